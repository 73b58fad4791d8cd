"""Hostile bytes for both ends of the codec, against a slow parser.

Every case is a stream of packets, most of them damaged, handed over in pieces. Whatever comes, a parser must say the
same as the slow one that has all bytes at once, raise nothing but Malformed, and keep no more than its limit.
"""

from __future__ import annotations

import functools
import random
import re

from mqtt_bytes import Anybody, Reader, connect, plain_parse, publish, subscribe, unsubscribe

from hepti_mqtt.transport.buffers import Buffers
from hepti_mqtt.transport.codec import STAGE, Malformed
from hepti_mqtt.transport.endpoint import MAX_FILTERS, ClientSession

GIVEN_NAME = re.compile(rb"client-[0-9a-f]{8}")
LIMIT = 20_000  # above the stage, and small enough that a lie about a length costs nothing
LENGTHS = (
    *(b"\0", b"\x7f", b"\x80\x01", b"\xff\x7f", b"\xff\xff\x7f", b"\xff\xff\xff\x7f"),
    *(b"\x80\x80\x80\x80\x01", b"\x80"),
)

SENT = [
    *(publish("x/m/a", bytes(n)) for n in (0, 1, 7, 118, 119, 120, 121, 300)),
    *(publish("x/é" + "t" * n, b"payload") for n in (0, 100, 1018, 1019, 1020)),
    *(publish("x/m/a", b"p" * n) for n in (STAGE - 10, STAGE - 9, STAGE, 2 * STAGE + 1, LIMIT - 7, LIMIT - 6)),
    publish("", b"x"),
    publish("x/#", b"x"),
    publish("x/m/a", b"xyz", version=5),
    b"\x20\x02\0\0",
    b"\x90\x04\0\x01\0\x80",
    b"\xb0\x02\0\x02",
    b"\xd0\0",
    b"\x32\x07\0\x03x/a\0\x01h",
    b"\x90\x81\x08" + bytes(1025),
]
SMALL = [data for data in SENT if len(data) < 400]
# Those behind which the next packet is heard.
WHOLE = frozenset(data for data in SENT if len(plain_parse(data + b"\xb0\x02\0\x02", LIMIT)[0]) == 2)
ANSWERED = [
    *(subscribe(*names, version=v) for v in (4, 5) for names in (("x/a",), ("x/+/b", "y/#"), ("x/a#",), ("",))),
    *(unsubscribe(*names, version=v) for v in (4, 5) for names in (("x/a",), ("x/+/b", "y/#"))),
    subscribe(*(f"x/{i}" for i in range(40))),
    subscribe(*(f"x/{i}" for i in range(40, 80))),
    subscribe("x/a", options=2),
    subscribe("x/a", options=3),
    subscribe("x/a", packet_id=0),
    subscribe("x/a", version=5, properties=b"\x0b\x81\x01\x26\0\x01a\0\x01b"),
    b"\xc0\0",
    b"\xe0\0",
    b"\x30\x05\0\x03x/a",
    b"\x40\x02\0\x01",
    b"\xf0\0",
]
CONNECTS = [
    connect(),
    connect(version=5),
    connect(client=""),
    connect(client="", version=5),
    connect(flags=0xC6, will=b"\0\x01w\0\x02hi"),
    connect(version=5, flags=0xC6, will=b"\x05\x18\0\0\0\x01\0\x01w\0\x02hi", properties=b"\x27\0\0\x10\0\x21\0\x05"),
    connect(token="wrong"),
    connect(user=None, token=None),
    connect(version=3),
    connect(keepalive_s=60),
]


def damage(rng, data):
    """Return a packet with one thing wrong with it, or none."""
    kind, data = rng.randrange(8), bytearray(data)
    at = rng.randrange(len(data))
    if kind == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[1:2] = rng.choice(LENGTHS)
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        data[at:at] = rng.randbytes(rng.randrange(1, 4))
    elif kind == 4 and len(data) > 3:
        data[2:4] = rng.choice((b"\0\0", b"\xff\xff", b"\0\xff", b"\x04\0"))
    return bytes(data)


def pieces(rng, data):
    """Cut a stream: whole, in two, byte by byte or anywhere."""
    kind = rng.randrange(4)
    if kind == 0 or len(data) < 2:
        return [data]
    if kind == 1:
        at = rng.randrange(len(data))
        return [data[:at], data[at:]]
    if kind == 2 and len(data) < 80:
        return [data[i : i + 1] for i in range(len(data))]
    parts, at = [], 0
    while at < len(data):
        nbytes = rng.choice((1, 2, 5, 100, STAGE, 3 * STAGE))
        parts.append(data[at : at + nbytes])
        at += nbytes
    return parts


def decoder_case(rng, buffers):
    """Compare what a subscriber reads with the slow parser's word."""
    pool = SENT if rng.random() < 0.2 else SMALL
    data = b"".join(damage(rng, rng.choice(pool)) for _ in range(rng.randrange(1, 5)))
    reader = Reader(limit_bytes=LIMIT, buffers=buffers)
    if rng.random() < 0.5:  # one that remembers where topics lie in such packets
        reader.put_all([packet for packet in rng.sample(pool, 3) if packet in WHOLE])
        assert not reader.broken
        reader.heard.clear()
    heard, broken = reader.put_all(pieces(rng, data))
    expected, breaks = plain_parse(data, LIMIT)
    assert [as_sent(item) for item in heard] == [as_sent(item) for item in expected], data
    assert broken == breaks, data
    assert reader.decoder.missing <= LIMIT


def as_sent(item):
    """Of the flags of CONNACK one bit alone counts."""
    return (item[0], bytes((item[1][0] & 1, item[1][1]))) if item[0] == 0x20 else item


def session_case(rng):
    """Compare the answers to a stream in pieces with those to all of it."""
    first = rng.choice(CONNECTS)
    parts = [first if rng.random() < 0.7 else damage(rng, first)]
    parts += [damage(rng, rng.choice(ANSWERED)) for _ in range(rng.randrange(4))]
    data = b"".join(parts)
    (whole, state), (cut, cut_state) = at_once(data), converse(pieces(rng, data))
    # What was answered before the stream broke may be more where it came in pieces; nothing else may differ.
    assert state == cut_state, data
    assert cut.startswith(whole), data
    if not state[0]:
        assert cut == whole, data


@functools.lru_cache(1 << 14)  # every other stream has come before
def at_once(data):
    return converse([data])


def converse(parts):
    """Return a guest's answers, and (whether it broke a rule, was let in, is to go, reads this)."""
    session, answers, broken = ClientSession(Anybody()), bytearray(), False
    try:
        for part in parts:
            if session.over:
                break
            answers += session.feed(part)
    except Malformed:
        broken = True
    assert len(session.filters) <= MAX_FILTERS
    assert all(name.startswith("x/") for name in session.filters)
    assert session.version or not session.filters
    state = (broken, session.version, session.over, frozenset(session.filters))
    return GIVEN_NAME.sub(b"client-N", bytes(answers)), state


def run(cases, seed):
    """Try this many cases of each parser."""
    rng, buffers = random.Random(seed), Buffers()
    for _ in range(cases):
        decoder_case(rng, buffers)
        session_case(rng)
