"""Requests and their answers, without a broker: what becomes of answers that nobody hears, or that find no room."""

from __future__ import annotations

import json
import logging
from functools import partial
from types import SimpleNamespace

import pytest

from hepti_mqtt.errors import NetworkError, PacketLimitError
from hepti_mqtt.service import channel as module
from hepti_mqtt.service.channel import UNHEARD, UNHEARD_BYTES, Post
from hepti_mqtt.service.decoder import Asked, Decoder
from hepti_mqtt.service.handler import Desk, Reply
from hepti_mqtt.transport import BrokerUrl, Delivery, Receipt

TOPIC = "hepti/v1/home/infer/m/req/me"


class Answers:
    """A connection that answers go out on; room: for how many more. limit: of bytes, that the broker takes."""

    def __init__(self):
        self.room, self.limit, self.sent = 10_000, 10_000_000_000, []

    def publish(self, topic, payload, qos, taken=None):
        if len(payload) > self.limit:
            raise PacketLimitError("it is too large")
        if not self.room:
            raise NetworkError("it is full")
        self.room -= 1
        self.sent.append((topic, payload, taken))

    def taken(self, heard):
        """The broker has all that was sent; return the payloads."""
        sent, self.sent = self.sent, []
        for _, _, taken in sent:
            if taken is not None:
                taken(heard)
        return [payload for _, payload, _ in sent]


class Site:
    """The post of a planner that is not connected, and what it does. settled: packet ids of acknowledged requests."""

    def __init__(self, place, monkeypatch):
        self.answers, self.asked, self.settled = Answers(), [], []
        url, log = BrokerUrl.parse("mqtt://127.0.0.1:1"), logging.getLogger("hepti.planner")
        decoder, nothing = Decoder("home"), lambda _state: None
        self.post = Post(url, "p", place, self.answers, None, decoder, self.asked.append, nothing, log)
        self.counters = decoder.counters
        monkeypatch.setattr(self.post._requests, "acknowledge", lambda receipt: self.settled.append(receipt.packet))

    def answer(self, packet, payload=b"{}"):
        """Answer a request that the broker keeps."""
        asked = Asked("m", "me", b"{}", Delivery(TOPIC, b"{}", Receipt(1, packet), repeated=False))
        self.post.reply(asked, Reply("res", payload, f"q{packet}"))


@pytest.fixture
def site(tmp_path, monkeypatch):
    made = Site(tmp_path / "requests", monkeypatch)
    monkeypatch.setattr(made.post, "_look_s", float("inf"))
    yield made
    made.post.close()


@pytest.fixture
def clock(monkeypatch):
    """The time, as the post has it; it stands still until a test moves it."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def test_a_request_that_the_broker_retains_is_acknowledged_and_not_computed(site, caplog):
    """It would be computed again at every start and reconnection."""
    other = f"{TOPIC}2"
    for packet, topic in enumerate((TOPIC, TOPIC, other)):
        site.post.delivered(Delivery(topic, b"{}", Receipt(1, packet), repeated=False, retained=True))
    assert (site.asked, site.settled) == ([], [0, 1, 2])
    assert site.counters["retained"] == 3
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, "once of each topic"
    assert f"mosquitto_pub -r -n -t {TOPIC}" in said[0]
    assert f"mosquitto_pub -r -n -t {other}" in said[1]
    site.post.delivered(Delivery(TOPIC, b"{}", Receipt(1, 3), repeated=False))
    assert len(site.asked) == 1
    assert site.settled == [0, 1, 2]


def test_retained_requests_do_not_fill_the_log(site, caplog):
    for n in range(module.RETAINED + 10):
        site.post.delivered(Delivery(f"{TOPIC}{n}", b"{}", None, repeated=False, retained=True))
    assert len(caplog.records) == module.RETAINED
    assert not site.asked


def test_an_answer_that_nobody_hears_goes_out_again_for_a_while(site, clock):
    site.answer(1)
    until = clock.now + module.UNHEARD_S
    while clock.now <= until:
        assert site.answers.taken(heard=False) == [b"{}"]
        assert not site.settled
        clock.now += module.AGAIN_S
        site.post.again(clock.now)
    site.answers.taken(heard=False)
    assert site.settled == [1]


def test_requests_of_a_client_that_does_not_listen_do_not_fill_the_broker(site, clock):
    for packet in range(UNHEARD):
        site.answer(packet)
    site.answers.taken(heard=False)
    assert not site.settled, "as when a broker has been killed, and all readers are on their way back"
    for packet in range(UNHEARD, UNHEARD + 100):
        site.answer(packet)
    site.answers.taken(heard=False)
    assert site.settled == list(range(UNHEARD, UNHEARD + 100))
    clock.now += module.AGAIN_S
    site.post.again(clock.now)
    site.answers.taken(heard=True)
    assert sorted(site.settled) == list(range(UNHEARD + 100)), "one that is heard makes room"
    del site.settled[:]
    site.answer(1000)
    site.answers.taken(heard=False)
    assert not site.settled


def test_answers_that_nobody_hears_fill_no_memory(site, clock):
    for packet in range(3):
        site.answer(packet, b"{%d" % packet + b" " * (UNHEARD_BYTES // 2))
    site.answers.taken(heard=False)
    assert site.settled == [1, 2]
    clock.now += module.AGAIN_S
    site.post.again(clock.now)
    site.answers.taken(heard=True)
    site.answer(3, b" " * (2 * UNHEARD_BYTES))
    site.answers.taken(heard=False)
    assert site.settled == [1, 2, 0], "one waits, however large"


def test_an_answer_that_finds_no_room_goes_out_when_there_is_some(site, clock, caplog):
    site.answers.room = 1
    for packet in range(4):
        site.answer(packet, b"%d" % packet)
    assert site.answers.taken(heard=True) == [b"0"]
    clock.now += module.AGAIN_S
    site.post.again(clock.now)
    assert site.counters["unpublished"] == 4, "who finds no room is the last that is tried"
    site.answers.room = 10
    while len(site.settled) < 4:
        clock.now += module.AGAIN_S
        site.post.again(clock.now)
        site.answers.taken(heard=True)
    assert sorted(site.settled) == [0, 1, 2, 3]
    assert "it is full" in caplog.text
    assert len(caplog.records) == 3, "the 1st, the 2nd and the 4th"


def test_an_answer_that_had_to_wait_for_room_waits_as_long_for_a_reader(site, clock):
    site.answers.room = 0
    site.answer(1)
    clock.now += 2 * module.UNHEARD_S
    site.answers.room = 10
    site.post.again(clock.now)
    assert site.answers.taken(heard=False) == [b"{}"]
    assert not site.settled


@pytest.mark.parametrize("limit", [1000, 10])
def test_an_answer_that_the_broker_does_not_take_becomes_an_error_or_ends(site, limit):
    site.post._desk = SimpleNamespace(too_large=partial(Desk.too_large, None))
    site.answers.limit = limit
    site.answer(1, b'{"id": "q1"}' + b" " * 2000)
    said = [json.loads(payload)["error"]["code"] for payload in site.answers.taken(heard=True)]
    assert said == (["packet_limit"] if limit > 100 else [])
    assert site.settled == [1], "or it would come again for ever"


def test_a_part_that_finds_no_room_is_not_kept(site, clock):
    site.answers.room = 0
    site.post._send(Reply("res", b"{}", "q1"))
    site.answers.room = 10
    clock.now += module.AGAIN_S
    site.post.again(clock.now)
    assert not site.answers.sent, "the answer has all of them"


def test_what_is_answered_after_the_end_is_not_kept(site, clock):
    site.post.close()
    site.answers.room = 0
    site.answer(1)
    site.answers.room = 10
    clock.now += module.AGAIN_S
    site.post.again(clock.now)
    assert not site.answers.sent
