"""Runs teach how far the simulator is off, by way of dividing a model; the search compares by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Experience, Learned
from hepti_mqtt.planner.estimates import ENOUGH, FORGET_S, LEAST, MOST, TRIED_S, way

SPLIT = Plan("m", Epoch(1, 1), "row", ("a", "b"), "a", {"attention": "kv"}, predicted_s=0.2, predicted_tokens=100)
OTHER = replace(SPLIT, strategy="column", options={})
SINGLE = replace(SPLIT, strategy="single", devices=("a",), options={})


def after(*seconds, plan=SPLIT, tokens=100, at=0.0):
    experience = Experience()
    for s in seconds:
        experience.ran(plan, tokens, s, at)
    return experience


def test_nothing_is_learned_from_too_few_runs():
    assert after(*[0.4] * (ENOUGH - 1)).learned(0.0) == Learned()
    assert after(*[0.4] * ENOUGH).learned(0.0).factor(SPLIT) == pytest.approx(2.0)


def test_it_is_the_median_so_that_one_stall_teaches_nothing():
    assert after(0.2, 0.2, 9.0, 0.2).learned(0.0).factor(SPLIT) == pytest.approx(1.0)


def test_a_way_that_was_never_used_is_as_far_off_as_the_others_and_one_device_is_not():
    learned = after(*[0.4] * ENOUGH).learned(0.0)
    assert learned.factor(OTHER) == pytest.approx(2.0)
    assert learned.factor(replace(SPLIT, wire="f16")) == pytest.approx(2.0)
    assert learned.factor(SINGLE) == 1.0
    assert after(*[0.4] * ENOUGH, plan=SINGLE).learned(0.0).factor(SPLIT) == 1.0


def test_a_prediction_that_was_far_too_long_makes_its_way_hardly_better():
    assert after(*[0.05] * ENOUGH).learned(0.0).factor(SPLIT) == LEAST


def test_what_is_long_past_is_forgotten():
    experience = after(*[0.4] * ENOUGH)
    assert experience.learned(FORGET_S - 1).factors == {way(SPLIT): pytest.approx(2.0)}
    assert experience.learned(FORGET_S).factors == {}


@pytest.mark.parametrize("tokens", [10, 79, 126, 500])
def test_another_length_than_the_predicted_one_teaches_nothing(tokens):
    assert after(*[0.4] * ENOUGH, tokens=tokens).learned(0.0) == Learned()


def test_a_length_near_the_predicted_one_is_scaled():
    assert after(*[0.44] * ENOUGH, tokens=110).learned(0.0).factor(SPLIT) == pytest.approx(2.0)


@given(st.lists(st.floats(1e-6, 1e6), max_size=20))
def test_a_factor_stays_within_bounds(seconds):
    assert LEAST <= after(*seconds).learned(0.0).factor(SPLIT) <= MOST


def side_by_side(*groups, **options):
    """Return replicas of one device each, or of several that a split divides."""
    inside = [replace(SPLIT, devices=g) if len(g) > 1 else replace(SINGLE, devices=g, head=g[0]) for g in groups]
    devices = tuple(device for group in groups for device in group)
    return replace(SPLIT, strategy="replicas", options=options, devices=devices, replicas=tuple(inside))


def test_what_replicas_teach_is_of_their_whole_plan_and_makes_none_of_its_parts_slower():
    whole = side_by_side(("a",), ("b",))
    experience = Experience()
    for _ in range(ENOUGH):
        for part in whole.replicas:
            experience.ran(part, 100, 0.6, 0.0, whole)
    learned = experience.learned(0.0)
    assert learned.factor(whole) == pytest.approx(3.0)
    assert learned.factor(SINGLE) == 1.0
    assert learned.factor(SPLIT) == 1.0, "a division that exchanges something was not tried"
    assert learned.factor(side_by_side(("a",), ("b",), ("c",))) == 1.0
    assert learned.factor(side_by_side(("a", "b"), ("c", "d"), groups="2")) == 1.0


def test_replicas_that_were_never_used_are_as_far_off_as_their_plans_by_themselves():
    learned = after(*[0.4] * ENOUGH).learned(0.0)
    assert learned.factor(side_by_side(("a", "b"), ("c", "d"), groups="2")) == pytest.approx(2.0)
    assert learned.factor(side_by_side(("a", "b"), ("c",), groups="2")) == pytest.approx(2.0**0.5)
    assert learned.factor(side_by_side(("a",), ("b",))) == 1.0


def test_what_is_learned_takes_as_much_room_whatever_the_devices_are_called():
    experience = Experience()
    for number in range(100):
        whole = side_by_side((f"a{number}",), (f"b{number}",))
        for part in whole.replicas * ENOUGH:
            experience.ran(part, 100, 0.6, 0.0, whole)
    assert list(experience.learned(0.0).factors) == [way(whole)]


def test_what_ran_since_a_link_failed_is_forgotten_and_no_more():
    experience = after(*[0.4] * ENOUGH, at=10.0)
    for _ in range(ENOUGH):
        experience.ran(SPLIT, 100, 0.8, 30.0)
    experience.forget(20.0)
    assert experience.learned(30.0).factor(SPLIT) == pytest.approx(2.0)
    experience.forget(5.0)
    assert not experience.learned(30.0).factors


def test_a_way_has_its_turn_until_it_has_run_often_enough_and_again_after_an_hour():
    hopeful = replace(after(*[0.2] * (ENOUGH - 1)).learned(0.0), hope=0.9)
    assert hopeful.hoped(SINGLE) == 0.9
    experience = after(*[0.2] * ENOUGH)
    for now, split, other in [(0.0, 1.0, 0.9), (FORGET_S, 1.0, 0.9), (TRIED_S, 0.81, 0.81)]:
        assert replace(experience.learned(now), hope=0.9).hoped(SPLIT) == pytest.approx(split)
        assert replace(experience.learned(now), hope=0.9).hoped(OTHER) == pytest.approx(other)
        assert experience.learned(now).hoped(OTHER) == 1.0, "only where a search is for trying"
    experience.forget(-1.0)
    assert replace(experience.learned(0.0), hope=0.9).hoped(SPLIT) == 1.0, "it ran, whatever it taught"


def test_the_first_plan_of_several_devices_may_promise_twice_as_much():
    alone = replace(after(*[0.2] * ENOUGH, plan=SINGLE).learned(0.0), hope=0.9)
    assert alone.hoped(SPLIT) == pytest.approx(0.81), "no runs have told what exchanges take"
    assert alone.hoped(replace(SINGLE, wire="f16")) == 0.9
    assert alone.hoped(side_by_side(("a",), ("b",))) == 0.9, "replicas exchange nothing"
    assert replace(alone, tried=frozenset({way(OTHER)})).hoped(SPLIT) == 0.9
