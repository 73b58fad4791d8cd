"""Kernel `mean_rows`: x f32 [m, h] -> mean of each sequence [B, h]; attribute lengths. An empty sequence gives 0."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numba import float32

from hepti_mqtt.kernels.base import Array, Check, Kernel, Run, rowwise, starts_of
from hepti_mqtt.kernels.elementary import ZERO
from hepti_mqtt.kernels.machine.jit import INT_ARRAY, fills, kernel, reads
from hepti_mqtt.kernels.machine.workers import Workers
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.program import Compute, SlotSpec


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


def _bind(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], _pool: Workers) -> Run:
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


def _reference(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    starts = starts_of(op.attrs["lengths"])
    x = reads[0].astype(np.float64)
    means = [x[a:b].sum(axis=0) / max(b - a, 1) for a, b in pairwise(starts)]
    return [np.asarray(means).reshape(len(means), x.shape[1])]


MEAN_ROWS: Final = Kernel("mean_rows", _bind, _reference, rowwise)
