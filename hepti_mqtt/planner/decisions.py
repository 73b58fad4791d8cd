"""The rule by which a model moves to another plan, tries another plan, or stays.

All plans are priced under the same draws from the posteriors of devices, links and methods. A move needs a sure and
large enough gain that pays for the move within the expected duration of the situation. An uncertain plan may be worth a
trial: the value of information counts. Without an active plan, waiting is the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import chain
from math import sqrt
from typing import Any, Final, Literal
from zlib import crc32

import numpy as np

from hepti_mqtt.core.plan import Plan
from hepti_mqtt.cost.loads import DeviceLoad, SiteLoad, site_load
from hepti_mqtt.cost.memory import matrices, resident_bytes, tile_map_bytes, weights_bytes
from hepti_mqtt.cost.moves import bytes_to_load, held_matrices
from hepti_mqtt.planner.candidates import Candidate, Decision
from hepti_mqtt.planner.estimates import Floats, StrategyKey, strategy_key
from hepti_mqtt.planner.price import Question
from hepti_mqtt.planner.quantities import Remaining
from hepti_mqtt.strategies.plan_programs import resident_weights


@dataclass(frozen=True, slots=True)
class Rule:
    """Constants of the rule: expected utility of a move under a normal posterior, with the value of information.

    Gains are parts of the active plan's cost, times are seconds.
    """

    # A move.
    sure: float = 0.95  #: least probability that a plan is better
    least_gain: float = 0.05  #: least expected gain: prices are off by as much
    cost_factor: float = 2.0  #: factor on costs, because a move can be postponed
    horizon_s: float = 600.0  #: longest time of a forecast
    same_method_sd: float = 0.015  #: standard deviation between prices of two plans of one method
    activation_s: float = 1.0  #: delay of running requests by an activation: Programs, frames of two versions
    ready_s: float = 0.6  #: from the last loaded byte to the first request: Programs, subscriptions, activation
    late_requests: int = 3  #: requests until the end of a change is detected
    # A load.
    most_share: float = 0.5  #: largest share of devices and links for a load: runs then take twice as long
    # A trial: the value of information.
    known_sd: float = 0.04  #: a method with a smaller standard deviation is not tried
    trial_runs: int = 4  #: runs that measure a method
    trial_share: float = 0.01  #: part of the time of all requests that a trial must gain
    tried_s: float = 3600.0  #: least time between two trials of a method
    # A switch inside a request.
    least_rest_s: float = 1.0  #: a request with less time left ends under its plan
    #: After the farthest block: devices differ by one block, and start another before the message arrives.
    lead_blocks: int = 2
    handover_s: float = 0.1  #: message to all devices, Programs of the rest, frames at the border without their bytes
    text_left: float = 0.5  #: expected part of the tokens that a text may still have
    # When the rule is evaluated.
    judged_s: float = 1.0  #: time between two evaluations without a change
    other_site: float = 1.25  #: factor on a device's time, relative to all devices, at which a search may gain
    other_link: float = 2.0  #: factor on a link's rate: surfaces are not valid beyond it
    # Requests to come.
    in_use_s: float = 60.0  #: longest interval between requests: an unused model counts as used at this interval
    least_period_s: float = 1e-3  #: shortest interval, for simultaneous requests
    pace_count: int = 10  #: intervals in the geometric mean
    held_s: float = 86400.0  #: time for which weights loaded ahead are useful
    # A search during requests, before the first measurement.
    search_s: float = 1.0  #: its time
    search_slowdown: float = 1.2  #: factor on a request's time
    search_weight: float = 0.3  #: of the last search in the geometric mean


RULE: Final = Rule()

Kind = Literal["go", "try", "must"]


@dataclass(frozen=True, slots=True)
class Option:
    """A plan that may serve."""

    candidate: Candidate
    cost: Floats  #: [draws] in the unit of the objective
    seconds: Floats  #: [draws] of one request
    method_sd: float = 0.0  #: standard deviation of the logarithm of its method's correction
    before: float = float("nan")  #: cost before the present changes, nan without changes
    remaining: Remaining | None = None  #: remaining time of the youngest change of its devices or the active plan's
    load_bytes: int = 0  #: weights that its devices lack
    load_s: float = 0.0  #: time of the load with all of devices and links
    own_s: float = 0.0  #: like `load_s`, for devices of the active plan only: their load slows down runs
    fits_next_to_others: bool = True  #: it fits next to the active plan; otherwise requests wait during its load
    no_evidence_s: float = 0.0  #: time since the last evidence on a device with a changed slowdown

    @property
    def plan(self) -> Plan:
        """Return the plan."""
        return self.candidate.plan


@dataclass(frozen=True, slots=True)
class Situation:
    """The active plan, its alternatives, and the requests."""

    active: Option | None
    options: Sequence[Option]
    period_s: float  #: from one request to the next
    busy: float = 1.0  #: part of the time with running requests of any model
    search_s: float = 0.5  #: time until a move begins
    waiting: int = 0  #: requests without a plan; each client is expected to send another request after its answer
    may_try: bool = True  #: no trial is running, and trials are allowed
    tried: AbstractSet[StrategyKey] = frozenset()  #: methods with a trial within the hour
    #: Devices may be changing, and the next run will decide: a slowdown of all shows on one device first.
    is_unclear: bool = False


@dataclass(frozen=True, slots=True)
class Assessment:
    """The rule's numbers for one plan, compared with the active plan."""

    option: Option
    gain: float  #: expected gain, as a part of the active plan's cost
    probability: float  #: that the plan is better
    requests: float  #: requests that gain from the move until the situation is expected to change
    cost_s: float  #: cost of the move in seconds of requests
    value_s: float  #: expected value of the move in seconds of requests, with costs counted twice
    kind: Kind | None  #: the possible move, None: stay
    why: str  #: the reason, for users
    share: float = 1.0  #: share of devices and links for its load

    def __str__(self) -> str:
        plan, loads = self.option.plan, self.option.load_bytes / 2**20
        numbers = f"gains {self.gain:.0%} (probability {self.probability:.2f}) in {self.requests:.0f} requests"
        numbers += f", costs {self.cost_s:.1f} s" + (f" with {loads:.0f} MiB to load" if loads >= 0.5 else "")
        return f"{plan.method} on {', '.join(plan.devices)}: {self.why}; {numbers}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, for the record of a model's plans."""
        return {
            "name": self.option.plan.method,
            "devices": list(self.option.plan.devices),
            "gain": self.gain,
            "probability": self.probability,
            "requests": self.requests,
            "cost_s": self.cost_s,
            "load_s": self.option.load_s,
            "load_bytes": self.option.load_bytes,
            "verdict": self.kind or "stay",
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """The move to make, None: stay; and all assessed options, the best first."""

    move: Assessment | None
    considered: tuple[Assessment, ...] = ()

    def __str__(self) -> str:
        others = [str(a) for a in self.considered if a is not self.move]
        if self.move is None:
            return "it stays" + (f"; {others[0]}" if others else "; nothing else was considered")
        return f"{self.move}" + (f"; not taken: {others[0]}" if others else "")


def decide(situation: Situation) -> Verdict:
    """Return what to do in a situation."""
    options = situation.options
    if situation.active is None:
        best = min(options, key=lambda o: float(o.cost.mean()), default=None)
        assessed = [_without_plan(situation, option, best) for option in options if best is not None]
    else:
        assessed = [_assess(situation, situation.active, option) for option in options]
        likeliest = max((a for a in assessed if a.kind == "try"), key=lambda a: a.gain * a.probability, default=None)
        assessed = [
            replace(a, kind=None, why="a likelier plan is tried first") if a.kind == "try" and a is not likeliest else a
            for a in assessed
        ]
    ranked = sorted(assessed, key=lambda a: (a.kind is None, -a.value_s))
    return Verdict(ranked[0] if ranked and ranked[0].kind else None, tuple(ranked))


def _without_plan(situation: Situation, option: Option, best: Option) -> Assessment:
    """Assess a first plan: requests wait for its load, and it serves until the best plan has loaded too.

    Requests arrive at the past pace, and one after another from each waiting client. A waiting client loses the time
    until the first answer, counted `cost_factor` times because it may give up. After that it loses, in each request,
    the time by which the best plan is faster.
    """
    cost, least = float(option.cost.mean()), float(best.cost.mean())
    gain = 1 - least / max(cost, 1e-12)
    share = load_share(gain)
    serves_s = max(RULE.horizon_s - option.load_s, 0.0)
    next_s = best.load_s / share + situation.search_s + RULE.ready_s
    until_s = serves_s if option is best else min(next_s, serves_s)
    waiting_s = _waiting_s(option.load_s, situation.period_s)
    lost_s = RULE.cost_factor * situation.waiting * (option.load_s + RULE.ready_s)
    lost_s += 0.0 if option is best else situation.waiting * until_s * (1 - (1 - gain) * (1 - share))
    rate = 1 / situation.period_s + situation.waiting / max(float(option.seconds.mean()), 1e-12)
    value_s = -(waiting_s + lost_s + (until_s * cost + (serves_s - until_s) * least) / situation.period_s)
    return Assessment(option, 0.0, 1.0, serves_s * rate, waiting_s + lost_s, value_s, "must", "nothing serves")


def _waiting_s(load_s: float, period_s: float) -> float:
    """Return the total waiting seconds of requests that arrive during a load without an active plan."""
    return (load_s + RULE.ready_s) ** 2 / 2 / period_s


def _assess(situation: Situation, active: Option, option: Option) -> Assessment:
    """Assess a plan against the active plan."""
    typical = float(active.cost.mean())
    unit_s = float(active.seconds.mean()) / max(typical, 1e-12)  # seconds of a request per unit of the objective
    gains = active.cost * (1 + _doubt(active.plan, option.plan, len(active.cost))) - option.cost
    gain, better = float(gains.mean()) / max(typical, 1e-12), float((gains > 0).mean())
    share = load_share(gain)
    if option.own_s > option.load_s * share:
        option = replace(option, load_s=option.own_s / share)
    requests, later = _requests(situation, option)
    cost_s = _cost_s(situation, active, option, unit_s, share)
    # After the end of the youngest change the best plan stays: this one, or a plan without a load.
    free = [active.before, *(o.before for o in situation.options if not o.load_bytes)]
    later_s = later * max((1 - RULE.least_gain) * min(free) - option.before, 0.0) * unit_s if later else 0.0
    value_s = requests * float(gains.mean()) * unit_s + later_s - RULE.cost_factor * cost_s
    kind: Kind | None = None
    if option.candidate.price.missing:
        why = "it lacks memory"
    elif situation.is_unclear:
        why = "devices may be changing, and the next run will decide"
    elif better >= RULE.sure and gain < RULE.least_gain:
        why = f"it gains less than {RULE.least_gain:.0%}"
    elif better >= RULE.sure:
        kind, why = ("go", "it is better") if value_s > 0 else (None, "the gain does not pay for the move")
    elif (why := _why_not_try(situation, option)) == "":
        if option.no_evidence_s and gain <= 0:  # a hope only: the present doubt is expected to last as long again
            requests = min(requests, option.no_evidence_s / situation.period_s)
        value_s = _value_of_trial(gains * unit_s, requests, cost_s, typical * unit_s)
        kind, why = ("try", "runs will tell") if value_s > 0 else (None, "it is not surely better")
    return Assessment(option, gain, better, requests, cost_s, value_s, kind, why, share)


def load_share(gain: float) -> float:
    """Return the share of devices and links that a load takes from runs, for a plan with this relative gain.

    The share minimises the loss: w seconds of work at a share p cost w / (1 - p) by slower runs and w * gain / p by the
    later gain.
    """
    root = sqrt(max(gain, RULE.least_gain))
    return min(root / (1 + root), RULE.most_share)


def _requests(situation: Situation, option: Option) -> tuple[float, float]:
    """Return the requests that gain from a move until the youngest change is expected to end, and those after it."""
    ready_s = option.load_s + situation.search_s + RULE.ready_s
    lasts_s = _lasts_s(option.remaining, ready_s)
    return lasts_s / situation.period_s, (max(RULE.horizon_s - ready_s, 0.0) - lasts_s) / situation.period_s


def _lasts_s(remaining: Remaining | None, ready_s: float) -> float:
    """Return the expected seconds, from a plan's readiness to the horizon, until the youngest change ends.

    The mean, not the median: a move without a load pays off for the few changes that last.
    """
    return max(RULE.horizon_s - ready_s, 0.0) if remaining is None else remaining.expected_s(ready_s, RULE.horizon_s)


def _doubt(active: Plan, other: Plan, count: int) -> Floats | float:
    """Return the error of the price ratio of two plans of one method [draws], with equal numbers at each call."""
    if strategy_key(active) != strategy_key(other):
        return 0.0
    rng = np.random.default_rng(crc32(repr((strategy_key(other), sorted(other.shares.items()))).encode()))
    return RULE.same_method_sd * rng.standard_normal(count)


def _cost_s(situation: Situation, active: Option, option: Option, unit_s: float, share: float) -> float:
    """Return the cost of a move in seconds of requests: activation, load, and late requests after a change ends."""
    cost_s = situation.busy * (RULE.activation_s + option.own_s / (1 - share))
    if not option.fits_next_to_others:
        cost_s += _waiting_s(option.load_s, situation.period_s)
    if option.remaining is not None:
        wrong = RULE.late_requests * max(option.before - active.before, 0.0) * unit_s
        cost_s += wrong + situation.busy * RULE.activation_s
    return cost_s


def _why_not_try(situation: Situation, option: Option) -> str:
    if not situation.may_try:
        return "it is not surely better"
    if not option.fits_next_to_others:
        return "it is not surely better, and does not fit next to the active plan for a trial"
    if option.no_evidence_s:
        return ""
    if option.method_sd < RULE.known_sd:
        return "it is not surely better, and its method is measured well"
    return "it was tried within the hour" if strategy_key(option.plan) in situation.tried else ""


def _value_of_trial(gains_s: Floats, requests: float, cost_s: float, typical_s: float) -> float:
    """Return the value of information in seconds: after some runs the better plan stays."""
    won_s = max(requests - RULE.trial_runs, 0.0) * float(np.maximum(gains_s, 0).mean())
    lost_s = min(RULE.trial_runs, requests) * float(np.maximum(-gains_s, 0).mean())
    back_s = float((gains_s <= 0).mean()) * RULE.activation_s
    return won_s - lost_s - RULE.cost_factor * (cost_s + back_s) - RULE.trial_share * requests * typical_s


# ----------------------------------------------------------------------------------------------------------------------
# Handover inside a request: a run continues under another plan from a block on, a text from a token on.


@dataclass(frozen=True, slots=True)
class Border:
    """A possible handover of a request to another plan; steps are blocks of a run's graph, or tokens of a text."""

    steps: float  #: all steps of the request
    done: int  #: completed steps at most
    start: int  #: the first step under the other plan
    each: float  #: part of a price per step
    moved_s: float = 0.0  #: time of the frames at the border
    again: float = 0.0  #: repeated work, in steps

    @classmethod
    def of_run(cls, blocks: int, block: int, moved_s: float = 0.0) -> Border:
        """Return the next border of a run; block: the farthest present block."""
        return cls(blocks, block, block + RULE.lead_blocks, 1 / blocks, moved_s)

    @classmethod
    def of_text(cls, tokens: int, most: int, again: float, each: float = 1.0) -> Border:
        """Return the border after the tokens of a text; most: tokens that may follow."""
        return cls(tokens + RULE.text_left * most, tokens, tokens, each, again=again)

    def __str__(self) -> str:
        again = f", with rows that take as long as {self.again:.0f}" if self.again else ""
        return f"at {self.done} of {self.steps:.0f}, from {self.start} on{again}"


@dataclass(frozen=True, slots=True)
class HandoverVerdict:
    """The rule's numbers for a handover inside a request."""

    border: Border
    rest_s: float  #: expected seconds of the rest under the present plan
    gain_s: float  #: expected gain in seconds
    probability: float  #: that the handover gains
    hands_over: bool  #: the request is handed over
    why: str = ""  #: another reason against the handover

    def __str__(self) -> str:
        less = f"{self.gain_s:.1f} s less of {self.rest_s:.1f} s (probability {self.probability:.2f})"
        return f"{self.border}: {less}" + (f"; {self.why}" if self.why else "")


def weigh_handover(active: Option, other: Option, border: Border) -> HandoverVerdict:
    """Return whether to continue a request of plan `active` under `other`; both are priced for the request's shape."""
    each_s = border.each * active.seconds * (1 + _doubt(active.plan, other.plan, len(active.seconds)))
    left, until = border.steps - border.done, border.start - border.done
    stay_s = left * each_s
    moved_s = border.moved_s + RULE.handover_s
    go_s = until * each_s + (left - until + border.again) * border.each * other.seconds + moved_s
    rest_s, probability = float(stay_s.mean()), float((go_s < stay_s).mean())
    hands_over = left > until and rest_s > RULE.least_rest_s and probability >= RULE.sure
    return HandoverVerdict(border, rest_s, rest_s - float(go_s.mean()), probability, hands_over)


def pays_to_hold(loss_probability: float, load_s: float, *, period_s: float, busy: float) -> bool:
    """Return whether a second device should load the weights of the only serving device, in case that is lost.

    loss_probability: of the serving device, while the second one holds the weights. load_s: of the second device.
    """
    return loss_probability * _waiting_s(load_s, period_s) > RULE.cost_factor * busy * RULE.activation_s


def pays_to_search(
    gain: float,
    run_s: float,
    remaining: Remaining | None,
    *,
    period_s: float,
    busy: float,
    search_s: float,
    search_factor: float,
) -> bool:
    """Return whether a search and the following move may gain more than they cost.

    gain: possible gain as a part of a request's time `run_s`: a move needs the least gain, and prices have an error of
    the same size. remaining: of the youngest change. search_factor: on the time of a request during a search.
    """
    requests = _lasts_s(remaining, search_s + RULE.ready_s) / period_s
    cost_s = busy * (search_s * max(search_factor - 1, 0.0) + RULE.activation_s)
    return gain >= RULE.cost_factor * RULE.least_gain and requests * gain * run_s > RULE.cost_factor * cost_s


# ----------------------------------------------------------------------------------------------------------------------
# Loads of candidates.


def with_loads(question: Question, decision: Decision, active: Candidate | None) -> Decision:
    """Return a decision with the loads of its feasible candidates, and whether they fit next to the active plan.

    Devices hold the weights of the question's residents and of the active plan.
    """
    held = [*([] if active is None else [active.plan]), *question.residents]
    ranking = tuple(_with_loads(question, c, held, active) for c in decision.ranking)
    return replace(decision, chosen=replace(ranking[0], plan=decision.chosen.plan), ranking=ranking)


def _with_loads(question: Question, c: Candidate, held: Sequence[Plan], active: Candidate | None) -> Candidate:
    if not c.price.feasible:
        return c
    spec, devices, fits = question.spec, c.plan.devices, True
    resident = {device: resident_weights(spec, c.plan, device) for device in devices}
    memory = {device: held_matrices(spec, device, held) for device in devices}
    shared = question.cluster.endpoints.issuperset(devices)  # devices share their tiles
    if question.tiles is not None:
        needs = {d: frozenset(matrices(resident[d], memory[d]).values()) - memory[d] for d in devices}
        load = site_load(question.tiles, needs, question.cached, shared=shared)
    else:
        lacks = {d: DeviceLoad(0, weights_bytes(resident[d], memory[d])) for d in devices}
        anywhere = frozenset(chain.from_iterable(memory.values()))
        once = weights_bytes(chain.from_iterable(resident.values()), anywhere)
        load = SiteLoad(lacks, once if shared else sum(part.fetched_bytes for part in lacks.values()))
    for device in devices:
        if active is not None and device in active.plan.devices:
            new_bytes = bytes_to_load(spec, c.plan, device, [active.plan])
            common = resident_bytes(spec, c.plan, device) - new_bytes + tile_map_bytes(spec)
            together = c.price.needs[device] + active.price.needs[device] - common
            fits = fits and together <= c.price.memory_bytes[device]
    cached = {device: part.cached_bytes for device, part in load.devices.items()}
    nbytes = {device: part.cached_bytes + part.fetched_bytes for device, part in load.devices.items()}
    return replace(c, load_bytes=nbytes, cached_bytes=cached, hub_bytes=load.hub_bytes, fits_next_to_others=fits)
