"""Kernel `conv2d` of one image in f32: x, or x and residual [y, x, n] -> activation(patches @ W + b) + residual.

Patches and the attributes kernel, stride, pad (zeros beyond x) and dilation are those of `windows`; writes [y, x, n].
Attributes: activation (one of `ACTIVATIONS`), bias and residual (bool); where wanted, residual_first (bool: the
residual is added before the activation) and groups (int, 1 where absent): channels of x, and columns of W, fall into so
many groups, in order, and a column sees the channels of its group. Weights: W packed [ky kx C / groups, n], whose row
(i kx + j) C / groups + c is for pixel (i, j) and channel c of the group, and with a bias b plain [n].

Pixels are multiplied where they lie (`places`): no patch is copied. Every output is one sum over k in ascending order.
A window of 3 x 3 over many channels is computed in tiles (`winograd`), which lie on the whole map: attributes origin
(row and column of the first output on it; (0, 0) where absent) and whole (its rows and columns; where absent, those
written). Several ranges of its rows are one op with the attribute `bands` (see there). Bits depend neither on how the
map is divided, nor on the block or the thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numba import float32
from numpy.typing import NDArray

from hepti_mqtt.kernels import references
from hepti_mqtt.kernels.base import Array, Check, Kernel, Run, nothing, row_parts, rowwise
from hepti_mqtt.kernels.conv.bands import Band, banded, lines, patches_of_bands
from hepti_mqtt.kernels.conv.places import PIXELS, depthwise_tile, places_tile
from hepti_mqtt.kernels.conv.units import (
    BIAS,
    BOUNDS,
    COLUMN,
    DEPTHWISE,
    IN_REGISTERS,
    LENGTH,
    OFFSET,
    RESIDUAL_FIRST,
    SHIFT,
    VALID,
    WEIGHTS,
    finish_rows,
    groups_of,
    units_of,
)
from hepti_mqtt.kernels.conv.windows import Window
from hepti_mqtt.kernels.conv.winograd import fits, grid, tiles_of, winograd, winograd_work
from hepti_mqtt.kernels.gemm.epilogue import NONE, RELU, RELU6, activation_of
from hepti_mqtt.kernels.gemm.tile import MR, NR
from hepti_mqtt.kernels.machine.addresses import floats
from hepti_mqtt.kernels.machine.isa import TILE
from hepti_mqtt.kernels.machine.jit import INT, INT_ARRAY, TABLE, fills, helper, kernel, reads
from hepti_mqtt.kernels.machine.workers import Workers, matmul_parts
from hepti_mqtt.kernels.weights import PackedMatrix, Weight
from hepti_mqtt.program import Compute, SlotSpec, Work

# A panel is used for PIXELS pixels, in pieces [DEPTH, NR] that stay near while the tiles pass over them.
DEPTH: Final = 512
_LANES: Final = TILE.lanes
# Below so many channels a row of a patch is one piece of memory, in a copy of the map with its border.
_FEW_CHANNELS: Final = 16
# Activations that cut to low..high are done in registers.
_LIMITS: Final = {NONE: (-math.inf, math.inf), RELU: (0.0, math.inf), RELU6: (0.0, 6.0)}


@helper
def _signed(array: Any) -> Any:
    """Return the address of an array as a signed number: a difference of addresses may be negative."""
    return np.int64(array.ctypes.data)


@helper
def _find(at: int, zeros: int, where: Any, pixel: int, count: int, corners: Any, table: Any) -> None:
    """Fill table [places, PIXELS] with the addresses of the places of `count` patches from `pixel` on.

    at: address of the map; zeros: of a pixel of zeros; corners: i64 [5, PIXELS], scratch.
    """
    window, lines = where
    width, size = window[1], 4 * window[2]
    ky, kx, across, dy, dx = window[3], window[4], window[10], window[11], window[12]
    ys, xs, lows, highs, firsts = corners[0], corners[1], corners[2], corners[3], corners[4]
    down, column = pixel // across, pixel % across
    for p in range(count):
        ys[p], lows[p], highs[p] = lines[down, 0], lines[down, 1], lines[down, 2]
        xs[p] = column * window[6] - window[8]
        firsts[p] = at + size * (ys[p] * width + xs[p])
        column += 1
        if column == across:
            down, column = down + 1, 0
    for i in range(ky):
        for j in range(kx):
            row, ahead = table[i * kx + j], size * (i * dy * width + j * dx)
            for p in range(count):
                y, x = ys[p] + i * dy, xs[p] + j * dx
                is_inside = (y >= lows[p]) & (y < highs[p]) & (x >= 0) & (x < width)
                row[p] = firsts[p] + ahead if is_inside else zeros


@helper
def _multiply(
    is_depthwise: int, size: Any, at: int, places: int, weights: int, begin: Any, end: Any, offset: int
) -> None:
    """Call the tile of `size` (rows, vectors, depth); begin: (sums, their stride), end: (place, stride, finish)."""
    rows, vectors, depth = size
    start, start_stride = begin
    to, stride, finish = end
    if is_depthwise:
        depthwise_tile(rows, vectors, at, places, 1, weights, start, start_stride, to, stride, offset, finish)
    else:
        places_tile(rows, vectors, at, places, depth, weights, start, start_stride, to, stride, offset, finish)


@helper
def _beside(table: Any, first: int, count: int, unit: Any, places: int, sums: Any) -> None:
    """Fill the sums [count, NR] of a depthwise unit's channels beyond its last whole vector."""
    whole = unit[VALID] // _LANES * _LANES
    rest = unit[VALID] - whole
    bias = floats(unit[BIAS] + 4 * whole, rest)
    for i in range(count):
        total = floats(sums + 4 * (i * NR + whole), rest)
        for c in range(rest):
            total[c] = bias[c]
        for place in range(places):
            pixel = floats(table[place, first + i] + unit[OFFSET] + 4 * whole, rest)
            weight = floats(unit[WEIGHTS] + 4 * (place * NR + whole), rest)
            for c in range(rest):
                total[c] += pixel[c] * weight[c]


@kernel(
    reads(float32, 1),
    fills(float32, 2),
    reads(float32, 2),
    reads(float32, 1),
    TABLE,
    INT_ARRAY,
    TABLE,
    INT_ARRAY,
    INT,
    INT,
    INT,
    INT,
    part=4,
    maps=True,
)
def _conv2d(
    x: Any,
    out: Any,
    residual: Any,
    zeros: Any,
    units: Any,
    window: Any,
    lines: Any,
    how: Any,
    first_unit: int,
    last_unit: int,
    first_pixel: int,
    last_pixel: int,
) -> None:
    """Fill the columns of some units in some pixels of out [y x, n]."""
    n, places, length, is_depthwise = out.shape[1], window[3] * window[4], how[LENGTH], how[DEPTHWISE]
    table, corners = np.empty((places, PIXELS), np.int64), np.empty((5, PIXELS), np.int64)
    sums = np.empty(PIXELS * NR, np.float32)
    finish = np.empty(3, np.int64)
    finish_at, out_at, sums_at, table_at = _signed(finish), _signed(out), _signed(sums), _signed(table)
    map_at, zeros_at = _signed(x), _signed(zeros)
    finish[0] = how[BOUNDS]
    finish[1] = _signed(residual) - out_at if residual.size > 0 else 0
    finish[2] = how[RESIDUAL_FIRST]
    # Some places at once, or some channels of one.
    most = min(length, DEPTH)
    at_once = places if is_depthwise else max(1, DEPTH // max(length, 1))
    for block in range(first_pixel, last_pixel, PIXELS):
        pixels = min(PIXELS, last_pixel - block)
        tiles = -(-pixels // MR)
        _find(map_at, zeros_at, (window, lines), block, pixels, corners, table)
        for u in range(first_unit, last_unit):
            unit = units[u]
            width = unit[SHIFT] + unit[VALID]
            is_whole = unit[SHIFT] == 0 and width % _LANES == 0
            vectors = width // _LANES if is_depthwise else -(-width // _LANES)
            direct = how[IN_REGISTERS] != 0 and is_whole
            for place in range(0, places, at_once):
                count = min(at_once, places - place)
                for low in range(0, max(length, 1), max(most, 1)):
                    depth = min(most, length - low)
                    begins, ends = place + low == 0, place + count == places and low + depth == length
                    weights = unit[WEIGHTS] + 4 * NR * (place * length + low)
                    offset = unit[OFFSET] + 4 * low
                    for t in range(tiles):
                        i = t * pixels // tiles
                        rows = (t + 1) * pixels // tiles - i
                        to, stride = sums_at + 4 * i * NR, NR
                        start, start_stride = (unit[BIAS], 0) if begins else (to, NR)
                        done, at = 0, table_at + 8 * (place * PIXELS + i)
                        if ends and direct:
                            to, stride = out_at + 4 * ((block + i) * n + unit[COLUMN]), n
                            done = finish_at
                        size, begin, end = (rows, vectors, depth), (start, start_stride), (to, stride, done)
                        _multiply(is_depthwise, size, at, count, weights, begin, end, offset)
                        if is_depthwise and not is_whole:
                            _beside(table, i, rows, unit, places, to)
                        if ends and not direct:
                            finish_rows(sums, i, rows, block + i, unit, how, out, residual)


@kernel(reads(float32, 3), fills(float32, 3), INT, INT, INT, INT, part=2, maps=True)
def _surround(x: Any, wide: Any, top: int, left: int, first: int, stop: int) -> None:
    """Copy rows first..stop of x to wide [.., .., C], whose border stays as it is."""
    for y in range(first, stop):
        count = x.shape[1] * x.shape[2]
        source = floats(x.ctypes.data + 4 * y * count, count)
        row = ((y + top) * wide.shape[1] + left) * x.shape[2]
        target = floats(wide.ctypes.data + 4 * row, count)
        for i in range(count):
            target[i] = source[i]


def _bind(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check = Check(op, slots)
    has_bias, has_residual = bool(op.attrs["bias"]), bool(op.attrs["residual"])
    check.count(2 if has_residual else 1)
    check.dtypes()
    check.weights(weights, 2 if has_bias else 1)
    activation = activation_of(check, op.attrs["activation"])
    window, bands = banded(check, op)
    matrix, n = check.packed(weights[0]), check.writes[0].shape[2]
    groups = groups_of(check, op, window, n)
    k = window.places * groups.channels
    check.that((matrix.rows, matrix.columns) == (k, n), f"weight {matrix.rows, matrix.columns} should be {(k, n)}")
    bias = np.zeros(len(matrix.panels) * NR, np.float32)
    if has_bias:
        bias[:n] = check.plain(weights[1], (n,))
    if has_residual:
        check.shape(check.reads[1], check.writes[0].shape)
    if not window.pixels or not n:
        return nothing
    low, high = np.asarray(_LIMITS.get(activation, (0.0, 0.0)), np.float32).view(np.int32).tolist()
    bounds = (low & 0xFFFFFFFF) | high << 32
    is_first = int(bool(op.attrs.get("residual_first", False)))
    depthwise = groups.channels == groups.columns == 1 and groups.number > 1
    how = [groups.channels, int(depthwise), activation, int(activation in _LIMITS), bounds, is_first]
    units = units_of(matrix, bias, groups, depthwise)
    made = _Convolution(matrix, bias, units, window, bands, how)
    if fits(window, groups.number, op.attrs):
        return made.run_by_winograd(has_residual, pool, op.attrs.get("origin", (0, 0))[1])
    return made.run(has_residual, pool)


class _Convolution(NamedTuple):
    """A checked convolution; its matrix and biases stay alive with it, since `units` has only addresses."""

    matrix: PackedMatrix
    bias: NDArray[np.float32]
    units: NDArray[np.int64]
    window: Window
    bands: tuple[Band, ...]
    how: list[int]

    def run(self, has_residual: bool, pool: Workers) -> Run:
        """Return its run."""
        window, bands, n = self.window, self.bands, self.matrix.columns
        how, none = np.asarray(self.how, np.int64), np.empty((0, 0), np.float32)
        zeros, units = np.zeros(max(1, window.channels), np.float32), self.units
        ragged = bool(units[-1, VALID] < NR)
        parts = matmul_parts(len(units), ragged, window.pixels, NR * self.matrix.rows, pool.threads, MR)
        is_thin = window.channels < _FEW_CHANNELS and window.kernel_columns > 1 and window.dilation_columns == 1
        surround = _surrounding(window, bands, pool) if is_thin and how[LENGTH] == window.channels > 0 else None
        if surround is not None:
            how[LENGTH] = window.kernel_columns * window.channels
            window, bands = _of_rows(window, bands)
        rows = lines(bands, window.stride_rows)
        table, alive, convolve = window.table(), self, pool.bind(_conv2d, parts)

        def run(reads: Sequence[Array], writes: Sequence[Array], _alive: _Convolution = alive) -> None:
            x = reads[0] if surround is None else surround(reads[0])
            residual = reads[1].reshape(-1, n) if has_residual else none
            convolve(x.reshape(-1), writes[0].reshape(-1, n), residual, zeros, units, table, rows, how)

        return run

    def run_by_winograd(self, has_residual: bool, pool: Workers, column: int) -> Run:
        """Return its run in tiles of 2 x 2; column: of the whole map, where its first outputs lie."""
        window, n, units = self.window, self.matrix.columns, self.units
        how, none = np.asarray(self.how, np.int64), np.empty((0, 0), np.float32)
        zeros, ragged = np.zeros(max(NR, window.channels), np.float32), bool(units[-1, VALID] < NR)
        count, tiles, rows = grid(window, self.bands, column)
        size = 16 * NR * window.channels
        parts = matmul_parts(len(units), ragged, count, size, pool.threads, MR)
        table, alive, convolve = window.table(), self, pool.bind(winograd, parts)

        def run(reads: Sequence[Array], writes: Sequence[Array], _alive: _Convolution = alive) -> None:
            residual = reads[1].reshape(-1, n) if has_residual else none
            x, out = reads[0].reshape(-1), writes[0].reshape(-1, n)
            convolve(x, out, residual, zeros, units, table, tiles, rows, how)

        return run


def _of_rows(window: Window, bands: Sequence[Band]) -> tuple[Window, tuple[Band, ...]]:
    """Return the window over a map of bands with their borders, one below the other; its places are rows of a patch."""
    reach, found, height = (window.kernel_rows - 1) * window.dilation_rows + 1, [], 0
    for band in bands:
        rows = (band.out - 1) * window.stride_rows + reach if band.out else 0
        found.append(Band(height, height + rows, 0, 0, band.origin, band.out))
        height += rows
    columns = (window.out_columns - 1) * window.stride_columns + window.kernel_columns
    return window._replace(rows=height, columns=columns, kernel_columns=1, top=0, left=0), tuple(found)


def _surrounding(window: Window, bands: Sequence[Band], pool: Workers) -> Any:
    """Return the function that copies a map into one whose bands have borders of zeros, as far as patches reach."""
    whole, places = _of_rows(window, bands)
    wide = np.zeros((whole.rows, whole.columns, whole.channels), np.float32)
    # Rows and columns that no patch reaches are not copied.
    columns, fills = whole.columns - window.left, []
    for band, place in zip(bands, places, strict=True):
        rows = min(place.stop - place.first - band.top, band.stop - band.first)
        fill = pool.bind(_surround, row_parts(max(rows, 0), window.columns * window.channels, pool))
        fills.append((fill, slice(band.first, band.stop), wide[place.first : place.stop], band.top))

    def surround(x: Array) -> Array:
        seen = x if columns >= window.columns else np.ascontiguousarray(x[:, : max(columns, 0)])
        for fill, rows, to, top in fills:
            fill(seen[rows], to, top, window.left)
        return wide

    return surround


def _reference(
    op: Compute,
    slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    weights: Sequence[Array],
) -> list[Array]:
    out = slots[op.writes[0]]
    y, x, n = out.shape
    groups, activation = op.attrs.get("groups", 1), references.ACTIVATIONS[op.attrs["activation"]]
    patches = patches_of_bands(op, reads[0], out)
    c = reads[0].shape[2] // groups
    by_group = np.moveaxis(patches.reshape(*patches.shape[:4], groups, c), 4, 0).reshape(groups, y * x, len(weights[0]))
    of_groups = weights[0].astype(np.float64).reshape(len(weights[0]), groups, n // groups).transpose(1, 0, 2)
    total = (by_group @ of_groups).transpose(1, 0, 2).reshape(out.shape)
    total += weights[1] if op.attrs["bias"] else 0.0
    if not op.attrs["residual"]:
        return [activation(total)]
    is_first = op.attrs.get("residual_first", False)
    return [activation(total + reads[1]) if is_first else activation(total) + reads[1]]


def _work(op: Compute, slots: Sequence[SlotSpec]) -> Work:
    y, x, n = slots[op.writes[0]].shape
    channels, groups = slots[op.reads[0]].shape[2], op.attrs.get("groups", 1)
    places, out = math.prod(op.attrs["kernel"]), slots[op.writes[0]]
    if channels == groups > 1:  # each channel alone: the map is read, written, and multiplied in registers
        return Work("rowwise", nbytes=rowwise(op, slots).nbytes + places * out.nbytes / 3)
    k = places * channels // groups
    window, bands = banded(Check(op, slots), op)
    if fits(window, groups, op.attrs):
        return winograd_work(window, n, tiles_of(window, bands, op.attrs.get("origin", (0, 0))[1]))
    # A product was measured with k of some hundreds: with fewer, what is written counts.
    beside = float(out.nbytes) * (2 if op.attrs["residual"] else 1)
    return Work("linear", rows=y * x, k=k, n=n, flops=2.0 * y * x * k * n, nbytes=beside)


CONV2D: Final = Kernel("conv2d", _bind, _reference, _work, later=True)
