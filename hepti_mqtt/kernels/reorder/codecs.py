"""Kernels of the wire formats: `to_f16`, `from_f16` (any shape), `to_i8`, `from_i8`.

i8 is f32 [..., n] -> i8 [..., n + 4], row by row of the last dimension: values rounded to steps of scale = (largest
magnitude of the row) / 127, then the scale as four little-endian bytes of f32. A row with a value that is not finite
decodes to NaN: loud, not wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import float32, int8, types, uint16

from hepti_mqtt.kernels.base import Array, Check, Kernel, Run, rowwise
from hepti_mqtt.kernels.elementary import ZERO, bits_of, from_bits
from hepti_mqtt.kernels.machine.isa import isa
from hepti_mqtt.kernels.machine.jit import JIT, entry, fills, kernel, lowered, reads
from hepti_mqtt.kernels.machine.workers import Workers
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.program import Compute, SlotSpec

if sys.byteorder != "little":
    raise ImportError("Hepti's wire formats are little-endian and this machine is not; no such machine is supported")

SCALE_BYTES: Final = 4

# Every CPU of these sets converts to and from half precision in one instruction; elsewhere LLVM would call a library
# function that Numba does not link.
HALF_IN_HARDWARE: Final = JIT and isa() in ("avx512", "avx2", "neon")

_LEVELS: Final = np.float32(127.0)
_TINY: Final = np.float32(1e-35)


def _emit_half_bits(_context: Any, _x: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


def _emit_from_half_bits(_context: Any, _bits: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


def _plain_to_f16(x: Any, out: Any) -> None:
    with np.errstate(over="ignore"):  # beyond 65504 is infinity, as in hardware
        out.view(np.float16)[...] = x


def _plain_from_f16(x: Any, out: Any) -> None:
    out[...] = x.view(np.float16)


_half_bits: Final = lowered(_emit_half_bits, _plain_to_f16)
from_half_bits: Final = lowered(_emit_from_half_bits, _plain_from_f16)  # in compiled code alone

if HALF_IN_HARDWARE:

    @kernel(reads(float32, 1), fills(uint16, 1))
    def _to_f16(x: Any, out: Any) -> None:
        for i in range(len(x)):
            out[i] = _half_bits(x[i])

    @kernel(reads(uint16, 1), fills(float32, 1))
    def _from_f16(x: Any, out: Any) -> None:
        for i in range(len(x)):
            out[i] = from_half_bits(x[i])

else:
    _to_f16, _from_f16 = _plain_to_f16, _plain_from_f16


@kernel(reads(float32, 2), fills(int8, 2))
def _to_i8(x: Any, out: Any) -> None:
    n = x.shape[1]
    for row in range(len(x)):
        # The bits of f32 >= 0 are ordered like the values, with infinity and NaN above all: an integer maximum
        # vectorises, where one of floats would not without the promise that there is no NaN.
        top = np.int32(0)
        for i in range(n):
            bits = bits_of(abs(x[row, i]))
            top = bits if bits > top else top
        most = from_bits(top)
        finite = most < np.inf
        scale = most / _LEVELS if finite else np.float32(np.nan)
        by = _LEVELS / most if finite and most > _TINY else ZERO
        for i in range(n):
            out[row, i] = np.int8(np.rint(x[row, i] * by)) if finite else np.int8(0)
        scale_bits = bits_of(scale)
        for i in range(SCALE_BYTES):
            byte = (scale_bits >> (8 * i)) & 0xFF
            out[row, n + i] = np.int8(byte - 256 if byte > 127 else byte)


@kernel(reads(int8, 2), fills(float32, 2))
def _from_i8(x: Any, out: Any) -> None:
    n = out.shape[1]
    for row in range(len(x)):
        bits = 0
        for i in range(SCALE_BYTES):
            bits |= (int(x[row, n + i]) & 0xFF) << (8 * i)
        scale = from_bits(bits)
        for i in range(n):
            out[row, i] = np.float32(x[row, i]) * scale


def _bind_f16(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], _pool: Workers) -> Run:
    check = Check(op, slots)
    check.count(1)
    check.weights(weights, 0)
    encode = op.kernel == "to_f16"
    check.dtypes(*(("f32", "f16") if encode else ("f16", "f32")))
    check.shape(check.writes[0], check.reads[0].shape)

    convert = entry(_to_f16 if encode else _from_f16)

    def run_to(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        convert(reads[0].reshape(-1), writes[0].reshape(-1).view(np.uint16))

    def run_from(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        convert(reads[0].reshape(-1).view(np.uint16), writes[0].reshape(-1))

    return run_to if encode else run_from


def _bind_i8(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], _pool: Workers) -> Run:
    check = Check(op, slots)
    check.count(1)
    check.weights(weights, 0)
    encode = op.kernel == "to_i8"
    check.dtypes(*(("f32", "i8") if encode else ("i8", "f32")))
    plain, coded = (check.reads[0], check.writes[0])[:: 1 if encode else -1]
    check.shape(coded, (*plain.shape[:-1], plain.shape[-1] + SCALE_BYTES))
    code = entry(_to_i8 if encode else _from_i8)
    # Rows by the number of their values: a map without rows or columns has no -1 that would follow.
    shapes = [(prod(slot.shape[:-1]), slot.shape[-1]) for slot in (check.reads[0], check.writes[0])]
    return lambda reads, writes: code(reads[0].reshape(shapes[0]), writes[0].reshape(shapes[1]))


def _reference_f16(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    with np.errstate(over="ignore"):
        return [reads[0].astype(np.float16 if op.kernel == "to_f16" else np.float32)]


def _reference_to_i8(
    _op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    x = reads[0]
    most = np.abs(x).max(axis=-1, keepdims=True, initial=0.0).astype(np.float32)
    finite = np.isfinite(most)
    scale = np.where(finite, most / _LEVELS, np.float32(np.nan)).astype("<f4")
    by = _LEVELS / np.where(finite & (most > _TINY), most, np.float32(np.inf))
    codes = np.rint(np.where(finite, x, 0) * by).astype(np.int8)
    return [np.concatenate([codes, scale.view(np.int8)], axis=-1)]


def reference_wide(x: Array) -> Array:
    """Return the f32 values of an f16 or i8 array."""
    if x.dtype == np.float16:
        return x.astype(np.float32)
    coded = np.ascontiguousarray(x)
    scale: Array = np.ascontiguousarray(coded[..., -SCALE_BYTES:]).view("<f4")
    wide: Array = coded[..., :-SCALE_BYTES].astype(np.float32) * scale
    return wide


def _reference_from_i8(
    _op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    return [reference_wide(reads[0])]


TO_F16: Final = Kernel("to_f16", _bind_f16, _reference_f16, rowwise)
FROM_F16: Final = Kernel("from_f16", _bind_f16, _reference_f16, rowwise)
TO_I8: Final = Kernel("to_i8", _bind_i8, _reference_to_i8, rowwise)
FROM_I8: Final = Kernel("from_i8", _bind_i8, _reference_from_i8, rowwise)
