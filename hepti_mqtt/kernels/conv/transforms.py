"""The transforms of Winograd's F(2x2, 3x3), as LLVM vector IR: four outputs of a 3 x 3 window from 16 products, not 36.

For an input patch d [4, 4], weights g [3, 3] and outputs y [2, 2] (Lavin and Gray 2016):
y = A^T ((G g G^T) * (B^T d B)) A. Along one side: B^T d = (d0 - d2, d1 + d2, d2 - d1, d1 - d3),
G g = (g0, (g0 + g1 + g2) / 2, (g0 - g1 + g2) / 2, g2) and A^T m = (m0 + m1 + m2, m1 - m2 - m3). So an output is made
of what its own window holds: d3 goes into y1 alone, d0 into y0 alone, and what lies there changes no bit of the other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types

from hepti_mqtt.kernels.machine.addresses import floats
from hepti_mqtt.kernels.machine.isa import TILE
from hepti_mqtt.kernels.machine.jit import lowered

# Products of a tile, and how many outputs it has.
PRODUCTS: Final = 16
OUTPUTS: Final = 4

_F32: Final = ir.FloatType()
_I64: Final = ir.IntType(64)
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


def _emit_pixels(_context: Any, _table: Any, _count: Any, _v: Any, _apart_v: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        table, count, v, apart = arguments
        sources, targets = _addresses(builder, table, PRODUCTS), _apart(builder, v, apart, PRODUCTS)

        def body(p: Any) -> None:
            values = [_load(builder, source, p) for source in sources]
            for value, target in zip(_both(_Vectors(builder), _pixels_side, values, 4), targets, strict=True):
                _store(builder, value, target, p)

        _by_vectors(builder, count, body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


def _plain_pixels(table: int, count: int, v: int, apart: int) -> None:
    addresses = (ctypes.c_int64 * PRODUCTS).from_address(table)
    values = [floats(address, count) for address in addresses]
    for i, value in enumerate(_both(_Arrays, _pixels_side, values, 4)):
        floats(v + 4 * i * apart, count)[:] = value


def _emit_weights(_context: Any, _w: Any, _apart_w: Any, _count: Any, _u: Any, _apart_u: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        w, apart, count, u, apart_u = arguments
        sources, targets = _apart(builder, w, apart, 9), _apart(builder, u, apart_u, PRODUCTS)

        def body(p: Any) -> None:
            values = [_load(builder, source, p) for source in sources]
            for value, target in zip(_both(_Vectors(builder), _weights_side, values, 3), targets, strict=True):
                _store(builder, value, target, p)

        _by_vectors(builder, count, body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


def _plain_weights(w: int, apart: int, count: int, u: int, apart_u: int) -> None:
    values = [floats(w + 4 * i * apart, count) for i in range(9)]
    for i, value in enumerate(_both(_Arrays, _weights_side, values, 3)):
        floats(u + 4 * i * apart_u, count)[:] = value


def _emit_sums(_context: Any, _m: Any, _apart_m: Any, _count: Any, _bias: Any, _y: Any, _apart_y: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        m, apart, count, bias, y, apart_y = arguments
        sources, targets = _apart(builder, m, apart, PRODUCTS), _apart(builder, y, apart_y, OUTPUTS)

        def body(p: Any) -> None:
            values, added = [_load(builder, source, p) for source in sources], _load(builder, bias, p)
            for value, target in zip(_both(_Vectors(builder), _sums_side, values, 4), targets, strict=True):
                _store(builder, builder.fadd(value, added), target, p)

        _by_vectors(builder, count, body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


def _emit_outputs(_context: Any, _m: Any, _apart_m: Any, _count: Any, _bias: Any, _targets: Any, _limits: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
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

    return types.void(*[types.int64] * 6), codegen


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
pixels_transformed: Final = lowered(_emit_pixels, _plain_pixels)
# Fill u, 16 arrays [count], with the transform of the 9 places of w [count], each `apart` floats from the next.
# Arguments: w, apart of w, count, u, apart of u.
weights_transformed: Final = lowered(_emit_weights, _plain_weights)
# Fill y, 4 arrays [count] that lie `apart of y` floats apart, with bias [count] + the transform of 16 arrays [count] of
# m. Arguments: m, apart of m, count, bias, y, apart of y.
sums_transformed: Final = lowered(_emit_sums, _plain_sums)
# Fill y, 4 arrays [count] whose addresses are at `targets`, with the same, cut to the two numbers at `limits`.
# Arguments: m, apart of m, count, bias, targets, limits.
outputs_transformed: Final = lowered(_emit_outputs, _plain_outputs)
