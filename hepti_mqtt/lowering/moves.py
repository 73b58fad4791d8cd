"""Ops of one block of a Program taken to the place of another one that is alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.program import Compute, Recv, Send, Slot, SlotSpec, WeightRef
from hepti_mqtt.program import Op as ProgramOp


class Move(NamedTuple):
    """Takes ops to another place: slots from `first` on by `by`, nodes by `nodes`, other tensors.

    layers: of each node. A layer's dozens of ops become hundreds here, so each is made with as few calls as can be.
    """

    first: Slot
    by: int
    nodes: int
    tensors: Mapping[str, str]
    layers: Mapping[int, int] | Sequence[int]

    def slots(self, slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
        """Return slots in their place."""
        first, by = self.first, self.by
        return tuple([slot + by if slot >= first else slot for slot in slots])

    def specs(self, specs: Iterable[SlotSpec]) -> list[SlotSpec]:
        """Return what slots are: views are of slots in their place."""
        return [spec if spec.base is None and not spec.state else self._spec(spec) for spec in specs]

    def _spec(self, spec: SlotSpec) -> SlotSpec:
        if spec.state:
            return spec._replace(state=self.tensors.get(spec.state, spec.state))
        assert spec.base is not None
        return SlotSpec(spec.shape, spec.dtype, self.slots((spec.base,))[0], spec.start)

    def refs(self, refs: Iterable[WeightRef]) -> tuple[WeightRef, ...]:
        """Return the same ranges of the other tensors."""
        new, tensors = tuple.__new__, self.tensors
        return tuple([new(WeightRef, (tensors[t], rows, cols, kind, kept)) for t, rows, cols, kind, kept in refs])

    def ops(self, ops: Iterable[ProgramOp]) -> Iterator[ProgramOp]:
        """Yield ops in their place."""
        new, (first, by, nodes, _, layers) = tuple.__new__, self
        for op in ops:
            node = op.node + nodes
            if isinstance(op, Compute):
                kernel, reads, writes, weights, attrs, *_ = op  # parts are made later, by passes
                reads = tuple([slot + by if slot >= first else slot for slot in reads])
                writes = tuple([slot + by for slot in writes])
                weights = weights and self.refs(weights)
                yield new(Compute, (kernel, reads, writes, weights, attrs, layers[node], node, ()))
            elif isinstance(op, Send):
                at, to, _, part, _, row, exact, route = op
                yield new(Send, (at + by if at >= first else at, to, node, part, layers[node], row, exact, route))
            else:
                at, source, _, part, _, exact, _, _ = op
                yield new(Recv, (at + by, source, node, part, layers[node], exact, (), -1))

    def behind(self, op: ProgramOp) -> ProgramOp:
        """Return an op that stays what it is but for its slots."""
        if isinstance(op, Compute):
            return op._replace(reads=self.slots(op.reads), writes=self.slots(op.writes))
        return op._replace(slot=self.slots((op.slot,))[0])


def moved(ops: Sequence[Op], to: Sequence[Op], first: Slot, by: int) -> Move:
    """Return what takes what was made for some tensors to where other ones stand that are worked out alike."""
    tensors = {a: b for x, y in zip(ops, to, strict=True) for a, b in zip(x.tensors, y.tensors, strict=True)}
    return Move(first, by, to[0].index - ops[0].index, tensors, {op.index: op.layer for op in to})
