"""Kernel `max_pool2d` of one image in f32: x [Y, X, C] -> the largest value of each channel in each patch, [y, x, C].

Patches and the attributes kernel, stride and pad (with -infinity beyond x) are those of `windows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32

from hepti_mqtt.kernels.base import Array, Kernel, Run, nothing
from hepti_mqtt.kernels.conv.windows import patches_of, pooling, pooling_work
from hepti_mqtt.kernels.machine.addresses import floats
from hepti_mqtt.kernels.machine.jit import INT, INT_ARRAY, fills, kernel, reads
from hepti_mqtt.kernels.machine.workers import Workers
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.program import Compute, SlotSpec

_MINUS_INF: Final = np.float32(-np.inf)


@kernel(reads(float32, 1), fills(float32, 2), INT_ARRAY, INT, INT, part=2, maps=True)
def _max_pool2d(x: Any, out: Any, window: Any, first: int, stop: int) -> None:
    """Fill rows first..stop of out [y x, C] with the largest values in the patches of the image x [Y X C]."""
    height, width, channels = window[0], window[1], window[2]
    ky, kx, across, dy, dx = window[3], window[4], window[10], window[11], window[12]
    for pixel in range(first, stop):
        best = floats(out.ctypes.data + 4 * channels * pixel, channels)
        for c in range(channels):
            best[c] = _MINUS_INF
        y0 = pixel // across * window[5] - window[7]
        x0 = pixel % across * window[6] - window[8]
        for i in range(ky):
            for j in range(kx):
                y, column = y0 + i * dy, x0 + j * dx
                if y < 0 or y >= height or column < 0 or column >= width:
                    continue
                values = floats(x.ctypes.data + 4 * channels * (y * width + column), channels)
                for c in range(channels):
                    # NaN is above everything, and nothing is above NaN; `or` would be a branch for each channel.
                    is_above = (values[c] > best[c]) | np.isnan(values[c])
                    best[c] = values[c] if is_above else best[c]


def _bind(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    window, parts = pooling(op, slots, weights, pool)
    c, table = window.channels, window.table()
    if not c:
        return nothing
    pool_maxima = pool.bind(_max_pool2d, parts)

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        pool_maxima(reads[0].reshape(-1), writes[0].reshape(-1, c), table)

    return run


def _reference(
    op: Compute,
    slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    return [patches_of(op, reads[0], slots[op.writes[0]], -np.inf).max(axis=(2, 3))]


MAX_POOL2D: Final = Kernel("max_pool2d", _bind, _reference, pooling_work, later=True)
