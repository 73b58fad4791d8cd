"""What a host of a lab is, whatever stands behind it: a namespace with quotas, a board by SSH, or this machine.

Experiments know hosts by these two protocols alone, so the same file runs on emulated hosts and on boards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that has ended: its exit code (negative: the signal) and what it printed, as text."""

    code: int
    out: str
    err: str


class Running(Protocol):
    """A process on a host, with its children."""

    name: str

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        ...

    def wait(self, timeout_s: float) -> int:
        """Return the exit code; raises LabError if it still runs after `timeout_s`."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children; one that has ended already is no error."""
        ...

    def log(self) -> str:
        """Return what it has printed so far on stdout and stderr."""
        ...


class Talking(Running, Protocol):
    """A process on a host that speaks lines of text on stdin and stdout; stderr goes to its log."""

    def send(self, line: str) -> None:
        """Write one line to its stdin; raises LabError if it has ended."""
        ...

    def receive(self, timeout_s: float) -> str:
        """Return its next line; raises LabError with its last words if it ends or says nothing for `timeout_s`."""
        ...


class Host(Protocol):
    """A computer of the lab.

    name: as in topics. address: where the other hosts reach it. python: the interpreter there that has Hepti.
    directory: a path there for what the host's programs keep; it exists. kept: one for what a later lab may use again,
    such as tiles of weights.
    """

    name: str
    address: str
    python: str
    directory: str
    kept: str

    @property
    def shared(self) -> str:
        """Return a directory for what hosts of one machine and one quota measure, "" for a machine of its own."""
        ...

    def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Running:
        """Start a process (no shell); its output goes to a log named `name` under the lab's directory."""
        ...

    def talk(self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Talking:
        """Start a process as `start` does, with pipes for lines to and from it."""
        ...

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> Completed:
        """Run a command to its end; raises LabError if the host does not answer or the time is over."""
        ...

    def provide(self, path: Path) -> str:
        """Make a file or directory of this machine readable there; return its path there (the same where shared)."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to every process of the lab there."""
        ...

    def kill(self) -> None:
        """End every process of the lab there at once, like a pulled plug; `restart` knows what ran."""
        ...

    def restart(self) -> None:
        """Start again what runs, or ran when the host was killed, with the same commands."""
        ...

    def throttle(self, on: bool) -> None:
        """Turn the host's CPU quota on or off, where it has one: programs start at full speed, and run throttled."""
        ...
