"""CoordinatorSession: the planner's part in the protocol, without sockets, threads or clocks.

Membership changes and drift lead to a search (`Solve`, done by the shell), the search to a prepared plan, the plan to
an epoch under which requests are dispatched. A request ends with the right answer or an error, whatever is lost
meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from hepti_mqtt import __version__
from hepti_mqtt.errors import PlanError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Question
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.coordinator.fleet import Introductions, Membership, Suspicion, believed, caps_refused
from hepti_mqtt.runtime.coordinator.interface import (
    Connection,
    CoordinatorCommand,
    CoordinatorEvent,
    DeviceCaps,
    DeviceHeartbeat,
    DeviceStatus,
    Note,
    Pin,
    SendTiles,
    Solve,
    Solved,
    Submit,
    Tick,
    Unreadable,
    UpFrame,
    UpMessage,
    users_last,
)
from hepti_mqtt.runtime.coordinator.models import ModelState, Slots
from hepti_mqtt.runtime.coordinator.plans import Served, Standing
from hepti_mqtt.runtime.coordinator.rollout import SETTLE_S, SOON_S, Rollout, Standby, question_of
from hepti_mqtt.runtime.coordinator.scheduler import Dispatcher
from hepti_mqtt.runtime.machinery import Story

COMING_S: Final = 5.0  # between two searches that find no plan while devices may come


class CoordinatorSession:
    """The state machine of the planner; `boot` is its boot counter, in_flight the runs at once per model.

    broker_bytes_per_s: rate of the broker's own link, None for that of the fastest device's. secret: random bytes from
    which the tokens follow that peers let each other in with; without it nobody is asked to.
    """

    def __init__(
        self,
        site: str,
        boot: int,
        served: tuple[Served, ...],
        in_flight: int = 2,
        broker_bytes_per_s: float | None = None,
        secret: bytes | None = None,
    ) -> None:
        self.site = site
        self.topics = Topics(site)
        self.boot = boot
        self.in_flight = in_flight
        self.membership = Membership(broker_bytes_per_s, mesh=secret is not None)
        self.counters: Counter[str] = Counter()
        self.slots = Slots(served, self.counters)
        self._online, self._begun, self._number = True, False, 0
        self._requests = Dispatcher(self.topics, self.slots, in_flight, self.counters)
        introduce = Introductions(secret, self.membership).of
        self._rollout = Rollout(self.topics, self.slots, in_flight, self._requests, self._next_epoch, introduce)
        self._suspicion = Suspicion(self.slots, self.membership, self._rollout.probe)
        self._standby = Standby(self.slots, self.membership, self._rollout, self._question)
        self._handlers: Mapping[type, Callable[..., list[CoordinatorCommand]]] = {
            DeviceStatus: self._status,
            DeviceCaps: self._caps,
            DeviceHeartbeat: self._heartbeat,
            UpMessage: self._message,
            UpFrame: self._frame,
            Submit: self._submit,
            Solved: self._solved,
            Pin: self._pin,
            Unreadable: self._rollout.unreadable,
            Connection: self._connection,
            Tick: self._tick,
        }

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorCommand]:
        """Take one event and return the commands that follow from it."""
        if not self._begun:  # if no device comes the search says so, and requests do not wait for ever
            self._begun = True
            for model in self.slots:
                model.plans.want(now + SETTLE_S, now, "the planner has started")
        out = self._handlers[type(event)](event, now)
        return users_last(out + self._pump(now) + self._standby.handle(event, now))

    @property
    def due_s(self) -> float:
        """Return when a Tick is needed for requests that wait for others; infinity if none does."""
        return self._requests.due_s

    def plan(self, model: str) -> Plan | None:
        """Return the active plan of a model, as the planner's user wants it."""
        return self.slots.own(model).active

    def snapshot(self) -> tuple[Standing, ...]:
        """Return the plans that are active or being prepared, as values that any thread may keep and read."""
        records = (r for model in self.slots for r in (model.plans.active, model.plans.preparing))
        return tuple(standing for r in records if r is not None for standing in r.standing())

    def stories(self) -> list[Story]:
        """Return the story of each model's plans."""
        return [model.plans.story for model in self.slots.models()]

    def check(self) -> None:
        """Raise AssertionError if an invariant of the session is broken; tests call it after every event."""
        for model in self.slots:
            assert model.active is None or set(model.active.devices) <= set(self.membership.usable())
        self.slots.check(self.in_flight)

    # -- membership -----------------------------------------------------------------------------------------------

    def _known(self, device: str) -> bool:
        """Return whether there is room for a device; what it says is dropped and counted if there is none."""
        self.counters["devices_beyond"] += not (room := self.membership.room(device))
        return room

    def _status(self, event: DeviceStatus, now: float) -> list[CoordinatorCommand]:
        if not self._known(event.device):
            return []
        return self._changed(event.device, self.membership.status(event.device, event.status, now), now)

    def _caps(self, event: DeviceCaps, now: float) -> list[CoordinatorCommand]:
        if not self._known(event.device):
            return []
        wrong = caps_refused(event.device, event.caps.curves, event.caps.memory_budget_bytes)
        if wrong is not None:
            self.counters["foreign_caps"] += 1
            return self._doubt(event.device, f"caps of {event.device} are refused ({wrong}); update the agent there")
        return self._changed(event.device, self.membership.caps(event.device, event.caps), now)

    def _heartbeat(self, event: DeviceHeartbeat, now: float) -> list[CoordinatorCommand]:
        device = event.device
        if not self._known(device):
            return []
        if self._loading():
            self.membership.loading(now)
        heartbeat, wrong = believed(event.heartbeat)
        changed = self._changed(device, self.membership.heartbeat(device, heartbeat, now), now)
        changed += self._requests.cut_short(self.membership.back) if self._online else []
        if wrong is None:
            return changed
        self.counters["implausible_heartbeat"] += 1
        text = f"a heartbeat of {device} is not believed: {wrong}; restart the agent there"
        return changed + self._doubt(device, text)

    def _doubt(self, device: str, text: str) -> list[CoordinatorCommand]:
        """Tell once of a device that says what cannot be."""
        member = self.membership.member(device)
        told, member.doubted = member.doubted, True
        return [] if told else [Note("refused", text)]

    def _loading(self) -> bool:
        return self._standby.loading or any(model.plans.preparing is not None for model in self.slots)

    def _changed(self, device: str, change: str | None, now: float) -> list[CoordinatorCommand]:
        if change == "joined":
            for model in self.slots:
                model.falls.back(device, self.membership.member(device).boot, now)
                model.spare.pop(device, None)
                if not model.pinned or model.in_use(now):
                    model.plans.want(now + SETTLE_S, now, f"{device} has joined", soon_s=now + SOON_S)
            # While it was away it may have missed a Release; no plan of ours uses it now, so it holds nothing we need.
            drain = messages.Drain(self._rollout.next_txn())
            return [self._rollout.tell(device, drain), Note("joined", f"{device} has joined")]
        if change == "starting":
            for model in self.slots:  # requests wait for it; those that have come before it were refused
                if model.active is None and (not model.pinned or model.in_use(now)):
                    soon_s = now + SOON_S if self.membership.usable() else None
                    model.plans.want(now + SETTLE_S, now, f"{device} is starting", soon_s=soon_s)
            return [Note("starting", f"{device} is starting")]
        if change == "left":
            out = self._lost(device, "went offline", now)
            if device in self.membership.usable():  # it came back under a new boot counter at once
                out += self._changed(device, "joined", now)
            return out
        return []

    def _lost(self, device: str, how: str, now: float) -> list[CoordinatorCommand]:
        out: list[CoordinatorCommand] = [Note("left", f"{device} {how}")]
        boot = self.membership.left(device, now)
        for model in self.slots:
            plans, why = model.plans, f"{device} {how}"
            preparing = plans.preparing
            for record in (plans.active, preparing):
                if boot is not None and record is not None and device in record.plan.devices:
                    needed_bytes = record.decision.chosen.price.needs.get(device, 0)
                    model.falls.gone(device, boot, needed_bytes, record.heard_s(), now)
            if preparing is not None and device in preparing.plan.devices:
                out += self._rollout.abandon(model, preparing, "lost", now, why)
                plans.want(now, now, why)
            for record in [r for r in plans.serving if device in r.plan.devices]:
                was_active, lost = record is plans.active, record.plan.of(device).epoch
                lessened = self._rollout.lessen(model, record, device, now, why)
                if lessened is None:
                    plans.retire(record, "lost", now, why)
                out += lessened or []
                if was_active:
                    plans.want(now, now, why, forced=True)
                    out.append(self._rollout.show(model))
                for run in [r for r in model.runs.values() if r.epoch == lost]:
                    out += self._requests.lost(model, run, device, now)
        return out

    # -- planning -------------------------------------------------------------------------------------------------

    def _question(self, model: ModelState, now: float) -> Question:
        epoch = self._next_epoch()
        return question_of(self.site, self.slots, self.membership, model, epoch, self.in_flight, now)

    def _next_epoch(self) -> Epoch:
        self._number += 1
        return Epoch(self.boot, self._number)

    def _pin(self, event: Pin, now: float) -> list[CoordinatorCommand]:
        self.slots.own(event.model).plans.pin(event.pins, now)
        return []

    # -- requests -------------------------------------------------------------------------------------------------

    def _submit(self, event: Submit, now: float) -> list[CoordinatorCommand]:
        job = event.job
        turned_away = self._requests.turned_away(job)
        if turned_away is not None:
            return turned_away
        model, out = self._rollout.slot_for(job, now)
        return out if model is None else out + self._requests.submit(model, job, now)

    def _search(self, model: ModelState, now: float) -> list[CoordinatorCommand]:
        """Begin the search that is due."""
        plans, wanted = model.plans, model.plans.wanted
        if wanted is None or plans.preparing is not None:
            return []
        if now < (wanted.soon_s if model.unserved else wanted.due_s):
            return []
        hurried = plans.pins.free and model.unserved
        # One at a time, because searches see what others will hold; but requests without a plan wait for no other.
        alone = all(slot.plans.searching is None for slot in self.slots)
        awaited = self.membership.awaited(plans.pins.devices or (), now)
        if awaited or not (alone or hurried) or not self.slots.may_search(model, now):
            return []
        if plans.searching is not None:
            plans.ended(plans.searching, "outdated", now, "requests wait")
        model.search_begun(self.membership.observed(), now)
        ticket, question = self._rollout.next_txn(), self._standby.question(model, hurried, now)
        if trial := wanted.cause == "trial":
            question = model.tries(question)
        plans.search(ticket, question.epoch, now)
        return [Solve(model.name, ticket, question, model.active, hurried, model.last, model.stands(wanted), trial)]

    def _solved(self, event: Solved, now: float) -> list[CoordinatorCommand]:
        model = self.slots.searching(event.model, event.ticket)
        if model is None or model.plans.searching is None:
            return []
        plans, search = model.plans, model.plans.searching
        serves = event.hurried and model.unserved and plans.pins.free  # and the whole search, which is wanted, follows
        if plans.wanted is not None and not serves:  # something changed while the search ran: search again
            plans.ended(search, "outdated", now)
            return []
        if event.decision is None:
            if model.active is None and (awaited := self.membership.may_come(now)):
                plans.want(now + COMING_S, now, f"there is no plan yet; {awaited} may come", forced=search.forced)
                plans.ended(search, "no plan", now, str(event.error))
                return []
            error = event.error or PlanError("no plan")
            if refused := self.membership.refused():
                error = PlanError("; ".join([str(error), *refused]))
            plans.ended(search, "no plan", now, str(error))
            return self._rollout.no_plan(model, error, now)
        chosen = event.decision.chosen.plan
        if not set(chosen.devices) <= set(self.membership.usable()):
            plans.want(now, now, "a device has left while the search ran")
            plans.ended(search, "outdated", now)
            return []
        model.error = None
        model.plan_made(chosen, now)
        if kept := model.keeps(event.decision, search.forced or event.worth_it(model.worth(chosen, now))):
            plans.ended(search, "kept", now, f"plan {kept} is as good")
            return [self._rollout.show(model)]
        # Replicas are plans of their own to their devices, so each has an epoch of its own.
        numbered = replace(event.decision.chosen, plan=chosen.under(chosen.epoch, self._next_epoch))
        plans.found(search, replace(event.decision, chosen=numbered), self._rollout.next_txn(), now)
        if event.hurried:
            plans.want(now + SETTLE_S, now, "the search was hurried")
        return [Note("replanned", chosen.reason), self._rollout.show(model)]

    # -- messages of devices --------------------------------------------------------------------------------------

    def _message(self, event: UpMessage, now: float) -> list[CoordinatorCommand]:
        message, device = event.message, event.device
        if isinstance(message, messages.TileAsk):
            return [SendTiles(message.model, device, message.hashes)] if message.model in self.slots else []
        return self._changed(device, self.membership.spoke(device, now), now) + self._said(device, message, now)

    def _frame(self, event: UpFrame, now: float) -> list[CoordinatorCommand]:
        change = self.membership.spoke(event.device, now, served=event.frame.kind == "done")
        return self._changed(event.device, change, now) + self._requests.frame(event, now)

    def _said(self, device: str, message: messages.Message, now: float) -> list[CoordinatorCommand]:
        if isinstance(message, messages.RequestFailed):
            return self._requests.failed(device, message, now)
        if isinstance(message, messages.TaskDone):
            return self._requests.bags.done(device, message, now)
        if not isinstance(message, messages.Ready | messages.Failed | messages.Progress):
            self.counters["foreign_message"] += 1
            return []
        if isinstance(message, messages.Failed) and message.code == "mesh":
            self.membership.unheard(device, message.peers, now)
            return self._rollout.unheard(message, now)
        if isinstance(message, messages.Failed) and message.code == "forgotten":
            return self._rollout.forgotten(message, now)
        self._rollout.moved(device, message, now)
        model = self.slots.preparing(message.model, message.txn)
        if model is None:
            return []
        record = model.plans.preparing
        if way := self._standby.make_way(record, device, message, now):
            return way
        if isinstance(message, messages.Ready) and record is not None and not record.derived_by(device, message):
            why = f"{self.membership.refuse(device)}, the planner {__version__}: install one version on both"
            return [Note("refused", why), *self._lost(device, "is of another version", now)]
        return self._rollout.heard(model, device, message, now)

    def _pump(self, now: float) -> list[CoordinatorCommand]:
        """Do what has become possible: release, prepare, dispatch, search."""
        out: list[CoordinatorCommand] = []
        for model in self.slots:
            model.queue.forget_over()
            out += self._rollout.release_idle(model, now)
        for slot in self.slots.pinned():
            if slot.idle and slot.plans.standing is None and slot.plans.preparing is None:
                out += self._rollout.close(slot, now, "there is no plan, and nobody waits for one")
        for model in self.slots:
            out += self._rollout.pump(model, now)
        for model in self.slots.models():
            out += self._requests.pump(model.name, now)
        for model in self.slots:
            out += self._search(model, now)
        return out

    # -- time -----------------------------------------------------------------------------------------------------

    def _tick(self, event: Tick, now: float) -> list[CoordinatorCommand]:
        out: list[CoordinatorCommand] = [] if event.behind or not self._online else self._silent(now)
        out += self._requests.bags.tick(now)
        for model in self.slots:
            out += self._rollout.tick(model, now)
            for run in list(model.runs.values()):
                if self._online and now > run.overdue_s:
                    out.append(Note("overdue", f"a run of {run.plan.model} is overdue; it is issued again"))
                    out += [*self._rollout.suspect(model, run.plan, now), *self._requests.again(model, run)]
            out += self._requests.expire(model, now)
            if rested := model.falls.rested(now):
                model.plans.want(now, now, f"{', '.join(rested)} may get more again")
            if self._loading():
                model.drift.disturbed(now)
            if (found := model.look_again(self.membership.telling(model.used, model.drift.planned), now)) is not None:
                out.append(Note(*found))
                model.plans.want(now, now, found[1], cause=found[0])
        for model in self.slots.models():
            if model.shown != model.plans.story.told:
                out.append(self._rollout.show(model))
        if (text := self.slots.illegal()) is not None:
            out.append(Note("illegal_step", text))
        return out

    def _silent(self, now: float) -> list[CoordinatorCommand]:
        """Go on without whoever has stopped beating; ask for a word where something is overdue, or go on without."""
        lost = [self._lost(device, "sends no heartbeats", now) for device in self.membership.overdue(now)]
        out, silent = self._suspicion.tick(now)
        out = [command for commands in lost for command in commands] + out
        for device, how, mute in silent:
            self.membership.put_aside(device, now, mute)
            out += self._lost(device, how, now)
        return out

    def _connection(self, event: Connection, now: float) -> list[CoordinatorCommand]:
        self._online = event.online
        self._requests.cut()
        if event.online:  # nobody could be heard meanwhile: everyone gets the usual time to be heard again
            self.membership.seen(now)
        return [self._rollout.show(model) for model in self.slots.models()] if event.online else []
