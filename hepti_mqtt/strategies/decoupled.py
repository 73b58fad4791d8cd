"""`decoupled`: DeTransformer's placement (DATE 2024) of a decoupled transformer: sub-blocks on devices of their own.

Original layers are computed by everyone who goes on (plan i), or divided as `megatron` does (plan ii); behind the last
group by the head alone, or divided. Sub-blocks go to devices by time, what they send, and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

from hepti_mqtt.lowering import Graph, Piece, Rule, Table, box, roles
from hepti_mqtt.lowering.ops import Linear, Op
from hepti_mqtt.strategies import megatron
from hepti_mqtt.strategies.method import HEADS, MLP, PARTS, ROWS, Division, Lane, Method, Options, Shares, Weights

_SHARED = (HEADS, MLP)  # of original layers


def table(division: Division) -> Table:
    """Return the layouts: the end of every sub-block has a place, what leads to it follows."""
    owner = {part: i for i, (a, z) in enumerate(division.plan.ranges[PARTS.kind]) for part in range(a, z)}
    inner, end = division.option("original"), division.graph.layers() - 1
    outer = division.option("last", inner)

    def ends(op: Op) -> list[Piece] | None:
        return [Piece(owner[op.branch], box(op, {}))] if op.branch >= 0 else None

    def whole(rule: Rule) -> Rule:
        return lambda op: rule(op) if op.branch < 0 and (outer if op.layer == end else inner) == "megatron" else None

    shared = megatron.table(division).lines if "megatron" in (inner, outer) else {}
    return Table({roles.AFTER_MLP: ends, **{role: whole(rule) for role, rule in shared.items()}})


def solve(graph: Graph, options: Options, weights: Weights, lanes: Sequence[Lane]) -> Shares:
    """Return the sub-blocks of each device: one by one to who then ends first; original layers by speed."""
    del options
    count = PARTS.total(graph)
    ops = [op for op in graph.ops if op.branch == 0 and isinstance(op, Linear)]
    flops, held = sum(2.0 * prod(op.space) for op in ops), sum(4.0 * prod(op.space[1:]) for op in ops)
    sent = 4.0 * prod(graph.first(roles.SLICE).space) * (len(weights) - 1)
    owned = [0] * len(weights)

    def ends_s(i: int) -> tuple[bool, float]:
        most = owned[i] + 1
        seconds = flops / weights[i] + sent / lanes[i].bytes_per_s if weights[i] > 0 else inf
        return most * held > lanes[i].memory_bytes, most * seconds

    for _ in range(count):
        owned[min((i for i, w in enumerate(weights) if w > 0), key=ends_s)] += 1
    starts = [sum(owned[:i]) for i in range(len(owned))]
    parts = tuple((a, a + n) for a, n in zip(starts, owned, strict=True))
    return {ROWS.kind: tuple(weights)}, {PARTS.kind: parts, **{s.kind: s.ranges(graph, weights) for s in _SHARED}}


METHOD = Method(
    "decoupled",
    "DeTransformer: independent sub-blocks on devices of their own",
    table,
    shares=(PARTS, ROWS, *_SHARED),
    needs=(roles.SLICE, roles.JOIN),
    options=(
        {"original": "everywhere"},
        {"original": "megatron"},
        {"original": "everywhere", "last": "megatron"},
        {"original": "megatron", "last": "everywhere"},
    ),
    solve=solve,
    offered=False,
)
