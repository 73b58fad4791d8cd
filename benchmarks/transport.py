"""Experiments of kind `transport`: what a message costs by each way between processes, rivals in one run.

Without `lab:` between four processes of this machine, with a broker; with it, between the hosts of a lab, throttled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil
from rich.console import Console

from benchmarks.errors import BenchError
from benchmarks.experiment import lab_of, numbers, require, whole, wholes, words
from benchmarks.lab.calibrate import Calibration, calibrate
from benchmarks.lab.hosts import Process
from benchmarks.lab.lab import Lab
from benchmarks.lab.spec import HUB, HostSpec, LabSpec, only
from benchmarks.provenance import FILE, Results, Writer, head
from benchmarks.tables import median_interval, ratio, table
from benchmarks.transport_host import KINDS
from benchmarks.transport_ways import WAYS
from hepti_mqtt.embedded_broker import start_broker

FLOOR: Final = "raw TCP"
PATIENCE_S: Final = 120.0
RANKS: Final = 4
_AT_ONCE: Final = 8 << 20  # bytes of messages in one case
_KEYS: Final = ("name", "kind", "lab", "rates", "dilation", "kilobytes", "exchanges", "ways", "rounds", "repeat")
_WHAT: Final = {
    "round trip": "There and back, two processes; milliseconds.",
    "one way": "Messages one after the other without waiting for answers, until the last is there; milliseconds each.",
    "all-gather": "Each process sends to all others, and waits for all; milliseconds.",
}


@dataclass(frozen=True, slots=True)
class TransportExperiment:
    """kilobytes: sizes of whole payloads, a header of 256 bytes included. repeat: exchanges in one round, at most."""

    name: str
    lab: LabSpec
    rates: tuple[float | None, ...]
    kilobytes: tuple[int, ...]
    exchanges: tuple[str, ...]
    ways: tuple[str, ...]
    rounds: int
    repeat: int
    seed: int = 0


def parse(data: Mapping[str, Any], base: Path) -> TransportExperiment:
    """Return the experiment of a mapping; raises ConfigError that names the key."""
    only("an experiment of kind transport", data, _KEYS)
    require(data, "name", "kilobytes", "exchanges", "ways")
    here = LabSpec("here", "local", tuple(HostSpec(f"rank{n}") for n in range(RANKS)))
    lab = lab_of(data["lab"], base, data.get("dilation")) if data.get("lab") else here
    rates = numbers(data, "rates", [])
    for rate in rates:
        lab.with_rate(rate)
    exchanges, ways = words(data, "exchanges", [], tuple(KINDS)), words(data, "ways", [], tuple(WAYS))
    rounds, repeat = whole(data, "rounds", 9, 1), whole(data, "repeat", 40, 1)
    sizes = wholes(data, "kilobytes", [], 1)
    return TransportExperiment(str(data["name"]), lab, rates or (None,), sizes, exchanges, ways, rounds, repeat)


def count(experiment: TransportExperiment) -> int:
    """Return the number of cases."""
    e = experiment
    return len(e.rates) * len(e.kilobytes) * len(e.exchanges) * len(e.ways)


def run(experiment: TransportExperiment, out: Path, writer: Writer, console: Console) -> None:
    """Measure and write it down; raises BenchError."""
    e = experiment
    emulated = e.lab.kind == "emulated"
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(e.lab, out.resolve() / "logs"))
        broker, pids = "", []
        if not emulated:
            broker = stack.enter_context(start_broker()).url
            pids = [process.pid for process in psutil.Process().children(recursive=True)]
        # The product that stands for computing is one thread's.
        one = {"OPENBLAS_NUM_THREADS": "1"}
        ranks = [h.talk("transport", "benchmarks.transport_host", environment=one) for h in lab.hosts.values()]
        addresses = [host.address for host in lab.hosts.values()]
        crew = Crew(ranks, addresses, e.ways, max(e.kilobytes) * 1024, broker, pids)
        for rate in e.rates:
            spec = e.lab.with_rate(rate)
            for name in (HUB, *lab.hosts) if rate is not None else ():
                lab.set_rate(name, rate or 0.0)
            if emulated:
                figures = calibrate(lab, spec, lambda line: console.print(line, markup=False))
                writer.add("lab", lab=asdict(spec), calibration=asdict(figures))
            lab.throttle(emulated)
            for record in _measured(crew, e):
                writer.add("case", rate=spec.rate_mbit, **record)
            lab.throttle(False)


def _measured(crew: Crew, e: TransportExperiment) -> Iterator[dict[str, Any]]:
    """Yield every way's record of every round of every case, ways in turns; the first round warms up."""
    for kind in e.exchanges:
        for nbytes in (1024 * kilobytes for kilobytes in e.kilobytes):
            repeat = max(4, min(e.repeat, _AT_ONCE // nbytes))
            for turn in range(e.rounds + 1):
                for way in e.ways[:: 1 if turn % 2 else -1]:
                    record = crew.measure(kind, nbytes, way, repeat)
                    if turn:
                        yield {"round": turn, **record}


class Crew:
    """Ranks that have reached each other by every way.

    addresses: of the ranks. largest: bytes of a message. broker: its URL, or empty where no way needs one; pids: its
    processes, whose CPU time counts.
    """

    def __init__(
        self,
        ranks: Sequence[Process],
        addresses: Sequence[str],
        ways: Sequence[str],
        largest: int,
        broker: str,
        pids: Sequence[int],
    ) -> None:
        self._ranks, self._broker = ranks, pids
        spec = {"addresses": addresses, "broker": broker, "ways": ways, "largest": largest}
        for number, rank in enumerate(ranks):
            rank.send(json.dumps({**spec, "rank": number}))
        self._tell({"ports": self._hear()})
        self._hear()

    def measure(self, kind: str, nbytes: int, way: str, repeat: int) -> dict[str, Any]:
        """Return seconds of a message (or exchange), and CPU seconds of each who takes part in it."""
        self._tell({"kind": kind, "bytes": nbytes, "way": way, "repeat": repeat})
        self._hear()
        before = self._broker_cpu_s()
        self._tell({"go": True}, reversed(self._ranks))  # who receives waits before rank 0 sends
        times = [words["times"] for words in self._hear()]
        self._tell({"stop": True})
        cpu_s = [words["cpu_s"] for words in self._hear()]
        broker_cpu_s = (self._broker_cpu_s() - before) / repeat
        if kind == "one way":
            seconds = (times[1][0] - times[0][0]) / repeat
        else:
            seconds = median(times[0]) if kind == "round trip" else max(mean for (mean,) in times)
        cpu = {"sender_cpu_s": cpu_s[0], "receiver_cpu_s": cpu_s[1], "broker_cpu_s": broker_cpu_s}
        return {"kind": kind, "bytes": nbytes, "way": way, "seconds": seconds, **cpu}

    def _tell(self, words: dict[str, Any], ranks: Iterable[Process] | None = None) -> None:
        for rank in self._ranks if ranks is None else ranks:
            rank.send(json.dumps(words))

    def _hear(self) -> list[dict[str, Any]]:
        heard = [json.loads(rank.receive(PATIENCE_S)) for rank in self._ranks]
        for number, said in enumerate(heard):
            if "error" in said:
                raise BenchError(f"process {number} of the benchmark stopped: {said['error']}")
        return heard

    def _broker_cpu_s(self) -> float:
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in self._broker) / 1e9


def write(results: Results, directory: Path) -> list[Path]:
    """Write report.md beside the results: medians per kind of exchange, with ratios to raw TCP; then CPU times."""
    lines = head(results.header["experiment"], results.header)
    lines += [
        "Rivals in turns, medians of the rounds; in brackets the median ratio to raw TCP in the same round. Every"
    ]
    lines += ["payload has a header of 256 bytes; brokers get one joined payload."]
    cases = results.of("case")
    for rate, kind in dict.fromkeys((r["rate"], r["kind"]) for r in cases):
        mine = [r for r in cases if (r["rate"], r["kind"]) == (rate, kind)]
        at = "" if rate is None else f" at {rate:g} Mbit/s"
        lines += ["", f"## {kind.capitalize()}{at}", "", _WHAT[kind], "", *_table(mine, "seconds", 1e3)]
        if rate is not None:
            lines += ["", "CPU of the first host, milliseconds:", "", *_table(mine, "sender_cpu_s", 1e3)]
    one_way = [r for r in cases if r["kind"] == "one way" and r["rate"] is None]
    for name, field in (("send", "sender_cpu_s"), ("receive", "receiver_cpu_s"), ("pass on", "broker_cpu_s")):
        if one_way:
            lines += ["", f"## CPU to {name} a message one way", "", "Microseconds.", "", *_table(one_way, field, 1e6)]
    for r in results.of("lab"):
        rate = r["lab"]["rate_mbit"]
        lines += ["", f"## The hosts at {rate} Mbit/s", "", *Calibration.from_dict(r["calibration"]).lines()]
    text = directory / "report.md"
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [directory / FILE, text]


def _table(records: Sequence[Mapping[str, Any]], field: str, unit: float) -> list[str]:
    ways = sorted(dict.fromkeys(r["way"] for r in records), key=lambda way: way != FLOOR)
    rows = []
    for nbytes in sorted({r["bytes"] for r in records}):
        times = {
            way: {r["round"]: r[field] for r in records if (r["bytes"], r["way"]) == (nbytes, way)} for way in ways
        }
        floor = {turn: value for turn, value in times.get(FLOOR, {}).items() if value > 0}
        cells = []
        for way in ways:
            against = f" ({ratio(times[way], floor).median:.2f})" if floor and way != FLOOR else ""
            cells.append(f"{median_interval(times[way].values()).median * unit:.3g}{against}")
        rows.append([f"{nbytes // 1024} KB", *cells])
    return table(("payload", *ways), rows)
