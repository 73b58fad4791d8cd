"""`two_d`: weights in tiles of X x Y devices (Pope et al., 2022), activations by columns, norms from partial moments.
Device y X + x holds tile (x, y). X, an option of the plan, is 1 by default: that sends least for few devices.
"""

from __future__ import annotations

from hepti_mqtt.lowering import Table, between_blocks, explicit, merge_parts, roles, split_along
from hepti_mqtt.strategies.method import COLUMNS, HEADS, MLP, Division, Method


def table(division: Division) -> Table:
    """Return the layouts of X x Y tiles."""
    nx = int(division.option("x", "1"))
    ny = division.devices // nx
    at = [(y * nx + x, x, y) for y in range(ny) for x in range(nx)]
    heads, mlp, turned = (division.device_sets(share) for share in (HEADS, MLP, COLUMNS))
    wide, heads_y, mlp_y = merge_parts(turned, ny), merge_parts(heads, nx), merge_parts(mlp, nx)
    columns = [turned[x * ny + y] for _, x, y in at]
    own = split_along(columns, 1)
    return Table(
        {
            roles.ATTENTION: split_along(heads, 1),
            roles.ATTENTION_OUT: explicit((i, {1: wide[x], 2: heads_y[y]}) for i, x, y in at),
            roles.MLP_UP: explicit((i, {1: mlp_y[y], 2: wide[x]}) for i, x, y in at),
            roles.MLP_HIDDEN: split_along(mlp, 1),
            roles.MLP_DOWN: explicit((i, {1: wide[x], 2: mlp_y[y]}) for i, x, y in at),
            roles.MOMENTS: split_along(columns, 2),
        },
        {**between_blocks(own), roles.ATTENTION_SUM: own, roles.MLP_SUM: own},
    )


METHOD = Method(
    "two_d", "weights in X x Y tiles, activations by columns", table,
    shares=(HEADS, MLP, COLUMNS),
    options=({"x": "1"},),
    variants=lambda n: [{"x": str(x)} for x in range(1, n + 1) if n % x == 0],
    equal_shares=True,
    automatic=False,
)  # fmt: skip
