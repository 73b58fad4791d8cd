"""The bars of an experiment beside what was measured: each cell's ratio, and whether it is met."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from hepti_mqtt.bench import foreseen, statistics
from hepti_mqtt.bench.bars import AGAINST, BEST, SPEEDS, SUM, UNLIMITED, Bar, bars_of
from hepti_mqtt.bench.contenders import ALONE, AUTO, CONTENDERS, SITE
from hepti_mqtt.bench.experiment import Cell, size_words
from hepti_mqtt.bench.overview import Figures
from hepti_mqtt.bench.results import Results
from hepti_mqtt.lab.calibrate import Calibration


class Beside(NamedTuple):
    """What a cell is compared with: its words, ms by round, or the same ms in every round."""

    words: str
    by_round: Mapping[int, float]


class Measured(NamedTuple):
    """One cell of a bar: the other's words, the figure that the bar bounds, or why there is none."""

    figures: Figures
    beside: str
    value: float | None


def verdicts(results: Results, found: Sequence[Figures]) -> Iterator[str]:
    """Yield a table of the bars that the experiment's file states; nothing where it states none."""
    bars = bars_of(results.header.get("file", {}).get("bars", []))
    if not bars:
        return
    yield from ("## Bars", "", "| bar | met | measured | cell | against |", "|---|---|---:|---|---|")
    for bar in bars:
        own = [f for f in found if belongs(bar, f.cell)]
        if bar.limit == "within":
            yield from _predictions(bar, own)
        else:
            yield from _lines(bar, [measured(bar, f, found, results) for f in _fastest(own)])
    yield ""


def _lines(bar: Bar, cells: Sequence[Measured]) -> Iterator[str]:
    if not cells:
        yield f"| {bar.words} | not measured | | {_where(bar)} | |"
    for f, beside, value in cells:
        if value is None:
            yield f"| {bar.words} | not measured | | {_cell(f.cell)} | {beside} |"
            continue
        fine = value >= bar.value if bar.limit == "at least" else value <= bar.value
        yield f"| {bar.words} | {_met_words(fine)} | {value:.2f} | {_cell(f.cell)} | {beside} |"
    values = [value for *_, value in cells if value is not None]
    if bar.mean is not None and values:
        mean = geometric_mean(values)
        fine = mean >= bar.mean if bar.limit == "at least" else mean <= bar.mean
        yield f"| {bar.words}: geometric mean | {_met_words(fine)} | {mean:.2f} | all {len(values)} | |"


def _fastest(found: Sequence[Figures]) -> list[Figures]:
    """Return the fastest of the variants that a bar names, for each condition."""
    best: dict[tuple[Any, ...], Figures] = {}
    for f in found:
        c = f.cell
        key = (*c.group, c.devices, c.wire, c.route, c.weights, c.requests, c.objective)
        if key not in best or f.ms < best[key].ms:
            best[key] = f
    return list(best.values())


def _predictions(bar: Bar, found: Sequence[Figures]) -> Iterator[str]:
    """Yield a line for each method: the median over its cells, and the cell that is furthest off."""
    off: dict[str, list[tuple[float, Figures]]] = defaultdict(list)
    for f in found:
        if f.predicted_ms is not None:
            off[f.cell.strategy.partition("/")[0]].append((abs(f.predicted_ms / f.ms - 1), f))
    if not off:
        yield f"| {bar.words} | not measured | | {_where(bar)} | |"
    for method, cells in off.items():
        middle, (most, worst) = median(value for value, _ in cells), max(cells, key=lambda cell: cell[0])
        fine = most <= bar.value and (bar.mean is None or middle <= bar.mean)
        figures = f"median {middle:.1%}, most {most:.1%}"
        yield (
            f"| {bar.words}: {method} | {_met_words(fine)} | {figures} of {len(cells)} | {_cell(worst.cell)} | "
            f"{worst.predicted_ms:.1f} ms predicted, {worst.ms:.1f} measured |"
        )


def belongs(bar: Bar, cell: Cell) -> bool:
    """Return whether a bar is for a cell."""
    return cell.strategy in bar.variant and not cell.copy and _has(cell, bar.where)


def measured(bar: Bar, own: Figures, found: Sequence[Figures], results: Results) -> Measured:
    """Return the figure that a bar bounds for a cell: how many times as fast, or as long, as what it is beside."""
    other = _beside(bar, own, found, results)
    if isinstance(other, str):
        return Measured(own, other, None)
    one, two = own.by_round, other.by_round
    if not one.keys() & two.keys():
        return Measured(own, f"{other.words}: in no round of this", None)
    ratio = statistics.ratio(two, one) if bar.limit == "at least" else statistics.ratio(one, two)
    return Measured(own, f"{other.words}, {median(two.values()):.1f} ms", ratio.median)


def _beside(bar: Bar, own: Figures, found: Sequence[Figures], results: Results) -> Beside | str:
    """Return what a cell is compared with, or why there is nothing."""
    if bar.against == (SUM,):
        return _sum(own, found)
    if bar.against in ((UNLIMITED,), (SPEEDS,)):
        return _simulated(bar.against[0], own, results)
    others = [f for f in found if _comparable(bar, own.cell, f.cell)]
    if not others:
        return f"{' or '.join(bar.against)}: not measured beside it"
    best = min(others, key=lambda f: f.ms)
    return Beside(f"{best.cell.label} on {', '.join(best.cell.devices)}", best.by_round)


def _comparable(bar: Bar, own: Cell, other: Cell) -> bool:
    """Return whether a cell is one of those that a bar compares another with: alike in all but what it says."""
    contender = CONTENDERS[other.strategy]
    if bar.against == (BEST,):
        if other.strategy == AUTO or contender.source != SITE:
            return False
    elif other.strategy not in bar.against:
        return False
    alike = {"lab": own.lab, "rate": own.rate, "model": own.model, "tokens": own.tokens, "requests": own.requests}
    if contender.wires:
        alike |= {"wire": own.wire}
    if contender.source == SITE:
        alike |= {"weights": own.weights}
    same_hosts = contender.most == 1 or "devices" in bar.of or set(other.devices) == set(own.devices)
    return not other.copy and same_hosts and _has(other, {**alike, **bar.of})


def _sum(own: Figures, found: Sequence[Figures]) -> Beside | str:
    """Return the time from answer to answer if every host of a cell answered on its own."""
    c = own.cell
    alike = (*c.group, c.weights, c.requests)
    alone = {
        f.cell.devices[0]: f
        for f in found
        if f.cell.strategy == ALONE and (*f.cell.group, f.cell.weights, f.cell.requests) == alike
    }
    if missing := [host for host in c.devices if host not in alone]:
        return f"`{ALONE}` on {', '.join(missing)}: not measured"
    parts = [alone[host].by_round for host in c.devices]
    shared = set.intersection(*(set(part) for part in parts))
    speeds = {r: sum(1 / part[r] for part in parts) for r in shared}
    return Beside(f"{', '.join(c.devices)} each alone", {r: 1 / speed for r, speed in speeds.items()})


def _simulated(what: str, own: Figures, results: Results) -> Beside | str:
    told = next((r for r in reversed(results.turns()) if r["cell"] == own.cell.id and r.get("active")), None)
    if told is None or own.cell.requests:
        return "only Hepti's own choice of one request at a time says enough of its plan"
    if what == UNLIMITED:
        ms = foreseen.unlimited_ms(told)
    else:
        calibration = _calibration(own.cell, results)
        ms = None if calibration is None else foreseen.least_ms(told, calibration)
    if ms is None:
        return "its plan is one of replicas, or was gone when it was asked for"
    return Beside(AGAINST[what], dict.fromkeys(own.by_round, ms))


def _calibration(cell: Cell, results: Results) -> Calibration | None:
    for record in results.records:
        if record["record"] != "lab" or record["lab"]["name"] != cell.lab:
            continue
        if cell.rate is None or record["lab"]["rate_mbit"] == cell.rate:
            return Calibration.from_dict(record["calibration"])
    return None


def _has(cell: Cell, fields: Mapping[str, Any]) -> bool:
    """Return whether a cell has these fields, each a value or one of a list; `devices` is their number."""
    for key, value in fields.items():
        has = len(cell.devices) if key == "devices" else getattr(cell, key)
        if has not in (value if isinstance(value, list) else [value]):
            return False
    return True


def _met_words(fine: bool) -> str:
    return "met" if fine else "**missed**"


def _where(bar: Bar) -> str:
    return ", ".join(f"{key} {value}" for key, value in bar.where.items())


def _cell(cell: Cell) -> str:
    rate = "" if cell.rate is None else f" at {cell.rate:g} Mbit/s"
    return f"{cell.label}, {cell.model}, {size_words(cell.tokens)}, {cell.lab}{rate}"
