"""The processes of `hepti bench transport`, on this machine or on hosts of a lab, and what they do together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, Protocol, Self

from hepti_mqtt.errors import BenchError

MODULE: Final = "hepti_mqtt.bench.transport_host"
# The product that stands for computing is one thread's.
ENVIRONMENT: Final[Mapping[str, str]] = {"OPENBLAS_NUM_THREADS": "1"}
PATIENCE_S: Final = 120.0
_END_S: Final = 60.0


class Record(NamedTuple):
    """One way in one round of one case: seconds of a message (or exchange), and CPU seconds of each who takes part.

    rate: Mbit/s of the hosts' links, None on one machine.
    """

    kind: str
    bytes: int
    way: str
    round: int
    seconds: float
    sender_cpu_s: float
    receiver_cpu_s: float
    broker_cpu_s: float
    rate: float | None = None


class Rank(Protocol):
    """A process that speaks lines of text; `hepti_mqtt.lab.hosts.Talking` is one."""

    def send(self, line: str) -> None:
        """Write one line to it; raises HeptiError if it has ended."""
        ...

    def receive(self, timeout_s: float) -> str:
        """Return its next line; raises HeptiError if it ends or says nothing."""
        ...


class Child:
    """A `Rank` on this machine; a context manager that ends it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        path = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": path, **ENVIRONMENT}
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", MODULE]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def send(self, line: str) -> None:
        """Write one line to it."""
        assert self._process.stdin is not None
        try:
            print(line, file=self._process.stdin, flush=True)
        except OSError as error:
            raise BenchError(f"process {self._rank} of the benchmark has ended: {error}") from error

    def receive(self, _timeout_s: float) -> str:
        """Return its next line; every wait of it has an end."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise BenchError(f"process {self._rank} of the benchmark stopped: it has ended; what it said stands above")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


class Crew:
    """Ranks that have reached each other by every way.

    addresses: of the ranks. largest: bytes of a message. broker: its URL, or empty where no way needs one; pids: its
    processes, whose CPU time counts.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        addresses: Sequence[str],
        ways: Sequence[str],
        largest: int,
        broker: str = "",
        pids: Sequence[int] = (),
    ) -> None:
        self._ranks, self._broker = ranks, pids
        spec = {"addresses": addresses, "broker": broker, "ways": ways, "largest": largest}
        for number, rank in enumerate(ranks):
            rank.send(json.dumps({**spec, "rank": number}))
        self._tell({"ports": self._hear()})
        self._hear()

    def measure(self, kind: str, nbytes: int, way: str, turn: int, repeat: int) -> Record:
        """Let everybody do one case by one way."""
        self._tell({"kind": kind, "bytes": nbytes, "way": way, "repeat": repeat})
        self._hear()
        before = self._broker_cpu_s()
        self._tell({"go": True}, reversed(self._ranks))  # who receives waits before rank 0 sends
        times = [words["times"] for words in self._hear()]
        self._tell({"stop": True})
        cpu_s = [words["cpu_s"] for words in self._hear()]
        broker_cpu_s = (self._broker_cpu_s() - before) / repeat
        if kind in ("one way", "fan-out"):
            ends = times[1:2] if kind == "one way" else times[1:]
            seconds = (max(end for (end,) in ends) - times[0][0]) / repeat
        else:
            seconds = median(times[0]) if "round trip" in kind else max(mean for (mean,) in times)
        return Record(kind, nbytes, way, turn, seconds, cpu_s[0], cpu_s[1], broker_cpu_s)

    def _tell(self, words: dict[str, Any], ranks: Iterable[Rank] | None = None) -> None:
        for rank in self._ranks if ranks is None else ranks:
            rank.send(json.dumps(words))

    def _hear(self) -> list[dict[str, Any]]:
        heard = []
        for number, rank in enumerate(self._ranks):
            words = json.loads(rank.receive(PATIENCE_S))
            if "error" in words:
                raise BenchError(f"process {number} of the benchmark stopped: {words['error']}")
            heard.append(words)
        return heard

    def _broker_cpu_s(self) -> float:
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in self._broker) / 1e9
