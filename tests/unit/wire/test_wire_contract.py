"""The contract of every wire format: round trips, and a WireError or a valid value for any other bytes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_values import MANIFESTS, MESSAGES, frame_fields, frames, message_values

from hepti_mqtt.core.errors import WireError
from hepti_mqtt.protocol import frames as frame_format
from hepti_mqtt.protocol import messages as wire
from hepti_mqtt.protocol.frames import Frame
from hepti_mqtt.protocol.manifest import Manifest


class Format(NamedTuple):
    values: st.SearchStrategy[Any]
    encode: Callable[[Any], bytes]
    decode: Callable[[Any], Any]


FORMATS = {
    "frame": Format(frames(), frame_format.encode, frame_format.decode),
    "message": Format(MESSAGES, wire.encode, wire.decode),
    "report": Format(MESSAGES, wire.encode, lambda payload: wire.decode_sealed_report(payload)[0]),
    "status": Format(message_values(wire.Status), wire.encode_status, wire.decode_status),
    "caps": Format(message_values(wire.Caps), wire.encode_caps, wire.decode_caps),
    "heartbeat": Format(message_values(wire.Heartbeat), wire.encode_heartbeat, wire.decode_heartbeat),
    "manifest": Format(MANIFESTS, Manifest.encode, Manifest.decode),
}
every_format = pytest.mark.parametrize("name", FORMATS)


def content(value):
    """Return what two equal values have in common; frames are compared by header fields and bytes."""
    return (frame_fields(value), value.array().tobytes()) if isinstance(value, Frame) else value


@every_format
@settings(deadline=None)
@given(st.data())
def test_a_value_survives_encoding_and_every_truncation_and_tail_is_a_wire_error(name, data):
    values, encode, decode = FORMATS[name]
    value = data.draw(values)
    payload = encode(value)
    back = decode(payload)
    sent = (frame_fields(value), value.body.tobytes()) if isinstance(value, Frame) else value
    assert content(back) == sent
    assert encode(back) == payload
    for wrong in (payload[: data.draw(st.integers(0, len(payload) - 1))], payload + b"\0"):
        with pytest.raises(WireError):
            decode(wrong)


@every_format
@settings(deadline=None)
@given(st.data())
def test_changed_bits_give_a_valid_value_or_a_wire_error(name, data):
    values, encode, decode = FORMATS[name]
    payload = bytearray(encode(data.draw(values)))
    for _ in range(data.draw(st.integers(1, 4))):
        bit = data.draw(st.integers(0, 8 * len(payload) - 1))
        payload[bit // 8] ^= 1 << bit % 8
    try:
        back = decode(bytes(payload))
    except WireError:
        return
    if not (name == "report" and isinstance(back, Frame)):
        assert content(decode(encode(back))) == content(back)


@every_format
@given(st.binary(max_size=600))
def test_random_bytes_are_a_valid_value_or_a_wire_error(name, data):
    for payload in (data, frame_format.MAGIC + data):
        try:
            FORMATS[name].decode(payload)
        except WireError:
            continue
