"""Layouts of convolutional nets that several methods use: rows of maps, columns of dense layers, one device at the end.

The request brings its picture to every device, so that nobody sends the first map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hepti_mqtt.lowering import Graph, Piece, Rule, Table, on_device, region_with, roles, span
from hepti_mqtt.shares import Options
from hepti_mqtt.shares.maps import Divide, after_cut, dense_kind, map_heights
from hepti_mqtt.strategies.method import Division

CUT: Final = "cut"
NO_CUT: Final = "none"
CUTS: Final[tuple[Options, ...]] = tuple({CUT: name} for name in (NO_CUT, "1", "2", "3", "4", "5"))


def divides_behind_cut(graph: Graph, options: Options) -> bool:
    """Return whether something that could be divided is left behind the cut that options name."""
    cut = cut_number(options)
    return not cut or (cut < len(map_heights(graph)) and after_cut(graph, cut) != after_cut(graph, 0))


def cut_number(options: Options) -> int:
    """Return the number of a cut, 0 for none."""
    name = options.get(CUT, NO_CUT)
    return 0 if name == NO_CUT else int(name)


def map_table(division: Division, maps: Rule, dense: Rule, uniform: bool = True) -> Table:
    """Return the table that places maps and dense layers by rules as far as the cut, and then on the head device."""
    cut = cut_number(division.plan.options)
    head, left = on_device(division.root), after_cut(division.graph, cut)

    def before(rule: Rule) -> Rule:
        return lambda op: (head if op.name in left else rule)(op)

    # The picture is everywhere: its first map is made where it is needed.
    beside = {roles.DENSE: before(dense), roles.STEM: lambda _: None}
    return Table({roles.MAP: before(maps)}, beside, uniform=uniform and not cut)


def rows_by_weights(division: Division, kind: str, divide: Divide) -> Rule:
    """Return the layout of the rows of each map, divided by the plan's weights of a kind."""
    weights = division.plan.shares[kind]
    return lambda op: [Piece(i, region_with(op, {0: span(*r)})) for i, r in enumerate(divide(op.space[0], weights))]


def in_ranges(division: Division, dim: int, kind: Callable[[int], str]) -> Rule:
    """Return the layout along a dimension by the plan's ranges for tensors of that size."""
    ranges = division.plan.ranges
    return lambda op: [Piece(i, region_with(op, {dim: span(*r)})) for i, r in enumerate(ranges[kind(op.space[dim])])]


def dense_columns(division: Division) -> Rule:
    """Return the layout of dense layers by columns as the plan says."""
    return in_ranges(division, 1, dense_kind)


def rows_by(kind: str, divide: Divide) -> Callable[[Division], Table]:
    """Return the table of rows of each map, divided by the plan's weights of a kind, and columns of dense layers."""

    def table(division: Division) -> Table:
        return map_table(division, rows_by_weights(division, kind, divide), dense_columns(division))

    return table
