"""A host in a network namespace, with a quota of CPU and a limit of memory."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from hepti_mqtt.errors import LabError
from hepti_mqtt.lab.cgroups import Group
from hepti_mqtt.lab.hosts import Completed
from hepti_mqtt.lab.local import LocalProcess, run_command
from hepti_mqtt.lab.started import Pluggable, Restartable, Started

_END_S: Final = 10.0
_PAUSE_S: Final = 0.005


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process; one that has ended already is no error."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


class EmulatedHost(Pluggable[LocalProcess]):
    """A `Host` inside its namespace and control group.

    cpu: its quota as a share of one core, None where it has none; set by calibration, in force while throttled.
    before_throttle: called before a quota is put in force. environment: of all its processes.
    """

    def __init__(
        self,
        name: str,
        address: str,
        namespace: str,
        group: Group,
        directory: Path,
        kept: Path,
        before_throttle: Callable[[], None],
        gflops: float | None = None,
    ) -> None:
        self.name, self.address, self.python = name, address, sys.executable
        self.directory, self.kept = str(directory), str(kept)
        self.environment = dict(os.environ)
        self._measured = directory.parent / "measured"
        self.gflops = gflops
        self.cpu: float | None = None
        self.throttled = False
        self._group, self._before_throttle = group, before_throttle
        self._namespace = namespace
        self._started: Started[LocalProcess] = Started()

    @property
    def shared(self) -> str:
        """Return the directory for what hosts of this quota measure; inside a namespace nobody sees it."""
        return str(self._measured / ("full" if self.cpu is None else f"{self.cpu:.4f}"))

    def start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> Restartable[LocalProcess]:
        """Start a process (no shell); its output goes to `name`.log in the host's directory."""
        return self._start(name, arguments, environment, pipes=False)

    def talk(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> Restartable[LocalProcess]:
        """Start a process as `start` does, with pipes for lines to and from it."""
        return self._start(name, arguments, environment, pipes=True)

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> Completed:
        """Run a command to its end; raises LabError if the time is over."""
        return run_command(self.name, self.entering(arguments), {**self.environment, **(environment or {})}, timeout_s)

    def entering(self, arguments: Sequence[str]) -> list[str]:
        """Return the command of this machine that runs `arguments` on the host."""
        words = [f"echo $$ > {shlex.quote(str(path))} &&" for path in self._group.entrances]
        # The shell enters the groups and then becomes the command: there is no moment at which it runs outside.
        into = shlex.join(["ip", "netns", "exec", self._namespace])
        return ["sh", "-c", " ".join([*words, "exec", into, '"$@"']), "hepti-lab", *arguments]

    def provide(self, path: Path) -> str:
        """Return the path itself: hosts share this machine's files."""
        if not path.exists():
            raise LabError(f"{path} does not exist, so {self.name} cannot be given it")
        return str(path.resolve())

    def set_cpu(self, cores: float | None) -> None:
        """Set the quota as a share of one core; in force at once if the host is throttled."""
        self.cpu = cores
        if self.throttled:
            self._group.set_cpu(cores)

    def throttle(self, on: bool) -> None:
        """Put the quota in force or lift it; raises LabError if the host has a target that nobody has calibrated."""
        if on and self.cpu is None and self.gflops is not None:
            raise LabError(
                f"host {self.name} is to reach {self.gflops:g} GFLOP/s and has no quota yet; calibrate first"
            )
        if on and self.cpu is not None:
            self._before_throttle()
        self._group.set_cpu(self.cpu if on else None)
        self.throttled = on

    def processes(self) -> list[int]:
        """Return the numbers of the processes that run on it."""
        return self._group.processes()

    def signal(self, number: int) -> None:
        """Send a signal to every process on the host."""
        for pid in self.processes():
            send_signal(pid, number)

    def kill(self) -> None:
        """Pull the plug: every process ends at once; `restart` knows what ran."""
        self._started.kill(self._end)

    def close(self) -> None:
        """End every process on the host; a second call does nothing."""
        self._started.end(self._end)
        self._started.close()

    def _end(self) -> None:
        until = time.monotonic() + _END_S
        while pids := self.processes():  # one that is forking meanwhile is met in the next round
            if time.monotonic() > until:
                raise LabError(f"host {self.name}: processes {pids} do not end")
            for pid in pids:
                send_signal(pid, signal.SIGKILL)
            time.sleep(_PAUSE_S)

    def _start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None, *, pipes: bool
    ) -> Restartable[LocalProcess]:
        log = Path(self.directory) / f"{name}.log"
        variables = {**self.environment, **(environment or {})}

        def begin() -> LocalProcess:
            return LocalProcess(name, self.entering(arguments), variables, log, pipes=pipes)

        return self._started.start(name, begin)
