"""The search as a command: whole, or hurried where requests wait."""

from __future__ import annotations

import subprocess
import sys
import threading

from scripted_site import Site
from sites import FAMILIES, plan

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.runtime.planner import events
from hepti_mqtt.runtime.planner.flight import Pins
from hepti_mqtt.service.solver import Accuracy, begin_loading, solve


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
    assert {len(c.plan.devices) for c in solve(whole).decision.ranking} > {1}


def test_a_search_is_whole_where_nobody_waits_or_somebody_has_pinned_something() -> None:
    site = Site(searches=False)
    site.join("a", "b")
    site.tick(1.1)
    assert not site.solves[-1].hurried
    site.event(events.Solved("m", site.solves[-1].ticket, None, None))
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
    site.event(events.Pin("m", Pins()))
    running = site.solves[-1]
    assert not running.hurried
    used = site.session.plan("m").devices[0]
    site.submit("r1")
    site.leave(used)
    assert site.solves[-1].hurried
    site.event(solve(site.solves[-1]))
    site.ready()
    assert used not in site.session.plan("m").devices
    site.event(events.Solved("m", running.ticket, None, None))
    assert not site.errors, "what the outdated one says changes nothing"


def test_a_planner_begins_without_numba_and_loads_it_beside_its_first_steps() -> None:
    told = "import sys, {0}; print('numba' in sys.modules)"
    for module in ("hepti_mqtt.service.planner", "hepti_mqtt.cli"):
        run = subprocess.run([sys.executable, "-c", told.format(module)], capture_output=True, text=True, check=True)
        assert run.stdout == "False\n", module
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
