"""What a quota really gives: by clocks that the test sets, and by a control group of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from device_agent import measure as measuring
from device_agent import measure as module
from device_agent.machine import Allowed
from device_agent.measure import busy, given
from hepti_mqtt.errors import HeptiError, LabError
from hepti_mqtt.kernels import Workers
from hepti_mqtt.lab.cgroups import Group, remove, this_machine

SHORT_S = 0.002


@pytest.fixture
def told(monkeypatch):
    """Make `busy` say a figure; what it was asked is kept."""
    given.cache_clear()
    asked = []

    def say(cores):
        monkeypatch.setattr(module, "busy", lambda *question: asked.append(question) or cores)
        return asked

    yield say
    given.cache_clear()


@pytest.mark.parametrize(
    ("allowed", "threads"),
    [(Allowed(2.0, None), 1), (Allowed(2.0, None), 4), (Allowed(0.5, 0.1), 1), (Allowed(1.0, SHORT_S), 1)],
)
def test_without_a_quota_of_short_periods_nothing_is_tried(told, allowed, threads):
    asked = told(0.1)
    assert given(allowed, threads) == allowed.cores
    assert not asked


@pytest.mark.parametrize(("found", "cores"), [(0.45, 0.45), (0.6, 0.54)])
def test_a_quota_of_short_periods_gives_what_is_found_and_no_more_than_it_says(told, found, cores):
    asked = told(found)
    assert given(Allowed(0.54, SHORT_S), 1) == cores
    assert given(Allowed(0.54, SHORT_S), 1) == cores
    assert asked == [(1, pytest.approx(module.PERIODS * SHORT_S))], "tried once"


def test_a_measurement_that_is_made_again_tries_the_quota_again(told, monkeypatch):
    def disturbed(*_):
        raise ValueError

    asked = told(0.45)
    monkeypatch.setattr(measuring, "_Cold", disturbed)
    given(Allowed(0.54, SHORT_S), 1)
    with pytest.raises(HeptiError):
        measuring.measure(Workers(1), 1 << 30)
    given(Allowed(0.54, SHORT_S), 1)
    assert len(asked) == 2


def test_the_best_window_counts_since_others_take_of_the_machine_too(monkeypatch):
    now = {"wall": 0.0, "cpu": 0.0}
    shares = iter([0.2, 0.45, 0.3])

    def spin(enough):
        share = next(shares)
        while not enough():
            now["wall"] += 0.01
            now["cpu"] += 0.01 * share

    monkeypatch.setattr(module, "_spin", spin)
    assert busy(1, 0.1, lambda: now["wall"], lambda: now["cpu"]) == pytest.approx(0.45, rel=0.02)


def test_several_threads_are_all_kept_busy_and_ended(monkeypatch):
    spun = []
    monkeypatch.setattr(module, "_spin", spun.append)
    busy(3, 0.0)
    assert len(spun) == 2 + module.WINDOWS


def test_of_a_real_control_group_no_more_is_told_than_it_gives():
    """A quota of 1 ms in 1.25: 0.8 of a core by the file, 0.56 by a kernel of 250 ticks a second."""
    group = None
    try:
        group = Group(this_machine(), f"given-{os.getpid()}", "host")
        group.make()
    except (LabError, OSError) as error:
        pytest.skip(f"no control groups to make here: {error}")
    code = (
        "import sys, time; sys.stdin.readline()\n"
        "from device_agent.measure import busy, given\n"
        "from device_agent.machine import Allowed, allowed\n"
        "found = allowed()\n"
        "begin, cpu = time.perf_counter(), time.process_time()\n"
        "told = given(found, 1)\n"
        "mean = (time.process_time() - cpu) / (time.perf_counter() - begin)\n"
        "print(found.cores, told, mean, max(busy(1, 0.0625) for _ in range(5)))"
    )
    try:
        group.set_cpu(0.8)
        _short(group)
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            for entrance in group.entrances:
                entrance.write_text(str(child.pid))
            out, _ = child.communicate("\n", timeout=60)
    finally:
        remove(group.directories, lambda pid: os.kill(pid, signal.SIGKILL))
    nominal, told, mean, most = map(float, out.split())
    assert nominal == pytest.approx(0.8)
    assert mean - 0.05 <= told <= 0.8  # the best window is no worse than all of them together ...
    assert told <= most + 0.1, "... and no better than the best of many more"


def _short(group: Group) -> None:
    """Give the group a quota in periods shorter than a tick."""
    for directory in group.directories:
        if (directory / "cpu.max").exists():
            (directory / "cpu.max").write_text("1000 1250")
        elif (directory / "cpu.cfs_quota_us").exists():
            (directory / "cpu.cfs_quota_us").write_text("-1")
            (directory / "cpu.cfs_period_us").write_text("1250")
            (directory / "cpu.cfs_quota_us").write_text("1000")
