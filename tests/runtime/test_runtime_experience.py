"""A plan that turns out slower than predicted is given up for one that is faster; on a virtual clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scripted_site import SPEC, Site

from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import make_plan, programs_digest
from hepti_mqtt.planner import Candidate, Decision, Question, price
from hepti_mqtt.planner.estimates import way
from hepti_mqtt.protocol.frames import decode_work
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.requests import Pins

TOKENS = 8
PREDICTED_S = {"row": 0.1, "single": 0.15}


def candidate(question: Question, strategy: str, devices: tuple[str, ...]) -> Candidate:
    template = Plan(question.naming.model, question.epoch, strategy, devices, "a")
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
        plan = self.session.plan("m")
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
    (note,) = (
        c for c in site.seen if isinstance(c, interface.Note) and c.kind in {"drift", "trial"} and "row" in c.text
    )
    assert "row/kv" in note.text


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
    frame, device = site.work[admission], plan.head
    body = np.zeros((len(decode_work(frame)[0].sizes), SPEC.hidden), np.float32)
    out = replace(frame, kind="output", source=device, dtype="f32", shape=body.shape, body=body)
    site.event(interface.UpFrame(device, out))
    done = replace(frame, kind="done", source=device, dtype="u8", shape=(0,), numbers=(2000, 500, 100, 1), body=b"")
    site.event(interface.UpFrame(device, done))


def test_slow_replicas_teach_about_their_plan_and_not_about_one_device() -> None:
    site = Site(pins=Pins(strategy="replicas", devices=("a", "b")))
    site.join("a", "b")
    whole = site.settle()
    assert len(whole.replicas) == 2
    for number in range(1, 5):
        site.submit(f"r{number}", 16)
        part = next(p for p in whole.replicas if p.epoch == site.work[number].epoch)
        site.now += 3 * part.predicted_s
        answer_alone(site, part, number)
    model = site.session.slots.own("m")
    learned = model.experience.learned(site.now)
    assert learned.factors == {way(whole): pytest.approx(3.0)}
    assert learned.factor(replace(whole.replicas[0])) == 1.0
    assert model.learned(site.now, whole) == pytest.approx(3.0)
    assert model.learned(site.now, whole.replicas[1]) == pytest.approx(3.0), "by which its next runs are expected"
