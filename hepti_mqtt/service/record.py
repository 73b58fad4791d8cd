"""The retained record of a model's plans, as programs and people read it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack

from hepti_mqtt.errors import HeptiError
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Decision
from hepti_mqtt.spec import ModelSpec


def encode_record(
    spec: ModelSpec,
    directory: Path,
    boot: int,
    active: Plan | None = None,
    preparing: Plan | None = None,
    decision: Decision | None = None,
    error: HeptiError | None = None,
    progress: Mapping[str, tuple[int, int]] | None = None,
) -> bytes:
    """Return the msgpack map of a model's plans.

    boot: of the planner that publishes it. active, preparing: plans as `Plan.to_dict`, or None. candidates: the best of
    each strategy and variant, best first; expected_ms is predicted_ms times what earlier runs have taught. reason: why
    the first one was chosen. error: {code, message} of a search that found no plan. progress: [bytes there, bytes in
    all] of the weights of `preparing`, by device.
    """
    ranking = decision.ranking if decision is not None else ()
    record: dict[str, Any] = {
        "boot": boot,
        "active": None if active is None else active.to_dict(),
        "preparing": None if preparing is None else preparing.to_dict(),
        "spec": spec.to_dict(),
        "directory": str(directory),
        "candidates": [
            {
                "name": c.name,
                "devices": list(c.plan.devices),
                "predicted_ms": c.price.seconds * 1e3,
                "expected_ms": c.price.expected_s * 1e3,
                "bytes": c.price.nbytes,
                "feasible": c.price.feasible,
                "missing": dict(c.price.missing),
            }
            for c in ranking
        ],
        "progress": {device: list(part) for device, part in (progress or {}).items()},
        "reason": decision.reason if decision is not None else "",
        "error": None if error is None else {"code": error.code, "message": str(error)},
    }
    payload: bytes = msgpack.packb(record)
    return payload
