"""`map_rows`: every device has rows of every feature map and gets the halo from its neighbours.

Dense layers are divided by columns. Maps of one size have one division into rows, by speed, which the planner balances
on the simulator. After the cut one device goes on alone. Variants `ahead` compute first what neighbours wait for.
"""

from __future__ import annotations

from typing import Final

from hepti_mqtt.lowering import Table, roles
from hepti_mqtt.shares.maps import ahead, ranges_by_size, rows_kind
from hepti_mqtt.strategies import maps
from hepti_mqtt.strategies.method import Division, Method

HALO: Final = "halo"
AHEAD: Final = "ahead"


def table(division: Division) -> Table:
    """Return the layouts: rows of each map, in one piece for each device, or with what others wait for by itself."""
    whole = maps.table_of(division, maps.in_ranges(division, 0, rows_kind), maps.dense_columns(division))
    return ahead(division.graph, whole) if division.option(HALO) == AHEAD else whole


METHOD = Method(
    "map_rows",
    "own rows of every feature map, halo from the neighbours",
    table,
    needs=(roles.MAP,),
    in_line=True,
    options=(*maps.CUTS, *({**cut, HALO: AHEAD} for cut in maps.CUTS)),
    solve=ranges_by_size,
    differs=maps.cuts,
    few=True,
)
