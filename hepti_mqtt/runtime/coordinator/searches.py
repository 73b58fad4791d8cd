"""Searches for plans: when a search begins, and to which plan of its result a model moves.

    wanted -> searching -> the rule -> a plan to prepare, another search, or nothing

The rule (`moves.py`) judges each result and, between searches, the active plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Final

from hepti_mqtt.core.errors import HeptiError, PlanError
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.planner import Decision, Verdict
from hepti_mqtt.planner.decisions import RULE
from hepti_mqtt.runtime.coordinator.fleet import Fleet
from hepti_mqtt.runtime.coordinator.interface import CoordinatorCommand, LogEvent, PlanRecalled, Solve, Solved
from hepti_mqtt.runtime.coordinator.moves import Moves
from hepti_mqtt.runtime.coordinator.plan_groups import PlanGroup, PlanGroups
from hepti_mqtt.runtime.coordinator.plans import Search, is_same_division
from hepti_mqtt.runtime.coordinator.rollout import Rollout, Standby
from hepti_mqtt.runtime.coordinator.search_kinds import SEARCHES, SETTLE_S, SearchKind

RECALL_S: Final = 1.0  # after the planner's start, for the broker's retained messages
RETRY_WHILE_EXPECTED_S: Final = 5.0  # between two searches without a plan while devices may come
LOOK_AGAIN_S: Final = 10.0  # between two searches without a plan otherwise


class Searches:
    """Starts searches, and moves models to their plans."""

    def __init__(self, groups: PlanGroups, fleet: Fleet, rollout: Rollout, moves: Moves, standby: Standby) -> None:
        self._groups, self._fleet, self._rollout, self._moves, self._standby = groups, fleet, rollout, moves, standby
        self.is_connected = False  #: the broker was reached, so devices can receive plans

    def begin(self, now: float, *, recalls: bool) -> None:
        """Want the first search of each model; recalls: the broker may hold the record of an earlier planner."""
        for group in self._groups:  # the search also refuses requests if no device joins
            group.plans.request_search(now + SETTLE_S, now, "the planner has started")
            if recalls:
                group.former_plans.recall_by_s = now + RECALL_S

    # -- the plan that served before --------------------------------------------------------------------------------

    def handle_recalled(self, event: PlanRecalled, _now: float) -> list[CoordinatorCommand]:
        """Record the plan of an earlier planner, or end the wait for it if there is none."""
        group = self._groups.default(event.model)
        former = group.former_plans
        if group.last_plan is None:
            former.recalled = event.recalled or former.recalled
        if former.recalled is None:
            former.recall_by_s = -inf
        return []

    def recall(self, group: PlanGroup, now: float) -> list[CoordinatorCommand]:
        """Prepare the plan that served before once all of its devices are usable: they have kept its weights."""
        plans, recalled = group.plans, group.former_plans.recalled
        if recalled is None or not self.is_connected or not self._groups.may_search(group, now):
            return []
        if plans.in_use is not None:
            group.former_plans.forget()
            return []
        usable = self._fleet.usable()
        boots = {device: usable[device].boot for device in recalled.plan.devices if device in usable}
        if len(boots) < len(recalled.plan.devices) or not boots.items() >= recalled.boots.items():
            return []
        out: list[CoordinatorCommand] = []
        why = "the plan that served before can serve again"
        group.former_plans.forget()
        if plans.searching is not None:
            plans.step(plans.searching, "outdated", now, why)
        if plans.preparing is not None:  # its devices would load other weights
            out += self._rollout.abandon(group, plans.preparing, "lost", now, why)
        plans.request_search(now, now, why)
        solve = self._start(group, SearchKind.RECALLED, now)
        return [*out, replace(solve, recalled=recalled)]

    # -- the start of a search --------------------------------------------------------------------------------------

    def start_due(self, group: PlanGroup, now: float) -> list[CoordinatorCommand]:
        """Start the search of a group if it is due."""
        self._look_again(group, now)
        plans, wanted = group.plans, group.plans.wanted
        if wanted is None or now < group.former_plans.recall_by_s:
            return []
        if plans.preparing is not None and plans.preparing.state == "swapping":  # wait for the release of old plans
            return []
        if now < (wanted.soon_s if group.unserved else wanted.due_s):
            return []
        if group.last_plan is None and plans.preparing is None and self._fleet.is_measuring(now):
            return []  # the search and the load would disturb the link probes
        is_awaited = plans.pins.is_unpinned and group.unserved
        # One search at a time, because each counts the memory of the others' plans, unless requests have no plan.
        alone = all(other.plans.searching is None for other in self._groups)
        missing = self._fleet.must_wait_for(plans.pins.devices or (), now)
        if missing or not (alone or is_awaited) or not self._groups.may_search(group, now):
            return []
        if plans.searching is not None:
            if plans.searching.kind is SearchKind.RECALLED:  # it ends immediately
                return []
            plans.step(plans.searching, "outdated", now, "requests wait")
        return [self._start(group, self._kind(group, wanted, is_awaited=is_awaited), now)]

    def _kind(self, group: PlanGroup, wanted: Search, *, is_awaited: bool) -> SearchKind:
        """Return the kind of a search at its start."""
        usable = self._fleet.usable().keys()
        if wanted.kind is SearchKind.NAMED and all(usable >= {*plan.devices} for plan in wanted.plans):
            return SearchKind.NAMED
        if is_awaited and wanted.origin is not SearchKind.HURRIED:  # otherwise a hurried search has just failed
            return SearchKind.HURRIED
        late = [r for r in group.runs.values() if r.lateness.is_late and not r.lateness.was_searched_for]
        late = [run for run in late if run.may_be_handed_over]
        if group.active is None or not (late or wanted.kind is SearchKind.BRIEF):
            return SearchKind.WHOLE
        for run in late:
            run.lateness.was_searched_for = True
        return SearchKind.BRIEF

    def _start(self, group: PlanGroup, kind: SearchKind, now: float) -> Solve:
        ticket, question = self._rollout.ids.next_transaction(), self._standby.question(group, now)
        history, group.evicted = group.search_history, False
        history.began_inputs, history.began_site, history.began_s = self._fleet.estimates.means(), self._site(), now
        search = group.plans.start_search(kind, ticket, question.plan_version, now)
        return Solve(group.name, ticket, question, group.active, kind, search.plans)

    def _look_again(self, group: PlanGroup, now: float) -> None:
        """Want a search for a model without a plan: every `LOOK_AGAIN_S`, and after a change of the site."""
        if group.plans.may_serve() or (group.pinned and not group.pace.is_in_use(now)):
            return
        last, has_changed = group.search_history, self._site() != group.search_history.began_site
        if not has_changed and now - last.began_s < LOOK_AGAIN_S:
            return
        group.missing_bytes.clear()
        why = "there is no plan, and the site has changed" if has_changed else "there is no plan"
        group.plans.request_search(now, now, why)

    def _site(self) -> frozenset[object]:
        """Return the starts of devices and the plan versions on them, which decide whether a model has a plan."""
        starts = ((name, member.boot) for name, member in self._fleet.usable().items())
        return frozenset((*starts, *self._groups.plan_versions()))

    # -- the end of a search ----------------------------------------------------------------------------------------

    def handle_solved(self, event: Solved, now: float) -> list[CoordinatorCommand]:
        """Take the result of a search."""
        group = self._groups.group_of_search(event.model, event.ticket)
        if group is None or group.plans.searching is None:
            return []
        plans, search = group.plans, group.plans.searching
        if search.kind is SearchKind.WHOLE and group.active is not None:
            self._groups.background.record_search(now - search.begun_s)
        serves = search.rules.is_short and group.unserved and plans.pins.is_unpinned
        if plans.wanted is not None and not serves and search.kind is not SearchKind.RECALLED:
            plans.step(search, "outdated", now)
            return []
        if event.decision is None:
            return self._handle_no_plan(group, search, event.error or PlanError("no plan"), now)
        if not set(event.decision.chosen.plan.devices) <= self._fleet.usable().keys():
            plans.request_search(now, now, "a device left during the search")
            plans.step(search, "outdated", now)
            return []
        group.error = None
        if search.kind is SearchKind.RECALLED:
            plans.prepare_found(search, event.decision, self._rollout.ids.next_transaction(), now)
            out: list[CoordinatorCommand] = [LogEvent("replanned", event.decision.reason)]
            out.append(self._rollout.publish_plan(group))
        else:
            decision = group.search_history.learn(event.decision, search)
            if plans.active is not None and event.active is not None:
                plans.active.reprice(event.active, decision.cluster)
            self._price_recalled(group)
            out = self._move(group, search, decision, now)
        rules = SEARCHES[search.origin]
        if (
            rules.whole_after_s < inf
            and not event.is_whole
            and not (plans.wanted and plans.wanted.kind is SearchKind.NAMED)
        ):
            forced = search.forced and plans.preparing is None
            why = f"the search was {search.origin}"
            plans.request_search(now + rules.whole_after_s, now, why, forced=forced, origin=search.origin)
        return out

    def _handle_no_plan(
        self, group: PlanGroup, search: Search, error: HeptiError, now: float
    ) -> list[CoordinatorCommand]:
        """Search on a larger scale or later, or refuse the queued requests."""
        plans = group.plans
        if plans.preparing is not None:
            plans.step(search, "kept", now, str(error))
            return []
        if search.kind is not SearchKind.WHOLE:
            plans.step(search, "no plan", now, str(error))
            why = f"the {search.kind} search found no plan: {error}"
            refused = (*search.refused, *search.plans)
            plans.request_search(now, now, why, forced=search.forced, origin=search.kind, refused=refused)
            return []
        if group.active is None and (awaited := self._fleet.describe_expected(now)):
            why = f"there is no plan yet; {awaited} may come"
            plans.request_search(now + RETRY_WHILE_EXPECTED_S, now, why, forced=search.forced)
            plans.step(search, "no plan", now, str(error))
            return []
        if group.active is None and (limited := group.crash_backoff.lift(self._fleet.usable(), now)):
            return self._search_without_limits(group, search, limited, now)
        if reasons := self._fleet.refusal_reasons():
            error = PlanError("; ".join([str(error), *reasons]), error.detail)
        plans.step(search, "no plan", now, str(error))
        return self._rollout.refuse_waiting(group, error, now)

    def _search_without_limits(
        self, group: PlanGroup, search: Search, devices: Sequence[str], now: float
    ) -> list[CoordinatorCommand]:
        """Search again with the memory that was withheld from plans after crashes."""
        why = f"no plan of {group.name} fits without all the memory of {', '.join(devices)}"
        group.plans.request_search(now, now, why, forced=search.forced)
        group.plans.step(search, "no plan", now, why)
        text = f"{why}: used again although it crashed soon after earlier plans. Check its log and its memory limit."
        return [LogEvent("crash_limit", text)]

    def _move(self, group: PlanGroup, search: Search, decision: Decision, now: float) -> list[CoordinatorCommand]:
        """Move to a plan of a search if the rule says so."""
        plans = group.plans
        # After a search for a named plan, judge only that plan; otherwise two plans could be priced in turn forever.
        only = decision.chosen.plan if search.kind is SearchKind.NAMED else None
        verdict = self._moves.judge(group, now, forced=search.forced, only=only)
        record = None if group.has_suspect_replica else plans.active
        move, coming = verdict.move, plans.preparing
        is_finished = coming is not None and is_worth_finishing(verdict, coming.plan)
        if move is None or is_finished or (record and is_same_division(record.plan, move.option.plan)):
            plans.step(search, "kept", now, str(verdict))
            kept: list[CoordinatorCommand] = [LogEvent("kept", str(verdict))]
            if coming and not is_finished and not self._fleet.estimates.is_unclear(group.active_devices, now):
                kept += self._rollout.abandon(group, coming, "outdated", now, str(verdict))
            return [*kept, self._rollout.publish_plan(group)]
        plan, why = move.option.plan, str(verdict)
        moved = self._fleet.estimates.moved(group.search_history.began_inputs, plan.devices, now) if record else None
        if moved is not None or plan != decision.chosen.plan:  # price the plan by the current estimates first
            plans.step(search, "kept", now, f"{moved or 'another plan than the first one'}: {why}")
            plans.request_search(
                now, now, why, plans=(plan,), forced=search.forced, origin=search.origin, refused=search.refused
            )
            return []
        # Each replica is a separate plan on its devices, so it has its own plan version.
        reason = plan.reason if move.kind == "must" else f"{plan.reason}; {move}"
        numbered = replace(plan, reason=reason).with_version(plan.version, self._rollout.ids.next_version)
        chosen = replace(decision, chosen=replace(decision.chosen, plan=numbered))
        # Tiles that the abandoned plan loaded stay in the caches of its devices, and count for the next plan.
        why = "another plan is better"
        stopped = [] if coming is None else self._rollout.abandon(group, coming, "outdated", now, why)
        plans.prepare_found(search, chosen, self._rollout.ids.next_transaction(), now, move)
        return [*stopped, LogEvent("replanned", numbered.reason), self._rollout.publish_plan(group)]

    # -- between searches -------------------------------------------------------------------------------------------

    @staticmethod
    def _price_recalled(group: PlanGroup) -> None:
        """Price a recalled active plan by the candidates of a search during its load: the rule needs a price."""
        record = group.plans.active
        if record is not None and not record.is_priced:
            for priced in group.search_history.candidates:
                record.reprice(priced.candidate, priced.cluster)

    def judge(self, group: PlanGroup, now: float) -> list[CoordinatorCommand]:
        """Judge the active plan by the current estimates; want a search if a better plan may exist."""
        self._price_recalled(group)
        if not self._moves.is_due(group, now):
            return []
        estimates, plans = self._fleet.estimates, group.plans
        in_use, inputs = group.pace.is_in_use(now), group.search_history.inputs
        moved = estimates.moved(inputs, group.active_devices, now) if in_use else None
        has_changed = estimates.last_change_s > group.judgement.judged_s
        verdict = Verdict(None)
        if moved is not None or has_changed or group.durations.learned_runs > group.judgement.learned_runs:
            verdict = self._moves.judge(group, now)
        group.judgement.judged_s = now
        is_unclear = estimates.is_unclear(group.active_devices, now)
        if plans.preparing is not None and is_worth_finishing(verdict, plans.preparing.plan):
            return []
        if verdict.move is not None:  # price the plan again, with all of its Programs, by the current estimates
            plans.request_search(now, now, str(verdict), plans=(verdict.move.option.plan,))
            return [LogEvent("judged", str(verdict))]
        if moved is None or is_unclear or not self._moves.is_worth_searching(group, now):
            return []
        plans.request_search(now, now, moved, kind=SearchKind.BRIEF if has_changed else SearchKind.WHOLE)
        return [LogEvent("drift", moved)]


def is_worth_finishing(verdict: Verdict, plan: Plan) -> bool:
    """Return whether to finish a load: its remaining cost falls with each second.

    Another plan replaces it only if it is worth more by the cost of an activation and the error of prices.
    """
    own = next((a for a in verdict.considered if is_same_division(a.option.plan, plan)), None)
    others = (a.value_s for a in verdict.considered if a is not own and a.kind in ("go", "must"))
    doubt_s = 0.0 if own is None else RULE.least_gain * abs(own.value_s)
    least_s = max(others, default=-inf) - max(RULE.cost_factor * RULE.activation_s, doubt_s)
    return own is not None and own.value_s >= (least_s if own.kind == "must" else max(least_s, 0.0))
