"""Waiting for a broker that does not answer yet."""

import threading

import pytest

from hepti_mqtt.core.errors import NetworkError, RefusedError
from hepti_mqtt.transport.base import SAY_S, wait_for_broker


class Site:
    """A broker that answers after `up_s`; each attempt advances the clock by a second."""

    def __init__(self, up_s: float) -> None:
        self.now, self.up_s, self.lines = 0.0, up_s, list[str]()

    def clock(self) -> float:
        return self.now

    def connect(self, left_s: float) -> float:
        self.now += 1.0
        if self.now < self.up_s:
            raise NetworkError("no broker answers")
        return left_s


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr("hepti_mqtt.transport.base.Backoff.pause_s", lambda _self: 0.0)


def test_a_wait_is_logged_at_intervals_and_has_an_end():
    site = Site(up_s=35.0)
    assert wait_for_broker(site.connect, site.lines.append, within_s=100.0, clock=site.clock) == 66.0
    assert len(site.lines) == 1 + 34 // SAY_S
    site = Site(up_s=35.0)
    with pytest.raises(NetworkError):
        wait_for_broker(site.connect, site.lines.append, within_s=20.0, clock=site.clock)
    assert site.now == 20.0
    stop, site = threading.Event(), Site(up_s=1e9)
    assert wait_for_broker(site.connect, lambda _line: stop.set(), stop=stop, clock=site.clock) is None


def test_a_refusal_ends_the_wait():
    def connect(_left_s):
        raise RefusedError("wrong password")

    with pytest.raises(RefusedError):
        wait_for_broker(connect, print)
