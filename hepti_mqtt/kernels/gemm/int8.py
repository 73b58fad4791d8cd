"""The loops of `linear` over int8 weights and int8 activations; see `narrow`."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import float32, uint8

from hepti_mqtt.kernels.elementary import bits_of, from_bits
from hepti_mqtt.kernels.gemm.epilogue import NONE, activate, store
from hepti_mqtt.kernels.gemm.forms import FORMS, GROUP
from hepti_mqtt.kernels.gemm.narrow_tile import dot_tile
from hepti_mqtt.kernels.gemm.unit_tile import configure_unit, release_unit, unit_tile
from hepti_mqtt.kernels.machine.addresses import fetch_to_write, floats, octets
from hepti_mqtt.kernels.machine.isa import DOT
from hepti_mqtt.kernels.machine.jit import INT, TABLE, exact, fills, helper, kernel, reads
from hepti_mqtt.kernels.weights import BLOCK

_MR: Final = DOT.unit or FORMS["w8a8"].rows
_NR: Final = FORMS["w8a8"].width
_LANES: Final = FORMS["w8a8"].lanes

# Columns of the table of panels: addresses of codes, of their sums, scales and bias, first column of the output, and
# how many are valid.
CODES, SUMS, SCALES, BIAS, COLUMN, VALID = range(6)

# A panel is used for _CHUNKS chunks of rows of x while it is in the second-level cache. A piece of it [BLOCK, width],
# the codes of a chunk of up to _TILES tiles and their sums stay in the first while the tiles pass over them.
_TILES: Final = 3 if DOT.unit else 8
_CHUNKS: Final = 8
# The last tiles of a piece fetch the next one, a line of 64 bytes in every step; of fewer tiles, two lines.
_LINE: Final = 64
_OF_STEP: Final = 2 * _LINE if DOT.unit else _LINE
_FETCHERS: Final = _NR * GROUP // _OF_STEP

# Rows of codes that a tile may read behind the last one.
BEHIND: Final = DOT.unit

_tile: Final = unit_tile if DOT.unit else dot_tile

_LEVELS: Final = np.float32(254.0)
_TINY: Final = np.float32(1e-35)
_HALF: Final = np.float32(0.5)
_NAN: Final = np.float32(np.nan)
# Bits of infinity, of minus infinity, and of the largest number that is not below 0.
_INFINITE: Final = np.int32(0x7F800000)
_MINUS_INFINITE: Final = np.uint32(0xFF800000)
_LARGEST: Final = np.uint32(0x7FFFFFFF)
# Blocks that are quantised at a time.
_BATCH: Final = 16
# What is taken from a code of 0 to 255 so that it is what the instruction takes.
_OFFSET: Final = np.int32(128 if DOT.signed else 0)


@exact
def _step(high: Any, low: Any) -> Any:
    return high / _LEVELS - low / _LEVELS  # the difference of the two alone could be infinite


@helper
def _range(x: Any, count: int) -> Any:
    """Return the bits of the largest of `count` values and 0, and of the smallest where one is below 0.

    Bits of f32 >= 0 are ordered like the values as signed integers, above all those below 0, which as unsigned ones
    are above the others and ordered by magnitude; NaN is outermost. Integers vectorise.
    """
    top, bottom = np.int32(0), np.uint32(0)
    for i in range(count):
        bits = np.int32(bits_of(x[i]))
        top = max(top, bits)
        bottom = max(bottom, np.uint32(bits))
    return top, bottom


@helper
def _round(x: Any, codes: Any, count: int, by: Any, shift: Any) -> None:
    for i in range(count):
        codes[i] = np.uint8(np.int32(np.int32(x[i] * by + shift) - _OFFSET))


@helper
def _steps(tops: Any, bottoms: Any, scales: Any, zeros: Any, factors: Any, shifts: Any) -> None:
    """Fill what follows from the extremes of _BATCH blocks: the step (NaN if not finite), the code of 0, x -> code."""
    for j in range(_BATCH):
        top, bottom = tops[j], bottoms[j]
        finite = top < _INFINITE and bottom < _MINUS_INFINITE
        low = from_bits(np.int32(bottom)) if bottom > _LARGEST else np.float32(0)
        step = _step(from_bits(top), low) if finite else _NAN
        by = np.float32(1) / step if step > _TINY else np.float32(0)
        offset = np.int32(_HALF - low * by) if finite else np.int32(0)
        scales[j], zeros[j] = step, np.float32(offset - _OFFSET)
        factors[j], shifts[j] = by, np.float32(offset) + _HALF


@helper
def quantise(x: Any, codes: Any, scales: Any, zeros: Any, first: int, last: int) -> None:
    """Fill codes [m + BEHIND, 4 ceil(k / 4)] and scales and zeros [m, blocks] of some rows of x [m, k].

    A block that is not finite has NaN for its scale, and codes of 0. _BATCH blocks at a time, which the first-level
    cache holds: a block alone would wait for its extremes, then for the divisions that follow from them.
    """
    k, stride, per_row, whole = x.shape[1], codes.shape[1], scales.shape[1], x.shape[1] // BLOCK
    tops, bottoms = np.zeros(_BATCH, np.int32), np.zeros(_BATCH, np.uint32)
    steps, offsets = np.zeros(_BATCH, np.float32), np.zeros(_BATCH, np.float32)
    factors, shifts = np.zeros(_BATCH, np.float32), np.zeros(_BATCH, np.float32)
    # Blocks of whole rows lie side by side, of x as of the codes: no row is counted, nothing is filled up.
    even = k == per_row * BLOCK
    for batch in range(first * per_row, last * per_row, _BATCH):
        count = min(_BATCH, last * per_row - batch)
        row, block = batch // per_row, batch % per_row
        if even:
            for j in range(count):
                # By address: slices of an array count references, which costs as much as the block. And a length that
                # the compiler knows leaves no loop of single values.
                tops[j], bottoms[j] = _range(floats(x.ctypes.data + 4 * BLOCK * (batch + j), BLOCK), BLOCK)
        else:
            for j in range(count):
                at = x.ctypes.data + 4 * (row * k + block * BLOCK)
                if block < whole:
                    tops[j], bottoms[j] = _range(floats(at, BLOCK), BLOCK)
                else:
                    tops[j], bottoms[j] = _range(floats(at, k - block * BLOCK), k - block * BLOCK)
                row, block = (row + 1, 0) if block == per_row - 1 else (row, block + 1)
        _steps(tops, bottoms, steps, offsets, factors, shifts)
        row, block = batch // per_row, batch % per_row
        for j in range(count):
            scales[row, block], zeros[row, block] = steps[j], offsets[j]
            if even:
                at, out_at, valid = x.ctypes.data + 4 * BLOCK * (batch + j), BLOCK * (batch + j), BLOCK
            else:
                at, out_at = x.ctypes.data + 4 * (row * k + block * BLOCK), row * stride + block * BLOCK
                valid = min(BLOCK, k - block * BLOCK)
            values, out = floats(at, valid), octets(codes.ctypes.data + out_at, valid)
            if not steps[j] < np.inf:
                out[:] = 0
            elif valid == BLOCK:
                _round(values, out, BLOCK, factors[j], shifts[j])
            else:
                _round(values, out, valid, factors[j], shifts[j])
            if block == per_row - 1:
                for i in range(k, stride):
                    codes[row, i] = 0
                row, block = row + 1, 0
            else:
                block += 1


@kernel(reads(float32, 2), fills(uint8, 2), fills(float32, 2), fills(float32, 2), INT, INT, part=2, narrow=True)
def quantise_rows(x: Any, codes: Any, scales: Any, zeros: Any, first: int, last: int) -> None:
    """Run `quantise`."""
    quantise(x, codes, scales, zeros, first, last)


@helper
def _in_turn(turn: int, panels: int, chunks: int) -> Any:
    """Return which panel comes at a turn, and for which chunk of rows.

    All panels for the first _CHUNKS chunks, then for the next: each panel for one chunk after the other.
    """
    group = turn // (_CHUNKS * panels)
    panel, chunk = divmod(turn - group * _CHUNKS * panels, min(_CHUNKS, chunks - group * _CHUNKS))
    return panel, chunk + group * _CHUNKS


@helper
def _fetch_rows(place: int, stride: int, rows: int, valid: int) -> None:
    """Ask for the lines of `valid` values in some rows, so that storing them does not wait."""
    for row in range(place, place + rows * stride, stride):
        for line in range(row, row + 4 * valid, _LINE):
            fetch_to_write(line)


@kernel(
    reads(uint8, 2),
    INT,
    reads(float32, 2),
    reads(float32, 2),
    fills(float32, 2),
    reads(float32, 2),
    TABLE,
    INT,
    INT,
    INT,
    INT,
    INT,
    part=4,
    narrow=True,
)
def linear_int8(
    row_codes: Any,
    k: int,
    row_scales: Any,
    zeros: Any,
    out: Any,
    residual: Any,
    panels: Any,
    activation: int,
    first_panel: int,
    last_panel: int,
    first_row: int,
    last_row: int,
) -> None:
    """Fill the columns of some panels in some rows of out; row_codes, row_scales and zeros are what `quantise` fills.

    panels: [P, 6].
    """
    plain = activation == NONE and residual.size == 0
    # Aligned: a vector that lies in two lines is stored at half the speed.
    scratch = np.empty(4 * _TILES * _MR * _NR + _LINE, np.uint8)
    height = last_row - first_row
    # Tiles of nearly equal height: 7 rows as 4 + 3 keep the pipelines fuller than 6 + 1.
    tiles = -(-height // _MR)
    chunks = -(-tiles // _TILES)
    stride = row_codes.shape[1]
    out_stride, scale_stride = 4 * out.shape[1], 4 * row_scales.shape[1]
    panel_count = last_panel - first_panel
    configure_unit(k)
    for turn in range(chunks * panel_count):
        p, chunk = _in_turn(turn, panel_count, chunks)
        p += first_panel
        first_tile, last_tile = chunk * tiles // chunks, (chunk + 1) * tiles // chunks
        first = first_tile * height // tiles
        column, valid = panels[p, COLUMN], panels[p, VALID]
        vectors = -(-valid // _LANES)
        direct = plain and valid == vectors * _LANES
        # Here, not before the loop: an array of which nothing is read any more is freed.
        sums = -(-scratch.ctypes.data // _LINE) * _LINE
        for low in range(0, max(k, 1), BLOCK):
            depth = min(BLOCK, k - low)
            steps = -(-depth // GROUP)
            final = low + depth >= k
            block = low // BLOCK
            codes = panels[p, CODES] + low * _NR
            of_columns = panels[p, SCALES] + 4 * block * _NR
            of_codes = panels[p, SUMS] + 4 * block * _NR
            for t in range(first_tile, last_tile):
                i = t * height // tiles
                count = (t + 1) * height // tiles - i
                row, i = first_row + i, i - first
                x = row_codes.ctypes.data + row * stride + low
                of_rows = row_scales.ctypes.data + row * scale_stride + 4 * block
                zero = zeros.ctypes.data + row * scale_stride + 4 * block
                c, c_stride = sums + 4 * i * _NR, 4 * _NR
                begin, begin_stride = (c, c_stride) if low > 0 else (panels[p, BIAS], 0)
                if final:
                    place = out.ctypes.data + row * out_stride + 4 * column
                    _fetch_rows(place, out_stride, count, valid)
                    if direct:
                        c, c_stride = place, out_stride
                share = t - last_tile + _FETCHERS
                ahead = codes + steps * GROUP * _NR + share * steps * _OF_STEP
                fetch = _OF_STEP if share >= 0 else 0
                _tile(
                    count, vectors, x, stride, steps, codes, of_rows, zero, scale_stride, of_columns, of_codes,
                    begin, begin_stride, c, c_stride, ahead, fetch
                )  # fmt: skip
                if final and not direct:
                    tile = floats(c, count * _NR)
                    activate(tile, activation)
                    store(tile, _NR, row, count, out, residual, column, valid)
    release_unit()


@kernel(
    reads(float32, 2),
    fills(float32, 2),
    reads(float32, 2),
    TABLE,
    INT,
    narrow=True,
)
def linear_w8a8(x: Any, out: Any, residual: Any, panels: Any, activation: int) -> None:
    """Quantise x and fill its rows of out, in one call; see `linear_int8`."""
    m, k = x.shape
    blocks = max(1, -(-k // BLOCK))
    codes = np.empty((m + BEHIND, GROUP * -(-k // GROUP)), np.uint8)
    scales, zeros = np.empty((m, blocks), np.float32), np.empty((m, blocks), np.float32)
    quantise(x, codes, scales, zeros, 0, m)
    linear_int8(codes, k, scales, zeros, out, residual, panels, activation, 0, len(panels), 0, m)
