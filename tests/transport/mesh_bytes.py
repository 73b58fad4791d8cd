"""MQTT packets for tests of the mesh's parsers, and slow parsers to compare them with."""

from __future__ import annotations

from hepti_mqtt.transport.mesh.packets import packet, publish_head, text


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
    """Rules: this user with this token may read what begins with "x/"."""

    def __init__(self, user="b", token=b"secret"):
        self.user, self.token = user, token

    def knows(self, user, token):
        return (user, token) == (self.user, self.token)

    def allows(self, user, pattern):
        return user == self.user and pattern.startswith("x/")


def plain_parse(data, limit_bytes):
    """Return what a subscriber hears in these bytes, and whether they break a rule: by the book, and slowly.

    Every item is (topic, payload) or (first byte, body).
    """
    heard, at = [], 0
    while True:
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
        if length > limit_bytes or (first != 0x30 and length > 1024):
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
        heard.append((name, body[2 + name_bytes :]) if first == 0x30 else (first, body))
        at = start + length
