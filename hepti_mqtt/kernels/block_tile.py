"""Register tiles over panels of blocks, as LLVM vector IR: some rows of x times one panel, by storage and kind of x.

If the CPU multiplies bytes, x is rows of s8 codes with a scale for each 32 of them: one rounded row, or three rows of
the digits of f32 x. Else x is f32. Per block and vector of columns the products of codes are added (exactly in i32, or
in f32), then y += (scale of the weights * scale of x) * sum, for q4_1 also minimum * sum of x. The offset of codes
(q4_0: 8) is subtracted through the sum of x, without an instruction for each code. So a row's bits do not depend on its
tile. A tile has no prefetch: CPUs detect the stream of a panel if it is read in one direction; so a tile of few rows
takes all vectors of a panel together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product, takewhile
from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from hepti_mqtt.core.storage import BLOCK, BLOCK_STORAGES, STORAGES, Storage
from hepti_mqtt.kernels.blocks import FIELDS, LANES, VECTORS, WIDTH, BlockMatrix
from hepti_mqtt.kernels.cpu import DOT, HALF_IN_HARDWARE, TILE, isa
from hepti_mqtt.kernels.ir_vectors import F32, I8, I16, I32, IN_ORDER, VectorWriter, emit_sized, loop
from hepti_mqtt.kernels.jit import lowered

# How products of bytes are added: by an instruction, for weights as u8 or s8, or by pairs in 16 bits.
_DOT: Final = DOT.intrinsic if DOT.lanes == LANES else ""
_UNSIGNED: Final = bool(_DOT) and not DOT.signed
BYTEWISE: Final = bool(_DOT) or isa() == "avx2"
# Rows of codes of a row of f32: its values become whole numbers up to 127 BASE**2, a little less than 2**23, and these
# become digits from -127 to 127. The small base leaves room for a digit that f32 rounds up.
DIGITS: Final = 3 if BYTEWISE else 1
BASE: Final = 253
# Rows of the largest tile, of f32 and of rounded x: sums, those of a block, weights and one x must fit the registers.
ROWS: Final = {
    "avx512": (4, 8),
    "avx2": (1, 3),
    "neon": (4, 8) if _DOT else (4, 4),
    "sse": (2, 2),
    "generic": (2, 2),
}[isa()]
_REGISTERS: Final = {"avx512": 32, "neon": 32}.get(isa(), 16)
# Words of a row of x for each 32 values: scale and sum (of digits: in the first row), then the start of sums of
# products for weights with an offset of 8 or 128, or of 32 in runs of 16: - offset * sum, in i32 of codes, else in f32.
WORDS: Final = 6
_OF_8, _OF_128, _OF_32 = 2, 3, 4
_UNSIGNED_PAIRS: Final = "llvm.x86.avx2.pmadd.ub.sw"
_ARGUMENTS: Final = 8


Sums = list[list[Any]]  # of each row, of each vector


class Piece(NamedTuple):
    """Values of k with one sum of products of codes."""

    #: number of each group of 4 of the 32 values, and the function that writes its codes
    groups: Sequence[tuple[int, Callable[[], list[Any]]]]
    #: factor of the sums, i32 of each vector; empty for none
    by: Sequence[Any]
    #: the word of x that sums begin with; 0 for none
    start: int


class Run(NamedTuple):
    """32 values of k with one scale of x, in some vectors."""

    #: number of the 32 values in a block, i64
    part: Any
    pieces: Sequence[Piece]
    #: of each vector
    scale: Sequence[Any]
    #: minimum of each vector; empty for none
    least: Sequence[Any]
    #: bits of a code, 255 for signed ones
    mask: int
    #: groups for which sums of pairs of products fit 16 bits
    narrow: int


class BlockTileWriter(VectorWriter):
    """Writes the LLVM function of one tile: c = start + x @ panel.

    Arguments: panel, blocks of 32, x, words, start, bytes between rows of start, c, bytes between rows of c; all but
    strides and blocks are addresses. Rows of each 32 values are adjacent in x and words. wide: DIGITS rows of x give
    one row of c.
    """

    def __init__(self, module: ir.Module, name: str, storage: Storage, rows: int, wide: bool) -> None:
        super().__init__(module, name, _ARGUMENTS, LANES, TILE.fma, HALF_IN_HARDWARE)
        self.storage, self.rows, self.fold = storage, rows, DIGITS if wide else 1
        self.octets = ir.VectorType(I8, 4 * LANES)
        if _DOT:
            self.enable(DOT.enables)

    def write(self) -> ir.Function:
        """Return the finished function."""
        b, large = self.builder, self.storage.block > BLOCK
        panel, blocks, x, words, start, start_stride, c, c_stride = self.function.args
        at_start, at_c = (
            self.rows_of(address, between, self.rows // self.fold)
            for address, between in ((start, start_stride), (c, c_stride))
        )
        columns = [self.whole(4 * LANES * j) for j in range(VECTORS)]
        begin = [self.load(b.add(row, column), self.floats) for row in at_start for column in columns]

        def turn(t: Any, sums: list[Any]) -> list[Any]:
            # Blocks of 256 have a step for each half: a whole one would be too much code.
            n, half = (b.lshr(t, self.whole(1)), b.and_(t, self.whole(1))) if large else (t, self.whole(0))
            block = b.add(panel, b.mul(n, self.whole(WIDTH * self.storage.block_bytes)))
            first, totals = b.mul(n, self.whole(self.storage.block // BLOCK)), list(sums)
            for vectors in self._at_once():
                for runs in self._runs(block, half, vectors):
                    for some in self._together(runs, vectors):
                        self._add(some, vectors, first, (x, words), totals)
            return totals

        turns = b.lshr(blocks, self.whole(2)) if large else blocks
        totals = loop(b, (self.whole(0), turns, 1), begin, turn, as_written=True)
        places = [b.add(row, column) for row in at_c for column in columns]
        for total, place in zip(totals, places, strict=True):
            self.store(total, place)
        b.ret_void()
        return self.function

    def _at_once(self) -> list[list[int]]:
        """Return groups of a panel's vectors: all together if their sums fit the registers, else one by one."""
        whole = list(range(VECTORS))
        return [whole] if self._fits(VECTORS) else [[j] for j in whole]

    def _together(self, runs: list[Run], vectors: list[int]) -> list[list[Run]]:
        """Return groups of runs of the same bytes: all together if their sums fit the registers, else one by one."""
        return [runs] if self._fits(len(vectors) * len(runs)) else [[run] for run in runs]

    def _fits(self, sums: int) -> bool:
        """Return whether this number of sums for each row fits the registers with totals, weights, masks and one x.

        Totals of a large block do not count: they leave the registers once per block.
        """
        totals = 0 if self.storage.block > BLOCK else self.rows // self.fold * VECTORS
        return totals + self.rows * sums * (1 if BYTEWISE else 2) + 6 <= _REGISTERS

    def _add(self, runs: list[Run], vectors: list[int], first: Any, at: tuple[Any, Any], totals: list[Any]) -> None:
        """Add runs to the totals of some vectors; at: x and its words; first: the block's first 32 values."""
        b, parts = self.builder, [self.builder.add(first, run.part) for run in runs]

        def of_rows(address: Any, nbytes: int) -> list[list[Any]]:
            of_parts = [b.add(address, b.mul(part, self.whole(nbytes * self.rows))) for part in parts]
            return [[b.add(place, self.whole(nbytes * i)) for i in range(self.rows)] for place in of_parts]

        of_x, of_words = of_rows(at[0], BLOCK if BYTEWISE else 4 * BLOCK), of_rows(at[1], 4 * WORDS)
        sums = (self._products if BYTEWISE else self._products_f32)(runs, of_x, of_words, len(vectors))
        for run, words, products in zip(runs, of_words, sums, strict=True):
            for (i, row), (n, j) in product(enumerate(words[:: self.fold]), enumerate(vectors)):
                place, factor = i * VECTORS + j, run.scale[n]
                if run.least:
                    least = self._word(row, 1, self.floats)
                    totals[place] = self.multiply_add(run.least[n], least, totals[place])
                if BYTEWISE:
                    factor = b.fmul(factor, self._word(row, 0, self.floats), flags=IN_ORDER)
                totals[place] = self.multiply_add(products[i][n], factor, totals[place])

    def _runs(self, block: Any, half: Any, vectors: list[int]) -> Iterator[list[Run]]:
        """Yield the runs of a block for some vectors, in groups of the same bytes; half: of a block of 256."""
        name, first = self.storage.name, self.whole(0)
        if name in ("q4_k", "q5_k"):
            yield from self._runs_q4_k(block, half, vectors)
        elif name == "q6_k":
            yield from self._runs_q6_k(block, half, vectors)
        else:
            scale = self._halves(block, "scale", vectors)
            least = self._halves(block, "least", vectors) if name == "q4_1" else []
            if name == "q8_0":
                groups = [(g, self._codes(block, "codes", self.whole(g), vectors)) for g in range(8)]
                piece = Piece(groups, [], _OF_128 if _UNSIGNED else 0)
            else:
                groups = [
                    (g + 4 * high, self._nibbles(block, self.whole(g), high, vectors))
                    for g, high in product(range(4), range(2))
                ]
                piece = Piece(groups, [], _OF_8 if name == "q4_0" else 0)
            yield [Run(first, [piece], scale, least, *((255, 1) if name == "q8_0" else (15, 8)))]

    def _runs_q4_k(self, block: Any, half: Any, vectors: list[int]) -> Iterator[list[Run]]:
        """Two runs, of the low and of the high halves of 32 bytes, twice; scales and minima have 6 bits.

        The first four parts' are the low six bits of bytes 0..7. The others' low four bits are in bytes 8..11, their
        upper two in the upper bits of bytes 0..7. q5_k also has fifth bits of each part.
        """
        b, every, is_five = self.builder, partial(self.every, self.integers), self.storage.name == "q5_k"
        is_second = b.icmp_signed("==", half, self.whole(1))

        def sixes(six: Any, four: Any) -> Any:
            later = b.or_(b.and_(four, every(0x0F0F0F0F)), b.and_(b.lshr(six, every(2)), every(0x30303030)))
            return b.select(is_second, later, b.and_(six, every(0x3F3F3F3F)))

        # Fifth bits of the parts of this half of the block come down to bits 0..3.
        lowered = self.splat(b.trunc(b.mul(half, self.whole(4)), I32), self.integers)

        def fives(nibbles: Callable[[], list[Any]], fifths: Callable[[], list[Any]], place: int) -> list[Any]:
            codes = []
            for nibble, bits in zip(nibbles(), fifths(), strict=True):
                bit = b.shl(b.lshr(bits, lowered), every(4 - place))
                codes.append(b.or_(nibble, b.and_(bit, every(0x10101010))))
            return codes

        low, high, both = (self._codes(block, "parts", self.whole(g), vectors)() for g in range(3))
        scales = [sixes(*pair) for pair in zip(low, both, strict=True)]
        minima = [sixes(six, b.lshr(four, every(4))) for six, four in zip(high, both, strict=True)]
        scale = self._halves(block, "scale", vectors)
        least = [b.fneg(value) for value in self._halves(block, "least", vectors)]
        for pair in range(2):
            first = b.add(b.mul(half, self.whole(16)), self.whole(8 * pair))
            runs = []
            for upper in range(2):
                place = 2 * pair + upper
                by = [self._byte(of, place, False) for of in scales]
                own = [b.sitofp(self._byte(of, place, False), self.floats) for of in minima]
                below = [b.fmul(of, value, flags=IN_ORDER) for of, value in zip(least, own, strict=True)]
                nibbles = [self._nibbles(block, b.add(first, self.whole(g)), upper, vectors) for g in range(8)]
                groups = list(enumerate(nibbles))
                if is_five:
                    fifths = [self._codes(block, "fifths", self.whole(g), vectors) for g in range(8)]
                    groups = [
                        (g, partial(fives, *both, place)) for g, both in enumerate(zip(nibbles, fifths, strict=True))
                    ]
                part = b.add(b.mul(half, self.whole(4)), self.whole(place))
                runs.append(Run(part, [Piece(groups, by, 0)], scale, below, *((31, 4) if is_five else (15, 8))))
            yield runs

    def _runs_q6_k(self, block: Any, half: Any, vectors: list[int]) -> Iterator[list[Run]]:
        """Four runs, of the low halves of twice 32 bytes and of the high ones; each 16 values have a scale."""
        b, every = self.builder, partial(self.every, self.integers)
        at = b.add(block, b.mul(half, self.whole(96 * WIDTH)))
        scale = self._halves(block, "scale", vectors)
        first = b.mul(half, self.whole(2))
        of_parts = [self._codes(block, "parts", b.add(first, self.whole(i)), vectors)() for i in range(2)]

        def codes(g: int, odd: int, high: int) -> list[Any]:
            sixes = []
            own = self._nibbles(at, self.whole(3 * g + 1 + odd), high, vectors)()
            pairs = self._codes(at, "codes", self.whole(3 * g), vectors)()
            for nibbles, upper in zip(own, pairs, strict=True):
                by = 4 - 2 * odd - 4 * high
                moved = b.shl(upper, every(by)) if by > 0 else b.lshr(upper, every(-by)) if by else upper
                sixes.append(b.or_(nibbles, b.and_(moved, every(0x30303030))))
            return sixes

        runs = []
        for high, odd in product(range(2), range(2)):
            place = 2 * high + odd
            pieces = []
            for q in range(2):
                by = [self._byte(of, 2 * odd + q, True) for of in of_parts[high]]
                groups = [(g, partial(codes, g, odd, high)) for g in range(4 * q, 4 * q + 4)]
                pieces.append(Piece(groups, by, _OF_32 + q))
            part = b.add(b.mul(half, self.whole(4)), self.whole(place))
            runs.append(Run(part, pieces, scale, [], 63, 2))
        yield runs

    def _byte(self, words: Any, place: int, signed: bool) -> Any:
        """Return a byte of each lane."""
        b, left = self.builder, self.every(self.integers, 24 - 8 * place)
        return (b.ashr if signed else b.lshr)(b.shl(words, left), self.every(self.integers, 24))

    def _field(self, name: str) -> int:
        """Return the bytes of a block before a field."""
        fields = FIELDS[self.storage.name]
        return WIDTH * sum(fields[other].nbytes for other in takewhile(lambda other: other != name, fields))

    def _halves(self, block: Any, field: str, vectors: list[int]) -> list[Any]:
        at = self._field(field)
        return [self.half(self.builder.add(block, self.whole(at + 2 * LANES * j))) for j in vectors]

    def _codes(self, block: Any, field: str, group: Any, vectors: list[int]) -> Callable[[], list[Any]]:
        """Return a function that writes the loads of a group of a field: four bytes of each lane."""
        b = self.builder

        def load() -> list[Any]:
            first = b.add(block, b.mul(group, self.whole(4 * WIDTH)))
            at = self._field(field)
            return [self.load(b.add(first, self.whole(at + 4 * LANES * j)), self.integers, 1) for j in vectors]

        return load

    def _nibbles(self, block: Any, group: Any, high: int, vectors: list[int]) -> Callable[[], list[Any]]:
        """Return a function that writes the codes 0..15 of one half of a group's bytes."""
        b, load = self.builder, self._codes(block, "codes", group, vectors)

        def codes() -> list[Any]:
            shifted = [b.lshr(v, self.every(self.integers, 4)) if high else v for v in load()]
            return [b.and_(v, self.every(self.integers, 0x0F0F0F0F)) for v in shifted]

        return codes

    def _word(self, words: Any, place: int, kind: Any) -> Any:
        """Return one of the words of a row, in all lanes."""
        return self.splat(self.load(self.builder.add(words, self.whole(4 * place)), kind.element), kind)

    def _products_f32(
        self, runs: list[Run], of_x: list[list[Any]], of_words: list[list[Any]], vectors: int
    ) -> list[Sums]:
        """Return sums of products of f32 x for each run: each byte of each lane becomes a float."""
        b, zero, every, sums_of = self.builder, ir.Constant(self.floats, None), partial(self.every, self.integers), []
        for run, at_x, at_words in zip(runs, of_x, of_words, strict=True):
            totals: list[list[Any]] = [[None] * vectors for _ in at_x]
            for piece in run.pieces:
                begin = [self._word(words, piece.start, self.floats) if piece.start else zero for words in at_words]
                # Two chains: each multiply-add waits for the previous one.
                sums = [[[start, zero] for _ in range(vectors)] for start in begin]
                for g, codes in piece.groups:
                    for (n, code), q in product(enumerate(codes()), range(4)):
                        if run.mask < 255:
                            whole = b.and_(b.lshr(code, every(8 * q)), every(run.mask))
                        else:
                            whole = b.ashr(b.shl(code, every(24 - 8 * q)), every(24))
                        weight = b.sitofp(whole, self.floats)
                        for row, at in zip(sums, at_x, strict=True):
                            x = self.splat(self.load(b.add(at, self.whole(16 * g + 4 * q)), F32), self.floats)
                            row[n][q % 2] = self.multiply_add(weight, x, row[n][q % 2])
                for i, n in product(range(len(sums)), range(vectors)):
                    value = b.fadd(*sums[i][n])
                    if piece.by:
                        value = b.fmul(value, b.sitofp(piece.by[n], self.floats), flags=IN_ORDER)
                    totals[i][n] = value if totals[i][n] is None else b.fadd(totals[i][n], value, flags=IN_ORDER)
            sums_of.append(totals)
        return sums_of

    def _products(self, runs: list[Run], of_x: list[list[Any]], of_words: list[list[Any]], vectors: int) -> list[Sums]:
        """Return sums of products of codes for each run, f32; those of each piece are exact."""
        b, add, totals = self.builder, self.builder.add, list[Sums]()
        for pieces in zip(*(run.pieces for run in runs), strict=True):
            sums = [
                [[self._start(piece, words)] * vectors for words in at_words]
                for piece, at_words in zip(pieces, of_words, strict=True)
            ]
            pairs: list[Sums] = [[[None] * vectors for _ in rows] for rows in sums]
            for at in range(len(pieces[0].groups)):
                for r, (run, piece) in enumerate(zip(runs, pieces, strict=True)):
                    last = at % run.narrow == run.narrow - 1
                    self._step(run.mask == 255, piece.groups[at], of_x[r], (sums[r], pairs[r]), last)
                if self.storage.block > BLOCK or self.storage.name == "q8_0" or at % 2:
                    # If the compiler moved loads, the CPU would not detect the stream of memory.
                    b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)
            if self.fold > 1:
                sums, add = [self._of_digits(rows) for rows in sums], partial(b.fadd, flags=IN_ORDER)
            sums = [self._times(rows, piece.by) for rows, piece in zip(sums, pieces, strict=True)]
            totals = [_merged(add, *both) for both in zip(totals, sums, strict=True)] if totals else sums
        if self.fold > 1:
            return totals
        return [[[b.sitofp(value, self.floats) for value in row] for row in rows] for rows in totals]

    def _of_digits(self, sums: Sums) -> Sums:
        """Return the sums of rows of f32 x from those of their digits."""
        b, totals = self.builder, Sums()
        base, square = self.every(self.integers, BASE), self.every(self.floats, BASE * BASE)
        for high, middle, low in zip(*(sums[digit::DIGITS] for digit in range(DIGITS)), strict=True):
            lower = [b.sitofp(b.add(b.mul(m, base), c), self.floats) for m, c in zip(middle, low, strict=True)]
            upper = [b.sitofp(h, self.floats) for h in high]
            totals.append([self.multiply_add(h, square, c) for h, c in zip(upper, lower, strict=True)])
        return totals

    def _times(self, sums: Sums, by: Sequence[Any]) -> Sums:
        """Return sums times a piece's factors `by`, if it has any."""
        b = self.builder
        if not by:
            return sums
        if self.fold > 1:
            floats = [b.sitofp(value, self.floats) for value in by]
            return [[b.fmul(v, f, flags=IN_ORDER) for v, f in zip(row, floats, strict=True)] for row in sums]
        return [[b.mul(v, whole) for v, whole in zip(row, by, strict=True)] for row in sums]

    def _start(self, piece: Piece, words: Any) -> Any:
        """Return the start of sums of codes, which subtracts the weights' offset."""
        return self._word(words, piece.start, self.integers) if piece.start else ir.Constant(self.integers, None)

    def _step(
        self, signed: bool, group: tuple[int, Callable[[], list[Any]]], of_x: list[Any],
        sums_and_pairs: tuple[list[list[Any]], list[list[Any]]], last: bool,
    ) -> None:  # fmt: skip
        """Add the products of 4 values of k to the sums; last: widen the sums of pairs after this group."""
        b, (sums, pairs), (g, codes) = self.builder, sums_and_pairs, group
        flip = self.every(self.integers, 0x80808080)
        weights = [b.xor(code, flip) if signed and _UNSIGNED else code for code in codes()]
        for i, at in enumerate(of_x):
            x = self.splat(self.load(b.add(at, self.whole(4 * g)), I32), self.integers)
            for n, weight in enumerate(weights):
                if _DOT:
                    sums[i][n] = self._call(_DOT, sums[i][n], b.bitcast(weight, self.octets), b.bitcast(x, self.octets))
                    continue
                products = self._pairs(weight, x, signed)
                pairs[i][n] = products if pairs[i][n] is None else b.add(pairs[i][n], products)
                if last:
                    sums[i][n], pairs[i][n] = b.add(sums[i][n], self._widened(pairs[i][n])), None

    def _pairs(self, weights: Any, x: Any, signed: bool) -> Any:
        """Return sums of pairs of products, i16."""
        if signed:
            return self._signed_pairs(weights, x)
        return self._call(
            _UNSIGNED_PAIRS, None, self.builder.bitcast(weights, self.octets), self.builder.bitcast(x, self.octets)
        )

    def _call(self, name: str, total: Any, weights: Any, x: Any) -> Any:
        """Return the result of an instruction on bytes: i32 totals plus products, or without totals pairs in i16."""
        given = [weights, x] if total is None else [total, weights, x]
        result = ir.VectorType(I16, 2 * LANES) if total is None else self.integers
        return self.builder.call(self.declared(name, result, [value.type for value in given]), given)

    def _signed_pairs(self, weights: Any, x: Any) -> Any:
        """Return sums of pairs of products of s8: |w| times x with the sign of w."""
        b = self.builder
        weights, x = b.bitcast(weights, self.octets), b.bitcast(x, self.octets)
        sign = self.declared("llvm.x86.avx2.psign.b", self.octets, [self.octets] * 2)
        magnitude = self.declared(f"llvm.abs.v{4 * LANES}i8", self.octets, [self.octets, ir.IntType(1)])
        size = b.call(magnitude, [weights, ir.Constant(ir.IntType(1), 0)])
        return self._call(_UNSIGNED_PAIRS, None, size, b.call(sign, [x, weights]))

    def _widened(self, pairs: Any) -> Any:
        """Return sums of two i16 each, i32."""
        add = self.declared("llvm.x86.avx2.pmadd.wd", self.integers, [pairs.type] * 2)
        return self.builder.call(add, [pairs, self.every(pairs.type, 1)])


def _merged(add: Callable[[Any, Any], Any], one: Sums, other: Sums) -> Sums:
    return [[add(*pair) for pair in zip(*rows, strict=True)] for rows in zip(one, other, strict=True)]


def _written(module: ir.Module, name: str, rows: int, variant: int) -> ir.Function:
    storage = STORAGES[BLOCK_STORAGES[variant // 2]]
    return BlockTileWriter(module, name, storage, rows, not variant % 2).write()


# Rows of x of a tile, and its variant: 2 * kind of the storage, + 1 of rounded x.
_SIZES: Final = [
    (rows * (1 if variant % 2 else DIGITS), variant)
    for variant in range(2 * len(BLOCK_STORAGES))
    for rows in range(1, ROWS[variant % 2] + 1)
    if BYTEWISE or not variant % 2
]


def _at(address: int, count: int, dtype: Any) -> NDArray[Any]:
    nbytes = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * nbytes).from_address(int(address)), dtype)


def _plain(
    rows: int, variant: int, panel: int, blocks: int, x: int, words: int, start: int, start_stride: int, c: int,
    c_stride: int,
) -> None:  # fmt: skip
    """Compute a tile in plain Python."""
    storage = STORAGES[BLOCK_STORAGES[variant // 2]]
    large = blocks * BLOCK // storage.block
    raw = _at(panel, large * WIDTH * storage.block_bytes, np.uint8).reshape(1, large, -1)
    right, digits = BlockMatrix(storage, raw, BLOCK * blocks, WIDTH).plain(), 1 if variant % 2 else DIGITS
    left = _at(x, rows * BLOCK * blocks, np.int8 if BYTEWISE else np.float32).reshape(blocks, rows, BLOCK)
    scales = _at(words, rows * WORDS * blocks, np.float32).reshape(blocks, rows, WORDS)[..., 0]
    for i in range(rows // digits):
        whole = np.zeros((blocks, BLOCK))
        for row in range(digits * i, digits * (i + 1)):
            whole = BASE * whole + left[:, row]
        if BYTEWISE:
            whole *= scales[:, digits * i, None]
        total = whole.reshape(-1) @ right + _at(start + i * start_stride, WIDTH, np.float32)
        _at(c + i * c_stride, WIDTH, np.float32)[...] = total


# Arguments: rows of x, variant, then those of the writer.
block_tile: Final = lowered(emit_sized("hepti_blocks", _SIZES, _ARGUMENTS, _written), _plain)
