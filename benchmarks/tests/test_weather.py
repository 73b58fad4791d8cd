"""A site under weather: what truth and devices do, what a verdict says, and what today's planner makes of it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.weather import KINDS, History, judge, make_truth, play, recorded_truth
from benchmarks.weather.__main__ import longest_worse_than_alone, read_recording
from benchmarks.weather.devices import LOAD, SimulatedDevice
from benchmarks.weather.truth import SCRIPT, SCRIPT_S, STEP_S
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.config.settings import find_bundled_site
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.service.solver import solve

FILE = load_site(find_bundled_site(Path("four-pi4-240")))
SPEC = spec_of_kind("bert-large")
RECORDING = Path(__file__).parents[2] / "tests" / "golden" / "still-240.jsonl.gz"
ROW = Pins(strategy="row", options={"variant": "kv"}, devices=("pi1", "pi2"))


def pinned(kind: str, minutes: float = 3.0, pins: Pins = ROW, resident: bool = True) -> History:
    """Play a site whose planner has no choice, so that its searches cost nothing."""
    return play(FILE, SPEC, make_truth(kind, FILE, minutes, 1), solve, pins=pins, resident=resident)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_site(kind: str) -> None:
    one, other, another = (make_truth(kind, FILE, 5, seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.real.slowdown, other.real.slowdown)
    np.testing.assert_array_equal(one.said.slowdown, other.said.slowdown)
    assert (one.real.slowdown != another.real.slowdown).any()


def test_where_nothing_changes_meters_err_far_more_than_the_truth_moves() -> None:
    truth = make_truth("still", FILE, 30, 1)
    assert np.log(truth.real.slowdown).std() < 0.08
    assert np.log(truth.said.slowdown).std() > 3 * np.log(truth.real.slowdown).std()


def test_the_script_slows_one_processor_down_to_a_quarter_and_back() -> None:
    truth = make_truth("changes", FILE, SCRIPT_S / 60, 1)
    edges = [0, *(int(at / STEP_S) for start, stop, *_ in SCRIPT for at in (start, stop))]
    usual = [np.log(truth.real.slowdown[a:b]).mean(0) for a, b in pairwise(edges)]
    assert sorted(usual[1] - usual[0])[-1] == pytest.approx(np.log(4), abs=0.2)
    assert usual[2] == pytest.approx(usual[0], abs=0.2)
    assert not truth.up[edges[5] : edges[6]].all(0).all()
    assert truth.up[edges[6] :].all()


def test_a_planner_without_a_choice_has_no_regret_but_for_its_method() -> None:
    history = pinned("still")
    verdict = judge(history)
    assert len(history.answers) > 50
    assert verdict.changes_per_hour == 0
    assert not history.refused
    ours = np.mean([a.run_s for a in history.answers if a.asked_s >= 120])
    assert verdict.phases[0].mean_s == pytest.approx(ours, rel=0.05), "no load or search is beside these runs"
    assert verdict.phases[0].best_s <= ours


def test_cached_weights_come_at_the_rate_of_a_processor_and_runs_beside_them_are_slow() -> None:
    there, loaded = pinned("still", 0.2), pinned("still", 1.5, resident=False)
    assert loaded.changes[0].loads
    assert loaded.answers[0].seconds > loaded.changes[0].now - 1
    assert not there.changes[0].loads
    assert loaded.changes[0].now > loaded.changes[0].loaded_bytes / 2 / (1.2 * LOAD.bytes_per_s)


def test_an_exchange_over_a_slow_link_is_told_to_be_slow() -> None:
    slow, fast = (SimulatedDevice("pi1", FILE.devices["pi1"]) for _ in range(2))
    slow.receive("pi2", 1e6, 1e6)
    fast.receive("pi2", 1e6, 4e6)
    assert slow.edges["pi2"].timed_bytes == fast.edges["pi2"].timed_bytes
    assert slow.edges["pi2"].timed_us == 4 * fast.edges["pi2"].timed_us


def test_a_device_that_is_away_answers_nothing_and_comes_back() -> None:
    truth = make_truth("still", FILE, 3, 1)
    truth.up[200:260, 1] = False  # pi2
    history = play(FILE, SPEC, truth, solve, pins=ROW, resident=True)
    away = [a for a in history.answers if 100 <= a.asked_s + a.seconds < 130]
    assert not away
    assert any(a.asked_s > 135 for a in history.answers)
    assert {*history.refused} == {"no_plan"}, "pins name a device that is away"


def test_what_was_recorded_is_told_and_taken() -> None:
    lines = [line for line in read_recording(RECORDING) if line["t"] < 70]
    truth = recorded_truth(FILE, lines)
    assert len(truth.recorded) == sum("device" in line for line in lines)
    history = play(FILE, SPEC, truth, solve, pins=ROW, resident=True)
    took = [a.run_s for a in history.answers]
    assert max(took) > 1.5 * np.median(took), "some of the recorded requests were slow"


def test_a_recorded_site_in_which_nothing_changes_gets_no_other_plan_and_no_search() -> None:
    lines = [line for line in read_recording(RECORDING) if line["t"] < 120]
    history = play(FILE, SPEC, recorded_truth(FILE, lines), solve, resident=True)
    assert not [change.text for change in history.changes if change.now > 60]
    assert not [at for at, _ in history.searches if at > 60]


def test_plans_follow_what_runs_show_and_the_story_names_the_liar() -> None:
    truth = make_truth("liar", FILE, 2, 1)
    history = play(FILE, spec_of_kind("bert-base"), truth, solve, resident=True)
    assert not history.refused
    assert longest_worse_than_alone(history) <= 15, "a first plan trusts meters, and the first runs correct them"
    liar = truth.names[int(np.argmin(np.log(truth.said.slowdown / truth.real.slowdown).mean(0)))]
    assert liar in {step.subject for step in history.story if step.after == "doubted"}
