"""From records of the transport benchmark to tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hepti_mqtt.bench.statistics import median_interval, ratio

FLOOR: Final = "raw TCP"
_WHAT: Final = {
    "round trip": "There and back, two processes; milliseconds.",
    "round trip, computing": "The same while both multiply matrices half of the time, on another thread.",
    "one way": "Messages one after the other without waiting for answers, until the last is there; milliseconds each.",
    "fan-out": "The same to three receivers.",
    "all-gather": "Each of four processes sends to all others, and waits for all.",
}
Records = Sequence[Mapping[str, Any]]


def markdown(results: Mapping[str, Any]) -> list[str]:
    """Return the report's lines: per kind of exchange medians, with ratios to raw TCP within rounds; then CPU times."""
    records: Records = results["records"]
    lines = ["# Transport", "", f"    {results['command']}", ""]
    lines.append(
        f"{_where(results)}, rivals in turns, medians of {results['rounds']} rounds; in brackets the median ratio to "
        "raw TCP in the same round. Every payload has a header of 256 bytes; brokers get one joined payload."
    )
    if "lab" in results:
        return [*lines, *_in_lab(results)]
    for kind in dict.fromkeys(r["kind"] for r in records):
        mine = [r for r in records if r["kind"] == kind]
        lines += ["", f"## {kind.capitalize()}", "", _WHAT[kind], ""]
        lines += _table(mine, "seconds", 1e3)
    one_way = [r for r in records if r["kind"] == "one way"]
    if one_way:
        for name, field in (("send", "sender_cpu_s"), ("receive", "receiver_cpu_s"), ("pass on", "broker_cpu_s")):
            lines += ["", f"## CPU to {name} a message one way", "", "Microseconds.", ""]
            lines += _table(one_way, field, 1e6)
    return lines


def _where(results: Mapping[str, Any]) -> str:
    machine = results["provenance"]["machine"]
    if "lab" in results:
        return f"{results['hosts']} hosts of the lab {results['lab']}, throttled ({machine})"
    return f"Processes of one machine ({machine}; broker: {results['broker']})"


def _in_lab(results: Mapping[str, Any]) -> list[str]:
    """Return a table per rate, and what the hosts were."""
    records: Records = results["records"]
    lines = []
    for (rate, kind), table in zip(
        dict.fromkeys((r["rate"], r["kind"]) for r in records), results["calibrations"], strict=True
    ):
        at = "" if rate is None else f" at {rate:g} Mbit/s"
        mine = [r for r in records if (r["rate"], r["kind"]) == (rate, kind)]
        lines += [
            "",
            f"## {kind.capitalize()}{at}",
            "",
            "Each host sends to all others, and waits for all; milliseconds.",
        ]
        lines += ["", *_table(mine, "seconds", 1e3), "", "CPU of the first host, milliseconds:", ""]
        lines += [*_table(mine, "sender_cpu_s", 1e3), "", *table.splitlines()]
    return lines


def cell(records: Records, way: str, field: str = "seconds") -> tuple[float, float | None]:
    """Return a way's median over rounds, and its median ratio to raw TCP, None where that was not measured or is 0."""
    values = {name: {r["round"]: r[field] for r in records if r["way"] == name} for name in (way, FLOOR)}
    floor = {turn: value for turn, value in values[FLOOR].items() if value > 0}
    found = median_interval(list(values[way].values())).median
    return found, ratio(values[way], floor).median if floor else None


def _table(records: Records, field: str, unit: float) -> list[str]:
    ways = list(dict.fromkeys(sorted((r["way"] for r in records), key=lambda way: way != FLOOR)))
    lines = ["| payload | " + " | ".join(ways) + " |", "|---|" + "---|" * len(ways)]
    for nbytes in sorted({r["bytes"] for r in records}):
        mine = [r for r in records if r["bytes"] == nbytes]
        cells = []
        for way in ways:
            value, times = cell(mine, way, field)
            cells.append(f"{value * unit:.3g}" + (f" ({times:.2f})" if times is not None and way != FLOOR else ""))
        lines.append(f"| {nbytes // 1024} KB | " + " | ".join(cells) + " |")
    return lines
