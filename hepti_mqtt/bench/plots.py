"""Pictures of results: latency and speed-up by strategy and devices, over the rate, predicted against measured."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from hepti_mqtt.bench.contenders import ALONE
from hepti_mqtt.bench.experiment import Cell, size_words
from hepti_mqtt.bench.plays import Play, change_words, parts
from hepti_mqtt.bench.results import Results
from hepti_mqtt.bench.statistics import Interval, ratio


def draw(results: Results, directory: Path) -> list[Path]:
    """Write the pictures that the results give; return their paths, none (and a word on stderr) without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        sys.stderr.write("no plots: matplotlib is missing; pip install matplotlib\n")
        return []
    mpl.use("Agg")
    found, timed = results.cells(), results.intervals()
    cells = sorted((c for c in found.values() if c.id in timed), key=lambda c: (repr(c.group), c.label))
    files = []
    for place, group in enumerate(list(part) for _, part in groupby(cells, key=lambda c: c.group)):
        if len(group) > 1:  # one bar compares nothing
            files.append(_latency(results, group, timed, directory / f"latency-{place + 1}.svg"))
            files += _scaling(results, group, directory / f"scaling-{place + 1}.svg")
    predicted = {r["cell"] for r in results.turns() if r["ok"] and "predicted_ms" in r}
    if own := [c for c in cells if c.id in predicted and not c.requests]:  # under load times hold the waiting
        files.append(_predicted(results, own, timed, directory / "predicted.svg"))
    if len({c.rate for c in cells}) > 1:
        files += _rates(cells, timed, directory)
    for place, play in enumerate(results.plays().values()):
        files.append(_under_changes(play, directory / f"changes-{place + 1}.svg"))
    return files


def _latency(results: Results, group: Sequence[Cell], timed: dict[str, Interval], file: Path) -> Path:
    single = next((c for c in group if (c.strategy, c.copy) == (ALONE, 0)), None)
    figure, axes = _subplots(2 if single else 1, height=max(3.0, 1.2 + 0.24 * len(group)))
    names, own = [c.label for c in group], [timed[c.id] for c in group]
    _bars(axes[0], names, own, "ms")
    if single is not None:
        base = results.medians(single.id)
        both = [(c, results.medians(c.id)) for c in group]
        shared = [(c.label, ratio(base, m)) for c, m in both if m.keys() & base.keys()]
        _bars(axes[1], [n for n, _ in shared], [i for _, i in shared], "times as fast as one device")
        axes[1].axvline(1.0, color="black", linewidth=0.8)
    figure.suptitle(_title(group[0]))
    return _save(figure, file)


def _scaling(results: Results, group: Sequence[Cell], file: Path) -> list[Path]:
    """Draw how many times as fast as one device several are, beside the ideal line; nothing for a single count."""
    single = next((c for c in group if (c.strategy, c.copy) == (ALONE, 0)), None)
    base = {} if single is None else results.medians(single.id)
    lines: dict[str, dict[int, Interval]] = defaultdict(dict)
    for cell in group:
        count, shared = len(cell.devices), results.medians(cell.id)
        if count > 1 and base.keys() & shared.keys():
            lines[cell.label.replace(f" x{count}", "")][count] = ratio(base, shared)
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    if not lines:
        return []
    figure, (axis,) = _subplots(1)
    for name, points in lines.items():
        counts = sorted(points)
        found = [points[count] for count in counts]
        spread = [[0.0, *(i.median - i.low for i in found)], [0.0, *(i.high - i.median for i in found)]]
        axis.errorbar([1, *counts], [1.0, *(i.median for i in found)], spread, label=name, capsize=2)
    counts = sorted({1, *(count for points in lines.values() for count in points)})
    axis.plot(counts, counts, color="black", linewidth=0.8, linestyle="--", label="ideal")
    axis.set(xlabel="devices", ylabel="times as fast as one device (median, interval)", xticks=counts)
    figure.suptitle(_title(group[0]))
    _legend(figure)
    return [_save(figure, file)]


def _bars(axis: Any, names: Sequence[str], found: Sequence[Interval], unit: str) -> None:
    spread = [[i.median - i.low for i in found], [i.high - i.median for i in found]]
    axis.barh(names, [i.median for i in found], xerr=spread, capsize=2)
    axis.set_xlabel(f"{unit} (median, interval)")


def _predicted(results: Results, cells: Sequence[Cell], timed: dict[str, Interval], file: Path) -> Path:
    figure, (axis,) = _subplots(1)
    last = {r["cell"]: r["predicted_ms"] for r in results.turns() if r["ok"] and "predicted_ms" in r}
    groups: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.strategy].append(cell)
    for name, own in groups.items():
        axis.scatter([last[c.id] for c in own], [timed[c.id].median for c in own], label=name, s=14)
    ends = [f(*(last[c.id] for c in cells), *(timed[c.id].median for c in cells)) for f in (min, max)]
    axis.plot(ends, ends, color="black", linewidth=0.8)
    axis.set(xlabel="predicted ms", ylabel="measured ms (median)")
    _log(axis.xaxis)
    _log(axis.yaxis)
    _legend(figure)
    return _save(figure, file)


def _rates(cells: Sequence[Cell], timed: dict[str, Interval], directory: Path) -> list[Path]:
    files = []
    shaped = sorted((c for c in cells if c.rate is not None), key=lambda c: (c.lab, c.model, c.tokens or 0, c.label))
    for place, (key, part) in enumerate(groupby(shaped, key=lambda c: (c.lab, c.model, c.tokens))):
        figure, (axis,) = _subplots(1)
        for label, line in groupby(part, key=lambda c: c.label):
            points = sorted(((c.rate or 0.0, timed[c.id]) for c in line), key=lambda p: p[0])
            spread = [[i.median - i.low for _, i in points], [i.high - i.median for _, i in points]]
            axis.errorbar([r for r, _ in points], [i.median for _, i in points], spread, label=label, capsize=2)
        axis.set(xlabel="Mbit/s", ylabel="ms (median, interval)")
        figure.suptitle(f"{key[1]}, {size_words(key[2])}, {key[0]}")
        _log(axis.xaxis)
        axis.set_xticks(sorted({c.rate or 0.0 for c in shaped}))
        _legend(figure)
        files.append(_save(figure, directory / f"rates-{place + 1}.svg"))
    return files


def _under_changes(play: Play, file: Path) -> Path:
    """Draw how long requests took over when they began, a colour per plan, with the changes as lines."""
    figure, (axis,) = _subplots(1, width=10.0)
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
    _log(axis.yaxis)
    figure.suptitle(_title(play.cell))
    _legend(figure)
    return _save(figure, file)


def _title(cell: Cell) -> str:
    lab, rate, model, tokens = cell.group
    return f"{model}, {size_words(tokens)}, {lab}" + ("" if rate is None else f", {rate:g} Mbit/s")


def _log(axis: Any) -> None:
    """Make an x or y axis logarithmic, with plain numbers at 1, 2, 3, 5 and 7 times a power of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def _legend(figure: Any) -> None:
    """Put the legend below the axes, where it covers nothing however many names there are."""
    figure.legend(loc="outside lower center", fontsize="small", ncols=3)


def _subplots(count: int, width: float = 6.4, height: float = 4.8) -> tuple[Any, Sequence[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, height), layout="constrained")
    return figure, [figure.add_subplot(1, count, place + 1) for place in range(count)]


def _save(figure: Any, file: Path) -> Path:
    figure.savefig(file)
    return file
