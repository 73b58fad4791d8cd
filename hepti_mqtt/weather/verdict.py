"""What a planner was worth on a site, beside the best plan of each phase if it had stood from its first second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean
from typing import Any, Final

import numpy as np

from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import decide
from hepti_mqtt.runtime.coordinator.plans import is_same_division
from hepti_mqtt.weather.site import Answered, History
from hepti_mqtt.weather.truth import STEP_S

FEW: Final = 4  # moments of a phase at which every plan is priced ...
MANY: Final = 16  # ... and those that may be the best
FINALISTS: Final = 4
PAIRED: Final = 40  # requests of a phase for which the best plan is priced
AS_GOOD: Final = 1.1  # a plan that takes no more of the best plan's time is the right one


@dataclass(frozen=True, slots=True)
class PhaseVerdict:
    """One phase of a site, in which the truth has one mean.

    changes, loads: of plans, and those that loaded bytes. mean_s, best_s: of a request, and of one under the best plan.
    right_s: from the phase's begin until a plan was active that is as good, None if never. worst_s: longest request.
    """

    name: str
    start_s: float
    requests: int
    changes: int
    loads: int
    mean_s: float
    best_s: float
    best: str
    right_s: float | None
    worst_s: float

    @property
    def regret(self) -> float:
        """Return by what part requests took longer than under the best plan."""
        return self.mean_s / self.best_s - 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """All phases but the first one, in which a planner gets to know the site. searches: after it."""

    kind: str
    phases: tuple[PhaseVerdict, ...]
    hours: float
    searches: int
    refused: int

    @property
    def changes_per_hour(self) -> float:
        """Return changes of plan per hour."""
        return sum(p.changes for p in self.phases) / self.hours

    @property
    def loads_per_hour(self) -> float:
        """Return changes of plan per hour for which a device loaded weights."""
        return sum(p.loads for p in self.phases) / self.hours

    @property
    def regret(self) -> float:
        """Return by what part all requests together took longer than under the best plan of each phase."""
        return sum(p.mean_s * p.requests for p in self.phases) / sum(p.best_s * p.requests for p in self.phases) - 1

    @property
    def worst_s(self) -> float:
        """Return the longest request."""
        return max(p.worst_s for p in self.phases)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        told = {"kind": self.kind, "hours": self.hours, "searches": self.searches, "refused": self.refused}
        told |= {k: getattr(self, k) for k in ("changes_per_hour", "loads_per_hour", "regret", "worst_s")}
        fields = [f for f in PhaseVerdict.__dataclass_fields__ if f != "name"]
        phases = [{"name": p.name, "regret": p.regret} | {f: getattr(p, f) for f in fields} for p in self.phases]
        return told | {"phases": phases}


def judge(history: History) -> Verdict:
    """Return what a planner was worth; raises ValueError if no request was answered after the first phase."""
    starts = [*(start for start, _ in history.truth.phases), history.truth.seconds]
    phases = (_judge_phase(history, i, starts[i], starts[i + 1]) for i in range(1, len(starts) - 1))
    found = tuple(phase for phase in phases if phase is not None)
    if not found:
        raise ValueError("no request was answered after the first phase; simulate more minutes")
    searches = sum(at >= starts[1] for at, _ in history.searches)
    hours = (history.truth.seconds - starts[1]) / 3600
    return Verdict(history.truth.kind, found, hours, searches, sum(history.refused.values()))


def _judge_phase(history: History, number: int, start_s: float, stop_s: float) -> PhaseVerdict | None:
    answers = [a for a in history.answers if start_s <= a.asked_s < stop_s]
    if not answers:
        return None
    start, stop = int(start_s / STEP_S), int(stop_s / STEP_S)
    best = _best_plan(history, start, stop)
    standing = [c for c in history.changes if c.now < start_s][-1:] + _within(history.changes, start_s, stop_s)
    few = _spread(range(start, stop), MANY)
    enough_s, right_s, seen = AS_GOOD * _mean_s(history, best, few), None, list[tuple[Plan, float]]()
    for change in standing:
        seconds = next((s for plan, s in seen if _same(plan, change.plan)), None)
        if seconds is None:
            there = {n for n, up in zip(history.truth.names, history.truth.up[(start + stop) // 2], strict=True) if up}
            seconds = _mean_s(history, change.plan, few) if there.issuperset(change.plan.devices) else inf
            seen.append((change.plan, seconds))
        if seconds <= enough_s:
            right_s = max(change.now - start_s, 0.0)
            break
    changes = _within(history.changes, start_s, stop_s)
    return PhaseVerdict(
        history.truth.phases[number][1],
        start_s,
        len(answers),
        len(changes),
        sum(c.loads for c in changes),
        fmean(a.seconds for a in answers),
        _best_s(history, best, answers),
        f"{best.method} on {', '.join(best.devices)}",
        right_s,
        max(a.seconds for a in answers),
    )


def _within(changes: Sequence[Any], start_s: float, stop_s: float) -> list[Any]:
    return [c for c in changes if start_s <= c.now < stop_s]


def _same(one: Plan, other: Plan) -> bool:
    return is_same_division(one, other) and (one.shares, one.ranges) == (other.shares, other.ranges)


def _best_plan(history: History, start: int, stop: int) -> Plan:
    """Return the plan that is the fastest in the steps of a phase, of those that a search finds or that were active."""
    usual = history.truth.usual_cluster(history.file, start, stop)
    question = replace(history.question, cluster=usual)
    plans = [c.plan for c in decide(question).ranking if c.price.feasible and not c.plan.replicas]
    used = [c.plan for c in history.changes if set(c.plan.devices) <= usual.devices.keys() and not c.plan.replicas]
    for plan in used:
        if not any(_same(plan, other) for other in plans):
            plans.append(plan)
    first = sorted(plans, key=lambda plan: _mean_s(history, plan, _spread(range(start, stop), FEW)))[:FINALISTS]
    return min(first, key=lambda plan: _mean_s(history, plan, _spread(range(start, stop), MANY)))


def _spread(steps: Sequence[int], count: int) -> list[int]:
    """Return so many of some steps, evenly."""
    return [steps[int(at)] for at in np.linspace(0, len(steps) - 1, min(count, len(steps)))]


def _mean_s(history: History, plan: Plan, steps: Sequence[int]) -> float:
    return fmean(history.run_s(plan, step) for step in steps)


def _best_s(history: History, best: Plan, answers: Sequence[Answered]) -> float:
    """Return the mean time of these requests under the best plan.

    It is priced for some of them. What their own runs took alone tells how much slower or faster the others found the
    site, so that a plan which is the best one has no regret but for what it waited.
    """
    some = [answers[i] for i in _spread(range(len(answers)), PAIRED)]
    paired = sum(a.run_s if _same(a.plan, best) else history.run_s(best, a.step) for a in some)
    return fmean(a.run_s for a in answers) * paired / sum(a.run_s for a in some)
