"""Apply the decision rule to the plans of a group: pace of requests, load times, and the choice to stay or move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp, inf, log
from statistics import median_low
from typing import TYPE_CHECKING

import numpy as np

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import Cluster
from hepti_mqtt.cost.loads import DeviceLoad, SiteLoad, load_seconds
from hepti_mqtt.lowering.handover import HandoverError
from hepti_mqtt.models import is_planned_for
from hepti_mqtt.planner.candidates import Candidate
from hepti_mqtt.planner.decisions import (
    RULE,
    Border,
    HandoverVerdict,
    Option,
    Situation,
    Verdict,
    decide,
    pays_to_hold,
    pays_to_search,
    weigh_handover,
)
from hepti_mqtt.planner.surface import NO_DRAWS, Beliefs, Outlook, Priced, factors_of, outlook
from hepti_mqtt.runtime.coordinator.fleet import Fleet
from hepti_mqtt.runtime.coordinator.plans import PlanRecord, is_same_division
from hepti_mqtt.runtime.coordinator.requests import Request
from hepti_mqtt.runtime.coordinator.runs import Run
from hepti_mqtt.strategies.plan_programs import handover_moves

if TYPE_CHECKING:
    from hepti_mqtt.runtime.coordinator.plan_groups import PlanGroup, PlanGroups


class RequestPace:
    """The geometric mean of the intervals between the last `pace_count` requests for a model.

    In an arithmetic mean, one long pause would hide the pace of the next fifty requests.
    """

    def __init__(self) -> None:
        self._usual_s = RULE.in_use_s
        self._count = 0  #: intervals in the mean, at most `pace_count`
        self.last_s = float("-inf")  #: time of the last request, or of the start of service if requests waited

    def record_request(self, now: float, *, served: bool = True) -> None:
        """Record a request; served: a plan is in use, otherwise the interval is ignored."""
        interval_s = max(min(now - self.last_s, RULE.in_use_s), RULE.least_period_s)
        if served and self.last_s > float("-inf"):
            self._count = min(self._count + 1, RULE.pace_count)
            self._usual_s *= (interval_s / self._usual_s) ** (1 / self._count)
        self.last_s = now

    def begin_service(self, now: float) -> None:
        """Measure the next interval from now, because clients waited for answers until a plan was active."""
        self.last_s = now

    def period_s(self, now: float) -> float:
        """Return the seconds from one request to the next, at most `in_use_s`."""
        return max(min(max(self._usual_s, now - self.last_s), RULE.in_use_s), RULE.least_period_s)

    def is_in_use(self, now: float) -> bool:
        """Return whether a request came recently."""
        return now - self.last_s < RULE.in_use_s


class SearchPace:
    """Measured seconds of a search, and the slowdown of requests during a search."""

    def __init__(self) -> None:
        self.search_s = RULE.search_s  #: wall-clock time of a search
        self.search_slowdown = RULE.search_slowdown  #: factor on a request's time during a search

    def record_search(self, seconds: float) -> None:
        """Take the duration of a whole search during service."""
        self.search_s = _smoothed(self.search_s, max(seconds, 0.01))

    def record_run(self, ratio: float) -> None:
        """Learn from a run during a search; ratio: its time over the expected time."""
        self.search_slowdown = _smoothed(self.search_slowdown, min(max(ratio, 0.5), 10.0))


def _smoothed(mean: float, sample: float) -> float:
    return exp(log(mean) * (1 - RULE.search_weight) + RULE.search_weight * log(sample))


class Moves:
    """Applies the rule to the plans of each group."""

    def __init__(self, groups: PlanGroups, fleet: Fleet) -> None:
        self._groups, self._fleet = groups, fleet

    def judge(self, group: PlanGroup, now: float, *, forced: bool = False, only: Plan | None = None) -> Verdict:
        """Return the rule's verdict on the active plan and the candidates of a group.

        forced: ignore the active plan. only: ignore all candidates except this plan and the plan being prepared.
        """
        record = None if forced or group.has_suspect_replica else group.plans.active
        record = record if record is not None and record.is_priced else None
        beliefs = self._beliefs(group, now)
        candidates = [k for k in group.search_history.candidates if self._is_there(k.candidate.plan, beliefs)]
        if only is not None:
            coming = group.plans.preparing
            choice = (only,) if coming is None else (only, coming.plan)
            candidates = [k for k in candidates if any(is_same_division(k.candidate.plan, plan) for plan in choice)]
        active, own = None, []
        if record is not None and self._is_there(record.decision.chosen.plan, beliefs):
            priced = Priced(record.decision.chosen, record.decision.cluster)
            active_outlook = outlook(priced, beliefs)
            own = [(priced, active_outlook)]
            group.durations.expect(record, active_outlook)
            active = self._option(group, priced, active_outlook, beliefs, (), now)
            candidates = [k for k in candidates if not is_same_division(record.plan, k.candidate.plan)]
        used = () if active is None else active.plan.devices
        outlooks = [outlook(k, beliefs) for k in candidates]
        options = [
            self._option(group, k, each, beliefs, used, now) for k, each in zip(candidates, outlooks, strict=True)
        ]
        may_gain = _may_gain([*own, *zip(candidates, outlooks, strict=True)], beliefs.cluster) if own else inf
        verdict = decide(self._situation(group, active, options, now))
        judgement = group.judgement
        judgement.verdict, judgement.may_gain, judgement.judged_s = verdict, may_gain, now
        judgement.learned_runs = group.durations.learned_runs
        return verdict

    def judge_run_handover(self, group: PlanGroup, run: Run, now: float) -> HandoverVerdict | None:
        """Return whether a run of an earlier plan should continue under the active one; None if a device is missing.

        The run must have reported progress.
        """
        beliefs, blocks, progress = self._beliefs(group, now), group.served.block_count(run.shape), run.progress
        if (plans := self._before_and_active(group, run.plan_version, beliefs)) is None:
            return None
        before, after = (self._of_size(group, r, run.shape.size, beliefs, now) for r in plans)
        assert progress is not None
        # Since that report the run has advanced at the expected pace, or at the pace of the current estimates.
        fastest_s = min(run.times.expected_s, float(np.quantile(before.seconds, 1 - RULE.sure))) / blocks
        block = progress.block + int((now - progress.heard_s) / max(fastest_s, 1e-6))
        verdict = weigh_handover(before, after, Border.of_run(blocks, block))
        if not verdict.hands_over:
            return verdict
        try:
            moved = handover_moves(group.served.spec, plans[0].plan, plans[1].plan, run.shape, verdict.border.start)
        except HandoverError as error:
            return replace(verdict, hands_over=False, why=str(error))
        sent: Counter[str] = Counter()
        for move in moved:
            sent[move.source] += move.nbytes
        moved_s = max((n / beliefs.cluster.links[d].up_bytes_per_s for d, n in sent.items()), default=0.0)
        return weigh_handover(before, after, replace(verdict.border, moved_s=moved_s))

    def judge_text_handover(self, group: PlanGroup, request: Request, now: float) -> HandoverVerdict | None:
        """Return whether a text of an earlier plan should continue under the active one.

        None if a device is missing.
        """
        generation, beliefs = request.generation, self._beliefs(group, now)
        assert generation is not None
        assert generation.session.plan_version is not None
        if (plans := self._before_and_active(group, generation.session.plan_version, beliefs)) is None:
            return None
        before, after = (self._of_size(group, r, 1, beliefs, now) for r in plans)
        tokens, (rows, rows_s, token_s) = len(generation.text.tokens), request.measured_s(now)
        # A row of a larger run takes no longer than a token alone; speech repeats its first run, too.
        more_rows = max(len(generation.prompt) + tokens - rows, tokens)
        again = (rows_s + more_rows * min(rows_s / rows, token_s)) / token_s
        is_for_steps = is_planned_for(group.served.spec, generation.shape.decode_step(1))
        each = 1.0 if is_for_steps else token_s / rows_s  # otherwise plans are optimised for the first run
        return weigh_handover(before, after, Border.of_text(tokens, generation.max_new_tokens - tokens, again, each))

    def _before_and_active(
        self, group: PlanGroup, version: PlanVersion, beliefs: Beliefs
    ) -> tuple[PlanRecord, PlanRecord] | None:
        """Return the retiring plan of a version and the active one, if all of their devices are usable."""
        active = group.plans.active
        before = next((r for r in group.plans.retiring if version in r.versions), None)
        if active is None or before is None or not all(self._is_there(r.plan, beliefs) for r in (active, before)):
            return None
        return before, active

    def _of_size(self, group: PlanGroup, record: PlanRecord, size: int, beliefs: Beliefs, now: float) -> Option:
        """Return a plan as an option for a run of a size."""
        priced = Priced(record.decision.chosen, record.decision.cluster)
        option = self._option(group, priced, outlook(priced, beliefs), beliefs, (), now)
        return replace(option, seconds=option.seconds * group.durations.length_factor(record.plan, size))

    def is_due(self, group: PlanGroup, now: float) -> bool:
        """Return whether to judge the active plan: after a change, or `judged_s` after the last judgement."""
        plans, record = group.plans, group.plans.active
        if record is None or not record.is_priced or plans.wanted or plans.searching or group.has_suspect_replica:
            return False
        if plans.preparing is not None and plans.preparing.state == "swapping":
            return False
        judged_s = group.judgement.judged_s
        return self._fleet.estimates.last_change_s > judged_s or now - judged_s >= RULE.judged_s

    def _situation(self, group: PlanGroup, active: Option | None, options: Sequence[Option], now: float) -> Situation:
        pins = group.plans.pins
        free = pins.strategy is None and pins.objective == "latency"
        tried = frozenset(key for key, at in group.judgement.tried.items() if now - at < RULE.tried_s)
        return Situation(
            active,
            options,
            group.pace.period_s(now),
            self.busy(now),
            waiting=len({id(item.request) for item in group.queue}) if group.unserved else 0,
            may_try=free and not self._is_trying(group),
            tried=tried,
            is_unclear=self._fleet.estimates.is_unclear(group.active_devices, now),
        )

    def is_worth_holding(self, group: PlanGroup, device: str, nbytes: int, now: float) -> bool:
        """Return whether a standby device should load the weights before the serving device is lost."""
        load_s = nbytes / self._fleet.load_bytes_per_s(device)
        probability, period_s = self._fleet.loss_probability(RULE.held_s, now), group.pace.period_s(now)
        return pays_to_hold(probability, load_s, period_s=period_s, busy=self.busy(now))

    def is_worth_searching(self, group: PlanGroup, now: float) -> bool:
        """Return whether a search may gain more time than it costs requests before the situation changes."""
        work, change = self._groups.background, self._fleet.estimates.youngest_change(tuple(self._fleet.usable()), now)
        return group.judgement.may_gain == inf or pays_to_search(
            group.judgement.may_gain,
            group.durations.run_s,
            None if change is None else change.remaining,
            period_s=group.pace.period_s(now),
            busy=self.busy(now),
            search_s=work.search_s,
            search_factor=work.search_slowdown,
        )

    def busy(self, now: float) -> float:
        """Return the share of time in which requests of any model run."""
        return min(sum(min(group.durations.run_s / group.pace.period_s(now), 1.0) for group in self._groups), 1.0)

    @staticmethod
    def _is_trying(group: PlanGroup) -> bool:
        record, methods = group.plans.active, group.durations.methods
        return record is not None and record.run_count < RULE.trial_runs and methods.sd(record.plan) > RULE.known_sd

    @staticmethod
    def _is_there(plan: Plan, beliefs: Beliefs) -> bool:
        return set(plan.devices) <= beliefs.cluster.devices.keys()

    def _beliefs(self, group: PlanGroup, now: float) -> Beliefs:
        cluster, estimates = self._fleet.cluster({}), self._fleet.estimates
        names = tuple(cluster.devices)
        change = estimates.youngest_change(names, now)
        before = None if change is None else change.before
        methods = group.durations.methods
        return Beliefs(cluster, estimates.draws(names, now), before, methods.factor, methods.sd)

    def _option(
        self, group: PlanGroup, priced: Priced, view: Outlook, beliefs: Beliefs, used: Iterable[str], now: float
    ) -> Option:
        candidate = priced.candidate
        change = self._fleet.estimates.youngest_change({*candidate.plan.devices, *used}, now)
        load = _rest(candidate, group.plans.preparing)
        down = {device: link.down_bytes_per_s for device, link in beliefs.cluster.links.items()}
        seconds = load_seconds(load, self._fleet.load_rates(), down, beliefs.cluster.broker_bytes_per_s)
        option = Option(
            candidate,
            view.cost,
            view.seconds,
            group.durations.methods.sd(candidate.plan),
            load_bytes=sum(part.cached_bytes + part.fetched_bytes for part in load.devices.values()),
            load_s=max(seconds.values(), default=0.0),
            own_s=max((seconds[device] for device in seconds if device in used), default=0.0),
            fits_next_to_others=candidate.fits_next_to_others,
            no_evidence_s=self._fleet.estimates.no_evidence_s(set(candidate.plan.devices).difference(used), now)
            if used
            else 0.0,
        )
        if view.before is None:
            return option
        return replace(option, before=view.before, remaining=None if change is None else change.remaining)


def _rest(candidate: Candidate, coming: PlanRecord | None) -> SiteLoad:
    """Return the bytes that a plan has yet to load; coming: the plan being prepared."""
    coming = coming if coming is not None and is_same_division(coming.plan, candidate.plan) else None
    loaded = {} if coming is None else coming.progress_bytes
    devices = dict[str, DeviceLoad]()
    for device, nbytes in candidate.load_bytes.items():
        left, cached = nbytes, candidate.cached_bytes.get(device, 0)
        if coming is not None and device in loaded:  # devices read cached tiles first
            done, total = loaded[device]
            left = total - done if device in coming.unready_devices else 0
            cached = max(coming.decision.chosen.cached_bytes.get(device, 0) - done, 0)
        devices[device] = DeviceLoad(min(cached, left), max(left - cached, 0))
    largest = max((part.fetched_bytes for part in devices.values()), default=0)
    fetched = sum(part.fetched_bytes for part in devices.values())
    return SiteLoad(devices, min(candidate.hub_bytes, fetched) if not loaded else min(candidate.hub_bytes, largest))


def _may_gain(views: Sequence[tuple[Priced, Outlook]], now: Cluster) -> float:
    """Return the share of the active plan's time (the first view) that a search may save; infinity if unknown.

    A search may move work off slow devices. It may gain more if the site has changed since the active plan was priced:
    if its time, or an unused device, deviates from the change that all devices share, or if a link is so much faster or
    slower that the surface does not hold.
    """
    if not views or views[0][1].now_s <= 0:
        return inf
    (priced, active), plan = views[0], views[0][0].candidate.plan
    before = priced.cluster.devices
    slower = {d: log(p.slowdown / before[d].slowdown) for d, p in now.devices.items() if d in before}
    usual = median_low(slower.values())
    links = factors_of(plan, priced.cluster, now, NO_DRAWS).link.values()
    link_change = max((abs(log(float(factor.mean()))) for factor in links), default=0.0)
    gain = link_change if link_change > log(RULE.other_link) else 0.0
    moved = abs(log(active.now_s / priced.candidate.price.seconds) - usual)
    unused = [d for d in slower if d not in plan.devices]
    link_factors = [log(now.links[d].up_bytes_per_s / priced.cluster.links[d].up_bytes_per_s) for d in unused]
    faster = max([0.0, *(usual - slower[d] for d in unused), *link_factors])
    if max(moved, faster) > log(RULE.other_site):
        gain = max(gain, moved, faster)
    return 1 - min(min(view.even_s for _, view in views) / active.mean_s, exp(-gain))
