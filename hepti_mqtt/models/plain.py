"""Plain NumPy functions for the families' references: no kernels, no Programs.

They compute in the dtype of their arguments (float32 or float64). m packed tokens, h hidden, f MLP width, a heads,
d = h / a, t tokens of one sequence. Tensors have canonical names and are in [in, out] orientation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hepti_mqtt.core.spec import HeadActivation, Pooling
from hepti_mqtt.lowering.ops import Norm
from hepti_mqtt.models.shapes import PackedBatch
from hepti_mqtt.models.transformer import DISENTANGLED, LAYERS, Layer, ModelSpec, sees_picture

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]

# erf by three Taylor terms from the nearest of these knots: |error| < 1e-12, and no loop over elements.
_KNOTS: Final = np.arange(6 * 1024 + 1) / 1024
_ERF: Final = np.array([math.erf(x) for x in _KNOTS])


def linear(tensors: Tensors, name: str, x: Array) -> Array:
    """Return x @ W + b: [m, in] -> [m, out]; b is 0 for a matrix without a bias."""
    return np.asarray(x @ tensors[f"{name}.weight"] + tensors.get(f"{name}.bias", x.dtype.type(0)))


def norm(tensors: Tensors, name: str, x: Array, how: Norm | float) -> Array:
    """Return the norm of each row of x [m, h]; how: a number is the epsilon of a layer norm."""
    eps, rms, offset, divisor = how if isinstance(how, Norm) else Norm(how)
    centred = x if rms else x - x.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt(variance + x.dtype.type(eps))
    gamma = (tensors[f"{name}.weight"] + x.dtype.type(offset)) / x.dtype.type(divisor)
    return np.asarray(scaled * gamma + tensors.get(f"{name}.bias", x.dtype.type(0)))


def attention(
    q: Array,
    k: Array,
    v: Array,
    heads: int,
    lengths: Sequence[int],
    causal: bool = False,
    window: int = -1,
    scale: float = 0.0,
    bias: Array | None = None,
    positions: tuple[Array, Array, Array] | None = None,
    sinks: Array | None = None,
) -> Array:
    """Return the attention of packed sequences: q [m, a d], k, v [m, * d] -> [m, a d].

    causal: no token attends to a later one. window: the largest distance, -1 for any. bias: added to scores, by query
    and key: [L, L, a] for sequences of up to L tokens. positions: DeBERTa's keys and queries of buckets, [buckets, a d]
    each, whose products with queries and keys are added to scores; and the bucket of each query and key [L, L]. sinks:
    logits [a], each like that of a key with value zero.
    """
    out, d = np.empty_like(q), q.shape[1] // heads
    for rows in sequence_slices(lengths):
        qs, ks, vs = (z[rows].reshape(-1, z.shape[1] // d, d).transpose(1, 0, 2) for z in (q, k, v))  # [*, t, d] each
        ks, vs = (z.repeat(heads // len(z), axis=0) for z in (ks, vs))  # [a, t, d]
        scores = qs @ ks.transpose(0, 2, 1)  # [a, t, t]
        t = np.arange(scores.shape[-1])
        if positions is not None:
            met = [
                z @ table.reshape(len(table), heads, d).transpose(1, 2, 0)  # [a, t, buckets] each
                for z, table in zip((qs, ks), positions[:2], strict=True)
            ]
            bucket = positions[2][: len(t), : len(t)]
            scores = scores + met[0][:, t[:, None], bucket] + met[1][:, t, bucket]
        scores = scores * (scale or 1 / math.sqrt(d))
        away = t - t[:, None]  # [t, t]
        if bias is not None:
            scores = scores + bias[: len(t), : len(t)].transpose(2, 0, 1)
        if causal:
            scores[:, away > 0] = -np.inf
        if window >= 0:
            scores[:, np.abs(away) > window] = -np.inf
        if sinks is not None:
            none = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
            scores = np.concatenate([scores, none], axis=2)
        out[rows] = (softmax(scores)[:, :, : len(t)] @ vs).transpose(1, 0, 2).reshape(out[rows].shape)
    return out


def attention_over(q: Array, k: Array, v: Array, heads: int) -> Array:
    """Return the attention of rows to another sequence: q [m, h], k and v [s, h] -> [m, h]."""
    qs, ks, vs = (z.reshape(len(z), heads, -1).transpose(1, 0, 2) for z in (q, k, v))  # [a, rows, d] each
    weights = softmax(qs @ ks.transpose(0, 2, 1) / math.sqrt(qs.shape[-1]))  # [a, m, s]
    return (weights @ vs).transpose(1, 0, 2).reshape(q.shape)


def rotate(x: Array, d: int, theta: float, lengths: Sequence[int], divisors: Sequence[float] = ()) -> Array:
    """Return heads of d columns [m, * d] with rotary positions: columns i and i + d / 2 are pairs.

    divisors: of the frequencies [d / 2], empty if all are 1.
    """
    frequencies = np.float32(1) / np.float32(theta) ** (np.arange(0, d, 2, dtype=np.float32) / np.float32(d))
    if divisors:
        frequencies = np.asarray(frequencies / np.asarray(divisors), np.float32)
    # In f32, as transformers has them.
    angles = (token_positions(lengths).astype(np.float32)[:, None, None] * frequencies).astype(x.dtype)  # [m, 1, d / 2]
    a, b = np.split(x.reshape(len(x), -1, d), 2, axis=-1)  # [m, *, d / 2] each
    turned = [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)]
    return np.concatenate(turned, axis=-1).reshape(x.shape)


def distance_bias(table: Array, farthest: int, longest: int) -> Array:
    """Return the addends of scores by distance (T5): a table [buckets, a] -> [longest queries, keys, a]."""
    half = len(table) // 2
    exact = half // 2
    bucket_of = []
    for away in range(1 - longest, longest):
        near = abs(away)
        if near >= exact:
            wide = np.log(np.float32(near) / np.float32(exact)) / np.float32(math.log(farthest / exact))
            near = min(exact + int(wide * np.float32(half - exact)), half - 1)
        bucket_of.append(near + (half if away > 0 else 0))
    t = np.arange(longest)
    return np.asarray(table[bucket_of][t - t[:, None] + longest - 1])


def log_buckets(buckets: int, farthest: int, longest: int) -> Array:
    """Return the bucket of each query and key (DeBERTa): [longest, longest].

    Up to half of `buckets // 2`, a distance to either side has its own bucket; farther ones share logarithmic buckets.
    """
    span = buckets // 2
    middle = span // 2
    bucket_of = []
    for away in range(1 - longest, longest):
        near = abs(away)
        if near > middle:
            wide = np.log(np.float32(near) / np.float32(middle)) / np.log(np.float32((farthest - 1) / middle))
            near = math.ceil(wide * np.float32(middle - 1)) + middle
        bucket_of.append(min(max(span + (near if away > 0 else -near), 0), buckets - 1))
    t = np.arange(longest)
    return np.asarray(np.asarray(bucket_of)[t[:, None] - t + longest - 1])


def grid_bias(table: Array, side: int) -> Array:
    """Return the addends of scores by steps on a grid (BEiT): a table [(2 side - 1)^2 + 3, a] -> [n + 1, n + 1, a].

    Row 0 is the class token. The last three rows of the table are its biases: to patches, from patches, to itself.
    """
    y, x = np.divmod(np.arange(side**2), side)
    rows = np.full((side**2 + 1,) * 2, len(table) - 1)
    rows[0, 1:], rows[1:, 0] = len(table) - 3, len(table) - 2
    rows[1:, 1:] = (y[:, None] - y + side - 1) * (2 * side - 1) + x[:, None] - x + side - 1
    return np.asarray(table[rows])


def softmax(x: Array) -> Array:
    """Return exp(x) / sum(exp(x)) along the last dimension."""
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def post_norm(tensors: Tensors, here: str, x: Array, n: Layer) -> Array:
    """Return a layer that norms after each residual (BERT): x [m, h] -> [m, h]."""
    y = norm(tensors, f"{here}attention_norm", x + _attention(tensors, here, x, n), n.norm)  # [m, h]
    return norm(tensors, f"{here}mlp_norm", y + _mlp(tensors, here, y, n), n.norm)


def pre_norm(tensors: Tensors, here: str, x: Array, n: Layer) -> Array:
    """Return a layer that norms before each block (ViT): x [m, h] -> [m, h]."""
    u = x if n.bare else norm(tensors, f"{here}attention_norm", x, n.norm)
    added = _attention(tensors, here, u, n)  # [m, h]
    if n.block.added_norms:
        added = norm(tensors, f"{here}attention_out_norm", added, n.norm)
    y = x + added
    added = _mlp(tensors, here, norm(tensors, f"{here}mlp_norm", y, n.norm), n)
    if n.block.added_norms:
        added = norm(tensors, f"{here}mlp_down_norm", added, n.norm)
    return y + added


def layers(tensors: Tensors, spec: ModelSpec, x: Array, shape: PackedBatch, stored: str = LAYERS) -> Array:
    """Return the result of all layers: x [m, h] -> [m, h]; stored: prefix of a layer's tensors, `{}` for its index."""
    layer = pre_norm if spec.norm_first else post_norm
    for i in range(spec.layers):
        n = Layer.of(spec, shape, i)
        if sees_picture(spec, shape):
            n = n._replace(block=replace(n.block, causal=False))
        x = layer(tensors, stored.format(i), x, n)  # [m, h]
    return x


def _attention(tensors: Tensors, here: str, x: Array, n: Layer) -> Array:
    if f"{here}qkv.weight" in tensors:
        q, k, v = np.split(linear(tensors, f"{here}qkv", x), 3, axis=1)
    else:
        q, k, v = (linear(tensors, f"{here}{part}", x) for part in ("query", "key", "value"))  # [m, * d] each
    if n.block.head_norms:
        q, k = (
            norm(tensors, f"{here}{part}_norm", z.reshape(len(z), -1, n.head_dim), n.norm).reshape(z.shape)
            for part, z in (("query", q), ("key", k))
        )
    if n.block.row_norms:
        q, k = norm(tensors, f"{here}query_norm", q, n.norm), norm(tensors, f"{here}key_norm", k, n.norm)
    if n.theta:
        q, k = (rotate(z, n.head_dim, n.theta, n.lengths, n.divisors) for z in (q, k))
    bias, positions = None, None
    if n.block.disentangled:
        to_queries, to_keys = (tensors[f"{here}{name}"] for name in DISENTANGLED)
        positions = to_queries, to_keys, log_buckets(n.block.buckets, n.block.farthest, max(n.lengths))
    elif n.block.buckets:
        table = tensors["relative_bias" if n.block.shared_bias else f"{here}relative_bias"]
        side, farthest = n.block.side, n.block.farthest
        bias = grid_bias(table, side) if side else distance_bias(table, farthest, max(n.lengths))
    sinks = tensors[f"{here}sinks"] if n.block.sinks else None
    out = attention(q, k, v, n.heads, n.lengths, n.block.causal, n.window, n.block.scale, bias, positions, sinks)
    return linear(tensors, f"{here}attention_out", out)


def _experts(tensors: Tensors, here: str, x: Array, n: Layer) -> Array:
    logits, out = linear(tensors, f"{here}router", x), np.zeros_like(x)  # [m, E], [m, h]
    for i, row in enumerate(x):
        best = np.argsort(-logits[i], kind="stable")[: n.block.chosen]
        whole = logits[i][best] if n.block.normed_experts else logits[i]
        for e in best:
            weight = np.exp(logits[i][e] - logits[i].max()) / np.exp(whole - logits[i].max()).sum()
            gate, up = (_of_expert(tensors, here, int(e), part, row) for part in ("gate", "up"))
            if n.block.gate_limit:
                gate, up = np.minimum(gate, n.block.gate_limit), np.clip(up, -n.block.gate_limit, n.block.gate_limit)
            hidden = activate(n.activation, gate) * (up + x.dtype.type(n.block.up_offset))
            out[i] += weight * _of_expert(tensors, here, int(e), "down", hidden)
    return out


def _of_expert(tensors: Tensors, here: str, e: int, part: str, row: Array) -> Array:
    """Return the product of a row with a matrix of an expert, and its bias."""
    product, biases = row @ tensors[f"{here}experts.{e}.{part}.weight"], tensors.get(f"{here}experts.{part}.bias")
    return np.asarray(product if biases is None else product + biases[e])


def _mlp(tensors: Tensors, here: str, x: Array, n: Layer) -> Array:
    if n.experts:
        return _experts(tensors, here, x, n)
    up = linear(tensors, f"{here}mlp_up", x)  # [m, f]
    if n.block.gated:
        up = activate(n.activation, linear(tensors, f"{here}mlp_gate", x)) * up
    else:
        up = activate(n.activation, up)
    return linear(tensors, f"{here}mlp_down", up)


def sequence_slices(lengths: Sequence[int]) -> Iterator[slice]:
    """Yield the packed rows of each sequence."""
    for stop, length in zip(accumulate(lengths), lengths, strict=True):
        yield slice(stop - length, stop)


def token_positions(lengths: Sequence[int]) -> Array:
    """Return the index of each packed token in its sequence, [m]."""
    return np.concatenate([np.arange(length) for length in lengths])


def pool(pooling: Pooling, rows: Array) -> Array:
    """Return the pooled rows [t, h] of one sequence: [h]."""
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
    if activation == "silu":
        return np.asarray(x * 0.5 * (1 + np.tanh(x * 0.5)))
    if activation == "quick_gelu":
        return np.asarray(x * 0.5 * (1 + np.tanh(x * 0.851)))
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
