"""This machine as a host, as it is: no namespace, no quota; several such hosts may share it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from hepti_mqtt.errors import LabError
from hepti_mqtt.lab.hosts import Completed
from hepti_mqtt.lab.started import Pluggable, Restartable, Started

_LAST_LINES: Final = 8
_REAP_S: Final = 10.0


class LocalProcess:
    """A process of this machine with a process group of its own; a `Running`, and a `Talking` if it has pipes."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, *, pipes: bool = False
    ) -> None:
        """Start `command`; raises LabError if there is no such program."""
        self.name, self._log, self._words = name, log, " ".join(command)
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
        # The group outlives its leader as long as a child runs, and its number is not given away meanwhile. Once the
        # leader is reaped and the group empty, the number may be another's: then there is nobody to signal.
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def log(self) -> str:
        """Return what it has printed so far on stdout and stderr."""
        with self._log.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")

    def send(self, line: str) -> None:
        """Write one line to its stdin; raises LabError if it has ended."""
        pipe = self._process.stdin
        assert pipe is not None, "started without pipes"
        try:
            pipe.write(line.encode() + b"\n")
            pipe.flush()
        except OSError as error:
            raise LabError(f"{self.name} does not listen any more: {error}{self._last_words()}") from error

    def receive(self, timeout_s: float) -> str:
        """Return its next line; raises LabError with its last words if it ends or says nothing for `timeout_s`."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise LabError(f"{self.name} says nothing for {timeout_s:g} s{self._last_words()}") from None
        if line is None:
            self._lines.put(None)
            raise LabError(f"{self.name} has closed its output ({self._words}){self._last_words()}")
        return line

    def close(self) -> None:
        """End the process and its children at once, and the pipes; a second call does nothing."""
        self.signal(signal.SIGKILL)
        self._process.wait(_REAP_S)
        if self._reader is not None:
            self._reader.join(_REAP_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # what was not read before it died

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.decode(errors="replace").rstrip("\n"))
        self._lines.put(None)

    def _last_words(self) -> str:
        lines = self.log().splitlines()[-_LAST_LINES:]
        said = "\n  ".join(lines) if lines else "it is empty"
        return f"; log {self._log}:\n  {said}"


def run_command(
    name: str, command: Sequence[str], environment: Mapping[str, str], timeout_s: float, stdin: IO[bytes] | None = None
) -> Completed:
    """Run a command of this machine to its end; raises LabError for no such program, or if the time is over."""
    try:
        with subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException as error:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise LabError(f"{name}: {' '.join(command)} did not end within {timeout_s:g} s") from None
                raise
    except OSError as error:
        raise LabError(f"{name}: {command[0]} cannot be run: {error}; install it or name its path") from error
    return Completed(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


class LocalHost(Pluggable[LocalProcess]):
    """This machine under a name of the lab; a `Host`, and a context manager that ends what it started.

    directory: of logs and whatever the host's programs keep; it is made and not removed. address: where boards of the
    lab reach it; the loopback address if there are none. kept: for what a later lab may use; below directory if None.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        python: str = sys.executable,
        address: str = "127.0.0.1",
        kept: Path | None = None,
    ) -> None:
        self.name, self.python, self.address = name, python, address
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = str(directory.resolve())
        self.kept = str((kept or directory / "kept").resolve())
        self.shared = ""
        self._started: Started[LocalProcess] = Started()

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
        return run_command(self.name, arguments, {**os.environ, **(environment or {})}, timeout_s)

    def provide(self, path: Path) -> str:
        """Return the path itself: it is readable here."""
        if not path.exists():
            raise LabError(f"{path} does not exist, so {self.name} cannot be given it")
        return str(path.resolve())

    def throttle(self, on: bool) -> None:
        """Do nothing: this machine runs as it is."""

    def close(self) -> None:
        """End every process that was started here; a second call does nothing."""
        self._started.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None, *, pipes: bool
    ) -> Restartable[LocalProcess]:
        log = Path(self.directory) / f"{name}.log"
        variables = {**os.environ, **(environment or {})}
        return self._started.start(name, lambda: LocalProcess(name, arguments, variables, log, pipes=pipes))
