"""The first tables of a report: every cell at a glance, what Hepti chose beside the best, predicted beside measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from hepti_mqtt.bench import foreseen
from hepti_mqtt.bench.contenders import ALONE, AUTO, CONTENDERS, SITE
from hepti_mqtt.bench.experiment import FREE, LATENCY, Cell, size_words
from hepti_mqtt.bench.plays import plan_words
from hepti_mqtt.bench.results import Results

_ORDER: Final = {name: place for place, name in enumerate(CONTENDERS)}

Column = tuple[float | None, tuple[str, ...]]  # rate, devices


@dataclass(frozen=True, slots=True)
class Figures:
    """One cell: the median of its rounds in ms, what was predicted last (None without), and the last turn.

    ms: of a request; of requests that are asked at once, what one of them takes of the time for all: the inverse of the
    throughput. by_round: the same, whose median it is.
    """

    cell: Cell
    ms: float
    predicted_ms: float | None
    turn: Any
    by_round: Mapping[int, float]

    @property
    def column(self) -> Column:
        """Return where it stands in a table."""
        return self.cell.rate, self.cell.devices


def figures(results: Results) -> list[Figures]:
    """Return the figures of every cell that has times."""
    last = {r["cell"]: r for r in results.turns() if r["ok"]}
    found = []
    for name, cell in results.cells().items():
        if name in last:
            turns = [r for r in results.turns() if r["cell"] == name and r["ok"]]
            if cell.requests:
                by_round = {r["round"]: 1e3 / median(r["requests_per_s"]) for r in turns}
                told = [r for r in turns if r.get("active")] or turns
                per_s = foreseen.requests_per_s(told[-1])
                predicted_ms = None if per_s is None else 1e3 / per_s
            else:
                by_round, predicted_ms = results.medians(name), last[name].get("predicted_ms")
            found.append(Figures(cell, median(by_round.values()), predicted_ms, turns[-1], by_round))
    return found


def overview(found: Sequence[Figures]) -> Iterator[str]:
    """Return a table per lab, model and length, where there is more than one column; then choices and predictions."""
    subjects = sorted({(f.cell.lab, f.cell.model, f.cell.tokens) for f in found}, key=repr)
    for lab, model, tokens in subjects:
        own = [f for f in found if (f.cell.lab, f.cell.model, f.cell.tokens) == (lab, model, tokens)]
        if len({f.column for f in own}) > 1:
            yield f"## {model}, {size_words(tokens)}, {lab}: median ms (predicted)"
            yield ""
            yield from matrix(own)
            yield ""
            yield from choices(own)
            yield ""
    yield from predictions(found)


def matrix(found: Sequence[Figures]) -> Iterator[str]:
    """Return contenders by rates and devices, the fastest of each column in bold."""
    columns = sorted({f.column for f in found}, key=lambda c: (-(c[0] or 0.0), len(c[1]), c[1]))
    rows = sorted({_row(f.cell) for f in found}, key=lambda r: (_ORDER.get(r[0], len(_ORDER)), *r[1:]))
    names = {devices for _, devices in columns}
    heads, before = [], object()
    for rate, devices in columns:
        alike = sum(len(other) == len(devices) for other in names) > 1
        hosts = ", ".join(devices) if alike else str(len(devices))
        first = "" if rate is None or rate == before else f"{rate:g} Mbit/s: "
        heads.append(first + hosts)
        before = rate
    counted = [f for f in found if not f.cell.requests] or found  # times under load hold the waiting
    best = {column: min((f.ms for f in counted if f.column == column), default=0.0) for column in columns}
    by_place = {(_row(f.cell), f.column): f for f in found if not f.cell.copy}
    yield "| devices | " + " | ".join(heads) + " |"
    yield "|---" + "|---:" * len(columns) + "|"
    for row in rows:
        cells = [_words(by_place.get((row, column)), best[column]) for column in columns]
        yield (
            f"| {' '.join([row[0], *(word for word in row[1:] if word not in ('f32', FREE))])} | "
            + " | ".join(cells)
            + " |"
        )


def _row(cell: Cell) -> tuple[str, ...]:
    load = f"{cell.requests} at once" if cell.requests else FREE
    sought = FREE if cell.objective == LATENCY else f"for {cell.objective}"
    return cell.strategy, cell.wire, cell.route, cell.weights, load, sought


def choices(found: Sequence[Figures]) -> Iterator[str]:
    """Return what Hepti chose, and how its pinned equal compares with the best pinned cell that it could have been."""
    # Under load only a choice for throughput is one that could have been the best.
    own = (f for f in found if f.cell.strategy == AUTO and (f.cell.objective == "throughput" or not f.cell.requests))
    for f in sorted(own, key=lambda f: (-(f.cell.rate or 0), f.cell.devices)):
        pinned = [
            other
            for other in found
            if other.cell.strategy != AUTO
            and CONTENDERS[other.cell.strategy].source == SITE
            and (other.cell.rate, other.cell.wire) == (f.cell.rate, f.cell.wire)
            and (other.cell.weights, other.cell.requests) == (f.cell.weights, f.cell.requests)
            and f.cell.route in (FREE, other.cell.route)
            and (other.cell.devices == f.cell.devices or other.cell.strategy == ALONE)
        ]
        rate = "" if f.cell.rate is None else f" at {f.cell.rate:g} Mbit/s"
        sought = "" if f.cell.objective == LATENCY else f", for {f.cell.objective}"
        line = f"- {len(f.cell.devices)} devices{rate}{sought}: Hepti chose {plan_words(f.turn['plan'])}"
        if pinned:
            best = min(pinned, key=lambda other: other.ms)
            line += (
                f"; the fastest pinned was {best.cell.label}, and its choice took {f.ms / best.ms:.2f} times as long"
            )
        yield line


def predictions(found: Sequence[Figures]) -> Iterator[str]:
    """Return predicted over measured time by the number of devices of the plan, without and with what runs taught."""
    by_devices: dict[int, list[Figures]] = defaultdict(list)
    for f in found:
        if f.predicted_ms is not None:
            by_devices[len(f.turn["plan"]["devices"])].append(f)
    if not by_devices:
        return
    yield "## Predicted over measured"
    yield ""
    yield "By the simulator alone, and with what earlier requests had taught before the last one of each turn."
    yield ""
    yield "| devices of the plan | cells | median | least | most | taught: cells | median | least | most |"
    yield "|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for devices, own in sorted(by_devices.items()):
        alone = [f.predicted_ms / f.ms for f in own if f.predicted_ms is not None]
        taught = [ms / f.ms for f in own if not f.cell.requests and (ms := f.turn.get("expected_ms")) is not None]
        yield f"| {devices} | {_spread(alone)} | {_spread(taught)} |"
    yield ""


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return "0 | | |"
    return f"{len(ratios)} | {median(ratios):.2f} | {min(ratios):.2f} | {max(ratios):.2f}"


def _words(f: Figures | None, best: float) -> str:
    if f is None:
        return ""
    figure = _rounded(f.ms)
    figure = f"**{figure}**" if f.ms == best else figure
    return figure if f.predicted_ms is None else f"{figure} ({_rounded(f.predicted_ms)})"


def _rounded(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}"
