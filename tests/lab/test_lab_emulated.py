"""Emulated hosts in real namespaces and groups; skipped where there is no root."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from emulation import PATIENCE_S, left_of, needs_emulation, small, unique

from hepti_mqtt.errors import LabError
from hepti_mqtt.lab import leftovers, network
from hepti_mqtt.lab.changes import parse_change
from hepti_mqtt.lab.emulated import EmulatedHost
from hepti_mqtt.lab.lab import Lab
from hepti_mqtt.lab.spec import load

LABS = Path(__file__).resolve().parents[2] / "configs" / "lab"
pytestmark = needs_emulation

SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        peer, _ = server.accept()
        with peer:
            size = 0
            while data := peer.recv(1 << 16):
                size += len(data)
            peer.sendall(str(size).encode())
"""
SEND = """
import socket, sys, time
address, port, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with socket.create_connection((address, port), timeout=float(sys.argv[4])) as peer:
    begin = time.monotonic()
    peer.sendall(bytes(size))
    peer.shutdown(socket.SHUT_WR)
    print(peer.recv(100).decode(), time.monotonic() - begin)
"""
WAIT = "import sys; print('here', flush=True); sys.stdin.read()"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    name = unique()
    with Lab(small(name), tmp_path / "lab") as made:
        yield made
    assert left_of(name) == []


def emulated(lab: Lab, name: str) -> EmulatedHost:
    host = lab.host(name)
    assert isinstance(host, EmulatedHost)
    return host


def change(lab: Lab, do: str, host: str, **amount: float) -> None:
    lab.apply(parse_change({"at": 0, "do": do, "host": host, **amount}, lab.spec))


def until(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"{what} did not come true"
        time.sleep(0.01)


def _quota(lab: Lab, name: str) -> float | None:
    """Return the quota in force as a share of one core, from the kernel's own files."""
    (record,) = [r for r in leftovers.records() if r.lab == lab.spec.name]
    group = Path(record.hosts[name]["group"])
    if (group / "cpu.max").exists():
        amount, period = (group / "cpu.max").read_text().split()
    else:
        amount, period = ((group / f"cpu.cfs_{what}_us").read_text().strip() for what in ("quota", "period"))
    return None if amount in ("max", "-1") else int(amount) / int(period)


def _goodput(lab: Lab, name: str) -> float:
    """Return the Mbit/s that TCP gets of a host's uplink, from the kernel's own words."""
    said = network.command(["tc", "-n", network.namespace(lab.spec.name, name), "qdisc", "show", "dev", "eth0"])
    rate, unit = re.findall(r"rate (\d+)([KM])bit", said)[0]
    return int(rate) * {"K": 1e-3, "M": 1.0}[unit] * 1448 / 1514


def _sleepers(lab: Lab) -> list[int]:
    (record,) = [r for r in leftovers.records() if r.lab == lab.spec.name]
    return [pid for pid, _ in record.sleepers]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_hosts_reach_each_other_and_nothing_else(lab: Lab) -> None:
    seen = lab.hub.run(["ip", "-br", "-4", "address"])
    assert {line.split()[0].split("@")[0] for line in seen.out.splitlines()} == {"lo", "eth0"}
    assert "default" not in lab.hub.run(["ip", "route"]).out
    server = lab.hosts["a"].talk("serve", [sys.executable, "-c", SERVE, lab.hosts["a"].address])
    port = server.receive(PATIENCE_S)
    done = lab.hosts["b"].run([sys.executable, "-c", SEND, lab.hosts["a"].address, port, "1000", "20"])
    assert done.out.split()[0] == "1000", done.err
    with socket.socket() as here:
        here.settimeout(0.2)
        assert here.connect_ex((lab.hosts["a"].address, int(port))) != 0


@pytest.mark.parametrize("sender", ["a", "b"])
def test_a_slow_link_takes_at_least_the_time_of_its_bytes_both_ways(lab: Lab, sender: str) -> None:
    change(lab, "rate", "a", mbit=4)  # uplink when a sends, downlink when b does
    receiver = "b" if sender == "a" else "a"
    server = lab.hosts[receiver].talk("serve", [sys.executable, "-c", SERVE, lab.hosts[receiver].address])
    size = 500_000
    words = [sys.executable, "-c", SEND, lab.hosts[receiver].address, server.receive(PATIENCE_S), str(size), "20"]
    received, took = lab.hosts[sender].run(words).out.split()
    assert int(received) == size
    assert float(took) > 0.9 * (size - 18_000) * 8 / 4e6


def test_links_of_a_dilated_lab_are_slower_also_after_a_change(tmp_path: Path) -> None:
    with Lab(replace(small(unique()), rate_mbit=100.0, dilation=4.0), tmp_path / "lab") as lab:
        assert _goodput(lab, "a") == pytest.approx(25, rel=0.01)
        change(lab, "rate", "a", mbit=48)
        assert _goodput(lab, "a") == pytest.approx(12, rel=0.01)


def test_hosts_are_held_to_an_instruction_set_and_keep_its_code_apart(tmp_path: Path) -> None:
    show = "import os; from hepti_mqtt.kernels import isa, jit; from hepti_mqtt.kernels import registry; "
    show += "print(isa(), jit.cache_directory().parent.name, os.environ['ATEN_CPU_CAPABILITY'])"
    with Lab(replace(small(unique()), isa="avx2"), tmp_path / "lab") as lab:
        host = lab.hosts["a"]
        assert host.run([host.python, "-c", show]).out.split() == ["avx2", "avx2", "avx2"]


def test_a_cut_host_is_unreachable_until_it_is_mended(lab: Lab) -> None:
    server = lab.hosts["a"].talk("serve", [sys.executable, "-c", SERVE, lab.hosts["a"].address])
    words = [sys.executable, "-c", SEND, lab.hosts["a"].address, server.receive(PATIENCE_S), "10"]
    change(lab, "cut", "a")
    assert lab.hosts["b"].run([*words, "0.3"]).code != 0
    change(lab, "mend", "a")
    assert lab.hosts["b"].run([*words, "30"]).out.startswith("10 ")


def test_only_hosts_of_one_quota_share_what_they_measure(lab: Lab) -> None:
    a, b = emulated(lab, "a"), emulated(lab, "b")
    a.set_cpu(0.3)
    b.set_cpu(0.3)
    assert a.shared == b.shared
    b.set_cpu(0.5)
    assert a.shared != b.shared
    a.set_cpu(None)
    assert a.shared not in {b.shared, str(Path(b.shared).parent)}


def test_processes_start_inside_and_are_stopped_continued_killed_and_restarted(lab: Lab) -> None:
    host = emulated(lab, "a")
    talking = host.talk("wait", [sys.executable, "-c", WAIT])
    assert talking.receive(PATIENCE_S) == "here"
    (pid,) = host.processes()
    group = Path(f"/proc/{pid}/cgroup").read_text()
    assert f"/hepti/{lab.spec.name}/a\n" in group
    change(lab, "stop", "a")
    until(lambda: state(pid) == "T", "stopped")
    change(lab, "cont", "a")
    until(lambda: state(pid) == "S", "going on")
    change(lab, "kill", "a")
    assert talking.poll() == -signal.SIGKILL
    assert host.processes() == []
    change(lab, "restart", "a")
    assert talking.poll() is None
    assert talking.receive(PATIENCE_S) == "here"
    assert len(host.processes()) == 1
    assert host.processes() != [pid]


def test_killing_a_host_ends_the_grandchildren_that_left_its_sessions(lab: Lab) -> None:
    host = emulated(lab, "a")
    inner = "import time; print('grandchild', flush=True); time.sleep(1000)"
    fork = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True)"
    talking = host.talk("fork", [sys.executable, "-c", fork])
    assert talking.receive(PATIENCE_S) == "grandchild"
    talking.wait(PATIENCE_S)
    (pid,) = host.processes()
    host.kill()
    until(lambda: not Path(f"/proc/{pid}").exists() or state(pid) == "Z", "ended")


def test_a_quota_is_in_force_only_while_throttled_and_can_be_changed(lab: Lab) -> None:
    host = emulated(lab, "a")
    host.throttle(True)  # no target, no quota: nothing to put in force
    assert _quota(lab, "a") is None
    host.set_cpu(0.5)
    assert _quota(lab, "a") == pytest.approx(0.5)
    host.throttle(False)
    assert _quota(lab, "a") is None
    host.throttle(True)
    change(lab, "cpu", "a", share=0.25)
    assert _quota(lab, "a") == pytest.approx(0.125)
    change(lab, "cpu", "a", share=1.0)  # of what it had, not of what it has
    assert _quota(lab, "a") == pytest.approx(0.5)
    lab.hub.throttle(True)
    assert _quota(lab, "hub") == pytest.approx(0.3, rel=1e-3)


def test_real_time_sleepers_run_while_a_quota_is_in_force(tmp_path: Path) -> None:
    name = unique()
    with Lab(small(name), tmp_path) as lab:
        assert _sleepers(lab) == []
        lab.hub.throttle(True)
        sleepers = _sleepers(lab)
        assert len(sleepers) == len(os.sched_getaffinity(0))
        assert [os.sched_getscheduler(pid) for pid in sleepers] == [os.SCHED_FIFO] * len(sleepers)
        assert sorted(c for pid in sleepers for c in os.sched_getaffinity(pid)) == sorted(os.sched_getaffinity(0))
        lab.hub.throttle(True)
        assert _sleepers(lab) == sleepers
    assert [pid for pid in sleepers if leftovers.started(pid) is not None] == []
    assert left_of(name) == []


@pytest.mark.parametrize("file", ["four-pi4", "mixed-four", "primary-secondary", "eight"])
def test_the_labs_of_the_project_can_be_made(file: str, tmp_path: Path) -> None:
    name = unique()
    spec = replace(load(LABS / f"{file}.yaml"), name=name)
    with Lab(spec, tmp_path) as lab:
        last = lab.hosts[spec.hosts[-1].name]
        server = lab.hub.talk("serve", [sys.executable, "-c", SERVE, lab.hub.address])
        words = [sys.executable, "-c", SEND, lab.hub.address, server.receive(PATIENCE_S), "10", "20"]
        assert last.run(words).out.startswith("10 ")
    assert left_of(name) == []


def test_a_target_is_not_throttled_before_it_is_calibrated(tmp_path: Path) -> None:
    name = unique()
    with Lab(small(name, hosts={"a": {"gflops": 10}}), tmp_path) as lab:
        with pytest.raises(LabError, match="calibrate"):
            lab.hosts["a"].throttle(True)
        with pytest.raises(LabError, match="calibrate"):
            change(lab, "cpu", "a", share=0.5)
        emulated(lab, "a").set_cpu(0.2)
        change(lab, "cpu", "a", gflops=5)
        assert _quota(lab, "a") == pytest.approx(0.1)
    assert left_of(name) == []


def test_a_memory_limit_kills_the_one_that_eats(tmp_path: Path) -> None:
    name = unique()
    with Lab(small(name, hosts={"a": {"memory": "64MiB"}, "b": {}}), tmp_path) as lab:
        eat = [sys.executable, "-c", "x = bytearray(200 << 20); x[::4096] = b'x' * (len(x) // 4096); print('full')"]
        assert lab.hosts["a"].run(eat).code == -signal.SIGKILL
        assert lab.hosts["b"].run(eat).out == "full\n"
        assert lab.hosts["a"].run([sys.executable, "-c", "print(1)"]).out == "1\n"
    assert left_of(name) == []


def test_two_labs_at_once_and_none_of_the_same_name(lab: Lab, tmp_path: Path) -> None:
    other = unique()
    with Lab(small(other), tmp_path / "other") as second:
        assert second.hub.address == lab.hub.address
        with pytest.raises(LabError, match=f"lab {other} is in use by process {os.getpid()}"):
            Lab(small(other), tmp_path / "third").open()
        assert second.hub.run(["true"]).code == 0
    assert left_of(other) == []
    assert lab.hub.run(["true"]).code == 0


def test_an_error_while_it_is_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        raise LabError("no more groups")

    monkeypatch.setattr("hepti_mqtt.lab.cgroups.Group.make", fail)
    name = unique()
    with pytest.raises(LabError, match="no more groups"):
        Lab(small(name), tmp_path).open()
    assert left_of(name) == []


def test_a_command_that_is_not_there_says_so(lab: Lab) -> None:
    done = lab.hub.run(["no-such-program"])
    assert done.code != 0
    assert "no-such-program" in done.err
