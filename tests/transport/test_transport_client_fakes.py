"""A connection that mends itself, against what answers as no broker should, or hangs up."""

from __future__ import annotations

import contextlib
import queue
import socket
from functools import partial

import pytest

from hepti_mqtt.errors import NetworkError
from hepti_mqtt.transport import BrokerUrl, Connected, DataConnection, Disconnected, PahoTransport, Refused

PATIENCE_S = 20.0


def transport_to(port, **options):
    options = {"on_message": lambda *_: None, "on_state": lambda _: None} | options
    return PahoTransport(BrokerUrl("127.0.0.1", port, user="u", password="s3cret"), "me", **options)


def _raise(error):
    raise error


CONNACK = b"\x20\x02\0\0"


@pytest.mark.parametrize(
    "answer",
    [b"\x20\x02\0\x01", b"\x20\x03\0\x84\0", None],
    ids=["3.1.1 code", "5 code", "closes"],
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
    with pytest.raises(NetworkError, match=f"127.0.0.1:{broker.port}.*check the port"):
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


@pytest.mark.parametrize("make", [partial(PahoTransport, protocol=4), DataConnection], ids=["control", "data"])
def test_a_connection_without_a_suback_is_closed_before_the_next_is_made(fake, monkeypatch, make):
    """The broker would go on sending to it, and meet two of one name."""
    broker, states = fake({4: CONNACK}), queue.SimpleQueue()
    for module in ("control", "data_connection"):
        monkeypatch.setattr(f"hepti_mqtt.transport.{module}.SUBACK_S", -1.0)
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
        5: b"\x20\x03\0\0\0",
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
