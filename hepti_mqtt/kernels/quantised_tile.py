"""Register tiles over narrow weights, as LLVM vector IR: some rows of the left side times one or several panels.

One step over k differs by kind. `f16` and `w8a32`: one f32 of each row times one row of the panel, widened in
registers, fused multiply-adds in ascending order of k. `w8a8`: four bytes of each row times four rows of the panel,
interleaved by column, added exactly in i32. So a row's bits do not depend on its tile.

The tile of few rows computes a whole panel in one call, block by block of scales, and prefetches far ahead, because
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

from hepti_mqtt.kernels.cpu import DOT, HALF_IN_HARDWARE, TILE, Dot, Tile
from hepti_mqtt.kernels.ir_vectors import F32, I8, I32, LINE, VectorWriter, emit_sized, in_order, loop
from hepti_mqtt.kernels.jit import lowered
from hepti_mqtt.kernels.tile import panels_at_once
from hepti_mqtt.kernels.weights import BLOCK

Kind = Literal["f16", "w8a8", "w8a32"]

GROUP: Final = 4  # bytes of a row that one step of an int8 dot product takes


class Form(NamedTuple):
    """The form of a kind of tile: its size, the type of its sums, the bytes of a panel's vector."""

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


KINDS: Final[tuple[Kind, ...]] = ("f16", "w8a32", "w8a8")
FORMS: Final[Mapping[str, Form]] = {kind: form(kind) for kind in KINDS}


_ARGUMENTS: Final = 15
# By kind, the bytes from a use to its prefetch, and the cache level: widening fills the window in which the CPU would
# issue loads early.
_AHEAD: Final[Mapping[str, tuple[int, int]]] = {"f16": (2048, 3), "w8a32": (2048, 3)}


class QuantisedTileWriter(VectorWriter):
    """Writes the LLVM function of one tile: c = start + a @ panel * column scales * row scales.

    Arguments: a, bytes between rows of a, steps, panel, row scales, zeros, bytes between rows of both, column scales,
    column sums, start, bytes between rows of start, c, bytes between rows of c, ahead, bytes ahead; all but strides and
    steps are addresses. a is [rows, steps] of four bytes each; start and c are f32 [rows, width], their first `vectors`
    vectors count. Row scales and zeros (the code of 0) are one for each row, column scales and sums [width]; all are
    f32. Only w8a8 reads row scales, zeros and sums, and subtracts the zeros' part from the sums; f16 reads no scales.
    Scales are applied one after the other: the product of two small ones could be 0, of two large ones infinite. Every
    step of w8a8 prefetches the next "bytes ahead" of memory from `ahead` on, valid or not; the others prefetch the
    panel itself.
    """

    prefix = ""
    ahead = _AHEAD
    # Bytes from a panel to the next one, and from its scales to the next one's, if a tile has several panels.
    panel_bytes: Any = None
    scale_bytes: Any = None

    def __init__(self, module: ir.Module, name: str, shape: Form, rows: int, vectors: int) -> None:
        super().__init__(module, name, _ARGUMENTS, shape.lanes, shape.fma, shape.half_in_hardware)
        self.form, self.rows, self.vectors = shape, rows, vectors
        self.vector = ir.VectorType(shape.sums, shape.lanes)
        if shape.kind == "w8a8":
            self.enable(shape.dot.enables)

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
        at_rows, at_zeros, at_scales, at_start, at_c = (
            self.rows_of(address, between, self.rows)
            for address, between in (
                (a, stride),
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
        """Return the sums after `steps` steps of k from `start`. ahead: of w8a8, address and bytes of prefetches."""
        b, first, at_once = self.builder, self.whole(0), self._at_once()

        def turn(p: Any, sums: list[Any]) -> list[Any]:
            sums = self._step(at_rows, p, panel, sums, ahead)
            for q in range(1, count):
                sums = self._step(at_rows, b.add(p, self.whole(q)), panel, in_order(b, sums), ahead)
            return sums

        if (count := at_once) > 1:
            whole = b.and_(steps, self.whole(-at_once))
            start, first = loop(b, (first, whole, at_once), start, turn, as_written=True), whole
        count = 1
        return loop(b, (first, steps, 1), start, turn, as_written=bool(at_once))

    def _at_once(self) -> int:
        """Return the steps of a turn of the loop, 0 if the compiler may choose."""
        return self.form.steps if self.vectors == self.form.vectors else 0

    def _step(self, at_rows: list[Any], p: Any, panel: Any, sums: list[Any], ahead: Sequence[Any]) -> list[Any]:
        b, f = self.builder, self.form
        at = b.add(panel, b.mul(p, self.whole(f.vector_bytes * f.vectors)))
        weights = [self._weight(self._of_vector(at, j, f.vector_bytes, self.panel_bytes)) for j in range(self.vectors)]
        if f.kind in self.ahead:
            self._fetch(p, at)
        elif ahead:
            beyond, by = ahead
            self._prefetch(b.add(beyond, b.mul(p, by)), LINE, 3)
        new = []
        for i, row in enumerate(at_rows):
            x = self.splat(self.load(b.add(row, b.mul(p, self.whole(4))), f.sums), self.vector)
            new += [self._accumulate(sums[i * self.vectors + j], x, w) for j, w in enumerate(weights)]
        return new

    def _of_vector(self, first: Any, j: int, nbytes: int, between: Any) -> Any:
        """Return the address of vector j; first: of vector 0. nbytes: of a vector. between: bytes between panels."""
        b = self.builder
        panel, place = divmod(j, self.form.vectors)
        within = b.add(first, self.whole(place * nbytes))
        return b.add(within, b.mul(between, self.whole(panel))) if panel else within

    def _of_columns(self, first: Any, j: int) -> Any:
        """Return the address of the scales or sums of vector j; first: of vector 0."""
        return self._of_vector(first, j, 4 * self.form.lanes, self.scale_bytes)

    def _fetch(self, p: Any, at: Any) -> None:
        """Prefetch the weights of a later step in step p; at: address of this step's weights."""
        del p
        distance, level = self.ahead[self.form.kind]
        self._prefetch(self.builder.add(at, self.whole(distance)), self.form.vector_bytes * self.form.vectors, level)

    def _prefetch(self, at: Any, nbytes: int, locality: int) -> None:
        """Prefetch `nbytes` from an address on."""
        for line in range(0, nbytes, LINE):
            self.prefetch(self.after(at, line), locality)

    def _finish(
        self, sums: list[Any], at_zeros: list[Any], column_sums: Any, at_scales: list[Any], column_scales: Any,
        at_start: list[Any], at_c: list[Any],
    ) -> None:  # fmt: skip
        """Scale the sums, add the tile's start and store them.

        Sums of products of bytes over a block, and the zeros' part of them, are below 2**24, so f32 is exact. An
        integer product at the start of the tile instead would delay its first steps.
        """
        b, f = self.builder, self.form
        for j in range(self.vectors):
            at = self.whole(4 * j * f.lanes)
            scale = None if f.kind == "f16" else self.load(self._of_columns(column_scales, j))
            of_codes = self.load(self._of_columns(column_sums, j)) if f.kind == "w8a8" else None
            for i in range(self.rows):
                value = sums[i * self.vectors + j]
                if f.kind != "f16":
                    factor, start = scale, self.load(b.add(at_start[i], at))
                    if f.kind == "w8a8":
                        zero, factor = (self.splat(self.load(of[i], F32)) for of in (at_zeros, at_scales))
                        value = self._of_codes(value, zero, of_codes, scale)
                    value = self.multiply_add(value, factor, start)
                self.store(value, b.add(at_c[i], at))

    def _of_codes(self, sums: Any, zero: Any, of_codes: Any, scale: Any) -> Any:
        """Return sums of products of bytes in steps of a row, without the part of the code of 0."""
        b = self.builder
        return b.fmul(self.multiply_add(b.fneg(zero), of_codes, b.sitofp(sums, of_codes.type)), scale)

    def _start(self, at_start: list[Any]) -> list[Any]:
        """Return the initial sums: of f16 the tile's start; of the others, with scaled sums, 0."""
        b, f = self.builder, self.form
        if f.kind != "f16":
            return [ir.Constant(self.vector, None)] * (self.rows * self.vectors)
        columns = [self.whole(4 * j * f.lanes) for j in range(self.vectors)]
        return [self.load(b.add(row, at), self.vector) for row in at_start for at in columns]

    def _weight(self, address: Any) -> Any:
        b, f = self.builder, self.form
        if f.kind == "w8a8":
            return self.load(address, ir.VectorType(I8, GROUP * f.lanes), 1)
        if f.kind == "w8a32":
            return b.sitofp(self.load(address, ir.VectorType(I8, f.lanes), 1), self.vector)
        return self.half(address)

    def _accumulate(self, total: Any, x: Any, weight: Any) -> Any:
        b, f = self.builder, self.form
        if f.kind != "w8a8":
            return self.multiply_add(x, weight, total)
        octets = ir.VectorType(I8, GROUP * f.lanes)
        x = b.bitcast(x, octets)
        if f.dot.intrinsic:
            function = self.declared(f.dot.intrinsic, self.vector, [self.vector, octets, octets])
            return b.call(function, [total, x, weight])
        words = ir.VectorType(I32, GROUP * f.lanes)
        products = b.mul(b.sext(x, words) if f.dot.signed else b.zext(x, words), b.sext(weight, words))
        for q in range(GROUP):
            mask = ir.Constant(ir.VectorType(I32, f.lanes), [GROUP * lane + q for lane in range(f.lanes)])
            total = b.add(total, b.shuffle_vector(products, ir.Constant(words, ir.Undefined), mask))
        return total


def _tiles(
    writer: type[QuantisedTileWriter], plain: Callable[[Form], Callable[..., None]], *kinds: Kind
) -> Callable[..., Any]:
    """Return the function that calls a tile: number of the kind, one of `writer.sizes`, then the writer's arguments."""
    forms = {KINDS.index(kind): form(kind) for kind in kinds}
    in_python = {number: plain(shape) for number, shape in forms.items()}

    def write(module: ir.Module, name: str, number: int, rows: int, vectors: int) -> ir.Function:
        return writer(module, name, forms[number], rows, vectors).write()

    sizes = [(number, *size) for number, shape in forms.items() for size in writer.sizes(shape)]
    emit = emit_sized(f"hepti_{writer.prefix}narrow", sizes, _ARGUMENTS, write)
    return lowered(emit, lambda number, *arguments: in_python[number](*arguments))


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


# Tiles of f16 and w8a32 with all vectors of a panel, and of w8a8 with 1 to all of them.
widened_tile: Final = _tiles(QuantisedTileWriter, plain_tile, "f16", "w8a32")
dot_tile: Final = _tiles(QuantisedTileWriter, plain_tile, "w8a8")


# By kind, the bytes from a use to its prefetch, and the cache level: 0 passes by the second level, which keeps the
# interpreter's data between two calls. 2 KB is slower for w8a32; other distances differ by less than the noise.
# Bytes without widening leave the CPU time to issue loads early.
_GEMV_AHEAD: Final[Mapping[str, tuple[int, int]]] = {"f16": (6144, 0), "w8a32": (8192, 0)}
# Blocks between a prefetch of scales and sums and their use: the loop cannot hide a wait for them.
_BLOCKS_AHEAD: Final = 2


def together(rows: int, shape: Form) -> int:
    """Return the number of panels of a tile of so many rows; byte dot products need no second one."""
    return 1 if shape.kind == "w8a8" else panels_at_once(rows, shape.vectors, shape.lanes)


class QuantisedGemvWriter(QuantisedTileWriter):
    """Writes the tile of `QuantisedTileWriter` with steps for all of k, and scales, sums and zeros by block.

    Column scales and sums are [blocks, width], row scales and zeros one for each block, adjacent. With more vectors
    than a panel, it computes several adjacent panels; their scales and sums are adjacent, too.
    """

    prefix = "stream_"
    ahead = _GEMV_AHEAD

    @classmethod
    def sizes(cls, shape: Form) -> Sequence[tuple[int, int]]:
        """Return (rows, vectors) of all tiles: over a whole panel, and over `together` panels."""
        rows = range(1, shape.rows + 1)
        return list(dict.fromkeys((r, n * shape.vectors) for r in rows for n in (1, together(r, shape))))

    def write(self) -> ir.Function:
        """Return the finished function."""
        b, f = self.builder, self.form
        a, stride, steps, panel, *rest = self.function.args
        row_scales, zeros, scale_stride, column_scales, column_sums, first, first_stride, c, c_stride, *_ = rest
        if self.vectors > f.vectors:
            self.panel_bytes = b.mul(steps, self.whole(f.vector_bytes * f.vectors))
            last = b.add(steps, self.whole(BLOCK - 1))
            self.scale_bytes = b.mul(b.udiv(last, self.whole(BLOCK)), self.whole(4 * f.width))
        at_rows, at_start, at_c = (
            self.rows_of(*of, self.rows) for of in ((a, stride), (first, first_stride), (c, c_stride))
        )
        start = [self.load(b.add(row, at)) for row in at_start for at in self._columns()]
        if f.kind == "f16":
            self._store(self._run(at_rows, steps, panel, start), at_c)
            b.ret_void()
            return self.function
        self._store(start, at_c)
        before, body, after = b.block, b.append_basic_block("block"), b.append_basic_block("last")
        b.cbranch(b.icmp_signed(">", steps, self.whole(0)), body, after)
        b.position_at_end(body)
        block = b.phi(steps.type)
        per_block = BLOCK // GROUP if f.kind == "w8a8" else BLOCK
        done, of_rows, of_columns = (b.mul(block, self.whole(by)) for by in (per_block, 4, 4 * f.width))
        left = b.sub(steps, done)
        count = b.select(b.icmp_signed("<", left, self.whole(per_block)), left, self.whole(per_block))
        at_zeros, at_scales = (self.rows_of(b.add(of, of_rows), scale_stride, self.rows) for of in (zeros, row_scales))
        at_x = [b.add(row, b.mul(done, self.whole(4))) for row in at_rows]
        at_panel = b.add(panel, b.mul(done, self.whole(f.vector_bytes * f.vectors)))
        at_scale, at_sum = (b.add(of, of_columns) for of in (column_scales, column_sums))
        for at in (at_scale, at_sum) if f.kind == "w8a8" else (at_scale,):
            for j in range(0, self.vectors, f.vectors):
                of_panel = self._of_columns(at, j)
                self._prefetch(b.add(of_panel, self.whole(_BLOCKS_AHEAD * 4 * f.width)), 4 * f.width, 3)
        sums = self._run(at_x, count, at_panel, self._start(at_c))
        self._finish(sums, at_zeros, at_sum, at_scales, at_scale, at_c, at_c)
        following = b.add(block, self.whole(1))
        block.add_incoming(self.whole(0), before)
        block.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed(">", left, self.whole(per_block)), body, after)
        b.position_at_end(after)
        b.ret_void()
        return self.function

    def _at_once(self) -> int:
        return 0

    def _fetch(self, p: Any, at: Any) -> None:
        """Prefetch lines of the panels in turn, often enough for each; at their end, of the panels after them."""
        b, f = self.builder, self.form
        panels = self.vectors // f.vectors
        if panels == 1:
            super()._fetch(p, at)
            return
        (distance, level), step = self.ahead[f.kind], f.vector_bytes * f.vectors
        later = b.add(at, self.whole(distance))
        inside = b.icmp_unsigned("<", b.sub(later, self.function.args[3]), self.panel_bytes)
        beyond = b.mul(self.panel_bytes, self.whole(panels - 1))
        later = b.select(inside, later, b.add(later, beyond))
        lines = max(1, panels * step // LINE)
        for i in range(lines):
            nth = b.and_(b.add(b.mul(p, self.whole(lines)), self.whole(i)), self.whole(panels - 1))
            self._prefetch(b.add(later, b.mul(nth, self.panel_bytes)), step, level)

    def _columns(self) -> list[Any]:
        return [self.whole(4 * j * self.form.lanes) for j in range(self.vectors)]

    def _store(self, values: list[Any], at_c: list[Any]) -> None:
        places = [self.builder.add(row, at) for row in at_c for at in self._columns()]
        for value, place in zip(values, places, strict=True):
            self.store(value, place)


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


# Tiles of all kinds over all vectors of a panel, or of `together` panels.
narrow_gemv: Final = _tiles(QuantisedGemvWriter, plain_gemv, *KINDS)
