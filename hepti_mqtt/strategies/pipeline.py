"""`pipeline`: consecutive parts of layers per device, micro-batches one behind the other (PipeEdge, Hu et al., 2022).

A layer may be cut before its attention, the attention's output, and each matrix of its MLP. Stages are found for most
throughput or, `goal: latency`, for the least sum over the devices (stages.py). micro: sequences of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from hepti_mqtt.lowering import Graph, Piece, Table, box, roles, span
from hepti_mqtt.lowering.ops import Attention, Op
from hepti_mqtt.lowering.regions import indices
from hepti_mqtt.strategies.method import STAGES, Division, Lane, Method, Options, Shares, Weights
from hepti_mqtt.strategies.stages import Goal, chain_of, part_of, stages

# Placed with what they feed, so that one kernel does both.
_INSIDE = {roles.ATTENTION_OUT, roles.MLP_UP, roles.MLP_DOWN, roles.MOMENTS, roles.SLICE}


def table(division: Division) -> Table:
    """Return the layouts: every tensor of a stage on its device, a piece and a turn per micro-batch."""
    graph = division.graph
    stage = {part: i for i, owned in enumerate(division.parts(STAGES)) for part in indices(owned)}
    attention = graph.first(roles.ATTENTION)
    lengths = attention.lengths if isinstance(attention, Attention) else attention.space[:1]
    ends = [0, *accumulate(lengths)]
    batches = [span(*cut) for cut in pairwise(dict.fromkeys((*ends[:: int(division.option("micro", "1"))], ends[-1])))]

    def rule(op: Op) -> list[Piece]:
        return [Piece(stage[part_of(op)], box(op, {0: rows}), turn=turn) for turn, rows in enumerate(batches)]

    placed = graph.roles - {roles.INPUT, roles.STEM, roles.TASK, roles.TASK_MOMENTS, *_INSIDE}
    return Table(dict.fromkeys(sorted(placed), rule), uniform=False)


def solve(graph: Graph, options: Options, weights: Weights, lanes: Sequence[Lane]) -> Shares:
    """Return the stages of each device."""
    goal: Goal = "latency" if options.get("goal") == "latency" else "throughput"
    return {}, {STAGES.kind: stages(chain_of(graph), weights, lanes, goal)}


METHOD = Method(
    "pipeline",
    "consecutive parts of layers per device, micro-batches in flight",
    table,
    shares=(STAGES,),
    options=({"goal": "throughput"},),
    variants=lambda _: [{"goal": "throughput"}, {"goal": "latency"}, *({"micro": str(n)} for n in (2, 4, 8))],
    solve=solve,
    differs=lambda _, options: "micro" not in options,  # one request of one sequence tells them not apart
    offered=False,
    settled=True,
)
