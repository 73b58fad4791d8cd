"""Kernel `linear` for as few rows as leave a tile with few sums, over weights in f32: several panels at once.

One row of a panel has two sums (AVX2, SSE, NEON), and each multiply-add waits some cycles for the one before it: so a
matrix in a cache was read at half of what the cache gives, and one in memory as a single stream. A tile over as many
panels as make eight sums has neither limit. A sum still runs over k in ascending order, so its bits are those of any
other tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import float32, types
from numpy.typing import NDArray

from hepti_mqtt.kernels.base import Array, Run
from hepti_mqtt.kernels.gemm.epilogue import NONE, activate, store
from hepti_mqtt.kernels.gemm.tile import TileWriter, call_chosen, panels_at_once, plain_panels
from hepti_mqtt.kernels.machine.isa import TILE, Tile
from hepti_mqtt.kernels.machine.jit import INT, TABLE, fills, kernel, lowered, reads
from hepti_mqtt.kernels.machine.workers import Workers, parts_of_panels

_NR: Final = TILE.width
_ADDRESS, _COLUMN, _VALID = 0, 1, 2  # columns of the table of panels, as in `linear`


def together(rows: int, tile: Tile) -> int:
    """Return how many panels a tile of so many rows goes down at once."""
    return panels_at_once(rows, tile.vectors, tile.lanes)


def most_rows(tile: Tile) -> int:
    """Return the most rows for which that is more than one, 0 if it never is."""
    return max((rows for rows in range(1, tile.rows + 1) if together(rows, tile) > 1), default=0)


MOST_ROWS: Final = most_rows(TILE)


def sizes(tile: Tile) -> list[tuple[int, int]]:
    """Return the tiles that there are, by rows and vectors: over one panel, and over as many as go together."""
    rows = range(1, max(most_rows(tile), 1) + 1)
    return list(dict.fromkeys((r, n * tile.vectors) for r in rows for n in (1, together(r, tile))))


def write_panels(module: ir.Module, name: str, tile: Tile, rows: int, vectors: int) -> ir.Function:
    """Return the function of one tile over `vectors` of adjacent panels."""
    over = tile._replace(rows=rows, vectors=vectors, panel=tile.vectors, steps=0)
    return TileWriter(module, name, over, rows, vectors, "rows", prefetch=False).write()


def _emit(
    _context: Any, _rows: Any, _panels: Any, _a: Any, _as: Any, _k: Any, _b: Any, _s: Any, _ss: Any, _c: Any, _cs: Any
) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        rows, panels, *rest = arguments
        nothing = ir.Constant(ir.IntType(64), 0)
        vectors = builder.mul(panels, ir.Constant(ir.IntType(64), TILE.vectors))

        def written(name: str, count: int, width: int) -> ir.Function:
            return write_panels(builder.module, name, TILE, count, width)

        call_chosen(builder, (rows, vectors), sizes(TILE), "hepti_panels_rows", written, [*rest, nothing, nothing])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), codegen


# Fill c [rows, panels * NR] with start + a @ [b_1 | b_2 ...], b_i panels of k rows that lie one behind the other.
# Arguments: rows (1 to MOST_ROWS), panels (1, or `together`), a, floats between rows of a, k, b, start, floats
# between rows of start, c, floats between rows of c.
panels_of_rows: Final = lowered(_emit, plain_panels)


@kernel(
    reads(float32, 2), fills(float32, 2), reads(float32, 2), TABLE, fills(float32, 2), INT, INT, INT, INT, part=2,
    seldom=MOST_ROWS == 0,
)  # fmt: skip
def _linear_few(
    x: Any,
    out: Any,
    residual: Any,
    panels: Any,
    bias: Any,
    activation: int,
    at_once: int,
    first_panel: int,
    last_panel: int,
) -> None:
    """Fill the columns of some panels in all rows of out, `at_once` of them together where they are adjacent."""
    rows, k = x.shape
    plain = activation == NONE and residual.size == 0
    sums = np.empty(rows * at_once * _NR, np.float32)
    p = first_panel
    while p < last_panel:
        count = at_once if p + at_once <= last_panel else 1
        # Each lies behind the one before, which has no columns that are not kept.
        for q in range(p + 1, p + count):
            behind = panels[q, _ADDRESS] == panels[q - 1, _ADDRESS] + 4 * k * _NR
            if not (behind and panels[q, _COLUMN] == panels[q - 1, _COLUMN] + _NR):
                count = 1
                break
        column, valid = panels[p, _COLUMN], panels[p + count - 1, _VALID] + _NR * (count - 1)
        place, stride = sums.ctypes.data, count * _NR
        direct = plain and valid == stride
        if direct:
            place, stride = out.ctypes.data + 4 * column, out.shape[1]
        start = bias.ctypes.data + 4 * _NR * p
        panels_of_rows(rows, count, x.ctypes.data, k, k, panels[p, _ADDRESS], start, 0, place, stride)
        if not direct:
            tile = sums[: rows * stride]
            activate(tile, activation)
            store(tile, stride, 0, rows, out, residual, column, valid)
        p += count


def bind(
    shape: tuple[int, int],
    table: NDArray[np.int64],
    bias: NDArray[np.float32],
    alive: tuple[object, ...],
    has_residual: bool,
    activation: int,
    pool: Workers,
) -> Run:
    """Return the run of a checked product of at most MOST_ROWS rows, as `linear.bind_product` does.

    table, bias: of `linear.panels_of`. alive: what the addresses in the table belong to.
    """
    m, k = shape
    parts = parts_of_panels(len(table), m * _NR * k, pool.threads)
    none, at_once = np.empty((0, 0), np.float32), together(m, TILE)
    product = pool.bind(_linear_few, parts)

    def run(reads: Sequence[Array], writes: Sequence[Array], _alive: tuple[object, ...] = alive) -> None:
        residual = reads[1] if has_residual else none
        product(reads[0], writes[0], residual, table, bias, activation, at_once)

    return run
