"""Rows of maps in several pieces, so that the halo travels while a device computes the rows that nobody waits for.

The rows that others wait for, at both ends of a share, are one piece: computed first and sent. Those that need no halo
are computed while it is on its way, since whatever is ready runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Final

from hepti_mqtt.lowering import Graph, Piece, Rule, Table, box, roles, span
from hepti_mqtt.lowering.ops import GlobalAverage, Op
from hepti_mqtt.lowering.regions import union
from hepti_mqtt.plan import Range
from hepti_mqtt.shares.units import Unit, units

LEAST_PIXELS: Final = 14  # of a middle: for fewer a convolution does little but read its weights from memory

Rows = Mapping[int, Range]  # by device


def ahead(graph: Graph, placed: Table) -> Table:
    """Return a table of rows of maps with those at both ends of a share in pieces of their own, which come first.

    placed: layouts of one piece for each device. Means over maps are added up by everyone who has some of the rows.
    """
    lines = {**placed.where_present, roles.FLAT: _means(graph, placed.lines[roles.MAP])}
    return Table({roles.MAP: _ends_first(graph, {**placed.lines, **placed.where_present})}, lines, uniform=False)


def _ends_first(graph: Graph, placed: Mapping[str, Rule]) -> Rule:
    ranges = {unit.op.name: _ranges(unit, placed[unit.op.role]) for unit in units(graph)}
    top, bottom = _waiting(graph, ranges)

    def rule(op: Op) -> list[Piece]:
        least = ceil(LEAST_PIXELS / op.space[1])
        found = []
        for i, (start, stop) in ranges[op.name].items():
            low, high = _middle((start, stop), top[op.name, i], bottom[op.name, i])
            ends = union(span(start, low), span(high, stop))
            parts = [ends, span(low, high)] if ends and high - low >= least else [span(start, stop)]
            found += [Piece(i, box(op, {0: rows})) for rows in parts]
        return found

    return rule


def _middle(rows: Range, first: int, last: int) -> Range:
    """Return the rows between the first and the last ones, which begin and end where tiles of 2 x 2 outputs do."""
    low, high = rows[0] + first, rows[1] - last
    return low + (low % 2 if first else 0), high - (high % 2 if last else 0)


def _means(graph: Graph, rows: Rule) -> Rule:
    """Return the layout of means over maps: everyone adds up own rows, instead of sending them to be added."""

    def rule(op: Op) -> list[Piece] | None:
        if not isinstance(op, GlobalAverage):
            return None
        found = rows(graph.by_name[op.inputs[0]]) or []
        return [Piece(piece.device, box(op, {2: piece.region[0]})) for piece in found]

    return rule


def _ranges(unit: Unit, rule: Rule) -> Rows:
    """Return the indices of a unit that each device has, without those that have none."""
    pieces = [(piece.device, piece.region[unit.dim]) for piece in rule(unit.op) or () if all(piece.region)]
    return {device: (part[0][0], part[-1][1]) for device, part in pieces}


def _waiting(graph: Graph, ranges: Mapping[str, Rows]) -> tuple[dict[tuple[str, int], int], dict[tuple[str, int], int]]:
    """Return how many of a device's first rows, and last rows, wait for others or are waited for, by (map, device)."""
    top: dict[tuple[str, int], int] = defaultdict(int)
    bottom: dict[tuple[str, int], int] = defaultdict(int)
    for unit in units(graph):
        for reads in unit.reads:
            held = ranges[reads.name]
            for i, (start, stop) in ranges[unit.op.name].items():
                own = held.get(i, (0, 0))
                early = sum(low < own[0] for low in reads.low[start:stop])
                late = sum(high > own[1] for high in reads.high[start:stop])
                top[unit.op.name, i] = max(top[unit.op.name, i], early)
                bottom[unit.op.name, i] = max(bottom[unit.op.name, i], late)
                low, high = reads.low[start], reads.high[stop - 1]
                for j, rows in _others(held, i, low, high):
                    if j > i:
                        top[reads.name, j] = max(top[reads.name, j], rows[1] - held[j][0])
                    else:
                        bottom[reads.name, j] = max(bottom[reads.name, j], held[j][1] - rows[0])
    return top, bottom


def _others(held: Rows, device: int, low: int, high: int) -> Iterator[tuple[int, Range]]:
    """Yield the other devices that have some of low..high, and which rows."""
    for other, (start, stop) in held.items():
        a, z = max(start, low), min(stop, high)
        if other != device and a < z:
            yield other, (a, z)
