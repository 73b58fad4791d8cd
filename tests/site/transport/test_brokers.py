"""What every broker must do for us: the same tests over all that can be had here, on each kind of connection."""

from __future__ import annotations

import os

import pytest

from hepti_mqtt.core.errors import NetworkError, RefusedError
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.protocol.topics import publish_bytes
from hepti_mqtt.transport.base import Connected, Disconnected, Will
from hepti_mqtt.transport.url import BrokerUrl

CONNECTIONS = {"3.1.1": {"protocol": 4}, "5": {"protocol": 5}, "tensors": {"tensors": True}}


@pytest.fixture(params=CONNECTIONS)
def connect(request, broker, peers):
    """Make connections of one kind, by default to the broker."""
    if broker.kind == "amqtt" and request.param == "5":
        pytest.skip("amqtt speaks MQTT 3.1.1 only")
    return lambda url=broker.url, **how: peers(url, **CONNECTIONS[request.param], **how)


def test_messages_of_any_size_arrive_unchanged_and_in_order(connect, topic):
    sender, receiver = connect(), connect()
    payloads = [os.urandom(size) for size in (0, 1, 127, 128, 4095, 4096, 20_000, 2_100_000, 3, 700_000, 700_000)]
    for qos in (0, 1):
        receiver.read(f"{topic}/{qos}", qos=qos)
        for payload in payloads:
            sender.transport.publish(f"{topic}/{qos}", payload, qos)
        assert [receiver.next() for _ in payloads] == [(f"{topic}/{qos}", payload) for payload in payloads]
    packets = sum(publish_bytes(f"{topic}/{qos}", len(payload), qos) for payload in payloads for qos in (0, 1))
    sent, received = sender.transport.counts(), receiver.transport.counts()
    assert (sent.published_bytes, received.received_bytes) == (packets, packets)
    assert sent.published == received.received == 2 * len(payloads)


def test_the_newest_version_that_the_broker_speaks_is_chosen(broker, peers):
    assert peers(broker.url).connected.protocol == (4 if broker.kind == "amqtt" else 5)
    assert peers(broker.url, tensors=True).connected.protocol == 4


def test_a_retained_message_comes_to_later_subscribers(connect, topic):
    sender = connect()
    sender.read(topic)
    sender.say(topic, b"kept", retain=True)
    assert sender.next() == (topic, b"kept")
    late = connect()
    late.read(topic)
    assert late.next() == (topic, b"kept")
    sender.say(topic, b"", retain=True)
    assert sender.next() == (topic, b"")


def test_a_clean_close_sends_the_last_word_and_not_the_will(connect, topic):
    watcher = connect()
    watcher.read(topic)
    leaver = connect(will=Will(topic, b"lost", retain=False))
    for n in range(50):
        leaver.say(topic, b"%d" % n)
    leaver.transport.close(Will(topic, b"left", retain=False), timeout_s=10)
    watcher.say(topic, b"end")
    assert [watcher.next()[1] for _ in range(52)] == [*(b"%d" % n for n in range(50)), b"left", b"end"]


def test_after_a_restart_of_the_broker_subscriptions_are_made_again_first(broker, connect, topic):
    sender, receiver = connect(), connect()
    made = receiver.read(topic, f"{topic}/more")
    receiver.read(f"{topic}/gone")
    receiver.transport.unsubscribe([f"{topic}/gone"])
    broker.stop()
    broker.start()
    receiver.state_of(Disconnected)
    assert receiver.states.get(timeout=20.0) == made
    assert isinstance(receiver.states.get(timeout=20.0), Connected)
    sender.state_of(Connected)
    for place in (f"{topic}/gone", f"{topic}/more", topic):
        sender.say(place, b"again")
    assert [receiver.next()[0] for _ in range(2)] == [f"{topic}/more", topic]
    assert receiver.transport.counts().reconnections == 1


def test_a_filter_left_is_silent_at_once(connect, topic):
    peer = connect()
    peer.read(f"{topic}/a", f"{topic}/b")
    peer.transport.unsubscribe([f"{topic}/a"])
    peer.say(f"{topic}/a", b"a")
    peer.say(f"{topic}/b", b"b")
    assert peer.next() == (f"{topic}/b", b"b")


def test_user_and_password_are_checked(broker, connect):
    with start_broker(broker.kind, users={"pi-1": "s3cret:/@ä"}) as guarded:
        assert guarded.kind == broker.kind
        place = ("127.0.0.1", guarded.port)
        connect(BrokerUrl(*place, user="pi-1", password="s3cret:/@ä"))
        for user, password in (("pi-1", "wrong-one"), ("pi-2", "s3cret:/@ä"), (None, None)):
            url = BrokerUrl(*place, user=user, password=password)
            with pytest.raises((RefusedError, NetworkError), match=f"127.0.0.1:{guarded.port}") as caught:
                connect(url)
            assert isinstance(caught.value, RefusedError) or user is None
            assert not any(secret in str(caught.value) for secret in ("wrong-one", "s3cret"))
