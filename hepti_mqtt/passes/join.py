"""Copies of copies become one, for every strategy alike: a pass from Program to Program.

A table that needs parts of what several devices sent makes a part of each and puts the parts together. Every op costs a
device a tenth of a millisecond beside its kernel, and every copy the memory's time, so one op does both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from hepti_mqtt.plan import Range
from hepti_mqtt.program import Compute, Op, Program, Slot, read

_KERNEL: Final = "assemble"
_Place = tuple[Range, ...]


class _Copy(NamedTuple):
    """A rectangle of a slot and where it goes."""

    slot: Slot
    source: _Place
    target: _Place


def joined(program: Program) -> Program:
    """Return `program` without the slots that are only assembled to be assembled again."""
    between = _between(program)
    if not between:
        return program
    made: dict[Slot, list[_Copy]] = {}
    ops: list[Op] = []
    for op in program.ops:
        if not isinstance(op, Compute) or op.kernel != _KERNEL:
            ops.append(op)
            continue
        copies = [c for copy in _copies(op) for c in _through(copy, made)]
        if op.writes[0] in between:
            made[op.writes[0]] = copies
        else:
            ops.append(_assemble(op, copies) if any(slot in made for slot in op.reads) else op)
    return without(program, between, ops)


def _between(program: Program) -> set[Slot]:
    """Return the slots that an assemble fills and that others of its kind read, and nobody else."""
    found = {op.writes[0] for op in program.ops if isinstance(op, Compute) and op.kernel == _KERNEL}
    found -= {spec.base for spec in program.slots if spec.base is not None}
    found -= {slot for slot in found if program.slots[slot].state}
    others: set[Slot] = set()
    read_at_all: set[Slot] = set()
    for op in program.ops:
        slots = read(op)
        read_at_all.update(slots)
        if not isinstance(op, Compute) or op.kernel != _KERNEL:
            others.update(slots)
    return (found & read_at_all) - others


def _copies(op: Compute) -> Iterator[_Copy]:
    for n, source, target in op.attrs["copies"]:
        yield _Copy(op.reads[n], tuple(source), tuple(target))


def _through(copy: _Copy, made: Mapping[Slot, list[_Copy]]) -> Iterator[_Copy]:
    """Yield a copy, or what it copies of the parts that its slot is put together of."""
    if copy.slot not in made:
        yield copy
        return
    for part in made[copy.slot]:
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(copy.source, part.target, strict=True)]
        if all(a < b for a, b in both):
            source = _moved(both, part.target, part.source)
            yield _Copy(part.slot, source, _moved(both, copy.source, copy.target))


def _moved(ranges: list[Range], origin: _Place, to: _Place) -> _Place:
    """Return ranges that are counted from `origin` as they are counted from `to`."""
    return tuple((a - o[0] + t[0], b - o[0] + t[0]) for (a, b), o, t in zip(ranges, origin, to, strict=True))


def _assemble(op: Compute, copies: list[_Copy]) -> Compute:
    reads = tuple(dict.fromkeys(copy.slot for copy in copies))
    numbered = tuple((reads.index(c.slot), c.source, c.target) for c in copies)
    return op._replace(reads=reads, attrs={**op.attrs, "copies": numbered})


def without(program: Program, gone: set[Slot], ops: list[Op]) -> Program:
    """Return a Program of these ops whose slots are numbered anew, without those that are gone."""
    kept = [slot for slot in range(len(program.slots)) if slot not in gone]
    new = {slot: n for n, slot in enumerate(kept)}
    slots = tuple(
        spec if spec.base is None else spec._replace(base=new[spec.base])
        for spec in (program.slots[slot] for slot in kept)
    )

    def numbered(op: Op) -> Op:
        if isinstance(op, Compute):
            return op._replace(reads=tuple(new[s] for s in op.reads), writes=tuple(new[s] for s in op.writes))
        return op._replace(slot=new[op.slot])

    return replace(program, slots=slots, ops=tuple(map(numbered, ops)))
