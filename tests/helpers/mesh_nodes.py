"""Ends of a mesh: nodes, an endpoint with clients, and an endpoint whose bytes the test writes itself."""

from __future__ import annotations

import os
import select
import socket
import time

import psutil
from mqtt_bytes import connect
from mqtt_bytes import subscribe as subscribe_packet
from programs import PATIENCE_S

from hepti_mqtt.protocol import messages
from hepti_mqtt.transport.endpoint import Endpoint
from hepti_mqtt.transport.mesh import Mesh
from hepti_mqtt.transport.peer import Joined, PeerStats
from hepti_mqtt.transport.sockets import listen

HOST = "127.0.0.1"
KEY, OTHER = ("bert", 1), ("bert", 2)
TOKEN = "secret"
IN, GRANTED = b"\x20\x02\0\0", b"\x90\x04\0\x01\0\0"
TOPIC, LIMIT = "x/m/a", 1 << 20


class Node:
    """A mesh with all that it has told: messages as (peer, topic, bytes), and events; hear: takes messages instead."""

    def __init__(self, user, port=0, host=HOST, hear=None, **options):
        self.user, self.host, self.fingerprint, self.told = user, host, "", []
        self.mesh = Mesh(host, port, user=user, on_message=hear or self.hear, on_event=self.told.append, **options)
        self.close = self.mesh.close

    @property
    def place(self):
        return messages.Endpoint(self.host, self.mesh.port, self.fingerprint)

    @property
    def messages(self):
        return self.events_of(tuple)

    @property
    def events(self):
        return [event for event in self.told if not isinstance(event, tuple)]

    def hear(self, peer, topic, payload):
        self.told.append((peer, topic, bytes(payload)))

    def events_of(self, kind):
        return [event for event in self.told if isinstance(event, kind)]


def topic(source, target="all", layer=0):
    return f"hepti/v1/home/x/bert/{layer}/{source}/{target}"


def filters(source, target):
    return [f"hepti/v1/home/x/bert/+/{source}/{name}" for name in (target, "all")]


def subscribe(reader, sender, key=KEY, token=TOKEN):
    """Grant and join at once, as `prepare` does on both."""
    sender.mesh.admit(reader.user, key, token, filters(sender.user, reader.user))
    reader.mesh.join(sender.user, key, sender.place, token, filters(sender.user, reader.user))


def pump(nodes, until):
    """Drive meshes on this thread until something holds."""
    patience = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < patience, [(node.user, node.messages[-3:], node.events[-5:]) for node in nodes]
        for node in nodes:
            node.mesh.wait(0.002)


def joined(reader, count=1):
    return lambda: len(reader.events_of(Joined)) >= count


class Clock:
    """Time that only the test moves."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Played:
    """An endpoint whose bytes the test writes itself."""

    def __init__(self):
        self.listener = listen(HOST, 0)
        self.place = messages.Endpoint(HOST, self.listener.getsockname()[1])
        self.sock = None

    def accept(self, node):
        """Drive the node until it knocks and has introduced itself; return what it said."""
        pump((node,), lambda: readable(self.listener))
        self.hang_up()
        self.sock, _ = self.listener.accept()
        self.sock.settimeout(PATIENCE_S)
        pump((node,), lambda: readable(self.sock))
        return self.sock.recv(4096)

    def say(self, node, data):
        self.sock.sendall(data)
        node.mesh.wait(PATIENCE_S)

    def hang_up(self):
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def close(self):
        self.hang_up()
        self.listener.close()


def readable(sock):
    return bool(select.select([sock], [], [], 0)[0])


def join(node, played, key=KEY, token=TOKEN, names=None):
    node.mesh.join("a", key, played.place, token, names or filters("a", "b"))


def up(node, played):
    join(node, played)
    said = played.accept(node)
    played.say(node, IN + GRANTED)
    assert node.events == [Joined("a", KEY)]
    return said


class Guests:
    """An endpoint with clients, driven on the test's own thread; only the test moves its clock."""

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
        packets = connect(user, client=client) + subscribe_packet("x/#")
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


def far_end(sock):
    """Return a socket for the other end of a connection, which this process has too."""
    ends = psutil.Process().net_connections("tcp4")
    (fd,) = [c.fd for c in ends if (c.laddr, c.raddr) == (sock.getpeername(), sock.getsockname())]
    return socket.socket(fileno=os.dup(fd))
