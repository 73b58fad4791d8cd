"""A host of a lab and its processes: in a namespace with a CPU quota and a memory limit, or this machine as it is."""

from __future__ import annotations

import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.errors import LabError
from benchmarks.files import ROOT
from benchmarks.lab.cgroups import Group

_END_S: Final = 10.0
_PAUSE_S: Final = 0.005
_LAST_LINES: Final = 8


class Completed(NamedTuple):
    """A command that has ended: its exit code (negative: the signal) and what it printed."""

    code: int
    out: str
    err: str


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process; one that has ended already is no error."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


class Process:
    """A process on a host with a process group of its own; with pipes it speaks lines of text on stdin and stdout."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, *, pipes: bool
    ) -> None:
        """Start `command`; raises LabError if there is no such program."""
        self.name, self._log = name, log
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("ab") as out:
                self._begin = out.tell()
                self._process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if pipes else out,
                    stderr=out,
                    env=dict(environment),
                    start_new_session=True,
                )
        except OSError as error:
            raise LabError(f"{name}: {command[0]} cannot be started: {error}; install it or name its path") from error
        self._reader = threading.Thread(target=self._read, name=f"read-{name}", daemon=True) if pipes else None
        if self._reader is not None:
            self._reader.start()

    @property
    def pid(self) -> int:
        """Return its number, which is that of its process group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """Return the exit code; raises LabError if it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise LabError(f"{self.name} still runs after {timeout_s:g} s{self._last_words()}") from None

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children; one that has ended already is no error."""
        if self._process.poll() is None:  # once its leader is reaped, the group's number may be another's
            os.killpg(self._process.pid, number)

    def log(self) -> str:
        """Return what it has printed so far on stdout (without pipes) and stderr."""
        with self._log.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")

    def send(self, line: str) -> None:
        """Write one line to its stdin; raises LabError if it has ended."""
        assert self._process.stdin is not None, "started without pipes"
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise LabError(f"{self.name} has ended: {error}{self._last_words()}") from error

    def receive(self, timeout_s: float) -> str:
        """Return its next line; raises LabError with its last words if it ends or says nothing for `timeout_s`."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise LabError(f"{self.name} says nothing for {timeout_s:g} s{self._last_words()}") from None
        if line is None:
            self._lines.put(None)
            raise LabError(f"{self.name} has closed its output{self._last_words()}")
        return line

    def close(self) -> None:
        """End the process and its children at once, and the pipes; a second call does nothing."""
        self.signal(signal.SIGKILL)
        self._process.wait(_END_S)
        if self._reader is not None:
            self._reader.join(_END_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what was not read before it died
                    pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.decode(errors="replace").rstrip("\n"))
        self._lines.put(None)

    def _last_words(self) -> str:
        said = "\n  ".join(self.log().splitlines()[-_LAST_LINES:]) or "it is empty"
        return f"; log {self._log}:\n  {said}"


class Host:
    """A computer of the lab: this machine, or with `namespace` and `group` an emulated one.

    address: where the other hosts reach it. directory: for logs and what its programs keep. kept: for what a later lab
    may use again, such as tiles of weights. gflops: its target, None without one. cpu: its quota as a share of one
    core, set by calibration and in force while `throttled`. before_throttle: called before a quota is put in force.
    """

    def __init__(
        self,
        name: str,
        address: str,
        directory: Path,
        kept: Path,
        environment: Mapping[str, str],
        *,
        namespace: str = "",
        group: Group | None = None,
        gflops: float | None = None,
        before_throttle: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.address, self.python, self.gflops = name, address, sys.executable, gflops
        self.directory, self.kept = directory.resolve(), kept.resolve()
        self.directory.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {**os.environ, "PYTHONPATH": path, **environment}
        self.cpu: float | None = None
        self.throttled = False
        self._namespace, self._group, self._before_throttle = namespace, group, before_throttle
        self._started: list[Process] = []

    @property
    def adjustable(self) -> bool:
        """Return whether it can have a CPU quota."""
        return self._group is not None

    def start(
        self, name: str, words: Sequence[str], environment: Mapping[str, str] | None = None, *, pipes: bool = False
    ) -> Process:
        """Start a process (no shell); its output goes to `name`.log in the host's directory."""
        variables = {**self.environment, **(environment or {})}
        process = Process(name, self.entering(words), variables, self.directory / f"{name}.log", pipes=pipes)
        self._started.append(process)
        return process

    def talk(self, name: str, module: str, *words: str, environment: Mapping[str, str] | None = None) -> Process:
        """Start `python -m MODULE WORDS` with pipes for lines to and from it."""
        return self.start(name, [self.python, "-m", module, *words], environment, pipes=True)

    def run(
        self, words: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> Completed:
        """Run a command to its end; raises LabError if the time is over."""
        variables = {**self.environment, **(environment or {})}
        pipe = subprocess.PIPE
        with subprocess.Popen(
            self.entering(words), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=variables, text=True
        ) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException as error:
                process.kill()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise LabError(f"{self.name}: {' '.join(words)} did not end within {timeout_s:g} s") from None
                raise
        return Completed(process.returncode, out, err)

    def entering(self, words: Sequence[str]) -> list[str]:
        """Return the command of this machine that runs `words` on the host."""
        if self._group is None:
            return list(words)
        into = [f"echo $$ > {shlex.quote(str(path))} &&" for path in self._group.entrances]
        # The shell enters the groups and then becomes the command: there is no moment at which it runs outside.
        program = f"exec ip netns exec {shlex.quote(self._namespace)}"
        return ["sh", "-c", " ".join([*into, program, '"$@"']), "hepti-lab", *words]

    def set_cpu(self, cores: float | None) -> None:
        """Set the quota as a share of one core; in force at once if the host is throttled."""
        self.cpu = cores
        if self.throttled:
            self.throttle(True)

    def throttle(self, on: bool) -> None:
        """Put the quota in force or lift it; raises LabError if the host has a target and was not calibrated."""
        if self._group is None:
            return
        if on and self.cpu is None and self.gflops is not None:
            raise LabError(
                f"host {self.name} is to reach {self.gflops:g} GFLOP/s and has no quota yet: calibrate first"
            )
        if on and self.cpu is not None:
            self._before_throttle()
        self._group.set_cpu(self.cpu if on else None)
        self.throttled = on

    def signal(self, number: int) -> None:
        """Send a signal to every process on the host."""
        for process in self._started:
            process.signal(number)
        for pid in self._group.processes() if self._group is not None else ():
            send_signal(pid, number)

    def kill(self) -> None:
        """Pull the plug: every process on the host ends at once."""
        until = time.monotonic() + _END_S
        self.signal(signal.SIGKILL)
        while self._group is not None and (pids := self._group.processes()):
            if time.monotonic() > until:
                raise LabError(f"host {self.name}: processes {pids} do not end")
            self.signal(signal.SIGKILL)  # one that was forking meanwhile
            time.sleep(_PAUSE_S)
        for process in self._started:
            process.wait(_END_S)

    def close(self) -> None:
        """End every process on the host and forget it; a second call does nothing."""
        self.kill()
        while self._started:
            self._started.pop().close()
