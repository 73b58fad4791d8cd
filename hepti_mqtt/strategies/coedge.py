"""`coedge`: rows of every feature map with the halo from the neighbours, shares by a linear programme over computation,
links and memory, as CoEdge (Zeng et al., 2021). Dense layers run on the head device. Variant `energy` takes the least
energy under a deadline, as CoEdge does, where devices' watts are known; without it a plan takes the least time.
"""

from __future__ import annotations

from typing import Final

from hepti_mqtt.lowering import Table, on_device, roles
from hepti_mqtt.plan import apportion
from hepti_mqtt.shares import Options
from hepti_mqtt.shares.maps import coedge_shares
from hepti_mqtt.strategies import maps
from hepti_mqtt.strategies.method import Division, Method

ROWS: Final = "coedge_rows"


def is_energy(options: Options) -> bool:
    """Return whether a variant takes the least energy."""
    return options.get("goal") == "energy"


def table(division: Division) -> Table:
    """Return the layouts: the same share of the rows of each map; dense layers on the head device."""
    return maps.map_table(division, maps.rows_by_weights(division, ROWS, apportion), on_device(division.root))


METHOD = Method(
    "coedge",
    "own rows of every feature map, shares by a linear programme",
    table,
    needs=(roles.MAP,),
    options=({}, {"goal": "energy"}),
    is_distinct=lambda _, options: not is_energy(options),
    chooses_devices=is_energy,
    solve=lambda graph, options, weights, lanes: ({ROWS: coedge_shares(graph, weights, lanes, is_energy(options))}, {}),
)
