"""Execution units of a convolutional net: what can be shared out, what it requires of others, where one goes on alone.

Feature maps are [y, x, channels]; methods place maps and dense layers, and what lies between is computed with what
reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Final, NamedTuple

from hepti_mqtt.lowering import Graph, Set, box, roles, span
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.lowering.regions import Region, count
from hepti_mqtt.plan import Range

PLACED: Final = (roles.MAP, roles.DENSE)


class Reads(NamedTuple):
    """What a unit requires of another one: for each index of the unit, which indices; bytes of one of those."""

    name: str
    low: tuple[int, ...]
    high: tuple[int, ...]
    nbytes: int


class Unit(NamedTuple):
    """A placed tensor with all that is computed for it alone, cut along one dimension: rows of a map, columns.

    flops: of one index, at the middle.
    """

    op: Op
    dim: int
    flops: float
    reads: tuple[Reads, ...]

    @property
    def size(self) -> int:
        """Return how many indices can be shared out."""
        return self.op.space[self.dim]


@lru_cache(maxsize=8)
def units(graph: Graph) -> tuple[Unit, ...]:
    """Return the execution units of a graph in the order in which they are computed."""
    return tuple([_unit(graph, op) for op in graph.ops if op.role in PLACED])


def _unit(graph: Graph, op: Op) -> Unit:
    dim = dimension(op)
    seen = [_seen(graph, op, box(op, {dim: span(i, i + 1)})) for i in range(op.space[dim])]
    reads = []
    for name in dict.fromkeys(name for one in seen for name in one):
        source = graph.by_name[name]
        ends = [one.get(name, (0, 0)) for one in seen]
        row = prod(source.space[: source.rank]) // source.space[dimension(source)]
        reads.append(Reads(name, tuple(a for a, _ in ends), tuple(z for _, z in ends), 4 * row))
    return Unit(op, dim, _flops(graph, op, op.full) / op.space[dim], tuple(reads))


def dimension(op: Op) -> int:
    """Return the dimension along which a unit is cut."""
    return 0 if op.rank == 3 else 1


def _seen(graph: Graph, op: Op, region: Region) -> Mapping[str, Range]:
    """Return the ranges of placed tensors that a region is computed from."""
    found: dict[str, Range] = {}
    for name, part in zip(op.inputs, op.need(region), strict=True):
        source = graph.by_name[name]
        if source.role in (roles.INPUT, roles.STEM) or not all(part):
            continue
        if source.role in PLACED:
            more = {name: _hull(part[dimension(source)])}
        else:
            inner = source.of(part)
            more = dict(_seen(graph, source, inner)) if inner else {}
        for key, (a, z) in more.items():
            low, high = found.get(key, (a, z))
            found[key] = (min(a, low), max(z, high))
    return found


def _hull(s: Set) -> Range:
    return s[0][0], s[-1][1]


def _flops(graph: Graph, op: Op, region: Region) -> float:
    """Return the FLOPs of a region with all that is computed for it alone."""
    places = prod(map(count, region[: op.rank - 1]))
    matrices = sum((r.rows[1] - r.rows[0]) * (r.columns[1] - r.columns[0]) for r in op.refs(region))
    total = 2.0 * places * matrices if matrices else float(prod(map(count, region[: op.rank])))
    for name, part in zip(op.inputs, op.need(region), strict=True):
        source = graph.by_name[name]
        if source.role not in (*PLACED, roles.INPUT, roles.STEM) and not source.is_view:
            inner = source.of(part)
            total += _flops(graph, source, inner) if inner else 0.0
    return total


def pixels(graph: Graph) -> int:
    """Return the pixels of the map behind which half of a net's work is done, 0 if it has no maps."""
    found = sorted(
        (unit.op.space[0] * unit.op.space[1], unit.flops * unit.size) for unit in units(graph) if unit.op.rank == 3
    )
    done = list(accumulate(flops for _, flops in found))
    return next((size for (size, _), flops in zip(found, done, strict=True) if 2 * flops >= done[-1]), 0)


# -- where one device goes on alone ---------------------------------------------------------------------------------


def sizes(graph: Graph) -> list[int]:
    """Return how many rows the maps of a graph have, the most first, each number once; one row is nobody's share."""
    return sorted({op.space[0] for op in graph.ops if op.role == roles.MAP and op.space[0] > 1}, reverse=True)


@lru_cache(maxsize=64)
def alone(graph: Graph, cut: int) -> frozenset[str]:
    """Return all that stands behind a cut, and maps of one row; cut 0: nothing else.

    Cut n is behind the first map of the n-th smaller size, and not behind the first one that is smaller again: of the
    places between, that at which the fewest bytes come together on one device.
    """
    found = units(graph)
    start = len(found)
    if 0 < cut < len(sizes(graph)):
        rest = [*sizes(graph)[cut : cut + 2], 1][:2]
        first, stop = (next((i for i, u in enumerate(found) if _within(u, rows)), len(found)) for rows in rest)
        stop = max(stop, first + 1)  # where maps grow, the first of one size can be the first of the next smaller too
        start = min(range(first + 1, stop + 1), key=lambda i: crossing(graph, i))
    small = {unit.op.name for unit in found if unit.op.role == roles.MAP and unit.size == 1}
    return frozenset(unit.op.name for unit in found[start:]) | small


def _within(unit: Unit, rows: int) -> bool:
    """Return whether a unit is a map of at most so many rows, or stands behind the maps."""
    return unit.op.role != roles.MAP or unit.size <= rows


def crossing(graph: Graph, start: int) -> int:
    """Return the bytes of maps that are computed before a unit and read by it, or by those behind it."""
    found = units(graph)
    before = {unit.op.name: unit for unit in found[:start]}
    read = {reads.name: reads.nbytes for unit in found[start:] for reads in unit.reads if reads.name in before}
    return sum(nbytes * before[name].size for name, nbytes in read.items())


def border(graph: Graph, cut: int) -> frozenset[str]:
    """Return the divided maps that are read by what is not (dense layers, maps behind the cut), and the last one."""
    behind = alone(graph, cut)
    readers = [unit for unit in units(graph) if unit.op.name in behind or unit.op.role == roles.DENSE]
    read = {reads.name for unit in readers for reads in unit.reads}
    divided = [op.name for op in graph.ops if op.role == roles.MAP and op.name not in behind]
    return frozenset(read & set(divided)) | frozenset(divided[-1:])
