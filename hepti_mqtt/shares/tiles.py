"""Tiles of a feature map in two dimensions, and who owns them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Final

from hepti_mqtt.lowering import Set, span
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.plan import apportion
from hepti_mqtt.shares.share import Weights

GRID: Final = (4, 2)  # rows and columns of tiles
TILES: Final = GRID[0] * GRID[1]


def tiles(op: Op) -> Iterator[Mapping[int, Set]]:
    """Yield what each tile has of a map's rows and columns, row by row."""
    for y, x in product(*(apportion(op.space[dim], [1.0] * parts) for dim, parts in enumerate(GRID))):
        yield {0: span(*y), 1: span(*x)}


def owners(weights: Weights) -> list[int]:
    """Return the device of each tile, by shares, in order."""
    return [i for i, (first, stop) in enumerate(apportion(TILES, weights)) for _ in range(first, stop)]
