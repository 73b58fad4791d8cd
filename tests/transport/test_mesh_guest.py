"""What an endpoint answers to its subscribers, and what it closes the connection for."""

from __future__ import annotations

import pytest
from mqtt_bytes import Anybody, connect, packet, subscribe, unsubscribe

from hepti_mqtt.transport.codec import Malformed, text
from hepti_mqtt.transport.endpoint import MAX_ASKED, MAX_AT_ONCE, MAX_FILTERS, ClientSession

IN_311, IN_5 = b"\x20\x02\0\0", b"\x20\x10\0\0\x0d\x24\0\x25\0\x29\0\x2a\0\x27\0\0\x40\0"
PING, PONG, BYE = b"\xc0\0", b"\xd0\0", b"\xe0\0"


def session(version=4):
    """Return a guest that is in."""
    made = ClientSession(Anybody())
    made.feed(connect(version=version))
    return made


@pytest.mark.parametrize(("version", "answer"), [(4, IN_311), (5, IN_5)])
def test_a_known_user_comes_in(version, answer):
    made = ClientSession(Anybody())
    assert made.feed(connect(version=version)) == answer
    assert (made.version, made.user, made.client, made.over) == (version, "b", "b", False)


def test_a_client_of_version_5_without_a_name_is_given_one():
    first, second = ClientSession(Anybody()), ClientSession(Anybody())
    names = [made.feed(connect(client="", version=5)).split(b"client-")[1] for made in (first, second)]
    assert names[0] != names[1]


def test_a_client_of_version_3_without_a_name_must_want_a_clean_session():
    assert ClientSession(Anybody()).feed(connect(client="")) == IN_311
    made = ClientSession(Anybody())
    assert made.feed(connect(client="", flags=0xC0)) == b"\x20\x02\0\x02"
    assert made.over


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


@pytest.mark.parametrize(("asked", "answer"), REFUSED)
def test_who_is_refused_is_told_and_closed(asked, answer):
    made = ClientSession(Anybody())
    assert made.feed(asked + subscribe("x/#")) == answer
    assert (made.over, made.version, made.filters) == (True, 0, set())


def test_wills_keep_alive_and_limits_of_a_client_are_understood():
    made = ClientSession(Anybody())
    assert made.feed(connect(flags=0xC6, keepalive_s=10, will=text("w") + text("gone"))) == IN_311
    assert made.silence_s == 15.0
    made = ClientSession(Anybody())
    own = b"\x27\0\0\x10\0" + b"\x11\0\0\0\x09" + b"\x26" + text("a") + text("b")
    will = b"\x05\x18\0\0\0\x01" + text("w") + text("gone")
    assert made.feed(connect(version=5, flags=0xC6, properties=own, will=will)) == IN_5
    assert (made.largest_bytes, made.silence_s) == (4096, float("inf"))


def test_subscriptions_are_granted_one_by_one():
    made = session()
    assert made.feed(subscribe("x/a", "y/a", "x/a#", packet_id=258)) == b"\x90\x05\x01\x02\0\x80\x80"
    assert made.filters == {"x/a"}
    assert made.feed(unsubscribe("x/a", "x/b")) == b"\xb0\x02\0\x01"
    assert made.filters == set()


def test_version_5_says_why():
    made = session(5)
    asked = subscribe("x/a", "y/a", "x/a#", options=0x2E, version=5, properties=b"\x0b\x07")
    assert made.feed(asked) == b"\x90\x06\0\x01\0\0\x87\x8f"
    assert made.feed(unsubscribe("x/a", "x/b", version=5)) == b"\xb0\x05\0\x01\0\0\x11"


@pytest.mark.parametrize(("version", "code"), [(4, 0x80), (5, 0x97)])
def test_filters_are_limited(version, code):
    made = session(version)
    for i in range(MAX_FILTERS):
        assert made.feed(subscribe(f"x/{i}", version=version))[-1] == 0
    assert made.feed(subscribe("x/more", "x/0", version=version))[-2:] == bytes((code, 0))
    assert len(made.filters) == MAX_FILTERS


def test_ping_and_farewell():
    made = session()
    assert made.feed(PING + PING) == PONG + PONG
    assert made.feed(BYE + PING) == b""
    assert made.over


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


@pytest.mark.parametrize("asked", MALFORMED.values(), ids=MALFORMED)
def test_who_breaks_the_rules_before_coming_in_is_closed(asked):
    made = ClientSession(Anybody())
    with pytest.raises(Malformed):
        made.feed(asked)
    assert not made.version


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


@pytest.mark.parametrize("asked", NOT_FOR_ENDPOINTS.values(), ids=NOT_FOR_ENDPOINTS)
def test_what_a_subscriber_may_not_send(asked):
    made = session()
    with pytest.raises(Malformed):
        made.feed(asked)


@pytest.mark.parametrize("options", [0x03, 0x30, 0x40])
def test_options_of_version_5(options):
    with pytest.raises(Malformed):
        session(5).feed(subscribe("x/a", options=options, version=5))


@pytest.mark.parametrize("version", [4, 5])
def test_every_split_gives_the_same_answers(version):
    asked = connect(version=version, keepalive_s=3) + subscribe("x/a", "y", version=version) + PING
    asked += unsubscribe("x/a", version=version) + BYE
    whole = ClientSession(Anybody()).feed(asked)
    for at in range(len(asked) + 1):
        made = ClientSession(Anybody())
        assert made.feed(asked[:at]) + made.feed(asked[at:]) == whole
        assert made.over
    made = ClientSession(Anybody())
    assert b"".join(made.feed(asked[i : i + 1]) for i in range(len(asked))) == whole


def test_what_is_kept_of_an_unfinished_packet_is_bounded():
    made = session()
    made.feed(b"\x82\xff\x7f")
    for _ in range(8):
        made.feed(bytes(2047))
    with pytest.raises(Malformed):  # 16,383 bytes of it are zeros: no packet id
        made.feed(bytes(2047))
    assert MAX_ASKED == 16_384
