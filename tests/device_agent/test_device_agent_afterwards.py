"""Whether a measurement is still believed, on a virtual clock; and what measuring again takes."""

from __future__ import annotations

import logging
from itertools import pairwise
from types import SimpleNamespace

import pytest

from device_agent import background
from device_agent.background import AGAIN_S, WRONG, WRONG_FOR_S, Afterwards, Doubts


def looks(doubts, slowdown, start, seconds):
    """Look every second; return the times at which the device is to be measured again."""
    return [now for now in range(start, start + seconds) if doubts.look(slowdown, now)]


def test_requests_that_tell_otherwise_for_long_are_believed():
    for slowdown in (WRONG * 1.1, 1 / WRONG / 1.1):
        assert looks(Doubts(), slowdown, 0, 60)[0] == WRONG_FOR_S


def test_what_is_nearly_right_or_short_is_no_reason():
    doubts = Doubts()
    assert not looks(doubts, WRONG * 0.9, 0, 200)
    assert not looks(doubts, 2.0, 200, int(WRONG_FOR_S) - 5)
    doubts.look(1.1, 300)
    assert not looks(doubts, 2.0, 301, int(WRONG_FOR_S) - 5)


def test_pauses_between_requests_do_not_make_it_right():
    doubts = Doubts()
    looks(doubts, 2.0, 0, 20)
    assert not looks(doubts, 1.0, 20, 100), "nothing runs"
    assert looks(doubts, 2.0, 120, 20)


def test_what_stays_wrong_is_measured_more_and_more_rarely():
    doubts = Doubts()
    times = []
    for now in range(4000):
        if doubts.look(2.0, now):
            doubts.measured(now)
            times.append(now)
    assert [b - a for a, b in pairwise(times)] == [AGAIN_S, 2 * AGAIN_S]


@pytest.mark.parametrize(("free", "takes"), [(200, 100), (30, 30)])
def test_measuring_again_takes_what_is_free_beside_the_weights_and_gives_it_back(monkeypatch, free, takes):
    told, curves = [], {"linear": []}
    monkeypatch.setattr(background, "free_memory", lambda: free)
    monkeypatch.setattr(background, "return_memory", lambda: told.append("given back"))
    monkeypatch.setattr(background, "cache_directory", lambda: None)

    def measured(places, workers, memory_bytes, **_):
        told.append(memory_bytes)
        return curves, False

    monkeypatch.setattr(background, "self_measurement", measured)
    meter = SimpleNamespace(measured=lambda new: told.append(new is curves))
    log = logging.getLogger("test")
    after = Afterwards([], 1, 100, meter, lambda: 0.0, lambda: told.append("told"), steady=False, log=log)
    after._measure(anew=True)
    assert told == [takes, "given back", True, "told"]
