"""Control messages: round trips, golden bytes, and attacks."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_values import MESSAGES

from hepti_mqtt import __version__
from hepti_mqtt.errors import PacketLimitError, WireError
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.protocol import messages as wire
from hepti_mqtt.protocol.frames import Frame
from hepti_mqtt.protocol.frames import encode as encode_frame
from hepti_mqtt.protocol.messages import (
    Activate,
    CachedTiles,
    Cancel,
    Caps,
    Endpoint,
    EndSessions,
    HandOver,
    Heartbeat,
    KeptSession,
    KeptSessions,
    LeaseTasks,
    LinkReport,
    Peer,
    PeerStats,
    Prepare,
    PrepareFailed,
    PrepareProgress,
    Ready,
    Release,
    ReleaseAll,
    RequestTiles,
    RunFailed,
    RunProgress,
    Status,
    TaskDone,
    decode,
    decode_caps,
    decode_heartbeat,
    decode_report,
    decode_status,
    encode,
    encode_caps,
    encode_heartbeat,
    encode_status,
    is_compatible,
)
from hepti_mqtt.protocol.plausible import FIELDS, MAX_TEXT, Number, check, limits_table
from hepti_mqtt.spec import PlainShape


def test_a_frame_on_the_way_up_is_told_apart_by_its_magic():
    frame = Frame("done", "m", PlanVersion(1, 2), 3, source="pi", numbers=(4, 5))
    back = decode_report(encode_frame(frame))
    assert isinstance(back, Frame)
    assert back.numbers == (4, 5)
    with pytest.raises(WireError):
        decode_report(b"HPT1")


UNKEYED = " c400 a6686561646572 cb0000000000000000"  # no key, the default of `checked`, no share


@pytest.mark.parametrize(
    ("message", "golden"),
    [
        (Prepare(1, {"a": 1}, {}, bytes(32), 2), "9c 01 01 81 a161 01 80 c420" + "00" * 32 + "02 90 00 90" + UNKEYED),
        (
            Prepare(1, {}, {}, bytes(32), 2, peers=(Peer("b", Endpoint("10.0.0.7", 80), "o", "i"),)),
            "9c 01 01 80 80 c420" + "00" * 32 + "02 90 00 91 96 a162 a831302e302e302e37 50 a0 a16f a169" + UNKEYED,
        ),
        (
            Prepare(1, {}, {}, bytes(32), 2, (PlainShape((3, 4), "hidden"), PlainShape((5,), session_rows=64)), 1),
            "9c 01 01 80 80 c420" + "00" * 32 + "02 92 9401009203 0490 9400409105 90 01 90" + UNKEYED,
        ),
        (Activate(1, "m", PlanVersion(2, 3)), "94 02 01 a16d 92 02 03"),
        (Release(1, "m", PlanVersion(2, 3)), "94 03 01 a16d 92 02 03"),
        (Cancel("m", PlanVersion(2, 3), 4), "94 04 a16d 92 02 03 04"),
        (ReleaseAll(255), "92 05 ccff"),
        (Ready(1, "m", PlanVersion(2, 3), 256, b"12345678"), "96 64 01 a16d 92 02 03 cd0100 c408 3132333435363738"),
        (PrepareProgress(1, "m", PlanVersion(2, 3), 4, 5), "96 65 01 a16d 92 02 03 04 05"),
        (PrepareFailed(1, "m", PlanVersion(2, 3), "c", "t", 0), "98 66 01 a16d 92 02 03 a163 a174 00 90"),
        (PrepareFailed(1, "m", PlanVersion(2, 3), "c", "t", 0, ("b",)), "98 66 01 a16d 92 02 03 a163 a174 00 91 a162"),
        (
            CachedTiles("m", bytes(32), b"\xf0", 0.5, 0.5),
            "96 6b a16d c420" + "00" * 32 + "c401f0" + 2 * "cb3fe0000000000000",
        ),
        (RequestTiles("m", (bytes(32),), 0.5), "94 67 a16d 91 c420" + "00" * 32 + "cb3fe0000000000000"),
        (RunFailed("m", PlanVersion(2, 3), 4, "c", "t"), "97 68 a16d 92 02 03 04 a163 a174 90"),
        (RunFailed("m", PlanVersion(2, 3), 4, "c", "t", (5,)), "97 68 a16d 92 02 03 04 a163 a174 91 05"),
        (LeaseTasks("m", PlanVersion(2, 3), 4, (5, 6)), "95 06 a16d 92 02 03 04 92 05 06"),
        (TaskDone("m", PlanVersion(2, 3), 4, 5), "95 69 a16d 92 02 03 04 05"),
        (HandOver("m", PlanVersion(2, 3), 4, 5, 6, {"a": 7}), "97 07 a16d 92 02 03 04 05 06 81 a161 07"),
        (EndSessions("m", PlanVersion(2, 3), (4, 5)), "94 08 a16d 92 02 03 92 04 05"),
        (RunProgress("m", PlanVersion(2, 3), 4, 5), "95 6a a16d 92 02 03 04 05"),
        (
            KeptSessions("m", PlanVersion(2, 3), (KeptSession(PlanVersion(1, 4), 5, 6),)),
            "94 6c a16d 92 02 03 91 93 92 01 04 05 06",
        ),
    ],
)
def test_golden_bytes(message, golden):
    assert encode(message).hex() == golden.replace(" ", "")


def test_golden_heartbeat_and_status():
    heartbeat = Heartbeat(1, 2, 0.5, 3, None, None, None, 1.0, 4, {"a": 5})
    assert (
        encode_heartbeat(heartbeat).hex()
        == "9f0102cb3fe000000000000003c0c0c0cb3ff000000000000004" + "81a161058080c0c0" + "cb0000000000000000"
    )
    told = replace(
        heartbeat, peers={"b": LinkReport(0.5, None)}, edges={"b": PeerStats(1, 2, 3, 4, 5, 6, 7, 1, 8, 9, "t")}
    )
    assert (
        encode_heartbeat(told)
        .hex()
        .endswith("81a1610581a16292cb3fe0000000000000c081a1629b01020304050607010809a174c0c0" + "cb0000000000000000")
    )
    assert encode_status(Status("online", 7)) == b'{"state": "online", "boot": 7}'
    starting = b'{"state": "starting", "boot": 7, "doing": "compiling", "done": 3, "total": 23}'
    assert encode_status(Status("starting", 7, "compiling", 3, 23)) == starting


WRONG = [None, True, -1, 2**63, 1.5, "x", b"x", [], {}, [1], {"a": 1}, {1: 2}, "B/A", float("nan"), float("inf")]


@given(MESSAGES, st.data())
def test_a_field_of_another_type_is_a_wire_error_or_still_valid(message, data):
    values = msgpack.unpackb(encode(message))
    values[data.draw(st.integers(0, len(values) - 1))] = data.draw(st.sampled_from(WRONG))
    try:
        back = decode(msgpack.packb(values))
    except WireError:
        return
    assert decode(encode(back)) == back


@pytest.mark.parametrize(
    "message", [Ready(1, "m", PlanVersion(2, 3), 4, bytes(8)), PrepareFailed(1, "m", PlanVersion(2, 3), "c", "t", 0)]
)
def test_a_field_too_many_or_too_few_is_a_wire_error(message):
    values = msgpack.unpackb(encode(message))
    for wrong in (values[:-1], [*values, 0]):
        with pytest.raises(WireError):
            decode(msgpack.packb(wrong))


HALF = "\ud800"  # a surrogate without its other half
CONTRADICTIONS = {
    "plan": [
        {"a": {1, 2}}, {"a": np.float32(1)}, {1: 2}, {"a": float("nan")}, {"a": 2**64}, [1], {"a": [HALF]}, {HALF: 1},
    ],
    "manifest": [bytes(31), "0" * 32],
    "transaction_id": [-1, True],
    "in_flight": [1.0],
    "build_first": [-1],
    "shapes": [
        5, [[0, 0, [1]]], [[0, 0, 1, []]], [[4, 0, [1], []]], [[True, 0, [1], []]], [[0, 0, [], []]],
        [[0, 0, [0], []]], [[0, 0, ["1"], []]], [[0, 0, [2**62], []]], [[0, 0, [3], [2, 1]]], [[0, 2, [3], []]],
        [[0, 64, [1] * 9, []]], [[0, 0, [1] * 4097, []]], [PlainShape((1,))] * 17, [PlainShape((1.5,))],
    ],
    "spec": [{"a": b"x" * 1_000_001}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(n, value) for n, some in CONTRADICTIONS.items() for value in some])
def test_encode_refuses_what_decode_would(name, value):
    with pytest.raises(WireError):
        encode(replace(Prepare(1, {}, {}, bytes(32), 2), **{name: value}))


def test_whatever_an_error_says_can_be_told():
    for text, told in (("half a character: \ud800", "half a character: ?"), (70_000 * "\u00e4", MAX_TEXT * "\u00e4")):
        message = RunFailed("m", PlanVersion(1, 1), 7, "device", text)
        assert decode(encode(message)) == replace(message, text=told)


def test_encode_refuses_what_is_no_message():
    with pytest.raises(WireError):
        encode(Status("online", 1))


def test_depth_and_size_are_limited_in_both_directions():
    nested: dict = {}
    for _ in range(20):
        nested = {"a": nested}
    with pytest.raises(WireError):
        encode(Prepare(1, nested, {}, bytes(32), 2))
    for deep, parsers in (
        (b"\x91" * 5000, (decode, decode_heartbeat)),
        (b"[" * 100_000, (decode_status, decode_caps)),
        (bytes(wire.MAX_MESSAGE_BYTES + 1), (decode, decode_heartbeat, decode_status, decode_caps)),
        (b'{"state": "online", "boot": 1}'.ljust(wire.MAX_SELF_BYTES + 1), (decode_status,)),
    ):
        for parse in parsers:
            with pytest.raises(WireError):
                parse(deep)


WRONG_STATUSES = (
    *(b"", b"[]", b"{}", b"\xff\xfe", b'{"state": "online"}', b'{"state": ["online"], "boot": 1}'),
    *(b'{"state": "%s", "boot": 1}' % state for state in (b"asleep", b"waiting")),
    *(b'{"state": "online", "boot": %s}' % boot for boot in (b'"1"', b"1e3", b"9" * 5000)),
    *(b'{"state": "starting", "boot": 1, %s}' % more for more in (b'"done": -1', b'"doing": 3', b'"doing": "\\ud800"')),
)


@pytest.mark.parametrize("payload", WRONG_STATUSES)
def test_a_wrong_status_is_a_wire_error(payload):
    with pytest.raises(WireError):
        decode_status(payload)


@pytest.mark.parametrize(
    "said",
    [
        *({name: HALF} for name in ("isa", "version")),
        *({"curves": {"a": value}} for value in ({HALF: 1}, [HALF])),
        {"endpoint": {"host": f"fe80::1%{HALF}", "port": 1, "fingerprint": ""}},
    ],
)
def test_half_a_character_which_json_can_spell_is_a_wire_error(said):
    right = json.loads(encode_caps(Caps("d", 1, 1, 1, 1, 1, "neon", "1", {}, 0, 5)))
    decode_caps(json.dumps(right).encode())
    with pytest.raises(WireError):
        decode_caps(json.dumps(right | said).encode())


def test_a_newer_agent_may_say_more_about_itself():
    said = json.loads(encode_status(Status("online", 7))) | {"since": "today"}
    assert decode_status(json.dumps(said).encode()) == Status("online", 7)


@pytest.mark.parametrize(
    "changes",
    [
        *({"cpu_other": 1.01}, {"cpu_other": None}, {"slowdown": -1.0}, {"temperature_c": float("nan")}),
        {"round_trip_s": "1"},
        *({"counters": counters} for counters in ({"a": -1}, {1: 1}, {str(n): n for n in range(257)}, [])),
    ],
)
def test_a_wrong_heartbeat_is_a_wire_error(changes):
    heartbeat = replace(Heartbeat(1, 2, 0.5, 3, None, None, None, 1.0, 4), **changes)
    with pytest.raises(WireError):
        encode_heartbeat(heartbeat)
    values = [getattr(heartbeat, entry.name) for entry in fields(heartbeat)]
    with pytest.raises(WireError):
        decode_heartbeat(msgpack.packb(values))


def test_too_small_a_limit_of_the_broker_has_a_code_of_its_own():
    assert PacketLimitError.of("the plan of bert", 2_000_000, "the broker at here:1", 1000).code == "packet_limit"


def test_the_table_of_limits_is_current():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "wire.md").read_text("utf-8")
    assert limits_table() in page, "write the table again: print(hepti_mqtt.protocol.plausible.limits_table())"


@pytest.mark.parametrize("name", [name for name, rule in FIELDS.items() if isinstance(rule, Number)])
def test_numbers_are_believed_up_to_their_bounds_and_not_beyond(name):
    rule = FIELDS[name]
    low, high = rule.credible or (rule.low, rule.high)
    for value in (low, high):
        assert check(name, float(value) if rule.real else value) == value
    for value in (low - 1, high * 2 + 1, True, "1", float("nan"), float("inf")):
        with pytest.raises(ValueError, match=re.escape(name)):
            check(name, value)


def test_versions_of_one_wire_format_work_together():
    major, minor = __version__.split(".")[:2]
    assert is_compatible(__version__)
    assert is_compatible(f"{major}.{minor}.99")
    assert not is_compatible("")
    assert not is_compatible(f"{major}.{int(minor) + 1}.0")
