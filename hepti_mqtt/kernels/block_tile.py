"""Register tiles over panels of blocks, as LLVM vector IR: some rows of x times one panel, by storage and kind of x.

x is f32, or s8 codes with a scale for each 32 of them. Per block and vector of columns the products of codes are added
(in f32, or exactly in i32), then y += (scale of the weights * scale of x) * sum, and of q4_1 minimum * sum of x. What
the codes are off by (q4_0: 8) comes in by the sum of x: no instruction for each code. So a row's bits do not depend on
its tile. A tile has no prefetch: CPUs find the one stream of a panel by themselves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from hepti_mqtt.kernels.blocks import LANES, VECTORS, WIDTH, BlockMatrix, code_bytes
from hepti_mqtt.kernels.cpu import DOT, isa
from hepti_mqtt.kernels.jit import emitter, lowered
from hepti_mqtt.kernels.quantised_tile import VectorWriter
from hepti_mqtt.kernels.tile import call_chosen, loop
from hepti_mqtt.storage import BLOCK, BLOCK_STORAGES, STORAGES, Storage

# Rows of the largest tile: its sums, those of a block, the weights and one x must fit the registers.
ROWS: Final = {"avx512": 6, "avx2": 3, "neon": 4, "sse": 2, "generic": 2}[isa()]
KINDS: Final[Mapping[str, int]] = {name: kind for kind, name in enumerate(BLOCK_STORAGES)}
WORDS: Final = 4  # of a row of x for each block: scale, scale * sum, and in i32 -8 * sum and -128 * sum of its codes
_UNSIGNED_PAIRS: Final = "llvm.x86.avx2.pmadd.ub.sw"
_F32: Final = ir.FloatType()
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_ARGUMENTS: Final = 10
_OFFSET: Final = 8  # of the codes of q4_0
# How products of bytes are added: by an instruction, for weights as u8 or s8, by pairs in 16 bits, or wide.
_DOT: Final = DOT.intrinsic if DOT.lanes == LANES else ""
_UNSIGNED: Final = bool(_DOT) and not DOT.signed
_PAIRS: Final = not _DOT and isa() == "avx2"


class BlockTileWriter(VectorWriter):
    """Writes the LLVM function of one tile: c = start + x @ panel.

    Arguments: panel, blocks, x, bytes between rows of x, words, bytes between rows of words, start, bytes between rows
    of start, c, bytes between rows of c; all but strides and blocks are addresses. wide: x is f32, of which only the
    sums among the words are read; else s8.
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

        def turn(n: Any, sums: list[Any]) -> list[Any]:
            block = b.add(panel, b.mul(n, self._int(WIDTH * self.storage.block_bytes)))
            x_bytes = self._int(BLOCK * 4 if self.wide else BLOCK)
            of_x = [b.add(row, b.mul(n, x_bytes)) for row in at_x]
            of_words = [b.add(row, b.mul(n, self._int(4 * WORDS))) for row in at_words]
            new = [None] * len(sums)
            for j in range(VECTORS):
                new[j::VECTORS] = self._block(block, j, of_x, of_words, sums[j::VECTORS])
            return new

        totals = loop(b, (self._int(0), blocks, 1), begin, turn, as_written=True)
        places = [b.add(row, column) for row in at_c for column in columns]
        for total, place in zip(totals, places, strict=True):
            b.store(total, self._pointer(place, self.floats)).align = 4
        b.ret_void()
        return self.function

    def _block(self, block: Any, j: int, of_x: list[Any], of_words: list[Any], totals: list[Any]) -> list[Any]:
        """Return the totals of vector j with what a block adds."""
        b, heads = self.builder, code_bytes(self.storage) * WIDTH
        scale = self._half(b.add(block, self._int(heads + 2 * LANES * j)))
        least = None
        if self.storage.name == "q4_1":
            least = self._half(b.add(block, self._int(heads + 2 * WIDTH + 2 * LANES * j)))
        groups = list(self._bytes(block, j) if self.storage.name == "q8_0" else self._nibbles(block, j))
        sums = self._products_f32(groups, of_x, of_words) if self.wide else self._products(groups, of_x, of_words)
        new = []
        for total, found, words in zip(totals, sums, of_words, strict=True):
            if least is not None:
                total = self._multiply_add(least, self._word(words, 1, self.floats), total)
            factor = scale if self.wide else b.fmul(scale, self._word(words, 0, self.floats))
            new.append(self._multiply_add(found if self.wide else b.sitofp(found, self.floats), factor, total))
        return new

    def _nibbles(self, block: Any, j: int) -> Iterator[tuple[int, Any]]:
        """Yield (group, codes 0..15): each load has two groups."""
        b, mask = self.builder, self._all(self.whole, 0x0F0F0F0F)
        for g in range(4):
            both = self._codes(block, g, j)
            yield g, b.and_(both, mask)
            yield g + 4, b.and_(b.lshr(both, self._all(self.whole, 4)), mask)

    def _bytes(self, block: Any, j: int) -> Iterator[tuple[int, Any]]:
        for g in range(8):
            yield g, self._codes(block, g, j)

    def _codes(self, block: Any, group: int, j: int) -> Any:
        return self._load(self.builder.add(block, self._int((group * VECTORS + j) * 4 * LANES)), self.whole, 1)

    def _word(self, words: Any, place: int, kind: Any) -> Any:
        """Return one of the words of a row, in all lanes."""
        return self._splat(self._load(self.builder.add(words, self._int(4 * place)), kind.element), kind)

    def _products_f32(self, groups: Sequence[tuple[int, Any]], of_x: list[Any], of_words: list[Any]) -> list[Any]:
        """Return sums of products of f32 x: each byte of each lane becomes a float."""
        b, nibbles = self.builder, self.storage.name != "q8_0"
        zero = ir.Constant(self.floats, None)
        sums = [[zero, zero] for _ in of_x]  # two chains: each multiply-add waits for the one before it
        if self.storage.name == "q4_0":
            by = self._all(self.floats, -float(_OFFSET))
            sums = [[b.fmul(by, self._word(words, 1, self.floats)), zero] for words in of_words]
        for g, codes in groups:
            for q in range(4):
                if nibbles:
                    whole = b.and_(b.lshr(codes, self._all(self.whole, 8 * q)), self._all(self.whole, 15))
                else:
                    left = b.shl(codes, self._all(self.whole, 24 - 8 * q))
                    whole = b.ashr(left, self._all(self.whole, 24))
                weight = b.sitofp(whole, self.floats)
                for row, at in zip(sums, of_x, strict=True):
                    x = self._splat(self._load(b.add(at, self._int(16 * g + 4 * q)), _F32), self.floats)
                    row[q % 2] = self._multiply_add(weight, x, row[q % 2])
        return [b.fadd(*row) for row in sums]

    def _products(self, groups: Sequence[tuple[int, Any]], of_x: list[Any], of_words: list[Any]) -> list[Any]:
        """Return sums of products of codes, exactly, i32; they begin with what the weights' offset takes away."""
        b, bytewise = self.builder, self.storage.name == "q8_0"
        place = {"q4_0": 2, "q8_0": 3 if _UNSIGNED else 0}.get(self.storage.name, 0)
        zero = ir.Constant(self.whole, None)
        sums = [self._word(words, place, self.whole) if place else zero for words in of_words]
        pairs: list[Any] = [None] * len(sums)
        for g, codes in groups:
            weights = b.xor(codes, self._all(self.whole, 0x80808080)) if bytewise and _UNSIGNED else codes
            for i, at in enumerate(of_x):
                x = self._splat(self._load(b.add(at, self._int(4 * g)), _I32), self.whole)
                if _DOT:
                    sums[i] = self._call(_DOT, sums[i], b.bitcast(weights, self.octets), b.bitcast(x, self.octets))
                elif not _PAIRS:
                    sums[i] = self._wide(sums[i], weights, x)
                elif bytewise:  # two products of 127 * 128 fit 16 bits, four do not
                    sums[i] = b.add(sums[i], self._widened(self._signed_pairs(weights, x)))
                else:  # sixteen of 15 * 127 do
                    found = self._call(
                        _UNSIGNED_PAIRS, None, b.bitcast(weights, self.octets), b.bitcast(x, self.octets)
                    )
                    pairs[i] = found if pairs[i] is None else b.add(pairs[i], found)
        return [total if p is None else b.add(total, self._widened(p)) for total, p in zip(sums, pairs, strict=True)]

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
    raw = _at(panel, blocks * WIDTH * storage.block_bytes, np.uint8).reshape(1, blocks, -1)
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
