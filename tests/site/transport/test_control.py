"""The control connection, against a broker that is cut off, slow, absent or restarted."""

from __future__ import annotations

import os
import queue
import resource
import socket
import threading
import uuid
from types import SimpleNamespace

import pytest
from broker_kinds import needs_mosquitto

from hepti_mqtt.core.errors import NetworkError
from hepti_mqtt.transport.base import Connected, Disconnected, Subscribed, Will
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.sockets import connect_any, local
from hepti_mqtt.transport.url import BrokerUrl

PATIENCE_S = 20.0


@pytest.fixture(params=[4, pytest.param(5, marks=needs_mosquitto)], ids=["3.1.1", "5"])
def protocol(request):
    return request.param


def transport_to(port, **options):
    options = {"on_message": lambda *_: None, "on_state": lambda _: None} | options
    return BrokerConnection(BrokerUrl("127.0.0.1", port, user="u", password="s3cret"), "me", **options)


@pytest.fixture
def closed_port():
    """A port that nobody listens on, and that nobody else gets meanwhile."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def test_an_absent_broker_is_named_and_connect_may_be_tried_again(closed_port):
    transport = transport_to(closed_port)
    for _ in range(2):
        with pytest.raises(NetworkError, match=f"no broker answers at 127.0.0.1:{closed_port}.*HEPTI_BROKER") as caught:
            transport.connect()
    assert "s3cret" not in str(caught.value)
    transport.close()


def test_the_will_is_published_when_the_connection_breaks(protocol, proxy, mosquitto, peers):
    watcher = peers(mosquitto.url)
    watcher.subscribe(f"will/{protocol}")
    dying = peers(proxy.url, protocol=protocol, will=Will(f"will/{protocol}", b"lost", 1, retain=False))
    proxy.cut()
    assert watcher.message() == (f"will/{protocol}", b"lost")
    assert dying.await_state(Disconnected).reason


def test_what_is_published_while_disconnected_is_counted_or_kept(protocol, proxy, mosquitto, peers):
    watcher = peers(mosquitto.url)
    watcher.subscribe("kept/+")
    sender = peers(proxy.url, protocol=protocol)
    proxy.refusing = True
    proxy.cut()
    sender.await_state(Disconnected)
    sender.transport.publish("kept/0", b"lost")
    for n in range(50):
        sender.transport.publish("kept/1", b"%d" % n, 1)
    assert sender.transport.counts().lost == 1
    proxy.refusing = False
    assert [watcher.message() for _ in range(50)] == [("kept/1", b"%d" % n) for n in range(50)]
    sender.await_state(Connected)


def test_what_the_broker_has_not_acknowledged_is_sent_again(protocol, proxy, mosquitto, peers):
    watcher = peers(mosquitto.url)
    watcher.subscribe("again/+")
    sender = peers(proxy.url, protocol=protocol)
    proxy.flowing.clear()  # what is sent now stays in the relay and goes down with it
    for n in range(200):
        sender.transport.publish("again/1", b"%d" % n, 1)
    proxy.cut()
    sender.await_state(Disconnected)
    proxy.flowing.set()
    sender.await_state(Connected)
    payloads = set()
    while len(payloads) < 200:
        payloads.add(watcher.message()[1])
    assert payloads == {b"%d" % n for n in range(200)}


def test_the_queue_is_bounded_when_the_broker_does_not_read(proxy, peers):
    sender = peers(proxy.url, max_queued_bytes=2_000_000)
    proxy.flowing.clear()
    while sender.transport.counts().lost == 0:
        sender.transport.publish("full", bytes(500_000))
    with pytest.raises(NetworkError, match="wait for the broker at 127"):
        for_ever(sender.transport.publish, "full", bytes(500_000), 1)


def test_a_broker_is_local_where_both_ends_have_one_address(mosquitto, peers):
    assert peers(mosquitto.url).connected.local
    elsewhere = SimpleNamespace(getpeername=lambda: ("192.0.2.1", 1883), getsockname=lambda: ("192.0.2.2", 50_000))
    with socket.socket() as unconnected:
        assert not any(map(local, (elsewhere, unconnected, None)))


def test_a_descriptor_beyond_what_select_takes(mosquitto, peers):
    """A process with many files and connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("this machine allows too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    try:
        peer = peers(mosquitto.url)
        assert peer.transport._link._sock.fileno() >= 1024
        peer.subscribe("high")
        peer.transport.publish("high", b"yes", 1)
        assert peer.message() == ("high", b"yes")
    finally:
        for fd in held:
            os.close(fd)


def test_a_callback_that_fails_does_not_end_the_connection(mosquitto, peers, caplog):
    peer = peers(mosquitto.url)
    peer.subscribe("callback")
    healthy, failures = peer.transport.on_message, [ZeroDivisionError("mine"), KeyError("mine")]
    peer.transport.on_message = lambda topic, payload: _raise(failures.pop()) if failures else healthy(topic, payload)
    for payload in (b"1", b"2", b"3"):
        peer.transport.publish("callback", payload)
    assert peer.message() == ("callback", b"3")
    assert peer.transport.counts().bad == 2
    assert "a callback failed" in caplog.text


def for_ever(call, *arguments):
    while True:
        call(*arguments)


def _raise(error):
    raise error


def test_a_transport_may_be_closed_from_its_own_callback(mosquitto, peers):
    done = threading.Event()
    peer = peers(mosquitto.url)
    peer.transport.on_message = lambda *_: (peer.transport.close(), done.set())
    peer.subscribe("closing")
    peer.transport.publish("closing", b"")
    assert done.wait(PATIENCE_S)
    peer.transport._thread.join(PATIENCE_S)
    assert not peer.transport._thread.is_alive()
    with pytest.raises(NetworkError, match="closed"):
        peer.transport.publish("closing", b"")
    with pytest.raises(ValueError, match="once"):
        peer.transport.connect()


def test_closing_while_the_broker_is_away_ends_at_once_and_counts_what_is_lost(proxy, peers):
    sender = peers(proxy.url)
    proxy.close()
    sender.await_state(Disconnected)
    sender.transport.publish("away", b"", 1)
    sender.transport.close(Will("away", b"last"))
    assert sender.transport.counts().lost == 2
    sender.transport._thread.join(PATIENCE_S)
    assert not sender.transport._thread.is_alive()


def test_names_that_mqtt_does_not_allow_are_refused(mosquitto, peers):
    transport = peers(mosquitto.url).transport
    for topic in ("", "a/+", "a/#", "a\0b"):
        with pytest.raises(ValueError, match="cannot publish"):
            transport.publish(topic, b"")
    for wrong in ("", "a/#/b", "a#", "a+/b", "a\0"):
        with pytest.raises(ValueError, match="cannot subscribe"):
            transport.subscribe([("fine/#", 0), (wrong, 0)])
    with pytest.raises(ValueError, match="at least one"):
        transport.subscribe([])


def test_connect_gives_up_an_attempt_that_is_late_and_may_be_called_again(mosquitto, peers, monkeypatch):
    monkeypatch.setattr("hepti_mqtt.transport.broker_connection.LATE_S", 0.0)
    peer, connected = peers(mosquitto.url, connect=False), threading.Event()
    monkeypatch.setattr(
        "hepti_mqtt.transport.link.connect_any", lambda *a: connected.wait(PATIENCE_S) and connect_any(*a)
    )
    with pytest.raises(NetworkError, match="no broker answers"):
        peer.transport.connect(0.0)
    connected.set()
    peer.transport.connect(PATIENCE_S)
    peer.await_state(Connected)
    with pytest.raises(ValueError, match="once"):
        peer.transport.connect()
    peer.transport.publish("late", b"", 1)
    assert peer.transport.counts().reconnections == 0


@pytest.fixture
def topic():
    return f"kept/{uuid.uuid4().hex[:8]}"


class Keeper:
    """A connection with a session of its own that acknowledges only what it is told to."""

    def __init__(self, peers, url, topic, protocol):
        self.deliveries = queue.SimpleQueue()
        self.peer = peers(
            url,
            client_id=topic.replace("/", "-"),
            protocol=protocol,
            clean=False,
            on_delivery=self.deliveries.put,
            connect=False,
        )
        self.peer.transport.subscribe([(f"{topic}/+", 1)])
        self.peer.transport.connect(PATIENCE_S)
        self.peer.await_state(Connected)

    def next(self):
        return self.deliveries.get(timeout=PATIENCE_S)

    def acknowledge(self, delivery):
        self.peer.transport.acknowledge(delivery.receipt)

    def close(self):
        self.peer.transport.close()


@needs_mosquitto
def test_what_is_not_acknowledged_comes_again_and_nothing_else_does(mosquitto, protocol, topic, peers):
    first, sender = Keeper(peers, mosquitto.url, topic, protocol), peers(mosquitto.url)
    for n in range(3):
        sender.transport.publish(f"{topic}/{n}", b"%d" % n, 1)
    kept = [first.next() for _ in range(3)]
    assert [(d.payload, d.repeated) for d in kept] == [(b"0", False), (b"1", False), (b"2", False)]
    first.acknowledge(kept[1])
    first.close()
    second = Keeper(peers, mosquitto.url, topic, protocol)
    again = [second.next() for _ in range(2)]
    assert [(d.payload, d.repeated) for d in again] == [(b"0", True), (b"2", True)]
    assert [d.receipt.packet for d in again] == [kept[0].receipt.packet, kept[2].receipt.packet]
    for delivery in again:
        second.acknowledge(delivery)
    second.close()
    third = Keeper(peers, mosquitto.url, topic, protocol)
    sender.transport.publish(f"{topic}/last", b"last", 1)
    assert third.next().payload == b"last"


@needs_mosquitto
def test_what_waits_for_acknowledgement_outlives_a_restart_of_the_broker(mosquitto, protocol, topic, peers):
    keeper, sender = Keeper(peers, mosquitto.url, topic, protocol), peers(mosquitto.url)
    sender.transport.publish(f"{topic}/a", b"a", 1)
    before = keeper.next()
    mosquitto.restart()
    after = keeper.next()
    assert (after.payload, after.repeated) == (b"a", True)
    keeper.acknowledge(before)  # of a connection that is gone: it says nothing
    keeper.acknowledge(after)
    keeper.close()
    mosquitto.restart()
    sender.await_state(Connected)
    keeper = Keeper(peers, mosquitto.url, topic, protocol)
    sender.transport.publish(f"{topic}/b", b"b", 1)
    assert keeper.next().payload == b"b"


@needs_mosquitto
def test_a_message_that_was_retained_before_says_so(mosquitto, protocol, topic, peers):
    sender = peers(mosquitto.url)
    sender.subscribe(f"{topic}/old")
    sender.transport.publish(f"{topic}/old", b"old", 1, True)
    assert sender.message() == (f"{topic}/old", b"old"), "the broker has it before anybody else asks"
    first = Keeper(peers, mosquitto.url, topic, protocol)
    old = first.next()
    first.acknowledge(old)
    sender.transport.publish(f"{topic}/new", b"new", 1, True)
    new = first.next()
    assert [(d.payload, d.retained) for d in (old, new)] == [(b"old", True), (b"new", False)]


@needs_mosquitto
def test_hundreds_may_wait_and_other_connections_go_on(mosquitto, protocol, topic, peers):
    keeper, sender, other = Keeper(peers, mosquitto.url, topic, protocol), peers(mosquitto.url), peers(mosquitto.url)
    token = other.transport.subscribe([(f"{topic}/200", 1)])
    other.await_state(Subscribed)
    assert token
    for n in range(300):
        sender.transport.publish(f"{topic}/{n}", b"%d" % n, 1)
    kept = [keeper.next() for _ in range(300)]
    assert other.message() == (f"{topic}/200", b"200")
    for delivery in kept:
        keeper.acknowledge(delivery)


@needs_mosquitto
def test_a_broker_of_mqtt_5_says_whether_anybody_was_subscribed(mosquitto, topic, peers):
    sender, ear, heard = peers(mosquitto.url, protocol=5), peers(mosquitto.url), queue.SimpleQueue()
    sender.transport.publish(topic, b"x", 1, taken=heard.put)
    assert heard.get(timeout=PATIENCE_S) is False
    ear.subscribe(topic)
    sender.transport.publish(topic, b"x", 1, taken=heard.put)
    assert heard.get(timeout=PATIENCE_S) is True
