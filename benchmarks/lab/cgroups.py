"""Quotas of CPU and limits of memory by control groups, version 1 and version 2.

Every host of every lab has a group `hepti/LAB/HOST`. For CPU it stands at the top of the hierarchy: version 1 refuses
to lower a group's quota below that of a group inside it, so a quota of ours inside a group of somebody else's could
block theirs. For memory in version 1 it stands inside the maker's own group, so that a limit around the maker holds.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.errors import LabError

TOP: Final = "hepti"
# A throttled host runs for its share of every period. Short periods stall it shortly; the kernel refuses a quota and
# a period of less than 1 ms. A kernel of 250 ticks a second looks at quotas every 4 ms, and gives less where periods
# are shorter: 0.33 of a core for 1 ms in 2.86, 0.45 for 1 in 1.85, 0.56 for 1 in 1.25. Calibration makes up for it,
# but in the end a whole core gives half of one. So hosts of much of a core, whose stalls are short, have a whole tick.
_TICK_US: Final = 4_000
_SHORT_US: Final = 2_500
_LEAST_QUOTA_US: Final = 1_000
_MOST_PERIOD_US: Final = 1_000_000
_EMPTY_S: Final = 10.0
_PAUSE_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Controllers:
    """Where groups are made: the directories above `hepti`, equal in version 2; that for CPU is its tree's top."""

    version: int
    cpu: Path
    memory: Path | None


def detect(mounts: str, own: str) -> Controllers:
    """Return the controllers from the texts of /proc/mounts and /proc/self/cgroup; raises LabError without any for CPU.

    On a machine with both versions the CPU controller decides.
    """
    rows = [line.split() for line in mounts.splitlines()]
    found: dict[str, Path] = {}
    unified: Path | None = None
    for _, place, kind, options, *_ in (row for row in rows if len(row) >= 4):
        if kind == "cgroup":
            for option in options.split(","):
                found.setdefault(option, Path(place))
        elif kind == "cgroup2":
            unified = unified or Path(place)
    if "cpu" in found:
        memory = found.get("memory")
        return Controllers(1, found["cpu"], None if memory is None else memory / _own_group(own, "memory", memory))
    if unified is not None and "cpu" in _words(unified / "cgroup.controllers"):
        has_memory = "memory" in _words(unified / "cgroup.controllers")
        return Controllers(2, unified, unified if has_memory else None)
    raise LabError(
        "emulated hosts need the kernel's CPU control groups, and none are mounted; mount them "
        "(mount -t cgroup2 none /sys/fs/cgroup), or use a lab of kind local"
    )


def this_machine() -> Controllers:
    """Return the controllers of this machine; raises LabError."""
    return detect(Path("/proc/mounts").read_text(), Path("/proc/self/cgroup").read_text())


def quota(cores: float) -> tuple[int, int]:
    """Return (quota, period) in microseconds for a share of one core (2.0: two cores)."""
    period = min(round(_LEAST_QUOTA_US / cores), _MOST_PERIOD_US)
    period = period if period >= _SHORT_US else _TICK_US
    return max(_LEAST_QUOTA_US, round(period * cores)), period


class Group:
    """The control group of one host."""

    def __init__(self, controllers: Controllers, lab: str, host: str, memory_bytes: int | None = None) -> None:
        """memory_bytes: of all its processes together, None: no limit; raises LabError where none can be set."""
        if memory_bytes is not None and controllers.memory is None:
            raise LabError(
                f"host {host} has a memory limit, and this machine has no memory control groups (kernel argument "
                "cgroup_enable=memory on a Raspberry Pi); enable them, or take `memory:` out of the lab file"
            )
        self._controllers, self._memory_bytes = controllers, memory_bytes
        self._cpu = controllers.cpu / TOP / lab / host
        parents = {controllers.cpu: self._cpu}
        if controllers.memory is not None and memory_bytes is not None:
            parents[controllers.memory] = controllers.memory / TOP / lab / host
        self.directories = list(parents.values())

    @property
    def entrances(self) -> list[Path]:
        """Return the files into which a process writes its number to be inside."""
        return [directory / "cgroup.procs" for directory in self.directories]

    def make(self) -> None:
        """Make the group and set its memory limit; raises LabError."""
        for directory in self.directories:
            lab = directory.parent
            top = lab.parent
            if self._controllers.version == 2:
                for parent, child in ((top.parent, top), (top, lab), (lab, directory)):
                    self._enable(parent)
                    child.mkdir(exist_ok=True)
            else:
                directory.mkdir(parents=True, exist_ok=True)
        if self._memory_bytes is None:
            return
        where = self.directories[-1]
        if self._controllers.version == 2:
            _write(where / "memory.max", str(self._memory_bytes))
            if (where / "memory.swap.max").exists():
                _write(where / "memory.swap.max", "0")
        else:
            _write(where / "memory.limit_in_bytes", str(self._memory_bytes))
            if (where / "memory.memsw.limit_in_bytes").exists():
                _write(where / "memory.memsw.limit_in_bytes", str(self._memory_bytes))

    def set_cpu(self, cores: float | None) -> None:
        """Set the quota as a share of one core, None: no quota; raises LabError."""
        if self._controllers.version == 2:
            amount, period = ("max", _TICK_US) if cores is None else quota(cores)
            _write(self._cpu / "cpu.max", f"{amount} {period}")
            return
        _write(self._cpu / "cpu.cfs_quota_us", "-1")  # between two periods the old quota may be one that is refused
        if cores is not None:
            amount, period = quota(cores)
            _write(self._cpu / "cpu.cfs_period_us", str(period))
            _write(self._cpu / "cpu.cfs_quota_us", str(amount))

    def processes(self) -> list[int]:
        """Return the processes inside."""
        return members(self.directories[-1])

    def _enable(self, parent: Path) -> None:
        wanted = ["cpu"] if self._memory_bytes is None else ["cpu", "memory"]
        enabled = _words(parent / "cgroup.subtree_control")
        lacking = [name for name in wanted if name not in enabled]
        if lacking:
            _write(parent / "cgroup.subtree_control", " ".join(f"+{name}" for name in lacking))


def members(directory: Path) -> list[int]:
    """Return the processes in a group, none where it does not exist."""
    return [int(word) for word in _words(directory / "cgroup.procs")]


def remove(directories: list[Path], kill: Callable[[int], None], clock: Callable[[], float] = time.monotonic) -> None:
    """End what runs in the groups and remove them, with empty groups `hepti/LAB` and `hepti` above; raises LabError."""
    for directory in directories:
        until = clock() + _EMPTY_S
        while directory.is_dir():
            for pid in members(directory):
                kill(pid)
            try:
                directory.rmdir()
            except OSError as error:
                if clock() > until:
                    inside = members(directory)
                    raise LabError(f"{directory} cannot be removed ({error.strerror}); inside are {inside}") from error
                time.sleep(_PAUSE_S)  # a killed process leaves its group when the kernel has taken it down
    for directory in directories:
        for parent in (directory.parent, directory.parent.parent):
            with suppress(OSError):  # another host or lab is inside
                parent.rmdir()


def _own_group(own: str, controller: str, mount: Path) -> str:
    """Return the maker's own group relative to the mount; its top where the group cannot be seen (a container)."""
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(",") and (mount / path.lstrip("/")).is_dir():
            return path.lstrip("/")
    return ""


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if error.errno == errno.ENODEV:  # the group was removed while its file was open
            return []
        raise LabError(f"{path} cannot be read: {error.strerror}") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="ascii")
    except OSError as error:
        raise LabError(
            f"{path} does not take {text!r}: {error.strerror}; run as root, outside of a container without rights to "
            "its control groups"
        ) from error
