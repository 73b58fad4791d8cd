"""Kernel `softmax`: x [m, n] -> exp(x - maximum of the row) / sum of it; a row of -inf alone, as of masks, gives 0.

A row with a NaN or with +inf gives NaN. Four passes over a row that stays in the first-level cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32

from hepti_mqtt.kernels.base import Array, Check, Kernel, Run, nothing, row_parts, rowwise
from hepti_mqtt.kernels.elementary import ONE, ZERO, bits_of, exp_of_negative, from_bits
from hepti_mqtt.kernels.jit import INT, fills, helper, kernel, reads
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.kernels.workers import Workers
from hepti_mqtt.program import Compute, SlotSpec

_MINUS_INF: Final = np.float32(-np.inf)
_MAGNITUDE: Final = np.int32(0x7FFFFFFF)
_ZERO_BITS: Final = np.int32(0)
_LEAST: Final = np.int32(-0x80000000)


@helper
def _order(bits: Any) -> Any:
    """Return an integer that is ordered as the float with these bits; its own inverse."""
    return bits ^ _MAGNITUDE if bits < _ZERO_BITS else bits


@helper
def _row_maximum(x: Any) -> Any:
    # A maximum of integers vectorises, where one of floats would not without the promise that there is no NaN.
    top = _LEAST
    for i in range(len(x)):
        ordered = _order(bits_of(x[i]))
        top = ordered if ordered > top else top
    return from_bits(_order(top))


@kernel(reads(float32, 2), fills(float32, 2), INT, INT, part=2)
def _softmax(x: Any, out: Any, first: int, stop: int) -> None:
    n = x.shape[1]
    for row in range(first, stop):
        top = _row_maximum(x[row])
        above = ZERO if top == _MINUS_INF else top
        for i in range(n):
            out[row, i] = exp_of_negative(x[row, i] - above)
        # A loop of its own: beside writes, the order of the sum would follow from a check at run time of where x and
        # out lie in memory, and so would its bits.
        norm = ZERO
        for i in range(n):
            norm += out[row, i]
        by = ONE / norm if norm != ZERO else ONE
        for i in range(n):
            out[row, i] *= by


def _bind(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check = Check(op, slots)
    check.count(1)
    check.dtypes()
    check.rank(2)
    check.weights(weights, 0)
    m, n = check.reads[0].shape
    check.shape(check.writes[0], (m, n))
    parts = row_parts(m, n, pool)
    if not parts or not n:
        return nothing
    return lambda reads, writes: pool.each(_softmax, (reads[0], writes[0]), parts)


def _reference(
    _op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    x = reads[0].astype(np.float64)
    top = x.max(axis=1, keepdims=True, initial=-np.inf)
    e = np.exp(x - np.where(top == -np.inf, 0.0, top))
    norm = e.sum(axis=1, keepdims=True)
    return [e / np.where(norm == 0, 1.0, norm)]


SOFTMAX: Final = Kernel("softmax", _bind, _reference, rowwise)
