"""`galaxy`: heads and MLP columns, norms and residuals on token shares, uneven by capacity (Ye et al., 2024). A matmul
beside an exchange is cut into rows: one part travels while the next is computed, direct or, as there, in a ring.
"""

from __future__ import annotations

from hepti_mqtt.lowering import IndexSet, Rule, Table, between_blocks, explicit, qkv_columns, roles, split_along
from hepti_mqtt.lowering.layouts import ring_all_gather, ring_reduce_scatter
from hepti_mqtt.strategies.method import HEADS, MLP, ROWS, Division, Method


def table(division: Division) -> Table:
    """Return the layouts: `block` with every matmul in parts by rows."""
    rows, heads, mlp = division.device_sets(ROWS), division.device_sets(HEADS), division.device_sets(MLP)
    n, qkv = division.devices, [qkv_columns(division.graph, own) for own in heads]
    ring = division.option("exchange", "direct") == "ring"
    # Which device's rows each computes one after the other: in a ring as they arrive, its own first.
    order = [(i, (i - t) % n if ring else t) for i in range(n) for t in range(n)]

    def by_rows(parts: list[IndexSet], dim: int) -> Rule:
        return explicit((i, {0: rows[c], dim: parts[i]}) for i, c in order)

    return Table(
        {
            roles.QKV: by_rows(qkv, 1),
            roles.ATTENTION_OUT: ring_reduce_scatter(heads, rows) if ring else by_rows(heads, 2),
            roles.MLP_HIDDEN: by_rows(mlp, 1),
            roles.MLP_DOWN: ring_reduce_scatter(mlp, rows) if ring else by_rows(mlp, 2),
        },
        between_blocks(ring_all_gather(rows) if ring else split_along(rows, 0), division.root),
    )


METHOD = Method(
    "galaxy",
    "heads and MLP columns, norms on token shares, exchanges overlapped",
    table,
    shares=(ROWS, HEADS, MLP),
    options=({"exchange": "direct"}, {"exchange": "ring"}),
)
