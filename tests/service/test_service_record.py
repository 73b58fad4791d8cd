"""The retained record of a model's plans, and the search that it comes from."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgpack
from sites import FAMILIES

from hepti_mqtt.cli.show import print_plan
from hepti_mqtt.cost.profiles import Cluster, Curve, DeviceProfile, Link, PeerLink
from hepti_mqtt.cost.simulator import Naming
from hepti_mqtt.errors import PlanError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.models.shapes import PackedTokens
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Question, decide
from hepti_mqtt.protocol import messages
from hepti_mqtt.runtime.coordinator.interface import ShowPlan, Solve
from hepti_mqtt.runtime.machinery import Story, Transition
from hepti_mqtt.service import solver
from hepti_mqtt.service.planner import encode_record

SPEC = FAMILIES["bert-embedding"]


def question(*names: str, memory: float = 1e9) -> Question:
    profiles = {n: DeviceProfile(n, (Curve(32, 32, ((1, 1e-5), (32, 1e-4))),), 1e9, 1e9, 1e-5, memory) for n in names}
    return Question(
        Naming("home", "m"), SPEC, Cluster(profiles, {n: Link() for n in names}), PackedTokens((8,)), Epoch(1, 2)
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

    def broken(*_question):
        raise IndexError("a mistake")

    monkeypatch.setattr(solver, "decide_within", broken)
    solved = solver.solve(Solve("m", 1, question("a"), None))
    assert "a mistake" in str(solved.error)


def test_record_holds_what_people_and_programs_read():
    decision = solver.solve(Solve("m", 1, question("a", "b"), None)).decision
    plan = decision.chosen.plan
    other = replace(plan, epoch=Epoch(1, 3), wire="f16")
    coming = replace(plan, epoch=Epoch(1, 4), wire="i8")
    shown = ShowPlan("m", plan, None, decision, pinned=(other,), pinned_preparing=(coming,), in_flight=3)
    record = msgpack.unpackb(encode_record((SPEC, Path("/models/m")), 9, shown))
    assert [Plan.from_dict(p) for p in record["pinned"]] == [other]
    assert [Plan.from_dict(p) for p in record["pinned_preparing"]] == [coming]
    assert Plan.from_dict(record["active"]) == plan
    assert ModelSpec.from_dict(record["spec"]) == SPEC
    assert record["preparing"] is None
    assert record["error"] is None
    assert record["in_flight"] == 3
    assert (record["directory"], record["boot"], record["reason"]) == ("/models/m", 9, decision.reason)
    assert {c["name"] for c in record["candidates"]} == {c.name for c in decision.ranking}
    first = record["candidates"][0]
    assert first["predicted_ms"] == first["expected_ms"] == decision.ranking[0].price.seconds * 1e3


def test_record_has_the_keys_that_its_readers_look_for():
    decision = solver.solve(Solve("m", 1, question("a", "b"), None)).decision
    plan, error = decision.chosen.plan, PlanError("too small")
    story = Story("plans of m")
    story.tell(Transition(2.5, "m 9.1", "preparing", "ready", "active"))
    shown = ShowPlan("m", plan, plan, decision, error, pinned=(plan,), story=story.last())
    record = msgpack.unpackb(encode_record((SPEC, Path("m")), 9, shown))
    assert set(record) == set(messages.RECORD)
    for part, keys in (
        (record["candidates"][0], messages.CANDIDATE),
        (record["story"][0], messages.STEP),
        (record["error"], messages.ERROR),
        (plan.to_dict(), messages.PLAN),
    ):
        assert set(part) == set(keys)
    assert messages.record_lacks(record) is None


def test_record_lists_what_was_too_slow_to_be_worked_out_as_such(capsys):
    asked = question("a", "b")
    slow = {pair: PeerLink(0.1, 1e4) for pair in (("a", "b"), ("b", "a"))}
    slow_site = replace(asked.cluster, links={n: Link(0.1, 1e4, 1e4) for n in ("a", "b")}, peer_links=slow)
    decision = decide(replace(asked, cluster=slow_site, compare=False))
    shown = ShowPlan("m", decision.chosen.plan, None, decision)
    record = msgpack.unpackb(encode_record((SPEC, Path("m")), 9, shown))
    fits = {c["name"]: c["feasible"] for c in record["candidates"]}
    assert fits["single"] is True
    assert fits["row/kv"] is fits["block"] is None
    print_plan("m", record)
    assert capsys.readouterr().out.count("not worked out: too slow") == len(decision.behind)


def test_record_of_a_search_in_vain():
    shown = ShowPlan("m", None, None, None, PlanError("too small"))
    record = msgpack.unpackb(encode_record((SPEC, Path("m")), 9, shown, unused={"a": "put aside"}))
    assert record["unused"] == {"a": "put aside"}
    assert record["error"] == {"code": "no_plan", "message": "too small"}
    assert record["candidates"] == []


def test_record_tells_the_story_in_unix_time():
    story = Story("plans of m")
    story.tell(Transition(2.5, "m 9.1", "preparing", "ready", "active"))
    story.tell(Transition(4.0, "m 9.1", "active", "lost", "retiring", "d1 went offline"))
    shown = ShowPlan("m", None, None, None, story=story.last())
    record = msgpack.unpackb(encode_record((SPEC, Path("m")), 9, shown, 1000.0))
    assert record["story"] == [
        {"time": 1002.5, "plan": "m 9.1", "from": "preparing", "to": "active", "cause": "ready"},
        {"time": 1004.0, "plan": "m 9.1", "from": "active", "to": "retiring", "cause": "lost: d1 went offline"},
    ]


def test_record_tells_a_directory_whose_name_is_not_utf_8():
    directory = Path(os.fsdecode(b"/models/tiny\xff"))
    record = msgpack.unpackb(encode_record((SPEC, directory), 9, ShowPlan("m", None, None, None)))
    assert record["directory"] == "/models/tiny\ufffd"
