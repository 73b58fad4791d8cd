"""`fused_tiles`: tiles of a feature map; whatever of the maps below a tile sees is computed by the same device, halo
included, as DeepThings does (Zhao et al., 2018); behind the cut one device goes on.

Tiles have fixed owners, by speed, or are a bag from which devices that are free get the next one (`leased`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Final

from hepti_mqtt.lowering import Graph, Piece, Table, box, on, roles, span
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.plan import apportion
from hepti_mqtt.strategies import maps
from hepti_mqtt.strategies.method import Division, Lane, Method, Options, Shares, Weights

SHARE: Final = "tiles"
TILES: Final = (4, 2)  # rows and columns of tiles
OWNERS: Final = "owners"
LEASED: Final = {OWNERS: "leased"}


def table(division: Division) -> Table:
    """Return the layouts: tiles of the maps that are read behind the cut, to the devices by their shares, in order."""
    shares = apportion(TILES[0] * TILES[1], division.plan.weights[SHARE])
    owners = [i for i, (start, stop) in enumerate(shares) for _ in range(start, stop)]
    border = _border(division.graph, maps.alone(division))

    def tiles(op: Op) -> list[Piece] | None:
        if op.name not in border:
            return None
        at = product(*(apportion(op.space[dim], [1.0] * n) for dim, n in enumerate(TILES)))
        return [Piece(d, box(op, {0: span(*y), 1: span(*x)})) for d, (y, x) in zip(owners, at, strict=True)]

    return maps.table_of(division, tiles, on(division.head))


def _border(graph: Graph, alone: frozenset[str]) -> frozenset[str]:
    """Return the divided maps that are read by what is not: a dense layer, or a map behind the cut."""
    found: set[str] = set()
    for unit in maps.units(graph):
        if unit.op.name in alone or unit.op.role == roles.DENSE:
            found |= {reads.name for reads in unit.reads}
    divided = [op.name for op in graph.ops if op.role == roles.MAP and op.name not in alone]
    return frozenset(found & set(divided)) | {divided[-1]} if divided else frozenset()


def solve(graph: Graph, options: Options, weights: Weights, lanes: Sequence[Lane]) -> Shares:
    """Return shares of the tiles by the weights."""
    del graph, options, lanes
    return {SHARE: tuple(weights)}, {}


def bag(options: Options) -> int:
    """Return how many tiles are leased one by one."""
    return TILES[0] * TILES[1] if OWNERS in options else 0


METHOD = Method(
    "fused_tiles",
    "tiles of a feature map, all below them computed with their halo",
    table,
    needs=(roles.MAP,),
    options=(*maps.CUTS[:4], *({**cut, **LEASED} for cut in maps.CUTS[:4])),
    solve=solve,
    # Where nobody becomes slower while a request runs, owners by speed are as fast: leases are there to be asked for.
    differs=lambda graph, options: OWNERS not in options and maps.cuts(graph, options),
    bag=bag,
)
