"""Pictures of results: latency and speed-up by strategy and devices, over the rate, predicted against measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.experiment import ALONE
from benchmarks.tables import Interval, ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from benchmarks.report import Figures, Play

Curve = Mapping[float, Interval]


def draw(found: Sequence[Figures], directory: Path) -> Iterator[Path]:
    """Write the pictures that the figures give; yield their paths."""
    ordered = sorted(found, key=lambda f: (repr(f.cell.group), f.cell.label))
    for number, (_, part) in enumerate(groupby(ordered, key=lambda f: f.cell.group), 1):
        own = list(part)
        if len(own) > 1:  # one bar compares nothing
            yield _latency(own, directory / f"latency-{number}.svg")
            yield from _scaling(own, directory / f"scaling-{number}.svg")
    told = [f for f in ordered if f.predicted_ms is not None and not f.cell.requests]  # times under load hold waiting
    if told:
        yield _predicted(told, directory / "predicted.svg")
    if len({f.cell.rate for f in found}) > 1:
        yield from _rates([f for f in found if f.cell.rate is not None], directory)


def _alone(own: Sequence[Figures]) -> Mapping[int, float]:
    return next((f.by_round for f in own if (f.cell.strategy, f.cell.copy) == (ALONE, 0)), {})


def _latency(own: Sequence[Figures], file: Path) -> Path:
    base = _alone(own)
    bars = {"ms": {f.cell.label: f.interval for f in own}}
    if base:
        shared = (f for f in own if f.by_round.keys() & base.keys())
        bars["speed-up over one device"] = {f.cell.label: ratio(base, f.by_round) for f in shared}
    figure, panels = subplots(len(bars), height=max(3.0, 1.2 + 0.24 * len(own)))
    for axis, (unit, values) in zip(panels, bars.items(), strict=True):
        spread = [[i.median - i.low for i in values.values()], [i.high - i.median for i in values.values()]]
        axis.barh(list(values), [i.median for i in values.values()], xerr=spread, capsize=2)
        axis.set_xlabel(f"{unit} (median, interval)")
    figure.suptitle(own[0].cell.title)
    return save(figure, file)


def _scaling(own: Sequence[Figures], file: Path) -> Iterator[Path]:
    """Draw the speed-up over one device beside the ideal line; nothing for a single number of devices."""
    base, curves = _alone(own), defaultdict[str, dict[float, Interval]](dict)
    for f in own:
        if len(f.cell.devices) > 1 and base.keys() & f.by_round.keys():
            curves[" ".join(f.cell.how)][len(f.cell.devices)] = ratio(base, f.by_round)
    curves = {name: curve for name, curve in curves.items() if len(curve) > 1}  # type: ignore[assignment]
    if curves:
        counts = sorted({1.0, *(count for curve in curves.values() for count in curve)})
        figure, (axis,) = subplots(1)
        one = Interval(1.0, 1.0, 1.0, 1.0)
        lines(axis, {name: {1.0: one, **curve} for name, curve in curves.items()})
        axis.plot(counts, counts, color="black", linewidth=0.8, linestyle="--", label="ideal")
        axis.set(xlabel="devices", ylabel="speed-up over one device (median, interval)", xticks=counts)
        yield _with_legend(figure, own[0].cell.title, file)


def _predicted(told: Sequence[Figures], file: Path) -> Path:
    figure, (axis,) = subplots(1)
    for name, part in groupby(sorted(told, key=lambda f: f.cell.strategy), key=lambda f: f.cell.strategy):
        own = list(part)
        axis.scatter([f.predicted_ms for f in own], [f.ms for f in own], label=name, s=14)
    ends = [f(*(f.ms for f in told), *(f.predicted_ms or f.ms for f in told)) for f in (min, max)]
    axis.plot(ends, ends, color="black", linewidth=0.8)
    axis.set(xlabel="predicted ms", ylabel="measured ms (median)")
    log(axis.xaxis)
    log(axis.yaxis)
    return _with_legend(figure, "predicted against measured", file)


def _rates(found: Sequence[Figures], directory: Path) -> Iterator[Path]:
    def key(f: Figures) -> str:
        return repr((f.cell.lab, f.cell.model, f.cell.tokens))

    for number, (_, part) in enumerate(groupby(sorted(found, key=key), key=key), 1):
        curves: dict[str, dict[float, Interval]] = defaultdict(dict)
        own = list(part)
        for f in own:
            curves[f.cell.label][f.cell.rate or 0.0] = f.interval
        figure, (axis,) = subplots(1)
        lines(axis, curves)
        axis.set(xlabel="Mbit/s", ylabel="ms (median, interval)")
        log(axis.xaxis)
        axis.set_xticks(sorted({f.cell.rate or 0.0 for f in own}))
        yield _with_legend(figure, own[0].cell.title.partition(" at ")[0], directory / f"rates-{number}.svg")


def under_changes(play: Play, file: Path) -> Path:
    """Draw how long requests took over when they began, a colour per plan, with the changes as lines."""
    from benchmarks.report import change_words, parts

    figure, (axis,) = subplots(1, width=10.0)
    plans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for part in parts(play):
        plans[part.plan] += [(r["unix_s"] - play.unix_s, r["latency_ms"][0]) for r in part.requests if r["ok"]]
    for plan, points in plans.items():
        if points:
            axis.plot(*zip(*points, strict=True), "o", markersize=4, label=plan)
    lost = [r["unix_s"] - play.unix_s for r in play.requests if not r["ok"]]
    if lost:
        axis.plot(lost, [0.98] * len(lost), "rx", transform=axis.get_xaxis_transform(), label="failed")
    for change in play.changes:
        at_s = change["unix_s"] - play.unix_s
        axis.axvline(at_s, color="black", linewidth=0.8, linestyle="--")
        place = {"xy": (at_s, 1.0), "xycoords": axis.get_xaxis_transform(), "xytext": (2, 3)}
        axis.annotate(change_words(change), **place, textcoords="offset points", rotation=20, fontsize="small")
    axis.set(xlabel="s after the begin", ylabel="ms from request to answer")
    log(axis.yaxis)
    return _with_legend(figure, play.cell.title, file)


def lines(axis: Any, curves: Mapping[str, Curve]) -> None:
    """Draw curves with the intervals of their points."""
    for name, curve in curves.items():
        points = sorted(curve.items())
        spread = [[i.median - i.low for _, i in points], [i.high - i.median for _, i in points]]
        axis.errorbar([x for x, _ in points], [i.median for _, i in points], spread, label=name, capsize=2)


def log(axis: Any) -> None:
    """Make an x or y axis logarithmic, with plain numbers at 1, 2, 3, 5 and 7 times a power of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def subplots(count: int, width: float = 6.4, height: float = 4.8, columns: int = 4) -> tuple[Figure, list[Any]]:
    """Return a figure with so many panels."""
    from matplotlib.figure import Figure  # its import takes a second, and few need it

    columns = min(count, columns)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, place + 1) for place in range(count)]


def _with_legend(figure: Figure, title: str, file: Path) -> Path:
    """Save a figure with its legend below the axes, where it covers nothing however many names there are."""
    figure.suptitle(title)
    figure.legend(loc="outside lower center", fontsize="small", ncols=3)
    return save(figure, file)


def save(figure: Figure, file: Path) -> Path:
    """Write a figure to a file."""
    figure.savefig(file)
    return file
