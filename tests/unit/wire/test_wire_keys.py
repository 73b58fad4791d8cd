"""Keys: agreement of two processes, and seals that no other process can forge."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.core.errors import WireError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.protocol import keys, messages
from hepti_mqtt.protocol.keys import REPLAY_WINDOW, Channel

ONE, TWO, STRANGER = b"1" * 32, b"2" * 32, b"3" * 32
CANCEL = messages.encode(messages.Cancel("m", PlanVersion(1, 2), 3))


SECRET = keys.agree(ONE, keys.public_key(TWO))


def channels():
    """Return the planner's and the device's end."""
    return Channel(SECRET, count(1), at_planner=True), Channel(SECRET, count(1), at_planner=False)


def test_golden_agreement():
    assert keys.agree(TWO, keys.public_key(ONE)) == SECRET
    assert SECRET.hex()[:16] == "d745e9e38fa20490"


@pytest.mark.parametrize(
    "value", ["", "00", "0" * 512, "0" * 511 + "1", "f" * 512, "x" * 512, 7, None, "0" * 510 + "+5"]
)
def test_an_invalid_public_key_is_refused(value):
    assert not keys.is_public_key(value)
    assert keys.is_public_key(keys.public_key(ONE))


def test_a_sealed_message_is_accepted_once_and_only_from_the_other_end():
    planner, device = channels()
    payload = planner.seal(CANCEL)
    assert messages.decode(payload) == messages.decode(CANCEL)
    message, seal = messages.decode_sealed(payload)
    assert message == messages.decode(CANCEL)
    assert not planner.accepts(seal), "it is the planner's own message"
    assert not device.verified
    assert device.accepts(seal)
    assert device.verified
    assert not device.accepts(seal), "a replay"
    assert not device.accepts(messages.decode_sealed(CANCEL)[1]), "without a seal"
    stranger = Channel(keys.agree(STRANGER, keys.public_key(TWO)), count(1), at_planner=True)
    assert not device.accepts(messages.decode_sealed(stranger.seal(CANCEL))[1])


def test_messages_are_accepted_in_any_order_and_once():
    planner, device = channels()
    seals = [messages.decode_sealed(planner.seal(CANCEL))[1] for _ in range(3 * REPLAY_WINDOW)]
    assert device.accepts(seals[5])
    assert all(map(device.accepts, seals[:5]))
    assert all(map(device.accepts, seals[6:]))
    assert not any(map(device.accepts, seals))


@given(st.integers(0, 8 * (keys.SEAL_BYTES + len(CANCEL)) - 1))
def test_a_changed_bit_or_a_missing_end_is_detected(bit):
    planner, device = channels()
    payload = bytearray(planner.seal(CANCEL))
    with pytest.raises(WireError):
        messages.decode_sealed(payload[: bit // 8])
    payload[bit // 8] ^= 1 << bit % 8
    try:
        _, seal = messages.decode_sealed(payload)
    except WireError:
        return
    assert not device.accepts(seal)


def test_only_the_other_end_decrypts_a_plans_key():
    planner, device = channels()
    sent = planner.wrapped(STRANGER, "m", PlanVersion(1, 2))
    assert sent != STRANGER
    assert device.wrapped(sent, "m", PlanVersion(1, 2)) == STRANGER
    assert planner.wrapped(STRANGER, "m", PlanVersion(1, 3)) != sent
    assert planner.wrapped(b"", "m", PlanVersion(1, 2)) == b""
