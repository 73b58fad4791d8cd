"""Register tiles of a convolution and Winograd's transforms, as LLVM vector IR.

A tile has, for each place of a patch, the address of each of its pixels, or of zeros beyond the map (the indirect
convolution of Dukhan 2019): no patch is copied. Sums stay in registers over all places. `places` multiplies the
channels of
a place by rows of a packed panel; `depthwise` multiplies channel by channel. Each sum runs over places, then
channels, in
ascending order: its bits do not depend on its tile.

F(2x2, 3x3): for an input patch d [4, 4], weights g [3, 3] and outputs y [2, 2] (Lavin and Gray 2016),
y = A^T ((G g G^T) * (B^T d B)) A. Along one side: B^T d = (d0 - d2, d1 + d2, d2 - d1, d1 - d3),
G g = (g0, (g0 + g1 + g2) / 2, (g0 - g1 + g2) / 2, g2) and A^T m = (m0 + m1 + m2, m1 - m2 - m3). An output depends
on its
own window alone: d3 enters y1 only, d0 enters y0 only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import numpy as np
from llvmlite import ir

from hepti_mqtt.kernels.cpu import TILE, Tile
from hepti_mqtt.kernels.ir_vectors import F32, I64, VectorWriter, emit_sized, loop
from hepti_mqtt.kernels.jit import floats, lowered
from hepti_mqtt.kernels.tile import TileWriter

# Pixels between the addresses of one place and those of the next one in the table of places.
PIXELS: Final = 384

Kind = Literal["places", "depthwise"]


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
        place = b.phi(I64)
        sums = [b.phi(self.floats) for _ in start]
        at_rows = [self._pixel(place, i) for i in range(self.rows)]
        depth = self.whole(1) if self.kind == "depthwise" else self.k
        self.b = b.gep(panel, [b.mul(b.mul(place, depth), self.whole(self.tile.width))])
        new = self._by_channel(at_rows, sums) if self.kind == "depthwise" else self._over_k(at_rows, sums)
        following = b.add(place, self.whole(1))
        end = b.block
        b.cbranch(b.icmp_signed("<", following, self.stride), body, after)
        place.add_incoming(self.whole(0), before)
        place.add_incoming(following, end)
        for phi, first, value in zip(sums, start, new, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, end)
        b.position_at_end(after)
        with b.if_then(b.icmp_signed("==", self.bytes_ahead, self.whole(0))):
            self._store_all(new)
            b.ret_void()
        self._finish(new)
        b.ret_void()
        return self.function

    def _pixel(self, place: Any, i: int) -> Any:
        b = self.builder
        at = b.add(b.mul(place, self.whole(PIXELS)), self.whole(i))
        address = b.load(b.gep(b.bitcast(self.a, I64.as_pointer()), [at]))
        return self.pointer(b.add(address, self.ahead), F32)

    def _by_channel(self, at_rows: list[Any], sums: list[Any]) -> list[Any]:
        weights = [self._load(self.b, self.whole(j * self.lanes)) for j in range(self.vectors)]
        return [
            self.multiply_add(self._load(row, self.whole(j * self.lanes)), w, sums[i * self.vectors + j])
            for i, row in enumerate(at_rows)
            for j, w in enumerate(weights)
        ]

    def _store_all(self, values: list[Any]) -> None:
        for place, value in enumerate(values):
            self._store(value, self.c, self._at(self.c_stride, *divmod(place, self.vectors)))

    def _finish(self, sums: list[Any]) -> None:
        """Add the residual, cut to low..high and store, in the order that `finish` says."""
        b = self.builder
        limits = b.inttoptr(self.bytes_ahead, F32.as_pointer())
        low, high = (self.splat(self._scalar(limits, self.whole(i))) for i in range(2))
        words = b.inttoptr(self.bytes_ahead, I64.as_pointer())
        apart, is_first = (b.load(b.gep(words, [self.whole(i)])) for i in (1, 2))
        has, first = (b.icmp_signed("!=", value, self.whole(0)) for value in (apart, is_first))
        residual = b.inttoptr(b.add(b.ptrtoint(self.c, I64), apart), F32.as_pointer())
        sums = self._added(sums, residual, b.and_(has, first))
        sums = [self.within(value, low, high) for value in sums]
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
        results = [b.phi(self.floats) for _ in sums]
        for phi, value, more in zip(results, sums, added, strict=True):
            phi.add_incoming(value, before)
            phi.add_incoming(more, then)
        return results


def _emit(kind: Kind, tile: Tile) -> Callable[..., Any]:
    """Return the Numba intrinsic that calls the tile of some rows and vectors by number."""

    def write(module: ir.Module, name: str, rows: int, vectors: int) -> ir.Function:
        return PlacesWriter(module, name, tile, rows, vectors, kind).write()

    return emit_sized(f"hepti_{kind}", tile.sizes(), 10, write)


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


# Numbers of products and outputs of a tile.
PRODUCTS: Final = 16
OUTPUTS: Final = 4

Ops = Any  # writes sums, differences and halves: a `TransformWriter`, or `_Arrays` in plain Python
Side = Callable[[Ops, Sequence[Any]], list[Any]]


def _pixels_side(o: Ops, d: Sequence[Any]) -> list[Any]:
    return [o.sub(d[0], d[2]), o.add(d[1], d[2]), o.sub(d[2], d[1]), o.sub(d[1], d[3])]


def _weights_side(o: Ops, g: Sequence[Any]) -> list[Any]:
    outer = o.add(g[0], g[2])
    return [g[0], o.half(o.add(outer, g[1])), o.half(o.sub(outer, g[1])), g[2]]


def _sums_side(o: Ops, m: Sequence[Any]) -> list[Any]:
    return [o.add(o.add(m[0], m[1]), m[2]), o.sub(o.sub(m[1], m[2]), m[3])]


def _both(o: Ops, side: Side, values: Sequence[Any], size: int) -> list[Any]:
    """Return values [size, size] transformed along their columns, then along their rows."""
    columns = [side(o, values[j::size]) for j in range(size)]
    return [value for row in zip(*columns, strict=True) for value in side(o, row)]


class TransformWriter(VectorWriter):
    """Writes the LLVM function of a transform of arrays, a whole vector of each at a time."""

    def __init__(self, module: ir.Module, name: str, arguments: int) -> None:
        super().__init__(module, name, arguments, TILE.lanes, TILE.fma)
        self.add, self.sub = self.builder.fadd, self.builder.fsub

    def half(self, value: Any) -> Any:
        """Return half of a vector."""
        return self.builder.fmul(value, self.constant(0.5))

    def addresses(self, table: Any, count: int) -> list[Any]:
        """Return the first addresses of a table."""
        return [self.load(self.after(table, 8 * i), I64, 8) for i in range(count)]

    def apart(self, base: Any, apart: Any, count: int) -> list[Any]:
        """Return the addresses of `count` arrays that lie `apart` floats apart."""
        return self.rows_of(base, self.builder.mul(apart, self.whole(4)), count)

    def write(
        self, side: Side, size: int, count: Any, sources: Sequence[Any], targets: Sequence[Any],
        finish: Callable[[Any], Callable[[Any], Any]] = lambda _: lambda value: value,
    ) -> ir.Function:  # fmt: skip
        """Return the finished function. finish: (place) -> a function of the values before they are stored."""
        b = self.builder
        given, taken = ([self.pointer(each, F32) for each in some] for some in (sources, targets))

        def turn(p: Any, _: list[Any]) -> list[Any]:
            values, last = [self.load(b.gep(source, [p])) for source in given], finish(p)
            for value, target in zip(_both(self, side, values, size), taken, strict=True):
                self.store(last(value), b.gep(target, [p]))
            return []

        loop(b, (self.whole(0), count, self.lanes), [], turn)
        b.ret_void()
        return self.function


class _Arrays:
    """Adds arrays, in plain Python."""

    add, sub = staticmethod(np.add), staticmethod(np.subtract)

    @staticmethod
    def half(v: Any) -> Any:
        return np.float32(0.5) * v


def _write_pixels(module: ir.Module, name: str) -> ir.Function:
    w = TransformWriter(module, name, 4)
    table, count, v, apart = w.function.args
    return w.write(_pixels_side, 4, count, w.addresses(table, PRODUCTS), w.apart(v, apart, PRODUCTS))


def _plain_pixels(table: int, count: int, v: int, apart: int) -> None:
    addresses = (ctypes.c_int64 * PRODUCTS).from_address(table)
    values = [floats(address, count) for address in addresses]
    for i, value in enumerate(_both(_Arrays, _pixels_side, values, 4)):
        floats(v + 4 * i * apart, count)[:] = value


def _write_weights(module: ir.Module, name: str) -> ir.Function:
    w = TransformWriter(module, name, 5)
    weights, apart, count, u, apart_u = w.function.args
    return w.write(_weights_side, 3, count, w.apart(weights, apart, 9), w.apart(u, apart_u, PRODUCTS))


def _plain_weights(w: int, apart: int, count: int, u: int, apart_u: int) -> None:
    values = [floats(w + 4 * i * apart, count) for i in range(9)]
    for i, value in enumerate(_both(_Arrays, _weights_side, values, 3)):
        floats(u + 4 * i * apart_u, count)[:] = value


def _write_sums(module: ir.Module, name: str) -> ir.Function:
    w = TransformWriter(module, name, 6)
    m, apart, count, bias, y, apart_y = w.function.args

    def finish(p: Any) -> Callable[[Any], Any]:
        added = w.load(w.builder.gep(w.pointer(bias, F32), [p]))
        return lambda value: w.builder.fadd(value, added)

    return w.write(_sums_side, 4, count, w.apart(m, apart, PRODUCTS), w.apart(y, apart_y, OUTPUTS), finish)


def _write_outputs(module: ir.Module, name: str) -> ir.Function:
    w = TransformWriter(module, name, 6)
    m, apart, count, bias, to, limits = w.function.args
    low, high = (w.splat(w.load(w.after(limits, 4 * i), F32)) for i in range(2))

    def finish(p: Any) -> Callable[[Any], Any]:
        added = w.load(w.builder.gep(w.pointer(bias, F32), [p]))
        return lambda value: w.within(w.builder.fadd(value, added), low, high)

    return w.write(_sums_side, 4, count, w.apart(m, apart, PRODUCTS), w.addresses(to, OUTPUTS), finish)


def _plain_outputs(m: int, apart: int, count: int, bias: int, targets: int, limits: int) -> None:
    values, (low, high) = [floats(m + 4 * i * apart, count) for i in range(PRODUCTS)], floats(limits, 2)
    to = (ctypes.c_int64 * OUTPUTS).from_address(targets)
    for address, value in zip(to, _both(_Arrays, _sums_side, values, 4), strict=True):
        total = value + floats(bias, count)
        floats(address, count)[:] = np.where(total < low, low, np.where(total > high, high, total))


def _plain_sums(m: int, apart: int, count: int, bias: int, y: int, apart_y: int) -> None:
    values = [floats(m + 4 * i * apart, count) for i in range(PRODUCTS)]
    for i, value in enumerate(_both(_Arrays, _sums_side, values, 4)):
        floats(y + 4 * i * apart_y, count)[:] = value + floats(bias, count)


# Fill v, 16 arrays [count] that lie `apart` floats apart, with the transform of a patch of 16 pixels [count]; table:
# their addresses. Arguments: table, count, v, apart. Counts are of whole vectors.
pixels_transformed: Final = lowered(emit_sized("hepti_pixels", [()], 4, _write_pixels), _plain_pixels)
# Fill u, 16 arrays [count], with the transform of the 9 places of w [count], each `apart` floats from the next.
# Arguments: w, apart of w, count, u, apart of u.
weights_transformed: Final = lowered(emit_sized("hepti_weights", [()], 5, _write_weights), _plain_weights)
# Fill y, 4 arrays [count] that lie `apart of y` floats apart, with bias [count] + the transform of 16 arrays [count] of
# m. Arguments: m, apart of m, count, bias, y, apart of y.
sums_transformed: Final = lowered(emit_sized("hepti_sums", [()], 6, _write_sums), _plain_sums)
# Fill y, 4 arrays [count] at the addresses in `targets`, with the same, cut to the two numbers at `limits`.
# Arguments: m, apart of m, count, bias, targets, limits.
outputs_transformed: Final = lowered(emit_sized("hepti_outputs", [()], 6, _write_outputs), _plain_outputs)
