"""Rows of maps by one weight per device, or by their size, and columns of the dense layers behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

from hepti_mqtt.lowering import Graph, roles
from hepti_mqtt.plan import Range, apportion
from hepti_mqtt.shares.share import Lane, Options, Shares, Weights
from hepti_mqtt.shares.units import sizes

# Divides so many units by the devices' weights.
Divide = Callable[[int, Weights], tuple[Range, ...]]


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


def rows_kind(rows: int) -> str:
    """Return the kind of share of maps that have so many rows."""
    return f"rows {rows}"


def ranges_by_size(graph: Graph, _options: Options, weights: Weights, lanes: Sequence[Lane]) -> Shares:
    """Return rows of the maps of each size by the devices' speeds, and columns of the dense layers."""
    rows = {rows_kind(n): apportion(n, weights) for n in sizes(graph)}
    speeds = row_speeds(weights, lanes)
    return {}, {**rows, **dense_ranges(graph, lambda n: apportion(n, speeds))}


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
