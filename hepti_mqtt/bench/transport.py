"""`hepti bench transport`: what a message costs by each way between processes of this machine, rivals in one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import psutil

from hepti_mqtt.bench import transport_report
from hepti_mqtt.bench.provenance import provenance
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.errors import BenchError

OUT: Final = Path("results/transport")
KB: Final = 1024
SIZES: Final = (KB, 16 * KB, 64 * KB, 128 * KB, 350 * KB, 512 * KB, 1024 * KB, 4096 * KB)
QUICK_SIZES: Final = (KB, 64 * KB, 512 * KB)
KINDS: Final = ("round trip", "round trip, computing", "one way", "fan-out", "all-gather")
WAYS: Final = ("raw TCP", "mesh", "broker, paho", "broker, paho, QoS 1", "broker, ours", "broker, ours by paho")
RANKS: Final = 4
_PATIENCE_S: Final = 60.0
_AT_ONCE: Final = 8 << 20  # bytes of messages in one case


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure; sizes are those of whole payloads, a header of 256 bytes included.

    repeat: exchanges of a case in one round, at most.
    """

    out: Path = OUT
    sizes: tuple[int, ...] = SIZES
    kinds: tuple[str, ...] = KINDS
    ways: tuple[str, ...] = WAYS
    rounds: int = 9
    repeat: int = 40
    command: str = ""

    @classmethod
    def quick(cls, out: Path, command: str) -> Options:
        """Return a sample."""
        return cls(out, QUICK_SIZES, rounds=3, command=command)


class Record(NamedTuple):
    """One way in one round of one case: seconds of a message (or exchange), and CPU seconds of each who takes part."""

    kind: str
    bytes: int
    way: str
    round: int
    seconds: float
    sender_cpu_s: float
    receiver_cpu_s: float
    broker_cpu_s: float


def run(options: Options) -> dict[str, Any]:
    """Measure, write JSON and a report to `options.out`, and return what the JSON holds; raises BenchError."""
    with ExitStack() as stack:
        broker = stack.enter_context(start_broker())
        crew = stack.enter_context(_Crew(broker.url, options))
        records = list(_measure(crew, options))
        kind = broker.kind
    results = {
        "provenance": provenance(),
        "command": options.command,
        "broker": kind,
        "rounds": options.rounds,
        "records": [record._asdict() for record in records],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "transport.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "transport.md").write_text("\n".join(transport_report.markdown(results)) + "\n")
    return results


def _measure(crew: _Crew, options: Options) -> Iterator[Record]:
    for kind in options.kinds:
        for nbytes in options.sizes:
            repeat = max(4, min(options.repeat, _AT_ONCE // nbytes))
            for turn in range(options.rounds + 1):
                for way in options.ways[:: 1 if turn % 2 else -1]:
                    record = crew.measure(kind, nbytes, way, turn, repeat)
                    if turn:  # the first one warms up
                        yield record


class _Crew:
    """The processes."""

    def __init__(self, broker: str, options: Options) -> None:
        self._hosts: list[subprocess.Popen[str]] = []
        self._broker = [process.pid for process in psutil.Process().children(recursive=True)]
        spec = {"count": RANKS, "broker": broker, "ways": options.ways, "largest": max(options.sizes)}
        with ExitStack() as failed:
            failed.callback(self._end)
            for rank in range(RANKS):
                self._hosts.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "hepti_mqtt.bench.transport_host"],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                        # The product that stands for computing is one thread's.
                        env={**_environment(), "OPENBLAS_NUM_THREADS": "1"},
                    )
                )
                self._tell([rank], {**spec, "rank": rank})
            self._tell(range(RANKS), {"ports": self._hear()})
            self._hear()
            failed.pop_all()

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def measure(self, kind: str, nbytes: int, way: str, turn: int, repeat: int) -> Record:
        """Let everybody do one case by one way."""
        self._tell(range(RANKS), {"kind": kind, "bytes": nbytes, "way": way, "repeat": repeat})
        self._hear()
        before = self._broker_cpu_s()
        self._tell(reversed(range(RANKS)), {"go": True})  # who receives waits before rank 0 sends
        times = [words["times"] for words in self._hear()]
        self._tell(range(RANKS), {"stop": True})
        cpu_s = [words["cpu_s"] for words in self._hear()]
        broker_cpu_s = (self._broker_cpu_s() - before) / repeat
        if kind in ("one way", "fan-out"):
            ends = times[1:2] if kind == "one way" else times[1:]
            seconds = (max(end for (end,) in ends) - times[0][0]) / repeat
        else:
            seconds = median(times[0]) if "round trip" in kind else max(mean for (mean,) in times)
        return Record(kind, nbytes, way, turn, seconds, cpu_s[0], cpu_s[1], broker_cpu_s)

    def _tell(self, ranks: Sequence[int] | Iterator[int], words: dict[str, Any]) -> None:
        for rank in ranks:
            pipe = self._hosts[rank].stdin
            assert pipe is not None
            try:
                print(json.dumps(words), file=pipe, flush=True)
            except OSError as error:
                raise BenchError(f"process {rank} of the benchmark has ended: {error}") from error

    def _hear(self) -> list[dict[str, Any]]:
        heard = []
        for rank, host in enumerate(self._hosts):
            assert host.stdout is not None
            line = host.stdout.readline()
            words = json.loads(line) if line else {"error": "it has ended; what it said stands above"}
            if "error" in words:
                raise BenchError(f"process {rank} of the benchmark stopped: {words['error']}")
            heard.append(words)
        return heard

    def _broker_cpu_s(self) -> float:
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in self._broker) / 1e9

    def _end(self) -> None:
        for host in self._hosts:
            with host:
                assert host.stdin is not None
                host.stdin.close()
                try:
                    host.wait(_PATIENCE_S)
                except subprocess.TimeoutExpired:
                    host.kill()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
