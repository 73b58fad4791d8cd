"""Limits of control groups, read from the files of a system that the test writes."""

from __future__ import annotations

import os

import pytest

from device_agent.machine import Allowed, allowed, capacities, cores, free_memory

MIB = 1 << 20


@pytest.fixture
def system(tmp_path):
    def write(cgroup, **files):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(cgroup)
        for name, text in files.items():
            path = tmp_path / "sys/fs/cgroup" / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_without_groups_the_machine_counts(system, tmp_path):
    assert free_memory(tmp_path) > 0
    assert free_memory(system("")) > 0


def test_a_group_of_version_2_limits_what_is_free(system):
    root = system(
        "0::/app\n",
        app__memory_dot_max=f"{600 * MIB}\n",
        app__memory_dot_current=f"{250 * MIB}\n",
        app__memory_dot_stat=f"anon 1\ninactive_file {50 * MIB}\n",
    )
    assert free_memory(root) == 400 * MIB


def test_the_tightest_group_above_counts(system):
    root = system(
        "0::/a/b\n",
        a__memory_dot_max=f"{100 * MIB}",
        a__memory_dot_current=f"{90 * MIB}",
        a__b__memory_dot_max="max",
        a__b__memory_dot_current=f"{90 * MIB}",
    )
    assert free_memory(root) == 10 * MIB


@pytest.mark.parametrize("tightest", ["a", "a/b", "a/b/c"])
def test_of_nested_groups_the_one_with_the_least_left_counts(system, tightest):
    root = system("0::/a/b/c\n")
    for group in ("a", "a/b", "a/b/c"):
        place = root / "sys/fs/cgroup" / group
        place.mkdir(parents=True)
        (place / "memory.max").write_text(f"{(150 if group == tightest else 400) * MIB}\n")
        (place / "memory.current").write_text(f"{100 * MIB}\n")
        (place / "cpu.max").write_text("30000 100000\n" if group == tightest else "max 100000\n")
    assert free_memory(root) == 50 * MIB
    assert cores(root) == 0.3
    assert allowed(root) == Allowed(0.3, 0.1)


def test_what_a_group_may_use_before_it_is_slowed_down_counts(system):
    used = {"app__memory_dot_max": f"{600 * MIB}", "app__memory_dot_current": f"{100 * MIB}"}
    assert free_memory(system("0::/app\n", **used, app__memory_dot_high=f"{300 * MIB}")) == 200 * MIB


def test_version_2_beside_version_1_has_a_directory_of_its_own(system):
    root = system(
        "4:memory:/\n0::/app\n",
        memory__memory_dot_limit_in_bytes=f"{500 * MIB}",
        memory__memory_dot_usage_in_bytes=f"{100 * MIB}",
        unified__app__cpu_dot_max="20000 100000\n",
        unified__app__memory_dot_max=f"{300 * MIB}",
        unified__app__memory_dot_current=f"{100 * MIB}",
    )
    assert free_memory(root) == 200 * MIB
    assert cores(root) == 0.2


def test_a_container_sees_its_group_as_the_top(system):
    root = system("0::/\n", memory_dot_max=f"{300 * MIB}", memory_dot_current=f"{100 * MIB}")
    assert free_memory(root) == 200 * MIB


def test_a_group_of_version_1_whose_path_is_the_hosts(system):
    root = system(
        "9:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n",
        memory__memory_dot_limit_in_bytes=f"{500 * MIB}",
        memory__memory_dot_usage_in_bytes=f"{300 * MIB}",
        memory__memory_dot_stat=f"total_inactive_file {100 * MIB}\n",
        **{"cpu,cpuacct__cpu_dot_cfs_quota_us": "40000", "cpu,cpuacct__cpu_dot_cfs_period_us": "100000"},
    )
    assert free_memory(root) == 300 * MIB
    assert cores(root) == 0.4


def test_a_group_that_is_over_its_limit_leaves_nothing(system):
    root = system("0::/\n", memory_dot_max=f"{100 * MIB}", memory_dot_current=f"{120 * MIB}")
    assert free_memory(root) == 0


@pytest.mark.parametrize(("quota", "expected"), [("40000 100000", 0.4), ("100000 100000", 1.0)])
def test_a_quota_limits_the_cores(system, quota, expected):
    assert cores(system("0::/\n", cpu_dot_max=quota)) == expected


def test_without_a_quota_all_cores_count(system, tmp_path):
    assert cores(system("0::/\n", cpu_dot_max="max 100000")) == cores(tmp_path / "nothing") >= 1


def test_cores_that_are_not_alike_are_told_apart_by_their_rating(tmp_path, monkeypatch):
    for core, rating in enumerate((1024, 446, 446)):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}"
        folder.mkdir(parents=True)
        (folder / "cpu_capacity").write_text(f"{rating}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5}, raising=False)
    assert capacities(tmp_path) == [446, 1024]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2}, raising=False)
    assert capacities(tmp_path) == [446, 446]
