"""Kernel `assemble`, which only moves values: parts of several arrays put together into one.

All are of one dtype; or the result is f32 and some are f16 or i8, as they came over the wire, and are widened straight
into their places, with the bits that `from_f16` and `from_i8` give. Rectangles of i8 are of values, without the scales.

It reads arrays of the rank of the slot that is written, 1 to 4. Attribute copies: (read, source, target), where read is
the place of an array among those that are read, source and target are rectangles of one shape, a half-open range
(start, stop) for each dimension. Targets fill the written slot, each element once.

NumPy's own copies run at the speed of memory and release the GIL, for any dtype and rank: a compiled loop gains
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.kernels.base import Array, Check, Kernel, Run
from hepti_mqtt.kernels.machine.workers import Workers
from hepti_mqtt.kernels.reorder.codecs import reference_wide
from hepti_mqtt.kernels.reorder.widen import NARROW, Rectangle, values, widen
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.plan import Range
from hepti_mqtt.program import ITEMSIZE, NUMPY_DTYPE, Compute, SlotSpec, Work

Place = tuple[slice, ...]

# Copies of single rows up to which a copy each (0.5 to 1 µs) is about as fast as one np.take (2 µs).
_FEW: Final = 4


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


def _place(ranges: Sequence[Range]) -> Place:
    return tuple(slice(start, stop) for start, stop in ranges)


def _single_rows(
    check: Check, copies: Sequence[_Copy]
) -> tuple[list[tuple[int, NDArray[np.intp], slice]], list[_Copy]]:
    """Return (the runs of more than _FEW whole rows of one read that follow each other in the result, the rest).

    A run is (read, rows of it, rows of the result). Parts of rows would have to be contiguous for np.take.
    """
    whole = [tuple((0, n) for n in s.shape[1:]) for s in check.reads]
    rest_of_row = tuple((0, n) for n in check.writes[0].shape[1:])

    def is_row(copy: _Copy) -> bool:
        whole_row = copy.source[1:] == whole[copy.read] and copy.target[1:] == rest_of_row
        return whole_row and _extents(copy.source[:1]) == (1,)

    rows = sorted((c for c in copies if is_row(c)), key=lambda c: (c.read, c.target[0]))
    rest = [c for c in copies if not is_row(c)]
    cuts = [i for i, (a, b) in enumerate(pairwise(rows), 1) if (a.read, a.target[0][1]) != (b.read, b.target[0][0])]
    runs = []
    for first, stop in pairwise([0, *cuts, len(rows)]):
        run = rows[first:stop]
        if len(run) <= _FEW:
            rest += run
            continue
        places = np.asarray([c.source[0][0] for c in run], np.intp)
        runs.append((run[0].read, places, slice(run[0].target[0][0], run[-1].target[0][1])))
    return runs, rest


def _copies(op: Compute) -> list[_Copy]:
    """Return the copies of an op, without the empty ones."""
    found = (_Copy(read, tuple(source), tuple(target)) for read, source, target in op.attrs["copies"])
    return [c for c in found if 0 not in _extents(c.target)]


def _bind_assemble(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], _pool: Workers) -> Run:
    check = Check(op, slots)
    check.count(None)
    check.weights(weights, 0)
    narrow = [n for n in range(len(check.reads)) if _narrow(check, n)]
    same = all(s.dtype == check.writes[0].dtype for n, s in enumerate(check.reads) if n not in narrow)
    check.that(same, "must read and write one dtype, or f16 and i8 into f32")
    copies = _copies(op)
    _check_copies(check, copies)
    widened = [
        (
            n,
            widen(
                check.reads[n], check.writes[0].shape, [Rectangle(c.source, c.target) for c in copies if c.read == n]
            ),
        )
        for n in narrow
    ]
    runs, rest = _single_rows(check, [c for c in copies if c.read not in narrow])
    moves = [(c.read, _place(c.source), _place(c.target)) for c in rest]

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        out = writes[0]
        for read, source, target in moves:
            out[target] = reads[read][source]
        for read, rows, among in runs:
            # The rows are checked above; "raise" would go through a buffer.
            np.take(reads[read], rows, axis=0, out=out[among], mode="clip")
        for read, widen_into in widened:
            widen_into(reads[read], out)

    return run


def _reference_assemble(
    op: Compute,
    slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    to = slots[op.writes[0]]
    out = np.zeros(to.shape, NUMPY_DTYPE[to.dtype])
    wide = [
        reference_wide(x) if to.dtype == "f32" and slots[s].dtype in NARROW else x
        for s, x in zip(op.reads, reads, strict=True)
    ]
    for read, source, target in op.attrs["copies"]:
        out[_place(target)] = wide[read][_place(source)]
    return [out]


def _work_of_result(op: Compute, slots: Sequence[SlotSpec]) -> Work:
    """Return what is read and written: each value of the result once, read as wide as it is there."""
    to = slots[op.writes[0]]
    less = sum(
        math.prod(_extents(target)) * (ITEMSIZE[to.dtype] - ITEMSIZE[slots[op.reads[read]].dtype])
        for read, _, target in op.attrs.get("copies", ())
    )
    return Work("rowwise", nbytes=2.0 * to.nbytes - less)


ASSEMBLE: Final = Kernel("assemble", _bind_assemble, _reference_assemble, _work_of_result)
