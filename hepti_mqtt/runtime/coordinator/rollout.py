"""What a search is asked: the devices as they are, less what other slots hold, and what the slot's pins say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Final, Literal

from hepti_mqtt.cost.simulator import Naming
from hepti_mqtt.errors import HeptiError, RemoteError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.models import shape_for
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Question
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.messages import Failed, Message, Peer, Ready
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.coordinator.fleet import Membership
from hepti_mqtt.runtime.coordinator.interface import (
    CoordinatorCommand,
    CoordinatorEvent,
    Note,
    ShowPlan,
    Solve,
    Solved,
    Tick,
    Unreadable,
    UpMessage,
)
from hepti_mqtt.runtime.coordinator.models import PINNED, ModelState, Slots
from hepti_mqtt.runtime.coordinator.plans import PlanRecord
from hepti_mqtt.runtime.coordinator.requests import Job
from hepti_mqtt.runtime.coordinator.scheduler import Dispatcher
from hepti_mqtt.runtime.machinery import Publish


def question_of(
    site: str, slots: Slots, membership: Membership, model: ModelState, epoch: Epoch, in_flight: int, now: float
) -> Question:
    """Return the question for a slot's next plan, which will be of this epoch."""
    served, pins = model.served, model.plans.pins
    # Where several requests wait they run packed (packs.py), and that is when throughput counts.
    several = served.batching.requests if pins.objective == "throughput" else 1
    held = Counter(model.spare)
    for other in slots:
        # Who would make room for this plan does not count.
        gives_way = other.pinned and (other.idle or not model.pinned)
        if other.name == model.name or gives_way:
            continue
        decision = other.held()
        held.update(decision.chosen.price.needs if decision else {})
    for device, most_bytes in model.falls.most_bytes(now).items():
        if (member := membership.usable().get(device)) is not None and member.caps is not None:
            held[device] = max(held[device], member.caps.memory_budget_bytes - most_bytes)
    return Question(
        naming=Naming(site, served.name),
        spec=served.spec,
        cluster=membership.cluster(held),
        shape=shape_for(served.spec, model.tokens(), several),
        epoch=epoch,
        in_flight=in_flight,
        strategy=pins.strategy,
        options=pins.options,
        devices=pins.devices,
        wire=pins.wire,
        storage=pins.storage,
        route=pins.route,
        objective=pins.objective,
        relayed=membership.relayed(now),
        packet_bytes=membership.packet_bytes(),
        learned=model.experience.learned(now),
        accuracy=pins.accuracy,
        compare=False,
    )


# ----------------------------------------------------------------------------------------------------------------------
# How a plan that was found comes to the devices, and how it leaves them again.


SETTLE_S: Final = 1.0  # after a join, wait for others that come up with it
SOON_S: Final = 0.1  # instead, where requests wait and no plan serves them
ASK_AGAIN_S: Final = 2.0  # a Prepare may go to a connection that is just gone; a device that has it loses nothing
PREPARE_S: Final = 120.0  # without any progress for so long, a preparation is given up
REFUSALS: Final = 3  # preparations in a row that fail for another reason than memory, then requests are refused ...
RETRY_S: Final = 30.0  # ... and the next search waits so long
SHOW_S: Final = 1.0  # between two records that differ in progress alone
STORY: Final = 32  # transitions in a published record


class Rollout:
    """Prepares, activates and releases the plans of all slots; which plan comes next is the coordinator's.

    in_flight: runs at once per model. next_epoch: returns an epoch that no plan has had. introduce: returns the peers
    of a device under a plan.
    """

    def __init__(
        self,
        topics: Topics,
        slots: Slots,
        in_flight: int,
        requests: Dispatcher,
        next_epoch: Callable[[], Epoch],
        introduce: Callable[[Plan, str], tuple[Peer, ...]],
    ) -> None:
        self._topics, self._slots, self._in_flight = topics, slots, in_flight
        self._requests, self._next_epoch, self._introduce = requests, next_epoch, introduce
        self._txn = 0

    def next_txn(self) -> int:
        """Return a number for a new transaction."""
        self._txn += 1
        return self._txn

    def tell(self, device: str, message: messages.Message) -> Publish:
        """Return the publish of a message to a device."""
        return Publish(self._topics.command(device), messages.encode(message), 1)

    def show(self, model: ModelState) -> ShowPlan:
        """Return what publishes the record of a model's plans, those of requests' pins among them."""
        own = self._slots.own(model.name)
        preparing = own.plans.preparing
        plan, progress = (None, {}) if preparing is None else (preparing.plan, dict(preparing.progress))
        own.shown = own.plans.story.told
        story = own.plans.story.last(STORY)
        slots = self._slots.pinned(model.name)
        pinned = tuple(slot.active for slot in slots if slot.active is not None)
        coming = tuple(slot.plans.preparing.plan for slot in slots if slot.plans.preparing is not None)
        shown = ShowPlan(model.name, own.active, plan, own.latest, own.error, progress, story, pinned, coming)
        return replace(shown, in_flight=self._in_flight)

    # -- what has become possible ---------------------------------------------------------------------------------

    def release_idle(self, model: ModelState, now: float) -> list[CoordinatorCommand]:
        """Release plans whose last run has ended."""
        out: list[CoordinatorCommand] = []
        for record in model.plans.retiring:
            if not any(r.epoch in record.epochs for r in model.runs.values()):
                model.plans.idle(record, now)
                out += self.release(record.plan)
        return out

    def pump(self, model: ModelState, now: float) -> list[CoordinatorCommand]:
        """Ask devices to prepare the next plan, if it waits for no other one to be released."""
        out: list[CoordinatorCommand] = []
        plans = model.plans
        preparing = plans.preparing
        if preparing is not None and preparing.state == "swapping" and not preparing.behind & self._slots.epochs():
            plans.room(preparing, now)
        if preparing is not None and preparing.state == "preparing" and preparing.asked_s == float("-inf"):
            out += self._ask(model, preparing, now)
        return out

    def tick(self, model: ModelState, now: float) -> list[CoordinatorCommand]:
        """Give a preparation up in which nothing moves, or ask again those who may not have heard."""
        record = model.plans.preparing
        if record is None or record.state != "preparing":
            return []
        moved_s = (record.moved_s.get(device, record.progress_s) for device in record.waiting)
        if now - max([record.progress_s, *moved_s]) > PREPARE_S:
            waiting = ", ".join(sorted(record.waiting))
            text = f"{waiting} did not get ready for plan {record.epoch} within {PREPARE_S:.0f} s"
            out: list[CoordinatorCommand] = [Note("refused", text)]
            return out + self._failed(model, record, "silent", RemoteError(text + "; see the log there"), now)
        return self._ask(model, record, now) if now > record.heard_s() + ASK_AGAIN_S else []

    def _ask(self, model: ModelState, record: PlanRecord, now: float) -> list[CoordinatorCommand]:
        record.asked_s = now
        served = model.served
        spec = served.spec.to_dict()
        shapes, needed = model.foreseen()
        foreseen, out = tuple(shape.plain() for shape in shapes), list[CoordinatorCommand]()
        for plan in record.plan.runs:
            message = messages.Prepare(
                record.txn, plan.to_dict(), spec, served.manifest, self._in_flight, foreseen, needed
            )
            waiting = [d for d in plan.devices if d in record.waiting]
            out += [self.tell(d, replace(message, peers=self._introduce(plan, d))) for d in waiting]
        return out

    def probe(self, model: ModelState, plan: Plan, devices: list[str]) -> list[CoordinatorCommand]:
        """Ask devices that have a plan for a word: who has it says so again."""
        served = model.served
        parts = plan.to_dict(), served.spec.to_dict(), served.manifest, self._in_flight
        found = ((d, self._introduce(plan, d)) for d in devices)
        return [self.tell(d, messages.Prepare(self.next_txn(), *parts, peers=peers)) for d, peers in found]

    def release(self, plan: Plan) -> list[CoordinatorCommand]:
        """Return what makes the devices of a plan give it up."""
        txn = self.next_txn()
        return [self.tell(d, messages.Release(txn, plan.model, plan.of(d).epoch)) for d in plan.devices]

    def lessen(
        self, model: ModelState, record: PlanRecord, device: str, now: float, why: str
    ) -> list[CoordinatorCommand] | None:
        """Go on with the other replicas of a plan that has lost a device; None if there are none.

        If all of them are in doubt, so is the plan.
        """
        left, gone = record.plan.without(device), record.plan.of(device)
        if left is None:
            return None
        model.plans.lessen(record, left)
        if record is model.plans.active and not model.able:
            model.plans.suspect(record, now, why)
        return self.release(replace(gone, devices=tuple(d for d in gone.devices if d != device)))

    # -- what devices say -----------------------------------------------------------------------------------------

    def moved(self, device: str, message: messages.Ready | messages.Failed | messages.Progress, now: float) -> None:
        """Take note of a device that gets further, with whatever plan: others that it is to prepare wait for that one.

        It loads and builds for one plan after the other, also for one that nobody wants any more.
        """
        records = [slot.plans.preparing for slot in self._slots]
        if isinstance(message, messages.Progress):
            is_further = message.total_bytes > 0  # else it has the plan, and has not got further
        else:  # what was ready before is only a word
            is_further = any(r is not None and r.txn == message.txn and device in r.waiting for r in records)
        for record in records if is_further else ():
            if record is not None and record.state == "preparing" and device in record.waiting:
                record.moved_s[device] = now

    def heard(
        self, model: ModelState, device: str, message: messages.Ready | messages.Failed | messages.Progress, now: float
    ) -> list[CoordinatorCommand]:
        """Take a device's word about a preparation; one about a preparation that is over changes nothing."""
        record = model.plans.preparing
        if record is None or record.state != "preparing" or record.txn != message.txn:
            return []
        if isinstance(message, messages.Progress) and not message.total_bytes:
            return []  # it has the plan, and has not got further
        record.progress_s = record.moved_s[device] = now
        if isinstance(message, messages.Progress):
            record.progress[device] = (message.done_bytes, message.total_bytes)
            if now - record.shown_s < SHOW_S:
                return []
            record.shown_s = now
            return [self.show(model)]
        if isinstance(message, messages.Ready):
            record.waiting.discard(device)
            return [] if record.waiting else self._activate(model, record, now)
        return self._refused(model, record, device, message, now)

    def unheard(self, message: messages.Failed, now: float) -> list[CoordinatorCommand]:
        """Give up the plan under which a device cannot hear others directly; the next one relays what they send."""
        note = Note("relayed", f"{message.text}; the broker carries what they send it")
        return [note, *self._renew(message, now + SETTLE_S, now)]  # others may say so too

    def forgotten(self, message: messages.Failed, now: float) -> list[CoordinatorCommand]:
        """Prepare a plan anew of which a device in doubt has given up its part; runs under it have ended there."""
        return [Note("forgotten", message.text), *self._renew(message, now, now)]

    def _renew(self, message: messages.Failed, due_s: float, now: float) -> list[CoordinatorCommand]:
        out: list[CoordinatorCommand] = []
        for model in self._slots.of(message.model):
            preparing, active = model.plans.preparing, model.plans.active
            if preparing is not None and message.epoch in preparing.epochs:
                out += self.abandon(model, preparing, "refused", now, message.text)
            elif active is not None and message.epoch in active.epochs:
                under = next((run for run in active.plan.runs if run.epoch == message.epoch), active.plan)
                out += self.suspect(model, under, now, message.text)
            else:
                continue
            for run in [r for r in model.runs.values() if r.epoch == message.epoch]:
                out += self._requests.again(model, run)
            model.plans.want(due_s, now, message.text, forced=True)
        return out

    def _activate(self, model: ModelState, record: PlanRecord, now: float) -> list[CoordinatorCommand]:
        model.plans.ready(record, now)
        model.refusals = 0
        plan = record.plan
        out = self._affirm(model, plan)
        txn = self.next_txn()
        activate = ((d, messages.Activate(txn, plan.model, plan.of(d).epoch)) for d in plan.devices)
        note = Note("activated", f"plan {plan.epoch} of {plan.model}: {plan.reason}")
        return [*out, *(self.tell(*told) for told in activate), note, self.show(model)]

    def _affirm(self, model: ModelState, newer: Plan) -> list[CoordinatorCommand]:
        """Say which older plans of a model go on beside a newer one: devices that are in doubt give up all others."""
        standing = (slot.plans.standing for slot in self._slots.of(model.name) if slot is not model)
        older = sorted((r.plan for r in standing if r is not None and r.epoch < newer.epoch), key=lambda p: p.epoch)
        return [
            self.tell(device, messages.Activate(self.next_txn(), plan.model, plan.of(device).epoch))
            for plan in older
            for device in plan.devices
            if device in newer.devices
        ]

    def _refused(
        self, model: ModelState, record: PlanRecord, device: str, message: messages.Failed, now: float
    ) -> list[CoordinatorCommand]:
        plans = model.plans
        out: list[CoordinatorCommand] = [Note("refused", f"{device} refused plan {message.epoch}: {message.text}")]
        if message.code != "memory":
            error = RemoteError(f"{device} cannot prepare the plan: {message.text}")
            return out + self._failed(model, record, "refused", error, now)
        if model.pinned and self._slots.own(model.name).plans.preparing is not None:
            # The planner's own plan is on its way: these pins wait for it, and then see who makes room.
            out += self.abandon(model, record, "refused", now, message.text)
            plans.want(now, now, f"{device} lacks memory beside the planner's own next plan", forced=True)
            return out
        if others := self._slots.who_makes_room(model, device):
            # They do not fit side by side: finish what runs, give the others up, then prepare again. Whoever has made
            # room holds nothing, so in the end a refusal makes the next question tighter.
            return [*out, *self._swap(model, record, others, now, f"{device} refused it"), self.show(model)]
        out += [*self.abandon(model, record, "refused", now, message.text), self.show(model)]
        # Each refusal makes the next question tighter, so this ends.
        model.spare[device] = model.spare.get(device, 0) + max(message.missing_bytes, 1 << 20)
        plans.want(now + SETTLE_S, now, f"{device} lacks memory", forced=True)
        return out

    def unreadable(self, event: Unreadable, now: float) -> list[CoordinatorCommand]:
        """Give up the plans that wait for weights which cannot be read: it makes no sense to try again at once."""
        out: list[CoordinatorCommand] = []
        for model in self._slots.of(event.model):
            record = model.plans.preparing
            if record is not None and record.state == "preparing" and event.device in record.plan.devices:
                model.refusals = REFUSALS
                out += self._failed(model, record, "refused", event.error, now)
        return out

    def _swap(
        self, model: ModelState, record: PlanRecord, others: list[ModelState], now: float, why: str
    ) -> list[CoordinatorCommand]:
        """Let others make room for a plan that was refused, and prepare it again when they are gone."""
        out = self.release(record.plan)
        plan = record.plan.under(self._next_epoch(), self._next_epoch)
        model.plans.lacks_memory(record, plan, self.next_txn(), now, why)
        why, behind = f"for {plan.epoch}", set[Epoch]()
        for slot in others:
            if slot is model:
                slot.plans.make_room(now, why)
            elif slot.pinned and slot.idle:
                out += self.close(slot, now, why)
            else:
                out += self._displace(slot, now, why)
            behind |= slot.plans.epochs()
        record.behind = frozenset(behind - record.epochs)
        return out

    def _displace(self, slot: ModelState, now: float, why: str) -> list[CoordinatorCommand]:
        """Take a slot its plans; it has the next one in its turn."""
        coming = slot.plans.put_off("make room", now, why)
        slot.plans.make_room(now, why)
        slot.displaced = True
        slot.plans.want(now, now, f"it made room {why}", forced=True)
        return self.release(coming.plan) if coming is not None else []

    def slot_for(self, job: Job, now: float) -> tuple[ModelState | None, list[CoordinatorCommand]]:
        """Return the slot of a request, a new one if it is the first with its pins; None if all are in use."""
        name, pins = job.key.model, job.pins
        model, out = self._slots.find(name, pins), list[CoordinatorCommand]()
        if model is not None or pins is None:
            return model, out
        others = self._slots.pinned(name)
        if len(others) >= PINNED:
            oldest = next((slot for slot in others if slot.idle), None)
            if oldest is None:
                text = f"{PINNED} ways of dividing {name} that requests have pinned are all in use"
                return None, self._requests.overloaded(job, f"{text}; try again later, or pin nothing")
            out = self.close(oldest, now, f"for {pins}")
        model = self._slots.add(name, pins)
        model.plans.want(now, now, "a request has pinned it", forced=True)
        return model, out

    def close(self, slot: ModelState, now: float, why: str) -> list[CoordinatorCommand]:
        """Release all plans of a slot of pins for which no request waits or runs, and forget it."""
        coming = slot.plans.put_off("unused", now, why)
        slot.plans.close(now, why)
        out = self.release(coming.plan) if coming is not None else []
        out += self.release_idle(slot, now)
        self._slots.drop(slot)
        return out

    # -- what does not come about ---------------------------------------------------------------------------------

    def abandon(
        self, model: ModelState, record: PlanRecord, event: Literal["refused", "silent", "lost"], now: float, why: str
    ) -> list[CoordinatorCommand]:
        """Give up a plan on its way."""
        model.plans.give_up(record, event, now, why)
        return self.release(record.plan)

    def _failed(
        self,
        model: ModelState,
        record: PlanRecord,
        event: Literal["refused", "silent"],
        error: HeptiError,
        now: float,
    ) -> list[CoordinatorCommand]:
        """Search again after a preparation that failed; after several, requests need not wait any longer."""
        plans = model.plans
        out = [*self.abandon(model, record, event, now, str(error)), self.show(model)]
        model.refusals += 1
        if model.refusals < REFUSALS:
            plans.want(now + SETTLE_S, now, "a preparation failed", forced=True)
            return out
        out += self.no_plan(model, error, now)
        plans.want(now + RETRY_S, now, f"{model.refusals} preparations failed", forced=True)
        return out

    def no_plan(self, model: ModelState, error: HeptiError, now: float) -> list[CoordinatorCommand]:
        """Refuse the requests of a slot for which there is no plan, unless there is the one before."""
        plans = model.plans
        out: list[CoordinatorCommand] = [Note("no_plan", str(error))]
        if plans.active is None:
            model.error = error
            for job in [item.job for item in model.queue]:
                out += self._requests.end(model, job, error)
        if (standing := plans.standing) is not None and standing.state == "suspect":
            plans.retire(standing, "no plan", now, str(error))
        return [*out, self.show(model)]

    def suspect(
        self, model: ModelState, plan: Plan, now: float, why: str = "a run never ended"
    ) -> list[CoordinatorCommand]:
        """Prepare a plan anew under which a run never ended; if it is one of several replicas, the others go on.

        A device may have lost its part of it unnoticed (a broker that restarts swallows wills and subscriptions). The
        old epoch stays resident meanwhile, so that devices that have its weights need not load them again.
        """
        record = model.plans.active
        if record is None or plan.epoch not in record.epochs:
            return []
        record.doubted |= {run.epoch for run in record.plan.replicas if run.epoch == plan.epoch}
        if not model.able or plan.epoch == record.epoch:
            model.plans.suspect(record, now, why)
        model.plans.want(now, now, f"under {record.epoch}: {why}", forced=True)
        return [self.show(model)]


# ----------------------------------------------------------------------------------------------------------------------
# Weights loaded ahead on a second device, where the plan in use has all of them on one.
#
# If that one is lost nobody else has anything of the model, and requests would wait for all of it to be loaded. So a
# second device is asked to prepare the plan that would follow, and to release it again: a device keeps the weights
# that
# it has released as long as there is room for them, so nothing makes room for these. No request ever runs under such a
# plan. The search after a loss, for requests that wait, is asked for that device alone.


CALM_S: Final = 3.0  # a plan is in use for so long before the next device loads
LOADS_S: Final = 10.0  # a load that would fill the device's link for longer is not worth it
ENDS_S: Final = 60.0  # then a preparation is given up, or a refused one tried again


@dataclass(slots=True)
class _Ahead:
    """What is ahead of one plan in use, of this epoch; next_s: when the next step is due.

    ticket: of the search, 0 if there was none yet. plan: that was found; boot: of its device. held: the device has it.
    needed_bytes: of memory.
    """

    epoch: Epoch
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
    """Sees what happens after the coordinator has dealt with it. ask: returns the question for a slot's next plan."""

    def __init__(
        self, slots: Slots, membership: Membership, rollout: Rollout, ask: Callable[[ModelState, float], Question]
    ) -> None:
        self._slots, self._membership, self._rollout, self._question = slots, membership, rollout, ask
        self._ahead: dict[str, _Ahead] = {}

    @property
    def loading(self) -> bool:
        """Return whether a device loads ahead."""
        return any(ahead.loading for ahead in self._ahead.values())

    def question(self, model: ModelState, hurried: bool, now: float) -> Question:
        """Return the question for a slot's next plan; hurried: of the device that has the weights, if one does."""
        question, ahead = self._question(model, now), self._ahead.get(model.name)
        if not hurried or model.pinned or ahead is None or ahead.plan is None or not self._there(ahead):
            return question
        able = _able(question, {ahead.plan.head}, ahead.needed_bytes)
        return _among(question, able) if able else question

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorCommand]:
        """Take an event and return the commands that follow from it."""
        if isinstance(event, Tick):
            return [command for model in self._slots.models() for command in self._tick(model, now)]
        if isinstance(event, Solved):
            return self._solved(event)
        if isinstance(event, UpMessage) and isinstance(event.message, Ready | Failed):
            return self._prepared(event.message, now)
        return []

    def make_way(
        self, record: PlanRecord | None, device: str, message: Message, now: float
    ) -> list[CoordinatorCommand]:
        """Release what a device loads ahead if a plan is refused there for want of memory, which is then asked again.

        Weights loaded ahead serve nobody yet; without this the device would be taken for smaller than it is.
        """
        if record is None or not isinstance(message, Failed) or message.code != "memory":
            return []
        ahead = [ahead for ahead in self._loads() if ahead.plan is not None and device in ahead.plan.devices]
        if ahead:
            record.asked_s = -inf
        return [command for load in ahead for command in self._give_up(load, now)]

    def _tick(self, model: ModelState, now: float) -> list[CoordinatorCommand]:
        ahead, record = self._ahead.get(model.name), model.plans.active
        if ahead is not None and ahead.loading and self._there(ahead):
            return self._give_up(ahead, now) if now > ahead.next_s else []
        if record is None or len(record.plan.devices) > 1 or not model.plans.pins.free or not model.in_use(now):
            return []
        if ahead is None or ahead.epoch != record.epoch or (ahead.plan is not None and not self._there(ahead)):
            needed_bytes = record.decision.chosen.price.needs[record.plan.head]
            self._ahead[model.name] = _Ahead(record.epoch, now + CALM_S, needed_bytes)
            return []
        if ahead.held or now < ahead.next_s or model.plans.busy():
            return []
        ahead.next_s = now + ENDS_S
        usable = self._membership.usable()
        quick = {n for n, m in usable.items() if ahead.needed_bytes <= LOADS_S * m.link().up_bytes_per_s}
        question = self._question(model, now)
        # A hurried search of those that cannot would become a whole one, and others wait for it.
        able = _able(question, quick - set(record.plan.devices), ahead.needed_bytes)
        if not able:
            return []
        ahead.ticket = self._rollout.next_txn()
        return [Solve(model.name, ahead.ticket, _among(question, able), None, hurried=True)]

    def _solved(self, event: Solved) -> list[CoordinatorCommand]:
        ahead, model = self._ahead.get(event.model), next(iter(self._slots.of(event.model)), None)
        if ahead is None or model is None or event.ticket != ahead.ticket or event.decision is None:
            return []
        chosen = event.decision.chosen
        member = self._membership.usable().get(chosen.plan.head)
        if member is None or len(chosen.plan.devices) > 1 or model.plans.busy():
            return []
        ahead.plan, ahead.boot, ahead.needed_bytes = chosen.plan, member.boot, chosen.price.needs[member.name]
        return [*self._rollout.probe(model, chosen.plan, [member.name])]

    def _prepared(self, message: Ready | Failed, now: float) -> list[CoordinatorCommand]:
        for ahead in self._loads():
            assert ahead.plan is not None
            if (ahead.plan.model, ahead.plan.epoch) != (message.model, message.epoch):
                continue
            if isinstance(message, Failed):
                return self._give_up(ahead, now)
            ahead.held = True
            return self._rollout.release(ahead.plan)
        return []

    def _give_up(self, ahead: _Ahead, now: float) -> list[CoordinatorCommand]:
        plan, ahead.plan, ahead.next_s = ahead.plan, None, now + ENDS_S
        return [] if plan is None else self._rollout.release(plan)

    def _loads(self) -> Iterator[_Ahead]:
        return (ahead for ahead in self._ahead.values() if ahead.loading)

    def _there(self, ahead: _Ahead) -> bool:
        member = None if ahead.plan is None else self._membership.usable().get(ahead.plan.head)
        return member is not None and member.boot == ahead.boot


def _able(question: Question, devices: set[str], needed_bytes: int) -> set[str]:
    """Return which of these devices have the memory."""
    there = ((name, question.cluster.devices.get(name)) for name in devices)
    return {name for name, profile in there if profile is not None and profile.memory_bytes >= needed_bytes}


def _among(question: Question, devices: set[str]) -> Question:
    """Return a question for some of its devices."""
    left = {name: profile for name, profile in question.cluster.devices.items() if name in devices}
    return replace(question, cluster=replace(question.cluster, devices=left))
