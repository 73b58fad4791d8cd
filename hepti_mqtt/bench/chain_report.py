"""What the chain of MatMuls says, as markdown, CSV and plots, beside what the paper says of it."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from hepti_mqtt.bench import paper
from hepti_mqtt.bench.chain_plot import plot_rows, plot_shares
from hepti_mqtt.bench.chain_results import Condition, Key, Point, best_shares, contradictions, points
from hepti_mqtt.bench.report import head
from hepti_mqtt.bench.results import FILE, Results, read
from hepti_mqtt.bench.statistics import ratio
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.lab.calibrate import Calibration
from hepti_mqtt.lab.calibrate import markdown as calibration_table

_COLUMNS: Final = (
    *("rate_mbit", "cpu_percent", "round", "rows", "share", "chunks", "kind", "latency_s", "primary_compute_s"),
    *("secondary_compute_s", "bytes", "error"),
)
_CURVES: Final = (("additive_s", "compute + way"), ("split_s", "one piece"), ("overlap_s", "in chunks"))


def write(directory: Path) -> list[Path]:
    """Write report.md, results.csv and plots (where matplotlib is) beside the results; return the files."""
    results = read(directory)
    records = [r for r in results.records if r["record"] == "case"]
    found = points(records)
    table, text = directory / "results.csv", directory / "report.md"
    with table.open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, _COLUMNS, extrasaction="ignore")
        lines.writeheader()
        lines.writerows(records)
    drawn = _draw(found, directory)
    text.write_text("\n".join(markdown(results, found, [path.name for path in drawn])) + "\n", encoding="utf-8")
    return [directory / FILE, table, text, *drawn]


def markdown(results: Results, found: Mapping[Key, Point], pictures: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of the whole report; `found`: the points of the results."""
    yield from head(results)
    for r in (r for r in results.records if r["record"] == "lab"):
        yield f"## Lab {r['lab']['name']}, {Condition(r['rate_mbit'], r['cpu_percent']).label}\n"
        yield calibration_table(Calibration.from_dict(r["calibration"])) + "\n"
        yield from (f"- off target: {miss}" for miss in r["misses"])
        yield ""
    if not found:
        yield "No point was measured in full yet."
        return
    yield from _one_and_two(results, found)
    rows = _rows(found)
    yield from _best(found, rows)
    for condition in _conditions(found):
        yield from _shares(found, condition, rows)
    yield "## What differs from the paper in kind\n"
    for field, label in _CURVES[:2]:
        said = contradictions(found, rows, field)
        yield from (f"- {label}: {words}" for words in said or ["nothing of what was measured"])
    missing = [Condition(*c).label for c in paper.BEST_SHARE if Condition(*c) not in _conditions(found)]
    if missing:
        yield f"- not compared, because they were not measured: {'; '.join(missing)}"
    yield ""
    yield from (f"![{name}]({name})" for name in pictures)


def _one_and_two(results: Results, found: Mapping[Key, Point]) -> Iterator[str]:
    """Yield one device against two at the best share, with the ratio within rounds."""
    times: dict[tuple[Condition, int, int, int], dict[int, float]] = defaultdict(dict)
    for r in (r for r in results.records if r["record"] == "case" and r["kind"] == "work"):
        times[Condition(r["rate_mbit"], r["cpu_percent"]), r["rows"], r["share"], r["chunks"]][r["round"]] = r[
            "latency_s"
        ]
    for condition in _conditions(found):
        yield f"## One device and two, {condition.label}\n"
        yield "| m | one, ms | two, ms | share, % | chunks | one / two | gain, % |"
        yield "|---:|---:|---:|---:|---:|---|---:|"
        for m in sorted({key.rows for key in found if key.condition == condition}):
            runs = {key[2:]: own for key, own in times.items() if key[:2] == (condition, m) and key[2]}
            (share, chunks), own = min(runs.items(), key=lambda run: statistics.median(run[1].values()))
            alone = times[condition, m, 0, 1]
            against = ratio(alone, own)
            one, two = (1e3 * statistics.median(t.values()) for t in (alone, own))
            yield (
                f"| {m} | {one:.1f} | {two:.1f} | {share} | {chunks} | "
                f"{against.median:.2f} [{against.low:.2f}, {against.high:.2f}] ({against.level:.0%}) | "
                f"{100 * (1 - 1 / against.median):.1f} |"
            )
        yield ""
    yield (
        "The share and the number of chunks are those of the least median of the same rounds, so the ratio is a "
        f"little too good; an interval that holds 1.00 has shown no gain. "
        f"The paper: {paper.LEAST_GAIN_PERCENT} % to {paper.LARGEST_GAIN_PERCENT} % over its m, and "
        f"{paper.ALONE_MS} ms against {paper.TOGETHER_MS} ms at m = {paper.ROWS}.\n"
    )


def _best(found: Mapping[Key, Point], rows: int) -> Iterator[str]:
    yield f"## Best share of the secondary device in percent, m = {rows}\n"
    yield "| condition | " + " | ".join(label for _, label in _CURVES) + " | paper |"
    yield "|---" + "|---:" * (len(_CURVES) + 1) + "|"
    best = [best_shares(found, rows, field) for field, _ in _CURVES]
    for condition in _conditions(found):
        theirs = paper.BEST_SHARE.get((condition.rate_mbit or 0, condition.cpu_percent)) if rows == paper.ROWS else None
        cells = [str(shares.get(condition, "–")) for shares in best]
        yield f"| {condition.label} | {' | '.join(cells)} | {'–' if theirs is None else theirs} |"
    yield ""


def _shares(found: Mapping[Key, Point], condition: Condition, rows: int) -> Iterator[str]:
    yield f"## Over the share, m = {rows}, {condition.label}, ms\n"
    yield "| share, % | one device | compute | way | compute + way | one piece | in chunks |"
    yield "|---:" * 7 + "|"
    for key, p in sorted(found.items()):
        if (key.condition, key.rows) == (condition, rows):
            values = (p.alone_s, p.compute_s, p.communication_s, p.additive_s, p.split_s, p.overlap_s)
            cells = ["–" if value is None else f"{1e3 * value:.1f}" for value in values]
            yield f"| {key.share} | {' | '.join(cells)} |"
    yield ""


def _draw(found: Mapping[Key, Point], directory: Path) -> list[Path]:
    files = [directory / "shares.png", directory / "rows.png"]
    if not found:
        return []
    try:
        plot_shares(found, _rows(found), files[0])
        plot_rows(found, _conditions(found)[0], files[1])
    except ConfigError:  # the report says the same in tables
        return []
    return files


def _rows(found: Mapping[Key, Point]) -> int:
    """Return the m that shares are shown for: the paper's, or else the largest."""
    rows = {key.rows for key in found}
    return paper.ROWS if paper.ROWS in rows else max(rows)


def _conditions(found: Mapping[Key, Point]) -> list[Condition]:
    return sorted({key.condition for key in found}, key=lambda c: (-(c.rate_mbit or 0), -c.cpu_percent))
