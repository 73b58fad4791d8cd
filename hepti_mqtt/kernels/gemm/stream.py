"""Kernel `linear` for few rows over narrow weights: a token at a time, where reading the weights takes all the time.

One compiled call quantises the rows where that is wanted, and one call of a tile goes down each panel: at 40 GB/s a
matrix of 1 MB takes 25 microseconds, and every hand-over between Python and compiled code takes one of them.
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
from hepti_mqtt.kernels.gemm.int8 import BIAS, CODES, COLUMN, SCALES, SUMS, VALID, quantise
from hepti_mqtt.kernels.gemm.narrow import F16, STORAGE, W8A8, panels_of
from hepti_mqtt.kernels.gemm.stream_tile import byte_stream, dot_stream, half_stream, together
from hepti_mqtt.kernels.machine.jit import INT, TABLE, fills, kernel, reads
from hepti_mqtt.kernels.machine.workers import Workers, parts_of_panels
from hepti_mqtt.kernels.weights import BLOCK, PANELS, NarrowMatrix
from hepti_mqtt.plan import Storage

# The most rows that one tile has: with them a panel is read once, in one call.
MOST_ROWS: Final = {storage: form.rows for storage, form in FORMS.items()}
_NR: Final = FORMS["f16"].width
_NR_DOT: Final = FORMS["w8a8"].width
_VECTORS: Final = FORMS["f16"].vectors
_VECTORS_DOT: Final = FORMS["w8a8"].vectors


@kernel(
    INT,
    reads(float32, 2),
    fills(float32, 2),
    reads(float32, 2),
    TABLE,
    INT,
    INT,
    INT,
    INT,
    part=2,
    narrow=True,
)
def _linear_stream(
    storage: int,
    x: Any,
    out: Any,
    residual: Any,
    panels: Any,
    activation: int,
    at_once: int,
    first_panel: int,
    last_panel: int,
) -> None:
    """Fill the columns of some panels, those of `narrow`, in all rows of out, `at_once` together where adjacent."""
    rows, k = x.shape
    dot = storage == W8A8
    width, vectors = (_NR_DOT, _VECTORS_DOT) if dot else (_NR, _VECTORS)
    plain = activation == NONE and residual.size == 0
    stride, steps, blocks = 4 * k, k, max(1, -(-k // BLOCK))
    quantised = rows if dot else 0
    codes = np.empty((quantised, GROUP * -(-k // GROUP)), np.uint8)
    row_scales, zeros = np.empty((quantised, blocks), np.float32), np.empty((quantised, blocks), np.float32)
    if dot:
        # Every thread for itself: a few thousand values take less than a hand-over.
        quantise(x, codes, row_scales, zeros, 0, rows)
        stride, steps = codes.shape[1], codes.shape[1] // GROUP
    sums = np.empty(rows * width * at_once, np.float32)
    item = 2 if storage == F16 else 1
    p = first_panel
    while p < last_panel:
        count = at_once if p + at_once <= last_panel else 1
        # Each lies behind the one before, with its scales and its bias: of another matrix those may lie elsewhere.
        for q in range(p + 1, p + count):
            behind = panels[q, CODES] == panels[q - 1, CODES] + item * k * width
            scaled = storage == F16 or panels[q, SCALES] == panels[q - 1, SCALES] + 4 * blocks * width
            biased = panels[q, BIAS] == panels[q - 1, BIAS] + 4 * width
            if not (behind and scaled and biased and panels[q, COLUMN] == panels[q - 1, COLUMN] + width):
                count = 1
                break
        columns, over = count * width, count * vectors
        column, valid = panels[p, COLUMN], panels[p + count - 1, VALID] + width * (count - 1)
        direct = plain and valid == columns
        weights, bias = panels[p, CODES], panels[p, BIAS]
        of_columns, of_codes = panels[p, SCALES], panels[p, SUMS]
        # Addresses are read where they are used: an array of which nothing is read any more is freed.
        left = codes.ctypes.data if dot else x.ctypes.data
        of_rows, zero, scale_stride = row_scales.ctypes.data, zeros.ctypes.data, 4 * blocks
        c, c_stride = sums.ctypes.data, 4 * columns
        if direct:
            c, c_stride = out.ctypes.data + 4 * column, 4 * out.shape[1]
        if dot:
            dot_stream(
                rows, vectors, left, stride, steps, weights, of_rows, zero, scale_stride, of_columns, of_codes,
                bias, 0, c, c_stride, 0, 0
            )  # fmt: skip
        elif storage == F16:
            half_stream(
                rows, over, left, stride, steps, weights, of_rows, zero, scale_stride, of_columns, of_codes,
                bias, 0, c, c_stride, 0, 0
            )  # fmt: skip
        else:
            byte_stream(
                rows, over, left, stride, steps, weights, of_rows, zero, scale_stride, of_columns, of_codes,
                bias, 0, c, c_stride, 0, 0
            )  # fmt: skip
        if not direct:
            tile = sums[: rows * columns]
            activate(tile, activation)
            store(tile, columns, 0, rows, out, residual, column, valid)
        p += count


def bind(
    shape: tuple[int, int],
    matrices: Sequence[NarrowMatrix],
    biases: Sequence[NDArray[np.float32]],
    has_residual: bool,
    activation: int,
    pool: Workers,
) -> Run:
    """Return what `narrow.bind` does, for at most MOST_ROWS rows."""
    m, k = shape
    table, alive = panels_of(matrices, biases)
    storage: Storage = matrices[0].storage
    parts = parts_of_panels(len(table), m * PANELS[storage].width * k, pool.threads)
    none = np.empty((0, 0), np.float32)
    product, at_once = pool.bind(_linear_stream, parts), together(m, FORMS[storage])

    def run(reads: Sequence[Array], writes: Sequence[Array], _alive: tuple[object, ...] = alive) -> None:
        residual = reads[1] if has_residual else none
        product(STORAGE[storage], reads[0], writes[0], residual, table, activation, at_once)

    return run
