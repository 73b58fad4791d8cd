"""Shares of a core in short slices: which hosts share a group, and that the processes of a host follow it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hepti_mqtt.lab import cgroups, slices
from hepti_mqtt.lab.cgroups import Group
from hepti_mqtt.lab.slices import MOST_SHARE, PERIOD_US, Slices


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slices:
    """Files where the kernel would have groups: it takes everything."""
    (tmp_path / "cpu.rt_runtime_us").write_text("950000\n")
    made = Path.mkdir

    def mkdir(self: Path, *args: object, **kwargs: object) -> None:
        made(self, exist_ok=True)
        for name, value in (("cpu.rt_runtime_us", "0"), ("cpu.rt_period_us", "1000000")):
            if not (self / name).exists():
                (self / name).write_text(value)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(slices.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    return Slices(tmp_path / "hepti" / "lab", 4, [0, 1])


def runtime(directory: Path) -> int:
    return int((directory / "cpu.rt_runtime_us").read_text())


def test_hosts_of_the_same_share_are_in_one_group_each_on_another_core(lab: Slices) -> None:
    places = [lab.place(name, 0.31) for name in ("a", "b", "c", "d")]
    assert [p and p.core for p in places] == [0, 1, 0, 1]
    groups = [p.group for p in places if p]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert {runtime(group) for group in groups} == {round(0.31 * PERIOD_US)}


def test_a_host_that_changes_takes_nothing_with_it_from_those_that_stay(lab: Slices) -> None:
    first = [lab.place(name, 0.3) for name in ("a", "b")]
    changed = lab.place("a", 0.1)
    assert changed
    assert first[1]
    assert changed.group != first[1].group
    assert (runtime(changed.group), runtime(first[1].group)) == (100, 300)
    back = lab.place("a", 0.3)
    assert back
    assert (back.group, back.core) == (first[1].group, 0)


def test_a_large_share_is_a_quota(lab: Slices) -> None:
    assert lab.place("a", MOST_SHARE + 0.01) is None
    assert lab.place("a", MOST_SHARE) is not None


def test_without_real_time_groups_there_are_no_slices(tmp_path: Path) -> None:
    none = Slices(tmp_path / "hepti" / "lab", 2, [0])
    assert not none.possible
    assert none.place("a", 0.3) is None


@pytest.mark.skipif(os.geteuid() != 0 or not sys.platform.startswith("linux"), reason="needs root and Linux")
def test_processes_move_into_their_slices_and_back() -> None:
    controllers = cgroups.this_machine()
    parts = Slices(controllers.cpu / "hepti" / f"slices-{os.getpid()}", 1, sorted(os.sched_getaffinity(0)))
    if controllers.memory is None or not parts.possible:
        pytest.skip("this kernel has no real-time groups beside those for memory")
    group = Group(controllers, f"slices-{os.getpid()}", "a", 1 << 30, parts)
    group.make()
    process = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    child = process.pid
    try:
        for entrance in group.entrances:
            entrance.write_text(str(child))
        group.set_cpu(0.2)
        if not group.command:
            pytest.skip("another lab has the real-time share of this machine")
        assert os.sched_getscheduler(child) == os.SCHED_RR
        assert len(os.sched_getaffinity(child)) == 1
        assert group.processes() == [child]
        assert group.entrances[0].parent == parts.directories[-1]
        group.set_cpu(None)
        assert os.sched_getscheduler(child) == os.SCHED_OTHER
        assert os.sched_getaffinity(child) == os.sched_getaffinity(0)
        assert group.processes() == [child]
        assert group.command == []
    finally:
        process.kill()
        process.communicate()
        cgroups.remove([*parts.directories, *group.directories], lambda pid: None)
