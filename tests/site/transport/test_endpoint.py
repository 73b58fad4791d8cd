"""An endpoint: who may read what, what clients are answered, and clients that are slow, silent, rude or many."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct

import pytest
from mesh_nodes import LIMIT, PATIENCE_S, TOPIC, is_closed, peek, stuff
from mqtt_bytes import Anybody, connect, packet, plain_parse, publish, subscribe, unsubscribe

from hepti_mqtt.transport.codec import Malformed, covers, is_filter, matches, text
from hepti_mqtt.transport.endpoint import (
    CONNECT_S,
    MAX_ASKED,
    MAX_AT_ONCE,
    MAX_CLIENTS,
    MAX_FILTERS,
    STALL_S,
    Acl,
    ClientSession,
)

IN_311, IN_5 = b"\x20\x02\0\0", b"\x20\x10\0\0\x0d\x24\0\x25\0\x29\0\x2a\0\x27\0\0\x40\0"
PING, PONG = b"\xc0\0", b"\xd0\0"


def opened(packets):
    """Return a new session and its answer to packets."""
    session = ClientSession(Anybody())
    return session, session.feed(packets)


def joined(version=4):
    """Return a session whose client has come in."""
    return opened(connect(version=version))[0]


@pytest.mark.parametrize(("version", "answer"), [(4, IN_311), (5, IN_5)])
def test_a_known_user_comes_in(version, answer):
    session, said = opened(connect(version=version))
    assert said == answer
    assert (session.version, session.user, session.client, session.over) == (version, "b", "b", False)


def test_a_client_of_version_5_without_a_name_is_given_one():
    first, second = (opened(connect(client="", version=5))[1].split(b"client-")[1] for _ in range(2))
    assert first != second


def test_a_client_of_version_3_without_a_name_must_want_a_clean_session():
    assert opened(connect(client=""))[1] == IN_311
    session, answer = opened(connect(client="", flags=0xC0))
    assert (answer, session.over) == (b"\x20\x02\0\x02", True)


REFUSED = [
    (connect(token="wrong"), b"\x20\x02\0\x04"),
    (connect(user="c"), b"\x20\x02\0\x04"),
    (connect(user=None, token=None), b"\x20\x02\0\x04"),
    (connect(token="wrong", version=5), b"\x20\x03\0\x86\0"),
    (connect(version=5, properties=b"\x15" + text("SCRAM")), b"\x20\x03\0\x8c\0"),
    (connect(version=3), b"\x20\x02\0\x01"),
    (connect(version=6), b"\x20\x02\0\x01"),
    (packet(0x10, text("MQIsdp") + b"\x03\x02\0\0" + text("b")), b"\x20\x02\0\x01"),
]


@pytest.mark.parametrize(("packets", "answer"), REFUSED)
def test_who_is_refused_is_told_and_closed(packets, answer):
    session, said = opened(packets + subscribe("x/#"))
    assert (said, session.over, session.version, session.filters) == (answer, True, 0, set())


def test_wills_keep_alive_and_limits_of_a_client_are_understood():
    session, answer = opened(connect(flags=0xC6, keepalive_s=10, will=text("w") + text("gone")))
    assert (answer, session.silence_s) == (IN_311, 15.0)
    own = b"\x27\0\0\x10\0" + b"\x11\0\0\0\x09" + b"\x26" + text("a") + text("b")
    will = b"\x05\x18\0\0\0\x01" + text("w") + text("gone")
    session, answer = opened(connect(version=5, flags=0xC6, properties=own, will=will))
    assert (answer, session.largest_bytes, session.silence_s) == (IN_5, 4096, float("inf"))


@pytest.mark.parametrize(
    ("version", "own", "granted", "left"),
    [
        (4, {}, b"\x90\x05\x01\x02\0\x80\x80", b"\xb0\x02\0\x01"),
        (5, {"options": 0x2E, "properties": b"\x0b\x07"}, b"\x90\x06\x01\x02\0\0\x87\x8f", b"\xb0\x05\0\x01\0\0\x11"),
    ],
)
def test_subscriptions_are_granted_one_by_one(version, own, granted, left):
    session = joined(version)
    packets = subscribe("x/a", "y/a", "x/a#", packet_id=258, version=version, **own)
    assert session.feed(packets) == granted
    assert session.filters == {"x/a"}
    assert session.feed(unsubscribe("x/a", "x/b", version=version)) == left
    assert session.filters == set()


@pytest.mark.parametrize(("version", "code"), [(4, 0x80), (5, 0x97)])
def test_filters_are_limited(version, code):
    session = joined(version)
    for i in range(MAX_FILTERS):
        assert session.feed(subscribe(f"x/{i}", version=version))[-1] == 0
    assert session.feed(subscribe("x/more", "x/0", version=version))[-2:] == bytes((code, 0))
    assert len(session.filters) == MAX_FILTERS


MALFORMED = {
    "not MQTT": b"GET / HTTP/1.1\r\n\r\n",
    "first SUBSCRIBE": subscribe("x/a"),
    "first PINGREQ": PING,
    "another protocol": packet(0x10, text("MQTX") + b"\x04\x02\0\0" + text("b")),
    "CONNECT with flags": b"\x11" + connect()[1:],
    "reserved flag": connect(flags=0xC3),
    "will QoS 3": connect(flags=0xDE, will=text("w") + text("gone")),
    "will QoS without a will": connect(flags=0xCA),
    "password without a user": connect(user=None, flags=0x42),
    "ends in the user": connect()[:1] + b"\x0f" + connect()[2:17],
    "more than it says": packet(0x10, connect()[2:] + b"x"),
    "user not UTF-8": packet(0x10, text("MQTT") + b"\x04\xc2\0\0" + text("b") + text(b"\xff") + text("t")),
    "user with NUL": connect(user="b\0"),
    "unknown property": connect(version=5, properties=b"\x7f\0"),
    "property too long": connect(version=5, properties=b"\x26\0\x01a\0\xff"),
    "no packet at all": connect(version=5, properties=b"\x27\0\0\0\0"),
    "5-byte length": b"\x10\x80\x80\x80\x80\x01",
    "huge length": b"\x10\xff\xff\xff\x7f",
    "just over the limit": b"\x10\x81\x80\x01",
    "5-byte list of properties": packet(0x10, text("MQTT") + b"\x05\xc2\0\0\x80\x80\x80\x80\x01"),
    "a list of properties that ends in one": packet(0x10, text("MQTT") + b"\x05\xc2\0\0\x02\x27\0\0\0\0\0"),
}


@pytest.mark.parametrize("packets", MALFORMED.values(), ids=MALFORMED)
def test_who_breaks_the_rules_before_coming_in_is_closed(packets):
    session = ClientSession(Anybody())
    with pytest.raises(Malformed):
        session.feed(packets)
    assert not session.version


NOT_FOR_ENDPOINTS = {
    "PUBLISH": b"\x30\x05\0\x03x/ah",
    "PUBLISH QoS 1": b"\x32\x07\0\x03x/a\0\x01h",
    "second CONNECT": connect(),
    "CONNACK": IN_311,
    "PUBACK": b"\x40\x02\0\x01",
    "PUBREL": b"\x62\x02\0\x01",
    "SUBACK": b"\x90\x03\0\x01\0",
    "PINGRESP": PONG,
    "AUTH": b"\xf0\0",
    "reserved": b"\0\0",
    "SUBSCRIBE with flags 0": b"\x80" + subscribe("x/a")[1:],
    "SUBSCRIBE to nothing": packet(0x82, b"\0\x01"),
    "SUBSCRIBE with id 0": subscribe("x/a", packet_id=0),
    "SUBSCRIBE at QoS 3": subscribe("x/a", options=3),
    "SUBSCRIBE with options of 5": subscribe("x/a", options=4),
    "UNSUBSCRIBE from nothing": packet(0xA2, b"\0\x01"),
    "PINGREQ with a body": b"\xc0\x01a",
    "too many at once": PING * (MAX_AT_ONCE + 1),
    "too long": b"\x82\x81\x80\x01",
}


@pytest.mark.parametrize("packets", NOT_FOR_ENDPOINTS.values(), ids=NOT_FOR_ENDPOINTS)
def test_what_a_subscriber_may_not_send(packets):
    session = joined()
    with pytest.raises(Malformed):
        session.feed(packets)


def test_what_is_kept_of_an_unfinished_packet_is_bounded():
    session = joined()
    session.feed(b"\x82\xff\x7f")
    for _ in range(8):
        session.feed(bytes(2047))
    with pytest.raises(Malformed):  # 16,383 bytes of it are zeros: no packet id
        session.feed(bytes(2047))
    assert MAX_ASKED == 16_384


def test_who_does_not_introduce_itself_is_rejected(site):
    silent = site.dial(connect()[:5])
    site.until(site.endpoint.busy)
    site.endpoint.turn(0.1)
    site.move(CONNECT_S - 0.1)
    assert not is_closed(silent)
    site.move(0.2)
    assert is_closed(silent)
    assert not site.endpoint.busy()


def test_who_has_come_in_may_be_silent_for_ever(site):
    client = site.let_in()
    site.move(1e6)
    assert site.endpoint.publish(TOPIC, b"still") == 1
    assert site.answer(client, 14) == publish(TOPIC, b"still")


def test_who_promised_to_be_heard_of_is_rejected_when_silent(site):
    client = site.dial(connect(keepalive_s=10) + subscribe("x/#"))
    site.answer(client, 9)
    site.move(14.0)
    client.sendall(b"\xc0\0")
    assert site.answer(client, 2) == b"\xd0\0"
    site.move(14.0)
    assert not is_closed(client)
    site.move(2.0)
    assert is_closed(client)


@pytest.mark.parametrize("said", [publish(TOPIC, b"hi"), b"\x82\xff\xff\xff\x7f", connect("b"), b"\x82\x02\0\0"])
def test_who_breaks_a_rule_is_closed(site, said):
    client = site.let_in()
    client.sendall(said)
    site.until(lambda: not site.endpoint.busy())
    assert is_closed(client)


def test_a_client_that_comes_again_takes_the_place_of_its_old_connection(site):
    old, other = site.let_in("b", client="one"), site.let_in("c", client="one")
    anonymous = [site.let_in("b"), site.let_in("b")]
    new = site.let_in("b", client="one")
    assert is_closed(old)
    assert site.endpoint.publish(TOPIC, b"x") == 4
    assert not any(is_closed(sock) for sock in (new, other, *anonymous))


def test_what_did_not_fit_arrives_whole_and_in_order(site):
    client = site.let_in(receive_bytes=65_536)
    count = 0
    while site.endpoint.queued_bytes()["b"] < LIMIT // 2:
        assert site.endpoint.publish(TOPIC, count.to_bytes(4, "big"), bytes(70_000)) == 1
        count += 1
    data, wanted = bytearray(), count * len(publish(TOPIC, bytes(70_004)))
    while len(data) < wanted:
        data += client.recv(1 << 20)
        site.endpoint.turn(0)
    heard, broken = plain_parse(bytes(data), LIMIT)
    assert not broken
    assert [int.from_bytes(payload[:4], "big") for _, payload in heard] == list(range(count))
    assert site.endpoint.queued_bytes() == {"b": 0}
    assert (site.by_user["b"].frames_out, site.by_user["b"].dropped, site.drops) == (count, 0, [])


def test_a_full_queue_drops_whole_messages_and_nobody_else_is_touched(site):
    slow, quick = site.let_in("b", receive_bytes=65_536), site.let_in("c")
    sent, received, nbytes = 0, 0, 100_000
    while len(site.drops) < 5:
        site.endpoint.publish(TOPIC, bytes(nbytes))
        sent += 1
        while peek(quick, 1):
            received += len(quick.recv(1 << 20))
        assert site.endpoint.queued_bytes()["b"] <= LIMIT
    while received < sent * len(publish(TOPIC, bytes(nbytes))):
        site.endpoint.turn(0)
        received += len(quick.recv(1 << 20))
    assert site.drops == [("b", len(publish(TOPIC, bytes(nbytes))))] * 5
    assert (site.by_user["b"].dropped, site.by_user["b"].frames_out) == (5, sent - 5)
    assert (site.by_user["c"].dropped, site.by_user["c"].frames_out) == (0, sent)
    heard = bytearray()
    while len(heard) < (sent - 5) * len(publish(TOPIC, bytes(nbytes))):
        heard += slow.recv(1 << 20)
        site.endpoint.turn(0)
    assert plain_parse(bytes(heard), LIMIT) == ([(TOPIC, bytes(nbytes))] * (sent - 5), False)


def test_a_reader_that_stops_is_rejected(site):
    client = site.let_in(receive_bytes=65_536)
    stuff(site)
    waiting = site.endpoint.queued_bytes()["b"]
    site.move(STALL_S - 0.1)
    assert site.drops == []
    site.move(0.2)
    assert site.drops == [("b", waiting)]
    assert site.by_user["b"].dropped == 1
    assert not site.endpoint.busy()
    assert site.endpoint.publish(TOPIC, b"x") == 0
    assert is_closed(client)


def test_who_asks_without_reading_answers_is_not_heard_meanwhile(site):
    """Its questions stay in its own socket; our memory does not grow with them."""
    client = site.let_in(receive_bytes=4096)
    client.setblocking(False)
    pings = b"\xc0\0" * 64
    stuff(site)
    waiting = site.endpoint.queued_bytes()["b"]
    taken = 0
    with contextlib.suppress(BlockingIOError):
        while taken < 32 << 20:
            taken += client.send(pings)
            site.endpoint.turn(0)
    assert taken < 32 << 20
    assert site.endpoint.queued_bytes()["b"] <= waiting
    site.move(STALL_S + 0.1)
    assert not site.endpoint.busy()


def test_silent_connections_keep_nobody_out(site):
    silent = []
    for _ in range(MAX_CLIENTS + 3):
        silent.append(site.dial())
        site.endpoint.turn(PATIENCE_S)
    client = site.let_in()
    assert [is_closed(sock) for sock in silent] == [True] * 4 + [False] * (MAX_CLIENTS - 1)
    assert site.endpoint.publish(TOPIC, b"x") == 1
    assert peek(client, 1)


def test_no_more_than_so_many_come_in(site):
    clients = [site.let_in() for _ in range(MAX_CLIENTS)]
    late = site.dial(connect())
    site.until(lambda: is_closed(late))
    assert site.endpoint.publish(TOPIC, b"x") == len(clients)
    clients[0].close()
    site.until(lambda: site.endpoint.publish(TOPIC, b"x") == len(clients) - 1)
    site.let_in()


def test_what_a_client_says_it_cannot_take_is_not_sent(site):
    client = site.dial(connect(version=5, properties=b"\x27\0\0\0\x40") + subscribe("x/#", version=5))
    site.answer(client, 24)
    assert site.endpoint.publish(TOPIC, bytes(100)) == 0
    assert site.endpoint.publish(TOPIC, bytes(10)) == 1
    assert site.answer(client, 20) == publish(TOPIC, bytes(10), version=5)
    assert site.by_user["b"].dropped == 1


def test_a_grant_that_ends_takes_its_filters_with_it(site):
    site.endpoint.admit("b", 2, "other", ["y/#"], LIMIT)
    client = site.dial(connect() + subscribe("x/+/a", "y/#"))
    site.answer(client, 10)
    assert [site.endpoint.publish(name, b"1") for name in (TOPIC, "y/a", "z")] == [1, 1, 0]
    site.endpoint.expel("b", 1)
    assert [site.endpoint.publish(name, b"2") for name in (TOPIC, "y/a")] == [0, 1]
    site.endpoint.admit("b", 3, "third", ["x/#"], LIMIT)
    assert site.endpoint.publish(TOPIC, b"3") == 1, "it goes on reading what it subscribed to and may read again"
    site.endpoint.expel("b", 3)
    site.endpoint.expel("b", 2)
    assert is_closed(client)
    assert not site.endpoint.busy()


def test_a_mistake_in_serving_one_is_logged_and_the_others_stay(site, monkeypatch, caplog):
    client, other = site.let_in("b"), site.let_in("c")
    monkeypatch.setattr("hepti_mqtt.transport.endpoint.ClientSession.feed", lambda *_: 1 / 0)
    client.sendall(b"\xc0\0")
    site.until(lambda: site.endpoint.publish(TOPIC, b"x") == 1)
    assert is_closed(client)
    assert not is_closed(other)
    assert "a subscriber of this device is disconnected" in caplog.text


def test_what_covers_is_never_more_than_what_matches():
    """Over all small filters: where one covers another, it takes in every topic that the other takes in."""
    levels = ["a", "b", "+", "#", "$s"]
    patterns = [p for n in (1, 2, 3) for p in map("/".join, itertools.product(levels, repeat=n)) if is_filter(p)]
    topics = ["/".join(t) for n in (1, 2, 3, 4) for t in itertools.product(["a", "b", "$s"], repeat=n)]
    taken = {p: frozenset(t for t in topics if matches(p, t)) for p in patterns}
    covered = 0
    for allowed, wanted in itertools.product(patterns, repeat=2):
        if covers(allowed, wanted):
            covered += 1
            assert taken[wanted] <= taken[allowed], (allowed, wanted)
        if allowed == wanted:
            assert covers(allowed, wanted)
    assert covered > 500


@pytest.mark.parametrize("last", [b"\xe0\0", b"", None], ids=["DISCONNECT", "closes", "reset"])
def test_who_leaves_is_forgotten(site, last):
    client = site.let_in()
    if last:
        client.sendall(last)
    else:
        if last is None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    site.until(lambda: not site.endpoint.busy())


def test_a_token_and_its_filters_hold_as_long_as_their_grant():
    grants = Acl()
    assert not grants.knows("", b"")
    grants.admit("", "anybody", "", ["x/#"], 10)
    grants.admit("b", 1, "one", ["x/m/+"], 10)
    grants.admit("b", 2, "two", ["x/n/+"], 20)
    tokens = [(u, t) for u in ("b", "c", "") for t in (b"one", b"two", b"") if grants.knows(u, t)]
    assert tokens == [("b", b"one"), ("b", b"two"), ("", b"")]
    names = [(u, f) for u in ("b", "c") for f in ("x/m/+", "x/n/5", "x/#") if grants.allows(u, f)]
    assert names == [("b", "x/m/+"), ("b", "x/n/5")]
    assert grants.limit_bytes("b") == 20
    grants.expel("b", 2)
    grants.admit("b", 1, "other", ["x/m/+"], 10)
    assert not any(grants.knows("b", token) for token in (b"one", b"two"))
    assert not grants.allows("b", "x/n/+")
    assert grants.holds("b")
    for _ in range(2):
        grants.expel("b", 1)
    assert not grants.holds("b")
    assert not grants.knows("b", b"other")
    assert grants.limit_bytes("b") == 0
