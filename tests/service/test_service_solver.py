"""The search as a command: whole, or hurried where requests wait."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace

from scripted_site import Site
from sites import FAMILIES, plan

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.rollout import SOON_S
from hepti_mqtt.service.solver import Accuracy, begin_loading, solve

# Each costs a planner that starts again time in which nobody is answered.
NOT_AT_THE_START = (
    *("numba", "llvmlite", "hepti_mqtt.kernels", "PIL", "rich", "cryptography", "onnx", "asyncio", "psutil", "scipy"),
    *("numpy.testing", "numpy.f2py", "unittest", "device_agent", "hepti_mqtt.runtime.worker"),
    *("hepti_mqtt.bench", "hepti_mqtt.lab", "hepti_mqtt.client", "hepti_mqtt.embedded_broker"),
)


def test_requests_that_have_no_plan_get_one_device_soon_and_the_whole_search_follows() -> None:
    site = Site(searches=False)
    site.join("a", "b")
    site.submit("r1")
    site.tick(1.1)
    (command,) = site.solves
    assert command.hurried
    found = solve(command)
    assert found.decision is not None
    assert {len(c.plan.devices) for c in found.decision.ranking} == {1}
    site.event(found)
    site.ready()
    assert site.session.plan("m") == found.decision.chosen.plan
    site.tick(1.1)
    whole = site.solves[-1]
    assert not whole.hurried
    decision = solve(whole).decision
    assert {len(c.plan.devices) for c in (*decision.ranking, *decision.behind)} > {1}


def test_a_search_is_whole_where_nobody_waits_or_somebody_has_pinned_something() -> None:
    site = Site(searches=False)
    site.join("a", "b")
    site.tick(1.1)
    assert not site.solves[-1].hurried
    site.event(interface.Solved("m", site.solves[-1].ticket, None, None))
    site.submit("r1", pins=Pins(strategy="row"))
    site.tick(1.1)
    assert not site.solves[-1].hurried


def test_a_hurried_search_that_finds_nothing_is_followed_by_the_whole_one() -> None:
    site = Site(searches=False)
    site.join("a", "b", memory=1)
    site.submit("r1")
    site.tick(1.1)
    found = solve(site.solves[-1])
    assert not found.hurried
    assert "memory" in str(found.error) or found.decision is not None


def test_requests_without_a_plan_wait_for_no_search_that_runs() -> None:
    site = Site(searches=False)
    site.join("a", "b")
    site.tick(1.1)
    site.event(solve(site.solves[-1]))
    site.ready()
    site.event(interface.Pin("m", Pins()))
    running = site.solves[-1]
    assert not running.hurried
    used = site.session.plan("m").devices[0]
    site.submit("r1")
    site.leave(used)
    assert site.solves[-1].hurried
    site.event(solve(site.solves[-1]))
    site.ready()
    assert used not in site.session.plan("m").devices
    site.event(interface.Solved("m", running.ticket, None, None))
    assert not site.errors, "what the outdated one says changes nothing"


def test_a_hurried_search_knows_the_plan_that_has_lost_a_device() -> None:
    site = Site(searches=False)
    site.join("a", "b", "c")
    site.tick(1.1)
    first = site.solves[-1]
    pinned = replace(first.question, strategy="row", options={"variant": "kv"}, devices=("a", "b", "c"))
    site.event(solve(replace(first, question=pinned)))
    site.ready()
    plan = site.session.plan("m")
    assert len(plan.devices) == 3
    site.submit("r1")
    site.leave(plan.devices[1])
    hurried = site.solves[-1]
    assert (hurried.hurried, hurried.running, hurried.last.devices) == (True, None, plan.devices)
    found = solve(hurried).decision
    assert plan.devices[1] not in {d for c in found.ranking for d in c.plan.devices}
    assert plan.method in {c.name for c in found.ranking}


def test_requests_that_come_after_the_devices_wait_no_longer_than_those_before_them() -> None:
    site = Site(searches=False)
    site.join("a", "b")
    site.tick(SOON_S * 2)
    assert not site.solves, "nobody asks yet: others may join"
    site.submit("r1")
    assert site.solves[-1].hurried


def test_a_device_that_starts_holds_nobody_up_whom_others_can_serve() -> None:
    site = Site(searches=False)
    site.join("a")
    site.event(interface.DeviceStatus("b", Status("starting", 1)))
    site.submit("r1")
    site.tick(SOON_S * 2)
    assert site.solves[-1].hurried


def test_a_hurried_search_serves_although_a_device_joins_meanwhile() -> None:
    site = Site(searches=False)
    site.join("a")
    site.submit("r1")
    site.tick(SOON_S * 2)
    (command,) = site.solves
    assert command.hurried
    site.join("b")
    site.event(solve(command))
    site.ready()
    assert site.session.plan("m").devices == ("a",)
    site.tick(1.1)
    assert not site.solves[-1].hurried, "the whole search follows"
    assert set(site.solves[-1].question.cluster.devices) == {"a", "b"}


def test_an_agent_that_was_killed_and_starts_again_holds_up_nobody_whom_another_can_serve() -> None:
    site = Site(searches=False)
    site.join("a", "b")
    site.tick(1.1)
    site.event(solve(site.solves[-1]))
    site.ready()
    used = site.session.plan("m").devices[0]
    site.submit("r1")
    site.leave(used)
    hurried = site.solves[-1]
    assert hurried.hurried
    site.event(interface.DeviceStatus(used, Status("starting", 2)))  # it is back before the search has ended
    site.event(solve(hurried))
    site.ready()
    assert used not in site.session.plan("m").devices


def test_a_planner_begins_with_what_it_needs_to_answer_and_loads_numba_beside_its_first_steps() -> None:
    code = f"""
import sys
from hepti_mqtt.cli import main, output, processes
output.setup_logging(verbose=False)
from hepti_mqtt.service import run_planner
print(*(m for m in sys.modules if any(m == name or m.startswith(name + '.') for name in {NOT_AT_THE_START!r})))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
    begin_loading()
    (loads,) = [thread for thread in threading.enumerate() if thread.name == "planner-loads"] or [None]
    if loads is not None:
        loads.join()
    assert "hepti_mqtt.kernels" in sys.modules


def test_errors_are_measured_once_per_checkpoint(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / name))
    split = plan(FAMILIES["bert-embedding"], ("row", {"variant": "kv"}), (1.0, 1.0))
    found = {}
    for seed in (0, 1):
        with Checkpoint.open(make_model("tiny-bert", tmp_path / f"m{seed}", seed=seed)) as checkpoint:
            assert Accuracy.of(checkpoint).known == {}, "another checkpoint's"
            found[seed] = Accuracy.of(checkpoint).measure(split)
            assert Accuracy.of(checkpoint).known == {("row/kv", 2, w): error for w, error in found[seed].items()}
    (first, _) = (tmp_path / "hepti" / "accuracy").iterdir()
    assert found[0] != found[1]
    for damaged in ("", "[[1, 2]]", '[["row/kv", 2, "f8", 0.1]]', "{}"):
        first.write_text(damaged)
        for seed in (0, 1):
            with Checkpoint.open(tmp_path / f"m{seed}") as checkpoint:
                assert set(Accuracy.of(checkpoint).known.values()) in (set(), set(found[seed].values()))


def test_what_has_only_drifted_is_no_reason_for_a_whole_search_if_the_plan_costs_what_it_did() -> None:
    site = Site(searches=False)
    site.join("a", "b")
    site.tick(1.1)
    site.event(solve(site.solves[-1]))
    site.ready()
    running = site.session.plan("m")
    assert site.solves[-1].kept is None, "there was nothing to keep"
    site.submit("r1")
    site.answer(1)
    site.drift(dict.fromkeys(running.devices, 1.4), 40)
    drifted = site.solves[-1]
    assert drifted.kept is not None
    assert drifted.kept.chosen.plan == running
    then = {"cluster": drifted.kept.cluster, "shape": drifted.kept.chosen.price.played[0].shape}
    for changed in then:
        other = replace(drifted.question, **{name: value for name, value in then.items() if name != changed})
        assert solve(replace(drifted, question=other)).decision.chosen.plan.epoch != running.epoch, "searched for anew"
    found = solve(replace(drifted, question=replace(drifted.question, **then)))
    assert found.decision.chosen.plan.epoch == running.epoch
    assert not found.worth_it()
    site.event(found)
    assert site.session.plan("m").epoch == running.epoch
    assert not site.session.slots.own("m").plans.busy()


def test_whatever_else_has_changed_is_searched_for_as_a_whole() -> None:
    site = Site(searches=False)
    site.join("a", "b")
    site.tick(1.1)
    site.event(solve(site.solves[-1]))
    site.ready()
    site.join("c")
    site.tick(1.1)
    assert site.solves[-1].kept is None
    site.event(solve(site.solves[-1]))
    site.event(interface.Pin("m", Pins(strategy="single")))
    assert site.solves[-1].kept is None


def test_a_trial_is_ranked_beside_what_the_plan_before_it_was_compared_with() -> None:
    site = Site(searches=False)
    site.join("a", "b")
    site.tick(1.1)
    search = site.solves[-1]
    last = solve(replace(search, question=replace(search.question, compare=True))).decision
    tried = next(c.plan for c in last.ranking if c.name != last.chosen.name)
    asked = replace(search.question, strategy=tried.strategy, options=tried.options, devices=tried.devices)
    trial = replace(search, question=asked, running=last.chosen.plan, kept=last, trial=True)
    found = solve(trial).decision
    assert found.chosen.name == tried.method
    assert last.chosen.name in [c.name for c in found.ranking[1:]]
    assert [c.name for c in solve(replace(trial, trial=False, kept=None)).decision.ranking] == [tried.method]
