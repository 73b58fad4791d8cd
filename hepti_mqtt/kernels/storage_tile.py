"""The register tiles over narrow weights, as LLVM vector IR: some rows of the left side times one panel.

Three kinds differ in what one step of the loop over k takes. `f16` and `w8a32`: one f32 of each row times one row of
the panel, widened in registers, fused multiply-adds in ascending order of k. `w8a8`: four bytes of each row times four
rows of the panel, interleaved by column, added exactly in i32. So a row's bits do not depend on the tile it falls into.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from hepti_mqtt.kernels.isa import DOT, TILE, Dot, Tile, isa
from hepti_mqtt.kernels.jit import lowered

Kind = Literal["f16", "w8a8", "w8a32"]

GROUP: Final = 4  # bytes of a row that one step of an int8 dot product takes

# Every CPU of these sets converts half precision in one instruction; elsewhere LLVM would call a library function that
# Numba does not link.
HALF_IN_HARDWARE: Final = isa() in ("avx512", "avx2", "neon")

_F32: Final = ir.FloatType()
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_SIGNATURE: Final = ir.FunctionType(ir.VoidType(), [_I64] * 7)
# Exponent of a half moved to that of a float: 2**(127 - 15); and the largest magnitude that is infinity or NaN.
_REBIAS: Final = float(np.ldexp(1.0, 112))
_HALF_INFINITY: Final = 0x7C00 << 13


class Form(NamedTuple):
    """What a kind of tile is made of: its size, the type of its sums, bytes of a panel's vector and of a step's row."""

    kind: Kind
    lanes: int
    rows: int
    vectors: int
    sums: ir.Type
    vector_bytes: int
    fma: bool
    dot: Dot
    half_in_hardware: bool

    @property
    def width(self) -> int:
        """Return the columns of one panel."""
        return self.lanes * self.vectors


def form(kind: Kind, tile: Tile = TILE, dot: Dot = DOT, half_in_hardware: bool = HALF_IN_HARDWARE) -> Form:
    """Return the form of a kind on a register tile."""
    if kind == "w8a8":
        return Form(kind, dot.lanes, dot.rows, dot.vectors, _I32, GROUP * dot.lanes, False, dot, half_in_hardware)
    size = 2 if kind == "f16" else 1
    return Form(kind, tile.lanes, tile.rows, tile.vectors, _F32, size * tile.lanes, tile.fma, dot, half_in_hardware)


class StorageTileWriter:
    """Writes the LLVM function of one tile: (a, bytes between rows of a, steps, panel, zeros, column sums, c).

    All but the stride and the steps are addresses. a is [rows, steps] of four bytes each; c is f32 [rows, width]. Only
    w8a8 reads zeros (i32 [rows], the code of 0 in each row of a) and column sums (i32 [width], of the panel): what
    the zeros add is taken out of the sums before they become f32.
    """

    def __init__(self, module: ir.Module, name: str, shape: Form, rows: int) -> None:
        self.form, self.rows = shape, rows
        self.module = module
        self.vector = ir.VectorType(shape.sums, shape.lanes)
        self.function = ir.Function(module, _SIGNATURE, name)
        self.function.linkage = "internal"
        self.function.attributes.add("noinline")
        self.builder = ir.IRBuilder(self.function.append_basic_block("entry"))

    def write(self) -> ir.Function:
        """Return the finished function."""
        b, f = self.builder, self.form
        a, stride, steps, panel, zeros, column_sums, c = self.function.args
        at_rows = [b.add(a, b.mul(stride, self._int(i))) for i in range(self.rows)]
        start = self._start(zeros, column_sums)
        before, body, after = b.block, b.append_basic_block("k"), b.append_basic_block("done")
        b.cbranch(b.icmp_signed(">", steps, self._int(0)), body, after)
        b.position_at_end(body)
        p = b.phi(_I64)
        sums = [b.phi(self.vector) for _ in start]
        at = b.add(panel, b.mul(p, self._int(f.vector_bytes * f.vectors)))
        weights = [self._weight(b.add(at, self._int(j * f.vector_bytes))) for j in range(f.vectors)]
        new = []
        for i, row in enumerate(at_rows):
            x = self._splat(self._load(b.add(row, b.mul(p, self._int(4))), f.sums))
            new += [self._accumulate(sums[i * f.vectors + j], x, w) for j, w in enumerate(weights)]
        following = b.add(p, self._int(1))
        b.cbranch(b.icmp_signed("<", following, steps), body, after)
        p.add_incoming(self._int(0), before)
        p.add_incoming(following, body)
        b.position_at_end(after)
        for place, (phi, begin, end) in enumerate(zip(sums, start, new, strict=True)):
            phi.add_incoming(begin, before)
            phi.add_incoming(end, body)
            result = b.phi(self.vector)
            result.add_incoming(begin, before)
            result.add_incoming(end, body)
            new[place] = result
        wide = ir.VectorType(_F32, f.lanes)
        for place, result in enumerate(new):
            value = b.sitofp(result, wide) if f.sums == _I32 else result
            b.store(value, self._pointer(b.add(c, self._int(4 * place * f.lanes)), wide)).align = 4
        b.ret_void()
        return self.function

    def _start(self, zeros: Any, column_sums: Any) -> list[Any]:
        b, f = self.builder, self.form
        if f.kind != "w8a8":
            return [ir.Constant(self.vector, [0.0] * f.lanes)] * (self.rows * f.vectors)
        of_columns = [self._load(b.add(column_sums, self._int(4 * j * f.lanes)), self.vector) for j in range(f.vectors)]
        minus = [self._splat(b.neg(self._load(b.add(zeros, self._int(4 * i)), _I32))) for i in range(self.rows)]
        return [b.mul(z, total) for z in minus for total in of_columns]

    def _weight(self, address: Any) -> Any:
        b, f = self.builder, self.form
        if f.kind == "w8a8":
            return self._load(address, ir.VectorType(_I8, GROUP * f.lanes), 1)
        if f.kind == "w8a32":
            return b.sitofp(self._load(address, ir.VectorType(_I8, f.lanes), 1), self.vector)
        if f.half_in_hardware:
            return b.fpext(self._load(address, ir.VectorType(ir.HalfType(), f.lanes), 2), self.vector)
        return self._half_by_bits(self._load(address, ir.VectorType(_I16, f.lanes), 2))

    def _half_by_bits(self, half: Any) -> Any:
        """Return the f32 of IEEE halves: their bits moved to the places of a float, and the exponent by a product."""
        b = self.builder
        words = ir.VectorType(_I32, self.form.lanes)
        bits = b.zext(half, words)
        magnitude = b.shl(b.and_(bits, self._all(words, 0x7FFF)), self._all(words, 13))
        scaled = b.fmul(b.bitcast(magnitude, self.vector), self._all(self.vector, _REBIAS))
        special = b.icmp_unsigned(">=", magnitude, self._all(words, _HALF_INFINITY))
        infinite = b.or_(magnitude, self._all(words, 0x7F800000))
        sign = b.shl(b.and_(bits, self._all(words, 0x8000)), self._all(words, 16))
        return b.bitcast(b.or_(b.select(special, infinite, b.bitcast(scaled, words)), sign), self.vector)

    def _accumulate(self, total: Any, x: Any, weight: Any) -> Any:
        b, f = self.builder, self.form
        if f.kind != "w8a8":
            name = f"llvm.{'fma' if f.fma else 'fmuladd'}.v{f.lanes}f32"
            return b.call(self._declared(name, self.vector, [self.vector] * 3), [x, weight, total])
        octets = ir.VectorType(_I8, GROUP * f.lanes)
        x = b.bitcast(x, octets)
        if f.dot.intrinsic:
            function = self._declared(f.dot.intrinsic, self.vector, [self.vector, octets, octets])
            return b.call(function, [total, x, weight])
        words = ir.VectorType(_I32, GROUP * f.lanes)
        products = b.mul(b.sext(x, words) if f.dot.signed else b.zext(x, words), b.sext(weight, words))
        for q in range(GROUP):
            mask = ir.Constant(ir.VectorType(_I32, f.lanes), [GROUP * lane + q for lane in range(f.lanes)])
            total = b.add(total, b.shuffle_vector(products, ir.Constant(words, ir.Undefined), mask))
        return total

    def _declared(self, name: str, result: Any, arguments: list[Any]) -> Any:
        return self.module.globals.get(name) or ir.Function(self.module, ir.FunctionType(result, arguments), name)

    def _pointer(self, address: Any, kind: Any) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())

    def _load(self, address: Any, kind: Any, align: int = 4) -> Any:
        value = self.builder.load(self._pointer(address, kind))
        value.align = align
        return value

    def _splat(self, value: Any) -> Any:
        undefined = ir.Constant(self.vector, ir.Undefined)
        one = self.builder.insert_element(undefined, value, ir.Constant(_I32, 0))
        mask = ir.Constant(ir.VectorType(_I32, self.form.lanes), [0] * self.form.lanes)
        return self.builder.shuffle_vector(one, undefined, mask)

    @staticmethod
    def _all(kind: Any, value: Any) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    @staticmethod
    def _int(value: int) -> Any:
        return ir.Constant(_I64, value)


def emit_storage_tile(shape: Form) -> Callable[..., Any]:
    """Return the Numba intrinsic that calls the tile of 1 to `shape.rows` rows by number."""

    def emit(_context: Any, _rows: Any, _a: Any, _as: Any, _n: Any, _b: Any, _z: Any, _s: Any, _c: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            module = builder.module
            rows, *rest = arguments
            end = builder.append_basic_block("tile.end")
            choice = builder.switch(rows, end)
            for count in range(1, shape.rows + 1):
                name = f"hepti_{shape.kind}_{count}"
                function = module.globals.get(name) or StorageTileWriter(module, name, shape, count).write()
                with builder.goto_block(builder.append_basic_block(name)):
                    choice.add_case(ir.Constant(_I64, count), builder.block)
                    builder.call(function, rest)
                    builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return emit


def _at(address: int, count: int, dtype: Any) -> NDArray[Any]:
    if not count:
        return np.empty(0, dtype)
    nbytes = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * nbytes).from_address(int(address)), dtype)


def _plain(shape: Form) -> Callable[..., None]:
    """Return the tile as plain Python."""
    weight_dtype = {"f16": np.float16, "w8a32": np.int8, "w8a8": np.int8}[shape.kind]
    group = GROUP if shape.kind == "w8a8" else 1
    left_dtype = (np.int8 if shape.dot.signed else np.uint8) if shape.kind == "w8a8" else np.float32

    def tile(rows: int, a: int, stride: int, steps: int, panel: int, zeros: int, column_sums: int, c: int) -> None:
        n, k = shape.width, steps * group
        out = _at(c, rows * n, np.float32).reshape(rows, n)
        left = np.stack([_at(a + i * stride, k, left_dtype) for i in range(rows)])
        right = _at(panel, k * n, weight_dtype).reshape(steps, n, group).transpose(0, 2, 1).reshape(k, n)
        if shape.kind != "w8a8":
            wide = right.astype(np.float32)
            for i in range(rows):  # one by one: BLAS may add in another order for another number of rows
                out[i] = left[i] @ wide
            return
        taken_out = np.outer(_at(zeros, rows, np.int32), _at(column_sums, n, np.int32))
        out[...] = left.astype(np.int32) @ right.astype(np.int32) - taken_out

    return tile


FORMS: Final = {kind: form(kind) for kind in ("f16", "w8a8", "w8a32")}
half_tile: Final = lowered(emit_storage_tile(FORMS["f16"]), _plain(FORMS["f16"]))
byte_tile: Final = lowered(emit_storage_tile(FORMS["w8a32"]), _plain(FORMS["w8a32"]))
dot_tile: Final = lowered(emit_storage_tile(FORMS["w8a8"]), _plain(FORMS["w8a8"]))
