"""Eager PyTorch in one process of one thread."""

from __future__ import annotations

from hepti_mqtt.bench.outside import common
from hepti_mqtt.errors import ConfigError


def make(options: common.Options, task: common.Task) -> common.Made:
    """Return what computes the hidden states."""
    from hepti_mqtt.bench.outside import torch_model as tm

    versions = tm.begin(options, task)
    if options.world != 1:
        raise ConfigError(f"torch takes 1 host, not {options.world}")
    model, values = tm.Encoder(task, options), tm.values(task)

    def attention(i: int, x: tm.Tensor) -> tm.Tensor:
        return model.attend(i, *model.project(i, tm.QKV, x)) + model.bias(i, "attention_out")

    def mlp(i: int, x: tm.Tensor) -> tm.Tensor:
        return model.mlp(i, x) + model.bias(i, "mlp_down")

    @tm.torch.inference_mode()  # type: ignore[untyped-decorator,unused-ignore]
    def compute() -> common.Array:
        out: common.Array = model.layers(model.stem(values), attention, mlp).numpy()
        return out

    return common.Made(compute, versions)
