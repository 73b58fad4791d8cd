"""`grid`: devices in Nt x Ns; heads and MLP columns over Nt, token rows over Ns (ours, between `row` and `block`).

Device s Nt + t holds heads and columns t and computes rows s, of which it has its own part between the blocks.
"""

from __future__ import annotations

from hepti_mqtt.lowering import Table, between_blocks, explicit, merge_parts, qkv_columns, roles, split_along
from hepti_mqtt.strategies.method import HEADS, MLP, ROWS, Division, Method


def table(division: Division) -> Table:
    """Return the layouts of Nt x Ns devices."""
    n, nt = division.devices, int(division.option("nt", "1"))
    own = division.device_sets(ROWS)
    rows, heads, mlp = merge_parts(own, nt), division.equal_sets(HEADS, nt), division.equal_sets(MLP, nt)
    at = [(s * nt + t, s, t) for s in range(n // nt) for t in range(nt)]
    columns = {t: [qkv_columns(division.graph, heads[t], which) for which in ("kv", "q")] for t in range(nt)}
    return Table(
        {
            roles.QKV: explicit((i, {0: rows[s], 1: c}) for i, s, t in at for c in columns[t]),
            roles.ATTENTION: explicit((i, {0: rows[s], 1: heads[t], 2: keys}) for i, s, t in at for keys in rows),
            roles.ATTENTION_OUT: explicit((i, {0: rows[s], 2: heads[t]}) for i, s, t in at),
            roles.MLP_DOWN: explicit((i, {0: rows[s], 2: mlp[t]}) for i, s, t in at),
        },
        between_blocks(split_along(own, 0)),
    )


METHOD = Method(
    "grid",
    "heads and columns over some devices, token rows over the others",
    table,
    shares=(ROWS,),
    options=({"nt": "1"},),
    variants=lambda n: [{"nt": str(t)} for t in range(1, n + 1) if n % t == 0],
    automatic=False,
)
