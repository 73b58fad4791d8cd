"""Kernels that move values: wire formats (`to_f16`, `from_f16`, `to_i8`, `from_i8`) and `assemble`.

i8 is f32 [..., n] -> i8 [..., n + 4], row by row of the last dimension: values rounded to steps of scale = (largest
magnitude of the row) / 127, then the scale as four little-endian bytes of f32. A row with a value that is not finite
decodes to NaN.

assemble copies rectangles of several arrays into one, all of rank 1 to 4. Attribute copies: (read, source, target):
index of the array read, and two rectangles of one shape, a half-open range (start, stop) per dimension. Targets fill
the written slot, each element once. All arrays have one dtype, or the result is f32 and some arrays are f16 or i8:
these are widened into their places, with the bits of `from_f16` and `from_i8`; rectangles of i8 exclude the scales.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir
from numba import float32, int8, uint8, uint16
from numpy.typing import NDArray

from hepti_mqtt.core.plan import Range
from hepti_mqtt.core.program import DTYPE_BYTES, NUMPY_DTYPE, Compute, SlotSpec, Work
from hepti_mqtt.kernels.base import Array, Arrays, Check, Kernel, Slots, Weights, rowwise
from hepti_mqtt.kernels.calls import Call, Calls, Operand, operands
from hepti_mqtt.kernels.cpu import HALF_IN_HARDWARE
from hepti_mqtt.kernels.elementary import HALF, ZERO, bits_of, from_bits, from_half
from hepti_mqtt.kernels.jit import JIT, TABLE, emitter, exact, fills, kernel, lowered, reads
from hepti_mqtt.kernels.threads import Workers

if sys.byteorder != "little":
    raise ImportError("Hepti's wire formats are little-endian and this machine is not; no such machine is supported")

SCALE_BYTES: Final = 4

#: of f32: bits of infinity, of the least normal half, and what exponents of halves lack
_INFINITE, _LEAST_NORMAL, _REBIAS = 0x7F800000, 0x38800000, 0x38000000
_LEVELS: Final = np.float32(127.0)
_TINY: Final = np.float32(1e-35)


def _emit_half_bits(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))


def _emit_from_half_bits(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())


@exact
def _half_of(x: Any) -> Any:
    """Return the bits of the nearest half of x, of two the even one; beyond 65504 is infinity, as in hardware."""
    sign, most = (bits_of(x) >> 16) & 0x8000, bits_of(abs(x))
    if most > _INFINITE:
        return sign | 0x7E00
    if most < _LEAST_NORMAL:  # the sum with 0.5 has steps of the least half
        return sign | bits_of(abs(x) + HALF) - bits_of(HALF)
    rounded = (most - _REBIAS + 0xFFF + (most >> 13 & 1)) >> 13
    return sign | (rounded if rounded < 0x7C00 else 0x7C00)


def _plain_half_bits(x: Any) -> Any:
    return np.float16(x).view(np.uint16)


def _plain_from_half_bits(bits: Any) -> Any:
    return np.float32(bits.view(np.float16))


half_bits, from_half_bits = _half_of, from_half
if HALF_IN_HARDWARE or not JIT:
    half_bits = lowered(emitter(1, _emit_half_bits, uint16, float32), _plain_half_bits)
    from_half_bits = lowered(emitter(1, _emit_from_half_bits, float32, uint16), _plain_from_half_bits)


@kernel(reads(float32, 1), fills(uint16, 1))
def _to_f16(x: Any, out: Any) -> None:
    for i in range(len(x)):
        out[i] = half_bits(x[i])


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


def _bind_narrow(op: Compute, slots: Slots, weights: Weights, _pool: Workers) -> Calls:
    check = Check.of(op, slots, 1, dtypes=("f32", op.kernel.removeprefix("to_")))
    check.weights(weights, 0)
    check.shape(check.reads[0], values(check.writes[0]))
    (x,), (out,) = operands(op, slots)
    if op.kernel == "to_f16":
        return [Call(_to_f16, (x.reshape(-1), out.reshape(-1).view(np.uint16)))]
    # Rows by the number of their values: a map without rows or columns has no -1 that would follow.
    x, out = (each.reshape(prod(each.shape[:-1]), each.shape[-1]) for each in (x, out))
    return [Call(_to_i8, (x, out))]


def _bind_wide(op: Compute, slots: Slots, weights: Weights, _pool: Workers) -> Calls:
    check = Check.of(op, slots, 1, dtypes=(op.kernel.removeprefix("from_"), "f32"))
    check.weights(weights, 0)
    shape = check.writes[0].shape
    check.shape(check.writes[0], values(check.reads[0]))
    (x,), (out,) = operands(op, slots)
    whole = tuple((0, extent) for extent in shape)
    return widen(check.reads[0], x, out, [Rectangle(whole, whole)]) if prod(shape) else []


def _reference_f16(op: Compute, _slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
    with np.errstate(over="ignore"):
        return [reads[0].astype(np.float16 if op.kernel == "to_f16" else np.float32)]


def _reference_to_i8(_op: Compute, _slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
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


def _reference_from_i8(_op: Compute, _slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
    return [reference_wide(reads[0])]


TO_F16: Final = Kernel("to_f16", _bind_narrow, _reference_f16, rowwise)
FROM_F16: Final = Kernel("from_f16", _bind_wide, _reference_f16, rowwise)
TO_I8: Final = Kernel("to_i8", _bind_narrow, _reference_to_i8, rowwise)
FROM_I8: Final = Kernel("from_i8", _bind_wide, _reference_from_i8, rowwise)


NARROW: Final = frozenset({"f16", "i8"})

# A row of the table of runs: (first value read, first value written, adjacent values, repetitions, values from one
# repetition to the next in the source, the same in the target, place of the first scale).
RUN: Final = 7


class Rectangle(NamedTuple):
    """A rectangle of the values of an array, and its target."""

    source: tuple[Range, ...]
    target: tuple[Range, ...]


def values(spec: SlotSpec) -> tuple[int, ...]:
    """Return the shape of the values of a slot that is read as f32: rows of i8 end with their scale."""
    return (*spec.shape[:-1], spec.shape[-1] - SCALE_BYTES) if spec.dtype == "i8" else spec.shape


def runs_of(spec: SlotSpec, shape: tuple[int, ...], rectangles: Sequence[Rectangle]) -> NDArray[np.int64]:
    """Return the table of runs for rectangles of a slot, none empty, and a result of `shape`."""
    scale = values(spec)[-1]
    far, apart = _strides(spec.shape), _strides(shape)
    table: list[tuple[int, ...]] = []
    for source, target in rectangles:
        extents = [stop - start for start, stop in source]
        loops = _merged(list(zip(extents, far, apart, strict=True)))
        first = sum(start * by for (start, _), by in zip(source, far, strict=True))
        to = sum(start * by for (start, _), by in zip(target, apart, strict=True))
        at = first - source[-1][0] + scale
        *outer, (times, over, by), (length, _, _) = loops
        for places in product(*(range(n) for n, _, _ in outer)):
            s = sum(i * step for i, (_, step, _) in zip(places, outer, strict=True))
            t = sum(i * step for i, (_, _, step) in zip(places, outer, strict=True))
            table.append((first + s, to + t, length, times, over, by, at + s))
    return np.asarray(table, np.int64).reshape(-1, RUN)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[d + 1 :], dtype=np.int64)) for d in range(len(shape)))


def _merged(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return nested loops (times, stride read, stride written), the last one over neighbours; at least two."""
    loops = [dims.pop()]
    for n, s, t in reversed(dims):
        inner = loops[0]
        if (s, t) == (inner[0] * inner[1], inner[0] * inner[2]):
            loops[0] = (n * inner[0], inner[1], inner[2])
        elif n > 1:
            loops.insert(0, (n, s, t))
    return loops if len(loops) > 1 else [(1, 0, 0), *loops]


@kernel(reads(uint16, 1), fills(float32, 1), TABLE)
def _widen_f16(x: Any, out: Any, runs: Any) -> None:
    for run in range(len(runs)):
        length = runs[run, 2]
        for i in range(runs[run, 3]):
            s, t = runs[run, 0] + i * runs[run, 4], runs[run, 1] + i * runs[run, 5]
            row, to = x[s : s + length], out[t : t + length]
            for j in range(len(to)):
                to[j] = from_half_bits(row[j])


@kernel(reads(int8, 1), fills(float32, 1), TABLE)
def _widen_i8(x: Any, out: Any, runs: Any) -> None:
    for run in range(len(runs)):
        length = runs[run, 2]
        for i in range(runs[run, 3]):
            s, t = runs[run, 0] + i * runs[run, 4], runs[run, 1] + i * runs[run, 5]
            at = runs[run, 6] + i * runs[run, 4]
            bits = 0
            for b in range(SCALE_BYTES):
                bits |= (int(x[at + b]) & 0xFF) << (8 * b)
            scale = from_bits(bits)
            row, to = x[s : s + length], out[t : t + length]
            for j in range(len(to)):
                to[j] = np.float32(row[j]) * scale


def widen(spec: SlotSpec, x: Operand, out: Operand, rectangles: Sequence[Rectangle]) -> Calls:
    """Return the calls that widen rectangles of the array of a narrow slot into an f32 array."""
    runs = runs_of(spec, out.shape, rectangles)
    if spec.dtype == "i8":
        return [Call(_widen_i8, (x.reshape(-1), out.reshape(-1), runs))]
    return [Call(_widen_f16, (x.reshape(-1).view(np.uint16), out.reshape(-1), runs))]


@kernel(reads(uint8, 1), fills(uint8, 1), TABLE)
def _copy_runs(x: Any, out: Any, runs: Any) -> None:
    for run in range(len(runs)):
        length = runs[run, 2]
        for i in range(runs[run, 3]):
            s, t = runs[run, 0] + i * runs[run, 4], runs[run, 1] + i * runs[run, 5]
            row, to = x[s : s + length], out[t : t + length]
            for j in range(len(to)):
                to[j] = row[j]


def _copied(spec: SlotSpec, x: Operand, out: Operand, rectangles: Sequence[Rectangle]) -> Calls:
    """Return the call that copies rectangles of an array into another one of its dtype."""
    runs = runs_of(spec, out.shape, rectangles)
    runs[:, [0, 1, 2, 4, 5]] *= out.dtype.itemsize
    return [Call(_copy_runs, (x.octets(), out.octets(), runs))]


class _Copy(NamedTuple):
    """One rectangle of a read and where it goes."""

    read: int
    source: tuple[Range, ...]
    target: tuple[Range, ...]


def _check_copies(check: Check, copies: Sequence[_Copy]) -> None:
    shape = check.writes[0].shape
    check.that(1 <= len(shape) <= 4, "assembles slots of 1 to 4 dimensions")
    check.that(all(len(s.shape) == len(shape) for s in check.reads), "slots must have one number of dimensions")
    filled, volume = np.zeros(shape, np.bool_), 0
    for copy in copies:
        check.that(0 <= copy.read < len(check.reads), f"copy {tuple(copy)} is of no array that it reads")
        read = check.reads[copy.read]
        whole = values(read) if _narrow(check, copy.read) else read.shape
        fits = _lies_in(copy.source, whole) and _lies_in(copy.target, shape)
        alike = _extents(copy.source) == _extents(copy.target)
        check.that(fits and alike, f"copy {tuple(copy)} does not lie in its arrays, or changes its shape")
        filled[_place(copy.target)] = True
        volume += math.prod(_extents(copy.target))
    check.that(volume == filled.size and bool(filled.all()), "copies must fill each element of the result once")


def _narrow(check: Check, read: int) -> bool:
    """Return whether an array that is read is widened."""
    return check.writes[0].dtype == "f32" and check.reads[read].dtype in NARROW


def _lies_in(ranges: Sequence[Range], shape: tuple[int, ...]) -> bool:
    return len(ranges) == len(shape) and all(0 <= a <= b <= n for (a, b), n in zip(ranges, shape, strict=True))


def _extents(ranges: Sequence[Range]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in ranges)


def _place(ranges: Sequence[Range]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in ranges)


def _copies(op: Compute) -> list[_Copy]:
    """Return the copies of an op, without the empty ones."""
    copies = (_Copy(read, tuple(source), tuple(target)) for read, source, target in op.attrs["copies"])
    return [copy for copy in copies if 0 not in _extents(copy.target)]


def _bind_assemble(op: Compute, slots: Slots, weights: Weights, _pool: Workers) -> Calls:
    check = Check.of(op, slots, None, dtypes=None)
    check.weights(weights, 0)
    narrow = [n for n in range(len(check.reads)) if _narrow(check, n)]
    same = all(s.dtype == check.writes[0].dtype for n, s in enumerate(check.reads) if n not in narrow)
    check.that(same, "must read and write one dtype, or f16 and i8 into f32")
    copies = _copies(op)
    _check_copies(check, copies)
    given, (out,) = operands(op, slots)
    calls = Calls()
    for n, (spec, x) in enumerate(zip(check.reads, given, strict=True)):
        rectangles = [Rectangle(c.source, c.target) for c in copies if c.read == n]
        if rectangles:
            calls += (widen if n in narrow else _copied)(spec, x, out, rectangles)
    return calls


def _reference_assemble(op: Compute, slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
    to = slots[op.writes[0]]
    out = np.zeros(to.shape, NUMPY_DTYPE[to.dtype])
    wide = [
        reference_wide(x) if to.dtype == "f32" and slots[s].dtype in NARROW else x
        for s, x in zip(op.reads, reads, strict=True)
    ]
    for read, source, target in op.attrs["copies"]:
        out[_place(target)] = wide[read][_place(source)]
    return [out]


def _work_of_result(op: Compute, slots: Slots) -> Work:
    """Return the bytes moved: each value of the result is read once, in its stored width, and written once."""
    to = slots[op.writes[0]]
    less = sum(
        math.prod(_extents(target)) * (DTYPE_BYTES[to.dtype] - DTYPE_BYTES[slots[op.reads[read]].dtype])
        for read, _, target in op.attrs.get("copies", ())
    )
    return Work("rowwise", nbytes=2.0 * to.nbytes - less)


ASSEMBLE: Final = Kernel("assemble", _bind_assemble, _reference_assemble, _work_of_result)
