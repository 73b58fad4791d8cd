"""`two_d`: weights in tiles of X x Y devices (Pope et al., 2022), activations by columns, norms from partial moments.

Device y X + x holds rows and columns of tile (x, y). X = 1 sends least for few devices; it is an option of the plan.
"""

from __future__ import annotations

from hepti_mqtt.lowering import Table, roles, split, tile
from hepti_mqtt.strategies.method import COLUMNS, HEADS, MLP, Division, Method, between, joined


def table(division: Division) -> Table:
    """Return the layouts of X x Y tiles."""
    n, nx = division.devices, int(division.option("x", "1"))
    ny = n // nx
    at = [(y * nx + x, x, y) for y in range(ny) for x in range(nx)]
    heads, mlp, turned = (division.parts(share) for share in (HEADS, MLP, COLUMNS))
    wide, heads_y, mlp_y = joined(turned, ny), joined(heads, nx), joined(mlp, nx)
    own = split([turned[x * ny + y] for _, x, y in at], 1)
    sums = dict.fromkeys((roles.ATTENTION_SUM, roles.MLP_SUM), own)
    return Table(
        {
            roles.ATTENTION: split(heads, 1),
            roles.ATTENTION_OUT: tile((i, {1: wide[x], 2: heads_y[y]}) for i, x, y in at),
            roles.MLP_UP: tile((i, {1: mlp_y[y], 2: wide[x]}) for i, x, y in at),
            roles.MLP_HIDDEN: split(mlp, 1),
            roles.MLP_DOWN: tile((i, {1: wide[x], 2: mlp_y[y]}) for i, x, y in at),
            roles.MOMENTS: split([turned[x * ny + y] for _, x, y in at], 2),
        },
        {**between(own), **sums},
    )


METHOD = Method(
    "two_d",
    "weights in X x Y tiles, activations by columns",
    table,
    shares=(HEADS, MLP, COLUMNS),
    options=({"x": "1"},),
    variants=lambda n: [{"x": str(x)} for x in range(1, n + 1) if n % x == 0],
    equal=True,
    offered=False,
)
