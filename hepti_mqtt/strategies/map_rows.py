"""`map_rows`: every device has rows of every feature map and gets the halo from its neighbours.

Dense layers are divided by columns. One share of the rows for all maps, by speed, which the planner balances on the
simulator. After the cut one device goes on alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hepti_mqtt.lowering import Graph, Piece, Table, roles
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.plan import apportion
from hepti_mqtt.strategies import maps
from hepti_mqtt.strategies.method import Division, Lane, Method, Options, Shares, Weights

ROWS: Final = "map_rows"


def table(division: Division) -> Table:
    """Return the layouts: the same share of the rows of each map, and of the columns of each dense layer."""
    weights = division.plan.weights[ROWS]

    def rows(op: Op) -> list[Piece] | None:
        return maps.rows_of(apportion(op.space[0], weights))(op)

    return maps.table_of(division, rows, maps.dense_columns(division))


def solve(graph: Graph, options: Options, weights: Weights, lanes: Sequence[Lane]) -> Shares:
    """Return shares by the weights."""
    del options, lanes
    return {ROWS: tuple(weights)}, maps.dense_ranges(graph, lambda n: apportion(n, weights))


METHOD = Method(
    "map_rows",
    "own rows of every feature map, halo from the neighbours",
    table,
    needs=(roles.MAP,),
    options=maps.CUTS,
    solve=solve,
    differs=maps.cuts,
)
