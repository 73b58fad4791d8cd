"""What a plan may come down to at the best, from what devices take alone and what its method took on others of them.

A division takes what its devices need for the work, and more: exchanges, what is computed twice, waiting. What it takes
more differs little from one set of devices to another with links as good. Refining a plan takes away a part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from math import inf
from typing import Final

from hepti_mqtt.cluster import Ways
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner.decision import Candidate
from hepti_mqtt.planner.price import Question
from hepti_mqtt.planner.routes import on_route, routes
from hepti_mqtt.strategies import STRATEGIES

# Devices together are no faster than the sum of their speeds alone, but for what smaller matrices gain in caches.
TOGETHER: Final = 0.8
# Of what a division takes more, at least so much stays on other devices with links as good; and so much when shares,
# route and wire are refined. Measured over random sites, not proved: docs/design.md.
ELSEWHERE: Final = 0.6
REFINED: Final = 0.5
# The best price is not refined either, and with equal layers once, it may be a little less than that of the whole.
NEARLY: Final = 1.1


class Floor:
    """What plans may come down to; alone: seconds of the whole model by device, of those where that is known."""

    def __init__(self, question: Question, alone: Mapping[str, float]) -> None:
        self._question, self._alone = question, alone
        self._ways = Ways(question.cluster)
        self._seen: dict[str, list[tuple[int, float, float, float]]] = {}  # by name: devices, seconds more, their way

    def together(self, devices: Sequence[str]) -> float | None:
        """Return the seconds of devices that divide all work by speed and exchange nothing; None if not known."""
        if not all(d in self._alone for d in devices):
            return None
        return 1 / sum(1 / self._alone[d] for d in devices)

    def saw(self, c: Candidate) -> None:
        """Take the price of a plan: others of its method on as many devices, or more, take no less beside the work."""
        together = self.together(c.plan.devices)
        if together is not None and len(c.plan.devices) > 1 and not c.plan.replicas:
            more = max(c.price.seconds - together, 0.0)
            self._seen.setdefault(c.name, []).append((len(c.plan.devices), more, *self._way(c.plan)))

    def behind(self, plan: Plan, priced_s: float | None, best_s: float) -> bool:
        """Return whether a plan is not expected to beat another; priced_s: its price, None if it has none."""
        if priced_s is None:
            return self.least(plan) >= best_s
        return self.refined(plan, priced_s) >= NEARLY * best_s

    def least(self, plan: Plan) -> float:
        """Return what a plan that is not priced is expected to take at the least, in seconds; 0 if nothing is known."""
        together = self.together(plan.devices)
        if together is None or plan.replicas:
            return 0.0
        # Where a method chooses another graph, more devices may compute less twice than few.
        fewest = 1 if STRATEGIES[plan.strategy].rewrite is None else len(plan.devices)
        seen = [s for s in self._seen.get(plan.method, ()) if fewest <= s[0] <= len(plan.devices)]
        if not seen:
            return TOGETHER * together * self._factor(plan)
        ways = self._by_route(plan)
        more = min(beside * _better(ways, latency, byte) for _, beside, latency, byte in seen)
        return (together + ELSEWHERE * more) * self._factor(plan)

    def refined(self, plan: Plan, priced_s: float) -> float:
        """Return what a plan of a known price is expected to take at the least when it is refined, in seconds."""
        together = self.together(plan.devices)
        if together is None or len(plan.devices) == 1 or plan.replicas:
            return 0.0
        more = (priced_s - together) * _better(self._by_route(plan), *self._way(plan))
        return (together + REFINED * more) * self._factor(plan)

    def _by_route(self, plan: Plan) -> list[tuple[float, float]]:
        """Return the way of a plan by each of its routes; it looks at every two devices."""
        return [self._way(on_route(self._question, plan, r)) for r in routes(self._question, plan.devices)]

    def _factor(self, plan: Plan) -> float:
        """Return what runs have taught of a plan, by the route of which they have taught the best."""
        learned = self._question.learned
        if not learned.factors:
            return 1.0
        by_route = (replace(plan, route=r) for r in routes(self._question, plan.devices))
        return min(learned.factor(routed) * learned.hoped(routed) for routed in by_route)

    def _way(self, plan: Plan) -> tuple[float, float]:
        """Return (seconds, seconds per byte) of the slowest way between devices of a plan."""
        latency = byte = 0.0
        links = self._question.cluster.links
        for source, target in permutations(plan.devices, 2):
            rates = [links[source].up_bytes_per_s, links[target].down_bytes_per_s]
            after = links[source].latency_s + links[target].latency_s
            if plan.route == "mesh" and (source, target) not in plan.relayed:
                way = self._ways.way(source, target)
                rates, after = [way.bytes_per_s, way.up_bytes_per_s, way.down_bytes_per_s], way.latency_s
            latency, byte = max(latency, after), max(byte, 1 / min(*rates, inf))
        return latency, byte


def _better(ways: Sequence[tuple[float, float]], latency_s: float, byte_s: float) -> float:
    """Return what exchanges may take by the best of some ways, as a part (0 to 1) of what a known way takes."""
    return min(1.0, *(min(a / max(latency_s, 1e-9), b / max(byte_s, 1e-15)) for a, b in ways))
