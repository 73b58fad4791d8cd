"""`hepti bench transport`: what a message costs by each way between processes of this machine, rivals in one run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from hepti_mqtt.bench import transport_report
from hepti_mqtt.bench.provenance import provenance
from hepti_mqtt.bench.transport_crew import Child, Crew, Record
from hepti_mqtt.embedded_broker import start_broker

OUT: Final = Path("results/transport")
KB: Final = 1024
SIZES: Final = (KB, 16 * KB, 64 * KB, 128 * KB, 350 * KB, 512 * KB, 1024 * KB, 4096 * KB)
QUICK_SIZES: Final = (KB, 64 * KB, 512 * KB)
KINDS: Final = ("round trip", "round trip, computing", "one way", "fan-out", "all-gather")
WAYS: Final = ("raw TCP", "mesh", "broker, paho", "broker, paho, QoS 1", "broker, ours", "broker, ours by paho")
RANKS: Final = 4
LOOPBACK: Final = "127.0.0.1"
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


def run(options: Options) -> dict[str, Any]:
    """Measure, write JSON and a report to `options.out`, and return what the JSON holds; raises BenchError."""
    with ExitStack() as stack:
        broker = stack.enter_context(start_broker())
        pids = [process.pid for process in psutil.Process().children(recursive=True)]
        ranks = [stack.enter_context(Child(rank)) for rank in range(RANKS)]
        crew = Crew(ranks, [LOOPBACK] * RANKS, options.ways, max(options.sizes), broker.url, pids)
        records = list(measure(crew, options))
        kind = broker.kind
    return write(options, records, {"broker": kind})


def write(options: Options, records: list[Record], besides: dict[str, Any]) -> dict[str, Any]:
    """Write JSON and a report to `options.out`, and return what the JSON holds."""
    results = {
        "provenance": provenance(),
        "command": options.command,
        **besides,
        "rounds": options.rounds,
        "records": [record._asdict() for record in records],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "transport.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "transport.md").write_text("\n".join(transport_report.markdown(results)) + "\n")
    return results


def measure(crew: Crew, options: Options) -> Iterator[Record]:
    """Return every way's record of every round of every case, ways in turns; the first round warms up."""
    for kind in options.kinds:
        for nbytes in options.sizes:
            repeat = max(4, min(options.repeat, _AT_ONCE // nbytes))
            for turn in range(options.rounds + 1):
                for way in options.ways[:: 1 if turn % 2 else -1]:
                    record = crew.measure(kind, nbytes, way, turn, repeat)
                    if turn:
                        yield record
