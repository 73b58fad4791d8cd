"""`pipeline`: consecutive parts of the model per device, micro-batches in a row (PipeEdge, Hu et al., 2022)."""

from __future__ import annotations

from hepti_mqtt.lowering import Piece, Table, region_with, roles
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.shares.stages import VARIANTS, is_distinct, micro_batches, parts_of, placed_roles, stages_of
from hepti_mqtt.strategies import maps
from hepti_mqtt.strategies.method import STAGES, Division, Method


def table(division: Division) -> Table:
    """Return the layouts: every tensor of a stage on its device, a piece and a turn per micro-batch."""
    graph, owners, part_of = division.graph, division.owners(STAGES), parts_of(division.graph)
    cuts = list(enumerate(micro_batches(graph, int(division.option("micro", "1")))))

    def stage(op: Op) -> list[Piece]:
        return [Piece(owners[part_of(op)], region_with(op, cut), order=turn) for turn, cut in cuts]

    if roles.MAP in graph.roles:
        return maps.map_table(division, stage, stage, uniform=False)
    return Table(dict.fromkeys(placed_roles(graph), stage), uniform=False)


METHOD = Method(
    "pipeline",
    "consecutive parts of layers per device, micro-batches in flight",
    table,
    shares=(STAGES,),
    needs=(),
    needs_any=(roles.AFTER_MLP, roles.MAP),
    options=VARIANTS[:1],
    variants=lambda _: VARIANTS,
    solve=lambda graph, options, weights, lanes: ({}, {STAGES.kind: stages_of(graph, weights, lanes, options)}),
    is_distinct=is_distinct,
    automatic=False,
    for_throughput=True,
    fixed_shares=True,
)
