"""Units given one by one to whoever is done with them first."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from math import inf, prod
from typing import Final

from hepti_mqtt.lowering import Graph, roles
from hepti_mqtt.lowering.ops import Linear
from hepti_mqtt.plan import Range
from hepti_mqtt.shares.share import Lane, Options, Weights

# How the original layers of a decoupled transformer are computed, and the last group's where that differs.
PLACEMENTS: Final[tuple[Options, ...]] = (
    {"original": "everywhere"},
    {"original": "megatron"},
    {"original": "everywhere", "last": "megatron"},
    {"original": "megatron", "last": "everywhere"},
)


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


def sub_blocks(graph: Graph, count: int, weights: Weights, lanes: Sequence[Lane]) -> tuple[Range, ...]:
    """Return the branches of each device, of so many: one by one to who then ends first, if it has room for it.

    What it sends counts too.
    """
    ops = [op for op in graph.ops if op.branch == 0 and isinstance(op, Linear)]
    flops, held = sum(2.0 * prod(op.space) for op in ops), sum(4.0 * prod(op.space[1:]) for op in ops)
    sent = 4.0 * prod(graph.first(roles.SLICE).space) * (len(weights) - 1)
    owned = [0] * len(weights)

    def ends_s(i: int) -> tuple[bool, float]:
        most = owned[i] + 1
        seconds = flops / weights[i] + sent / lanes[i].bytes_per_s if weights[i] > 0 else inf
        return most * held > lanes[i].memory_bytes, most * seconds

    for _ in range(count):
        owned[min((i for i, w in enumerate(weights) if w > 0), key=ends_s)] += 1
    return tuple(pairwise(accumulate(owned, initial=0)))


def dealt(count: int, weights: Weights) -> list[list[int]]:
    """Return so many groups of devices: as even as can be, the fastest device dealt out first."""
    groups: list[list[int]] = [[] for _ in range(count)]
    for device in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        least = min(groups, key=lambda group: (sum(weights[i] for i in group), len(group)))
        least.append(device)
    return [sorted(group) for group in groups]
