"""CoordinatorSession: the planner's part in the protocol, without sockets, threads or clocks.

A change of devices or estimates starts a search (`Solve`, run by the shell). After each search, and between searches,
the rule (`moves.py`) decides whether the model moves to another plan. A move prepares that plan; meanwhile requests run
under the active one. Whatever is lost, a request ends with the right answer or an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import product
from math import inf
from typing import Final

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.cost.reported import implausible_caps, sanitize_heartbeat
from hepti_mqtt.planner import EarlierPlan
from hepti_mqtt.planner.decisions import HandoverVerdict
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.keys import Checked
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.coordinator.fleet import UNWANTED, Fleet, HangDetector
from hepti_mqtt.runtime.coordinator.interface import (
    Answer,
    BrokerState,
    CoordinatorCommand,
    CoordinatorEvent,
    DeviceCaps,
    DeviceFrame,
    DeviceHeartbeat,
    DeviceMessage,
    DeviceStatus,
    DeviceUse,
    LogEvent,
    PlanRecalled,
    RequestArrived,
    RequestCancelled,
    SendTiles,
    Solved,
    Tick,
    WeightsUnreadable,
)
from hepti_mqtt.runtime.coordinator.kv_caches import waiting_texts
from hepti_mqtt.runtime.coordinator.moves import Moves
from hepti_mqtt.runtime.coordinator.orders import Orders
from hepti_mqtt.runtime.coordinator.plan_groups import PlanGroup, PlanGroups
from hepti_mqtt.runtime.coordinator.plans import Ids, PlanReport, PlanSnapshot, ServedModel
from hepti_mqtt.runtime.coordinator.rollout import SETTLE_UNSERVED_S, Rollout, Standby
from hepti_mqtt.runtime.coordinator.run_tracker import RunTracker
from hepti_mqtt.runtime.coordinator.search_kinds import SETTLE_S, SearchKind
from hepti_mqtt.runtime.coordinator.searches import Searches
from hepti_mqtt.runtime.machinery import Transition, TransitionLog

BEFORE_S: Final = 2.0  # a change may have begun this much earlier than detected
LATE_BLOCKS: Final = 1  # a run may be at the end of its reported block
LATE_FACTOR: Final = 1.5  # a run is late after this multiple of its expected duration

Action = Callable[[], Iterable[CoordinatorCommand]]


class CoordinatorSession:
    """The state machine of the planner.

    boot: identifies the planner's start. in_flight: concurrent runs per model. broker_bytes_per_s: rate of the broker's
    link, None for the rate of the fastest device. secret: KEY_BYTES random bytes from which run ids, keys and tokens of
    peers are derived; without it there are no keys and no mesh. checked: what frame tags cover. recalls: a
    `PlanRecalled` comes for each model. checks: assert the invariants after each event.
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
        checks: bool = False,
    ) -> None:
        self._checks = checks
        self._snapshot: tuple[PlanSnapshot, ...] | None = None  #: cache; None after a possible change of plans
        self._is_settled = False  #: no plan is searched for, preparing or retiring, so frames change only runs
        self._recalls = recalls
        self.topics = Topics(site)
        self.boot = boot
        self.in_flight = in_flight
        self.fleet = Fleet(broker_bytes_per_s, secret=secret, checked=checked)
        self.counters: Counter[str] = Counter()
        self.groups = PlanGroups(served, self.counters, self.fleet.estimates)
        self._online, self._begun = True, False
        self._pending: list[CoordinatorCommand] = []  # commands that `handle` has yet to return
        ids = Ids(boot, secret)
        orders = Orders(self.topics, self.fleet)
        self._run_tracker = RunTracker(orders, self.groups, self.fleet, ids, in_flight, self.counters)
        self.kv_caches = self._run_tracker.caches
        self._rollout = Rollout(orders, self.groups, self.fleet, self._run_tracker, ids, in_flight)
        self._moves = Moves(self.groups, self.fleet)
        self._standby = Standby(self.groups, self.fleet, self._rollout, self._moves)
        self._searches = Searches(self.groups, self.fleet, self._rollout, self._moves, self._standby)
        self._hang_detector = HangDetector(self.groups, self.fleet, self._rollout, self._standby)
        self._handlers: Mapping[type, Callable[..., list[CoordinatorCommand]]] = {
            DeviceStatus: self._handle_status,
            DeviceUse: self._handle_use,
            DeviceCaps: self._handle_caps,
            DeviceHeartbeat: self._handle_heartbeat,
            DeviceMessage: self._handle_message,
            DeviceFrame: self._handle_frame,
            RequestArrived: self._handle_request,
            RequestCancelled: self._run_tracker.cancel,
            Solved: self._searches.handle_solved,
            PlanRecalled: self._searches.handle_recalled,
            WeightsUnreadable: self._rollout.handle_unreadable,
            BrokerState: self._handle_broker_state,
            Tick: self._tick,
        }

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorCommand]:
        """Handle an event; return its commands.

        If an action raises, the other actions still run. The next call returns their commands, because the state has
        already changed.
        """
        if isinstance(event, DeviceMessage) and not self.fleet.accepts(event.device, event.seal):
            self.counters["forged"] += 1
            return []
        if not self._begun:
            self._begun = True
            self._searches.begin(now, recalls=self._recalls)
        if self._is_settled and isinstance(event, DeviceFrame):
            self._change_runs(partial(self._handle_frame, event, now), event.frame.model, now)
        elif (
            self._is_settled
            and isinstance(event, RequestArrived)
            and self.groups.find(event.request.key.model, event.request.pins)
        ):
            self._change_runs(partial(self._handle_request, event, now), event.request.key.model, now)
        else:
            self._handle_all(event, now)
        if self._checks:
            self.assert_invariants()
        out, self._pending = self._pending, []
        # Writing an answer takes longer than sending devices their next run.
        return sorted(out, key=lambda command: isinstance(command, Answer))

    def _change_runs(self, act: Action, model: str, now: float) -> None:
        """Handle an event that changes no plan: only runs of its model may begin."""
        self._do([act, partial(self._run_tracker.dispatch_ready, model, now)])

    def _handle_all(self, event: CoordinatorEvent, now: float) -> None:
        """Handle an event, then release, prepare, dispatch and search."""
        self._mark_other_work()
        self._is_settled, self._snapshot = False, None
        self._do(
            [
                self._learn,
                partial(self._take_event, event, now),
                self._learn,
                partial(self._advance, now),
                partial(self._standby.handle, event, now),
            ]
        )
        self._is_settled = not self._loading_devices() and all(
            group.active is not None
            and group.former_plans.recalled is None
            and not (group.plans.retiring or group.plans.preparing or group.plans.searching)
            for group in self.groups
        )

    def _do(self, actions: Iterable[Action]) -> None:
        """Collect the commands of all actions, including those before an error; then raise every error."""
        errors: list[Exception] = []
        for action in actions:
            try:
                for command in action():
                    self._pending.append(command)
            except Exception as error:
                errors.append(error)
        if len(errors) > 1:
            raise ExceptionGroup("several actions of one event failed", errors)
        if errors:
            raise errors[0]

    def _take_event(self, event: CoordinatorEvent, now: float) -> list[CoordinatorCommand]:
        changed_s = self.fleet.estimates.last_change_s
        try:
            return self._handlers[type(event)](event, now)
        finally:
            self._blame_changes(changed_s)

    def _learn(self) -> list[CoordinatorCommand]:
        """Update estimates by the runs that have ended."""
        for update in self._run_tracker.estimate_updates():
            changed_s = self.fleet.estimates.last_change_s
            update()
            self._blame_changes(changed_s)
        return []

    def _blame_changes(self, changed_s: float) -> None:
        """After a detected change of a device or link, undo the updates of method estimates since the change."""
        if self.fleet.estimates.last_change_s != changed_s:
            for group in self.groups:
                group.durations.methods.undo_since(self.fleet.estimates.last_change_began_s - BEFORE_S)

    @property
    def due_s(self) -> float:
        """Return when a Tick is needed for a delayed batch or a late lease; infinity if there is none."""
        return self._run_tracker.due_s

    def snapshot(self) -> tuple[PlanSnapshot, ...]:
        """Return the active and preparing plans as values for other threads."""
        if self._snapshot is None:
            records = (r for group in self.groups for r in (group.plans.active, group.plans.preparing))
            self._snapshot = tuple(snapshot for r in records if r is not None for snapshot in r.snapshots())
        return self._snapshot

    def stories(self) -> list[TransitionLog]:
        """Return the story of each model's plans."""
        return [group.plans.story for group in self.groups.defaults()]

    def assert_invariants(self) -> None:
        """Raise AssertionError if an invariant of the session is broken."""
        for group in self.groups:
            assert group.active is None or set(group.active.devices) <= set(self.fleet.usable())
        self.groups.check(self.in_flight)
        self._run_tracker.check()

    # -- membership -----------------------------------------------------------------------------------------------

    def _admit_device(self, device: str) -> bool:
        """Return whether there is room for a device; otherwise count its dropped message."""
        self.counters["devices_beyond"] += not (room := self.fleet.make_room(device))
        return room

    def _handle_status(self, event: DeviceStatus, now: float) -> list[CoordinatorCommand]:
        if not self._admit_device(event.device):
            return []
        return self._handle_news(event.device, partial(self.fleet.record_status, event.device, event.status, now), now)

    def _handle_caps(self, event: DeviceCaps, now: float) -> list[CoordinatorCommand]:
        if not self._admit_device(event.device):
            return []
        wrong = implausible_caps(asdict(event.caps))
        if wrong is not None:
            self.counters["foreign_caps"] += 1
            return self._warn_implausible(
                event.device, f"Refused the caps of {event.device} ({wrong}). Restart its agent, or update it."
            )
        return self._handle_news(event.device, partial(self.fleet.record_caps, event.device, event.caps), now)

    def _handle_use(self, event: DeviceUse, now: float) -> list[CoordinatorCommand]:
        """Switch a device off or on: runs on a device that is switched off are retried, and it releases all plans."""
        if not self._admit_device(event.device):
            return []
        change = self.fleet.record_use(event.device, event.wanted)
        if change != "unwanted":
            return self._handle_change(event.device, change, now)
        lost = self._handle_lost(event.device, f"was {UNWANTED}", now)
        return [*lost, self._rollout.release_all(event.device)]

    def _handle_news(self, device: str, record: Callable[[], str | None], now: float) -> list[CoordinatorCommand]:
        """Record a status or caps of a device, and log a new refusal."""
        before = self.fleet.member(device).refused
        out = self._handle_change(device, record(), now)
        refused = self.fleet.member(device).refused
        return [LogEvent("refused", refused), *out] if refused not in ("", before) else out

    def _handle_heartbeat(self, event: DeviceHeartbeat, now: float) -> list[CoordinatorCommand]:
        device = event.device
        if not self._admit_device(device):
            return []
        heartbeat, wrong = sanitize_heartbeat(event.heartbeat)
        runs = [run for run in self.groups.runs() if device in run.plan.devices]
        busy, loading = any(run.is_computing for run in runs), bool(self._loading_devices())
        change = self.fleet.record_heartbeat(device, heartbeat, now, busy=busy, loading=loading)
        changed = self._handle_change(device, change, now)
        changed += self._run_tracker.retry_after_broker_loss(now) if self._online else []
        if wrong is None:
            return changed
        self.counters["implausible_heartbeat"] += 1
        text = f"Implausible heartbeat from {device}: {wrong}. Restart its agent."
        return changed + self._warn_implausible(device, text)

    def _warn_implausible(self, device: str, text: str) -> list[CoordinatorCommand]:
        """Log the first implausible report of a device."""
        member = self.fleet.member(device)
        before, member.implausible = member.implausible, text
        return [] if before else [LogEvent("refused", text)]

    def _warn_contradicted(self, now: float) -> Iterator[CoordinatorCommand]:
        """Log, once per device, measurements that runs contradict; record them in the stories of all models."""
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

    def _mark_other_work(self) -> None:
        """Mark the runs during which devices load or the planner searches, because this work slows them down."""
        is_loading = bool(self._loading_devices())
        searching = any(group.plans.searching is not None for group in self.groups)
        for run in self.groups.runs():
            run.other_work.loads |= is_loading  # on any device, because the planner's machine sends the tiles
            run.other_work.search |= searching
            run.other_work.only_search &= searching

    def _handle_change(self, device: str, change: str | None, now: float) -> list[CoordinatorCommand]:
        """Handle a device that has joined, is starting or has left, as `Fleet` reports; None: nothing changed."""
        if change == "joined":
            for group in self.groups:
                group.crash_backoff.record_return(device, self.fleet.member(device).boot, now)
                group.missing_bytes.pop(device, None)
                if not group.pinned or group.pace.is_in_use(now):
                    settled_s, why = now + SETTLE_S, f"{device} has joined"
                    # Devices may still hold the weights of released plans.
                    kind = SearchKind.BRIEF if group.former_plans.released else SearchKind.WHOLE
                    group.plans.request_search(settled_s, now, why, soon_s=now + SETTLE_UNSERVED_S, kind=kind)
            # The device may have missed a Release. No plan uses it now, so it can release everything.
            return [self._rollout.release_all(device), LogEvent("joined", f"{device} has joined")]
        if change == "starting":
            for group in self.groups:  # a wanted search lets new requests wait for the device
                if group.active is None and (not group.pinned or group.pace.is_in_use(now)):
                    soon_s = now + SETTLE_UNSERVED_S if self.fleet.usable() else None
                    group.plans.request_search(now + SETTLE_S, now, f"{device} is starting", soon_s=soon_s)
            return [LogEvent("starting", f"{device} is starting")]
        if change == "left":
            out = self._handle_lost(device, "went offline", now, says_so=True)
            if device in self.fleet.usable():  # it has started again
                out += self._handle_change(device, "joined", now)
            return out
        return []

    def _handle_lost(self, device: str, how: str, now: float, *, says_so: bool = False) -> list[CoordinatorCommand]:
        """Continue without a device; says_so: it has published `offline`, so lost runs count against it."""
        out: list[CoordinatorCommand] = [LogEvent("left", f"{device} {how}")]
        member = self.fleet.member(device)
        lost_boot = {device: member.boot_before or member.boot}
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
                for text in waiting_texts(group, record):
                    text.session.leave()
                if was_active:
                    boots = {d: self.fleet.member(d).boot for d in record.plan.devices} | lost_boot
                    group.former_plans.recalled = EarlierPlan(record.plan, record.decision.chosen.price.needs, boots)
                released = self._rollout.drop_replica(group, record, device, now, why)
                if released is None:
                    plans.retire(record, "lost", now, why)
                out += released or []
                if was_active:
                    plans.request_search(now, now, why, forced=True)
                    out.append(self._rollout.publish_plan(group))
                for run in [r for r in group.runs.values() if r.needs(lost)]:
                    lost_runs = True
                    out += self._run_tracker.handle_lost_device(group, run, device, now)
            if member.farewell == messages.STOPPED:
                group.former_plans.excuse(device)
        if lost_runs and says_so and self.fleet.record_setback(device, now):
            out.append(LogEvent("excluded", f"too many runs failed because {device} left"))
        return out

    # -- requests -------------------------------------------------------------------------------------------------

    def _handle_request(self, event: RequestArrived, now: float) -> list[CoordinatorCommand]:
        request = event.request
        refusal = self._run_tracker.admission.refuse_or_none(request, now)
        if refusal is not None:
            return refusal
        group, out = self._rollout.group_for(request, now)
        return out if group is None else out + self._run_tracker.admission.enqueue(group, request, now)

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
        if change is None:
            return self._run_tracker.handle_frame(event, now)
        self._is_settled = False
        return self._handle_change(event.device, change, now) + self._run_tracker.handle_frame(event, now)

    def _restore_sessions(self, device: str, message: messages.KeptSessions) -> list[CoordinatorCommand]:
        """Record the KV caches of earlier plans that a device continues under a plan."""
        for group in self.groups:
            plans = (plan for record in group.plans.records() for plan in record.plan.executables)
            plan = next((plan for plan in plans if plan.version == message.plan_version), None)
            if plan is not None and group.name == message.model and device in plan.devices:
                return self._run_tracker.caches.restore(group, plan, device, message.sessions)
        return []

    def last_plans(self) -> dict[str, EarlierPlan]:
        """Return the plan of each model that serves or last served."""
        out = dict[str, EarlierPlan]()
        for group in self.groups.defaults():
            record, former = group.plans.active, group.former_plans.recalled
            if record is not None:
                out[group.name] = EarlierPlan(record.plan, record.decision.chosen.price.needs)
            elif former is not None:
                out[group.name] = EarlierPlan(former.plan, former.needs)
        return out

    def _handle_report(self, device: str, message: messages.Message, now: float) -> list[CoordinatorCommand]:
        if isinstance(message, messages.RunFailed):
            return self._run_tracker.handle_failure(device, message, now)
        if isinstance(message, messages.KeptSessions):
            return self._restore_sessions(device, message)
        if isinstance(message, messages.RunProgress):
            return self._handle_progress(device, message, now)
        if isinstance(message, messages.TaskDone):
            return self._run_tracker.complete_task(device, message, now)
        if not isinstance(message, PlanReport) or self.groups.concerns_others(device, message):
            self.counters["foreign_message"] += 1
            return []
        if isinstance(message, messages.PrepareFailed) and message.code in ("mesh", "forgotten"):
            if message.code == "mesh":
                self.fleet.record_unreachable(device, message.peers, now)
            return self._rollout.replace_plan(message, now)
        self._rollout.record_device_progress(device, message, now)
        group = self.groups.group_of_preparation(message.model, message.transaction_id)
        if group is None:
            return []
        record = group.plans.preparing
        failed = message if isinstance(message, messages.PrepareFailed) and message.code != "memory" else None
        if failed is not None and self.fleet.record_setback(device, now):
            return self._handle_lost(device, f"refuses every plan ({failed.text})", now)
        if released := self._standby.release_for_memory(record, device, message, now):
            return released
        if isinstance(message, messages.Ready) and record is not None and not record.has_same_programs(device, message):
            refused = LogEvent("refused", self.fleet.refuse(device))
            return [refused, *self._handle_lost(device, "compiles plans differently", now)]
        return self._rollout.handle_preparation(group, device, message, now)

    def _handle_progress(self, device: str, message: messages.RunProgress, now: float) -> list[CoordinatorCommand]:
        """Record the progress of a run, and mark it late if it is too slow."""
        if (run := self._run_tracker.record_progress(device, message, now)) is None:
            self.counters["late"] += 1
            return []
        group = self.groups.default(message.model)
        blocks = group.served.block_count(run.shape)
        part = 1.0 if run.progress is None else min((run.progress.block + LATE_BLOCKS) / blocks, 1.0)
        if run.other_work.loads or now - run.times.dispatched_s <= LATE_FACTOR * run.times.expected_s * part:
            return []  # a load slows down runs, and the rule has counted its cost
        run.lateness.is_late = True
        self.fleet.estimates.record_overdue(run.plan.devices, now)
        return []

    def _hand_over(self, group: PlanGroup, now: float) -> Iterator[CoordinatorCommand]:
        """Hand runs and texts of earlier plans over to the active plan if the rule says so."""
        active, before = group.plans.active, group.plans.retiring
        for run in list(group.runs.values()) if active is not None and before else ():
            assert active is not None
            judged = (active.version, run.progress)
            if not run.may_be_handed_over or run.lateness.judged == judged or run.plan_version in active.versions:
                continue
            last, run.lateness.judged = run.lateness.judged, judged
            is_first = last is None or last[0] != active.version
            if (verdict := self._moves.judge_run_handover(group, run, now)) is not None:
                yield from self._record_handover(group, f"run {run.run_id}", run.plan_version, verdict, is_first, now)
                if verdict.hands_over:
                    block = verdict.border.start
                    yield from self._run_tracker.dispatcher.hand_over(group, run, active.plan, block, now)
        queued = [(item.request, item.request.generation) for item in group.queue] if before else ()
        for record, (request, text) in product(before, queued):
            if text is None or text.session.plan_version not in record.versions:
                continue
            verdict = None if active is None else self._moves.judge_text_handover(group, request, now)
            if active is not None and verdict is not None:
                is_first, text.session.judged_for = text.session.judged_for != active.version, active.version
                yield from self._record_handover(group, "a text", record.version, verdict, is_first, now)
            if verdict is None or verdict.hands_over:
                text.session.leave()

    @staticmethod
    def _record_handover(
        group: PlanGroup, subject: str, before: PlanVersion, verdict: HandoverVerdict, is_first: bool, now: float
    ) -> Iterator[CoordinatorCommand]:
        """Record the first verdict on a run or text, and each handover, in the story."""
        what = "continues under the active plan" if verdict.hands_over else "ends under its plan"
        text = f"{subject} {what}; {verdict}"
        active = group.plans.active
        if active is not None and (is_first or verdict.hands_over):
            group.plans.record_handover(before, active.version if verdict.hands_over else before, text, now)
        if verdict.hands_over:
            yield LogEvent("continued", text)

    def _advance(self, now: float) -> list[CoordinatorCommand]:
        """Release, prepare, dispatch and search where possible."""
        out: list[CoordinatorCommand] = []
        for group in self.groups:
            group.queue.discard_finished()
            out += [*self._hand_over(group, now), *self._rollout.release_idle(group, now)]
        for group in self.groups.pinned():
            if group.idle and group.plans.in_use is None and group.plans.preparing is None:
                out += self._rollout.close_group(group, now, "it has no plan and no requests")
        for group in self.groups:
            out += self._rollout.advance(group, now)
        for group in self.groups.defaults():
            out += self._run_tracker.dispatch_ready(group.name, now)
        for group in self.groups:
            out += [*self._searches.recall(group, now), *self._searches.start_due(group, now)]
        return out

    # -- time -----------------------------------------------------------------------------------------------------

    def _tick(self, event: Tick, now: float) -> list[CoordinatorCommand]:
        heard_s = min(event.heard_s, now) if self._online else -inf
        listens = self._online and not event.has_backlog
        self._do(
            (
                *((partial(self._drop_silent, now, heard_s),) if listens else ()),
                partial(self._run_tracker.lease_overdue, now),
                partial(self._warn_contradicted, now),
                *(partial(self._tick_group, group, now, heard_s) for group in self.groups),
                *(partial(self._searches.judge, group, now) for group in self.groups),
                self._publish_transitions,
            )
        )
        return []

    def _tick_group(self, group: PlanGroup, now: float, heard_s: float) -> Iterator[CoordinatorCommand]:
        """Yield the commands for late runs, expired requests and expired crash limits."""
        yield from self._rollout.tick(group, heard_s)
        for run in list(group.runs.values()):
            if not run.other_work.loads and heard_s - run.times.dispatched_s > LATE_FACTOR * run.times.expected_s:
                self.fleet.estimates.record_overdue(run.plan.devices, now)
            if heard_s > run.times.deadline_s and not run.broker_was_lost:
                yield LogEvent("overdue", f"A run of {run.plan.model} is overdue; retrying it")
                yield from self._rollout.mark_suspect(group, run.plan, now)
                yield from self._run_tracker.retry(group, run, now)
        yield from self._run_tracker.refuse_expired(group, now)
        if devices := group.crash_backoff.lift_expired(now):
            group.plans.request_search(now, now, f"{', '.join(devices)} may use all memory again")

    def _publish_transitions(self) -> Iterator[CoordinatorCommand]:
        """Yield the records of models with new transitions, and an event for illegal ones."""
        for group in self.groups.defaults():
            if group.published_transitions != group.plans.story.count:
                yield self._rollout.publish_plan(group)
        if (text := self.groups.new_illegal_steps()) is not None:
            yield LogEvent("illegal_step", text)

    def _drop_silent(self, now: float, heard_s: float) -> Iterator[CoordinatorCommand]:
        """Drop devices without heartbeats; probe the devices of late runs, and quarantine silent ones."""
        for device in self.fleet.mark_silent_offline(heard_s):
            yield from self._handle_lost(device, "sends no heartbeats", now)
        probes, silent = self._hang_detector.tick(now, heard_s)
        yield from probes
        for device, how, is_silent in silent:
            self.fleet.quarantine(device, now, is_silent)
            yield from self._handle_lost(device, how, now)

    def _handle_broker_state(self, event: BrokerState, now: float) -> list[CoordinatorCommand]:
        self._online = event.online
        for run in self.groups.runs():  # the broker may have lost frames of it
            run.broker_was_lost = True
        if event.online:  # devices could not be heard, so restart their timeouts
            self.fleet.reset_silence(now)
            self._run_tracker.admission.expect_burst(now)
            self._searches.is_connected = True
            for group in self.groups:
                if (record := group.plans.preparing) is not None:
                    record.progress_s, record.device_progress_s, record.prepare_sent_s = now, {}, -inf
        return [self._rollout.publish_plan(group) for group in self.groups.defaults()] if event.online else []
