"""A host in a network namespace, with a quota of CPU and a limit of memory."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hepti_mqtt.errors import LabError
from hepti_mqtt.lab.cgroups import Group
from hepti_mqtt.lab.hosts import Completed
from hepti_mqtt.lab.local import LocalProcess, run_command

_END_S: Final = 10.0
_PAUSE_S: Final = 0.005


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process; one that has ended already is no error."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


@dataclass
class EmulatedProcess:
    """A process on an emulated host, `Running` and `Talking`; it stays the same one when its host is restarted."""

    name: str
    begin: Callable[[], LocalProcess]
    now: LocalProcess

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self.now.poll()

    def wait(self, timeout_s: float) -> int:
        """Return the exit code; raises LabError if it still runs after `timeout_s`."""
        return self.now.wait(timeout_s)

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children; one that has ended already is no error."""
        self.now.signal(number)

    def log(self) -> str:
        """Return what it has printed so far."""
        return self.now.log()

    def send(self, line: str) -> None:
        """Write one line to its stdin; raises LabError if it has ended."""
        self.now.send(line)

    def receive(self, timeout_s: float) -> str:
        """Return its next line; raises LabError if it ends or says nothing for `timeout_s`."""
        return self.now.receive(timeout_s)


class EmulatedHost:
    """A `Host` inside its namespace and control group.

    cpu: its quota as a share of one core, None where it has none; set by calibration, in force while throttled.
    before_throttle: called before a quota is put in force.
    """

    def __init__(
        self,
        name: str,
        address: str,
        namespace: str,
        group: Group,
        directory: Path,
        before_throttle: Callable[[], None],
        gflops: float | None = None,
    ) -> None:
        self.name, self.address, self.python = name, address, sys.executable
        self.directory = str(directory)
        self.gflops = gflops
        self.cpu: float | None = None
        self.throttled = False
        self._group, self._before_throttle = group, before_throttle
        words = [f"echo $$ > {shlex.quote(str(path))} &&" for path in group.entrances]
        # The shell enters the groups and then becomes the command: there is no moment at which it runs outside.
        script = " ".join([*words, "exec", "ip", "netns", "exec", shlex.quote(namespace), '"$@"'])
        self._enter = ["sh", "-c", script, "hepti-lab"]
        self._started: list[EmulatedProcess] = []
        self._killed: list[EmulatedProcess] = []

    def start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> EmulatedProcess:
        """Start a process (no shell); its output goes to `name`.log in the host's directory."""
        return self._start(name, arguments, environment, pipes=False)

    def talk(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> EmulatedProcess:
        """Start a process as `start` does, with pipes for lines to and from it."""
        return self._start(name, arguments, environment, pipes=True)

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> Completed:
        """Run a command to its end; raises LabError if the time is over."""
        return run_command(self.name, self.entering(arguments), {**os.environ, **(environment or {})}, timeout_s)

    def entering(self, arguments: Sequence[str]) -> list[str]:
        """Return the command of this machine that runs `arguments` on the host."""
        return [*self._enter, *arguments]

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
        self._killed += [process for process in self._started if process.poll() is None]
        self._end()

    def restart(self) -> None:
        """Start again what runs, or ran when the host was killed, with the same commands."""
        self.kill()
        again, self._killed = self._killed, []
        for process in again:
            process.now.close()
            process.now = process.begin()

    def close(self) -> None:
        """End every process on the host; a second call does nothing."""
        self._end()
        while self._started:
            self._started.pop().now.close()

    def _end(self) -> None:
        for process in self._started:
            process.signal(signal.SIGKILL)  # also one that has not entered the group yet
        until = time.monotonic() + _END_S
        while pids := self.processes():  # one that is forking meanwhile is met in the next round
            if time.monotonic() > until:
                raise LabError(f"host {self.name}: processes {pids} do not end")
            for pid in pids:
                send_signal(pid, signal.SIGKILL)
            time.sleep(_PAUSE_S)
        for process in self._started:
            process.wait(_END_S)

    def _start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None, *, pipes: bool
    ) -> EmulatedProcess:
        log = Path(self.directory) / f"{name}.log"
        words, variables = self.entering(arguments), {**os.environ, **(environment or {})}

        def begin() -> LocalProcess:
            return LocalProcess(name, words, variables, log, pipes=pipes)

        process = EmulatedProcess(name, begin, begin())
        self._started.append(process)
        return process
