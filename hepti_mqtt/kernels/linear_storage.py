"""Kernel `linear` over weights in f16 and int8; reads, weights, bias, activation and residual are those of `linear`.

f16 adds f32 products in ascending order of k. w8a32 does so within a block of `BLOCK` rows of k, and adds the blocks'
sums times their scales in ascending order; it overflows to infinity or NaN where the sum of |x| times 127 in a block
passes 3.4e38. w8a8 first rounds each block of a row of x to 254 steps between its smallest and largest value (0
included, so that 0 stays exact), adds products of bytes in i32 without error, and adds the blocks' sums times the
scales of column and row. Its error is at most the sum over k of |x| scale_column / 2 + |w| scale_row / 2, and f32
rounding. A row with a value that is not finite comes out as NaN in every column; magnitudes below 1e-35 count as 0.

Each output depends on its row of x and its column alone: not on other rows, its tile or the threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32, int32, uint8
from numpy.typing import NDArray

from hepti_mqtt.kernels.base import Array, Run
from hepti_mqtt.kernels.elementary import ONE, bits_of, from_bits
from hepti_mqtt.kernels.epilogue import NONE, SILU_GATE, activate, store
from hepti_mqtt.kernels.isa import DOT
from hepti_mqtt.kernels.jit import FLOAT, INT, TABLE, exact, fills, helper, kernel, reads
from hepti_mqtt.kernels.storage_tile import FORMS, GROUP, byte_tile, dot_tile, half_tile
from hepti_mqtt.kernels.weights import BLOCK, PANELS, NarrowMatrix, blocks
from hepti_mqtt.kernels.workers import Part, Workers, ranges

F16, W8A32, W8A8 = range(3)
STORAGE: Final = {"f16": F16, "w8a32": W8A32, "w8a8": W8A8}
_MR: Final = FORMS["f16"].rows
_MR_DOT: Final = FORMS["w8a8"].rows
_NR: Final = FORMS["f16"].width
_NR_DOT: Final = FORMS["w8a8"].width

# Columns of the table of panels: addresses of codes, of their sums, scales and bias, first column of the output, and
# how many are valid.
CODES, SUMS, SCALES, BIAS, COLUMN, VALID = range(6)

# A panel is used for _ROWS rows of x, in pieces [BLOCK, width] that stay in the first-level cache while the tiles pass
# over them; the rows of x stay in the second level.
_ROWS: Final = 384
# Multiply-adds, and elements to quantise, below which a hand-over to another thread costs more than it saves.
_GRAIN: Final = 1 << 19
_ROW_GRAIN: Final = 1 << 17

_LEVELS: Final = np.float32(254.0)
_TINY: Final = np.float32(1e-35)
_HALF: Final = np.float32(0.5)
_NAN: Final = np.float32(np.nan)
_INFINITE: Final = 0x7F800000
_FLIP: Final = np.int32(0x7FFFFFFF)
# What is taken from a code of 0 to 255 so that it is what the instruction takes.
_OFFSET: Final = np.int32(128 if DOT.signed else 0)


@exact
def _step(high: Any, low: Any) -> Any:
    return high / _LEVELS - low / _LEVELS  # the difference of the two alone could be infinite


@helper
def _quantise_block(x: Any, codes: Any, count: int) -> Any:
    """Fill `count` codes and return the step (NaN if not all is finite) and the code of 0."""
    # Bits with all but the sign flipped below 0 are ordered like the values, NaN outermost: integers vectorise.
    top, bottom = np.int32(0), np.int32(0)
    for i in range(count):
        bits = np.int32(bits_of(x[i]))
        key = np.int32(bits ^ ((bits >> np.int32(31)) & _FLIP))
        top = max(top, key)
        bottom = min(bottom, key)
    finite = top < _INFINITE and bottom > -_INFINITE - 1
    high = from_bits(top)
    low = from_bits(bottom ^ _FLIP) if bottom < 0 else np.float32(0)
    step = _step(high, low) if finite else _NAN
    by = np.float32(1) / step if step > _TINY else np.float32(0)
    zero = np.int32(_HALF - low * by) if finite else np.int32(0)
    shift = np.float32(zero) + _HALF
    if finite:
        for i in range(count):
            codes[i] = np.uint8(np.int32(np.int32(x[i] * by + shift) - _OFFSET))
    else:
        codes[:count] = 0
    return step, zero - _OFFSET


@helper
def quantise(x: Any, codes: Any, scales: Any, zeros: Any, first: int, last: int) -> None:
    """Fill codes [m, 4 ceil(k / 4)] and scales and zeros [m, blocks] of some rows of x [m, k]."""
    k = x.shape[1]
    whole = k // BLOCK
    for row in range(first, last):
        # Slices from where a block begins: i alone is an index that the compiler knows to be positive, and vectorises;
        # and a length that it knows leaves no loop of single values.
        for block in range(whole):
            begin = block * BLOCK
            scales[row, block], zeros[row, block] = _quantise_block(x[row, begin:], codes[row, begin:], BLOCK)
        if whole < scales.shape[1]:
            begin = whole * BLOCK
            scales[row, whole], zeros[row, whole] = _quantise_block(x[row, begin:], codes[row, begin:], k - begin)
        codes[row, k:] = 0


@kernel(reads(float32, 2), fills(uint8, 2), fills(float32, 2), fills(int32, 2), INT, INT)
def _quantise_rows(x: Any, codes: Any, scales: Any, zeros: Any, first: int, last: int) -> None:
    quantise(x, codes, scales, zeros, first, last)


@kernel(
    INT,
    INT,
    INT,
    INT,
    fills(float32, 2),
    fills(int32, 2),
    fills(float32, 2),
    reads(float32, 2),
    TABLE,
    INT,
    FLOAT,
    INT,
    INT,
    INT,
    INT,
    INT,
)
def _linear_storage(
    storage: int,
    left: int,
    stride: int,
    k: int,
    row_scales: Any,
    zeros: Any,
    out: Any,
    residual: Any,
    panels: Any,
    activation: int,
    scale: Any,
    out_column: int,
    first_panel: int,
    last_panel: int,
    first_row: int,
    last_row: int,
) -> None:
    """Fill the columns of some panels in some rows of out; left is the address of rows `stride` bytes apart.

    panels: [P, 6], with a gate [2 P, 6], the gates behind.
    """
    dot = storage == W8A8
    most, width, group = (_MR_DOT, _NR_DOT, GROUP) if dot else (_MR, _NR, 1)
    item = 2 if storage == F16 else 1
    gated = activation == SILU_GATE
    has_residual = residual.size > 0
    plain = activation == NONE and scale == ONE and not has_residual
    height = min(_ROWS, last_row - first_row)
    scratch = np.empty((2 if gated else 1) * height * width, np.float32)
    gates = scratch[-height * width :]
    out_stride, scale_stride = 4 * out.shape[1], 4 * row_scales.shape[1]
    for start_row in range(first_row, last_row, _ROWS):
        rows = min(_ROWS, last_row - start_row)
        # Tiles of nearly equal height: 7 rows as 4 + 3 keep the pipelines fuller than 6 + 1.
        tiles = -(-rows // most)
        for p in range(first_panel, last_panel):
            column, valid = panels[p, COLUMN], panels[p, VALID]
            direct = plain and valid == width
            for is_gate in range(1 if gated else 0, -1, -1):
                at = p + is_gate * (len(panels) // 2)
                sums = gates if is_gate else scratch
                for low in range(0, max(k, 1), BLOCK):
                    depth = min(BLOCK, k - low)
                    steps = -(-depth // group)
                    final = not is_gate and low + depth >= k
                    block = low // BLOCK
                    codes = panels[at, CODES] + low * width * item
                    of_columns = panels[at, SCALES] + 4 * block * width
                    of_codes = panels[at, SUMS] + 4 * block * width
                    for t in range(tiles):
                        i = t * rows // tiles
                        count = (t + 1) * rows // tiles - i
                        row = start_row + i
                        x = left + row * stride + low * (1 if dot else 4)
                        of_rows = row_scales.ctypes.data + row * scale_stride + 4 * block
                        zero = zeros.ctypes.data + row * scale_stride + 4 * block
                        c, c_stride = sums.ctypes.data + 4 * i * width, 4 * width
                        begin, begin_stride = (c, c_stride) if low > 0 else (panels[at, BIAS], 0)
                        if final and direct:
                            c = out.ctypes.data + row * out_stride + 4 * (out_column + column)
                            c_stride = out_stride
                        if dot:
                            dot_tile(
                                count,
                                x,
                                stride,
                                steps,
                                codes,
                                of_rows,
                                zero,
                                scale_stride,
                                of_columns,
                                of_codes,
                                begin,
                                begin_stride,
                                c,
                                c_stride,
                            )
                        elif storage == F16:
                            half_tile(
                                count,
                                x,
                                stride,
                                steps,
                                codes,
                                of_rows,
                                zero,
                                scale_stride,
                                of_columns,
                                of_codes,
                                begin,
                                begin_stride,
                                c,
                                c_stride,
                            )
                        else:
                            byte_tile(
                                count,
                                x,
                                stride,
                                steps,
                                codes,
                                of_rows,
                                zero,
                                scale_stride,
                                of_columns,
                                of_codes,
                                begin,
                                begin_stride,
                                c,
                                c_stride,
                            )
                        if final and not direct:
                            tile = sums[i * width : (i + count) * width]
                            activate(tile, gates[i * width : (i + count) * width], activation, scale)
                            add = column if has_residual else -1
                            store(tile, width, row, count, out, out_column + column, residual, add, valid)


def bind(
    shape: tuple[int, int],
    matrices: Sequence[NarrowMatrix],
    biases: Sequence[NDArray[np.float32]],
    has_residual: bool,
    finish: tuple[int, np.float32, int],
    pool: Workers,
) -> Run:
    """Return the run of a checked `linear` over x of `shape` [m, k] and matrices that are all in one narrow storage.

    biases: one for each matrix, or none. finish: place of the activation in `ACTIVATIONS`, scale, first column of out.
    """
    m, k = shape
    gated = finish[0] == SILU_GATE
    table, alive = panels_of(matrices[::-1], biases[::-1]) if gated else panels_of(matrices, biases)
    code, width = STORAGE[matrices[0].storage], PANELS[matrices[0].storage].width
    stride = GROUP * -(-k // GROUP) if code == W8A8 else 4 * k
    parts = parts_of(len(table) // (2 if gated else 1), m, width * k, pool)
    row_parts = ranges(m, min(pool.threads, 1 + m * k // _ROW_GRAIN))
    no_scales, no_zeros, none = np.empty((0, 0), np.float32), np.empty((0, 0), np.int32), np.empty((0, 0), np.float32)

    def run(reads: Sequence[Array], writes: Sequence[Array], _alive: tuple[object, ...] = alive) -> None:
        x, left, row_scales, zeros = reads[0], reads[0], no_scales, no_zeros
        if code == W8A8:
            left = np.empty((m, stride), np.uint8)
            row_scales, zeros = np.empty((m, blocks(k)), np.float32), np.empty((m, blocks(k)), np.int32)
            pool.each(_quantise_rows, (x, left, row_scales, zeros), row_parts)
        address = left.__array_interface__["data"][0]
        others = (writes[0], reads[1] if has_residual else none)
        pool.each(_linear_storage, (code, address, stride, k, row_scales, zeros, *others, table, *finish), parts)

    return run


def panels_of(
    matrices: Sequence[NarrowMatrix], biases: Sequence[NDArray[np.float32]]
) -> tuple[NDArray[np.int64], tuple[object, ...]]:
    """Return the table of panels, and what must live as long as it, since it has only addresses."""
    table: list[tuple[int, ...]] = []
    padded_biases: list[NDArray[np.float32]] = []
    column = 0
    for place, matrix in enumerate(matrices):
        count, width = matrix.panels.shape[0], matrix.panels.shape[2]
        padded = np.zeros((count, width), np.float32)
        if biases:
            padded.reshape(-1)[: matrix.columns] = biases[place]
        padded_biases.append(padded)
        for p in range(count):
            parts = (matrix.panels, matrix.sums, matrix.scales, padded)
            addresses = [a.__array_interface__["data"][0] + p * (a[0].nbytes if len(a) else 0) for a in parts]
            table.append((*addresses, column + p * width, min(width, matrix.columns - p * width)))
        column += matrix.columns
    return np.asarray(table, np.int64).reshape(-1, 6), (*matrices, *padded_biases)


def parts_of(panels: int, rows: int, panel_size: int, pool: Workers) -> list[Part]:
    """Return the ranges of panels and rows that the threads of `pool` take; panel_size: weights of a panel."""
    threads = min(pool.threads, 1 + panels * panel_size * rows // _GRAIN)
    by_panel = ranges(panels, threads)
    by_row = ranges(rows, -(-threads // max(1, len(by_panel))))
    return [(*p, *r) for p in by_panel for r in by_row]
