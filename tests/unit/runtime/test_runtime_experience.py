"""Measured runs decide between plans: slower runs than predicted, and one trial of the next best plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
from scripted_site import Site

from hepti_mqtt.core.plan import Plan
from hepti_mqtt.planner import Candidate, Decision, Question, price
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.search_kinds import SearchKind
from hepti_mqtt.strategies.plan_programs import make_plan, programs_digest

TOKENS = 8
PREDICTED_S = {"row": 0.1, "single": 0.15}


def candidate(question: Question, strategy: str, devices: tuple[str, ...], seconds: float) -> Candidate:
    template = Plan(question.naming.model, question.plan_version, strategy, devices, "a")
    options = {"variant": "kv"} if strategy == "row" else {}
    plan = make_plan(question.spec, template, strategy, options, (1.0,) * len(devices))
    plan = replace(plan, predicted_s=seconds, predicted_tokens=TOKENS)
    return Candidate(plan, replace(price(question, plan), seconds=seconds), (1.0,) * len(devices))


def two(predicted: Mapping[str, float], question: Question) -> Decision:
    """Decide between a split and one device, with given predictions."""
    places = {"row": ("a", "b"), "single": ("a",)}
    usable = {key: seconds for key, seconds in predicted.items() if question.cluster.devices.keys() >= {*places[key]}}
    candidates = [candidate(question, strategy, places[strategy], seconds) for strategy, seconds in usable.items()]
    candidates = [replace(c, price=replace(c.price, objective=question.objective)) for c in candidates]
    ranking = tuple(sorted(candidates, key=lambda c: c.price.expected_s))
    return Decision(ranking[0], ranking, "", question.cluster, programs_digest(question.spec, ranking[0].plan))


class Timed(Site):
    """A site with given prices of plans and durations of runs."""

    def __init__(self, predicted: Mapping[str, float], pins: Pins | None, room: bool) -> None:
        super().__init__(decider=partial(two, predicted), pins=pins)
        self.count, self.room = 0, room

    def solve(self, command: interface.Solve) -> None:
        if command.kind is SearchKind.HURRIED:  # for who would serve next: nobody, here
            self.solves.remove(command)
            return
        ranking = self.decider(command.question).ranking
        if command.plans:
            ranking = tuple(c for c in ranking if c.plan.strategy == command.plans[0].strategy)
        ranking = tuple(replace(c, fits_next_to_others=self.room) for c in ranking)
        digest = programs_digest(command.question.spec, ranking[0].plan)
        decision = Decision(ranking[0], ranking, "", command.question.cluster, digest)
        active = None
        if command.active is not None:
            prices = self.decider(command.question).ranking
            priced = next(c for c in prices if c.plan.strategy == command.active.strategy)
            active = replace(priced, plan=command.active)
        self.event(interface.Solved(command.model, command.ticket, decision, active))

    def serve(self, row_s: float, single_s: float = PREDICTED_S["single"], times: int = 1) -> list[str]:
        """Let requests run one after the other; return the methods that served, one after the other."""
        ran: list[str] = []
        for _ in range(times):
            self.count += 1
            ran += [self.strategy] if ran[-1:] != [self.strategy] else []
            self.submit(f"r{self.count}", TOKENS)
            self.now += row_s if self.strategy == "row" else single_s
            self.answer(max(self.work))
            self.tick(1.0)
            self.ready()
        return ran

    @property
    def strategy(self) -> str:
        plan = self.plan
        return plan.strategy


def serving(predicted: Mapping[str, float] = PREDICTED_S, pins: Pins | None = None, room: bool = True) -> Timed:
    """Return a site that has its first plan."""
    site = Timed(predicted, pins, room)
    site.join("a", "b")
    site.settle()
    return site


@pytest.fixture
def site() -> Timed:
    site = serving()
    site.serve(0.1, times=30)  # the first heartbeats tell more than the joins did, which is searched once
    site.solves.clear()
    return site


def test_a_split_that_is_slower_than_one_device_gives_way_to_it_and_stays_away(site: Timed) -> None:
    site.serve(0.25, single_s=0.16, times=60)
    assert site.strategy == "single"
    assert [bool(solve.plans) for solve in site.solves] == [True], "a search of named plans only"


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


# -- trials -----------------------------------------------------------------------------------------------------------

CLOSE = {"single": 0.1, "row": 0.104}


@pytest.mark.parametrize(
    ("row_s", "ran"),
    [
        (0.085, ["single", "row"]),  # in truth it is better
        (0.125, ["single", "row", "single"]),  # it is worse than predicted: the first one comes back
        (0.2, ["single", "row", "single"]),
    ],
)
def test_what_may_be_faster_is_tried_once_and_runs_decide(row_s: float, ran: list[str]) -> None:
    site = serving(CLOSE)
    assert site.serve(row_s, 0.1, times=120) == ran
    assert any("runs will tell" in step.why for step in site.session.stories()[0].last())
    assert site.serve(row_s, 0.1, times=120) == ran[-1:], "what was tried once is not tried again"


@pytest.mark.parametrize(
    ("row_s", "pins", "room"),
    [
        (0.104, Pins(strategy="single"), True),
        (0.104, Pins(objective="memory"), True),
        (0.16, None, True),  # far behind
        (0.104, None, False),  # it does not fit beside the plan that serves
    ],
)
def test_nothing_is_tried_that_is_pinned_far_behind_or_too_large_or_if_time_does_not_count(row_s, pins, room) -> None:
    site = serving({"single": 0.1, "row": row_s}, pins, room)
    assert site.serve(0.05, 0.1, times=60) == ["single"]
