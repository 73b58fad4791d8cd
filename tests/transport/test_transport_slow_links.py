"""A link of paho's over which a message takes longer than a broker may keep silent."""

from __future__ import annotations

import select
import socket

import pytest

from hepti_mqtt.protocol.topics import publish_bytes
from hepti_mqtt.transport import BrokerUrl
from hepti_mqtt.transport.flow import Flow
from hepti_mqtt.transport.in_flight import Session
from hepti_mqtt.transport.link import KEEPALIVE_S, STALLED_S, Link, LinkLost
from hepti_mqtt.transport.sockets import unacknowledged
from hepti_mqtt.transport.wake import Wake

PATIENCE_S = 20.0
STEP_S = 0.4 * KEEPALIVE_S
PINGREQ = b"\xc0\0"


@pytest.fixture
def open_link(monkeypatch):
    """A link that is open, the broker's end of it, and a clock to set."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1_000_000)
    there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
    there.settimeout(PATIENCE_S)
    now = [1000.0]
    monkeypatch.setattr("paho.mqtt.client.time_func", lambda: now[0])
    monkeypatch.setattr("hepti_mqtt.transport.link.time.monotonic", lambda: now[0])
    monkeypatch.setattr("paho.mqtt.client.socket.create_connection", lambda *_, **__: here)
    wake = Wake()
    link = Link(BrokerUrl.parse("mqtt://b"), "a", protocol=4, will=None, clean=True, listener=None, wake=wake)
    with there:
        there.sendall(b"\x20\x02\0\0")
        link.open(PATIENCE_S, lambda: False)
        there.recv(1000)
        yield link, there, now
    link.close()
    wake.close()


def later(link, now, seconds):
    """Let time pass, in which the link has its turns."""
    until = now[0] + seconds
    while now[0] < until:
        now[0] += 1.1
        link.turn(0.0)


def test_a_broker_that_reads_a_large_message_slowly_is_not_given_up(open_link):
    """What it has not read yet lies in our own queue first, and then in the kernel."""
    link, there, now = open_link
    begun, payload = now[0], bytes(8_000_000)
    link.publish("t", payload, 1, False)
    link.flush()
    left, kernel = publish_bytes("t", len(payload), 1), 0
    while left:
        later(link, now, STEP_S)
        while link.busy and not select.select([], [link._client.socket()], [], 0)[1]:
            left -= len(there.recv(min(left, 100_000)))
        left -= len(there.recv(min(left, 100_000)))
        kernel += not link.busy
    assert now[0] - begun > 3 * STALLED_S
    assert kernel * STEP_S > STALLED_S
    while unacknowledged(link._client.socket()):
        continue
    later(link, now, 3.0)
    assert there.recv(2) == PINGREQ
    with pytest.raises(LinkLost):
        later(link, now, STALLED_S)


def test_a_broker_that_reads_no_more_of_a_message_is_given_up(open_link):
    link, _there, now = open_link
    link.publish("t", bytes(8_000_000), 1, False)
    link.flush()
    later(link, now, STALLED_S - 2.0)
    with pytest.raises(LinkLost, match="has taken nothing"):
        later(link, now, 5.0)


def test_a_broker_that_does_not_answer_is_given_up_though_we_send_a_little(open_link):
    link, there, now = open_link
    later(link, now, KEEPALIVE_S + 2.0)
    assert there.recv(1000) == PINGREQ

    def send():
        for _ in range(10):
            link.publish("t", b"small", 1, False)
            link.flush()
            later(link, now, 1.0)

    with pytest.raises(LinkLost):
        send()


@pytest.mark.parametrize(("resumed", "silent_s"), [(True, STEP_S), (False, 3 * STEP_S)])
def test_bytes_of_a_session_that_the_broker_kept_put_off_when_it_must_have_acknowledged(open_link, resumed, silent_s):
    """It sends what it kept before it reads our SUBSCRIBE; without a session it may have forgotten that one."""
    link, there, now = open_link
    link.resumed, session = resumed, Session(begun_at=now[0])
    for piece in (b"\x32\x7f", b"\0\1t"):
        now[0] += STEP_S
        there.sendall(piece)
        link.turn(PATIENCE_S)
    now[0] += STEP_S
    assert session.silent_s(link) == pytest.approx(silent_s)


def test_bytes_move_when_they_leave_either_queue_and_not_when_more_of_them_come():
    flow = Flow(0.0)
    flow.look(1.0, queued=False, kept=0)
    assert (flow.waiting, flow.moved_at) == (False, 1.0)
    flow.look(2.0, queued=True, kept=100)
    flow.look(3.0, queued=False, kept=200)
    assert (flow.waiting, flow.moved_at) == (True, 1.0)
    flow.look(4.0, queued=False, kept=199)
    assert flow.moved_at == 4.0
    flow.wrote()
    flow.look(5.0, queued=True, kept=300)
    assert flow.moved_at == 5.0
    flow.look(6.0, queued=True, kept=300)
    assert flow.moved_at == 5.0


def test_a_socket_that_is_gone_keeps_nothing():
    with socket.socket() as sock:
        pass
    assert unacknowledged(sock) is unacknowledged(None) is None
