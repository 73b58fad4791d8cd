"""Layouts: a family's graph and a method's table make the Programs of all devices."""

from __future__ import annotations

from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.graph import Graph, Net
from hepti_mqtt.lowering.layouts import (
    BY_ROW,
    PLANNER_PLACE,
    Piece,
    Rule,
    Table,
    after,
    between,
    box,
    in_groups,
    joined,
    on,
    qkv_of,
    split,
    tile,
)
from hepti_mqtt.lowering.lower import Lowered, SkippedError
from hepti_mqtt.lowering.regions import Region, Set, both, shift, span, union
from hepti_mqtt.lowering.rewrites import Rewrite, product_order

__all__ = [
    "BY_ROW",
    "PLANNER_PLACE",
    "Graph",
    "Lowered",
    "Net",
    "Piece",
    "Region",
    "Rewrite",
    "Rule",
    "Set",
    "SkippedError",
    "Table",
    "after",
    "between",
    "both",
    "box",
    "in_groups",
    "joined",
    "on",
    "product_order",
    "qkv_of",
    "roles",
    "shift",
    "span",
    "split",
    "tile",
    "union",
]
