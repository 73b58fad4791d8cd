"""A subscription that restores itself, over slow links too, and endpoints that say what they should not."""

from __future__ import annotations

import select
import socket
import threading

import pytest
from mesh_nodes import (
    GRANTED,
    HOST,
    IN,
    KEY,
    OTHER,
    PATIENCE_S,
    TOKEN,
    far_end,
    filters,
    join,
    joined,
    pump,
    readable,
    stuff,
    subscribe,
    topic,
    up,
)
from mqtt_bytes import publish

from hepti_mqtt.protocol.messages import Endpoint
from hepti_mqtt.transport.endpoint import STALL_S
from hepti_mqtt.transport.peer import ANSWER_S, BACKOFF_S, Joined, Lost, Refused
from hepti_mqtt.transport.sockets import unacknowledged

MALFORMED = {
    "second CONNACK": IN,
    "DISCONNECT": b"\xe0\0",
    "packet above the limit": b"\x30\xff\xff\xff\x7f",
    "topic with a wildcard": publish("x/+", b""),
}


@pytest.mark.parametrize("said", MALFORMED.values(), ids=MALFORMED)
def test_an_endpoint_that_breaks_the_rules_is_left_and_asked_again(node, played, clock, said):
    up(node, played)
    played.say(node, said)
    assert [type(event) for event in node.events] == [Joined, Lost]
    assert node.events[1].reason == node.mesh.stats()["a"].trouble != ""
    assert played.sock.recv(1) == b""
    clock.now += BACKOFF_S[0]
    played.accept(node)
    played.say(node, IN + GRANTED)
    assert node.events[2:] == [Joined("a", KEY)]
    assert node.mesh.stats()["a"].reconnections == 1


@pytest.mark.parametrize(
    "said", [GRANTED, publish(topic("a"), b""), b"\x30\x80\x80\x80\x80\x01", b"HTTP/1.1 400" + bytes(99)]
)
def test_what_is_no_endpoint_is_left(node, played, said):
    join(node, played)
    played.accept(node)
    played.say(node, said)
    assert node.events == []
    assert node.messages == []
    assert node.mesh.stats()["a"].trouble


def test_who_does_not_answer_is_asked_again_later_and_later(node, played, clock):
    join(node, played)
    waits = []
    for _ in range(9):
        played.accept(node)
        node.mesh.wait(0)
        clock.now += ANSWER_S
        node.mesh.wait(0)
        start = clock.now
        while not readable(played.listener):
            clock.now += 0.01
            node.mesh.wait(0)
        waits.append(clock.now - start)
    assert BACKOFF_S[0] / 2 <= waits[0] <= BACKOFF_S[0] + 0.02
    assert BACKOFF_S[1] / 2 <= waits[-1] <= BACKOFF_S[1] + 0.02
    assert sum(waits) > 4 * BACKOFF_S[1] / 2
    assert "no answer from 127.0.0.1" in node.mesh.stats()["a"].trouble
    assert node.events == []


def test_a_refused_filter_is_asked_for_again_on_the_same_connection(node, played, clock):
    join(node, played)
    played.accept(node)
    played.say(node, IN + b"\x90\x04\0\x01\0\x80")
    reason = "it does not let us read hepti/v1/home/x/bert/+/a/all"
    assert node.events == [Refused("a", KEY, reason)]
    for again, code in ((2, 0x80), (3, 0)):
        clock.now += 2 * BACKOFF_S[0]
        node.mesh.wait(0)
        said = played.sock.recv(4096)
        assert said[0] == 0x82
        assert said[2 + (said[1] > 127) :][:2] == bytes((0, again))
        played.say(node, b"\x90\x04" + bytes((0, again, 0, code)))
    assert node.events == [Refused("a", KEY, reason), Joined("a", KEY)]
    assert node.mesh.stats()["a"].trouble == ""


def test_every_token_has_its_turn(node, played, clock):
    join(node, played, KEY, "first")
    join(node, played, OTHER, "second")
    order = []
    for _ in range(3):
        said = played.accept(node)
        order.append(b"first" if b"first" in said else b"second" if b"second" in said else b"")
        played.say(node, b"\x20\x02\0\x04")
        clock.now += BACKOFF_S[1]
    assert order == [b"second", b"first", b"second"]
    assert {event.key for event in node.events_of(Refused)} == {KEY, OTHER}


def test_a_payload_is_timed_while_it_is_waited_for(node, played):
    up(node, played)
    sent, cut = publish(topic("a"), bytes(200_000)), 100_000
    played.sock.sendall(sent[:cut])
    while unacknowledged(played.sock):
        node.mesh.wait(0.01)
    node.mesh.wait(0.05)
    before, later = node.mesh.stats()["a"], threading.Timer(0.05, played.sock.sendall, [sent[cut:]])
    later.start()
    while not node.messages:
        node.mesh.wait(1.0)
    later.join()
    after = node.mesh.stats()["a"]
    assert after.timed_bytes - before.timed_bytes == len(sent) - cut
    assert after.timed_us - before.timed_us > 10_000


def test_a_key_that_leaves_gives_back_only_what_nobody_else_reads(node, played):
    up(node, played)
    join(node, played, OTHER, TOKEN, ["hepti/v1/home/x/bert/+/a/b", "x/own"])
    played.sock.recv(4096)
    played.say(node, b"\x90\x04\0\x02\0\0")
    node.mesh.leave("a", OTHER)
    assert played.sock.recv(4096) == b"\xa2\x09\0\x03\0\x05x/own"
    played.say(node, b"\xb0\x02\0\x03" + publish("x/own", b"too late") + publish(topic("a"), b"still"))
    assert node.messages == [("a", topic("a"), b"still")]
    node.mesh.leave("a", KEY)
    assert played.sock.recv(4096) == b"\xe0\0"
    assert played.sock.recv(4096) == b""
    node.mesh.leave("a", KEY)
    assert node.events_of(Lost) == []


def test_a_peer_that_listens_elsewhere_is_followed(nodes):
    (b,) = nodes("b")
    first, second = nodes("a", "a")
    subscribe(b, first)
    pump((b, first), joined(b))
    subscribe(b, second)
    pump((b, first, second), joined(b, 2))
    assert [event.reason for event in b.events_of(Lost)] == ["it moved to another address"]
    assert second.mesh.publish(topic("a"), b"here") == 1
    pump((b,), lambda: b.messages)


def test_a_half_received_frame_is_dropped(node, played, clock):
    up(node, played)
    whole = publish(topic("a"), bytes(100_000))
    played.say(node, publish(topic("a"), b"whole") + whole[:50_000])
    played.hang_up()
    pump((node,), lambda: node.events_of(Lost))
    assert node.messages == [("a", topic("a"), b"whole")]
    clock.now += BACKOFF_S[0]
    played.accept(node)
    played.say(node, IN + b"\x90\x04\0\x02\0\0" + publish(topic("a"), b"new"))
    assert node.messages[1:] == [("a", topic("a"), b"new")]


def test_what_came_before_a_loss_is_told_before_it(node, played):
    join(node, played)
    played.accept(node)
    played.say(node, IN + GRANTED + publish(topic("a"), b"last") + b"\xe0\0")
    assert [type(told) for told in node.told] == [Joined, tuple, Lost]


def test_a_peer_that_is_not_there_is_tried_until_it_is(nodes):
    (b,) = nodes("b")
    with socket.create_server((HOST, 0)) as reserved:
        port = reserved.getsockname()[1]
    b.mesh.join("a", KEY, Endpoint(HOST, port), TOKEN, filters("a", "b"))
    pump((b,), lambda: b.mesh.stats()["a"].trouble)
    assert "refused" in b.mesh.stats()["a"].trouble
    assert b.events == []
    (a,) = nodes("a", port=port)
    a.mesh.admit("b", KEY, TOKEN, filters("a", "b"))
    pump((a, b), joined(b))
    a.close()
    pump((b,), lambda: b.events_of(Lost))


def test_a_mistake_in_what_hears_does_not_lose_what_came_after(nodes, played, clock):
    heard = []

    def hear(_peer, _topic, payload):
        heard.append(bytes(payload))
        assert len(heard) > 1, "the mistake"

    (node,) = nodes("b", clock=clock, hear=hear)
    up(node, played)
    with pytest.raises(AssertionError):
        played.say(node, publish(topic("a"), b"1") + publish(topic("a"), b"2"))
    node.mesh.wait(PATIENCE_S)
    assert heard == [b"1", b"2"]


UNACKED_AT = 24  # where TCP_INFO says how many segments are under way
ANSWER = b"\x90\x03\0\x02\0"  # to the second SUBSCRIBE


def take_a_little(client, line):
    """Receive until the other side's kernel knows that something was taken."""
    before = unacknowledged(line)
    while unacknowledged(line) >= before:
        client.recv(10_000)


def hangs_up(sock):
    """Return whether the other side ends the connection, behind what it has sent before."""
    sock.settimeout(10.0)
    try:
        while sock.recv(1 << 20):
            continue
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def settle(sock):
    """Return once nothing is under way: the reader's kernel has no room."""
    while any(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[UNACKED_AT : UNACKED_AT + 4]):
        continue


def test_a_reader_on_a_slow_link_stays_while_its_kernel_takes_something(site):
    client = site.let_in(receive_bytes=65_536)
    stuff(site)
    with far_end(client) as ours:
        for _ in range(3 * int(STALL_S)):
            take_a_little(client, ours)
            assert not select.select([], [ours], [], 0)[1], "our kernel has more than enough"
            site.move(1.0)
        assert site.drops == []
        settle(ours)
        for _ in range(int(STALL_S)):
            site.move(1.0)
        assert site.drops == []
        # At least one second more; on a busy machine its kernel may have made room once more after that.
        for _ in range(1 + int(STALL_S)):
            site.move(1.0)
    assert hangs_up(client), "it has taken nothing for as long as it may"


def questions_of(node, played):
    """Let a second key ask on a connection that stands."""
    up(node, played)
    join(node, played, OTHER, names=["x/own"])
    assert played.sock.recv(4096)


def test_who_falls_silent_before_it_answers_is_left(node, played, clock):
    questions_of(node, played)
    clock.now += ANSWER_S - 1
    played.say(node, publish(topic("a"), b"before"))
    clock.now += ANSWER_S
    node.mesh.wait(0)
    assert node.events_of(Lost) == [Lost("a", "no answer to SUBSCRIBE within 5 s")]


def test_an_answer_may_lie_behind_a_payload_of_which_too_little_comes_to_wake_us(node, played, clock):
    up(node, played)
    played.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    whole = publish(topic("a"), bytes(100_000))
    played.say(node, whole[:10_000])
    join(node, played, OTHER, names=["x/own"])
    assert played.sock.recv(4096)
    for start in range(10_000, 90_000, 10_000):
        played.sock.sendall(whole[start : start + 10_000])
        clock.now += ANSWER_S
        node.mesh.wait(0)
    played.sock.sendall(whole[90_000:] + ANSWER)
    pump((node,), joined(node, 2))
    assert node.events_of(Lost) == []
    assert node.messages == [("a", topic("a"), bytes(100_000))]


def test_what_came_while_the_thread_was_away_is_read_before_anything_is_late(node, played, clock):
    questions_of(node, played)
    played.sock.sendall(ANSWER)
    clock.now += 2 * ANSWER_S
    node.mesh.wait(0)
    assert node.events == [Joined("a", KEY), Joined("a", OTHER)]
