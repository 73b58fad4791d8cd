"""Layouts: a family's graph and a method's table make the Programs of all devices."""

from __future__ import annotations

from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.blocks import BY_ROW, after, between, in_groups, joined, qkv_of
from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.layouts import PLANNER_PLACE, Piece, Rule, Table, box, on, split, tile
from hepti_mqtt.lowering.lowered import Lowered, SkippedError
from hepti_mqtt.lowering.net import Net
from hepti_mqtt.lowering.regions import Region, Set, both, shift, span, union
from hepti_mqtt.lowering.reorder import Rewrite, product_order

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
