"""An endpoint among subscribers that are slow, silent, rude or many, on a clock of the test's own."""

from __future__ import annotations

import contextlib
import select
import socket
import struct

import numpy as np
import pytest
from mesh_nodes import HOST, PATIENCE_S
from mqtt_bytes import connect, plain_parse, publish, subscribe

from hepti_mqtt.transport.endpoint import CONNECT_S, MAX_CLIENTS, STALL_S, Endpoint
from hepti_mqtt.transport.mesh import PeerStats

TOPIC = "x/m/a"
LIMIT = 1 << 20


class Site:
    """An endpoint with a clock that only the test moves, driven on the test's own thread."""

    def __init__(self):
        self.now = 1000.0
        self.drops = []
        self.by_user = {}
        self.endpoint = Endpoint(
            HOST, 0, clock=lambda: self.now, stats_of=self.stats, on_drop=lambda user, n: self.drops.append((user, n))
        )
        self.clients = []
        for user in ("b", "c"):
            self.endpoint.admit(user, 1, "secret", ["x/#"], LIMIT)

    def stats(self, user):
        return self.by_user.setdefault(user, PeerStats())

    def dial(self, data=b"", receive_bytes=None):
        sock = socket.socket()
        self.clients.append(sock)
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(PATIENCE_S)
        sock.connect((HOST, self.endpoint.port))
        sock.sendall(data)
        return sock

    def let_in(self, user="b", client="", receive_bytes=None):
        """Return a client that has come in and subscribed to everything."""
        asked = connect(user, client=client) + subscribe("x/#")
        sock = self.dial(asked, receive_bytes)
        self.answer(sock, 9)
        return sock

    def answer(self, sock, nbytes):
        """Serve until the client has so many bytes, and return them."""
        return self.until(lambda: len(peek(sock, nbytes)) == nbytes) or sock.recv(nbytes)

    def until(self, holds):
        for _ in range(10_000):
            if holds():
                return
            self.endpoint.turn(0.001)
        raise AssertionError("it never happened")

    def move(self, seconds):
        self.now += seconds
        self.endpoint.tick(self.now)

    def close(self):
        for sock in self.clients:
            sock.close()
        self.endpoint.close()


def peek(sock, nbytes):
    sock.setblocking(False)
    try:
        return sock.recv(nbytes, socket.MSG_PEEK)
    except BlockingIOError:
        return b""
    finally:
        sock.settimeout(PATIENCE_S)


def is_closed(sock):
    """Return whether the endpoint has hung up; what it sent before is read."""
    sock.setblocking(False)
    try:
        while sock.recv(1 << 20):
            continue
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True


def stuff(site, nbytes=100_000, user="b"):
    """Publish until something waits for the user in our own queue; return how many messages went."""
    count = 0
    while not site.endpoint.queued_bytes().get(user):
        assert site.endpoint.publish(TOPIC, bytes(nbytes)) >= 1
        count += 1
    return count


@pytest.fixture
def site():
    made = Site()
    yield made
    made.close()


def test_who_does_not_introduce_itself_is_rejected(site):
    silent = site.dial(connect()[:5])
    site.until(site.endpoint.busy)
    site.endpoint.turn(0.1)
    site.move(CONNECT_S - 0.1)
    assert not is_closed(silent)
    site.move(0.2)
    assert is_closed(silent)
    assert not site.endpoint.busy()
    assert site.endpoint.rejected == 1


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
def test_who_breaks_a_rule_is_closed_and_counted(site, said):
    client = site.let_in()
    client.sendall(said)
    site.until(lambda: not site.endpoint.busy())
    assert is_closed(client)
    assert site.endpoint.rejected == 1


def test_who_is_refused_hears_why(site):
    client = site.dial(connect(token="wrong"))
    assert site.answer(client, 4) == b"\x20\x02\0\x04"
    assert is_closed(client)
    assert not site.endpoint.busy()


def test_who_says_goodbye_is_not_counted(site):
    client = site.let_in()
    client.sendall(b"\xe0\0")
    site.until(lambda: not site.endpoint.busy())
    client = site.let_in()
    client.close()
    site.until(lambda: not site.endpoint.busy())
    assert site.endpoint.rejected == 0


def test_a_reset_is_not_an_offence(site):
    client = site.let_in()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    site.until(lambda: not site.endpoint.busy())
    assert site.endpoint.rejected == 0


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


def test_a_reader_that_goes_on_is_not(site):
    client = site.let_in(receive_bytes=65_536)
    stuff(site)
    before = site.endpoint.queued_bytes()["b"]
    site.move(STALL_S - 0.1)
    while site.endpoint.queued_bytes()["b"] == before:
        client.recv(1 << 20)
        site.endpoint.turn(0)
    site.move(STALL_S - 0.1)
    assert not is_closed(client)


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


def test_without_descriptors_who_knocks_waits_for_the_next_tick(site, monkeypatch):
    listener = site.endpoint._listener

    class Full:
        def accept(self):
            raise OSError(24, "Too many open files")

        def __getattr__(self, name):
            return getattr(listener, name)

    monkeypatch.setattr(site.endpoint, "_listener", Full())
    client = site.dial(connect())
    site.until(site.endpoint.busy)
    assert site.endpoint._epoll.poll(0) == [], "it is not asked again and again"
    monkeypatch.setattr(site.endpoint, "_listener", listener)
    site.move(1.0)
    assert site.answer(client, 4) == b"\x20\x02\0\0"


def test_ways_to_readers_are_not_remembered_for_ever(site, monkeypatch):
    monkeypatch.setattr("hepti_mqtt.transport.endpoint.MAX_CACHED", 10)
    client = site.let_in()
    for i in range(25):
        site.endpoint.publish(f"x/{i}", b"")
    assert len(site.endpoint._routes) <= 10
    data = site.answer(client, sum(len(publish(f"x/{i}", b"")) for i in range(25)))
    assert [name for name, _ in plain_parse(data, LIMIT)[0]] == [f"x/{i}" for i in range(25)]


def test_a_payload_that_mqtt_cannot_say_is_refused(site):
    site.let_in()
    with pytest.raises(ValueError, match="more than one MQTT packet"):
        site.endpoint.publish(TOPIC, np.empty(1 << 28, np.uint8))


def test_a_connection_that_broke_is_forgotten_by_who_publishes(site):
    client, other = site.let_in("b"), site.let_in("c")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()  # a reset
    while site.endpoint.publish(TOPIC, b"x") == 2:
        continue
    assert site.endpoint.queued_bytes() == {"c": 0}
    assert peek(other, 1)


def test_an_answer_waits_behind_what_waits_already(site):
    client = site.let_in(receive_bytes=65_536)
    client.sendall(b"\xc0\0")
    count = stuff(site)
    (subscriber,) = site.endpoint._subscribers.values()
    waiting = site.endpoint.queued_bytes()["b"]
    site.endpoint._serve(subscriber, select.EPOLLIN)  # it was readable before anything had to wait
    assert site.endpoint.queued_bytes()["b"] == waiting + 2
    data, wanted = bytearray(), count * len(publish(TOPIC, bytes(100_000))) + 2
    while len(data) < wanted:
        data += client.recv(1 << 20)
        site.endpoint.turn(0)
    assert data.endswith(b"\xd0\0")


def test_who_was_said_to_be_there_may_not_be(site):
    site.endpoint._accept()
    assert not site.endpoint.busy()
    client = site.let_in()
    (subscriber,) = site.endpoint._subscribers.values()
    site.endpoint._serve(subscriber, select.EPOLLIN)
    assert not is_closed(client)


def test_a_socket_that_is_full_already_takes_nothing(site):
    client = site.let_in(receive_bytes=65_536)
    (subscriber,) = site.endpoint._subscribers.values()
    with contextlib.suppress(BlockingIOError):
        while True:
            subscriber.connection.send(publish(TOPIC, bytes(10_000)))
    assert site.endpoint.publish(TOPIC, b"last") == 1
    assert site.endpoint.queued_bytes() == {"b": len(publish(TOPIC, b"last"))}
    data = bytearray()
    while not data.endswith(b"last"):
        data += client.recv(1 << 20)
        site.endpoint.turn(0)


def test_a_mistake_in_serving_one_is_logged_and_the_others_stay(site, monkeypatch, caplog):
    client, other = site.let_in("b"), site.let_in("c")
    monkeypatch.setattr("hepti_mqtt.transport.endpoint.ClientSession.feed", lambda *_: 1 / 0)
    client.sendall(b"\xc0\0")
    site.until(lambda: site.endpoint.publish(TOPIC, b"x") == 1)
    assert is_closed(client)
    assert not is_closed(other)
    assert "a subscriber of this device is disconnected" in caplog.text
