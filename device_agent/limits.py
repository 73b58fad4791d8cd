"""What the system lets this process have: the memory and the cores of its control groups, not those of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from hepti_mqtt.errors import ConfigError

SYSTEM: Final = Path("/")
PART_OF_FREE: Final = 0.8
LOADING_BYTES: Final = 8 << 20  # tiles under way while weights are loaded


def free_memory(root: Path = SYSTEM) -> int:
    """Return the bytes that are free for this process: of the machine, and in each control group that it is in."""
    return min([int(psutil.virtual_memory().available), *(max(free, 0) for free in _free_in_groups(root))])


def memory_budget(memory_bytes: int | None, free_bytes: int) -> int:
    """Return the bytes for weights and live slots together, beside what the idle agent takes.

    It is what was asked for, as far as that is free. The tiles under way while weights are loaded come out of the same
    budget. Raises ConfigError if nothing is left.
    """
    whole = int(PART_OF_FREE * free_bytes) if memory_bytes is None else min(memory_bytes, free_bytes)
    if whole <= LOADING_BYTES:
        raise ConfigError(
            f"a budget of {whole / 2**20:.0f} MiB leaves nothing for weights: {LOADING_BYTES / 2**20:.0f} MiB of it "
            "are needed while they are loaded; raise --memory, or the container's limit"
        )
    return whole - LOADING_BYTES


class Allowed(NamedTuple):
    """How many cores this process has, and the seconds of a period of the quota that says so, None without one."""

    cores: float
    period_s: float | None


def allowed(root: Path = SYSTEM) -> Allowed:
    """Return what the affinity and the quotas of the control groups leave this process."""
    whole = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (_quota(group) for group in _groups(root, "cpu"))
    least = min((quota for quota in quotas if quota is not None), default=None)
    return least if least is not None and least.cores < whole else Allowed(float(whole), None)


def cores(root: Path = SYSTEM) -> float:
    """Return how many cores this process has, by what is allowed and by the quota of the control groups."""
    return allowed(root).cores


def capacities(root: Path = SYSTEM) -> list[int]:
    """Return how strong the cores are that this process may use, as the system rates those of CPUs with unlike ones."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    rated = (_number(root / f"sys/devices/system/cpu/cpu{core}/cpu_capacity") for core in allowed)
    return sorted(rate for rate in rated if rate is not None)


def _free_in_groups(root: Path) -> Iterator[int]:
    """Yield what is left in each control group: its limit less what it uses, but for files that can be let go.

    Beyond memory.high nothing is killed, but slowed down until it gives memory back: as good as a limit.
    """
    names = (
        ("memory.max", "memory.current"),
        ("memory.high", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    for group in _groups(root, "memory"):
        for limit_file, used_file in names:  # version 2 twice, version 1
            limit, used = _number(group / limit_file), _number(group / used_file)
            if limit is not None and used is not None:
                yield limit - used + _inactive_files(group / "memory.stat")


def _inactive_files(stat: Path) -> int:
    found = dict.fromkeys(("inactive_file", "total_inactive_file"), 0)
    with suppress(OSError, ValueError):
        for line in stat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in found:
                found[name] = int(value)
    return max(found.values())


def _quota(group: Path) -> Allowed | None:
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else Allowed(int(quota) / int(period), int(period) / 1e6)
    quota_us, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    if quota_us is None or not period_us or quota_us <= 0:
        return None
    return Allowed(quota_us / period_us, period_us / 1e6)


def _groups(root: Path, controller: str) -> list[Path]:
    """Return the directories of this process's control groups, from the innermost to the outermost."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    out: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 lies beside the hierarchies of version 1 where a system has both.
        names = (controllers, controller) if controllers else ("unified",)
        top = next((mount / name for name in names if (mount / name).is_dir()), mount)
        inner = top / path.lstrip("/")
        # In a container the path may be the host's: its own group is then the top of what is mounted.
        out += [d for d in (inner, *inner.parents) if d.is_relative_to(top) and d.is_dir()]
    return out


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None
