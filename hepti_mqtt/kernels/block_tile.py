"""Register tiles over panels of blocks, as LLVM vector IR: some rows of x times one panel, by storage and kind of x.

x is f32, or s8 codes with a scale for each 32 of them. Per block and vector of columns the products of codes are added
(in f32, or exactly in i32), then y += (scale of the weights * scale of x) * sum, and of q4_1 minimum * sum of x. What
the codes are off by (q4_0: 8) comes in by the sum of x: no instruction for each code. So a row's bits do not depend on
its tile. A tile has no prefetch: CPUs find the one stream of a panel by themselves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from hepti_mqtt.kernels.blocks import FIELDS, LANES, VECTORS, WIDTH, BlockMatrix
from hepti_mqtt.kernels.cpu import DOT, isa
from hepti_mqtt.kernels.jit import EXACT, emitter, lowered
from hepti_mqtt.kernels.quantised_tile import VectorWriter
from hepti_mqtt.kernels.tile import call_chosen, loop
from hepti_mqtt.storage import BLOCK, BLOCK_STORAGES, STORAGES, Storage

# Rows of the largest tile: its sums, those of a block, the weights and one x must fit the registers.
ROWS: Final = {"avx512": 6, "avx2": 3, "neon": 4, "sse": 2, "generic": 2}[isa()]
KINDS: Final[Mapping[str, int]] = {name: kind for kind, name in enumerate(BLOCK_STORAGES)}
# Of a row of x for each 32 values: scale and sum (of codes: times the scale), then what sums of products begin with
# where weights are off by 8 or 128, or by 32 in runs of 16: - offset * sum, in i32 of codes, else in f32.
WORDS: Final = 6
_OF_8, _OF_128, _OF_32 = 2, 3, 4
_UNSIGNED_PAIRS: Final = "llvm.x86.avx2.pmadd.ub.sw"
_F32: Final = ir.FloatType()
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_ARGUMENTS: Final = 10
_EXACT: Final = tuple(sorted(EXACT))  # else tiles of one row take products in another order
# How products of bytes are added: by an instruction, for weights as u8 or s8, by pairs in 16 bits, or wide.
_DOT: Final = DOT.intrinsic if DOT.lanes == LANES else ""
_UNSIGNED: Final = bool(_DOT) and not DOT.signed
_PAIRS: Final = not _DOT and isa() == "avx2"


class Run(NamedTuple):
    """Values of k that share a scale of the weights and one of x.

    part: which 32 values of a block, i64. groups: (which 4 of these, their codes in each lane). least: what all are
    above, if there is such a number. start: the word that sums begin with, 0 for none. mask: bits of a code, 255 for
    signed ones. narrow: groups of which sums of pairs of products fit 16 bits.
    """

    part: Any
    groups: Sequence[tuple[int, Any]]
    scale: Any
    least: Any
    start: int
    mask: int
    narrow: int


class BlockTileWriter(VectorWriter):
    """Writes the LLVM function of one tile: c = start + x @ panel.

    Arguments: panel, blocks of 32, x, bytes between rows of x, words, bytes between rows of words, start, bytes between
    rows of start, c, bytes between rows of c; all but strides and blocks are addresses. wide: x is f32, of which no
    scales are read among the words; else s8.
    """

    def __init__(self, module: ir.Module, name: str, storage: Storage, rows: int, wide: bool) -> None:
        super().__init__(module, name, _ARGUMENTS, LANES)
        self.storage, self.rows, self.wide = storage, rows, wide
        self.whole, self.floats = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)
        self.octets = ir.VectorType(_I8, 4 * LANES)
        if not wide and _DOT:
            self._enable(DOT.enables)

    def write(self) -> ir.Function:
        """Return the finished function."""
        b, rows = self.builder, range(self.rows)
        panel, blocks, x, x_stride, words, words_stride, start, start_stride, c, c_stride = self.function.args
        at_x, at_words, at_start, at_c = (
            [b.add(address, b.mul(between, self._int(i))) for i in rows]
            for address, between in ((x, x_stride), (words, words_stride), (start, start_stride), (c, c_stride))
        )
        columns = [self._int(4 * LANES * j) for j in range(VECTORS)]
        begin = [self._load(b.add(row, column), self.floats) for row in at_start for column in columns]

        large = self.storage.block > BLOCK

        def turn(t: Any, sums: list[Any]) -> list[Any]:
            # Blocks of 256 have a step for each 64 of them: all of one would be too much code.
            n, step = (b.lshr(t, self._int(2)), b.and_(t, self._int(3))) if large else (t, self._int(0))
            block = b.add(panel, b.mul(n, self._int(WIDTH * self.storage.block_bytes)))
            first = b.mul(n, self._int(self.storage.block // BLOCK))
            x_bytes = self._int(BLOCK * 4 if self.wide else BLOCK)
            new: list[Any] = [None] * len(sums)
            for j in range(VECTORS):
                totals = sums[j::VECTORS]
                for run in self._runs(block, step, j):
                    part = b.add(first, run.part)
                    of_x = [b.add(row, b.mul(part, x_bytes)) for row in at_x]
                    of_words = [b.add(row, b.mul(part, self._int(4 * WORDS))) for row in at_words]
                    totals = self._added(run, of_words, of_x, totals)
                new[j::VECTORS] = totals
            return new

        turns = b.lshr(blocks, self._int(1)) if large else blocks
        totals = loop(b, (self._int(0), turns, 1), begin, turn, as_written=True)
        places = [b.add(row, column) for row in at_c for column in columns]
        for total, place in zip(totals, places, strict=True):
            b.store(total, self._pointer(place, self.floats)).align = 4
        b.ret_void()
        return self.function

    def _added(self, run: Run, of_words: list[Any], of_x: list[Any], totals: list[Any]) -> list[Any]:
        """Return the totals of a vector with what a run adds."""
        b = self.builder
        sums = (self._products_f32 if self.wide else self._products)(run, of_x, of_words)
        new = []
        for total, found, words in zip(totals, sums, of_words, strict=True):
            if run.least is not None:
                total = self._multiply_add(run.least, self._word(words, 1, self.floats), total)
            factor = run.scale if self.wide else b.fmul(run.scale, self._word(words, 0, self.floats), flags=_EXACT)
            new.append(self._multiply_add(found if self.wide else b.sitofp(found, self.floats), factor, total))
        return new

    def _runs(self, block: Any, step: Any, j: int) -> Iterator[Run]:
        """Yield what a step over vector j of a block has; step: of the four of a block of 256."""
        name = self.storage.name
        if name == "q4_k":
            yield from self._runs_q4_k(block, step, j)
            return
        if name == "q6_k":
            yield from self._runs_q6_k(block, step, j)
            return
        first = self._int(0)
        scale = self._field_half(block, 1, j)
        least = self._field_half(block, 2, j) if name == "q4_1" else None
        if name == "q8_0":
            groups = [(g, self._codes(block, 0, self._int(g), j)) for g in range(8)]
            yield Run(first, groups, scale, least, _OF_128 if _UNSIGNED and not self.wide else 0, 255, 1)
            return
        groups = [*self._nibbles(block, first, j, 0), *self._nibbles(block, first, j, 1)]
        yield Run(first, groups, scale, least, _OF_8 if name == "q4_0" else 0, 15, 8)

    def _nibbles(self, block: Any, first: Any, j: int, high: int) -> list[tuple[int, Any]]:
        """Return (group, codes 0..15) of one half of the bytes of four or eight groups from `first` on."""
        b, found = self.builder, []
        count = 8 if self.storage.block > BLOCK else 4
        for g in range(count):
            codes = self._codes(block, 0, b.add(first, self._int(g)), j)
            codes = b.lshr(codes, self._all(self.whole, 4)) if high else codes
            found.append((g + 4 * high * (count == 4), b.and_(codes, self._all(self.whole, 0x0F0F0F0F))))
        return found

    def _runs_q4_k(self, block: Any, step: Any, j: int) -> Iterator[Run]:
        """Two runs, of the low and of the high halves of 32 bytes; scales and minima have 6 bits.

        Those of the first four parts are the low six bits of bytes 0..7; of the others four bits are in bytes 8..11,
        and the upper two those that bytes 0..7 have left.
        """
        b = self.builder
        low, high, both = (self._codes(block, 1, self._int(g), j) for g in range(3))
        behind = b.icmp_signed(">=", step, self._int(2))
        shift = self._splat(b.trunc(b.mul(b.and_(step, self._int(1)), self._int(16)), _I32), self.whole)

        def sixes(six: Any, four: Any) -> Any:
            upper = b.and_(b.lshr(six, self._all(self.whole, 2)), self._all(self.whole, 0x30303030))
            later = b.or_(b.and_(four, self._all(self.whole, 0x0F0F0F0F)), upper)
            return b.lshr(b.select(behind, later, b.and_(six, self._all(self.whole, 0x3F3F3F3F))), shift)

        scales, minima = sixes(low, both), sixes(high, b.lshr(both, self._all(self.whole, 4)))
        scale, least = self._field_half(block, 2, j), b.fneg(self._field_half(block, 3, j))
        for half in range(2):
            part = b.add(b.mul(step, self._int(2)), self._int(half))
            groups = self._nibbles(block, b.mul(step, self._int(8)), j, half)
            own = [b.fmul(of, self._byte(v, half, False), flags=_EXACT) for of, v in ((scale, scales), (least, minima))]
            yield Run(part, groups, own[0], own[1], 0, 15, 8)

    def _runs_q6_k(self, block: Any, step: Any, j: int) -> Iterator[Run]:
        """Four runs of 16 values with a scale each: the low halves of 32 bytes, then the high ones."""
        b = self.builder
        half, odd = b.lshr(step, self._int(1)), b.and_(step, self._int(1))
        pairs = self._splat(b.trunc(b.mul(odd, self._int(2)), _I32), self.whole)
        bytes_in = self._splat(b.trunc(b.mul(odd, self._int(16)), _I32), self.whole)
        scale, mask = self._field_half(block, 3, j), self._all(self.whole, 0x30303030)
        first = b.add(b.mul(half, self._int(16)), b.mul(odd, self._int(8)))
        for high in range(2):
            part = b.add(b.add(b.mul(half, self._int(4)), odd), self._int(2 * high))
            of_part = b.lshr(self._codes(block, 2, b.add(b.mul(half, self._int(2)), self._int(high)), j), bytes_in)
            groups = []
            for g, codes in self._nibbles(block, first, j, high):
                upper = b.lshr(self._codes(block, 1, b.add(b.mul(half, self._int(8)), self._int(g)), j), pairs)
                upper = upper if high else b.shl(upper, self._all(self.whole, 4))
                groups.append((g, b.or_(codes, b.and_(upper, mask))))
            for q in range(2):
                own = b.fmul(scale, self._byte(of_part, q, True), flags=_EXACT)
                yield Run(part, groups[4 * q : 4 * q + 4], own, None, _OF_32 + q, 63, 2)

    def _byte(self, words: Any, place: int, signed: bool) -> Any:
        """Return a byte of each lane, f32."""
        b = self.builder
        left = b.shl(words, self._all(self.whole, 24 - 8 * place))
        shifted = (b.ashr if signed else b.lshr)(left, self._all(self.whole, 24))
        return b.sitofp(shifted, self.floats)

    def _field(self, block: Any, field: int) -> Any:
        return self.builder.add(block, self._int(WIDTH * sum(f.nbytes for f in FIELDS[self.storage.name][:field])))

    def _field_half(self, block: Any, field: int, j: int) -> Any:
        return self._half(self.builder.add(self._field(block, field), self._int(2 * LANES * j)))

    def _codes(self, block: Any, field: int, group: Any, j: int) -> Any:
        """Return four bytes of each lane: a group of a field."""
        b = self.builder
        at = b.add(b.mul(group, self._int(4 * WIDTH)), self._int(4 * LANES * j))
        return self._load(b.add(self._field(block, field), at), self.whole, 1)

    def _word(self, words: Any, place: int, kind: Any) -> Any:
        """Return one of the words of a row, in all lanes."""
        return self._splat(self._load(self.builder.add(words, self._int(4 * place)), kind.element), kind)

    def _products_f32(self, run: Run, of_x: list[Any], of_words: list[Any]) -> list[Any]:
        """Return sums of products of f32 x: each byte of each lane becomes a float."""
        b, zero = self.builder, ir.Constant(self.floats, None)
        # Two chains: each multiply-add waits for the one before it.
        sums = [[self._word(words, run.start, self.floats) if run.start else zero, zero] for words in of_words]
        for g, codes in run.groups:
            for q in range(4):
                if run.mask < 255:
                    whole = b.and_(b.lshr(codes, self._all(self.whole, 8 * q)), self._all(self.whole, run.mask))
                else:
                    left = b.shl(codes, self._all(self.whole, 24 - 8 * q))
                    whole = b.ashr(left, self._all(self.whole, 24))
                weight = b.sitofp(whole, self.floats)
                for row, at in zip(sums, of_x, strict=True):
                    x = self._splat(self._load(b.add(at, self._int(16 * g + 4 * q)), _F32), self.floats)
                    row[q % 2] = self._multiply_add(weight, x, row[q % 2])
        return [b.fadd(*row) for row in sums]

    def _products(self, run: Run, of_x: list[Any], of_words: list[Any]) -> list[Any]:
        """Return sums of products of codes, exactly, i32; they begin with what the weights' offset takes away."""
        b, bytewise = self.builder, run.mask == 255
        zero = ir.Constant(self.whole, None)
        sums = [self._word(words, run.start, self.whole) if run.start else zero for words in of_words]
        pairs: list[Any] = [None] * len(sums)
        for n, (g, codes) in enumerate(run.groups):
            weights = b.xor(codes, self._all(self.whole, 0x80808080)) if bytewise and _UNSIGNED else codes
            for i, at in enumerate(of_x):
                x = self._splat(self._load(b.add(at, self._int(4 * g)), _I32), self.whole)
                if _DOT:
                    sums[i] = self._call(_DOT, sums[i], b.bitcast(weights, self.octets), b.bitcast(x, self.octets))
                elif not _PAIRS:
                    sums[i] = self._wide(sums[i], weights, x)
                else:
                    found = self._pairs(weights, x, bytewise)
                    pairs[i] = found if pairs[i] is None else b.add(pairs[i], found)
                    if n % run.narrow == run.narrow - 1:
                        sums[i], pairs[i] = b.add(sums[i], self._widened(pairs[i])), None
        return sums

    def _pairs(self, weights: Any, x: Any, signed: bool) -> Any:
        """Return sums of pairs of products, i16."""
        if signed:
            return self._signed_pairs(weights, x)
        return self._call(
            _UNSIGNED_PAIRS, None, self.builder.bitcast(weights, self.octets), self.builder.bitcast(x, self.octets)
        )

    def _call(self, name: str, total: Any, weights: Any, x: Any) -> Any:
        """Return what an instruction makes of bytes: it adds to i32 totals, or without any gives sums of pairs, i16."""
        given = [weights, x] if total is None else [total, weights, x]
        result = ir.VectorType(_I16, 2 * LANES) if total is None else self.whole
        return self.builder.call(self._declared(name, result, [value.type for value in given]), given)

    def _signed_pairs(self, weights: Any, x: Any) -> Any:
        """Return sums of pairs of products of s8: |w| times x with the sign of w."""
        b = self.builder
        weights, x = b.bitcast(weights, self.octets), b.bitcast(x, self.octets)
        sign = self._declared("llvm.x86.avx2.psign.b", self.octets, [self.octets] * 2)
        magnitude = self._declared(f"llvm.abs.v{4 * LANES}i8", self.octets, [self.octets, ir.IntType(1)])
        size = b.call(magnitude, [weights, ir.Constant(ir.IntType(1), 0)])
        return self._call(_UNSIGNED_PAIRS, None, size, b.call(sign, [x, weights]))

    def _widened(self, pairs: Any) -> Any:
        """Return sums of two i16 each, i32."""
        add = self._declared("llvm.x86.avx2.pmadd.wd", self.whole, [pairs.type] * 2)
        return self.builder.call(add, [pairs, self._all(pairs.type, 1)])

    def _wide(self, total: Any, weights: Any, x: Any) -> Any:
        b = self.builder
        for q in range(4):
            one, other = (
                b.ashr(b.shl(v, self._all(self.whole, 24 - 8 * q)), self._all(self.whole, 24)) for v in (weights, x)
            )
            total = b.add(total, b.mul(one, other))
        return total


def _written(module: ir.Module, name: str, rows: int, variant: int) -> ir.Function:
    storage = STORAGES[BLOCK_STORAGES[variant // 2]]
    return BlockTileWriter(module, name, storage, rows, bool(variant % 2)).write()


_SIZES: Final = [(rows, variant) for variant in range(2 * len(KINDS)) for rows in range(1, ROWS + 1)]


def _emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    rows, variant, *rest = arguments
    call_chosen(
        builder,
        (rows, variant),
        _SIZES,
        "hepti_blocks",
        lambda name, count, which: _written(builder.module, name, count, which),
        rest,
    )
    return context.get_dummy_value()


def _at(address: int, count: int, dtype: Any) -> NDArray[Any]:
    nbytes = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * nbytes).from_address(int(address)), dtype)


def _plain(
    rows: int, variant: int, panel: int, blocks: int, x: int, x_stride: int, words: int, words_stride: int, start: int,
    start_stride: int, c: int, c_stride: int,
) -> None:  # fmt: skip
    """Do what a tile does, in plain Python."""
    storage = STORAGES[BLOCK_STORAGES[variant // 2]]
    large = blocks * BLOCK // storage.block
    raw = _at(panel, large * WIDTH * storage.block_bytes, np.uint8).reshape(1, large, -1)
    right = BlockMatrix(storage, raw, BLOCK * blocks, WIDTH).plain()
    for i in range(rows):
        if variant % 2:
            left = _at(x + i * x_stride, BLOCK * blocks, np.float32)
        else:
            scales = _at(words + i * words_stride, WORDS * blocks, np.float32)[::WORDS]
            left = _at(x + i * x_stride, BLOCK * blocks, np.int8) * np.repeat(scales, BLOCK)
        begin = _at(start + i * start_stride, WIDTH, np.float32)
        _at(c + i * c_stride, WIDTH, np.float32)[...] = left @ right + begin


# Arguments: rows (1 to ROWS), variant (2 * kind of the storage, + 1 where x is f32), then those of the writer.
block_tile: Final = lowered(emitter(2 + _ARGUMENTS, _emit), _plain)
