"""Plain NumPy functions that the families' references are made of: no kernels, no Programs.

They compute in the dtype of what they are given (float32 or float64). m packed tokens, h hidden, f MLP width, a heads,
d = h / a, t tokens of one sequence. Tensors have canonical names and are in [in, out] orientation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hepti_mqtt.models.transformer import Layer
from hepti_mqtt.spec import HeadActivation, Pooling

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]

# erf by three Taylor terms from the nearest of these knots: |error| < 1e-12, and no loop over elements.
_KNOTS: Final = np.arange(6 * 1024 + 1) / 1024
_ERF: Final = np.array([math.erf(x) for x in _KNOTS])


def linear(tensors: Tensors, name: str, x: Array, bias: bool = True) -> Array:
    """Return x @ W + b: [m, in] -> [m, out]."""
    return np.asarray(x @ tensors[f"{name}.weight"] + (tensors[f"{name}.bias"] if bias else 0))


def norm(tensors: Tensors, name: str, x: Array, eps: float) -> Array:
    """Return the layer norm of each row of x [m, h]."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt(variance + x.dtype.type(eps))
    return np.asarray(scaled * tensors[f"{name}.weight"] + tensors[f"{name}.bias"])


def attention(q: Array, k: Array, v: Array, heads: int, lengths: Sequence[int], causal: bool = False) -> Array:
    """Return the attention of packed sequences: q, k, v [m, h] -> [m, h]; causal: no token sees a later one."""
    out = np.empty_like(q)
    for rows in sequence_slices(lengths):
        by_head = (-1, heads, q.shape[1] // heads)
        qs, ks, vs = (z[rows].reshape(by_head).transpose(1, 0, 2) for z in (q, k, v))  # [a, t, d] each
        scores = qs @ ks.transpose(0, 2, 1) / math.sqrt(qs.shape[-1])  # [a, t, t]
        if causal:
            scores[:, *np.triu_indices(scores.shape[-1], 1)] = -np.inf
        weights = softmax(scores)
        out[rows] = (weights @ vs).transpose(1, 0, 2).reshape(out[rows].shape)
    return out


def attention_over(q: Array, k: Array, v: Array, heads: int) -> Array:
    """Return the attention of rows over those of another sequence: q [m, h], k and v [s, h] -> [m, h]."""
    qs, ks, vs = (z.reshape(len(z), heads, -1).transpose(1, 0, 2) for z in (q, k, v))  # [a, rows, d] each
    weights = softmax(qs @ ks.transpose(0, 2, 1) / math.sqrt(qs.shape[-1]))  # [a, m, s]
    return (weights @ vs).transpose(1, 0, 2).reshape(q.shape)


def softmax(x: Array) -> Array:
    """Return exp(x) / sum(exp(x)) along the last dimension."""
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def post_norm(tensors: Tensors, here: str, x: Array, n: Layer) -> Array:
    """Return a layer that norms behind each residual (BERT): x [m, h] -> [m, h]."""
    y = norm(tensors, f"{here}attention_norm", x + _attention(tensors, here, x, n), n.eps)  # [m, h]
    return norm(tensors, f"{here}mlp_norm", y + _mlp(tensors, here, y, n), n.eps)


def pre_norm(tensors: Tensors, here: str, x: Array, n: Layer) -> Array:
    """Return a layer that norms before each block (ViT): x [m, h] -> [m, h]."""
    y = x + _attention(tensors, here, norm(tensors, f"{here}attention_norm", x, n.eps), n)  # [m, h]
    return y + _mlp(tensors, here, norm(tensors, f"{here}mlp_norm", y, n.eps), n)


def _attention(tensors: Tensors, here: str, x: Array, n: Layer) -> Array:
    q, k, v = (linear(tensors, f"{here}{part}", x) for part in ("query", "key", "value"))  # [m, h] each
    return linear(tensors, f"{here}attention_out", attention(q, k, v, n.heads, n.lengths))


def _mlp(tensors: Tensors, here: str, x: Array, n: Layer) -> Array:
    up = activate(n.activation, linear(tensors, f"{here}mlp_up", x))  # [m, f]
    return linear(tensors, f"{here}mlp_down", up)


def sequence_slices(lengths: Sequence[int]) -> Iterator[slice]:
    """Yield the packed rows of each sequence."""
    for stop, length in zip(accumulate(lengths), lengths, strict=True):
        yield slice(stop - length, stop)


def token_positions(lengths: Sequence[int]) -> Array:
    """Return the place of each packed token in its sequence, [m]."""
    return np.concatenate([np.arange(length) for length in lengths])


def pool(pooling: Pooling, rows: Array) -> Array:
    """Return what one sequence's rows [t, h] are pooled to: [h]."""
    if pooling == "max":
        return np.asarray(rows.max(axis=0))
    if pooling == "weighted_mean":
        return np.asarray(np.average(rows, axis=0, weights=np.arange(1, len(rows) + 1)).astype(rows.dtype))
    mean = rows.mean(axis=0)
    return np.asarray(mean * rows.dtype.type(math.sqrt(len(rows))) if pooling == "sqrt_mean" else mean)


def activate(activation: HeadActivation, x: Array) -> Array:
    """Return the activation of each element of x, in its dtype."""
    if activation == "relu":
        return np.maximum(x, 0)
    if activation == "tanh":
        return np.asarray(np.tanh(x))
    if activation == "gelu_tanh":
        return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
    return np.asarray(0.5 * x * (1 + erf(x / math.sqrt(2))))


def erf(x: Array) -> Array:
    """Return the error function of each element, in the dtype of x; |error| < 1e-12 in float64."""
    at = np.minimum(np.abs(x.astype(np.float64)), _KNOTS[-1])
    near = np.rint(at * 1024)
    knot = near / 1024
    step = at - knot
    slope = (2 / math.sqrt(math.pi)) * np.exp(-knot * knot)
    value = _ERF[np.nan_to_num(near).astype(np.intp)]
    value = value + slope * step * (1 - knot * step + (2 * knot * knot - 1) / 3 * step * step)
    return np.asarray(np.copysign(value, x), x.dtype)
