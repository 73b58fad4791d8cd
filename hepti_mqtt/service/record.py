"""The retained record of a model's plans: what people and programs read, and the next planner."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgpack

from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Recalled
from hepti_mqtt.protocol.messages import MAX_MESSAGE_BYTES
from hepti_mqtt.runtime.coordinator.interface import PublishPlan
from hepti_mqtt.spec import Spec


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

    served: the model, and its directory. boot: of the planner that publishes it. active, preparing: the planner's own
    plans as `Plan.to_dict`, or None; pinned: those that are active for what requests have pinned, pinned_preparing:
    those on their way there. candidates: the best of each strategy and variant, best first; feasible: None for
    those that are too slow, so that nobody worked out whether they fit; expected_ms is predicted_ms times what
    earlier runs have taught. reason: why the first one was chosen. error: {code, message, detail} where none was
    found. progress: [bytes there, bytes in all] of the weights of `preparing`, by device; loading: the same in a
    sentence. story: the last transitions of the plans, oldest first, in unix time; zero_s: when the session's clock
    was zero. in_flight: requests that run at once. unused: why devices that are online are used for no plan, by
    name. clocks: by how many seconds a device's clock is ahead of the planner's, where it is by more than a minute.
    considered: what the rule said last of other plans, the best first, as `Assessment.to_dict`. evidence: what is
    believed of each device, in sentences. needs: bytes that the active plan needs, by device. languages: that a
    model of speech knows; others have no such key. machines: addresses of devices that share a machine, by device,
    if any do: predictions for several of them hold for idle cores. card: what the model is (`service/card.py`).
    `protocol/messages.py` names all keys that users read.
    """
    (spec, directory), decision, error = served, shown.decision, shown.error
    ranking = decision.ranking if decision is not None else ()
    behind = decision.pruned if decision is not None else ()
    record: dict[str, Any] = {
        "boot": boot,
        "active": None if shown.active is None else shown.active.to_dict(),
        "preparing": None if shown.preparing is None else shown.preparing.to_dict(),
        "pinned": [plan.to_dict() for plan in shown.pinned],
        "pinned_preparing": [plan.to_dict() for plan in shown.pinned_preparing],
        "spec": spec.to_dict(),
        "directory": os.fsencode(directory).decode("utf-8", "replace"),  # a name may be any bytes
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
            for c in (*ranking, *behind)
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


def minimal_record(spec: Spec, recalled: Recalled) -> bytes:
    """Return what `read_recalled` reads of a record."""
    record = {"boot": 0, "active": recalled.plan.to_dict(), "spec": spec.to_dict(), "needs": dict(recalled.needs)}
    payload: bytes = msgpack.packb(record)
    return payload


def read_recalled(payload: bytes, model: str, spec: Spec) -> tuple[int, Recalled | None]:
    """Return whose record of a model this is (boot, 0 if it cannot be read), and the active plan if it is of `spec`.

    Anybody may have written the record, so its plan is prepared like any other.
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
    return boot, Recalled(plan, needs) if plausible and plan.model == model else None
