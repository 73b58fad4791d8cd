"""Layouts: a family's graph and a method's table make the Programs of all devices."""

from __future__ import annotations

from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.graph import Graph, GraphBuilder
from hepti_mqtt.lowering.layouts import (
    PLANNER_INDEX,
    ROWWISE_ROLES,
    Piece,
    Rule,
    Table,
    between_blocks,
    explicit,
    merge_parts,
    on_device,
    qkv_columns,
    region_with,
    ring_order,
    split_along,
    split_into_groups,
)
from hepti_mqtt.lowering.lower import Lowered
from hepti_mqtt.lowering.ops import Norm
from hepti_mqtt.lowering.regions import IndexSet, Region, intersect_sets, shift, span, union
from hepti_mqtt.lowering.rewrites import Rewrite, choose_product_order

__all__ = [
    "PLANNER_INDEX",
    "ROWWISE_ROLES",
    "Graph",
    "GraphBuilder",
    "IndexSet",
    "Lowered",
    "Norm",
    "Piece",
    "Region",
    "Rewrite",
    "Rule",
    "Table",
    "between_blocks",
    "choose_product_order",
    "explicit",
    "intersect_sets",
    "merge_parts",
    "on_device",
    "qkv_columns",
    "region_with",
    "ring_order",
    "roles",
    "shift",
    "span",
    "split_along",
    "split_into_groups",
    "union",
]
