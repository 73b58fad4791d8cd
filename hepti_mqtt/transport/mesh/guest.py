"""What a subscriber of an endpoint may say, and what it is answered: bytes in, bytes out."""

from __future__ import annotations

import itertools
import struct
from typing import Final, Protocol

from hepti_mqtt.transport.mesh.filters import is_filter
from hepti_mqtt.transport.mesh.packets import (
    ASSIGNED_CLIENT,
    AUTHENTICATION_METHOD,
    CONNACK,
    CONNECT,
    DISCONNECT,
    MAX_LENGTH,
    MAXIMUM_PACKET_SIZE,
    PINGREQ,
    PINGRESP,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    Fields,
    Malformed,
    fixed_header,
    packet,
    text,
    varint,
)

MAX_ASKED: Final = 16_384  # the largest packet that a subscriber may send
MAX_FILTERS: Final = 64
MAX_AT_ONCE: Final = 128  # packets in one read: who asks for more work than that at once is sent away

# MQTT 5 alone has reasons; 3.1.1 has one code per packet.
_BAD_LOGIN, _BAD_METHOD, _NO_FILTER, _NOT_ALLOWED, _TOO_MANY = 0x86, 0x8C, 0x8F, 0x87, 0x97
_REFUSED_311: Final = 0x80
_NOT_FOUND: Final = 0x11
# To a client of MQTT 5: QoS 0 only, nothing retained, no wildcards in shares, no subscription ids, 16 KB a packet.
_SAID: Final = (
    b"\x24\0\x25\0\x29\0\x2a\0" + bytes((MAXIMUM_PACKET_SIZE,)) + struct.pack(">I", MAX_ASKED)
)  # fmt: skip
_numbers = itertools.count(1)


class Rules(Protocol):
    """Who may come in and what it may read."""

    def knows(self, user: str, token: bytes) -> bool:
        """Return whether this user may come in with this token."""

    def allows(self, user: str, pattern: str) -> bool:
        """Return whether this user may read what this filter takes in."""


class Guest:
    """One connection to an endpoint: `feed` it what came and send what it returns.

    version: 4 or 5 once it is let in, 0 before. filters: what it has subscribed to. largest_bytes: the largest packet
    that it takes. silence_s: how long it may say nothing. over: close the connection after the answer.
    """

    def __init__(self, rules: Rules) -> None:
        self.version, self.client, self.user = 0, "", ""
        self.filters: set[str] = set()
        self.silence_s = float("inf")
        self.largest_bytes = MAX_LENGTH
        self.over = False
        self._rules = rules
        self._asked = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Return the answers to what came, whole packets or parts. Raises Malformed."""
        asked, answers, start = self._asked, bytearray(), 0
        asked += data
        for _ in range(MAX_AT_ONCE + 1):
            if self.over:
                return bytes(answers)
            if not self.version and asked[start : start + 1] not in (b"", bytes((CONNECT,))):
                raise Malformed(f"packet {asked[start]:#x} before CONNECT")
            header = fixed_header(asked, start, len(asked), MAX_ASKED)
            if header is None or len(asked) < header[1] + header[2]:
                del asked[:start]
                return bytes(answers)
            first, at, length = header
            start = at + length
            answers += self._answer(first, bytes(asked[at:start]))
        raise Malformed(f"more than {MAX_AT_ONCE} packets at once")

    def _answer(self, first: int, body: bytes) -> bytes:
        fields = Fields(body)
        if not self.version:
            return self._connect(fields)
        if first == SUBSCRIBE:
            return self._subscribe(fields)
        if first == UNSUBSCRIBE:
            return self._unsubscribe(fields)
        if first == PINGREQ:
            fields.end()
            return packet(PINGRESP)
        if first == DISCONNECT:
            self.over = True
            return b""
        raise Malformed(f"packet {first:#x} is not for an endpoint: it only sends")

    def _connect(self, fields: Fields) -> bytes:
        protocol, version = fields.text(), fields.number(1)
        if protocol not in ("MQTT", "MQIsdp"):
            raise Malformed("not MQTT")
        if protocol != "MQTT" or version not in (4, 5):
            self.over = True
            return packet(CONNACK, b"\0\x01")  # as 3.1.1 refuses other versions
        flags, keepalive_s = fields.number(1), fields.number(2)
        if flags & 1 or flags & 0x18 == 0x18 or (flags & 0x38 and not flags & 4):
            raise Malformed(f"flags {flags:#x} in CONNECT")
        if version == 4 and flags & 0x40 and not flags & 0x80:
            raise Malformed("a password without a user in MQTT 3.1.1")
        properties = fields.properties() if version == 5 else {}
        client = fields.text()
        if flags & 4:  # a will, which nobody would get
            if version == 5:
                fields.properties()
            fields.text()
            fields.data()
        user = fields.text() if flags & 0x80 else ""
        token = fields.data() if flags & 0x40 else b""
        fields.end()
        largest_bytes = properties.get(MAXIMUM_PACKET_SIZE, MAX_LENGTH)
        if not largest_bytes:
            raise Malformed("a maximum packet size of 0")
        refusal = self._refusal(version, client, flags, properties, self._rules.knows(user, token))
        if refusal:
            self.over = True
            return packet(CONNACK, bytes((0, refusal)), b"\0" if version == 5 else b"")
        self.version, self.client, self.user, self.largest_bytes = version, client, user, largest_bytes
        self.silence_s = 1.5 * keepalive_s or float("inf")
        if version == 4:
            return packet(CONNACK, b"\0\0")
        said = _SAID + (b"" if client else bytes((ASSIGNED_CLIENT,)) + text(f"guest-{next(_numbers):08x}"))
        return packet(CONNACK, b"\0\0", varint(len(said)), said)

    @staticmethod
    def _refusal(version: int, client: str, flags: int, properties: dict[int, int], known: bool) -> int:
        if AUTHENTICATION_METHOD in properties:
            return _BAD_METHOD
        if not known:
            return 4 if version == 4 else _BAD_LOGIN
        return 2 if version == 4 and not client and not flags & 2 else 0

    def _subscribe(self, fields: Fields) -> bytes:
        packet_id = self._packet_id(fields)
        codes = bytearray()
        while fields.more() or not codes:
            pattern, options = fields.text(), fields.number(1)
            reserved = 0xC0 if self.version == 5 else 0xFC
            if options & reserved or options & 3 == 3 or options & 0x30 == 0x30:
                raise Malformed(f"options {options:#x} in SUBSCRIBE")
            code = self._grant(pattern)
            codes.append(code if self.version == 5 or not code else _REFUSED_311)
        return packet(SUBACK, packet_id, b"\0" if self.version == 5 else b"", bytes(codes))

    def _grant(self, pattern: str) -> int:
        if not is_filter(pattern):
            return _NO_FILTER
        if not self._rules.allows(self.user, pattern):
            return _NOT_ALLOWED
        if len(self.filters) >= MAX_FILTERS and pattern not in self.filters:
            return _TOO_MANY
        self.filters.add(pattern)
        return 0

    def _unsubscribe(self, fields: Fields) -> bytes:
        packet_id = self._packet_id(fields)
        codes = bytearray()
        while fields.more() or not codes:
            pattern = fields.text()
            codes.append(0 if pattern in self.filters else _NOT_FOUND)
            self.filters.discard(pattern)
        if self.version == 4:
            return packet(UNSUBACK, packet_id)
        return packet(UNSUBACK, packet_id, b"\0", bytes(codes))

    def _packet_id(self, fields: Fields) -> bytes:
        packet_id = fields.take(2)
        if packet_id == b"\0\0":
            raise Malformed("packet id 0")
        if self.version == 5:
            fields.properties()
        return packet_id
