"""Kernels that norm rows of f32 [m, h]; each row is finished while it is in the first-level cache.

layer_norm      x -> layer norm; weights gamma, beta; attribute eps.
add_norm        the sum of `add`, then its layer norm -> (normed), or (total, normed) with attribute keep_sum; weights
                bias if attribute bias, gamma, beta; attributes bias, eps, keep_sum.
normalize_rows  x -> x / max(L2 norm, 1e-12).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32

from hepti_mqtt.kernels import references
from hepti_mqtt.kernels.base import Array, Kernel, Run, nothing, row_parts, rowwise
from hepti_mqtt.kernels.machine.addresses import address_table
from hepti_mqtt.kernels.machine.jit import FLOAT, INT, INT_ARRAY, entry, exact, fills, helper, kernel, reads
from hepti_mqtt.kernels.machine.workers import Workers
from hepti_mqtt.kernels.rowwise.sums import add_row, bias_of, same_shapes, total_of
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.program import Compute, SlotSpec

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
def normalise_row(x: Any, out: Any, gamma: Any, beta: Any, eps: Any) -> None:
    """Fill out [h] with the layer norm of x [h], which may be the same array."""
    mean, squares = moments_of(x)
    scale_row(x, out, mean, reciprocal_root(squares / len(x) + np.float64(eps)), gamma, beta)


@kernel(reads(float32, 2), fills(float32, 2), reads(float32, 1), reads(float32, 1), FLOAT, INT, INT, part=2)
def _layer_norm(x: Any, out: Any, gamma: Any, beta: Any, eps: Any, first: int, stop: int) -> None:
    for row in range(first, stop):
        normalise_row(x[row], out[row], gamma, beta, eps)


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


def _bind_layer_norm(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check, m, h = same_shapes(op, slots, 1)
    check.weights(weights, 2)
    gamma, beta = (check.plain(w, (h,)) for w in weights)
    eps, parts = np.float32(op.attrs["eps"]), row_parts(m, h, pool)
    if not parts or not h:
        return nothing
    norm = pool.bind(_layer_norm, parts)

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        norm(reads[0], writes[0], gamma, beta, eps)

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
    norm = pool.bind(_add_norm, parts)

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        fill(reads)
        norm(table, count, writes[0], writes[-1], bias, gamma, beta, eps)

    return run


def _bind_normalize_rows(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], _pool: Workers) -> Run:
    check, _, _ = same_shapes(op, slots, 1)
    check.weights(weights, 0)
    normalize = entry(_normalize_rows)
    return lambda reads, writes: normalize(reads[0], writes[0])


def _reference_layer_norm(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    weights: Sequence[Array],
) -> list[Array]:
    return [references.layer_norm(reads[0], weights[0], weights[1], op.attrs["eps"])]


def _reference_add_norm(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    weights: Sequence[Array],
) -> list[Array]:
    total = total_of(op, reads, weights)
    normed = references.layer_norm(total, weights[-2], weights[-1], op.attrs["eps"])
    return [total, normed] if op.attrs["keep_sum"] else [normed]


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
ADD_NORM: Final = Kernel("add_norm", _bind_add_norm, _reference_add_norm, rowwise)
NORMALIZE_ROWS: Final = Kernel("normalize_rows", _bind_normalize_rows, _reference_normalize_rows, rowwise)
