"""A Program op by op, and the rules of every Program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hepti_mqtt.core.ids import ALL_DEVICES
from hepti_mqtt.core.program import (
    Compute,
    ExchangeKey,
    Op,
    Program,
    Recv,
    Send,
    Slot,
    SlotDtype,
    SlotSpec,
    WeightRef,
    fuse_ops,
    slots_written,
)


def validate(program: Program) -> None:
    """Raise ValueError unless slots are written once and before they are read, and exchanges have unique keys."""
    filled = set(program.state_inputs())
    keys: set[ExchangeKey] = set()
    for place, op in enumerate(program.ops):
        for slot in program.reads(op):
            if slot not in filled:
                raise ValueError(f"op {place} of {program.device} reads slot {slot} before it is written: {op}")
        for slot in slots_written(op):
            if slot in filled or program.slots[slot].base is not None:
                raise ValueError(f"op {place} of {program.device} writes slot {slot} again, or a view: {op}")
            filled.add(slot)
        if isinstance(op, Recv):
            if not keys.isdisjoint(op.keys):
                raise ValueError(f"op {place} of {program.device} receives {op.key} again: {op}")
            keys.update(op.keys)
        if isinstance(op, Compute) and op.fused and op[:4] != fuse_ops(program, op.fused, op)[:4]:
            raise ValueError(f"op {place} of {program.device} reads or writes other slots than its parts: {op}")
        if isinstance(op, Send) and (not op.to or ALL_DEVICES in op.to or len(set(op.to)) < len(op.to)):
            raise ValueError(f"op {place} of {program.device} sends to nobody, to ALL or twice to one device: {op}")


class ProgramBuilder:
    """Collects slots and ops of one device's Program."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.layer = 0
        self._slots: list[SlotSpec] = []
        self._ops: list[Op] = []

    def slot(self, shape: Sequence[int], dtype: SlotDtype = "f32") -> Slot:
        """Return a new slot of `shape`."""
        self._slots.append(SlotSpec(tuple(shape), dtype))
        return len(self._slots) - 1

    def shape(self, slot: Slot) -> tuple[int, ...]:
        """Return the shape of a slot."""
        return self._slots[slot].shape

    def compute(
        self, kernel: str, reads: Iterable[Slot], shape: Sequence[int], weights: Iterable[WeightRef] = (), **attrs: Any
    ) -> Slot:
        """Append a kernel with one result of `shape`; return its slot."""
        return self.compute_many(kernel, reads, (shape,), weights, **attrs)[0]

    def compute_many(
        self,
        kernel: str,
        reads: Iterable[Slot],
        shapes: Iterable[Sequence[int]],
        weights: Iterable[WeightRef] = (),
        **attrs: Any,
    ) -> tuple[Slot, ...]:
        """Append a kernel with several results; return their slots."""
        writes = tuple(self.slot(shape) for shape in shapes)
        self._ops.append(Compute(kernel, tuple(reads), writes, tuple(weights), attrs, self.layer))
        return writes

    def view(self, base: Slot, start: int, shape: Sequence[int]) -> Slot:
        """Return a slot that is rows of another one, from `start`."""
        self._slots.append(SlotSpec(tuple(shape), self._slots[base].dtype, base, start))
        return len(self._slots) - 1

    def send(self, slot: Slot, to: Iterable[str], node: int, part: int = 0) -> None:
        """Append a Send of `slot` as a part of a node; no destination, no op."""
        names = tuple(to)
        if names:
            self._ops.append(Send(slot, names, node, part, self.layer))

    def recv(self, shape: Sequence[int], source: str, node: int, part: int = 0, dtype: SlotDtype = "f32") -> Slot:
        """Append a Recv; return the slot that it fills."""
        slot = self.slot(shape, dtype)
        self._ops.append(Recv(slot, source, node, part, self.layer))
        return slot

    def build(self) -> Program:
        """Return the finished Program; raises ValueError if it breaks a rule."""
        program = Program(self.device, tuple(self._slots), tuple(self._ops))
        validate(program)
        return program
