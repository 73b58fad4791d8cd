"""Kernel `linear` over matrices in blocks; reads, weights, bias, activation and residual are those of `linear`.

x is f32, or (attribute x: "i8") each 32 values of a row are rounded to 254 steps between minus and plus the largest
one, as llama.cpp does; one that is not finite makes its row NaN. Codes are multiplied as they are stored; an output is
the sum of its blocks in ascending order of k, each the sum of its products times the block's scale. Each output depends
on its row of x and its column alone: not on other rows, its tile or the threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32
from numpy.typing import NDArray

from hepti_mqtt.kernels.base import Array, Run
from hepti_mqtt.kernels.block_tile import KINDS, ROWS, WORDS, block_tile
from hepti_mqtt.kernels.blocks import WIDTH, BlockMatrix
from hepti_mqtt.kernels.elementary import bits_of, from_bits
from hepti_mqtt.kernels.jit import INT, TABLE, fills, helper, kernel, reads
from hepti_mqtt.kernels.threads import Workers, matmul_parts
from hepti_mqtt.kernels.tile import NONE, activate, store
from hepti_mqtt.storage import BLOCK

# Columns of the table of panels: addresses of codes and bias, the storage, first column of the output, how many count.
_CODES, _BIAS, _KIND, _COLUMN, _VALID = range(5)
_STEPS, _TINY = np.float32(127), np.float32(1e-35)  # of a block of x, and magnitudes below which it counts as 0
_ROWS: Final = 192  # of x that pass over a panel at a time, so that they stay in the second-level cache


@helper
def _add_up(x: Any, words: Any, first: int, rows: int) -> None:
    """Fill the sums of blocks of some rows of x among their words."""
    for i in range(rows):
        for n in range(words.shape[1]):
            halves = np.float32(0), np.float32(0)
            for j in range(BLOCK // 2):
                halves = halves[0] + x[first + i, BLOCK * n + j], halves[1] + x[first + i, BLOCK * n + j + BLOCK // 2]
            words[i, n, 1] = halves[0] + halves[1]
            words[i, n, 2] = np.float32(-8) * (halves[0] + halves[1])
            words[i, n, 4], words[i, n, 5] = np.float32(-32) * halves[0], np.float32(-32) * halves[1]


@helper
def _round(x: Any, codes: Any, words: Any, first: int, rows: int) -> None:
    """Fill the codes and the words of some rows of x."""
    for i in range(rows):
        for n in range(words.shape[1]):
            top = np.int32(0)
            for j in range(BLOCK):
                # The bits of f32 >= 0 are ordered like the values, with infinity and NaN above all.
                top = max(top, bits_of(abs(x[first + i, BLOCK * n + j])))
            most = from_bits(top)
            step = most / _STEPS if most < np.inf else np.float32(np.nan)
            by = _STEPS / most if _TINY < most < np.inf else np.float32(0)
            behind = total = np.int32(0)
            for j in range(BLOCK):
                code = np.int32(np.rint(x[first + i, BLOCK * n + j] * by)) if by > 0 else np.int32(0)
                codes[i, BLOCK * n + j] = np.int8(code)
                total += code
                behind += code if j >= BLOCK // 2 else np.int32(0)
            words[i, n, 0], words[i, n, 1] = step, step * np.float32(total)
            words[i, n, 2], words[i, n, 3] = from_bits(np.int32(-8 * total)), from_bits(np.int32(-128 * total))
            words[i, n, 4] = from_bits(np.int32(-32 * (total - behind)))
            words[i, n, 5] = from_bits(np.int32(-32 * behind))


@kernel(reads(float32, 2), fills(float32, 2), reads(float32, 2), TABLE, *[INT] * 6, part=4, narrow=True)
def _linear_blocks(
    x: Any, out: Any, residual: Any, panels: Any, activation: int, rounded: int, first_panel: int, last_panel: int,
    first_row: int, last_row: int,
) -> None:  # fmt: skip
    """Fill the columns of some panels in some rows of out; panels [P, 5]. rounded: whether x becomes codes."""
    k, width = x.shape[1], out.shape[1]
    plain = activation == NONE and residual.size == 0
    words = np.empty((min(_ROWS, last_row - first_row), k // BLOCK, WORDS), np.float32)
    codes = np.empty((len(words) * rounded, k), np.int8)
    sums = np.empty(ROWS * WIDTH, np.float32)
    for first in range(first_row, last_row, _ROWS):
        rows = min(_ROWS, last_row - first)
        if rounded:
            _round(x, codes, words, first, rows)
        else:
            _add_up(x, words, first, rows)
        # Tiles of nearly equal height: 7 rows as 4 + 3 keep the pipelines fuller than 6 + 1.
        tiles = -(-rows // ROWS)
        for p in range(first_panel, last_panel):
            column, valid = panels[p, _COLUMN], panels[p, _VALID]
            direct = plain and valid == WIDTH
            for t in range(tiles):
                i = t * rows // tiles
                count = (t + 1) * rows // tiles - i
                # Addresses are read where they are used: an array of which nothing is read any more is freed.
                left, row_bytes = x.ctypes.data + 4 * k * (first + i), 4 * k
                if rounded:
                    left, row_bytes = codes.ctypes.data + k * i, k
                of_blocks, stride = words.ctypes.data + 4 * WORDS * (k // BLOCK) * i, 4 * WORDS * (k // BLOCK)
                c, c_stride = sums.ctypes.data, 4 * WIDTH
                if direct:
                    c, c_stride = out.ctypes.data + 4 * (width * (first + i) + column), 4 * width
                block_tile(
                    count, 2 * panels[p, _KIND] + 1 - rounded, panels[p, _CODES], k // BLOCK, left, row_bytes,
                    of_blocks, stride, panels[p, _BIAS], 0, c, c_stride
                )  # fmt: skip
                if not direct:
                    tile = sums[: count * WIDTH]
                    activate(tile, activation)
                    store(tile, WIDTH, first + i, count, out, residual, column, valid)


def bind(
    shape: tuple[int, int],
    matrices: Sequence[BlockMatrix],
    biases: Sequence[NDArray[np.float32]],
    has_residual: bool,
    activation: int,
    rounded: bool,
    pool: Workers,
) -> Run:
    """Return the run of a checked `linear` over x of `shape` [m, k], as `linear.bind_product` does.

    The matrices may be in several storages. rounded: whether x becomes codes.
    """
    m, k = shape
    table, alive = _panels_of(matrices, biases)
    parts = matmul_parts(len(table), bool(table[-1, _VALID] < WIDTH), m, WIDTH * k, pool.threads, ROWS)
    product, none = pool.bind(_linear_blocks, parts), np.empty((0, 0), np.float32)

    def run(reads: Sequence[Array], writes: Sequence[Array], _alive: tuple[object, ...] = alive) -> None:
        product(reads[0], writes[0], reads[1] if has_residual else none, table, activation, int(rounded))

    return run


def _panels_of(
    matrices: Sequence[BlockMatrix], biases: Sequence[NDArray[np.float32]]
) -> tuple[NDArray[np.int64], tuple[object, ...]]:
    """Return the table of panels, and what must live as long as it, since it has only addresses."""
    table: list[tuple[int, ...]] = []
    padded_biases: list[NDArray[np.float32]] = []
    column = 0
    for place, matrix in enumerate(matrices):
        padded = np.zeros((len(matrix.panels), WIDTH), np.float32)
        if biases:
            padded.reshape(-1)[: matrix.columns] = biases[place]
        padded_biases.append(padded)
        codes, bias = (a.__array_interface__["data"][0] for a in (matrix.panels, padded))
        for p in range(len(matrix.panels)):
            valid = min(WIDTH, matrix.columns - p * WIDTH)
            at = (codes + p * matrix.panels[0].nbytes, bias + 4 * WIDTH * p)
            table.append((*at, KINDS[matrix.storage.name], column + p * WIDTH, valid))
        column += matrix.columns
    return np.asarray(table, np.int64).reshape(-1, 5), (*matrices, *padded_biases)


def reference_rounded(x: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return what rows of activations [m, k] become as codes, in plain NumPy."""
    parts = np.asarray(x, np.float64).reshape(len(x), -1, BLOCK)
    most = np.abs(parts).max(axis=2, keepdims=True)
    step = np.where(np.isfinite(most), most / 127, np.nan)
    codes = np.rint(np.divide(parts, step, out=np.zeros_like(parts), where=step > _TINY))
    return np.asarray((codes * step).reshape(x.shape), np.float64)
