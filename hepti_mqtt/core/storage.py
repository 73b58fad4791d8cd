"""Storage of matrices, from a file to the kernels: as single numbers, or in blocks that share scales.

A block is `block` consecutive values of a stored row [out, in], in `block_bytes` bytes. Blocks are those of GGUF
(ggml-common.h, ggml-quants.c). Kernels multiply some storages directly; other storages of files are widened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from hepti_mqtt.core.plan import Quantised, WeightDtype

# Storages that kernels multiply directly.
BlockStorage = Literal["q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k"]
BLOCK_STORAGES: Final[tuple[BlockStorage, ...]] = get_args(BlockStorage)
BLOCK: Final = 32  # values of the smallest block; larger blocks have a multiple of it

# Target of quantising a checkpoint of numbers.
QUANTISED: Final[Mapping[Quantised, BlockStorage]] = {"q8": "q8_0", "q4": "q4_0"}


class Product(NamedTuple):
    """The operands of a matmul: storage of the weights, and whether f32 activations are rounded to int8."""

    weights: WeightDtype | BlockStorage = "f32"
    rounded: bool = False  #: for weights in blocks alone; other storages imply it


#: Products that agents measure and site files price.
PRODUCTS: Final = (
    *map(Product, get_args(WeightDtype)),
    *(Product(storage, rounded) for storage in BLOCK_STORAGES for rounded in (False, True)),
)

Octets = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class Storage(NamedTuple):
    """A storage: its blocks, and the values f32 [n, block] of blocks u8 [n, block_bytes]."""

    name: str
    block: int
    block_bytes: int
    decode: Callable[[Octets], Floats]
    encode: Callable[[Floats], Octets] | None = None  #: the inverse, for storages that numbers are quantised to
    wider: str = ""  #: the storage that a file's matrices are widened to on reading; empty for none
    #: Return blocks [n, block_bytes] in the wider storage; without it values are rounded to it.
    widen: Callable[[Octets], Octets] | None = None

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of `columns` values, a multiple of `block`."""
        return columns // self.block * self.block_bytes

    def rows(self, raw: Octets) -> npt.NDArray[Any]:
        """Return the values [rows, columns] of stored rows u8 [rows, bytes]: f16 unchanged, others as f32."""
        if self.name in ("f16", "f32"):
            return raw.view({"f16": "<f2", "f32": "<f4"}[self.name])
        return self.decode(raw.reshape(-1, self.block_bytes)).reshape(len(raw), -1)

    def stored(self, values: npt.NDArray[Any]) -> Octets:
        """Return rows [n, columns] as stored, u8 [n, bytes]; raises ValueError for a storage without `encode`."""
        if self.encode is None:
            raise ValueError(f"Hepti cannot quantise numbers to {self.name}")
        blocks = np.ascontiguousarray(values, np.float32).reshape(-1, self.block)
        return self.encode(blocks).reshape(len(values), -1)

    def widened(self, raw: Octets) -> Octets:
        """Return stored rows [n, bytes] in the wider storage."""
        wider = STORAGES[self.wider]
        if self.widen is None:
            return wider.stored(self.rows(raw))
        return self.widen(raw.reshape(-1, self.block_bytes)).reshape(len(raw), -1)


class StoredRows(NamedTuple):
    """Rows of a matrix in a file's storage: u8 [n, bytes], in blocks along k. A kernel reads it as [k, n]."""

    storage: Storage
    raw: Octets

    @property
    def shape(self) -> tuple[int, int]:
        """Return (k, n)."""
        return self.raw.shape[1] // self.storage.block_bytes * self.storage.block, len(self.raw)

    def values(self) -> Floats:
        """Return the values, f32 [k, n]."""
        return np.asarray(self.storage.rows(self.raw).T, np.float32)


#: Parts of a tensor, each with its first row and column: values f32 or f16, or columns in blocks.
Tiles = Iterable[tuple[npt.NDArray[Any] | StoredRows, int, int]]


def _half(raw: Octets, at: int) -> Floats:
    """Return the f16 at a byte of each block, as f32 [n, 1]."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(raw: Octets) -> Floats:
    """Return the low halves of all bytes, then the high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=1).astype(np.float32)


def _q4_0(raw: Octets) -> Floats:
    return (_nibbles(raw[:, 2:]) - np.float32(8)) * _half(raw, 0)


def _q4_1(raw: Octets) -> Floats:
    return _nibbles(raw[:, 4:]) * _half(raw, 0) + _half(raw, 2)


def _fives(raw: Octets, at: int) -> Floats:
    """Return values of 5 bits [n, 32]: the fifth bits in 4 bytes, then the lower ones as nibbles."""
    top = np.unpackbits(raw[:, at : at + 4], axis=1, bitorder="little")
    return _nibbles(raw[:, at + 4 :]) + np.float32(16) * top


class _Coded(NamedTuple):
    """Blocks as codes i8 [n, groups, values], and a scale per group, f32 [n, groups]."""

    codes: npt.NDArray[np.int8]
    scales: Floats

    def values(self) -> Floats:
        """Return the values f32 [n, groups * values]."""
        values: Floats = self.codes * self.scales[..., None]
        return values.reshape(len(self.codes), -1)

    def as_q8_0(self) -> Octets:
        """Return blocks of q8_0, one per group; only scales are rounded, to f16."""
        with np.errstate(over="ignore"):
            scales = self.scales.reshape(-1, 1).astype("<f2").view(np.uint8)
        return np.concatenate([scales, self.codes.reshape(-1, BLOCK).view(np.uint8)], axis=1)


def _q5_0(raw: Octets) -> _Coded:
    return _Coded((_fives(raw, 2) - np.float32(16)).astype(np.int8)[:, None], _half(raw, 0))


_IQ4: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_FP4: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # twice the values


def _looked_up(table: npt.NDArray[np.int8], raw: Octets) -> npt.NDArray[np.int8]:
    """Return the codes i8 [n, 1, 32] of nibbles in 16 bytes."""
    return np.asarray(table[np.concatenate([raw & 15, raw >> 4], axis=1)][:, None])


def _iq4_nl(raw: Octets) -> _Coded:
    return _Coded(_looked_up(_IQ4, raw[:, 2:]), _half(raw, 0))


def _mxfp4(raw: Octets) -> _Coded:
    """The first byte is an exponent."""
    return _Coded(_looked_up(_FP4, raw[:, 1:]), np.ldexp(np.float32(1), raw[:, :1].astype(np.int32) - 128))


def _iq4_xs(raw: Octets) -> _Coded:
    """Eight groups; the lower four bits of scales are nibbles of bytes 4..7, the upper two are in bytes 2 and 3."""
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    upper = (raw[:, 2:4].view("<u2") >> shifts & 3).astype(np.uint8)
    lower = np.stack([raw[:, 4:8] & 15, raw[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    scales = ((lower | upper << 4).astype(np.float32) - np.float32(32)) * _half(raw, 0)
    return _Coded(_looked_up(_IQ4, raw[:, 8:].reshape(-1, 16)).reshape(-1, 8, 32), scales)


def _q3_k_parts(raw: Octets) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    """Return codes -4..3, i8 [n, 16, 16], and scales i8 [n, 16].

    Bytes 0..31 have the third bits, 32..95 the pairs of lower bits, 96..107 scales of 6 bits.
    """
    places = np.arange(8, dtype=np.uint8)[:, None]
    third = (raw[:, None, :32] >> places & 1).astype(np.int8)  # [n, 8, 32]
    pairs = raw[:, 32:96].reshape(-1, 2, 1, 32) >> 2 * places[:4] & 3
    codes = (pairs.astype(np.int8).reshape(-1, 8, 32) + 4 * third - 4).reshape(-1, 16, 16)
    lower = np.concatenate([raw[:, 96:104] & 15, raw[:, 96:104] >> 4], axis=1)
    upper = (raw[:, None, 104:108] >> 2 * places[:4] & 3).reshape(-1, 16)
    return codes, ((lower | upper << 4).astype(np.int16) - 32).astype(np.int8)


def _q3_k(raw: Octets) -> Floats:
    codes, scales = _q3_k_parts(raw)
    return _Coded(codes, scales * _half(raw, 108)).values()


def _q3_k_as_q6_k(raw: Octets) -> Octets:
    """Return blocks with the same scales, and codes as numbers of 6 bits."""
    codes, scales = _q3_k_parts(raw)
    q = (codes + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    lower = (q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4).reshape(len(raw), -1)
    upper = (q >> 4 << 2 * np.arange(4, dtype=np.uint8)[:, None]).sum(axis=2, dtype=np.uint8).reshape(len(raw), -1)
    return np.concatenate([lower, upper, scales.view(np.uint8), raw[:, 108:110]], axis=1)


def _q2_k(raw: Octets) -> Floats:
    """Sixteen groups of 16, each with a scale and a minimum of 4 bits in bytes 0..15; then pairs of bits."""
    pairs = raw[:, 16:80].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scales, minima = (raw[:, :16] & 15) * _half(raw, 80), (raw[:, :16] >> 4) * _half(raw, 82)
    return np.asarray(pairs.reshape(-1, 16, 16) * scales[..., None] - minima[..., None], np.float32).reshape(-1, 256)


def _q5_1(raw: Octets) -> Floats:
    return _fives(raw, 4) * _half(raw, 0) + _half(raw, 2)


def _bf16(raw: Octets) -> Floats:
    return np.asarray(raw.view("<u2").astype("<u4") << 16).view("<f4")


def _q8_0(raw: Octets) -> Floats:
    return raw[:, 2:].view(np.int8) * _half(raw, 0)


def _steps(x: Floats, extremes: Floats, most: int) -> tuple[Floats, Octets]:
    """Return blocks in units of their step, extreme / most, and the steps in f16 as bytes; 0 for blocks of zeros.

    As in ggml, values are divided by the step before it is rounded.
    """
    step = extremes / np.float32(most)
    by = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step != 0)
    with np.errstate(over="ignore"):
        return x * by, step.astype("<f2").view(np.uint8)


def _to_q8_0(x: Floats) -> Octets:
    codes, step = _steps(x, np.abs(x).max(axis=1, keepdims=True), 127)
    return np.concatenate([step, np.rint(codes, out=codes).astype(np.int8).view(np.uint8)], axis=1)


def _to_q4_0(x: Floats) -> Octets:
    """The value farthest from zero becomes -8."""
    farthest = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    codes, step = _steps(x, farthest, -8)
    nibbles = np.clip(codes + np.float32(8.5), 0, 15).astype(np.uint8)
    return np.concatenate([step, nibbles[:, :16] | nibbles[:, 16:] << 4], axis=1)


def _q4_k(raw: Octets) -> Floats:
    """Eight parts of 32, each with a scale and a minimum of 6 bits: part 2 c has the low nibbles of 32 bytes."""
    return _eight_parts(raw, _halves_of_32(raw[:, 16:]))


def _q5_k(raw: Octets) -> Floats:
    """As q4_k; bit j of bytes 16..47 is the fifth bit of part j."""
    fifth = np.asarray(raw[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1, np.uint8)
    return _eight_parts(raw, _halves_of_32(raw[:, 48:]) | fifth * np.uint8(16))


def _halves_of_32(raw: Octets) -> Octets:
    """Return codes [n, 8, 32]: the low nibbles of 32 bytes, then the high ones, and so on."""
    codes = raw.reshape(-1, 4, 1, 32)
    return np.concatenate([codes & 15, codes >> 4], axis=2).reshape(-1, 8, 32)


def _eight_parts(raw: Octets, codes: Octets) -> Floats:
    """Return values of codes [n, 8, 32], given scales and minima in bytes 0..15."""
    packed = raw[:, 4:16]
    low, high, top = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, top & 15 | low >> 6 << 4], axis=1).astype(np.float32) * _half(raw, 0)
    minima = np.concatenate([high & 63, top >> 4 | high >> 6 << 4], axis=1).astype(np.float32) * _half(raw, 2)
    return np.asarray(codes * scales[..., None] - minima[..., None], np.float32).reshape(-1, 256)


def _q6_k(raw: Octets) -> Floats:
    """Two halves of 128: 64 bytes of low nibbles, 32 of upper pairs of bits; a scale i8 for each 16 values."""
    nibbles, pairs = raw[:, :128].reshape(-1, 2, 64), raw[:, 128:192].reshape(-1, 2, 1, 32)
    upper = pairs >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3  # [n, 2, 4, 32]
    lower = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(-1, 2, 4, 32)
    codes = (lower | upper << 4).astype(np.float32) - np.float32(32)
    scales = raw[:, 192:208].view(np.int8) * _half(raw, 208)
    return np.asarray(codes.reshape(-1, 16, 16) * scales[..., None], np.float32).reshape(-1, 256)


def _coded(name: str, block: int, nbytes: int, read: Callable[[Octets], _Coded]) -> Storage:
    """Return a storage with blocks that are widened to q8_0."""
    return Storage(name, block, nbytes, lambda raw: read(raw).values(), None, "q8_0", lambda raw: read(raw).as_q8_0())


def _single(dtype: str) -> Callable[[Octets], Floats]:
    return lambda raw: raw.view(dtype).astype(np.float32)


STORAGES: Final[Mapping[str, Storage]] = {
    s.name: s
    for s in (
        Storage("f32", 1, 4, _single("<f4")),
        Storage("f16", 1, 2, _single("<f2")),
        Storage("q4_0", 32, 18, _q4_0, _to_q4_0),
        Storage("q4_1", 32, 20, _q4_1),
        Storage("bf16", 1, 2, _bf16),
        _coded("q5_0", 32, 22, _q5_0),
        Storage("q5_1", 32, 24, _q5_1),
        Storage("q8_0", 32, 34, _q8_0, _to_q8_0),
        _coded("iq4_nl", 32, 18, _iq4_nl),
        _coded("iq4_xs", 256, 136, _iq4_xs),
        _coded("mxfp4", 32, 17, _mxfp4),
        Storage("q2_k", 256, 84, _q2_k, None, "q8_0"),
        Storage("q3_k", 256, 110, _q3_k, None, "q6_k", _q3_k_as_q6_k),
        Storage("q4_k", 256, 144, _q4_k),
        Storage("q5_k", 256, 176, _q5_k),
        Storage("q6_k", 256, 210, _q6_k),
    )
}
