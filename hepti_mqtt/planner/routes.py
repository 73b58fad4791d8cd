"""By which route the exchanges of a plan can go: the same division over the broker, or over mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

from hepti_mqtt.plan import Pair, Plan, Route
from hepti_mqtt.planner.price import Question


def relayed(question: Question, devices: Sequence[str]) -> tuple[Pair, ...]:
    """Return the (source, target) among devices that only the broker connects."""
    can = question.cluster.endpoints
    return tuple(
        pair
        for pair in permutations(sorted(devices), 2)
        if pair in question.relayed or pair[0] not in can or pair[1] not in can
    )


def routes(question: Question, devices: Sequence[str]) -> tuple[Route, ...]:
    """Return the routes to price against each other, first the one that is faster nearly always.

    What is pinned is alone. Mesh is one of them where all devices have an endpoint and some two can connect.
    """
    if len(devices) == 1:
        return ("broker",)
    if question.route is not None:
        return (question.route,)
    pairs = len(devices) * (len(devices) - 1)
    meshed = question.cluster.endpoints.issuperset(devices) and len(relayed(question, devices)) < pairs
    return ("mesh", "broker") if meshed else ("broker",)


def on_route(question: Question, plan: Plan, route: Route) -> Plan:
    """Return a plan with its exchanges on a route; those of pairs that cannot connect stay on the broker."""
    replicas = tuple(on_route(question, replica, route) for replica in plan.replicas)
    apart = relayed(question, plan.devices) if route == "mesh" else ()
    return replace(plan, route=route, relayed=apart, replicas=replicas)
