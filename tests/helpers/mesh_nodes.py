"""Devices of a mesh for tests: each has a Mesh and records its messages and events."""

from __future__ import annotations

import time

from hepti_mqtt.transport.mesh import Mesh
from hepti_mqtt.transport.peer import Address, Joined

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
