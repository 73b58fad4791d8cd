"""Kernel `linear` over weights in f16 and int8; reads, weights, bias, activation and residual are those of `linear`.

f16 adds f32 products in ascending order of k. w8a32 does so within a block of `BLOCK` rows of k, and adds the blocks'
sums times their scales in ascending order; it overflows to infinity or NaN where the sum of |x| times 127 in a block
exceeds 3.4e38. w8a8 first rounds each block of a row of x to 254 steps between its smallest and largest value (0
included, so that 0 stays exact), adds products of bytes in i32 without error, and adds the blocks' sums times the
scales of column and row. Its error is at most the sum over k of |x| scale_column / 2 + |w| scale_row / 2, and f32
rounding. A row with a value that is not finite gives NaN in every column; magnitudes below 1e-35 count as 0.

Each output depends only on its row of x and its column: not on other rows, its tile or the threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32, uint8
from numpy.typing import NDArray

from hepti_mqtt.kernels.calls import Call, Calls, ProductArrays, scratch
from hepti_mqtt.kernels.cpu import DOT
from hepti_mqtt.kernels.elementary import bits_of, from_bits
from hepti_mqtt.kernels.jit import INT, TABLE, exact, fetch_to_write, fills, floats, helper, kernel, octets, reads
from hepti_mqtt.kernels.panels import BIAS, CODES, COLUMN, SCALES, SUMS, VALID, panels_of
from hepti_mqtt.kernels.quantised_tile import FORMS, GROUP, KINDS, dot_tile, widened_tile
from hepti_mqtt.kernels.threads import Workers, matmul_parts, ranges
from hepti_mqtt.kernels.tile import NONE, activate, store
from hepti_mqtt.kernels.weights import BLOCK, NarrowMatrix, blocks

F16, W8A8 = KINDS.index("f16"), KINDS.index("w8a8")
_MR_DOT: Final = FORMS["w8a8"].rows
_NR_DOT: Final = FORMS["w8a8"].width
_LANES: Final = FORMS["w8a8"].lanes

# A panel is used for _CHUNKS chunks of rows of x while it is in the second-level cache. A piece of it [BLOCK, width],
# the codes of a chunk of up to _TILES tiles and their sums stay in the first while the tiles pass over them.
_TILES: Final = 8
_CHUNKS: Final = 8
# The last tiles of a piece fetch the next one, a line of 64 bytes in every step.
_LINE: Final = 64
_FETCHERS: Final = _NR_DOT * GROUP // _LINE

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
# Subtracted from codes 0 to 255 for an instruction with signed bytes.
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
    """Fill codes [m, 4 ceil(k / 4)] and scales and zeros [m, blocks] of some rows of x [m, k].

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
    """Return the panel and the chunk of rows of a turn.

    All panels for the first _CHUNKS chunks, then for the next ones: each panel for one chunk after the other.
    """
    group = turn // (_CHUNKS * panels)
    panel, chunk = divmod(turn - group * _CHUNKS * panels, min(_CHUNKS, chunks - group * _CHUNKS))
    return panel, chunk + group * _CHUNKS


@helper
def _fetch_rows(place: int, stride: int, rows: int, valid: int) -> None:
    """Prefetch the lines of `valid` values in some rows, so that stores do not wait."""
    for row in range(place, place + rows * stride, stride):
        for line in range(row, row + 4 * valid, _LINE):
            fetch_to_write(line)


@kernel(
    reads(uint8, 2), INT, reads(float32, 2), reads(float32, 2), fills(float32, 2), reads(float32, 2), TABLE, INT, INT,
    INT, INT, INT, part=4, narrow=True,
)  # fmt: skip
def linear_int8(
    row_codes: Any, k: int, row_scales: Any, zeros: Any, out: Any, residual: Any, panels: Any, activation: int,
    first_panel: int, last_panel: int, first_row: int, last_row: int,
) -> None:  # fmt: skip
    """Fill the columns of some panels in some rows of out; row_codes, row_scales and zeros are what `quantise` fills.

    panels: the table of `panels`.
    """
    plain = activation == NONE and residual.size == 0
    # Aligned: a vector that lies in two lines is stored at half the speed.
    scratch = np.empty(4 * _TILES * _MR_DOT * _NR_DOT + _LINE, np.uint8)
    height = last_row - first_row
    # Tiles of nearly equal height: 7 rows as 4 + 3 keep the pipelines fuller than 6 + 1.
    tiles = -(-height // _MR_DOT)
    chunks = -(-tiles // _TILES)
    stride = row_codes.shape[1]
    out_stride, scale_stride = 4 * out.shape[1], 4 * row_scales.shape[1]
    panel_count = last_panel - first_panel
    for turn in range(chunks * panel_count):
        p, chunk = _in_turn(turn, panel_count, chunks)
        p += first_panel
        first_tile, last_tile = chunk * tiles // chunks, (chunk + 1) * tiles // chunks
        first = first_tile * height // tiles
        column, valid = panels[p, COLUMN], panels[p, VALID]
        vectors = -(-valid // _LANES)
        direct = plain and valid == vectors * _LANES
        # Here, not before the loop: Numba frees an array after its last use.
        sums = -(-scratch.ctypes.data // _LINE) * _LINE
        for low in range(0, max(k, 1), BLOCK):
            depth = min(BLOCK, k - low)
            steps = -(-depth // GROUP)
            final = low + depth >= k
            block = low // BLOCK
            codes = panels[p, CODES] + low * _NR_DOT
            of_columns = panels[p, SCALES] + 4 * block * _NR_DOT
            of_codes = panels[p, SUMS] + 4 * block * _NR_DOT
            for t in range(first_tile, last_tile):
                i = t * height // tiles
                count = (t + 1) * height // tiles - i
                row, i = first_row + i, i - first
                x = row_codes.ctypes.data + row * stride + low
                of_rows = row_scales.ctypes.data + row * scale_stride + 4 * block
                zero = zeros.ctypes.data + row * scale_stride + 4 * block
                c, c_stride = sums + 4 * i * _NR_DOT, 4 * _NR_DOT
                begin, begin_stride = (c, c_stride) if low > 0 else (panels[p, BIAS], 0)
                if final:
                    place = out.ctypes.data + row * out_stride + 4 * column
                    _fetch_rows(place, out_stride, count, valid)
                    if direct:
                        c, c_stride = place, out_stride
                share = t - last_tile + _FETCHERS
                ahead = codes + steps * GROUP * _NR_DOT + share * steps * _LINE
                fetch = _LINE if share >= 0 else 0
                dot_tile(
                    W8A8, count, vectors, x, stride, steps, codes, of_rows, zero, scale_stride, of_columns, of_codes,
                    begin, begin_stride, c, c_stride, ahead, fetch
                )  # fmt: skip
                if final and not direct:
                    tile = floats(c, count * _NR_DOT)
                    activate(tile, activation)
                    store(tile, _NR_DOT, row, count, out, residual, column, valid)


@kernel(reads(float32, 2), fills(float32, 2), reads(float32, 2), TABLE, INT, narrow=True)
def linear_w8a8(x: Any, out: Any, residual: Any, panels: Any, activation: int) -> None:
    """Quantise x and fill its rows of out, in one call; see `linear_int8`."""
    m, k = x.shape
    blocks = max(1, -(-k // BLOCK))
    codes = np.empty((m, GROUP * -(-k // GROUP)), np.uint8)
    scales, zeros = np.empty((m, blocks), np.float32), np.empty((m, blocks), np.float32)
    quantise(x, codes, scales, zeros, 0, m)
    linear_int8(codes, k, scales, zeros, out, residual, panels, activation, 0, len(panels), 0, m)


_MR: Final = FORMS["f16"].rows
_NR: Final = FORMS["f16"].width
_VECTORS: Final = FORMS["f16"].vectors

# A panel is used for _ROWS rows of x, in pieces [BLOCK, width] that stay in the first-level cache while the tiles pass
# over them; the rows of x stay in the second level.
_ROWS: Final = 384
# Values to quantise per thread at least; above it `choice` decides.
_ROW_GRAIN: Final = 1 << 15


@kernel(INT, reads(float32, 2), fills(float32, 2), reads(float32, 2), TABLE, *[INT] * 5, part=4, narrow=True)
def _linear_widened(
    storage: int, x: Any, out: Any, residual: Any, panels: Any, activation: int, first_panel: int, last_panel: int,
    first_row: int, last_row: int,
) -> None:  # fmt: skip
    """Fill the columns of some panels in some rows of out; panels: the table of `panels`."""
    k = x.shape[1]
    item = 2 if storage == F16 else 1
    plain = activation == NONE and residual.size == 0
    height = min(_ROWS, last_row - first_row)
    sums = np.empty(height * _NR, np.float32)
    out_stride, stride = 4 * out.shape[1], 4 * k
    for start_row in range(first_row, last_row, _ROWS):
        rows = min(_ROWS, last_row - start_row)
        # Tiles of nearly equal height: 7 rows as 4 + 3 keep the pipelines fuller than 6 + 1.
        tiles = -(-rows // _MR)
        for p in range(first_panel, last_panel):
            column, valid = panels[p, COLUMN], panels[p, VALID]
            direct = plain and valid == _NR
            for low in range(0, max(k, 1), BLOCK):
                depth = min(BLOCK, k - low)
                final = low + depth >= k
                codes = panels[p, CODES] + low * _NR * item
                of_columns = panels[p, SCALES] + 4 * (low // BLOCK) * _NR
                for t in range(tiles):
                    i = t * rows // tiles
                    count = (t + 1) * rows // tiles - i
                    row = start_row + i
                    left = x.ctypes.data + row * stride + 4 * low
                    c, c_stride = sums.ctypes.data + 4 * i * _NR, 4 * _NR
                    begin, begin_stride = (c, c_stride) if low > 0 else (panels[p, BIAS], 0)
                    if final and direct:
                        c = out.ctypes.data + row * out_stride + 4 * column
                        c_stride = out_stride
                    widened_tile(
                        storage, count, _VECTORS, left, stride, depth, codes, 0, 0, 0, of_columns, 0, begin,
                        begin_stride, c, c_stride, 0, 0
                    )  # fmt: skip
                    if final and not direct:
                        tile = sums[i * _NR : (i + count) * _NR]
                        activate(tile, activation)
                        store(tile, _NR, row, count, out, residual, column, valid)


def bind(
    arrays: ProductArrays,
    matrices: Sequence[NarrowMatrix],
    biases: Sequence[NDArray[np.float32]],
    activation: int,
    pool: Workers,
) -> Calls:
    """Return the calls of a checked `linear` over x [m, k] and matrices that are all in one narrow storage.

    biases: one for each matrix, or none. activation: its place in `ACTIVATIONS`.
    """
    m, k = arrays.x.shape
    table, alive = panels_of(matrices, biases)
    stride = GROUP * -(-k // GROUP)
    form = FORMS[matrices[0].storage]
    code, width = KINDS.index(form.kind), form.width
    parts = matmul_parts(len(table), bool(table[-1, VALID] < width), m, width * k, pool.threads, _MR)
    if code != W8A8:
        return pool.bind(_linear_widened, parts, code)(code, *arrays, table, activation, alive=alive)
    choice = pool.choice((linear_int8, parts.whole(), parts.work), parts)
    out = [Call(linear_w8a8, (*arrays, table, activation), None, choice, most=1, alive=alive)]
    if choice is not None:
        codes = scratch((m, stride), np.uint8)
        scales, zeros = (scratch((m, blocks(k)), np.float32) for _ in range(2))
        row_parts = ranges(m, min(pool.threads, 1 + m * k // _ROW_GRAIN), m * k)
        out.append(Call(quantise_rows, (arrays.x, codes, scales, zeros), row_parts, choice, least=2))
        taken = codes, k, scales, zeros, arrays.out, arrays.residual, table, activation
        out.append(Call(linear_int8, taken, parts, choice, least=2, alive=alive))
    return out
