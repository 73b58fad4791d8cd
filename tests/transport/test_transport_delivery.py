"""Messages that the broker keeps until they are acknowledged, and publishes that tell when it has them."""

from __future__ import annotations

import queue
import threading
import uuid

import pytest
from broker_kinds import needs_mosquitto

from hepti_mqtt.transport import Connected, Subscribed

pytestmark = [pytest.mark.broker, needs_mosquitto]
PATIENCE_S = 20.0


@pytest.fixture(params=[4, 5], ids=["3.1.1", "5"])
def protocol(request):
    return request.param


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


def test_a_message_of_qos_0_needs_no_acknowledgement(mosquitto, protocol, topic, peers):
    keeper, sender = Keeper(peers, mosquitto.url, topic, protocol), peers(mosquitto.url)
    sender.transport.publish(f"{topic}/a", b"a", 0)
    assert keeper.next().receipt is None


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


def test_a_publish_tells_when_the_broker_has_it(mosquitto, protocol, topic, peers):
    sender, taken = peers(mosquitto.url, protocol=protocol), threading.Event()
    mosquitto.stop()
    sender.transport.publish(topic, b"x", 1, taken=lambda _: taken.set())
    assert not taken.is_set()
    mosquitto.start()
    assert taken.wait(PATIENCE_S)


def test_a_broker_of_mqtt_5_says_whether_anybody_was_subscribed(mosquitto, topic, peers):
    sender, ear, heard = peers(mosquitto.url, protocol=5), peers(mosquitto.url), queue.SimpleQueue()
    sender.transport.publish(topic, b"x", 1, taken=heard.put)
    assert heard.get(timeout=PATIENCE_S) is False
    ear.subscribe(topic)
    sender.transport.publish(topic, b"x", 1, taken=heard.put)
    assert heard.get(timeout=PATIENCE_S) is True
