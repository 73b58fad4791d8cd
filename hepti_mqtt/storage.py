"""How values of a matrix are stored, from a file to the kernels: as single numbers, or in blocks that share scales.

A block is `block` values that follow each other in a stored row [out, in], in `block_bytes` bytes. Blocks are those of
GGUF (ggml-common.h, ggml-quants.c): q4_0, q4_1, q5_0, q5_1 and q8_0 have 32 values, q4_k and q6_k 256.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from hepti_mqtt.plan import Quantised, WeightDtype

# Those that kernels multiply by as they are.
BlockStorage = Literal["q4_0", "q4_1", "q8_0", "q4_k", "q6_k"]
BLOCK_STORAGES: Final[tuple[BlockStorage, ...]] = get_args(BlockStorage)
BLOCK: Final = 32  # values of the smallest block of any of them; larger ones have several of these

# What a checkpoint of numbers is quantised to.
QUANTISED: Final[Mapping[Quantised, BlockStorage]] = {"q8": "q8_0", "q4": "q4_0"}


class Product(NamedTuple):
    """What a matmul multiplies: how its weights are kept, and whether activations in f32 are rounded to int8 first.

    Of weights in blocks alone; of others how they are kept says it.
    """

    weights: WeightDtype | BlockStorage = "f32"
    rounded: bool = False


#: Products that agents measure and site files price.
PRODUCTS: Final = (
    *map(Product, get_args(WeightDtype)),
    *(Product(storage, rounded) for storage in BLOCK_STORAGES for rounded in (False, True)),
)

Octets = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class Storage(NamedTuple):
    """One way of storing: values and bytes of a block, and the values f32 [n, block] of blocks u8 [n, block_bytes].

    encode: the inverse, of those that numbers are quantised to.
    """

    name: str
    block: int
    block_bytes: int
    decode: Callable[[Octets], Floats]
    encode: Callable[[Floats], Octets] | None = None

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of a number of values, a multiple of `block`."""
        return columns // self.block * self.block_bytes

    def rows(self, raw: Octets) -> npt.NDArray[Any]:
        """Return the values [rows, columns] of stored rows u8 [rows, bytes]: f16 as it is, others as f32."""
        if self.name in ("f16", "f32"):
            return raw.view({"f16": "<f2", "f32": "<f4"}[self.name])
        return self.decode(raw.reshape(-1, self.block_bytes)).reshape(len(raw), -1)

    def stored(self, values: npt.NDArray[Any]) -> Octets:
        """Return rows [n, columns] as stored, u8 [n, bytes]; raises ValueError for a storage without `encode`."""
        if self.encode is None:
            raise ValueError(f"numbers are not quantised to {self.name}")
        blocks = np.ascontiguousarray(values, np.float32).reshape(-1, self.block)
        return self.encode(blocks).reshape(len(values), -1)


class StoredRows(NamedTuple):
    """Rows of a matrix as a file has them: u8 [n, bytes], in blocks along k. A kernel reads it as [k, n]."""

    storage: Storage
    raw: Octets

    @property
    def shape(self) -> tuple[int, int]:
        """Return (k, n)."""
        return self.raw.shape[1] // self.storage.block_bytes * self.storage.block, len(self.raw)

    def values(self) -> Floats:
        """Return what it stands for, f32 [k, n]."""
        return np.asarray(self.storage.rows(self.raw).T, np.float32)


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
    """Return values of 5 bits [n, 32]: the fifth ones in 4 bytes, then the others as nibbles."""
    top = np.unpackbits(raw[:, at : at + 4], axis=1, bitorder="little")
    return _nibbles(raw[:, at + 4 :]) + np.float32(16) * top


def _q5_0(raw: Octets) -> Floats:
    return (_fives(raw, 2) - np.float32(16)) * _half(raw, 0)


def _q5_1(raw: Octets) -> Floats:
    return _fives(raw, 4) * _half(raw, 0) + _half(raw, 2)


def _bf16(raw: Octets) -> Floats:
    return np.asarray(raw.view("<u2").astype("<u4") << 16).view("<f4")


def _q8_0(raw: Octets) -> Floats:
    return raw[:, 2:].view(np.int8) * _half(raw, 0)


def _steps(x: Floats, extremes: Floats, most: int) -> tuple[Floats, Octets]:
    """Return blocks in steps of their own, extreme / most, and these steps in f16 as bytes; of zeros they are 0.

    As in ggml values are divided by the step before it is rounded.
    """
    step = extremes / np.float32(most)
    by = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step != 0)
    with np.errstate(over="ignore"):
        return x * by, step.astype("<f2").view(np.uint8)


def _to_q8_0(x: Floats) -> Octets:
    codes, step = _steps(x, np.abs(x).max(axis=1, keepdims=True), 127)
    return np.concatenate([step, np.rint(codes, out=codes).astype(np.int8).view(np.uint8)], axis=1)


def _to_q4_0(x: Floats) -> Octets:
    """The value that is farthest from zero becomes -8."""
    farthest = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    codes, step = _steps(x, farthest, -8)
    nibbles = np.clip(codes + np.float32(8.5), 0, 15).astype(np.uint8)
    return np.concatenate([step, nibbles[:, :16] | nibbles[:, 16:] << 4], axis=1)


def _q4_k(raw: Octets) -> Floats:
    """Eight parts of 32, each with a scale and a minimum of 6 bits: part 2 c has the low halves of 32 bytes."""
    packed, codes = raw[:, 4:16], raw[:, 16:].reshape(-1, 4, 1, 32)
    low, high, top = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, top & 15 | low >> 6 << 4], axis=1).astype(np.float32) * _half(raw, 0)
    minima = np.concatenate([high & 63, top >> 4 | high >> 6 << 4], axis=1).astype(np.float32) * _half(raw, 2)
    parts = np.concatenate([codes & 15, codes >> 4], axis=2).reshape(-1, 8, 32).astype(np.float32)
    return np.asarray(parts * scales[..., None] - minima[..., None], np.float32).reshape(-1, 256)


def _q6_k(raw: Octets) -> Floats:
    """Two halves of 128: 64 bytes of low nibbles, 32 of upper pairs of bits; a scale i8 for each 16 values."""
    nibbles, pairs = raw[:, :128].reshape(-1, 2, 64), raw[:, 128:192].reshape(-1, 2, 1, 32)
    upper = pairs >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3  # [n, 2, 4, 32]
    lower = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(-1, 2, 4, 32)
    codes = (lower | upper << 4).astype(np.float32) - np.float32(32)
    scales = raw[:, 192:208].view(np.int8) * _half(raw, 208)
    return np.asarray(codes.reshape(-1, 16, 16) * scales[..., None], np.float32).reshape(-1, 256)


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
        Storage("q5_0", 32, 22, _q5_0),
        Storage("q5_1", 32, 24, _q5_1),
        Storage("q8_0", 32, 34, _q8_0, _to_q8_0),
        Storage("q4_k", 256, 144, _q4_k),
        Storage("q6_k", 256, 210, _q6_k),
    )
}
