"""What arrives narrow and is only put together with other parts is widened by the op that does so: a pass on Programs.

Straight from the frame into its place, instead of an op and an array of its own for each part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from hepti_mqtt.passes.join import without
from hepti_mqtt.passes.narrow import narrow_slot
from hepti_mqtt.program import Compute, Op, Program, Slot, SlotSpec, read

WIDENING: Final = frozenset({"from_f16", "from_i8"})
_KERNEL: Final = "assemble"


def widened(program: Program) -> Program:
    """Return `program` without the slots that are widened only to be assembled; the values have the same bits."""
    wide = _only_assembled(program)
    if not wide:
        return program
    slots: list[SlotSpec] = list(program.slots)
    views = {slot: spec for slot, spec in enumerate(slots) if spec.base in wide}
    twins = dict(wide)
    for slot, spec in views.items():
        twins[slot] = len(slots)
        narrow = narrow_slot(spec, slots[wide[program.base(slot)]].dtype)
        slots.append(narrow._replace(base=wide[program.base(slot)], start=spec.start))
    ops: list[Op] = []
    for op in program.ops:
        if isinstance(op, Compute) and op.kernel in WIDENING and op.writes[0] in wide:
            continue
        if isinstance(op, Compute) and op.kernel == _KERNEL:
            op = op._replace(reads=tuple(twins.get(slot, slot) for slot in op.reads))
        ops.append(op)
    return without(replace(program, slots=tuple(slots)), {*wide, *views}, ops)


def _only_assembled(program: Program) -> Mapping[Slot, Slot]:
    """Return {wide slot: the narrow one} of those that nothing but assembling reads, in rows as they are."""
    found = {op.writes[0]: op.reads[0] for op in program.ops if isinstance(op, Compute) and op.kernel in WIDENING}
    for op in program.ops:
        for slot in read(op):
            base = program.base(slot)
            same_rows = program.slots[slot].shape[1:] == program.slots[base].shape[1:]
            if not (isinstance(op, Compute) and op.kernel == _KERNEL and same_rows):
                found.pop(base, None)
    return found
