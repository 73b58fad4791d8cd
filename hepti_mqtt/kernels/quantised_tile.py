"""Register tiles over narrow weights, as LLVM vector IR: some rows of the left side times one or several panels.

One step over k differs by kind. `f16` and `w8a32`: one f32 of each row times one row of the panel, widened in
registers,
fused multiply-adds in ascending order of k. `w8a8`: four bytes of each row times four rows of the panel,
interleaved by
column, added exactly in i32. So a row's bits do not depend on its tile.

The tile of few rows goes down a whole panel in one call, block by block of scales, and prefetches far ahead, because
memory is its limit. Its arithmetic and order are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from hepti_mqtt.kernels.cpu import DOT, TILE, Dot, Tile, isa
from hepti_mqtt.kernels.jit import emitter, lowered
from hepti_mqtt.kernels.tile import call_chosen, in_order, loop, panels_at_once
from hepti_mqtt.kernels.weights import BLOCK

Kind = Literal["f16", "w8a8", "w8a32"]

GROUP: Final = 4  # bytes of a row that one step of an int8 dot product takes

# Every CPU of these sets converts half precision in one instruction; elsewhere LLVM would call a library function that
# Numba does not link.
HALF_IN_HARDWARE: Final = isa() in ("avx512", "avx2", "neon")


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
    steps: int = 0  # as in `Tile`

    @property
    def width(self) -> int:
        """Return the columns of one panel."""
        return self.lanes * self.vectors


def form(kind: Kind, tile: Tile = TILE, dot: Dot = DOT, half_in_hardware: bool = HALF_IN_HARDWARE) -> Form:
    """Return the form of a kind on a register tile."""
    if kind == "w8a8":
        size, steps = GROUP * dot.lanes, tile.steps if dot.intrinsic else 0
        return Form(
            kind, dot.lanes, dot.rows, dot.vectors, ir.IntType(32), size, tile.fma, dot, half_in_hardware, steps
        )
    size = 2 if kind == "f16" else 1
    nbytes = size * tile.lanes
    return Form(
        kind, tile.lanes, tile.rows, tile.vectors, ir.FloatType(), nbytes, tile.fma, dot, half_in_hardware, tile.steps
    )


FORMS: Final = {kind: form(kind) for kind in ("f16", "w8a32", "w8a8")}


_F32: Final = ir.FloatType()
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_ARGUMENTS: Final = 15
# Bytes of a cache line; and by kind how far ahead of its use a line is asked for, and for which level of cache (3 the
# first): widening fills the window in which the CPU would find loads by itself.
LINE: Final = 64
_AHEAD: Final[Mapping[str, tuple[int, int]]] = {"f16": (2048, 3), "w8a32": (2048, 3)}
# Exponent of a half moved to that of a float: 2**(127 - 15); and the largest magnitude that is infinity or NaN.
_REBIAS: Final = float(np.ldexp(1.0, 112))
_HALF_INFINITY: Final = 0x7C00 << 13


class VectorWriter:
    """What functions over vectors of `lanes` numbers are written with; its function takes i64 arguments."""

    def __init__(self, module: ir.Module, name: str, arguments: int, lanes: int) -> None:
        self.module, self.lanes, self.fma = module, lanes, TILE.fma
        self.half_in_hardware = HALF_IN_HARDWARE
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * arguments), name)
        self.function.linkage = "internal"
        self.function.attributes.add("noinline")
        self.builder = ir.IRBuilder(self.function.append_basic_block("entry"))

    def _enable(self, features: str) -> None:
        """Let the function use what LLVM does not detect."""
        if features:
            # llvmlite's own `add` takes only attributes without a value.
            set.add(self.function.attributes, f'"target-features"="{features}"')

    def _multiply_add(self, x: Any, y: Any, total: Any) -> Any:
        name = f"llvm.{'fma' if self.fma else 'fmuladd'}.v{self.lanes}f32"
        return self.builder.call(self._declared(name, total.type, [total.type] * 3), [x, y, total])

    def _half(self, address: Any) -> Any:
        """Return the f32 of halves in memory."""
        if self.half_in_hardware:
            half = self._load(address, ir.VectorType(ir.HalfType(), self.lanes), 2)
            return self.builder.fpext(half, ir.VectorType(_F32, self.lanes))
        return self._half_by_bits(self._load(address, ir.VectorType(_I16, self.lanes), 2))

    def _half_by_bits(self, half: Any) -> Any:
        """Return the f32 of IEEE halves: their bits moved to the places of a float, and the exponent by a product."""
        b = self.builder
        words, wide = ir.VectorType(_I32, self.lanes), ir.VectorType(_F32, self.lanes)
        bits = b.zext(half, words)
        magnitude = b.shl(b.and_(bits, self._all(words, 0x7FFF)), self._all(words, 13))
        scaled = b.fmul(b.bitcast(magnitude, wide), self._all(wide, _REBIAS))
        special = b.icmp_unsigned(">=", magnitude, self._all(words, _HALF_INFINITY))
        infinite = b.or_(magnitude, self._all(words, 0x7F800000))
        sign = b.shl(b.and_(bits, self._all(words, 0x8000)), self._all(words, 16))
        return b.bitcast(b.or_(b.select(special, infinite, b.bitcast(scaled, words)), sign), wide)

    def _declared(self, name: str, result: Any, arguments: list[Any]) -> Any:
        return self.module.globals.get(name) or ir.Function(self.module, ir.FunctionType(result, arguments), name)

    def _pointer(self, address: Any, kind: Any) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())

    def _load(self, address: Any, kind: Any, align: int = 4) -> Any:
        value = self.builder.load(self._pointer(address, kind))
        value.align = align
        return value

    def _splat(self, value: Any, kind: Any) -> Any:
        undefined = ir.Constant(kind, ir.Undefined)
        one = self.builder.insert_element(undefined, value, ir.Constant(_I32, 0))
        mask = ir.Constant(ir.VectorType(_I32, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(one, undefined, mask)

    @staticmethod
    def _all(kind: Any, value: Any) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    @staticmethod
    def _int(value: int) -> Any:
        return ir.Constant(_I64, value)


class QuantisedTileWriter(VectorWriter):
    """Writes the LLVM function of one tile: c = start + a @ panel * column scales * row scales.

    Arguments: a, bytes between rows of a, steps, panel, row scales, zeros, bytes between rows of both, column scales,
    column sums, start, bytes between rows of start, c, bytes between rows of c, ahead, bytes ahead; all but strides and
    steps are addresses. a is [rows, steps] of four bytes each; start and c are f32 [rows, width], of which the first
    `vectors` vectors count. Row scales and zeros (the code of 0) are one for each row, column scales and sums
    [width]; all are f32. Only w8a8 reads row scales, zeros and sums, and takes what the zeros add out of the sums; f16
    reads no scales. Scales are applied one after the other: the product of two small ones alone could be 0, that of two
    large ones infinite. Every step of w8a8 asks for the next "bytes ahead" of memory from
    `ahead` on, which need not be valid; the others ask for the panel itself.
    """

    prefix = ""
    ahead = _AHEAD
    # Bytes from a panel to the next one, and from its scales to the next one's, where a tile goes down several.
    panel_bytes: Any = None
    scale_bytes: Any = None

    def __init__(self, module: ir.Module, name: str, shape: Form, rows: int, vectors: int) -> None:
        super().__init__(module, name, _ARGUMENTS, shape.lanes)
        self.form, self.rows, self.vectors = shape, rows, vectors
        self.fma, self.half_in_hardware = shape.fma, shape.half_in_hardware
        self.vector = ir.VectorType(shape.sums, shape.lanes)
        if shape.kind == "w8a8":
            self._enable(shape.dot.enables)

    @classmethod
    def sizes(cls, shape: Form) -> Sequence[tuple[int, int]]:
        """Return (rows, vectors) of all tiles: w8a8 has 1 to those of a panel, the others all."""
        widths = range(1, shape.vectors + 1) if shape.kind == "w8a8" else (shape.vectors,)
        return [(rows, vectors) for vectors in widths for rows in range(1, shape.rows + 1)]

    def write(self) -> ir.Function:
        """Return the finished function."""
        b = self.builder
        a, stride, steps, panel, *rest = self.function.args
        row_scales, zeros, scale_stride, column_scales, column_sums, first, first_stride, c, c_stride, *ahead = rest
        at_rows = [b.add(a, b.mul(stride, self._int(i))) for i in range(self.rows)]
        at_zeros, at_scales, at_start, at_c = (
            [b.add(address, b.mul(between, self._int(i))) for i in range(self.rows)]
            for address, between in (
                (zeros, scale_stride),
                (row_scales, scale_stride),
                (first, first_stride),
                (c, c_stride),
            )
        )
        sums = self._run(at_rows, steps, panel, self._start(at_start), ahead)
        self._finish(sums, at_zeros, column_sums, at_scales, column_scales, at_start, at_c)
        b.ret_void()
        return self.function

    def _run(
        self, at_rows: list[Any], steps: Any, panel: Any, start: list[Any], ahead: Sequence[Any] = ()
    ) -> list[Any]:
        """Return the sums that `start` becomes in `steps` steps of k. ahead: what w8a8 asks for, and by how much."""
        b, first, at_once = self.builder, self._int(0), self._at_once()

        def turn(p: Any, sums: list[Any]) -> list[Any]:
            sums = self._step(at_rows, p, panel, sums, ahead)
            for q in range(1, count):
                sums = self._step(at_rows, b.add(p, self._int(q)), panel, in_order(b, sums), ahead)
            return sums

        if (count := at_once) > 1:
            whole = b.and_(steps, self._int(-at_once))
            start, first = loop(b, (first, whole, at_once), start, turn, as_written=True), whole
        count = 1
        return loop(b, (first, steps, 1), start, turn, as_written=bool(at_once))

    def _at_once(self) -> int:
        """Return how many steps a turn of the loop does, 0 if the compiler may choose."""
        return self.form.steps if self.vectors == self.form.vectors else 0

    def _step(self, at_rows: list[Any], p: Any, panel: Any, sums: list[Any], ahead: Sequence[Any]) -> list[Any]:
        b, f = self.builder, self.form
        at = b.add(panel, b.mul(p, self._int(f.vector_bytes * f.vectors)))
        weights = [self._weight(self._of_vector(at, j, f.vector_bytes, self.panel_bytes)) for j in range(self.vectors)]
        if f.kind in self.ahead:
            self._fetch(p, at)
        elif ahead:
            beyond, by = ahead
            self._prefetch(b.add(beyond, b.mul(p, by)), LINE, 3)
        new = []
        for i, row in enumerate(at_rows):
            x = self._splat(self._load(b.add(row, b.mul(p, self._int(4))), f.sums), self.vector)
            new += [self._accumulate(sums[i * self.vectors + j], x, w) for j, w in enumerate(weights)]
        return new

    def _of_vector(self, first: Any, j: int, nbytes: int, between: Any) -> Any:
        """Return where vector j lies, of `nbytes`, if the first is there; `between` two panels: address and bytes."""
        b = self.builder
        panel, place = divmod(j, self.form.vectors)
        within = b.add(first, self._int(place * nbytes))
        return b.add(within, b.mul(between, self._int(panel))) if panel else within

    def _of_columns(self, first: Any, j: int) -> Any:
        """Return where the scales or sums of vector j lie, if those of the first are there."""
        return self._of_vector(first, j, 4 * self.form.lanes, self.scale_bytes)

    def _fetch(self, p: Any, at: Any) -> None:
        """Ask in step p, whose weights lie at an address, for those of a later step."""
        del p
        distance, level = self.ahead[self.form.kind]
        self._prefetch(self.builder.add(at, self._int(distance)), self.form.vector_bytes * self.form.vectors, level)

    def _prefetch(self, at: Any, nbytes: int, locality: int) -> None:
        """Ask for `nbytes` from an address on, for a level of cache: 3 the first, 2 the second, 0 the first alone."""
        address = _I8.as_pointer()
        function = self._declared("llvm.prefetch.p0", ir.VoidType(), [address, _I32, _I32, _I32])
        read, level, data = (ir.Constant(_I32, value) for value in (0, locality, 1))
        for line in range(0, nbytes, LINE):
            place = self.builder.inttoptr(self.builder.add(at, self._int(line)), address)
            self.builder.call(function, [place, read, level, data])

    def _finish(
        self, sums: list[Any], at_zeros: list[Any], column_sums: Any, at_scales: list[Any], column_scales: Any,
        at_start: list[Any], at_c: list[Any],
    ) -> None:  # fmt: skip
        """Scale the sums, add what the tile starts with and store them.

        Sums of products of bytes over a block, and what a zero adds to them, are below 2**24, so that f32 is exact. An
        integer product at the start of the tile instead would keep its first steps waiting.
        """
        b, f = self.builder, self.form
        wide = ir.VectorType(_F32, f.lanes)
        for j in range(self.vectors):
            at = self._int(4 * j * f.lanes)
            scale = None if f.kind == "f16" else self._load(self._of_columns(column_scales, j), wide)
            of_codes = self._load(self._of_columns(column_sums, j), wide) if f.kind == "w8a8" else None
            for i in range(self.rows):
                value = sums[i * self.vectors + j]
                if f.kind != "f16":
                    factor, start = scale, self._load(b.add(at_start[i], at), wide)
                    if f.kind == "w8a8":
                        zero, factor = (self._splat(self._load(of[i], _F32), wide) for of in (at_zeros, at_scales))
                        value = self._of_codes(value, zero, of_codes, scale)
                    value = self._multiply_add(value, factor, start)
                b.store(value, self._pointer(b.add(at_c[i], at), wide)).align = 4

    def _of_codes(self, sums: Any, zero: Any, of_codes: Any, scale: Any) -> Any:
        """Return sums of products of bytes in steps of a row, without what the code of 0 has added to them."""
        b = self.builder
        return b.fmul(self._multiply_add(b.fneg(zero), of_codes, b.sitofp(sums, of_codes.type)), scale)

    def _start(self, at_start: list[Any]) -> list[Any]:
        """Return what the sums begin with: f16 the start itself, the others, whose sums are scaled, nothing."""
        b, f = self.builder, self.form
        if f.kind != "f16":
            return [ir.Constant(self.vector, None)] * (self.rows * self.vectors)
        columns = [self._int(4 * j * f.lanes) for j in range(self.vectors)]
        return [self._load(b.add(row, at), self.vector) for row in at_start for at in columns]

    def _weight(self, address: Any) -> Any:
        b, f = self.builder, self.form
        if f.kind == "w8a8":
            return self._load(address, ir.VectorType(_I8, GROUP * f.lanes), 1)
        if f.kind == "w8a32":
            return b.sitofp(self._load(address, ir.VectorType(_I8, f.lanes), 1), self.vector)
        return self._half(address)

    def _accumulate(self, total: Any, x: Any, weight: Any) -> Any:
        b, f = self.builder, self.form
        if f.kind != "w8a8":
            return self._multiply_add(x, weight, total)
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


def emit_quantised_tile(shape: Form, writer: type[QuantisedTileWriter] = QuantisedTileWriter) -> Callable[..., Any]:
    """Return the Numba intrinsic that calls the tile of one of `writer.sizes`: rows, vectors."""

    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        rows, vectors, *rest = arguments

        def written(name: str, count: int, width: int) -> ir.Function:
            return writer(builder.module, name, shape, count, width).write()

        prefix = f"hepti_{writer.prefix}{shape.kind}"
        call_chosen(builder, (rows, vectors), writer.sizes(shape), prefix, written, rest)
        return context.get_dummy_value()

    return emitter(2 + _ARGUMENTS, codegen)


def _at(address: int, count: int, dtype: Any) -> NDArray[Any]:
    if not count:
        return np.empty(0, dtype)
    nbytes = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * nbytes).from_address(int(address)), dtype)


def plain_tile(shape: Form) -> Callable[..., None]:
    """Return the tile as plain Python."""
    weight_dtype = {"f16": np.float16, "w8a32": np.int8, "w8a8": np.int8}[shape.kind]
    group = GROUP if shape.kind == "w8a8" else 1
    left_dtype = (np.int8 if shape.dot.signed else np.uint8) if shape.kind == "w8a8" else np.float32

    def tile(
        rows: int, vectors: int, a: int, stride: int, steps: int, panel: int, row_scales: int, zeros: int,
        scale_stride: int, column_scales: int, column_sums: int, start: int, start_stride: int, c: int,
        c_stride: int, _ahead: int, _fetch: int,
    ) -> None:  # fmt: skip
        n, k = vectors * shape.lanes, steps * group
        left = np.stack([_at(a + i * stride, k, left_dtype) for i in range(rows)])
        panels = _at(panel, k * shape.width, weight_dtype).reshape(steps, shape.width, group)
        right = panels[:, :n].transpose(0, 2, 1).reshape(k, n)
        begin = np.stack([_at(start + i * start_stride, n, np.float32) for i in range(rows)])
        if shape.kind == "w8a8":
            of_zero = np.concatenate([_at(zeros + i * scale_stride, 1, np.float32) for i in range(rows)])
            of_rows = np.stack([_at(row_scales + i * scale_stride, 1, np.float32) for i in range(rows)])
            taken_out = np.outer(of_zero, _at(column_sums, n, np.float32)).astype(np.int32)
            exact = left.astype(np.int32) @ right.astype(np.int32) - taken_out
            result = exact.astype(np.float32) * _at(column_scales, n, np.float32) * of_rows + begin
        else:
            wide = right.astype(np.float32)
            # Row by row: BLAS may add in another order for another number of rows.
            result = np.stack([row @ wide for row in left])
            result = result * _at(column_scales, n, np.float32) + begin if shape.kind == "w8a32" else result + begin
        for i in range(rows):
            _at(c + i * c_stride, n, np.float32)[...] = result[i]

    return tile


# Arguments: rows (1 to the form's), vectors (w8a8: 1 to the form's, else all), then those of `StorageTileWriter`.
half_tile: Final = lowered(emit_quantised_tile(FORMS["f16"]), plain_tile(FORMS["f16"]))
byte_tile: Final = lowered(emit_quantised_tile(FORMS["w8a32"]), plain_tile(FORMS["w8a32"]))
dot_tile: Final = lowered(emit_quantised_tile(FORMS["w8a8"]), plain_tile(FORMS["w8a8"]))


# By kind, how far ahead of its use a line is asked for, and for which cache: 0 passes by the second level, which keeps
# what the interpreter needs between two calls. 2 KB is slower for w8a32; other distances differ by less than the noise.
# Bytes that need no widening leave the CPU time to find its loads by itself.
_GEMV_AHEAD: Final[Mapping[str, tuple[int, int]]] = {"f16": (6144, 0), "w8a32": (8192, 0)}
# How many blocks ahead their scales and sums are asked for: what the loop waits for, it cannot hide.
_BLOCKS_AHEAD: Final = 2


def together(rows: int, shape: Form) -> int:
    """Return how many panels a tile of so many rows goes down at once; byte dot products wait for nothing."""
    return 1 if shape.kind == "w8a8" else panels_at_once(rows, shape.vectors, shape.lanes)


class QuantisedGemvWriter(QuantisedTileWriter):
    """Writes the tile of `StorageTileWriter` with steps for all of k, and scales, sums and zeros by block.

    Column scales and sums are [blocks, width], row scales and zeros one for each block, side by side. With more vectors
    than a panel has, it goes down several panels that lie one behind the other, as their scales and sums do.
    """

    prefix = "stream_"
    ahead = _GEMV_AHEAD

    @classmethod
    def sizes(cls, shape: Form) -> Sequence[tuple[int, int]]:
        """Return (rows, vectors) of all tiles: over a panel, a whole one, and over as many as go together."""
        rows = range(1, shape.rows + 1)
        return list(dict.fromkeys((r, n * shape.vectors) for r in rows for n in (1, together(r, shape))))

    def write(self) -> ir.Function:
        """Return the finished function."""
        b, f = self.builder, self.form
        a, stride, steps, panel, *rest = self.function.args
        row_scales, zeros, scale_stride, column_scales, column_sums, first, first_stride, c, c_stride, *_ = rest
        if self.vectors > f.vectors:
            self.panel_bytes = b.mul(steps, self._int(f.vector_bytes * f.vectors))
            last = b.add(steps, self._int(BLOCK - 1))
            self.scale_bytes = b.mul(b.udiv(last, self._int(BLOCK)), self._int(4 * f.width))
        at_rows, at_start, at_c = (self._rows_of(*of) for of in ((a, stride), (first, first_stride), (c, c_stride)))
        start = [self._load(b.add(row, at), self.wide) for row in at_start for at in self._columns()]
        if f.kind == "f16":
            self._store(self._run(at_rows, steps, panel, start), at_c)
            b.ret_void()
            return self.function
        self._store(start, at_c)
        before, body, after = b.block, b.append_basic_block("block"), b.append_basic_block("last")
        b.cbranch(b.icmp_signed(">", steps, self._int(0)), body, after)
        b.position_at_end(body)
        block = b.phi(_I64)
        per_block = BLOCK // GROUP if f.kind == "w8a8" else BLOCK
        done, of_rows, of_columns = (b.mul(block, self._int(by)) for by in (per_block, 4, 4 * f.width))
        left = b.sub(steps, done)
        count = b.select(b.icmp_signed("<", left, self._int(per_block)), left, self._int(per_block))
        at_zeros, at_scales = (self._rows_of(b.add(of, of_rows), scale_stride) for of in (zeros, row_scales))
        at_x = [b.add(row, b.mul(done, self._int(4))) for row in at_rows]
        at_panel = b.add(panel, b.mul(done, self._int(f.vector_bytes * f.vectors)))
        at_scale, at_sum = (b.add(of, of_columns) for of in (column_scales, column_sums))
        for at in (at_scale, at_sum) if f.kind == "w8a8" else (at_scale,):
            for j in range(0, self.vectors, f.vectors):
                of_panel = self._of_columns(at, j)
                self._prefetch(b.add(of_panel, self._int(_BLOCKS_AHEAD * 4 * f.width)), 4 * f.width, 3)
        sums = self._run(at_x, count, at_panel, self._start(at_c))
        self._finish(sums, at_zeros, at_sum, at_scales, at_scale, at_c, at_c)
        following = b.add(block, self._int(1))
        block.add_incoming(self._int(0), before)
        block.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed(">", left, self._int(per_block)), body, after)
        b.position_at_end(after)
        b.ret_void()
        return self.function

    def _at_once(self) -> int:
        return 0

    def _fetch(self, p: Any, at: Any) -> None:
        """Ask for one line of the panels in turn, each often enough; of the panels after these where those end."""
        b, f = self.builder, self.form
        panels = self.vectors // f.vectors
        if panels == 1:
            super()._fetch(p, at)
            return
        (distance, level), step = self.ahead[f.kind], f.vector_bytes * f.vectors
        later = b.add(at, self._int(distance))
        inside = b.icmp_unsigned("<", b.sub(later, self.function.args[3]), self.panel_bytes)
        beyond = b.mul(self.panel_bytes, self._int(panels - 1))
        later = b.select(inside, later, b.add(later, beyond))
        lines = max(1, panels * step // LINE)
        for i in range(lines):
            nth = b.and_(b.add(b.mul(p, self._int(lines)), self._int(i)), self._int(panels - 1))
            self._prefetch(b.add(later, b.mul(nth, self.panel_bytes)), step, level)

    @property
    def wide(self) -> Any:
        """Return the type of a vector of results."""
        return ir.VectorType(ir.FloatType(), self.form.lanes)

    def _rows_of(self, address: Any, between: Any) -> list[Any]:
        return [self.builder.add(address, self.builder.mul(between, self._int(i))) for i in range(self.rows)]

    def _columns(self) -> list[Any]:
        return [self._int(4 * j * self.form.lanes) for j in range(self.vectors)]

    def _store(self, values: list[Any], at_c: list[Any]) -> None:
        places = [self.builder.add(row, at) for row in at_c for at in self._columns()]
        for value, place in zip(values, places, strict=True):
            self.builder.store(value, self._pointer(place, self.wide)).align = 4


def plain_gemv(shape: Form) -> Callable[..., None]:
    """Return the tile as plain Python."""
    tile = plain_tile(shape)
    per_block = BLOCK // GROUP if shape.kind == "w8a8" else BLOCK
    step = shape.vector_bytes * shape.vectors

    def stream(
        rows: int, vectors: int, a: int, stride: int, steps: int, panel: int, row_scales: int, zeros: int,
        scale_stride: int, column_scales: int, column_sums: int, start: int, start_stride: int, c: int,
        c_stride: int, ahead: int, fetch: int,
    ) -> None:  # fmt: skip
        blocks = max(1, -(-steps // per_block))
        for nth, block in product(range(vectors // shape.vectors), range(blocks)):
            done, at = block * per_block, 4 * nth * shape.width
            of_columns = 4 * (nth * blocks + block) * shape.width
            begin = (c + at, c_stride) if block else (start + at, start_stride)
            left = (a + 4 * done, stride, min(per_block, steps - done))
            of_rows = (row_scales + 4 * block, zeros + 4 * block, scale_stride)
            tile(
                rows, shape.vectors, *left, panel + (nth * steps + done) * step, *of_rows, column_scales + of_columns,
                column_sums + of_columns, *begin, c + at, c_stride, ahead, fetch
            )  # fmt: skip

    return stream


# Arguments: rows (1 to the form's), vectors (all of a panel's, or of `together` panels), then those of the writer.
half_gemv: Final = lowered(emit_quantised_tile(FORMS["f16"], QuantisedGemvWriter), plain_gemv(FORMS["f16"]))
byte_gemv: Final = lowered(emit_quantised_tile(FORMS["w8a32"], QuantisedGemvWriter), plain_gemv(FORMS["w8a32"]))
dot_gemv: Final = lowered(emit_quantised_tile(FORMS["w8a8"], QuantisedGemvWriter), plain_gemv(FORMS["w8a8"]))
