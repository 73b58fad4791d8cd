"""The control connection, against peers that answer as no broker should, hang up, or take very long."""

from __future__ import annotations

import contextlib
import queue
import select
import time

import pytest
from played_broker import PATIENCE_S, usual

from hepti_mqtt.core.errors import NetworkError, PacketLimitError
from hepti_mqtt.transport import base, broker_connection
from hepti_mqtt.transport.base import Connected, Disconnected, Refused
from hepti_mqtt.transport.broker_connection import HANG_UPS
from hepti_mqtt.transport.codec import (
    MAXIMUM_PACKET_SIZE,
    Connack,
    Connect,
    Disconnect,
    Puback,
    Publish,
    Suback,
    Subscribe,
    encode,
    publish_head,
)

CONNACK = encode(Connack(0))


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    """Connect again at once, and wait little for an answer."""
    monkeypatch.setattr(base, "BACKOFF_S", (0.01, 0.05))
    monkeypatch.setattr(broker_connection, "ANSWER_S", 0.2)


@pytest.mark.parametrize(
    "answer", [b"\x20\x02\0\x01", b"\x20\x03\0\x84\0", None], ids=["3.1.1 code", "5 code", "closes"]
)
def test_a_broker_of_the_old_version_is_spoken_to_in_the_old_version(fake, peers, answer):
    broker = fake(lambda event, _: answer if getattr(event, "version", 4) == 5 else usual(event))
    peer = peers(broker.url)
    assert peer.connected == Connected(4, None, local=True)
    broker.cut()  # it is remembered: the next attempt begins with the old version
    peer.state_of(Disconnected)
    peer.state_of(Connected)
    assert [broker.next(Connect)[1].version for _ in range(3)] == [5, 4, 4]


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "half a packet"])
def test_a_broker_that_did_not_answer_once_is_spoken_to_in_the_new_version_again(fake, peers, answer):
    """It may only have been slow."""
    broker = fake(lambda event, connection: usual(event) if connection else answer)
    peer = peers(broker.url)
    assert peer.connected == Connected(4, None, local=True)
    broker.cut()
    peer.state_of(Disconnected)
    assert peer.state_of(Connected) == Connected(5, None, local=True)


@pytest.mark.parametrize("answer", [None, b"", b"\xff" * 40], ids=["closes", "silent", "noise"])
def test_what_is_no_broker_is_a_network_error(fake, peers, answer):
    url = fake(lambda *_: answer).url
    with pytest.raises(NetworkError, match=url.partition("@")[2]):
        peers(url, connect=False).transport.connect(0.4)


@pytest.mark.parametrize(
    "noise",
    [
        b"\x30\x02\xff\xff",  # a topic longer than its packet
        b"\x90\x01\0",  # half a SUBACK
        b"\x40\x02\x12\x34" + b"\x62\x02\x12\x34",  # acknowledgements of what was never sent
        b"\x30\xff\xff\xff\xff\xff",  # a length of five bytes
        b"\x00" * 10,
        b"\xf0\x00",
    ],
)
def test_malformed_packets_never_end_the_mending(fake, peers, noise):
    broker = fake(lambda _, connection: CONNACK + (b"\x30\x05\0\x02ok!" if connection else noise))
    peer = peers(broker.url, protocol=4)
    broker.next(Connect)
    broker.cut()
    assert peer.next() == ("ok", b"!")


@pytest.mark.parametrize("how", [{"protocol": 4}, {"tensors": True}], ids=["control", "data"])
def test_a_connection_without_a_suback_is_closed_before_the_next_is_made(fake, peers, monkeypatch, how):
    """The broker would go on sending to it, and meet two of one name."""
    monkeypatch.setattr(broker_connection, "SUBACK_S", -1.0)
    broker = fake(lambda event, _: usual(event) if isinstance(event, Connect) else b"")
    peer = peers(broker.url, connect=False, **how)
    peer.transport.subscribe([("a", 0)])
    peer.transport.connect(PATIENCE_S)
    peer.state_of(Disconnected)
    broker.next(type(None))  # its end: the broker takes no other connection meanwhile


def test_a_topic_that_is_not_utf8_is_counted(fake, peers):
    peer = peers(fake(lambda *_: CONNACK + b"\x30\x03\0\x01\xff" + b"\x30\x05\0\x02ok!").url, protocol=4)
    assert peer.next() == ("ok", b"!")
    assert peer.transport.counts().bad == 1


def test_refused_filters_and_publishes_are_told(fake, peers):
    def answer(event, _):
        match event:
            case Subscribe(packet_id):
                return Suback(packet_id, b"\0\0\x87")
            case Publish(packet_id=packet_id):
                return Puback(packet_id, 0x87)
        return usual(event)

    peer = peers(fake(answer).url, protocol=5)
    token = peer.transport.subscribe([("mine", 0), ("ours", 1), ("yours", 1)])
    refused = peer.state_of(Refused)
    assert (refused.token, refused.topics) == (token, ("yours",))
    peer.say("theirs", b"x")
    refused = peer.state_of(Refused)
    assert (refused.token, refused.topics) == (None, ("theirs",))


class Sender:
    """A connection that tells (topic, heard) of what is taken or refused."""

    def __init__(self, peers, broker, protocol):
        self.taken, self.peer = queue.SimpleQueue(), peers(broker.url, connect=False, protocol=protocol)
        self.transport = self.peer.transport

    def publish(self, *topics, payload=b"x"):
        for topic in topics:
            self.transport.publish(topic, payload, 1, taken=lambda heard, topic=topic: self.taken.put((topic, heard)))

    def connect(self, count):
        """Connect, and return what becomes of the first messages."""
        self.transport.connect(PATIENCE_S)
        return [self.taken.get(timeout=PATIENCE_S) for _ in range(count)]

    def states(self, kind):
        """Close, and return the states of one kind."""
        self.transport.close(timeout_s=0.1)
        states = self.peer.states
        return [state for _ in range(states.qsize()) if isinstance(state := states.get(), kind)]


@pytest.fixture
def sender(fake, peers):
    """Make a sender to a broker; what(connection, topic): the answer to a message, by default as usual."""

    def make(what, protocol=4, connack=None):
        def answer(event, connection):
            if isinstance(event, Publish):
                return what(connection, event.topic, usual(event))
            return (connack or Connack(0)) if isinstance(event, Connect) else usual(event)

        broker = fake(answer)
        return Sender(peers, broker, protocol), broker

    return make


@pytest.mark.parametrize("protocol", [4, 5], ids=["3.1.1", "5"])
def test_a_message_on_which_the_broker_hangs_up_is_given_up_and_the_rest_is_taken(sender, protocol):
    client, _ = sender(lambda _, topic, ack: None if topic == "bad" else ack, protocol)
    client.transport.subscribe([("mine", 1)])
    client.publish("before", "bad", "after", "bad")  # the last: as one who waits publishes again
    assert [topic for topic, _ in client.connect(4)] == ["before", "bad", "bad", "after"]
    assert client.transport.counts().reconnections > HANG_UPS
    assert [(refusal.token, refusal.topics) for refusal in client.states(Refused)] == [(None, ("bad",))] * 2


def test_after_a_hang_up_the_first_message_goes_alone_until_it_is_acknowledged(sender):
    """Acknowledgements may be lost with the connection: the one before it is not to be blamed."""
    client, broker = sender(lambda connection, _, ack: ack if connection == 2 else None)
    client.publish("a", "b", "c")
    assert client.connect(3) == [("a", True), ("b", True), ("c", True)]
    came = [broker.next(Publish) for _ in range(5)]
    assert [(n, message.topic) for n, message in came] == [(0, "a"), (1, "a"), (2, "a"), (2, "b"), (2, "c")]
    assert client.states(Refused) == []


def test_a_broker_that_restarts_under_a_message_again_and_again_gets_it_at_last(fake, peers):
    """It is away for a while each time, here for one try."""

    def answer(event, connection):
        is_away = connection % 2 or (isinstance(event, Publish) and connection < 8)
        return None if is_away else usual(event)

    client = Sender(peers, fake(answer), 4)
    client.publish("long")
    assert client.connect(1) == [("long", True)]
    assert client.states(Refused) == []


def test_a_broker_that_says_that_it_shuts_down_is_not_blamed_on_a_message(sender):
    leaving = Disconnect(0x8B)
    client, _ = sender(lambda connection, _, ack: leaving if connection < 6 else ack, 5)
    client.publish("long")
    assert client.connect(1) == [("long", True)]
    assert client.states(Refused) == []


def limited(limit):
    return Connack(0, properties={MAXIMUM_PACKET_SIZE: limit})


def test_what_waits_is_refused_by_a_broker_that_says_it_takes_nothing_so_large(sender):
    client, _ = sender(lambda _, topic, ack: None if topic == "large" else ack, None, limited(2000))
    client.publish("large", payload=bytes(5000))
    client.publish("small")
    assert client.connect(2) == [("large", False), ("small", True)]
    refused, connected = client.states(Refused | Connected)
    assert (refused.token, refused.topics) == (None, ("large",))
    assert connected == Connected(5, 1999, local=True)


@pytest.mark.parametrize("limit", [2000, 0, 268_435_456])
def test_no_packet_is_larger_than_a_broker_says_that_it_takes(sender, limit):
    """With the byte that MQTT 5 adds; a limit that MQTT does not allow (EMQX has 256 MiB) means 3.1.1."""
    client, broker = sender(lambda _, __, ack: ack, None, limited(limit))
    client.connect(0)
    for nbytes in range(1985, 2000):
        with contextlib.suppress(PacketLimitError):
            client.publish("t", payload=bytes(nbytes))
    client.publish("end")
    nbytes = []
    while (message := broker.next(Publish)[1]).topic != "end":
        nbytes.append(len(message.payload))
    (connected,) = client.states(Connected | Disconnected)
    assert connected.protocol == (5 if limit == 2000 else 4)
    longest = len(publish_head("t", 2000, connected.protocol, qos=1, packet_id=1)) + max(nbytes)
    assert longest == 2000 if limit == 2000 else longest > 2000


@pytest.mark.parametrize("resumed", [True, False])
def test_bytes_of_a_session_that_the_broker_kept_put_off_when_it_must_have_acknowledged(
    fake, peers, monkeypatch, resumed
):
    """It sends what it kept before it reads our SUBSCRIBE; without a session it may have forgotten that one."""
    monkeypatch.setattr(broker_connection, "SUBACK_S", 0.5)
    monkeypatch.setattr(broker_connection, "TURN_S", 0.05)
    broker = fake(lambda event, _: Connack(0, resumed) if isinstance(event, Connect) else b"")
    peer = peers(broker.url, connect=False, protocol=4, clean=False)
    peer.transport.subscribe([("f", 1)])
    peer.transport.connect(PATIENCE_S)
    kept, begun = publish_head("t", 1, 4, qos=1, packet_id=7) + b"x", time.monotonic()
    with contextlib.suppress(OSError):  # the connection ends where the bytes put nothing off
        while time.monotonic() < begun + 1.0:
            broker.socks[0].sendall(kept)
            select.select([], [], [], 0.05)
    ended = [peer.states.get() for _ in range(peer.states.qsize())]
    assert any(isinstance(state, Disconnected) for state in ended) is not resumed
