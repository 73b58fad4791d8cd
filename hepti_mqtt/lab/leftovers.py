"""What labs have made on this machine, written down before it is made, so that any later process can remove it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from hepti_mqtt.config.state import write_atomically
from hepti_mqtt.errors import LabError
from hepti_mqtt.lab import cgroups, network
from hepti_mqtt.lab.emulated import send_signal

STATES: Final = Path("/run/hepti-lab")
_FORMAT: Final = 1


@dataclass
class Record:
    """One lab of this machine.

    owner: process number and start time (clock ticks since boot) of who made it. kept: it is meant to outlive its
    owner. groups: directories of control groups. sleepers: process number and start time of each. hosts: name ->
    address, rate_mbit, gflops, cpu (quota as a share of one core) and group, the directory that lists its processes.
    """

    lab: str
    owner: tuple[int, int]
    kept: bool
    directory: str
    namespaces: list[str]
    groups: list[str]
    hosts: dict[str, dict[str, Any]]
    sleepers: list[tuple[int, int]] = field(default_factory=list)
    made_unix_s: float = field(default_factory=time.time)
    format: int = _FORMAT

    @property
    def in_use(self) -> bool:
        """Return whether the process that made it still runs."""
        return started(self.owner[0]) == self.owner[1]

    @property
    def state(self) -> str:
        """Return one word for `status`: running (its maker runs), up (kept on purpose) or leftover."""
        return "running" if self.in_use else "up" if self.kept else "leftover"


@dataclass(frozen=True, slots=True)
class Strays:
    """Namespaces and groups that no record explains: somebody deleted it."""

    namespaces: list[str]
    groups: list[Path]

    def names(self) -> list[str]:
        """Return them for people."""
        return [*(f"namespace {name}" for name in self.namespaces), *(f"group {path}" for path in self.groups)]

    def data(self) -> dict[str, list[str]]:
        """Return them for JSON."""
        return {"stray_namespaces": self.namespaces, "stray_groups": [str(path) for path in self.groups]}


def started(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot; None if there is none. Numbers are given again."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def me() -> tuple[int, int]:
    """Return this process's number and start time."""
    start = started(os.getpid())
    assert start is not None
    return os.getpid(), start


def claim(record: Record, states: Path = STATES) -> None:
    """Write a lab down before anything of it is made; raises LabError if its name is taken."""
    try:
        states.mkdir(parents=True, exist_ok=True)
        with (states / f"{record.lab}.json").open("x") as file:
            json.dump(asdict(record), file)
    except FileExistsError:
        raise LabError(_taken(record.lab, states)) from None
    except OSError as error:
        raise LabError(f"{states} cannot be written: {error.strerror}; emulated hosts need root (sudo)") from error


def update(record: Record, states: Path = STATES) -> None:
    """Write a lab down again after it has changed."""
    write_atomically(states / f"{record.lab}.json", json.dumps(asdict(record)).encode())


def records(states: Path = STATES) -> list[Record]:
    """Return the labs of this machine; raises LabError for a file that is none."""
    return list(_records(states))


def running(record: Record) -> list[list[int]]:
    """Return the processes on each host, in the order of `hosts`."""
    return [cgroups.members(Path(host["group"])) for host in record.hosts.values()]


def strays(recorded: Sequence[Record]) -> Strays:
    """Return what is called like a lab's on this machine and belongs to none that is written down."""
    if network.missing_tools():
        return Strays([], [])
    return sift(recorded, network.namespaces(), sorted((cgroups.this_machine().cpu / cgroups.TOP).glob("*/*/")))


def sift(recorded: Sequence[Record], namespaces: Sequence[str], groups: Sequence[Path]) -> Strays:
    """Return those of a machine's namespaces and groups that are called like a lab's and belong to none."""
    known = {name for record in recorded for name in record.namespaces}
    inside = {Path(path) for record in recorded for path in record.groups}
    return Strays(
        [name for name in namespaces if name.startswith(network.PREFIX) and name not in known],
        [directory for directory in groups if directory not in inside],
    )


def remove_strays(found: Strays) -> None:
    """End what runs in them and remove them."""
    cgroups.remove(found.groups, kill)
    remove_namespaces(found.namespaces)


def remove(record: Record, states: Path = STATES) -> None:
    """End everything that runs in a lab and remove all that was made for it; what is gone already is no error."""
    for pid, start in record.sleepers:
        if started(pid) == start:
            send_signal(pid, signal.SIGKILL)
    cgroups.remove([Path(path) for path in record.groups], kill)
    remove_namespaces(record.namespaces)
    with suppress(FileNotFoundError):
        (states / f"{record.lab}.json").unlink()
    with suppress(OSError):  # another lab is written down there
        states.rmdir()


def remove_namespaces(names: list[str]) -> None:
    """End what runs in namespaces, by hand or by a host, and remove them."""
    for name in names:
        for pid in network.processes(name):
            kill(pid)
    network.remove(names)


def kill(pid: int) -> None:
    """End a process at once."""
    send_signal(pid, signal.SIGKILL)


def _records(states: Path) -> Iterator[Record]:
    for path in sorted(states.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != _FORMAT:
                raise ValueError(f"format {data['format']}")
            pid, start = data.pop("owner")
            sleepers = [(int(p), int(s)) for p, s in data.pop("sleepers")]
            yield Record(owner=(int(pid), int(start)), sleepers=sleepers, **data)
        except FileNotFoundError:
            continue  # removed meanwhile
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LabError(
                f"{path} is not a lab written down by this version ({error}); remove its namespaces and groups by hand "
                "(ip netns list, /sys/fs/cgroup/**/hepti), then the file"
            ) from error


def _taken(lab: str, states: Path) -> str:
    for record in records(states):
        if record.lab == lab:
            if record.in_use:
                return f"lab {lab} is in use by process {record.owner[0]}; wait for it, or give this one another name"
            return f"lab {lab} is still there ({record.state}); remove it with `hepti lab down {lab}`"
    return f"lab {lab} is being made or removed by another process; try again"
