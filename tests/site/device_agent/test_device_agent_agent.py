"""An agent as it starts and ends: its directories, limits of control groups, words while it starts, and signals."""

from __future__ import annotations

import errno
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref

import pytest
from mesh_nodes import Clock

from device_agent import agent
from device_agent.agent import agent_directories, device_lock, run_agent
from device_agent.background import LOG_S, StartupStatus
from device_agent.config import AgentConfig
from device_agent.machine import core_capacities, free_memory, usable_cores
from hepti_mqtt import __version__
from hepti_mqtt.config.process import StopRequested, StopSignals
from hepti_mqtt.core.errors import BadNameError, ConfigError, NetworkError
from hepti_mqtt.core.ids import Start
from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.transport.url import BrokerUrl


def test_directories_by_site_and_device(tmp_path):
    places = agent_directories(tmp_path, "home", "d1")
    assert places.state == tmp_path / "home" / "d1"
    assert places.state.is_dir()
    assert agent_directories(tmp_path, "home", "d2").state != places.state


def test_directories_without_root_are_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    places = agent_directories(None, "home", "d1")
    assert places.state.is_relative_to(tmp_path / "state")
    assert places.tiles.is_relative_to(tmp_path / "cache")


@pytest.mark.parametrize(("site", "device"), [("home", "../x"), ("a/b", "d1"), ("home", "all"), ("", "d1")])
def test_names_cannot_leave_the_directory(tmp_path, site, device):
    with pytest.raises(BadNameError):
        agent_directories(tmp_path, site, device)
    assert list(tmp_path.iterdir()) == []


def test_state_that_cannot_be_written_goes_to_a_temporary_place(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("a file")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    places = agent_directories(tmp_path, "home", "d1")
    assert places.state.is_relative_to(tmp_path / "temporary")
    assert places.state == agent_directories(tmp_path, "home", "d1").state, "the lock holds for both"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "home"))
    with pytest.raises(ConfigError):
        agent_directories(tmp_path, "home", "d1")


def test_second_agent_of_one_name_is_told_who_holds_the_lock(tmp_path):
    with device_lock(tmp_path), pytest.raises(ConfigError), device_lock(tmp_path):
        pass
    with device_lock(tmp_path):
        pass


def test_a_killed_agent_leaves_no_lock(tmp_path):
    code = (
        "import os, signal; from pathlib import Path; from device_agent.agent import device_lock\n"
        f"with device_lock(Path({str(tmp_path)!r})): os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with device_lock(tmp_path):
        pass


def test_a_full_disk_keeps_nobody_from_the_lock(tmp_path, monkeypatch):
    def full(_handle, _data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with device_lock(tmp_path), pytest.raises(ConfigError), device_lock(tmp_path):
            pass


# -- limits of control groups -----------------------------------------------------------------------------------------

MIB = 1 << 20


@pytest.fixture
def system(tmp_path):
    def write(cgroup, files=()):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(cgroup)
        for name, value in dict(files).items():
            path = tmp_path / "sys/fs/cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")
        return tmp_path

    return write


def test_without_groups_the_machine_counts(system, tmp_path):
    assert free_memory(tmp_path) > 0
    assert free_memory(system("")) > 0


@pytest.mark.parametrize("tightest", ["a", "a/b", "a/b/c"])
def test_of_nested_groups_the_one_with_the_least_left_counts(system, tightest):
    files = {}
    for group in ("a", "a/b", "a/b/c"):
        files[f"{group}/memory.max"] = (150 if group == tightest else 400) * MIB
        files[f"{group}/memory.current"] = 100 * MIB
        files[f"{group}/cpu.max"] = "30000 100000" if group == tightest else "max 100000"
    root = system("0::/a/b/c\n", files)
    assert free_memory(root) == 50 * MIB
    assert usable_cores(root) == 0.3


V1 = "memory/memory"
GROUPS = {
    "version 2": (
        "0::/app\n",
        {
            "app/memory.max": 600 * MIB,
            "app/memory.current": 250 * MIB,
            "app/memory.stat": f"anon 1\ninactive_file {50 * MIB}",
            "app/cpu.max": "40000 100000",
        },
        (400 * MIB, 0.4),
    ),
    "a whole core": (
        "0::/\n",
        {"memory.max": 300 * MIB, "memory.current": 100 * MIB, "cpu.max": "100000 100000"},
        (200 * MIB, 1.0),
    ),
    "version 2 beside version 1": (
        "4:memory:/\n0::/app\n",
        {
            f"{V1}.limit_in_bytes": 500 * MIB,
            f"{V1}.usage_in_bytes": 100 * MIB,
            "unified/app/memory.max": 300 * MIB,
            "unified/app/memory.current": 100 * MIB,
            "unified/app/cpu.max": "20000 100000",
        },
        (200 * MIB, 0.2),
    ),
    "version 1 with the host's path": (
        "9:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n",
        {
            f"{V1}.limit_in_bytes": 500 * MIB,
            f"{V1}.usage_in_bytes": 300 * MIB,
            f"{V1}.stat": f"total_inactive_file {100 * MIB}",
            "cpu,cpuacct/cpu.cfs_quota_us": 40000,
            "cpu,cpuacct/cpu.cfs_period_us": 100000,
        },
        (300 * MIB, 0.4),
    ),
}


@pytest.mark.parametrize(("cgroup", "files", "expected"), GROUPS.values(), ids=GROUPS)
def test_a_group_limits_memory_and_cores(system, cgroup, files, expected):
    root = system(cgroup, files)
    assert (free_memory(root), usable_cores(root)) == expected


def test_cores_that_are_not_alike_are_told_apart_by_their_rating(tmp_path, monkeypatch):
    for core, rating in enumerate((1024, 446, 446)):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}"
        folder.mkdir(parents=True)
        (folder / "cpu_capacity").write_text(f"{rating}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5}, raising=False)
    assert core_capacities(tmp_path) == [446, 1024]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2}, raising=False)
    assert core_capacities(tmp_path) == [446, 446]


# -- what it says while it starts -------------------------------------------------------------------------------------


def starting_of(publish, **how):
    return StartupStatus(publish, Start(1, 7), logging.getLogger("test.starting"), **how)


def status(*doing):
    return Status("starting", 7, *doing, version=__version__, term=1)


def test_what_is_done_is_said_when_it_changes_and_again_by_and_by(monkeypatch):
    monkeypatch.setattr("device_agent.background.REPEAT_S", 0.001)
    said = queue.SimpleQueue()
    with starting_of(said.put) as starting:
        assert said.get(timeout=60.0) == status()
        for doing in (("compiling kernels", 3, 23), ("measuring",)):
            starting.update(*doing)
            for _ in range(3):
                while said.get(timeout=60.0) != status(*doing):
                    continue


def test_the_log_has_a_line_for_each_stage_and_some_of_its_steps(caplog):
    clock = Clock()
    with caplog.at_level(logging.INFO, "test.starting"), starting_of(lambda _: None, clock=clock) as starting:
        for step in range(4):
            starting.update("compiling kernels", step, 23)
            clock.now += LOG_S / 2
        starting.update("measuring")
    assert len(caplog.messages) == 3


def test_a_broker_that_is_gone_stops_nothing():
    def publish(_status):
        raise NetworkError("gone")

    with starting_of(publish) as starting:
        starting.update("measuring")


# -- signals ----------------------------------------------------------------------------------------------------------


def tell_in_a_callback():
    """Send SIGTERM in the callback of a weak reference, where Python drops what is raised."""
    thing = threading.Event()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))
    del thing
    assert reference() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_was_lost_comes_again():
    with StopSignals() as signals:
        signals.raise_if_requested()
        tell_in_a_callback()
        with pytest.raises(StopRequested):
            signals.raise_if_requested()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_was_lost_ends_the_session_thread():
    stops = []
    with StopSignals() as signals:
        tell_in_a_callback()
        signals.on_stop(lambda: stops.append(1))
    assert stops


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_interrupts_before_the_session_thread_runs_and_is_an_event_then(number):
    stops = []
    with StopSignals() as signals, pytest.raises(StopRequested):
        signal.raise_signal(number)
    with StopSignals() as signals:
        signals.on_stop(lambda: stops.append(1))
        signal.raise_signal(number)
    assert stops


def test_an_agent_started_with_nohup_outlives_its_terminal():
    stops = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signals.on_stop(lambda: stops.append(1))
            signal.raise_signal(signal.SIGHUP)
        assert not stops
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def config(tmp_path):
    return AgentConfig(BrokerUrl.parse("mqtt://127.0.0.1:1"), "home", "a", cache_dir=tmp_path)


def test_a_second_signal_does_not_keep_an_agent_from_closing_all(config, monkeypatch):
    closed = []
    for kind in (agent.Network, agent.LoaderThread):

        def close_told_again(part, *how, close=kind.close):
            signal.raise_signal(signal.SIGTERM)
            close(part, *how)
            closed.append(type(part))

        monkeypatch.setattr(kind, "close", close_told_again)
    monkeypatch.setattr(agent, "prepare_kernels", lambda *_: signal.raise_signal(signal.SIGINT))
    run_agent(config)
    assert closed == [agent.Network, agent.LoaderThread]


def test_a_signal_while_an_agent_is_put_together_ends_it_without_a_traceback(config, monkeypatch):
    monkeypatch.setattr(agent, "TileCache", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    run_agent(config)
