"""Prepare, activate and release plans on devices; load weights ahead on a standby device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Final, Literal

from hepti_mqtt.core.errors import HeptiError, RemoteError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.spec import PlainShape
from hepti_mqtt.cost.simulator import TopicNames
from hepti_mqtt.models import representative_shape
from hepti_mqtt.planner import Question
from hepti_mqtt.planner.estimates import strategy_key
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.messages import Message, PrepareFailed, Ready
from hepti_mqtt.runtime.coordinator.fleet import Fleet, peers_of
from hepti_mqtt.runtime.coordinator.interface import (
    CoordinatorCommand,
    CoordinatorEvent,
    DeviceMessage,
    LogEvent,
    PublishPlan,
    Solve,
    Solved,
    Tick,
    WeightsUnreadable,
)
from hepti_mqtt.runtime.coordinator.kv_caches import waiting_texts
from hepti_mqtt.runtime.coordinator.load_text import describe_end, describe_load
from hepti_mqtt.runtime.coordinator.moves import Moves
from hepti_mqtt.runtime.coordinator.next_batch import shapes_to_build
from hepti_mqtt.runtime.coordinator.orders import Orders
from hepti_mqtt.runtime.coordinator.plan_groups import MAX_PINNED_GROUPS, PlanGroup, PlanGroups
from hepti_mqtt.runtime.coordinator.plans import Ids, PlanRecord, PlanReport
from hepti_mqtt.runtime.coordinator.requests import Request
from hepti_mqtt.runtime.coordinator.run_tracker import RunTracker
from hepti_mqtt.runtime.coordinator.search_kinds import SETTLE_S, SearchKind
from hepti_mqtt.runtime.machinery import Publish

MAX_LOADS_PRICED: Final = 4  # plans that are priced again after an activation, because their weights may be loaded now
SETTLE_UNSERVED_S: Final = 0.1  # replaces `SETTLE_S` while requests wait without a plan
REPEAT_PREPARE_S: Final = 2.0  # a Prepare may be lost; a device answers a repeated one with its state
PREPARE_TIMEOUT_S: Final = 120.0  # without progress, before a preparation is abandoned
MAX_FAILED_PREPARATIONS: Final = 3  # in a row, for other reasons than memory, before requests are refused
RETRY_S: Final = 30.0  # from that refusal to the next search
PUBLISH_INTERVAL_S: Final = 1.0  # between two records that differ only in progress
PUBLISHED_TRANSITIONS: Final = 32  # in a published record


class Rollout:
    """Prepares, activates and releases the plans of all groups; the session decides which plan comes next.

    in_flight: concurrent runs of a model on a device.
    """

    def __init__(
        self, orders: Orders, groups: PlanGroups, fleet: Fleet, run_tracker: RunTracker, ids: Ids, in_flight: int
    ) -> None:
        self.ids, self._orders, self._groups, self._fleet = ids, orders, groups, fleet
        self._run_tracker, self._in_flight = run_tracker, in_flight

    def question(self, group: PlanGroup, now: float) -> Question:
        """Return the question for a group's next plan, under a new plan version."""
        served, pins = group.served, group.plans.pins
        # Throughput counts when requests queue up, and then they run in full batches.
        batch_size = served.batching.max_requests if pins.objective == "throughput" else 1
        reserved = Counter(group.missing_bytes)
        for other in self._groups:
            # Plans that would be evicted for this one do not count.
            gives_way = other.pinned and (other.idle or not group.pinned)
            if other.name == group.name or gives_way:
                continue
            record = other.plans.preparing or other.plans.active
            reserved.update(record.decision.chosen.price.needs if record else {})
        for device, limit_bytes in group.crash_backoff.memory_limits(now).items():
            if (member := self._fleet.usable().get(device)) is not None and member.caps is not None:
                reserved[device] = max(reserved[device], member.caps.memory_budget_bytes - limit_bytes)
        return pins.question(
            TopicNames(self._orders.site, served.name),
            served.spec,
            self._fleet.cluster(reserved),
            representative_shape(served.spec, group.recent.typical_length(served.default_length), batch_size),
            self.ids.next_version(),
            in_flight=self._in_flight,
            relayed_pairs=self._fleet.relayed_pairs(now),
            packet_bytes=self._fleet.packet_limits(),
            learned=group.durations.methods.corrections(now),
            is_exhaustive=False,
            active=group.last_plan,
            residents=group.held(),
            coming=None if group.plans.preparing is None else group.plans.preparing.plan,
            tiles=served.tiles,
            cached=self._fleet.cached(served.name),
        )

    def release_all(self, device: str) -> Publish:
        """Return the command that releases all plans on a device."""
        return self._orders.command(device, messages.ReleaseAll(self.ids.next_transaction()))

    def publish_plan(self, group: PlanGroup) -> PublishPlan:
        """Return the record of a model's plans, including those of pinned groups."""
        own = self._groups.default(group.name)
        preparing = own.plans.preparing
        plan, progress = (None, {}) if preparing is None else (preparing.plan, dict(preparing.progress_bytes))
        loading = "" if preparing is None else describe_load(preparing, preparing.progress_s)
        own.published_transitions = own.plans.story.count
        story = own.plans.story.last(PUBLISHED_TRANSITIONS)
        others = self._groups.pinned(group.name)
        pinned = tuple(other.active for other in others if other.active is not None)
        coming = tuple(other.plans.preparing.plan for other in others if other.plans.preparing is not None)
        needs = {} if own.plans.active is None else own.plans.active.decision.chosen.price.needs
        parts = own.search_history.decision, own.error, progress, story, pinned, coming, self._in_flight
        return PublishPlan(group.name, own.active, plan, *parts, own.judgement.verdict.considered, needs, loading)

    # -- progress of plans ----------------------------------------------------------------------------------------

    def release_idle(self, group: PlanGroup, now: float) -> list[CoordinatorCommand]:
        """Release retiring plans without active runs or generations."""
        out: list[CoordinatorCommand] = []
        for record in group.plans.retiring:
            runs = [each for run in group.runs.values() for each in (run, run.before) if each is not None]
            if not any(run.plan_version in record.versions for run in runs) and not waiting_texts(group, record):
                group.plans.step(record, "idle", now)
                group.former_plans.note_released(record.plan)
                out += self.release(record.plan)
        return out

    def advance(self, group: PlanGroup, now: float) -> list[CoordinatorCommand]:
        """Send the Prepare of the next plan, unless it waits for the release of others."""
        preparing = group.plans.preparing
        if preparing is None:
            return []
        if preparing.state == "swapping" and not preparing.waits_for & self._groups.plan_versions():
            group.plans.resume_preparation(preparing, now)
        if preparing.state != "preparing" or preparing.prepare_sent_s > -inf:
            return []
        text = "" if preparing.progress_bytes else describe_load(preparing, now)
        story = [LogEvent("loading", text)] if text else []
        return [*story, *self._send_prepare(group, preparing, now)]

    def tick(self, group: PlanGroup, now: float) -> list[CoordinatorCommand]:
        """Abandon a preparation without progress, or repeat its Prepare to unready devices."""
        record = group.plans.preparing
        if record is None or record.state != "preparing":
            return []
        moved_s = (record.device_progress_s.get(device, record.progress_s) for device in record.unready_devices)
        if now - max([record.progress_s, *moved_s]) > PREPARE_TIMEOUT_S:
            waiting = ", ".join(sorted(record.unready_devices))
            text = f"{waiting} made no progress on plan {record.version} for {PREPARE_TIMEOUT_S:.0f} s"
            error = RemoteError(f"{text}. See its log.")
            return [LogEvent("refused", text), *self._handle_failed_preparation(group, record, "silent", error, now)]
        return self._send_prepare(group, record, now) if now > record.last_exchange_s() + REPEAT_PREPARE_S else []

    def _send_prepare(self, group: PlanGroup, record: PlanRecord, now: float) -> list[CoordinatorCommand]:
        record.prepare_sent_s = now
        served = group.served
        spec = served.spec.to_dict()
        shapes, needed = shapes_to_build(group)
        foreseen, out = tuple(shape.plain() for shape in shapes), list[CoordinatorCommand]()
        for plan in record.plan.executables:
            message = messages.Prepare(
                record.transaction_id, plan.to_dict(), spec, served.manifest, self._in_flight, foreseen, needed
            )
            waiting = [d for d in plan.devices if d in record.unready_devices]
            out += [self._orders.command(d, self._addressed(message, plan, d)) for d in waiting]
        return out

    def _addressed(self, message: messages.Prepare, plan: Plan, device: str) -> messages.Prepare:
        """Return a Prepare with the peers, frame key and load share of one device."""
        peers, key = peers_of(plan, device, self._fleet), self._fleet.wrapped_key(plan, device)
        coming = (group.plans.preparing for group in self._groups)
        record = next((r for r in coming if r is not None and plan.version in r.versions), None)
        serves = any(device in group.active_devices for group in self._groups)
        share = 0.0 if record is None else record.share if serves else 1.0  # an unused device may load at full speed
        return replace(message, peers=peers, key=key, checked=self._fleet.frame_key(plan).checked, share=share)

    def probe(
        self, group: PlanGroup, plan: Plan, devices: list[str], shapes: tuple[PlainShape, ...] = ()
    ) -> list[CoordinatorCommand]:
        """Send devices the Prepare of a plan; a device with the plan and the Programs of `shapes` answers Ready."""
        served = group.served
        parts = plan.to_dict(), served.spec.to_dict(), served.manifest, self._in_flight, shapes, len(shapes)
        prepare = ((d, messages.Prepare(self.ids.next_transaction(), *parts)) for d in devices)
        return [self._orders.command(d, self._addressed(message, plan, d)) for d, message in prepare]

    def release(self, plan: Plan) -> list[CoordinatorCommand]:
        """Return the commands that release a plan on its devices."""
        number = self.ids.next_transaction()
        return [
            self._orders.command(d, messages.Release(number, plan.model, plan.for_device(d).version))
            for d in plan.devices
        ]

    def drop_replica(
        self, group: PlanGroup, record: PlanRecord, device: str, now: float, why: str
    ) -> list[CoordinatorCommand] | None:
        """Remove the replica of a lost device from a plan, and release it; None if no replica is left.

        If all other replicas are suspect, so is the plan.
        """
        rest, replica = record.plan.without_device(device), record.plan.for_device(device)
        if rest is None:
            return None
        record.plan = rest
        if record is group.plans.active and not group.usable_executables:
            group.plans.step(record, "overdue", now, why)
        return self.release(replace(replica, devices=tuple(d for d in replica.devices if d != device)))

    # -- messages of devices --------------------------------------------------------------------------------------

    def record_device_progress(self, device: str, message: PlanReport, now: float) -> None:
        """Record a device's progress for all plans that it prepares, because it prepares one after the other."""
        records = [group.plans.preparing for group in self._groups]
        if isinstance(message, messages.PrepareProgress):
            is_further = message.total_bytes > 0  # 0: the device has the plan, but made no progress
        else:  # a repeated Ready is no progress
            is_further = any(
                r is not None and r.transaction_id == message.transaction_id and device in r.unready_devices
                for r in records
            )
        for record in records if is_further else ():
            if record is not None and record.state == "preparing" and device in record.unready_devices:
                record.device_progress_s[device] = now

    def handle_preparation(
        self, group: PlanGroup, device: str, message: PlanReport, now: float
    ) -> list[CoordinatorCommand]:
        """Handle a device's message about the current preparation."""
        record = group.plans.preparing
        if record is None or record.state != "preparing" or record.transaction_id != message.transaction_id:
            return []
        if isinstance(message, messages.PrepareProgress) and not message.total_bytes:
            return []
        record.progress_s = record.device_progress_s[device] = now
        if isinstance(message, messages.PrepareProgress):
            record.progress_bytes[device] = (message.done_bytes, message.total_bytes)
            if now - record.published_s < PUBLISH_INTERVAL_S:
                return []
            record.published_s = now
            return [self.publish_plan(group)]
        if isinstance(message, messages.Ready):
            record.unready_devices.discard(device)
            return [] if record.unready_devices else self._activate(group, record, now)
        return self._handle_refusal(group, record, device, message, now)

    def replace_plan(self, message: messages.PrepareFailed, now: float) -> list[CoordinatorCommand]:
        """Replace a plan, and retry its runs.

        Code mesh: the device cannot reach peers; the broker relays their frames under the next plan.
        Code forgotten: the device released the plan in doubt.
        """
        due_s, note = now, LogEvent("forgotten", message.text)
        if message.code == "mesh":  # wait for reports of other devices
            due_s, note = now + SETTLE_S, LogEvent("relayed", f"{message.text}; the broker relays their frames")
        out: list[CoordinatorCommand] = [note]
        for group in self._groups.of_model(message.model):
            preparing, active = group.plans.preparing, group.plans.active
            if preparing is not None and message.plan_version in preparing.versions:
                out += self.abandon(group, preparing, "refused", now, message.text)
            elif active is not None and message.plan_version in active.versions:
                run_plan = next(plan for plan in active.plan.executables if plan.version == message.plan_version)
                out += self.mark_suspect(group, run_plan, now, message.text)
            else:
                continue
            for run in [r for r in group.runs.values() if r.plan_version == message.plan_version]:
                out += self._run_tracker.retry(group, run, now)
            group.plans.request_search(due_s, now, message.text, forced=True)
        return out

    def _activate(self, group: PlanGroup, record: PlanRecord, now: float) -> list[CoordinatorCommand]:
        self._note_trial(group, record, now)
        if group.unserved:
            group.pace.begin_service(now)
        group.plans.activate(record, now)
        group.failed_preparations = 0
        plan = record.plan
        self._fleet.estimates.begin_plan(plan.devices)
        # The loaded weights may make other plans cheaper.
        if others := group.search_history.plans_to_load(record, MAX_LOADS_PRICED):
            group.plans.request_search(now, now, "its weights may serve other plans too", plans=others)
        out = self._reactivate_older(group, plan)
        number = self.ids.next_transaction()
        activate = ((d, messages.Activate(number, plan.model, plan.for_device(d).version)) for d in plan.devices)
        loaded = describe_end(record, now)
        notes = [LogEvent("loaded", loaded)] if loaded else []
        notes.append(LogEvent("activated", f"plan {plan.version} of {plan.model}: {plan.reason}"))
        return [*out, *(self._orders.command(*order) for order in activate), *notes, self.publish_plan(group)]

    @staticmethod
    def _note_trial(group: PlanGroup, record: PlanRecord, now: float) -> None:
        """Record an activated or refused trial, so that its method is not tried again soon."""
        if record.move is not None and record.move.kind == "try":
            group.judgement.tried[strategy_key(record.plan)] = now

    def _reactivate_older(self, group: PlanGroup, newer: Plan) -> list[CoordinatorCommand]:
        """Activate older plans again: after a newer plan's Activate, devices release all unconfirmed plans."""
        in_use = (other.plans.in_use for other in self._groups.of_model(group.name) if other is not group)
        older = (r.plan for r in in_use if r is not None and r.version < newer.version)
        return [
            self._orders.command(d, messages.Activate(self.ids.next_transaction(), p.model, p.for_device(d).version))
            for p in sorted(older, key=lambda plan: plan.version)
            for d in p.devices
            if d in newer.devices
        ]

    def _handle_refusal(
        self, group: PlanGroup, record: PlanRecord, device: str, message: messages.PrepareFailed, now: float
    ) -> list[CoordinatorCommand]:
        plans = group.plans
        text = f"{device} refused plan {message.plan_version}: {message.text}"
        out: list[CoordinatorCommand] = [LogEvent("refused", text)]
        if message.code != "memory":
            error = RemoteError(f"{device} cannot prepare the plan: {message.text}")
            return out + self._handle_failed_preparation(group, record, "refused", error, now)
        if group.pinned and self._groups.default(group.name).plans.preparing is not None:
            # The default group's plan is being prepared: evictions for these pins are decided after its activation.
            out += self.abandon(group, record, "refused", now, message.text)
            plans.request_search(now, now, f"{device} lacks memory next to the model's default plan", forced=True)
            return out
        if others := self._groups.groups_to_evict(group, device):
            # The plans do not fit together: finish the runs of the others, release them, then prepare again. An evicted
            # group holds nothing, so a further refusal reaches the search below.
            out += self._evict_and_retry(group, record, others, now, f"{device} refused it")
            return [*out, self.publish_plan(group)]
        out += [*self.abandon(group, record, "refused", now, message.text), self.publish_plan(group)]
        # Each refusal reserves more memory in the next question, so this ends.
        group.missing_bytes[device] = group.missing_bytes.get(device, 0) + max(message.missing_bytes, 1 << 20)
        plans.request_search(now + SETTLE_S, now, f"{device} lacks memory", forced=True)
        return out

    def handle_unreadable(self, event: WeightsUnreadable, now: float) -> list[CoordinatorCommand]:
        """Abandon the preparations of a model with unreadable weights, without an immediate retry."""
        out: list[CoordinatorCommand] = []
        for group in self._groups.of_model(event.model):
            record = group.plans.preparing
            if record is not None and record.state == "preparing" and event.device in record.plan.devices:
                group.failed_preparations = MAX_FAILED_PREPARATIONS
                out += self._handle_failed_preparation(group, record, "refused", event.error, now)
        return out

    def _evict_and_retry(
        self, group: PlanGroup, record: PlanRecord, others: list[PlanGroup], now: float, why: str
    ) -> list[CoordinatorCommand]:
        """Evict the plans of other groups for a refused plan, and prepare it again after their release."""
        out = self.release(record.plan)
        plan = record.plan.with_version(self.ids.next_version(), self.ids.next_version)
        group.plans.wait_for_memory(record, plan, self.ids.next_transaction(), now, why)
        why, evicted = f"for {plan.version}", set[PlanVersion]()
        for other in others:
            if other is group:
                other.plans.make_room(now, why)
            elif other.pinned and other.idle:
                out += self.close_group(other, now, why)
            else:
                out += self._evict(other, now, why)
            evicted |= other.plans.versions()
        record.waits_for = frozenset(evicted - record.versions)
        return out

    def _evict(self, group: PlanGroup, now: float, why: str) -> list[CoordinatorCommand]:
        """End the plans of a group, and want its next search, which waits for its turn."""
        coming = group.plans.abandon_pending("make room", now, why)
        group.plans.make_room(now, why)
        group.evicted = True
        group.plans.request_search(now, now, f"it made room {why}", forced=True)
        return self.release(coming.plan) if coming is not None else []

    def group_for(self, request: Request, now: float) -> tuple[PlanGroup | None, list[CoordinatorCommand]]:
        """Return the group of a request, added for new pins; None if all pinned groups are in use."""
        name, pins = request.key.model, request.pins
        group, out = self._groups.find(name, pins), list[CoordinatorCommand]()
        if group is not None or pins is None:
            return group, out
        others = self._groups.pinned(name)
        if len(others) >= MAX_PINNED_GROUPS:
            oldest = next((other for other in others if other.idle), None)
            if oldest is None:
                text = f"All {MAX_PINNED_GROUPS} pinned plans of {name} are in use. Try again later, or send no pins."
                return None, self._run_tracker.admission.refuse_overloaded(request, text)
            out = self.close_group(oldest, now, f"for {pins}")
        group = self._groups.add(name, pins)
        group.plans.request_search(now, now, "a request has pinned it", forced=True)
        return group, out

    def close_group(self, group: PlanGroup, now: float, why: str) -> list[CoordinatorCommand]:
        """Release all plans of an idle pinned group, and remove it."""
        coming = group.plans.abandon_pending("unused", now, why)
        group.plans.retire_all(now, why)
        out = self.release(coming.plan) if coming is not None else []
        out += self.release_idle(group, now)
        self._groups.drop(group)
        return out

    # -- failed plans ---------------------------------------------------------------------------------------------

    def abandon(
        self,
        group: PlanGroup,
        record: PlanRecord,
        event: Literal["refused", "silent", "lost", "outdated"],
        now: float,
        why: str,
    ) -> list[CoordinatorCommand]:
        """Abandon the plan being prepared."""
        group.plans.step(record, event, now, why)
        text = describe_end(record, now, why)
        return [*([LogEvent("loaded", text)] if text else []), *self.release(record.plan)]

    def _handle_failed_preparation(
        self, group: PlanGroup, record: PlanRecord, event: Literal["refused", "silent"], error: HeptiError, now: float
    ) -> list[CoordinatorCommand]:
        """Search again after a failed preparation; after several in a row, refuse the queued requests first."""
        plans = group.plans
        self._note_trial(group, record, now)
        out = [*self.abandon(group, record, event, now, str(error)), self.publish_plan(group)]
        group.failed_preparations += 1
        if group.failed_preparations < MAX_FAILED_PREPARATIONS:
            plans.request_search(now + SETTLE_S, now, "a preparation failed", forced=True)
            return out
        out += self.refuse_waiting(group, error, now)
        plans.request_search(now + RETRY_S, now, f"{group.failed_preparations} preparations failed", forced=True)
        return out

    def refuse_waiting(self, group: PlanGroup, error: HeptiError, now: float) -> list[CoordinatorCommand]:
        """Refuse the queued requests of a group unless a plan is active; retire a suspect plan."""
        plans = group.plans
        is_repeated = plans.active is None and str(group.error) == str(error)
        out: list[CoordinatorCommand] = [] if is_repeated else [LogEvent("no_plan", str(error))]
        if plans.active is None:
            group.error = error
            for request in [item.request for item in group.queue]:
                out += self._run_tracker.fail_request(group, request, error, now)
        if (record := plans.in_use) is not None and record.state == "suspect":
            plans.retire(record, "no plan", now, str(error))
        return [*out, self.publish_plan(group)]

    def mark_suspect(
        self, group: PlanGroup, plan: Plan, now: float, why: str = "a run never ended"
    ) -> list[CoordinatorCommand]:
        """Search for a replacement of a plan with a run that never ended; its other replicas continue.

        A device may have lost the plan, because a restarted broker loses wills and subscriptions. The old version stays
        resident until then, so that devices need not load its weights again.
        """
        record = group.plans.active
        if record is None or plan.version not in record.versions:
            return []
        record.suspect_versions |= {run.version for run in record.plan.replicas if run.version == plan.version}
        if not group.usable_executables or plan.version == record.version:
            group.plans.step(record, "overdue", now, why)
        group.plans.request_search(now, now, f"under {record.version}: {why}", forced=True)
        return [self.publish_plan(group)]


# ----------------------------------------------------------------------------------------------------------------------
# Standby: a second device loads the weights of a plan that runs on one device.
#
# The standby device prepares the plan that would follow a loss, and releases it again. It keeps released weights and
# the Programs of recent shapes while it has room, so nothing is evicted for them. No request runs under such a plan.


ENDS_S: Final = 60.0  # until a preparation is abandoned, or a refused one tried again


@dataclass(slots=True)
class _StandbyPlan:
    """The standby plan of one model."""

    plan_version: PlanVersion  #: version of the plan in use
    next_s: float  #: when the next step is due
    needed_bytes: int
    ticket: int = 0  #: ticket of the search, 0 before it
    plan: Plan | None = None  #: the chosen plan
    boot: int = 0  #: boot of its device
    held: bool = False  #: the device has the weights

    @property
    def loading(self) -> bool:
        return self.plan is not None and not self.held


class Standby:
    """The standby devices of all groups; handles each event after the session."""

    def __init__(self, groups: PlanGroups, fleet: Fleet, rollout: Rollout, moves: Moves) -> None:
        self._groups, self._fleet, self._rollout, self._moves = groups, fleet, rollout, moves
        self._standbys: dict[str, _StandbyPlan] = {}

    @property
    def loading_devices(self) -> frozenset[str]:
        """Return the standby devices that load weights."""
        return frozenset(standby.plan.root for standby in self._loads() if standby.plan is not None)

    def is_held(self, group: PlanGroup) -> bool:
        """Return whether a standby device holds the weights of the plan in use."""
        standby = self._standbys.get(group.name)
        return standby is not None and standby.held and self._is_usable(standby)

    def question(self, group: PlanGroup, now: float) -> Question:
        """Return the question for a group's next plan, including the standby plan."""
        question, standby = self._rollout.question(group, now), self._standbys.get(group.name)
        if standby is None or standby.plan is None or not self._is_usable(standby):
            return question
        return replace(question, residents=(*question.residents, standby.plan))

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorCommand]:
        """Handle an event; return the commands for standby devices."""
        if isinstance(event, Tick):
            return [command for group in self._groups.defaults() for command in self._tick(group, now)]
        if isinstance(event, Solved):
            return self._solved(event)
        if isinstance(event, DeviceMessage) and isinstance(event.message, Ready | PrepareFailed):
            return self._prepared(event.device, event.message, now)
        return []

    def release_for_memory(
        self, record: PlanRecord | None, device: str, message: Message, now: float
    ) -> list[CoordinatorCommand]:
        """If a device lacks memory for a plan, release its standby plans, so that the Prepare is repeated."""
        if record is None or not isinstance(message, PrepareFailed) or message.code != "memory":
            return []
        standbys = [s for s in self._loads() if s.plan is not None and device in s.plan.devices]
        if standbys:
            record.prepare_sent_s = -inf
        return [command for standby in standbys for command in self._give_up(standby, now)]

    def _tick(self, group: PlanGroup, now: float) -> list[CoordinatorCommand]:
        standby, record = self._standbys.get(group.name), group.plans.active
        if standby is not None and standby.loading and self._is_usable(standby):
            return self._give_up(standby, now) if now > standby.next_s else []
        if (
            record is None
            or len(record.plan.devices) > 1
            or not group.plans.pins.is_unpinned
            or not group.pace.is_in_use(now)
        ):
            return []
        if not record.is_priced:
            return []
        is_lost = standby is not None and standby.plan is not None and not self._is_usable(standby)
        if standby is None or standby.plan_version != record.version or is_lost:
            needed_bytes = record.decision.chosen.price.needs[record.plan.root]
            self._standbys[group.name] = _StandbyPlan(record.version, now, needed_bytes)
            return []
        if standby.held or now < standby.next_s or group.plans.in_transition():
            return []
        standby.next_s = now + ENDS_S
        question, needed_bytes = self._rollout.question(group, now), standby.needed_bytes
        worth = {n for n in self._fleet.usable() if self._moves.is_worth_holding(group, n, needed_bytes, now)}
        worth.difference_update(record.plan.devices)
        profiles = question.cluster.devices
        able = {n: p for n, p in profiles.items() if n in worth and p.memory_bytes >= needed_bytes}
        if not able:
            return []
        standby.ticket = self._rollout.ids.next_transaction()
        question = replace(question, cluster=replace(question.cluster, devices=able))
        return [Solve(group.name, standby.ticket, question, None, SearchKind.HURRIED)]

    def _solved(self, event: Solved) -> list[CoordinatorCommand]:
        standby, group = self._standbys.get(event.model), next(iter(self._groups.of_model(event.model)), None)
        if standby is None or group is None or event.ticket != standby.ticket or event.decision is None:
            return []
        chosen = event.decision.chosen
        member = self._fleet.usable().get(chosen.plan.root)
        if member is None or len(chosen.plan.devices) > 1 or group.plans.in_transition():
            return []
        standby.plan, standby.boot, standby.needed_bytes = chosen.plan, member.boot, chosen.price.needs[member.name]
        shapes = tuple(shape.plain() for shape in shapes_to_build(group)[0])
        return self._rollout.probe(group, chosen.plan, [member.name], shapes)

    def _prepared(self, device: str, message: Ready | PrepareFailed, now: float) -> list[CoordinatorCommand]:
        for standby in self._loads():
            assert standby.plan is not None
            own = (standby.plan.root, standby.plan.model, standby.plan.version)
            if own != (device, message.model, message.plan_version):
                continue
            if isinstance(message, PrepareFailed):
                return self._give_up(standby, now)
            standby.held = True
            return self._rollout.release(standby.plan)
        return []

    def _give_up(self, standby: _StandbyPlan, now: float) -> list[CoordinatorCommand]:
        plan, standby.plan, standby.next_s = standby.plan, None, now + ENDS_S
        return [] if plan is None else self._rollout.release(plan)

    def _loads(self) -> Iterator[_StandbyPlan]:
        return (standby for standby in self._standbys.values() if standby.loading)

    def _is_usable(self, standby: _StandbyPlan) -> bool:
        member = None if standby.plan is None else self._fleet.usable().get(standby.plan.root)
        return member is not None and member.boot == standby.boot
