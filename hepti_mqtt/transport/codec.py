"""MQTT 3.1.1 and 5 without I/O: bytes in and events out, commands in and bytes out.

Broker connections, endpoints and their subscribers use it. `Decoder.next_event` returns and `encode` takes control
packets. Large payloads are not copied: `Decoder.buffer` is the memory to receive into, and a sender writes
`publish_head` and then the payload from its own memory (`sendmsg`).

Source: OASIS MQTT 3.1.1 and MQTT 5.0, chapters 2 and 3. Unsupported because unused: QoS 2, AUTH, topic aliases.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from hepti_mqtt.core.errors import HeptiError
from hepti_mqtt.core.recent import Recent
from hepti_mqtt.transport.buffers import Buffers

CONNECT, CONNACK, PUBLISH, PUBACK, SUBSCRIBE, SUBACK = 0x10, 0x20, 0x30, 0x40, 0x82, 0x90
UNSUBSCRIBE, UNSUBACK, PINGREQ, PINGRESP, DISCONNECT = 0xA2, 0xB0, 0xC0, 0xD0, 0xE0
RETAIN: Final = 1
MAX_LENGTH: Final = 268_435_455  # largest variable byte integer
FAILURE: Final = 0x80  # smallest refusal code
NO_SUBSCRIBERS: Final = 0x10
# Refusal codes: CONNACK in 3.1.1 (1 to 5), all packets in MQTT 5.
REASONS: Final[dict[int, str]] = {
    1: "Unsupported protocol version", 2: "Client identifier not valid", 3: "Server unavailable",
    4: "Bad user name or password", 5: "Not authorized", 0x80: "Unspecified error", 0x81: "Malformed packet",
    0x82: "Protocol error", 0x83: "Implementation specific error", 0x84: "Unsupported protocol version",
    0x85: "Client identifier not valid", 0x86: "Bad user name or password", 0x87: "Not authorized",
    0x88: "Server unavailable", 0x89: "Server busy", 0x8A: "Banned", 0x8B: "Server shutting down",
    0x8D: "Keep alive timeout", 0x8E: "Session taken over", 0x8F: "Topic filter invalid", 0x90: "Topic name invalid",
    0x91: "Packet identifier in use", 0x93: "Receive maximum exceeded", 0x95: "Packet too large",
    0x96: "Message rate too high", 0x97: "Quota exceeded", 0x98: "Administrative action",
    0x99: "Payload format invalid", 0x9A: "Retain not supported", 0x9B: "QoS not supported",
    0x9C: "Use another server", 0x9D: "Server moved", 0x9E: "Shared subscription not supported",
    0x9F: "Connection rate exceeded", 0xA1: "Subscription identifiers not supported",
    0xA2: "Wildcard subscription not supported",
}  # fmt: skip

SESSION_EXPIRY, ASSIGNED_CLIENT, AUTHENTICATION_METHOD = 0x11, 0x12, 0x15
RECEIVE_MAXIMUM, MAXIMUM_PACKET_SIZE = 0x21, 0x27
# Properties of MQTT 5: bytes of the number, "v" for a variable byte integer, "s" for a text, "ss" for two texts.
_PROPERTIES: Final[dict[int, int | str]] = {
    0x01: 1, 0x02: 4, 0x03: "s", 0x08: "s", 0x09: "s", 0x0B: "v", 0x11: 4, 0x12: "s", 0x13: 2, 0x15: "s", 0x16: "s",
    0x17: 1, 0x18: 4, 0x19: 1, 0x1A: "s", 0x1C: "s", 0x1F: "s", 0x21: 2, 0x22: 2, 0x23: 2, 0x24: 1, 0x25: 1, 0x26: "ss",
    0x27: 4, 0x28: 1, 0x29: 1, 0x2A: 1,
}  # fmt: skip
# Properties that a client may send in CONNECT (its will included), SUBSCRIBE and UNSUBSCRIBE.
_FROM_CLIENT: Final = frozenset(
    {0x01, 0x02, 0x03, 0x08, 0x09, 0x0B, 0x11, 0x15, 0x16, 0x17, 0x18, 0x19, 0x21, 0x22, 0x26, 0x27}
)

STAGE: Final = 4096  # bytes of the receive buffer; the rest of a larger payload goes directly to its own memory
# Bytes of the longest control packet from an endpoint, and of the longest topic with its header.
MAX_CONTROL: Final = 1024
MAX_TOPICS: Final = 4096  # decoded topics in the cache
# The first LEAD bytes of a PUBLISH contain its length and its topic's length. A cache maps them to the positions of
# topic and payload, because the same frames come with every request.
LEAD, MAX_LEADS = 7, 256

Buffer = Any  # a C-contiguous object with the buffer protocol: bytes, memoryview, array
Properties = Mapping[int, int | bytes]  # numbers, and texts as bytes


class Malformed(HeptiError):
    """The other end broke a rule of MQTT or a limit; close the connection."""

    code = "wire"


# -- events and commands ---------------------------------------------------------------------------------------------


class Publish(NamedTuple):
    """A message."""

    topic: str
    payload: memoryview  #: its memory is reused after the last reference is gone
    qos: int = 0
    retain: bool = False
    packet_id: int = 0  #: 0 at QoS 0
    repeated: bool = False  #: whether the sender has sent it before (DUP)


@dataclass(frozen=True, slots=True)
class Connect:
    """A client's CONNECT; for other versions than 4 and 5 only the version is read."""

    version: int
    client: str = ""
    user: str | None = None
    password: bytes | None = None
    clean: bool = True
    keepalive_s: int = 0
    will: tuple[str, bytes] | None = None  #: topic and payload of the last will
    properties: Properties = field(default_factory=dict)
    will_options: int = 0  #: QoS and RETAIN of the will, as flags of CONNECT


@dataclass(frozen=True, slots=True)
class Connack:
    """The answer to CONNECT."""

    code: int  #: 0, or the version's code for a refusal
    present: bool = False  #: whether the broker kept our session
    properties: Properties = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Puback:
    """The answer to a PUBLISH of QoS 1; code: 0, or why it was refused (MQTT 5)."""

    packet_id: int
    code: int = 0


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Filters to subscribe to, each with its options (QoS in 3.1.1)."""

    packet_id: int
    filters: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Suback:
    """The answer to a SUBSCRIBE, one code per filter."""

    packet_id: int
    codes: bytes


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Filters to unsubscribe from."""

    packet_id: int
    filters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unsuback:
    """The answer to an UNSUBSCRIBE; codes: one per filter (MQTT 5)."""

    packet_id: int
    codes: bytes = b""


@dataclass(frozen=True, slots=True)
class Pingreq:
    """PINGREQ."""


@dataclass(frozen=True, slots=True)
class Pingresp:
    """PINGRESP."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The end of the connection; code: the reason (MQTT 5)."""

    code: int = 0


Control = (
    Connect | Connack | Puback | Subscribe | Suback | Unsubscribe | Unsuback | Pingreq | Pingresp | Disconnect
)  # fmt: skip
Event = Publish | Control
AnyControl = TypeVar("AnyControl", bound=Control)


# -- commands in, bytes out ------------------------------------------------------------------------------------------


def encode(command: Control, version: int = 4) -> bytes:
    """Return a packet of this version of MQTT. Raises ValueError if it is too long."""
    first, write = _WRITERS[type(command)]
    body = b"".join(write(command, version))
    return bytes((first,)) + varint(len(body)) + body


def publish_head(
    topic: str, nbytes: int, version: int, *, qos: int = 0, retain: bool = False, packet_id: int = 0
) -> bytes:
    """Return the PUBLISH header of a payload of `nbytes`. Raises ValueError if the packet is too long."""
    name = text(topic) + (struct.pack(">H", packet_id) if qos else b"") + (b"\0" if version == 5 else b"")
    return bytes((PUBLISH | qos << 1 | retain,)) + varint(len(name) + nbytes) + name


def reason(code: int) -> str:
    """Return the text of a refusal code."""
    return REASONS.get(code, f"code {code}")


def varint(value: int) -> bytes:
    """Encode a variable byte integer."""
    if value > MAX_LENGTH:
        raise ValueError(f"{value} bytes are more than one MQTT packet can hold ({MAX_LENGTH})")
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def text(value: str | bytes) -> bytes:
    """Encode a length-prefixed string."""
    data = value.encode() if isinstance(value, str) else value
    if len(data) > 65_535:
        raise ValueError(f"{len(data)} bytes are more than one text of MQTT can hold (65535)")
    return struct.pack(">H", len(data)) + data


def _listed(properties: Properties, version: int) -> bytes:
    """Encode the properties of an MQTT 5 packet; empty in 3.1.1."""
    if version != 5:
        return b""
    out = bytearray()
    for identifier, value in properties.items():
        kind = _PROPERTIES[identifier]
        out.append(identifier)
        if isinstance(value, bytes):
            out += text(value)
        else:
            out += value.to_bytes(kind, "big") if isinstance(kind, int) else varint(value)
    return varint(len(out)) + bytes(out)


def _write_connect(c: Connect, version: int) -> Sequence[bytes]:
    flags = c.clean << 1 | (c.will is not None) << 2 | (c.password is not None) << 6 | (c.user is not None) << 7
    flags |= c.will_options
    will = (_listed({}, version), text(c.will[0]), text(c.will[1])) if c.will is not None else ()
    login = [text(part) for part in (c.user, c.password) if part is not None]
    head = text("MQTT") + struct.pack(">BBH", version, flags, c.keepalive_s)
    return (head, _listed(c.properties, version), text(c.client), *will, *login)


def _id(packet_id: int) -> bytes:
    return struct.pack(">H", packet_id)


_WRITERS: Final[Mapping[type, tuple[int, Callable[[Any, int], Sequence[bytes]]]]] = {
    Connect: (CONNECT, _write_connect),
    Connack: (CONNACK, lambda c, v: (bytes((c.present, c.code)), _listed(c.properties, v))),
    Puback: (PUBACK, lambda c, v: (_id(c.packet_id), bytes((c.code,)) if v == 5 and c.code else b"")),
    Subscribe: (
        SUBSCRIBE,
        lambda c, v: (_id(c.packet_id), _listed({}, v), *(text(name) + bytes((o,)) for name, o in c.filters)),
    ),
    Suback: (SUBACK, lambda c, v: (_id(c.packet_id), _listed({}, v), c.codes)),
    Unsubscribe: (UNSUBSCRIBE, lambda c, v: (_id(c.packet_id), _listed({}, v), *map(text, c.filters))),
    Unsuback: (UNSUBACK, lambda c, v: (_id(c.packet_id), _listed({}, v), c.codes if v == 5 else b"")),
    Pingreq: (PINGREQ, lambda _c, _v: ()),
    Pingresp: (PINGRESP, lambda _c, _v: ()),
    Disconnect: (DISCONNECT, lambda c, v: (bytes((c.code,)) if v == 5 and c.code else b"",)),
}


# -- bytes in, events out --------------------------------------------------------------------------------------------


class Fields:
    """Reads the body of a packet from front to back. Raises Malformed if it is too short."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        start, self._at = self._at, self._at + nbytes
        if self._at > len(self._data):
            raise Malformed("a packet ends too early")
        return self._data[start : self._at]

    def rest(self) -> bytes:
        """Return the remaining bytes, at least one."""
        return self.take(max(self.left(), 1))

    def number(self, nbytes: int) -> int:
        """Return a big-endian number."""
        return int.from_bytes(self.take(nbytes), "big")

    def packet_id(self) -> int:
        """Return a packet id."""
        packet_id = self.number(2)
        if not packet_id:
            raise Malformed("packet id 0")
        return packet_id

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

    def properties(self, version: int, allowed: frozenset[int] | Mapping[int, Any] = _PROPERTIES) -> Properties:
        """Return the properties of MQTT 5, the first text of pairs; empty in 3.1.1."""
        properties: dict[int, int | bytes] = {}
        end = self.varint() + self._at if version == 5 else 0
        while self._at < end:
            identifier = self.number(1)
            if identifier not in allowed:
                raise Malformed(f"property {identifier:#x} where it may not be")
            kind = _PROPERTIES[identifier]
            if isinstance(kind, int):
                properties[identifier] = self.number(kind)
            elif kind == "v":
                properties[identifier] = self.varint()
            else:
                properties[identifier] = self.data()
                if kind == "ss":
                    self.data()
        if end and self._at > end:
            raise Malformed("a property longer than its list")
        return properties

    def left(self) -> int:
        """Return the number of remaining bytes."""
        return len(self._data) - self._at

    def end(self, packet: AnyControl) -> AnyControl:
        """Return a decoded packet. Raises Malformed if bytes remain."""
        if self.left():
            raise Malformed("a packet longer than its fields")
        return packet


def _read_connect(fields: Fields, _version: int) -> Connect:
    protocol, version = fields.text(), fields.number(1)
    if protocol not in ("MQTT", "MQIsdp"):
        raise Malformed("not MQTT")
    if protocol != "MQTT" or version not in (4, 5):
        return Connect(version if version not in (4, 5) else 3)
    flags, keepalive_s = fields.number(1), fields.number(2)
    if flags & 1 or flags & 0x18 == 0x18 or (flags & 0x38 and not flags & 4):
        raise Malformed(f"flags {flags:#x} in CONNECT")
    if version == 4 and flags & 0x40 and not flags & 0x80:
        raise Malformed("a password without a user in MQTT 3.1.1")
    properties = fields.properties(version, _FROM_CLIENT)
    client, will = fields.text(), None
    if flags & 4:
        fields.properties(version, _FROM_CLIENT)
        will = (fields.text(), fields.data())
    user = fields.text() if flags & 0x80 else None
    password = fields.data() if flags & 0x40 else None
    if properties.get(MAXIMUM_PACKET_SIZE) == 0:
        raise Malformed("a maximum packet size of 0")
    clean, will_options = bool(flags & 2), flags & 0x38
    return fields.end(Connect(version, client, user, password, clean, keepalive_s, will, properties, will_options))


def _read_connack(fields: Fields, version: int) -> Connack:
    present, code = fields.number(1), fields.number(1)
    # A broker of 3.1.1 refuses MQTT 5 with a CONNACK without properties.
    properties = fields.properties(version) if fields.left() else {}
    return fields.end(Connack(code, bool(present & 1), properties))


def _read_puback(fields: Fields, version: int) -> Puback:
    packet_id = fields.packet_id()
    code = fields.number(1) if version == 5 and fields.left() else 0
    if version == 5 and fields.left():
        fields.properties(version)
    return fields.end(Puback(packet_id, code))


def _read_subscribe(fields: Fields, version: int) -> Subscribe:
    packet_id, filters = fields.packet_id(), list[tuple[str, int]]()
    fields.properties(version, _FROM_CLIENT)
    reserved = 0xC0 if version == 5 else 0xFC
    while fields.left() or not filters:
        name, options = fields.text(), fields.number(1)
        if options & reserved or options & 3 == 3 or options & 0x30 == 0x30:
            raise Malformed(f"options {options:#x} in SUBSCRIBE")
        filters.append((name, options))
    return Subscribe(packet_id, tuple(filters))


def _read_suback(fields: Fields, version: int) -> Suback:
    packet_id = fields.packet_id()
    fields.properties(version)
    return Suback(packet_id, fields.rest())


def _read_unsubscribe(fields: Fields, version: int) -> Unsubscribe:
    packet_id, filters = fields.packet_id(), list[str]()
    fields.properties(version, _FROM_CLIENT)
    while fields.left() or not filters:
        filters.append(fields.text())
    return Unsubscribe(packet_id, tuple(filters))


def _read_unsuback(fields: Fields, version: int) -> Unsuback:
    packet_id = fields.packet_id()
    fields.properties(version)
    codes = fields.rest() if version == 5 else b""
    return fields.end(Unsuback(packet_id, codes))


def _read_disconnect(fields: Fields, version: int) -> Disconnect:
    return Disconnect(fields.number(1) if version == 5 and fields.left() else 0)


def _publishes(_fields: Fields, _version: int) -> Control:
    raise AssertionError("Decoder reads a PUBLISH in place")


Reads = Mapping[int, Callable[[Fields, int], Control]]

# Readers of the allowed packets for each sender, by a packet's first byte (type and flags).
FROM_STRANGER: Final[Reads] = {CONNECT: _read_connect}
FROM_SUBSCRIBER: Final[Reads] = {
    SUBSCRIBE: _read_subscribe,
    UNSUBSCRIBE: _read_unsubscribe,
    PINGREQ: lambda fields, _version: fields.end(Pingreq()),
    DISCONNECT: _read_disconnect,
}
FROM_ENDPOINT: Final[Reads] = {
    PUBLISH: _publishes,
    CONNACK: _read_connack,
    SUBACK: _read_suback,
    UNSUBACK: _read_unsuback,
}
FROM_BROKER: Final[Reads] = {
    **FROM_ENDPOINT,
    **{PUBLISH | flags: _publishes for flags in (RETAIN, 2, 3, 10, 11)},  # QoS 0 retained; QoS 1, also repeated
    PUBACK: _read_puback,
    PINGRESP: lambda fields, _version: fields.end(Pingresp()),
    DISCONNECT: _read_disconnect,
}


class Decoder:
    """Decodes a stream: receive into `buffer()`, pass the count to `received`, call `next_event` until None.

    reads: packets that the other end may send now. version: 4 or 5. limit_bytes: of the longest PUBLISH.
    control_bytes: of the longest other packet, and of the longest topic with its header.
    any_topic: return an invalid topic as "" instead of raising Malformed.
    After Malformed the stream cannot be read further.
    """

    def __init__(
        self,
        reads: Reads,
        *,
        version: int = 4,
        limit_bytes: int = MAX_LENGTH,
        control_bytes: int = MAX_CONTROL,
        buffers: Buffers | None = None,
        any_topic: bool = False,
    ) -> None:
        self.reads, self.version, self.limit_bytes = reads, version, limit_bytes
        self.missing = 0  #: bytes of the current payload that have not arrived
        self._control_bytes, self._any_topic = control_bytes, any_topic
        self._buffers = Buffers() if buffers is None else buffers
        self._stage = memoryview(bytearray(max(STAGE, control_bytes + 5)))
        self._start = self._end = 0  # unparsed range of the stage
        self._topics = Recent[bytes, str](MAX_TOPICS)
        self._leads = Recent[bytes, tuple[int, int, int]](MAX_LEADS)
        self._begun: Publish | None = None  # message with an incomplete payload

    @property
    def is_empty(self) -> bool:
        """Return whether no partial or unread packet is buffered."""
        return not self.missing and self._start == self._end

    def buffer(self) -> memoryview:
        """Return the memory to receive into: exactly the rest of a payload, or the stage."""
        if self.missing:
            assert self._begun is not None
            return self._begun.payload[-self.missing :]
        left = self._end - self._start
        if self._start:
            self._stage[:left] = self._stage[self._start : self._end]
            self._start, self._end = 0, left
        return self._stage[left:]

    def received(self, nbytes: int) -> Event | None:
        """Process `nbytes` that arrived in `buffer()`; return the next event as `next_event` does."""
        if not self.missing:
            self._end += nbytes
            return self.next_event()
        self.missing -= nbytes
        if self.missing:
            return None
        begun, self._begun = self._begun, None  # a kept view would keep its buffer in use
        return begun

    def next_event(self) -> Event | None:
        """Return the next event, None if more bytes are needed. Raises Malformed."""
        stage, start, end = self._stage, self._start, self._end
        if start == end or self.missing:
            return None
        if end - start >= LEAD:
            lead = self._leads.get(bytes(stage[start : start + LEAD]))
            if lead is not None and lead[2] <= self.limit_bytes:
                return self._publish(PUBLISH, start + lead[0], start + lead[1], start + lead[2])
        first = stage[start]
        read = self.reads.get(first)
        if read is None:
            raise Malformed(f"packet {first:#x} is out of place")
        header = self._length(self.limit_bytes if read is _publishes else self._control_bytes)
        if header is None:
            return None
        at, length = header
        if read is _publishes:
            return self._unknown(first, at, length)
        if end < at + length:
            return None
        self._start = at + length
        return read(Fields(bytes(stage[at : at + length])), self.version)

    def feed(self, data: Buffer) -> Event | None:
        """Copy bytes into `buffer()` and return as `received`. Raises ValueError if they do not fit."""
        self.buffer()[: len(data)] = data
        return self.received(len(data))

    def _length(self, limit: int) -> tuple[int, int] | None:
        """Return (start of the body, its length), None if the header is incomplete."""
        length = shift = 0
        for at in range(self._start + 1, self._end):
            byte = self._stage[at]
            length |= (byte & 127) << shift
            if byte < 128:
                if length > limit:
                    raise Malformed(f"a packet of {length} bytes; the limit is {limit}")
                return at + 1, length
            shift += 7
            if shift == 28:
                raise Malformed("a length of more than four bytes")
        return None

    def _unknown(self, first: int, at: int, length: int) -> Publish | None:
        """Locate and check topic and payload of a PUBLISH with its body at `at`, and start to receive it."""
        stage, begin, end = self._stage, self._start, self._end
        plain = first & 6 == 0 and self.version == 4
        least = 2 if plain else 2 + (2 if first & 6 else 0) + (self.version == 5)
        if length < least:
            raise Malformed("a PUBLISH without a topic")
        if end < at + 2:
            return None
        start = at + 2 + (stage[at] << 8 | stage[at + 1])
        if start > at + min(length, self._control_bytes):
            raise Malformed("a topic longer than its packet, or too long")
        if not plain:
            return self._with_more(first, at, start, at + length)
        if first == PUBLISH and end - begin >= LEAD:
            self._leads[bytes(stage[begin : begin + LEAD])] = (at + 2 - begin, start - begin, at + length - begin)
        return self._publish(first, at + 2, start, at + length)

    def _with_more(self, first: int, at: int, name_end: int, stop: int) -> Publish | None:
        """Read packet id (QoS 1) and properties (MQTT 5) between topic and payload."""
        limit = min(stop, at + self._control_bytes)
        head = bytes(self._stage[name_end : min(self._end, limit)])
        fields = Fields(head)
        try:
            packet_id = fields.packet_id() if first & 6 else 0
            fields.properties(self.version)
        except Malformed:
            if name_end + len(head) < limit:
                return None  # incomplete, or malformed; the complete header decides
            raise
        start = name_end + len(head) - fields.left()
        return self._publish(first, at + 2, start, stop, name_end, packet_id)

    def _publish(
        self, first: int, name_at: int, start: int, stop: int, name_end: int = 0, packet_id: int = 0
    ) -> Publish | None:
        """Take the topic and the available bytes of the payload at start:stop; None if bytes are missing."""
        stage, end = self._stage, self._end
        if end < start:
            return None
        name = bytes(stage[name_at : name_end or start])
        topic = self._topics.get(name) or self._new_topic(name)
        payload = self._buffers.take(stop - start)
        # Calling `Publish` takes twice as long.
        fields = (topic, payload, first >> 1 & 3, first & RETAIN == RETAIN, packet_id, first & 8 == 8)
        message = tuple.__new__(Publish, fields)
        if end >= stop:
            payload[:] = stage[start:stop]
            self._start = stop
            return message
        payload[: end - start] = stage[start:end]
        self._start, self._begun, self.missing = end, message, stop - end
        return None

    def _new_topic(self, name: bytes) -> str:
        try:
            topic = name.decode()
        except UnicodeDecodeError:
            topic = ""
        if not is_topic(topic):
            if self._any_topic:
                return ""
            raise Malformed(f"a topic {name[:64]!r}")
        self._topics[name] = topic
        return topic


# -- topics and filters ----------------------------------------------------------------------------------------------


def is_filter(pattern: str) -> bool:
    """Return whether a text is a valid topic filter."""
    levels = pattern.split("/")
    return (
        bool(pattern)
        and "\0" not in pattern
        and all(level == "+" or "+" not in level for level in levels)
        and all("#" not in level for level in levels[:-1])
        and (levels[-1] == "#" or "#" not in levels[-1])
    )


def is_topic(name: str) -> bool:
    """Return whether a text is a valid topic name."""
    return bool(name) and not any(c in name for c in "+#\0")


def matches(pattern: str, topic: str) -> bool:
    """Return whether a filter matches a topic."""
    return _within(pattern.split("/"), topic.split("/"))


def covers(allowed: str, pattern: str) -> bool:
    """Return whether the filter `allowed` matches every topic that the filter `pattern` matches."""
    outer, inner = allowed.split("/"), pattern.split("/")
    if inner[-1] == "#":
        # "a/#" also matches "a", so `allowed` needs a "#" at the same level or above.
        return outer[-1] == "#" and len(outer) <= len(inner) and _within(outer, inner)
    return _within(outer, inner)


def _within(outer: list[str], inner: list[str]) -> bool:
    if outer[0] in ("+", "#") and inner[0].startswith("$"):
        return False
    if outer[-1] == "#":
        outer, inner = outer[:-1], inner[: len(outer) - 1]
    return len(outer) == len(inner) and all(a in (b, "+") for a, b in zip(outer, inner, strict=True))
