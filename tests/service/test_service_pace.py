"""Searches that leave the processor to requests, by clocks of the tests' own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sites import FAMILIES

from hepti_mqtt.cost.profiles import Cluster, Curve, DeviceProfile, Link
from hepti_mqtt.cost.simulator import Naming
from hepti_mqtt.ids import Epoch
from hepti_mqtt.models import shape_for
from hepti_mqtt.planner import Question, decide
from hepti_mqtt.runtime.coordinator.interface import Solve
from hepti_mqtt.service.threads import AGAIN, IN_HAND_S, LOOKS_S, MOST_S, Pace

SPEC = FAMILIES["bert-embedding"]
DEVICES = {n: DeviceProfile(n, (Curve(32, 32, ((1, 1e-5), (32, 1e-4))),), 1e9, 1e9, 1e-5, 1e9) for n in ("a", "b")}
CLUSTER = Cluster(DEVICES, {n: Link() for n in DEVICES})
QUESTION = Question(Naming("home", "m"), SPEC, CLUSTER, shape_for(SPEC, 8), Epoch(1, 2))
PLAN = decide(QUESTION).chosen.plan


class Processor:
    """A processor of which a search gets a part; `waited` has its pauses."""

    def __init__(self) -> None:
        self.now_s = self.computed_s = 0.0
        self.waited: list[float] = []
        self.in_hand_until_s = 0.0
        clocks = (lambda: self.now_s, lambda: self.computed_s)
        self.pace = Pace(lambda: self.now_s < self.in_hand_until_s, *clocks, self.sleep, self.wait)

    def compute(self, seconds: float, part: float) -> None:
        self.now_s += seconds / part
        self.computed_s += seconds

    def wait(self, seconds: float) -> None:
        self.sleep(seconds)
        self.waited.append(seconds)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def searching(processor: Processor, **changes: Any) -> Solve:
    return processor.pace.paced(replace(Solve("m", 1, QUESTION, PLAN), **changes))


@pytest.mark.parametrize(("part", "pause"), [(1.0, 0.0), (0.5, AGAIN * 0.1), (0.25, AGAIN * 0.3), (0.01, MOST_S)])
def test_a_search_that_has_to_wait_for_the_processor_leaves_it_to_requests(part: float, pause: float) -> None:
    processor = Processor()
    processor.pace.serving(True)
    pauses = searching(processor).question.pause
    processor.compute(5.0, 0.1)  # another search, long ago
    pauses()
    for _ in range(3):
        processor.compute(0.1, part)
        pauses()
    assert processor.waited == pytest.approx([pause] * 3)


@pytest.mark.parametrize(("seconds", "pause"), [(0.0, 0.0), (0.1, 0.1), (60.0, IN_HAND_S)])
def test_a_search_does_nothing_while_the_planner_has_something_in_hand(seconds: float, pause: float) -> None:
    processor = Processor()
    processor.in_hand_until_s = seconds
    searching(processor).question.pause()
    assert processor.now_s == pytest.approx(pause, abs=LOOKS_S)


def test_a_search_does_nothing_while_an_event_is_dealt_with() -> None:
    processor = Processor()
    pauses = searching(processor).question.pause
    processor.pace.first(pauses)
    assert processor.now_s == pytest.approx(IN_HAND_S, abs=LOOKS_S)
    with pytest.raises(ZeroDivisionError):
        processor.pace.first(lambda: print(1 / 0))
    pauses()
    assert processor.now_s == pytest.approx(IN_HAND_S, abs=LOOKS_S), "it is over"


def test_nobody_is_left_the_processor_who_does_not_ask() -> None:
    processor = Processor()
    pauses = searching(processor).question.pause
    for _ in range(3):
        processor.compute(0.1, 0.25)
        pauses()
    assert processor.waited == []


@pytest.mark.parametrize("changes", [{"hurried": True}, {"running": None}])
def test_a_search_that_requests_wait_for_has_no_pauses(changes: dict[str, Any]) -> None:
    processor = Processor()
    processor.pace.serving(True)
    assert searching(processor, **changes).question.pause is QUESTION.pause


def test_every_price_of_a_search_may_be_paused_at() -> None:
    paused: list[int] = []
    decide(replace(QUESTION, pause=lambda: paused.append(1)))
    assert len(paused) > 5
