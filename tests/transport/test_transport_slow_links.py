"""A link of paho's over which a message takes longer than a broker may keep silent."""

from __future__ import annotations

import select
import socket

import pytest

from hepti_mqtt.transport import BrokerUrl, Disconnected, PahoTransport
from hepti_mqtt.transport.base import KEEPALIVE_S
from hepti_mqtt.transport.control import STALLED_S, SUBACK_S, _Flow
from hepti_mqtt.transport.sockets import unacknowledged
from hepti_mqtt.wire.topics import publish_bytes

PATIENCE_S = 20.0
STEP_S = 0.4 * KEEPALIVE_S
PINGREQ = b"\xc0\0"


class Slow:
    """A connection that the test drives turn by turn, the broker's end of it, and a clock to set."""

    def __init__(self, monkeypatch, connack=b"\x20\x02\0\0", filters=()):
        with socket.create_server(("127.0.0.1", 0)) as server:
            here = socket.create_connection(server.getsockname())
            self.there, _ = server.accept()
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1_000_000)
        self.there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
        self.there.settimeout(PATIENCE_S)
        self.now, self.states = 1000.0, []
        monkeypatch.setattr("paho.mqtt.client.time_func", lambda: self.now)
        monkeypatch.setattr("hepti_mqtt.transport.control.time.monotonic", lambda: self.now)
        monkeypatch.setattr("paho.mqtt.client.socket.create_connection", lambda *_, **__: here)
        url = BrokerUrl.parse("mqtt://b")
        self.transport = PahoTransport(
            url, "a", on_message=lambda *_: None, on_state=self.states.append, protocol=4, clean=False
        )
        if filters:
            self.transport.subscribe(filters)
        self.client = self.transport._client = self.transport._new_client(PATIENCE_S)
        monkeypatch.setattr(self.client, "loop_start", lambda: None)
        self.client.begin(url)
        self.client._sockpairR, self.client._sockpairW = self.pair = socket.socketpair()
        for end in self.pair:
            end.setblocking(False)
        self.client.reconnect()
        self.there.sendall(connack)
        while not self.transport.connected:
            self.client._loop(0.1)
        self.there.recv(1000)

    def later(self, seconds):
        """Let time pass, in which the connection has its turns."""
        until = self.now + seconds
        while self.now < until:
            self.now += 1.1
            self.client._loop(0.0)

    def turns(self):
        while self.client.want_write() and select.select([], [self.client.socket()], [], 0)[1]:
            self.client._loop(0.0)

    def ended(self):
        return [state.reason for state in self.states if isinstance(state, Disconnected)]

    def close(self):
        self.there.close()
        for end in self.pair:
            end.close()
        if self.client.socket() is not None:
            self.client.socket().close()


@pytest.fixture
def slow(monkeypatch):
    made = []

    def make(**options):
        made.append(Slow(monkeypatch, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_broker_that_reads_a_large_message_slowly_is_not_given_up(slow):
    """What it has not read yet lies in our own queue first, and then in the kernel."""
    slow = slow()
    begun, payload = slow.now, bytes(8_000_000)
    slow.transport.publish("t", payload, 1)
    slow.turns()
    left, kernel = publish_bytes("t", len(payload), 1), 0
    while left:
        slow.later(STEP_S)
        while slow.client.want_write() and not select.select([], [slow.client.socket()], [], 0)[1]:
            left -= len(slow.there.recv(min(left, 100_000)))
        left -= len(slow.there.recv(min(left, 100_000)))
        kernel += not slow.client.want_write()
    assert slow.now - begun > 3 * STALLED_S
    assert kernel * STEP_S > STALLED_S
    while unacknowledged(slow.client.socket()):
        continue
    slow.later(3.0)
    assert slow.there.recv(2) == PINGREQ
    assert slow.ended() == []
    slow.later(STALLED_S + 2.0)
    assert slow.ended() == [f"the broker has not answered for {KEEPALIVE_S} s"]


def test_a_broker_that_reads_no_more_of_a_message_is_given_up(slow):
    slow = slow()
    slow.transport.publish("t", bytes(8_000_000), 1)
    slow.turns()
    slow.later(STALLED_S - 2.0)
    assert slow.ended() == []
    slow.later(5.0)
    assert slow.ended() == [f"the broker has taken nothing for {STALLED_S} s"]


def test_a_broker_that_does_not_answer_is_given_up_though_we_send_a_little(slow):
    slow = slow()
    slow.later(KEEPALIVE_S + 2.0)
    assert slow.there.recv(1000) == PINGREQ
    for _ in range(10):
        if slow.ended():
            return
        slow.transport.publish("t", b"small")
        slow.turns()
        slow.later(1.0)
    raise AssertionError("it was not given up")


@pytest.mark.parametrize("resumed", [True, False])
def test_bytes_of_a_session_that_the_broker_kept_put_off_when_it_must_have_acknowledged(slow, resumed):
    """It sends what it kept before it reads our SUBSCRIBE; without a session it may have forgotten that one."""
    slow = slow(connack=b"\x20\x02\1\0" if resumed else b"\x20\x02\0\0", filters=[("f", 1)])
    for piece in (b"\x32\x7f", b"\0\1t"):
        slow.now += 0.7 * SUBACK_S
        slow.there.sendall(piece)
        slow.client._loop(PATIENCE_S)
        slow.client._loop(0.0)
    assert bool(slow.ended()) is not resumed


def test_bytes_move_when_they_leave_either_queue_and_not_when_more_of_them_come():
    flow = _Flow(0.0)
    flow.look(1.0, queued=False, wrote=False, kept=0)
    assert (flow.waiting, flow.moved_at) == (False, 1.0)
    flow.look(2.0, queued=True, wrote=False, kept=100)
    flow.look(3.0, queued=False, wrote=False, kept=200)
    assert (flow.waiting, flow.moved_at) == (True, 1.0)
    flow.look(4.0, queued=False, wrote=False, kept=199)
    assert flow.moved_at == 4.0
    flow.look(5.0, queued=True, wrote=True, kept=300)
    assert flow.moved_at == 5.0
    flow.look(6.0, queued=True, wrote=False, kept=300)
    assert flow.moved_at == 5.0


def test_a_socket_that_is_gone_keeps_nothing():
    with socket.socket() as sock:
        pass
    assert unacknowledged(sock) is unacknowledged(None) is None
