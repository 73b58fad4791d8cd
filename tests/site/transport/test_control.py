"""The control connection, against a broker that is cut off, slow, absent or restarted."""

from __future__ import annotations

import os
import queue
import resource
import socket
import threading
from types import SimpleNamespace

import pytest
from broker_kinds import needs_mosquitto
from site_processes import PATIENCE_S, poll

from hepti_mqtt.core.errors import NetworkError
from hepti_mqtt.transport.base import Connected, Disconnected, Will
from hepti_mqtt.transport.sockets import connect_any, local


@pytest.fixture(params=[4, pytest.param(5, marks=needs_mosquitto)], ids=["3.1.1", "5"])
def protocol(request):
    return request.param


def test_an_absent_broker_is_named_and_connect_may_be_tried_again(peers):
    with socket.socket() as sock:  # nobody listens on its port, and nobody else gets it meanwhile
        sock.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{sock.getsockname()[1]}"
        transport = peers(f"mqtt://u:s3cret@{place}", connect=False).transport
        for _ in range(2):
            with pytest.raises(NetworkError, match=f"{place}.*HEPTI_BROKER") as caught:
                transport.connect()
    assert "s3cret" not in str(caught.value)


def test_the_will_is_published_when_the_connection_breaks(protocol, topic, proxy, mosquitto, peers):
    watcher = peers(mosquitto.url)
    watcher.read(topic)
    dying = peers(proxy.url, protocol=protocol, will=Will(topic, b"lost", 1, retain=False))
    proxy.cut()
    assert watcher.next() == (topic, b"lost")
    assert dying.state_of(Disconnected).reason


def test_what_is_published_while_disconnected_is_counted_or_kept(protocol, proxy, topic, mosquitto, peers):
    watcher = peers(mosquitto.url)
    watcher.read(f"{topic}/+")
    sender = peers(proxy.url, protocol=protocol)
    proxy.refusing = True
    proxy.cut()
    sender.state_of(Disconnected)
    sender.transport.publish(f"{topic}/0", b"lost")
    for n in range(50):
        sender.say(f"{topic}/1", b"%d" % n)
    assert sender.transport.counts().lost == 1
    proxy.refusing = False
    assert [watcher.next() for _ in range(50)] == [(f"{topic}/1", b"%d" % n) for n in range(50)]
    sender.state_of(Connected)


def test_what_the_broker_has_not_acknowledged_is_sent_again(protocol, topic, proxy, mosquitto, peers):
    watcher = peers(mosquitto.url)
    watcher.read(topic)
    sender = peers(proxy.url, protocol=protocol)
    proxy.flowing.clear()  # what is sent now stays in the relay and goes down with it
    for n in range(200):
        sender.say(topic, b"%d" % n)
    proxy.cut()
    sender.state_of(Disconnected)
    proxy.flowing.set()
    sender.state_of(Connected)
    payloads = set()
    while len(payloads) < 200:
        payloads.add(watcher.next()[1])
    assert payloads == {b"%d" % n for n in range(200)}


def test_the_queue_is_bounded_when_the_broker_does_not_read(proxy, peers):
    sender = peers(proxy.url, max_queued_bytes=2_000_000)
    proxy.flowing.clear()
    while sender.transport.counts().lost == 0:
        sender.transport.publish("full", bytes(500_000))
    with pytest.raises(NetworkError):
        for_ever(sender.say, "full", bytes(500_000))


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
        assert max(held) >= 1024  # so is what is opened now
        peer = peers(mosquitto.url)
        peer.read("high")
        peer.say("high", b"yes")
        assert peer.next() == ("high", b"yes")
    finally:
        for fd in held:
            os.close(fd)


def test_a_callback_that_fails_does_not_end_the_connection(mosquitto, peers, caplog):
    peer = peers(mosquitto.url)
    peer.read("callback")
    healthy, failures = peer.transport.on_message, [ZeroDivisionError("mine"), KeyError("mine")]

    def on_message(topic, payload):
        if failures:
            raise failures.pop()
        healthy(topic, payload)

    peer.transport.on_message = on_message
    for payload in (b"1", b"2", b"3"):
        peer.transport.publish("callback", payload)
    assert peer.next() == ("callback", b"3")
    assert peer.transport.counts().bad == 2
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError, ZeroDivisionError]


def for_ever(call, *arguments):
    while True:
        call(*arguments)


def wait_for_end(name):
    """Wait until no thread has this name."""
    poll(lambda: name not in {thread.name for thread in threading.enumerate()}, f"the end of {name}")


def test_a_transport_may_be_closed_from_its_own_callback(mosquitto, peers):
    done = threading.Event()
    peer = peers(mosquitto.url, name="closes itself")
    peer.transport.on_message = lambda *_: (peer.transport.close(), done.set())
    peer.read("closing")
    peer.transport.publish("closing", b"")
    assert done.wait(PATIENCE_S)
    wait_for_end("closes itself")
    with pytest.raises(NetworkError, match="closed"):
        peer.transport.publish("closing", b"")
    with pytest.raises(ValueError, match="once"):
        peer.transport.connect()


def test_closing_while_the_broker_is_away_ends_at_once_and_counts_what_is_lost(proxy, peers):
    sender = peers(proxy.url, name="closed while away")
    proxy.close()
    sender.state_of(Disconnected)
    sender.say("away", b"")
    sender.transport.close(Will("away", b"last"))
    assert sender.transport.counts().lost == 2
    wait_for_end("closed while away")


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
        "hepti_mqtt.transport.link.sockets.connect_any", lambda *a: connected.wait(PATIENCE_S) and connect_any(*a)
    )
    with pytest.raises(NetworkError):
        peer.transport.connect(0.0)
    connected.set()
    peer.transport.connect(PATIENCE_S)
    peer.state_of(Connected)
    with pytest.raises(ValueError, match="once"):
        peer.transport.connect()
    peer.say("late", b"")
    assert peer.transport.counts().reconnections == 0


@pytest.fixture
def keepers(mosquitto, protocol, topic, peers):
    """Make connections with one session, each with its deliveries, which nobody acknowledges."""

    def make():
        deliveries = queue.SimpleQueue()
        how = {"client_id": topic.replace("/", "-"), "clean": False, "on_delivery": deliveries.put}
        transport = peers(mosquitto.url, protocol=protocol, connect=False, **how).transport
        transport.subscribe([(f"{topic}/+", 1)])
        transport.connect(PATIENCE_S)
        return transport, lambda: deliveries.get(timeout=PATIENCE_S)

    return make


@needs_mosquitto
def test_what_is_not_acknowledged_comes_again_and_nothing_else_does(mosquitto, topic, keepers, peers):
    (first, next_delivery), sender = keepers(), peers(mosquitto.url)
    for n in range(3):
        sender.say(f"{topic}/{n}", b"%d" % n)
    kept = [next_delivery() for _ in range(3)]
    assert [(d.payload, d.repeated) for d in kept] == [(b"0", False), (b"1", False), (b"2", False)]
    first.acknowledge(kept[1].receipt)
    first.close()
    second, next_delivery = keepers()
    again = [next_delivery() for _ in range(2)]
    assert [(d.payload, d.repeated) for d in again] == [(b"0", True), (b"2", True)]
    assert [d.receipt.packet for d in again] == [kept[0].receipt.packet, kept[2].receipt.packet]
    for delivery in again:
        second.acknowledge(delivery.receipt)
    second.close()
    _, next_delivery = keepers()
    sender.say(f"{topic}/last", b"last")
    assert next_delivery().payload == b"last"


@needs_mosquitto
def test_what_waits_for_acknowledgement_outlives_a_restart_of_the_broker(mosquitto, topic, keepers, peers):
    (keeper, next_delivery), sender = keepers(), peers(mosquitto.url)
    sender.say(f"{topic}/a", b"a")
    before = next_delivery()
    mosquitto.stop()
    mosquitto.start()
    after = next_delivery()
    assert (after.payload, after.repeated) == (b"a", True)
    keeper.acknowledge(before.receipt)  # of a connection that is gone: it says nothing
    keeper.acknowledge(after.receipt)
    keeper.close()
    mosquitto.stop()
    mosquitto.start()
    sender.state_of(Connected)
    _, next_delivery = keepers()
    sender.say(f"{topic}/b", b"b")
    assert next_delivery().payload == b"b"


@needs_mosquitto
def test_a_message_that_was_retained_before_says_so(mosquitto, topic, keepers, peers):
    sender = peers(mosquitto.url)
    sender.read(f"{topic}/old")
    sender.say(f"{topic}/old", b"old", retain=True)
    assert sender.next() == (f"{topic}/old", b"old"), "the broker has it before anybody else asks"
    keeper, next_delivery = keepers()
    old = next_delivery()
    keeper.acknowledge(old.receipt)
    sender.say(f"{topic}/new", b"new", retain=True)
    assert [(d.payload, d.retained) for d in (old, next_delivery())] == [(b"old", True), (b"new", False)]


@needs_mosquitto
def test_hundreds_may_wait_and_other_connections_go_on(mosquitto, topic, keepers, peers):
    (_, next_delivery), sender, other = keepers(), peers(mosquitto.url), peers(mosquitto.url)
    other.read(f"{topic}/200")
    for n in range(300):
        sender.say(f"{topic}/{n}", b"%d" % n)
    assert [next_delivery().payload for _ in range(300)] == [b"%d" % n for n in range(300)]
    assert other.next() == (f"{topic}/200", b"200")


@needs_mosquitto
def test_a_broker_of_mqtt_5_says_whether_anybody_was_subscribed(mosquitto, topic, peers):
    sender, ear, heard = peers(mosquitto.url, protocol=5), peers(mosquitto.url), queue.SimpleQueue()
    sender.transport.publish(topic, b"x", 1, taken=heard.put)
    assert heard.get(timeout=PATIENCE_S) is False
    ear.read(topic)
    sender.transport.publish(topic, b"x", 1, taken=heard.put)
    assert heard.get(timeout=PATIENCE_S) is True
