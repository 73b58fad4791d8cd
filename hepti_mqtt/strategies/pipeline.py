"""`pipeline`: consecutive parts of layers per device, micro-batches one behind the other (PipeEdge, Hu et al., 2022).

A layer may be cut before its attention, the attention's output, and each matrix of its MLP; a net of convolutions
between any two maps. Stages are found for most throughput or, `goal: latency`, for the least sum over the devices
(`shares/stages.py`). micro: sequences of a micro-batch.
"""

from __future__ import annotations

from hepti_mqtt.lowering import Graph, Piece, Table, box, on, roles
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.lowering.regions import indices
from hepti_mqtt.shares import Options
from hepti_mqtt.shares.stages import micro_batches, parts_of, stages_of
from hepti_mqtt.strategies import maps
from hepti_mqtt.strategies.method import STAGES, Division, Method

# Placed with what they feed, so that one kernel does both.
_INSIDE = {roles.ATTENTION_OUT, roles.MLP_UP, roles.MLP_DOWN, roles.MOMENTS, roles.SLICE}


def table(division: Division) -> Table:
    """Return the layouts: every tensor of a stage on its device, a piece and a turn per micro-batch."""
    graph, part_of = division.graph, parts_of(division.graph)
    device = {part: i for i, owned in enumerate(division.parts(STAGES)) for part in indices(owned)}
    if roles.MAP in graph.roles:  # one picture in a run

        def unit(op: Op) -> list[Piece] | None:
            return on(device[part_of(op)])(op)

        return maps.table_of(division, unit, unit, uniform=False)
    batches = list(enumerate(micro_batches(graph, int(division.option("micro", "1")))))

    def rule(op: Op) -> list[Piece]:
        return [Piece(device[part_of(op)], box(op, {0: rows}), turn=turn) for turn, rows in batches]

    placed = graph.roles - {roles.INPUT, roles.STEM, roles.TASK, roles.TASK_MOMENTS, *_INSIDE}
    return Table(dict.fromkeys(sorted(placed), rule), uniform=False)


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
    solve=lambda graph, options, weights, lanes: ({}, {STAGES.kind: stages_of(graph, weights, lanes, options)}),
    differs=differs,
    offered=False,
    throughput=True,
    settled=True,
)
