"""The columns of a convolution that are multiplied at once, how its products are made, and what follows the sums."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.kernels.base import Check
from hepti_mqtt.kernels.conv.windows import Window
from hepti_mqtt.kernels.gemm.epilogue import activate
from hepti_mqtt.kernels.gemm.tile import NR
from hepti_mqtt.kernels.machine.addresses import floats
from hepti_mqtt.kernels.machine.isa import TILE
from hepti_mqtt.kernels.machine.jit import helper
from hepti_mqtt.kernels.weights import PackedMatrix
from hepti_mqtt.program import Compute

_LANES: Final = TILE.lanes
# Columns of the table of units: address of weights, address of biases, first column of out, columns, those of the panel
# before the first one, bytes from a pixel to its first channel.
WEIGHTS, BIAS, COLUMN, VALID, SHIFT, OFFSET = range(6)
# How products are made: what `_conv2d` reads of it, in this order.
LENGTH, DEPTHWISE, ACTIVATION, IN_REGISTERS, BOUNDS, RESIDUAL_FIRST = range(6)


@helper
def finish_rows(sums: Any, first: int, count: int, pixel: int, unit: Any, how: Any, out: Any, residual: Any) -> None:
    """Finish rows first..first + count of sums [.., NR] and copy them to the pixels of out from `pixel` on."""
    valid, n = unit[VALID], out.shape[1]
    has, is_first = residual.size > 0, how[RESIDUAL_FIRST] != 0
    for i in range(count):
        tile = floats(sums.ctypes.data + 4 * ((first + i) * NR + unit[SHIFT]), valid)
        target = floats(out.ctypes.data + 4 * ((pixel + i) * n + unit[COLUMN]), valid)
        added = floats(residual.ctypes.data + 4 * ((pixel + i) * n + unit[COLUMN]), valid if has else 0)
        if has and is_first:
            for j in range(valid):
                tile[j] += added[j]
        activate(tile, how[ACTIVATION])
        if has and not is_first:
            for j in range(valid):
                tile[j] += added[j]
        for j in range(valid):
            target[j] = tile[j]


class Groups(NamedTuple):
    """How channels of x and columns of W fall into groups: of a group, so many of each."""

    number: int
    channels: int
    columns: int


def groups_of(check: Check, op: Compute, window: Window, n: int) -> Groups:
    """Return the groups of a convolution to n columns; ValueError where channels or columns do not fall into them."""
    count = int(op.attrs.get("groups", 1))
    check.that(count >= 1, f"groups {count} must be >= 1")
    divides = window.channels % count == n % count == 0
    check.that(divides, f"groups {count} must divide {window.channels} channels and {n} columns")
    return Groups(count, window.channels // count, n // count)


def units_of(matrix: PackedMatrix, bias: NDArray[np.float32], groups: Groups, depthwise: bool) -> NDArray[np.int64]:
    """Return the table of units: columns of one panel and one group; depthwise, of one panel."""
    found = []
    address = matrix.panels.__array_interface__["data"][0]
    biases = bias.__array_interface__["data"][0]
    for panel in range(len(matrix.panels)):
        first, stop = panel * NR, min((panel + 1) * NR, matrix.columns)
        while first < stop:
            group = 0 if depthwise else first // groups.columns
            end = stop if depthwise else min(stop, (group + 1) * groups.columns)
            # Vectors of a panel begin at whole vectors.
            skipped = (first - panel * NR) // _LANES * _LANES
            weights = address + 4 * (panel * matrix.rows * NR + skipped)
            shift = first - panel * NR - skipped
            offset = first if depthwise else group * groups.channels
            found.append((weights, biases + 4 * (first - shift), first, end - first, shift, 4 * offset))
            first = end
    return np.asarray(found, np.int64)
