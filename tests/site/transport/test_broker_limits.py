"""Limits of packets, queues and logins, measured at real brokers."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace

import pytest
from broker_kinds import outer_address
from limited_broker import mosquitto_with
from relay import Relay
from site_processes import Voice

from hepti_mqtt.core.errors import NetworkError, PacketLimitError
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.embedded_broker.broker import SETTINGS
from hepti_mqtt.protocol.topics import publish_bytes
from hepti_mqtt.transport.broker_limits import (
    QueueCapacity,
    is_loopback,
    largest_packet,
    open_broker_warning,
    queue_capacity,
    warn_of_limits,
)
from hepti_mqtt.transport.url import BrokerUrl

TOPIC = "hepti/v1/home/dev/pi/probe"
WANTED = 100
LIMIT = 2_000_000


def test_no_packet_at_the_border_costs_a_connection(tmp_path):
    """Mosquitto's own limit since 2.1, and whole packets from a byte below it to five above."""
    with mosquitto_with(tmp_path, f"max_packet_size {LIMIT}") as broker:
        for protocol in (4, 5):
            url = BrokerUrl.parse(broker.url)
            with Voice(url, TOPIC, protocol=protocol) as peer:
                largest = largest_packet(
                    url, client_id="pi", topic=f"{TOPIC}s", wanted_bytes=4_000_000, protocol=protocol
                )
                assert LIMIT * 15 / 16 <= largest <= LIMIT
                for packet_bytes in (largest, *range(LIMIT - 1, LIMIT + 6)):
                    payload = bytes(packet_bytes - publish_bytes(TOPIC, LIMIT, 1) + LIMIT)
                    if packet_bytes > largest:
                        if protocol == 5:
                            with pytest.raises(PacketLimitError):
                                peer.say(TOPIC, payload)
                        continue  # 3.1.1 says nothing of a limit: who sends asks `largest_packet` first
                    peer.say(TOPIC, payload)
                    assert len(peer.next()[1]) == len(payload)
                assert peer.transport.counts().reconnections == 0


def test_what_is_wanted_is_enough(broker):
    url = BrokerUrl.parse(broker.url)
    assert largest_packet(url, client_id="pi", topic=TOPIC, wanted_bytes=3_000_000) == 3_000_000


class Halting(Relay):
    """Brings a client the beginning of what the broker sends, at most 600 kB, as a slow network does for a while."""

    def relay(self, source, target):
        if any(source is near for near, _ in self.pairs):
            super().relay(source, target)
            return
        with contextlib.suppress(OSError):
            for _ in range(60):
                target.sendall(source.recv(10_000))


def test_the_beginning_of_a_large_message_is_enough(broker):
    with contextlib.closing(Halting(BrokerUrl.parse(broker.url).port)) as relay:
        url = BrokerUrl.parse(relay.url)
        assert largest_packet(url, client_id="pi", topic=TOPIC, wanted_bytes=1_000_000) == 1_000_000


def test_without_a_broker_there_is_no_limit_to_find():
    with pytest.raises(NetworkError):
        largest_packet(BrokerUrl("host.invalid", 1), client_id="pi", topic=TOPIC, wanted_bytes=1)


@pytest.mark.parametrize(
    ("lines", "capacity"),
    [
        (["max_queued_messages 10"], QueueCapacity(20, 10)),
        (["max_queued_messages 1", "max_inflight_messages 120"], QueueCapacity(120, 1)),
        ([f"{s.name} {s.value}" for s in SETTINGS if s.name.startswith("max_")], None),
        ([], None),
        (["max_inflight_messages 0"], None),
    ],
    ids=["10", "1 of a large window", "ours", "Mosquitto's own", "no limit"],
)
def test_the_capacity_is_found_exactly(tmp_path, lines, capacity):
    with mosquitto_with(tmp_path, *lines) as broker:
        assert queue_capacity(BrokerUrl.parse(broker.url), client_id="room", topic="t/1", wanted=WANTED) == capacity


@pytest.mark.parametrize(("lines", "count"), [(["max_queued_messages 10"], 1), ([], 0)], ids=["10", "enough"])
def test_a_short_queue_is_logged_at_start(tmp_path, caplog, lines, count):
    with mosquitto_with(tmp_path, *lines) as broker:
        warn_of_limits(BrokerUrl.parse(broker.url), "planner", "t/1", logging.getLogger("test"))
    assert len([record for record in caplog.records if "max_queued_messages" in record.getMessage()]) == count


@pytest.mark.parametrize(
    ("host", "is_it"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("192.0.2.1", False), ("no-such-host.invalid", False)],
)
def test_loopback(host, is_it):
    assert is_loopback(host) is is_it


def test_only_an_open_broker_is_told():
    address = outer_address()
    with start_broker(address=address) as broker:
        url = BrokerUrl.parse(broker.url)
        said = open_broker_warning(url)
        assert said is not None
        assert f"OPEN BROKER: {address}:{broker.port}" in said
        assert "hepti site init" in said
        # A password that nobody asks for closes nothing.
        assert open_broker_warning(replace(url, user="me", password="secret")) == said
    assert open_broker_warning(url) is None, "an absent broker is none"
    with start_broker(address=address, users={"me": "secret"}) as broker:
        assert open_broker_warning(replace(BrokerUrl.parse(broker.url), user="me", password="secret")) is None
    with start_broker() as broker:
        assert open_broker_warning(BrokerUrl.parse(broker.url)) is None
