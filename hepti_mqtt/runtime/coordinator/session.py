"""CoordinatorSession: the planner's part in the protocol, without sockets, threads or clocks.

Membership changes and changed measurements lead to a search (`Solve`, done by the shell). What it finds, and what runs
say, is judged by the rule (`moves.py`); a move leads to a prepared plan, and requests are dispatched under the active
one. A request ends with the right answer or an error, whatever is lost meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from math import inf
from typing import Final

from hepti_mqtt.cost.reported import implausible_caps, sanitize_heartbeat
from hepti_mqtt.errors import PlanError
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Decision, Recalled, Verdict
from hepti_mqtt.planner.decisions import GoingOn
from hepti_mqtt.planner.price import Budget
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.keys import Checked
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.coordinator.fleet import UNWANTED, Fleet, HangDetector
from hepti_mqtt.runtime.coordinator.interface import (
    BrokerConnection,
    CoordinatorCommand,
    CoordinatorEvent,
    DeviceCaps,
    DeviceFrame,
    DeviceHeartbeat,
    DeviceMessage,
    DeviceStatus,
    DeviceUse,
    LogEvent,
    PinPlan,
    PlanRecalled,
    RequestArrived,
    RequestCancelled,
    SendTiles,
    Solve,
    Solved,
    Tick,
    WeightsUnreadable,
    devices_first,
)
from hepti_mqtt.runtime.coordinator.models import PlanGroup, PlanGroups
from hepti_mqtt.runtime.coordinator.moves import Moves
from hepti_mqtt.runtime.coordinator.plans import Ids, PlanSnapshot, Search, ServedModel, is_same_division
from hepti_mqtt.runtime.coordinator.rollout import SETTLE_S, SETTLE_UNSERVED_S, Rollout, Standby
from hepti_mqtt.runtime.coordinator.scheduler import Scheduler
from hepti_mqtt.runtime.machinery import Transition, TransitionLog

BEFORE_S: Final = 2.0  # a change may have begun by so much earlier than it seems
LATE_BLOCKS: Final = 1  # a run may be at the end of the block that it says it is in
LATE_FACTOR: Final = 1.5  # times its expected duration: then a run says that something is wrong before it ends
RECALL_S: Final = 1.0  # for what the broker has retained to be heard
PRICED_S: Final = 3.0  # after a recalled plan is to be prepared: requests that have waited for it come first
RETRY_WHILE_EXPECTED_S: Final = 5.0  # between two searches that find no plan while devices may come


class CoordinatorSession:
    """The state machine of the planner; boot: of its start, in_flight the runs at once per model.

    broker_bytes_per_s: rate of the broker's own link, None for that of the fastest device. secret: KEY_BYTES random
    bytes from which run ids, keys and the tokens of peers follow; without it there are no keys, and no mesh. checked:
    what the tags of frames cover. recalls: whether a `PlanRecalled` comes for each model.
    """

    def __init__(
        self,
        site: str,
        boot: int,
        served: tuple[ServedModel, ...],
        in_flight: int = 2,
        broker_bytes_per_s: float | None = None,
        secret: bytes | None = None,
        checked: Checked = "header",
        recalls: bool = False,
    ) -> None:
        self.site = site
        self._recalls = recalls
        self.topics = Topics(site)
        self.boot = boot
        self.in_flight = in_flight
        self.fleet = Fleet(broker_bytes_per_s, secret=secret, checked=checked)
        self.counters: Counter[str] = Counter()
        self.groups = PlanGroups(served, self.counters, self.fleet.estimates)
        self._online, self._begun, self._met_broker = True, False, False
        self._made: list[CoordinatorCommand] = []  # commands that were not returned yet
        ids = Ids(boot, secret)
        self._scheduler = Scheduler(self.topics, self.groups, self.fleet, ids, in_flight, self.counters)
        self._rollout = Rollout(self.topics, self.groups, self.fleet, self._scheduler, ids, in_flight)
        self._moves = Moves(self.groups, self.fleet)
        self._standby = Standby(self.groups, self.fleet, self._rollout, self._moves)
        self._hang_detector = HangDetector(self.groups, self.fleet, self._rollout, self._standby)
        self._handlers: Mapping[type, Callable[..., list[CoordinatorCommand]]] = {
            DeviceStatus: self._handle_status,
            DeviceUse: self._handle_use,
            DeviceCaps: self._handle_caps,
            DeviceHeartbeat: self._handle_heartbeat,
            DeviceMessage: self._handle_message,
            DeviceFrame: self._handle_frame,
            RequestArrived: self._handle_request,
            RequestCancelled: self._handle_cancelled,
            Solved: self._handle_solved,
            PlanRecalled: self._handle_recalled,
            PinPlan: self._pin,
            WeightsUnreadable: self._rollout.handle_unreadable,
            BrokerConnection: self._connection,
            Tick: self._tick,
        }

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorCommand]:
        """Take one event and return the commands that follow from it.

        If a step raises, the others are done all the same, and the next call returns what they have made: the states
        that they have changed count on it.
        """
        if isinstance(event, DeviceMessage) and not self.fleet.accepts(event.device, event.seal):
            self.counters["forged"] += 1
            return []
        if not self._begun:  # if no device comes the search says so, and requests do not wait for ever
            self._begun = True
            for group in self.groups:
                group.plans.request_search(now + SETTLE_S, now, "the planner has started")
                group.recall_by_s = now + RECALL_S if self._recalls else -inf
        self._mark_runs_beside_work()
        changed_s = self.fleet.estimates.last_change_s
        self._do(
            (
                partial(self._handlers[type(event)], event, now),
                partial(self._blame_changes, changed_s),
                partial(self._advance, now),
                partial(self._standby.handle, event, now),
            )
        )
        out, self._made = self._made, []
        return devices_first(out)

    def _do(self, steps: Iterable[Callable[[], Iterable[CoordinatorCommand]]]) -> None:
        """Take the commands of all steps, also those of a step before it raises; then raise every error."""
        errors: list[Exception] = []
        for step in steps:
            try:
                for command in step():
                    self._made.append(command)
            except Exception as error:
                errors.append(error)
        if len(errors) > 1:
            raise ExceptionGroup("several steps of one event failed", errors)
        if errors:
            raise errors[0]

    def _blame_changes(self, changed_s: float) -> list[CoordinatorCommand]:
        """Take back what methods seemed to take since a device or a link has changed: that was its doing."""
        if self.fleet.estimates.last_change_s != changed_s:
            for group in self.groups:
                group.methods.undo_since(self.fleet.estimates.last_change_began_s - BEFORE_S)
        return []

    @property
    def due_s(self) -> float:
        """Return when a Tick is needed for requests that wait for others; infinity if none does."""
        return self._scheduler.due_s

    def active_plan(self, model: str) -> Plan | None:
        """Return the active plan of a model, as the planner's user wants it."""
        return self.groups.default(model).active

    def snapshot(self) -> tuple[PlanSnapshot, ...]:
        """Return the plans that are active or being prepared, as values that any thread may keep and read."""
        records = (r for group in self.groups for r in (group.plans.active, group.plans.preparing))
        return tuple(standing for r in records if r is not None for standing in r.snapshots())

    def stories(self) -> list[TransitionLog]:
        """Return the story of each model's plans."""
        return [group.plans.story for group in self.groups.defaults()]

    def assert_invariants(self) -> None:
        """Raise AssertionError if an invariant of the session is broken; tests call it after every event."""
        for group in self.groups:
            assert group.active is None or set(group.active.devices) <= set(self.fleet.usable())
        self.groups.check(self.in_flight)
        self._scheduler.check()

    # -- membership -----------------------------------------------------------------------------------------------

    def _admit_device(self, device: str) -> bool:
        """Return whether there is room for a device; what it says is dropped and counted if there is none."""
        self.counters["devices_beyond"] += not (room := self.fleet.make_room(device))
        return room

    def _handle_status(self, event: DeviceStatus, now: float) -> list[CoordinatorCommand]:
        if not self._admit_device(event.device):
            return []
        before = self.fleet.member(event.device).refused
        out = self._handle_change(event.device, self.fleet.record_status(event.device, event.status, now), now)
        return self._tell_refused(event.device, before) + out

    def _handle_caps(self, event: DeviceCaps, now: float) -> list[CoordinatorCommand]:
        if not self._admit_device(event.device):
            return []
        wrong = implausible_caps(asdict(event.caps))
        if wrong is not None:
            self.counters["foreign_caps"] += 1
            return self._warn_implausible(
                event.device, f"Refused the caps of {event.device} ({wrong}). Restart its agent, or update it."
            )
        before = self.fleet.member(event.device).refused
        out = self._handle_change(event.device, self.fleet.record_caps(event.device, event.caps), now)
        return self._tell_refused(event.device, before) + out

    def _handle_use(self, event: DeviceUse, now: float) -> list[CoordinatorCommand]:
        """People switch a device off or on: what it computes runs again elsewhere, and it frees what it holds."""
        if not self._admit_device(event.device):
            return []
        change = self.fleet.record_use(event.device, event.wanted)
        if change != "unwanted":
            return self._handle_change(event.device, change, now)
        lost = self._handle_lost(event.device, f"was {UNWANTED}", now)
        release = messages.ReleaseAll(self._rollout.ids.next_transaction())
        return [*lost, self._rollout.command_device(event.device, release)]

    def _tell_refused(self, device: str, before: str) -> list[CoordinatorCommand]:
        """Tell of a device that is refused now, and was not before."""
        refused = self.fleet.member(device).refused
        return [LogEvent("refused", refused)] if refused not in ("", before) else []

    def _handle_heartbeat(self, event: DeviceHeartbeat, now: float) -> list[CoordinatorCommand]:
        device = event.device
        if not self._admit_device(device):
            return []
        heartbeat, wrong = sanitize_heartbeat(event.heartbeat)
        runs = [run for group in self.groups for run in group.runs.values() if device in run.plan.devices]
        busy, loading = any(run.is_computing for run in runs), bool(self._loading_devices())
        change = self.fleet.record_heartbeat(device, heartbeat, now, busy=busy, loading=loading)
        changed = self._handle_change(device, change, now)
        changed += self._scheduler.retry_after_broker_loss(now) if self._online else []
        if wrong is None:
            return changed
        self.counters["implausible_heartbeat"] += 1
        text = f"Implausible heartbeat from {device}: {wrong}. Restart its agent."
        return changed + self._warn_implausible(device, text)

    def _warn_implausible(self, device: str, text: str) -> list[CoordinatorCommand]:
        """Tell once of a device that says what cannot be."""
        member = self.fleet.member(device)
        told, member.implausible = member.implausible, text
        return [] if told else [LogEvent("refused", text)]

    def _warn_contradicted(self, now: float) -> Iterator[CoordinatorCommand]:
        """Tell once of each device whose measurements runs contradict, and in the stories of all models."""
        for member in self.fleet.usable().values():
            text = "" if member.contradiction_reported else next(self.fleet.estimates.contradicted(member.name), "")
            if not text:
                continue
            member.contradiction_reported = True
            for story in self.stories():
                story.append(Transition(now, member.name, "believed", "contradicted", "doubted", text))
            yield LogEvent("doubt", text)

    def _loading_devices(self) -> frozenset[str]:
        """Return the devices that load weights."""
        coming = (group.plans.preparing for group in self.groups)
        loading = (record.unready_devices for record in coming if record is not None)
        return self._standby.loading_devices.union(*loading)

    def _mark_runs_beside_work(self) -> None:
        is_loading = bool(self._loading_devices())
        searching = any(group.plans.searching is not None for group in self.groups)
        for run in (run for group in self.groups for run in group.runs.values()):
            run.beside.loads |= is_loading  # of any device, because the hub sends its tiles
            run.beside.search |= searching
            run.beside.only_search &= searching

    def _handle_change(self, device: str, change: str | None, now: float) -> list[CoordinatorCommand]:
        if change == "joined":
            for group in self.groups:
                group.crash_backoff.record_return(device, self.fleet.member(device).boot, now)
                group.missing_bytes.pop(device, None)
                if not group.pinned or group.in_use(now):
                    settled_s, why = now + SETTLE_S, f"{device} has joined"
                    first = partial(group.plans.request_search, is_brief=bool(group.left))  # what was left may be there
                    first(settled_s, now, why, soon_s=now + SETTLE_UNSERVED_S)
            # While it was away it may have missed a Release; no plan of ours uses it now, so it holds nothing we need.
            drain = messages.ReleaseAll(self._rollout.ids.next_transaction())
            return [self._rollout.command_device(device, drain), LogEvent("joined", f"{device} has joined")]
        if change == "starting":
            for group in self.groups:  # requests wait for it; those that have come before it were refused
                if group.active is None and (not group.pinned or group.in_use(now)):
                    soon_s = now + SETTLE_UNSERVED_S if self.fleet.usable() else None
                    group.plans.request_search(now + SETTLE_S, now, f"{device} is starting", soon_s=soon_s)
            return [LogEvent("starting", f"{device} is starting")]
        if change == "left":
            out = self._handle_lost(device, "went offline", now, says_so=True)
            if device in self.fleet.usable():  # a new start of it is here already
                out += self._handle_change(device, "joined", now)
            return out
        return []

    def _handle_lost(self, device: str, how: str, now: float, *, says_so: bool = False) -> list[CoordinatorCommand]:
        """Go on without a device; one that has left by its own word, under requests, may do so a few times."""
        out: list[CoordinatorCommand] = [LogEvent("left", f"{device} {how}")]
        member = self.fleet.member(device)
        held = {device: member.boot_before or member.boot}
        boot, lost_runs = self.fleet.record_loss(device, now), False
        for group in self.groups:
            plans, why = group.plans, f"{device} {how}"
            preparing = plans.preparing
            for record in (plans.active, preparing):
                if boot is not None and record is not None and device in record.plan.devices:
                    needed_bytes = record.needed_bytes(device)
                    group.crash_backoff.record_departure(device, boot, needed_bytes, record.last_exchange_s(), now)
            if preparing is not None and device in preparing.plan.devices:
                out += self._rollout.abandon(group, preparing, "lost", now, why)
                plans.request_search(now, now, why)
            for record in [r for r in plans.serving if device in r.plan.devices]:
                was_active, lost = record is plans.active, record.plan.for_device(device).version
                for text in group.waiting_texts(record):
                    text.leave_session()
                if was_active:
                    boots = {d: self.fleet.member(d).boot for d in record.plan.devices} | held
                    group.recalled = Recalled(record.plan, record.decision.chosen.price.needs, boots)
                lessened = self._rollout.drop_replica(group, record, device, now, why)
                if lessened is None:
                    plans.retire(record, "lost", now, why)
                out += lessened or []
                if was_active:
                    plans.request_search(now, now, why, forced=True)
                    out.append(self._rollout.publish_plan(group))
                for run in [r for r in group.runs.values() if r.needs(lost)]:
                    lost_runs = True
                    out += self._scheduler.handle_lost_device(group, run, device, now)
        if lost_runs and says_so and self.fleet.record_setback(device, now):
            out.append(LogEvent("put_aside", f"{device} has cost too many runs"))
        return out

    # -- planning -------------------------------------------------------------------------------------------------

    def _pin(self, event: PinPlan, now: float) -> list[CoordinatorCommand]:
        self.groups.default(event.model).plans.pin(event.pins, now)
        return []

    # -- requests -------------------------------------------------------------------------------------------------

    def _handle_request(self, event: RequestArrived, now: float) -> list[CoordinatorCommand]:
        request = event.request
        turned_away = self._scheduler.admission.refuse_or_none(request, now)
        if turned_away is not None:
            return turned_away
        group, out = self._rollout.group_for(request, now)
        return out if group is None else out + self._scheduler.admission.enqueue(group, request, now)

    def _handle_cancelled(self, event: RequestCancelled, now: float) -> list[CoordinatorCommand]:
        return self._scheduler.cancel(event.key, now)

    def _handle_recalled(self, event: PlanRecalled, _now: float) -> list[CoordinatorCommand]:
        group = self.groups.default(event.model)
        if event.recalled is not None and group.last_plan is None:
            group.recalled = event.recalled
        if group.recalled is None:
            group.recall_by_s = -inf
        return []

    def _recall(self, group: PlanGroup, now: float) -> list[CoordinatorCommand]:
        """Take the plan that served before, once all of its devices are there: they have kept what it needs."""
        plans, recalled = group.plans, group.recalled
        if recalled is None or not self._met_broker or not self.groups.may_search(group, now):
            return []
        if plans.in_use is not None:
            group.recalled = None
            return []
        usable = self.fleet.usable()
        boots = {device: usable[device].boot for device in recalled.plan.devices if device in usable}
        if len(boots) < len(recalled.plan.devices) or not boots.items() >= recalled.boots.items():
            return []
        out: list[CoordinatorCommand] = []
        why = "the plan that served before can serve again"
        group.recalled, group.recall_by_s = None, -inf
        if plans.searching is not None:
            plans.step(plans.searching, "outdated", now, why)
        if plans.preparing is not None:  # by devices that load its weights
            out += self._rollout.abandon(group, plans.preparing, "lost", now, why)
        plans.request_search(now, now, why)
        ticket, question = self._rollout.ids.next_transaction(), self._rollout.question(group, now)
        plans.start_search(ticket, question.plan_version, now, recalls=True)
        return [*out, Solve(group.name, ticket, question, None, recalled=recalled)]

    def _take_recalled(self, group: PlanGroup, search: Search, event: Solved, now: float) -> list[CoordinatorCommand]:
        """Prepare the plan that served before, or search as usual where it is not available."""
        plans, found = group.plans, event.decision
        if found is None or not set(found.chosen.plan.devices) <= self.fleet.usable().keys():
            plans.step(search, "outdated", now, str(event.error or "a device has left"))
            plans.request_search(now, now, "the plan that served before is not available")
            return []
        group.error = None
        plans.prepare_found(search, found, self._rollout.ids.next_transaction(), now)
        plans.request_search(now + PRICED_S, now, "the plan is as it was priced before")
        return [LogEvent("replanned", found.reason), self._rollout.publish_plan(group)]

    def _start_due_search(self, group: PlanGroup, now: float) -> list[CoordinatorCommand]:
        """Begin the search that is due."""
        plans, wanted = group.plans, group.plans.wanted
        if wanted is None or plans.preparing is not None or now < group.recall_by_s:
            return []
        if now < (wanted.soon_s if group.unserved else wanted.due_s):
            return []
        hurried = plans.pins.is_unpinned and group.unserved
        # One at a time, because searches see what others will hold; but requests without a plan wait for no other.
        alone = all(slot.plans.searching is None for slot in self.groups)
        awaited = self.fleet.must_wait_for(plans.pins.devices or (), now)
        if awaited or not (alone or hurried) or not self.groups.may_search(group, now):
            return []
        if plans.searching is not None:
            if plans.searching.recalls:  # it takes no time
                return []
            plans.step(plans.searching, "outdated", now, "requests wait")
        ticket, question = self._rollout.ids.next_transaction(), self._standby.question(group, now)
        late = [
            r for r in group.runs.values() if r.lateness.is_late and r.may_go_on and not r.lateness.was_searched_for
        ]
        if (late or wanted.is_brief) and not wanted.plans and group.active is not None:
            # What needs no load and few prices is there at once; the whole search follows.
            question, wanted.is_brief = replace(question, budget=Budget(0.0)), True
            for run in late:
                run.lateness.was_searched_for = True
        elif not wanted.plans:
            wanted.is_brief = False
        group.made_room = False
        group.search_inputs = self.fleet.estimates.means()
        plans.start_search(ticket, question.plan_version, now)
        return [Solve(group.name, ticket, question, group.active, hurried, wanted.plans)]

    def _handle_solved(self, event: Solved, now: float) -> list[CoordinatorCommand]:
        group = self.groups.group_of_search(event.model, event.ticket)
        if group is None or group.plans.searching is None:
            return []
        plans, search = group.plans, group.plans.searching
        if event.recalled:
            return self._take_recalled(group, search, event, now)
        if not (event.hurried or search.plans or search.is_brief or group.active is None):
            self.groups.background.record_search(now - search.begun_s)
        # A hurried result serves at once; the whole search, which is wanted, follows.
        serves = event.hurried and group.unserved and plans.pins.is_unpinned
        if plans.wanted is not None and not serves:  # something changed while the search ran: search again
            plans.step(search, "outdated", now)
            return []
        if event.decision is None:
            if group.active is None and (awaited := self.fleet.describe_expected(now)):
                why = f"there is no plan yet; {awaited} may come"
                plans.request_search(now + RETRY_WHILE_EXPECTED_S, now, why, forced=search.forced)
                plans.step(search, "no plan", now, str(event.error))
                return []
            if group.active is None and (limited := group.crash_backoff.lift(self.fleet.usable(), now)):
                return self._search_without_limits(group, search, limited, now)
            error = event.error or PlanError("no plan")
            if refused := self.fleet.refusal_reasons():
                error = PlanError("; ".join([str(error), *refused]), error.detail)
            plans.step(search, "no plan", now, str(error))
            return self._rollout.refuse_waiting(group, error, now)
        if not set(event.decision.chosen.plan.devices) <= set(self.fleet.usable()):
            plans.request_search(now, now, "a device has left while the search ran")
            plans.step(search, "outdated", now)
            return []
        group.error = None
        out = self._handle_found(group, search, event, event.decision, now)
        if search.is_brief:
            plans.request_search(now + SETTLE_S, now, "the search was brief", forced=search.forced)
        return out

    def _search_without_limits(
        self, group: PlanGroup, search: Search, devices: Sequence[str], now: float
    ) -> list[CoordinatorCommand]:
        """Search again after no plan fitted the memory that devices may use after their crashes."""
        why = f"no plan of {group.name} fits without all the memory of {', '.join(devices)}"
        group.plans.request_search(now, now, why, forced=search.forced)
        group.plans.step(search, "no plan", now, why)
        text = f"{why}: used again although it crashed soon after earlier plans. Check its log and its memory limit."
        return [LogEvent("crash_limit", text)]

    def _handle_found(
        self, group: PlanGroup, search: Search, event: Solved, decision: Decision, now: float
    ) -> list[CoordinatorCommand]:
        """Move to a plan that a search has found, if the rule says so."""
        plans = group.plans
        decision = group.learn_search(decision, event.active, search)
        # What the rule has asked to be priced is all that is asked: else two plans could be priced in turn for ever.
        only = decision.chosen.plan if search.plans else None
        verdict = self._moves.judge(group, now, forced=search.forced, only=only)
        record = None if group.has_suspect_replica else plans.active
        if verdict.move is None or (record and is_same_division(record.plan, verdict.move.option.plan)):
            plans.step(search, "kept", now, str(verdict))
            return [LogEvent("kept", str(verdict)), self._rollout.publish_plan(group)]
        plan, why = verdict.move.option.plan, str(verdict)
        moved = self.fleet.estimates.moved(group.search_inputs, plan.devices, now) if record else None
        if moved is not None or plan != decision.chosen.plan:  # priced by what is believed now
            plans.step(search, "kept", now, f"{moved or 'another plan than the first one'}: {why}")
            plans.request_search(now, now, why, plans=(plan,), forced=search.forced)
            return []
        # Replicas are plans of their own to their devices, so each has its own plan version.
        reason = plan.reason if verdict.move.kind == "must" else f"{plan.reason}; {verdict.move}"
        numbered = replace(plan, reason=reason).with_version(plan.version, self._rollout.ids.next_version)
        found = replace(decision, chosen=replace(decision.chosen, plan=numbered))
        plans.prepare_found(search, found, self._rollout.ids.next_transaction(), now, verdict.move)
        if event.hurried:
            plans.request_search(now + SETTLE_S, now, "the search was hurried")
        return [LogEvent("replanned", numbered.reason), self._rollout.publish_plan(group)]

    def _judge(self, group: PlanGroup, now: float) -> list[CoordinatorCommand]:
        """Judge the active plan by what is believed now; ask for a search where a better one may exist."""
        if not self._moves.is_due(group, now):
            return []
        moved = self.fleet.estimates.moved(group.made_with, group.active_devices, now) if group.in_use(now) else None
        has_changed = self.fleet.estimates.last_change_s > group.judged_s
        changed = moved is not None or has_changed
        verdict = self._moves.judge(group, now) if changed or group.is_fresh else Verdict(None)
        group.judged_s = now
        unclear = self.fleet.estimates.is_unclear(group.active_devices, now)
        if (coming := group.plans.preparing) is not None:
            # A load that was decided is carried out: what is left of it costs less with each second.
            assessed = self._moves.judge(group, now).considered
            ours = next((a for a in assessed if is_same_division(a.option.plan, coming.plan)), None)
            best = max((a.value_s for a in assessed if a is not ours and a.kind == "go"), default=0.0)
            if moved is None or unclear or (ours is not None and ours.value_s >= best):
                return []
            group.plans.request_search(now, now, moved, is_brief=True)
            return [LogEvent("drift", moved), *self._rollout.abandon(group, coming, "outdated", now, moved)]
        if verdict.move is not None:  # priced once more, with all of its Programs, by measurements of now
            group.plans.request_search(now, now, str(verdict), plans=(verdict.move.option.plan,))
            return [LogEvent("judged", str(verdict))]
        if moved is None or unclear or not self._moves.is_worth_searching(group, now):
            return []
        group.plans.request_search(now, now, moved, is_brief=has_changed)
        return [LogEvent("drift", moved)]

    # -- messages of devices --------------------------------------------------------------------------------------

    def _handle_message(self, event: DeviceMessage, now: float) -> list[CoordinatorCommand]:
        message, device = event.message, event.device
        if isinstance(message, messages.RequestTiles):
            tiles = SendTiles(message.model, device, message.hashes, message.share)
            return [tiles] if message.model in self.groups else []
        if isinstance(message, messages.CachedTiles):
            if message.model in self.groups:
                self.fleet.record_tiles(device, message, self.groups.default(message.model).served)
            return []
        changed = self._handle_change(device, self.fleet.record_message(device, now), now)
        return changed + self._handle_report(device, message, now)

    def _handle_frame(self, event: DeviceFrame, now: float) -> list[CoordinatorCommand]:
        change = self.fleet.record_message(event.device, now, served=event.frame.kind == "done")
        return self._handle_change(event.device, change, now) + self._scheduler.handle_frame(event, now)

    def _handle_report(self, device: str, message: messages.Message, now: float) -> list[CoordinatorCommand]:
        if isinstance(message, messages.RunFailed):
            return self._scheduler.handle_failure(device, message, now)
        if isinstance(message, messages.RunProgress):
            return self._handle_progress(device, message, now)
        if isinstance(message, messages.TaskDone):
            return self._scheduler.complete_task(device, message, now)
        if not isinstance(message, messages.Ready | messages.PrepareFailed | messages.PrepareProgress):
            self.counters["foreign_message"] += 1
            return []
        if isinstance(message, messages.PrepareFailed) and message.code == "mesh":
            self.fleet.record_unreachable(device, message.peers, now)
            return self._rollout.handle_unreachable_peers(message, now)
        if isinstance(message, messages.PrepareFailed) and message.code == "forgotten":
            return self._rollout.handle_forgotten(message, now)
        self._rollout.record_device_progress(device, message, now)
        group = self.groups.group_of_preparation(message.model, message.transaction_id)
        if group is None:
            return []
        record = group.plans.preparing
        failed = message if isinstance(message, messages.PrepareFailed) and message.code != "memory" else None
        if failed is not None and self.fleet.record_setback(device, now):
            return self._handle_lost(device, f"refuses every plan ({failed.text})", now)
        if way := self._standby.release_for_memory(record, device, message, now):
            return way
        if isinstance(message, messages.Ready) and record is not None and not record.has_same_programs(device, message):
            refused = LogEvent("refused", self.fleet.refuse(device))
            return [refused, *self._handle_lost(device, "compiles plans differently", now)]
        return self._rollout.handle_preparation(group, device, message, now)

    def _handle_progress(self, device: str, message: messages.RunProgress, now: float) -> list[CoordinatorCommand]:
        """Take how far a run is: one that is late says so before it ends."""
        if (run := self._scheduler.record_progress(device, message, now)) is None:
            self.counters["late"] += 1
            return []
        group = self.groups.default(message.model)
        blocks = group.served.block_count(run.shape)
        part = 1.0 if run.progress is None else min((run.progress.block + LATE_BLOCKS) / blocks, 1.0)
        if run.beside.loads or now - run.times.dispatched_s <= LATE_FACTOR * run.times.expected_s * part:
            return []  # a load slows down runs, and the rule has paid for it
        run.lateness.is_late = True
        self.fleet.estimates.record_overdue(run.plan.devices, now)
        return []

    def _go_on(self, group: PlanGroup, now: float) -> Iterator[CoordinatorCommand]:
        """Let runs and texts that began under a plan before the active one go on under that, where the rule says so."""
        active, before = group.plans.active, group.plans.retiring
        for run in list(group.runs.values()) if active is not None and before else ():
            assert active is not None
            asked = (active.version, run.progress)
            if not run.may_go_on or run.lateness.asked == asked or run.plan_version in active.versions:
                continue
            last, run.lateness.asked = run.lateness.asked, asked
            is_first = last is None or last[0] != active.version
            if (verdict := self._moves.go_on(group, run, now)) is not None:
                yield from self._tell_going_on(group, f"run {run.run_id}", run.plan_version, verdict, is_first, now)
                if verdict.goes:
                    yield from self._scheduler.go_on(group, run, active.plan, verdict.border.start, now)
        queued = [(item.request, item.request.generation) for item in group.queue] if before else ()
        for record, (request, text) in product(before, queued):
            if text is None or text.plan_version not in record.versions:
                continue
            verdict = None if active is None else self._moves.go_on_with_text(group, request, now)
            if active is not None and verdict is not None:
                is_first, text.judged_for = text.judged_for != active.version, active.version
                yield from self._tell_going_on(group, "a text", record.version, verdict, is_first, now)
            if verdict is None or verdict.goes:
                text.leave_session()

    @staticmethod
    def _tell_going_on(
        group: PlanGroup, what: str, before: PlanVersion, verdict: GoingOn, is_first: bool, now: float
    ) -> Iterator[CoordinatorCommand]:
        """Tell under which plan something ends: when it is asked first, and when it goes on."""
        text = f"{what} {'goes on' if verdict.goes else 'ends under its plan'}; {verdict}"
        active = group.plans.active
        if active is not None and (is_first or verdict.goes):
            group.plans.tell(before, active.version if verdict.goes else before, text, now)
        if verdict.goes:
            yield LogEvent("continued", text)

    def _advance(self, now: float) -> list[CoordinatorCommand]:
        """Do what has become possible: release, prepare, dispatch, search."""
        out: list[CoordinatorCommand] = []
        for group in self.groups:
            group.queue.discard_finished()
            out += [*self._go_on(group, now), *self._rollout.release_idle(group, now)]
        for slot in self.groups.pinned():
            if slot.idle and slot.plans.in_use is None and slot.plans.preparing is None:
                out += self._rollout.close_group(slot, now, "there is no plan, and nobody waits for one")
        for group in self.groups:
            out += self._rollout.advance(group, now)
        for group in self.groups.defaults():
            out += self._scheduler.dispatch_ready(group.name, now)
        for group in self.groups:
            out += [*self._recall(group, now), *self._start_due_search(group, now)]
        return out

    # -- time -----------------------------------------------------------------------------------------------------

    def _tick(self, event: Tick, now: float) -> list[CoordinatorCommand]:
        heard_s = min(event.heard_s, now) if self._online else -inf
        listens = self._online and not event.has_backlog
        self._do(
            (
                *((partial(self._drop_silent, now, heard_s),) if listens else ()),
                partial(self._scheduler.lease_overdue, now),
                partial(self._warn_contradicted, now),
                *(partial(self._tick_group, group, now, heard_s) for group in self.groups),
                *(partial(self._judge, group, now) for group in self.groups),
                self._tell_steps,
            )
        )
        return []

    def _tick_group(self, group: PlanGroup, now: float, heard_s: float) -> Iterator[CoordinatorCommand]:
        """Yield what follows from runs that are late, requests that have expired and devices that have rested."""
        yield from self._rollout.tick(group, heard_s)
        for run in list(group.runs.values()):
            if not run.beside.loads and heard_s - run.times.dispatched_s > LATE_FACTOR * run.times.expected_s:
                self.fleet.estimates.record_overdue(run.plan.devices, now)
            if heard_s > run.times.deadline_s and not run.broker_was_lost:
                yield LogEvent("overdue", f"A run of {run.plan.model} is overdue; retrying it")
                yield from self._rollout.mark_suspect(group, run.plan, now)
                yield from self._scheduler.retry(group, run, now)
        yield from self._scheduler.refuse_expired(group, now)
        if rested := group.crash_backoff.lift_expired(now):
            group.plans.request_search(now, now, f"{', '.join(rested)} may get more again")

    def _tell_steps(self) -> Iterator[CoordinatorCommand]:
        """Yield the records of models whose plans have taken steps, and the steps that may not be."""
        for group in self.groups.defaults():
            if group.published_transitions != group.plans.story.count:
                yield self._rollout.publish_plan(group)
        if (text := self.groups.new_illegal_steps()) is not None:
            yield LogEvent("illegal_step", text)

    def _drop_silent(self, now: float, heard_s: float) -> Iterator[CoordinatorCommand]:
        """Drop devices without heartbeats; probe those that others wait for, quarantine the silent."""
        for device in self.fleet.mark_silent_offline(heard_s):
            yield from self._handle_lost(device, "sends no heartbeats", now)
        probes, silent = self._hang_detector.tick(now, heard_s)
        yield from probes
        for device, how, mute in silent:
            self.fleet.quarantine(device, now, mute)
            yield from self._handle_lost(device, how, now)

    def _connection(self, event: BrokerConnection, now: float) -> list[CoordinatorCommand]:
        self._online, self._met_broker = event.online, self._met_broker or event.online
        self._scheduler.mark_broker_lost()
        if event.online:  # nobody could be heard meanwhile: everyone gets the usual time to be heard again
            self.fleet.reset_silence(now)
            self._scheduler.admission.expect_burst(now)
            for group in self.groups:
                if (record := group.plans.preparing) is not None:
                    record.progress_s, record.device_progress_s, record.prepare_sent_s = now, {}, -inf
        return [self._rollout.publish_plan(group) for group in self.groups.defaults()] if event.online else []
