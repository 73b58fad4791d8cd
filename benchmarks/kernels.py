"""Experiments of kind `kernels`: check first, then warm up, then time what alternates.

Every thread count is a process of its own, because BLAS reads its number of threads when NumPy is imported; what
several threads of ours gain over one is measured in another, where no rival has threads.
`python -m benchmarks.kernels JSON` is such a process; it prints a line of JSON for each case.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console

from benchmarks import plots
from benchmarks.errors import BenchError
from benchmarks.experiment import require, whole, wholes, words
from benchmarks.kernel_cases import GROUPS, LARGE_WEIGHTS, ROOF, SINGLE, THREADS, Conditions, cases, measure
from benchmarks.lab.spec import only
from benchmarks.provenance import FILE, Results, Writer, head
from benchmarks.tables import table
from hepti_mqtt.core.errors import HeptiError
from hepti_mqtt.kernels import Workers, warm_up

Record = Mapping[str, Any]
_KEYS: Final = ("name", "kind", "threads", "groups", "seed", "rounds", "sample", "seconds")
_THREAD_VARIABLES: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_RIVALS_SETTINGS: Final = ("OPENBLAS_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_")
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 384)  # ticks of the axis of rows


@dataclass(frozen=True, slots=True)
class KernelExperiment:
    """groups: of kernel_cases.GROUPS. sample: a seeded sample of the cases. seconds: after which it ends, 0 for all."""

    name: str
    threads: tuple[int, ...]
    groups: tuple[str, ...]
    seed: int
    rounds: int
    sample: bool
    seconds: int


def parse(data: Mapping[str, Any], _base: Path) -> KernelExperiment:
    """Return the experiment of a mapping; raises ConfigError that names the key."""
    only("an experiment of kind kernels", data, _KEYS)
    require(data, "name")
    threads, groups = wholes(data, "threads", [1, 2], 1), words(data, "groups", list(GROUPS), tuple(GROUPS))
    seed, rounds, seconds = whole(data, "seed", 1, 0), whole(data, "rounds", 9, 1), whole(data, "seconds", 0, 0)
    return KernelExperiment(str(data["name"]), threads, groups, seed, rounds, bool(data.get("sample")), seconds)


def _sittings(experiment: KernelExperiment) -> list[tuple[int, tuple[str, ...]]]:
    """Return what each process measures: the groups with rivals, and the one without, which needs several threads."""
    found = []
    for threads in experiment.threads:
        found.append((threads, tuple(group for group in experiment.groups if group != THREADS)))
        found.append((threads, (THREADS,) if THREADS in experiment.groups and threads > 1 else ()))
    return [(threads, groups) for threads, groups in found if groups]


def count(experiment: KernelExperiment) -> int:
    """Return the number of cases."""
    e = experiment
    return sum(len(list(cases(groups, e.sample, e.seed))) for _, groups in _sittings(e))


def run(experiment: KernelExperiment, _out: Path, writer: Writer, console: Console) -> None:
    """Measure and write it down; raises BenchError if a kernel or a rival computes wrongly."""
    e = experiment
    stop = time.monotonic() + (e.seconds or math.inf)
    for threads, groups in _sittings(e):
        # Beside our own threads alone, NumPy may not keep any: those of its BLAS spin after the check of the results.
        blas = dict.fromkeys(_THREAD_VARIABLES, "1" if groups == (THREADS,) else str(threads))
        # Rivals choose their own code: an inherited setting such as OPENBLAS_CORETYPE=Haswell would halve their speed.
        untuned = {name: value for name, value in os.environ.items() if not name.startswith(_RIVALS_SETTINGS)}
        said = json.dumps(
            {"threads": threads, "rounds": e.rounds, "seed": e.seed, "groups": groups, "sample": e.sample}
        )
        command = [sys.executable, "-m", "benchmarks.kernels", said]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env={**untuned, **blas}, stdout=pipe, stderr=pipe, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            for line in process.stdout:
                record = json.loads(line)
                writer.add("case", **record)
                console.print(f"{record['key']}, {threads} threads: {record['elapsed_s']:.1f} s", markup=False)
                if time.monotonic() > stop:
                    console.print(f"the {e.seconds} s are over; the other cases were not measured")
                    process.terminate()
                    return
            words = process.stderr.read()
        if process.returncode:
            raise BenchError(words.strip() or f"the measuring process ended with {process.returncode}; run it again")


def _measure_all(said: Mapping[str, Any]) -> None:
    threads, alone = said["threads"], said["groups"] == [THREADS]
    warm_up()
    if alone and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    pools = {"ours": Workers(threads), **({SINGLE: Workers(1)} if alone else {})}
    try:
        for case in cases(said["groups"], said["sample"], said["seed"]):
            record = measure(case, Conditions(threads, said["rounds"], said["seed"]), pools)
            print(json.dumps({**record, "seed": said["seed"]}), flush=True)
    finally:
        for pool in pools.values():
            pool.close()


def write(results: Results, directory: Path) -> list[Path]:
    """Write report.md and plots of time over rows; return the files."""
    records = results.of("case")
    text = directory / "report.md"
    drawn = []
    for threads in sorted({r["threads"] for r in records if r["group"] == "curve"}):
        curve = [r for r in records if (r["group"], r["threads"]) == ("curve", threads)]
        bandwidth = [_roof(r) for r in records if (r["group"], r["threads"]) == ("stream", threads)]
        drawn.append(_plot(curve, threads, max(bandwidth, default=math.nan), directory / f"rows-{threads}.svg"))
    said = [*head(results.header["experiment"], results.header), *_summary(records), ""]
    said += [*_durations(records), "", *(f"![{path.stem}]({path.name})" for path in drawn)]
    text.write_text("\n".join(said) + "\n", encoding="utf-8")
    return [directory / FILE, text, *drawn]


def _rivals(records: Sequence[Record]) -> list[str]:
    """Return those that every record has been compared with."""
    kept = [name for name in records[0]["seconds"] if name != "ours"]
    return [name for name in kept if all(name in r["seconds"] for r in records)]


def _flops_per_s(record: Record, name: str) -> float:
    return float(record["flops"] / median(record["seconds"][name]))


def _roof(record: Record) -> float:
    """Return the FLOP/s or bytes per second that could be reached at most, measured in the same rounds."""
    return float(record["roofs"][ROOF]["amount"] / median(record["roofs"][ROOF]["seconds"]))


def _summary(records: Sequence[Record]) -> list[str]:
    """Return our speed-up over every rival and the part of each roof, by group: over all shapes, few and many rows."""
    rows: list[list[Any]] = []
    for key in dict.fromkeys((r["group"], r["threads"], r["storage"]) for r in records):
        own = [r for r in records if (r["group"], r["threads"], r["storage"]) == key]
        for word, chosen in (("", own), ("m ≤ 48", [r for r in own if r["m"] <= 48])):
            for rival in _rivals(own) if chosen else ():
                speed_ups = [(r, median(r["seconds"][rival]) / median(r["seconds"]["ours"])) for r in chosen]
                rows.append([*key, word, f"speed-up over {rival}", *_figures(speed_ups)])
        if "roofs" in own[0] and own[0]["threads"] == 1:
            amount = "weight_bytes" if "weight_bytes" in own[0] else "flops"
            word = "read bandwidth" if "weight_bytes" in own[0] else "FMA peak"
            large = [r for r in own if amount == "weight_bytes" or (r["m"] >= 96 and min(r["n"], r["k"]) >= 768)]
            parts = [(r, r[amount] / median(r["seconds"]["ours"]) / _roof(r)) for r in large]
            rows += [[*key, "", f"part of the {word}", *_figures(parts)]] if parts else []
    names = (
        "group",
        "threads",
        "weights",
        "rows",
        "figure",
        "mean by FLOPs",
        "median",
        "least",
        "of",
        "where",
    )
    return table(names, rows)


def _figures(values: Sequence[tuple[Record, float]]) -> list[Any]:
    """Return the mean by the FLOPs of all Programs, the median, and the least of the shapes with n k >= 2^18."""
    weight = sum(r["weight"] for r, _ in values)
    mean = f"{sum(r['weight'] * v for r, v in values) / weight:.3f}" if weight else None
    large = [(r, v) for r, v in values if r["n"] * r["k"] >= LARGE_WEIGHTS] or values
    worst, least = min(large, key=lambda rv: rv[1])
    where = f"m={worst['m']} n={worst['n']} k={worst['k']}"
    return [mean, f"{median(v for _, v in values):.3f}", f"{least:.3f}", len(values), where]


def _durations(records: Sequence[Record]) -> list[str]:
    """Return how long each group took, by threads."""
    groups = dict.fromkeys((r["group"], r["threads"]) for r in records)
    spent = {key: [r["elapsed_s"] for r in records if (r["group"], r["threads"]) == key] for key in groups}
    return table(("group", "threads", "cases", "s"), [(*key, len(s), round(sum(s))) for key, s in spent.items()])


def _plot(curve: Sequence[Record], threads: int, bandwidth: float, file: Path) -> Path:
    matrices = sorted({(r["n"], r["k"]) for r in curve})
    figure, panels = plots.subplots(2 * len(matrices), 5, 4, columns=len(matrices))
    for place, (n, k) in enumerate(matrices):
        mine = sorted((r for r in curve if (r["n"], r["k"]) == (n, k)), key=lambda r: int(r["m"]))
        speed, seconds, rows = panels[place], panels[len(matrices) + place], [r["m"] for r in mine]
        for name in ("ours", *_rivals(mine)):
            speed.plot(rows, [_flops_per_s(r, name) / 1e9 for r in mine], marker=".", label=name)
            seconds.plot(rows, [1e3 * median(r["seconds"][name]) for r in mine], marker=".", label=name)
        peak = max(map(_roof, mine)) / 1e9
        if threads == 1:
            speed.axhline(peak, color="black", linestyle="--", label="FMA peak, measured")
            if not math.isnan(bandwidth):  # weights from memory once: 2 m FLOPs for every 4 bytes
                roofs = [min(peak, m / 2 * bandwidth / 1e9) for m in rows]
                speed.plot(rows, roofs, color="grey", linestyle=":", label="memory roof, measured")
        for axis, unit in ((speed, "GFLOP/s"), (seconds, "ms")):
            axis.set(xscale="log", xlabel="rows m", ylabel=unit, title=f"k = {k}, n = {n}, threads: {threads}")
            axis.set_xticks(_ROWS, [str(m) for m in _ROWS])
            axis.minorticks_off()
        seconds.set_yscale("log")
        speed.legend(fontsize="small")
    return plots.save(figure, file)


if __name__ == "__main__":
    try:
        _measure_all(json.loads(sys.argv[1]))
    except HeptiError as error:
        sys.exit(str(error))
