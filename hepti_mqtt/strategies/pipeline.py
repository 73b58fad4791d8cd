"""`pipeline`: consecutive parts of layers per device, micro-batches one behind the other (PipeEdge, Hu et al., 2022).

A layer may be cut before its attention, the attention's output, and each matrix of its MLP; a net of convolutions
between any two maps. Stages are found for most throughput or, `goal: latency`, for the least sum over the devices
(stages.py, maps.py). micro: sequences of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from hepti_mqtt.lowering import Graph, Piece, Table, box, on, roles, span
from hepti_mqtt.lowering.ops import Attention, Op
from hepti_mqtt.lowering.regions import indices
from hepti_mqtt.strategies import maps
from hepti_mqtt.strategies.method import STAGES, Division, Lane, Method, Options, Shares, Weights
from hepti_mqtt.strategies.stages import Goal, chain_of, part_of, stages

# Placed with what they feed, so that one kernel does both.
_INSIDE = {roles.ATTENTION_OUT, roles.MLP_UP, roles.MLP_DOWN, roles.MOMENTS, roles.SLICE}


def table(division: Division) -> Table:
    """Return the layouts: every tensor of a stage on its device, a piece and a turn per micro-batch."""
    graph = division.graph
    if roles.MAP in graph.roles:
        return _of_maps(division)
    stage = {part: i for i, owned in enumerate(division.parts(STAGES)) for part in indices(owned)}
    attention = graph.first(roles.ATTENTION)
    lengths = attention.lengths if isinstance(attention, Attention) else attention.space[:1]
    ends = [0, *accumulate(lengths)]
    batches = [span(*cut) for cut in pairwise(dict.fromkeys((*ends[:: int(division.option("micro", "1"))], ends[-1])))]

    def rule(op: Op) -> list[Piece]:
        return [Piece(stage[part_of(op)], box(op, {0: rows}), turn=turn) for turn, rows in enumerate(batches)]

    placed = graph.roles - {roles.INPUT, roles.STEM, roles.TASK, roles.TASK_MOMENTS, *_INSIDE}
    return Table(dict.fromkeys(sorted(placed), rule), uniform=False)


def _of_maps(division: Division) -> Table:
    """Return the layouts of a net of convolutions, which has one picture in a run: a unit is where its stage is."""
    stage = {i: d for d, part in enumerate(division.parts(STAGES)) for i in indices(part)}
    owner = {unit.op.name: stage[i] for i, unit in enumerate(maps.units(division.graph))}
    table = maps.table_of(division, lambda op: on(owner[op.name])(op), lambda op: on(owner[op.name])(op))
    return Table(table.lines, table.where_present, uniform=False)


def solve(graph: Graph, options: Options, weights: Weights, lanes: Sequence[Lane]) -> Shares:
    """Return the stages of each device."""
    if roles.MAP in graph.roles:
        return {}, {STAGES.kind: maps.stages(graph, weights, lanes)}
    goal: Goal = "latency" if options.get("goal") == "latency" else "throughput"
    return {}, {STAGES.kind: stages(chain_of(graph), weights, lanes, goal)}


def differs(graph: Graph, options: Options) -> bool:
    """Return whether one request of one sequence, or picture, tells a variant from the others."""
    return options.get("goal") == "throughput" or (roles.MAP not in graph.roles and "micro" not in options)


METHOD = Method(
    "pipeline",
    "consecutive parts of layers per device, micro-batches in flight",
    table,
    shares=(STAGES,),
    needs=(),
    one_of=(roles.AFTER_MLP, roles.MAP),
    options=({"goal": "throughput"},),
    variants=lambda _: [{"goal": "throughput"}, {"goal": "latency"}, *({"micro": str(n)} for n in (2, 4, 8))],
    solve=solve,
    differs=differs,
    offered=False,
    throughput=True,
    settled=True,
)
