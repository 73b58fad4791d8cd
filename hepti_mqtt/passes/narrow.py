"""Narrower numbers on the wire, for every strategy alike: a pass from Program to Program.

Each exchanged value is converted once before it leaves and once where it arrives; values from and to the planner stay
as they are. Rows are converted one by one, so a range of rows can be sent of a converted value too. What only passes
through is sent on as it came where narrowing it again gives the same bits: f16, but not i8, whose scale may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from hepti_mqtt.ids import PLANNER
from hepti_mqtt.plan import WireDtype
from hepti_mqtt.program import Compute, Op, Program, Recv, Send, Slot, SlotDtype, SlotSpec

SCALE_BYTES: Final = 4  # an i8 row ends with its scale as four raw bytes


def _f16(spec: SlotSpec) -> SlotSpec:
    return SlotSpec(spec.shape, "f16")


def _i8(spec: SlotSpec) -> SlotSpec:
    return SlotSpec((*spec.shape[:-1], spec.shape[-1] + SCALE_BYTES), "i8")


# wire dtype: (kernel that narrows, kernel that widens, the narrow slot)
_CODECS: Final[Mapping[str, tuple[str, str, Callable[[SlotSpec], SlotSpec]]]] = {
    "f16": ("to_f16", "from_f16", _f16),
    "i8": ("to_i8", "from_i8", _i8),
}

_SENT_ON: Final = frozenset({"f16"})


def narrow_slot(spec: SlotSpec, wire: SlotDtype) -> SlotSpec:
    """Return the slot that a slot is on the wire."""
    return _CODECS[wire][2](spec)


def narrow(program: Program, wire: WireDtype) -> Program:
    """Return `program` with its exchanges between devices in `wire`; "f32" changes nothing."""
    if wire == "f32":
        return program
    to_narrow, to_wide, _ = _CODECS[wire]
    slots: list[SlotSpec] = list(program.slots)
    ops: list[Op] = []
    narrowed: dict[Slot, Slot] = {}

    def twin(slot: Slot) -> Slot:
        slots.append(narrow_slot(slots[slot], wire))
        return len(slots) - 1

    def sent(op: Send) -> Slot:
        """Return the narrow twin of what is sent: the same rows of the twin of all that it is a view of."""
        spec = program.slots[op.slot]
        base = program.base(op.slot)
        if program.slots[base].shape[1:] != spec.shape[1:]:
            base = op.slot  # a view of another shape is converted by itself
        if base not in narrowed:
            narrowed[base] = twin(base)
            ops.append(Compute(to_narrow, (base,), (narrowed[base],), layer=op.layer, node=op.node))
        if base == op.slot:
            return narrowed[base]
        slots.append(narrow_slot(spec, wire)._replace(base=narrowed[base], start=spec.start))
        return len(slots) - 1

    for op in program.ops:
        if isinstance(op, Send) and op.to != (PLANNER,) and not op.exact:
            slot = sent(op)
            ops.append(op._replace(slot=slot))
        elif isinstance(op, Recv) and op.source != PLANNER and not op.exact:
            arriving = twin(op.slot)
            if wire in _SENT_ON:
                narrowed[op.slot] = arriving
            ops.append(op._replace(slot=arriving))
            ops.append(Compute(to_wide, (arriving,), (op.slot,), layer=op.layer, node=op.node))
        else:
            ops.append(op)
    return replace(program, slots=tuple(slots), ops=tuple(ops))
