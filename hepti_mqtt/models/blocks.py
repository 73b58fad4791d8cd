"""Layers that several families share, as graphs.

m tokens, h hidden, f MLP width. Tensors of a layer stand under `layers.<i>.`, those of the graph under `<i>.`.
"""

from __future__ import annotations

from typing import NamedTuple

from hepti_mqtt.lowering import Net, roles
from hepti_mqtt.models.shapes import PackedShape
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.spec import Activation


class Layer(NamedTuple):
    """Sizes of a transformer layer: h, a heads of h / a columns, f, and what the packed sequences are."""

    hidden: int
    heads: int
    mlp: int
    activation: Activation
    eps: float
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, spec: ModelSpec, shape: PackedShape) -> Layer:
        """Return the sizes of the layers of a model in a request."""
        return cls(spec.hidden, spec.heads, spec.mlp, spec.activation, spec.norm_eps, shape.lengths)


def post_norm(net: Net, name: str, stored: str, x: str, n: Layer) -> str:
    """Add a layer that norms behind each residual (BERT): x [m, h] -> [m, h]."""
    attention = _attention(net, name, stored, x, n)  # [m, h]
    total = net.add(f"{name}r", x, attention, roles.ATTENTION_SUM)
    y = net.norm(f"{name}y", total, roles.AFTER_ATTENTION, f"{stored}attention_norm", n.eps)
    total = net.add(f"{name}s", y, _mlp(net, name, stored, y, n), roles.MLP_SUM)
    return net.norm(f"{name}x", total, roles.AFTER_MLP, f"{stored}mlp_norm", n.eps)


def pre_norm(net: Net, name: str, stored: str, x: str, n: Layer) -> str:
    """Add a layer that norms before each block (ViT): x [m, h] -> [m, h].

    A block of the graph begins behind its first norm, which one kernel computes with the residual sum before it.
    """
    u = net.norm(f"{name}u", x, roles.BEFORE_ATTENTION, f"{stored}attention_norm", n.eps)
    net.block()
    y = net.add(f"{name}y", x, _attention(net, name, stored, u, n), roles.AFTER_ATTENTION)
    v = net.norm(f"{name}v", y, roles.BEFORE_MLP, f"{stored}mlp_norm", n.eps)
    return net.add(f"{name}x", y, _mlp(net, name, stored, v, n), roles.AFTER_MLP)


def _attention(net: Net, name: str, stored: str, x: str, n: Layer) -> str:
    h, width = n.hidden, net.dims(x)[1]
    matrices = {f"{stored}{part}": h for part in ("query", "key", "value")}
    qkv = net.linear(f"{name}qkv", x, roles.QKV, matrices)  # [m, 3h]
    attention = net.attention(
        f"{name}attention",
        qkv,
        qkv,
        roles.ATTENTION,
        heads=n.heads,
        width=h,
        columns=(0, h, 2 * h),
        lengths=n.lengths,
    )
    return net.linear(f"{name}o", attention, roles.ATTENTION_OUT, {f"{stored}attention_out": width})


def _mlp(net: Net, name: str, stored: str, x: str, n: Layer) -> str:
    up = net.linear(f"{name}up", x, roles.MLP_UP, {f"{stored}mlp_up": n.mlp})  # [m, f]
    hidden = net.activation(f"{name}g", up, roles.MLP_HIDDEN, n.activation)
    return net.linear(f"{name}down", hidden, roles.MLP_DOWN, {f"{stored}mlp_down": net.dims(x)[1]})
