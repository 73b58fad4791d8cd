"""`voltage`: shares of the token rows, gathered once a layer (Voltage, Hu and Li, 2024). Shares are equal, or follow
the speed of the devices (`shares: uneven`). Everyone computes keys and values of all rows, or attends to these rows
themselves, whichever takes less for a request (`order: kept` or `reordered` pins it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from hepti_mqtt.lowering import Graph, Rewrite, Table, choose_product_order, roles, split_along
from hepti_mqtt.plan import WeightDtype
from hepti_mqtt.shares import DeviceResources, Options, Shares, Speeds
from hepti_mqtt.strategies.method import ROWS, Division, Method


def table(division: Division) -> Table:
    """Return the layouts: only the rows between layers have a place."""
    return Table({roles.AFTER_MLP: split_along(division.device_sets(ROWS), 0)})


def rewrite(division: Division) -> Rewrite:
    """Return the order of the products around attention."""
    return choose_product_order(
        division.graph, division.option("order", "cost"), division.device_sets(ROWS), division.plan.weight_dtype
    )


def solve(graph: Graph, options: Options, weights: Speeds, lanes: Sequence[DeviceResources]) -> Shares:
    """Return the rows of each device."""
    del graph, lanes
    return {ROWS.kind: tuple(weights if options.get("shares") == "uneven" else [1.0] * len(weights))}, {}


ORDERS: Sequence[Options] = ({}, {"order": "kept"}, {"order": "reordered"})
VARIANTS = tuple({"shares": shares, **order} for shares in ("equal", "uneven") for order in ORDERS)
METHOD = Method(
    "voltage", "own token rows, gathered once a layer", table, (ROWS,), options=VARIANTS[:1],
    variants=lambda _: VARIANTS, is_distinct=lambda _, options: "order" not in options, rewrite=rewrite, solve=solve,
    weight_dtypes=lambda options: ("f32",) if options.get("order") == "reordered" else get_args(WeightDtype),
)  # fmt: skip
