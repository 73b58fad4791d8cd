"""A lab's broker, started where another one was a moment ago."""

from __future__ import annotations

import itertools
import socket
import time
from types import SimpleNamespace

import pytest

from hepti_mqtt.errors import ConfigError
from hepti_mqtt.lab import broker

HOST = "127.0.0.1"


def listening() -> socket.socket:
    held = socket.socket()
    held.bind((HOST, 0))
    held.listen()
    return held


@pytest.mark.processes
@pytest.mark.broker
def test_a_broker_waits_for_the_port_of_one_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as before:
        port = before.getsockname()[1]
        waiting = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: before.close())
        monkeypatch.setattr(broker, "time", waiting)
        with broker.started(HOST, port) as after:
            assert after.port == port


def test_a_port_that_stays_taken_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(broker, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None))
    with listening() as other, pytest.raises(ConfigError, match="is taken"):
        broker.started(HOST, other.getsockname()[1])
    assert next(seconds) > broker.PATIENCE_S
