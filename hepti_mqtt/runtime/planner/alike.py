"""When two plans divide a model alike, and what one takes from the other then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan import Plan

_VARYING: Final[dict[str, Any]] = {
    "epoch": Epoch(0, 0),
    "weights": {},
    "predicted_s": 0.0,
    "predicted_bytes": 0,
    "predicted_tokens": 0,
    "wire_error": None,
    "reason": "",
    "replicas": (),
}


def same_division(a: Plan, b: Plan) -> bool:
    """Return whether two plans divide the work alike; weights may differ by rounding."""
    if len(a.replicas) != len(b.replicas) or not all(map(same_division, a.replicas, b.replicas)):
        return False
    if replace(a, **_VARYING) != replace(b, **_VARYING):
        return False
    for kind, weights in a.weights.items():
        whole_a, whole_b = sum(weights), sum(b.weights[kind])
        if any(abs(x / whole_a - y / whole_b) > 0.02 for x, y in zip(weights, b.weights[kind], strict=True)):
            return False
    return True


def priced_as(plan: Plan, other: Plan) -> Plan:
    """Return a plan with the predictions of another one of the same division; its own ranges may differ by rounding."""
    replicas = tuple(map(priced_as, plan.replicas, other.replicas))
    told = ("predicted_s", "predicted_bytes", "predicted_tokens", "reason")
    return replace(plan, **{name: getattr(other, name) for name in told}, replicas=replicas)


def same_shares(a: Plan, b: Plan) -> bool:
    """Return whether two plans of the same division have the same shares and ranges, to the last bit."""
    return (a.devices, a.weights, a.ranges) == (b.devices, b.weights, b.ranges)
