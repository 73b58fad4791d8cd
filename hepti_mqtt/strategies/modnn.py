"""`modnn`: the rows of each feature map one by one to whoever has them done first, as MoDNN (Mao et al., 2017) cuts
layers in one dimension; fully connected layers by columns in the same way. Neighbours exchange the halo.
"""

from __future__ import annotations

from typing import Final

from hepti_mqtt.lowering import roles
from hepti_mqtt.shares.maps import solve_by_speed
from hepti_mqtt.shares.share import assign_greedily
from hepti_mqtt.strategies import maps
from hepti_mqtt.strategies.method import Method

SPEEDS: Final = "speeds"

METHOD = Method(
    "modnn",
    "rows of each map greedily to whoever has them done first",
    maps.rows_by(SPEEDS, assign_greedily),
    needs=(roles.MAP,),
    order_matters=True,
    solve=solve_by_speed(SPEEDS, assign_greedily),
)
