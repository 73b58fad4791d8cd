"""A board as a host, by the `ssh` program: one connection for all commands, no questions asked.

Any program that takes a line of shell as its last argument can stand in for ssh (`command`), such as `docker exec`
with `sh -c`: everything is done by such lines.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shlex
import shutil
import signal
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from hepti_mqtt.errors import LabError
from hepti_mqtt.lab import remote
from hepti_mqtt.lab.hosts import Completed
from hepti_mqtt.lab.local import LocalProcess, run_command
from hepti_mqtt.lab.started import Pluggable, Restartable, Started

CONNECT_S: Final = 10
COPY_S: Final = 1800.0  # 1.3 GB of BERT-Large over a slow Wi-Fi
_LOST: Final = 255  # ssh's own exit code, if it has no connection
_ADVICE: Final = (
    ("Permission denied", "the key is not accepted there; try `ssh-copy-id {name}`, or name the key with -i in `ssh:`"),
    ("Host key verification failed", "its key is not known here, or not the one of last time; connect once by hand"),
    ("Could not resolve", "there is no such name; write its address"),
    ("Connection refused", "no SSH server listens there; start one, or correct the port"),
    ("timed out", "it is off, or another network; `ping` it"),
    ("No route to host", "it is off, or another network; `ping` it"),
)


class SshProcess:
    """A process on a board: here the ssh that waits for it, there a process group; a `Running` and a `Talking`."""

    def __init__(self, host: SshHost, name: str, process: LocalProcess) -> None:
        self.name, self._host, self._process = name, host, process

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        code = self._process.poll()
        return code if code is None else _own_code(code)

    def wait(self, timeout_s: float) -> int:
        """Return the exit code; raises LabError if it still runs after `timeout_s`."""
        return _own_code(self._process.wait(timeout_s))

    def signal(self, number: int) -> None:
        """Send a signal to the process group there; one that has ended already is no error."""
        if self._process.poll() is None:
            # The file comes with the process and is empty once it has ended, so that its number is not another's.
            lines = (
                f"pid={shlex.quote(f'{self._host.directory}/{self.name}.pid')}; tries=0",
                f'until test -e "$pid" || test $tries -ge {10 * CONNECT_S}; do sleep 0.1; tries=$((tries + 1)); done',
                f'if test -s "$pid"; then kill -{number} "-$(cat "$pid")" 2>/dev/null; fi; true',
            )
            self._host.shell("; ".join(lines))

    def log(self) -> str:
        """Return what it has printed so far there, and what ssh had to say here."""
        done = self._host.shell(f"cat {shlex.quote(f'{self._host.directory}/{self.name}.log')} 2>/dev/null || true")
        return done.out + self._process.log()

    def send(self, line: str) -> None:
        """Write one line to its stdin; raises LabError if it has ended."""
        self._process.send(line)

    def receive(self, timeout_s: float) -> str:
        """Return its next line; raises LabError with its last words if it ends or says nothing for `timeout_s`."""
        try:
            return self._process.receive(timeout_s)
        except LabError as error:
            words = " / ".join(self.log().splitlines()[-5:])
            raise LabError(f"{error}\n  on {self._host.name}: {words or 'its log is empty'}") from error

    def close(self) -> None:
        """End the process there and the ssh here."""
        try:
            self.signal(signal.SIGKILL)
        finally:
            self._process.close()


class SshHost(Pluggable[SshProcess]):
    """A board with Hepti installed; a `Host`, and a context manager that ends what it started and the connection.

    command: the transport before the line of shell, such as ("ssh", "-p", "2222", "pi@192.168.1.20"). address: where
    the other hosts reach it. python: the interpreter there that has Hepti. directory: there, for logs and caches.
    logs: a directory here for what ssh says.
    """

    def __init__(
        self, name: str, address: str, command: Sequence[str], logs: Path, *, python: str, directory: str
    ) -> None:
        """Connect and look; raises LabError that says what is wrong with the host and what to do."""
        self.name, self.address, self.python = name, address, python
        logs.mkdir(parents=True, exist_ok=True)
        self._logs, self._started = logs, Started[SshProcess]()
        self._is_ssh = Path(command[0]).name == "ssh"
        self._command = list(command)
        # A socket's path may have about 100 characters, and a lab's directory has more.
        self._sockets = Path(tempfile.mkdtemp(prefix="hepti-ssh-")) if self._is_ssh else None
        if self._is_ssh:
            options = ("BatchMode=yes", f"ConnectTimeout={CONNECT_S}", "ServerAliveInterval=5", "ServerAliveCountMax=3")
            share = ("ControlMaster=auto", f"ControlPath={self._sockets}/{name}", "ControlPersist=60")
            self._command[1:1] = [a for o in (*options, *share) for a in ("-o", o)]
        where = f"mkdir -p {shlex.quote(directory)} && cd {shlex.quote(directory)} && pwd"
        try:
            self.directory = self.shell(where, must="make its directory").out.strip()
            self.kept = f"{self.directory}/kept"
            self.shared = ""
            look = "import hepti_mqtt, device_agent; print(hepti_mqtt.__version__)"
            found = self.run([self.python, "-c", look])
            if found.code != 0:
                said = (found.err.strip().splitlines() or ["it says nothing"])[-1]
                raise LabError(
                    f"{name}: {self.python} there has no Hepti ({said}); install it there (pip install hepti), or "
                    "name the interpreter that has it with `python:`"
                )
        except BaseException:
            self.close()
            raise

    def start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> Restartable[SshProcess]:
        """Start a process (no shell); its output goes to `name`.log in the host's directory, there."""
        return self._start(name, f"{name}!", arguments, environment)

    def talk(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> Restartable[SshProcess]:
        """Start a process as `start` does, with pipes for lines to and from it."""
        return self._start(name, name, arguments, environment)

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> Completed:
        """Run a command to its end; raises LabError if the host does not answer or the time is over."""
        done = self.shell(self._line("", arguments, environment), timeout_s)
        return Completed(_own_code(done.code), done.out, done.err)

    def provide(self, path: Path) -> str:
        """Copy a file or directory there once per content; return its path there."""
        files = _files(path)
        place = f"{self.directory}/provided/{_digest(path, files)}"
        target = f"{place}/{path.name}"
        if self.shell(f"test -e {shlex.quote(target)}").code == 0:
            return target
        # Unpacked beside and renamed, so that a copy that breaks off is never taken for a whole one.
        part = f"{place}.part"
        whole, half = shlex.quote(place), shlex.quote(part)
        line = f"mkdir -p {half} && tar -x -C {half} && mv {half} {whole}"
        with tempfile.TemporaryFile() as copy:
            _tar(copy, path, files)
            self.shell(line, COPY_S, stdin=copy, must=f"take a copy of {path}")
        return target

    def throttle(self, on: bool) -> None:
        """Do nothing: a board is as fast as it is."""

    def shell(
        self, line: str, timeout_s: float = 60.0, *, stdin: IO[bytes] | None = None, must: str | None = None
    ) -> Completed:
        """Run a line of shell there; raises LabError if there is no connection, or if it fails and `must` says what."""
        done = run_command(self.name, [*self._command, line], os.environ, timeout_s, stdin)
        if self._is_ssh and done.code == _LOST:
            advice = next((a for sign, a in _ADVICE if sign in done.err), "try the same by hand")
            said = " / ".join(done.err.strip().splitlines()[-2:]) or "no word"
            raise LabError(f"{self.name} cannot be reached: {said}: {advice.format(name=self._command[-1])}")
        if must is not None and done.code != 0:
            raise LabError(f"{self.name} cannot {must}: {done.err.strip() or f'exit code {done.code}'}")
        return done

    def close(self) -> None:
        """End every process that was started here, and the connection; a second call does nothing."""
        try:
            self._started.close()
        finally:
            if self._sockets is not None and self._sockets.is_dir():
                run_command(self.name, [*self._command[:-1], "-O", "exit", self._command[-1]], os.environ, CONNECT_S)
                shutil.rmtree(self._sockets, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _line(self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None) -> str:
        own = [f"{key}={value}" for key, value in (environment or {}).items()]
        around = [self.python, "-I", "-S", "-c", inspect.getsource(remote), self.directory, name]
        return f"exec {shlex.join(['env', *own, *around, *arguments])}"

    def _start(
        self, name: str, log: str, arguments: Sequence[str], environment: Mapping[str, str] | None
    ) -> Restartable[SshProcess]:
        place = f"{self.directory}/{name}"
        self.shell(f"rm -f {shlex.quote(f'{place}.log')}", must="begin a log")
        command = [*self._command, self._line(log, arguments, environment)]

        def begin() -> SshProcess:
            self.shell(f"rm -f {shlex.quote(f'{place}.pid')}", must="begin a process")
            # Always with pipes: the remote end takes a closed output for a lost connection.
            local = LocalProcess(name, command, os.environ, self._logs / f"{self.name}-{name}.ssh.log", pipes=True)
            return SshProcess(self, name, local)

        return self._started.start(name, begin)


def _own_code(code: int) -> int:
    """Return the exit code of a command there: a shell says 128 + n where a signal n has ended it."""
    return 128 - code if 128 < code < _LOST else code


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise LabError(f"{path} does not exist, so no host can be given it")
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def _digest(path: Path, files: Sequence[Path]) -> str:
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as data:
            inner = hashlib.file_digest(data, "sha256").hexdigest()
        whole.update(f"{file.relative_to(path.parent)}\0{inner}\n".encode())
    return whole.hexdigest()[:24]


def _tar(out: IO[bytes], path: Path, files: Sequence[Path]) -> None:
    with tarfile.open(fileobj=out, mode="w", dereference=True) as tar:  # a model directory may be links into a cache
        for file in files:
            tar.add(file, arcname=str(file.relative_to(path.parent)))
    out.seek(0)
