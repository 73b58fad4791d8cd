"""Links that are slow but flow, and threads that come late: neither ends a connection, silence does."""

from __future__ import annotations

import socket

import pytest
from test_mesh_endpoint import Site, is_closed, stuff

from hepti_mqtt.transport.mesh.endpoint import STALL_S
from hepti_mqtt.transport.mesh.lines import unacknowledged

UNACKED_AT = 24  # where TCP_INFO says how many segments are under way


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


def settle(sock):
    """Return once nothing is under way: the reader's kernel has no room."""
    while any(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[UNACKED_AT : UNACKED_AT + 4]):
        continue


def test_a_reader_on_a_slow_link_stays_while_its_kernel_takes_something(site):
    client = site.let_in(receive_bytes=65_536)
    stuff(site)
    (reader,) = site.endpoint._subscribers.values()
    for _ in range(3 * int(STALL_S)):
        take_a_little(client, reader.line)
        assert site.endpoint._epoll.poll(0) == [], "our kernel has more than enough"
        site.move(1.0)
    assert site.drops == []
    settle(reader.line)
    for _ in range(int(STALL_S)):
        site.move(1.0)
    assert site.drops == []
    site.move(1.0)
    assert is_closed(client), "it has taken nothing for as long as it may"
