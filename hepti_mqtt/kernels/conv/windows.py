"""How patches lie on an image, f32 [Y, X, C], rows first and channels last: what the kernels of a map share.

Attributes kernel (ky, kx), stride (sy, sx) and pad (top, left, bottom, right) say where patches are. There are as many
as fit: y = (Y + top + bottom - ky) // sy + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.kernels.base import Array, Check
from hepti_mqtt.program import Compute, SlotSpec


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

    def table(self) -> NDArray[np.int64]:
        """Return the window as compiled code reads it."""
        return np.asarray(self, np.int64)

    @property
    def pixels(self) -> int:
        """Return the number of patches."""
        return self.out_rows * self.out_columns


def window_of(check: Check, op: Compute) -> Window:
    """Return the window of an op whose first read is [Y, X, C] and whose result is [y, x, n]."""
    check.that(len(check.reads[0].shape) == len(check.writes[0].shape) == 3, "slots must have 3 dimensions")
    height, width, channels = check.reads[0].shape
    (ky, kx), (sy, sx) = op.attrs["kernel"], op.attrs["stride"]
    top, left, bottom, right = op.attrs["pad"]
    check.that(min(ky, kx, sy, sx) >= 1, f"kernel {(ky, kx)} and stride {(sy, sx)} must be >= 1")
    check.that(min(top, left, bottom, right) >= 0, f"pad {(top, left, bottom, right)} must be >= 0")
    y, x = (height + top + bottom - ky) // sy + 1, (width + left + right - kx) // sx + 1
    check.shape(check.writes[0], (max(0, y), max(0, x), check.writes[0].shape[2]))
    return Window(height, width, channels, ky, kx, sy, sx, top, left, max(0, y), max(0, x))


def patches_of(op: Compute, x: Array, out: SlotSpec, fill: float) -> Array:
    """Return the patches of x as [y, x, ky, kx, C], for references."""
    (ky, kx), (sy, sx) = op.attrs["kernel"], op.attrs["stride"]
    top, left, bottom, right = op.attrs["pad"]
    padded = np.pad(x.astype(np.float64), ((top, bottom), (left, right), (0, 0)), constant_values=fill)
    y, across, _ = out.shape
    found = np.empty((y, across, ky, kx, x.shape[2]))
    for i in range(y):
        for j in range(across):
            found[i, j] = padded[i * sy : i * sy + ky, j * sx : j * sx + kx]
    return found
