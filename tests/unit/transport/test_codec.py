"""The codec without a socket: every split, every truncation, hostile bytes, both versions."""

import tracemalloc

import numpy as np
import pytest
from hostile_bytes import run
from hypothesis import given
from hypothesis import strategies as st
from mqtt_bytes import Reader, publish

from hepti_mqtt.transport import codec
from hepti_mqtt.transport.buffers import ALIGN, Buffers
from hepti_mqtt.transport.codec import FROM_BROKER, FROM_SUBSCRIBER, STAGE, Malformed, Publish, encode, publish_head

LIMIT = 1 << 20
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60)
DATA = st.binary(max_size=60)
IDS = st.integers(1, 65_535)
CODES = st.integers(0, 255)
PROPERTIES = st.dictionaries(st.sampled_from([0x24, 0x25, 0x29, 0x2A]), CODES)


def commands(version):
    """Commands of a version, each with who may send it."""
    properties = PROPERTIES if version == 5 else st.just({})
    connect_properties = (
        st.dictionaries(st.just(codec.MAXIMUM_PACKET_SIZE), st.integers(1, 2**32 - 1))
        if version == 5
        else st.just({})
    )  # fmt: skip
    code = CODES if version == 5 else st.just(0)
    login = st.tuples(TEXTS, st.none() | DATA) | st.just((None, None))
    will = st.none() | st.tuples(TEXTS, DATA)
    connect = st.builds(
        lambda login, *rest: codec.Connect(version, rest[0], *login, *rest[1:]),
        login, TEXTS, st.booleans(), st.integers(0, 65_535), will, connect_properties,
    )  # fmt: skip
    codes = st.binary(min_size=1, max_size=20)
    filters = st.lists(st.tuples(TEXTS, st.integers(0, 2)), min_size=1, max_size=5).map(tuple)
    return st.one_of(
        st.tuples(st.just(codec.FROM_STRANGER), connect),
        st.tuples(st.just(FROM_BROKER), st.builds(codec.Connack, CODES, st.booleans(), properties)),
        st.tuples(st.just(FROM_BROKER), st.builds(codec.Puback, IDS, code)),
        st.tuples(st.just(FROM_SUBSCRIBER), st.builds(codec.Subscribe, IDS, filters)),
        st.tuples(st.just(FROM_BROKER), st.builds(codec.Suback, IDS, codes)),
        st.tuples(st.just(FROM_SUBSCRIBER), st.builds(codec.Unsubscribe, IDS, st.lists(TEXTS, min_size=1).map(tuple))),
        st.tuples(st.just(FROM_BROKER), st.builds(codec.Unsuback, IDS, codes if version == 5 else st.just(b""))),
        st.tuples(st.just(FROM_SUBSCRIBER), st.just(codec.Pingreq())),
        st.tuples(st.just(FROM_BROKER), st.just(codec.Pingresp())),
        st.tuples(st.just(FROM_BROKER), st.builds(codec.Disconnect, code)),
    )


@given(st.sampled_from([4, 5]).flatmap(lambda v: st.tuples(st.just(v), commands(v))))
def test_a_control_packet_survives_whole_and_byte_by_byte_and_no_prefix_is_one(case):
    version, (reads, command) = case
    data = encode(command, version)
    for parts in ([data], [data[i : i + 1] for i in range(len(data))]):
        reader = Reader(reads, version=version, control_bytes=16_384)
        for part in parts[:-1]:
            reader.put(part)
            assert reader.heard == []
        reader.put(parts[-1])
        assert reader.heard == [command]


@given(
    st.sampled_from([4, 5]),
    st.text(st.characters(exclude_characters="+#\0", exclude_categories=["Cs"]), min_size=1, max_size=200),
    st.binary(max_size=300) | st.integers(STAGE - 300, 3 * STAGE).map(bytes),
    st.sampled_from([(0, 0), (1, 7), (1, 65_535)]),
    st.booleans(),
    st.lists(st.integers(1, 2 * STAGE), max_size=20),
)
def test_a_message_survives_every_division_of_its_stream(version, topic, payload, sent, retain, cuts):
    qos, packet_id = sent
    data = publish_head(topic, len(payload), version, qos=qos, retain=retain, packet_id=packet_id) + payload
    reader, stream = Reader(FROM_BROKER, version=version), data * 3
    for cut in [*cuts, len(stream)]:
        reader.put(stream[:cut])
        stream = stream[cut:]
    assert reader.heard == [Publish(topic, payload, qos, retain, packet_id)] * 3
    assert {address % ALIGN for address in reader.addresses} <= {0}


def test_the_caches_of_topics_and_leads_are_bounded(monkeypatch):
    monkeypatch.setattr(codec, "MAX_TOPICS", 4)
    monkeypatch.setattr(codec, "MAX_LEADS", 4)
    reader = Reader()
    for i in [*range(6), 5, 0]:
        reader.put(publish(f"x/{i}", bytes(i)))
    *first, last, again = [event.topic for event in reader.heard]
    assert [*first, last, again] == [*(f"x/{i}" for i in range(6)), "x/5", "x/0"]
    assert last is first[-1]
    assert again is not first[0], "the cache has dropped it"


def test_properties_of_a_broker_are_skipped_or_reported():
    listed = b"\x21\0\x14\x27\0\x01\0\0\x12\0\x02id\x26\0\x01k\0\x01v"
    reader = Reader(FROM_BROKER, version=5)
    reader.put(bytes((0x20, 3 + len(listed), 1, 0, len(listed))) + listed)
    read = {codec.RECEIVE_MAXIMUM: 20, codec.MAXIMUM_PACKET_SIZE: 65_536, codec.ASSIGNED_CLIENT: b"id", 0x26: b"k"}
    assert reader.heard == [codec.Connack(0, True, read)]
    message = b"\x32\x14\0\x01t\0\x09\x0b\x01\x01\x26\0\x02kk\0\x02vvpay"
    for part in (*(message[i : i + 1] for i in range(12)), message[12:]):
        reader.put(part)
    assert reader.heard[1:] == [Publish("t", b"pay", 1, False, 9)]


def test_mqtt_5_may_be_refused_by_a_connack_of_3_1_1():
    reader = Reader(FROM_BROKER, version=5)
    reader.put(b"\x20\x02\0\x01")
    assert reader.heard == [codec.Connack(1)]


def test_a_lower_limit_applies_to_cached_leads():
    reader = Reader()
    reader.put(publish("x/a", bytes(1000)))
    reader.decoder.limit_bytes = 1000
    with pytest.raises(Malformed):
        reader.put(publish("x/a", bytes(1000)))


#: A version of MQTT, and a packet of a broker.
BROKEN = {
    "QoS 2": (4, b"\x34\x07\0\x03x/a\0\x01"),
    "QoS 1 without a packet id": (4, b"\x32\x05\0\x03x/a"),
    "packet id 0": (4, b"\x32\x07\0\x03x/a\0\0"),
    "repeated at QoS 0": (4, b"\x38\x05\0\x03x/a"),
    "PUBREC": (4, b"\x50\x02\0\x01"),
    "acknowledges packet 0": (4, b"\x40\x02\0\0"),
    **{
        f"properties {broken.hex()}": (5, bytes((0x30, 3 + len(broken))) + b"\0\x01t" + broken)
        for broken in (b"\x05\x23\0\x01", b"\x01\x7f", b"\x80\x80\x80\x80\x01", b"\xff\x7f")
    },
}


@pytest.mark.parametrize(("version", "data"), BROKEN.values(), ids=BROKEN)
def test_an_invalid_packet_of_a_broker_is_malformed(version, data):
    with pytest.raises(Malformed):
        Reader(FROM_BROKER, version=version).put(data)


def test_a_packet_above_mqtts_limit_is_refused_to_its_sender():
    assert publish_head("t", codec.MAX_LENGTH - 3, 4)
    with pytest.raises(ValueError):
        publish_head("t", codec.MAX_LENGTH - 2, 4)
    with pytest.raises(ValueError):
        publish_head("t" * 65_536, 0, 4)


def test_filters_and_topics():
    assert all(map(codec.is_filter, ("a", "+", "#", "a/#", "+/b", "/", "a//+")))
    assert not any(map(codec.is_filter, ("", "a/#/b", "a#", "a+/b", "+a", "##", "a\0")))
    assert [codec.is_topic(name) for name in ("a/b", "", "a/+", "#", "a\0")] == [True, False, False, False, False]
    yes = [
        ("a/b", "a/b"),
        ("a/#", "a"),
        ("a/#", "a/b/c"),
        ("+/b", "a/b"),
        ("a/+", "a/"),
        ("+", ""),
        ("$SYS/#", "$SYS/a"),
    ]
    no = [("a/b", "a/c"), ("a/+", "a"), ("a/#", "b/a"), ("#", "$SYS/a"), ("+/a", "$SYS/a"), ("+", "a/b")]
    assert all(codec.matches(*pair) for pair in yes)
    assert not any(codec.matches(*pair) for pair in no)
    assert codec.covers("a/#", "a/+/c")
    assert not codec.covers("a/+", "a/#")


def test_a_buffer_is_reused_after_its_last_reference():
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


def test_the_memory_of_buffers_is_bounded_and_buffers_in_use_stay():
    buffers = Buffers(limit_bytes=40_000)
    held = buffers.take(16_384)
    held[:] = b"a" * 16_384
    tracemalloc.start()
    for nbytes in range(1, 1_000_000, 16_384):
        buffers.take(nbytes)[:] = b"b" * nbytes
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4_000_000, "the sizes add up to 30 MB"
    assert bytes(held) == b"a" * 16_384


@pytest.mark.parametrize(("cases", "seed"), [(3_000, 13), pytest.param(500_000, 0, marks=pytest.mark.nightly)])
def test_damaged_streams_are_read_as_by_the_slow_parser(cases, seed):
    run(cases, seed)
