"""Tiles of a feature map in two dimensions, and who owns them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Final

from hepti_mqtt.lowering import Set, span
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.plan import apportion
from hepti_mqtt.shares.share import Weights

GRID: Final = (4, 2)  # rows and columns of tiles
TILES: Final = GRID[0] * GRID[1]


def tiles(op: Op) -> list[Mapping[int, Set]]:
    """Return what each tile has of a map's rows and columns, row by row; a small map has fewer of them."""
    sides = [[span(*r) for r in apportion(op.space[dim], [1.0] * parts)] for dim, parts in enumerate(GRID)]
    return [{0: y, 1: x} for y, x in product(*sides) if y and x]


def owned(op: Op, weights: Weights) -> list[tuple[int, Mapping[int, Set]]]:
    """Return the tiles of a map, each with its device: by shares, in order."""
    found = tiles(op)
    return [(i, at) for i, (first, stop) in enumerate(apportion(len(found), weights)) for at in found[first:stop]]
