"""The packets of MQTT 3.1.1 and 5 that an endpoint and its subscribers exchange: bytes in, bytes out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from hepti_mqtt.errors import HeptiError

CONNECT, CONNACK, PUBLISH, SUBSCRIBE, SUBACK = 0x10, 0x20, 0x30, 0x82, 0x90
UNSUBSCRIBE, UNSUBACK, PINGREQ, PINGRESP, DISCONNECT = 0xA2, 0xB0, 0xC0, 0xD0, 0xE0
MAX_LENGTH: Final = 268_435_455  # what four bytes of a length can say

AUTHENTICATION_METHOD, MAXIMUM_PACKET_SIZE, ASSIGNED_CLIENT = 0x15, 0x27, 0x12
# Properties of MQTT 5 that a client may send in CONNECT (its will included), SUBSCRIBE and UNSUBSCRIBE: how many bytes
# their number has, or "v" for one of variable length, "s" for a text, "ss" for two.
_PROPERTIES: Final[dict[int, int | str]] = {
    0x01: 1, 0x02: 4, 0x03: "s", 0x08: "s", 0x09: "s", 0x0B: "v", 0x11: 4, 0x15: "s", 0x16: "s",
    0x17: 1, 0x18: 4, 0x19: 1, 0x21: 2, 0x22: 2, 0x26: "ss", 0x27: 4,
}  # fmt: skip

Bytes = bytes | bytearray | memoryview


class Malformed(HeptiError):
    """The other side of a mesh connection broke MQTT or a limit; its connection is closed."""

    code = "wire"


def varint(value: int) -> bytes:
    """Return MQTT's variable byte integer."""
    if value > MAX_LENGTH:
        raise ValueError(f"{value} bytes are more than one MQTT packet can hold ({MAX_LENGTH})")
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def fixed_header(data: Bytes, start: int, end: int, limit: int) -> tuple[int, int, int] | None:
    """Return (first byte, where the body starts, its length), None if `data[start:end]` is too short to tell.

    Raises Malformed for a length of more than `limit` or of more than four bytes.
    """
    length = shift = 0
    at = start + 1
    while at < end:
        byte = data[at]
        at += 1
        if byte < 128:
            length |= byte << shift
            if length > limit:
                raise Malformed(f"a packet of {length} bytes; the limit is {limit}")
            return data[start], at, length
        length |= (byte & 127) << shift
        shift += 7
        if shift == 28:
            raise Malformed("a length of more than four bytes")
    return None


def packet(first: int, *parts: bytes) -> bytes:
    """Return a whole packet."""
    body = b"".join(parts)
    return bytes((first,)) + varint(len(body)) + body


def text(value: str | bytes) -> bytes:
    """Return a length-prefixed string."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack(">H", len(data)) + data


def publish_head(topic: str, nbytes: int, version: int) -> bytes:
    """Return what stands before a payload of `nbytes` in a PUBLISH at QoS 0."""
    name = text(topic) + (b"\0" if version == 5 else b"")  # no properties
    return bytes((PUBLISH,)) + varint(len(name) + nbytes) + name


def connect(user: str, token: str) -> bytes:
    """Return CONNECT of MQTT 3.1.1: a clean session, no keep-alive, the client named as the user."""
    login = (text(user), text(token)) if user else ()
    return packet(CONNECT, text("MQTT"), b"\x04", b"\xc2" if user else b"\x02", b"\0\0", text(user), *login)


def subscribe(packet_id: int, filters: Sequence[str]) -> bytes:
    """Return SUBSCRIBE at QoS 0."""
    return packet(SUBSCRIBE, struct.pack(">H", packet_id), *(text(name) + b"\0" for name in filters))


def unsubscribe(packet_id: int, filters: Sequence[str]) -> bytes:
    """Return UNSUBSCRIBE."""
    return packet(UNSUBSCRIBE, struct.pack(">H", packet_id), *(text(name) for name in filters))


class Fields:
    """Reads the body of a packet from front to back; raises Malformed where it ends too early."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        start, self._at = self._at, self._at + nbytes
        if self._at > len(self._data):
            raise Malformed("a packet ends too early")
        return self._data[start : self._at]

    def number(self, nbytes: int) -> int:
        """Return a big-endian number."""
        return int.from_bytes(self.take(nbytes), "big")

    def varint(self) -> int:
        """Return a variable byte integer."""
        value = 0
        for shift in range(0, 28, 7):
            byte = self.number(1)
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise Malformed("a length of more than four bytes")

    def data(self) -> bytes:
        """Return length-prefixed bytes."""
        return self.take(self.number(2))

    def text(self) -> str:
        """Return a length-prefixed string."""
        try:
            value = self.data().decode()
        except UnicodeDecodeError:
            raise Malformed("a text that is not UTF-8") from None
        if "\0" in value:
            raise Malformed("a text with a NUL")
        return value

    def properties(self) -> dict[int, int]:
        """Return those properties of MQTT 5 that are numbers, and 0 for others that are there."""
        end = self.varint() + self._at
        found: dict[int, int] = {}
        while self._at < end:
            kind = _PROPERTIES.get(identifier := self.number(1))
            if kind is None:
                raise Malformed(f"property {identifier:#x} where it may not be")
            if isinstance(kind, int):
                found[identifier] = self.number(kind)
            elif kind == "v":
                found[identifier] = self.varint()
            else:
                found[identifier] = 0
                for _ in kind:
                    self.data()
        if self._at > end:
            raise Malformed("a property longer than its list")
        return found

    def more(self) -> bool:
        """Return whether bytes are left."""
        return self._at < len(self._data)

    def end(self) -> None:
        """Raise Malformed if bytes are left."""
        if self.more():
            raise Malformed("a packet longer than what it says")
