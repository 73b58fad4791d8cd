"""Kernel `conv2d` of one image in f32: x, or x and residual [y, x, n] -> activation(patches @ W + b) + residual.

Patches and the attributes kernel, stride, pad (zeros beyond x), dilation and bands are those of `windows`; writes
[y, x, n]. Attributes: activation (one of `ACTIVATIONS`), bias and residual (bool); optional residual_first (bool: add
the residual before the activation) and groups (int, default 1): channels of x and columns of W fall into this many
groups, in order; a column uses the channels of its group. Weights: W packed [ky kx C / groups, n], row
(i kx + j) C / groups + c for pixel (i, j) and channel c of the group, and with a bias b plain [n].

Pixels are multiplied in place (`places_tile`): no patch is copied. Every output is one sum over k in ascending order.

A window of 3 x 3 over many channels is computed by Winograd's F(2x2, 3x3): four outputs from 16 products over the
channels instead of 36. Its tiles of 2 x 2 outputs begin at even rows and columns of the whole map: attributes origin
(row and column of the first output on it, default (0, 0)) and whole (its rows and columns, default those written). A
part that begins at an odd row or column computes half of its first tiles. An output depends on its own window, in one
order: bits depend neither on how the map is divided, nor on the block or the thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
from numba import float32
from numpy.typing import NDArray

from hepti_mqtt.core.program import Compute, Work
from hepti_mqtt.kernels.base import (
    REFERENCE_ACTIVATIONS,
    Array,
    Arrays,
    Check,
    Kernel,
    Slots,
    Weights,
    row_parts,
    rowwise,
)
from hepti_mqtt.kernels.calls import Calls, Operand, ProductArrays, operands, scratch
from hepti_mqtt.kernels.conv_tile import (
    OUTPUTS,
    PIXELS,
    PRODUCTS,
    depthwise_tile,
    outputs_transformed,
    pixels_transformed,
    places_tile,
    sums_transformed,
    weights_transformed,
)
from hepti_mqtt.kernels.cpu import TILE
from hepti_mqtt.kernels.elementary import ZERO
from hepti_mqtt.kernels.jit import INT, INT_ARRAY, TABLE, fills, floats, helper, kernel, reads
from hepti_mqtt.kernels.threads import Workers, matmul_parts
from hepti_mqtt.kernels.tile import MR, NONE, NR, RELU, RELU6, activation_of, panel_of_rows
from hepti_mqtt.kernels.weights import PackedMatrix
from hepti_mqtt.kernels.windows import (
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
    Band,
    Window,
    banded,
    finish_rows,
    groups_of,
    lines,
    patches_of_bands,
    units_of,
)

# Tiles of a block, and channels of a piece of transformed weights [16, PIECE, NR].
TILES: Final = 192
PIECE: Final = 128
# Floats of a cache line, the gap between the arrays of the 16 products: without it the 16 places of a tile fall into
# the same few sets of the first-level cache and evict each other.
_LINE: Final = 16
# Fewer channels cost more in transforms than they save in products; so do weights for fewer outputs, and with a whole
# map of fewer, shares of it have so few that nothing is gained.
LEAST_CHANNELS: Final = 32
LEAST_PIXELS: Final = 28 * 28
_LANES: Final = TILE.lanes
# Channels come in whole vectors of every instruction set, so that all of them choose Winograd for the same layers.
_GRAIN: Final = 16
# Values of a grid of tiles for `winograd`: tiles of a row, and columns of the first tile before the first output.
_ACROSS, _BEFORE = range(2)
# Columns of the table of rows of tiles: first row of x, rows low..high of x of its band, first row of outputs, rows
# from..to of outputs of its band.
_SEES, _LOW, _HIGH, _MAKES, _FROM, _TO = range(6)


def fits(window: Window, groups: int, attrs: Mapping[str, Any]) -> bool:
    """Return whether Winograd's method computes a convolution; equal for every part of a map."""
    if prod(attrs.get("whole", (window.out_rows, window.out_columns))) < LEAST_PIXELS:
        return False
    square = window.kernel_rows == window.kernel_columns == 3
    step = (window.stride_rows, window.stride_columns, window.dilation_rows, window.dilation_columns)
    channels = window.channels
    return square and step == (1, 1, 1, 1) and groups == 1 and channels >= LEAST_CHANNELS and channels % _GRAIN == 0


class Grid(NamedTuple):
    """Tiles over bands of a map."""

    number: int
    #: [2]: `_ACROSS`, `_BEFORE`
    tiles: NDArray[np.int64]
    #: of each row of tiles [rows, 6]
    rows: NDArray[np.int64]


def grid(window: Window, bands: Sequence[Band], column: int) -> Grid:
    """Return the tiles over bands; column: of the whole map, of the first outputs."""
    rows, begin, before = [], 0, column % 2
    for band in bands:
        above = band.origin % 2
        for down in range(-above, band.out, 2):
            first, out = band.first - band.top + down, begin + down
            rows.append((first, band.first, band.stop, out, begin, begin + band.out))
        begin += band.out
    across = -(-(before + window.out_columns) // 2)
    tiles = np.asarray([across, before], np.int64)
    return Grid(len(rows) * across, tiles, np.asarray(rows, np.int64).reshape(-1, 6))


def tiles_of(window: Window, bands: Sequence[Band], column: int) -> int:
    """Return the number of tiles over bands."""
    down = sum(-(-(band.origin % 2 + band.out) // 2) for band in bands)
    return down * -(-(column % 2 + window.out_columns) // 2)


def winograd_work(window: Window, n: int, count: int) -> Work:
    """Return the work of a convolution to n columns: the FLOPs of its definition, priced as the products of tiles.

    These have a row for each tile, over 16 matrices [C, n]; a product's price includes reading them. Bytes moved: the
    transforms of the map, and those of the weights for each block of tiles.
    """
    c = window.channels
    values = count * (c + n) * (PRODUCTS + OUTPUTS)
    values += -(-count // TILES) * PRODUCTS * c * n
    flops = 2.0 * window.pixels * window.places * c * n
    return Work("linear", rows=count, k=PRODUCTS * c, n=n, flops=flops, nbytes=4.0 * values)


@helper
def _transform(at: Any, zeros: Any, window: Any, grid: Any, first: int, count: int, table: Any, v: Any) -> None:
    """Fill v [16, count, C] with the transforms of `count` tiles from `first` on of the map at an address."""
    tiles, rows = grid
    width, channels = window[1], window[2]
    for t in range(count):
        down = (first + t) // tiles[_ACROSS]
        y0, low, high = rows[down, _SEES], rows[down, _LOW], rows[down, _HIGH]
        x0 = (first + t) % tiles[_ACROSS] * 2 - tiles[_BEFORE] - window[8]
        for i in range(4):
            for j in range(4):
                y, x = y0 + i, x0 + j
                is_inside = (y >= low) & (y < high) & (x >= 0) & (x < width)
                table[4 * i + j] = at + 4 * channels * (y * width + x) if is_inside else zeros
        pixels_transformed(table.ctypes.data, channels, v + 4 * t * channels, count * channels + _LINE)


@helper
def _multiply_tiles(v: Any, channels: int, count: int, unit: Any, near: Any, none: Any) -> None:
    """Fill m [16, count, NR] with v [16, count, C] times the transformed columns of a unit; near: u, m, by address."""
    u, m = near
    vectors, tiles = -(-unit[VALID] // _LANES), -(-count // MR)
    for low in range(0, channels, PIECE):
        depth = min(PIECE, channels - low)
        weights_transformed(unit[WEIGHTS] + 4 * NR * low, channels * NR, depth * NR, u, depth * NR + _LINE)
        for product in range(PRODUCTS):
            for t in range(tiles):
                i = t * count // tiles
                rows = (t + 1) * count // tiles - i
                left = v + 4 * (product * (count * channels + _LINE) + i * channels + low)
                to = m + 4 * (product * (count * NR + _LINE) + i * NR)
                start, stride = (to, NR) if low > 0 else (none, 0)
                panel_of_rows(
                    rows, vectors, left, channels, depth, u + 4 * product * (depth * NR + _LINE), start, stride, to, NR
                )


@helper
def _finish(
    m: Any, first: int, count: int, unit: Any, where: Any, how: Any, sums: Any, out: Any, residual: Any
) -> None:
    """Finish the outputs of `count` tiles from `first` on, m [16, count, NR], and copy outputs inside out."""
    window, tiles, rows = where
    width = -(-(unit[SHIFT] + unit[VALID]) // _LANES) * _LANES
    for t in range(count):
        down = (first + t) // tiles[_ACROSS]
        y0, low, high = rows[down, _MAKES], rows[down, _FROM], rows[down, _TO]
        x0 = (first + t) % tiles[_ACROSS] * 2 - tiles[_BEFORE]
        at = m + 4 * t * NR
        sums_transformed(at, count * NR + _LINE, width, unit[BIAS], sums.ctypes.data, NR)
        left, right = max(-x0, 0), min(window[10] - x0, 2)
        for i in range(2):
            if low <= y0 + i < high:
                pixel = (y0 + i) * window[10] + x0 + left
                finish_rows(sums, 2 * i + left, right - left, pixel, unit, how, out, residual)


@helper
def _finish_directly(m: Any, first: int, count: int, unit: Any, where: Any, limits: Any, spare: Any, out: Any) -> None:
    """Compute `_finish` for whole vectors that are only cut to limits: sums stay in registers.

    spare: address for outputs beyond out.
    """
    window, tiles, rows, targets = where
    n = out.shape[1]
    for t in range(count):
        down = (first + t) // tiles[_ACROSS]
        y0, low, high = rows[down, _MAKES], rows[down, _FROM], rows[down, _TO]
        x0 = (first + t) % tiles[_ACROSS] * 2 - tiles[_BEFORE]
        for i in range(2):
            for j in range(2):
                y, x = y0 + i, x0 + j
                is_inside = (y >= low) & (y < high) & (x >= 0) & (x < window[10])
                pixel = np.int64(out.ctypes.data) + 4 * ((y * window[10] + x) * n + unit[COLUMN])
                targets[2 * i + j] = pixel if is_inside else spare
        at = m + 4 * t * NR
        outputs_transformed(at, count * NR + _LINE, unit[VALID], unit[BIAS], targets.ctypes.data, limits)


@kernel(
    reads(float32, 1), fills(float32, 2), reads(float32, 2), reads(float32, 1), TABLE, INT_ARRAY, INT_ARRAY, TABLE,
    INT_ARRAY, INT, INT, INT, INT, part=4, maps=True,
)  # fmt: skip
def winograd(
    x: Any, out: Any, residual: Any, zeros: Any, units: Any, window: Any, tiles: Any, rows: Any, how: Any,
    first_unit: int, last_unit: int, first_tile: int, last_tile: int,
) -> None:  # fmt: skip
    """Fill the columns of some units in the outputs [y x, n] of some tiles."""
    channels = window[2]
    blocks = -(-(last_tile - first_tile) // TILES)
    most = -(-(last_tile - first_tile) // max(blocks, 1))
    v, u = (
        np.empty(PRODUCTS * (most * channels + _LINE), np.float32),
        np.empty(PRODUCTS * (PIECE * NR + _LINE), np.float32),
    )
    m, sums = np.empty(PRODUCTS * (most * NR + _LINE), np.float32), np.empty(OUTPUTS * NR, np.float32)
    table = np.empty(PRODUCTS, np.int64)
    # Addresses are read at their use: Numba frees an array after its last use.
    for first in range(first_tile, last_tile, max(most, 1)):
        count = min(most, last_tile - first)
        nothing = np.int64(zeros.ctypes.data)
        _transform(
            np.int64(x.ctypes.data), nothing, window, (tiles, rows), first, count, table, np.int64(v.ctypes.data)
        )
        for place in range(first_unit, last_unit):
            unit, near = units[place], (np.int64(u.ctypes.data), np.int64(m.ctypes.data))
            _multiply_tiles(np.int64(v.ctypes.data), channels, count, unit, near, np.int64(zeros.ctypes.data))
            products, is_whole = np.int64(m.ctypes.data), unit[SHIFT] == 0 and unit[VALID] % _LANES == 0
            if is_whole and how[IN_REGISTERS] != 0 and residual.size == 0:
                limits, spare = np.int64(how.ctypes.data) + 8 * BOUNDS, np.int64(sums.ctypes.data)
                _finish_directly(products, first, count, unit, (window, tiles, rows, table), limits, spare, out)
            else:
                _finish(products, first, count, unit, (window, tiles, rows), how, sums, out, residual)


# A panel is used for PIXELS pixels, in pieces [DEPTH, NR] that stay in the cache for all tiles.
DEPTH: Final = 512
# With fewer channels the map is copied with its border, so that a row of a patch is contiguous.
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
def _rest(table: Any, first: int, count: int, unit: Any, places: int, sums: Any) -> None:
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
    reads(float32, 1), fills(float32, 2), reads(float32, 2), reads(float32, 1), TABLE, INT_ARRAY, TABLE, INT_ARRAY,
    INT, INT, INT, INT, part=4, maps=True,
)  # fmt: skip
def _conv2d(
    x: Any, out: Any, residual: Any, zeros: Any, units: Any, window: Any, lines: Any, how: Any, first_unit: int,
    last_unit: int, first_pixel: int, last_pixel: int,
) -> None:  # fmt: skip
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
                            _rest(table, i, rows, unit, places, to)
                        if ends and not direct:
                            finish_rows(sums, i, rows, block + i, unit, how, out, residual)


@kernel(reads(float32, 3), fills(float32, 3), INT, INT, INT, INT, part=2, maps=True)
def _surround(x: Any, wide: Any, top: int, left: int, first: int, stop: int) -> None:
    """Fill rows first..stop of wide [.., .., C] with x, from row `top` and column `left` on, and zeros around it."""
    columns, channels = min(x.shape[1], wide.shape[1] - left), x.shape[2]
    for row in range(first, stop):
        target = floats(wide.ctypes.data + 4 * row * wide.shape[1] * channels, wide.shape[1] * channels)
        target[:] = ZERO
        y = row - top
        if 0 <= y < x.shape[0]:
            source = floats(x.ctypes.data + 4 * y * x.shape[1] * channels, columns * channels)
            for i in range(len(source)):
                target[left * channels + i] = source[i]


def _bind(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    has_bias, has_residual = bool(op.attrs["bias"]), bool(op.attrs["residual"])
    check = Check.of(op, slots, 2 if has_residual else 1)
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
        return []
    low, high = np.asarray(_LIMITS.get(activation, (0.0, 0.0)), np.float32).view(np.int32).tolist()
    bounds = (low & 0xFFFFFFFF) | high << 32
    is_first = int(bool(op.attrs.get("residual_first", False)))
    depthwise = groups.channels == groups.columns == 1 and groups.number > 1
    how = [groups.channels, int(depthwise), activation, int(activation in _LIMITS), bounds, is_first]
    units = units_of(matrix, bias, groups, depthwise)
    given, (out,) = operands(op, slots)
    residual = given[1].reshape(-1, n) if has_residual else np.empty((0, 0), np.float32)
    arrays = ProductArrays(given[0], out.reshape(-1, n), residual)
    convolution = _Convolution(matrix, bias, units, window, bands, how)
    if fits(window, groups.number, op.attrs):
        return convolution.by_winograd(arrays, pool, op.attrs.get("origin", (0, 0))[1])
    return convolution.direct(arrays, pool)


class _Convolution(NamedTuple):
    """A checked convolution; owns its matrix and biases, because `units` has only addresses."""

    matrix: PackedMatrix
    bias: NDArray[np.float32]
    units: NDArray[np.int64]
    window: Window
    bands: tuple[Band, ...]
    how: list[int]

    def direct(self, arrays: ProductArrays, pool: Workers) -> Calls:
        """Return the calls of the direct method."""
        window, bands, how = self.window, self.bands, np.asarray(self.how, np.int64)
        zeros, units = np.zeros(max(1, window.channels), np.float32), self.units
        ragged = bool(units[-1, VALID] < NR)
        parts = matmul_parts(len(units), ragged, window.pixels, NR * self.matrix.rows, pool.threads, MR)
        is_thin = window.channels < _FEW_CHANNELS and window.kernel_columns > 1 and window.dilation_columns == 1
        calls, x = Calls(), arrays.x.reshape(-1)
        if is_thin and how[LENGTH] == window.channels > 0:
            how[LENGTH] = window.kernel_columns * window.channels
            calls, x = _surrounding(arrays.x, window, bands, pool)
            window, bands = _of_rows(window, bands)
        rows, table = lines(bands, window.stride_rows), window.table()
        convolve = pool.bind(_conv2d, parts)
        return calls + convolve(x, *arrays[1:], zeros, units, table, rows, how, alive=(self,))

    def by_winograd(self, arrays: ProductArrays, pool: Workers, column: int) -> Calls:
        """Return the calls of Winograd's method; column: of the whole map, of the first outputs."""
        window, units, how = self.window, self.units, np.asarray(self.how, np.int64)
        zeros, ragged = np.zeros(max(NR, window.channels), np.float32), bool(units[-1, VALID] < NR)
        count, tiles, rows = grid(window, self.bands, column)
        size = 16 * NR * window.channels
        parts = matmul_parts(len(units), ragged, count, size, pool.threads, MR)
        x, convolve = arrays.x.reshape(-1), pool.bind(winograd, parts)
        return convolve(x, *arrays[1:], zeros, units, window.table(), tiles, rows, how, alive=(self,))


def _of_rows(window: Window, bands: Sequence[Band]) -> tuple[Window, tuple[Band, ...]]:
    """Return the window over a map of bands with borders, one below the other; its places are rows of a patch."""
    reach, placed, height = (window.kernel_rows - 1) * window.dilation_rows + 1, [], 0
    for band in bands:
        rows = (band.out - 1) * window.stride_rows + reach if band.out else 0
        placed.append(Band(height, height + rows, 0, 0, band.origin, band.out))
        height += rows
    columns = (window.out_columns - 1) * window.stride_columns + window.kernel_columns
    return window._replace(rows=height, columns=columns, kernel_columns=1, top=0, left=0), tuple(placed)


def _surrounding(x: Operand, window: Window, bands: Sequence[Band], pool: Workers) -> tuple[Calls, Operand]:
    """Return the calls that give the bands of a map the borders of zeros that patches need, and the new map."""
    whole, places = _of_rows(window, bands)
    wide, calls = scratch((whole.rows, whole.columns, whole.channels), np.float32), Calls()
    for band, place in zip(bands, places, strict=True):
        rows = row_parts(place.stop - place.first, whole.columns * window.channels, pool)
        to = wide.rows(place.first, place.stop)
        calls += pool.bind(_surround, rows)(x.rows(band.first, band.stop), to, band.top, window.left)
    return calls, wide.reshape(-1)


def _reference(op: Compute, slots: Slots, reads: Arrays, weights: Arrays) -> list[Array]:
    out = slots[op.writes[0]]
    y, x, n = out.shape
    groups, activation = op.attrs.get("groups", 1), REFERENCE_ACTIVATIONS[op.attrs["activation"]]
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


def _work(op: Compute, slots: Slots) -> Work:
    y, x, n = slots[op.writes[0]].shape
    channels, groups = slots[op.reads[0]].shape[2], op.attrs.get("groups", 1)
    places, out = math.prod(op.attrs["kernel"]), slots[op.writes[0]]
    if channels == groups > 1:  # each channel alone: the map is read, written, and multiplied in registers
        return Work("rowwise", nbytes=rowwise(op, slots).nbytes + places * out.nbytes / 3)
    k = places * channels // groups
    window, bands = banded(Check(op, slots), op)
    if fits(window, groups, op.attrs):
        return winograd_work(window, n, tiles_of(window, bands, op.attrs.get("origin", (0, 0))[1]))
    # Products are measured with k of some hundreds: with smaller k the writes count.
    nbytes = float(out.nbytes) * (2 if op.attrs["residual"] else 1)
    return Work("linear", rows=y * x, k=k, n=n, flops=2.0 * y * x * k * n, nbytes=nbytes)


CONV2D: Final = Kernel("conv2d", _bind, _reference, _work, later=True)
