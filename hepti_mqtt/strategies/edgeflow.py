"""`edgeflow`: each layer of the graph cut into execution units of its own shares, solved one behind the other, as
EdgeFlow (Hu and Li, 2022). What a unit requires and who forwards it follows from the ranges.
"""

from __future__ import annotations

from hepti_mqtt.lowering import Piece, Table, region_with, roles, span
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.shares.maps import cut_dimension, edgeflow_ranges
from hepti_mqtt.strategies import maps
from hepti_mqtt.strategies.method import Division, Method


def table(division: Division) -> Table:
    """Return the layouts: each map's rows and each dense layer's columns in ranges of its own."""
    ranges = division.plan.ranges

    def rule(op: Op) -> list[Piece]:
        return [Piece(i, region_with(op, {cut_dimension(op): span(*r)})) for i, r in enumerate(ranges[op.name])]

    return maps.map_table(division, rule, rule, uniform=False)


METHOD = Method(
    "edgeflow",
    "rows of each map in shares of its own, solved layer by layer",
    table,
    needs=(roles.MAP,),
    order_matters=True,
    solve=lambda graph, _options, weights, lanes: ({}, edgeflow_ranges(graph, weights, lanes)),
)
