"""Control messages: round trips, golden bytes, and attacks."""

import json
import re
from dataclasses import fields, replace

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_values import MESSAGES

from hepti_mqtt import __version__
from hepti_mqtt.core.errors import WireError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.spec import PlainShape
from hepti_mqtt.protocol import messages as wire
from hepti_mqtt.protocol.frames import Frame
from hepti_mqtt.protocol.frames import encode as encode_frame
from hepti_mqtt.protocol.plausible import FIELDS, MAX_TEXT, Number, check


def test_a_report_with_the_frames_magic_is_a_frame():
    frame = Frame("done", "m", PlanVersion(1, 2), 3, source="pi", numbers=(4, 5))
    back, seal = wire.decode_sealed_report(encode_frame(frame))
    assert (type(back), back.numbers, seal) == (Frame, (4, 5), None)
    with pytest.raises(WireError):
        wire.decode_sealed_report(b"HPT1")


V = PlanVersion(2, 3)
UNKEYED = " c400 a6686561646572 cb0000000000000000"  # no key, the default of `checked`, no share


@pytest.mark.parametrize(
    ("message", "golden"),
    [
        (
            wire.Prepare(1, {"a": 1}, {}, bytes(32), 2),
            "9c 01 01 81 a161 01 80 c420" + "00" * 32 + "02 90 00 90" + UNKEYED,
        ),
        (
            wire.Prepare(1, {}, {}, bytes(32), 2, peers=(wire.Peer("b", wire.Endpoint("10.0.0.7", 80), "o", "i"),)),
            "9c 01 01 80 80 c420" + "00" * 32 + "02 90 00 91 96 a162 a831302e302e302e37 50 a0 a16f a169" + UNKEYED,
        ),
        (
            wire.Prepare(1, {}, {}, bytes(32), 2, (PlainShape((3, 4), "hidden"), PlainShape((5,), session_rows=64)), 1),
            "9c 01 01 80 80 c420" + "00" * 32 + "02 92 9401009203 0490 9400409105 90 01 90" + UNKEYED,
        ),
        (wire.Activate(1, "m", V), "94 02 01 a16d 92 02 03"),
        (wire.Release(1, "m", V), "94 03 01 a16d 92 02 03"),
        (wire.Cancel("m", V, 4), "94 04 a16d 92 02 03 04"),
        (wire.ReleaseAll(255), "92 05 ccff"),
        (wire.Ready(1, "m", V, 256, b"12345678"), "96 64 01 a16d 92 02 03 cd0100 c408 3132333435363738"),
        (wire.PrepareProgress(1, "m", V, 4, 5), "96 65 01 a16d 92 02 03 04 05"),
        (wire.PrepareFailed(1, "m", V, "c", "t", 0), "98 66 01 a16d 92 02 03 a163 a174 00 90"),
        (wire.PrepareFailed(1, "m", V, "c", "t", 0, ("b",)), "98 66 01 a16d 92 02 03 a163 a174 00 91 a162"),
        (
            wire.CachedTiles("m", bytes(32), b"\xf0", 0.5, 0.5),
            "96 6b a16d c420" + "00" * 32 + "c401f0" + 2 * "cb3fe0000000000000",
        ),
        (wire.RequestTiles("m", (bytes(32),), 0.5), "94 67 a16d 91 c420" + "00" * 32 + "cb3fe0000000000000"),
        (wire.RunFailed("m", V, 4, "c", "t"), "97 68 a16d 92 02 03 04 a163 a174 90"),
        (wire.RunFailed("m", V, 4, "c", "t", (5,)), "97 68 a16d 92 02 03 04 a163 a174 91 05"),
        (wire.LeaseTasks("m", V, 4, (5, 6)), "95 06 a16d 92 02 03 04 92 05 06"),
        (wire.TaskDone("m", V, 4, 5), "95 69 a16d 92 02 03 04 05"),
        (wire.HandOver("m", V, 4, 5, 6, {"a": 7}), "97 07 a16d 92 02 03 04 05 06 81 a161 07"),
        (wire.EndSessions("m", V, (4, 5)), "94 08 a16d 92 02 03 92 04 05"),
        (wire.RunProgress("m", V, 4, 5), "95 6a a16d 92 02 03 04 05"),
        (
            wire.KeptSessions("m", V, (wire.KeptSession(PlanVersion(1, 4), 5, 6),)),
            "94 6c a16d 92 02 03 91 93 92 01 04 05 06",
        ),
    ],
)
def test_golden_bytes(message, golden):
    assert wire.encode(message).hex() == golden.replace(" ", "")


def test_golden_heartbeat_and_status():
    heartbeat = wire.Heartbeat(1, 2, 0.5, 3, None, None, None, 1.0, 4, {"a": 5})
    assert (
        wire.encode_heartbeat(heartbeat).hex()
        == "9f0102cb3fe000000000000003c0c0c0cb3ff000000000000004" + "81a161058080c0c0" + "cb0000000000000000"
    )
    edges = {"b": wire.PeerStats(1, 2, 3, 4, 5, 6, 7, 1, 8, 9, "t")}
    payload = wire.encode_heartbeat(replace(heartbeat, peers={"b": wire.LinkReport(0.5, None)}, edges=edges))
    end = "81a1610581a16292cb3fe0000000000000c081a1629b01020304050607010809a174c0c0" + "cb0000000000000000"
    assert payload.hex().endswith(end)
    assert wire.encode_status(wire.Status("online", 7)) == b'{"state": "online", "boot": 7}'
    starting = b'{"state": "starting", "boot": 7, "doing": "compiling", "done": 3, "total": 23}'
    assert wire.encode_status(wire.Status("starting", 7, "compiling", 3, 23)) == starting


WRONG = [None, True, -1, 2**63, 1.5, "x", b"x", [], {}, [1], {"a": 1}, {1: 2}, "B/A", float("nan"), float("inf")]


@given(MESSAGES, st.data())
def test_a_field_of_another_type_is_a_wire_error_or_still_valid(message, data):
    values = msgpack.unpackb(wire.encode(message))
    values[data.draw(st.integers(0, len(values) - 1))] = data.draw(st.sampled_from(WRONG))
    try:
        back = wire.decode(msgpack.packb(values))
    except WireError:
        return
    assert wire.decode(wire.encode(back)) == back


@pytest.mark.parametrize("message", [wire.Ready(1, "m", V, 4, bytes(8)), wire.PrepareFailed(1, "m", V, "c", "t", 0)])
def test_a_field_too_many_or_too_few_is_a_wire_error(message):
    values = msgpack.unpackb(wire.encode(message))
    for wrong in (values[:-1], [*values, 0]):
        with pytest.raises(WireError):
            wire.decode(msgpack.packb(wrong))


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
        wire.encode(replace(wire.Prepare(1, {}, {}, bytes(32), 2), **{name: value}))


def test_any_text_of_an_error_can_be_sent():
    for text, sent in (("half a character: \ud800", "half a character: ?"), (70_000 * "\u00e4", MAX_TEXT * "\u00e4")):
        message = wire.RunFailed("m", PlanVersion(1, 1), 7, "device", text)
        assert wire.decode(wire.encode(message)) == replace(message, text=sent)


def test_depth_and_size_are_limited_in_both_directions():
    nested = {}
    for _ in range(20):
        nested = {"a": nested}
    for wrong in (wire.Prepare(1, nested, {}, bytes(32), 2), wire.Status("online", 1)):
        with pytest.raises(WireError):
            wire.encode(wrong)
    for deep, parsers in (
        (b"\x91" * 5000, (wire.decode, wire.decode_heartbeat)),
        (b"[" * 100_000, (wire.decode_status, wire.decode_caps)),
        (bytes(wire.MAX_MESSAGE_BYTES + 1), (wire.decode, wire.decode_heartbeat, wire.decode_status, wire.decode_caps)),
        (b'{"state": "online", "boot": 1}'.ljust(wire.MAX_SELF_BYTES + 1), (wire.decode_status,)),
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
        wire.decode_status(payload)


@pytest.mark.parametrize(
    "changes",
    [
        *({name: HALF} for name in ("isa", "version")),
        *({"curves": {"a": value}} for value in ({HALF: 1}, [HALF])),
        {"endpoint": {"host": f"fe80::1%{HALF}", "port": 1, "fingerprint": ""}},
    ],
)
def test_a_lone_surrogate_in_json_is_a_wire_error(changes):
    caps = json.loads(wire.encode_caps(wire.Caps("d", 1, 1, 1, 1, 1, "neon", "1", {}, 0, 5)))
    wire.decode_caps(json.dumps(caps).encode())
    with pytest.raises(WireError):
        wire.decode_caps(json.dumps(caps | changes).encode())


@pytest.mark.parametrize("wrong", [{"host": "pi.local"}, {"host": ""}, {"port": 0}, {"port": 65536}])
def test_an_endpoint_without_an_ip_address_and_a_port_is_a_wire_error(wrong):
    endpoint = {"host": "10.0.0.7", "port": 80, "fingerprint": ""}
    caps = json.loads(wire.encode_caps(wire.Caps("d", 1, 1, 1, 1, 1, "neon", "1", {}, 0, 5)))
    wire.decode_caps(json.dumps(caps | {"endpoint": endpoint}).encode())
    with pytest.raises(WireError):
        wire.decode_caps(json.dumps(caps | {"endpoint": endpoint | wrong}).encode())


def test_unknown_keys_of_a_newer_agent_are_ignored():
    status = json.loads(wire.encode_status(wire.Status("online", 7))) | {"since": "today"}
    assert wire.decode_status(json.dumps(status).encode()) == wire.Status("online", 7)


@pytest.mark.parametrize(
    "changes",
    [
        *({"cpu_other": 1.01}, {"cpu_other": None}, {"slowdown": -1.0}, {"temperature_c": float("nan")}),
        {"round_trip_s": "1"},
        *({"counters": counters} for counters in ({"a": -1}, {1: 1}, {str(n): n for n in range(257)}, [])),
    ],
)
def test_a_wrong_heartbeat_is_a_wire_error(changes):
    heartbeat = replace(wire.Heartbeat(1, 2, 0.5, 3, None, None, None, 1.0, 4), **changes)
    with pytest.raises(WireError):
        wire.encode_heartbeat(heartbeat)
    values = [getattr(heartbeat, entry.name) for entry in fields(heartbeat)]
    with pytest.raises(WireError):
        wire.decode_heartbeat(msgpack.packb(values))


@pytest.mark.parametrize("name", [name for name, rule in FIELDS.items() if isinstance(rule, Number)])
def test_numbers_are_credible_exactly_within_their_bounds(name):
    rule = FIELDS[name]
    low, high = rule.credible or (rule.low, rule.high)
    for value in (low, high):
        assert check(name, float(value) if rule.real else value) == value
    for value in (low - 1, high * 2 + 1, True, "1", float("nan"), float("inf")):
        with pytest.raises(ValueError, match=re.escape(name)):
            check(name, value)


def test_versions_of_one_wire_format_work_together():
    major, minor = __version__.split(".")[:2]
    assert wire.is_compatible(__version__)
    assert wire.is_compatible(f"{major}.{minor}.99")
    assert not wire.is_compatible("")
    assert not wire.is_compatible(f"{major}.{int(minor) + 1}.0")
