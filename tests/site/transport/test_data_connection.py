"""The connection for tensors, and what a link takes for silence."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
from programs import PATIENCE_S

from hepti_mqtt.core.errors import NetworkError, RefusedError
from hepti_mqtt.protocol.topics import publish_bytes
from hepti_mqtt.transport.base import KEEPALIVE_S, Connected, Disconnected
from hepti_mqtt.transport.codec import Connect, publish_head
from hepti_mqtt.transport.link import Link, Lost
from hepti_mqtt.transport.sockets import Wake, unacknowledged
from hepti_mqtt.transport.url import BrokerUrl


@pytest.fixture
def peer(mosquitto, topic, peers):
    """A connection that reads the topic."""
    peer = peers(mosquitto.url, tensors=True)
    peer.read(topic, qos=0)
    return peer


def test_a_payload_in_parts_goes_out_as_one_and_its_parts_may_change_then(peer, topic):
    """Sent on the calling thread or queued behind others: what arrives is what the parts were."""
    array = np.zeros((300, 1000), np.float32)
    for value in range(8):
        array[:] = value
        peer.transport.send(topic, bytes([value]) * 100, array.data)
    for value in range(8):
        payload = peer.next()[1]
        assert payload[:100] == bytes([value]) * 100
        assert (np.frombuffer(payload[100:], np.float32) == value).all()
    assert peer.transport.counts().lost == 0
    assert peer.transport.counts().published_bytes == 8 * publish_bytes(topic, 100 + array.nbytes, 0)


def test_threads_that_send_at_once_do_not_mix_their_messages(peer, topic):
    def send(value):
        for _ in range(50):
            peer.transport.send(topic, bytes([value]), bytes([value]) * 20_000)
            peer.transport.publish(topic, bytes([value]) * 3)

    threads = [threading.Thread(target=send, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    heard = [peer.next()[1] for _ in range(400)]
    for thread in threads:
        thread.join()
    assert {len(set(payload)) for payload in heard} == {1}
    assert sorted({len(payload) for payload in heard}) == [3, 20_001]


def test_a_broker_that_does_not_read_for_a_while_gets_everything_later(proxy, topic, peers):
    """Nothing is lost, and nothing comes twice or in another order."""
    sender, receiver = peers(proxy.url, tensors=True), peers(proxy.url, tensors=True)
    receiver.read(topic, qos=0)
    proxy.flowing.clear()
    payloads = [bytes([value]) * 1_500_000 for value in range(12)]
    for payload in payloads:
        sender.transport.publish(topic, payload)
    proxy.flowing.set()
    assert [receiver.next()[1] for _ in payloads] == payloads
    assert sender.transport.counts().lost == 0


def test_a_message_that_is_half_out_when_the_connection_is_lost_is_counted(proxy, topic, peers):
    peer = peers(proxy.url, tensors=True)
    proxy.flowing.clear()
    peer.transport.send(topic, bytes(30_000_000))
    assert peer.transport.counts().published == 1, "its beginning is out"
    proxy.cut()
    proxy.flowing.set()
    peer.state_of(Disconnected)
    peer.state_of(Connected)
    assert peer.transport.counts().lost == 1


@pytest.mark.parametrize(
    ("answer", "error"), [(b"\x20\x02\0\x05", RefusedError), (b"\x20\x02\0\x03", NetworkError), (None, NetworkError)]
)
def test_a_broker_that_does_not_let_us_in_says_why(fake, peers, answer, error):
    with pytest.raises(error):
        peers(fake(lambda *_: answer).url, tensors=True)


@pytest.fixture(params=["pair", "TCP", "control"])
def open_link(request, monkeypatch):
    """A link that is open, its socket, the broker's end of it, and a clock to set; low water works over TCP alone.

    control: as control connections have it, without large buffers; the others are links for tensors.
    """
    if request.param != "pair":
        with socket.create_server(("127.0.0.1", 0)) as server:
            here = socket.create_connection(server.getsockname())
            there, _ = server.accept()
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 100_000)
        there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        here, there = socket.socketpair()
    now = [0.0]
    monkeypatch.setattr("hepti_mqtt.transport.link.time.monotonic", lambda: now[0])
    monkeypatch.setattr("hepti_mqtt.transport.link.sockets.connect_any", lambda *_: here)
    monkeypatch.setattr("hepti_mqtt.transport.link.sockets.tune", lambda sock: sock.setblocking(False))
    for tuned in ("tune_receiver", "tune_sender"):
        monkeypatch.setattr(f"hepti_mqtt.transport.link.sockets.{tuned}", lambda sock: None)
    wake = Wake()
    url, connect = BrokerUrl.parse("mqtt://127.0.0.1"), Connect(4, "a")
    link = Link(url, connect, threading.RLock(), wake, lambda *_: None, bulk=request.param != "control")
    with there:
        there.sendall(b"\x20\x02\0\0")
        link.open(5.0, 5.0, lambda: False)
        there.recv(1000)
        yield link, here, there, now
    here.close()
    wake.close()


def put(link, payload):
    """Publish as a transport does; return the bytes of the packet."""
    head = publish_head("t", len(payload), 4)
    link.send([memoryview(head), memoryview(payload)], copied=False)
    return len(head) + len(payload)


def is_given_up(link, now):
    """Let more than the keep-alive time pass in silence; return whether that ends the connection."""
    now[0] += KEEPALIVE_S + 0.1
    try:
        link.turn(0.0)
    except Lost:
        return True
    return False


def test_a_broker_that_has_fallen_silent_is_given_up(open_link):
    """PINGREQ after half the keep-alive time, and the end if nothing answers within all of it."""
    link, _, there, now = open_link
    now[0] = KEEPALIVE_S / 2 + 0.1
    link.turn(0.0)
    assert there.recv(1000) == b"\xc0\0"
    there.sendall(b"\xd0\0")
    link.turn(1.0)
    now[0] += KEEPALIVE_S / 2
    link.turn(0.0)
    assert there.recv(1000) == b"\xc0\0"
    link.turn(0.0)
    assert is_given_up(link, now)


@pytest.mark.parametrize("open_link", ["TCP", "control"], indirect=True)
def test_a_broker_that_reads_slowly_is_not_silent_where_the_kernel_has_taken_everything(open_link):
    """PINGREQ lies in the kernel, which asks for nothing more."""
    link, here, there, now = open_link
    there.settimeout(PATIENCE_S)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2_000_000)
    left = put(link, bytes(2_000_000))
    assert not link.unwritten_bytes
    while left > 1_000_000:
        before = unacknowledged(here)
        while unacknowledged(here) >= before:
            left -= len(there.recv(10_000))
        now[0] += 0.4 * KEEPALIVE_S
        link.turn(0.0)
    assert now[0] > 2 * KEEPALIVE_S
    assert is_given_up(link, now)


def test_a_broker_that_sends_slowly_is_not_silent(open_link):
    """PINGRESP waits behind a payload, of which less comes at a time than wakes us."""
    link, here, there, now = open_link
    there.sendall(publish_head("t", 4_000_000, 4))
    for _ in range(10):
        there.sendall(bytes(10_000))
        now[0] += 0.4 * KEEPALIVE_S
        link.turn(0.0)
    assert here.family == socket.AF_UNIX or here.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) > 10_000
    while link.protocol.decoder.missing > 4_000_000 - 10 * 10_000:
        link.turn(0.0)
    assert is_given_up(link, now)


def test_a_broker_that_answers_nothing_while_we_send_a_little_is_given_up(open_link):
    """The kernel takes small messages for long after the broker has stopped."""
    link, _, _, now = open_link
    for _ in range(2):
        now[0] += 0.6 * KEEPALIVE_S
        put(link, b"small")
        link.turn(0.0)
    now[0] += 0.6 * KEEPALIVE_S
    put(link, b"small")
    with pytest.raises(Lost):
        link.turn(0.0)
