"""`pipeline`: consecutive layers per device, the sequences of a batch one behind the other (PipeEdge, Hu et al., 2022).

Layers are shared out by speed here; PipeEdge's dynamic programme over layers and links is not in it yet.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from hepti_mqtt.lowering import Piece, Table, box, roles, span
from hepti_mqtt.lowering.ops import Attention, Op
from hepti_mqtt.lowering.regions import indices
from hepti_mqtt.strategies.method import LAYERS, Division, Method

# Placed with what they feed, so that one kernel does both.
_INSIDE = {roles.ATTENTION_OUT, roles.MLP_UP, roles.MLP_DOWN, roles.MOMENTS, roles.SLICE}


def table(division: Division) -> Table:
    """Return the layouts: every tensor of a layer on its device, a piece and a turn per sequence."""
    graph = division.graph
    stage = {layer: i for i, part in enumerate(division.parts(LAYERS)) for layer in indices(part)}
    attention = graph.first(roles.ATTENTION)
    lengths = attention.lengths if isinstance(attention, Attention) else attention.space[:1]
    batches = [span(*ends) for ends in pairwise((0, *accumulate(lengths)))]

    def rule(op: Op) -> list[Piece]:
        return [Piece(stage[op.layer], box(op, {0: rows}), turn=turn) for turn, rows in enumerate(batches)]

    placed = graph.roles - {roles.INPUT, roles.STEM, roles.TASK, roles.TASK_MOMENTS, *_INSIDE}
    return Table(dict.fromkeys(sorted(placed), rule), uniform=False)


METHOD = Method(
    "pipeline",
    "consecutive layers per device, sequences in flight",
    table,
    shares=(LAYERS,),
    offered=False,
    throughput=True,
)
