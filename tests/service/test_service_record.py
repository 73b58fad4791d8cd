"""The retained record of a model's plans, and the search that it comes from."""

from __future__ import annotations

from pathlib import Path

import msgpack
from sites import FAMILIES

from hepti_mqtt.cluster import Cluster, Curve, DeviceProfile, Link
from hepti_mqtt.errors import PlanError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Question
from hepti_mqtt.runtime.coordination import Solve
from hepti_mqtt.service import solver
from hepti_mqtt.service.record import encode_record
from hepti_mqtt.simulate import Naming
from hepti_mqtt.spec import ModelSpec, RequestShape

SPEC = FAMILIES["bert-embedding"]


def question(*names: str, memory: float = 1e9) -> Question:
    profiles = {n: DeviceProfile(n, (Curve(32, 32, ((1, 1e-5), (32, 1e-4))),), 1e9, 1e9, 1e-5, memory) for n in names}
    return Question(
        Naming("home", "m"), SPEC, Cluster(profiles, {n: Link() for n in names}), RequestShape((8,)), Epoch(1, 2)
    )


def test_a_search_is_answered_with_a_decision_and_the_running_plans_price():
    first = solver.solve(Solve("m", 5, question("a"), None))
    assert first.decision is not None
    assert (first.ticket, first.running_s, first.error) == (5, None, None)
    again = solver.solve(Solve("m", 6, question("a"), first.decision.chosen.plan))
    assert again.running_s is not None
    assert again.running_s > 0
    assert solver.solve(Solve("m", 7, question("b"), first.decision.chosen.plan)).running_s is None


def test_no_plan_and_mistakes_are_errors_not_exceptions(monkeypatch):
    assert isinstance(solver.solve(Solve("m", 1, question(), None)).error, PlanError)
    assert isinstance(solver.solve(Solve("m", 1, question("a", memory=10), None)).error, PlanError)

    def broken(_question):
        raise IndexError("a mistake")

    monkeypatch.setattr(solver, "decide", broken)
    solved = solver.solve(Solve("m", 1, question("a"), None))
    assert "a mistake" in str(solved.error)


def test_record_holds_what_people_and_programs_read():
    decision = solver.solve(Solve("m", 1, question("a", "b"), None)).decision
    plan = decision.chosen.plan
    record = msgpack.unpackb(encode_record(SPEC, Path("/models/m"), 9, plan, None, decision))
    assert Plan.from_dict(record["active"]) == plan
    assert ModelSpec.from_dict(record["spec"]) == SPEC
    assert record["preparing"] is None
    assert record["error"] is None
    assert (record["directory"], record["boot"], record["reason"]) == ("/models/m", 9, decision.reason)
    assert {c["name"] for c in record["candidates"]} == {c.name for c in decision.ranking}
    first = record["candidates"][0]
    assert first["predicted_ms"] == first["expected_ms"] == decision.ranking[0].price.seconds * 1e3


def test_record_of_a_search_in_vain():
    record = msgpack.unpackb(encode_record(SPEC, Path("m"), 9, error=PlanError("too small")))
    assert record["error"] == {"code": "no_plan", "message": "too small"}
    assert record["candidates"] == []
