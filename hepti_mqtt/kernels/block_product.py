"""Kernel `linear` over matrices in blocks; reads, weights, bias, activation and residual are those of `linear`.

x is taken to 2**-23 of the largest of each 32 values, or (attribute x: "i8") rounded to 254 steps between minus and
plus the largest one, as llama.cpp does; if 32 values are not all finite, their row is NaN. Codes are multiplied as they
are stored; an output is the sum of its blocks in ascending order of k, each the sum of its products times the block's
scale. Each output depends only on its row of x and its column: not on other rows, its tile or the threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32, uint8
from numpy.typing import NDArray

from hepti_mqtt.core.storage import BLOCK
from hepti_mqtt.kernels.block_tile import BASE, BYTEWISE, DIGITS, ROWS, WORDS, block_tile
from hepti_mqtt.kernels.blocks import WIDTH, BlockMatrix
from hepti_mqtt.kernels.calls import Call, Calls, ProductArrays, scratch
from hepti_mqtt.kernels.elementary import ONE, ZERO, bits_of, from_bits
from hepti_mqtt.kernels.jit import INT, TABLE, fills, floats, helper, kernel, octets, reads
from hepti_mqtt.kernels.panels import BIAS, CODES, COLUMN, KIND, VALID, panels_of
from hepti_mqtt.kernels.threads import Workers, matmul_parts, ranges
from hepti_mqtt.kernels.tile import NONE, activate, store

_NEAR: Final = 1 << 19  # bytes of x per pass over the panels: they stay in the second-level cache
_GRAIN: Final = 1 << 15  # values of x per thread at least; above it `choice` decides
_LEAST: Final = 1 << 19  # multiply-adds of a part
_HALF: Final = BLOCK // 2

# For digits and for rounded x: steps from 0 to the largest value of a block, and magnitudes below which it counts as 0.
_PLACES: Final = np.float32(BASE * BASE), np.float32(BASE), ONE
_STEPS: Final = np.float32(127 * BASE * BASE), np.float32(127)
_TINY: Final = np.float32(1e-30), np.float32(1e-35)
_INFINITY, _NAN = np.float32(np.inf), np.float32(np.nan)


@helper
def _add_up(values: Any, words: Any) -> None:
    """Fill the words of 32 values."""
    lower = upper = ZERO
    for j in range(_HALF):
        lower += values[j]
        upper += values[j + _HALF]
    total = lower + upper
    words[1], words[2], words[3] = total, np.float32(-8) * total, np.float32(-128) * total
    words[4], words[5] = np.float32(-32) * lower, np.float32(-32) * upper


@helper
def _add_up_codes(codes: Any, words: Any) -> Any:
    """Fill the starts of sums of 32 codes; return the sum of the codes."""
    lower = upper = np.int32(0)
    for j in range(_HALF):
        lower += np.int8(codes[j])
        upper += np.int8(codes[j + _HALF])
    total = lower + upper
    words[2], words[3] = from_bits(np.int32(-8 * total)), from_bits(np.int32(-128 * total))
    words[4], words[5] = from_bits(np.int32(-32 * lower)), from_bits(np.int32(-32 * upper))
    return total


@helper
def _scale_of(values: Any, steps: Any, tiny: Any) -> Any:
    """Return (step, its reciprocal) of 32 values; not finite: (NaN, 0); below `tiny` the reciprocal is 0."""
    top = np.int32(0)
    for j in range(BLOCK):
        # The bits of f32 >= 0 are ordered like the values, with infinity and NaN above all.
        top = max(top, bits_of(abs(values[j])))
    most = from_bits(top)
    return most / steps if most < _INFINITY else _NAN, steps / most if tiny < most < _INFINITY else ZERO


@helper
def _digits(values: Any, by: Any, codes: Any) -> None:
    """Fill three rows of codes with the digits of 32 values; all arithmetic is on whole numbers in f32."""
    for j in range(BLOCK):
        whole = np.rint(values[j] * by)
        high = np.rint(whole * (ONE / _PLACES[0]))
        rest = whole - high * _PLACES[0]
        middle = np.rint(rest * (ONE / _PLACES[1]))
        codes[j], codes[BLOCK + j] = np.uint8(np.int8(high)), np.uint8(np.int8(middle))
        codes[2 * BLOCK + j] = np.uint8(np.int8(rest - middle * _PLACES[1]))


@helper
def _encode(values: Any, rounded: int, codes: Any, words: Any) -> None:
    """Fill the codes and words of 32 values, a row of each for each digit."""
    digits = 1 if rounded else DIGITS
    step, by = _scale_of(values, _STEPS[rounded], _TINY[rounded])
    if not by > ZERO:
        for j in range(digits * BLOCK):
            codes[j] = np.uint8(0)
    elif rounded:
        for j in range(BLOCK):
            codes[j] = np.uint8(np.int8(np.rint(values[j] * by)))
    else:
        _digits(values, by, codes)
    total = ZERO
    for digit in range(digits):
        of_digit = _add_up_codes(codes[digit * BLOCK : (digit + 1) * BLOCK], words[digit * WORDS :])
        total += _PLACES[digit + DIGITS - digits] * np.float32(of_digit)
    words[0], words[1] = step, step * total


@helper
def prepare_tile(x: Any, rounded: int, first: int, rows: int, left: int, words: int) -> None:
    """Fill a tile's input from some rows of x: values at `left`, and words; rows of each 32 values are adjacent."""
    k, digits = x.shape[1], 1 if rounded else DIGITS
    nbytes = digits * BLOCK if BYTEWISE else 4 * BLOCK
    for n in range(k // BLOCK):
        for i in range(rows):
            values = floats(x.ctypes.data + 4 * (k * (first + i) + BLOCK * n), BLOCK)
            place, of_words = left + nbytes * (n * rows + i), words + 4 * WORDS * digits * (n * rows + i)
            if BYTEWISE:
                _encode(values, rounded, octets(place, digits * BLOCK), floats(of_words, digits * WORDS))
                continue
            taken = floats(place, BLOCK)
            step, by = _scale_of(values, _STEPS[1], _TINY[1])
            for j in range(BLOCK):
                taken[j] = step * np.rint(values[j] * by) if rounded else values[j]
            _add_up(taken, floats(of_words, WORDS))


def sizes(rows: int, k: int, rounded: int) -> tuple[int, int]:
    """Return the bytes and the words of tiles' input for x [rows, k]."""
    digits = 1 if rounded else DIGITS
    return rows * k * (digits if BYTEWISE else 4), rows * (k // BLOCK) * digits * WORDS


sizes_of_rows: Final = helper(sizes)


@helper
def _prepare(x: Any, taken: Any, words: Any, rounded: int, first_tile: int, last_tile: int) -> None:
    """Fill the input of some tiles."""
    rows, k = x.shape
    tiles, of_row = -(-rows // ROWS[rounded]), sizes_of_rows(1, k, rounded)
    for t in range(first_tile, last_tile):
        i, last = t * rows // tiles, (t + 1) * rows // tiles
        at = taken.ctypes.data + of_row[0] * i, words.ctypes.data + 4 * of_row[1] * i
        prepare_tile(x, rounded, i, last - i, at[0], at[1])


@kernel(reads(float32, 2), fills(uint8, 1), fills(float32, 1), INT, INT, INT, part=2, narrow=True)
def prepare_tiles(x: Any, taken: Any, words: Any, rounded: int, first_tile: int, last_tile: int) -> None:
    """Run `_prepare`."""
    _prepare(x, taken, words, rounded, first_tile, last_tile)


@kernel(
    reads(float32, 2), fills(uint8, 1), fills(float32, 1), fills(float32, 2), reads(float32, 2), TABLE, *[INT] * 6,
    part=4, narrow=True,
)  # fmt: skip
def _linear_blocks(
    x: Any, taken: Any, words: Any, out: Any, residual: Any, panels: Any, activation: int, rounded: int,
    first_panel: int, last_panel: int, first_tile: int, last_tile: int,
) -> None:  # fmt: skip
    """Fill the columns of some panels in the rows of some tiles of out.

    panels: the table of `panels`. rounded: whether x is rounded. taken, words: filled by `prepare_tiles`; empty to fill
    them here.
    """
    rows, k = x.shape
    width, plain = out.shape[1], activation == NONE and residual.size == 0
    digits, of_row = 1 if rounded else DIGITS, sizes_of_rows(1, k, rounded)
    if taken.size == 0:
        taken, words = np.empty(rows * of_row[0], np.uint8), np.empty(rows * of_row[1], np.float32)
        _prepare(x, taken, words, rounded, first_tile, last_tile)
    sums = np.empty(ROWS[rounded] * WIDTH, np.float32)
    # Tiles of nearly equal height: 7 rows as 4 + 3 keep the pipelines fuller than 6 + 1.
    tiles = -(-rows // ROWS[rounded])
    at_once = max(1, _NEAR // (ROWS[rounded] * of_row[0]))
    for chunk in range(first_tile, last_tile, at_once):
        for p in range(first_panel, last_panel):
            column, valid = panels[p, COLUMN], panels[p, VALID]
            direct = plain and valid == WIDTH
            for t in range(chunk, min(chunk + at_once, last_tile)):
                first = t * rows // tiles
                count = (t + 1) * rows // tiles - first
                # Addresses are read at their use: Numba frees an array after its last use.
                left, of_words = taken.ctypes.data + of_row[0] * first, words.ctypes.data + 4 * of_row[1] * first
                c, c_stride = sums.ctypes.data, 4 * WIDTH
                if direct:
                    c, c_stride = out.ctypes.data + 4 * (width * first + column), 4 * width
                variant = 2 * panels[p, KIND] + (rounded if BYTEWISE else 0)
                block_tile(
                    digits * count, variant, panels[p, CODES], k // BLOCK, left, of_words, panels[p, BIAS], 0, c,
                    c_stride
                )  # fmt: skip
                if not direct:
                    tile = sums[: count * WIDTH]
                    activate(tile, activation)
                    store(tile, WIDTH, first, count, out, residual, column, valid)


def bind(
    arrays: ProductArrays,
    matrices: Sequence[BlockMatrix],
    biases: Sequence[NDArray[np.float32]],
    activation: int,
    rounded: bool,
    pool: Workers,
) -> Calls:
    """Return the calls of a checked `linear` over x [m, k], as `linear.bind_product` does.

    The matrices may be in several storages. rounded: whether x is rounded.
    """
    m, k = arrays.x.shape
    table, alive = panels_of(matrices, biases)
    tiles = -(-m // ROWS[rounded])
    of_tile = -(-m // tiles) * WIDTH * k
    parts = matmul_parts(len(table), bool(table[-1, VALID] < WIDTH), tiles, of_tile, pool.threads, 1, _LEAST)
    kinds = tuple(sorted({matrix.storage.name for matrix in matrices}))
    choice = pool.choice((_linear_blocks, parts.whole(), parts.work, m, rounded, kinds), parts)
    how, nothing = (table, activation, int(rounded)), (np.empty(0, np.uint8), np.empty(0, np.float32))
    alone = arrays.x, *nothing, arrays.out, arrays.residual, *how
    # If each thread has one part, it prepares x itself: that takes less than a call.
    if choice is None or len(parts) <= pool.threads:
        return [Call(_linear_blocks, alone, parts, choice, alive=alive)]
    octets, words = sizes(m, k, int(rounded))
    taken = scratch((octets,), np.uint8), scratch((words,), np.float32)
    tiles_of_thread = ranges(tiles, min(pool.threads, 1 + m * k // _GRAIN), m * k)
    return [
        Call(_linear_blocks, alone, parts, choice, most=1, alive=alive),
        Call(prepare_tiles, (arrays.x, *taken, int(rounded)), tiles_of_thread, choice, least=2),
        Call(
            _linear_blocks, (arrays.x, *taken, arrays.out, arrays.residual, *how), parts, choice, least=2, alive=alive
        ),
    ]


def reference_rounded(x: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return rounded rows of activations [m, k], in plain NumPy."""
    parts = np.asarray(x, np.float64).reshape(len(x), -1, BLOCK)
    most = np.abs(parts).max(axis=2, keepdims=True)
    step = np.where(np.isfinite(most), most / 127, np.nan)
    codes = np.rint(np.divide(parts, step, out=np.zeros_like(parts), where=step > _TINY[1]))
    return np.asarray((codes * step).reshape(x.shape), np.float64)
