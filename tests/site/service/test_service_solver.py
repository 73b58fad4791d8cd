"""The search as a command, whole or hurried where requests wait, and the retained record of its plans."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
from programs import run_python
from scripted_site import Site, preparing
from sites import FAMILIES, plan

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.cli.show import print_plan
from hepti_mqtt.core.errors import HeptiError, PlanError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import Cluster, Curve, DeviceProfile, Link, PeerLink
from hepti_mqtt.cost.simulator import TopicNames
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.planner import Assessment, Option, Question, Verdict, decide
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.interface import PublishPlan, Solve
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.rollout import SETTLE_UNSERVED_S
from hepti_mqtt.runtime.coordinator.search_kinds import SearchKind
from hepti_mqtt.runtime.machinery import Transition, TransitionLog
from hepti_mqtt.service import solver
from hepti_mqtt.service.record import encode_record
from hepti_mqtt.service.solver import MeasuredErrors, solve, start_preloading


def settled(*names):
    """Return a site with an active plan from a whole search."""
    site = preparing(*names, searches=False)
    site.event(solve(site.solves[-1]))
    site.ready()
    return site


# Each costs a planner that starts again time in which nobody is answered.
NOT_AT_THE_START = (
    *("numba", "llvmlite", "hepti_mqtt.kernels", "PIL", "rich", "cryptography", "onnx", "asyncio", "psutil", "scipy"),
    *("numpy.testing", "numpy.f2py", "unittest", "device_agent", "hepti_mqtt.runtime.worker"),
    *("benchmarks", "hepti_mqtt.client", "hepti_mqtt.embedded_broker"),
)


def test_requests_that_have_no_plan_get_one_device_soon_and_the_whole_search_follows():
    site = Site(searches=False)
    site.join("a", "b")
    site.submit("r1")
    site.tick(1.1)
    (command,) = site.solves
    assert command.kind is SearchKind.HURRIED
    solved = solve(command)
    assert solved.decision is not None
    assert {len(c.plan.devices) for c in solved.decision.ranking} == {1}
    site.event(solved)
    site.ready()
    assert site.session.groups.default("m").active == solved.decision.chosen.plan
    site.tick(1.1)
    whole = site.solves[-1]
    assert whole.kind is SearchKind.WHOLE
    decision = solve(whole).decision
    assert {len(c.plan.devices) for c in (*decision.ranking, *decision.pruned)} > {1}


def test_a_search_is_whole_where_nobody_waits_or_somebody_has_pinned_something():
    site = preparing("a", "b", searches=False)
    assert site.solves[-1].kind is SearchKind.WHOLE
    site.event(interface.Solved("m", site.solves[-1].ticket, None, None))
    site.submit("r1", pins=Pins(strategy="row"))
    site.tick(1.1)
    assert site.solves[-1].kind is SearchKind.WHOLE


def test_a_hurried_search_that_finds_nothing_is_followed_by_the_whole_one():
    site = Site(searches=False)
    site.join("a", "b", memory=1)
    site.submit("r1")
    site.tick(1.1)
    site.event(solve(site.solves[-1]))
    assert not site.errors
    whole = site.solves[-1]
    assert whole.kind is SearchKind.WHOLE
    site.event(solve(whole))
    assert isinstance(site.errors["r1"], PlanError)


def test_requests_without_a_plan_wait_for_no_search_that_runs():
    site = settled("a", "b")
    site.pin(Pins())
    running = site.solves[-1]
    assert running.kind is SearchKind.WHOLE
    used = site.session.groups.default("m").active.devices[0]
    site.submit("r1")
    site.leave(used)
    hurried = site.solves[-1]
    assert hurried.kind is SearchKind.HURRIED
    site.event(interface.DeviceStatus(used, Status("starting", 2)))  # it is back before the search has ended
    site.event(solve(hurried))
    site.ready()
    assert used not in site.session.groups.default("m").active.devices
    site.event(interface.Solved("m", running.ticket, None, None))
    assert not site.errors, "what the outdated one says changes nothing"


def test_a_hurried_search_knows_the_plan_that_has_lost_a_device():
    site = preparing("a", "b", "c", searches=False)
    first = site.solves[-1]
    pinned = replace(first.question, strategy="row", options={"variant": "kv"}, devices=("a", "b", "c"))
    site.event(solve(replace(first, question=pinned)))
    site.ready()
    plan = site.session.groups.default("m").active
    assert len(plan.devices) == 3
    site.submit("r1")
    site.leave(plan.devices[1])
    hurried = site.solves[-1]
    assert (hurried.active, hurried.question.active.devices) == (None, plan.devices)
    decision = solve(hurried).decision
    assert plan.devices[1] not in {d for c in decision.ranking for d in c.plan.devices}
    assert plan.method in {c.name for c in decision.ranking}


def test_a_hurried_search_serves_although_a_device_joins_meanwhile():
    site = Site(searches=False)
    site.join("a")
    site.submit("r1")
    site.tick(SETTLE_UNSERVED_S * 2)
    (command,) = site.solves
    assert command.kind is SearchKind.HURRIED
    site.join("b")
    site.event(solve(command))
    site.ready()
    assert site.session.groups.default("m").active.devices == ("a",)
    site.tick(1.1)
    assert site.solves[-1].kind is SearchKind.WHOLE, "the whole search follows"
    assert set(site.solves[-1].question.cluster.devices) == {"a", "b"}


def test_a_planner_begins_with_what_it_needs_to_answer_and_loads_numba_beside_its_first_steps():
    code = f"""
import sys
from hepti_mqtt.cli import main, output, processes
output.setup_logging(verbose=False)
from hepti_mqtt.service.planner import run_planner
print(*(m for m in sys.modules if any(m == name or m.startswith(name + '.') for name in {NOT_AT_THE_START!r})))
"""
    assert run_python("-c", code).split() == []
    start_preloading()
    (loads,) = [thread for thread in threading.enumerate() if thread.name == "planner-loads"] or [None]
    if loads is not None:
        loads.join()
    assert "hepti_mqtt.kernels" in sys.modules


def test_errors_are_measured_once_per_checkpoint(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / name))
    split = plan(FAMILIES["bert-embedding"], ("row", {"variant": "kv"}), (1.0, 1.0))
    errors = {}
    for seed in (0, 1):
        with Checkpoint.open(make_model("tiny-bert", tmp_path / f"m{seed}", seed=seed)) as checkpoint:
            assert MeasuredErrors.of(checkpoint).wire == {}, "another checkpoint's"
            errors[seed] = MeasuredErrors.of(checkpoint).measure_wire(split)
            assert MeasuredErrors.of(checkpoint).wire == {("row/kv", 2, w): error for w, error in errors[seed].items()}
    (first, _) = (tmp_path / "hepti" / "accuracy").iterdir()
    assert errors[0] != errors[1]
    assert not caplog.records
    for damaged in ("", "[[1, 2]]", '{"wire": [["row/kv", 2, "f8", 0.1]], "weights": {}}', "{}"):
        first.write_text(damaged)
        caplog.clear()
        for seed in (0, 1):
            with Checkpoint.open(tmp_path / f"m{seed}") as checkpoint:
                assert set(MeasuredErrors.of(checkpoint).wire.values()) in (set(), set(errors[seed].values()))
        assert [str(first) in record.getMessage() for record in caplog.records] == [True]
    in_the_way = tmp_path / "a file"
    in_the_way.touch()
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda _: str(in_the_way))
    caplog.clear()
    with Checkpoint.open(tmp_path / "m0") as checkpoint:
        assert MeasuredErrors.of(checkpoint).measure_wire(split) == errors[0]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2, "it is neither read nor written"


def test_what_the_rule_wants_is_priced_once_more_and_nothing_is_searched_for():
    site = preparing("a", "b", searches=False)
    search = site.solves[-1]
    last = solve(replace(search, question=replace(search.question, is_exhaustive=True))).decision
    wanted = next(c.plan for c in last.ranking if c.name != last.chosen.name)
    command = replace(search, active=last.chosen.plan, kind=SearchKind.NAMED, plans=(wanted,))
    solved = solve(command)
    assert [c.name for c in solved.decision.ranking] == [wanted.method]
    assert solved.decision.chosen.plan.version == search.question.plan_version
    assert solved.active.plan == last.chosen.plan
    assert set(solved.decision.chosen.load_bytes) == set(wanted.devices)
    held = solve(replace(command, question=replace(search.question, residents=(wanted,)))).decision.chosen.load_bytes
    assert set(held.values()) == {0}, "devices have all of it"
    assert solved.decision.chosen.fits_next_to_others
    cluster = search.question.cluster
    most = max(*last.chosen.price.needs.values(), *solved.decision.chosen.price.needs.values())
    tight = {n: replace(d, memory_bytes=1.01 * most) for n, d in cluster.devices.items()}
    lacks = solve(replace(command, question=replace(search.question, cluster=replace(cluster, devices=tight))))
    assert not lacks.decision.chosen.fits_next_to_others, "there is room for one of them alone"


SPEC = FAMILIES["bert-embedding"]


def question(*names, memory=1e9):
    profiles = {n: DeviceProfile(n, (Curve(32, 32, ((1, 1e-5), (32, 1e-4))),), 1e9, 1e9, 1e-5, memory) for n in names}
    return Question(
        TopicNames("home", "m"),
        SPEC,
        Cluster(profiles, {n: Link() for n in names}),
        TokenBatch((8,)),
        PlanVersion(1, 2),
    )


def test_a_search_is_answered_with_a_decision_and_the_active_plans_price():
    first = solver.solve(Solve("m", 5, question("a"), None))
    assert first.decision is not None
    assert (first.ticket, first.active, first.error) == (5, None, None)
    again = solver.solve(Solve("m", 6, question("a"), first.decision.chosen.plan))
    assert again.active is not None
    assert again.active.price.seconds > 0
    assert solver.solve(Solve("m", 7, question("b"), first.decision.chosen.plan)).active is None


def test_no_plan_and_mistakes_are_errors_not_exceptions(monkeypatch):
    assert isinstance(solver.solve(Solve("m", 1, question(), None)).error, PlanError)
    assert isinstance(solver.solve(Solve("m", 1, question("a", memory=10), None)).error, PlanError)
    monkeypatch.setattr(solver, "decide_within_accuracy", None)
    assert isinstance(solver.solve(Solve("m", 1, question("a"), None)).error, HeptiError)


def test_record_holds_what_people_and_programs_read():
    decision = solver.solve(Solve("m", 1, question("a", "b"), None)).decision
    plan = decision.chosen.plan
    other = replace(plan, version=PlanVersion(1, 3), wire="f16")
    coming = replace(plan, version=PlanVersion(1, 4), wire="i8")
    shown = PublishPlan("m", plan, None, decision, pinned=(other,), pinned_preparing=(coming,), in_flight=3)
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
    story = TransitionLog("plans of m")
    story.append(Transition(2.5, "m 9.1", "preparing", "ready", "active"))
    option = Option(decision.chosen, np.ones(1), np.ones(1))
    said = Verdict(None, (Assessment(option, 0.1, 0.9, 1.0, 0.5, 0.2, None, "no"),))
    shown = PublishPlan("m", plan, plan, decision, error, {}, story.last(), (plan,), considered=said.considered)
    directory = Path(os.fsdecode(b"/models/tiny\xff"))
    record = msgpack.unpackb(encode_record((SPEC, directory), 9, shown, unused={"a": "put aside"}))
    assert record["directory"] == "/models/tiny\ufffd", "a name that is not UTF-8"
    assert (record["unused"], record["error"]["code"]) == ({"a": "put aside"}, "no_plan")
    later = {"needs", "loading", "card"}  # readers do without them: an earlier planner has none
    assert set(record) == {*messages.RECORD, *later}
    for part, keys in (
        (record["candidates"][0], messages.CANDIDATE),
        (record["story"][0], messages.STEP),
        (record["considered"][0], messages.ASSESSMENT),
        (record["error"], messages.ERROR),
        (plan.to_dict(), messages.PLAN),
    ):
        assert set(part) == set(keys)
    assert messages.missing_record_key(record) is None


def test_record_lists_what_was_too_slow_to_be_worked_out_as_such(capsys):
    query = question("a", "b")
    slow = {pair: PeerLink(0.1, 1e4) for pair in (("a", "b"), ("b", "a"))}
    slow_site = replace(query.cluster, links={n: Link(0.1, 1e4, 1e4) for n in ("a", "b")}, peer_links=slow)
    decision = decide(replace(query, cluster=slow_site, is_exhaustive=False))
    shown = PublishPlan("m", decision.chosen.plan, None, decision)
    record = msgpack.unpackb(encode_record((SPEC, Path("m")), 9, shown))
    fits = {c["name"]: c["feasible"] for c in record["candidates"]}
    assert fits["single"] is True
    assert fits["row/kv"] is fits["block"] is None
    print_plan("m", record)
    assert capsys.readouterr().out.count("not worked out: too slow") == len(decision.pruned)


def test_record_tells_the_story_in_unix_time():
    story = TransitionLog("plans of m")
    story.append(Transition(2.5, "m 9.1", "preparing", "ready", "active"))
    story.append(Transition(4.0, "m 9.1", "active", "lost", "retiring", "d1 went offline"))
    shown = PublishPlan("m", None, None, None, story=story.last())
    record = msgpack.unpackb(encode_record((SPEC, Path("m")), 9, shown, 1000.0))
    assert record["story"] == [
        {"time": 1002.5, "plan": "m 9.1", "from": "preparing", "to": "active", "cause": "ready"},
        {"time": 1004.0, "plan": "m 9.1", "from": "active", "to": "retiring", "cause": "lost: d1 went offline"},
    ]
