"""Kernel `average_pool2d` of one image in f32: x [Y, X, C] -> the mean of each channel in each patch, [y, x, C].

Patches and the attributes kernel, stride and pad (zeros beyond x) are those of `windows`. Attribute count_pad (bool):
whether places beyond x count; if not, the mean is that of the others, and 0 where there are none. Every sum runs over
the patch in ascending order of rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32

from hepti_mqtt.kernels.base import Array, Kernel, Run, nothing
from hepti_mqtt.kernels.conv.windows import patches_of, pooling, pooling_work
from hepti_mqtt.kernels.elementary import ZERO
from hepti_mqtt.kernels.machine.addresses import floats
from hepti_mqtt.kernels.machine.jit import INT, INT_ARRAY, fills, kernel, reads
from hepti_mqtt.kernels.machine.workers import Workers
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.program import Compute, SlotSpec


@kernel(reads(float32, 1), fills(float32, 2), INT_ARRAY, INT, INT, INT, part=2, maps=True)
def _average_pool2d(x: Any, out: Any, window: Any, count_pad: int, first: int, stop: int) -> None:
    """Fill rows first..stop of out [y x, C] with the means of the patches of the image x [Y X C]."""
    height, width, channels = window[0], window[1], window[2]
    ky, kx, across, dy, dx = window[3], window[4], window[10], window[11], window[12]
    for pixel in range(first, stop):
        total = floats(out.ctypes.data + 4 * channels * pixel, channels)
        for c in range(channels):
            total[c] = ZERO
        y0 = pixel // across * window[5] - window[7]
        x0 = pixel % across * window[6] - window[8]
        count = 0
        for i in range(ky):
            for j in range(kx):
                y, column = y0 + i * dy, x0 + j * dx
                if 0 <= y < height and 0 <= column < width:
                    count += 1
                    values = floats(x.ctypes.data + 4 * channels * (y * width + column), channels)
                    for c in range(channels):
                        total[c] += values[c]
        by = np.float32(1.0) / np.float32(ky * kx if count_pad else max(count, 1))
        for c in range(channels):
            total[c] *= by


def _bind(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    window, parts = pooling(op, slots, weights, pool)
    c, table, count_pad = window.channels, window.table(), int(bool(op.attrs["count_pad"]))
    if not c:
        return nothing
    pool_means = pool.bind(_average_pool2d, parts)

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        pool_means(reads[0].reshape(-1), writes[0].reshape(-1, c), table, count_pad)

    return run


def _reference(
    op: Compute,
    slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    out = slots[op.writes[0]]
    counted = np.ones(reads[0].shape)
    inside = patches_of(op, counted, out, 0.0).sum(axis=(2, 3))
    counts = np.prod(op.attrs["kernel"]) if op.attrs["count_pad"] else np.maximum(inside, 1)
    return [patches_of(op, reads[0], out, 0.0).sum(axis=(2, 3)) / counts]


AVERAGE_POOL2D: Final = Kernel("average_pool2d", _bind, _reference, pooling_work, later=True)
