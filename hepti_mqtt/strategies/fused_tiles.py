"""`fused_tiles`: tiles of a feature map; whatever of the maps below a tile sees is computed by the same device, halo
included, as DeepThings does (Zhao et al., 2018); behind the cut one device goes on.

Tiles have fixed owners, by speed, or are a bag from which devices that are free get the next one (`leased`).
"""

from __future__ import annotations

from itertools import product
from typing import Final

from hepti_mqtt.lowering import Piece, Table, box, on, roles, span
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.plan import apportion
from hepti_mqtt.shares.units import border
from hepti_mqtt.strategies import maps
from hepti_mqtt.strategies.method import Division, Method

SHARE: Final = "tiles"
TILES: Final = (4, 2)  # rows and columns of tiles
OWNERS: Final = "owners"
LEASED: Final = {OWNERS: "leased"}


def table(division: Division) -> Table:
    """Return the layouts: tiles of the maps that are read behind the cut, to the devices by their shares, in order."""
    shares = apportion(TILES[0] * TILES[1], division.plan.weights[SHARE])
    owners = [i for i, (start, stop) in enumerate(shares) for _ in range(start, stop)]
    ends = border(division.graph, maps.cut_of(division.plan.options))

    def tiles(op: Op) -> list[Piece] | None:
        if op.name not in ends:
            return None
        at = product(*(apportion(op.space[dim], [1.0] * n) for dim, n in enumerate(TILES)))
        return [Piece(d, box(op, {0: span(*y), 1: span(*x)})) for d, (y, x) in zip(owners, at, strict=True)]

    return maps.table_of(division, tiles, on(division.head))


METHOD = Method(
    "fused_tiles",
    "tiles of a feature map, all below them computed with their halo",
    table,
    needs=(roles.MAP,),
    options=(*maps.CUTS[:4], *({**cut, **LEASED} for cut in maps.CUTS[:4])),
    solve=lambda _graph, _options, weights, _lanes: ({SHARE: tuple(weights)}, {}),
    # Where nobody becomes slower while a request runs, owners by speed are as fast: leases are there to be asked for.
    differs=lambda graph, options: OWNERS not in options and maps.cuts(graph, options),
    bag=lambda options: TILES[0] * TILES[1] if OWNERS in options else 0,
)
