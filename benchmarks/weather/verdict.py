"""What a planner was worth on a site, beside the best plan of each phase if it had stood from its first second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean
from typing import Final

import numpy as np

from benchmarks.weather.site import Answered, History
from benchmarks.weather.truth import STEP_S
from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.planner import decide
from hepti_mqtt.runtime.coordinator.plans import is_same_division

FEW: Final = 4  # moments of a phase at which every plan is priced ...
MANY: Final = 16  # ... and those that may be the best
FINALISTS: Final = 4
PAIRED: Final = 40  # requests of a phase for which the best plan is priced
AS_GOOD: Final = 1.1  # a plan that takes no more of the best plan's time is the right one


@dataclass(frozen=True, slots=True)
class PhaseVerdict:
    """One phase of a site.

    changes, loads: of plans, and those that loaded bytes. mean_s, best_s: of a request, and of one under the best plan;
    regret: by what part the first is longer. right_s: from the phase's begin until a plan was active that is as good,
    None if never. worst_s: longest request.
    """

    name: str
    start_s: float
    requests: int
    changes: int
    loads: int
    mean_s: float
    best_s: float
    regret: float
    best: str
    right_s: float | None
    worst_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """All phases but the first one, in which a planner gets to know the site; numbers of all of them together."""

    kind: str
    hours: float
    changes_per_hour: float
    loads_per_hour: float
    searches_per_hour: float
    regret: float
    worst_s: float
    refused: int
    phases: tuple[PhaseVerdict, ...]


def judge(history: History) -> Verdict:
    """Return what a planner was worth; raises ConfigError if no request was answered after the first phase."""
    truth = history.truth
    starts = [*(start for start, _ in truth.phases), truth.seconds]
    found = (_judge_phase(history, i, starts[i], starts[i + 1]) for i in range(1, len(starts) - 1))
    phases = tuple(phase for phase in found if phase is not None)
    if not phases:
        raise ConfigError("no request was answered after the first phase; simulate more minutes")
    hours, ours, best = (truth.seconds - starts[1]) / 3600, 0.0, 0.0
    for p in phases:
        ours, best = ours + p.mean_s * p.requests, best + p.best_s * p.requests
    return Verdict(
        truth.kind,
        hours,
        sum(p.changes for p in phases) / hours,
        sum(p.loads for p in phases) / hours,
        sum(at >= starts[1] for at, _ in history.searches) / hours,
        ours / best - 1,
        max(p.worst_s for p in phases),
        sum(history.refused.values()),
        phases,
    )


def _judge_phase(history: History, number: int, start_s: float, stop_s: float) -> PhaseVerdict | None:
    answers = [a for a in history.answers if start_s <= a.asked_s < stop_s]
    if not answers:
        return None
    start, stop = int(start_s / STEP_S), int(stop_s / STEP_S)
    best, mean_s = _best_plan(history, start, stop), fmean(a.seconds for a in answers)
    changes, best_s = [c for c in history.changes if start_s <= c.now < stop_s], _best_s(history, best, answers)
    return PhaseVerdict(
        history.truth.phases[number][1],
        start_s,
        len(answers),
        len(changes),
        sum(c.loads for c in changes),
        mean_s,
        best_s,
        mean_s / best_s - 1,
        f"{best.method} on {', '.join(best.devices)}",
        _right_s(history, best, start_s, stop_s),
        max(a.seconds for a in answers),
    )


def _right_s(history: History, best: Plan, start_s: float, stop_s: float) -> float | None:
    steps = _spread(range(int(start_s / STEP_S), int(stop_s / STEP_S)), MANY)
    enough_s = AS_GOOD * _mean_s(history, best, steps)
    there = _there(history, steps[len(steps) // 2])
    before = [c for c in history.changes if c.now < start_s][-1:]
    for change in [*before, *(c for c in history.changes if start_s <= c.now < stop_s)]:
        able = there.issuperset(change.plan.devices)
        if (_mean_s(history, change.plan, steps) if able else inf) <= enough_s:
            return max(change.now - start_s, 0.0)
    return None


def _there(history: History, step: int) -> set[str]:
    return {name for name, up in zip(history.truth.names, history.truth.up[step], strict=True) if up}


def _same(one: Plan, other: Plan) -> bool:
    return is_same_division(one, other) and (one.shares, one.ranges) == (other.shares, other.ranges)


def _best_plan(history: History, start: int, stop: int) -> Plan:
    """Return the plan that is the fastest in the steps of a phase, of those that a search finds or that were active."""
    usual, there = history.truth.usual_cluster(history.file, start, stop), _there(history, (start + stop) // 2)
    ranking = decide(replace(history.question, cluster=usual)).ranking
    plans = [c.plan for c in ranking if c.price.feasible and not c.plan.replicas]
    for plan in (c.plan for c in history.changes if there.issuperset(c.plan.devices) and not c.plan.replicas):
        if not any(_same(plan, other) for other in plans):
            plans.append(plan)
    steps = range(start, stop)
    first = sorted(plans, key=lambda plan: _mean_s(history, plan, _spread(steps, FEW)))[:FINALISTS]
    return min(first, key=lambda plan: _mean_s(history, plan, _spread(steps, MANY)))


def _spread(steps: Sequence[int], count: int) -> list[int]:
    """Return some of the steps, evenly."""
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
