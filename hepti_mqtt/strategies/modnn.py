"""`modnn`: the rows of each feature map one by one to whoever has them done first, as MoDNN (Mao et al., 2017) cuts
layers in one dimension; fully connected layers by columns in the same way. Neighbours exchange the halo.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import Final

from hepti_mqtt.lowering import Graph, Piece, Table, roles
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.plan import Range
from hepti_mqtt.strategies import maps
from hepti_mqtt.strategies.method import Division, Lane, Method, Options, Shares, Weights

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


def table(division: Division) -> Table:
    """Return the layouts: rows of each map and columns of each dense layer."""
    speeds = division.plan.weights[SPEEDS]

    def rows(op: Op) -> list[Piece] | None:
        return maps.rows_of(greedy(op.space[0], speeds))(op)

    return maps.table_of(division, rows, maps.dense_columns(division))


def solve(graph: Graph, options: Options, weights: Weights, lanes: Sequence[Lane]) -> Shares:
    """Return the speeds, from which the rows of each map follow, and the columns of the dense layers."""
    del options, lanes
    return {SPEEDS: tuple(weights)}, maps.dense_ranges(graph, lambda n: greedy(n, weights))


METHOD = Method(
    "modnn",
    "rows of each map greedily to whoever has them done first",
    table,
    needs=(roles.MAP,),
    solve=solve,
)
