"""Register tiles of a convolution, as LLVM vector IR: some pixels times some vectors of columns, read where they lie.

A tile has, for each place of a patch, the address of each of its pixels, or of zeros beyond the map (the indirect
convolution of Dukhan 2019): no patch is copied. Sums stay in registers over all places. `places` multiplies the
channels of a place by rows of a packed panel, as the tile of a matmul does; `depthwise` multiplies channel by channel.
Each sum runs over places, then channels, in ascending order: its bits do not depend on the tile that it falls into.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import product
from typing import Any, Final, Literal

import numpy as np
from llvmlite import ir
from numba import types

from hepti_mqtt.kernels.gemm.tile import TileWriter, call_chosen
from hepti_mqtt.kernels.machine.addresses import floats
from hepti_mqtt.kernels.machine.isa import TILE, Tile
from hepti_mqtt.kernels.machine.jit import lowered

# Pixels between the addresses of one place and those of the next one in the table of places.
PIXELS: Final = 384

Kind = Literal["places", "depthwise"]

_F32: Final = ir.FloatType()
_I64: Final = ir.IntType(64)


class PlacesWriter(TileWriter):
    """Writes the LLVM function of one tile: (table, places, depth, b, start, stride of start, c, stride of c,
    offset, finish).

    table: i64 [places, PIXELS], addresses of pixels; b: [places * depth, width], or [places, width] if depthwise, where
    depth means nothing; offset: bytes from the address of a pixel to its first channel; finish: 0, or the address of
    (f32 low, f32 high, i64 bytes from c to the residual or 0, i64 whether it is added before sums are cut to
    low..high).
    """

    def __init__(self, module: ir.Module, name: str, tile: Tile, rows: int, vectors: int, kind: Kind) -> None:
        super().__init__(module, name, tile, rows, vectors, "rows", prefetch=False)
        self.kind = kind

    def write(self) -> ir.Function:
        """Return the finished function."""
        b, panel = self.builder, self.b
        start = [self._start(i, j) for i in range(self.rows) for j in range(self.vectors)]
        before, body, after = b.block, b.append_basic_block("place"), b.append_basic_block("places.done")
        b.branch(body)
        b.position_at_end(body)
        place = b.phi(_I64)
        sums = [b.phi(self.vector) for _ in start]
        at_rows = [self._pixel(place, i) for i in range(self.rows)]
        depth = self._int(1) if self.kind == "depthwise" else self.k
        self.b = b.gep(panel, [b.mul(b.mul(place, depth), self._int(self.tile.width))])
        new = self._by_channel(at_rows, sums) if self.kind == "depthwise" else self._over_k(at_rows, sums)
        following = b.add(place, self._int(1))
        end = b.block
        b.cbranch(b.icmp_signed("<", following, self.stride), body, after)
        place.add_incoming(self._int(0), before)
        place.add_incoming(following, end)
        for phi, first, value in zip(sums, start, new, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, end)
        b.position_at_end(after)
        with b.if_then(b.icmp_signed("==", self.bytes_ahead, self._int(0))):
            self._store_all(new)
            b.ret_void()
        self._finish(new)
        b.ret_void()
        return self.function

    def _pixel(self, place: Any, i: int) -> Any:
        b = self.builder
        at = b.add(b.mul(place, self._int(PIXELS)), self._int(i))
        address = b.load(b.gep(b.bitcast(self.a, _I64.as_pointer()), [at]))
        return b.inttoptr(b.add(address, self.ahead), _F32.as_pointer())

    def _by_channel(self, at_rows: list[Any], sums: list[Any]) -> list[Any]:
        weights = [self._load(self.b, self._int(j * self.tile.lanes)) for j in range(self.vectors)]
        return [
            self.builder.call(
                self.multiply_add,
                [self._load(row, self._int(j * self.tile.lanes)), w, sums[i * self.vectors + j]],
            )
            for i, row in enumerate(at_rows)
            for j, w in enumerate(weights)
        ]

    def _store_all(self, values: list[Any]) -> None:
        for place, value in enumerate(values):
            self._store(value, self.c, self._at(self.c_stride, *divmod(place, self.vectors)))

    def _finish(self, sums: list[Any]) -> None:
        """Add the residual, cut to low..high and store, in the order that `finish` says."""
        b = self.builder
        limits = b.inttoptr(self.bytes_ahead, _F32.as_pointer())
        low, high = (self._splat_of(self._scalar(limits, self._int(i))) for i in range(2))
        words = b.inttoptr(self.bytes_ahead, _I64.as_pointer())
        apart, is_first = (b.load(b.gep(words, [self._int(i)])) for i in (1, 2))
        has, first = (b.icmp_signed("!=", value, self._int(0)) for value in (apart, is_first))
        residual = b.inttoptr(b.add(b.ptrtoint(self.c, _I64), apart), _F32.as_pointer())
        sums = self._added(sums, residual, b.and_(has, first))
        # A comparison with NaN is false: NaN stays.
        sums = [b.select(b.fcmp_ordered("<", value, low), low, value) for value in sums]
        sums = [b.select(b.fcmp_ordered(">", value, high), high, value) for value in sums]
        self._store_all(self._added(sums, residual, b.and_(has, b.not_(first))))

    def _added(self, sums: list[Any], residual: Any, condition: Any) -> list[Any]:
        b = self.builder
        before, then, after = b.block, b.append_basic_block("residual"), b.append_basic_block("residual.done")
        b.cbranch(condition, then, after)
        b.position_at_end(then)
        places = [self._at(self.c_stride, *divmod(place, self.vectors)) for place in range(len(sums))]
        added = [b.fadd(value, self._load(residual, at)) for value, at in zip(sums, places, strict=True)]
        b.branch(after)
        b.position_at_end(after)
        results = [b.phi(self.vector) for _ in sums]
        for phi, value, more in zip(results, sums, added, strict=True):
            phi.add_incoming(value, before)
            phi.add_incoming(more, then)
        return results


def _emit(kind: Kind, tile: Tile) -> Callable[..., Any]:
    """Return the Numba intrinsic that calls the tile of some rows and vectors by number."""

    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        rows, vectors, *rest = arguments

        def written(name: str, count: int, width: int) -> ir.Function:
            return PlacesWriter(builder.module, name, tile, count, width, kind).write()

        sizes = [(count, width) for width, count in product(range(1, tile.vectors + 1), range(1, tile.rows + 1))]
        call_chosen(builder, (rows, vectors), sizes, f"hepti_{kind}", written, rest)
        return context.get_dummy_value()

    def emit(
        _context: Any,
        _rows: Any,
        _vectors: Any,
        _table: Any,
        _places: Any,
        _depth: Any,
        _b: Any,
        _s: Any,
        _ss: Any,
        _c: Any,
        _cs: Any,
        _offset: Any,
        _finish: Any,
    ) -> Any:
        return types.void(*[types.int64] * 12), codegen

    return emit


def _plain(kind: Kind) -> Callable[..., None]:
    def tile(rows: int, vectors: int, *rest: int) -> None:
        table, places, depth, b, start, start_stride, c, c_stride, offset, finish = map(int, rest)
        width, depth = vectors * TILE.lanes, depth if kind == "places" else 1
        right = floats(b, places * depth * TILE.width).reshape(places, depth, TILE.width)[..., :width]
        low, high = floats(finish, 2) if finish else (0, 0)
        _, apart, is_first = (ctypes.c_int64 * 3).from_address(finish) if finish else (0, 0, 0)
        for i in range(rows):
            total = floats(start + 4 * i * start_stride, width).copy()
            for place in range(places):
                address = ctypes.c_int64.from_address(table + 8 * (place * PIXELS + i)).value + offset
                if kind == "places":
                    total += floats(address, depth) @ right[place]
                else:
                    total += floats(address, width) * right[place, 0]
            out = floats(c + 4 * i * c_stride, width)
            residual = floats(c + apart + 4 * i * c_stride, width) if apart else np.zeros(width, np.float32)
            if finish:
                total = total + residual if is_first else total
                total = np.where(total < low, low, np.where(total > high, high, total))
                total = total if is_first else total + residual
            out[:] = total

    return tile


# Fill c [rows, vectors] with start + the products of a tile, and finish it. Arguments: rows (1 to MR), vectors (1 to
# TILE.vectors), and those of `PlacesWriter`.
places_tile: Final = lowered(_emit("places", TILE), _plain("places"))
depthwise_tile: Final = lowered(_emit("depthwise", TILE), _plain("depthwise"))
