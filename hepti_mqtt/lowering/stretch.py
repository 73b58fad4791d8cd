"""Equal blocks are worked out once: their ops repeated, with slots, nodes and tensors moved by whole blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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
    (a0, a1), (b0, b1) = short.span(run.first + TEMPLATE - 1), short.span(run.first + TEMPLATE)
    pairs = zip(short.ops[a0:a1], short.ops[b0:b1], strict=True)
    return all(tiles[x.name] == tiles[y.name] for x, y in pairs) and not any(
        tile.turn for op in short.ops for tile in tiles[op.name]
    )


def stretch(draft: Draft, graph: Graph, run: Run) -> Draft:
    """Return the draft for the whole graph from that for the short one."""
    template = run.first + TEMPLATE
    before, low, high = (draft.starts[b] for b in (template - 1, template, template + 1))
    step = high - low
    copies = run.repeats
    out = Draft()
    blocks: dict[int, list[ProgramOp]] = {}
    for _, block, op in draft.ops:
        blocks.setdefault(block, []).append(op)
    for block, start in enumerate(draft.starts):
        stop = (*draft.starts[1:], len(draft.slots))[block]
        repeats = range(copies) if block == template else (0,) if block < template else (copies - 1,)
        for n in repeats:
            move = _Move(graph, template, n, before if block == template else low, step)
            out.starts.append(len(out.slots))
            out.slots += [move.spec(spec) for spec in draft.slots[start:stop]]
            block_ops = blocks.get(block, ())
            out.ops += [(0, len(out.starts) - 1, move.op(op, block)) for op in block_ops]
    return out


def repeated_refs(refs: Sequence[WeightRef], graph: Graph, run: Run) -> Iterator[WeightRef]:
    """Yield, for weights of the repeated block, those of the blocks that it stands for."""
    for n in range(1, run.repeats):
        move = _Move(graph, run.first + TEMPLATE, n, 0, 0)
        yield from map(move.ref, refs)


class _Move:
    """Takes ops of the short Program to their place in the whole one, `n` blocks on."""

    def __init__(self, graph: Graph, template: int, n: int, first: Slot, step: int) -> None:
        start, stop = graph.span(template)
        self.graph, self.n, self.first, self.by = graph, n, first, n * step
        self.template = template
        self.nodes = n * (stop - start)
        self.tensors: Mapping[str, str] = {}
        if n:
            pairs = zip(graph.ops[start:stop], graph.ops[start + self.nodes : stop + self.nodes], strict=True)
            self.tensors = {a: b for x, y in pairs for a, b in zip(x.tensors, y.tensors, strict=True)}

    def slot(self, slot: Slot) -> Slot:
        return slot + self.by if slot >= self.first else slot

    def spec(self, spec: SlotSpec) -> SlotSpec:
        if self.n and spec.state:
            return SlotSpec(spec.shape, spec.dtype, state=self.tensors.get(spec.state, spec.state))
        if spec.base is None or not self.by:
            return spec
        return SlotSpec(spec.shape, spec.dtype, self.slot(spec.base), spec.start)

    def ref(self, ref: WeightRef) -> WeightRef:
        return WeightRef(self.tensors[ref.tensor], *ref[1:])

    def op(self, op: ProgramOp, block: int) -> ProgramOp:
        if not self.n:
            return op
        node, layer, repeated = op.node, op.layer, block == self.template
        if repeated:  # behind the repeated blocks nodes have the numbers of the whole graph already
            node += self.nodes
            layer = self.graph.ops[node].layer
        if isinstance(op, Compute):
            reads, writes = (tuple(map(self.slot, s)) for s in (op.reads, op.writes))
            weights = tuple(map(self.ref, op.weights)) if repeated else op.weights
            return Compute(op.kernel, reads, writes, weights, op.attrs, layer, node)
        if isinstance(op, Send):
            return Send(self.slot(op.slot), op.to, node, op.part, layer, op.row, op.exact)
        return Recv(self.slot(op.slot), op.source, node, op.part, layer, op.exact)
