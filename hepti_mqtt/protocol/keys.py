"""Keys that planner and devices agree on, and the tags that they check.

On a broker without an access list everybody reads what is published. So a key is never sent: the planner's status and a
device's caps each have a public value, from which both compute one secret (Diffie-Hellman in the group ffdhe2048 of
RFC 7919, exponents of 256 bits). What that stops, and what not, stands in docs/reference/guarantees.md. Tags are keyed
BLAKE2b: of what the standard library has, it took the shortest time for a header.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Literal, NamedTuple

from hepti_mqtt.ids import PlanVersion

KEY_BYTES: Final = 32
TAG_BYTES: Final = 8
NO_TAG: Final = bytes(TAG_BYTES)
PUBLIC_DIGITS: Final = 512
REPLAY_WINDOW: Final = 1024  # messages; QoS 1 may bring one again after others

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
    """Return the public value of a private key of KEY_BYTES, in hex."""
    return f"{pow(_GENERATOR, int.from_bytes(private, 'big'), _PRIME):0{PUBLIC_DIGITS}x}"


def is_public_key(value: object) -> bool:
    """Return whether a value is a public key, and none that makes every secret the same."""
    if type(value) is not str or len(value) != PUBLIC_DIGITS or not set(value) <= set("0123456789abcdef"):
        return False
    return 1 < int(value, 16) < _PRIME - 1


def agree(private: bytes, theirs: str) -> bytes:
    """Return the secret of two processes, from the private key of one and the public key of the other."""
    secret = pow(int(theirs, 16), int.from_bytes(private, "big"), _PRIME)
    return blake2b(secret.to_bytes(PUBLIC_DIGITS // 2, "big"), digest_size=KEY_BYTES, person=b"hepti agree").digest()


def _derive(key: bytes, *parts: bytes) -> bytes:
    made = blake2b(key=key, digest_size=KEY_BYTES)
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.digest()


# -- frames ----------------------------------------------------------------------------------------------------------


class FrameKey(NamedTuple):
    """What the frames of a plan are tagged with. checked: the header, or the array too. An empty key tags nothing."""

    key: bytes = b""
    checked: Checked = "header"


UNKEYED: Final = FrameKey()


def frame_tag(key: FrameKey, header_prefix: bytes, run_id: bytes, body: bytes | bytearray | memoryview) -> bytes:
    """Return the tag of a frame; its header states the length of its array."""
    if not key.key:
        return NO_TAG
    made = blake2b(header_prefix, key=key.key, digest_size=TAG_BYTES)
    made.update(run_id)
    if key.checked == "whole":
        made.update(body)
    return made.digest()


def header_tags(key: FrameKey, header_prefix: bytes) -> Callable[[bytes], bytes]:
    """Return what returns the tag of a frame for a run's number, where tags are of headers alone."""
    assert key.checked == "header"
    begun = blake2b(header_prefix, key=key.key, digest_size=TAG_BYTES)

    def tag(run_id: bytes) -> bytes:
        made = begun.copy()
        made.update(run_id)
        return made.digest()

    return tag


def same_tag(one: bytes, other: bytes) -> bool:
    """Return whether two tags are the same, in a time that does not say where they differ."""
    return hmac.compare_digest(one, other)


def frame_key(secret: bytes, model: str, plan_version: PlanVersion, checked: Checked) -> FrameKey:
    """Return the key of a plan's frames."""
    return FrameKey(_derive(secret, b"frames", model.encode(), str(tuple(plan_version)).encode()), checked)


# -- messages --------------------------------------------------------------------------------------------------------
#
#     offset 0    4 bytes   magic b"HPK1"
#     offset 4    8 bytes   the message's number on its way, rising, little-endian
#     offset 12   8 bytes   the tag of number and message
#     offset 20             the message


MAGIC: Final = b"HPK1"
SEAL_BYTES: Final = len(MAGIC) + 8 + TAG_BYTES


@dataclass(frozen=True, slots=True)
class Seal:
    """Number and tag of a message that has come, and the message as it was sent."""

    number: int
    tag: bytes
    payload: bytes


def split(payload: bytes | bytearray | memoryview) -> tuple[bytes | bytearray | memoryview, Seal | None]:
    """Return a message without its seal, and the seal if it has one."""
    if payload[: len(MAGIC)] != MAGIC:
        return payload, None
    message, number = bytes(payload[SEAL_BYTES:]), int.from_bytes(payload[4:12], "little")
    return message, Seal(number, bytes(payload[12:SEAL_BYTES]), message)


class Channel:
    """The messages between a planner and a device, by their common secret; at_planner: whether this is its end.

    numbers: of the messages that this end sends, rising, also where a channel takes the place of another one. verified:
    whether the other end has shown that it knows the secret. One thread seals and one opens.
    """

    def __init__(self, secret: bytes, numbers: Iterator[int], *, at_planner: bool) -> None:
        ways = (_derive(secret, b"to the device"), _derive(secret, b"to the planner"))
        self._out, self._in = ways if at_planner else ways[::-1]
        self._wrap = _derive(secret, b"wrap")
        self._numbers, self._latest = numbers, 0
        self._seen: set[int] = set()
        self.verified = False

    def seal(self, message: bytes) -> bytes:
        """Return a message with a seal."""
        number = next(self._numbers).to_bytes(8, "little")
        return b"".join((MAGIC, number, _message_tag(self._out, number, message), message))

    def accepts(self, seal: Seal | None) -> bool:
        """Return whether a message is of the other end, and has not come before."""
        if seal is None or seal.number <= self._latest - REPLAY_WINDOW or seal.number in self._seen:
            return False
        if not same_tag(_message_tag(self._in, seal.number.to_bytes(8, "little"), seal.payload), seal.tag):
            return False
        self.verified = True
        self._latest = max(self._latest, seal.number)
        self._seen.add(seal.number)
        if len(self._seen) > 2 * REPLAY_WINDOW:
            self._seen = {number for number in self._seen if number > self._latest - REPLAY_WINDOW}
        return True

    def wrapped(self, key: bytes, model: str, plan_version: PlanVersion) -> bytes:
        """Return a plan's key as it is sent, or back from that; a plan version has one key."""
        if not key:
            return key
        mask = _derive(self._wrap, model.encode(), str(tuple(plan_version)).encode())
        return bytes(a ^ b for a, b in zip(key, mask, strict=True))


def _message_tag(key: bytes, number: bytes, message: bytes) -> bytes:
    return blake2b(number + message, key=key, digest_size=TAG_BYTES).digest()
