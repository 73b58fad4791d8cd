"""The pace of requests and searches."""

from __future__ import annotations

import pytest

from hepti_mqtt.planner.decisions import RULE
from hepti_mqtt.runtime.coordinator.moves import RequestPace, SearchPace


def test_a_model_is_asked_as_often_as_it_was_or_less_often_since() -> None:
    pace = RequestPace()
    assert pace.period_s(5.0) == RULE.in_use_s
    for number in range(60):
        pace.record_request(2.0 * number)
    assert pace.period_s(118.0) == pytest.approx(2.0, rel=0.1)
    assert pace.is_in_use(140.0)
    assert pace.period_s(140.0) == pytest.approx(22.0)
    assert pace.period_s(1e6) == RULE.in_use_s
    assert not pace.is_in_use(1e6)


def test_neither_a_wait_for_the_first_plan_nor_a_pause_hides_the_pace() -> None:
    pace = RequestPace()
    pace.record_request(0.0, served=False)
    pace.begin_service(70.0)
    for number in range(1, 4):
        pace.record_request(70.0 + 2 * number)
    assert pace.period_s(76.0) == pytest.approx(2.0)
    pace = RequestPace()
    for at_s in (0.0, 60.0, *(60.0 + 2 * n for n in range(1, 10))):
        pace.record_request(at_s)
    assert pace.period_s(78.0) < 3.0


def test_what_background_work_takes_is_learned() -> None:
    pace = SearchPace()
    for _ in range(20):
        pace.record_search(3.0)
        pace.record_run(1.6)
    assert (pace.search_s, pace.search_slowdown) == pytest.approx((3.0, 1.6), rel=0.05)
