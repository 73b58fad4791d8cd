"""Kinds of shares and their units, device resources for solvers, and simple solvers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from math import inf, prod
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.core.plan import Range, apportion
from hepti_mqtt.core.profiles import Power
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.ops import Linear, Op

Options = Mapping[str, str]  # of a method's variant
Speeds = Sequence[float]  # one per device


@dataclass(frozen=True)
class Share:
    """A kind of share: each device's part of one dimension of the tensors of a role."""

    kind: str
    role: str
    dim: int
    #: The dimension depends on the request, so plans keep numbers from which ranges follow; else they keep ranges.
    by_length: bool = False
    unit: int = 1  #: least unit of ranges, if the op itself has a unit above 1
    in_proportion: bool = False  #: layers with another extent than the first are divided in proportion

    def unit_count(self, graph: Graph) -> int:
        """Return the number of indices to share."""
        return graph.first_with_role(self.role).space[self.dim]

    def cap_devices(self, graph: Graph, speeds: Speeds) -> tuple[float, ...]:
        """Return the speeds, with 0 in place of the smallest if there are more devices than indices.

        graph: of the longest request. Otherwise the set of devices with a part would depend on a request's length.
        """
        kept = sorted(range(len(speeds)), key=lambda i: -speeds[i])[: self.unit_count(graph)]
        return tuple(speed if i in kept else 0.0 for i, speed in enumerate(speeds))

    def ranges(self, graph: Graph, speeds: Speeds) -> tuple[Range, ...]:
        """Return one range of indices per device, in whole units; empty ranges if no tensor has the role."""
        if self.role not in graph.roles:
            return ((0, 0),) * len(speeds)
        total = self.unit_count(graph)
        op = graph.first_with_role(self.role)
        unit = op.share_unit(self.dim)
        unit = min(max(unit, self.unit) if unit > 1 else unit, total)
        if op.range_cost(self.dim, 0, unit) * total > op.range_cost(self.dim, 0, total) * unit:
            # A device without speed is slow enough to get nothing.
            slowness = np.array([1 / max(speed, 1e-30) for speed in speeds])[:, None, None]
            parts = partition_in_order(_costs(op, self.dim, unit, total) * slowness)
        else:
            parts = apportion(-(-total // unit), speeds)
        return tuple((min(a * unit, total), min(z * unit, total)) for a, z in parts)


@dataclass(frozen=True)
class Branches(Share):
    """Branches of a layer."""

    def unit_count(self, graph: Graph) -> int:
        """Return the number of branches."""
        return max(op.branch for op in graph.ops) + 1

    def ranges(self, graph: Graph, speeds: Speeds) -> tuple[Range, ...]:
        """Return consecutive branches per device."""
        return apportion(self.unit_count(graph), speeds)


class DeviceResources(NamedTuple):
    """A device's resources besides its speed, for methods that solve for shares."""

    bytes_per_s: float = inf  #: of its link, one way
    latency_s: float = 0.0
    memory_bytes: float = inf  #: for weights and maps
    #: With one row, where reading weights dominates; None: as fast as with many rows.
    row_flops_per_s: float | None = None
    power: Power | None = None  #: None if unknown
    deadline_s: float = inf  #: time limit of an answer at the site


# The divisions in a plan: shares that depend on the request, ranges of the others; one per device, by kind.
Shares = tuple[dict[str, tuple[float, ...]], dict[str, tuple[Range, ...]]]


# ----------------------------------------------------------------------------------------------------------------------
# Consecutive ranges for devices in order, with the least time of the slowest: by dynamic programming.


Array = NDArray[np.float64]


def partition_in_order(costs: Array) -> tuple[Range, ...]:
    """Return a range of points for each device that minimises the largest cost; exact, in whole points.

    costs [N, P, P]: of start..stop on device i, inf if impossible. Of equal solutions the one with least for later
    devices.
    """
    devices, points, _ = costs.shape
    best = np.full(points, np.inf)
    best[0] = 0.0
    chosen = np.zeros((devices, points), int)
    for i in range(devices):
        through = np.maximum(best[:, None], costs[i])
        chosen[i] = points - 1 - np.argmin(through[::-1], axis=0)
        best = through[chosen[i], np.arange(points)]
    at, out = points - 1, []
    for i in reversed(range(devices)):
        start = int(chosen[i, at])
        out.append((start, at))
        at = start
    return tuple(reversed(out))


@lru_cache(maxsize=64)
def _costs(op: Op, dim: int, unit: int, total: int) -> Array:
    """Return the cost of each range of a dimension, [P, P] by start and stop in units; inf if stop precedes start."""
    ends = [min(end, total) for end in range(0, total + unit, unit)]
    return np.array([[op.range_cost(dim, a, z) if a <= z else np.inf for z in ends] for a in ends])


# ----------------------------------------------------------------------------------------------------------------------
# Greedy assignment: unit by unit to the device that finishes first.


# Placement of the original layers of a decoupled transformer, and of the last group's if it differs.
PLACEMENTS: Final[tuple[Options, ...]] = (
    {"original": "everywhere"},
    {"original": "megatron"},
    {"original": "everywhere", "last": "megatron"},
    {"original": "megatron", "last": "everywhere"},
)


def assign_greedily(total: int, speeds: Speeds) -> tuple[Range, ...]:
    """Divide 0..total: each unit goes to the device that then ends first; of two equal ones to the faster.

    Ranges are in the devices' order. The last device to end ends as early as in any division into units.
    """
    counts = [0] * len(speeds)
    queue = [(1.0 / speed, -speed, i) for i, speed in enumerate(speeds) if speed > 0]
    heapify(queue)
    for _ in range(total):
        _, slower, i = queue[0]
        counts[i] += 1
        heapreplace(queue, ((counts[i] + 1) / speeds[i], slower, i))
    return tuple(pairwise(accumulate(counts, initial=0)))


def assign_sub_blocks(
    graph: Graph, count: int, speeds: Speeds, resources: Sequence[DeviceResources]
) -> tuple[Range, ...]:
    """Return the branches of each device: each goes to the device that then ends first and has memory for it.

    Sending counts as time too.
    """
    ops = [op for op in graph.ops if op.branch == 0 and isinstance(op, Linear)]
    flops, held = sum(2.0 * prod(op.space) for op in ops), sum(4.0 * prod(op.space[1:]) for op in ops)
    sent = 4.0 * prod(graph.first_with_role(roles.SLICE).space) * (len(speeds) - 1)
    owned = [0] * len(speeds)

    def ends_s(i: int) -> tuple[bool, float]:
        most = owned[i] + 1
        seconds = flops / speeds[i] + sent / resources[i].bytes_per_s if speeds[i] > 0 else inf
        return most * held > resources[i].memory_bytes, most * seconds

    for _ in range(count):
        owned[min((i for i, w in enumerate(speeds) if w > 0), key=ends_s)] += 1
    return tuple(pairwise(accumulate(owned, initial=0)))


def balanced_groups(count: int, speeds: Speeds) -> list[list[int]]:
    """Return `count` groups of devices, as even as possible, assigning the fastest device first."""
    groups: list[list[int]] = [[] for _ in range(count)]
    for device in sorted(range(len(speeds)), key=lambda i: (-speeds[i], i)):
        least = min(groups, key=lambda group: (sum(speeds[i] for i in group), len(group)))
        least.append(device)
    return [sorted(group) for group in groups]
