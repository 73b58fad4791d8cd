"""Kernel `linear` over weights in f16 and int8; reads, weights, bias, activation and residual are those of `linear`.

f16 and w8a32 add f32 products in ascending order of k; w8a32 scales the sum by column, so it overflows to infinity or
NaN where the sum of |x| times 127 passes 3.4e38. w8a8 first rounds each row of x to 254 steps between its
smallest and largest value (0 included, so that 0 stays exact), adds products of bytes in i32 without error, and scales
the sum by column and row. Its error is at most the sum over k of |x| scale_column / 2 + |w| scale_row / 2, and f32
rounding. A row with a value that is not finite comes out as NaN in every column; magnitudes below 1e-35 count as 0.

Each output depends on its row of x and its column alone: not on other rows, its tile or the threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32, int32, uint8
from numpy.typing import NDArray

from hepti_mqtt.kernels import elementary
from hepti_mqtt.kernels.base import Array, Check, Run, nothing
from hepti_mqtt.kernels.elementary import bits_of, from_bits
from hepti_mqtt.kernels.isa import DOT
from hepti_mqtt.kernels.jit import INT, TABLE, exact, fills, helper, kernel, reads
from hepti_mqtt.kernels.storage_tile import FORMS, GROUP, byte_tile, dot_tile, half_tile
from hepti_mqtt.kernels.weights import PANELS, NarrowMatrix, Weight
from hepti_mqtt.kernels.workers import Part, Workers, ranges
from hepti_mqtt.program import Compute, SlotSpec

_F16, _W8A32, _W8A8 = range(3)
_CODE: Final = {"f16": _F16, "w8a32": _W8A32, "w8a8": _W8A8}
_MR: Final = FORMS["f16"].rows
_MR_DOT: Final = FORMS["w8a8"].rows
_WIDEST: Final = max(f.rows * f.width for f in FORMS.values())
_NR: Final = FORMS["f16"].width
_NR_DOT: Final = FORMS["w8a8"].width

# Columns of the table of panels: addresses of codes and of their sums, first column of the output, and how many.
_CODES, _SUMS, _COLUMN, _VALID = range(4)

# Bytes of the rows of x that stay in the second-level cache while all panels pass over them.
_BLOCK_BYTES: Final = 1 << 19
# Multiply-adds, and elements to quantise, below which a hand-over to another thread costs more than it saves.
_GRAIN: Final = 1 << 19
_ROW_GRAIN: Final = 1 << 17

_LEVELS: Final = np.float32(254.0)
_TINY: Final = np.float32(1e-35)
_HALF: Final = np.float32(0.5)
_NAN: Final = np.float32(np.nan)
_INFINITE: Final = 0x7F800000
_FLIP: Final = 0x7FFFFFFF
# What is taken from a code of 0 to 255 so that it is what the instruction takes.
_OFFSET: Final = 128 if DOT.signed else 0

_gelu, _gelu_tanh, _relu, _tanh = elementary.gelu, elementary.gelu_tanh, elementary.relu, elementary.tanh
_NONE, _GELU, _GELU_TANH, _RELU, _TANH = range(5)
_ACTIVATIONS: Final = {None: _NONE, "gelu": _GELU, "gelu_tanh": _GELU_TANH, "relu": _RELU, "tanh": _TANH}


@exact
def _step(high: Any, low: Any) -> Any:
    return high / _LEVELS - low / _LEVELS  # the difference of the two alone could be infinite


@kernel(reads(float32, 2), fills(uint8, 2), fills(float32, 1), fills(int32, 1), INT, INT)
def _quantise_rows(x: Any, codes: Any, scales: Any, zeros: Any, first: int, last: int) -> None:
    """Fill codes [m, 4 ceil(k / 4)], and of each row the step (NaN if a value is not finite) and the code of 0."""
    k = x.shape[1]
    for row in range(first, last):
        # Bits with all but the sign flipped below 0 are ordered like the values, NaN outermost: integers vectorise.
        top, bottom = np.int32(0), np.int32(0)
        for i in range(k):
            bits = np.int32(bits_of(x[row, i]))
            key = np.int32(bits ^ ((bits >> 31) & _FLIP))
            top = max(top, key)
            bottom = min(bottom, key)
        finite = top < _INFINITE and bottom > -_INFINITE - 1
        high = from_bits(top)
        low = from_bits(bottom ^ _FLIP) if bottom < 0 else np.float32(0)
        step = _step(high, low) if finite else _NAN
        by = np.float32(1) / step if step > _TINY else np.float32(0)
        zero = np.int32(_HALF - low * by) if finite else np.int32(0)
        scales[row] = step
        zeros[row] = zero - _OFFSET
        shift = np.float32(zero) + _HALF
        if finite:
            for i in range(k):
                codes[row, i] = np.uint8(np.int32(x[row, i] * by + shift) - _OFFSET & 0xFF)
        else:
            codes[row, :k] = 0
        codes[row, k:] = 0


@helper
def _activate(tile: Any, activation: int) -> None:
    if activation == _GELU:
        for i in range(tile.size):
            tile[i] = _gelu(tile[i])
    elif activation == _GELU_TANH:
        for i in range(tile.size):
            tile[i] = _gelu_tanh(tile[i])
    elif activation == _RELU:
        for i in range(tile.size):
            tile[i] = _relu(tile[i])
    elif activation == _TANH:
        for i in range(tile.size):
            tile[i] = _tanh(tile[i])


@kernel(
    INT,
    INT,
    INT,
    INT,
    INT,
    fills(float32, 1),
    fills(int32, 1),
    fills(float32, 2),
    reads(float32, 2),
    TABLE,
    fills(float32, 2),
    fills(float32, 2),
    INT,
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
    steps: int,
    block: int,
    row_scales: Any,
    zeros: Any,
    out: Any,
    residual: Any,
    panels: Any,
    column_scales: Any,
    bias: Any,
    activation: int,
    has_residual: int,
    first_panel: int,
    last_panel: int,
    first_row: int,
    last_row: int,
) -> None:
    """Fill the columns of some panels in some rows of out; left is the address of rows `stride` bytes apart."""
    most = _MR_DOT if storage == _W8A8 else _MR
    width = _NR_DOT if storage == _W8A8 else _NR
    scratch = np.empty(_WIDEST, np.float32)
    for start in range(first_row, last_row, block):
        rows = min(block, last_row - start)
        # Tiles of nearly equal height: 7 rows as 4 + 3 keep the pipelines fuller than 6 + 1.
        tiles = -(-rows // most)
        for p in range(first_panel, last_panel):
            codes, sums, column, valid = panels[p, _CODES], panels[p, _SUMS], panels[p, _COLUMN], panels[p, _VALID]
            of_columns, of_bias = column_scales[p].ctypes.data, bias[p].ctypes.data
            for t in range(tiles):
                i = start + t * rows // tiles
                count = start + (t + 1) * rows // tiles - i
                whole = valid == width and not activation and not has_residual
                c = out.ctypes.data + 4 * (i * out.shape[1] + column) if whole else scratch.ctypes.data
                c_stride = 4 * (out.shape[1] if whole else width)
                at, of_rows, zero = left + i * stride, row_scales.ctypes.data + 4 * i, zeros.ctypes.data + 4 * i
                if storage == _W8A8:
                    dot_tile(count, at, stride, steps, codes, of_rows, zero, of_columns, sums, of_bias, c, c_stride)
                elif storage == _F16:
                    half_tile(count, at, stride, steps, codes, of_rows, zero, of_columns, sums, of_bias, c, c_stride)
                else:
                    byte_tile(count, at, stride, steps, codes, of_rows, zero, of_columns, sums, of_bias, c, c_stride)
                if whole:
                    continue
                _activate(scratch[: count * width], activation)
                for r in range(count):
                    if has_residual:
                        for j in range(valid):
                            out[i + r, column + j] = scratch[r * width + j] + residual[i + r, column + j]
                    else:
                        for j in range(valid):
                            out[i + r, column + j] = scratch[r * width + j]


def bind(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    """Return the run of a `linear` whose matrices are all in one narrow storage."""
    check = Check(op, slots)
    has_residual, has_bias = bool(op.attrs["residual"]), bool(op.attrs["bias"])
    check.count(2 if has_residual else 1)
    check.dtypes()
    check.rank(2)
    name = op.attrs["activation"]
    others = set(op.attrs) - {"bias", "residual", "activation"}
    check.that(not others, f"attributes {sorted(others)} need matrices in f32")
    check.that(name in _ACTIVATIONS, f"activation {name!r} is not in {tuple(_ACTIVATIONS)}")
    count = len(weights) // 2 if has_bias else len(weights)
    check.weights(weights, 2 * count if has_bias else count)
    matrices = [w for w in weights[:count] if isinstance(w, NarrowMatrix)]
    storage = matrices[0].storage if matrices else None
    same = len(matrices) == count and all(w.storage == storage for w in matrices)
    check.that(same and storage is not None, "its matrices must all be packed and in one storage")
    m, k = check.reads[0].shape
    table, scales, bias, n = _panels(check, matrices, weights[count:], k)
    check.shape(check.writes[0], (m, n))
    if has_residual:
        check.shape(check.reads[1], (m, n))
    if not m or not n:
        return nothing
    code, width = _CODE[matrices[0].storage], PANELS[matrices[0].storage].width
    groups = -(-k // GROUP)
    stride, steps = (GROUP * groups, groups) if code == _W8A8 else (4 * k, k)
    block = max(48, _BLOCK_BYTES // max(stride, 1))
    parts = _parts(len(table), m, width * k, pool)
    row_parts = ranges(m, min(pool.threads, 1 + m * k // _ROW_GRAIN))
    ones, none = np.ones(m, np.float32), np.zeros(m, np.int32)
    finish = (table, scales, bias, _ACTIVATIONS[name], int(has_residual))
    alive = tuple(weights)  # the table has only addresses

    def run(reads: Sequence[Array], writes: Sequence[Array], _alive: tuple[Weight, ...] = alive) -> None:
        x, left, row_scales, zeros = reads[0], reads[0], ones, none
        if code == _W8A8:
            left = np.empty((m, stride), np.uint8)
            row_scales, zeros = np.empty(m, np.float32), np.empty(m, np.int32)
            pool.each(_quantise_rows, (x, left, row_scales, zeros), row_parts)
        address = left.__array_interface__["data"][0]
        shape = (code, address, stride, steps, block, row_scales, zeros)
        pool.each(_linear_storage, (*shape, writes[0], reads[-1], *finish), parts)

    return run


def _panels(
    check: Check, matrices: Sequence[NarrowMatrix], biases: Sequence[Weight], k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32], int]:
    """Return (table of panels, scales of columns [P, width], bias [P, width], n)."""
    table: list[tuple[int, ...]] = []
    scales: list[NDArray[np.float32]] = []
    bias: list[NDArray[np.float32]] = []
    column = 0
    for place, matrix in enumerate(matrices):
        check.that(matrix.rows == k, f"weight {place} has {matrix.rows} rows, x has {k} columns")
        count, width = matrix.panels.shape[0], matrix.panels.shape[2]
        padded = np.zeros((count, width), np.float32)
        if biases:
            padded.reshape(-1)[: matrix.columns] = check.plain(biases[place], (matrix.columns,))
        bias.append(padded)
        scales.append(matrix.scales if matrix.scales.size else np.ones((count, width), np.float32))
        for p in range(count):
            codes = matrix.panels.__array_interface__["data"][0] + p * matrix.panels[0].nbytes
            sums = matrix.sums.__array_interface__["data"][0] + 4 * p * width
            table.append((codes, sums, column + p * width, min(width, matrix.columns - p * width)))
        column += matrix.columns
    return np.asarray(table, np.int64).reshape(-1, 4), np.concatenate(scales), np.concatenate(bias), column


def _parts(panels: int, rows: int, panel_size: int, pool: Workers) -> list[Part]:
    threads = min(pool.threads, 1 + panels * panel_size * rows // _GRAIN)
    by_panel = ranges(panels, threads)
    by_row = ranges(rows, -(-threads // max(1, len(by_panel))))
    return [(*p, *r) for p in by_panel for r in by_row]
