"""How patches lie on an image, f32 [Y, X, C], rows first and channels last: what the kernels of a map share.

Attributes kernel (ky, kx), stride (sy, sx), pad (top, left, bottom, right) and, where wanted, dilation (dy, dx) say
where patches are: places of a patch lie dilation apart. There are as many patches as fit: y = (Y + top + bottom -
(ky - 1) dy - 1) // sy + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.kernels.base import Array, Check, row_parts
from hepti_mqtt.kernels.machine.workers import Parts, Workers
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.program import Compute, SlotSpec, Work


class Window(NamedTuple):
    """How patches lie on an image; compiled code reads it as a table in this order."""

    rows: int
    columns: int
    channels: int
    kernel_rows: int
    kernel_columns: int
    stride_rows: int
    stride_columns: int
    top: int
    left: int
    out_rows: int
    out_columns: int
    dilation_rows: int
    dilation_columns: int

    def table(self) -> NDArray[np.int64]:
        """Return the window as compiled code reads it."""
        return np.asarray(self, np.int64)

    @property
    def pixels(self) -> int:
        """Return the number of patches."""
        return self.out_rows * self.out_columns

    @property
    def places(self) -> int:
        """Return the pixels of a patch."""
        return self.kernel_rows * self.kernel_columns


def window_of(check: Check, op: Compute) -> Window:
    """Return the window of an op whose first read is [Y, X, C] and whose result is [y, x, n]."""
    window = measured(check, op)
    check.shape(check.writes[0], (window.out_rows, window.out_columns, check.writes[0].shape[2]))
    return window


def measured(check: Check, op: Compute) -> Window:
    """Return the window of an op whose first read is [Y, X, C], with as many patches as fit."""
    check.that(len(check.reads[0].shape) == len(check.writes[0].shape) == 3, "slots must have 3 dimensions")
    height, width, channels = check.reads[0].shape
    (ky, kx), (sy, sx) = op.attrs["kernel"], op.attrs["stride"]
    dy, dx = op.attrs.get("dilation", (1, 1))
    top, left, bottom, right = op.attrs["pad"]
    check.that(min(ky, kx, sy, sx) >= 1, f"kernel {(ky, kx)} and stride {(sy, sx)} must be >= 1")
    check.that(min(dy, dx) >= 1, f"dilation {(dy, dx)} must be >= 1")
    check.that(min(top, left, bottom, right) >= 0, f"pad {(top, left, bottom, right)} must be >= 0")
    y, x = fitting(op, 0, height + top + bottom), fitting(op, 1, width + left + right)
    return Window(height, width, channels, ky, kx, sy, sx, top, left, y, x, dy, dx)


def fitting(op: Compute, dim: int, size: int) -> int:
    """Return how many patches of an op fit into `size` rows (dimension 0), or columns (1)."""
    reach: int = (op.attrs["kernel"][dim] - 1) * op.attrs.get("dilation", (1, 1))[dim] + 1
    stride: int = op.attrs["stride"][dim]
    return max(0, (size - reach) // stride + 1)


def pooling(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> tuple[Window, Parts]:
    """Return the window of an op that pools channel by channel, and the pixels that each thread of `pool` fills.

    Raises ValueError if the op does not fit together.
    """
    check = Check(op, slots)
    check.count(1)
    check.dtypes()
    check.weights(weights, 0)
    window = window_of(check, op)
    c = window.channels
    check.that(check.writes[0].shape[2] == c, f"must write as many channels as it reads, {c}")
    return window, row_parts(window.pixels, c * window.places, pool)


def pooling_work(op: Compute, slots: Sequence[SlotSpec]) -> Work:
    """Return the work of an op that pools: for each place of a patch, its values and what they change are moved."""
    places, out = prod(op.attrs["kernel"]), slots[op.writes[0]]
    return Work("rowwise", nbytes=2.0 * (places + 1) * out.nbytes)


def patches_of(op: Compute, x: Array, out: SlotSpec, fill: float) -> Array:
    """Return the patches of x as [y, x, ky, kx, C], for references."""
    (ky, kx), (sy, sx) = op.attrs["kernel"], op.attrs["stride"]
    dy, dx = op.attrs.get("dilation", (1, 1))
    top, left, bottom, right = op.attrs["pad"]
    padded = np.pad(x.astype(np.float64), ((top, bottom), (left, right), (0, 0)), constant_values=fill)
    y, across, _ = out.shape
    found = np.empty((y, across, ky, kx, x.shape[2]))
    for i in range(y):
        for j in range(across):
            rows = slice(i * sy, i * sy + (ky - 1) * dy + 1, dy)
            found[i, j] = padded[rows, j * sx : j * sx + (kx - 1) * dx + 1 : dx]
    return found
