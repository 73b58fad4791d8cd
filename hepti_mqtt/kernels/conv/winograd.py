"""Convolution 3 x 3 by Winograd's F(2x2, 3x3) (`transforms`): four outputs from 16 products over the channels, not 36.

Tiles of 2 x 2 outputs lie where rows and columns of the whole map are even: the op says with its attribute `origin`
where on the whole map its first output lies, and with `whole` how many rows and columns that has. A part of the map
that begins at an odd row or column has the one half of its first tiles, and so has each of several bands. An output is
made of its own window alone, in the same order wherever it is made: how a map is divided changes no bit. Tiles are
transformed in blocks, over all bands, and weights for each block in pieces of channels that stay near.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
from numba import float32
from numpy.typing import NDArray

from hepti_mqtt.kernels.conv.bands import Band
from hepti_mqtt.kernels.conv.transforms import (
    OUTPUTS,
    PRODUCTS,
    outputs_transformed,
    pixels_transformed,
    sums_transformed,
    weights_transformed,
)
from hepti_mqtt.kernels.conv.units import BIAS, BOUNDS, COLUMN, IN_REGISTERS, SHIFT, VALID, WEIGHTS, finish_rows
from hepti_mqtt.kernels.conv.windows import Window
from hepti_mqtt.kernels.gemm.tile import MR, NR, panel_of_rows
from hepti_mqtt.kernels.machine.isa import TILE
from hepti_mqtt.kernels.machine.jit import INT, INT_ARRAY, TABLE, fills, helper, kernel, reads
from hepti_mqtt.program import Work

# Tiles of a block, and channels of a piece of transformed weights [16, PIECE, NR].
TILES: Final = 192
PIECE: Final = 128
# Floats of a cache line. What is written for each of the 16 products lies so much further apart than it is long: else
# the 16 places of a tile fall into the same few sets of the first-level cache, and drive each other out.
_LINE: Final = 16
# Fewer channels cost more in transforms than they save in products; so do weights for fewer outputs, and with a whole
# map of fewer, shares of it have so few that nothing is gained.
LEAST_CHANNELS: Final = 32
LEAST_PIXELS: Final = 28 * 28
_LANES: Final = TILE.lanes
# Channels come in whole vectors of every instruction set, so that the same layers are made in this way on all.
_GRAIN: Final = 16
# What `winograd` reads of the grid of tiles: tiles of a row, and how many columns of the first one lie before the first
# output.
_ACROSS, _BEFORE = range(2)
# What it reads of a row of tiles: the first row of x that it sees, rows low..high of x that belong to its band, its
# first row of outputs, and rows from..to of those that its band has.
_SEES, _LOW, _HIGH, _MAKES, _FROM, _TO = range(6)


def fits(window: Window, groups: int, attrs: Mapping[str, Any]) -> bool:
    """Return whether a convolution with these attributes is made in this way; the same for every part of a map."""
    if prod(attrs.get("whole", (window.out_rows, window.out_columns))) < LEAST_PIXELS:
        return False
    square = window.kernel_rows == window.kernel_columns == 3
    step = (window.stride_rows, window.stride_columns, window.dilation_rows, window.dilation_columns)
    channels = window.channels
    return square and step == (1, 1, 1, 1) and groups == 1 and channels >= LEAST_CHANNELS and channels % _GRAIN == 0


class Grid(NamedTuple):
    """Tiles over bands of a map: how many, what `winograd` reads of them all, and of each row of tiles."""

    number: int
    tiles: NDArray[np.int64]
    rows: NDArray[np.int64]


def grid(window: Window, bands: Sequence[Band], column: int) -> Grid:
    """Return the tiles over bands whose first outputs are in a column of the whole map."""
    rows, made, before = [], 0, column % 2
    for band in bands:
        above = band.origin % 2
        for down in range(-above, band.out, 2):
            sees, out = band.first - band.top + down, made + down
            rows.append((sees, band.first, band.stop, out, made, made + band.out))
        made += band.out
    across = -(-(before + window.out_columns) // 2)
    tiles = np.asarray([across, before], np.int64)
    return Grid(len(rows) * across, tiles, np.asarray(rows, np.int64).reshape(-1, 6))


def tiles_of(window: Window, bands: Sequence[Band], column: int) -> int:
    """Return how many tiles the grid over bands has."""
    down = sum(-(-(band.origin % 2 + band.out) // 2) for band in bands)
    return down * -(-(column % 2 + window.out_columns) // 2)


def winograd_work(window: Window, n: int, count: int) -> Work:
    """Return the work of a convolution to n columns: the FLOPs of its definition, priced as the product that is made.

    That is one of as many rows as tiles, over 16 matrices [C, n], whose reading is in the price of a product; the
    transforms of the map, and those of the weights, made anew for each block of tiles, are bytes moved beside it.
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
def _multiply(v: Any, channels: int, count: int, unit: Any, near: Any, none: Any) -> None:
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
    """Finish the outputs of `count` tiles from `first` on, m [16, count, NR], and copy those that are in out."""
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
def _finish_directly(m: Any, first: int, count: int, unit: Any, where: Any, limits: Any, beside: Any, out: Any) -> None:
    """Do what `_finish` does where sums are only cut to limits, in whole vectors: they never leave the registers.

    beside: an address where outputs that are not in out may go.
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
                targets[2 * i + j] = pixel if is_inside else beside
        at = m + 4 * t * NR
        outputs_transformed(at, count * NR + _LINE, unit[VALID], unit[BIAS], targets.ctypes.data, limits)


@kernel(
    reads(float32, 1),
    fills(float32, 2),
    reads(float32, 2),
    reads(float32, 1),
    TABLE,
    INT_ARRAY,
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
def winograd(
    x: Any,
    out: Any,
    residual: Any,
    zeros: Any,
    units: Any,
    window: Any,
    tiles: Any,
    rows: Any,
    how: Any,
    first_unit: int,
    last_unit: int,
    first_tile: int,
    last_tile: int,
) -> None:
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
    # Addresses are read where they are used: an array of which nothing is read any more is freed.
    for first in range(first_tile, last_tile, max(most, 1)):
        count = min(most, last_tile - first)
        nothing = np.int64(zeros.ctypes.data)
        _transform(
            np.int64(x.ctypes.data), nothing, window, (tiles, rows), first, count, table, np.int64(v.ctypes.data)
        )
        for place in range(first_unit, last_unit):
            unit, near = units[place], (np.int64(u.ctypes.data), np.int64(m.ctypes.data))
            _multiply(np.int64(v.ctypes.data), channels, count, unit, near, np.int64(zeros.ctypes.data))
            made, is_whole = np.int64(m.ctypes.data), unit[SHIFT] == 0 and unit[VALID] % _LANES == 0
            if is_whole and how[IN_REGISTERS] != 0 and residual.size == 0:
                limits, beside = np.int64(how.ctypes.data) + 8 * BOUNDS, np.int64(sums.ctypes.data)
                _finish_directly(made, first, count, unit, (window, tiles, rows, table), limits, beside, out)
            else:
                _finish(made, first, count, unit, (window, tiles, rows), how, sums, out, residual)
