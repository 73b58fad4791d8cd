"""From records of the kernels' benchmark to figures: a summary, tables in Markdown and CSV, and plots."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from hepti_mqtt.bench import kernel_bars
from hepti_mqtt.bench.kernel_bars import (
    Found,
    Record,
    Value,
    cores,
    least,
    mean,
    of_bandwidth,
    of_peak,
    ratio_to,
    roof,
    times,
)
from hepti_mqtt.bench.kernel_cases import MANY_ROWS, SINGLE, THREADS
from hepti_mqtt.bench.kernel_maps import MODELS
from hepti_mqtt.errors import BenchError

# Ticks of the axis of rows.
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 384)


class Figure(NamedTuple):
    """One line of the summary; `shape` is where a minimum was found, `of` how many shapes it is over."""

    name: str
    value: float
    of: int
    shape: str = ""


def summary(records: Sequence[Record]) -> list[Figure]:
    """Return figures of every group, rival and thread count in the records; the bars are judged in `kernel_bars`."""
    figures: list[Figure] = []
    for threads in sorted({r["threads"] for r in records}):
        mine = [r for r in records if r["threads"] == threads]
        word = f"{threads} thread" + "s" * (threads > 1)
        linear = [r for r in mine if r["group"] == "linear"]
        for rival in _rivals(linear):
            figures += _against(f"f32 × {rival}, {word}", linear, rival)
            few = [r for r in linear if kernel_bars.few_rows(r)]
            low, high = kernel_bars.FEW_ROWS
            figures += _against(f"f32 × {rival}, {word}, {low} ≤ m ≤ {high}", few, rival)
        for model in MODELS:
            maps = [r for r in mine if r["group"] == "maps" and r["model"] == model]
            for rival in _rivals(maps):
                figures += _both(f"{model}'s layers × {rival}, {word}", maps, times(rival))
        alone = [r for r in mine if r["group"] == THREADS]
        figures += _both(f"× own one thread, {word}, m ≥ {MANY_ROWS}", alone, times(SINGLE))
        figures += _both(f"FMA peak of {word} × of one, same rounds", alone, lambda r: median(cores(r)))
        int8 = [r for r in mine if r["group"] == "int8"]
        for other in ("ours, f32", "ours, w8a32", "ours, f16", *_rivals(int8)):
            figures += _against(f"w8a8 × {other}, {word}", [r for r in int8 if other in r["seconds"]], other)
        if threads == 1:  # both roofs are one thread's
            figures += _roofs(mine)
    return figures


def _against(name: str, records: Sequence[Record], rival: str) -> list[Figure]:
    by_flops, worst = mean(records, times(rival)), kernel_bars.least_of_large(records, times(rival))
    return [*_figure(f"{name}: mean by FLOPs", by_flops), *_figure(f"{name}: least of n·k ≥ 2^18", worst)]


def _roofs(records: Sequence[Record]) -> list[Figure]:
    big = [r for r in records if r["group"] == "linear" and kernel_bars.compute_bound(r)]
    figures = _both("of the FMA peak, 1 thread, m ≥ 96, n, k ≥ 768", big, of_peak)
    streams = [r for r in records if r["group"] == "stream"]
    for storage, m in sorted({(r["storage"], r["m"]) for r in streams}):
        own = [r for r in streams if (r["storage"], r["m"]) == (storage, m)]
        figures += _figure(f"{storage} of the read bandwidth, 1 thread, m = {m}: least", least(own, of_bandwidth))
    return figures


def _both(name: str, records: Sequence[Record], value: Value) -> list[Figure]:
    return [*_figure(f"{name}: mean by FLOPs", mean(records, value)), *_figure(f"{name}: least", least(records, value))]


def _figure(name: str, found: Found | None) -> list[Figure]:
    return [Figure(name, *found)] if found else []


def _rivals(records: Iterable[Record]) -> list[str]:
    """Return those that every record has been compared with, in the order of the records."""
    kept: list[str] | None = None
    for record in records:
        names = [name for name in record["seconds"] if not name.startswith("ours")]
        kept = names if kept is None else [name for name in kept if name in names]
    return kept or []


def _flops_per_s(record: Record, name: str) -> float:
    return float(record["flops"] / median(record["seconds"][name]))


def _durations(records: Sequence[Record]) -> str:
    """Return how long each group took, by threads."""
    groups = dict.fromkeys((r["group"], r["threads"]) for r in records)
    spent = {key: [r["elapsed_s"] for r in records if (r["group"], r["threads"]) == key] for key in groups}
    said = [f"{group} ({threads}): {len(s)} in {sum(s):.0f} s" for (group, threads), s in spent.items()]
    return "Cases by group (threads): " + ", ".join(said) + "."


def markdown(records: Sequence[Record], provenance: Mapping[str, Any]) -> str:
    """Return the verdicts and the summary as Markdown tables under the provenance."""
    versions = ", ".join(f"{name} {number}" for name, number in provenance["versions"].items())
    lines = [
        f"{provenance['machine']} ({provenance['isa']}), Python {provenance['python']}; "
        f"{versions}; {provenance['blas']}; revision {provenance['revision']}, seed {provenance['seed']}, "
        f"{provenance['rounds']} rounds. `{records[-1]['command']}`",
        "",
        _durations(records),
        "",
        *kernel_bars.table(records),
        "",
        "| figure | value | shapes | where |",
        "|---|---:|---:|---|",
        *(f"| {f.name} | {f.value:.3f} | {f.of} | {f.shape} |" for f in summary(records)),
    ]
    return "\n".join(lines) + "\n"


def table(records: Sequence[Record]) -> str:
    """Return one CSV line per record and contender: median, GFLOP/s, and how much faster ours is, with its interval."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = (
        "group",
        "storage",
        "threads",
        "m",
        "n",
        "k",
        "contender",
        "median_s",
        "gflop_per_s",
        "ours_times",
        "low",
        "high",
    )
    writer.writerow(columns)
    for r in records:
        for name, seconds in r["seconds"].items():
            speed = _flops_per_s(r, name) / 1e9
            figures = [f"{median(seconds):.9f}", f"{speed:.2f}", *(f"{v:.4f}" for v in ratio_to(r, name))]
            writer.writerow([r["group"], r["storage"], r["threads"], r["m"], r["n"], r["k"], name, *figures])
    return out.getvalue()


def write(records: Sequence[Record], provenance: Mapping[str, Any], out: Path) -> None:
    """Write kernels.md, kernels.csv and the plots; raises BenchError where matplotlib is missing, after the tables."""
    (out / "kernels.md").write_text(markdown(records, provenance), encoding="utf-8")
    (out / "kernels.csv").write_text(table(records), encoding="utf-8")
    for threads in sorted({r["threads"] for r in records}):
        curve = [r for r in records if r["group"] == "curve" and r["threads"] == threads]
        if curve:
            bandwidth = [roof(r) for r in records if r["group"] == "stream" and r["threads"] == threads]
            _plot(curve, threads, max(bandwidth, default=math.nan), out)


def _plot(curve: Sequence[Record], threads: int, bandwidth: float, out: Path) -> None:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise BenchError(
            f"the plots need matplotlib: pip install matplotlib; the tables are written in {out}"
        ) from error
    mpl.use("agg")
    from matplotlib import pyplot as plt

    matrices = sorted({(r["n"], r["k"]) for r in curve})
    figure, axes = plt.subplots(2, len(matrices), figsize=(5 * len(matrices), 8), squeeze=False)
    for place, (n, k) in enumerate(matrices):
        mine = sorted((r for r in curve if (r["n"], r["k"]) == (n, k)), key=lambda r: int(r["m"]))
        _draw(axes[0][place], axes[1][place], mine, threads, bandwidth)
        axes[0][place].set_title(f"k = {k}, n = {n}, {threads} thread" + "s" * (threads > 1))
    figure.tight_layout()
    for suffix in ("png", "svg"):
        figure.savefig(out / f"rows-{threads}.{suffix}", dpi=150)
    plt.close(figure)


def _draw(speed: Any, seconds: Any, records: Sequence[Record], threads: int, bandwidth: float) -> None:
    rows = [r["m"] for r in records]
    for name in ("ours", *_rivals(records)):
        speed.plot(rows, [_flops_per_s(r, name) / 1e9 for r in records], marker=".", label=name)
        seconds.plot(rows, [1e3 * median(r["seconds"][name]) for r in records], marker=".", label=name)
    peak = max(map(roof, records)) / 1e9
    if threads == 1:
        speed.axhline(peak, color="black", linestyle="--", label="FMA peak, measured")
        if not math.isnan(bandwidth):
            # Weights from memory once: 2 m FLOPs for every 4 bytes.
            roofs = [min(peak, m / 2 * bandwidth / 1e9) for m in rows]
            speed.plot(rows, roofs, color="grey", linestyle=":", label="memory roof, measured")
    for axis, word in ((speed, "GFLOP/s"), (seconds, "ms")):
        axis.set(xscale="log", xlabel="rows m", ylabel=word)
        axis.grid(alpha=0.3)
        axis.set_xticks(_ROWS, [str(m) for m in _ROWS])
        axis.minorticks_off()
    # Below the plots: within them it would lie on the curves.
    speed.legend(fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    seconds.set_yscale("log")
