"""From records of the kernels' benchmark to figures: a summary, tables in Markdown and CSV, and plots."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from hepti_mqtt.bench.kernel_timing import Ratio, ratio
from hepti_mqtt.errors import BenchError

Record = Mapping[str, Any]

# A shape with fewer weights than this is judged in the mean alone.
LARGE_WEIGHTS: Final = 1 << 18
FEW_ROWS: Final = (8, 48)
_SINGLE: Final = "ours, 1 thread"


class Figure(NamedTuple):
    """One line of the summary; `shape` is where a minimum was found, `of` how many shapes it is over."""

    name: str
    value: float
    of: int
    shape: str = ""


def ratio_to(record: Record, rival: str) -> Ratio:
    """Return how many times as fast as `rival` the record's kernel is."""
    return ratio(record["seconds"]["ours"], record["seconds"][rival], record["provenance"]["seed"])


def summary(records: Sequence[Record]) -> list[Figure]:
    """Return the figures that the project judges its kernels by, for every thread count in the records."""
    figures: list[Figure] = []
    for threads in sorted({r["threads"] for r in records}):
        mine = [r for r in records if r["threads"] == threads]
        word = f"{threads} thread" + "s" * (threads > 1)
        linear = [r for r in mine if r["group"] == "linear"]
        for rival in _rivals(linear):
            figures += _against(linear, rival, word)
        figures += _scaling(linear, word)
        figures += _roofs(mine, word)
    return figures


def _against(linear: Sequence[Record], rival: str, word: str) -> list[Figure]:
    few = [r for r in linear if FEW_ROWS[0] <= r["m"] <= FEW_ROWS[1]]
    large = [r for r in linear if r["n"] * r["k"] >= LARGE_WEIGHTS]
    name = f"× {rival}, {word}"
    return [
        *_mean(f"{name}: mean by FLOPs", linear, lambda r: ratio_to(r, rival).value),
        *_least(f"{name}: least of n·k ≥ 2^18", large, lambda r: ratio_to(r, rival).value),
        *_mean(f"{name}: mean by FLOPs, {FEW_ROWS[0]} ≤ m ≤ {FEW_ROWS[1]}", few, lambda r: ratio_to(r, rival).value),
    ]


def _scaling(linear: Sequence[Record], word: str) -> list[Figure]:
    both = [r for r in linear if _SINGLE in r["seconds"] and r["m"] >= 64]
    name = f"× own one thread, {word}, m ≥ 64"
    return [
        *_mean(f"{name}: mean by FLOPs", both, lambda r: ratio_to(r, _SINGLE).value),
        *_least(f"{name}: least", both, lambda r: ratio_to(r, _SINGLE).value),
    ]


def _roofs(records: Sequence[Record], word: str) -> list[Figure]:
    big = [r for r in records if r["group"] == "linear" and r["m"] >= 96 and min(r["n"], r["k"]) >= 768]
    streams = [r for r in records if r["group"] == "stream" and r["m"] == 1]
    # Both roofs are one thread's.
    one = word == "1 thread"
    return [
        *_least(f"of the FMA peak, {word}, m ≥ 96, n, k ≥ 768: least", big if one else [], of_peak),
        *_mean(f"of the FMA peak, {word}, m ≥ 96, n, k ≥ 768: mean by FLOPs", big if one else [], of_peak),
        *_least(f"of the read bandwidth, {word}, m = 1: least", streams if one else [], of_bandwidth),
    ]


def of_peak(record: Record) -> float:
    """Return the part of one thread's measured FMA peak that the kernel reaches."""
    return _flops_per_s(record, "ours") / float(record["peak_flops_per_s"])


def of_bandwidth(record: Record) -> float:
    """Return the part of one thread's measured read bandwidth at which the kernel reads its weights."""
    return float(record["weight_bytes"] / median(record["seconds"]["ours"]) / record["read_bytes_per_s"])


def _mean(name: str, records: Sequence[Record], value: Callable[[Record], float]) -> list[Figure]:
    """Return the mean weighted by the FLOPs that each shape has in all Programs."""
    total = sum(r["weight"] for r in records)
    return [Figure(name, sum(r["weight"] * value(r) for r in records) / total, len(records))] if total else []


def _least(name: str, records: Sequence[Record], value: Callable[[Record], float]) -> list[Figure]:
    if not records:
        return []
    worst = min(records, key=value)
    return [Figure(name, value(worst), len(records), _shape(worst))]


def _shape(record: Record) -> str:
    return f"m={record['m']} n={record['n']} k={record['k']}"


def _rivals(records: Iterable[Record]) -> list[str]:
    """Return those that every record has been compared with, in the order of the records."""
    kept: list[str] | None = None
    for record in records:
        names = [name for name in record["seconds"] if not name.startswith("ours")]
        kept = names if kept is None else [name for name in kept if name in names]
    return kept or []


def _flops_per_s(record: Record, name: str) -> float:
    return float(2.0 * record["m"] * record["n"] * record["k"] / median(record["seconds"][name]))


def markdown(records: Sequence[Record], provenance: Mapping[str, Any]) -> str:
    """Return the summary as a Markdown table under the provenance."""
    versions = ", ".join(f"{name} {number}" for name, number in provenance["versions"].items())
    lines = [
        f"{provenance['machine']} ({provenance['isa']}), Python {provenance['python']}; "
        f"{versions}; {provenance['blas']}; revision {provenance['revision']}, seed {provenance['seed']}, "
        f"{provenance['rounds']} rounds. `{records[-1]['command']}`",
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
    columns = ("group", "threads", "m", "n", "k", "contender", "median_s", "gflop_per_s", "ours_times", "low", "high")
    writer.writerow(columns)
    for r in records:
        for name, seconds in r["seconds"].items():
            copies = r.get("weight_bytes", 4 * r["n"] * r["k"]) // (4 * r["n"] * r["k"])
            speed = copies * _flops_per_s(r, name) / 1e9
            figures = [f"{median(seconds):.9f}", f"{speed:.2f}", *(f"{v:.4f}" for v in ratio_to(r, name))]
            writer.writerow([r["group"], r["threads"], r["m"], r["n"], r["k"], name, *figures])
    return out.getvalue()


def write(records: Sequence[Record], provenance: Mapping[str, Any], out: Path) -> None:
    """Write kernels.md, kernels.csv and the plots; raises BenchError where matplotlib is missing, after the tables."""
    (out / "kernels.md").write_text(markdown(records, provenance), encoding="utf-8")
    (out / "kernels.csv").write_text(table(records), encoding="utf-8")
    for threads in sorted({r["threads"] for r in records}):
        curve = [r for r in records if r["group"] == "curve" and r["threads"] == threads]
        if curve:
            bandwidth = [r["read_bytes_per_s"] for r in records if "read_bytes_per_s" in r and r["threads"] == threads]
            _plot(curve, threads, max(bandwidth, default=math.nan), out)


def _plot(curve: Sequence[Record], threads: int, bandwidth: float, out: Path) -> None:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise BenchError(
            "the plots need matplotlib, which the extra `bench` brings: pip install 'hepti[bench]'; the tables are "
            f"written in {out}"
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
    peak = max(float(r["peak_flops_per_s"]) for r in records) / 1e9
    if threads == 1:
        speed.axhline(peak, color="black", linestyle="--", label="FMA peak, measured")
        if not math.isnan(bandwidth):
            # Weights from memory once: 2 m FLOPs for every 4 bytes.
            roof = [min(peak, m / 2 * bandwidth / 1e9) for m in rows]
            speed.plot(rows, roof, color="grey", linestyle=":", label="memory roof, measured")
    for axis, word in ((speed, "GFLOP/s"), (seconds, "ms")):
        axis.set(xscale="log", xlabel="rows m", ylabel=word)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    seconds.set_yscale("log")
