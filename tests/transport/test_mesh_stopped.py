"""A process that is stopped: its peers' memory is bounded, it is sent away, and comes back by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from mesh_nodes import PATIENCE_S, Dropped, Node, filters, pump, topic

from hepti_mqtt.transport.endpoint import STALL_S

READER = """
import sys
from mesh_nodes import Joined, Lost, Node, filters
from hepti_mqtt.transport.mesh import Address

node = Node("b")
node.mesh.join("a", 1, Address(sys.argv[1], int(sys.argv[2])), "secret", filters("a", "b"))
while True:
    node.mesh.wait(None)
    for event in node.events:
        print(type(event).__name__, flush=True)
    for _, _, data in node.messages:
        print(len(data), flush=True)
    node.events.clear()
    node.messages.clear()
"""
LIMIT, NBYTES = 8 << 20, 1 << 20


def test_a_stopped_process_costs_its_peers_no_more_than_the_limit():
    ahead_s = 0.0
    a = Node("a", limit_bytes=LIMIT, clock=lambda: time.monotonic() + ahead_s)
    a.mesh.admit("b", 1, "secret", filters("a", "b"))
    path = os.pathsep.join([str(Path(__file__).parent), *(path for path in sys.path if path)])
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, a.host, str(a.mesh.port)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert reader.stdout.readline() == "Joined\n"
        assert a.mesh.publish(topic("a"), b"hello") == 1
        assert reader.stdout.readline() == "5\n"
        reader.send_signal(signal.SIGSTOP)
        payload = bytes(NBYTES)
        before = psutil.Process().memory_info().rss
        for _ in range(100):
            a.mesh.publish(topic("a"), payload)
            a.mesh.wait(0)
        assert len(a.told(Dropped)) > 50
        assert psutil.Process().memory_info().rss - before < LIMIT + 16 * NBYTES
        assert a.mesh.stats()["b"].queued_bytes <= LIMIT

        def rejected():
            nonlocal ahead_s
            ahead_s += STALL_S + 1  # again and again: the kernel may still take some of it
            return not a.mesh._endpoint.busy()

        pump((a,), rejected)
        assert a.mesh.stats()["b"].queued_bytes == 0
        assert a.mesh.publish(topic("a"), payload) == 0
        reader.send_signal(signal.SIGCONT)
        said = [reader.stdout.readline()]
        while said[-1] != "Joined\n":
            assert said[-1], "the reader has ended"
            said.append(reader.stdout.readline())
        assert said[-2:] == ["Lost\n", "Joined\n"]
        assert set(said[:-2]) <= {f"{NBYTES}\n"}, "whole messages only"
        assert a.mesh.publish(topic("a"), b"again") == 1
        assert reader.stdout.readline() == "5\n"
    finally:
        reader.kill()
        reader.wait(PATIENCE_S)
        reader.stdout.close()
        a.mesh.close()
