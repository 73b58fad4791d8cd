"""Key agreement between planner and devices, and the tags of frames and messages.

Without an access list, everybody can read all messages of a broker, so keys are never sent. The planner's status and a
device's caps contain public keys, from which both sides compute a secret (Diffie-Hellman in the group ffdhe2048 of
RFC 7919, exponents of 256 bits). docs/reference/guarantees.md states the guarantees. Tags are keyed BLAKE2b, which was
the fastest algorithm of the standard library for a header.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Literal, NamedTuple

from hepti_mqtt.core.ids import PlanVersion

KEY_BYTES: Final = 32
TAG_BYTES: Final = 8
NO_TAG: Final = bytes(TAG_BYTES)
PUBLIC_DIGITS: Final = 512
REPLAY_WINDOW: Final = 1024  # messages; QoS 1 may repeat a message after later ones

_GENERATOR: Final = 2
_PRIME: Final = int(
    "FFFFFFFFFFFFFFFFADF85458A2BB4A9AAFDC5620273D3CF1D8B9C583CE2D3695A9E13641146433FBCC939DCE249B3EF97D2FE363630C75D8"
    "F681B202AEC4617AD3DF1ED5D5FD65612433F51F5F066ED0856365553DED1AF3B557135E7F57C935984F0C70E0E68B77E2A689DAF3EFE872"
    "1DF158A136ADE73530ACCA4F483A797ABC0AB182B324FB61D108A94BB2C8E3FBB96ADAB760D7F4681D4F42A3DE394DF4AE56EDE76372BB19"
    "0B07A7C8EE0A6D709E02FCE1CDF7E2ECC03404CD28342F619172FE9CE98583FF8E4F1232EEF28183C3FE3B1B4C6FAD733BB5FCBC2EC22005"
    "C58EF1837D1683B2C6F34A26C1B2EFFA886B423861285C97FFFFFFFFFFFFFFFF",
    16,
)

Checked = Literal["header", "whole"]


def public_key(private: bytes) -> str:
    """Return the public key of a private key of KEY_BYTES, in hex."""
    return f"{pow(_GENERATOR, int.from_bytes(private, 'big'), _PRIME):0{PUBLIC_DIGITS}x}"


def is_public_key(value: object) -> bool:
    """Return whether a value is a public key; keys that fix the secret (0, 1, -1) are refused."""
    if type(value) is not str or len(value) != PUBLIC_DIGITS or not set(value) <= set("0123456789abcdef"):
        return False
    return 1 < int(value, 16) < _PRIME - 1


def agree(private: bytes, theirs: str) -> bytes:
    """Return the common secret of a private key and the other process's public key."""
    secret = pow(int(theirs, 16), int.from_bytes(private, "big"), _PRIME)
    return blake2b(secret.to_bytes(PUBLIC_DIGITS // 2, "big"), digest_size=KEY_BYTES, person=b"hepti agree").digest()


def _derive(key: bytes, *parts: bytes) -> bytes:
    state = blake2b(key=key, digest_size=KEY_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


# -- frames ----------------------------------------------------------------------------------------------------------


class FrameKey(NamedTuple):
    """The key of a plan's tags, empty for no tags; checked: whether tags cover the header or the whole frame."""

    key: bytes = b""
    checked: Checked = "header"


UNKEYED: Final = FrameKey()


def frame_tag(key: FrameKey, header_prefix: bytes, run_id: bytes, body: bytes | bytearray | memoryview) -> bytes:
    """Return the tag of a frame; its header contains the length of its array."""
    if not key.key:
        return NO_TAG
    state = blake2b(header_prefix, key=key.key, digest_size=TAG_BYTES)
    state.update(run_id)
    if key.checked == "whole":
        state.update(body)
    return state.digest()


def header_tags(key: FrameKey, header_prefix: bytes) -> Callable[[bytes], bytes]:
    """Return a function from run id to frame tag, for tags that cover headers only."""
    assert key.checked == "header"
    prefix_state = blake2b(header_prefix, key=key.key, digest_size=TAG_BYTES)

    def tag(run_id: bytes) -> bytes:
        state = prefix_state.copy()
        state.update(run_id)
        return state.digest()

    return tag


def same_tag(one: bytes, other: bytes) -> bool:
    """Compare two tags in constant time."""
    return hmac.compare_digest(one, other)


def frame_key(secret: bytes, model: str, plan_version: PlanVersion, checked: Checked) -> FrameKey:
    """Return the key of a plan's frames."""
    return FrameKey(_derive(secret, b"frames", model.encode(), str(tuple(plan_version)).encode()), checked)


# -- messages --------------------------------------------------------------------------------------------------------
#
#     offset 0    4 bytes   magic b"HPK1"
#     offset 4    8 bytes   the message's number, rising, little-endian
#     offset 12   8 bytes   the tag of number and message
#     offset 20             the message


MAGIC: Final = b"HPK1"
SEAL_BYTES: Final = len(MAGIC) + 8 + TAG_BYTES


@dataclass(frozen=True, slots=True)
class Seal:
    """Number and tag of a received message, and its bytes."""

    number: int
    tag: bytes
    payload: bytes


def split(payload: bytes | bytearray | memoryview) -> tuple[bytes | bytearray | memoryview, Seal | None]:
    """Split a message from its seal, if it has one."""
    if payload[: len(MAGIC)] != MAGIC:
        return payload, None
    message, number = bytes(payload[SEAL_BYTES:]), int.from_bytes(payload[4:12], "little")
    return message, Seal(number, bytes(payload[12:SEAL_BYTES]), message)


class Channel:
    """Authenticates the messages between a planner and a device with their common secret.

    numbers: rising message numbers; a new channel must continue them. at_planner: whether the planner uses this end.
    One thread seals and one thread calls `accepts`.
    """

    def __init__(self, secret: bytes, numbers: Iterator[int], *, at_planner: bool) -> None:
        directions = (_derive(secret, b"to the device"), _derive(secret, b"to the planner"))
        self._out, self._in = directions if at_planner else directions[::-1]
        self._wrap = _derive(secret, b"wrap")
        self._numbers, self._latest = numbers, 0
        self._accepted: set[int] = set()  # numbers within the replay window
        self.verified = False  #: whether the other end has proved that it has the secret

    def seal(self, message: bytes) -> bytes:
        """Add a seal to a message."""
        number = next(self._numbers).to_bytes(8, "little")
        return b"".join((MAGIC, number, _message_tag(self._out, number, message), message))

    def accepts(self, seal: Seal | None) -> bool:
        """Return whether a message is authentic and not a replay."""
        if seal is None or seal.number <= self._latest - REPLAY_WINDOW or seal.number in self._accepted:
            return False
        if not same_tag(_message_tag(self._in, seal.number.to_bytes(8, "little"), seal.payload), seal.tag):
            return False
        self.verified = True
        self._latest = max(self._latest, seal.number)
        self._accepted.add(seal.number)
        if len(self._accepted) > 2 * REPLAY_WINDOW:
            self._accepted = {number for number in self._accepted if number > self._latest - REPLAY_WINDOW}
        return True

    def wrapped(self, key: bytes, model: str, plan_version: PlanVersion) -> bytes:
        """Encrypt or decrypt a plan's key; a plan version has one key."""
        if not key:
            return key
        mask = _derive(self._wrap, model.encode(), str(tuple(plan_version)).encode())
        return bytes(a ^ b for a, b in zip(key, mask, strict=True))


def _message_tag(key: bytes, number: bytes, message: bytes) -> bytes:
    return blake2b(number + message, key=key, digest_size=TAG_BYTES).digest()
