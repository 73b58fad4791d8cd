"""What a planner tells: a record of plans, and an answer."""

from __future__ import annotations

from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.plan import Plan

A_PLAN = Plan("m", PlanVersion(1, 1), "single", ("a",), "a").to_dict()


def a_record(**data):
    """Return a record without plans, and with `data`."""
    empty = {"boot": 1, "active": None, "preparing": None, "pinned": [], "spec": {}, "directory": "/m", "in_flight": 2}
    told = {"unused": {}, "clocks": {}, "candidates": [], "progress": {}, "reason": "", "story": [], "error": None}
    told |= {"considered": [], "evidence": {}}
    empty["pinned_preparing"] = []
    return {**empty, **told, **data}


def an_answer(request, **data):
    """Return an answer that computed nothing, and with `data`."""
    plan = {"id": "1.1", "strategy": "single", "options": {}, "wire": "f32", "weights": "f32", "route": "broker"}
    counted = {"compute_ms": None, "wait_ms": None, "bytes_on_wire": None, "predicted_bytes": 0, "predicted_ms": 1.0}
    head = {"id": request, "model": "m", "ok": True, "result": None, "tokens": 1}
    return {**head, **counted, "plan": {**plan, "devices": {"a": 1.0}}, **data}
