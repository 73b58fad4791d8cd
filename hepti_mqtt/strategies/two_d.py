"""`two_d`: weights in tiles of X x Y devices (Pope et al., 2022), activations by columns, norms from partial moments.
Device y X + x holds tile (x, y). X, an option of the plan, is 1 by default: that sends least for few devices.
"""

from __future__ import annotations

from hepti_mqtt.lowering import Table, between, joined, roles, split, tile
from hepti_mqtt.strategies.method import COLUMNS, HEADS, MLP, Division, Method


def table(division: Division) -> Table:
    """Return the layouts of X x Y tiles."""
    nx = int(division.option("x", "1"))
    ny = division.devices // nx
    at = [(y * nx + x, x, y) for y in range(ny) for x in range(nx)]
    heads, mlp, turned = (division.parts(share) for share in (HEADS, MLP, COLUMNS))
    wide, heads_y, mlp_y = joined(turned, ny), joined(heads, nx), joined(mlp, nx)
    columns = [turned[x * ny + y] for _, x, y in at]
    own = split(columns, 1)
    return Table(
        {
            roles.ATTENTION: split(heads, 1),
            roles.ATTENTION_OUT: tile((i, {1: wide[x], 2: heads_y[y]}) for i, x, y in at),
            roles.MLP_UP: tile((i, {1: mlp_y[y], 2: wide[x]}) for i, x, y in at),
            roles.MLP_HIDDEN: split(mlp, 1),
            roles.MLP_DOWN: tile((i, {1: wide[x], 2: mlp_y[y]}) for i, x, y in at),
            roles.MOMENTS: split(columns, 2),
        },
        {**between(own), roles.ATTENTION_SUM: own, roles.MLP_SUM: own},
    )


METHOD = Method(
    "two_d", "weights in X x Y tiles, activations by columns", table,
    shares=(HEADS, MLP, COLUMNS),
    options=({"x": "1"},),
    variants=lambda n: [{"x": str(x)} for x in range(1, n + 1) if n % x == 0],
    equal=True,
    offered=False,
)  # fmt: skip
