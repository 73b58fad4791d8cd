"""LLVM IR over vectors of f32: the writer of all register tiles, and the intrinsics that call tiles by size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Final

import numpy as np
from llvmlite import ir

from hepti_mqtt.kernels.jit import EXACT, emitter

F32: Final = ir.FloatType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))

# Numba gives the kernel's own flags to every operation that has none; with "reassoc", (x + shift) - shift would be x.
IN_ORDER: Final = tuple(sorted(EXACT))

LINE: Final = 64  # bytes of a cache line
# Exponent of a half moved to that of a float: 2**(127 - 15); and the largest magnitude that is infinity or NaN.
_REBIAS: Final = float(np.ldexp(1.0, 112))
_HALF_INFINITY: Final = 0x7C00 << 13


class VectorWriter:
    """Writes an LLVM function over vectors of `lanes` numbers; its arguments are i64: addresses and numbers.

    fma: whether a fused multiply-add is one instruction. half_in_hardware: whether the CPU converts halves.
    """

    def __init__(
        self, module: ir.Module, name: str, arguments: int, lanes: int, fma: bool, half_in_hardware: bool = False
    ) -> None:
        self.module, self.lanes, self.fma, self.half_in_hardware = module, lanes, fma, half_in_hardware
        self.floats, self.integers = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * arguments), name)
        self.function.linkage = "internal"
        self.function.attributes.add("noinline")
        self.builder = ir.IRBuilder(self.function.append_basic_block("entry"))

    def enable(self, features: str) -> None:
        """Enable features of the CPU that LLVM does not detect."""
        if features:
            # llvmlite's own `add` takes only attributes without a value.
            set.add(self.function.attributes, f'"target-features"="{features}"')

    def declared(self, name: str, result: Any, arguments: list[Any]) -> Any:
        """Return a function of LLVM."""
        return self.module.globals.get(name) or ir.Function(self.module, ir.FunctionType(result, arguments), name)

    @staticmethod
    def whole(value: int) -> Any:
        """Return an i64."""
        return ir.Constant(I64, value)

    def constant(self, value: float) -> Any:
        """Return a vector of one f32."""
        # As the nearest f32: LLVM refuses a float constant that is not exact.
        return self.every(self.floats, float(np.float32(value)))

    @staticmethod
    def every(kind: Any, value: Any) -> Any:
        """Return a constant vector of one value."""
        return ir.Constant(kind, [value] * kind.count)

    def splat(self, value: Any, kind: Any = None) -> Any:
        """Return a value in all lanes."""
        undefined = ir.Constant(kind or self.floats, ir.Undefined)
        return self.lane(self.builder.insert_element(undefined, value, ir.Constant(I32, 0)), 0)

    def lane(self, vector: Any, lane: int) -> Any:
        """Return a lane of a vector in all lanes."""
        mask = ir.Constant(self.integers, [lane] * self.lanes)
        return self.builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)

    def after(self, address: Any, nbytes: int) -> Any:
        """Return the address some bytes on."""
        return self.builder.add(address, self.whole(nbytes))

    def rows_of(self, address: Any, between: Any, rows: int) -> list[Any]:
        """Return the addresses of some rows, `between` bytes apart."""
        return [self.builder.add(address, self.builder.mul(between, self.whole(i))) for i in range(rows)]

    def pointer(self, place: Any, kind: Any = None) -> Any:
        """Return a pointer to a kind of value, of an address or another pointer."""
        cast = self.builder.inttoptr if place.type == I64 else self.builder.bitcast
        return cast(place, (kind or self.floats).as_pointer())

    def load(self, place: Any, kind: Any = None, align: int = 4) -> Any:
        """Return the value at an address or pointer; kind: its type, by default a vector of f32."""
        value = self.builder.load(self.pointer(place, kind))
        value.align = align
        return value

    def store(self, value: Any, place: Any) -> None:
        """Write a value."""
        self.builder.store(value, self.pointer(place, value.type)).align = 4

    def half(self, address: Any) -> Any:
        """Return the f32 of halves in memory."""
        if self.half_in_hardware:
            return self.builder.fpext(self.load(address, ir.VectorType(ir.HalfType(), self.lanes), 2), self.floats)
        return self._half_by_bits(self.load(address, ir.VectorType(I16, self.lanes), 2))

    def _half_by_bits(self, half: Any) -> Any:
        """Return the f32 of IEEE halves: their bits moved to the places of a float, and the exponent by a product."""
        b, words, every = self.builder, self.integers, self.every
        bits = b.zext(half, words)
        magnitude = b.shl(b.and_(bits, every(words, 0x7FFF)), every(words, 13))
        scaled = b.fmul(b.bitcast(magnitude, self.floats), every(self.floats, _REBIAS))
        special = b.icmp_unsigned(">=", magnitude, every(words, _HALF_INFINITY))
        infinite = b.or_(magnitude, every(words, 0x7F800000))
        sign = b.shl(b.and_(bits, every(words, 0x8000)), every(words, 16))
        return b.bitcast(b.or_(b.select(special, infinite, b.bitcast(scaled, words)), sign), self.floats)

    def select(self, relation: str, a: Any, b: Any) -> Any:
        """Return for each lane a if a `relation` b, else b; b if either is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(relation, a, b), a, b)

    def within(self, value: Any, low: Any, high: Any) -> Any:
        """Return a vector cut to low..high; NaN stays."""
        b = self.builder
        value = b.select(b.fcmp_ordered("<", value, low), low, value)
        return b.select(b.fcmp_ordered(">", value, high), high, value)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c."""
        name = f"llvm.{'fma' if self.fma else 'fmuladd'}.v{self.lanes}f32"
        return self.builder.call(self.declared(name, self.floats, [self.floats] * 3), [a, b, c])

    def prefetch(self, place: Any, locality: int) -> None:
        """Ask for the line at an address, for a level of cache: 3 the first, 2 the second, 0 the first alone."""
        octet = I8.as_pointer()
        ask = self.declared("llvm.prefetch.p0", ir.VoidType(), [octet, I32, I32, I32])
        read, level, data = (ir.Constant(I32, value) for value in (0, locality, 1))
        self.builder.call(ask, [self.builder.inttoptr(place, octet), read, level, data])


def loop(
    builder: Any,
    bounds: tuple[Any, Any, int],
    start: Sequence[Any],
    body: Callable[[Any, list[Any]], list[Any]],
    *,
    as_written: bool = False,
) -> list[Any]:
    """Write `values = body(p, values)` for p in range(*bounds) (i64, i64, a number); return the last values.

    as_written: the compiler does no several turns at once.
    """
    first, stop, step = bounds
    before, inner, after = builder.block, builder.append_basic_block("turn"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed("<", first, stop), inner, after)
    builder.position_at_end(inner)
    p, values = builder.phi(I64), [builder.phi(value.type) for value in start]
    new = body(p, list(values))
    last = builder.block
    following = builder.add(p, ir.Constant(I64, step))
    back = builder.cbranch(builder.icmp_signed("<", following, stop), inner, after)
    if as_written:
        back.set_metadata("llvm.loop", _not_unrolled(builder.module))
    p.add_incoming(first, before)
    p.add_incoming(following, last)
    builder.position_at_end(after)
    results = [builder.phi(value.type) for value in start]
    for phi, result, begin, end in zip(values, results, start, new, strict=True):
        for place in (phi, result):
            place.add_incoming(begin, before)
            place.add_incoming(end, last)
    return results


def _not_unrolled(module: ir.Module) -> Any:
    """Return the metadata for a loop's last branch that prevents unrolling."""
    mark = module.add_metadata([ir.MetaDataString(module, f"hepti.loop.{len(module.metadata)}")])
    mark.operands = (mark, module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")]))
    return mark


def in_order(builder: Any, sums: Sequence[Any]) -> list[Any]:
    """Return vectors of an x86 register unchanged, and keep the compiler from moving products or loads across.

    It would load what several steps need before their products (Zen), and run out of registers. No instruction comes
    of it.
    """
    vector, count = sums[0].type, len(sums)
    constraints = ",".join(["=v"] * count + [str(i) for i in range(count)] + ["~{memory}"])
    result = ir.LiteralStructType([vector] * count) if count > 1 else vector
    same = builder.asm(ir.FunctionType(result, [vector] * count), "", constraints, sums, True)
    return [builder.extract_value(same, i) for i in range(count)] if count > 1 else [same]


def emit_sized(
    prefix: str,
    sizes: Sequence[tuple[int, ...]],
    arguments: int,
    write: Callable[..., ir.Function],
    given: int | None = None,
) -> Callable[..., Any]:
    """Return the Numba intrinsic that calls the function of a size: numbers of the size, then i64 arguments.

    sizes: of all functions; other sizes call none. write: writes the function of a size, of (module, name, *size) and
    `arguments`. given: number of arguments of the caller; the rest are 0.
    """
    given = arguments if given is None else given
    numbers = len(sizes[0])
    most = 1 + max(max(size, default=0) for size in sizes)

    def codegen(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        rest = [*values[numbers:], *[ir.Constant(I64, 0)] * (arguments - given)]
        end = builder.append_basic_block("size.end")
        key = reduce(lambda k, n: builder.add(builder.mul(k, ir.Constant(I64, most)), n), values[:numbers], I64(0))
        choice = builder.switch(key, end)
        for size in sizes:
            name = "_".join((prefix, *map(str, size)))
            function = builder.module.globals.get(name) or write(builder.module, name, *size)
            with builder.goto_block(builder.append_basic_block(name)):
                choice.add_case(I64(reduce(lambda k, n: k * most + n, size, 0)), builder.block)
                builder.call(function, rest)
                builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return emitter(numbers + given, codegen)
