"""Plots of the chain of MatMuls beside what the paper says of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hepti_mqtt.bench import paper
from hepti_mqtt.bench.chain_results import Condition, Key, Point
from hepti_mqtt.errors import ConfigError

_CURVES = {"additive_s": ("ours, compute + way", "o-"), "split_s": ("ours, one piece", "^:")}
_OVERLAP = {"overlap_s": ("ours, in chunks", "s--")}


def plot_shares(found: Mapping[Key, Point], rows: int, out: Path) -> None:
    """Draw latency over the secondary's share, a panel for each condition; raises ConfigError without matplotlib."""
    conditions = sorted({key.condition for key in found if key.rows == rows}, reverse=True)
    figure, panels = _figure(len(conditions))
    for axes, condition in zip(panels, conditions, strict=True):
        mine = sorted((key.share, p) for key, p in found.items() if (key.condition, key.rows) == (condition, rows))
        axes.axhline(1e3 * mine[0][1].alone_s, color="grey", label="ours, one device")
        for field, (label, style) in {**_CURVES, **_OVERLAP}.items():
            values = [(share, 1e3 * getattr(p, field)) for share, p in mine if getattr(p, field) is not None]
            axes.plot(*zip(*values, strict=True), style, label=label) if values else None
        best = paper.BEST_SHARE.get((condition.rate_mbit or 0, condition.cpu_percent))
        if best is not None and rows == paper.ROWS:
            axes.axvline(best, color="black", linestyle="-.", label="paper, best share")
        if condition == Condition(940, 100) and rows == paper.ROWS:
            axes.plot([90], [paper.TOGETHER_MS], "k*", markersize=12, label="paper, 90 %")
            axes.plot([0], [paper.ALONE_MS], "kx", label="paper, one device")
        axes.set(
            title=f"{condition.label}, m = {rows}",
            xlabel="rows on the secondary device, %",
            ylabel="latency, ms",
        )
        axes.legend(fontsize="small")
    figure.savefig(out)


def plot_rows(found: Mapping[Key, Point], condition: Condition, out: Path) -> None:
    """Draw latency over m, one device against two at its best share; raises ConfigError without matplotlib."""
    figure, (axes,) = _figure(1)
    rows = sorted({key.rows for key in found if key.condition == condition})
    mine = {m: [p for key, p in found.items() if (key.condition, key.rows) == (condition, m)] for m in rows}
    axes.plot(rows, [1e3 * mine[m][0].alone_s for m in rows], "o-", color="grey", label="ours, one device")
    axes.plot(rows, [1e3 * min(p.additive_s for p in mine[m]) for m in rows], "o-", label="ours, two: compute + way")
    axes.plot(rows, [1e3 * min(p.best_s for p in mine[m]) for m in rows], "s--", label="ours, two: measured")
    axes.plot([paper.ROWS], [paper.ALONE_MS], "kx", label="paper, one device")
    axes.plot([paper.ROWS], [paper.TOGETHER_MS], "k*", markersize=12, label="paper, two")
    title = f"Best share, {condition.label}"
    axes.set(title=title, xlabel="m, rows of the left matrix", ylabel="latency, ms")
    axes.legend(fontsize="small")
    figure.savefig(out)


def _figure(panels: int) -> tuple[Any, list[Any]]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib; pip install matplotlib") from None
    columns = min(panels, 2)
    lines = -(-panels // max(columns, 1))
    figure = Figure(figsize=(6 * columns, 4 * lines), layout="constrained")
    return figure, [figure.add_subplot(lines, columns, i + 1) for i in range(panels)]
