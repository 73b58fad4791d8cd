"""Shares of a core in slices of a fraction of a millisecond, by real-time groups where the kernel has them.

A CPU quota is at least a millisecond long, so a host of a third of a core stands still for two milliseconds and more at
a time. A board never does; and where four hosts wait for each other at every exchange, one of them mostly stands still.
The real-time groups of control groups' version 1 know no least time. The kernel adds up their shares whatever core they
run on, so hosts of the same share are in one group, each on another core: there every core has the share for itself.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PERIOD_US: Final = 1_000
MOST: Final = 0.93  # of a core, all groups together; the kernel keeps 0.05 for everybody else
MOST_SHARE: Final = 0.6  # a host with more stands still so shortly that a quota does as well
_SECOND_US: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Place:
    """Where a host computes: the directory of its real-time group, and its core."""

    group: Path
    core: int

    @property
    def command(self) -> list[str]:
        """Return what starts a program there once it is inside the group."""
        return ["chrt", "-r", "1", "taskset", "-c", str(self.core)]

    def take(self, pid: int) -> None:
        """Let a process, with all its threads, compute here from now on."""
        with suppress(ProcessLookupError):
            (self.group / "cgroup.procs").write_text(str(pid), encoding="ascii")
            _schedule(pid, {self.core}, os.SCHED_RR, 1)


@dataclass(slots=True)
class _Slice:
    directory: Path
    share: float
    hosts: dict[int, str] = field(default_factory=dict)  # by core


class Slices:
    """The real-time groups of one lab below its directory for CPU; cores: those that hosts may use."""

    def __init__(self, directory: Path, hosts: int, cores: Sequence[int]) -> None:
        self._cores, self._lab = tuple(cores), directory
        self._free = [directory / f"slice.{number}" for number in range(hosts, 0, -1)]
        self.directories = list(self._free)
        self._slices: list[_Slice] = []

    @property
    def possible(self) -> bool:
        """Return whether the kernel has real-time groups, and this machine the commands that enter them."""
        has_groups = (self._lab.parents[1] / "cpu.rt_runtime_us").exists()
        return has_groups and all(shutil.which(tool) for tool in ("chrt", "taskset"))

    def place(self, host: str, share: float) -> Place | None:
        """Return where a host computes with its share of one core; None where that is not to be had."""
        self.leave(host)
        if not self.possible or share > MOST_SHARE:
            return None
        core = min(self._cores, key=self._load)
        found = next((s for s in self._slices if s.share == share and core not in s.hosts), None)
        try:
            found = found or self._make(share)
        except OSError:  # more than there is, or another lab has it
            return None
        found.hosts[core] = host
        return Place(found.directory, core)

    def leave(self, host: str) -> None:
        """Give up a host's place, from which its processes have gone or are about to."""
        for each in self._slices:
            each.hosts = {core: name for core, name in each.hosts.items() if name != host}

    def _load(self, core: int) -> float:
        return sum(each.share for each in self._slices if core in each.hosts)

    def _make(self, share: float) -> _Slice:
        """Return a group of a share: an empty one, or a new one."""
        empty = next((each for each in self._slices if not each.hosts), None)
        if empty is None:
            for parent in (self._lab.parent, self._lab):
                parent.mkdir(exist_ok=True)
                _allow(parent, _SECOND_US, MOST)
            empty = _Slice(self._free[-1], 0.0)
            empty.directory.mkdir(exist_ok=True)
            self._slices.append(empty)
            self._free.pop()
        _allow(empty.directory, PERIOD_US, share)
        empty.share = share
        return empty


def released(pid: int, group: Path) -> None:
    """Let a process, with all its threads, compute as every other one, in a group of the usual kind."""
    with suppress(ProcessLookupError):
        _schedule(pid, os.sched_getaffinity(0), os.SCHED_OTHER, 0)
        (group / "cgroup.procs").write_text(str(pid), encoding="ascii")


def _schedule(pid: int, cores: set[int], policy: int, priority: int) -> None:
    """Change all threads of a process; those that begin meanwhile are met in the next round, or inherit it."""
    done: set[str] = set()
    while threads := {path.name for path in Path(f"/proc/{pid}/task").glob("*")} - done:
        for thread in threads:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), cores)
                os.sched_setscheduler(int(thread), policy, os.sched_param(priority))
        done |= threads


def _allow(directory: Path, period_us: int, share: float) -> None:
    """Give a group a share of every core; raises OSError if its parent has less."""
    period = directory / "cpu.rt_period_us"
    if period.read_text(encoding="ascii").strip() != str(period_us):
        period.write_text(str(period_us), encoding="ascii")
    (directory / "cpu.rt_runtime_us").write_text(str(round(period_us * share)), encoding="ascii")
