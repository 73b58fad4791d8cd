"""`map_rows`: every device has rows of every feature map and gets the halo from its neighbours.

Dense layers are divided by columns. Maps of one size have one division into rows, by speed, which the planner balances
on the simulator. After the cut one device goes on alone. Variants `ahead` compute first what neighbours wait for.
"""

from __future__ import annotations

from typing import Final

from hepti_mqtt.lowering import Table, roles
from hepti_mqtt.shares.maps import borders_first, ranges_by_size, rows_kind
from hepti_mqtt.strategies import maps
from hepti_mqtt.strategies.method import Division, Method

HALO: Final = "halo"
AHEAD: Final = "ahead"


def table(division: Division) -> Table:
    """Return the layouts: rows of each map, in one piece for each device, or with what others wait for by itself."""
    whole = maps.map_table(division, maps.in_ranges(division, 0, rows_kind), maps.dense_columns(division))
    return borders_first(division.graph, whole) if division.option(HALO) == AHEAD else whole


METHOD = Method(
    "map_rows",
    "own rows of every feature map, halo from the neighbours",
    table,
    needs=(roles.MAP,),
    order_matters=True,
    options=(*maps.CUTS, *({**cut, HALO: AHEAD} for cut in maps.CUTS)),
    solve=ranges_by_size,
    is_distinct=maps.divides_behind_cut,
    coarse=True,
)
