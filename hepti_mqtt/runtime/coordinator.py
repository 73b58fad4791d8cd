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

from hepti_mqtt.cluster import Cluster, profile_from_caps
from hepti_mqtt.errors import HeptiError, PlanError, RemoteError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Question
from hepti_mqtt.runtime.commands import Publish
from hepti_mqtt.runtime.coordination import (
    Connection,
    CoordinatorCommand,
    CoordinatorEvent,
    DeviceCaps,
    DeviceHeartbeat,
    DeviceStatus,
    Note,
    Pin,
    SendTiles,
    Served,
    ShowPlan,
    Solve,
    Solved,
    Submit,
    Tick,
    UpFrame,
    UpMessage,
)
from hepti_mqtt.runtime.dispatcher import Dispatcher
from hepti_mqtt.runtime.flight import Pins
from hepti_mqtt.runtime.membership import Membership
from hepti_mqtt.runtime.model_state import ModelState, Preparing, same_division
from hepti_mqtt.simulate import Naming
from hepti_mqtt.spec import RequestShape
from hepti_mqtt.wire import messages
from hepti_mqtt.wire.topics import Topics

SETTLE_S: Final = 1.0  # after a join, wait for others that come up with it
RETURN_S: Final = 5.0  # when the last device is lost, it has so long to come back before requests are refused
ASK_AGAIN_S: Final = 5.0  # a Prepare may go to a connection that is just gone; a device that has it loses nothing
PREPARE_S: Final = 120.0  # without any progress for so long, a preparation is given up
REFUSALS: Final = 3  # preparations in a row that fail for another reason than memory, then requests are refused ...
RETRY_S: Final = 30.0  # ... and the next search waits so long
IN_USE_S: Final = 60.0  # a model that was not asked for so long is not planned again for what has drifted
SHOW_S: Final = 1.0  # between two records that differ in progress alone
WORTH: Final = 0.93  # a new plan must be expected to take less than this part of the running one's time


class CoordinatorSession:
    """The state machine of the planner; `boot` is its boot counter, in_flight the runs at once per model.

    broker_bytes_per_s: rate of the broker's own link, None for that of the fastest device's.
    """

    def __init__(
        self,
        site: str,
        boot: int,
        served: tuple[Served, ...],
        in_flight: int = 2,
        broker_bytes_per_s: float | None = None,
    ) -> None:
        self.site = site
        self.topics = Topics(site)
        self.boot = boot
        self.in_flight = in_flight
        self.membership = Membership(broker_bytes_per_s)
        self.counters: Counter[str] = Counter()
        self._models = {s.name: ModelState(s, s.pins) for s in served}
        self._number = 0
        self._txn = 0
        self._requests = Dispatcher(self.topics, self._models, in_flight, self.counters)
        self._online = True
        self._begun = False
        self._handlers: Mapping[type, Callable[..., list[CoordinatorCommand]]] = {
            DeviceStatus: self._status,
            DeviceCaps: self._caps,
            DeviceHeartbeat: self._heartbeat,
            UpMessage: self._message,
            UpFrame: self._requests.frame,
            Submit: lambda event, now: self._requests.submit(event.job, now),
            Solved: self._solved,
            Pin: self._pin,
            Connection: self._connection,
            Tick: self._tick,
        }

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorCommand]:
        """Take one event and return the commands that follow from it."""
        if not self._begun:  # if no device comes the search says so, and requests do not wait for ever
            self._begun = True
            for model in self._models.values():
                model.solve_at = now + SETTLE_S
        out = self._handlers[type(event)](event, now)
        for model in self._models.values():
            out += self._pump(model, now)
        return out

    def plan(self, model: str) -> Plan | None:
        """Return the active plan of a model."""
        return self._models[model].active

    def basis(self, model: str) -> tuple[Plan, Cluster] | None:
        """Return the active plan of a model with the measurements that it was chosen by."""
        state = self._models[model]
        return None if state.active is None else (state.active, state.cluster())

    def check(self) -> None:
        """Raise AssertionError if an invariant of the session is broken; tests call it after every event."""
        for model in self._models.values():
            live = {p.epoch for p in (model.active, model.suspect, *model.retiring.values()) if p is not None}
            assert all(r.epoch in live and not r.job.over for r in model.runs.values())
            assert len({(id(r.job), r.chunk) for r in model.runs.values()}) == len(model.runs)
            assert model.active is None or model.active.epoch not in model.retiring
            assert model.active is None or set(model.active.devices) <= set(self.membership.usable())
            assert model.preparing is None or model.solving is None
            assert not model.queue or model.hopeful(), "requests wait for nothing"

    # -- membership -----------------------------------------------------------------------------------------------

    def _status(self, event: DeviceStatus, now: float) -> list[CoordinatorCommand]:
        return self._changed(event.device, self.membership.status(event.device, event.status, now), now)

    def _caps(self, event: DeviceCaps, now: float) -> list[CoordinatorCommand]:
        try:
            profile_from_caps(event.device, event.caps.curves, event.caps.memory_budget_bytes, 1.0)
        except (KeyError, TypeError, ValueError) as exc:
            self.counters["foreign_caps"] += 1
            return [Note("refused", f"caps of {event.device} cannot be read ({exc!r}); update the agent")]
        return self._changed(event.device, self.membership.caps(event.device, event.caps), now)

    def _heartbeat(self, event: DeviceHeartbeat, now: float) -> list[CoordinatorCommand]:
        if self._loading():
            self.membership.loading(now)
        return self._changed(event.device, self.membership.heartbeat(event.device, event.heartbeat, now), now)

    def _loading(self) -> bool:
        return any(model.preparing is not None for model in self._models.values())

    def _changed(self, device: str, change: str | None, now: float) -> list[CoordinatorCommand]:
        if change == "joined":
            for model in self._models.values():
                model.spare.pop(device, None)
                model.solve_at = now + SETTLE_S
            # While it was away it may have missed a Release; no plan of ours uses it now, so it holds nothing we need.
            self._txn += 1
            return [self._tell(device, messages.Drain(self._txn)), Note("joined", f"{device} has joined")]
        if change == "left":
            out = self._lost(device, "went offline", now)
            if device in self.membership.usable():  # it came back under a new boot counter at once
                out += self._changed(device, "joined", now)
            return out
        return []

    def _lost(self, device: str, how: str, now: float) -> list[CoordinatorCommand]:
        out: list[CoordinatorCommand] = [Note("left", f"{device} {how}")]
        again_at = now if self.membership.usable() else now + RETURN_S
        for model in self._models.values():
            if model.preparing is not None and device in model.preparing.plan.devices:
                out += self._abandon(model)
                model.solve_at = again_at
            known = (model.active, model.suspect, *model.retiring.values())
            for plan in [p for p in known if p is not None and device in p.devices]:
                if plan is model.suspect:
                    model.suspect = None
                if plan is model.active:
                    model.active, model.solve_at, model.forced = None, again_at, True
                    out.append(self._show(model))
                model.retiring[plan.epoch] = plan
                for run in [r for r in model.runs.values() if r.epoch == plan.epoch]:
                    out += self._requests.again(model, run)
        return out

    # -- planning -------------------------------------------------------------------------------------------------

    def _question(self, model: ModelState, now: float) -> Question:
        served = model.served
        held = Counter(model.spare)
        for other in self._models.values():
            if other is model:
                continue
            decision = other.preparing.decision if other.preparing else other.decision if other.active else None
            held.update(decision.chosen.price.needs if decision else {})
        self._number += 1
        mask = (0,) if served.spec.head.pooling == "mask" else ()
        longest = served.spec.max_tokens
        tokens = longest if served.spec.image is not None else min(model.tokens(), longest)
        return Question(
            naming=Naming(self.site, served.name),
            spec=served.spec,
            cluster=self.membership.cluster(held),
            shape=RequestShape((tokens,), mask_rows=mask),
            epoch=Epoch(self.boot, self._number),
            in_flight=self.in_flight,
            strategy=model.pins.strategy,
            options=model.pins.options,
            devices=model.pins.devices,
            wire=model.pins.wire,
            storage=model.pins.storage,
            packet_bytes=self.membership.packet_bytes(),
            learned=model.experience.learned(now),
        )

    def _pin(self, event: Pin, now: float) -> list[CoordinatorCommand]:
        model = self._models[event.model]
        model.pins = Pins(event.strategy, event.options, event.devices, event.wire, event.storage)
        model.served = replace(model.served, pins=model.pins)
        model.solve_at, model.forced = now, True
        return []

    def _solved(self, event: Solved, now: float) -> list[CoordinatorCommand]:
        model = self._models[event.model]
        if model.solving != event.ticket:
            return []
        model.solving = None
        if model.solve_at is not None:
            return []  # something changed while the search ran: search again
        if event.decision is None:
            return self._no_plan(model, event.error or PlanError("no plan"), now)
        chosen = event.decision.chosen
        if not set(chosen.plan.devices) <= set(self.membership.usable()):
            model.solve_at = now  # a device has left while the search ran
            return []
        model.error, model.latest = None, event.decision
        running = model.active
        model.drift.plan_made(self._observed(model, now, chosen.plan), now)
        if running is not None and (same_division(running, chosen.plan) or self._not_worth(model, event)):
            model.forced, model.active_pins = False, model.pins
            return [self._show(model)]
        model.forced = False
        self._txn += 1
        waiting = set(chosen.plan.devices)
        model.preparing = Preparing(event.decision, chosen.plan, model.pins, self._txn, waiting, now)
        return [Note("replanned", chosen.plan.reason), self._show(model)]

    def _no_plan(self, model: ModelState, error: HeptiError, now: float) -> list[CoordinatorCommand]:
        """Refuse the requests that this search was for; a request's pins then give way to what was there before."""
        own = model.pins == model.served.pins
        idle = model.active is None
        waiting = [j for j, _ in model.queue if j.pins == model.pins or (own and idle and j.pins is None)]
        if not idle:
            model.pins = model.active_pins or model.served.pins
        elif own:
            model.error = error
        else:
            model.pins, model.solve_at = model.served.pins, now
        model.forced = False
        out: list[CoordinatorCommand] = [Note("no_plan", str(error))]
        for job in waiting:
            out += self._requests.end(model, job, error)
        if model.suspect is not None:
            model.retiring[model.suspect.epoch], model.suspect = model.suspect, None
        return [*out, self._show(model)]

    def _not_worth(self, model: ModelState, event: Solved) -> bool:
        assert event.decision is not None
        if model.forced or event.running_s is None:
            return False
        return event.decision.chosen.price.expected_s > WORTH * event.running_s

    def _observed(self, model: ModelState, now: float, chosen: Plan | None = None) -> dict[str, float]:
        """Return what a plan depends on: devices and links, and how far off the predictions of these plans were."""
        observed = {k: v for m in self.membership.usable().values() for k, v in m.observed().items()}
        learned = model.experience.learned(now)
        plans = [p for p in (model.active, chosen) if p is not None]
        return observed | {f"the time of {p.method} on {len(p.devices)}": learned.factor(p) for p in plans}

    def _prepare(self, model: ModelState, now: float) -> list[CoordinatorCommand]:
        preparing = model.preparing
        assert preparing is not None
        if not preparing.sent:
            preparing.sent, preparing.progress_s = True, now
        preparing.asked_s = now
        message = messages.Prepare(
            preparing.txn,
            preparing.plan.to_dict(),
            model.served.spec.to_dict(),
            model.served.manifest,
            self.in_flight,
        )
        return [self._tell(d, message) for d in preparing.plan.devices if d in preparing.waiting]

    def _abandon(self, model: ModelState) -> list[CoordinatorCommand]:
        preparing = model.preparing
        model.preparing = None
        return [] if preparing is None else self._release(preparing.plan)

    def _release(self, plan: Plan) -> list[CoordinatorCommand]:
        self._txn += 1
        return [self._tell(d, messages.Release(self._txn, plan.model, plan.epoch)) for d in plan.devices]

    def _activate(self, model: ModelState, preparing: Preparing) -> list[CoordinatorCommand]:
        old, plan = model.active or model.suspect, preparing.plan
        model.suspect = None
        model.preparing, model.active, model.decision = None, plan, preparing.decision
        model.active_pins, model.refusals = preparing.pins, 0
        if old is not None:
            model.retiring[old.epoch] = old
        self._txn += 1
        activate = messages.Activate(self._txn, plan.model, plan.epoch)
        note = Note("activated", f"plan {plan.epoch} of {plan.model}: {plan.reason}")
        return [*(self._tell(d, activate) for d in plan.devices), note, self._show(model)]

    # -- messages of devices --------------------------------------------------------------------------------------

    def _message(self, event: UpMessage, now: float) -> list[CoordinatorCommand]:
        message, device = event.message, event.device
        if isinstance(message, messages.TileAsk):
            return [SendTiles(message.model, device, message.hashes)] if message.model in self._models else []
        if isinstance(message, messages.RequestFailed):
            return self._requests.failed(device, message)
        if not isinstance(message, messages.Ready | messages.Failed | messages.Progress):
            self.counters["foreign_message"] += 1
            return []
        model = self._models.get(message.model)
        if model is None or model.preparing is None or model.preparing.txn != message.txn:
            return []
        preparing = model.preparing
        preparing.progress_s = now
        if isinstance(message, messages.Progress):
            preparing.progress[device] = (message.done_bytes, message.total_bytes)
            if now - preparing.shown_s < SHOW_S:
                return []
            preparing.shown_s = now
            return [self._show(model)]
        if isinstance(message, messages.Ready):
            preparing.waiting.discard(device)
            return [] if preparing.waiting else self._activate(model, preparing)
        return self._prepare_failed(model, preparing, device, message, now)

    def _prepare_failed(
        self, model: ModelState, preparing: Preparing, device: str, message: messages.Failed, now: float
    ) -> list[CoordinatorCommand]:
        out: list[CoordinatorCommand] = [Note("refused", f"{device} refused plan {message.epoch}: {message.text}")]
        old = model.active or model.suspect
        swappable = old is not None or model.retiring
        if message.code == "memory" and swappable and not preparing.swap:
            # Old and new do not fit side by side: finish what runs, give the old plan up, then prepare again.
            out += self._release(preparing.plan)
            self._number += 1
            plan = replace(preparing.plan, epoch=Epoch(self.boot, self._number))
            self._txn += 1
            model.preparing = Preparing(
                preparing.decision, plan, preparing.pins, self._txn, set(plan.devices), now, swap=True
            )
            if old is not None:
                model.retiring[old.epoch] = old
                model.active = model.suspect = None
            return [*out, self._show(model)]
        out += [*self._abandon(model), self._show(model)]
        if message.code == "memory":  # each refusal makes the next question tighter, so this ends
            model.spare[device] = model.spare.get(device, 0) + max(message.missing_bytes, 1 << 20)
            model.solve_at, model.forced = now + SETTLE_S, True
            return out
        return out + self._refused(model, RemoteError(f"{device} cannot prepare the plan: {message.text}"), now)

    def _refused(self, model: ModelState, error: HeptiError, now: float) -> list[CoordinatorCommand]:
        """Search again after a preparation that failed; after several, requests need not wait any longer."""
        model.refusals += 1
        if model.refusals < REFUSALS:
            model.solve_at, model.forced = now + SETTLE_S, True
            return []
        out = self._no_plan(model, error, now)
        model.solve_at, model.forced = now + RETRY_S, True
        return out

    def _pump(self, model: ModelState, now: float) -> list[CoordinatorCommand]:
        """Do what has become possible: search, prepare, release, dispatch."""
        out: list[CoordinatorCommand] = []
        for epoch, plan in list(model.retiring.items()):
            if not any(r.epoch == epoch for r in model.runs.values()):
                del model.retiring[epoch]
                out += self._release(plan)
        preparing = model.preparing
        if preparing is not None and not preparing.sent and (not preparing.swap or not model.retiring):
            out += self._prepare(model, now)
        model.follow_pins(now)
        due = model.solve_at is not None and now >= model.solve_at
        alone = all(m.solving is None for m in self._models.values())  # searches see what other models will hold
        if due and alone and model.preparing is None:
            model.solve_at = None
            self._txn += 1
            model.solving = self._txn
            out.append(Solve(model.served.name, self._txn, self._question(model, now), model.active))
        return out + self._requests.pump(model, now)

    # -- time -----------------------------------------------------------------------------------------------------

    def _tick(self, _event: Tick, now: float) -> list[CoordinatorCommand]:
        out: list[CoordinatorCommand] = []
        for device in self.membership.overdue(now) if self._online else []:
            out += self._lost(device, "sends no heartbeats", now)
        for model in self._models.values():
            preparing = model.preparing
            if preparing is not None and preparing.sent and now - preparing.progress_s > PREPARE_S:
                waiting = ", ".join(sorted(preparing.waiting))
                text = f"{waiting} did not get ready for plan {preparing.plan.epoch} within {PREPARE_S:.0f} s"
                out += [Note("refused", text), *self._abandon(model)]
                out += self._refused(model, RemoteError(text + "; see the log there"), now)
            elif preparing is not None and preparing.sent and now > preparing.heard_s() + ASK_AGAIN_S:
                out += self._prepare(model, now)
            for run in list(model.runs.values()):
                if self._online and now > run.overdue_s:
                    out.append(Note("overdue", f"a run of {run.plan.model} is overdue; it is issued again"))
                    out += [*self._suspect(model, run.plan, now), *self._requests.again(model, run)]
            out += self._requests.expire(model, now)
            if self._loading():
                model.drift.disturbed(now)
            # A model that nobody asks has no time to gain, and moving its weights would slow the others down.
            in_use = model.active is not None and now - model.asked_s < IN_USE_S
            drifted = model.drift.observe(self._observed(model, now), now) if in_use else None
            busy = any(x is not None for x in (model.solve_at, model.solving, model.preparing))
            if drifted is not None and not busy:
                out.append(Note("drift", drifted))
                model.solve_at = now
        return out

    def _suspect(self, model: ModelState, plan: Plan, now: float) -> list[CoordinatorCommand]:
        """Prepare a plan anew under which a run never ended.

        A device may have lost its part of it unnoticed (a broker that restarts swallows wills and subscriptions). The
        old epoch stays resident meanwhile, so that devices that have their weights need not load them again.
        """
        if plan is not model.active:
            return []
        model.suspect, model.active = plan, None
        model.solve_at, model.forced = now, True
        return [self._show(model)]

    def _connection(self, event: Connection, now: float) -> list[CoordinatorCommand]:
        self._online = event.online
        if event.online:  # nobody could be heard meanwhile: everyone gets the usual time to be heard again
            self.membership.seen(now)
        return [self._show(model) for model in self._models.values()] if event.online else []

    def _tell(self, device: str, message: messages.Message) -> Publish:
        return Publish(self.topics.command(device), messages.encode(message), 1)

    def _show(self, model: ModelState) -> ShowPlan:
        plan, progress = (model.preparing.plan, dict(model.preparing.progress)) if model.preparing else (None, {})
        return ShowPlan(model.served.name, model.active, plan, model.latest, model.error, progress)
