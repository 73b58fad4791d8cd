"""The register tile of every matmul, as LLVM vector IR, and the activation and residual after it.

A tile [rows, NR] of sums stays in vector registers while k runs: per step one load for each vector of the panel, one
broadcast for each row, and a fused multiply-add for each pair (as in BLIS, Van Zee and van de Geijn 2015). Every sum
runs over k in ascending order, one term at a time, for any number of rows: a row's bits do not depend on its tile.
Kernels call it by address, in loops of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, Final, Literal

import numpy as np
from llvmlite import ir

from hepti_mqtt.kernels import elementary
from hepti_mqtt.kernels.base import Check
from hepti_mqtt.kernels.cpu import TILE, Tile
from hepti_mqtt.kernels.ir_vectors import F32, LINE, VectorWriter, emit_sized, in_order, loop
from hepti_mqtt.kernels.jit import fetch_to_read, fetch_to_write, floats, helper, lowered

MR: Final = TILE.rows
NR: Final = TILE.width

# Sums that hide the latency of a multiply-add: two begin in a cycle and take four (AMD, Intel), or fewer begin and take
# longer (ARM). And values of sums with which a tile reads 64 bytes of f32 weights in a cycle, the first-level cache's
# rate.
_SUMS: Final = 8
_VALUES: Final = 64

Layout = Literal["rows", "columns"]

_ARGUMENTS: Final = 10


def panels_at_once(rows: int, vectors: int, lanes: int) -> int:
    """Return the number of panels of a tile of few rows, so that it does not wait for its own sums.

    vectors: of a panel. lanes: f32 values of a vector.
    """
    return max(1, min(_SUMS // (rows * vectors), _VALUES // (rows * vectors * lanes)))


class TileWriter(VectorWriter):
    """Writes the LLVM function of one tile: (a, stride of a, k, b, start, stride of start, c, stride of c,
    ahead, bytes ahead).

    a is [rows, k] (layout `rows`) or [k, rows] (`columns`), b is the first `vectors` vectors of [k, NR] with
    NR = tile.width, or several such adjacent panels; start and c are [rows, vectors]. Addresses; strides in floats.
    With `prefetch`, every step of k prefetches the next "bytes ahead" of memory from `ahead` on, for the next tiles.
    """

    def __init__(
        self, module: ir.Module, name: str, tile: Tile, rows: int, vectors: int, layout: Layout, prefetch: bool
    ) -> None:
        super().__init__(module, name, _ARGUMENTS, tile.lanes, tile.fma)
        self.tile, self.rows, self.vectors, self.layout, self.prefetched = tile, rows, vectors, layout, prefetch
        self.steps = tile.steps if vectors == tile.vectors or tile.steps == 1 else 0
        a, self.stride, self.k, b, start, self.start_stride, c, self.c_stride, self.ahead, self.bytes_ahead = (
            self.function.args
        )
        self.a, self.b, self.start, self.c = (self.pointer(p, F32) for p in (a, b, start, c))

    def write(self) -> ir.Function:
        """Return the finished function."""
        b = self.builder
        start = [self._start(i, j) for i in range(self.rows) for j in range(self.vectors)]
        if self.prefetched:
            # A loop without prefetches: a prefetch beyond the first-level cache costs as much as a read.
            with b.if_then(b.icmp_signed("==", self.bytes_ahead, self.whole(0))):
                self._write(start, prefetch=False)
        self._write(start, self.prefetched)
        return self.function

    def _write(self, start: list[Any], prefetch: bool) -> None:
        b = self.builder
        at_rows = [b.gep(self.a, [b.mul(self.stride, self.whole(i))]) for i in range(self.rows)]
        left = self._column if self.layout == "columns" else None
        for place, total in enumerate(self._over_k(at_rows, start, left, prefetch)):
            i, j = divmod(place, self.vectors)
            self._store(total, self.c, self._at(self.c_stride, i, j))
        b.ret_void()

    def _over_k(
        self,
        at_rows: list[Any],
        start: list[Any],
        left: Callable[[Any], list[Any]] | None = None,
        prefetch: bool = False,
    ) -> list[Any]:
        """Return the sums over all of k. left: returns the broadcasts of all rows at p, by default of `at_rows`."""
        b, first = self.builder, self.whole(0)

        def one(p: Any) -> list[Any]:
            return left(p) if left else self._splats(at_rows, p)

        def turn(p: Any) -> Iterator[list[Any]]:
            if by_lane:
                yield from self._lanes_of_rows(at_rows, p)
            else:
                yield from (one(b.add(p, self.whole(q))) for q in range(count))

        by_lane = self.tile.lane_broadcast and not left
        # More than two steps and a prefetch need too many addresses for the registers.
        count = self.lanes if by_lane else min(self.steps, 2) if prefetch else self.steps
        if count > 1:
            first = b.and_(self.k, self.whole(-count))
            start = self._loop(self.whole(0), first, count, start, turn, prefetch)
        return self._loop(first, self.k, 1, start, lambda p: iter([one(p)]), prefetch)

    def _start(self, i: int, j: int) -> Any:
        return self._load(self.start, self._at(self.start_stride, i, j))

    def _at(self, stride: Any, i: int, j: int) -> Any:
        return self.builder.add(self.builder.mul(stride, self.whole(i)), self.whole(j * self.lanes))

    def _loop(
        self,
        first: Any,
        stop: Any,
        step: int,
        start: list[Any],
        left: Callable[[Any], Iterator[list[Any]]],
        prefetch: bool,
    ) -> list[Any]:
        """Run p from first to stop; `left(p)` writes the broadcast of every row, for `step` values of k in turn."""
        b = self.builder

        def turn(p: Any, sums: list[Any]) -> list[Any]:
            rows_of = left(p)
            for q in range(step):
                if q and self.steps:
                    sums = in_order(b, sums)
                rows = next(rows_of)
                at = b.mul(b.add(p, self.whole(q)), self.whole(self.tile.width))
                panel = [self._load(self.b, b.add(at, self._in_panel(j))) for j in range(self.vectors)]
                if prefetch and q == 0:
                    self._prefetch(p, step)
                pairs = product(rows, panel)
                sums = [self.multiply_add(x, w, s) for (x, w), s in zip(pairs, sums, strict=True)]
            return sums

        return loop(b, (first, stop, step), start, turn, as_written=bool(self.steps))

    def _in_panel(self, j: int) -> Any:
        """Return the offset of vector j from the first one of a step; after a panel the next one follows."""
        panel, place = divmod(j, self.tile.panel or self.tile.vectors)
        within = self.whole(place * self.lanes)
        return (
            self.builder.add(self.builder.mul(self.k, self.whole(panel * self.tile.width)), within) if panel else within
        )

    def _prefetch(self, p: Any, step: int) -> None:
        """Prefetch the share of steps p to p + step: lines of 64 bytes, for half of the panel at least."""
        b, nbytes = self.builder, 4 * self.tile.width * step
        count = max(nbytes // 128, min(nbytes // LINE, 2), 1)
        for nth in range(count):
            address = b.add(self.ahead, b.mul(p, self.bytes_ahead))
            if nth:
                share = b.mul(self.bytes_ahead, self.whole(step * nth))
                address = b.add(address, b.udiv(share, self.whole(count)))
            self.prefetch(address, 2)

    def _splats(self, at_rows: list[Any], p: Any) -> list[Any]:
        return [self.splat(self._scalar(row, p)) for row in at_rows]

    def _lanes_of_rows(self, at_rows: list[Any], p: Any) -> list[list[Any]]:
        vectors = [self._load(row, p) for row in at_rows]
        return [[self.lane(v, lane) for v in vectors] for lane in range(self.lanes)]

    def _column(self, p: Any) -> list[Any]:
        at = self.builder.gep(self.a, [self.builder.mul(self.stride, p)])
        whole = self.rows // self.lanes * self.lanes if self.tile.lane_broadcast else 0
        vectors = [self._load(at, self.whole(i)) for i in range(0, whole, self.lanes)]
        lanes = [self.lane(v, lane) for v in vectors for lane in range(self.lanes)]
        return lanes + [self.splat(self._scalar(at, self.whole(i))) for i in range(whole, self.rows)]

    def _scalar(self, base: Any, offset: Any) -> Any:
        return self.load(self.builder.gep(base, [offset]), F32)

    def _load(self, base: Any, offset: Any) -> Any:
        return self.load(self.builder.gep(base, [offset]))

    def _store(self, value: Any, base: Any, offset: Any) -> None:
        self.store(value, self.builder.gep(base, [offset]))


def emit_tile(layout: Layout, tile: Tile, prefetch: bool = False) -> Callable[..., Any]:
    """Return the Numba intrinsic that calls the tile of any number of rows and vectors up to those of `tile`.

    Arguments: those of `panel_of_rows`; with `prefetch` also the first address to fetch (need not be valid) and the
    bytes to fetch for each k: memory that is needed next.
    """

    def write(module: ir.Module, name: str, rows: int, vectors: int) -> ir.Function:
        return TileWriter(module, name, tile, rows, vectors, layout, prefetch).write()

    prefix = f"hepti_panel{'_ahead' if prefetch else ''}_{layout}"
    return emit_sized(prefix, tile.sizes(), _ARGUMENTS, write, _ARGUMENTS if prefetch else _ARGUMENTS - 2)


def _plain_tile(left: Any, width: int, b: int, start: int, start_stride: int, c: int, c_stride: int) -> None:
    rows, k = left.shape
    right = floats(b, k * NR).reshape(k, NR)[:, :width]
    sums = [floats(start + 4 * i * start_stride, width) + left[i] @ right for i in range(rows)]
    for i in range(rows):
        floats(c + 4 * i * c_stride, width)[:] = sums[i]


def _plain_panel(
    rows: int, vectors: int, a: int, stride: int, k: int, b: int, start: int, start_stride: int, c: int, c_stride: int
) -> None:
    left = np.stack([floats(a + 4 * i * stride, k) for i in range(rows)])
    _plain_tile(left, vectors * TILE.lanes, b, start, start_stride, c, c_stride)


def plain_panels(
    rows: int, panels: int, a: int, stride: int, k: int, b: int, start: int, start_stride: int, c: int, c_stride: int
) -> None:
    """Compute a tile over several adjacent panels."""
    for p in range(panels):
        of_panel = (b + 4 * p * k * NR, start + 4 * p * NR, start_stride, c + 4 * p * NR, c_stride)
        _plain_panel(rows, TILE.vectors, a, stride, k, *of_panel)


def plain_panel_ahead(*arguments: int) -> None:
    """Compute a tile with prefetches; the last two arguments are not used."""
    _plain_panel(*arguments[:-2])


def _plain_panel_of_columns(
    rows: int, vectors: int, a: int, stride: int, k: int, b: int, start: int, start_stride: int, c: int, c_stride: int
) -> None:
    left = np.asarray([floats(a + 4 * p * stride, rows) for p in range(k)], np.float32).reshape(k, rows).T
    _plain_tile(left, vectors * TILE.lanes, b, start, start_stride, c, c_stride)


# Fill c [rows, vectors] with start + a @ b, where a is [rows, k] (panel_of_rows) or the transpose of [k, rows]
# (panel_of_columns) and b the first `vectors` vectors of [k, NR]. Arguments: rows (1 to MR), vectors (1 to
# TILE.vectors), a, floats between rows of a as stored, k, b, start, floats between rows of start (0 repeats one row),
# c, floats between rows of c; all but the numbers are addresses.
panel_of_rows: Final = lowered(emit_tile("rows", TILE), _plain_panel)
panel_of_columns: Final = lowered(emit_tile("columns", TILE), _plain_panel_of_columns)


ACTIVATIONS: Final = (
    None,
    "gelu",
    "gelu_tanh",
    "relu",
    "tanh",
    "relu6",
    "leaky_relu",
    "silu",
    "sigmoid",
    "hard_sigmoid",
    "hard_swish",
    "quick_gelu",
)
NONE, GELU, GELU_TANH, RELU, TANH, RELU6, LEAKY_RELU, SILU, SIGMOID, HARD_SIGMOID, HARD_SWISH, QUICK_GELU = range(12)

_LINE: Final = 16  # floats of a cache line

_gelu, _gelu_tanh, _relu, _tanh = elementary.gelu, elementary.gelu_tanh, elementary.relu, elementary.tanh
_relu6, _leaky_relu, _silu = elementary.relu6, elementary.leaky_relu, elementary.silu
_quick_gelu = elementary.quick_gelu
_sigmoid, _hard_sigmoid, _hard_swish = elementary.sigmoid, elementary.hard_sigmoid, elementary.hard_swish


def activation_of(check: Check, name: str | None) -> int:
    """Return the place of an activation in `ACTIVATIONS`; ValueError if it is unknown."""
    check.that(name in ACTIVATIONS, f"activation {name!r} is not in {ACTIVATIONS}")
    return ACTIVATIONS.index(name)


@helper
def activate(tile: Any, activation: int) -> None:
    """Replace tile by its activation."""
    if activation == GELU:
        for i in range(tile.size):
            tile[i] = _gelu(tile[i])
    elif activation == GELU_TANH:
        for i in range(tile.size):
            tile[i] = _gelu_tanh(tile[i])
    elif activation == RELU:
        for i in range(tile.size):
            tile[i] = _relu(tile[i])
    elif activation == TANH:
        for i in range(tile.size):
            tile[i] = _tanh(tile[i])
    elif activation == RELU6:
        for i in range(tile.size):
            tile[i] = _relu6(tile[i])
    elif activation == LEAKY_RELU:
        for i in range(tile.size):
            tile[i] = _leaky_relu(tile[i])
    elif activation == SILU:
        for i in range(tile.size):
            tile[i] = _silu(tile[i])
    elif activation == QUICK_GELU:
        for i in range(tile.size):
            tile[i] = _quick_gelu(tile[i])
    elif activation == SIGMOID:
        for i in range(tile.size):
            tile[i] = _sigmoid(tile[i])
    elif activation == HARD_SIGMOID:
        for i in range(tile.size):
            tile[i] = _hard_sigmoid(tile[i])
    elif activation == HARD_SWISH:
        for i in range(tile.size):
            tile[i] = _hard_swish(tile[i])


@helper
def fetch_rows(row: int, rows: int, out: Any, residual: Any, column: int, valid: int) -> None:
    """Prefetch the memory that `store` will write and read, while the tile computes.

    Rows lie KB apart, so the hardware does not prefetch the next one. If rows do not begin with a cache line, the first
    line of a panel is the last one of the previous panel.
    """
    for i in range(rows):
        for j in range(0, valid, _LINE):
            at = 4 * ((row + i) * out.shape[1] + column + min(j + _LINE, valid) - 1)
            fetch_to_write(out.ctypes.data + at)
            if residual.size > 0:
                fetch_to_read(residual.ctypes.data + at)


@helper
def store(tile: Any, stride: int, row: int, rows: int, out: Any, residual: Any, column: int, valid: int) -> None:
    """Copy `valid` columns of tile [rows, stride] to out[row :, column :], and add those of residual if it has any.

    Rows are taken by address: with an index that Numba could not prove to be >= 0, every store was a scatter.
    """
    for i in range(rows):
        sums = floats(tile.ctypes.data + 4 * i * stride, valid)
        target = floats(out.ctypes.data + 4 * ((row + i) * out.shape[1] + column), valid)
        if residual.size > 0:
            added = floats(residual.ctypes.data + 4 * ((row + i) * residual.shape[1] + column), valid)
            for j in range(valid):
                target[j] = sums[j] + added[j]
        else:
            for j in range(valid):
                target[j] = sums[j]
