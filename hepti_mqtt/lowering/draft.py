"""A Program in the making: slots and ops in blocks, as the graph has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.lowering.regions import Region
from hepti_mqtt.program import Compute, Program, Slot, SlotSpec
from hepti_mqtt.program import Op as ProgramOp


class Held(NamedTuple):
    """A region that a device has in a slot; state: as a partial result in a format of its own."""

    slot: Slot
    region: Region
    state: bool


@dataclass(slots=True)
class Draft:
    """A Program in blocks: ops with their turn and block, and the first slot and op of each block."""

    slots: list[SlotSpec] = field(default_factory=list)
    ops: list[tuple[int, int, ProgramOp]] = field(default_factory=list)
    starts: list[Slot] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """Begin a block."""
        self.starts.append(len(self.slots))
        self.begun.append(len(self.ops))

    def block(self, number: int) -> list[ProgramOp]:
        """Return the ops of a block that is not the last one."""
        return [op for _, _, op in self.ops[self.begun[number] : self.begun[number + 1]]]

    def size(self, block: int) -> tuple[int, int]:
        """Return how many slots and ops a block has that is not the last one."""
        return self.starts[block + 1] - self.starts[block], self.begun[block + 1] - self.begun[block]

    def within(self, block: int, ops: Sequence[Op], have: Mapping[str, Sequence[Held]]) -> tuple[list[object], ...]:
        """Return what a block is, wherever it stands: equal for two where the same is done with what was before them.

        ops: its tensors. have: where they are.
        """
        start, stop = self.starts[block : block + 2]
        return (
            [_relative(op, start, ops[0].index) for op in self.block(block)],
            [_relative_spec(spec, start) for spec in self.slots[start:stop]],
            [(h.slot - start, h.region, h.state) for op in ops for h in have[op.name]],
        )

    def program(self, device: str, nodes: tuple[str, ...]) -> Program:
        """Return the Program, ops of a lower turn first."""
        ordered = sorted(self.ops, key=lambda entry: entry[0])
        return Program(device, tuple(self.slots), tuple(op for _, _, op in ordered), nodes)


def _relative(op: ProgramOp, start: Slot, node: int) -> tuple[object, ...]:
    if isinstance(op, Compute):
        reads = [max(slot - start, -1) for slot in op.reads]
        return op.kernel, reads, [slot - start for slot in op.writes], op.attrs, op.node - node
    slot, who, number, part, _, *rest = op
    return type(op), max(slot - start, -1), who, number - node, part, rest


def _relative_spec(spec: SlotSpec, start: Slot) -> tuple[object, ...]:
    shape, dtype, base, row, state = spec
    return shape, dtype, base if base is None else max(base - start, -1), row, bool(state)
