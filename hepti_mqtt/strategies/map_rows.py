"""`map_rows`: every device has rows of every feature map and gets the halo from its neighbours, as MoDNN (Mao et al.,
2017) and CoEdge (Zeng et al., 2021) divide convolutions; fully connected layers by columns. Shares are by speed here.
"""

from __future__ import annotations

from hepti_mqtt.lowering import Piece, Table, box, roles, span, split
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.plan import apportion
from hepti_mqtt.strategies.method import DENSE, MAP_ROWS, Division, Method


def table(division: Division) -> Table:
    """Return the layouts: the same share of the rows of each map, and of the columns of each dense layer."""
    weights = division.plan.weights[MAP_ROWS.kind]

    def rows(op: Op) -> list[Piece]:
        return [Piece(i, box(op, {0: span(*r)})) for i, r in enumerate(apportion(op.space[0], weights))]

    return Table({roles.MAP: rows}, {roles.DENSE: split(division.parts(DENSE), 1)})


METHOD = Method(
    "map_rows",
    "own rows of every feature map, halo from the neighbours",
    table,
    shares=(MAP_ROWS, DENSE),
    needs=(roles.MAP,),
)
