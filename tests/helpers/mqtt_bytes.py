"""MQTT packets for tests of the codec, written by hand, and a slow parser to compare it with."""

from __future__ import annotations

import numpy as np

from hepti_mqtt.transport.codec import FROM_ENDPOINT, Decoder, Malformed, Publish, encode, publish_head, text, varint


def packet(first, *parts):
    body = b"".join(parts)
    return bytes((first,)) + varint(len(body)) + body


def connect(user="b", token="secret", *, client="b", version=4, flags=None, keepalive_s=0, properties=b"", will=b""):
    """Return CONNECT; None for a user or a token leaves it out."""
    if flags is None:
        flags = 2 | (0x80 if user is not None else 0) | (0x40 if token is not None else 0)
    own = bytes((len(properties),)) + properties if version == 5 else b""
    login = b"".join(text(part) for part in (user, token) if part is not None)
    head = text("MQTT") + bytes((version, flags)) + keepalive_s.to_bytes(2, "big") + own
    return packet(0x10, head + text(client) + will + login)


def subscribe(*filters, packet_id=1, options=0, version=4, properties=b""):
    own = bytes((len(properties),)) + properties if version == 5 else b""
    return packet(0x82, packet_id.to_bytes(2, "big") + own, *(text(f) + bytes((options,)) for f in filters))


def unsubscribe(*filters, packet_id=1, version=4):
    return packet(0xA2, packet_id.to_bytes(2, "big") + (b"\0" if version == 5 else b""), *map(text, filters))


def publish(topic, payload, version=4):
    return publish_head(topic, len(payload), version) + payload


class Anybody:
    """An access list: this user with this token may read what begins with "x/"."""

    def __init__(self, user="b", token=b"secret"):
        self.user, self.token = user, token

    def knows(self, user, token):
        return (user, token) == (self.user, self.token)

    def allows(self, user, pattern):
        return user == self.user and pattern.startswith("x/")


def plain_parse(data, limit_bytes, *, control_bytes=1024):
    """Return what a subscriber at an endpoint reads in these bytes, and whether they break a rule: by the book, slowly.

    Every item is (topic, payload) or (first byte, body). Bodies of control packets are checked by their lengths alone.
    """
    heard, at = [], 0
    while True:
        if len(data) > at and data[at] not in (0x20, 0x30, 0x90, 0xB0):
            return heard, True
        length = used = 0
        while True:
            if used == 4:
                return heard, True
            if len(data) < at + used + 2:
                return heard, False
            byte = data[at + 1 + used]
            length += (byte & 127) * 128**used
            used += 1
            if byte < 128:
                break
        first, start = data[at], at + 1 + used
        body = data[start : start + length]
        if length > (limit_bytes if first == 0x30 else control_bytes):
            return heard, True
        if first == 0x30:
            if length < 2:
                return heard, True
            if len(body) >= 2:
                name_bytes = body[0] * 256 + body[1]
                if 2 + name_bytes > min(length, 1024):
                    return heard, True
                if len(body) >= 2 + name_bytes:
                    try:
                        name = body[2 : 2 + name_bytes].decode()
                    except UnicodeDecodeError:
                        return heard, True
                    if not name or set(name) & set("+#\0"):
                        return heard, True
        if len(body) < length:
            return heard, False
        if first != 0x30 and not well_formed(first, body):
            return heard, True
        heard.append((name, body[2 + name_bytes :]) if first == 0x30 else (first, body))
        at = start + length


def well_formed(first, body):
    """Return whether the body of CONNACK, SUBACK or UNSUBACK of MQTT 3.1.1 is one."""
    if first == 0x20:
        return len(body) == 2
    whole = len(body) > 2 if first == 0x90 else len(body) == 2
    return whole and body[:2] != b"\0\0"


class Reader:
    """A decoder and what it has read; `put` gives it bytes as a socket would: no more than it has room for."""

    def __init__(self, reads=FROM_ENDPOINT, limit_bytes=1 << 20, **options):
        self.heard, self.addresses, self.broken = [], [], False
        self.decoder = Decoder(reads, limit_bytes=limit_bytes, **options)

    def put(self, data):
        decoder, view = self.decoder, memoryview(data)
        while view.nbytes:
            room = decoder.buffer()
            nbytes = min(room.nbytes, view.nbytes)
            assert nbytes, "no room for more"
            room[:nbytes] = view[:nbytes]
            event = decoder.received(nbytes)
            view = view[nbytes:]
            while event is not None:
                if isinstance(event, Publish):
                    self.addresses.append(address(event.payload))
                    event = event._replace(payload=bytes(event.payload))
                self.heard.append(event)
                event = decoder.next_event()

    def put_all(self, parts):
        """Give it parts until it breaks; return what it has read as `plain_parse` says it, and whether it broke."""
        try:
            for part in parts:
                self.put(part)
        except Malformed:
            self.broken = True
        return [plain(event) for event in self.heard], self.broken


def address(payload):
    return np.frombuffer(payload, np.uint8).ctypes.data if payload.nbytes else 0


def plain(event):
    """Return an event as `plain_parse` says it."""
    if isinstance(event, Publish):
        return event.topic, event.payload
    data = encode(event)
    return data[0], data[2 if data[1] < 128 else 3 :]
