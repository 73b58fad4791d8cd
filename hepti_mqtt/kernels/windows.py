"""Windows: the patches of an image, f32 [Y, X, C], rows first and channels last, and kernels that pool them.

Attributes kernel (ky, kx), stride (sy, sx), pad (top, left, bottom, right) and optionally dilation (dy, dx) place the
patches; as many as fit: y = (Y + top + bottom - (ky - 1) dy - 1) // sy + 1.

Attribute `bands`: several ranges of rows in one convolution, each (first row of x, end of its rows, rows of zeros above
and below them, its first row on the whole map). Bands may share rows of x, and use only their own. Outputs of bands are
adjacent, in order; `pad` then has 0 rows above and below.

max_pool2d      x -> the largest value of each channel in each patch, [y, x, C]; -infinity beyond x.
average_pool2d  x -> the mean of each channel in each patch, [y, x, C]; attribute count_pad (bool): places beyond x
                count as zeros; else they are left out, and a patch without places gives 0. Sums run in ascending order.
global_sum      x -> scale (default 1) times the sum of each channel, [1, C]: with 1 / (rows times columns of the whole
                map) the parts' sums add up to its mean. Pixels of a row are added in order, then rows: sums of parts
                differ from the whole by rounding.
scale_map       row [1, C], x -> activation(row) * x, [Y, X, C]; attribute activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
from numba import float32
from numpy.typing import NDArray

from hepti_mqtt.core.program import Compute, SlotSpec, Work
from hepti_mqtt.kernels.base import (
    REFERENCE_ACTIVATIONS,
    ROWWISE_GRAIN,
    Array,
    Arrays,
    Check,
    Kernel,
    Slots,
    Weights,
    row_parts,
    rowwise,
)
from hepti_mqtt.kernels.calls import Calls, operands
from hepti_mqtt.kernels.cpu import TILE
from hepti_mqtt.kernels.elementary import ZERO
from hepti_mqtt.kernels.jit import FLOAT, INT, INT_ARRAY, fills, floats, helper, kernel, reads
from hepti_mqtt.kernels.threads import Parts, Workers, ranges
from hepti_mqtt.kernels.tile import NR, activate, activation_of
from hepti_mqtt.kernels.weights import PackedMatrix


class Window(NamedTuple):
    """The patches of an image; compiled code reads it as a table in this order."""

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
        """Return the table for compiled code."""
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
    """Return the window of an op that reads [Y, X, C] first and writes [y, x, n]."""
    window = measured(check, op)
    check.shape(check.writes[0], (window.out_rows, window.out_columns, check.writes[0].shape[2]))
    return window


def measured(check: Check, op: Compute) -> Window:
    """Return the window of an op that reads [Y, X, C] first, with all patches that fit."""
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
    """Return the number of patches that fit into `size` rows (dimension 0), or columns (1)."""
    reach: int = (op.attrs["kernel"][dim] - 1) * op.attrs.get("dilation", (1, 1))[dim] + 1
    stride: int = op.attrs["stride"][dim]
    return max(0, (size - reach) // stride + 1)


def pooling(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> tuple[Window, Parts]:
    """Return the window of an op that pools channel by channel, and the pixels that each thread of `pool` fills.

    Raises ValueError if the op does not fit together.
    """
    check = Check.of(op, slots, 1)
    check.weights(weights, 0)
    window = window_of(check, op)
    c = window.channels
    check.that(check.writes[0].shape[2] == c, f"must write as many channels as it reads, {c}")
    return window, row_parts(window.pixels, c * window.places, pool)


def pooling_work(op: Compute, slots: Slots) -> Work:
    """Return the work of a pooling op: for each place of a patch, its values and the results are moved."""
    places, out = prod(op.attrs["kernel"]), slots[op.writes[0]]
    return Work("rowwise", nbytes=2.0 * (places + 1) * out.nbytes)


def patches_of(op: Compute, x: Array, out: SlotSpec, fill: float) -> Array:
    """Return the patches of x as [y, x, ky, kx, C], for references."""
    (ky, kx), (sy, sx) = op.attrs["kernel"], op.attrs["stride"]
    dy, dx = op.attrs.get("dilation", (1, 1))
    top, left, bottom, right = op.attrs["pad"]
    padded = np.pad(x.astype(np.float64), ((top, bottom), (left, right), (0, 0)), constant_values=fill)
    y, across, _ = out.shape
    patches = np.empty((y, across, ky, kx, x.shape[2]))
    for i in range(y):
        for j in range(across):
            rows = slice(i * sy, i * sy + (ky - 1) * dy + 1, dy)
            patches[i, j] = padded[rows, j * sx : j * sx + (kx - 1) * dx + 1 : dx]
    return patches


class Band(NamedTuple):
    """Rows first..stop of x, with rows of zeros above and below, give `out` rows from row `origin` of a map on."""

    first: int
    stop: int
    top: int
    bottom: int
    origin: int
    out: int


def banded(check: Check, op: Compute) -> tuple[Window, tuple[Band, ...]]:
    """Return the window of an op, with the output rows of all its bands, and the bands."""
    window, (top, _, bottom, _) = measured(check, op), op.attrs["pad"]
    given = op.attrs.get("bands")
    if given is None:
        row = op.attrs.get("origin", (0, 0))[0]
        bands: tuple[Band, ...] = (Band(0, window.rows, top, bottom, row, window.out_rows),)
    else:
        check.that(top == bottom == 0, f"pad {op.attrs['pad']} must have no rows, because bands have their own")
        bands = tuple([_band(check, op, window, *band) for band in given])
        window = window._replace(out_rows=sum(band.out for band in bands))
    check.shape(check.writes[0], (window.out_rows, window.out_columns, check.writes[0].shape[2]))
    return window, bands


def _band(check: Check, op: Compute, window: Window, *given: int) -> Band:
    check.that(len(given) == 5, f"band {given} must have 5 numbers")
    first, stop, top, bottom, origin = given
    check.that(0 <= first <= stop <= window.rows, f"band {given} must lie within the {window.rows} rows of the map")
    check.that(min(top, bottom, origin) >= 0, f"band {given} must have no number below 0")
    return Band(first, stop, top, bottom, origin, fitting(op, 0, stop - first + top + bottom))


def lines(bands: Sequence[Band], stride: int) -> NDArray[np.int64]:
    """Return, for each output row, (the first row of x in its window, the first row of its band, the band's end)."""
    rows = [(b.first + i * stride - b.top, b.first, b.stop) for b in bands for i in range(b.out)]
    return np.asarray(rows, np.int64).reshape(-1, 3)


def patches_of_bands(op: Compute, x: Array, out: SlotSpec) -> Array:
    """Return the patches of x, band after band; for references."""
    if "bands" not in op.attrs:
        return patches_of(op, x, out, 0.0)
    patches, (_, left, _, right) = [], op.attrs["pad"]
    for first, stop, top, bottom, _ in op.attrs["bands"]:
        alone = op._replace(attrs={**op.attrs, "pad": (top, left, bottom, right)})
        rows = fitting(op, 0, stop - first + top + bottom)
        patches.append(patches_of(alone, x[first:stop], SlotSpec((rows, *out.shape[1:])), 0.0))
    return np.concatenate(patches)


_LANES: Final = TILE.lanes
# Columns of the table of units: address of weights, address of biases, first column of out, columns, those of the panel
# before the first one, bytes from a pixel to its first channel.
WEIGHTS, BIAS, COLUMN, VALID, SHIFT, OFFSET = range(6)
# Values of `how`, the options of a convolution for compiled code.
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
    """The groups of a convolution: their number, and the channels of x and columns of W of each."""

    number: int
    channels: int
    columns: int


def groups_of(check: Check, op: Compute, window: Window, n: int) -> Groups:
    """Return the groups of a convolution to n columns; ValueError if channels or columns cannot be divided."""
    count = int(op.attrs.get("groups", 1))
    check.that(count >= 1, f"groups {count} must be >= 1")
    divides = window.channels % count == n % count == 0
    check.that(divides, f"groups {count} must divide {window.channels} channels and {n} columns")
    return Groups(count, window.channels // count, n // count)


def units_of(matrix: PackedMatrix, bias: NDArray[np.float32], groups: Groups, depthwise: bool) -> NDArray[np.int64]:
    """Return the table of units: columns of one panel and one group; depthwise, of one panel."""
    units = []
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
            units.append((weights, biases + 4 * (first - shift), first, end - first, shift, 4 * offset))
            first = end
    return np.asarray(units, np.int64)


_MINUS_INF: Final = np.float32(-np.inf)


_LARGEST, _MEAN, _MEAN_WITH_PAD = range(3)


@kernel(reads(float32, 1), fills(float32, 2), INT_ARRAY, INT, INT, INT, part=2, maps=True)
def _pool2d(x: Any, out: Any, window: Any, mode: int, first: int, stop: int) -> None:
    """Fill rows first..stop of out [y x, C] with the largest values or means of patches of the image x [Y X C]."""
    height, width, channels = window[0], window[1], window[2]
    ky, kx, across, dy, dx = window[3], window[4], window[10], window[11], window[12]
    for pixel in range(first, stop):
        result = floats(out.ctypes.data + 4 * channels * pixel, channels)
        for c in range(channels):
            result[c] = _MINUS_INF if mode == _LARGEST else ZERO
        y0 = pixel // across * window[5] - window[7]
        x0 = pixel % across * window[6] - window[8]
        count = 0
        for i in range(ky):
            for j in range(kx):
                y, column = y0 + i * dy, x0 + j * dx
                if y < 0 or y >= height or column < 0 or column >= width:
                    continue
                count += 1
                values = floats(x.ctypes.data + 4 * channels * (y * width + column), channels)
                if mode == _LARGEST:
                    for c in range(channels):
                        # NaN is above everything, and nothing is above NaN; `or` would be a branch for each channel.
                        is_above = (values[c] > result[c]) | np.isnan(values[c])
                        result[c] = values[c] if is_above else result[c]
                else:
                    for c in range(channels):
                        result[c] += values[c]
        if mode != _LARGEST:
            by = np.float32(1.0) / np.float32(ky * kx if mode == _MEAN_WITH_PAD else max(count, 1))
            for c in range(channels):
                result[c] *= by


def _bind_pool2d(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    window, parts = pooling(op, slots, weights, pool)
    mode = _LARGEST if op.kernel == "max_pool2d" else _MEAN_WITH_PAD if op.attrs["count_pad"] else _MEAN
    (x,), (out,) = operands(op, slots)
    c = window.channels
    return pool.bind(_pool2d, parts)(x.reshape(-1), out.reshape(-1, c), window.table(), mode) if c else []


def _reference_max_pool2d(op: Compute, slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
    return [patches_of(op, reads[0], slots[op.writes[0]], -np.inf).max(axis=(2, 3))]


def _reference_average_pool2d(op: Compute, slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
    out = slots[op.writes[0]]
    counted = np.ones(reads[0].shape)
    inside = patches_of(op, counted, out, 0.0).sum(axis=(2, 3))
    counts = np.prod(op.attrs["kernel"]) if op.attrs["count_pad"] else np.maximum(inside, 1)
    return [patches_of(op, reads[0], out, 0.0).sum(axis=(2, 3)) / counts]


MAX_POOL2D: Final = Kernel("max_pool2d", _bind_pool2d, _reference_max_pool2d, pooling_work, later=True)
AVERAGE_POOL2D: Final = Kernel("average_pool2d", _bind_pool2d, _reference_average_pool2d, pooling_work, later=True)


# Channels of a block of sums that stays in the first-level cache.
_CHANNELS: Final = 1024


@kernel(reads(float32, 3), fills(float32, 2), FLOAT, INT, INT, part=2, maps=True)
def _global_sum(x: Any, out: Any, scale: Any, first: int, stop: int) -> None:
    """Fill channels first..stop of out [1, C]."""
    channels = x.shape[2]
    of_row = np.empty(min(_CHANNELS, stop - first), np.float32)
    for low in range(first, stop, _CHANNELS):
        count = min(_CHANNELS, stop - low)
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


def _bind_global_sum(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    check = Check.of(op, slots, 1)
    check.weights(weights, 0)
    check.that(len(check.reads[0].shape) == 3, "x must have 3 dimensions")
    y, x, c = check.reads[0].shape
    check.shape(check.writes[0], (1, c))
    scale = np.float32(op.attrs.get("scale", 1.0))
    parts = ranges(c, min(pool.threads, 1 + y * x * c // ROWWISE_GRAIN), y * x * c)
    if not c:
        return []
    (maps,), (out,) = operands(op, slots)
    return pool.bind(_global_sum, parts)(maps, out, scale)


def _reference_global_sum(op: Compute, _slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
    return [op.attrs.get("scale", 1.0) * reads[0].astype(np.float64).sum(axis=(0, 1))[None]]


GLOBAL_SUM: Final = Kernel("global_sum", _bind_global_sum, _reference_global_sum, rowwise, later=True)


@kernel(reads(float32, 2), reads(float32, 2), fills(float32, 2), INT, INT, INT, part=2, maps=True)
def _scale_map(row: Any, x: Any, out: Any, activation: int, first: int, stop: int) -> None:
    """Fill pixels first..stop of out [y x, c] with activation(row [1, c]) * x."""
    factors = np.empty(row.shape[1], np.float32)
    for c in range(len(factors)):
        factors[c] = row[0, c]
    activate(factors, activation)
    for pixel in range(first, stop):
        for c in range(len(factors)):
            out[pixel, c] = factors[c] * x[pixel, c]


def _bind_scale_map(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    check = Check.of(op, slots, 2)
    check.weights(weights, 0)
    check.that(len(check.reads[1].shape) == 3, "x must have 3 dimensions")
    y, x, c = check.reads[1].shape
    check.shape(check.reads[0], (1, c))
    check.shape(check.writes[0], (y, x, c))
    activation, parts = activation_of(check, op.attrs["activation"]), row_parts(y * x, c, pool)
    if not parts or not c:
        return []
    (row, maps), (out,) = operands(op, slots)
    return pool.bind(_scale_map, parts)(row, maps.reshape(-1, c), out.reshape(-1, c), activation)


def _reference_scale_map(op: Compute, _slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
    row, x = (part.astype(np.float64) for part in reads)
    return [REFERENCE_ACTIVATIONS[op.attrs["activation"]](row) * x]


SCALE_MAP: Final = Kernel("scale_map", _bind_scale_map, _reference_scale_map, rowwise, later=True)
