"""What runs have taught: how much longer a way of dividing a model takes than the simulator says.

The simulator knows neither stalls of a CPU's quota nor a lossy radio. Without this a plan that is faster on paper alone
would be kept for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, log
from statistics import fmean, median
from typing import Final

from hepti_mqtt.plan import Plan

KEPT: Final = 8  # late runs of each way
ENOUGH: Final = 3  # runs before they count: the first ones after a change wait for caches
FORGET_S: Final = 600.0  # then a way is as good as unknown: what made it slow may be gone
TRIED_S: Final = 3600.0  # so long a way that ran is not tried again for its own sake
EXPLORATION_BONUS: Final = (
    0.88  # a way that was never tried may take so much of its price: predictions are off by that much
)
# Bounds of a factor. The simulator leaves things out, so its mistakes are times that are too short. A run that was much
# faster than predicted says that what its plan was made with was wrong then, which is no reason to prefer its way now.
LEAST, MOST = 0.8, 8.0

# A way of dividing a model: method, number of devices and of replicas (0: not side by side), wire, storage and route.
StrategyKey = tuple[str, int, int, str, str, str]


def strategy_key(plan: Plan) -> StrategyKey:
    """Return what runs under a plan teach about."""
    return plan.method, len(plan.devices), len(plan.replicas), plan.wire, plan.weight_dtype, plan.route


@dataclass(frozen=True, slots=True)
class Corrections:
    """Measured over predicted time, by way.

    tried: ways that have run recently, whether or not that counts still. exploration_bonus: what part of its price an
    untried way is taken to cost, 1 where a search is not for trying any.
    """

    factors: Mapping[StrategyKey, float] = field(default_factory=dict)
    tried: frozenset[StrategyKey] = frozenset()
    exploration_bonus: float = 1.0

    def factor(self, plan: Plan) -> float:
        """Return what to multiply a plan's predicted time by.

        A way of several devices that was never used is taken to be as far off as those that were: what they share,
        links and stalls, is what the simulator misses. One device alone has no exchanges: 1. Replicas that were never
        used are as far off as their plans are by themselves.
        """
        known = self.factors.get(strategy_key(plan))
        if known is not None:
            return known
        if plan.replicas:
            return exp(fmean(log(self.factor(replica)) for replica in plan.replicas))
        others = [log(f) for (_, devices, replicas, *_rest), f in self.factors.items() if devices > 1 and not replicas]
        return exp(fmean(others)) if others and len(plan.devices) > 1 else 1.0

    def knows(self, plan: Plan) -> bool:
        """Return whether a plan's way was measured."""
        return strategy_key(plan) in self.factors

    def bonus_for(self, plan: Plan) -> float:
        """Return what to multiply a plan's cost by so that ways which were never tried get their turn.

        The first plan of several devices may promise twice as much: exchanges were not measured here yet.
        """
        if self.knows(plan) or strategy_key(plan) in self.tried:
            return 1.0
        split = any(devices > 1 and not replicas for _, devices, replicas, *_rest in {*self.factors, *self.tried})
        return self.exploration_bonus if split or len(plan.devices) == 1 or plan.replicas else self.exploration_bonus**2


class RunHistory:
    """The late runs of one model; times by any one clock, in seconds."""

    def __init__(self) -> None:
        self._runs: dict[StrategyKey, deque[tuple[float, float]]] = {}
        self._tried_s: dict[StrategyKey, float] = {}

    def record_run(self, plan: Plan, tokens: int, seconds: float, now: float, whole: Plan | None = None) -> None:
        """Take the measured time of a run of `tokens` tokens that had the devices to itself.

        whole: the plan of which `plan` is a replica. It teaches about that alone: the same division without others
        beside it need not be as slow.
        """
        if plan.predicted_s <= 0 or plan.predicted_tokens <= 0 or not 0.8 < tokens / plan.predicted_tokens < 1.25:
            return  # the time of another length is not in proportion
        ratio = seconds / (plan.predicted_s * tokens / plan.predicted_tokens)
        taught = strategy_key(whole or plan)
        runs = self._runs.setdefault(taught, deque(maxlen=KEPT))
        runs.append((now, min(max(ratio, LEAST), MOST)))
        if len(runs) >= ENOUGH:
            self._tried_s[taught] = now

    def forget_since(self, since_s: float) -> None:
        """Forget what ran since then: what it was held against was predicted from links or speeds that were others."""
        for runs in self._runs.values():
            while runs and runs[-1][0] > since_s:
                runs.pop()

    def corrections(self, now: float) -> Corrections:
        """Return the median of every way's late runs, where there are enough."""
        late = {w: [r for at, r in runs if now - at < FORGET_S] for w, runs in self._runs.items()}
        tried = frozenset(w for w, at in self._tried_s.items() if now - at < TRIED_S)
        return Corrections({w: median(ratios) for w, ratios in late.items() if len(ratios) >= ENOUGH}, tried)


# ----------------------------------------------------------------------------------------------------------------------
# When to plan again: a device's speed or link has differed from what the plan was made for, long enough.


GROSS: Final = 2.0  # beyond this ratio less patience: it is not noise


@dataclass(slots=True)
class DriftRule:
    """Fires when any observed value has been off by more than `factor` for `hold_s`, and not within `rest_s` of a plan.

    Nor within `rest_s` of a disturbance: devices that load weights compute slowly and have full links. Where a value is
    off by more than `GROSS`, both times are shorter, the more the further it is off; a rest after a plan is at least
    `hold_s`, and one after a disturbance stays whole. A processor that fell to a quarter while the rule rested after a
    plan waited 20 s for the next one.

    Values are positive (slowdown, bandwidth, round trip), by any key; `planned` are those that the plan was made with.
    """

    factor: float = 1.15  # some prices decide whether a full search follows (`revalidate`)
    hold_s: float = 5.0
    rest_s: float = 15.0
    planned: dict[str, float] = field(default_factory=dict)
    _since: dict[str, float] = field(default_factory=dict)
    _made_at: float = float("-inf")
    _disturbed_at: float = float("-inf")

    def set_planned(self, values: Mapping[str, float], now: float) -> None:
        """Take the values that a new plan was made with."""
        self.planned = dict(values)
        self._since.clear()
        self._made_at = now

    def record_disturbance(self, now: float) -> None:
        """Take it that what is observed now says nothing of how things will be."""
        self._since.clear()
        self._disturbed_at = now

    def is_too_recent(self, since: float, now: float) -> bool:
        """Return whether what began at `since`, or a disturbance, is too recent to be judged by its times."""
        return now - max(since, self._disturbed_at) < self.rest_s

    def observe(self, values: Mapping[str, float], now: float, grown: float | None = None) -> str | None:
        """Return what has drifted, in words, or None; grown: the factor for values that are larger, if another."""
        for key, value in values.items():
            base = self.planned.get(key)
            if base is None or base <= 0 or value <= 0:
                continue
            ratio = value / base
            off = max(ratio, 1 / ratio)
            if off <= (self.factor if grown is None or ratio < 1 else grown):
                self._since.pop(key, None)
                continue
            since = self._since.setdefault(key, now)
            patience = min(log(GROSS) / log(off), 1.0)
            hold_s, rest_s = patience * self.hold_s, max(patience * self.rest_s, min(self.hold_s, self.rest_s))
            if now - since >= hold_s and now - self._made_at >= rest_s and now - self._disturbed_at >= self.rest_s:
                return f"{key} is {ratio:.2f} times what the plan was made for, since {now - since:.0f} s"
        return None
