"""Tensor parallel as in Megatron-LM (Shoeybi et al., 2019), gloo.

QKV and the first MLP matrix by columns, the output projection and the second by rows, an all-reduce after each pair.
"""

from __future__ import annotations

from hepti_mqtt.bench.outside import common


def make(options: common.Options, task: common.Task) -> common.Made:
    """Return what computes the hidden states; every rank has all of them, the first one compares."""
    from hepti_mqtt.bench.outside import torch_model as tm

    versions = tm.begin(options, task)
    at = options.rank, options.world
    model = tm.Encoder(task, options, tm.part(task.spec.heads, *at), tm.part(task.spec.mlp, *at))
    values = tm.values(task)
    many = options.world > 1

    def summed(x: tm.Tensor) -> tm.Tensor:
        if many:
            tm.dist.all_reduce(x)
        return x

    def attention(i: int, x: tm.Tensor) -> tm.Tensor:
        return summed(model.attend(i, *model.project(i, tm.QKV, x))) + model.bias(i, "attention_out")

    def mlp(i: int, x: tm.Tensor) -> tm.Tensor:
        return summed(model.mlp(i, x)) + model.bias(i, "mlp_down")

    @tm.torch.inference_mode()  # type: ignore[untyped-decorator,unused-ignore]
    def compute() -> common.Array | None:
        given = values.clone()
        if many:
            tm.dist.broadcast(given, 0)
        out = model.layers(model.stem(given), attention, mlp)
        return out.numpy() if options.rank == 0 else None

    return common.Made(compute, versions, tm.together(options), tm.leave(options))
