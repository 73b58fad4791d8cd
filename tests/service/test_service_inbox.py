"""Topics and payloads to events."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.ids import Epoch
from hepti_mqtt.protocol import frames, messages
from hepti_mqtt.protocol import messages as protocol_messages
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.service.decoder import TOLD, Asked, Decoder, Implausible, PlannerSeen, PlanSeen

T = Topics("home")
CAPS = protocol_messages.Caps("a", 1, 4, 4, 1 << 30, 1 << 20, "plain", "0", {}, 0, 4)
BEAT = protocol_messages.Heartbeat(1, 2, 0.0, 1 << 30, None, None, None, 1.0, 0)
TOPICS = [
    T.status("a"),
    T.caps("a"),
    T.heartbeat("a"),
    T.up("a"),
    T.request("m", "c"),
    T.planner_status(),
    T.plan("m"),
    T.work("m", "a"),
    "hepti/v1/elsewhere/dev/a/up",
]


def test_every_kind_becomes_its_event():
    ready = messages.Ready(1, "m", Epoch(1, 1), 5, bytes(8))
    frame = frames.Frame("done", "m", Epoch(1, 1), 3, source="a", numbers=(1, 2, 3))
    status = protocol_messages.Status("online", 1)
    known = {
        (T.status("a"), messages.encode_status(status)): interface.DeviceStatus("a", status),
        (T.caps("a"), messages.encode_caps(CAPS)): interface.DeviceCaps("a", CAPS),
        (T.heartbeat("a"), messages.encode_heartbeat(BEAT)): interface.DeviceHeartbeat("a", BEAT),
        (T.up("a"), messages.encode(ready)): interface.UpMessage("a", ready),
        (T.request("m", "c"), b"{"): Asked("m", "c", b"{"),
        (T.planner_status(), messages.encode_status(status)): PlannerSeen(status),
        (T.plan("m"), b"x"): PlanSeen("m"),
    }
    decoder = Decoder("home")
    for (topic, payload), event in known.items():
        assert decoder.decode(topic, payload) == event
    up = decoder.decode(T.up("a"), frames.encode(frame))
    assert isinstance(up, interface.UpFrame)
    assert up.frame.numbers == (1, 2, 3)
    assert not decoder.counters


def test_the_filters_cover_every_kind():
    decoder = Decoder("home")
    filters = [name for name, _ in decoder.filters() + decoder.requests()]
    assert len(filters) == len(set(filters)) == 7


def test_cleared_foreign_and_lying_messages_are_dropped():
    decoder = Decoder("home")
    assert decoder.decode(T.caps("b"), messages.encode_caps(CAPS)) is None, "caps under another device's name"
    assert decoder.decode(T.status("a"), b"") is None
    assert decoder.decode(T.work("m", "a"), b"x") is None
    assert decoder.counters == {"malformed": 1, "foreign": 1}


@given(st.sampled_from(TOPICS), st.binary(max_size=300) | st.binary(max_size=300).map(lambda b: frames.MAGIC + b))
def test_no_bytes_raise(topic, payload):
    Decoder("home").decode(topic, payload)


def test_boot_counters_of_a_time_that_has_not_come_are_named_and_not_passed_on():
    decoder = Decoder("home", lambda: 100)
    beat = protocol_messages.Heartbeat(101, 2, 0.0, 1 << 30, None, None, None, 1.0, 0)
    said = {
        ("status", T.status("a")): messages.encode_status(protocol_messages.Status("online", 101)),
        ("caps", T.caps("a")): messages.encode_caps(replace(CAPS, boot=101)),
        ("heartbeat", T.heartbeat("a")): messages.encode_heartbeat(beat),
        ("planner_status", T.planner_status()): messages.encode_status(protocol_messages.Status("online", 101)),
    }
    for (kind, topic), payload in said.items():
        assert decoder.decode(topic, payload) == Implausible(topic, kind, 101)
    assert decoder.counters == {"implausible_boot": 4}
    assert decoder.decode(T.status("a"), b'{"state": "online", "boot": 4611686018427387904}') is None
    assert decoder.counters["malformed"] == 1


def test_a_device_whose_caps_cannot_be_read_is_told_of_once(caplog):
    decoder = Decoder("home")
    for _ in range(3):
        assert decoder.decode(T.caps("a"), b'{"device": "a", "boot": 1}') is None
        assert decoder.decode(T.heartbeat("a"), b"x") is None
    assert decoder.counters["malformed"] == 6
    (record,) = caplog.records
    assert "caps of a cannot be read (Caps lacks" in record.getMessage()
    for number in range(2 * TOLD):
        decoder.decode(T.caps(f"d{number}"), b"x")
    assert len(caplog.records) == TOLD, "names cost nothing to invent"
