"""Experiments of kind `chain`: the five chained MatMuls on two hosts of a lab, beside what the paper says of them."""

from __future__ import annotations

import json
import random
import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from rich.console import Console

from benchmarks import plots
from benchmarks.chain import KINDS, PRIMARY, SECONDARY, Case
from benchmarks.errors import LabError
from benchmarks.experiment import lab_of, numbers, require, whole, wholes
from benchmarks.lab.calibrate import Calibration, calibrate
from benchmarks.lab.hosts import Process
from benchmarks.lab.lab import Lab
from benchmarks.lab.spec import HUB, LabSpec, only
from benchmarks.provenance import FILE, Results, Writer, head
from benchmarks.runner import progress
from benchmarks.tables import Interval, ratio, table
from hepti_mqtt.core.errors import ConfigError

PATIENCE_S: Final = 600.0
TOLERANCE: Final = 1e-4  # of five f32 sums over 1024 terms whose results are of size 1
_KEYS: Final = ("name", "kind", "lab", "rates", "cpu", "rows", "shares", "chunks", "rounds", "seed", "dilation")
# Section 3 of the Hepti paper (ICS 2024). Figure (a): 940 Mbit/s, 90 % of 256 rows on the secondary device; the gain is
# over every m of the figure. Figure (b), m = 256: the best share of the secondary in percent, by (Mbit/s, percent of
# its CPU). Only figures that its text states are here.
ROWS: Final = 256
ALONE_MS, TOGETHER_MS = 109.3, 55.1
GAIN_PERCENT: Final = (25.1, 64.2)
BEST_SHARE: Final[Mapping[tuple[float, int], int]] = {(940, 100): 90, (240, 100): 70, (940, 25): 50, (240, 25): 30}


class Condition(NamedTuple):
    """Rate of the links in Mbit/s (None: as they are), and percent of the secondary device's CPU."""

    rate_mbit: float | None
    cpu_percent: int

    @property
    def label(self) -> str:
        """Return it for people."""
        rate = "links as they are" if self.rate_mbit is None else f"{self.rate_mbit:g} Mbit/s"
        return f"{rate}, CPU {self.cpu_percent} %"


@dataclass(frozen=True, slots=True)
class ChainExperiment:
    """rows: values of m. shares: percents of the rows on the secondary. chunks: pieces of the overlapped run."""

    name: str
    lab: LabSpec
    conditions: tuple[Condition, ...]
    rows: tuple[int, ...]
    shares: tuple[int, ...]
    chunks: int
    rounds: int
    seed: int

    @property
    def cases(self) -> list[Case]:
        """Return the cases of a round: one device, and for each share the parts, the way, and both together."""
        split = [Case(m, share, 1, kind) for m in self.rows for share in self.shares for kind in KINDS]
        chunked = [Case(m, share, self.chunks) for m in self.rows for share in self.shares if self.chunks > 1]
        return [*(Case(m) for m in self.rows), *split, *chunked]

    def spec(self, condition: Condition) -> LabSpec:
        """Return the lab under a condition: its rate, and the secondary's target in GFLOP/s."""
        spec = self.lab.with_rate(condition.rate_mbit)
        part = condition.cpu_percent / 100
        hosts = (replace(h, gflops=h.gflops and h.gflops * part) if h.name == SECONDARY else h for h in spec.hosts)
        return replace(spec, hosts=tuple(hosts))


def parse(data: Mapping[str, Any], base: Path) -> ChainExperiment:
    """Return the experiment of a mapping; `base`: where its paths begin. Raises ConfigError that names the key."""
    only("an experiment of kind chain", data, _KEYS)
    require(data, "name", "lab", "rows", "shares")
    lab = lab_of(data["lab"], base, data.get("dilation"))
    cpu, shares = wholes(data, "cpu", [100], 1), wholes(data, "shares", [], 1)
    if max(*cpu, *shares) > 100:
        raise ConfigError("`cpu` and `shares` are percents: at most 100")
    if cpu != (100,) and lab.host(SECONDARY).gflops is None:
        raise ConfigError(f"`cpu` needs an emulated lab whose host {SECONDARY} has `gflops:` to take a part of")
    lab.host(PRIMARY)
    conditions = tuple(Condition(*each) for each in product(numbers(data, "rates", []) or (lab.rate_mbit,), cpu))
    rows, chunks = wholes(data, "rows", [], 1), whole(data, "chunks", 1, 1)
    rounds, seed = whole(data, "rounds", 5, 1), whole(data, "seed", 0, 0)
    return ChainExperiment(str(data["name"]), lab, conditions, rows, shares, chunks, rounds, seed)


def count(experiment: ChainExperiment) -> int:
    """Return the number of cases under all conditions."""
    return len(experiment.conditions) * len(experiment.cases)


def run(experiment: ChainExperiment, out: Path, writer: Writer, console: Console) -> None:
    """Measure and write it down; raises the error of a lab or a device."""
    e = experiment
    with ExitStack() as stack:
        bar = stack.enter_context(progress(console))
        task = bar.add_task(e.name, total=count(e) * e.rounds)
        lab = stack.enter_context(Lab(e.lab, out / "logs"))
        broker = lab.hub.talk("broker", "benchmarks.lab.broker", lab.hub.address)
        url = json.loads(broker.receive(PATIENCE_S))["url"]
        # NumPy computes the reference only; its threads must not outlive a case.
        one = {"OPENBLAS_NUM_THREADS": "1"}
        words = ("benchmarks.chain", "--broker", url, "--run", "chain", "--seed", str(e.seed), "--device")
        pair = {name: lab.host(name).talk("chain", *words, name, environment=one) for name in (PRIMARY, SECONDARY)}
        for process in pair.values():
            _said(process)
        for condition in e.conditions:
            spec = e.spec(condition)
            for name in (HUB, PRIMARY, SECONDARY) if spec.rate_mbit is not None else ():
                lab.set_rate(name, spec.rate_mbit or 0.0)
            figures = calibrate(lab, spec, lambda line: console.print(line, markup=False))
            writer.add("lab", **condition._asdict(), lab=asdict(spec), calibration=asdict(figures))
            lab.throttle(True)
            bar.update(task, description=condition.label)
            for case in e.cases:
                measure(pair, case)
            for number in range(e.rounds):
                for case in random.Random(f"{e.seed}/{number}").sample(e.cases, len(e.cases)):
                    writer.add("case", round=number, **condition._asdict(), **measure(pair, case))
                    bar.advance(task)
            lab.throttle(False)
        for process in (*pair.values(), broker):
            process.signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


def measure(pair: Mapping[str, Process], case: Case) -> dict[str, Any]:
    """Return a record of one case; raises LabError if a device fails or the product is wrong."""
    for process in pair.values():
        process.send(json.dumps(asdict(case)))
    for process in pair.values():
        _said(process)
    for process in reversed(pair.values()):  # type: ignore[call-overload]  # the secondary waits before the primary sends
        process.send("")
    said = {device: _said(process) for device, process in pair.items()}
    error = max(words["error"] for words in said.values() if words["error"] is not None)
    if not error <= TOLERANCE:  # NaN is wrong too
        raise LabError(f"{case} gives a product that differs from NumPy's by {error:g}; its time means nothing")
    return {
        **asdict(case),
        "latency_s": said[PRIMARY]["latency_s"],
        "primary_compute_s": said[PRIMARY]["compute_s"],
        "secondary_compute_s": said[SECONDARY]["compute_s"],
        "bytes": sum(words["sent_bytes"] for words in said.values()),
        "error": error,
    }


def _said(process: Process) -> dict[str, Any]:
    words: dict[str, Any] = json.loads(process.receive(PATIENCE_S))
    return words


# -- what it says -----------------------------------------------------------------------------------------------------


class Key(NamedTuple):
    """One point of the curves."""

    condition: Condition
    rows: int
    share: int


@dataclass(frozen=True, slots=True)
class Point:
    """Medians over the rounds, in ms.

    alone: one device. compute: the slower device, undisturbed. way: scatter and gather alone. added: both together, as
    the paper adds them. split: measured, scatter and gather in one piece. chunks: in several, None without. gain: one
    device over two, the faster of both forms, within rounds.
    """

    alone: float
    compute: float
    way: float
    added: float
    split: float
    chunks: float | None
    gain: Interval


_CURVES: Final = {"added": "compute + way", "split": "one piece", "chunks": "in chunks"}


def points(records: Sequence[Mapping[str, Any]]) -> dict[Key, Point]:
    """Return every point that was measured in full."""
    ms: dict[tuple[Key, str], dict[int, float]] = defaultdict(dict)
    for r in records:
        key, number = Key(Condition(r["rate_mbit"], r["cpu_percent"]), r["rows"], r["share"]), r["round"]
        kind = "chunks" if r["chunks"] > 1 else r["kind"]
        ms[key, kind][number] = 1e3 * r["latency_s"]
        if kind == "parts":
            ms[key, kind][number] = 1e3 * max(r["primary_compute_s"], r["secondary_compute_s"])
    found = {}
    for key in sorted({key for key, _ in ms if key.share}):
        alone = ms[key._replace(share=0), "work"]
        parts, echo, work, chunks = (ms[key, kind] for kind in ("parts", "echo", "work", "chunks"))
        shared = parts.keys() & echo.keys() & work.keys() & alone.keys()
        if not shared:
            continue
        best = min((work, chunks) if chunks else (work,), key=lambda times: median(times.values()))
        compute, way, split = (median(times[n] for n in shared) for times in (parts, echo, work))
        added = median(parts[n] + echo[n] for n in shared)
        several = median(chunks.values()) if chunks else None
        found[key] = Point(median(alone.values()), compute, way, added, split, several, ratio(alone, best))
    return found


def best_shares(found: Mapping[Key, Point], rows: int, curve: str) -> dict[Condition, int]:
    """Return the share with the least `curve` (a field of Point) for each condition at m = rows."""
    best: dict[Condition, tuple[float, int]] = {}
    for key, point in found.items():
        if key.rows == rows and (value := getattr(point, curve)) is not None:
            best[key.condition] = min(best.get(key.condition, (value, key.share)), (value, key.share))
    return {condition: share for condition, (_, share) in best.items()}


def write(results: Results, directory: Path) -> list[Path]:
    """Write report.md and a plot beside the results; return the files."""
    text, found = directory / "report.md", points(results.of("case"))
    drawn = [_plot(found, directory / "shares.png")] if found else []
    said = [*_markdown(results, found), *(f"![{path.stem}]({path.name})" for path in drawn)]
    text.write_text("\n".join(said) + "\n", encoding="utf-8")
    return [directory / FILE, text, *drawn]


def _markdown(results: Results, found: Mapping[Key, Point]) -> Iterator[str]:
    yield from head(results.header["experiment"], results.header)
    for r in results.of("lab"):
        yield f"## Lab {r['lab']['name']}, {Condition(r['rate_mbit'], r['cpu_percent']).label}\n"
        yield from Calibration.from_dict(r["calibration"]).lines()
    if not found:
        yield "No point was measured in full yet."
        return
    yield "## One device and two at the best share\n"
    lines = []
    for condition, m in sorted({(key.condition, key.rows) for key in found}, key=_order):
        key, p = max(((k, p) for k, p in found.items() if k[:2] == (condition, m)), key=lambda kp: kp[1].gain.median)
        times, gain = (p.alone, min(p.split, p.chunks or p.split)), 100 * (1 - 1 / p.gain.median)
        lines.append([condition.label, m, *times, key.share, f"{p.gain.median:.2f}", p.gain.words(2), f"{gain:.1f}"])
    yield from table(("condition", "m", "one, ms", "two, ms", "share, %", "one / two", "interval", "gain, %"), lines)
    yield "\nThe share is that of the best ratio of the same rounds, so the ratio is a little too good. The paper:"
    yield f"{GAIN_PERCENT[0]} % to {GAIN_PERCENT[1]} %, and {ALONE_MS} ms against {TOGETHER_MS} ms at m = {ROWS}.\n"
    rows = _rows(found)
    yield f"## Best share of the secondary device in percent, m = {rows}\n"
    best = [best_shares(found, rows, curve) for curve in _CURVES]
    conditions = sorted({key.condition for key in found}, key=lambda c: _order((c, 0)))
    yield from table(
        ("condition", *_CURVES.values(), "paper"),
        [[c.label, *(of.get(c) for of in best), _paper(c, rows)] for c in conditions],
    )
    yield f"\n## Over the share, m = {rows}, ms\n"
    yield from table(
        ("condition", "share, %", "one device", "compute", "way", *_CURVES.values()),
        [
            [k.condition.label, k.share, p.alone, p.compute, p.way, p.added, p.split, p.chunks]
            for k, p in sorted(found.items(), key=lambda kp: (_order((kp[0].condition, 0)), kp[0].share))
            if k.rows == rows
        ],
    )
    yield ""


def _order(key: tuple[Condition, int]) -> tuple[float, int, int]:
    return -(key[0].rate_mbit or 0), -key[0].cpu_percent, key[1]


def _paper(condition: Condition, rows: int) -> int | None:
    return BEST_SHARE.get((condition.rate_mbit or 0, condition.cpu_percent)) if rows == ROWS else None


def _rows(found: Mapping[Key, Point]) -> int:
    """Return the m that shares are shown for: the paper's, or else the largest."""
    rows = {key.rows for key in found}
    return ROWS if ROWS in rows else max(rows)


def _plot(found: Mapping[Key, Point], out: Path) -> Path:
    """Draw latency over the secondary's share, a panel for each condition."""
    rows = _rows(found)
    conditions = sorted({key.condition for key in found}, key=lambda c: _order((c, 0)))
    figure, panels = plots.subplots(len(conditions), 6, 4, columns=2)
    for axes, condition in zip(panels, conditions, strict=True):
        mine = sorted((key.share, p) for key, p in found.items() if (key.condition, key.rows) == (condition, rows))
        axes.axhline(mine[0][1].alone, color="grey", label="ours, one device")
        for (curve, label), style in zip(_CURVES.items(), ("o-", "^:", "s--"), strict=True):
            values = [(share, getattr(p, curve)) for share, p in mine if getattr(p, curve) is not None]
            axes.plot(*zip(*values, strict=True), style, label=f"ours, {label}") if values else None
        best = _paper(condition, rows)
        if best is not None:
            axes.axvline(best, color="black", linestyle="-.", label="paper, best share")
        if best is not None and condition == Condition(940, 100):
            axes.plot([90], [TOGETHER_MS], "k*", markersize=12, label="paper, 90 %")
            axes.plot([0], [ALONE_MS], "kx", label="paper, one device")
        axes.set(title=f"{condition.label}, m = {rows}", xlabel="rows on the secondary device, %", ylabel="ms")
        axes.legend(fontsize="small")
    return plots.save(figure, out)
