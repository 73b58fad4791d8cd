"""Exchanges from agent to agent, at a site of real processes with a real broker: the same bits as over the broker."""

from __future__ import annotations

import ctypes
import os
import socket

import numpy as np
import psutil
import pytest
from site_processes import PATIENCE_S, SITE, client_of, poll, running_site, site_of, wait_online
from together import bound, run_together

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.kernels.jit import JIT
from hepti_mqtt.strategies.plan_programs import device_programs
from hepti_mqtt.transport.sockets import mesh_possible

pytestmark = [pytest.mark.skipif(not mesh_possible(), reason="the mesh needs Linux")]

IDS = list(range(5, 23))
NAMES = ["a", "b", "c"]
TEXT_TOKENS = 20
METHOD = {"strategy": "row", "options": {"variant": "kv"}, "want": "hidden"}
ROW = {**METHOD, "devices": NAMES}
TOLERANCE = 5e-5
_PIDFD_GETFD = 438  # of Linux since 5.6, on every architecture
_libc = ctypes.CDLL(None, use_errno=True)


site = site_of({"tiny": "tiny-bert", "gpt": "tiny-gpt2"}, dict.fromkeys(NAMES, "300MiB"))
hepti = client_of(online=True)


def cut(pid, other):
    """End every connection between two processes; return how many there were. Skips where that is forbidden."""
    ends = {c.laddr for c in psutil.Process(other).net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED}
    connections = [c for c in psutil.Process(pid).net_connections("tcp") if c.raddr in ends]
    for connection in connections:
        process = os.pidfd_open(pid)
        try:
            fd = _libc.syscall(_PIDFD_GETFD, process, connection.fd, 0)
        finally:
            os.close(process)
        if fd < 0:
            pytest.skip(f"no descriptor of another process can be had: {os.strerror(ctypes.get_errno())}")
        with socket.socket(fileno=fd) as sock:
            sock.shutdown(socket.SHUT_RDWR)
    return len(connections)


def heard(hepti, device, sources=()):
    """Return what went between a device and its peers, once it has told of frames from some of them, or from all."""
    heartbeat = next((d["heartbeat"] for d in hepti.devices(wait_s=1.5) if d["device"] == device), None)
    edges = {} if heartbeat is None else heartbeat["edges"]
    some = [edge for name, edge in edges.items() if not sources or name in sources]
    return edges if some and all(edge["frames_in"] for edge in some) else None


def in_one_process(site, plan):
    """Return what the devices' Programs answer without any wire between them."""
    with Checkpoint.open(site.models["tiny"], "tiny") as checkpoint:
        shape, inputs = models.single_sequence(checkpoint.spec, np.array(IDS, np.int32), "hidden")
        parts = device_programs(checkpoint.spec, plan, shape)
        return run_together(bound(parts, checkpoint.tensors()), inputs)


@pytest.mark.parametrize("route", ["mesh", "broker"])
def test_the_bits_do_not_depend_on_the_way(site, hepti, route):
    """Shares follow from what devices measured, so each answer is held against its own plan in one process."""
    answer = hepti.infer("tiny", ids=IDS, **ROW, route=route, timeout_s=PATIENCE_S)
    plans = map(Plan.from_dict, hepti.plan("tiny")["pinned"])
    plan = next(p for p in plans if list(p.version) == list(answer.plan["version"]))
    assert (plan.route, plan.relayed_pairs, set(plan.devices)) == (route, (), set(NAMES))
    assert np.array_equal(answer.hidden, in_one_process(site, plan))
    if route == "mesh":
        for name in NAMES:
            peers = poll(lambda name=name: heard(hepti, name), f"{name} has told what its peers sent")
            assert set(peers) == set(NAMES) - {name}
            assert all(edge["frames_out"] and not edge["dropped"] for edge in peers.values())


def counted(hepti, frames):
    """Return each device's frames to and from peers, and those of compiled code, once all devices have so many."""
    beats = {d["device"]: d["heartbeat"] for d in hepti.devices(wait_s=1.5) if d["device"] in NAMES}
    sums = {
        name: (
            sum(edge["frames_in"] + edge["frames_out"] for edge in beat["edges"].values()),
            beat["counters"]["compiled_frames"],
        )
        for name, beat in beats.items()
    }
    return sums if len(sums) == len(NAMES) and all(count >= frames for count, _ in sums.values()) else None


@pytest.mark.skipif(not JIT, reason="nothing is compiled")
def test_compiled_code_exchanges_most_frames_of_a_text(hepti):
    """The planner's keys tag their headers. Python sends and checks those of the first runs."""

    def answer():
        pins = {"strategy": "decoder", "devices": NAMES, "route": "mesh", "timeout_s": PATIENCE_S}
        return hepti.infer("gpt", ids=IDS[:9], max_new_tokens=TEXT_TOKENS, **pins).result["ids"]

    first = answer()
    before = poll(lambda: counted(hepti, TEXT_TOKENS), "devices have counted the first text")
    assert answer() == first
    least = max(count for count, _ in before.values()) + 4 * TEXT_TOKENS  # two peers, at least once to and from each
    after = poll(lambda: counted(hepti, least), "devices have counted the second text")
    for name in NAMES:
        frames, compiled = (now - then for now, then in zip(after[name], before[name], strict=True))
        assert compiled > frames / 4, name  # on a busy machine Python waits for late ones


def agrees(site, answer):
    return np.allclose(answer.hidden, site.reference("tiny", ids=IDS, want="hidden")[0], atol=TOLERANCE)


def test_connections_that_are_cut_cost_no_answer(site, hepti):
    def ask():
        return hepti.infer("tiny", ids=IDS, **ROW, route="mesh", timeout_s=PATIENCE_S)

    before = ask().plan["version"]
    waiting = [hepti.submit("tiny", ids=IDS, **ROW, route="mesh") for _ in range(20)]
    assert cut(site.running["a"].pid, site.running["b"].pid)
    assert all(agrees(site, future.result(PATIENCE_S)) for future in waiting)
    again = ask()
    assert agrees(site, again)
    assert again.plan["version"] == before, "the connection was back in time"
    poll(lambda: (heard(hepti, "a") or {}).get("b", {}).get("reconnections"), "a has told that it came back to b")


@pytest.mark.nightly
def test_a_device_that_nobody_can_connect_to_is_heard_over_the_broker(tmp_path):
    """Its endpoint is told at an address of documentation (RFC 5737), to which no packet gets."""
    model = make_model("tiny-bert", tmp_path / "model", seed=3)
    for site in running_site(tmp_path, {"tiny": model}, dict.fromkeys(["a", "b"], "300MiB")):
        site.agent("walled", "300MiB", "--mesh-host", "192.0.2.1")
        with Hepti.connect(site.url, site=SITE, client_id="tester") as hepti:
            wait_online(hepti, ["a", "b", "walled"])
            pins = {**METHOD, "devices": ["a", "b", "walled"], "route": "mesh"}
            answer = hepti.infer("tiny", ids=IDS, **pins, timeout_s=PATIENCE_S)
            plan = Plan.from_dict(hepti.plan("tiny")["pinned"][0])
            edges = poll(lambda hepti=hepti: heard(hepti, "b", {"a"}), "b has told of frames from a")
        assert agrees(site, answer)
        assert set(plan.relayed_pairs) == {(d, "walled") for d in "ab"} | {("walled", d) for d in "ab"}
        assert edges["a"]["joined"]
        assert not edges["walled"]["joined"]
        assert edges["walled"]["trouble"]
