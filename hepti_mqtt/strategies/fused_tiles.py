"""`fused_tiles`: tiles of a feature map; whatever of the maps below a tile sees is computed by the same device, halo
included, as DeepThings does (Zhao et al., 2018); behind the cut one device goes on.

Tiles have fixed owners, by speed, or are a bag from which devices that are free get the next one (`leased`).
"""

from __future__ import annotations

from hepti_mqtt.lowering import Piece, Table, on_device, region_with, roles
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.shares.maps import TILES, boundary_maps, owned_tiles
from hepti_mqtt.strategies import maps
from hepti_mqtt.strategies.method import Division, Method


def table(division: Division) -> Table:
    """Return the layouts: tiles of the maps that are read behind the cut, to the devices by their shares, in order."""
    weights = division.plan.shares["tiles"]
    ends = boundary_maps(division.graph, maps.cut_number(division.plan.options))

    def tiled(op: Op) -> list[Piece] | None:
        return [Piece(d, region_with(op, at)) for d, at in owned_tiles(op, weights)] if op.name in ends else None

    return maps.map_table(division, tiled, on_device(division.root))


METHOD = Method(
    "fused_tiles",
    "tiles of a feature map, all below them computed with their halo",
    table,
    needs=(roles.MAP,),
    options=(*maps.CUTS[:4], *({**cut, "owners": "leased"} for cut in maps.CUTS[:4])),
    solve=lambda _graph, _options, weights, _lanes: ({"tiles": tuple(weights)}, {}),
    # Where nobody becomes slower while a request runs, owners by speed are as fast: leases are there to be asked for.
    is_distinct=lambda graph, options: "owners" not in options and maps.divides_behind_cut(graph, options),
    task_count=lambda options: TILES if "owners" in options else 0,
)
