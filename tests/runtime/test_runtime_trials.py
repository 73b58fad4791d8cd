"""A plan beside the next best one: looked at if its runs take longer, tried once, and runs decide; a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from scripted_site import Site, beside

from hepti_mqtt.planner import Decision, Question
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.requests import Pins


@pytest.mark.parametrize(
    ("times", "longer", "looks"), [(1.07, 1.09, True), (1.07, 1.06, False), (1.01, 1.04, False), (1.3, 1.12, False)]
)
def test_a_plan_that_takes_longer_than_the_next_best_was_to_take_is_looked_at(
    times: float, longer: float, looks: bool
) -> None:
    site = Site(decider=beside(times))
    site.join("a", "b")
    plan = site.settle()
    (model,) = site.session.slots.models()
    assert model.latest is not None
    other = model.latest.ranking[1].plan
    for _ in range(8):  # it was tried, so hope has no part in this
        model.experience.ran(other, other.predicted_tokens, other.predicted_s, site.now)
    for number in range(1, 5):
        site.submit(f"r{number}")
        site.answer(number)
        for _ in range(8):
            model.ran(plan, plan.predicted_tokens, longer * plan.predicted_s, site.now)
        site.drift({}, 10)
    told = [c.text for c in site.seen if isinstance(c, interface.Note) and c.kind == "drift"]
    assert any("the time of" in text for text in told) is looks, told


def trying(times: float) -> Site:
    """Return a site that decides between one device and two; after a trial both are ranked by such prices too."""
    decider = beside(times)
    site = Site(decider=decider)

    def ranked(question: Question, found: Decision, _last: Decision) -> Decision:
        both = decider(replace(question, strategy=None, options={}, devices=None)).ranking
        return replace(found, ranking=(found.chosen, *(c for c in both if c.name != found.chosen.name)))

    site.ranked = ranked
    return site


def serve(site: Site, seconds: int, took: Mapping[str, float]) -> list[str]:
    """Let a site serve and return which methods ran; took: times what was predicted, by method."""
    (model,) = site.session.slots.models()
    ran = []
    for _ in range(seconds):
        assert model.active is not None
        site.submit(f"r{len(site.work) + 1}", 16)
        site.answer(len(site.work))
        for _ in range(8):
            model.ran(model.active, 16, took[model.active.strategy] * model.active.predicted_s, site.now)
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
    assert serve(site, 120, taken) == ran
    trials = site.notes()["trial"]
    assert bool(trials) is (len(ran) > 1)
    assert serve(site, 120, taken) == ran[-1:], "what was tried once is not tried again"
    assert site.notes()["trial"] == trials


@pytest.mark.parametrize("pins", [Pins(strategy="single"), Pins(objective="memory")])
def test_nothing_is_tried_where_the_method_is_pinned_or_time_is_not_what_counts(pins: Pins) -> None:
    def decider(asked: Question) -> Decision:
        found = beside(1.06)(replace(asked, objective="latency"))
        told = tuple(replace(c, price=replace(c.price, objective=pins.objective)) for c in found.ranking)
        return replace(found, chosen=told[0], ranking=told)

    site = Site(pins=pins, decider=decider)
    site.join("a", "b")
    site.settle()
    assert serve(site, 60, {"single": 1.0}) == ["single"]
    assert not site.notes()["trial"]


@pytest.mark.parametrize("memory", [2_000_000, 1 << 30])
def test_nothing_is_tried_that_does_not_fit_beside_what_serves(memory: int) -> None:
    site = trying(1.06)
    site.join("a", "b", memory=memory)
    plan = site.settle()
    assert plan.strategy == "single"
    ran = serve(site, 60, {"single": 1.0, "block": 0.9})
    assert ran == (["single"] if memory < 1 << 30 else ["single", "block"])
