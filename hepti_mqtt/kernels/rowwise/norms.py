"""Kernels of rows of f32 [m, h]; each row is finished while it is in the first-level cache.

layer_norm      x -> layer norm; weights gamma, beta; attribute eps.
add             residual, p_1 ... p_n -> residual + (bias + p_1 + ... + p_n), in that order; weight bias if attribute
                bias.
add_norm        the same sum, then its layer norm -> (normed), or (total, normed) with attribute keep_sum; weights
                bias if attribute bias, gamma, beta; attributes bias, eps, keep_sum.
mean_rows       x -> mean of each sequence [B, h]; attribute lengths. An empty sequence gives 0.
normalize_rows  x -> x / max(L2 norm, 1e-12).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numba import float32
from numpy.typing import NDArray

from hepti_mqtt.kernels import references
from hepti_mqtt.kernels.base import Array, Check, Kernel, Run, nothing, row_parts, rowwise, starts_of
from hepti_mqtt.kernels.elementary import ZERO
from hepti_mqtt.kernels.machine.addresses import address_table, floats
from hepti_mqtt.kernels.machine.jit import FLOAT, INT, INT_ARRAY, exact, fills, helper, kernel, reads
from hepti_mqtt.kernels.machine.workers import Workers
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.program import Compute, SlotSpec

_TINY: Final = np.float32(1e-12)


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
def normalise_row(x: Any, out: Any, gamma: Any, beta: Any, eps: Any) -> None:
    """Fill out [h] with the layer norm of x [h], which may be the same array."""
    mean, squares = moments_of(x)
    scale_row(x, out, mean, reciprocal_root(squares / len(x) + np.float64(eps)), gamma, beta)


@kernel(reads(float32, 2), fills(float32, 2), reads(float32, 1), reads(float32, 1), FLOAT, INT, INT, part=2)
def _layer_norm(x: Any, out: Any, gamma: Any, beta: Any, eps: Any, first: int, stop: int) -> None:
    for row in range(first, stop):
        normalise_row(x[row], out[row], gamma, beta, eps)


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


@kernel(
    INT_ARRAY,
    INT,
    fills(float32, 2),
    fills(float32, 2),
    reads(float32, 1),
    reads(float32, 1),
    reads(float32, 1),
    FLOAT,
    INT,
    INT,
    part=2,
)
def _add_norm(
    addresses: Any,
    count: int,
    total: Any,
    out: Any,
    bias: Any,
    gamma: Any,
    beta: Any,
    eps: Any,
    first: int,
    stop: int,
) -> None:
    """Fill total and out; without keep_sum they are one array, whose rows are normalised in place."""
    for row in range(first, stop):
        add_row(addresses, count, bias, row * out.shape[1], total[row])
        normalise_row(total[row], out[row], gamma, beta, eps)


@kernel(reads(float32, 2), fills(float32, 2), INT_ARRAY)
def _mean_rows(x: Any, out: Any, starts: Any) -> None:
    """Fill out [B, h] with the means of rows starts[b]..starts[b + 1] of x; of no rows it is 0."""
    h = x.shape[1]
    for b in range(len(out)):
        for i in range(h):
            out[b, i] = ZERO
        for row in range(starts[b], starts[b + 1]):
            for i in range(h):
                out[b, i] += x[row, i]
        by = np.float32(max(starts[b + 1] - starts[b], 1))
        for i in range(h):
            out[b, i] /= by


@kernel(reads(float32, 2), fills(float32, 2))
def _normalize_rows(x: Any, out: Any) -> None:
    h = x.shape[1]
    for row in range(len(x)):
        # f64: the square of a large f32 would be infinite.
        squares = 0.0
        for i in range(h):
            squares += np.float64(x[row, i]) * np.float64(x[row, i])
        norm = np.sqrt(squares)
        by = np.float32(norm) if not norm < _TINY else _TINY
        for i in range(h):
            out[row, i] = x[row, i] / by


def same_shapes(op: Compute, slots: Sequence[SlotSpec], reads: int | None, writes: int = 1) -> tuple[Check, int, int]:
    """Check an op whose slots are all f32 [m, h]; return (its checks, m, h)."""
    check = Check(op, slots)
    check.count(reads, writes)
    check.dtypes()
    check.rank(2)
    m, h = check.reads[0].shape
    for spec in (*check.reads, *check.writes):
        check.shape(spec, (m, h))
    return check, m, h


def _bind_layer_norm(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check, m, h = same_shapes(op, slots, 1)
    check.weights(weights, 2)
    gamma, beta = (check.plain(w, (h,)) for w in weights)
    eps, parts = np.float32(op.attrs["eps"]), row_parts(m, h, pool)
    if not parts or not h:
        return nothing

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        pool.each(_layer_norm, (reads[0], writes[0], gamma, beta, eps), parts)

    return run


def bias_of(check: Check, op: Compute, weights: Sequence[Weight], h: int) -> NDArray[np.float32]:
    """Return the op's bias [h], its first weight if attribute bias, else zeros."""
    return check.plain(weights[0], (h,)) if op.attrs["bias"] else np.zeros(h, np.float32)


def _bind_add(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check, m, h = same_shapes(op, slots, None)
    check.weights(weights, int(bool(op.attrs["bias"])))
    bias, count = bias_of(check, op, weights, h), len(op.reads)
    table, fill = address_table(count)
    parts = row_parts(m, h * count, pool)
    if not parts or not h:
        return nothing

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        fill(reads)
        pool.each(_add, (table, count, writes[0], bias), parts)

    return run


def _bind_add_norm(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check, m, h = same_shapes(op, slots, None, 2 if op.attrs["keep_sum"] else 1)
    check.weights(weights, 3 if op.attrs["bias"] else 2)
    bias, count = bias_of(check, op, weights, h), len(op.reads)
    gamma, beta = (check.plain(w, (h,)) for w in weights[-2:])
    eps = np.float32(op.attrs["eps"])
    table, fill = address_table(count)
    parts = row_parts(m, h * count, pool)
    if not parts or not h:
        return nothing

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        fill(reads)
        pool.each(_add_norm, (table, count, writes[0], writes[-1], bias, gamma, beta, eps), parts)

    return run


def _bind_mean_rows(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], _pool: Workers) -> Run:
    check = Check(op, slots)
    check.count(1)
    check.dtypes()
    check.rank(2)
    check.weights(weights, 0)
    starts = starts_of(op.attrs["lengths"])
    m, h = check.reads[0].shape
    check.that(starts[-1] == m, f"lengths sum to {starts[-1]}, x has {m} rows")
    check.shape(check.writes[0], (len(starts) - 1, h))
    return lambda reads, writes: _mean_rows(reads[0], writes[0], starts)


def _bind_normalize_rows(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], _pool: Workers) -> Run:
    check, _, _ = same_shapes(op, slots, 1)
    check.weights(weights, 0)
    return lambda reads, writes: _normalize_rows(reads[0], writes[0])


def total_of(op: Compute, reads: Sequence[Array], weights: Sequence[Array]) -> Array:
    """Return residual + (bias + p_1 + ... + p_n) in float64, for references."""
    parts = [p.astype(np.float64) for p in reads[1:]]
    start = weights[0].astype(np.float64) if op.attrs["bias"] else np.zeros(reads[0].shape[1])
    return np.asarray(reads[0] + sum(parts, np.broadcast_to(start, reads[0].shape)))


def _reference_layer_norm(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    weights: Sequence[Array],
) -> list[Array]:
    return [references.layer_norm(reads[0], weights[0], weights[1], op.attrs["eps"])]


def _reference_add(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    weights: Sequence[Array],
) -> list[Array]:
    return [total_of(op, reads, weights)]


def _reference_add_norm(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    weights: Sequence[Array],
) -> list[Array]:
    total = total_of(op, reads, weights)
    normed = references.layer_norm(total, weights[-2], weights[-1], op.attrs["eps"])
    return [total, normed] if op.attrs["keep_sum"] else [normed]


def _reference_mean_rows(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    starts = starts_of(op.attrs["lengths"])
    x = reads[0].astype(np.float64)
    means = [x[a:b].sum(axis=0) / max(b - a, 1) for a, b in pairwise(starts)]
    return [np.asarray(means).reshape(len(means), x.shape[1])]


def _reference_normalize_rows(
    _op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    x = reads[0].astype(np.float64)
    norms = np.sqrt((x * x).sum(axis=1, keepdims=True))
    return [x / np.where(norms < 1e-12, 1e-12, norms)]


LAYER_NORM: Final = Kernel("layer_norm", _bind_layer_norm, _reference_layer_norm, rowwise)
ADD: Final = Kernel("add", _bind_add, _reference_add, rowwise)
ADD_NORM: Final = Kernel("add_norm", _bind_add_norm, _reference_add_norm, rowwise)
MEAN_ROWS: Final = Kernel("mean_rows", _bind_mean_rows, _reference_mean_rows, rowwise)
NORMALIZE_ROWS: Final = Kernel("normalize_rows", _bind_normalize_rows, _reference_normalize_rows, rowwise)
