"""`decoupled`: DeTransformer's placement (DATE 2024) of a decoupled transformer: sub-blocks on devices of their own.

Original layers are computed by everyone who goes on (plan i), or divided as `megatron` does (plan ii); behind the last
group by the head alone, or divided. Sub-blocks go to devices by time, what they send, and memory.
"""

from __future__ import annotations

from hepti_mqtt.lowering import Piece, Rule, Table, region_with, roles
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.shares.share import PLACEMENTS, assign_sub_blocks
from hepti_mqtt.strategies import megatron
from hepti_mqtt.strategies.method import BRANCHES, HEADS, MLP, ROWS, Division, Method


def table(division: Division) -> Table:
    """Return the layouts: the end of every sub-block has a place, what leads to it follows."""
    owners = division.owners(BRANCHES)
    inner, end = division.option("original"), division.graph.layer_count() - 1
    outer = division.option("last", inner)

    def ends(op: Op) -> list[Piece] | None:
        return [Piece(owners[op.branch], region_with(op, {}))] if op.branch >= 0 else None

    def whole(rule: Rule) -> Rule:
        return lambda op: rule(op) if op.branch < 0 and (outer if op.layer == end else inner) == "megatron" else None

    shared = megatron.table(division).rules if "megatron" in (inner, outer) else {}
    return Table({roles.AFTER_MLP: ends, **{role: whole(rule) for role, rule in shared.items()}})


METHOD = Method(
    "decoupled",
    "DeTransformer: independent sub-blocks on devices of their own",
    table,
    shares=(BRANCHES, ROWS, HEADS, MLP),
    needs=(roles.SLICE, roles.JOIN),
    options=PLACEMENTS,
    solve=lambda graph, _, weights, lanes: (
        {},
        {BRANCHES.kind: assign_sub_blocks(graph, BRANCHES.unit_count(graph), weights, lanes)},
    ),
)
