"""How a plan that was found comes to the devices, and how it leaves them again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal

from hepti_mqtt.errors import HeptiError, RemoteError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan import Plan
from hepti_mqtt.runtime.commands import Publish
from hepti_mqtt.runtime.coordination import CoordinatorCommand, Note, ShowPlan
from hepti_mqtt.runtime.dispatcher import Dispatcher
from hepti_mqtt.runtime.flight import Pins
from hepti_mqtt.runtime.model_state import ModelState
from hepti_mqtt.runtime.plans import PlanRecord
from hepti_mqtt.wire import messages
from hepti_mqtt.wire.topics import Topics

SETTLE_S: Final = 1.0  # after a join, wait for others that come up with it
ASK_AGAIN_S: Final = 5.0  # a Prepare may go to a connection that is just gone; a device that has it loses nothing
PREPARE_S: Final = 120.0  # without any progress for so long, a preparation is given up
REFUSALS: Final = 3  # preparations in a row that fail for another reason than memory, then requests are refused ...
RETRY_S: Final = 30.0  # ... and the next search waits so long
SHOW_S: Final = 1.0  # between two records that differ in progress alone
STORY: Final = 32  # transitions in a published record


class Rollout:
    """Prepares, activates and releases the plans of all models; which plan comes next is the coordinator's.

    in_flight: runs at once per model. next_epoch: returns an epoch that no plan has had.
    """

    def __init__(self, topics: Topics, in_flight: int, requests: Dispatcher, next_epoch: Callable[[], Epoch]) -> None:
        self._topics, self._in_flight, self._requests, self._next_epoch = topics, in_flight, requests, next_epoch
        self._txn = 0

    def next_txn(self) -> int:
        """Return a number for a new transaction."""
        self._txn += 1
        return self._txn

    def tell(self, device: str, message: messages.Message) -> Publish:
        """Return the publish of a message to a device."""
        return Publish(self._topics.command(device), messages.encode(message), 1)

    def show(self, model: ModelState) -> ShowPlan:
        """Return what publishes the record of a model's plans."""
        plans = model.plans
        preparing = plans.preparing
        plan, progress = (None, {}) if preparing is None else (preparing.plan, dict(preparing.progress))
        model.shown = plans.story.told
        story = plans.story.last(STORY)
        name, in_flight = model.served.name, self._in_flight
        return ShowPlan(name, model.active, plan, model.latest, model.error, progress, story, in_flight)

    # -- what has become possible ---------------------------------------------------------------------------------

    def pump(self, model: ModelState, now: float) -> list[CoordinatorCommand]:
        """Release plans whose last run has ended, and ask devices to prepare the next one."""
        out: list[CoordinatorCommand] = []
        plans = model.plans
        for record in plans.retiring:
            if not any(r.epoch == record.epoch for r in model.runs.values()):
                plans.idle(record, now)
                out += self._release(record.plan)
        preparing = plans.preparing
        if preparing is not None and preparing.state == "swapping" and not plans.retiring:
            plans.room(preparing, now)
        if preparing is not None and preparing.state == "preparing" and preparing.asked_s == float("-inf"):
            out += self._ask(model, preparing, now)
        return out

    def tick(self, model: ModelState, now: float) -> list[CoordinatorCommand]:
        """Give a preparation up in which nothing moves, or ask again those who may not have heard."""
        record = model.plans.preparing
        if record is None or record.state != "preparing":
            return []
        if now - record.progress_s > PREPARE_S:
            waiting = ", ".join(sorted(record.waiting))
            text = f"{waiting} did not get ready for plan {record.epoch} within {PREPARE_S:.0f} s"
            out: list[CoordinatorCommand] = [Note("refused", text)]
            return out + self._failed(model, record, "silent", RemoteError(text + "; see the log there"), now)
        return self._ask(model, record, now) if now > record.heard_s() + ASK_AGAIN_S else []

    def _ask(self, model: ModelState, record: PlanRecord, now: float) -> list[CoordinatorCommand]:
        record.asked_s = now
        served = model.served
        spec = served.spec.to_dict()
        plan, foreseen = record.plan.to_dict(), model.foreseen()
        message = messages.Prepare(record.txn, plan, spec, served.manifest, self._in_flight, *foreseen)
        return [self.tell(d, message) for d in record.plan.devices if d in record.waiting]

    def _release(self, plan: Plan) -> list[CoordinatorCommand]:
        txn = self.next_txn()
        return [self.tell(d, messages.Release(txn, plan.model, plan.epoch)) for d in plan.devices]

    # -- what devices say -----------------------------------------------------------------------------------------

    def heard(
        self, model: ModelState, device: str, message: messages.Ready | messages.Failed | messages.Progress, now: float
    ) -> list[CoordinatorCommand]:
        """Take a device's word about a preparation; one about a preparation that is over changes nothing."""
        record = model.plans.preparing
        if record is None or record.state != "preparing" or record.txn != message.txn:
            return []
        record.progress_s = now
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

    def _activate(self, model: ModelState, record: PlanRecord, now: float) -> list[CoordinatorCommand]:
        model.plans.ready(record, now)
        model.refusals = 0
        plan = record.plan
        activate = messages.Activate(self.next_txn(), plan.model, plan.epoch)
        note = Note("activated", f"plan {plan.epoch} of {plan.model}: {plan.reason}")
        return [*(self.tell(d, activate) for d in plan.devices), note, self.show(model)]

    def _refused(
        self, model: ModelState, record: PlanRecord, device: str, message: messages.Failed, now: float
    ) -> list[CoordinatorCommand]:
        plans = model.plans
        out: list[CoordinatorCommand] = [Note("refused", f"{device} refused plan {message.epoch}: {message.text}")]
        if message.code != "memory":
            error = RemoteError(f"{device} cannot prepare the plan: {message.text}")
            return out + self._failed(model, record, "refused", error, now)
        if plans.standing is not None or plans.retiring:
            # Old and new do not fit side by side: finish what runs, give the old plan up, then prepare again. After
            # that there is no old plan, so a second refusal makes the next question tighter.
            out += self._release(record.plan)
            plan = replace(record.plan, epoch=self._next_epoch())
            plans.lacks_memory(record, plan, self.next_txn(), now, f"{device} refused it")
            return [*out, self.show(model)]
        pins = plans.pins
        out += [*self.abandon(model, record, "refused", now, message.text), self.show(model)]
        # Each refusal makes the next question tighter, so this ends.
        model.spare[device] = model.spare.get(device, 0) + max(message.missing_bytes, 1 << 20)
        plans.want(now + SETTLE_S, now, f"{device} lacks memory", pins=pins, forced=True)
        return out

    # -- what does not come about ---------------------------------------------------------------------------------

    def abandon(
        self, model: ModelState, record: PlanRecord, event: Literal["refused", "silent", "lost"], now: float, why: str
    ) -> list[CoordinatorCommand]:
        """Give up a plan on its way."""
        model.plans.give_up(record, event, now, why)
        return self._release(record.plan)

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
        pins, next_one = plans.pins, plans.wanted
        out = [*self.abandon(model, record, event, now, str(error)), self.show(model)]
        model.refusals += 1
        if model.refusals < REFUSALS:
            plans.want(now + SETTLE_S, now, "a preparation failed", pins=pins, forced=True)
            return out
        out += self.no_plan(model, record.pins, error, now)
        if next_one is None or next_one.pins == record.pins:
            plans.want(now + RETRY_S, now, f"{model.refusals} preparations failed", forced=True)
        return out

    def no_plan(self, model: ModelState, pins: Pins, error: HeptiError, now: float) -> list[CoordinatorCommand]:
        """Refuse the requests that a plan under these pins was for; what was there before takes their place."""
        plans = model.plans
        own = pins == plans.pinned
        idle = plans.active is None
        waiting = [j for j, _ in model.queue if j.pins == pins or (own and idle and j.pins is None)]
        if idle and own:
            model.error = error
        elif idle and plans.wanted is None:
            plans.want(now, now, "a request's pins led to no plan", pins=plans.pinned)
        out: list[CoordinatorCommand] = [Note("no_plan", str(error))]
        for job in waiting:
            out += self._requests.end(model, job, error)
        if (standing := plans.standing) is not None and standing.state == "suspect":
            plans.retire(standing, "no plan", now, str(error))
        return [*out, self.show(model)]

    def suspect(self, model: ModelState, plan: Plan, now: float) -> list[CoordinatorCommand]:
        """Prepare a plan anew under which a run never ended.

        A device may have lost its part of it unnoticed (a broker that restarts swallows wills and subscriptions). The
        old epoch stays resident meanwhile, so that devices that have its weights need not load them again.
        """
        record = model.plans.active
        if record is None or record.plan is not plan:
            return []
        model.plans.suspect(record, now, "a run never ended")
        model.plans.want(now, now, f"a run under {record.epoch} never ended", forced=True)
        return [self.show(model)]
