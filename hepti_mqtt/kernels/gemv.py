"""Kernel `linear` for few rows: f32 over several panels at once, narrow weights down whole panels.

One row of an f32 panel has two sums (AVX2, SSE, NEON), and each multiply-add waits for the one before it. A tile over
enough panels for eight sums reads caches and memory at full speed. A sum still runs over k in ascending order, so its
bits are those of any other tile.

Over narrow weights, one compiled call quantises the rows if needed, and one call of a tile computes each panel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import float32
from numpy.typing import NDArray

from hepti_mqtt.core.plan import WeightDtype
from hepti_mqtt.kernels.calls import Calls, ProductArrays
from hepti_mqtt.kernels.cpu import TILE, Tile
from hepti_mqtt.kernels.ir_vectors import emit_sized
from hepti_mqtt.kernels.jit import INT, TABLE, fills, kernel, lowered, reads
from hepti_mqtt.kernels.panels import BIAS, CODES, COLUMN, SCALES, SUMS, VALID, adjacent, panels_of
from hepti_mqtt.kernels.quantised import F16, W8A8, quantise
from hepti_mqtt.kernels.quantised_tile import FORMS, GROUP, KINDS, narrow_gemv, together
from hepti_mqtt.kernels.threads import Workers, parts_of_panels
from hepti_mqtt.kernels.tile import NONE, TileWriter, activate, panels_at_once, plain_panels, store
from hepti_mqtt.kernels.weights import BLOCK, PANELS, NarrowMatrix

_NR: Final = TILE.width


def panels_together(rows: int, tile: Tile) -> int:
    """Return the number of panels of a tile of `rows` rows."""
    return panels_at_once(rows, tile.vectors, tile.lanes)


def most_rows(tile: Tile) -> int:
    """Return the most rows with several panels, 0 if there are none."""
    return max((rows for rows in range(1, tile.rows + 1) if panels_together(rows, tile) > 1), default=0)


MOST_ROWS: Final = most_rows(TILE)


def tile_sizes(tile: Tile) -> list[tuple[int, int]]:
    """Return the (rows, panels) of all tiles: over one panel, and over `panels_together`."""
    rows = range(1, max(most_rows(tile), 1) + 1)
    return list(dict.fromkeys((r, n) for r in rows for n in (1, panels_together(r, tile))))


def write_panels(module: ir.Module, name: str, tile: Tile, rows: int, vectors: int) -> ir.Function:
    """Return the function of one tile over `vectors` of adjacent panels."""
    over = tile._replace(rows=rows, vectors=vectors, panel=tile.vectors, steps=0)
    return TileWriter(module, name, over, rows, vectors, "rows", prefetch=False).write()


def _write_panels(module: ir.Module, name: str, rows: int, panels: int) -> ir.Function:
    return write_panels(module, name, TILE, rows, panels * TILE.vectors)


# Fill c [rows, panels * NR] with start + a @ [b_1 | b_2 ...], b_i adjacent panels of k rows.
# Arguments: rows (1 to MOST_ROWS), panels (1, or `together`), a, floats between rows of a, k, b, start, floats
# between rows of start, c, floats between rows of c.
panels_of_rows: Final = lowered(emit_sized("hepti_panels_rows", tile_sizes(TILE), 10, _write_panels, 8), plain_panels)


@kernel(
    reads(float32, 2), fills(float32, 2), reads(float32, 2), TABLE, INT, INT, INT, INT, part=2, seldom=MOST_ROWS == 0,
)  # fmt: skip
def _gemv(
    x: Any, out: Any, residual: Any, panels: Any, activation: int, at_once: int, first_panel: int, last_panel: int,
) -> None:  # fmt: skip
    """Fill the columns of some panels in all rows of out, `at_once` of them together where they are adjacent."""
    rows, k = x.shape
    plain = activation == NONE and residual.size == 0
    sums = np.empty(rows * at_once * _NR, np.float32)
    p = first_panel
    while p < last_panel:
        count = adjacent(panels, p, at_once, last_panel, _NR, 4 * k * _NR, 0)
        column, valid = panels[p, COLUMN], panels[p + count - 1, VALID] + _NR * (count - 1)
        place, stride = sums.ctypes.data, count * _NR
        direct = plain and valid == stride
        if direct:
            place, stride = out.ctypes.data + 4 * column, out.shape[1]
        panels_of_rows(rows, count, x.ctypes.data, k, k, panels[p, CODES], panels[p, BIAS], 0, place, stride)
        if not direct:
            tile = sums[: rows * stride]
            activate(tile, activation)
            store(tile, stride, 0, rows, out, residual, column, valid)
        p += count


def bind_f32(
    arrays: ProductArrays,
    table: NDArray[np.int64],
    alive: tuple[object, ...],
    activation: int,
    pool: Workers,
) -> Calls:
    """Return the calls of a checked product of at most MOST_ROWS rows, as `linear.bind_product` does.

    table, alive: of `panels_of`.
    """
    m, k = arrays.x.shape
    parts = parts_of_panels(len(table), m * _NR * k, pool.threads)
    return pool.bind(_gemv, parts, m)(*arrays, table, activation, panels_together(m, TILE), alive=alive)


# The most rows of one tile: a panel is read once, in one call.
MOST_ROWS_QUANTISED: Final = {storage: form.rows for storage, form in FORMS.items()}
_NR_WIDENED: Final = FORMS["f16"].width
_NR_DOT: Final = FORMS["w8a8"].width
_VECTORS: Final = FORMS["f16"].vectors
_VECTORS_DOT: Final = FORMS["w8a8"].vectors


@kernel(INT, reads(float32, 2), fills(float32, 2), reads(float32, 2), TABLE, INT, INT, INT, INT, part=2, narrow=True)
def _gemv_quantised(
    storage: int, x: Any, out: Any, residual: Any, panels: Any, activation: int, at_once: int, first_panel: int,
    last_panel: int,
) -> None:  # fmt: skip
    """Fill the columns of some panels, those of `narrow`, in all rows of out, `at_once` together where adjacent."""
    rows, k = x.shape
    dot = storage == W8A8
    width, vectors = (_NR_DOT, _VECTORS_DOT) if dot else (_NR_WIDENED, _VECTORS)
    plain = activation == NONE and residual.size == 0
    stride, steps, blocks = 4 * k, k, max(1, -(-k // BLOCK))
    quantised = rows if dot else 0
    codes = np.empty((quantised, GROUP * -(-k // GROUP)), np.uint8)
    row_scales, zeros = np.empty((quantised, blocks), np.float32), np.empty((quantised, blocks), np.float32)
    if dot:
        # In every thread: a few thousand values take less than a hand-over.
        quantise(x, codes, row_scales, zeros, 0, rows)
        stride, steps = codes.shape[1], codes.shape[1] // GROUP
    sums = np.empty(rows * width * at_once, np.float32)
    item, scale_bytes = (2, 0) if storage == F16 else (1, 4 * blocks * width)
    p = first_panel
    while p < last_panel:
        count = adjacent(panels, p, at_once, last_panel, width, item * k * width, scale_bytes)
        columns, over = count * width, count * vectors
        column, valid = panels[p, COLUMN], panels[p + count - 1, VALID] + width * (count - 1)
        direct = plain and valid == columns
        weights, bias = panels[p, CODES], panels[p, BIAS]
        of_columns, of_codes = panels[p, SCALES], panels[p, SUMS]
        # Addresses are read at their use: Numba frees an array after its last use.
        left = codes.ctypes.data if dot else x.ctypes.data
        of_rows, zero, scale_stride = row_scales.ctypes.data, zeros.ctypes.data, 4 * blocks
        c, c_stride = sums.ctypes.data, 4 * columns
        if direct:
            c, c_stride = out.ctypes.data + 4 * column, 4 * out.shape[1]
        narrow_gemv(
            storage, rows, over, left, stride, steps, weights, of_rows, zero, scale_stride, of_columns, of_codes,
            bias, 0, c, c_stride, 0, 0
        )  # fmt: skip
        if not direct:
            tile = sums[: rows * columns]
            activate(tile, activation)
            store(tile, columns, 0, rows, out, residual, column, valid)
        p += count


def bind_quantised(
    arrays: ProductArrays,
    matrices: Sequence[NarrowMatrix],
    biases: Sequence[NDArray[np.float32]],
    activation: int,
    pool: Workers,
) -> Calls:
    """Return the calls of `quantised.bind` for at most MOST_ROWS_QUANTISED rows."""
    m, k = arrays.x.shape
    table, alive = panels_of(matrices, biases)
    storage: WeightDtype = matrices[0].storage
    parts = parts_of_panels(len(table), m * PANELS[storage].width * k, pool.threads)
    calls = pool.bind(_gemv_quantised, parts, (m, storage))
    form = FORMS[storage]
    return calls(KINDS.index(form.kind), *arrays, table, activation, together(m, form), alive=alive)
