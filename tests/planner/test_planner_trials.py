"""What is tried beside the plan that serves, on what was measured of four boards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.config import settings
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.cost.simulator import Naming
from hepti_mqtt.ids import Epoch
from hepti_mqtt.models import shape_for
from hepti_mqtt.planner import (
    KNOWN,
    Candidate,
    Decision,
    Learned,
    Question,
    compared,
    decide,
    fits_beside,
    hopeful,
    worth_trying,
)
from hepti_mqtt.planner.decisions import LOADS_S
from hepti_mqtt.planner.estimates import HOPE, way

SPEC = replace(spec_of_kind("bert-base"), layers=2)
SITE = load_site(settings.find_bundled_config("sites", Path("four-pi4")))
QUESTION = Question(Naming("home", "m"), SPEC, SITE, shape_for(SPEC, 128), Epoch(1, 1))


@pytest.fixture(scope="module")
def last() -> Decision:
    found = decide(QUESTION)
    assert len(found.ranking) > 3
    return found


def taking(c: Candidate, seconds: float) -> Candidate:
    return replace(c, price=replace(c.price, seconds=seconds))


def between(last: Decision, other_s: float) -> Decision:
    """Return a decision in which the chosen plan takes a second and the next one another time, and nothing is near."""
    first, second, *others = last.ranking
    ranking = (taking(first, 1.0), taking(second, other_s), *(taking(c, 9.0) for c in others))
    return replace(last, chosen=ranking[0], ranking=ranking)


@pytest.mark.parametrize(
    ("other_s", "runs", "other", "tried"),
    [
        (0.99 * KNOWN / HOPE, 1.0, None, True),
        (1.01 * KNOWN / HOPE, 1.0, None, False),
        (1.01 * KNOWN / HOPE, 1.1, None, True),  # ours takes longer than it was to take
        (0.99 * KNOWN, 1.0, 1.0, True),  # it has run: no hope
        (1.01 * KNOWN, 1.0, 1.0, False),
        (1.2, 1.0, 0.7, True),
        (0.5, None, None, False),  # nobody knows what ours takes
    ],
)
def test_the_next_way_tried_where_it_may_be_faster(
    last: Decision, other_s: float, runs: float | None, other: float | None, tried: bool
) -> None:
    first, second, *_ = last.ranking
    told = {way(c.plan): factor for c, factor in ((first, runs), (second, other)) if factor is not None}
    # Where ours is known and alone, another split is taken to be as far off; one that has run is not.
    if runs == 1.1:
        told |= {way(replace(second.plan, strategy="block")): 1 / 1.1}
    found = worth_trying(between(last, other_s), Learned(told))
    assert (found is not None) is tried
    if found is not None:
        assert found.name == second.name
        assert worth_trying(between(last, other_s), Learned(told), {way(found.plan)}) is None


def test_the_first_plan_of_several_devices_tried_from_further_behind(last: Decision) -> None:
    alone = next(c for c in last.ranking if len(c.plan.devices) == 1)
    split = next(c for c in last.ranking if len(c.plan.devices) > 1)
    learned = Learned({way(alone.plan): 1.0})
    for seconds, tried in [(0.99 * KNOWN / HOPE**2, True), (1.01 * KNOWN / HOPE**2, False)]:
        ranking = (taking(alone, 1.0), taking(split, seconds))
        found = worth_trying(replace(last, chosen=ranking[0], ranking=ranking), learned)
        assert (found is not None) is tried


def test_nothing_tried_for_other_objectives(last: Decision) -> None:
    found = between(last, 0.9)
    throughput = replace(found.chosen, price=replace(found.chosen.price, objective="throughput"))
    known = Learned({way(found.chosen.plan): 1.0})
    assert worth_trying(found, known) is not None
    assert worth_trying(replace(found, chosen=throughput), known) is None


def test_what_fits_beside_has_the_memory_of_both_and_loads_soon(last: Decision) -> None:
    other = next(c for c in last.ranking if c.plan.strategy != last.chosen.plan.strategy and len(c.plan.devices) > 1)
    assert fits_beside(SPEC, last, other)
    tight = replace(other, price=replace(other.price, room=other.price.needs))
    assert not fits_beside(SPEC, last, tight)
    same = replace(last.chosen, price=replace(last.chosen.price, room={d: 2 * n for d, n in other.price.room.items()}))
    assert fits_beside(SPEC, last, same), "its weights are there already"
    slow = {n: replace(link, down_bytes_per_s=1e6 / LOADS_S) for n, link in SITE.links.items()}
    assert not fits_beside(SPEC, replace(last, cluster=replace(SITE, links=slow)), other)


def test_after_a_trial_the_ways_before_it_are_ranked_beside_it_by_the_prices_of_now(last: Decision) -> None:
    slower = replace(SITE, devices={n: replace(d, slowdown=1.5 * d.slowdown) for n, d in SITE.devices.items()})
    tried = last.ranking[1].plan
    asked = replace(QUESTION, cluster=slower, learned=hopeful(Learned({way(last.chosen.plan): 1.0})))
    found = decide(replace(asked, strategy=tried.strategy, options=tried.options, devices=tried.devices))
    assert {c.plan.strategy for c in found.ranking} == {tried.strategy}
    assert found.chosen.price.cost[0] == pytest.approx(HOPE * found.chosen.price.expected_s)
    ranked = compared(asked, found, last)
    assert ranked.chosen == ranked.ranking[0] == found.chosen
    names = [c.name for c in ranked.ranking]
    assert last.chosen.name in names
    assert len(set(names)) == len(names)
    now = next(c for c in ranked.ranking if c.name == last.chosen.name)
    assert now.price.seconds > 1.2 * last.chosen.price.seconds


def test_a_way_whose_device_has_left_is_not_ranked(last: Decision) -> None:
    gone = last.chosen.plan.devices[-1]
    left = replace(SITE, devices={n: d for n, d in SITE.devices.items() if n != gone})
    asked = replace(QUESTION, cluster=left)
    found = decide(replace(asked, strategy="single"))
    assert all(gone not in c.plan.devices for c in compared(asked, found, last).ranking)
