"""The retained record of a model's plans, as programs and people read it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgpack

from hepti_mqtt.runtime.planner.commands import ShowPlan
from hepti_mqtt.spec import Spec


def encode_record(
    served: tuple[Spec, Path],
    boot: int,
    shown: ShowPlan,
    zero_s: float = 0.0,
    unused: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Return the msgpack map of a model's plans.

    served: the model, and its directory. boot: of the planner that publishes it. active, preparing: the planner's own
    plans as `Plan.to_dict`, or None; pinned: those that are active for what requests have pinned, pinned_preparing:
    those on their way there. candidates: the best of each strategy and variant, best first; feasible: None for those
    that are too slow, so that nobody worked out whether they fit; expected_ms is predicted_ms times what earlier runs
    have taught. reason: why the first one was chosen. error: {code, message} of a search that found no plan. progress:
    [bytes there, bytes in all] of the weights of `preparing`, by device. story: the last transitions of the plans,
    oldest first, in unix time; zero_s: when the session's clock was zero. in_flight: requests that run at once. unused:
    why devices that are online are used for no plan, by name. `wire/told.py` names all keys, for who reads it.
    """
    (spec, directory), decision, error = served, shown.decision, shown.error
    ranking = decision.ranking if decision is not None else ()
    behind = decision.behind if decision is not None else ()
    record: dict[str, Any] = {
        "boot": boot,
        "active": None if shown.active is None else shown.active.to_dict(),
        "preparing": None if shown.preparing is None else shown.preparing.to_dict(),
        "pinned": [plan.to_dict() for plan in shown.pinned],
        "pinned_preparing": [plan.to_dict() for plan in shown.pinned_preparing],
        "spec": spec.to_dict(),
        "directory": os.fsencode(directory).decode("utf-8", "replace"),  # a name may be any bytes
        "in_flight": shown.in_flight,
        "unused": dict(unused),
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
        "reason": decision.reason if decision is not None else "",
        "story": [
            {"time": zero_s + t.now, "plan": t.subject, "from": t.before, "to": t.after, "cause": t.cause}
            for t in shown.story
        ],
        "error": None if error is None else {"code": error.code, "message": str(error)},
    }
    payload: bytes = msgpack.packb(record)
    return payload
