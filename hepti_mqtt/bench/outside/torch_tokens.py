"""Own token rows and all weights, PyTorch with gloo.

x: the layer's input is gathered and every rank computes K and V of all rows. kv: K and V of own rows are gathered.
"""

from __future__ import annotations

from hepti_mqtt.bench.outside import common
from hepti_mqtt.errors import ConfigError


def make(options: common.Options, task: common.Task) -> common.Made:
    """Return what computes the hidden states; the first rank gets all of them."""
    from hepti_mqtt.bench.outside import torch_model as tm

    if options.variant not in ("x", "kv"):
        raise ConfigError(f"torch_tokens has the variants x and kv, not {options.variant!r}: give --variant")
    versions = tm.begin(options, task)
    groups = (tm.QKV[:1], tm.QKV[1:]) if options.variant == "x" else (tm.QKV,)
    model, values = tm.Encoder(task, options, together=groups), tm.values(task)
    many = options.world > 1
    counts = [b - a for a, b in (tm.part(task.rows, rank, options.world) for rank in range(options.world))]
    mine = slice(*tm.part(task.rows, options.rank, options.world))

    def gathered(x: tm.Tensor) -> tm.Tensor:
        """Return the rows of all ranks; gloo gathers equal parts only, so shorter ones travel with unused rows."""
        if not many:
            return x
        padded = tm.F.pad(x, (0, 0, 0, max(counts) - len(x)))
        parts = [tm.torch.empty_like(padded) for _ in counts]
        tm.dist.all_gather(parts, padded)
        return tm.torch.cat([rows[:count] for rows, count in zip(parts, counts, strict=True)])

    def attention_x(i: int, x: tm.Tensor) -> tm.Tensor:
        return model.attend(i, *model.project(i, tm.QKV[:1], x), *model.project(i, tm.QKV[1:], gathered(x)))

    def attention_kv(i: int, x: tm.Tensor) -> tm.Tensor:
        q, k, v = model.project(i, tm.QKV, x)
        k, v = gathered(tm.torch.cat([k, v], dim=-1)).chunk(2, dim=-1)
        return model.attend(i, q, k, v)

    chosen = attention_x if options.variant == "x" else attention_kv

    def attention(i: int, x: tm.Tensor) -> tm.Tensor:
        return chosen(i, x) + model.bias(i, "attention_out")

    def mlp(i: int, x: tm.Tensor) -> tm.Tensor:
        return model.mlp(i, x) + model.bias(i, "mlp_down")

    @tm.torch.inference_mode()  # type: ignore[untyped-decorator,unused-ignore]
    def compute() -> common.Array | None:
        given = values.clone()
        if many:
            tm.dist.broadcast(given, 0)
        out = gathered(model.layers(model.stem(given)[mine], attention, mlp))
        return out.numpy() if options.rank == 0 else None

    return common.Made(compute, versions, tm.together(options), tm.leave(options))
