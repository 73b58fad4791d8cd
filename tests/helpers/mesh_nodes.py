"""Ends of a mesh: nodes that record messages and events, and an endpoint whose bytes the test writes itself."""

from __future__ import annotations

import select
import time

from hepti_mqtt.transport.mesh import Mesh
from hepti_mqtt.transport.peer import Address, Joined
from hepti_mqtt.transport.sockets import listen

HOST = "127.0.0.1"
PATIENCE_S = 20.0  # how long a test waits for what must come; never how long it takes


class Node:
    """A mesh with its messages, as (peer, topic, bytes), and its events."""

    def __init__(self, user, port=0, host=HOST, **options):
        self.user, self.host, self.fingerprint = user, host, ""
        self.messages = []
        self.events = []
        self.mesh = Mesh(host, port, user=user, on_message=self.hear, on_event=self.events.append, **options)

    @property
    def place(self):
        return Address(self.host, self.mesh.port, self.fingerprint)

    def hear(self, peer, topic, payload):
        self.messages.append((peer, topic, bytes(payload)))

    def events_of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def topic(source, target="all", layer=0):
    return f"hepti/v1/home/x/bert/{layer}/{source}/{target}"


def filters(source, target):
    return [f"hepti/v1/home/x/bert/+/{source}/{name}" for name in (target, "all")]


def subscribe(reader, sender, key=("bert", 1), token="secret"):
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


KEY, OTHER = ("bert", 1), ("bert", 2)
IN, GRANTED = b"\x20\x02\0\0", b"\x90\x04\0\x01\0\0"
TOKEN = "secret"


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
        self.place = Address(HOST, self.listener.getsockname()[1])
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
