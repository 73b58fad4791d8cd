"""The retained record of a model's plans, for users, programs and the next planner."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgpack

from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.planner import EarlierPlan
from hepti_mqtt.protocol.messages import MAX_MESSAGE_BYTES
from hepti_mqtt.runtime.coordinator.interface import PublishPlan


def encode_record(
    served: tuple[Spec, Path],
    boot: int,
    shown: PublishPlan,
    zero_s: float = 0.0,
    unused: Mapping[str, str] = MappingProxyType({}),
    clocks: Mapping[str, float] = MappingProxyType({}),
    evidence: Mapping[str, Sequence[str]] = MappingProxyType({}),
    languages: Sequence[str] = (),
    machines: Mapping[str, str] = MappingProxyType({}),
    card: Mapping[str, Any] = MappingProxyType({}),
) -> bytes:
    """Return the msgpack map of a model's plans.

    served: spec and directory of the model. boot: of the publishing planner. zero_s: unix time of the session
    clock's zero. `protocol/messages.py` names all keys that users read:

    active, preparing: plans without pins as `Plan.to_dict`, or None. pinned, pinned_preparing: plans for pins of
    requests. candidates: the best of each strategy and variant, best first; feasible is None for pruned candidates;
    expected_ms is predicted_ms corrected by earlier runs. reason: of the decision. error: {code, message, detail} of a
    failed search. progress: [loaded bytes, all bytes] of the weights of `preparing`, by device; loading: the same as a
    sentence. story: last transitions of the plans, oldest first, in unix time. in_flight: limit of concurrent runs.
    unused: reasons of online devices without a plan. clocks: seconds by which a device's clock is ahead, if above a
    minute. considered: last assessments of other plans, best first, as `Assessment.to_dict`. evidence: sentences about
    each device's estimates. needs: memory of the active plan in bytes, by device. languages: only of speech models.
    machines: addresses of devices on a shared machine; predictions for several of them assume idle cores. card: see
    `service/card.py`.
    """
    (spec, directory), decision, error = served, shown.decision, shown.error
    ranking = decision.ranking if decision is not None else ()
    pruned = decision.pruned if decision is not None else ()
    record: dict[str, Any] = {
        "boot": boot,
        "active": None if shown.active is None else shown.active.to_dict(),
        "preparing": None if shown.preparing is None else shown.preparing.to_dict(),
        "pinned": [plan.to_dict() for plan in shown.pinned],
        "pinned_preparing": [plan.to_dict() for plan in shown.pinned_preparing],
        "spec": spec.to_dict(),
        "directory": os.fsencode(directory).decode("utf-8", "replace"),  # a path may contain any bytes
        "in_flight": shown.in_flight,
        "card": dict(card),
        **({"languages": list(languages)} if languages else {}),
        **({"machines": dict(machines)} if machines else {}),
        "unused": dict(unused),
        "clocks": dict(clocks),
        "candidates": [
            {
                "name": c.name,
                "devices": list(c.plan.devices),
                "route": c.plan.route,
                "wire": c.plan.wire,
                "wire_error": c.plan.wire_error,
                "predicted_ms": c.price.seconds * 1e3,
                "expected_ms": c.price.expected_s * 1e3,
                "bytes": c.price.nbytes,
                "feasible": c.price.feasible if c in ranking else None,
                "missing": dict(c.price.missing),
            }
            for c in (*ranking, *pruned)
        ],
        "progress": {device: list(part) for device, part in shown.progress.items()},
        "loading": shown.loading,
        "reason": decision.reason if decision is not None else "",
        "story": [
            {"time": zero_s + t.now, "plan": t.subject, "from": t.before, "to": t.after, "cause": t.cause}
            for t in shown.story
        ],
        "considered": [assessment.to_dict() for assessment in shown.considered],
        "needs": dict(shown.needs),
        "evidence": {device: list(sentences) for device, sentences in evidence.items()},
        "error": None if error is None else {"code": error.code, "message": str(error), "detail": list(error.detail)},
    }
    payload: bytes = msgpack.packb(record)
    return payload


def minimal_record(spec: Spec, recalled: EarlierPlan) -> bytes:
    """Return a record with only the keys of `read_recalled`."""
    record = {"boot": 0, "active": recalled.plan.to_dict(), "spec": spec.to_dict(), "needs": dict(recalled.needs)}
    payload: bytes = msgpack.packb(record)
    return payload


def read_recalled(payload: bytes, model: str, spec: Spec) -> tuple[int, EarlierPlan | None]:
    """Return the boot of a record's planner (0 if malformed), and its active plan if the record is of `spec`.

    Any client may have written the record, so its plan is prepared like any other.
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        return 0, None
    try:
        record = msgpack.unpackb(payload)
        boot, active = int(record["boot"]), record["active"]
        if active is None or record["spec"] != msgpack.unpackb(msgpack.packb(spec.to_dict())):
            return boot, None
        plan, needs = Plan.from_dict(active), {str(d): int(n) for d, n in record["needs"].items()}
        numbers = (plan.predicted_s, plan.predicted_bytes, plan.predicted_tokens, *needs.values())
        plausible = all(isfinite(number) and number >= 0 for number in numbers) and set(needs) <= set(plan.devices)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, msgpack.UnpackException):
        return 0, None
    return boot, EarlierPlan(plan, needs) if plausible and plan.model == model else None
