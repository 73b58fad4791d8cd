"""Frames and arrivals: golden bytes, tags, attacks, requests, and cached exchanges."""

import hashlib
from dataclasses import replace
from typing import get_args

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from wire_values import U63, frame_fields
from wire_values import frames as any_frame

from hepti_mqtt.core.errors import WireError
from hepti_mqtt.core.ids import ALL_DEVICES, PLANNER, PlanVersion
from hepti_mqtt.core.program import NUMPY_DTYPE
from hepti_mqtt.core.spec import Draw, PlainShape
from hepti_mqtt.protocol import frames
from hepti_mqtt.protocol.frames import (
    DTYPES,
    HEADER_BYTES,
    ExchangeCache,
    Frame,
    decode,
    decode_work,
    encode,
    encode_work,
)
from hepti_mqtt.protocol.keys import UNKEYED, Checked, FrameKey
from hepti_mqtt.transport.buffers import Buffers

TOP = 2**63 - 1
WIDEST = Frame(
    "tensor", "m" * 64, PlanVersion(TOP, TOP), TOP, 32_767, 2**32 - 1, "s" * 64, 2**32 - 1, "i8",
    (0, 2**32 - 1, 2**32 - 1, 2**32 - 1), 2**32 - 1, (2**32 - 1,) * 8,
)  # fmt: skip


VALUES = np.arange(4, dtype="<f4").reshape(2, 2)
GOLDEN = Frame(
    "tensor", "bert-base", PlanVersion(1_750_000_000, 7), 42, 3, 2, "pi-2", 0, "f32", (2, 2), 16, (1500, 20), VALUES
)
KEYS = [FrameKey(b"k" * 32, checked) for checked in get_args(Checked)]
GOLDEN_HEADER = b"HPT4\x24\0" + bytes.fromhex(
    "9c 00 a9 62657274 2d62617365 ce684ee180 07 03 02 a4 70692d32 00 00 92 02 02 10 92 cd05dc 14"
)


def test_golden_bytes():
    payload = encode(GOLDEN)
    assert payload[: len(GOLDEN_HEADER)] == GOLDEN_HEADER
    assert not any(payload[len(GOLDEN_HEADER) : HEADER_BYTES - 8])
    assert payload[HEADER_BYTES - 8 : HEADER_BYTES] == bytes([42, 0, 0, 0, 0, 0, 0, 0])
    assert payload[HEADER_BYTES:] == bytes.fromhex("000000000000803f0000004000004040")
    header, whole = (encode(GOLDEN, key)[HEADER_BYTES - 16 : HEADER_BYTES - 8].hex() for key in KEYS)
    assert (header, whole) == ("c186b59b6265ff65", "ada4de55509d909b")
    assert hashlib.sha256(encode(WIDEST)).hexdigest()[:16] == "363cebb10058c6ac"
    assert frame_fields(decode(encode(WIDEST))) == frame_fields(WIDEST), "the longest names and numbers fit"
    array = decode(bytearray(payload)).array()
    assert not array.flags.writeable
    assert np.shares_memory(decode(payload).array(), np.frombuffer(payload, np.uint8))


@given(any_frame(), st.sampled_from(KEYS), st.data())
def test_a_tag_depends_on_the_key_and_on_every_byte_that_it_covers(frame, key, data):
    payload = bytearray(encode(frame, key))
    back = decode(payload)
    assert frame_fields(back) == frame_fields(frame)
    assert back.has_tag(key)
    assert back.has_tag(UNKEYED)
    assert not back.has_tag(FrameKey(b"l" * 32, key.checked))
    assert not decode(encode(frame)).has_tag(key)
    covered = len(payload) if key.checked == "whole" else HEADER_BYTES
    bit = data.draw(st.integers(0, 8 * covered - 1))
    payload[bit // 8] ^= 1 << bit % 8
    try:
        forged = decode(payload)
    except WireError:
        return
    assert not forged.has_tag(key)


def test_the_indices_on_the_wire_never_change():
    assert frames.KINDS == ("tensor", "work", "output", "done", "tile", "probe", "held", "wanted", "refused")
    assert DTYPES == ("f32", "f16", "i8", "u8", "i32")
    assert frames.WANTS == ("task", "hidden", "candidates", "alignment")


def forged(**changes):
    """Return a payload with the golden frame's header fields, some of them replaced."""
    names = [n for n in Frame.__slots__ if n not in ("plan_version", "run_id", "body", "header")]
    names[2:2] = ["boot", "number"]
    values = dict(zip(names, msgpack.unpackb(encode(GOLDEN)[6 : len(GOLDEN_HEADER)]), strict=True)) | changes
    packed = msgpack.packb(list(values.values()))
    return (b"HPT4" + len(packed).to_bytes(2, "little") + packed).ljust(HEADER_BYTES, b"\0") + bytes(16)


FORGERIES = {
    "kind": [len(frames.KINDS), -1, True, "tensor"],
    "node": [-1, 2**32],
    "dtype": [5, [0]],
    "model": ["", "All", b"bert", None],
    "source": [ALL_DEVICES, 3],
    "boot": [-1, 1.5],
    "number": [2**63],
    "layer": [-1, 32_768, True],
    "part": [2**32],
    "row_start": [-5],
    "shape": [4, [4.0], [-2, -2], [True, 4], [2**32, 4], [2**32 - 1] * 4, [1, 1, 1, 2, 2], [5], []],
    "numbers": [[0] * 9, [-1], {}, [2**32]],
}


def test_a_field_out_of_range_is_a_wire_error():
    assert decode(forged()).shape == (2, 2), "without changes it is valid"
    for name, value in [(name, value) for name, some in FORGERIES.items() for value in some]:
        with pytest.raises(WireError):
            decode(forged(**{name: value}))


def test_a_wrong_header_length_or_run_id_is_a_wire_error():
    payload = encode(GOLDEN)
    lengths = [payload[:4] + length.to_bytes(2, "little") + payload[6:] for length in (0, 39, 41, 250, 251, 65_535)]
    for wrong in (*lengths, payload[: HEADER_BYTES - 1] + b"\x80" + payload[HEADER_BYTES:]):
        with pytest.raises(WireError):
            decode(wrong)


def test_a_cached_header_does_not_admit_another_body():
    payload = encode(GOLDEN)
    assert decode(payload).run_id == 42
    for wrong in (payload + b"x", b"HPT1" + payload[4:]):
        with pytest.raises(WireError):
            decode(wrong)
    again = decode(encode(replace(GOLDEN, run_id=43)))
    assert again.run_id == 43
    np.testing.assert_array_equal(again.array(), GOLDEN.body)
    for view in (VALUES.T, VALUES[::2], VALUES[:, 1:]):
        back = decode(encode(replace(GOLDEN, shape=view.shape, body=view)))
        np.testing.assert_array_equal(back.array(), view, "an array of any layout is sent in C order")


WRONG = [
    *({"dtype": "f32", "shape": (2,), "body": body} for body in (np.zeros(3, "<f4"), np.zeros(2, "<f8"), bytes(9))),
    *({"model": "M"}, {"model": ""}, {"run_id": -1}, {"node": -1}, {"dtype": "f64"}, {"kind": "letter"}),
    {"numbers": (2**32,)},
]


def test_encode_refuses_what_decode_would():
    right = Frame("tensor", "m", PlanVersion(1, 1), 1, shape=(0,), body=b"")
    encode(right)
    encode(replace(right, kind="probe", model=""))
    for changes in WRONG:
        with pytest.raises(WireError):
            encode(replace(right, **changes))


@st.composite
def requests(draw):
    lengths = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=6)))
    rows = draw(st.sets(st.integers(0, sum(lengths) - 1), max_size=10))
    shape = PlainShape(lengths, draw(st.sampled_from(["task", "hidden"])), tuple(sorted(rows)))
    if draw(st.booleans()):
        return shape, draw(hnp.arrays(np.dtype("<i4"), (shape.size,)))
    return shape, draw(hnp.arrays(np.uint8, (len(lengths), 3, 4, 4)))


@given(requests(), U63)
def test_a_request_survives_encoding(request_, run_id):
    shape, inputs = request_
    payload = encode_work("vit", PlanVersion(5, 6), run_id, shape, inputs)
    frame = decode(payload)
    back_shape, back = decode_work(frame)
    assert (frame.kind, frame.run_id, frame.source) == ("work", run_id, PLANNER)
    assert back_shape == shape
    assert back.dtype == inputs.dtype
    np.testing.assert_array_equal(back, inputs)
    assert len(payload) == frames.work_bytes(shape, inputs.nbytes)
    assert np.shares_memory(back, np.frombuffer(payload, np.uint8))


DRAWS = st.builds(
    Draw,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.floats(0, 10),
    st.integers(0, 2**32 - 1),
    st.floats(0, 1, width=32),
    st.floats(0, 1, width=32),
)


@given(st.lists(DRAWS, min_size=1, max_size=8), st.integers(1, 2**63 - 1))
def test_the_draws_of_a_following_run_survive_encoding(draws, before):
    count, followed = len(draws), frames.Followed(before, tuple(draws))
    shape, inputs = PlainShape((1,) * count, "candidates", (), 64), np.arange(3 * count, dtype="<i4")
    frame = decode(encode_work("m", PlanVersion(5, 6), 7, shape, inputs, follows=followed))
    assert decode_work(frame)[0] == shape
    np.testing.assert_array_equal(decode_work(frame)[1], inputs)
    assert frames.decode_followed(frame) == followed
    assert frames.decode_continued(frame) is None
    assert frames.decode_followed(decode(encode_work("m", PlanVersion(5, 6), 7, shape, inputs))) is None


@given(requests(), st.data())
def test_a_changed_request_is_another_request_or_a_wire_error(request_, data):
    payload = bytearray(encode_work("m", PlanVersion(1, 1), 1, *request_))
    byte = data.draw(st.integers(0, min(len(payload), HEADER_BYTES + 64) - 1))
    payload[byte] ^= 1 << data.draw(st.integers(0, 7))
    try:
        shape, inputs = decode_work(decode(payload))
    except WireError:
        return
    assert frames.work_bytes(shape, inputs.nbytes) == len(payload)


def test_golden_request():
    payload = encode_work("m", PlanVersion(1, 2), 3, PlainShape((2, 1), "hidden", (1,)), np.array([7, 8, 9], "<i4"))
    assert payload[HEADER_BYTES:] == np.array([1, 2, 1, 0, 2, 1, 1, *[0] * 9, 7, 8, 9], "<i4").tobytes()
    assert decode(payload).numbers == (4, 3)


@pytest.mark.parametrize(
    ("shape", "inputs"),
    [
        *((PlainShape(sizes), np.zeros(size, "<i4")) for sizes, size in (((), 0), ((0,), 0), ((2, -1), 1), ((2,), 3))),
        *((PlainShape((2,)), i) for i in (np.zeros(2, "<i8"), np.zeros(2, np.uint8), np.zeros((2, 3, 4, 4), np.uint8))),
        (PlainShape((2,), "all"), np.zeros(2, "<i4")),
        *((PlainShape((3,), "task", marks), np.zeros(3, "<i4")) for marks in ((3,), (1, 1), (-1,))),
        (PlainShape((2**24 + 1,)), np.zeros((1, 1, 1, 1), np.uint8)),
    ],
)
def test_a_contradictory_request_is_refused(shape, inputs):
    with pytest.raises(WireError):
        encode_work("m", PlanVersion(1, 1), 1, shape, inputs)


BIG = 2**31 - 1
HEADS = (
    (2, 1, 0, 0, 0, 0, 3), (0, 0, 0, 0, 0, 0, 3), (0, -1, 0, 0, 0, 0, 3), (0, 1, -1, 0, 0, 0, 3),
    (0, BIG, 0, 0, 0, 0, 3), (0, 1, BIG, 0, 0, 0, 3), (0, 1, 0, 0, 0, 0, 4), (0, 1, 0, -1, 0, 0, 3),
    (0, 1, 0, 1, 0, 0, 2), (0, 1, 0, BIG, 0, 0, 2), (0, 1, 0, 64, -1, 0, 2), (0, 1, 0, 64, 1, 2, 2),
    (0, 1, 0, 0, 1, 0, 3), (0, 1, 0, 0, 0, 1, 3), (0, 2, 0, 64, 1, 0, 1, 1),
)  # fmt: skip


@pytest.mark.parametrize("head", HEADS)
def test_a_forged_request_is_refused(head):
    body = np.zeros(16, "<i4")
    body[: len(head)] = head
    payload = body.tobytes() + np.zeros(3, "<i4").tobytes()
    frame = Frame("work", "m", PlanVersion(1, 1), 1, shape=(len(payload),), numbers=(4, 3), body=payload)
    with pytest.raises(WireError):
        decode_work(decode(encode(frame)))


def test_another_frame_is_not_a_request():
    body = encode_work("m", PlanVersion(1, 1), 1, PlainShape((3,)), np.zeros(3, "<i4"))[HEADER_BYTES:]
    right = Frame("work", "m", PlanVersion(1, 1), 1, shape=(len(body),), numbers=(4, 3), body=body)
    decode_work(right)
    changes = [{"kind": "tile"}, *({"numbers": n} for n in ((), (9, 3), (4, 4))), {"shape": (8,), "body": body[:8]}]
    for change in changes:
        with pytest.raises(WireError):
            decode_work(replace(right, **change))


def test_a_session_survives_encoding_and_contradictions_are_refused():
    Session = frames.DecoderSession
    shape, inputs = PlainShape((2,), session_rows=64), np.array([5, 7, 8], "<i4")
    for session in (Session(9, final=True), Session(9, source=8), Session(9, False, 8, True)):
        frame = decode(encode_work("m", PlanVersion(1, 2), 3, shape, inputs, (session,)))
        back_shape, back = decode_work(frame)
        assert (back_shape, frames.decode_sessions(frame)) == (shape, (session,))
        np.testing.assert_array_equal(back, inputs)
    for session in (Session(9, source=9), Session(9, takes_over=True), Session(0, source=9)):
        with pytest.raises(WireError):
            encode_work("m", PlanVersion(1, 2), 3, shape, inputs, (session,))
    for sizes, rows in (((3,), 64), ((2,), 1), ((2, 65), 64), ((1,) * 9, 64)):
        wrong = PlainShape(sizes, session_rows=rows)
        with pytest.raises(WireError):
            encode_work("m", PlanVersion(1, 2), 3, wrong, inputs)


# -- arrivals ---------------------------------------------------------------------------------------------------------

TOPIC = "hepti/v1/home/x/m/2/a/b"
BODY = np.arange(12, dtype=np.float32).reshape(3, 4)
FRAME = Frame("tensor", "m", PlanVersion(1, 1), 7, 2, 3, "a", 1, "f32", BODY.shape, 0, (), BODY)


def payload(frame=FRAME):
    return memoryview(encode(frame))


def learned(frame=FRAME):
    cache = ExchangeCache()
    cache.learn("a", TOPIC, payload(frame), decode(payload(frame)))
    return cache


@given(
    st.integers(0, 2**63 - 1),
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    st.integers(0, 2**32 - 1),
)
def test_an_arrival_equals_its_frame(run_id, dtype, shape, node):
    body = np.random.default_rng(node).integers(0, 100, shape).astype(NUMPY_DTYPE[dtype])
    first = replace(FRAME, dtype=dtype, shape=shape, node=node, body=body)
    sent = payload(replace(first, run_id=run_id, body=body + body.dtype.type(1)))
    arrival, frame = learned(first).arrival("a", TOPIC, sent), decode(sent)
    assert arrival is not None
    assert (arrival.run_id, arrival.exchange.plan_key) == (frame.run_id, (frame.model, frame.plan_version))
    assert arrival.exchange.key == (frame.node, frame.part, frame.source)
    got, read = arrival.array(), frame.array()
    assert (got.shape, got.dtype) == (read.shape, read.dtype)
    assert (got.flags.writeable, got.flags.owndata, got.flags.c_contiguous) == (False, False, True)
    assert got.ctypes.data == read.ctypes.data
    assert arrival.frame().equals(frame)


def test_a_payloads_memory_is_not_reused_during_its_arrays_life():
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


def test_a_changed_byte_before_the_tag_needs_a_full_check():
    cache, sent = learned(), bytearray(payload())
    for at in range(frames.HEADER_PREFIX_BYTES):
        sent[at] ^= 1
        assert cache.arrival("a", TOPIC, memoryview(bytes(sent))) is None, at
        sent[at] ^= 1
    assert cache.arrival("a", TOPIC, memoryview(bytes(sent))) is not None


SENT = bytes(payload())


@pytest.mark.parametrize(
    ("peer", "topic", "sent"),
    [
        *(("c", TOPIC, SENT), ("a", TOPIC[:-1] + "c", SENT)),
        *(("a", TOPIC, sent) for sent in (SENT[:-1], SENT + b"\0", SENT[:HEADER_BYTES], SENT[:100], b"")),
        ("a", TOPIC, SENT[: HEADER_BYTES - 1] + b"\xff" + SENT[HEADER_BYTES:]),
    ],
)
def test_a_frame_unlike_the_cached_frame_needs_a_full_check(peer, topic, sent):
    assert learned().arrival(peer, topic, memoryview(sent)) is None
    assert learned(replace(FRAME, shape=(0, 4), body=b"")).arrival("a", TOPIC, payload()) is None, "an empty array"


def test_the_cache_of_exchanges_is_bounded(monkeypatch):
    monkeypatch.setattr(frames, "MAX_EXCHANGES", 4)
    cache = ExchangeCache()
    sent = [replace(FRAME, node=node) for node in range(11)]
    for frame in sent:
        cache.learn("a", TOPIC, payload(frame), frame)
        assert cache.arrival("a", TOPIC, payload(frame)) is not None
    assert sum(cache.arrival("a", TOPIC, payload(frame)) is not None for frame in sent) <= 4
