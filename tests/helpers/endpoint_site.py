"""An endpoint with clients for tests, driven on the test's own thread, with time that only tests move."""

from __future__ import annotations

import socket

from mesh_nodes import HOST, PATIENCE_S
from mqtt_bytes import connect, subscribe

from hepti_mqtt.transport.endpoint import Endpoint
from hepti_mqtt.transport.peer import PeerStats

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
        packets = connect(user, client=client) + subscribe("x/#")
        sock = self.dial(packets, receive_bytes)
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
