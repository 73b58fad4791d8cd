"""Equal blocks are worked out once: their ops repeated, with slots, nodes and tensors moved by whole blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hepti_mqtt.lowering.draft import Draft
from hepti_mqtt.lowering.graph import TEMPLATE, Graph, Run
from hepti_mqtt.lowering.moves import Move
from hepti_mqtt.lowering.tiles import Tiles
from hepti_mqtt.program import Op as ProgramOp
from hepti_mqtt.program import Slot, SlotSpec, WeightRef


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


def stretch(draft: Draft, graph: Graph, run: Run) -> tuple[list[SlotSpec], list[ProgramOp]]:
    """Return the slots and ops of the whole graph from the draft for the short one."""
    template = run.first + TEMPLATE
    before, low, high = (draft.starts[b] for b in (template - 1, template, template + 1))
    every, inner = [op for _, _, op in draft.ops], draft.block(template)
    end = draft.begun[template + 1]
    slots, ops = draft.slots[:high], every[:end]
    for n in range(1, run.repeats):
        move = _move(graph, run, n, before, n * (high - low))
        slots += move.specs(draft.slots[low:high])
        ops += move.ops(inner)
    last = run.repeats - 1
    move = _move(graph, run, last, low, last * (high - low))
    slots += move.specs(draft.slots[high:])
    ops += map(move.behind, every[end:])
    return slots, ops


def repeated_refs(refs: Sequence[WeightRef], graph: Graph, run: Run) -> Iterator[WeightRef]:
    """Yield, for weights of the repeated block, those of the blocks that it stands for."""
    for n in range(1, run.repeats):
        yield from _move(graph, run, n, 0, 0).refs(refs)


def _move(graph: Graph, run: Run, n: int, first: Slot, by: int) -> Move:
    """Return what takes the repeated block to its place in the whole graph, `n` blocks on."""
    start, stop = graph.span(run.first + TEMPLATE)
    return Move(first, by, n * (stop - start), graph.renamed[n], graph.layer_of)
