"""`map_rows`: every device has rows of every feature map and gets the halo from its neighbours.

Dense layers are divided by columns. One share of the rows for all maps, by speed, which the planner balances on the
simulator. After the cut one device goes on alone. Variants `ahead` compute first what neighbours wait for.
"""

from __future__ import annotations

from typing import Final

from hepti_mqtt.lowering import Table, roles
from hepti_mqtt.plan import apportion
from hepti_mqtt.strategies import maps
from hepti_mqtt.strategies.borders import ahead
from hepti_mqtt.strategies.method import Division, Method, Options

ROWS: Final = "map_rows"
HALO: Final = "halo"
AHEAD: Final = "ahead"
VARIANTS: Final[tuple[Options, ...]] = (*maps.CUTS, *({**cut, HALO: AHEAD} for cut in maps.CUTS))


def table(division: Division) -> Table:
    """Return the layouts: rows of each map, in one piece for each device, or with what others wait for by itself."""
    whole = maps.rows_by(ROWS, apportion)(division)
    if division.option(HALO) != AHEAD:
        return whole
    rule = ahead(division.graph, {**whole.lines, **whole.where_present})
    means = maps.means_of(division.graph, whole.lines[roles.MAP])
    return Table({roles.MAP: rule}, {**whole.where_present, roles.FLAT: means}, uniform=False)


METHOD = Method(
    "map_rows",
    "own rows of every feature map, halo from the neighbours",
    table,
    needs=(roles.MAP,),
    options=VARIANTS,
    solve=maps.shares_by(ROWS, apportion),
    differs=maps.cuts,
    few=True,
)
