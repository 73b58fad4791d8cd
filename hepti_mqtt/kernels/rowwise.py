"""Kernels over rows of f32 [m, h]: sums, norms and means.

add             residual, p_1 ... p_n -> residual + (bias + p_1 + ... + p_n), in that order; weight bias if
                attribute bias.
sum             p_1 ... p_n of one shape of any rank -> activation(p_1 + ... + p_n); attribute activation, optional,
                one of `ACTIVATIONS`.
gate            x, y of one shape -> activation(x) * y; attribute activation.
layer_norm      x of any rank -> its norm over the last dimension, as `base.norm_of` says: weights gamma and perhaps
                beta; attributes eps, rms (without the mean; Zhang and Sennrich, 2019), gamma_offset.
add_norm        the sum of `add`, then its layer norm -> (normed), or (total, normed) with attribute keep_sum; weights
                bias if attribute bias, then as `layer_norm` has; attributes bias, keep_sum, and those of `layer_norm`.
normalize_rows  x -> x / max(L2 norm, 1e-12).
pool_rows       x -> one row of each sequence [B, h]; attributes lengths, mode: mean, sqrt_mean (the sum by the root
                of the length), weighted_mean (by place, the first counts once) or max. An empty sequence gives 0.

Layer norm of rows with columns on several devices:

moments         x [r, c] -> [r, 2]: mean and standard deviation of the c values, which are finite in f32 if x is; a sum
                of squared distances would overflow from 1e19 on. Without columns both are 0.
normalise       x [r, c], p_1 ... p_n [r, 2] (moments of all columns of the row) -> the norm of x; weights [c] and
                attributes as `layer_norm` has, and counts (columns of each part). Parts are combined in the given order
                (Chan, Golub and LeVeque 1979, formula 2.1).

Moments are computed in f64 and sent in f32. A sum and a sum of squares instead would lose the digits of the mean.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any, Final

import numpy as np
from numba import float32
from numpy.typing import NDArray

from hepti_mqtt.core.program import Compute
from hepti_mqtt.kernels.base import (
    REFERENCE_ACTIVATIONS,
    Array,
    Arrays,
    Check,
    Kernel,
    Slots,
    Weights,
    norm_of,
    reference_norm,
    row_parts,
    rowwise,
    starts_of,
)
from hepti_mqtt.kernels.calls import Addresses, Call, Calls, operands
from hepti_mqtt.kernels.elementary import ZERO
from hepti_mqtt.kernels.jit import FLOAT, INT, INT_ARRAY, exact, fills, floats, helper, kernel, reads
from hepti_mqtt.kernels.threads import NO_PARTS, Workers
from hepti_mqtt.kernels.tile import activate, activation_of

# Elements of a block that is summed and activated in the first-level cache: a tenth of 32 KB.
_BLOCK: Final = 1024


@helper
def add_row(addresses: Any, count: int, bias: Any, at: int, total: Any) -> None:
    """Fill total [h] with residual + (bias + p_1 + ... + p_n); the addresses are of residual, p_1, ..., p_n."""
    h = len(total)
    for i in range(h):
        total[i] = bias[i]
    for p in range(1, count):
        part = floats(addresses[p] + 4 * at, h)
        for i in range(h):
            total[i] += part[i]
    residual = floats(addresses[0] + 4 * at, h)
    for i in range(h):
        total[i] += residual[i]


@kernel(INT_ARRAY, INT, fills(float32, 2), reads(float32, 1), INT, INT, part=2)
def _add(addresses: Any, count: int, out: Any, bias: Any, first: int, stop: int) -> None:
    for row in range(first, stop):
        add_row(addresses, count, bias, row * out.shape[1], out[row])


@kernel(INT_ARRAY, INT, fills(float32, 1), INT, INT, INT, part=2)
def _sum(addresses: Any, count: int, out: Any, activation: int, first: int, stop: int) -> None:
    for low in range(first, stop, _BLOCK):
        block = out[low : min(low + _BLOCK, stop)]
        part = floats(addresses[0] + 4 * low, len(block))
        for i in range(len(block)):
            block[i] = part[i]
        for p in range(1, count):
            part = floats(addresses[p] + 4 * low, len(block))
            for i in range(len(block)):
                block[i] += part[i]
        activate(block, activation)


def same_shapes(op: Compute, slots: Slots, reads: int | None, writes: int = 1) -> tuple[Check, int, int]:
    """Check an op with only f32 [m, h] slots; return (its checks, m, h)."""
    check = Check.of(op, slots, reads, writes=writes, rank=2)
    m, h = check.reads[0].shape
    for spec in (*check.reads, *check.writes):
        check.shape(spec, (m, h))
    return check, m, h


def bias_of(check: Check, op: Compute, weights: Weights, h: int) -> NDArray[np.float32]:
    """Return the op's bias [h], its first weight if attribute bias, else zeros."""
    return check.plain(weights[0], (h,)) if op.attrs["bias"] else np.zeros(h, np.float32)


def _bind_add(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    check, m, h = same_shapes(op, slots, None)
    check.weights(weights, int(bool(op.attrs["bias"])))
    bias, count = bias_of(check, op, weights, h), len(op.reads)
    given, (out,) = operands(op, slots)
    return pool.bind(_add, row_parts(m, h * count, pool) if h else NO_PARTS)(Addresses(given), count, out, bias)


def _bind_sum(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    check = Check.of(op, slots, None)
    check.weights(weights, 0)
    activation = activation_of(check, op.attrs.get("activation"))
    for spec in check.reads:
        check.shape(spec, check.writes[0].shape)
    given, (out,) = operands(op, slots)
    parts = row_parts(check.writes[0].nbytes // 4, len(given), pool)
    return pool.bind(_sum, parts)(Addresses(given), len(given), out.reshape(-1), activation)


def total_of(op: Compute, reads: Arrays, weights: Arrays) -> Array:
    """Return residual + (bias + p_1 + ... + p_n) in float64, for references."""
    parts = [p.astype(np.float64) for p in reads[1:]]
    start = weights[0].astype(np.float64) if op.attrs["bias"] else np.zeros(reads[0].shape[1])
    return np.asarray(reads[0] + sum(parts, np.broadcast_to(start, reads[0].shape)))


def _reference_add(op: Compute, _slots: Slots, reads: Arrays, weights: Arrays) -> list[Array]:
    return [total_of(op, reads, weights)]


def _reference_sum(op: Compute, _slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
    total = reads[0].astype(np.float64)
    for part in reads[1:]:
        total = total + part
    return [REFERENCE_ACTIVATIONS[op.attrs.get("activation")](total)]


@kernel(reads(float32, 1), reads(float32, 1), fills(float32, 1), INT, INT, INT, part=2)
def _gate(x: Any, y: Any, out: Any, activation: int, first: int, stop: int) -> None:
    for low in range(first, stop, _BLOCK):
        high = min(low + _BLOCK, stop)
        block = out[low:high]
        for i in range(len(block)):
            block[i] = x[low + i]
        activate(block, activation)
        for i in range(len(block)):
            block[i] *= y[low + i]


def _bind_gate(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    check, m, h = same_shapes(op, slots, 2)
    check.weights(weights, 0)
    (x, y), (out,) = operands(op, slots)
    gate = pool.bind(_gate, row_parts(m * h, 2, pool))
    return gate(x.reshape(-1), y.reshape(-1), out.reshape(-1), activation_of(check, op.attrs["activation"]))


def _reference_gate(op: Compute, _slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
    x, y = (part.astype(np.float64) for part in reads)
    return [REFERENCE_ACTIVATIONS[op.attrs["activation"]](x) * y]


ADD: Final = Kernel("add", _bind_add, _reference_add, rowwise)
SUM: Final = Kernel("sum", _bind_sum, _reference_sum, rowwise)
GATE: Final = Kernel("gate", _bind_gate, _reference_gate, rowwise)


_TINY: Final = 1e-12


@exact  # else LLVM turns the product with it into a division for every value
def reciprocal_root(x: Any) -> Any:
    """Return 1 / sqrt(x)."""
    return 1.0 / np.sqrt(x)


@helper
def moments_of(x: Any) -> tuple[Any, Any]:
    """Return (mean, sum of squared distances from it) of x [h], h >= 1: two passes, mean before variance.

    In f64: sums and squares of large f32 would be infinite, and an infinite norm would make a wrong row of zeros.
    """
    h = len(x)
    total = 0.0
    for i in range(h):
        total += np.float64(x[i])
    mean = total / h
    squares = 0.0
    for i in range(h):
        away = np.float64(x[i]) - mean
        squares += away * away
    return mean, squares


@helper
def scale_row(x: Any, out: Any, mean: Any, by: Any, gamma: Any, beta: Any) -> None:
    """Fill out [h] with (x - mean) * by * gamma + beta, where mean and by are f64; x may be the same array."""
    for i in range(len(x)):
        out[i] = np.float32((np.float64(x[i]) - mean) * by) * gamma[i] + beta[i]


@helper
def root_mean_square(x: Any, eps: Any) -> Any:
    """Return 1 / sqrt(mean of the squares of x [h] + eps), in f64."""
    squares = 0.0
    for i in range(len(x)):
        squares += np.float64(x[i]) * np.float64(x[i])
    return reciprocal_root(squares / len(x) + np.float64(eps))


@helper
def normalise_row(x: Any, out: Any, gamma: Any, beta: Any, eps: Any, centred: int) -> None:
    """Fill out [h] with the norm of x [h], which may be the same array; centred: 0 for the one by root mean square."""
    if centred:
        mean, squares = moments_of(x)
        scale_row(x, out, mean, reciprocal_root(squares / len(x) + np.float64(eps)), gamma, beta)
    else:
        scale_row(x, out, 0.0, root_mean_square(x, eps), gamma, beta)


@kernel(reads(float32, 2), fills(float32, 2), reads(float32, 1), reads(float32, 1), FLOAT, INT, INT, INT, part=2)
def _layer_norm(x: Any, out: Any, gamma: Any, beta: Any, eps: Any, centred: int, first: int, stop: int) -> None:
    for row in range(first, stop):
        normalise_row(x[row], out[row], gamma, beta, eps, centred)


@kernel(
    INT_ARRAY, INT, fills(float32, 2), fills(float32, 2), reads(float32, 1), reads(float32, 1), reads(float32, 1),
    FLOAT, INT, INT, INT, part=2,
)  # fmt: skip
def _add_norm(
    addresses: Any, count: int, total: Any, out: Any, bias: Any, gamma: Any, beta: Any, eps: Any, centred: int,
    first: int, stop: int,
) -> None:  # fmt: skip
    """Fill total and out; without keep_sum they are one array, and rows are normalised in place."""
    for row in range(first, stop):
        add_row(addresses, count, bias, row * out.shape[1], total[row])
        normalise_row(total[row], out[row], gamma, beta, eps, centred)


@kernel(reads(float32, 2), fills(float32, 2))
def _normalize_rows(x: Any, out: Any) -> None:
    h = x.shape[1]
    for row in range(len(x)):
        # f64: the square of a large f32 would be infinite, and so may be the norm of several.
        squares = 0.0
        for i in range(h):
            squares += np.float64(x[row, i]) * np.float64(x[row, i])
        norm = np.sqrt(squares)
        by = norm if not norm < _TINY else _TINY
        for i in range(h):
            out[row, i] = np.float32(np.float64(x[row, i]) / by)


def _bind_layer_norm(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    check = Check.of(op, slots, 1)
    check.that(len(check.reads[0].shape) > 0, "x must have a dimension")
    check.shape(check.writes[0], check.reads[0].shape)
    *rows, h = check.reads[0].shape
    m = prod(rows)
    how, ((x,), (out,)) = norm_of(check, weights, h), operands(op, slots)
    parts = row_parts(m, h, pool) if h else NO_PARTS
    return pool.bind(_layer_norm, parts)(x.reshape(-1, h), out.reshape(-1, h), *how)


def _bind_add_norm(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    check, m, h = same_shapes(op, slots, None, 2 if op.attrs["keep_sum"] else 1)
    bias, count = bias_of(check, op, weights, h), len(op.reads)
    how = norm_of(check, weights[bool(op.attrs["bias"]) :], h)
    given, results = operands(op, slots)
    parts = row_parts(m, h * count, pool) if h else NO_PARTS
    return pool.bind(_add_norm, parts)(Addresses(given), count, results[0], results[-1], bias, *how)


def _bind_normalize_rows(op: Compute, slots: Slots, weights: Weights, _pool: Workers) -> Calls:
    check, _, _ = same_shapes(op, slots, 1)
    check.weights(weights, 0)
    (x,), (out,) = operands(op, slots)
    return [Call(_normalize_rows, (x, out))]


def _reference_layer_norm(op: Compute, _slots: Slots, reads: Arrays, weights: Arrays) -> list[Array]:
    return [reference_norm(reads[0], weights, op.attrs)]


def _reference_add_norm(op: Compute, _slots: Slots, reads: Arrays, weights: Arrays) -> list[Array]:
    total = total_of(op, reads, weights)
    normed = reference_norm(total, weights[bool(op.attrs["bias"]) :], op.attrs)
    return [total, normed] if op.attrs["keep_sum"] else [normed]


def _reference_normalize_rows(_op: Compute, _slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
    x = reads[0].astype(np.float64)
    norms = np.sqrt((x * x).sum(axis=1, keepdims=True))
    return [x / np.where(norms < 1e-12, 1e-12, norms)]


LAYER_NORM: Final = Kernel("layer_norm", _bind_layer_norm, _reference_layer_norm, rowwise)
ADD_NORM: Final = Kernel("add_norm", _bind_add_norm, _reference_add_norm, rowwise)
NORMALIZE_ROWS: Final = Kernel("normalize_rows", _bind_normalize_rows, _reference_normalize_rows, rowwise)


@kernel(reads(float32, 2), fills(float32, 2), INT, INT, part=2)
def _moments(x: Any, out: Any, first: int, stop: int) -> None:
    for row in range(first, stop):
        out[row, 0] = out[row, 1] = ZERO
        if x.shape[1] > 0:
            mean, squares = moments_of(x[row])
            out[row, 0] = np.float32(mean)
            out[row, 1] = np.float32(np.sqrt(squares / x.shape[1]))


@kernel(
    reads(float32, 2), fills(float32, 2), INT_ARRAY, INT_ARRAY, reads(float32, 1), reads(float32, 1), FLOAT, INT, INT,
    INT, part=2,
)  # fmt: skip
def _normalise(
    x: Any, out: Any, addresses: Any, counts: Any, gamma: Any, beta: Any, eps: Any, centred: int, first: int, stop: int
) -> None:
    for row in range(first, stop):
        mean, squares, count = 0.0, 0.0, 0
        for p in range(len(counts)):
            if counts[p] > 0:
                part = floats(addresses[p] + 8 * row, 2)
                away, deviation = np.float64(part[0]) - mean, np.float64(part[1])
                share = counts[p] / np.float64(count + counts[p])
                mean += away * share
                squares += deviation * deviation * counts[p] + away * away * count * share
                count += counts[p]
        if not centred:
            squares += mean * mean * count
            mean = 0.0
        scale_row(x[row], out[row], mean, reciprocal_root(squares / count + np.float64(eps)), gamma, beta)


def _bind_moments(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    check = Check.of(op, slots, 1, rank=2)
    check.weights(weights, 0)
    r, c = check.reads[0].shape
    check.shape(check.writes[0], (r, 2))
    (x,), (out,) = operands(op, slots)
    return pool.bind(_moments, row_parts(r, c, pool))(x, out)


def _bind_normalise(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    check = Check.of(op, slots, None, rank=2)
    (r, c), counts = check.reads[0].shape, np.asarray(op.attrs["counts"], np.int64)
    check.shape(check.writes[0], (r, c))
    for spec in check.reads[1:]:
        check.shape(spec, (r, 2))
    check.that(len(counts) == len(op.reads) - 1, f"counts has {len(counts)} numbers, not one for each part")
    fits = not (counts < 0).any() and counts.sum() >= c
    check.that(fits, f"counts {counts.tolist()} must be >= 0 and at least the {c} columns of x in all")
    how, parts = norm_of(check, weights, c), row_parts(r, c, pool) if c else NO_PARTS
    (x, *moments), (out,) = operands(op, slots)
    return pool.bind(_normalise, parts)(x, out, Addresses(moments), counts, *how)


def _reference_moments(_op: Compute, _slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
    x = reads[0].astype(np.float64)
    if not x.shape[1]:
        return [np.zeros((len(x), 2))]
    return [np.stack([x.mean(axis=1), x.std(axis=1)], axis=1)]


def _reference_normalise(op: Compute, _slots: Slots, reads: Arrays, weights: Arrays) -> list[Array]:
    if not reads[0].shape[1]:
        return [reads[0]]
    x, counts = reads[0].astype(np.float64), np.asarray(op.attrs["counts"])
    used = counts > 0
    means, deviations = (np.stack([p[:, i].astype(np.float64) for p in reads[1:]])[used] for i in (0, 1))
    weight = counts[used][:, None]
    mean = (means * weight).sum(axis=0) / counts.sum()
    var = (weight * (deviations**2 + (means - mean) ** 2)).sum(axis=0) / counts.sum()
    if op.attrs.get("rms", False):
        mean, var = 0 * mean, var + mean**2
    gamma, beta = weights[0] + op.attrs.get("gamma_offset", 0.0), weights[1] if len(weights) > 1 else 0.0
    return [(x - mean[:, None]) / np.sqrt(var[:, None] + op.attrs["eps"]) * gamma + beta]


MOMENTS: Final = Kernel("moments", _bind_moments, _reference_moments, rowwise)
NORMALISE: Final = Kernel("normalise", _bind_normalise, _reference_normalise, rowwise)


POOLINGS: Final = ("mean", "sqrt_mean", "weighted_mean", "max")


@kernel(reads(float32, 2), fills(float32, 2), INT_ARRAY, INT)
def _pool_rows(x: Any, out: Any, starts: Any, mode: int) -> None:
    """Fill out [B, h] with rows starts[b]..starts[b + 1] of x, by the number of a mode; of no rows it is 0."""
    h = x.shape[1]
    for b in range(len(out)):
        first, stop = starts[b], starts[b + 1]
        for i in range(h):
            out[b, i] = ZERO
        for row in range(first, stop):
            for i in range(h):
                if mode == 3:
                    # NaN stays: no comparison with it holds.
                    if row == first or x[row, i] > out[b, i] or x[row, i] != x[row, i]:
                        out[b, i] = x[row, i]
                elif mode == 2:
                    out[b, i] += np.float32(row - first + 1) * x[row, i]
                else:
                    out[b, i] += x[row, i]
        count = np.float64(max(stop - first, 1))
        by = np.float32(count)
        if mode == 1:
            by = np.float32(np.sqrt(count))
        elif mode == 2:
            by = np.float32(count * (count + 1) / 2)
        if mode != 3:
            for i in range(h):
                out[b, i] /= by


def _bind_pool_rows(op: Compute, slots: Slots, weights: Weights, _pool: Workers) -> Calls:
    check = Check.of(op, slots, 1, rank=2)
    check.weights(weights, 0)
    starts, name = starts_of(op.attrs["lengths"]), op.attrs["mode"]
    m, h = check.reads[0].shape
    check.that(starts[-1] == m, f"lengths sum to {starts[-1]}, x has {m} rows")
    check.that(name in POOLINGS, f"mode {name!r} is none of {', '.join(POOLINGS)}")
    check.shape(check.writes[0], (len(starts) - 1, h))
    mode = POOLINGS.index(name)
    (x,), (out,) = operands(op, slots)
    return [Call(_pool_rows, (x, out, starts, mode))]


def _reference_pool_rows(op: Compute, _slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
    starts = starts_of(op.attrs["lengths"])
    x = reads[0].astype(np.float64)
    pooled = [_pooled(x[a:b], op.attrs["mode"]) if b > a else np.zeros(x.shape[1]) for a, b in pairwise(starts)]
    return [np.asarray(pooled).reshape(len(pooled), x.shape[1])]


def _pooled(rows: Array, mode: str) -> Array:
    if mode == "max":
        return np.asarray(rows.max(axis=0))
    places = np.arange(1, len(rows) + 1)[:, None]
    if mode == "weighted_mean":
        return np.asarray((rows * places).sum(axis=0) / places.sum())
    return np.asarray(rows.sum(axis=0) / (len(rows) if mode == "mean" else np.sqrt(len(rows))))


POOL_ROWS: Final = Kernel("pool_rows", _bind_pool_rows, _reference_pool_rows, rowwise)
