"""What the project demands of its kernels, each demand held against the records of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Final, NamedTuple

from hepti_mqtt.bench.kernel_cases import (
    INT8_ROWS,
    LARGE_WEIGHTS,
    LAYER_ROWS,
    MANY_ROWS,
    ROOF,
    ROOF_OF_ONE,
    SINGLE,
    THREADS,
)
from hepti_mqtt.bench.kernel_maps import MODELS
from hepti_mqtt.bench.kernel_timing import Ratio, ratio

Record = Mapping[str, Any]
Value = Callable[[Record], float]
Wanted = Callable[[Record], bool]

FEW_ROWS: Final = (8, 48)
# Part of as many FMA peaks as there are threads that these must reach for their cores to count as free: the cores of a
# virtual machine may at times be two threads of one core, which reach half of it.
CORES_FREE: Final = 0.95


class Found(NamedTuple):
    """A figure over `of` records; `shape` is where a least value was found."""

    value: float
    of: int
    shape: str = ""


class Bar(NamedTuple):
    """A demand: a figure of some records is at least `least`; `value` needs the contenders `needs`."""

    name: str
    least: float
    threads: int
    group: str
    wanted: Wanted
    value: Value
    figure: Callable[[Sequence[Record], Value], Found | None]
    needs: tuple[str, ...] = ()


class Verdict(NamedTuple):
    """A bar and what was found; `met` is None where nothing was measured that it could be held against."""

    name: str
    bar: float
    found: Found | None
    met: bool | None


def ratio_to(record: Record, rival: str) -> Ratio:
    """Return how many times as fast as `rival` the record's kernel is."""
    return ratio(record["seconds"]["ours"], record["seconds"][rival], record["provenance"]["seed"])


def times(rival: str) -> Value:
    """Return the function of a record that says how many times as fast as `rival` ours is."""
    return lambda r: float(median(r["seconds"][rival]) / median(r["seconds"]["ours"]))


def roof(record: Record) -> float:
    """Return the FLOP/s or bytes per second that could be reached at most, measured in the same rounds."""
    measured = record["roofs"][ROOF]
    return float(measured["amount"] / median(measured["seconds"]))


def of_peak(record: Record) -> float:
    """Return the part of one thread's measured FMA peak that the kernel reaches."""
    return float(record["flops"] / median(record["seconds"]["ours"]) / roof(record))


def of_bandwidth(record: Record) -> float:
    """Return the part of one thread's measured read bandwidth at which the kernel reads its weights."""
    return float(record["weight_bytes"] / median(record["seconds"]["ours"]) / roof(record))


def cores(record: Record) -> list[float]:
    """Return how many times one thread's FMA peak several threads reached together in each round."""
    several, one = record["roofs"][ROOF], record["roofs"][ROOF_OF_ONE]
    times = several["amount"] / one["amount"]
    return [times * s / t for t, s in zip(several["seconds"], one["seconds"], strict=True)]


def scaling_where_cores_are_free(record: Record) -> float:
    """Return how many times as fast as one thread several are in the rounds that gave them their cores; NaN in none."""
    free = [i for i, times in enumerate(cores(record)) if times >= CORES_FREE * record["threads"]]
    seconds = record["seconds"]
    return median(seconds[SINGLE][i] for i in free) / median(seconds["ours"][i] for i in free) if free else math.nan


def mean(records: Sequence[Record], value: Value) -> Found | None:
    """Return the mean weighted by the FLOPs that each shape has in all Programs; None without any."""
    total = sum(r["weight"] for r in records)
    return Found(sum(r["weight"] * value(r) for r in records) / total, len(records)) if total else None


def least(records: Sequence[Record], value: Value) -> Found | None:
    """Return the least value and its shape."""
    if not records:
        return None
    worst = min(records, key=value)
    return Found(value(worst), len(records), f"m={worst['m']} n={worst['n']} k={worst['k']}")


def middle(records: Sequence[Record], value: Value) -> Found | None:
    """Return the median; None without any record."""
    return Found(median(map(value, records)), len(records)) if records else None


def least_of_large(records: Sequence[Record], value: Value) -> Found | None:
    """Return the least value of the shapes with n·k ≥ 2^18."""
    return least([r for r in records if r["n"] * r["k"] >= LARGE_WEIGHTS], value)


def few_rows(record: Record) -> bool:
    """Return whether a device gets so few rows when tokens are split."""
    return bool(FEW_ROWS[0] <= record["m"] <= FEW_ROWS[1])


def compute_bound(record: Record) -> bool:
    """Return whether the arithmetic alone should limit the shape."""
    return bool(record["m"] >= 96 and min(record["n"], record["k"]) >= 768)


def _all(_record: Record) -> bool:
    return True


def _has_free_cores(record: Record) -> bool:
    return not math.isnan(scaling_where_cores_are_free(record))


def _one_row_of(storage: str) -> Wanted:
    return lambda r: r["m"] == 1 and r["storage"] == storage


def of_model(name: str) -> Wanted:
    """Return the function of a record of the group `maps` that says whether it is a layer of this model."""
    return lambda r: bool(r["model"] == name)


def _rows(m: int) -> Wanted:
    return lambda r: bool(r["m"] == m)


def _against(name: str, rival: str, bars: tuple[float, float], group: str, wanted: Wanted) -> list[Bar]:
    """Return a bar for the mean and one for every large shape."""
    said = ((": mean by FLOPs", mean), (": least of n·k ≥ 2^18", least_of_large))
    return [
        Bar(name + how, bar, 1, group, wanted, times(rival), figure, (rival,))
        for (how, figure), bar in zip(said, bars, strict=True)
    ]


_FEW: Final = f"f32, {FEW_ROWS[0]} ≤ m ≤ {FEW_ROWS[1]}"
_INT8: Final = f"w8a8, m ≥ {INT8_ROWS}"
_FREE: Final = f"rounds with {CORES_FREE:.0%} of two FMA peaks"
_SCALING: Final = f"2 threads × 1 thread, f32, m ≥ {MANY_ROWS}"

BARS: Final[tuple[Bar, ...]] = (
    *_against("f32 × NumPy", "numpy", (1.10, 0.95), "linear", _all),
    *_against("f32 × PyTorch", "torch", (1.10, 0.95), "linear", _all),
    *_against("f32 × ONNX Runtime", "onnxruntime", (1.05, 0.95), "linear", _all),
    *_against(f"{_FEW} × PyTorch", "torch", (1.3, 1.3), "linear", few_rows),
    Bar("f32 of the FMA peak, m ≥ 96, n, k ≥ 768: median", 0.90, 1, "linear", compute_bound, of_peak, middle),
    Bar("f32 of the FMA peak, m ≥ 96, n, k ≥ 768: least", 0.80, 1, "linear", compute_bound, of_peak, least),
    Bar(f"{_SCALING}: mean by FLOPs", 1.85, 2, THREADS, _all, times(SINGLE), mean, (SINGLE,)),
    Bar(f"{_SCALING}: least of n·k ≥ 2^18", 1.85, 2, THREADS, _all, times(SINGLE), least_of_large, (SINGLE,)),
    *(
        Bar(f"{_SCALING}, {_FREE}: {word}", 1.85, 2, THREADS, _has_free_cores, scaling_where_cores_are_free, figure)
        for word, figure in (("mean by FLOPs", mean), ("least of n·k ≥ 2^18", least_of_large))
    ),
    *_against(f"{_INT8} × own f32", "ours, f32", (3.5, 3.5), "int8", _all),
    *_against(f"{_INT8} × PyTorch dynamic int8", "torch int8", (1.2, 1.2), "int8", _all),
    *(
        Bar(
            f"{storage} of the read bandwidth, m = 1: least",
            0.85,
            1,
            "stream",
            _one_row_of(storage),
            of_bandwidth,
            least,
        )
        for storage in ("f32", "f16", "w8a32", "w8a8")
    ),
    *(
        Bar(f"BERT-Large layer, m = {m} × {name}", bar, 1, "layer", _rows(m), times(rival), least, (rival,))
        for m in LAYER_ROWS
        for name, rival, bar in (
            ("PyTorch", "torch", 1.10),
            ("PyTorch, weights packed", "torch packed", 1.10),
            ("ONNX Runtime", "onnxruntime", 1.05),
        )
    ),
    *(
        Bar(f"{model}'s layers × {name}: mean by FLOPs", bar, 1, "maps", of_model(model), times(rival), mean, (rival,))
        for model in MODELS
        for name, rival, bar in (("PyTorch", "torch", 1.0), ("ONNX Runtime", "onnxruntime", 0.9))
    ),
)


def verdicts(records: Sequence[Record]) -> list[Verdict]:
    """Return every bar with what the records say of it."""
    return [_verdict(bar, records) for bar in BARS]


def _verdict(bar: Bar, records: Sequence[Record]) -> Verdict:
    held = [
        r
        for r in records
        if r["group"] == bar.group
        and r["threads"] == bar.threads
        and all(name in r["seconds"] for name in bar.needs)
        and bar.wanted(r)
    ]
    found = bar.figure(held, bar.value)
    return Verdict(bar.name, bar.least, found, None if found is None else found.value >= bar.least)


def table(records: Sequence[Record]) -> list[str]:
    """Return the verdicts as the lines of a Markdown table."""
    words = {True: "met", False: "**not met**", None: "not measured"}
    lines = ["| bar | at least | measured | verdict | shapes | where |", "|---|---:|---:|---|---:|---|"]
    for name, bar, found, met in verdicts(records):
        value, of, shape = (f"{found.value:.3f}", found.of, found.shape) if found else ("", "", "")
        lines.append(f"| {name} | {bar:.2f} | {value} | {words[met]} | {of} | {shape} |")
    return lines
