"""Control groups of both versions, over directories that stand in for the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.errors import LabError
from benchmarks.lab.cgroups import Controllers, Group, detect, quota

MIB = 2**20


@given(st.floats(0.001, 64))
def test_a_quota_is_the_share_of_its_period_and_never_refused(cores: float) -> None:
    amount, period = quota(cores)
    assert amount >= 1000  # the kernel refuses less
    assert 1000 <= period <= 1_000_000  # and other periods
    assert amount / period == pytest.approx(cores, rel=0.01)
    assert amount == 1000 or period >= 4000, "much of a core in periods of less than a tick is less than that"


def unified(tmp_path: Path, controllers: str = "cpu memory pids") -> Path:
    (tmp_path / "cgroup.controllers").write_text(controllers)
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    return tmp_path


def test_version_2_is_found_where_the_cpu_controller_is_there(tmp_path: Path) -> None:
    root = unified(tmp_path)
    assert detect(f"cgroup2 {root} cgroup2 rw 0 0", "0::/user") == Controllers(2, root, root)
    (root / "cgroup.controllers").write_text("cpu")
    assert detect(f"cgroup2 {root} cgroup2 rw 0 0", "0::/user") == Controllers(2, root, None)
    (root / "cgroup.controllers").write_text("hugetlb")
    with pytest.raises(LabError, match="control groups"):
        detect(f"cgroup2 {root} cgroup2 rw 0 0", "0::/user")
    with pytest.raises(LabError, match="mount"):
        detect("proc /proc proc rw 0 0", "0::/")


def test_version_1_is_found_beside_an_empty_version_2(tmp_path: Path) -> None:
    root = unified(tmp_path, "hugetlb")
    (tmp_path / "memory" / "own").mkdir(parents=True)
    mounts = (
        f"cgroup {tmp_path}/cpu cgroup rw,cpu,cpuacct 0 0\n"
        f"cgroup {tmp_path}/memory cgroup rw,relatime,memory 0 0\ncgroup2 {root} cgroup2 rw 0 0"
    )
    inside = detect(mounts, "4:memory:/own\n2:cpu,cpuacct:/there\n0::/")
    assert inside == Controllers(1, tmp_path / "cpu", tmp_path / "memory" / "own")
    unseen = detect(mounts, "4:memory:/docker/123\n2:cpu,cpuacct:/docker/123\n0::/")
    assert unseen.memory == tmp_path / "memory"


def test_a_group_of_version_2_has_quota_and_memory_in_one_place(tmp_path: Path) -> None:
    root = unified(tmp_path)
    group = Group(Controllers(2, root, root), "lab", "pi1", 64 * MIB)
    group.make()
    place = root / "hepti" / "lab" / "pi1"
    assert group.entrances == [place / "cgroup.procs"]
    assert (root / "cgroup.subtree_control").read_text() == "+memory"  # cpu was there
    assert (root / "hepti" / "cgroup.subtree_control").read_text() == "+cpu +memory"
    assert (root / "hepti" / "lab" / "cgroup.subtree_control").read_text() == "+cpu +memory"
    assert not (place / "cgroup.subtree_control").exists()
    assert (place / "memory.max").read_text() == str(64 * MIB)
    group.set_cpu(0.25)
    assert (place / "cpu.max").read_text() == "1000 4000"
    group.set_cpu(0.05)
    assert (place / "cpu.max").read_text() == "1000 20000"
    group.set_cpu(None)
    assert (place / "cpu.max").read_text().startswith("max ")


def test_a_group_of_version_1_has_a_place_in_each_hierarchy(tmp_path: Path) -> None:
    (tmp_path / "memory" / "own").mkdir(parents=True)
    (tmp_path / "cpu").mkdir()
    group = Group(Controllers(1, tmp_path / "cpu", tmp_path / "memory" / "own"), "lab", "pi1", 64 * MIB)
    group.make()
    cpu, memory = tmp_path / "cpu" / "hepti" / "lab" / "pi1", tmp_path / "memory" / "own" / "hepti" / "lab" / "pi1"
    assert group.entrances == [cpu / "cgroup.procs", memory / "cgroup.procs"]
    assert (memory / "memory.limit_in_bytes").read_text() == str(64 * MIB)
    group.set_cpu(0.25)
    assert ((cpu / "cpu.cfs_quota_us").read_text(), (cpu / "cpu.cfs_period_us").read_text()) == ("1000", "4000")
    group.set_cpu(None)
    assert (cpu / "cpu.cfs_quota_us").read_text() == "-1"
    (group.directories[-1] / "cgroup.procs").write_text("12\n34\n")
    assert group.processes() == [12, 34]


def test_a_limit_that_cannot_be_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="cgroup_enable=memory"):
        Group(Controllers(1, tmp_path, None), "lab", "pi1", MIB)
    group = Group(Controllers(1, tmp_path, None), "lab", "pi1")
    assert group.entrances == [tmp_path / "hepti/lab/pi1/cgroup.procs"]
    group.make()
    (group.directories[0] / "cpu.cfs_quota_us").mkdir()
    with pytest.raises(LabError, match=r"cpu\.cfs_quota_us"):
        group.set_cpu(0.5)
