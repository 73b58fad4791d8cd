"""What results say, as markdown: medians with intervals, ratios within rounds, Hepti's own choice, predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from hepti_mqtt.bench import plots, statistics
from hepti_mqtt.bench.bars_report import verdicts
from hepti_mqtt.bench.contenders import ALONE, AUTO
from hepti_mqtt.bench.experiment import Cell, size_words
from hepti_mqtt.bench.overview import Figures, figures, overview
from hepti_mqtt.bench.plays import Play, parts, plan_words
from hepti_mqtt.bench.results import FILE, Results, read, write_csv
from hepti_mqtt.lab.calibrate import Calibration
from hepti_mqtt.lab.calibrate import markdown as calibration_table

_HEAD: Final = "| cell | median ms | interval | this / single | predicted ms | bytes | MiB | error | Hepti's plan |"


def write(directory: Path) -> list[Path]:
    """Write report.md, results.csv and time lines beside the results of a directory; return the files."""
    results = read(directory)
    table, text = directory / "results.csv", directory / "report.md"
    write_csv(results, table)
    drawn = [*_time_lines(results, directory), *plots.draw(results, directory)]
    text.write_text(markdown(results, [path.name for path in drawn]), encoding="utf-8")
    return [directory / FILE, table, text, *drawn]


def markdown(results: Results, pictures: Sequence[str] = ()) -> str:
    """Return the whole report."""
    lines = head(results)
    for r in (r for r in results.records if r["record"] == "lab"):
        lines += [_lab_title(r["lab"]), ""]
        lines += [calibration_table(Calibration.from_dict(r["calibration"])), ""]
        lines += [f"- off target: {miss}" for miss in r["misses"]] + [""]
    found = figures(results)
    lines += [*verdicts(results, found), *overview(found)]
    groups = sorted(results.cells().values(), key=lambda cell: repr(cell.group))
    for group, part in groupby(groups, key=lambda cell: cell.group):
        cells = list(part)
        lines += [f"## {_title(group)}", "", *_table(results, cells), "", *_throughput(found, cells)]
    for play in results.plays().values():
        lines += _changes(play)
    lines += [f"![{name}]({name})" for name in pictures]
    return "\n".join(lines) + "\n"


def _lab_title(lab: Mapping[str, Any]) -> str:
    rate, times = lab["rate_mbit"], lab.get("dilation", 1)
    slowed = f", {times:g} times as slow: the table has what the hosts were to have so, times are as measured"
    links = "links as they are" if rate is None else f"{rate:g} Mbit/s"
    return f"## Lab {lab['name']}, {links}{slowed if times != 1 else ''}"


def head(results: Results) -> list[str]:
    """Return the lines that say where results come from."""
    h = results.header
    lines = [f"# {h['experiment']}", "", f"{h['machine']}; Python {h['python']}; "]
    lines[-1] += ", ".join(f"{k} {v}" for k, v in h["versions"].items())
    lines += [f"revision {h['revision']}, seed {h['seed']}, experiment {h['digest']}, `{h['command']}`", ""]
    return lines


def compare(a: Results, b: Results) -> tuple[bool, list[str]]:
    """Return whether two runs agree within their intervals in every cell that both have, and a line per cell."""
    one, two, cells = a.intervals(), b.intervals(), a.cells()
    verdicts = statistics.agree(one, two)
    lines = [
        f"{'agrees ' if same else 'DIFFERS'} {_title(cells[cell].group)}, {cells[cell].label}: "
        f"{_range(one[cell])} and {_range(two[cell])} ms"
        for cell, same in verdicts.items()
    ]
    return bool(verdicts) and all(verdicts.values()), lines or ["the two runs have no cell in common"]


def _table(results: Results, group: Sequence[Cell]) -> Iterator[str]:
    times = {cell: results.medians(cell.id) for cell in group}
    turns = {cell: [r for r in results.turns() if r["cell"] == cell.id] for cell in group}
    plain = (ALONE, 0, "f32", 0)
    single = next((c for c in group if (c.strategy, c.copy, c.weights, c.requests) == plain and times[c]), None)
    for cell in group:
        original = next((c for c in group if cell.copy and (c.id != cell.id) and _pinned(c) == _pinned(cell)), None)
        if original is not None and times[cell] and times[original]:
            both = statistics.ratio(times[cell], times[original])
            yield f"A/A {original.label}: {both.median:.3f} [{both.low:.3f}, {both.high:.3f}] ({both.level:.0%})\n"
    yield _HEAD
    yield "|---|---:|---|---:|---:|---:|---:|---:|---|"
    for cell in sorted(
        group,
        key=lambda c: (c.strategy != AUTO, c.strategy, len(c.devices), c.wire, c.route, c.weights, c.requests, c.copy),
    ):
        good = [r for r in turns[cell] if r["ok"]]
        if not good:
            yield f"| {cell.label} | - | {turns[cell][-1]['message'].splitlines()[0]} | | | | | | |"
            continue
        median, last = statistics.median_interval(list(times[cell].values())), good[-1]
        against = ""
        if single is not None and not cell.requests and times[cell].keys() & times[single].keys():
            r = statistics.ratio(times[cell], times[single])
            against = f"{r.median:.2f} [{r.low:.2f}, {r.high:.2f}]"
        failed = f" ({len(turns[cell]) - len(good)} turns failed)" if len(good) < len(turns[cell]) else ""
        # That of a request alone: under load the times hold the waiting, and `throughput` has the prediction.
        predicted = f"{last['predicted_ms']:.1f}" if "predicted_ms" in last and not cell.requests else ""
        yield (
            f"| {cell.label}{failed} | {median.median:.1f} | {_range(median)} | {against} | {predicted} | "
            f"{last.get('bytes', '')} | {_mib(last)} | {max(r['error'] for r in good):.0e} | "
            f"{_choice(cell, last, group)} |"
        )


def _mib(turn: Mapping[str, Any]) -> str:
    """Return the most that a device holds at once, weights and activations; nothing for who does not say."""
    needs = turn.get("needs_bytes")
    return f"{max(needs.values()) / 2**20:.0f}" if needs else ""


def _throughput(found: Sequence[Figures], group: Sequence[Cell]) -> Iterator[str]:
    """Tell what came out per second where requests were asked at once; latencies of such cells hold the waiting."""
    loaded = [f for f in found if f.cell in group and f.cell.requests]
    if not loaded:
        return
    yield "| throughput | hosts | requests/s | interval | predicted | predicted / measured | bytes | plan |"
    yield "|---|---|---:|---|---:|---:|---:|---|"
    for f in loaded:
        per_s = statistics.median_interval([1e3 / ms for ms in f.by_round.values()])
        interval = f"{per_s.low:.2f} to {per_s.high:.2f} ({per_s.level:.0%})"
        predicted = "| " if f.predicted_ms is None else f"{1e3 / f.predicted_ms:.2f} | {f.ms / f.predicted_ms:.2f}"
        yield (
            f"| {f.cell.label} | {', '.join(f.cell.devices)} | {per_s.median:.2f} | {interval} | {predicted} | "
            f"{f.turn['bytes']} | {plan_words(_whole(f.turn))} |"
        )
    yield ""
    alone = {f.cell.devices: 1e3 / f.ms for f in loaded if f.cell.strategy == ALONE and not f.cell.copy}
    if len(alone) > 1:
        yield f"Hosts alone, added up: {sum(alone.values()):.2f} requests/s ({', '.join(h for (h,) in alone)})."
        yield ""


def _whole(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the plan of a turn with all of its devices: of replicas an answer names those of its own run."""
    plan, active = turn["plan"], turn.get("active")
    known = active and list(active["epoch"]) == list(plan["epoch"])
    return {**plan, "devices": active["devices"]} if active and known else plan


def _pinned(cell: Cell) -> tuple[Any, ...]:
    return (*cell.group, cell.strategy, cell.devices, cell.wire, cell.route, cell.weights, cell.requests)


def _choice(cell: Cell, turn: Mapping[str, Any], group: Sequence[Cell]) -> str:
    """Return, for Hepti's own choice, what it is and which pinned cell it equals, as far as one was measured."""
    if cell.strategy != AUTO:
        return ""
    plan = turn["plan"]
    name, devices = "/".join([plan["strategy"], *plan["options"].values()]), tuple(sorted(plan["devices"]))
    alike = (name, devices, plan["wire"], cell.weights, cell.requests)
    same = [c for c in group if (c.strategy, tuple(sorted(c.devices)), c.wire, c.weights, c.requests) == alike]
    equals = f" (= {same[0].label})" if same else ""
    return f"{plan_words(_whole(turn))}{equals}"


def _range(i: statistics.Interval) -> str:
    return f"{i.low:.1f} to {i.high:.1f} ({i.level:.0%})"


def _title(group: tuple[str, float | None, str, int | None]) -> str:
    lab, rate, model, tokens = group
    return f"{model}, {size_words(tokens)}, {lab}" + ("" if rate is None else f" at {rate:g} Mbit/s")


def _changes(play: Play) -> Iterator[str]:
    """Tell what happened to a cell under changes: a line per change and per new plan, with the requests between."""
    yield f"## {_title(play.cell.group)}, {play.cell.label}: under changes"
    yield ""
    if not play.whole:
        yield "Cut off: `--resume` plays it again.\n"
    yield "| s | what | plan | requests | failed | median ms | slowest ms |"
    yield "|---:|---|---|---:|---:|---:|---:|"
    for part in parts(play):
        times = [r["latency_ms"][0] for r in part.requests if r["ok"]]
        figures = f"{statistics.median_interval(times).median:.0f} | {max(times):.0f}" if times else "| "
        failed = len(part.requests) - len(times)
        yield f"| {part.at_s:.1f} | {part.what} | {part.plan} | {len(part.requests)} | {failed} | {figures} |"
    failures = Counter(r["message"].splitlines()[0] for r in play.requests if not r["ok"])
    told = (f"- {message}" + (f" ({count} times)" if count > 1 else "") for message, count in failures.items())
    yield from ("", f"{failures.total()} of {len(play.requests)} requests failed", *told, "")


def _time_lines(results: Results, directory: Path) -> list[Path]:
    """Draw the simulated time line of every plan that Hepti chose itself; one per cell, as it last was."""
    from hepti_mqtt.bench.timeline import draw

    last = {r["cell"]: r for r in results.turns() if r.get("active") and r["of"]["strategy"] == AUTO}
    return [draw(r, directory / f"timeline-{cell}.svg") for cell, r in last.items()]
