"""What methods for convolutional nets share: where one device goes on alone, and execution units.

Feature maps are [y, x, channels]; a method places maps and dense layers, and what lies between is computed with what
reads it. The request brings its picture to every device, so that nobody sends the first map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from math import ceil, prod
from typing import Final, NamedTuple

import numpy as np

from hepti_mqtt.lowering import Graph, Piece, Rule, Set, Table, box, on, roles, span
from hepti_mqtt.lowering.ops import GlobalAverage, Op
from hepti_mqtt.lowering.regions import Region, count
from hepti_mqtt.plan import Range
from hepti_mqtt.strategies.consecutive import consecutive
from hepti_mqtt.strategies.method import Division, Lane, Options, Shares, Weights

# Divides so many units by the devices' weights.
Divide = Callable[[int, Weights], tuple[Range, ...]]

CUT: Final = "cut"
NO_CUT: Final = "none"
CUTS: Final[tuple[Options, ...]] = tuple({CUT: name} for name in (NO_CUT, "1", "2", "3", "4", "5"))
PLACED: Final = (roles.MAP, roles.DENSE)


def sizes(graph: Graph) -> list[int]:
    """Return how many rows the maps of a graph have, the most first, each number once; one row is nobody's share."""
    return sorted({op.space[0] for op in graph.ops if op.role == roles.MAP and op.space[0] > 1}, reverse=True)


def cuts(graph: Graph, options: Options) -> bool:
    """Return whether something that could be divided is left behind the cut that options name."""
    cut = _number(options)
    return not cut or (cut < len(sizes(graph)) and _alone(graph, cut) != _alone(graph, 0))


def alone(division: Division) -> frozenset[str]:
    """Return the tensors that the head device computes alone under the plan's cut."""
    return _alone(division.graph, _number(division.plan.options))


def _number(options: Options) -> int:
    """Return the number of a cut, 0 for none."""
    name = options.get(CUT, NO_CUT)
    return 0 if name == NO_CUT else int(name)


@lru_cache(maxsize=64)
def _alone(graph: Graph, cut: int) -> frozenset[str]:
    """Return all that stands behind a cut, and maps of one row; cut 0: nothing else.

    Cut n is behind the first map of the n-th smaller size, and not behind the first one that is smaller again: of the
    places between, that at which the fewest bytes come together on one device.
    """
    found = units(graph)
    start = len(found)
    if 0 < cut < len(sizes(graph)):
        rest = [*sizes(graph)[cut : cut + 2], 1][:2]
        first, stop = (next((i for i, u in enumerate(found) if _within(u, rows)), len(found)) for rows in rest)
        start = min(range(first + 1, stop + 1), key=lambda i: _crossing(graph, i))
    small = {unit.op.name for unit in found if unit.op.role == roles.MAP and unit.size == 1}
    return frozenset(unit.op.name for unit in found[start:]) | small


def _within(unit: Unit, rows: int) -> bool:
    """Return whether a unit is a map of at most so many rows, or stands behind the maps."""
    return unit.op.role != roles.MAP or unit.size <= rows


def _crossing(graph: Graph, start: int) -> int:
    """Return the bytes of maps that are computed before a unit and read by it, or by those behind it."""
    found = units(graph)
    before = {unit.op.name: unit for unit in found[:start]}
    read = {reads.name: reads.nbytes for unit in found[start:] for reads in unit.reads if reads.name in before}
    return sum(nbytes * before[name].size for name, nbytes in read.items())


def table_of(division: Division, maps: Rule, dense: Rule) -> Table:
    """Return the table that places maps and dense layers by rules as far as the cut, and then on the head device."""
    head, left = on(division.head), alone(division)

    def before(rule: Rule) -> Rule:
        return lambda op: (head if op.name in left else rule)(op)

    # The picture is everywhere: its first map is made where it is needed.
    beside = {roles.DENSE: before(dense), roles.STEM: lambda _: None}
    return Table({roles.MAP: before(maps)}, beside, uniform=not _number(division.plan.options))


def rows_of(parts: Sequence[Range]) -> Rule:
    """Return the layout in which device i holds the given rows of a map."""
    return lambda op: [Piece(i, box(op, {0: span(*r)})) for i, r in enumerate(parts)]


def means_of(graph: Graph, rows: Rule) -> Rule:
    """Return the layout of means over maps: everyone adds up own rows, instead of sending them to be added."""

    def rule(op: Op) -> list[Piece] | None:
        if not isinstance(op, GlobalAverage):
            return None
        found = rows(graph.by_name[op.inputs[0]]) or []
        return [Piece(piece.device, box(op, {2: piece.region[0]})) for piece in found]

    return rule


def dense_kind(columns: int) -> str:
    """Return the kind of share of dense layers that have so many columns."""
    return f"dense {columns}"


def dense_ranges(graph: Graph, divide: Callable[[int], tuple[Range, ...]]) -> dict[str, tuple[Range, ...]]:
    """Return the columns of dense layers for each device, by the layers' size; divide: so many whole units."""
    found = {}
    for op in graph.ops:
        if op.role == roles.DENSE:
            total, unit = op.space[1], min(op.unit(1), op.space[1])
            parts = divide(ceil(total / unit))
            found[dense_kind(total)] = tuple((min(a * unit, total), min(z * unit, total)) for a, z in parts)
    return found


def dense_columns(division: Division) -> Rule:
    """Return the layout of dense layers by columns as the plan says."""
    ranges = division.plan.ranges

    def rule(op: Op) -> list[Piece]:
        return [Piece(i, box(op, {1: span(*r)})) for i, r in enumerate(ranges[dense_kind(op.space[1])])]

    return rule


def rows_by(kind: str, divide: Divide) -> Callable[[Division], Table]:
    """Return the table of rows of each map, divided by the plan's weights of a kind, and columns of dense layers."""

    def table(division: Division) -> Table:
        weights = division.plan.weights[kind]
        return table_of(division, lambda op: rows_of(divide(op.space[0], weights))(op), dense_columns(division))

    return table


def shares_by(kind: str, divide: Divide) -> Callable[[Graph, Options, Weights, Sequence[Lane]], Shares]:
    """Return what finds the shares of such a table: the devices' speeds, and the columns of the dense layers."""

    def solve(graph: Graph, _options: Options, weights: Weights, lanes: Sequence[Lane]) -> Shares:
        speeds = row_speeds(weights, lanes)
        whole = sum(weights) or 1.0  # parts of it: however often shares are changed, a plan has no numbers without end
        return {kind: tuple(w / whole for w in weights)}, dense_ranges(graph, lambda n: divide(n, speeds))

    return solve


def row_speeds(weights: Weights, lanes: Sequence[Lane]) -> Weights:
    """Return how fast devices are at dense layers, which have one row: they follow memory, not arithmetic."""
    return [
        w if lane.row_flops_per_s is None or w <= 0 else lane.row_flops_per_s
        for w, lane in zip(weights, lanes, strict=True)
    ]


def pixels(graph: Graph) -> int:
    """Return the pixels of the map behind which half of a net's work is done, 0 if it has no maps."""
    found = sorted(
        (unit.op.space[0] * unit.op.space[1], unit.flops * unit.size) for unit in units(graph) if unit.op.rank == 3
    )
    done = list(accumulate(flops for _, flops in found))
    return next((size for (size, _), flops in zip(found, done, strict=True) if 2 * flops >= done[-1]), 0)


# -- execution units --------------------------------------------------------------------------------------------------


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


def stages(graph: Graph, weights: Weights, lanes: Sequence[Lane]) -> tuple[Range, ...]:
    """Return consecutive units for each device, so that the slowest stage, with what it receives, is the fastest."""
    found = units(graph)
    work = np.array([0.0, *accumulate(unit.flops * unit.size for unit in found)])
    crossing = np.array([_crossing(graph, i) for i in range(len(found) + 1)], float)
    costs = np.full((len(weights), len(work), len(work)), np.inf)
    for i, (speed, lane) in enumerate(zip(weights, lanes, strict=True)):
        if speed > 0:
            costs[i] = (work[None, :] - work[:, None]) / speed + crossing[:, None] / lane.bytes_per_s
        costs[i][np.tri(len(work), dtype=bool)] = np.inf
        np.fill_diagonal(costs[i], 0.0)
    return consecutive(costs)
