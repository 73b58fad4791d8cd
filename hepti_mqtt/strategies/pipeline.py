"""`pipeline`: consecutive layers per device, the sequences of a batch one behind the other (PipeEdge, Hu et al., 2022).

Layers of a transformer are shared out by speed. Those of a net of convolutions differ: a dynamic programme finds the
stages of which the slowest is the fastest, over computation and links, as PipeEdge's does; memory is the planner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from hepti_mqtt.lowering import Graph, Piece, Table, box, on, roles, span
from hepti_mqtt.lowering.ops import Attention, Op
from hepti_mqtt.lowering.regions import indices
from hepti_mqtt.strategies import maps
from hepti_mqtt.strategies.method import LAYERS, Division, Lane, Method, Options, Shares, Weights

# Placed with what they feed, so that one kernel does both.
_INSIDE = {roles.ATTENTION_OUT, roles.MLP_UP, roles.MLP_DOWN, roles.MOMENTS, roles.SLICE}


def table(division: Division) -> Table:
    """Return the layouts: every tensor of a layer on its device, a piece and a turn per sequence."""
    graph = division.graph
    if roles.MAP in graph.roles:
        return _of_maps(division)
    stage = {layer: i for i, part in enumerate(division.parts(LAYERS)) for layer in indices(part)}
    attention = graph.first(roles.ATTENTION)
    lengths = attention.lengths if isinstance(attention, Attention) else attention.space[:1]
    batches = [span(*ends) for ends in pairwise((0, *accumulate(lengths)))]

    def rule(op: Op) -> list[Piece]:
        return [Piece(stage[op.layer], box(op, {0: rows}), turn=turn) for turn, rows in enumerate(batches)]

    placed = graph.roles - {roles.INPUT, roles.STEM, roles.TASK, roles.TASK_MOMENTS, *_INSIDE}
    return Table(dict.fromkeys(sorted(placed), rule), uniform=False)


def _of_maps(division: Division) -> Table:
    """Return the layouts of a net of convolutions, which has one picture in a run: a unit is where its stage is."""
    stage = {i: d for d, part in enumerate(division.parts(LAYERS)) for i in indices(part)}
    owner = {unit.op.name: stage[i] for i, unit in enumerate(maps.units(division.graph))}
    table = maps.table_of(division, lambda op: on(owner[op.name])(op), lambda op: on(owner[op.name])(op))
    return Table(table.lines, table.where_present, uniform=False)


def solve(graph: Graph, options: Options, weights: Weights, lanes: Sequence[Lane]) -> Shares:
    """Return layers by speed; of a net of convolutions, units of which the slowest stage is the fastest."""
    del options
    of_maps = roles.MAP in graph.roles
    return {}, {LAYERS.kind: maps.stages(graph, weights, lanes) if of_maps else LAYERS.ranges(graph, weights)}


METHOD = Method(
    "pipeline",
    "consecutive layers per device, sequences in flight",
    table,
    needs=(),
    one_of=(roles.AFTER_MLP, roles.MAP),
    solve=solve,
    offered=False,
)
