"""`modnn`: the rows of each feature map one by one to whoever has them done first, as MoDNN (Mao et al., 2017) cuts
layers in one dimension; fully connected layers by columns in the same way. Neighbours exchange the halo.
"""

from __future__ import annotations

from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import Final

from hepti_mqtt.lowering import roles
from hepti_mqtt.plan import Range
from hepti_mqtt.strategies import maps
from hepti_mqtt.strategies.method import Method, Weights

SPEEDS: Final = "speeds"


def greedy(total: int, speeds: Weights) -> tuple[Range, ...]:
    """Divide 0..total: each unit to the device that then ends first, the faster one of two that end together.

    Ranges stand in the devices' order. The last one to end does so as early as with any other division into units.
    """
    counts = [0] * len(speeds)
    queue = [(1.0 / speed, -speed, i) for i, speed in enumerate(speeds) if speed > 0]
    heapify(queue)
    for _ in range(total):
        _, slower, i = queue[0]
        counts[i] += 1
        heapreplace(queue, ((counts[i] + 1) / speeds[i], slower, i))
    return tuple(pairwise(accumulate(counts, initial=0)))


METHOD = Method(
    "modnn",
    "rows of each map greedily to whoever has them done first",
    maps.rows_by(SPEEDS, greedy),
    needs=(roles.MAP,),
    solve=maps.shares_by(SPEEDS, greedy),
)
