"""The register tiles of few rows over narrow weights: one call goes down a whole panel, block by block of scales.

Memory is the limit: the loop never stops for the next piece, and lines are asked for far ahead of their use. Arithmetic
and its order are those of `narrow_tile`, so that a row has the same bits in either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, Final

from llvmlite import ir

from hepti_mqtt.kernels.gemm.forms import FORMS, GROUP, Form
from hepti_mqtt.kernels.gemm.narrow_tile import LINE, StorageTileWriter, emit_storage_tile, plain_tile
from hepti_mqtt.kernels.gemm.tile import panels_at_once
from hepti_mqtt.kernels.machine.jit import lowered
from hepti_mqtt.kernels.weights import BLOCK

_I64: Final = ir.IntType(64)
# By kind, how far ahead of its use a line is asked for, and for which cache: 0 passes by the second level, which keeps
# what the interpreter needs between two calls. 2 KB is slower for w8a32; other distances differ by less than the noise.
# Bytes that need no widening leave the CPU time to find its loads by itself.
_AHEAD: Final[Mapping[str, tuple[int, int]]] = {"f16": (6144, 0), "w8a32": (8192, 0)}
# How many blocks ahead their scales and sums are asked for: what the loop waits for, it cannot hide.
_BLOCKS_AHEAD: Final = 2


def together(rows: int, shape: Form) -> int:
    """Return how many panels a tile of so many rows goes down at once; byte dot products wait for nothing."""
    return 1 if shape.kind == "w8a8" else panels_at_once(rows, shape.vectors, shape.lanes)


class StreamTileWriter(StorageTileWriter):
    """Writes the tile of `StorageTileWriter` with steps for all of k, and scales, sums and zeros by block.

    Column scales and sums are [blocks, width], row scales and zeros one for each block, side by side. With more vectors
    than a panel has, it goes down several panels that lie one behind the other, as their scales and sums do.
    """

    prefix = "stream_"
    ahead = _AHEAD

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


def plain_stream(shape: Form) -> Callable[..., None]:
    """Return the tile as plain Python."""
    tile = plain_tile(shape)
    per_block = BLOCK // GROUP if shape.kind == "w8a8" else BLOCK
    step = shape.vector_bytes * shape.vectors

    def stream(
        rows: int,
        vectors: int,
        a: int,
        stride: int,
        steps: int,
        panel: int,
        row_scales: int,
        zeros: int,
        scale_stride: int,
        column_scales: int,
        column_sums: int,
        start: int,
        start_stride: int,
        c: int,
        c_stride: int,
        ahead: int,
        fetch: int,
    ) -> None:
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
half_stream: Final = lowered(emit_storage_tile(FORMS["f16"], StreamTileWriter), plain_stream(FORMS["f16"]))
byte_stream: Final = lowered(emit_storage_tile(FORMS["w8a32"], StreamTileWriter), plain_stream(FORMS["w8a32"]))
dot_stream: Final = lowered(emit_storage_tile(FORMS["w8a8"], StreamTileWriter), plain_stream(FORMS["w8a8"]))
