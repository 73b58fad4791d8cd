"""The processes that were started on a host: stopped, killed all at once like by a pulled plug, and started again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from hepti_mqtt.lab.hosts import Talking

_END_S: Final = 10.0


class _Closable(Talking, Protocol):
    def close(self) -> None:
        """End it, and what belongs to it here."""
        ...


P = TypeVar("P", bound=_Closable)


@dataclass
class Restartable(Generic[P]):
    """A process of a host, `Running` and `Talking`; it stays the same one when its host is restarted."""

    name: str
    begin: Callable[[], P]
    now: P

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


class Started(Generic[P]):
    """All that was started on one host."""

    def __init__(self) -> None:
        self._all: list[Restartable[P]] = []
        self._killed: list[Restartable[P]] = []

    def start(self, name: str, begin: Callable[[], P]) -> Restartable[P]:
        """Return the process that `begin` starts, now and whenever the host is restarted."""
        process = Restartable(name, begin, begin())
        self._all.append(process)
        return process

    def signal(self, number: int) -> None:
        """Send a signal to every process."""
        for process in self._all:
            process.signal(number)

    def kill(self, besides: Callable[[], None] = lambda: None) -> None:
        """End every process at once; `restart` knows what ran. besides: ends what they have left behind."""
        self._killed += [process for process in self._all if process.poll() is None]
        self.end(besides)

    def restart(self) -> None:
        """Start again what ran when `kill` was called, with the same commands."""
        again, self._killed = self._killed, []
        for process in again:
            process.now.close()
            process.now = process.begin()

    def end(self, besides: Callable[[], None] = lambda: None) -> None:
        """End every process at once."""
        self.signal(signal.SIGKILL)
        besides()
        for process in self._all:
            process.wait(_END_S)

    def close(self) -> None:
        """End every process and forget it; a second call does nothing."""
        while self._all:
            self._all.pop().now.close()


class Pluggable(Generic[P]):
    """What a host can do to all that was started on it."""

    _started: Started[P]

    def signal(self, number: int) -> None:
        """Send a signal to every process that was started on the host."""
        self._started.signal(number)

    def kill(self) -> None:
        """Pull the plug: every process ends at once; `restart` knows what ran."""
        self._started.kill()

    def restart(self) -> None:
        """Start again what runs, or ran when the host was killed, with the same commands."""
        self.kill()
        self._started.restart()
