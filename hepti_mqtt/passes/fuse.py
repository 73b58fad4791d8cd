"""Conversions become part of the ops that make or first read what they convert: a pass from Program to Program.

An op costs a device a tenth of a millisecond beside its kernel. Kernels and slots stay as they are, and so do the bits;
what only parts of the same op read is free when it has run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from hepti_mqtt.passes.widen import WIDENING
from hepti_mqtt.program import Compute, Op, Program, Slot, fused, written

NARROWING: Final = frozenset({"to_f16", "to_i8"})


def fuse(program: Program) -> Program:
    """Return `program` with its conversions as parts of other ops, where no op has to wait longer for that."""
    ops: list[Op | None] = list(program.ops)
    _into_makers(program, ops)
    _into_readers(program, ops)
    return replace(program, ops=tuple(op for op in ops if op is not None))


def _into_makers(program: Program, ops: list[Op | None]) -> None:
    """Let the op that makes a value narrow it, whoever it is for; what comes from elsewhere keeps an op for that."""
    maker = {slot: place for place, op in enumerate(program.ops) for slot in written(op)}
    for place, op in enumerate(program.ops):
        if not isinstance(op, Compute) or op.kernel not in NARROWING:
            continue
        at = maker.get(program.base(op.reads[0]))
        made = None if at is None else ops[at]
        if at is not None and isinstance(made, Compute):
            ops[at], ops[place] = fused(program, (made, op), made), None


def _into_readers(program: Program, ops: list[Op | None]) -> None:
    """Let the first op that reads a value widen it, unless another one could begin before that has run."""
    readers: dict[Slot, list[int]] = defaultdict(list)
    for place, op in enumerate(ops):
        for slot in () if op is None else program.reads(op):
            readers[slot].append(place)
    for place, op in enumerate(ops):
        if not isinstance(op, Compute) or op.kernel not in WIDENING or op.parts:
            continue
        if not readers[op.writes[0]]:
            continue
        first, *others = readers[op.writes[0]]
        reader = ops[first]
        if isinstance(reader, Compute) and _may_wait(program, program.ops[first], [program.ops[o] for o in others]):
            ops[first], ops[place] = fused(program, (op, reader), reader), None


def _may_wait(program: Program, first: Op, others: Sequence[Op]) -> bool:
    """Return whether ops that read what `first` reads cannot begin before it anyway."""
    waits, makes = set(program.reads(first)), set(written(first))
    return all(waits <= (slots := set(program.reads(o))) or makes & slots for o in others)
