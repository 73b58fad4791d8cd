"""`voltage`: shares of the token rows, gathered once a layer; everyone computes keys and values of all rows (Voltage,
Hu and Li, 2024). Shares are equal, or follow the speed of the devices (`shares: uneven`). The order of the product of
queries and keys is not chosen by cost here.
"""

from __future__ import annotations

from collections.abc import Sequence

from hepti_mqtt.lowering import Graph, Table, roles, split
from hepti_mqtt.shares import Lane, Options, Shares, Weights
from hepti_mqtt.strategies.method import ROWS, Division, Method


def table(division: Division) -> Table:
    """Return the layouts: only the rows between layers have a place."""
    return Table({roles.AFTER_MLP: split(division.parts(ROWS), 0)})


def solve(graph: Graph, options: Options, weights: Weights, lanes: Sequence[Lane]) -> Shares:
    """Return the rows of each device."""
    del graph, lanes
    return {ROWS.kind: tuple(weights if options.get("shares") == "uneven" else [1.0] * len(weights))}, {}


METHOD = Method(
    "voltage",
    "own token rows, gathered once a layer",
    table,
    shares=(ROWS,),
    options=({"shares": "equal"},),
    variants=lambda _: [{"shares": "equal"}, {"shares": "uneven"}],
    solve=solve,
)
