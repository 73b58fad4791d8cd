"""Equal blocks are worked out once: their ops repeated, with slots, nodes and tensors moved by whole blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hepti_mqtt.lowering.graph import TEMPLATE, Graph, Run
from hepti_mqtt.lowering.lower import Draft
from hepti_mqtt.lowering.tiles import Tiles
from hepti_mqtt.program import Compute, Recv, Send, Slot, SlotSpec, WeightRef
from hepti_mqtt.program import Op as ProgramOp


def repeatable(short: Graph, run: Run, tiles: Tiles) -> bool:
    """Return whether the repeated block may stand for any number of them.

    Tiles follow from what the next block asks for. The repeated block asks the one before it for what that has given it
    tiles for; if both have equal tiles, so has every block that is put between them.
    """
    template = run.first + TEMPLATE
    return _equal(short, tiles, template - 1, template) and not any(
        tile.turn for op in short.ops for tile in tiles[op.name]
    )


def shortest(short: Graph, run: Run, tiles: Tiles) -> tuple[Graph, Run]:
    """Return the graph and its run without the block behind the repeated one where that has equal tiles."""
    template = run.first + TEMPLATE
    if not _equal(short, tiles, template, template + 1):
        return short, run
    return short.without(template, template + 2), replace(run, kept=run.kept - 1)


def _equal(graph: Graph, tiles: Tiles, a: int, b: int) -> bool:
    (a0, a1), (b0, b1) = graph.span(a), graph.span(b)
    return all(tiles[x.name] == tiles[y.name] for x, y in zip(graph.ops[a0:a1], graph.ops[b0:b1], strict=True))


def stretch(draft: Draft, graph: Graph, run: Run) -> Draft:
    """Return the draft for the whole graph from that for the short one."""
    template = run.first + TEMPLATE
    before, low, high = (draft.starts[b] for b in (template - 1, template, template + 1))
    out = Draft()
    blocks: dict[int, list[ProgramOp]] = {}
    for _, block, op in draft.ops:
        blocks.setdefault(block, []).append(op)
    for block, start in enumerate(draft.starts):
        stop = (*draft.starts[1:], len(draft.slots))[block]
        slots, ops = draft.slots[start:stop], blocks.get(block, ())
        repeated = block == template
        for n in range(run.repeats) if repeated else (0,) if block < template else (run.repeats - 1,):
            number = len(out.starts)
            out.starts.append(len(out.slots))
            if n == 0:
                out.slots += slots
                out.ops += [(0, number, op) for op in ops]
                continue
            move = _Move(graph, template, n, before if repeated else low, n * (high - low))
            out.slots += [spec if spec.base is None and not spec.state else move.spec(spec) for spec in slots]
            out.ops += [(0, number, move.op(op, repeated)) for op in ops]
    return out


def repeated_refs(refs: Sequence[WeightRef], graph: Graph, run: Run) -> Iterator[WeightRef]:
    """Yield, for weights of the repeated block, those of the blocks that it stands for."""
    for n in range(1, run.repeats):
        move = _Move(graph, run.first + TEMPLATE, n, 0, 0)
        yield from map(move.ref, refs)


class _Move:
    """Takes ops of the short Program to their place in the whole one, `n` blocks on: slots from `first` on by `by`."""

    def __init__(self, graph: Graph, template: int, n: int, first: Slot, by: int) -> None:
        start, stop = graph.span(template)
        self.graph, self.first, self.by = graph, first, by
        self.nodes = n * (stop - start)
        pairs = zip(graph.ops[start:stop], graph.ops[start + self.nodes : stop + self.nodes], strict=True)
        self.tensors = {a: b for x, y in pairs if x.tensors for a, b in zip(x.tensors, y.tensors, strict=True)}

    def slots(self, slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
        first, by = self.first, self.by
        return tuple([slot + by if slot >= first else slot for slot in slots])

    def spec(self, spec: SlotSpec) -> SlotSpec:
        if spec.state:
            return SlotSpec(spec.shape, spec.dtype, state=self.tensors.get(spec.state, spec.state))
        assert spec.base is not None
        return SlotSpec(spec.shape, spec.dtype, self.slots((spec.base,))[0], spec.start)

    def ref(self, ref: WeightRef) -> WeightRef:
        return WeightRef(self.tensors[ref[0]], *ref[1:])

    def op(self, op: ProgramOp, repeated: bool) -> ProgramOp:
        node, layer = op.node, op.layer
        if repeated:  # behind the repeated blocks nodes have the numbers of the whole graph already
            node += self.nodes
            layer = self.graph.ops[node].layer
        if isinstance(op, Compute):
            weights = tuple([self.ref(ref) for ref in op.weights]) if repeated else op.weights
            return Compute(op.kernel, self.slots(op.reads), self.slots(op.writes), weights, op.attrs, layer, node)
        slot = op.slot + self.by if op.slot >= self.first else op.slot
        if isinstance(op, Send):
            return Send(slot, op.to, node, op.part, layer, op.row, op.exact)
        return Recv(slot, op.source, node, op.part, layer, op.exact)
