"""Arrivals: what a known exchange says without being read again is what reading its frame would say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.ids import Epoch
from hepti_mqtt.program import NUMPY_DTYPE
from hepti_mqtt.protocol import frames
from hepti_mqtt.protocol.frames import DTYPES, HEADER_BYTES, Exchanges, Frame, decode, encode
from hepti_mqtt.transport.mesh.buffers import Buffers

TOPIC = "hepti/v1/home/x/m/2/a/b"
BODY = np.arange(12, dtype=np.float32).reshape(3, 4)
FRAME = Frame("tensor", "m", Epoch(1, 1), 7, 2, 3, "a", 1, "f32", BODY.shape, 0, (), BODY)


def payload(frame: Frame = FRAME) -> memoryview:
    return memoryview(encode(frame))


def learned(frame: Frame = FRAME) -> Exchanges:
    known = Exchanges()
    known.learn("a", TOPIC, payload(frame), decode(payload(frame)))
    return known


@given(
    st.integers(0, 2**63 - 1),
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    st.integers(0, 2**32 - 1),
)
def test_an_arrival_says_what_its_frame_says(admission, dtype, shape, node):
    body = np.random.default_rng(node).integers(0, 100, shape).astype(NUMPY_DTYPE[dtype])
    first = replace(FRAME, dtype=dtype, shape=shape, node=node, body=body)
    sent = payload(replace(first, admission=admission, body=body + body.dtype.type(1)))
    arrival, frame = learned(first).arrival("a", TOPIC, sent), decode(sent)
    assert arrival is not None
    assert (arrival.admission, arrival.exchange.of) == (frame.admission, (frame.model, frame.epoch))
    assert arrival.exchange.key == (frame.node, frame.part, frame.source)
    got, read = arrival.array(), frame.array()
    assert (got.shape, got.dtype) == (read.shape, read.dtype)
    assert (got.flags.writeable, got.flags.owndata, got.flags.c_contiguous) == (False, False, True)
    assert got.ctypes.data == read.ctypes.data
    assert arrival.frame().says(frame)


def test_memory_of_a_payload_is_not_used_again_while_its_array_is_there():
    buffers, sent = Buffers(), payload()
    taken = buffers.take(sent.nbytes)
    taken[:] = sent
    array = learned().arrival("a", TOPIC, taken).array()
    del taken
    for _ in range(3):
        buffers.take(sent.nbytes)[:] = bytes(sent.nbytes)
    np.testing.assert_array_equal(array, BODY)
    address = array.ctypes.data
    del array
    assert address - HEADER_BYTES in {np.frombuffer(buffers.take(100), np.uint8).ctypes.data for _ in range(3)}


def test_any_other_byte_before_the_admission_number_has_to_be_checked():
    known, sent = learned(), bytearray(payload())
    for at in range(HEADER_BYTES - 8):
        sent[at] ^= 1
        assert known.arrival("a", TOPIC, memoryview(bytes(sent))) is None, at
        sent[at] ^= 1
    assert known.arrival("a", TOPIC, memoryview(bytes(sent))) is not None


@pytest.mark.parametrize(
    ("peer", "topic", "sent"),
    [
        ("c", TOPIC, payload()),
        ("a", TOPIC[:-1] + "c", payload()),
        ("a", TOPIC, payload()[:-1]),
        ("a", TOPIC, memoryview(bytes(payload()) + b"\0")),
        ("a", TOPIC, payload()[:HEADER_BYTES]),
        ("a", TOPIC, payload()[:100]),
        ("a", TOPIC, memoryview(b"")),
        ("a", TOPIC, memoryview(bytes(payload()[: HEADER_BYTES - 1]) + b"\xff" + bytes(payload()[HEADER_BYTES:]))),
    ],
    ids=["sender", "topic", "short", "long", "no body", "half a header", "empty", "admission number"],
)
def test_what_is_not_just_like_a_checked_frame_has_to_be_checked(peer, topic, sent):
    assert learned().arrival(peer, topic, sent) is None


def test_an_empty_array_is_always_read():
    assert learned(replace(FRAME, shape=(0, 4), body=b"")).arrival("a", TOPIC, payload()) is None


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(frames, "REMEMBERED", 4)
    known = Exchanges()
    for node in range(11):
        frame = replace(FRAME, node=node)
        known.learn("a", TOPIC, payload(frame), frame)
        assert known.arrival("a", TOPIC, payload(frame)) is not None
        assert len(known._known) <= 4
