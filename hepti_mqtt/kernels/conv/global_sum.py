"""Kernel `global_sum` of one image in f32: x [Y, X, C] -> scale times the sum of each channel, [1, C].

Attribute scale (float, 1 where absent): with 1 / (rows times columns of the whole map), the sums of those who own rows
of it add up to its mean. A map of no pixels gives 0. Pixels of a row are added in ascending order, then the rows: how
rows are divided changes the order, so parts that are added differ from the whole within the rounding of such a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32

from hepti_mqtt.kernels.base import ROWWISE_GRAIN, Array, Check, Kernel, Run, nothing, rowwise
from hepti_mqtt.kernels.elementary import ZERO
from hepti_mqtt.kernels.machine.addresses import floats
from hepti_mqtt.kernels.machine.jit import FLOAT, INT, fills, kernel, reads
from hepti_mqtt.kernels.machine.workers import Workers, ranges
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.program import Compute, SlotSpec

# Channels whose sums stay in the first-level cache.
_BLOCK: Final = 1024


@kernel(reads(float32, 3), fills(float32, 2), FLOAT, INT, INT, part=2, maps=True)
def _global_sum(x: Any, out: Any, scale: Any, first: int, stop: int) -> None:
    """Fill channels first..stop of out [1, C]."""
    channels = x.shape[2]
    of_row = np.empty(min(_BLOCK, stop - first), np.float32)
    for low in range(first, stop, _BLOCK):
        count = min(_BLOCK, stop - low)
        total = floats(out.ctypes.data + 4 * low, count)
        for c in range(count):
            total[c] = ZERO
        for y in range(x.shape[0]):
            for c in range(count):
                of_row[c] = ZERO
            for column in range(x.shape[1]):
                values = floats(x.ctypes.data + 4 * ((y * x.shape[1] + column) * channels + low), count)
                for c in range(count):
                    of_row[c] += values[c]
            for c in range(count):
                total[c] += of_row[c]
        for c in range(count):
            total[c] *= scale


def _bind(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check = Check(op, slots)
    check.count(1)
    check.dtypes()
    check.weights(weights, 0)
    check.that(len(check.reads[0].shape) == 3, "x must have 3 dimensions")
    y, x, c = check.reads[0].shape
    check.shape(check.writes[0], (1, c))
    scale = np.float32(op.attrs.get("scale", 1.0))
    parts = ranges(c, min(pool.threads, 1 + y * x * c // ROWWISE_GRAIN))
    if not c:
        return nothing
    add_up = pool.bind(_global_sum, parts)

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        add_up(reads[0], writes[0], scale)

    return run


def _reference(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    return [op.attrs.get("scale", 1.0) * reads[0].astype(np.float64).sum(axis=(0, 1))[None]]


GLOBAL_SUM: Final = Kernel("global_sum", _bind, _reference, rowwise, later=True)
