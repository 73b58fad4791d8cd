"""Results that are pieces of their inputs as they are: no kernel computes them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod

from hepti_mqtt.lowering.ops.base import Op
from hepti_mqtt.lowering.regions import Region, both, indices, shift, span, to_set


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows(Op):
    """Some rows of a tensor, in order: what a task reads of the last layer. None: all of them."""

    rows: tuple[int, ...] | None = None

    kind = "rows"
    is_view = True

    def need(self, region: Region) -> tuple[Region, ...]:
        r, c = region
        return ((r if self.rows is None else to_set(self.rows[i] for i in indices(r)), c),)


@dataclass(frozen=True, eq=False, kw_only=True)
class Columns(Op):
    """A range of the columns of a tensor, from `start`."""

    start: int

    kind = "columns"
    is_view = True

    def need(self, region: Region) -> tuple[Region, ...]:
        return ((region[0], shift(region[1], self.start)),)


@dataclass(frozen=True, eq=False, kw_only=True)
class Join(Op):
    """Tensors side by side along their columns; starts: the first column of each."""

    starts: tuple[int, ...]

    kind = "join"
    is_view = True

    def need(self, region: Region) -> tuple[Region, ...]:
        r, c = region
        ends = (*self.starts, self.space[1])
        return tuple((r, shift(both(c, span(a, z)), -a)) for a, z in pairwise(ends))

    def filled(self, number: int, region: Region) -> Region:
        a, z = (*self.starts, self.space[1])[number : number + 2]
        return region[0], both(region[1], span(a, z))


@dataclass(frozen=True, eq=False, kw_only=True)
class Slice(Op):
    """Elements start.. of a vector."""

    start: int
    rank: int = 1

    kind = "slice"
    is_view = True

    def need(self, region: Region) -> tuple[Region, ...]:
        return ((shift(region[0], self.start),),)


@dataclass(frozen=True, eq=False, kw_only=True)
class Reshape(Op):
    """All of a tensor in another shape; source: the shape that it had."""

    source: tuple[int, ...]

    kind = "reshape"
    is_view = True

    def extent(self, region: Region) -> Region:
        return self.full

    def need(self, region: Region) -> tuple[Region, ...]:
        return (tuple(span(0, n) for n in self.source),)


@dataclass(frozen=True, eq=False, kw_only=True)
class Flatten(Op):
    """A map [Y, X, C] as one row [1, Y X C]: rows of the map are columns of it, in whole rows."""

    source: tuple[int, int, int]

    kind = "flatten"
    is_view = True

    def grain(self) -> tuple[int, ...]:
        return 1, prod(self.source[1:])

    def need(self, region: Region) -> tuple[Region, ...]:
        row = prod(self.source[1:])
        rows = tuple((a // row, z // row) for a, z in region[1])
        return ((rows, *(span(0, n) for n in self.source[1:])),)
