"""`map_rows`: every device has rows of every feature map and gets the halo from its neighbours.

Dense layers are divided by columns. One share of the rows for all maps, by speed, which the planner balances on the
simulator. After the cut one device goes on alone.
"""

from __future__ import annotations

from typing import Final

from hepti_mqtt.lowering import roles
from hepti_mqtt.plan import apportion
from hepti_mqtt.strategies import maps
from hepti_mqtt.strategies.method import Method

ROWS: Final = "map_rows"


METHOD = Method(
    "map_rows",
    "own rows of every feature map, halo from the neighbours",
    maps.rows_by(ROWS, apportion),
    needs=(roles.MAP,),
    options=maps.CUTS,
    solve=maps.shares_by(ROWS, apportion),
    differs=maps.cuts,
)
