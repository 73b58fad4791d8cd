"""A device's part in the protocol without sockets, threads or clocks: `WorkerSession` and `MeshRoutes`.

A plan is ready after the device has joined all peers that it reads from. The device reports unreachable peers to the
planner, and the next plan relays their frames over the broker. A connection that is lost later loses frames, so the
planner retries the runs that wait for that peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from hepti_mqtt.core.errors import HeptiError, PlanError, WireError
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.cost.memory import weights_bytes
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import Frame, TensorArrival
from hepti_mqtt.protocol.messages import Peer, Prepare
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.runtime.worker import interface
from hepti_mqtt.runtime.worker.executor import OutgoingTensor, Step
from hepti_mqtt.runtime.worker.interface import Command
from hepti_mqtt.runtime.worker.kv_caches import KeptCache
from hepti_mqtt.runtime.worker.residents import (
    EndEvent,
    Place,
    PlanKey,
    ResidentPlan,
    ResidentPlans,
    check_plan,
    plan_key,
)
from hepti_mqtt.runtime.worker.runs import WorkerRuns

JOIN_S: Final = 5.0  # to connect to a peer
WELCOME_S: Final = 20.0  # for a peer that answers but has not received its Prepare
RETURN_S: Final = 2.0  # to restore a lost connection


@dataclass(slots=True)
class _PlanRoutes:
    """The mesh routes of one plan."""

    sources: Mapping[str, Peer]  #: peers by name
    give_up_s: dict[str, float]  #: deadlines of the peers that are not joined
    welcome_by_s: float  #: deadline of peers that answer but refuse


class MeshRoutes:
    """The mesh routes of all plans on one device."""

    def __init__(self) -> None:
        self._admitted: dict[PlanKey, frozenset[str]] = {}  # peers that may read here, by plan
        self._routes: dict[PlanKey, _PlanRoutes] = {}

    def admit(self, key: PlanKey, message: Prepare) -> list[Command]:
        """Admit the peers of a Prepare immediately, because they may be ready before this device."""
        guests = tuple(peer for peer in message.peers if peer.token_in)
        if not guests:
            return []
        self._admitted[key] = frozenset(peer.device for peer in guests)
        return [interface.AllowPeers(*key, guests)]

    def join(self, key: PlanKey, peers: Iterable[Peer], now: float) -> list[Command]:
        """Connect to the peers that a plan reads from."""
        sources = {peer.device: peer for peer in peers}
        if not sources:
            return []
        self._admitted.setdefault(key, frozenset())
        self._routes[key] = _PlanRoutes(sources, dict.fromkeys(sources, now + JOIN_S), now + WELCOME_S)
        return [interface.JoinPeers(*key, tuple(sources.values()))]

    def leave(self, key: PlanKey) -> list[Command]:
        """Remove the routes of an ended plan."""
        self._routes.pop(key, None)
        return [] if self._admitted.pop(key, None) is None else [interface.LeavePeers(*key)]

    def complete(self, key: PlanKey) -> bool:
        """Return whether every peer that a plan reads from is joined."""
        routes = self._routes.get(key)
        return routes is None or not routes.give_up_s

    def record_joined(self, peer: str, key: PlanKey) -> bool:
        """Record a joined peer; return whether it was missing."""
        routes = self._routes.get(key)
        return routes is not None and routes.give_up_s.pop(peer, None) is not None

    def record_refused(self, peer: str, key: PlanKey) -> None:
        """Record a peer that answers but does not admit this device yet."""
        routes = self._routes.get(key)
        if routes is not None and peer in routes.give_up_s:
            routes.give_up_s[peer] = max(routes.give_up_s[peer], routes.welcome_by_s)

    def record_lost(self, peer: str, now: float) -> list[PlanKey]:
        """Record a lost peer; return the plans that read from it."""
        keys = [k for k, r in self._routes.items() if peer in r.sources and peer not in r.give_up_s]
        for key in keys:
            self._routes[key].give_up_s[peer] = now + RETURN_S
        return keys

    def deadline(self) -> float:
        """Return when `take_unreachable` has something to report; infinity if all peers are joined."""
        deadline = inf
        for routes in self._routes.values():
            if routes.give_up_s:  # rarely; this runs between ops
                deadline = min(deadline, *routes.give_up_s.values())
        return deadline

    def take_unreachable(self, now: float) -> dict[PlanKey, tuple[str, ...]]:
        """Return the peers that have not joined in time, by plan, each peer once."""
        unreachable = dict[PlanKey, tuple[str, ...]]()
        for key, routes in self._routes.items():
            late = [peer for peer, at in routes.give_up_s.items() if at <= now]
            for peer in late:
                routes.give_up_s[peer] = inf
            if late:
                unreachable[key] = tuple(sorted(late))
        return unreachable

    def plans_read_by(self, peer: str) -> list[PlanKey]:
        """Return the plans under which a peer reads from this device."""
        return [key for key, guests in self._admitted.items() if peer in guests]


# ----------------------------------------------------------------------------------------------------------------------
# The session: the shell passes it events with the time, runs its steps, and executes its commands.


MAX_BEING_ANALYSED: Final = 32


class WorkerSession:
    """The state machine of one agent; memory_bytes: budget of weights and live buffers."""

    def __init__(self, device: str, site: str, memory_bytes: int) -> None:
        self.device = device
        self.topics = Topics(site)
        self.memory_bytes = memory_bytes
        self.counters: Counter[str] = Counter()  #: dropped frames and other faults, by reason
        self.plans = ResidentPlans(device, self.counters)
        self._mesh = MeshRoutes()
        self._being_analysed: dict[PlanKey, messages.Prepare] = {}  # last Prepare of each plan being analysed
        self._doubted: set[PlanKey] = set()  # plans being analysed that the planner may have released
        self.runs = WorkerRuns(device, self.topics, self.counters)
        self.next_step, self.fail_step = self.runs.next_step, self.runs.fail_step
        self._illegal = 0  # illegal steps that were logged

    @property
    def deadline(self) -> float:
        """Return when the session needs a `Tick`, infinity if never."""
        return self._mesh.deadline()

    # -- events ---------------------------------------------------------------------------------------------------

    def handle(self, event: interface.WorkerEvent, now: float) -> list[Command]:
        """Handle an event; return its commands."""
        if isinstance(event, TensorArrival):
            if self.runs.try_fill(event):
                return []
            event = interface.FrameIn(event.frame())
        if isinstance(event, interface.FrameIn):
            out = self._frame(event.frame, now)
            if not out and event.frame.kind == "tensor":
                return out  # a tensor is the most frequent event, and changes no plan or build order
        elif isinstance(event, interface.MessageIn):
            out = self._message(event.message, now)
        elif isinstance(event, interface.LoadingEvent):
            out = self._handle_loading(event, now)
        elif isinstance(event, interface.CachesRead):
            out = self._restore_saved(event)
        elif isinstance(event, interface.PrepareAnalysed):
            out = self._handle_analysed(event, now)
        elif isinstance(event, interface.ProgramBuilt):
            out = self._built(event, now)
        elif isinstance(event, interface.PeerEvent):
            out = self._peer(event, now)
        elif isinstance(event, interface.Tick):
            late = self._mesh.take_unreachable(now)
            out = [c for key, peers in late.items() for c in self._report_unreachable(key, peers, now)]
        elif isinstance(event, interface.PlannerLost):
            out = self._release(
                [k for k in (*self.plans, *self._being_analysed) if k[1].boot != event.boot], "planner lost", now
            )
            self.runs.reset()
        else:
            out = []
            self._doubted |= self._being_analysed.keys()
            self.plans.step_all(self.plans, "doubt", now, event.why)  # the planner may have released them
        return [*out, *self._unload(), *self.runs.next_build(self.plans.residents())]

    def _message(self, message: messages.Message, now: float) -> list[Command]:
        match message:
            case messages.Prepare():
                return self._prepare(message, now)
            case messages.Activate():
                return self._activate(message, now)
            case messages.Release():
                return self._release([(message.model, message.plan_version)], "release", now)
            case messages.ReleaseAll():
                return self._release([*self.plans, *self._being_analysed], "drain", now)
            case messages.Cancel():
                self.runs.cancel(message.run_id)
            case messages.EndSessions():
                for number in message.sessions:
                    self.runs.sessions.end((message.model, message.plan_version, number))
            case messages.HandOver():
                return self._hand_over(message, now)
            case messages.LeaseTasks():
                return self.runs.handle_lease(message, now)
            case _:
                self.counters["foreign_message"] += 1
        return []

    # -- plans ----------------------------------------------------------------------------------------------------

    def _prepare(self, message: messages.Prepare, now: float) -> list[Command]:
        try:
            key = plan_key(message)
        except WireError:
            self.counters["bad_prepare"] += 1
            raise
        if (resident := self.plans.get(*key)) is not None:
            resident.transaction_id = message.transaction_id
            return self._ready_if_complete(resident) or [self._progress(message.transaction_id, key)]
        if key in self._being_analysed:
            self._doubted.discard(key)
            self._being_analysed[key] = message
            return [self._progress(message.transaction_id, key)]
        if (renewed := self.plans.take_ended(message, self.topics, self.memory_bytes)) is not None:
            return [*self._mesh.admit(key, message), *self._take_in(renewed, message, now, doubted=False)]
        if len(self._being_analysed) >= MAX_BEING_ANALYSED:
            text = f"{self.device} is already analysing {MAX_BEING_ANALYSED} plans"
            return [self._failed(message.transaction_id, key, PlanError.code, text)]
        self._being_analysed[key] = message
        return [*self._mesh.admit(key, message), interface.AnalysePrepare(message, self.runs.idle)]

    def _progress(self, transaction_id: int, key: PlanKey, done_bytes: int = 0, total_bytes: int = 0) -> Publish:
        """Report loaded bytes of weights; 0 of 0: this device answers, but has made no progress."""
        return self._up(messages.PrepareProgress(transaction_id, *key, done_bytes, total_bytes))

    def _handle_analysed(self, event: interface.PrepareAnalysed, now: float) -> list[Command]:
        key = plan_key(event.prepare)
        message = self._being_analysed.get(key)
        if message is None:  # released during the analysis
            return []
        if message.plan != event.prepare.plan:  # repeated with another plan: one of the two is forged
            return [*self._mesh.admit(key, message), interface.AnalysePrepare(message, self.runs.idle)]
        del self._being_analysed[key]
        doubted = key in self._doubted
        self._doubted.discard(key)
        if isinstance(event.result, HeptiError):
            self.counters["bad_prepare"] += 1
            text = f"{self.device}: {event.result}"
            failed = self._failed(message.transaction_id, key, event.result.code, text)
            return [*self._mesh.leave(key), interface.LogTrouble("event_errors", text, event.unexpected), failed]
        event.result.transaction_id = message.transaction_id
        return self._take_in(event.result, message, now, doubted=doubted)

    def _take_in(
        self, resident: ResidentPlan, message: messages.Prepare, now: float, *, doubted: bool
    ) -> list[Command]:
        """Keep a plan if it fits into memory, and load its weights."""
        key, plan = resident.key, resident.plan
        out: list[Command] = []
        if resident.weights is None:
            self.plans.place(resident, self.memory_bytes)
        if self.plans.needed_bytes(resident) > self.memory_bytes:
            out = self._release_unconfirmed(self.plans.unconfirmed(), "memory", now)
        needed = self.plans.needed_bytes(resident)
        if needed > self.memory_bytes:
            missing = needed - self.memory_bytes
            text = (
                f"{self.device} needs {needed / 2**20:.1f} MiB for plan {plan.version} of {plan.model} and its other "
                f"plans, its budget is {self.memory_bytes / 2**20:.1f} MiB"
            )
            return [*out, *self._mesh.leave(key), self._failed(resident.transaction_id, key, "memory", text, missing)]
        self.plans.add(resident, now)
        if doubted:
            self.plans.step(resident, "doubt", now)
        out += self._mesh.join(key, resident.mesh_sources, now)
        out.append(interface.Subscribe(plan.model, plan.version, resident.filters, resident.work_topic))
        if resident.session_rows:  # before the plan is ready, so that its first run can use the caches
            out += [*self.runs.restore_caches(resident), interface.ReadCaches(*key, resident.layout)]
        keep = self._keep()
        if resident.weights is not None:
            return [*out, *self._loaded_if_complete(resident, now)]
        parts = plan.model, plan.version, message.manifest, resident.matrices, keep, message.share, plan.devices
        return [*out, interface.Load(*parts)]

    def _handle_loading(self, event: interface.LoadingEvent, now: float) -> list[Command]:
        resident = self.plans.get(event.model, event.plan_version)
        if resident is None:
            return []
        if isinstance(event, interface.LoadProgress):
            return [self._progress(resident.transaction_id, resident.key, event.done_bytes, event.total_bytes)]
        if isinstance(event, interface.LoadFailed):
            out = self._release([resident.key], "failed", now, str(event.error))
            return [*out, self._failed(resident.transaction_id, resident.key, event.error.code, str(event.error))]
        if isinstance(event, interface.Loaded):
            resident.weights = event.weights
            return self._loaded_if_complete(resident, now) or [self._progress_loaded(resident)]
        resident.filters_acknowledged = True
        return self._subscribed_if_complete(resident, now)

    def _subscribed_if_complete(self, resident: ResidentPlan, now: float) -> list[Command]:
        """Mark a plan subscribed if the broker has acknowledged its filters and its peers are joined."""
        if not resident.filters_acknowledged or not self._mesh.complete(resident.key):
            return []
        resident.subscribed = True
        self.plans.step(resident, "subscribed", now)
        return self._ready_if_complete(resident)

    def _loaded_if_complete(self, resident: ResidentPlan, now: float) -> list[Command]:
        """Mark a plan loaded if its weights are resident and its urgent Programs are built."""
        if resident.weights is None or resident.urgent_shapes:
            return []
        resident.loaded = True
        self.plans.step(resident, "loaded", now)
        return self._ready_if_complete(resident)

    def _built(self, event: interface.ProgramBuilt, now: float) -> list[Command]:
        resident, out = self.runs.handle_built(event, now)
        if resident is None or resident.loaded:
            return out
        return [*out, *(self._loaded_if_complete(resident, now) or [self._progress_loaded(resident)])]

    def _progress_loaded(self, resident: ResidentPlan) -> Publish:
        """Report progress of a plan that has its weights but is not ready."""
        nbytes = max(weights_bytes(resident.refs), 1)
        return self._progress(resident.transaction_id, resident.key, nbytes, nbytes)

    def _ready_if_complete(self, resident: ResidentPlan) -> list[Command]:
        if not resident.ready:
            return []
        ready = messages.Ready(resident.transaction_id, *resident.key, weights_bytes(resident.refs), resident.digest)
        return [self._up(ready)]

    def _failed(
        self, transaction_id: int, key: PlanKey, code: str, text: str, missing: int = 0, peers: tuple[str, ...] = ()
    ) -> Publish:
        return self._up(messages.PrepareFailed(transaction_id, *key, code, text, missing, peers))

    # -- peers ----------------------------------------------------------------------------------------------------

    def _peer(self, event: interface.PeerEvent, now: float) -> list[Command]:
        if isinstance(event, interface.PeerRefused):
            self._mesh.record_refused(event.peer, (event.model, event.plan_version))
            return []
        if isinstance(event, interface.PeerLost):
            text = f"{self.device}: the connection to {event.peer} is lost ({event.reason})"
            return self.runs.fail_after_loss(event.peer, self._mesh.record_lost(event.peer, now), text)
        if isinstance(event, interface.PeerFrameDropped):
            text = f"{self.device}: {event.peer} reads too slowly; a frame of {event.nbytes} bytes is lost"
            return self.runs.fail_after_loss(None, self._mesh.plans_read_by(event.peer), text)
        resident = self.plans.get(event.model, event.plan_version)
        if resident is None or not self._mesh.record_joined(event.peer, resident.key):
            return []
        if not resident.subscribed:
            return self._subscribed_if_complete(resident, now)
        # Frames that the peer sent without a connection are lost.
        text = f"{self.device}: the connection to {event.peer} was down"
        return self.runs.fail_after_loss(event.peer, [resident.key], text)

    def _report_unreachable(self, key: PlanKey, peers: tuple[str, ...], now: float) -> list[Command]:
        """Report unreachable peers; a plan that was ready stays until the planner replaces it."""
        resident = self.plans.get(*key)
        if resident is None:
            return []
        text = f"{self.device} has no connection to {', '.join(peers)}"
        out = [] if resident.subscribed else self._release([key], "failed", now, text)
        failed = self._failed(resident.transaction_id, key, "mesh", text, 0, peers)
        return [*out, interface.LogTrouble("mesh_unheard", text), failed]

    def _hand_over(self, message: messages.HandOver, now: float) -> list[Command]:
        """Leave a run to the devices of another plan, in which this device has no part."""
        resident = self.plans.get(message.model, message.plan_version)
        try:
            after = Plan.from_dict(message.plan)
            check_plan(after.root, after)
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"the plan to continue run {message.run_id} cannot be read ({error!r})") from error
        if resident is None:
            self.counters["dead_plan"] += 1
            return []
        return self.runs.leave(resident, message, after, now)

    def _activate(self, message: messages.Activate, now: float) -> list[Command]:
        out = self._release_unconfirmed(self.plans.unconfirmed(message.model, message.plan_version), "outlived", now)
        resident = self.plans.get(message.model, message.plan_version)
        if resident is None:
            self.counters["dead_plan"] += 1
        elif resident.ready:
            self.plans.step(resident, "activate", now)
        return out

    def _release_unconfirmed(self, keys: list[PlanKey], event: EndEvent, now: float) -> list[Command]:
        out: list[Command] = []
        for model, plan_version in keys:
            text = f"{self.device} released plan {plan_version} of {model}: after a reconnection it could not tell "
            text += "whether the plan was still in use"
            failed = self._failed(0, (model, plan_version), "forgotten", text)
            out += [interface.LogTrouble("plans_forgotten", text), failed]
        return [*out, *self._release(keys, event, now)]

    def _release(self, keys: Collection[PlanKey], event: EndEvent, now: float, why: str = "") -> list[Command]:
        out = [c for key in keys if self._being_analysed.pop(key, None) is not None for c in self._mesh.leave(key)]
        self._doubted &= self._being_analysed.keys()
        self.plans.step_all(keys, event, now, why)
        return [*out, *self._unload()]

    def _unload(self) -> list[Command]:
        """Release the weights, filters and routes of released plans."""
        released = self.plans.take_released()
        if not released:
            return []
        for resident in released:
            self.runs.drop_plan(resident.key, resident.layout)
        out: list[Command] = [c for resident in released for c in self._mesh.leave(resident.key)]
        keep = self._keep()
        out += [interface.Unload(*resident.key, keep) for resident in released]
        kept = self.plans.residents()
        filters = {f for r in released for f in r.filters} - {f for r in kept for f in r.filters}
        works = {r.work_topic for r in released} - {r.work_topic for r in kept}
        if filters or works:
            out.append(interface.Unsubscribe(tuple(sorted(filters)), tuple(sorted(works))))
        if self.counters["illegal_step"] != self._illegal:
            self._illegal = self.counters["illegal_step"]
            story = "\n".join([self.plans.story.title, *self.plans.story.as_text()])
            out.append(interface.LogTrouble("illegal_steps", story))
        return out

    def _keep(self) -> frozenset[Place]:
        """Return the matrices that stay resident, and drop kept KV caches that no longer fit."""
        places = self.plans.keep(self.memory_bytes)
        self.runs.sessions.limit_kept(self.plans.spare_bytes)
        return places

    def _restore_saved(self, event: interface.CachesRead) -> list[Command]:
        """Use KV caches that an earlier process of this device saved."""
        self.runs.sessions.add_kept(event.caches)
        resident = self.plans.get(event.model, event.plan_version)
        out = [] if resident is None else self.runs.restore_caches(resident)
        self._keep()
        return out

    def end(self, now: float) -> tuple[KeptCache, ...]:
        """End all plans before this device stops; return the KV caches to save, oldest first."""
        self._release([*self.plans], "drain", now)
        return self.runs.sessions.take_kept()

    # -- frames ---------------------------------------------------------------------------------------------------

    def _frame(self, frame: Frame, now: float) -> list[Command]:
        resident = self.plans.get(frame.model, frame.plan_version)
        if resident is None or not resident.ready:
            self.counters["dead_plan"] += 1
            return []
        if not frame.has_tag(resident.frame_key):
            self.counters["forged"] += 1
            return []
        if frame.kind == "work" and resident.state != "active":
            self.plans.step(resident, "request", now)
        if self.runs.has_ended(frame.run_id):
            self.counters["late"] += 1
            return []
        if frame.kind == "work":
            return self.runs.start(resident, frame, now)
        if frame.kind != "tensor":
            self.counters["foreign_frame"] += 1
            return []
        return self.runs.handle_tensor(frame, now)

    # -- ops ------------------------------------------------------------------------------------------------------

    def finish_step(self, step: Step, outgoing: OutgoingTensor | None, seconds: float, now: float) -> list[Command]:
        """Take the result of steps like `WorkerRuns.finish_step`."""
        out = self.runs.finish_step(step, outgoing, seconds, now)
        # Predicted Programs are built only while no run is active.
        return [*out, *self.runs.next_build(self.plans.residents())] if self.runs.idle else out

    def _up(self, message: messages.Message) -> Publish:
        return Publish(self.topics.reports(self.device), messages.encode(message), 1)

    def check(self) -> None:
        """Raise AssertionError if an invariant of the session is broken."""
        self.runs.check(self.plans)
        self.plans.check()
