"""`row`: every device holds all weights and computes its own token rows (docs/methods/row.md; reconstructed).

Variant `kv` gathers K and V once per layer and attends to each source's block as it arrives; `heads` turns token rows
into heads and back (all-to-all); in `mlp` the head device attends for all, for others' rows first. Only rows of
sequences that two devices share are exchanged. In `heads` every device computes first what the next one waits for, its
own part last: nobody waits for the same sender, and what was sent first travels while the rest is computed.
"""

from __future__ import annotations

from hepti_mqtt.lowering import Table, after, qkv_of, roles, split, tile
from hepti_mqtt.shares.offload import rows_behind
from hepti_mqtt.strategies.method import HEADS, ROWS, Division, Method


def table(division: Division) -> Table:
    """Return the layouts of a variant."""
    rows = division.parts(ROWS)
    lines = {roles.AFTER_MLP: split(rows, 0)}
    if division.option("variant", "kv") == "kv":
        every = tuple((0, n) for n in division.graph.first(roles.ATTENTION).space[1:2])
        columns = [qkv_of(division.graph, every, which) for which in ("kv", "q")]
        lines[roles.QKV] = tile((i, {0: r, 1: c}) for i, r in enumerate(rows) for c in columns)
        lines[roles.ATTENTION] = tile((i, {0: r, 2: keys}) for i, r in enumerate(rows) for keys in rows)
    elif division.option("variant") == "heads":
        heads = division.parts(HEADS)
        own = [qkv_of(division.graph, h) for h in heads]
        lines[roles.QKV] = tile((i, {0: r, 1: c}) for i, r in enumerate(rows) for c in after(own, i))
        lines[roles.ATTENTION] = tile((i, {0: r, 1: h}) for i, h in enumerate(heads) for r in after(rows, i))
    elif division.option("variant") == "mlp":
        lines[roles.QKV] = tile((division.head, {0: r}) for r in reversed(after(rows, division.head)))
        lines[roles.ATTENTION] = tile((division.head, {0: r}) for r in after(rows, division.head))
    return Table(lines)


OPTIONS = ({"variant": "kv"}, {"variant": "heads"}, {"variant": "mlp"})
METHOD = Method(
    "row", "own token rows, all weights everywhere", table, (ROWS, HEADS), options=OPTIONS, solve=rows_behind(ROWS.kind)
)
