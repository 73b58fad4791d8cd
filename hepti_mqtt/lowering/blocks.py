"""Layouts of a transformer's blocks: what lies between them, columns of queries, keys and values, parts in a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.layouts import Rule, on
from hepti_mqtt.lowering.regions import Set, span, union

# What is computed row by row behind attention: matmuls with what is fused into them, and norms.
BY_ROW: Final = (roles.ATTENTION_SUM, roles.AFTER_ATTENTION, roles.MLP_HIDDEN, roles.MLP_SUM)
BETWEEN: Final = (roles.BEFORE_ATTENTION, roles.AFTER_ATTENTION, roles.BEFORE_MLP, roles.AFTER_MLP)


def between(rule: Rule, head: int | None = None) -> dict[str, Rule]:
    """Return lines that place what lies between the blocks: norms and residuals.

    head: computes the first norm, of the embedding, since it has all of that and sends it on anyway.
    """
    lines = dict.fromkeys(BETWEEN, rule)
    if head is not None:
        first = on(head)
        lines[roles.BEFORE_ATTENTION] = lambda op: (rule if op.layer else first)(op)
    return lines


def qkv_of(graph: Graph, heads: Set, which: str = "qkv") -> Set:
    """Return the columns of the joint query, key and value matrix that belong to heads (columns of attention)."""
    attention = graph.first(roles.ATTENTION)
    first = dict(zip("qkv", attention.columns, strict=True))  # type: ignore[attr-defined]
    return union(*(tuple((a + first[w], z + first[w]) for a, z in heads) for w in which))


def after(parts: Sequence[Set], device: int) -> list[Set]:
    """Return the parts in a ring: that of the device after this one first, its own last."""
    return [*parts[device + 1 :], *parts[: device + 1]]


def joined(parts: Sequence[Set], by: int) -> list[Set]:
    """Return the unions of `by` parts each."""
    return [union(*parts[i : i + by]) for i in range(0, len(parts), by)]


def in_groups(parts: Sequence[Set], count: int) -> list[list[Set]]:
    """Return each part, one interval or nothing, cut into `count` of about equal size: the first of each, and so on."""
    ends = [part[0] if part else (0, 0) for part in parts]
    return [[span(a + (z - a) * g // count, a + (z - a) * (g + 1) // count) for a, z in ends] for g in range(count)]
