"""Compiling ahead: who does what, who waits for whom, and what happens when a process ends too early."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from hepti_mqtt.kernels import ahead
from hepti_mqtt.kernels.gemm import few
from hepti_mqtt.kernels.machine import jit, turns

compiled_only = pytest.mark.skipif(not jit.JIT, reason="about compiled code")

# Claims a byte of the file in argv[1] and holds it until its stdin is closed.
HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "ab")
fcntl.lockf(file, fcntl.LOCK_EX, 1, int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


@dataclass
class Job:
    """A kernel that is in the cache after so many looks."""

    place: int
    looks: int
    started: list[int] = field(default_factory=list)

    def done(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(ahead, "_LOOK_S", 0.001)


@pytest.fixture
def fill(tmp_path):
    """Fill a cache with jobs; return (what was told, how many processes were started).

    Their standard input is open until they are ended: that of the tests may be nothing at all.
    """

    def run(jobs, code="", most=2):
        told, started = [], []
        held, kept_open = os.pipe()

        def start(directory):
            started.append(directory)
            return [subprocess.Popen([sys.executable, "-S", "-c", code], stdin=held)]

        try:
            with (tmp_path / ahead.LOCKS).open("ab") as locks:
                ahead._fill(tmp_path, locks, jobs, start, lambda *step: told.append(step), most)
        finally:
            os.close(held)
            os.close(kept_open)
        return told, len(started)

    return run


def test_progress_is_told_until_all_is_there(fill):
    told, started = fill([Job(0, 2), Job(1, 4), Job(2, 6)], "import sys; sys.stdin.read()")
    assert told[0] == (0, 3)
    assert told[-1] == (3, 3)
    assert sorted(told) == told
    assert started == 2, "as many as may be"


def test_processes_that_fail_end_it_and_are_not_started_for_ever(fill):
    told, started = fill([Job(0, 10**9)], "raise SystemExit(1)", most=1)
    assert started == 1
    assert told[-1] == (0, 1)


def test_processes_that_keep_nothing_end_it_and_are_not_started_for_ever(fill):
    told, started = fill([Job(0, 10**9), Job(1, 10**9)], "", most=1)
    assert started == 1, "the disk is full, or they compile other sources"
    assert told[-1] == (0, 2)


def test_processes_that_made_way_for_an_agent_that_starts_are_started_again(fill):
    told, started = fill([Job(0, 200)], f"raise SystemExit({ahead.NOT_NOW})", most=1)
    assert started > 1
    assert told[-1] == (1, 1)


@compiled_only
def test_what_is_compiled_for_later_ends_when_an_agent_starts(tmp_path):
    code = (
        "import os; from hepti_mqtt.kernels import ahead; from hepti_mqtt.kernels.machine import jit, turns\n"
        "with turns.starting(jit.cache_directory()): raise SystemExit(ahead.main('behind', 1, os.getppid()))"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True, timeout=300)
    assert done.returncode == ahead.NOT_NOW, done.stderr[-2000:]


def test_what_somebody_else_compiles_is_waited_for_and_taken_over_when_that_one_dies(fill, tmp_path):
    path = tmp_path / ahead.LOCKS
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLDER, str(path), "5"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert fill([Job(5, 20)])[1] == 0, "somebody compiles it"
        with path.open("ab") as locks:
            assert not ahead._claim(locks, 5)
            assert ahead._claim(locks, 4, probe=True)
        holder.kill()
        holder.wait()
        with path.open("ab") as locks:
            assert ahead._claim(locks, 5)
    finally:
        holder.kill()
        holder.communicate()


def test_there_are_no_more_processes_than_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 1)
    with (tmp_path / ahead._CORE.format(0)).open("ab") as lock:
        ahead.fcntl.flock(lock, ahead.fcntl.LOCK_EX)
        assert ahead._start("first", 1, tmp_path) == []


def test_what_is_compiled_for_later_starts_no_process_while_agents_start(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead.subprocess, "Popen", lambda *_, **__: "a process")
    with turns.starting(tmp_path):
        assert ahead._start("behind", 1, tmp_path) == []
        assert ahead._start("first", 1, tmp_path) == ["a process"]
    assert ahead._start("behind", 1, tmp_path) == ["a process"]


@compiled_only
def test_what_waits_is_what_narrow_weights_maps_and_few_plans_need():
    assert {d.py_func.__module__.rpartition(".")[2] for d in jit.later} == {
        *("weights", "int8", "narrow", "stream"),
        *("conv2d", "winograd", "max_pool2d", "average_pool2d", "global_sum"),
        "reordered",
        *(() if few.MOST_ROWS else ("few",)),  # wide vectors need it for nothing
    }
    first, everything = (ahead._jobs(which, 2) for which in ("first", "behind"))
    assert {job.dispatcher for job in everything} - {job.dispatcher for job in first} == jit.later
    assert everything[0].name == "attention_units", "what takes longest is begun first"
    assert set(ahead._LONG) <= {job.name for job in everything}


@compiled_only
def test_after_warm_up_everything_is_in_the_cache_and_no_process_is_started(monkeypatch):
    if jit.cache_directory() is None:
        pytest.skip("a forced instruction set has no cache")
    jit.warm_up()
    monkeypatch.setattr(ahead, "_start", lambda *_: pytest.fail("nothing is missing"))
    told = []
    ahead.fill_cache("all", 1, lambda *step: told.append(step))
    assert told == [(len(jit.registered), len(jit.registered))]
    assert ahead.ready(1)
    assert jit.all_ready()
