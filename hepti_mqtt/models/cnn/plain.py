"""What a net computes, node by node in plain NumPy: the oracle of every operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from hepti_mqtt.core.spec import RequestShape
from hepti_mqtt.models.cnn import nodes
from hepti_mqtt.models.cnn.nodes import IMAGE, CnnSpec, Node
from hepti_mqtt.models.plain import Array, Tensors, activate, linear, norm


def reference(spec: CnnSpec, tensors: Tensors, pixels: Array, shape: RequestShape) -> tuple[Array, Array]:
    """Return (hidden states, the output), a row or the rows of a map for each of the pixels [B, 3, S, S]."""
    dtype = next(iter(tensors.values())).dtype
    mean, std = (np.array(v, dtype)[:, None, None] for v in (spec.mean, spec.std))
    parts = []
    for picture in pixels:
        values = {IMAGE: ((picture.astype(dtype) / 255 - mean) / std).transpose(1, 2, 0)}
        for node in spec.nodes:
            values[node.name] = _COMPUTES[type(node)](tensors, node, *(values[x] for x in node.inputs))
        parts.append([_rows(values[name]) for name in (spec.hidden, spec.nodes[-1].name)])
    hidden, output = (np.concatenate(rows) for rows in zip(*parts, strict=True))
    return hidden, hidden if shape.want == "hidden" else output


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _places(node: nodes.Window, x: Array, beyond: float) -> Iterator[Array]:
    """Yield for each cell of a window the elements of x [Y, X, C] under it, at all positions: [y, x, C]."""
    top, left, bottom, right = node.pad
    sides = node.sides(x.shape)
    padded = np.pad(x, ((top, bottom), (left, right), (0, 0)), constant_values=beyond)
    for i in range(node.kernel[0]):
        for j in range(node.kernel[1]):
            y, z = i * node.dilation[0], j * node.dilation[1]
            yield padded[y :: node.stride[0], z :: node.stride[1]][: sides[0], : sides[1]]


def _conv(tensors: Tensors, node: nodes.Conv, x: Array) -> Array:
    windows = np.stack([*_places(node, x, 0.0)], axis=2)  # [y, x, ky kx, C]
    weight = tensors[f"{node.name}.weight"]  # [ky kx C/groups, n]
    if node.groups == 1:
        total = windows.reshape(*windows.shape[:2], -1) @ weight
    else:
        by_group = windows.reshape(*windows.shape[:3], node.groups, -1)  # [y, x, ky kx, groups, C/groups]
        of_group = weight.reshape(windows.shape[2], -1, node.groups, node.channels // node.groups)
        total = np.einsum("yxkgc,kcgn->yxgn", by_group, of_group).reshape(*windows.shape[:2], -1)
    return total + tensors[f"{node.name}.bias"] if node.has_bias else total


def _max_pool(_tensors: Tensors, node: nodes.MaxPool, x: Array) -> Array:
    return np.asarray(np.stack([*_places(node, x, -np.inf)]).max(axis=0))


def _average_pool(_tensors: Tensors, node: nodes.AveragePool, x: Array) -> Array:
    total = sum(_places(node, x, 0.0), np.zeros((), x.dtype))
    if node.count_pad:
        return np.asarray(total / (node.kernel[0] * node.kernel[1]))
    return np.asarray(total / sum(_places(node, np.ones_like(x), 0.0), np.zeros((), x.dtype)))


def _linear(tensors: Tensors, node: nodes.Linear, x: Array) -> Array:
    return linear(tensors, node.name, x) if node.bias else np.asarray(x @ tensors[f"{node.name}.weight"])


def _hard_sigmoid(x: Array) -> Array:
    return np.asarray(np.clip(x + 3, 0, 6) / x.dtype.type(6))


_FUNCTIONS: Final[Mapping[str, Callable[[Array], Array]]] = {
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "leaky_relu": lambda x: np.where(x < 0, x * x.dtype.type(0.1), x),
    "gelu": lambda x: activate("gelu", x),
    "gelu_tanh": lambda x: activate("gelu_tanh", x),
    "silu": lambda x: activate("silu", x),
    "hard_swish": lambda x: x * _hard_sigmoid(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "hard_sigmoid": _hard_sigmoid,
}

_COMPUTES: Final[Mapping[type[Node], Callable[..., Array]]] = {
    nodes.Conv: _conv,
    nodes.MaxPool: _max_pool,
    nodes.AveragePool: _average_pool,
    nodes.GlobalAverage: lambda _tensors, _node, x: x.mean(axis=(0, 1))[None],
    nodes.Add: lambda _tensors, _node, x, y: x + y,
    nodes.Scale: lambda _tensors, node, row, x: _FUNCTIONS[node.function](row) * x,
    nodes.LayerNorm: lambda tensors, node, x: norm(tensors, node.name, x, node.eps),
    nodes.Concat: lambda _tensors, _node, *xs: np.concatenate(xs, axis=2),
    nodes.Flatten: lambda _tensors, _node, x: x.reshape(1, -1),
    nodes.Linear: _linear,
    nodes.Activation: lambda _tensors, node, x: _FUNCTIONS[node.function](x),
}


if {*_COMPUTES} != {*nodes.NODE_TYPES.values()} or {*_FUNCTIONS} != {*nodes.ACTIVATIONS, *nodes.GATES}:
    raise ImportError("every node and every function needs its reference")
