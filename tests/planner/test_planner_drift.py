"""Drift fires after it has held, not before, and rests after a plan."""

from __future__ import annotations

import pytest

from hepti_mqtt.planner import DriftRule


def test_fires_only_after_the_hold_time():
    rule = DriftRule(factor=1.5, hold_s=5, rest_s=0)
    rule.plan_made({"slowdown of a": 1.0}, 0)
    assert rule.observe({"slowdown of a": 2.0}, 1) is None
    assert rule.observe({"slowdown of a": 2.0}, 5.9) is None
    assert "slowdown of a is 2.00 times" in (rule.observe({"slowdown of a": 2.0}, 6) or "")


def test_a_short_spike_resets_the_hold_time():
    rule = DriftRule(factor=1.5, hold_s=5, rest_s=0)
    rule.plan_made({"x": 1.0}, 0)
    rule.observe({"x": 2.0}, 1)
    rule.observe({"x": 1.0}, 4)
    assert rule.observe({"x": 2.0}, 7) is None
    assert rule.observe({"x": 2.0}, 11.9) is None
    assert rule.observe({"x": 2.0}, 12) is not None


def test_slower_and_faster_both_count():
    for value in (0.4, 2.5):
        rule = DriftRule(factor=2, hold_s=0, rest_s=0)
        rule.plan_made({"x": 1.0}, 0)
        assert rule.observe({"x": value}, 1) is not None


def test_what_has_grown_may_count_sooner_than_what_has_shrunk():
    rule = DriftRule(factor=1.2, hold_s=0, rest_s=0)
    rule.plan_made({"x": 1.0}, 0)
    assert rule.observe({"x": 1.1}, 1) is None
    assert rule.observe({"x": 1 / 1.1}, 2, grown=1.05) is None
    assert rule.observe({"x": 1.1}, 3, grown=1.05) is not None


def test_a_disturbance_begins_the_hold_time_and_the_rest_anew():
    rule = DriftRule(factor=1.5, hold_s=5, rest_s=10)
    rule.plan_made({"x": 1.0}, 0)
    rule.observe({"x": 2.0}, 20)
    rule.disturbed(24)
    assert rule.observe({"x": 2.0}, 26) is None
    assert rule.observe({"x": 2.0}, 33) is None
    assert rule.observe({"x": 2.0}, 34) is not None


def test_rests_after_a_plan_and_ignores_what_the_plan_did_not_know():
    rule = DriftRule(factor=1.5, hold_s=1, rest_s=10)
    rule.plan_made({"x": 1.0}, 0)
    assert rule.observe({"x": 1.9, "y": 100.0}, 1) is None
    assert rule.observe({"x": 1.9}, 9) is None
    assert rule.observe({"x": 1.9}, 10) is not None


@pytest.mark.parametrize("value", [8.0, 1 / 8.0])
def test_what_is_grossly_off_waits_for_a_third_of_both_times(value):
    rule = DriftRule(factor=1.3, hold_s=6, rest_s=24)
    rule.plan_made({"x": 1.0}, 0)
    assert rule.observe({"x": value}, 1) is None  # rests for 8 s: 8 is 2 cubed
    assert rule.observe({"x": value}, 7.9) is None
    assert rule.observe({"x": value}, 8.1) is not None
    rule.plan_made({"x": 1.0}, 10)
    assert rule.observe({"x": value}, 30) is None  # holds for 2 s
    assert rule.observe({"x": value}, 31.9) is None
    assert rule.observe({"x": value}, 32.1) is not None


def test_however_far_off_the_rest_is_at_least_the_hold_time_and_whole_after_a_disturbance():
    rule = DriftRule(factor=1.3, hold_s=5, rest_s=15)
    rule.plan_made({"x": 1.0}, 0)
    rule.observe({"x": 1e9}, 1)
    assert rule.observe({"x": 1e9}, 4.9) is None
    assert rule.observe({"x": 1e9}, 5) is not None
    rule.disturbed(6)
    rule.observe({"x": 1e9}, 7)
    assert rule.observe({"x": 1e9}, 20.9) is None
    assert rule.observe({"x": 1e9}, 21) is not None
