"""`row`: every device holds all weights and computes its own token rows (docs/methods/row.md; reconstructed).

Variant `kv` gathers K and V once per layer and attends to each source's block as it arrives; `heads` turns token rows
into heads and back (all-to-all), for the next device first, in one or two `groups` of rows per device, of which one's
matmuls hide the other's exchanges; in `mlp` the head device attends for all, for others' rows first.
"""

from __future__ import annotations

from hepti_mqtt.lowering import ROWWISE_ROLES, Table, explicit, qkv_columns, ring_order, roles, split_into_groups
from hepti_mqtt.shares.stages import offload_rows
from hepti_mqtt.strategies.method import HEADS, ROWS, Division, Method


def table(division: Division) -> Table:
    """Return the layouts of a variant."""
    groups = split_into_groups(division.device_sets(ROWS), int(division.option("groups", "1")))
    own = [(i, rows) for group in groups for i, rows in enumerate(group)]
    lines = {roles.AFTER_MLP: explicit((i, {0: r}) for i, r in own)}
    if division.option("variant", "kv") == "kv":
        columns = [
            qkv_columns(division.graph, division.graph.first_with_role(roles.ATTENTION).full_region[1], w)
            for w in ("kv", "q")
        ]
        lines[roles.QKV] = explicit((i, {0: r, 1: c}) for i, r in own for c in columns)
        lines[roles.ATTENTION] = explicit((i, {0: r, 2: keys}) for i, r in own for _, keys in own)
    elif division.option("variant") == "heads":
        heads = division.device_sets(HEADS)
        qkv = [qkv_columns(division.graph, h) for h in heads]
        lines[roles.QKV] = explicit((i, {0: r, 1: c}) for i, r in own for c in ring_order(qkv, i))
        rings = [(i, h, r) for i, h in enumerate(heads) for group in groups for r in ring_order(group, i)]
        lines[roles.ATTENTION] = explicit((i, {0: r, 1: h}) for i, h, r in rings)
    elif division.option("variant") == "mlp":
        lines[roles.ATTENTION] = explicit(
            order := [(division.root, {0: r}) for r in ring_order(groups[0], division.root)]
        )
        lines[roles.QKV] = explicit(reversed(order))
    return Table(lines, dict.fromkeys(ROWWISE_ROLES, lines[roles.AFTER_MLP]) if len(groups) > 1 else {})


OPTIONS = ({"variant": "kv"}, {"variant": "heads"}, {"variant": "mlp"}, {"variant": "heads", "groups": "2"})
METHOD = Method(
    "row", "own token rows, all weights everywhere", table, (ROWS, HEADS), options=OPTIONS,
    is_distinct=lambda _, options: "groups" not in options, solve=offload_rows(ROWS.kind),
)  # fmt: skip
