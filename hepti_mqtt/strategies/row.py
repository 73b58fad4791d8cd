"""`row`: every device holds all weights and computes its own token rows (docs/methods/row.md; reconstructed).

Variant `kv` gathers K and V once per layer and attends to each source's block as it arrives; `heads` turns token rows
into heads and back (all-to-all), for the next device first, in one or two `groups` of rows per device, of which one's
matmuls hide the other's exchanges; in `mlp` the head device attends for all, for others' rows first.
"""

from __future__ import annotations

from hepti_mqtt.lowering import BY_ROW, Table, after, in_groups, qkv_of, roles, tile
from hepti_mqtt.shares.stages import rows_behind
from hepti_mqtt.strategies.method import HEADS, ROWS, Division, Method


def table(division: Division) -> Table:
    """Return the layouts of a variant."""
    groups = in_groups(division.parts(ROWS), int(division.option("groups", "1")))
    own = [(i, rows) for group in groups for i, rows in enumerate(group)]
    lines = {roles.AFTER_MLP: tile((i, {0: r}) for i, r in own)}
    if division.option("variant", "kv") == "kv":
        columns = [qkv_of(division.graph, division.graph.first(roles.ATTENTION).full[1], w) for w in ("kv", "q")]
        lines[roles.QKV] = tile((i, {0: r, 1: c}) for i, r in own for c in columns)
        lines[roles.ATTENTION] = tile((i, {0: r, 2: keys}) for i, r in own for _, keys in own)
    elif division.option("variant") == "heads":
        heads = division.parts(HEADS)
        qkv = [qkv_of(division.graph, h) for h in heads]
        lines[roles.QKV] = tile((i, {0: r, 1: c}) for i, r in own for c in after(qkv, i))
        rings = [(i, h, r) for i, h in enumerate(heads) for group in groups for r in after(group, i)]
        lines[roles.ATTENTION] = tile((i, {0: r, 1: h}) for i, h, r in rings)
    elif division.option("variant") == "mlp":
        lines[roles.ATTENTION] = tile(order := [(division.head, {0: r}) for r in after(groups[0], division.head)])
        lines[roles.QKV] = tile(reversed(order))
    return Table(lines, dict.fromkeys(BY_ROW, lines[roles.AFTER_MLP]) if len(groups) > 1 else {})


OPTIONS = ({"variant": "kv"}, {"variant": "heads"}, {"variant": "mlp"}, {"variant": "heads", "groups": "2"})
METHOD = Method(
    "row", "own token rows, all weights everywhere", table, (ROWS, HEADS), options=OPTIONS,
    differs=lambda _, options: "groups" not in options, solve=rows_behind(ROWS.kind),
)  # fmt: skip
