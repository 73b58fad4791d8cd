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
from numba import float32
from numpy.typing import NDArray

from hepti_mqtt.kernels.base import Array, Run
from hepti_mqtt.kernels.gemm.epilogue import NONE, activate, store
from hepti_mqtt.kernels.gemm.forms import FORMS, GROUP
from hepti_mqtt.kernels.gemm.int8 import (
    BEHIND,
    BIAS,
    CODES,
    COLUMN,
    SCALES,
    VALID,
    linear_int8,
    linear_w8a8,
    quantise_rows,
)
from hepti_mqtt.kernels.gemm.narrow_tile import byte_tile, half_tile
from hepti_mqtt.kernels.machine.jit import INT, TABLE, entry, fills, kernel, reads
from hepti_mqtt.kernels.machine.workers import Workers, matmul_parts, ranges
from hepti_mqtt.kernels.weights import BLOCK, PANELS, NarrowMatrix, blocks

F16, W8A32, W8A8 = range(3)
STORAGE: Final = {"f16": F16, "w8a32": W8A32, "w8a8": W8A8}
_MR: Final = FORMS["f16"].rows
_NR: Final = FORMS["f16"].width
_VECTORS: Final = FORMS["f16"].vectors

# A panel is used for _ROWS rows of x, in pieces [BLOCK, width] that stay in the first-level cache while the tiles pass
# over them; the rows of x stay in the second level.
_ROWS: Final = 384
# Elements to quantise below which a hand-over to another thread costs more than it saves.
_ROW_GRAIN: Final = 1 << 17


@kernel(
    INT,
    INT,
    INT,
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
def _linear_narrow(
    storage: int,
    left: int,
    k: int,
    out: Any,
    residual: Any,
    panels: Any,
    activation: int,
    first_panel: int,
    last_panel: int,
    first_row: int,
    last_row: int,
) -> None:
    """Fill the columns of some panels in some rows of out; left is the address of x, panels [P, 6]."""
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
                    x = left + row * stride + 4 * low
                    c, c_stride = sums.ctypes.data + 4 * i * _NR, 4 * _NR
                    begin, begin_stride = (c, c_stride) if low > 0 else (panels[p, BIAS], 0)
                    if final and direct:
                        c = out.ctypes.data + row * out_stride + 4 * column
                        c_stride = out_stride
                    if storage == F16:
                        half_tile(
                            count, _VECTORS, x, stride, depth, codes, 0, 0, 0, of_columns, 0, begin, begin_stride,
                            c, c_stride, 0, 0
                        )  # fmt: skip
                    else:
                        byte_tile(
                            count, _VECTORS, x, stride, depth, codes, 0, 0, 0, of_columns, 0, begin, begin_stride,
                            c, c_stride, 0, 0
                        )  # fmt: skip
                    if final and not direct:
                        tile = sums[i * _NR : (i + count) * _NR]
                        activate(tile, activation)
                        store(tile, _NR, row, count, out, residual, column, valid)


def bind(
    shape: tuple[int, int],
    matrices: Sequence[NarrowMatrix],
    biases: Sequence[NDArray[np.float32]],
    has_residual: bool,
    activation: int,
    pool: Workers,
) -> Run:
    """Return the run of a checked `linear` over x of `shape` [m, k] and matrices that are all in one narrow storage.

    biases: one for each matrix, or none. activation: its place in `ACTIVATIONS`.
    """
    m, k = shape
    table, alive = panels_of(matrices, biases)
    stride = GROUP * -(-k // GROUP)
    code, width = STORAGE[matrices[0].storage], PANELS[matrices[0].storage].width
    parts = matmul_parts(len(table), bool(table[-1, VALID] < width), m, width * k, pool.threads, _MR)
    row_parts = ranges(m, min(pool.threads, 1 + m * k // _ROW_GRAIN))
    none = np.empty((0, 0), np.float32)
    product = pool.bind(linear_int8 if code == W8A8 else _linear_narrow, parts)
    quantise, alone = pool.bind(quantise_rows, row_parts), entry(linear_w8a8)

    def run(reads: Sequence[Array], writes: Sequence[Array], _alive: tuple[object, ...] = alive) -> None:
        x, others = reads[0], (writes[0], reads[1] if has_residual else none)
        if code != W8A8:
            address = x.__array_interface__["data"][0]
            product(code, address, k, *others, table, activation)
            return
        if len(parts) == len(row_parts) == 1:
            alone(x, *others, table, activation)
            return
        codes = np.empty((m + BEHIND, stride), np.uint8)
        scales, zeros = np.empty((m, blocks(k)), np.float32), np.empty((m, blocks(k)), np.float32)
        quantise(x, codes, scales, zeros)
        product(codes, k, scales, zeros, *others, table, activation)

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
