"""`decoupled`: DeTransformer's placement (DATE 2024) of a decoupled transformer: sub-blocks on devices of their own.

Original layers are computed by everyone who goes on (plan i), or divided as `megatron` does (plan ii).
"""

from __future__ import annotations

from hepti_mqtt.lowering import Piece, Rule, Table, box, roles
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.strategies import megatron
from hepti_mqtt.strategies.method import HEADS, MLP, PARTS, ROWS, Division, Method


def table(division: Division) -> Table:
    """Return the layouts: the end of every sub-block has a place, what leads to it follows."""
    owner = {part: i for i, (a, z) in enumerate(division.plan.ranges[PARTS.kind]) for part in range(a, z)}

    def ends(op: Op) -> list[Piece] | None:
        return [Piece(owner[op.branch], box(op, {}))] if op.branch >= 0 else None

    def whole(rule: Rule) -> Rule:
        return lambda op: rule(op) if op.branch < 0 else None

    shared = megatron.table(division).lines if division.option("original") == "megatron" else {}
    return Table({roles.AFTER_MLP: ends, **{role: whole(rule) for role, rule in shared.items()}})


METHOD = Method(
    "decoupled",
    "DeTransformer: independent sub-blocks on devices of their own",
    table,
    shares=(PARTS, ROWS, HEADS, MLP),
    needs=(roles.SLICE, roles.JOIN),
    options=({"original": "everywhere"}, {"original": "megatron"}),
    offered=False,
)
