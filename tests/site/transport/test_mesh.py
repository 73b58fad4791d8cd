"""Devices exchange tensors directly, one of them stopped; any MQTT client with a token reads along."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from mesh_nodes import HOST, KEY, OTHER, PATIENCE_S, TOKEN, Node, filters, joined, pump, subscribe, topic

from hepti_mqtt.transport.endpoint import STALL_S
from hepti_mqtt.transport.peer import Dropped, Joined, Lost, Refused


@pytest.fixture
def pair(nodes):
    """Two devices that have joined each other."""
    a, b = nodes("a", "b")
    subscribe(a, b)
    subscribe(b, a)
    pump((a, b), lambda: joined(a)() and joined(b)())
    return a, b


def test_messages_of_every_size_arrive_in_order(pair):
    a, b = pair
    sizes = [0, 1, 63, 126, 127, 128, 4000, 4096, 5000, 16_384, 100_000, 3_000_000, 7]
    sent = [bytes([i]) * nbytes for i, nbytes in enumerate(sizes)]
    for data in sent:
        assert a.mesh.publish(topic("a", "b"), data) == 1
    pump(pair, lambda: len(b.messages) == len(sent))
    assert [data for _, _, data in b.messages] == sent
    stats = a.mesh.stats()["b"]
    assert (stats.frames_out, stats.bytes_out, stats.queued_bytes) == (len(sent), sum(sizes), 0)
    stats = b.mesh.stats()["a"]
    assert (stats.frames_in, stats.bytes_in, stats.joined) == (len(sent), sum(sizes), True)


@pytest.mark.skipif(shutil.which("mosquitto_sub") is None, reason="needs mosquitto_sub")
@pytest.mark.parametrize("version", ["311", "5"])
def test_anybody_with_a_token_reads_along(nodes, version):
    (a,) = nodes("a")
    a.mesh.admit("person", "watch", "ticket", ["hepti/v1/home/x/#"])
    words = ["mosquitto_sub", "-h", HOST, "-p", str(a.mesh.port), "-V", version, "-u", "person", "-P", "ticket"]
    words += ["-t", "hepti/v1/home/x/bert/+/a/#", "-C", "2", "-F", "%t %l"]
    reader = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        pump((a,), lambda: a.mesh.publish(topic("a"), np.zeros(1000, np.float32)) == 1)
        a.mesh.publish(topic("a", layer=7), b"header", bytes(100_000))
        said, _ = reader.communicate(timeout=PATIENCE_S)
    finally:
        reader.kill()
        reader.wait()
    assert said.splitlines() == [f"{topic('a')} 4000", f"{topic('a', layer=7)} 100006"]


def test_a_wrong_token_is_refused_until_the_right_one_is_admitted(nodes):
    a, b = nodes("a", "b")
    b.mesh.join("a", KEY, a.place, TOKEN, filters("a", "b"))
    pump((a, b), lambda: b.events_of(Refused))
    assert b.events_of(Refused)[0].key == KEY
    assert "let us in" in b.mesh.stats()["a"].trouble
    assert a.mesh.publish(topic("a"), b"early") == 0
    a.mesh.admit("b", KEY, TOKEN, filters("a", "b"))
    pump((a, b), joined(b))
    assert a.mesh.publish(topic("a"), b"now") == 1
    pump((a, b), lambda: b.messages)
    assert [data for _, _, data in b.messages] == [b"now"]
    assert b.events_of(Lost) == []
    assert b.mesh.stats()["a"].trouble == ""


def test_a_grant_that_ends_closes_the_connection_of_a_peer(pair):
    a, b = pair
    a.mesh.expel("b", KEY)
    assert a.mesh.publish(topic("a"), b"x") == 0
    pump(pair, lambda: b.events_of(Lost))
    pump(pair, lambda: b.events_of(Refused))
    b.mesh.leave("a", KEY)
    subscribe(b, a, OTHER, "other")
    pump(pair, joined(b, 2))
    assert b.events_of(Joined)[-1] == Joined("a", OTHER)
    assert a.events_of(Lost) == [], "the other direction is a connection of its own"


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_of_connections_and_meshes():
    """Descriptors and threads after many plans and restarts are those from before."""
    gc.collect()  # what earlier tests have left
    before, threads = descriptors(), threading.active_count()
    held = None
    with contextlib.closing(Node("a")) as a:
        for number in range(20):
            with contextlib.closing(Node("b")) as b:
                for key in range(3):
                    subscribe(b, a, ("bert", key), f"token {number} {key}")
                pump((a, b), joined(b, 3))
                a.mesh.publish(topic("a"), bytes(10_000))
                pump((a, b), lambda b=b: b.messages)
                for key in range(3):
                    b.mesh.leave("a", ("bert", key))
                    a.mesh.expel("b", ("bert", key))
            held = held or descriptors()
        pump((a,), lambda: descriptors() <= held)  # the first one may have met a socket that was about to close
    assert descriptors() <= before  # more may be collected meanwhile
    assert threading.active_count() == threads


def test_devices_may_have_addresses_of_ipv6(nodes):
    try:
        a, b = nodes("a", "b", host="::1")
    except OSError:
        pytest.skip("no IPv6 on the loopback interface")
    subscribe(b, a)
    pump((a, b), joined(b))
    a.mesh.publish(topic("a"), b"six")
    pump((a, b), lambda: b.messages)


READER = """
import sys
from mesh_nodes import TOKEN, Node, filters
from hepti_mqtt.protocol.messages import Endpoint

node = Node("b")
node.mesh.join("a", 1, Endpoint(sys.argv[1], int(sys.argv[2])), TOKEN, filters("a", "b"))
while True:
    node.mesh.wait(None)
    for told in node.told:
        print(len(told[2]) if isinstance(told, tuple) else type(told).__name__, flush=True)
    node.told.clear()
"""
LIMIT, NBYTES = 8 << 20, 1 << 20


def test_a_stopped_process_costs_its_peers_no_more_than_the_limit(nodes):
    ahead_s = 0.0
    (a,) = nodes("a", limit_bytes=LIMIT, clock=lambda: time.monotonic() + ahead_s)
    a.mesh.admit("b", 1, TOKEN, filters("a", "b"))
    path = os.pathsep.join([str(Path(__file__).parents[2] / "helpers"), *(path for path in sys.path if path)])
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
        assert len(a.events_of(Dropped)) > 50
        assert psutil.Process().memory_info().rss - before < LIMIT + 16 * NBYTES
        assert a.mesh.stats()["b"].queued_bytes <= LIMIT

        def rejected():
            nonlocal ahead_s
            ahead_s += STALL_S + 1  # again and again: the kernel may still take some of it
            return a.mesh.stats()["b"].queued_bytes == 0

        pump((a,), rejected)
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
