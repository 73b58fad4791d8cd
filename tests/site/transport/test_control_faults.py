"""The control connection, against peers that answer as no broker should, hang up, or take very long."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import time
from functools import partial

import pytest
from picky import HANG_UP, LEAVE, TAKE, Picky

from hepti_mqtt.core.errors import NetworkError, PacketLimitError
from hepti_mqtt.transport.base import Connected, Disconnected, Refused
from hepti_mqtt.transport.broker_connection import HANG_UPS, BrokerConnection, DataConnection
from hepti_mqtt.transport.codec import publish_head
from hepti_mqtt.transport.url import BrokerUrl

PATIENCE_S = 20.0


def transport_to(port, **options):
    options = {"on_message": lambda *_: None, "on_state": lambda _: None} | options
    return BrokerConnection(BrokerUrl("127.0.0.1", port, user="u", password="s3cret"), "me", **options)


CONNACK = b"\x20\x02\0\0"


@pytest.mark.parametrize(
    "answer", [b"\x20\x02\0\x01", b"\x20\x03\0\x84\0", None], ids=["3.1.1 code", "5 code", "closes"]
)
def test_a_broker_of_the_old_version_is_spoken_to_in_the_old_version(fake, answer):
    broker = fake({5: answer, 4: CONNACK})
    states = queue.SimpleQueue()
    transport = transport_to(broker.port, on_state=states.put)
    transport.connect(PATIENCE_S)
    assert states.get(timeout=PATIENCE_S) == Connected(4, None, local=True)
    broker.socks[-1].shutdown(socket.SHUT_RDWR)  # it is remembered: the next attempt begins with the old version
    assert isinstance(states.get(timeout=PATIENCE_S), Disconnected)
    assert isinstance(states.get(timeout=PATIENCE_S), Connected)
    assert [broker.levels.get(timeout=PATIENCE_S) for _ in range(3)] == [5, 4, 4]
    transport.close(timeout_s=0.1)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "half a packet"])
def test_a_broker_that_did_not_answer_once_is_spoken_to_in_the_new_version_again(fake, answer):
    """It may only have been slow."""
    answers = iter([answer])
    broker = fake({5: lambda: next(answers, b"\x20\x03\0\0\0"), 4: CONNACK})
    states = queue.SimpleQueue()
    transport = transport_to(broker.port, on_state=states.put)
    transport.connect(PATIENCE_S)
    assert states.get(timeout=PATIENCE_S) == Connected(4, None, local=True)
    broker.socks[-1].shutdown(socket.SHUT_RDWR)
    assert isinstance(states.get(timeout=PATIENCE_S), Disconnected)
    assert states.get(timeout=PATIENCE_S) == Connected(5, None, local=True)
    transport.close(timeout_s=0.1)


@pytest.mark.parametrize("answer", [None, b"", b"\xff" * 40], ids=["closes", "silent", "noise"])
def test_what_is_no_broker_is_a_network_error(fake, answer):
    broker = fake({5: answer, 4: answer})
    transport = transport_to(broker.port)
    with pytest.raises(NetworkError, match=f"127.0.0.1:{broker.port}"):
        transport.connect(1.0)
    transport.close()


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
def test_malformed_packets_never_end_the_mending(fake, noise):
    answers = iter([CONNACK + noise])
    broker = fake({4: lambda: next(answers, CONNACK + b"\x30\x05\0\x02ok!")})
    heard, states = queue.SimpleQueue(), queue.SimpleQueue()
    transport = transport_to(broker.port, protocol=4, on_message=lambda *m: heard.put(m), on_state=states.put)
    transport.connect(PATIENCE_S)
    assert isinstance(states.get(timeout=PATIENCE_S), Connected)
    broker.levels.get(timeout=PATIENCE_S)
    with contextlib.suppress(OSError):
        broker.socks[0].shutdown(socket.SHUT_RDWR)
    assert heard.get(timeout=PATIENCE_S) == ("ok", b"!")
    transport.close(timeout_s=0.1)


@pytest.mark.parametrize("make", [partial(BrokerConnection, protocol=4), DataConnection], ids=["control", "data"])
def test_a_connection_without_a_suback_is_closed_before_the_next_is_made(fake, monkeypatch, make):
    """The broker would go on sending to it, and meet two of one name."""
    broker, states = fake({4: CONNACK}), queue.SimpleQueue()
    monkeypatch.setattr("hepti_mqtt.transport.broker_connection.SUBACK_S", -1.0)
    transport = make(BrokerUrl("127.0.0.1", broker.port), "me", on_message=lambda *_: None, on_state=states.put)
    transport.subscribe([("a", 0)])
    transport.connect(PATIENCE_S)
    while not isinstance(states.get(timeout=PATIENCE_S), Disconnected):
        continue
    broker.socks[0].settimeout(PATIENCE_S)
    while broker.socks[0].recv(1024):
        continue
    transport.close(timeout_s=0.0)


def test_a_topic_that_is_not_utf8_is_counted(fake):
    broker = fake({4: CONNACK + b"\x30\x03\0\x01\xff" + b"\x30\x05\0\x02ok!"})
    heard = queue.SimpleQueue()
    transport = transport_to(broker.port, protocol=4, on_message=lambda *m: heard.put(m))
    transport.connect(PATIENCE_S)
    assert heard.get(timeout=PATIENCE_S) == ("ok", b"!")
    assert transport.counts().bad == 1
    transport.close(timeout_s=0.1)


def test_refused_filters_and_publishes_are_told(fake):
    answers = {
        # CONNACK, then (before they are asked for) refusals of the first SUBSCRIBE and of the first PUBLISH.
        5: b"\x20\x03\0\0\0"
    }
    broker = fake(answers)
    states = queue.SimpleQueue()
    transport = transport_to(broker.port, protocol=5, on_state=states.put)
    transport.connect(PATIENCE_S)
    assert isinstance(states.get(timeout=PATIENCE_S), Connected)
    token = transport.subscribe([("mine", 0), ("yours", 1)])
    sock = broker.socks[0]
    sock.settimeout(PATIENCE_S)
    packet = sock.recv(1024)
    assert packet[0] == 0x82
    sock.sendall(b"\x90\x05" + packet[2:4] + b"\0\0\x87")
    assert states.get(timeout=PATIENCE_S) == Refused(token, ("yours",), "Not authorized")
    transport.publish("theirs", b"x", 1)
    packet = sock.recv(1024)
    assert packet[0] == 0x32
    sock.sendall(b"\x40\x04" + packet[10:12] + b"\x87\0")
    assert states.get(timeout=PATIENCE_S) == Refused(None, ("theirs",), "Not authorized")
    transport.close(timeout_s=0.1)


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    """Connect again at once."""
    monkeypatch.setattr("hepti_mqtt.transport.base.BACKOFF_S", (0.01, 0.05))


@pytest.fixture
def picky():
    with contextlib.ExitStack() as stack:
        yield lambda *how, **options: stack.enter_context(contextlib.closing(Picky(*how, **options)))


class Sender:
    """A transport, and what it tells: (topic, heard) of what is taken or refused, and states."""

    def __init__(self, broker, protocol):
        self.taken, self.states = queue.SimpleQueue(), queue.SimpleQueue()
        url = BrokerUrl("127.0.0.1", broker.port)
        self.transport = BrokerConnection(
            url, "me", on_message=lambda *_: None, on_state=self.states.put, protocol=protocol
        )

    def publish(self, topic, payload=b"x"):
        self.transport.publish(topic, payload, 1, taken=lambda heard: self.taken.put((topic, heard)))

    def next_taken(self):
        return self.taken.get(timeout=PATIENCE_S)

    def events_of(self, kind):
        """Close, and return the states of one kind."""
        self.transport.close(timeout_s=0.1)
        events = []
        while not self.states.empty():
            events.append(self.states.get())
        return [state for state in events if isinstance(state, kind)]


@pytest.mark.parametrize("protocol", [4, 5], ids=["3.1.1", "5"])
def test_a_message_on_which_the_broker_hangs_up_is_given_up_and_the_rest_is_taken(picky, protocol):
    broker = picky(lambda _n, topic: HANG_UP if topic == "bad" else TAKE)
    sender = Sender(broker, protocol)
    sender.transport.subscribe([("mine", 1)])
    for topic in ("before", "bad", "after", "bad"):  # the last: as one who waits publishes again
        sender.publish(topic)
    sender.transport.connect(PATIENCE_S)
    assert [sender.next_taken()[0] for _ in range(4)] == ["before", "bad", "bad", "after"]
    assert sender.transport.counts().reconnections > HANG_UPS
    refusals = sender.events_of(Refused)
    assert [(refusal.token, refusal.topics) for refusal in refusals] == [(None, ("bad",))] * 2


def test_after_a_hang_up_the_first_message_goes_alone_until_it_is_acknowledged(picky):
    """Acknowledgements may be lost with the connection: the one before it is not to be blamed."""
    broker = picky(lambda n, _topic: HANG_UP if n < 2 else TAKE)
    sender = Sender(broker, 4)
    for topic in ("a", "b", "c"):
        sender.publish(topic)
    sender.transport.connect(PATIENCE_S)
    assert [sender.next_taken() for _ in range(3)] == [("a", True), ("b", True), ("c", True)]
    assert [broker.came.get() for _ in range(5)] == [(0, "a"), (1, "a"), (2, "a"), (2, "b"), (2, "c")]
    assert sender.events_of(Refused) == []


def test_a_broker_that_restarts_under_a_message_again_and_again_gets_it_at_last(picky):
    """It is away for a while each time, here for one try."""
    broker = picky(lambda n, _topic: HANG_UP if n < 8 else TAKE, open_to=lambda n: n % 2 == 0)
    sender = Sender(broker, 4)
    sender.publish("long")
    sender.transport.connect(PATIENCE_S)
    assert sender.next_taken() == ("long", True)
    assert broker.came.qsize() == 5
    assert sender.events_of(Refused) == []


def test_a_broker_that_says_that_it_shuts_down_is_not_blamed_on_a_message(picky):
    broker = picky(lambda n, _topic: LEAVE if n < 6 else TAKE)
    sender = Sender(broker, 5)
    sender.publish("long")
    sender.transport.connect(PATIENCE_S)
    assert sender.next_taken() == ("long", True)
    assert sender.events_of(Refused) == []


def test_what_waits_is_refused_by_a_broker_that_says_it_takes_nothing_so_large(picky):
    broker = picky(lambda _n, topic: HANG_UP if topic == "large" else TAKE, limit=2000)
    sender = Sender(broker, None)
    sender.publish("large", bytes(5000))
    sender.publish("small")
    sender.transport.connect(PATIENCE_S)
    assert [sender.next_taken() for _ in range(2)] == [("large", False), ("small", True)]
    states = sender.events_of(Refused | Connected)
    assert states == [
        Refused(None, ("large",), "it takes packets of at most 1999 bytes, not 5012"),
        Connected(5, 1999, local=True),
    ]


def test_no_packet_is_larger_than_a_broker_says_that_it_takes(picky):
    """With the byte that MQTT 5 adds; a limit that MQTT does not allow (EMQX has 256 MiB) means 3.1.1."""
    for limit in (2000, 0, 268_435_456):
        broker = picky(lambda *_: TAKE, limit=limit)
        sender = Sender(broker, None)
        sender.transport.connect(PATIENCE_S)
        for payload_bytes in range(1985, 2000):
            with contextlib.suppress(PacketLimitError):
                sender.publish("t", bytes(payload_bytes))
        sender.publish("end")
        while sender.next_taken()[0] != "end":
            continue
        assert broker.longest == 2000 if limit == 2000 else broker.longest > 2000
        (connected,) = sender.events_of(Connected | Disconnected)
        assert connected.protocol == (5 if limit == 2000 else 4)


@pytest.mark.parametrize("resumed", [True, False])
def test_bytes_of_a_session_that_the_broker_kept_put_off_when_it_must_have_acknowledged(fake, monkeypatch, resumed):
    """It sends what it kept before it reads our SUBSCRIBE; without a session it may have forgotten that one."""
    monkeypatch.setattr("hepti_mqtt.transport.broker_connection.SUBACK_S", 0.5)
    monkeypatch.setattr("hepti_mqtt.transport.broker_connection.TURN_S", 0.05)
    broker, states = fake({4: b"\x20\x02\1\0" if resumed else b"\x20\x02\0\0"}), queue.SimpleQueue()
    transport = transport_to(broker.port, protocol=4, on_state=states.put, clean=False)
    transport.subscribe([("f", 1)])
    transport.connect(PATIENCE_S)
    sock, begun = broker.socks[0], time.monotonic()
    kept = publish_head("t", 1, 4, qos=1, packet_id=7) + b"x"
    with contextlib.suppress(OSError):  # the connection ends where the bytes put nothing off
        while time.monotonic() < begun + 1.0:
            sock.sendall(kept)
            select.select([], [], [], 0.05)
    ended = [states.get() for _ in range(states.qsize())]
    assert any(isinstance(state, Disconnected) for state in ended) is not resumed
    transport.close(timeout_s=0.1)
