"""Shares: what part of a model each device has, in what it is counted, and what solvers know of a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from hepti_mqtt.cluster import Power
from hepti_mqtt.lowering import Graph
from hepti_mqtt.plan import Range, apportion

Options = Mapping[str, str]  # of a method's variant
Weights = Sequence[float]  # one per device


@dataclass(frozen=True)
class Share:
    """A kind of share: what part of one dimension of the tensors of a role each device has.

    by_length: the dimension depends on the request, so plans keep weights, from which ranges follow by one function;
    else they keep ranges, in whole units of that dimension.
    """

    kind: str
    role: str
    dim: int
    by_length: bool = False

    def total(self, graph: Graph) -> int:
        """Return how many indices there are to share."""
        return graph.first(self.role).space[self.dim]

    def most(self, graph: Graph, weights: Weights) -> tuple[float, ...]:
        """Return the weights, the smallest ones as 0 where more devices have one than there are indices.

        graph: of the longest request. Else the devices that have a part of it would depend on its length.
        """
        kept = sorted(range(len(weights)), key=lambda i: -weights[i])[: self.total(graph)]
        return tuple(weight if i in kept else 0.0 for i, weight in enumerate(weights))

    def ranges(self, graph: Graph, weights: Weights) -> tuple[Range, ...]:
        """Return one range of indices per device, in whole units; empty ones where a model has nothing of the role."""
        if self.role not in graph.roles:
            return ((0, 0),) * len(weights)
        total = self.total(graph)
        unit = min(graph.first(self.role).unit(self.dim), total)
        parts = apportion(-(-total // unit), weights)
        return tuple((min(a * unit, total), min(z * unit, total)) for a, z in parts)


@dataclass(frozen=True)
class Branches(Share):
    """Branches of a layer."""

    def total(self, graph: Graph) -> int:
        """Return how many branches there are."""
        return max(op.branch for op in graph.ops) + 1

    def ranges(self, graph: Graph, weights: Weights) -> tuple[Range, ...]:
        """Return consecutive branches per device."""
        return apportion(self.total(graph), weights)


class Lane(NamedTuple):
    """What a method that solves for shares knows of a device beside its speed.

    bytes_per_s, latency_s: of its link, one way. memory_bytes: what it has for weights and maps. row_flops_per_s: with
    one row, for which a device does little but read weights; None if it is as fast as with many. power: what it draws,
    if that is known; deadline_s: by when the site wants an answer.
    """

    bytes_per_s: float = inf
    latency_s: float = 0.0
    memory_bytes: float = inf
    row_flops_per_s: float | None = None
    power: Power | None = None
    deadline_s: float = inf


# What a plan keeps: weights of shares that depend on the request, ranges of the others; one per device, by kind.
Shares = tuple[dict[str, tuple[float, ...]], dict[str, tuple[Range, ...]]]
