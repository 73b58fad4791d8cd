"""MQTT 3.1.1 and 5 without I/O: bytes in and events out, commands in and bytes out.

Connections to the broker, subscriptions at a peer's endpoint and the endpoint itself use it. Control packets
are small classes that `Decoder.next_event` returns and `encode` takes. Large payloads are not copied: the decoder names
the memory to receive them into (`Decoder.buffer`), and `publish_head` is what stands before a payload that its sender
writes from where it lies (`sendmsg`).

Source: OASIS MQTT 3.1.1 and MQTT 5.0, chapters 2 and 3. Not here, because nothing of ours uses it: QoS 2, AUTH, topic
aliases.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from hepti_mqtt.errors import HeptiError
from hepti_mqtt.transport.buffers import Buffers

CONNECT, CONNACK, PUBLISH, PUBACK, SUBSCRIBE, SUBACK = 0x10, 0x20, 0x30, 0x40, 0x82, 0x90
UNSUBSCRIBE, UNSUBACK, PINGREQ, PINGRESP, DISCONNECT = 0xA2, 0xB0, 0xC0, 0xD0, 0xE0
RETAIN: Final = 1
MAX_LENGTH: Final = 268_435_455  # what four bytes of a length can say
FAILURE: Final = 0x80  # codes from here on are refusals
NO_SUBSCRIBERS: Final = 0x10
# What codes of refusals say: of CONNACK in 3.1.1, and of MQTT 5.
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
# Properties of MQTT 5: how many bytes their number has, "v" where the number says so itself, "s" for a text, "ss" for
# two.
_PROPERTIES: Final[dict[int, int | str]] = {
    0x01: 1, 0x02: 4, 0x03: "s", 0x08: "s", 0x09: "s", 0x0B: "v", 0x11: 4, 0x12: "s", 0x13: 2, 0x15: "s", 0x16: "s",
    0x17: 1, 0x18: 4, 0x19: 1, 0x1A: "s", 0x1C: "s", 0x1F: "s", 0x21: 2, 0x22: 2, 0x23: 2, 0x24: 1, 0x25: 1, 0x26: "ss",
    0x27: 4, 0x28: 1, 0x29: 1, 0x2A: 1,
}  # fmt: skip
# Those that a client may send in CONNECT (its will included), SUBSCRIBE and UNSUBSCRIBE.
_FROM_CLIENT: Final = frozenset(
    {0x01, 0x02, 0x03, 0x08, 0x09, 0x0B, 0x11, 0x15, 0x16, 0x17, 0x18, 0x19, 0x21, 0x22, 0x26, 0x27}
)

STAGE: Final = 4096  # received first, to see what comes; the rest of a larger payload goes where it belongs
MAX_CONTROL: Final = (
    1024  # bytes of the longest control packet from an endpoint, and of the longest topic with its header
)
MAX_TOPICS: Final = 4096  # topics remembered as text
# First byte, length and length of the topic of a PUBLISH lie in so many bytes, which say where its topic and payload
# lie: those of frames that come with every request are read once.
LEAD, MAX_LEADS = 7, 256
_NOTHING: Final = memoryview(b"")

Buffer = Any  # what has the buffer protocol, C-contiguous: bytes, a memoryview, an array
Properties = Mapping[int, int | bytes]  # numbers, and the bytes of texts


class Malformed(HeptiError):
    """The other end of a connection broke MQTT or a limit; the connection must be closed."""

    code = "wire"


# -- events and commands ---------------------------------------------------------------------------------------------


class Publish(NamedTuple):
    """A message; payload: a view of memory that is used again once nobody refers to it. packet_id: 0 at QoS 0.

    repeated: it was sent before.
    """

    topic: str
    payload: memoryview
    qos: int = 0
    retain: bool = False
    packet_id: int = 0
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Connect:
    """A client introduces itself; of a version other than 4 and 5 nothing but the version is known.

    will: topic and payload of the last will, None without one. will_options: its QoS and RETAIN, as CONNECT's flags.
    """

    version: int
    client: str = ""
    user: str | None = None
    password: bytes | None = None
    clean: bool = True
    keepalive_s: int = 0
    will: tuple[str, bytes] | None = None
    properties: Properties = field(default_factory=dict)
    will_options: int = 0


@dataclass(frozen=True, slots=True)
class Connack:
    """The answer to CONNECT; code: 0, or why not, in the numbers of the version. present: it knew our session."""

    code: int
    present: bool = False
    properties: Properties = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Puback:
    """A message of QoS 1 has been taken, or (MQTT 5) refused."""

    packet_id: int
    code: int = 0


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Filters to subscribe to, each with its options (in 3.1.1 its QoS)."""

    packet_id: int
    filters: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Suback:
    """A code for each filter of a SUBSCRIBE."""

    packet_id: int
    codes: bytes


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Filters to leave."""

    packet_id: int
    filters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unsuback:
    """Filters have been left; codes: one for each, in MQTT 5 only."""

    packet_id: int
    codes: bytes = b""


@dataclass(frozen=True, slots=True)
class Pingreq:
    """Are you there?"""


@dataclass(frozen=True, slots=True)
class Pingresp:
    """Yes."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The connection ends; code: why, in MQTT 5."""

    code: int = 0


Control = (
    Connect | Connack | Puback | Subscribe | Suback | Unsubscribe | Unsuback | Pingreq | Pingresp | Disconnect
)  # fmt: skip
Event = Publish | Control
AnyControl = TypeVar("AnyControl", bound=Control)


# -- commands in, bytes out ------------------------------------------------------------------------------------------


def encode(command: Control, version: int = 4) -> bytes:
    """Return a packet of this version of MQTT; raises ValueError for what no packet can hold."""
    first, write = _WRITERS[type(command)]
    body = b"".join(write(command, version))
    return bytes((first,)) + varint(len(body)) + body


def publish_head(
    topic: str, nbytes: int, version: int, *, qos: int = 0, retain: bool = False, packet_id: int = 0
) -> bytes:
    """Return what stands before a payload of `nbytes` in a PUBLISH; raises ValueError if that is too long."""
    name = text(topic) + (struct.pack(">H", packet_id) if qos else b"") + (b"\0" if version == 5 else b"")
    return bytes((PUBLISH | qos << 1 | retain,)) + varint(len(name) + nbytes) + name


def reason(code: int) -> str:
    """Return what the code of a refusal says."""
    return REASONS.get(code, f"code {code}")


def varint(value: int) -> bytes:
    """Return MQTT's variable byte integer."""
    if value > MAX_LENGTH:
        raise ValueError(f"{value} bytes are more than one MQTT packet can hold ({MAX_LENGTH})")
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def text(value: str | bytes) -> bytes:
    """Return a length-prefixed string."""
    data = value.encode() if isinstance(value, str) else value
    if len(data) > 65_535:
        raise ValueError(f"{len(data)} bytes are more than one text of MQTT can hold (65535)")
    return struct.pack(">H", len(data)) + data


def _listed(properties: Properties, version: int) -> bytes:
    """Return the list of properties that every packet of MQTT 5 has, and none of 3.1.1."""
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
    """Reads the body of a packet from front to back; raises Malformed where it ends too early."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        start, self._at = self._at, self._at + nbytes
        if self._at > len(self._data):
            raise Malformed("a packet ends too early")
        return self._data[start : self._at]

    def rest(self) -> bytes:
        """Return all bytes that are left, at least one."""
        if not self.more():
            raise Malformed("a packet ends too early")
        return self.take(self.left())

    def number(self, nbytes: int) -> int:
        """Return a big-endian number."""
        return int.from_bytes(self.take(nbytes), "big")

    def packet_id(self) -> int:
        """Return a packet id."""
        found = self.number(2)
        if not found:
            raise Malformed("packet id 0")
        return found

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
        """Return the properties of MQTT 5, of those with two texts the first; nothing in 3.1.1."""
        found: dict[int, int | bytes] = {}
        end = self.varint() + self._at if version == 5 else 0
        while self._at < end:
            identifier = self.number(1)
            if identifier not in allowed:
                raise Malformed(f"property {identifier:#x} where it may not be")
            kind = _PROPERTIES[identifier]
            if isinstance(kind, int):
                found[identifier] = self.number(kind)
            elif kind == "v":
                found[identifier] = self.varint()
            else:
                found[identifier] = self.data()
                if kind == "ss":
                    self.data()
        if end and self._at > end:
            raise Malformed("a property longer than its list")
        return found

    def left(self) -> int:
        """Return how many bytes are left."""
        return len(self._data) - self._at

    def more(self) -> bool:
        """Return whether bytes are left."""
        return self._at < len(self._data)

    def end(self, packet: AnyControl) -> AnyControl:
        """Return a packet that has been read; raises Malformed if bytes are left."""
        if self.more():
            raise Malformed("a packet longer than what it says")
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
    # One that does not speak MQTT 5 refuses it in the words of 3.1.1, without properties.
    properties = fields.properties(version) if fields.more() else {}
    return fields.end(Connack(code, bool(present & 1), properties))


def _read_puback(fields: Fields, version: int) -> Puback:
    packet_id = fields.packet_id()
    code = fields.number(1) if version == 5 and fields.more() else 0
    if version == 5 and fields.more():
        fields.properties(version)
    return fields.end(Puback(packet_id, code))


def _read_subscribe(fields: Fields, version: int) -> Subscribe:
    packet_id, filters = fields.packet_id(), list[tuple[str, int]]()
    fields.properties(version, _FROM_CLIENT)
    reserved = 0xC0 if version == 5 else 0xFC
    while fields.more() or not filters:
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
    while fields.more() or not filters:
        filters.append(fields.text())
    return Unsubscribe(packet_id, tuple(filters))


def _read_unsuback(fields: Fields, version: int) -> Unsuback:
    packet_id = fields.packet_id()
    fields.properties(version)
    codes = fields.rest() if version == 5 else b""
    return fields.end(Unsuback(packet_id, codes))


def _read_disconnect(fields: Fields, version: int) -> Disconnect:
    return Disconnect(fields.number(1) if version == 5 and fields.more() else 0)


def _publishes(_fields: Fields, _version: int) -> Control:
    raise AssertionError("a PUBLISH is read where it lies")


Reads = Mapping[int, Callable[[Fields, int], Control]]

# Who may send what: by the first byte of a packet, flags included.
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
    """Reads what the other end sends: receive into `buffer()`, say how much came (`received`), take events until None.

    reads: which packets the other end may send now. version: of MQTT, 4 or 5. limit_bytes: the longest PUBLISH;
    control_bytes: the longest other packet, and the longest topic with its header. any_topic: read a topic that MQTT
    does not allow as "", instead of Malformed. missing: bytes of the payload on its way that have not come yet. Once a
    method has raised Malformed the connection cannot be read any further.
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
        self.missing = 0
        self._control_bytes, self._any_topic = control_bytes, any_topic
        self._buffers = Buffers() if buffers is None else buffers
        self._stage = memoryview(bytearray(max(STAGE, control_bytes + 5)))
        self._start = self._end = 0  # what of the stage is not parsed
        self._topics: dict[bytes, str] = {}
        self._leads: dict[bytes, tuple[int, int, int]] = {}
        self._begun: Publish | None = None  # whose payload has not all come

    @property
    def is_empty(self) -> bool:
        """Return whether nothing of a packet has come that `next_event` has not returned."""
        return not self.missing and self._start == self._end

    def buffer(self) -> memoryview:
        """Return where to receive: the rest of a payload and nothing beyond it, or the stage."""
        if self.missing:
            assert self._begun is not None
            return self._begun.payload[-self.missing :]
        left = self._end - self._start
        if self._start:
            self._stage[:left] = self._stage[self._start : self._end]
            self._start, self._end = 0, left
        return self._stage[left:]

    def received(self, nbytes: int) -> Event | None:
        """So many bytes have come into `buffer()`; return as `next_event`, to be called until it returns None."""
        if not self.missing:
            self._end += nbytes
            return self.next_event()
        self.missing -= nbytes
        if self.missing:
            return None
        begun, self._begun = self._begun, None  # a view that is kept would keep the buffer
        return begun

    def next_event(self) -> Event | None:
        """Return what came next, None if more bytes are needed. Raises Malformed."""
        stage, start, end = self._stage, self._start, self._end
        if start == end or self.missing:
            return None
        if end - start >= LEAD:
            known = self._leads.get(bytes(stage[start : start + LEAD]))
            if known is not None and known[2] <= self.limit_bytes:
                return self._publish(PUBLISH, start + known[0], start + known[1], start + known[2])
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
        """Receive bytes that lie elsewhere and return as `received`; raises ValueError if `buffer()` has no room."""
        self.buffer()[: len(data)] = data
        return self.received(len(data))

    def _length(self, limit: int) -> tuple[int, int] | None:
        """Return (where the body starts, its length), None if the stage holds too little to tell."""
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
        """Check where topic and payload of a PUBLISH lie whose body starts at `at`, and take their beginning."""
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
            if len(self._leads) >= MAX_LEADS:
                self._leads.clear()
            self._leads[bytes(stage[begin : begin + LEAD])] = (at + 2 - begin, start - begin, at + length - begin)
        return self._publish(first, at + 2, start, at + length)

    def _with_more(self, first: int, at: int, name_end: int, stop: int) -> Publish | None:
        """Read what stands between topic and payload at QoS 1 and in MQTT 5: packet id and properties."""
        limit = min(stop, at + self._control_bytes)
        head = bytes(self._stage[name_end : min(self._end, limit)])
        fields = Fields(head)
        try:
            packet_id = fields.packet_id() if first & 6 else 0
            fields.properties(self.version)
        except Malformed:
            if name_end + len(head) < limit:
                return None  # not all of it has come, or it is broken: then all of it shows that
            raise
        start = name_end + len(head) - fields.left()
        return self._publish(first, at + 2, start, stop, name_end, packet_id)

    def _publish(
        self, first: int, name_at: int, start: int, stop: int, name_end: int = 0, packet_id: int = 0
    ) -> Publish | None:
        """Take the topic and the first bytes of a payload that lies from `start` to `stop`; None if more is needed."""
        stage, end = self._stage, self._end
        if end < start:
            return None
        name = bytes(stage[name_at : name_end or start])
        topic = self._topics.get(name) or self._new_topic(name)
        payload = self._buffers.take(stop - start)
        # Without the arguments of `Publish` to look up, this costs half.
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
        if len(self._topics) >= MAX_TOPICS:
            self._topics.clear()
        self._topics[name] = topic
        return topic


# -- topics and filters ----------------------------------------------------------------------------------------------


def is_filter(pattern: str) -> bool:
    """Return whether this is a topic filter."""
    levels = pattern.split("/")
    return (
        bool(pattern)
        and "\0" not in pattern
        and all(level == "+" or "+" not in level for level in levels)
        and all("#" not in level for level in levels[:-1])
        and (levels[-1] == "#" or "#" not in levels[-1])
    )


def is_topic(name: str) -> bool:
    """Return whether a message may be published on this."""
    return bool(name) and not any(c in name for c in "+#\0")


def matches(pattern: str, topic: str) -> bool:
    """Return whether a filter takes in a topic."""
    return _within(pattern.split("/"), topic.split("/"))


def covers(allowed: str, asked: str) -> bool:
    """Return whether every topic that `asked` takes in is taken in by `allowed` as well."""
    outer, inner = allowed.split("/"), asked.split("/")
    if inner[-1] == "#":
        # "a/#" is also "a": only a "#" at or before its place has all of it.
        return outer[-1] == "#" and len(outer) <= len(inner) and _within(outer, inner)
    return _within(outer, inner)


def _within(outer: list[str], inner: list[str]) -> bool:
    if outer[0] in ("+", "#") and inner[0].startswith("$"):
        return False
    if outer[-1] == "#":
        outer, inner = outer[:-1], inner[: len(outer) - 1]
    return len(outer) == len(inner) and all(a in (b, "+") for a, b in zip(outer, inner, strict=True))
