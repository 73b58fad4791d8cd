"""Kernels of RMS norm over rows of f32 [m, h]: x / sqrt(mean of squares + eps) * gamma (Zhang and Sennrich 2019).

rms_norm        x -> its RMS norm; weight gamma; attribute eps.
add_rms_norm    residual, p_1 ... p_n -> the RMS norm of residual + (bias + p_1 + ... + p_n) as (normed), or
                (total, normed) with attribute keep_sum; weights bias if attribute bias, gamma; attributes bias, eps,
                keep_sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32

from hepti_mqtt.kernels.base import Array, Kernel, Run, nothing, row_parts, rowwise
from hepti_mqtt.kernels.jit import FLOAT, INT, INT_ARRAY, fills, helper, kernel, reads
from hepti_mqtt.kernels.memory import address_table
from hepti_mqtt.kernels.rowwise import add_row, bias_of, reciprocal_root, same_shapes, total_of
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.kernels.workers import Workers
from hepti_mqtt.program import Compute, SlotSpec


@helper
def _normalise(x: Any, out: Any, gamma: Any, eps: Any) -> None:
    """Fill out [h] with the RMS norm of x [h] (may be the same array); squares in f64, where none overflows."""
    h = len(x)
    squares = 0.0
    for i in range(h):
        squares += np.float64(x[i]) * np.float64(x[i])
    by = reciprocal_root(squares / h + np.float64(eps))
    for i in range(h):
        out[i] = np.float32(np.float64(x[i]) * by) * gamma[i]


@kernel(reads(float32, 2), fills(float32, 2), reads(float32, 1), FLOAT, INT, INT, part=2)
def _rms_norm(x: Any, out: Any, gamma: Any, eps: Any, first: int, stop: int) -> None:
    for row in range(first, stop):
        _normalise(x[row], out[row], gamma, eps)


@kernel(
    INT_ARRAY, INT, fills(float32, 2), fills(float32, 2), reads(float32, 1), reads(float32, 1), FLOAT, INT, INT, part=2
)
def _add_rms_norm(
    addresses: Any, count: int, total: Any, out: Any, bias: Any, gamma: Any, eps: Any, first: int, stop: int
) -> None:
    """Fill total and out; without keep_sum they are one array, whose rows are normalised in place."""
    for row in range(first, stop):
        add_row(addresses, count, bias, row * out.shape[1], total[row])
        _normalise(total[row], out[row], gamma, eps)


def _bind_rms_norm(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check, m, h = same_shapes(op, slots, 1)
    check.weights(weights, 1)
    gamma = check.plain(weights[0], (h,))
    eps, parts = np.float32(op.attrs["eps"]), row_parts(m, h, pool)
    if not parts or not h:
        return nothing
    return lambda reads, writes: pool.each(_rms_norm, (reads[0], writes[0], gamma, eps), parts)


def _bind_add_rms_norm(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check, m, h = same_shapes(op, slots, None, 2 if op.attrs["keep_sum"] else 1)
    check.weights(weights, 2 if op.attrs["bias"] else 1)
    bias, gamma, count = bias_of(check, op, weights, h), check.plain(weights[-1], (h,)), len(op.reads)
    eps = np.float32(op.attrs["eps"])
    table, fill = address_table(count)
    parts = row_parts(m, h * count, pool)
    if not parts or not h:
        return nothing

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        fill(reads)
        pool.each(_add_rms_norm, (table, count, writes[0], writes[-1], bias, gamma, eps), parts)

    return run


def _reference_of(x: Array, gamma: Array, eps: float) -> Array:
    x = x.astype(np.float64)
    return np.asarray(x / np.sqrt((x * x).sum(axis=-1, keepdims=True) / max(len(gamma), 1) + eps) * gamma)


def _reference_rms_norm(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    weights: Sequence[Array],
) -> list[Array]:
    return [_reference_of(reads[0], weights[0], op.attrs["eps"])]


def _reference_add_rms_norm(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    weights: Sequence[Array],
) -> list[Array]:
    total = total_of(op, reads, weights)
    normed = _reference_of(total, weights[-1], op.attrs["eps"])
    return [total, normed] if op.attrs["keep_sum"] else [normed]


RMS_NORM: Final = Kernel("rms_norm", _bind_rms_norm, _reference_rms_norm, rowwise)
ADD_RMS_NORM: Final = Kernel("add_rms_norm", _bind_add_rms_norm, _reference_add_rms_norm, rowwise)
