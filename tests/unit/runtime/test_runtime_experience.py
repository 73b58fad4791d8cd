"""Runs that take longer than predicted, and the next best plan that is tried once: runs decide; on a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from scripted_site import SPEC, Site, beside, settled

from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import make_plan, programs_digest
from hepti_mqtt.planner import Candidate, Decision, Question, price
from hepti_mqtt.planner.estimates import strategy_key
from hepti_mqtt.protocol.frames import decode_work
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.requests import Pins

TOKENS = 8
PREDICTED_S = {"row": 0.1, "single": 0.15}


def candidate(question: Question, strategy: str, devices: tuple[str, ...]) -> Candidate:
    template = Plan(question.naming.model, question.plan_version, strategy, devices, "a")
    options = {"variant": "kv"} if strategy == "row" else {}
    plan = make_plan(question.spec, template, strategy, options, (1.0,) * len(devices))
    plan = replace(plan, predicted_s=PREDICTED_S[strategy], predicted_tokens=TOKENS)
    return Candidate(plan, replace(price(question, plan), seconds=plan.predicted_s), (1.0,) * len(devices))


def two(question: Question) -> Decision:
    """Decide between a split and one device, whose simulated times are given."""
    found = [candidate(question, "row", ("a", "b")), candidate(question, "single", ("a",))]
    ranking = tuple(sorted(found, key=lambda c: c.price.expected_s))
    return Decision(ranking[0], ranking, "", question.cluster, programs_digest(question.spec, ranking[0].plan))


class Timed(Site):
    """A site whose runs take a given time."""

    def __init__(self) -> None:
        super().__init__(decider=two)
        self.asked = 0

    def solve(self, command: interface.Solve) -> None:
        if command.hurried:  # for who would serve next: nobody, here
            self.solves.remove(command)
            return
        decision = self.decider(command.question)
        running = command.running and next(
            c.price.expected_s for c in decision.ranking if c.plan.strategy == command.running.strategy
        )
        self.event(interface.Solved(command.model, command.ticket, decision, running))

    def serve(self, row_s: float, single_s: float = PREDICTED_S["single"], times: int = 1) -> None:
        for _ in range(times):
            self.asked += 1
            self.submit(f"r{self.asked}", TOKENS)
            self.now += row_s if self.strategy == "row" else single_s
            self.answer(max(self.work))
            self.tick(1.0)
            self.ready()

    @property
    def strategy(self) -> str:
        plan = self.plan
        assert plan is not None
        return plan.strategy


@pytest.fixture
def site() -> Timed:
    site = Timed()
    site.join("a", "b")
    site.settle()
    site.serve(0.1, times=30)  # the first heartbeats tell more than the joins did, which is searched once
    site.solves.clear()
    return site


def test_as_long_as_predictions_come_true_nothing_is_searched(site: Timed) -> None:
    assert site.strategy == "row"
    site.serve(0.11, times=40)
    assert site.strategy == "row"
    assert not site.solves


def test_a_split_that_is_slower_than_one_device_gives_way_to_it_and_stays_away(site: Timed) -> None:
    site.serve(0.25, single_s=0.16, times=60)
    assert site.strategy == "single"
    assert len(site.solves) == 1


def test_a_split_that_is_slower_than_predicted_and_still_faster_stays(site: Timed) -> None:
    site.serve(0.142, times=60)
    assert site.strategy == "row"
    asked = len(site.solves)
    assert asked <= 3, "of its own time, to try one device, and to come back"
    site.serve(0.142, times=120)
    assert len(site.solves) == asked, "it is asked once, not again and again"


def test_one_slow_request_teaches_nothing(site: Timed) -> None:
    for _ in range(10):
        site.serve(0.1, times=4)
        site.serve(3.0)
    assert site.strategy == "row"
    assert not site.solves


def test_runs_that_shared_the_devices_teach_nothing(site: Timed) -> None:
    for number in range(20):
        site.submit(f"x{number}", TOKENS)
        site.submit(f"y{number}", TOKENS)
        site.now += 0.4
        first = max(site.work)
        site.answer(first - 1)
        site.answer(first)
        site.tick(1.0)
    assert site.strategy == "row"
    assert not site.solves


def answer_alone(site: Site, plan: Plan, admission: int) -> None:
    """Let a device that is a replica by itself answer a run."""
    frame, device = site.work[admission], plan.root
    body = np.zeros((len(decode_work(frame)[0].sizes), SPEC.hidden), np.float32)
    out = replace(frame, kind="output", source=device, dtype="f32", shape=body.shape, body=body)
    site.event(interface.DeviceFrame(device, out))
    done = replace(frame, kind="done", source=device, dtype="u8", shape=(0,), numbers=(0, 500, 100, 1), body=b"")
    site.event(interface.DeviceFrame(device, done))


def test_slow_replicas_teach_about_their_plan_and_not_about_one_device() -> None:
    site = settled("a", "b", pins=Pins(strategy="replicas", devices=("a", "b")))
    whole = site.plan
    assert len(whole.replicas) == 2
    for number in range(1, 13):
        site.submit(f"r{number}", 16)
        part = next(p for p in whole.replicas if p.version == site.work[number].plan_version)
        site.now += 3 * part.predicted_s
        answer_alone(site, part, number)
    model = site.session.groups.default("m")
    learned = model.methods.corrections(site.now)
    assert learned.factors == {strategy_key(whole): pytest.approx(3.0, rel=0.1)}
    assert learned.factor(replace(whole.replicas[0])) == 1.0
    assert model.correction(site.now, whole) == pytest.approx(3.0, rel=0.1)
    assert model.correction(site.now, whole.replicas[1]) == pytest.approx(3.0, rel=0.1), (
        "by which its next runs are expected"
    )


# -- trials -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "longer", "looks"), [(1.07, 1.09, True), (1.07, 1.06, False), (1.01, 1.04, False), (1.3, 1.12, False)]
)
def test_a_plan_that_takes_longer_than_the_next_best_was_to_take_is_looked_at(
    times: float, longer: float, looks: bool
) -> None:
    site = settled("a", "b", decider=beside(times))
    plan = site.plan
    (model,) = site.session.groups.defaults()
    other = model.last_decision.ranking[1].plan
    for _ in range(8):  # it was tried, so hope has no part in this
        model.methods.record_run(other, other.predicted_tokens, other.predicted_s, site.now)
    site.submit("first")
    site.answer(1)
    site.drift({}, 20)  # whatever the first heartbeats said is planned for then
    searched = site.notes()["drift"]
    for number in range(2, 6):
        site.submit(f"r{number}")
        site.answer(number)
        for _ in range(8):
            model.record_run(plan, plan.predicted_tokens, longer * plan.predicted_s, site.now)
        site.drift({}, 10)
    assert (site.notes()["drift"] > searched) is looks


def trying(times: float) -> Site:
    """Return a site that decides between one device and two; after a trial both are ranked by such prices too."""
    decider = beside(times)
    site = Site(decider=decider)

    def ranked(question: Question, found: Decision, _last: Decision) -> Decision:
        both = decider(replace(question, strategy=None, options={}, devices=None)).ranking
        return replace(found, ranking=(found.chosen, *(c for c in both if c.name != found.chosen.name)))

    site.ranked = ranked
    return site


def serve_for(site: Site, seconds: int, took: Mapping[str, float]) -> list[str]:
    """Let a site serve and return which methods ran; took: times what was predicted, by method."""
    (model,) = site.session.groups.defaults()
    ran = []
    for _ in range(seconds):
        assert model.active is not None
        site.submit(f"r{len(site.work) + 1}", 16)
        site.answer(len(site.work))
        for _ in range(8):
            model.record_run(model.active, 16, took[model.active.strategy] * model.active.predicted_s, site.now)
        if not ran or ran[-1] != model.active.strategy:
            ran.append(model.active.strategy)
        site.drift({}, 1)
        if model.plans.preparing is not None:
            site.ready()
    return ran


@pytest.mark.parametrize(
    ("times", "took", "ran"),
    [
        (1.06, 0.92, ["single", "block"]),  # in truth it is better
        (1.06, 1.0, ["single", "block", "single"]),  # it is as bad as predicted: the first one comes back
        (1.06, 1.5, ["single", "block", "single"]),
        (1.3, 0.8, ["single"]),  # too far behind to be tried
    ],
)
def test_what_is_predicted_to_be_about_as_fast_is_tried_once_and_runs_decide(
    times: float, took: float, ran: list[str]
) -> None:
    site = trying(times)
    site.join("a", "b")
    site.settle()
    taken = {"single": 1.0, "block": took}
    assert serve_for(site, 120, taken) == ran
    trials = site.notes()["trial"]
    assert bool(trials) is (len(ran) > 1)
    assert serve_for(site, 120, taken) == ran[-1:], "what was tried once is not tried again"
    assert site.notes()["trial"] == trials


@pytest.mark.parametrize("pins", [Pins(strategy="single"), Pins(objective="memory")])
def test_nothing_is_tried_where_the_method_is_pinned_or_time_is_not_what_counts(pins: Pins) -> None:
    def decider(asked: Question) -> Decision:
        found = beside(1.06)(replace(asked, objective="latency"))
        told = tuple(replace(c, price=replace(c.price, objective=pins.objective)) for c in found.ranking)
        return replace(found, chosen=told[0], ranking=told)

    site = settled("a", "b", pins=pins, decider=decider)
    assert serve_for(site, 60, {"single": 1.0}) == ["single"]
    assert not site.notes()["trial"]


@pytest.mark.parametrize("memory", [2_000_000, 1 << 30])
def test_nothing_is_tried_that_does_not_fit_beside_what_serves(memory: int) -> None:
    site = trying(1.06)
    site.join("a", "b", memory=memory)
    plan = site.settle()
    assert plan.strategy == "single"
    ran = serve_for(site, 60, {"single": 1.0, "block": 0.9})
    assert ran == (["single"] if memory < 1 << 30 else ["single", "block"])
