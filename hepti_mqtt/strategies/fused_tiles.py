"""`fused_tiles`: tiles of the last feature map; whatever of the maps below a tile sees is computed by the same device,
halo included, as DeepThings does (Zhao et al., 2018). Tiles have fixed owners here; its work stealing is not in it.
"""

from __future__ import annotations

from itertools import product

from hepti_mqtt.lowering import Piece, Table, box, on, roles, span
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.plan import apportion
from hepti_mqtt.strategies.method import MAP_ROWS, Division, Method

TILES = (4, 2)  # rows and columns of tiles


def table(division: Division) -> Table:
    """Return the layouts: tiles of the last map go to the devices by their shares, in order."""
    last = [op for op in division.graph.ops if op.role == roles.MAP][-1]
    shares = apportion(TILES[0] * TILES[1], division.plan.weights[MAP_ROWS.kind])
    owners = [i for i, (start, stop) in enumerate(shares) for _ in range(start, stop)]

    def tiles(op: Op) -> list[Piece] | None:
        if op.name != last.name:
            return None
        at = product(*(apportion(op.space[dim], [1.0] * n) for dim, n in enumerate(TILES)))
        return [Piece(d, box(op, {0: span(*y), 1: span(*x)})) for d, (y, x) in zip(owners, at, strict=True)]

    return Table({roles.MAP: tiles}, {roles.DENSE: on(division.head)})


METHOD = Method(
    "fused_tiles",
    "tiles of the last feature map, all below them computed with their halo",
    table,
    shares=(MAP_ROWS,),
    needs=(roles.MAP,),
    offered=False,
)
