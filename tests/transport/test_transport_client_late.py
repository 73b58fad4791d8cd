"""An attempt to connect that outlasts the wait for it, as where a name is looked up slowly."""

from __future__ import annotations

import threading

import pytest

from hepti_mqtt.errors import NetworkError
from hepti_mqtt.transport import Connected

PATIENCE_S = 20.0

pytestmark = pytest.mark.broker


@pytest.fixture
def late(mosquitto, peers, monkeypatch):
    """A peer whose attempts to connect, counted, hang until `found`, as in the look-up of a name."""
    monkeypatch.setattr("hepti_mqtt.transport.client.LATE_S", 0.0)
    peer = peers(mosquitto.url, connect=False)
    honest, peer.found, peer.attempts = peer.transport._open, threading.Event(), 0

    def hang(_timeout_s):
        peer.attempts += 1
        peer.found.wait(PATIENCE_S)
        return honest(PATIENCE_S)

    monkeypatch.setattr(peer.transport, "_open", hang)
    for _ in range(2):
        with pytest.raises(NetworkError, match="no broker answers"):
            peer.transport.connect(0.0)
    yield peer
    peer.found.set()


def test_the_next_connect_waits_for_an_attempt_that_is_late(late):
    late.found.set()
    late.transport.connect(PATIENCE_S)
    late.await_state(Connected)
    assert late.attempts == 1
    with pytest.raises(ValueError, match="once"):
        late.transport.connect()


def test_an_attempt_that_is_late_and_fails_is_told_and_the_next_one_begins_anew(late):
    versions = late.transport._versions
    order, versions.order = versions.order, ()
    late.found.set()
    with pytest.raises(NetworkError, match="no version"):
        late.transport.connect(PATIENCE_S)
    versions.order = order
    late.transport.connect(PATIENCE_S)
    assert late.attempts == 2


def test_close_gives_an_attempt_up_that_is_late(late):
    thread = late.transport._thread
    late.transport.close()
    late.found.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert late.states.empty()
    with pytest.raises(ValueError, match="after close"):
        late.transport.connect()
