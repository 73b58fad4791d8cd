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
from itertools import product
from typing import Any, Final, Literal

import numpy as np
from llvmlite import ir

from hepti_mqtt.kernels.cpu import TILE, Tile
from hepti_mqtt.kernels.jit import emitter, floats, lowered
from hepti_mqtt.kernels.tile import TileWriter, call_chosen

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
                self.multiply_add, [self._load(row, self._int(j * self.tile.lanes)), w, sums[i * self.vectors + j]]
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

    return emitter(12, codegen)


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


# Products of a tile, and how many outputs it has.
PRODUCTS: Final = 16
OUTPUTS: Final = 4

_VECTOR: Final = ir.VectorType(_F32, TILE.lanes)

Ops = Any  # what adds, subtracts and halves: a `_Vectors`, or a `_Arrays` in plain Python
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


class _Vectors:
    """Adds vectors in the code that is written."""

    def __init__(self, builder: Any) -> None:
        self.add, self.sub = builder.fadd, builder.fsub
        self.half = lambda v: builder.fmul(v, ir.Constant(_VECTOR, [0.5] * TILE.lanes))


class _Arrays:
    """Adds arrays, where nothing is compiled."""

    add, sub = staticmethod(np.add), staticmethod(np.subtract)

    @staticmethod
    def half(v: Any) -> Any:
        return np.float32(0.5) * v


def _by_vectors(builder: Any, count: Any, body: Callable[[Any], None]) -> None:
    """Write `body(p)` for p in 0..count, a whole vector at a time."""
    before, loop, after = builder.block, builder.append_basic_block("vectors"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed(">", count, ir.Constant(_I64, 0)), loop, after)
    builder.position_at_end(loop)
    p = builder.phi(_I64)
    body(p)
    following = builder.add(p, ir.Constant(_I64, TILE.lanes))
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    p.add_incoming(ir.Constant(_I64, 0), before)
    p.add_incoming(following, builder.block)
    builder.position_at_end(after)


def _vector_at(builder: Any, base: Any, offset: Any) -> Any:
    at = builder.gep(builder.inttoptr(base, _F32.as_pointer()), [offset])
    return builder.bitcast(at, _VECTOR.as_pointer())


def _load(builder: Any, base: Any, offset: Any) -> Any:
    value = builder.load(_vector_at(builder, base, offset))
    value.align = 4
    return value


def _store(builder: Any, value: Any, base: Any, offset: Any) -> None:
    builder.store(value, _vector_at(builder, base, offset)).align = 4


def _addresses(builder: Any, table: Any, count: int) -> list[Any]:
    words = builder.inttoptr(table, _I64.as_pointer())
    return [builder.load(builder.gep(words, [ir.Constant(_I64, i)])) for i in range(count)]


def _apart(builder: Any, base: Any, apart: Any, count: int) -> list[Any]:
    """Return the addresses of `count` arrays that lie `apart` floats apart."""
    size = builder.mul(apart, ir.Constant(_I64, 4))
    return [builder.add(base, builder.mul(size, ir.Constant(_I64, i))) for i in range(count)]


def _write_pixels(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    table, count, v, apart = arguments
    sources, targets = _addresses(builder, table, PRODUCTS), _apart(builder, v, apart, PRODUCTS)

    def body(p: Any) -> None:
        values = [_load(builder, source, p) for source in sources]
        for value, target in zip(_both(_Vectors(builder), _pixels_side, values, 4), targets, strict=True):
            _store(builder, value, target, p)

    _by_vectors(builder, count, body)
    return context.get_dummy_value()


def _plain_pixels(table: int, count: int, v: int, apart: int) -> None:
    addresses = (ctypes.c_int64 * PRODUCTS).from_address(table)
    values = [floats(address, count) for address in addresses]
    for i, value in enumerate(_both(_Arrays, _pixels_side, values, 4)):
        floats(v + 4 * i * apart, count)[:] = value


def _write_weights(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    w, apart, count, u, apart_u = arguments
    sources, targets = _apart(builder, w, apart, 9), _apart(builder, u, apart_u, PRODUCTS)

    def body(p: Any) -> None:
        values = [_load(builder, source, p) for source in sources]
        for value, target in zip(_both(_Vectors(builder), _weights_side, values, 3), targets, strict=True):
            _store(builder, value, target, p)

    _by_vectors(builder, count, body)
    return context.get_dummy_value()


def _plain_weights(w: int, apart: int, count: int, u: int, apart_u: int) -> None:
    values = [floats(w + 4 * i * apart, count) for i in range(9)]
    for i, value in enumerate(_both(_Arrays, _weights_side, values, 3)):
        floats(u + 4 * i * apart_u, count)[:] = value


def _write_sums(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    m, apart, count, bias, y, apart_y = arguments
    sources, targets = _apart(builder, m, apart, PRODUCTS), _apart(builder, y, apart_y, OUTPUTS)

    def body(p: Any) -> None:
        values, added = [_load(builder, source, p) for source in sources], _load(builder, bias, p)
        for value, target in zip(_both(_Vectors(builder), _sums_side, values, 4), targets, strict=True):
            _store(builder, builder.fadd(value, added), target, p)

    _by_vectors(builder, count, body)
    return context.get_dummy_value()


def _write_outputs(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    m, apart, count, bias, to, limits = arguments
    sources, targets = _apart(builder, m, apart, PRODUCTS), _addresses(builder, to, OUTPUTS)
    low, high = (_splat(builder, limits, i) for i in range(2))

    def body(p: Any) -> None:
        values, added = [_load(builder, source, p) for source in sources], _load(builder, bias, p)
        for value, target in zip(_both(_Vectors(builder), _sums_side, values, 4), targets, strict=True):
            total = builder.fadd(value, added)
            # A comparison with NaN is false: NaN stays.
            total = builder.select(builder.fcmp_ordered("<", total, low), low, total)
            total = builder.select(builder.fcmp_ordered(">", total, high), high, total)
            _store(builder, total, target, p)

    _by_vectors(builder, count, body)
    return context.get_dummy_value()


def _splat(builder: Any, base: Any, i: int) -> Any:
    """Return a vector of the number at a place of an array."""
    value = builder.load(builder.gep(builder.inttoptr(base, _F32.as_pointer()), [ir.Constant(_I64, i)]))
    none, zero = ir.Constant(_VECTOR, ir.Undefined), ir.Constant(ir.IntType(32), 0)
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), TILE.lanes), [0] * TILE.lanes)
    return builder.shuffle_vector(builder.insert_element(none, value, zero), none, lanes)


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


# Fill v, 16 arrays [count] that lie `apart` floats apart, with the transform of a patch of 16 pixels [count], whose
# addresses are at `table`. Arguments: table, count, v, apart. Counts are of whole vectors.
pixels_transformed: Final = lowered(emitter(4, _write_pixels), _plain_pixels)
# Fill u, 16 arrays [count], with the transform of the 9 places of w [count], each `apart` floats from the next.
# Arguments: w, apart of w, count, u, apart of u.
weights_transformed: Final = lowered(emitter(5, _write_weights), _plain_weights)
# Fill y, 4 arrays [count] that lie `apart of y` floats apart, with bias [count] + the transform of 16 arrays [count] of
# m. Arguments: m, apart of m, count, bias, y, apart of y.
sums_transformed: Final = lowered(emitter(6, _write_sums), _plain_sums)
# Fill y, 4 arrays [count] whose addresses are at `targets`, with the same, cut to the two numbers at `limits`.
# Arguments: m, apart of m, count, bias, targets, limits.
outputs_transformed: Final = lowered(emitter(6, _write_outputs), _plain_outputs)
