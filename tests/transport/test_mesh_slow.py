"""Links that are slow but flow, and threads that come late: neither ends a connection, silence does."""

from __future__ import annotations

import socket

import pytest
from mesh_nodes import Lost, joined, pump, topic
from mesh_played import GRANTED, IN, KEY, OTHER, join, up
from mqtt_bytes import publish
from test_mesh_endpoint import Site, stuff

from hepti_mqtt.transport.endpoint import STALL_S
from hepti_mqtt.transport.mesh import Joined
from hepti_mqtt.transport.peer import ANSWER_S
from hepti_mqtt.transport.sockets import unacknowledged

UNACKED_AT = 24  # where TCP_INFO says how many segments are under way
ANSWER = b"\x90\x03\0\x02\0"  # to the second SUBSCRIBE


@pytest.fixture
def site():
    made = Site()
    yield made
    made.close()


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
    (reader,) = site.endpoint._subscribers.values()
    for _ in range(3 * int(STALL_S)):
        take_a_little(client, reader.connection)
        assert site.endpoint._epoll.poll(0) == [], "our kernel has more than enough"
        site.move(1.0)
    assert site.drops == []
    settle(reader.connection)
    for _ in range(int(STALL_S)):
        site.move(1.0)
    assert site.drops == []
    # At least one second more; on a busy machine its kernel may have made room once more after that.
    for _ in range(1 + int(STALL_S)):
        site.move(1.0)
    assert hangs_up(client), "it has taken nothing for as long as it may"


def asked(node, played):
    """Let a second key ask on a connection that stands."""
    up(node, played)
    join(node, played, OTHER, names=["x/own"])
    assert played.sock.recv(4096)


def test_an_answer_may_take_as_long_as_what_was_sent_before_it(node, played, clock):
    asked(node, played)
    for _ in range(4):
        clock.now += ANSWER_S - 1
        played.say(node, publish(topic("a"), b"before"))
    clock.now += ANSWER_S - 1
    played.say(node, ANSWER)
    assert node.events == [Joined("a", KEY), Joined("a", OTHER)]


def test_who_falls_silent_before_it_answers_is_left(node, played, clock):
    asked(node, played)
    clock.now += ANSWER_S - 1
    played.say(node, publish(topic("a"), b"before"))
    clock.now += ANSWER_S
    node.mesh.wait(0)
    assert node.told(Lost) == [Lost("a", "no answer to SUBSCRIBE within 5 s")]


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
    assert node.told(Lost) == []
    assert node.messages == [("a", topic("a"), bytes(100_000))]


def test_what_came_while_the_thread_was_away_is_read_before_anything_is_late(node, played, clock):
    asked(node, played)
    played.sock.sendall(ANSWER)
    clock.now += 2 * ANSWER_S
    node.mesh.wait(0)
    assert node.events == [Joined("a", KEY), Joined("a", OTHER)]


def test_a_device_whose_every_op_takes_long_joins_all_the_same(node, played, clock):
    join(node, played)
    played.sock, _ = played.listener.accept()
    clock.now += 2 * ANSWER_S
    node.mesh.wait(0)
    assert played.sock.recv(4096)
    played.sock.sendall(IN + GRANTED)
    clock.now += 2 * ANSWER_S
    node.mesh.wait(0)
    assert node.events == [Joined("a", KEY)]
