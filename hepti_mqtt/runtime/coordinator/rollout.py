"""Prepare, activate and release plans on devices; load weights ahead on a standby device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Final, Literal

from hepti_mqtt.cost.simulator import TopicNames
from hepti_mqtt.errors import HeptiError, RemoteError
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.models import representative_shape
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Question
from hepti_mqtt.planner.estimates import strategy_key
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.messages import Message, PrepareFailed, Ready
from hepti_mqtt.protocol.topics import Topics
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
from hepti_mqtt.runtime.coordinator.load_story import describe_end, describe_load
from hepti_mqtt.runtime.coordinator.models import MAX_PINNED_GROUPS, PlanGroup, PlanGroups
from hepti_mqtt.runtime.coordinator.moves import Moves
from hepti_mqtt.runtime.coordinator.next_batch import shapes_to_build
from hepti_mqtt.runtime.coordinator.plans import Ids, PlanRecord
from hepti_mqtt.runtime.coordinator.requests import Request
from hepti_mqtt.runtime.coordinator.scheduler import Scheduler
from hepti_mqtt.runtime.coordinator.search_kinds import SETTLE_S, SearchKind
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.spec import PlainShape

MAX_LOADS_PRICED: Final = 4  # plans whose loads are worked out once more when another one's weights are there
SETTLE_UNSERVED_S: Final = 0.1  # instead, where requests wait and no plan serves them
REPEAT_PREPARE_S: Final = 2.0  # a Prepare may go to a connection that is just gone; a device that has it loses nothing
PREPARE_TIMEOUT_S: Final = 120.0  # without any progress for so long, a preparation is given up
# After so many preparations in a row fail for another reason than memory, requests are refused ...
MAX_FAILED_PREPARATIONS: Final = 3
RETRY_S: Final = 30.0  # ... and the next search waits this long
PUBLISH_INTERVAL_S: Final = 1.0  # between two records that differ in progress alone
PUBLISHED_TRANSITIONS: Final = 32  # transitions in a published record


class Rollout:
    """Prepares, activates and releases the plans of all groups; the session decides which plan comes next.

    in_flight: runs at once per model.
    """

    def __init__(
        self,
        topics: Topics,
        groups: PlanGroups,
        fleet: Fleet,
        scheduler: Scheduler,
        ids: Ids,
        in_flight: int,
    ) -> None:
        self.ids, self._topics, self._groups, self._fleet = ids, topics, groups, fleet
        self._scheduler, self._in_flight = scheduler, in_flight

    def question(self, group: PlanGroup, now: float) -> Question:
        """Return the question for a group's next plan, under a new plan version."""
        served, pins = group.served, group.plans.pins
        # Where several requests wait they run in one batch, and that is when throughput counts.
        several = served.batching.max_requests if pins.objective == "throughput" else 1
        held = Counter(group.missing_bytes)
        for other in self._groups:
            # Plans that would make room for this one do not count.
            gives_way = other.pinned and (other.idle or not group.pinned)
            if other.name == group.name or gives_way:
                continue
            decision = other.resident_decision()
            held.update(decision.chosen.price.needs if decision else {})
        for device, most_bytes in group.crash_backoff.memory_limits(now).items():
            if (member := self._fleet.usable().get(device)) is not None and member.caps is not None:
                held[device] = max(held[device], member.caps.memory_budget_bytes - most_bytes)
        return pins.question(
            TopicNames(self._topics.site, served.name),
            served.spec,
            self._fleet.cluster(held),
            representative_shape(served.spec, group.recent.typical_length(served.default_length), several),
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

    def command_device(self, device: str, message: messages.Message) -> Publish:
        """Return the publish of a message to a device."""
        return Publish(self._topics.command(device), self._fleet.seal(device, message), 1)

    def publish_plan(self, group: PlanGroup) -> PublishPlan:
        """Return what publishes the record of a model's plans, those of requests' pins among them."""
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

    # -- what has become possible ---------------------------------------------------------------------------------

    def release_idle(self, group: PlanGroup, now: float) -> list[CoordinatorCommand]:
        """Release plans whose last run, and last text, has ended."""
        out: list[CoordinatorCommand] = []
        for record in group.plans.retiring:
            runs = [each for run in group.runs.values() for each in (run, run.before) if each is not None]
            if not any(run.plan_version in record.versions for run in runs) and not waiting_texts(group, record):
                group.plans.step(record, "idle", now)
                group.former_plans.note_released(record.plan)
                out += self.release(record.plan)
        return out

    def advance(self, group: PlanGroup, now: float) -> list[CoordinatorCommand]:
        """Ask devices to prepare the next plan, if it waits for no other one to be released."""
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
        """Give up a preparation without progress, or send its Prepare again to devices that may have missed it."""
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
            out += [self.command_device(d, self._addressed(message, plan, d)) for d in waiting]
        return out

    def _addressed(self, message: messages.Prepare, plan: Plan, device: str) -> messages.Prepare:
        """Return a Prepare with what one device alone is to know: its peers, and the key of the plan's frames."""
        peers, key = peers_of(plan, device, self._fleet), self._fleet.wrapped_key(plan, device)
        coming = (group.plans.preparing for group in self._groups)
        record = next((r for r in coming if r is not None and plan.version in r.versions), None)
        serves = any(device in group.active_devices for group in self._groups)
        share = 0.0 if record is None else record.share if serves else 1.0  # a device that does not serve has no runs
        return replace(message, peers=peers, key=key, checked=self._fleet.frame_key(plan).checked, share=share)

    def probe(
        self, group: PlanGroup, plan: Plan, devices: list[str], shapes: tuple[PlainShape, ...] = ()
    ) -> list[CoordinatorCommand]:
        """Send devices the Prepare of a plan; a device that has the plan, and its Programs of shapes, answers Ready."""
        served = group.served
        parts = plan.to_dict(), served.spec.to_dict(), served.manifest, self._in_flight, shapes, len(shapes)
        prepare = ((d, messages.Prepare(self.ids.next_transaction(), *parts)) for d in devices)
        return [self.command_device(d, self._addressed(message, plan, d)) for d, message in prepare]

    def release(self, plan: Plan) -> list[CoordinatorCommand]:
        """Return the commands that release a plan on its devices."""
        number = self.ids.next_transaction()
        release = ((d, messages.Release(number, plan.model, plan.for_device(d).version)) for d in plan.devices)
        return [self.command_device(*told) for told in release]

    def drop_replica(
        self, group: PlanGroup, record: PlanRecord, device: str, now: float, why: str
    ) -> list[CoordinatorCommand] | None:
        """Go on with the other replicas of a plan that has lost a device; None if there are none.

        If all of them are in doubt, so is the plan.
        """
        left, gone = record.plan.without_device(device), record.plan.for_device(device)
        if left is None:
            return None
        record.plan = left
        if record is group.plans.active and not group.usable_executables:
            group.plans.step(record, "overdue", now, why)
        return self.release(replace(gone, devices=tuple(d for d in gone.devices if d != device)))

    # -- what devices say -----------------------------------------------------------------------------------------

    def record_device_progress(
        self, device: str, message: messages.Ready | messages.PrepareFailed | messages.PrepareProgress, now: float
    ) -> None:
        """Record progress of a device with any plan, since it loads and builds for one plan after the other."""
        records = [group.plans.preparing for group in self._groups]
        if isinstance(message, messages.PrepareProgress):
            is_further = message.total_bytes > 0  # else it has the plan, and made no progress
        else:  # what was ready before is only a word
            is_further = any(
                r is not None and r.transaction_id == message.transaction_id and device in r.unready_devices
                for r in records
            )
        for record in records if is_further else ():
            if record is not None and record.state == "preparing" and device in record.unready_devices:
                record.device_progress_s[device] = now

    def handle_preparation(
        self,
        group: PlanGroup,
        device: str,
        message: messages.Ready | messages.PrepareFailed | messages.PrepareProgress,
        now: float,
    ) -> list[CoordinatorCommand]:
        """Handle a device's message about a preparation, unless that is over."""
        record = group.plans.preparing
        if record is None or record.state != "preparing" or record.transaction_id != message.transaction_id:
            return []
        if isinstance(message, messages.PrepareProgress) and not message.total_bytes:
            return []  # it has the plan, and made no progress
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

    def handle_unreachable_peers(self, message: messages.PrepareFailed, now: float) -> list[CoordinatorCommand]:
        """Give up the plan under which a device cannot hear others directly; the next one relays what they send."""
        note = LogEvent("relayed", f"{message.text}; the broker carries what they send it")
        return [note, *self._replace_plan(message, now + SETTLE_S, now)]  # others may say so too

    def handle_forgotten(self, message: messages.PrepareFailed, now: float) -> list[CoordinatorCommand]:
        """Prepare a plan again of which a device in doubt has given up its part; runs under it have ended there."""
        return [LogEvent("forgotten", message.text), *self._replace_plan(message, now, now)]

    def _replace_plan(self, message: messages.PrepareFailed, due_s: float, now: float) -> list[CoordinatorCommand]:
        out: list[CoordinatorCommand] = []
        for group in self._groups.of_model(message.model):
            preparing, active = group.plans.preparing, group.plans.active
            if preparing is not None and message.plan_version in preparing.versions:
                out += self.abandon(group, preparing, "refused", now, message.text)
            elif active is not None and message.plan_version in active.versions:
                runs = (run for run in active.plan.executables if run.version == message.plan_version)
                under = next(runs, active.plan)
                out += self.mark_suspect(group, under, now, message.text)
            else:
                continue
            for run in [r for r in group.runs.values() if r.plan_version == message.plan_version]:
                out += self._scheduler.retry(group, run, now)
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
        # Now that the weights of this plan are there, other plans may need none.
        if others := group.search_history.plans_to_load(record, MAX_LOADS_PRICED):
            group.plans.request_search(now, now, "its weights may serve other plans too", plans=others)
        out = self._reactivate_older(group, plan)
        number = self.ids.next_transaction()
        activate = ((d, messages.Activate(number, plan.model, plan.for_device(d).version)) for d in plan.devices)
        loaded = describe_end(record, now)
        notes = [LogEvent("loaded", loaded)] if loaded else []
        notes.append(LogEvent("activated", f"plan {plan.version} of {plan.model}: {plan.reason}"))
        return [*out, *(self.command_device(*told) for told in activate), *notes, self.publish_plan(group)]

    @staticmethod
    def _note_trial(group: PlanGroup, record: PlanRecord, now: float) -> None:
        """Remember a trial that came about, or that a device refuses: neither is to be tried again soon."""
        if record.move is not None and record.move.kind == "try":
            group.judgement.tried[strategy_key(record.plan)] = now

    def _reactivate_older(self, group: PlanGroup, newer: Plan) -> list[CoordinatorCommand]:
        """Confirm older plans of a model that stay beside a newer one: devices release the other unconfirmed ones."""
        standing = (slot.plans.in_use for slot in self._groups.of_model(group.name) if slot is not group)
        older = (r.plan for r in standing if r is not None and r.version < newer.version)
        pairs = ((p, d) for p in sorted(older, key=lambda p: p.version) for d in p.devices if d in newer.devices)
        activate = (
            (d, messages.Activate(self.ids.next_transaction(), p.model, p.for_device(d).version)) for p, d in pairs
        )
        return [self.command_device(*told) for told in activate]

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
            # The planner's own plan is on its way: these pins wait for it, and then see who makes room.
            out += self.abandon(group, record, "refused", now, message.text)
            plans.request_search(now, now, f"{device} lacks memory beside the planner's own next plan", forced=True)
            return out
        if others := self._groups.groups_to_evict(group, device):
            # They do not fit side by side: finish what runs, give the others up, then prepare again. Whoever has made
            # room holds nothing, so in the end a refusal makes the next question tighter.
            out += self._evict_and_retry(group, record, others, now, f"{device} refused it")
            return [*out, self.publish_plan(group)]
        out += [*self.abandon(group, record, "refused", now, message.text), self.publish_plan(group)]
        # Each refusal makes the next question tighter, so this ends.
        group.missing_bytes[device] = group.missing_bytes.get(device, 0) + max(message.missing_bytes, 1 << 20)
        plans.request_search(now + SETTLE_S, now, f"{device} lacks memory", forced=True)
        return out

    def handle_unreadable(self, event: WeightsUnreadable, now: float) -> list[CoordinatorCommand]:
        """Give up the plans whose weights cannot be read, without an immediate retry."""
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
        """Evict other groups' plans for a refused one, which is prepared again when they are gone."""
        out = self.release(record.plan)
        plan = record.plan.with_version(self.ids.next_version(), self.ids.next_version)
        group.plans.wait_for_memory(record, plan, self.ids.next_transaction(), now, why)
        why, behind = f"for {plan.version}", set[PlanVersion]()
        for slot in others:
            if slot is group:
                slot.plans.make_room(now, why)
            elif slot.pinned and slot.idle:
                out += self.close_group(slot, now, why)
            else:
                out += self._evict(slot, now, why)
            behind |= slot.plans.versions()
        record.waits_for = frozenset(behind - record.versions)
        return out

    def _evict(self, group: PlanGroup, now: float, why: str) -> list[CoordinatorCommand]:
        """Take a group its plans; it has the next one in its turn."""
        coming = group.plans.abandon_pending("make room", now, why)
        group.plans.make_room(now, why)
        group.made_room = True
        group.plans.request_search(now, now, f"it made room {why}", forced=True)
        return self.release(coming.plan) if coming is not None else []

    def group_for(self, request: Request, now: float) -> tuple[PlanGroup | None, list[CoordinatorCommand]]:
        """Return the group of a request, a new one if it is the first with its pins; None if all are in use."""
        name, pins = request.key.model, request.pins
        group, out = self._groups.find(name, pins), list[CoordinatorCommand]()
        if group is not None or pins is None:
            return group, out
        others = self._groups.pinned(name)
        if len(others) >= MAX_PINNED_GROUPS:
            oldest = next((slot for slot in others if slot.idle), None)
            if oldest is None:
                text = f"All {MAX_PINNED_GROUPS} pinned plans of {name} are in use. Try again later, or send no pins."
                return None, self._scheduler.admission.refuse_overloaded(request, text)
            out = self.close_group(oldest, now, f"for {pins}")
        group = self._groups.add(name, pins)
        group.plans.request_search(now, now, "a request has pinned it", forced=True)
        return group, out

    def close_group(self, group: PlanGroup, now: float, why: str) -> list[CoordinatorCommand]:
        """Release all plans of a pinned group for which no request waits or runs, and forget it."""
        coming = group.plans.abandon_pending("unused", now, why)
        group.plans.retire_all(now, why)
        out = self.release(coming.plan) if coming is not None else []
        out += self.release_idle(group, now)
        self._groups.drop(group)
        return out

    # -- what does not come about ---------------------------------------------------------------------------------

    def abandon(
        self,
        group: PlanGroup,
        record: PlanRecord,
        event: Literal["refused", "silent", "lost", "outdated"],
        now: float,
        why: str,
    ) -> list[CoordinatorCommand]:
        """Give up a plan on its way."""
        group.plans.step(record, event, now, why)
        text = describe_end(record, now, why)
        return [*([LogEvent("loaded", text)] if text else []), *self.release(record.plan)]

    def _handle_failed_preparation(
        self,
        group: PlanGroup,
        record: PlanRecord,
        event: Literal["refused", "silent"],
        error: HeptiError,
        now: float,
    ) -> list[CoordinatorCommand]:
        """Search again after a preparation that failed; after several, requests need not wait any longer."""
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
        """Refuse the requests of a group for which there is no plan, unless there is the one before."""
        plans = group.plans
        is_told = plans.active is None and str(group.error) == str(error)  # by the last search
        out: list[CoordinatorCommand] = [] if is_told else [LogEvent("no_plan", str(error))]
        if plans.active is None:
            group.error = error
            for request in [item.request for item in group.queue]:
                out += self._scheduler.fail_request(group, request, error, now)
        if (standing := plans.in_use) is not None and standing.state == "suspect":
            plans.retire(standing, "no plan", now, str(error))
        return [*out, self.publish_plan(group)]

    def mark_suspect(
        self, group: PlanGroup, plan: Plan, now: float, why: str = "a run never ended"
    ) -> list[CoordinatorCommand]:
        """Prepare a plan again under which a run never ended; other replicas of it continue.

        A device may have lost the plan unnoticed (a restarted broker loses wills and subscriptions). The old version
        stays resident meanwhile, so that devices need not load its weights again.
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
# Weights loaded ahead on a standby device, where the plan in use has all of them on one.
#
# A second device prepares the plan that would follow a loss and releases it again: it keeps released weights, and the
# Programs of recent shapes, while it has room, so nothing makes room for these. No request runs under such a plan. The
# search after a loss, for requests that wait, is for that device alone.


ENDS_S: Final = 60.0  # then a preparation is given up, or a refused one tried again


@dataclass(slots=True)
class _StandbyPlan:
    """The standby of the plan in use, `plan_version`; next_s: when the next step is due.

    ticket: of the search, 0 before it. plan: that it found; boot: of its device. held: the device has the weights.
    """

    plan_version: PlanVersion
    next_s: float
    needed_bytes: int
    ticket: int = 0
    plan: Plan | None = None
    boot: int = 0
    held: bool = False

    @property
    def loading(self) -> bool:
        return self.plan is not None and not self.held


class Standby:
    """The standby devices of all groups; sees each event after the session has handled it."""

    def __init__(self, groups: PlanGroups, fleet: Fleet, rollout: Rollout, moves: Moves) -> None:
        self._groups, self._fleet, self._rollout, self._moves = groups, fleet, rollout, moves
        self._ahead: dict[str, _StandbyPlan] = {}

    @property
    def loading_devices(self) -> frozenset[str]:
        """Return the devices that load ahead."""
        return frozenset(ahead.plan.root for ahead in self._loads() if ahead.plan is not None)

    def is_held(self, group: PlanGroup) -> bool:
        """Return whether another device has the weights of the plan in use."""
        ahead = self._ahead.get(group.name)
        return ahead is not None and ahead.held and self._there(ahead)

    def question(self, group: PlanGroup, now: float) -> Question:
        """Return the question for a group's next plan, with what is held ahead."""
        question, ahead = self._rollout.question(group, now), self._ahead.get(group.name)
        if ahead is None or ahead.plan is None or not self._there(ahead):
            return question
        return replace(question, residents=(*question.residents, ahead.plan))

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorCommand]:
        """Take an event and return the commands that follow from it."""
        if isinstance(event, Tick):
            return [command for group in self._groups.defaults() for command in self._tick(group, now)]
        if isinstance(event, Solved):
            return self._solved(event)
        if isinstance(event, DeviceMessage) and isinstance(event.message, Ready | PrepareFailed):
            return self._prepared(event.message, now)
        return []

    def release_for_memory(
        self, record: PlanRecord | None, device: str, message: Message, now: float
    ) -> list[CoordinatorCommand]:
        """Release what a device loads ahead where a plan is refused for lack of memory; the plan is prepared again."""
        if record is None or not isinstance(message, PrepareFailed) or message.code != "memory":
            return []
        ahead = [ahead for ahead in self._loads() if ahead.plan is not None and device in ahead.plan.devices]
        if ahead:
            record.prepare_sent_s = -inf
        return [command for load in ahead for command in self._give_up(load, now)]

    def _tick(self, group: PlanGroup, now: float) -> list[CoordinatorCommand]:
        ahead, record = self._ahead.get(group.name), group.plans.active
        if ahead is not None and ahead.loading and self._there(ahead):
            return self._give_up(ahead, now) if now > ahead.next_s else []
        if record is None or len(record.plan.devices) > 1 or not group.plans.pins.is_unpinned or not group.in_use(now):
            return []
        if not record.is_priced:
            return []
        if ahead is None or ahead.plan_version != record.version or (ahead.plan is not None and not self._there(ahead)):
            needed_bytes = record.decision.chosen.price.needs[record.plan.root]
            self._ahead[group.name] = _StandbyPlan(record.version, now, needed_bytes)
            return []
        if ahead.held or now < ahead.next_s or group.plans.in_transition():
            return []
        ahead.next_s = now + ENDS_S
        question = self._rollout.question(group, now)
        worth = {n for n in self._fleet.usable() if self._moves.is_worth_holding(group, n, ahead.needed_bytes, now)}
        able = _with_memory(question, worth - set(record.plan.devices), ahead.needed_bytes)
        if not able:
            return []
        ahead.ticket = self._rollout.ids.next_transaction()
        return [Solve(group.name, ahead.ticket, _restricted_to(question, able), None, SearchKind.HURRIED)]

    def _solved(self, event: Solved) -> list[CoordinatorCommand]:
        ahead, group = self._ahead.get(event.model), next(iter(self._groups.of_model(event.model)), None)
        if ahead is None or group is None or event.ticket != ahead.ticket or event.decision is None:
            return []
        chosen = event.decision.chosen
        member = self._fleet.usable().get(chosen.plan.root)
        if member is None or len(chosen.plan.devices) > 1 or group.plans.in_transition():
            return []
        ahead.plan, ahead.boot, ahead.needed_bytes = chosen.plan, member.boot, chosen.price.needs[member.name]
        shapes = tuple(shape.plain() for shape in shapes_to_build(group)[0])
        return self._rollout.probe(group, chosen.plan, [member.name], shapes)

    def _prepared(self, message: Ready | PrepareFailed, now: float) -> list[CoordinatorCommand]:
        for ahead in self._loads():
            assert ahead.plan is not None
            if (ahead.plan.model, ahead.plan.version) != (message.model, message.plan_version):
                continue
            if isinstance(message, PrepareFailed):
                return self._give_up(ahead, now)
            ahead.held = True
            return self._rollout.release(ahead.plan)
        return []

    def _give_up(self, ahead: _StandbyPlan, now: float) -> list[CoordinatorCommand]:
        plan, ahead.plan, ahead.next_s = ahead.plan, None, now + ENDS_S
        return [] if plan is None else self._rollout.release(plan)

    def _loads(self) -> Iterator[_StandbyPlan]:
        return (ahead for ahead in self._ahead.values() if ahead.loading)

    def _there(self, ahead: _StandbyPlan) -> bool:
        member = None if ahead.plan is None else self._fleet.usable().get(ahead.plan.root)
        return member is not None and member.boot == ahead.boot


def _with_memory(question: Question, devices: set[str], needed_bytes: int) -> set[str]:
    """Return which of these devices have the memory."""
    there = ((name, question.cluster.devices.get(name)) for name in devices)
    return {name for name, profile in there if profile is not None and profile.memory_bytes >= needed_bytes}


def _restricted_to(question: Question, devices: set[str]) -> Question:
    """Return a question for some of its devices."""
    left = {name: profile for name, profile in question.cluster.devices.items() if name in devices}
    return replace(question, cluster=replace(question.cluster, devices=left))
