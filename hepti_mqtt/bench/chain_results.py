"""Curves and findings of the chain of MatMuls from its records; the same records give the same answer.

A record is what `chain_pair.rounds` yields, with rate_mbit and cpu_percent (of the secondary device) among its words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple


class Condition(NamedTuple):
    """Rate of the links in Mbit/s (None: as they are), and percent of the secondary device's CPU."""

    rate_mbit: int | None
    cpu_percent: int

    @property
    def label(self) -> str:
        """Return it for people."""
        rate = "links as they are" if self.rate_mbit is None else f"{self.rate_mbit} Mbit/s"
        return f"{rate}, CPU {self.cpu_percent} %"


class Key(NamedTuple):
    """One point of the curves."""

    condition: Condition
    rows: int
    share: int


@dataclass(frozen=True, slots=True)
class Point:
    """Medians over the rounds, in seconds.

    alone_s: one device. compute_s: the slower device, undisturbed. communication_s: scatter and gather alone.
    additive_s: both together, as the paper adds them. split_s: measured, scatter and gather in one piece. overlap_s: in
    several, None where that was not measured.
    """

    alone_s: float
    compute_s: float
    communication_s: float
    additive_s: float
    split_s: float
    overlap_s: float | None

    @property
    def best_s(self) -> float:
        """Return the least time in which both devices gave the product."""
        return self.split_s if self.overlap_s is None else min(self.split_s, self.overlap_s)


def turn_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells a record from every other one of its experiment."""
    return tuple(record[key] for key in ("rate_mbit", "cpu_percent", "round", "rows", "share", "chunks", "kind"))


def points(records: Iterable[Mapping[str, Any]]) -> dict[Key, Point]:
    """Return every point that was measured in full: alone, parts, echo and work, in at least one common round."""
    runs: dict[Key, dict[int, dict[tuple[str, bool], Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for r in records:
        key = Key(Condition(r["rate_mbit"], r["cpu_percent"]), r["rows"], r["share"])
        runs[key][r["round"]][r["kind"], r["chunks"] > 1] = r
    out = {}
    for key, by_round in runs.items():
        alone = runs.get(key._replace(share=0), {})
        whole = [
            (alone[number]["work", False], kinds)
            for number, kinds in by_round.items()
            if {("parts", False), ("echo", False), ("work", False)} <= set(kinds)
            and ("work", False) in alone.get(number, {})
        ]
        if key.share and whole:
            out[key] = _point(whole)
    return out


def _point(rounds: list[tuple[Mapping[str, Any], dict[tuple[str, bool], Mapping[str, Any]]]]) -> Point:
    compute = [
        max(kinds["parts", False]["primary_compute_s"], kinds["parts", False]["secondary_compute_s"])
        for _, kinds in rounds
    ]
    way = [kinds["echo", False]["latency_s"] for _, kinds in rounds]
    overlap = [kinds["work", True]["latency_s"] for _, kinds in rounds if ("work", True) in kinds]
    return Point(
        alone_s=median(alone["latency_s"] for alone, _ in rounds),
        compute_s=median(compute),
        communication_s=median(way),
        additive_s=median(c + w for c, w in zip(compute, way, strict=True)),
        split_s=median(kinds["work", False]["latency_s"] for _, kinds in rounds),
        overlap_s=median(overlap) if overlap else None,
    )


def best_shares(found: Mapping[Key, Point], rows: int, curve: str = "additive_s") -> dict[Condition, int]:
    """Return the share with the least `curve` (a field of Point) for each condition at m = rows."""
    best: dict[Condition, tuple[float, int]] = {}
    for key, point in found.items():
        value = getattr(point, curve)
        if key.rows == rows and value is not None:
            best[key.condition] = min(best.get(key.condition, (value, key.share)), (value, key.share))
    return {condition: share for condition, (_, share) in best.items()}


def gains(found: Mapping[Key, Point], condition: Condition, curve: str = "best_s") -> dict[int, float]:
    """Return for each m the percent by which the best share takes less time than one device."""
    out: dict[int, float] = {}
    for key, point in sorted(found.items()):
        if key.condition == condition and getattr(point, curve) is not None:
            gain = 100 * (1 - getattr(point, curve) / point.alone_s)
            out[key.rows] = max(gain, out.get(key.rows, gain))
    return out


def contradictions(found: Mapping[Key, Point], rows: int, curve: str = "additive_s") -> list[str]:
    """Return in words what differs in kind from the paper; empty if nothing does."""
    best = best_shares(found, rows, curve)
    rates = sorted({c.rate_mbit for c in best}, key=lambda rate: rate or 0)
    speeds = sorted({c.cpu_percent for c in best})
    out = []
    for rate in rates:
        for slow, fast in pairwise(speeds):
            a, b = best.get(Condition(rate, slow)), best.get(Condition(rate, fast))
            if a is not None and b is not None and a >= b:
                out.append(f"at {rate} Mbit/s the best share is {a} % with {slow} % CPU and {b} % with {fast} % CPU")
    for cpu in speeds:
        for low, high in pairwise(rates):
            a, b = best.get(Condition(low, cpu)), best.get(Condition(high, cpu))
            if a is not None and b is not None and a > b:
                out.append(f"with {cpu} % CPU the best share is {a} % at {low} Mbit/s and {b} % at {high} Mbit/s")
    if rates and speeds:
        for m, gain in gains(found, Condition(rates[-1], speeds[-1]), curve).items():
            if gain <= 0:
                out.append(f"m = {m}: two devices take {-gain:.1f} % longer than one at full speed")
    return out
