"""An endpoint whose bytes tests write themselves, and a node that asks it, with time that only tests move."""

from __future__ import annotations

import select

from mesh_nodes import HOST, PATIENCE_S, filters, pump

from hepti_mqtt.transport.peer import Address, Joined
from hepti_mqtt.transport.sockets import listen

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
