"""What a subscriber makes of the bytes of an endpoint."""

from __future__ import annotations

import numpy as np
import pytest
from mesh_bytes import plain_parse, publish

from hepti_mqtt.transport.mesh.buffers import ALIGN, Buffers
from hepti_mqtt.transport.mesh.intake import MAX_LEADS, MAX_TOPICS, STAGE, Intake
from hepti_mqtt.transport.mesh.packets import Malformed

LIMIT = 1 << 20


class Reader:
    """An intake and what it has heard; `put` gives it bytes as a socket would: no more than it has room for."""

    def __init__(self, limit_bytes=LIMIT):
        self.heard = []
        self.addresses = []
        self.intake = Intake(Buffers(), self.publish, lambda first, body: self.heard.append((first, body)), limit_bytes)

    def publish(self, topic, payload):
        self.heard.append((topic, bytes(payload)))
        self.addresses.append(np.frombuffer(payload, np.uint8).ctypes.data if payload.nbytes else 0)

    def put(self, data):
        view = memoryview(data)
        while view.nbytes:
            room = self.intake.room()
            nbytes = min(room.nbytes, view.nbytes)
            room[:nbytes] = view[:nbytes]
            self.intake.took(nbytes)
            view = view[nbytes:]


STREAM = (
    b"\x20\x02\0\0\x90\x03\0\x01\0"
    + publish("x/a", b"")
    + publish("x/b", bytes(range(200)))
    + b"\xb0\x02\0\x07"
    + publish("x/ü", bytes(300) + b"end")
)
HEARD = [
    (0x20, b"\0\0"),
    (0x90, b"\0\x01\0"),
    ("x/a", b""),
    ("x/b", bytes(range(200))),
    (0xB0, b"\0\x07"),
    ("x/ü", bytes(300) + b"end"),
]


def test_every_split_is_heard_the_same():
    for at in range(len(STREAM) + 1):
        reader = Reader()
        reader.put(STREAM[:at])
        reader.put(STREAM[at:])
        assert reader.heard == HEARD
    assert plain_parse(STREAM, LIMIT) == (HEARD, False)


def test_byte_by_byte():
    reader = Reader()
    for i in range(len(STREAM)):
        reader.put(STREAM[i : i + 1])
    assert reader.heard == HEARD


def test_what_was_heard_before_is_heard_the_same_at_every_split():
    for at in range(len(STREAM) + 1):
        reader = Reader()
        for data in (STREAM, STREAM[:at], STREAM[at:], STREAM):
            reader.put(data)
        assert reader.heard == HEARD * 3


def test_where_topics_lie_is_not_remembered_for_ever():
    reader = Reader()
    for nbytes in range(2 * MAX_LEADS):
        reader.put(publish("x/a", bytes(nbytes)))
        assert len(reader.intake._leads) <= MAX_LEADS
    assert reader.heard == [("x/a", bytes(nbytes)) for nbytes in range(2 * MAX_LEADS)]


def test_a_lower_limit_holds_for_what_was_heard_before():
    reader = Reader()
    reader.put(publish("x/a", bytes(1000)))
    reader.intake.limit_bytes = 1000
    with pytest.raises(Malformed, match="the limit is 1000"):
        reader.put(publish("x/a", bytes(1000)))


@pytest.mark.parametrize("nbytes", [STAGE - 20, STAGE - 8, STAGE - 7, STAGE, STAGE + 1, 70_000, 1_000_000])
def test_payloads_around_the_stage_are_whole_and_aligned(nbytes):
    payload = np.random.default_rng(nbytes).bytes(nbytes)
    reader = Reader()
    reader.put(publish("x/a", payload) * 3)
    assert reader.heard == [("x/a", payload)] * 3
    assert [address % ALIGN for address in reader.addresses] == [0, 0, 0]
    assert reader.intake.missing == 0


def test_nothing_beyond_a_payload_is_received_into_it():
    reader = Reader()
    reader.put(publish("x/a", bytes(10_000))[:5000])
    room = reader.intake.room()
    assert room.nbytes == reader.intake.missing == 10_000 + 8 - 5000


MALFORMED = {
    "5-byte length": b"\x30\x80\x80\x80\x80\x01",
    "huge length": b"\x30\xff\xff\xff\x7f",
    "just over the limit": b"\x30" + b"\x81\x80\x40",
    "no topic": b"\x30\x01\0",
    "empty": b"\x30\0",
    "topic longer than the packet": b"\x30\x05\0\x04x/a",
    "topic too long": b"\x30\x80\x10" + b"\x04\0" + b"x" * 1024,
    "empty topic": b"\x30\x03\0\0a",
    "wildcard in the topic": publish("x/+", b""),
    "NUL in the topic": publish("x/\0", b""),
    "topic not UTF-8": b"\x30\x04\0\x02\xff\xfe",
    "QoS 0 of 3 GB in a control packet": b"\x90\x81\x08",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_what_an_endpoint_may_not_send(data):
    with pytest.raises(Malformed):
        Reader().put(data)
    assert plain_parse(data, LIMIT) == ([], True)
    reader = Reader()
    reader.put(STREAM)
    with pytest.raises(Malformed):
        reader.put(data)
    assert reader.heard == HEARD


def test_other_packets_are_handed_on_as_they_are():
    reader = Reader()
    reader.put(b"\x32\x07\0\x03x/a\0\x01\x31\x03\0\x01a")
    assert reader.heard == [(0x32, b"\0\x03x/a\0\x01"), (0x31, b"\0\x01a")]


def test_topics_are_remembered_and_forgotten():
    reader = Reader()
    for i in range(MAX_TOPICS + 10):
        reader.put(publish(f"x/{i}", b""))
    assert len(reader.intake._topics) == 10
    assert reader.heard[-1] == (f"x/{MAX_TOPICS + 9}", b"")


def test_a_buffer_is_used_again_when_nobody_refers_to_it():
    buffers = Buffers()
    first = buffers.take(20_000)
    array = np.frombuffer(first, np.uint8)
    del first
    second = buffers.take(20_001)
    assert np.frombuffer(second, np.uint8).ctypes.data != array.ctypes.data
    array[:] = 7
    address = array.ctypes.data
    del array
    third = np.frombuffer(buffers.take(19_999), np.uint8)
    assert (third.ctypes.data, third.nbytes) == (address, 19_999)


def test_what_is_kept_is_bounded():
    buffers = Buffers(limit_bytes=100_000)
    for nbytes in range(1, 1_000_000, 16_384):
        buffers.take(nbytes)
        kept = sum(array.nbytes for of_size in buffers._kept.values() for array in of_size)
        assert kept == buffers._bytes
        assert kept <= max(100_000, nbytes + 16_384)


def test_a_buffer_in_use_lives_on_when_others_are_forgotten():
    buffers = Buffers(limit_bytes=40_000)
    held = buffers.take(16_384)
    held[:] = b"a" * 16_384
    for _ in range(20):
        buffers.take(30_000)[:] = b"b" * 30_000
    assert bytes(held) == b"a" * 16_384
