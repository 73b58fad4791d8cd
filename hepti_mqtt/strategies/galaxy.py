"""`galaxy`: attention and MLP by heads and columns, norms and residuals on token shares, uneven by capacity (Ye et al.,
2024). The matmuls beside an exchange are cut into the rows of each device, so that one part travels while the next is
computed; here the parts go to their owners directly instead of round a ring.
"""

from __future__ import annotations

from hepti_mqtt.lowering import Table, roles, split, tile
from hepti_mqtt.strategies.method import HEADS, MLP, ROWS, Division, Method, between, qkv_of


def table(division: Division) -> Table:
    """Return the layouts: `block` with every matmul in parts by rows."""
    rows, heads, mlp = division.parts(ROWS), division.parts(HEADS), division.parts(MLP)
    every = [(i, r) for i in range(division.devices) for r in rows]
    qkv = [qkv_of(division, own) for own in heads]
    return Table(
        {
            roles.QKV: tile((i, {0: r, 1: qkv[i]}) for i, r in every),
            roles.ATTENTION_OUT: tile((i, {0: r, 2: heads[i]}) for i, r in every),
            roles.MLP_HIDDEN: tile((i, {0: r, 1: mlp[i]}) for i, r in every),
            roles.MLP_DOWN: tile((i, {0: r, 2: mlp[i]}) for i, r in every),
        },
        between(split(rows, 0), division.head),
    )


METHOD = Method(
    "galaxy",
    "heads and MLP columns, norms on token shares, exchanges overlapped",
    table,
    shares=(ROWS, HEADS, MLP),
)
