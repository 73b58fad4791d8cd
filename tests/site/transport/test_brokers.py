"""What every broker must do for us: the same tests over all that can be had here."""

from __future__ import annotations

import os
import uuid

import pytest

from hepti_mqtt.core.errors import NetworkError, RefusedError
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.protocol.topics import publish_bytes
from hepti_mqtt.transport.base import Connected, Disconnected, Subscribed, Will
from hepti_mqtt.transport.url import BrokerUrl


@pytest.fixture(params=[4, 5], ids=["3.1.1", "5"])
def protocol(request, broker):
    if broker.kind == "amqtt" and request.param == 5:
        pytest.skip("amqtt speaks MQTT 3.1.1 only")
    return request.param


@pytest.fixture
def topic():
    return f"t/{uuid.uuid4().hex}"


def test_messages_of_any_size_arrive_unchanged_and_in_order(broker, protocol, topic, peers):
    sender, receiver = peers(broker.url, protocol=protocol), peers(broker.url, protocol=protocol)
    receiver.subscribe(f"{topic}/+")
    sizes = [0, 1, 127, 128, 20_000, 2_100_000, 3]
    payloads = [os.urandom(size) for size in sizes]
    for qos in (0, 1):
        for payload in payloads:
            sender.transport.publish(f"{topic}/{qos}", payload, qos)
        assert [receiver.message() for _ in payloads] == [(f"{topic}/{qos}", payload) for payload in payloads]
    packets = sum(publish_bytes(f"{topic}/0", size, qos) for size in sizes for qos in (0, 1))
    assert sender.transport.counts().published_bytes == packets
    if broker.kind != "amqtt":  # which raises messages to the QoS of the subscription
        assert receiver.transport.counts().received_bytes == packets
    assert (sender.transport.counts().published, receiver.transport.counts().received) == (14, 14)


def test_the_newest_version_that_the_broker_speaks_is_chosen(broker, peers):
    assert peers(broker.url).connected.protocol == (4 if broker.kind == "amqtt" else 5)


def test_a_retained_message_comes_to_later_subscribers(broker, protocol, topic, peers):
    sender = peers(broker.url, protocol=protocol)
    sender.subscribe(topic)
    sender.transport.publish(topic, b"kept", 1, retain=True)
    assert sender.message() == (topic, b"kept")
    late = peers(broker.url, protocol=protocol)
    late.subscribe(topic)
    assert late.message() == (topic, b"kept")
    sender.transport.publish(topic, b"", 1, retain=True)
    assert sender.message() == (topic, b"")


def test_a_clean_close_sends_the_last_word_and_not_the_will(broker, protocol, topic, peers):
    watcher = peers(broker.url, protocol=protocol)
    watcher.subscribe(topic)
    leaver = peers(broker.url, protocol=protocol, will=Will(topic, b"lost", retain=False))
    for n in range(50):
        leaver.transport.publish(topic, b"%d" % n, 1)
    leaver.transport.close(Will(topic, b"left", retain=False), timeout_s=10)
    watcher.transport.publish(topic, b"end", 1)
    assert [watcher.message()[1] for _ in range(52)] == [*(b"%d" % n for n in range(50)), b"left", b"end"]


def test_after_a_restart_of_the_broker_subscriptions_are_made_again_first(broker, protocol, topic, peers):
    sender, receiver = peers(broker.url, protocol=protocol), peers(broker.url, protocol=protocol)
    token = receiver.subscribe(topic, f"{topic}/more")
    gone = receiver.subscribe(f"{topic}/gone")
    receiver.transport.unsubscribe([f"{topic}/gone"])
    broker.restart()
    assert isinstance(receiver.await_state(Disconnected), Disconnected)
    assert receiver.state() == Subscribed(token)
    assert isinstance(receiver.state(), Connected)
    sender.await_state(Connected)
    for place in (f"{topic}/gone", f"{topic}/more", topic):
        sender.transport.publish(place, b"again", 1)
    assert [receiver.message()[0] for _ in range(2)] == [f"{topic}/more", topic]
    assert receiver.transport.counts().reconnections == 1
    assert gone != token


def test_a_filter_left_is_silent_at_once(broker, protocol, topic, peers):
    peer = peers(broker.url, protocol=protocol)
    peer.subscribe(f"{topic}/a", f"{topic}/b")
    peer.transport.unsubscribe([f"{topic}/a"])
    peer.transport.publish(f"{topic}/a", b"a", 1)
    peer.transport.publish(f"{topic}/b", b"b", 1)
    assert peer.message() == (f"{topic}/b", b"b")


def test_user_and_password_are_checked(broker, protocol, peers):
    with start_broker(broker.kind, users={"pi-1": "s3cret:/@ä"}) as guarded:
        assert guarded.kind == broker.kind

        def connect(user, password):
            url = BrokerUrl("127.0.0.1", guarded.port, user=user, password=password)
            peers(url, protocol=protocol, connect=False).transport.connect()

        connect("pi-1", "s3cret:/@ä")
        for user, password in (("pi-1", "wrong-one"), ("pi-2", "s3cret:/@ä"), (None, None)):
            with pytest.raises((RefusedError, NetworkError), match=f"127.0.0.1:{guarded.port}") as caught:
                connect(user, password)
            assert isinstance(caught.value, RefusedError) or user is None
            assert not any(secret in str(caught.value) for secret in ("wrong-one", "s3cret"))
