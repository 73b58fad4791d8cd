"""Rectangles of arrays as they came over the wire, widened to f32 straight into their places in another array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Final, NamedTuple

import numpy as np
from numba import float32, int8, uint16
from numpy.typing import NDArray

from hepti_mqtt.kernels.base import Array
from hepti_mqtt.kernels.elementary import from_bits
from hepti_mqtt.kernels.machine.jit import TABLE, entry, fills, kernel, reads
from hepti_mqtt.kernels.reorder.codecs import HALF_IN_HARDWARE, SCALE_BYTES, from_half_bits
from hepti_mqtt.plan import Range
from hepti_mqtt.program import SlotSpec

NARROW: Final = frozenset({"f16", "i8"})

# A row of the table of runs: (first value read, first value written, values side by side, how often, values from one to
# the next in the array that is read, the same in the one that is written, where the first scale is read).
RUN: Final = 7


class Rectangle(NamedTuple):
    """A rectangle of the values of a narrow array, and where it goes."""

    source: tuple[Range, ...]
    target: tuple[Range, ...]


def values(spec: SlotSpec) -> tuple[int, ...]:
    """Return the shape of the values of a slot that is read as f32: rows of i8 end with their scale."""
    return (*spec.shape[:-1], spec.shape[-1] - SCALE_BYTES) if spec.dtype == "i8" else spec.shape


def runs_of(spec: SlotSpec, shape: tuple[int, ...], rectangles: Sequence[Rectangle]) -> NDArray[np.int64]:
    """Return the table of what `widen` does with rectangles of a slot, none empty, for a result of `shape`."""
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


def _plain_widen_f16(x: Any, out: Any, runs: Any) -> None:
    for source, target, length, times, far, apart, _ in runs:
        for i in range(times):
            s, t = source + i * far, target + i * apart
            out[t : t + length] = x[s : s + length].view(np.float16)


if HALF_IN_HARDWARE:

    @kernel(reads(uint16, 1), fills(float32, 1), TABLE)
    def _widen_f16(x: Any, out: Any, runs: Any) -> None:
        for run in range(len(runs)):
            length = runs[run, 2]
            for i in range(runs[run, 3]):
                s, t = runs[run, 0] + i * runs[run, 4], runs[run, 1] + i * runs[run, 5]
                row, to = x[s : s + length], out[t : t + length]
                for j in range(len(to)):
                    to[j] = from_half_bits(row[j])

else:
    _widen_f16 = _plain_widen_f16


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


def widen(spec: SlotSpec, shape: tuple[int, ...], rectangles: Sequence[Rectangle]) -> Callable[[Array, Array], None]:
    """Return what widens rectangles of an array of a narrow slot into an f32 array of `shape`."""
    runs = runs_of(spec, shape, rectangles)
    if spec.dtype == "i8":
        of_i8 = entry(_widen_i8)
        return lambda x, out: of_i8(x.reshape(-1), out.reshape(-1), runs)
    of_f16 = entry(_widen_f16)
    return lambda x, out: of_f16(x.reshape(-1).view(np.uint16), out.reshape(-1), runs)
