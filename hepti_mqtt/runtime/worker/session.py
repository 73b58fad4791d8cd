"""A device's part in the protocol without sockets, threads or clocks: `WorkerSession`, and its mesh routes.

A plan is ready once all peers that the device reads from are joined. A peer that stays unreachable is reported to the
planner, whose next plan relays its frames over the broker. A connection that is lost later loses the frames on it:
runs that await that peer end at once and are retried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from hepti_mqtt.cost.memory import weights_bytes
from hepti_mqtt.errors import HeptiError, PlanError, WireError
from hepti_mqtt.plan import Plan
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import Frame, TensorArrival
from hepti_mqtt.protocol.messages import Peer, Prepare
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.runtime.worker.executor import OutgoingTensor, Step
from hepti_mqtt.runtime.worker.interface import (
    AllowPeers,
    AnalysePrepare,
    CachesRead,
    Command,
    FrameIn,
    JoinPeers,
    LeavePeers,
    Load,
    Loaded,
    LoadFailed,
    LoadProgress,
    LogTrouble,
    MessageIn,
    PeerFrameDropped,
    PeerJoined,
    PeerLost,
    PeerRefused,
    PlannerLost,
    PrepareAnalysed,
    ProgramBuilt,
    ReadCaches,
    Subscribe,
    Subscribed,
    Tick,
    Unload,
    Unsubscribe,
    WorkerEvent,
)
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
WELCOME_S: Final = 20.0  # for a peer that is there but has not received its Prepare
RETURN_S: Final = 2.0  # for a lost connection to come back


@dataclass(slots=True)
class _PlanRoutes:
    """Routes of one plan. sources: peers by name; give_up_s: deadlines of the peers that are not joined.

    welcome_by_s: until then a peer that is there may not have received its Prepare.
    """

    sources: Mapping[str, Peer]
    give_up_s: dict[str, float]
    welcome_by_s: float


@dataclass(frozen=True, slots=True)
class UnreachablePeers:
    """A plan and the peers that it cannot reach."""

    key: PlanKey
    peers: tuple[str, ...]


class MeshRoutes:
    """The mesh routes of all plans on one device."""

    def __init__(self) -> None:
        self._admitted: dict[PlanKey, frozenset[str]] = {}  # peers that may read here, by plan
        self._routes: dict[PlanKey, _PlanRoutes] = {}

    def admit(self, key: PlanKey, message: Prepare) -> list[Command]:
        """Admit the peers of a Prepare at once: they may be ready before this device is."""
        guests = tuple(peer for peer in message.peers if peer.token_in)
        if not guests:
            return []
        self._admitted[key] = frozenset(peer.device for peer in guests)
        return [AllowPeers(*key, guests)]

    def join(self, key: PlanKey, peers: Iterable[Peer], now: float) -> list[Command]:
        """Connect to the peers that a plan reads from."""
        heard = {peer.device: peer for peer in peers}
        if not heard:
            return []
        self._admitted.setdefault(key, frozenset())
        self._routes[key] = _PlanRoutes(heard, dict.fromkeys(heard, now + JOIN_S), now + WELCOME_S)
        return [JoinPeers(*key, tuple(heard.values()))]

    def leave(self, key: PlanKey) -> list[Command]:
        """Forget the routes of a plan that has ended."""
        self._routes.pop(key, None)
        return [] if self._admitted.pop(key, None) is None else [LeavePeers(*key)]

    def complete(self, key: PlanKey) -> bool:
        """Return whether every peer that a plan reads from is joined."""
        routes = self._routes.get(key)
        return routes is None or not routes.give_up_s

    def record_joined(self, peer: str, key: PlanKey) -> bool:
        """Record that a peer is joined; return whether it was missing."""
        routes = self._routes.get(key)
        return routes is not None and routes.give_up_s.pop(peer, None) is not None

    def record_refused(self, peer: str, key: PlanKey) -> None:
        """Record that a peer is there but does not admit this device yet."""
        routes = self._routes.get(key)
        if routes is not None and peer in routes.give_up_s:
            routes.give_up_s[peer] = max(routes.give_up_s[peer], routes.welcome_by_s)

    def record_lost(self, peer: str, now: float) -> list[PlanKey]:
        """Record that the connection to a peer is lost; return the plans that read from it."""
        keys = [k for k, r in self._routes.items() if peer in r.sources and peer not in r.give_up_s]
        for key in keys:
            self._routes[key].give_up_s[peer] = now + RETURN_S
        return keys

    def deadline(self) -> float:
        """Return when `take_unreachable` has something to report; infinity if all peers are joined."""
        deadline = inf
        for routes in self._routes.values():
            if routes.give_up_s:  # hardly ever; this is asked between ops
                deadline = min(deadline, *routes.give_up_s.values())
        return deadline

    def take_unreachable(self, now: float) -> list[UnreachablePeers]:
        """Return the plans whose peers have not joined in time, each peer once."""
        found = []
        for key, routes in self._routes.items():
            late = [peer for peer, at in routes.give_up_s.items() if at <= now]
            for peer in late:
                routes.give_up_s[peer] = inf
            if late:
                found.append(UnreachablePeers(key, tuple(sorted(late))))
        return found

    def plans_read_by(self, peer: str) -> list[PlanKey]:
        """Return the plans under which a peer reads from this device."""
        return [key for key, guests in self._admitted.items() if peer in guests]


# ----------------------------------------------------------------------------------------------------------------------
# The session: the shell hands it events with the time, runs the steps of `next_step` and carries out the commands.


MAX_BEING_ANALYSED: Final = 32


class WorkerSession:
    """The state machine of one agent.

    memory_bytes: budget for weights and live buffers together. counters: dropped frames by reason.
    """

    def __init__(self, device: str, site: str, memory_bytes: int) -> None:
        self.device = device
        self.topics = Topics(site)
        self.memory_bytes = memory_bytes
        self.counters: Counter[str] = Counter()
        self.plans = ResidentPlans(device, self.counters)
        self._mesh = MeshRoutes()
        self._being_analysed: dict[PlanKey, messages.Prepare] = {}  # the last Prepare of each plan
        self._doubted: set[PlanKey] = set()  # of these, those that the planner may have released unnoticed
        self.runs = WorkerRuns(device, self.topics, self.counters)
        self._illegal = 0  # illegal steps that were logged

    @property
    def deadline(self) -> float:
        """Return when the session wants to hear a `Tick`, infinity if never."""
        return self._mesh.deadline()

    # -- events ---------------------------------------------------------------------------------------------------

    def handle(self, event: WorkerEvent, now: float) -> list[Command]:
        """Take one event and return the commands that follow from it."""
        if isinstance(event, TensorArrival):
            if self.runs.try_fill(event):
                return []
            event = FrameIn(event.frame())
        if isinstance(event, FrameIn):
            out = self._frame(event.frame, now)
            if not out and event.frame.kind == "tensor":
                return out  # a peer's tensor, the most frequent event, changes no plan and no build order
        elif isinstance(event, MessageIn):
            out = self._message(event.message, now)
        elif isinstance(event, Loaded | LoadProgress | LoadFailed | Subscribed):
            out = self._handle_loading(event, now)
        elif isinstance(event, CachesRead):
            out = self._restore_saved(event)
        elif isinstance(event, PrepareAnalysed):
            out = self._handle_analysed(event, now)
        elif isinstance(event, ProgramBuilt):
            out = self._built(event, now)
        elif isinstance(event, PeerJoined | PeerRefused | PeerLost | PeerFrameDropped):
            out = self._peer(event, now)
        elif isinstance(event, Tick):
            out = [c for late in self._mesh.take_unreachable(now) for c in self._report_unreachable(late, now)]
        elif isinstance(event, PlannerLost):
            out = self._release(
                [k for k in (*self.plans, *self._being_analysed) if k[1].boot != event.boot], "planner lost", now
            )
            self.runs.reset()
        else:
            out = []
            self._doubted |= self._being_analysed.keys()
            self.plans.mark_all_unconfirmed(now, event.why)
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
                self.runs.end_sessions((message.model, message.plan_version), message.sessions)
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
        if (known := self.plans.get(*key)) is not None:
            known.transaction_id = message.transaction_id
            return self._ready_if_complete(known) or [self._progress(message.transaction_id, key)]
        if key not in self._being_analysed:
            again = self.plans.take_ended(message, self.topics, self.memory_bytes)
            if again is not None:
                return [*self._mesh.admit(key, message), *self._take_in(again, message, now, doubted=False)]
        if key not in self._being_analysed and len(self._being_analysed) >= MAX_BEING_ANALYSED:
            text = f"{self.device} is already analysing {MAX_BEING_ANALYSED} plans"
            return [self._failed(message.transaction_id, key, PlanError.code, text)]
        self._doubted.discard(key)
        is_repeated, self._being_analysed[key] = key in self._being_analysed, message
        if is_repeated:
            return [self._progress(message.transaction_id, key)]
        return [*self._mesh.admit(key, message), AnalysePrepare(message, self.runs.idle)]

    def _progress(self, transaction_id: int, key: PlanKey, done_bytes: int = 0, total_bytes: int = 0) -> Publish:
        """Report bytes of weights; 0 of 0: this device is there, and has made no progress."""
        return self._up(messages.PrepareProgress(transaction_id, *key, done_bytes, total_bytes))

    def _handle_analysed(self, event: PrepareAnalysed, now: float) -> list[Command]:
        key = plan_key(event.prepare)
        message = self._being_analysed.get(key)
        if message is None:  # released meanwhile
            return []
        if message.plan != event.prepare.plan:  # repeated with another plan: one of both was forged
            return [*self._mesh.admit(key, message), AnalysePrepare(message, self.runs.idle)]
        del self._being_analysed[key]
        doubted = key in self._doubted
        self._doubted.discard(key)
        if isinstance(event.result, HeptiError):
            self.counters["bad_prepare"] += 1
            text = f"{self.device}: {event.result}"
            failed = self._failed(message.transaction_id, key, event.result.code, text)
            return [*self._mesh.leave(key), LogTrouble("event_errors", text, event.unexpected), failed]
        event.result.transaction_id = message.transaction_id
        return self._take_in(event.result, message, now, doubted=doubted)

    def _take_in(
        self, resident: ResidentPlan, message: messages.Prepare, now: float, *, doubted: bool
    ) -> list[Command]:
        """Keep a plan if there is memory for it, and load what it lacks."""
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
                f"{self.device} needs {needed / 2**20:.1f} MiB for plan {plan.version} of {plan.model} beside what it "
                f"holds, its budget is {self.memory_bytes / 2**20:.1f} MiB"
            )
            return [*out, *self._mesh.leave(key), self._failed(resident.transaction_id, key, "memory", text, missing)]
        self.plans.add(resident, now)
        if doubted:
            self.plans.step(resident, "doubt", now)
        out += self._mesh.join(key, resident.mesh_sources, now)
        out.append(Subscribe(plan.model, plan.version, resident.filters, resident.work_topic))
        if resident.session_rows:  # before the plan is ready, so that its first request can use them
            out += [*self.runs.restore_caches(resident), ReadCaches(*key, resident.layout)]
        keep = self._keep()
        if resident.weights is not None:
            return [*out, *self._loaded_if_complete(resident, now)]
        parts = plan.model, plan.version, message.manifest, resident.matrices, keep, message.share, plan.devices
        return [*out, Load(message.transaction_id, *parts)]

    def _handle_loading(self, event: Loaded | LoadProgress | LoadFailed | Subscribed, now: float) -> list[Command]:
        resident = self.plans.get(event.model, event.plan_version)
        if resident is None:
            return []
        if isinstance(event, LoadProgress):
            return [self._progress(resident.transaction_id, resident.key, event.done_bytes, event.total_bytes)]
        if isinstance(event, LoadFailed):
            out = self._release([resident.key], "failed", now, str(event.error))
            return [*out, self._failed(resident.transaction_id, resident.key, event.error.code, str(event.error))]
        if isinstance(event, Loaded):
            resident.weights = event.weights
            return self._loaded_if_complete(resident, now) or [self._progress_loaded(resident)]
        resident.filters_acknowledged = True
        return self._subscribed_if_complete(resident, now)

    def _subscribed_if_complete(self, resident: ResidentPlan, now: float) -> list[Command]:
        """A plan is subscribed when the broker has acknowledged its filters and its peers are joined."""
        if not resident.filters_acknowledged or not self._mesh.complete(resident.key):
            return []
        resident.subscribed = True
        self.plans.step(resident, "subscribed", now)
        return self._ready_if_complete(resident)

    def _loaded_if_complete(self, resident: ResidentPlan, now: float) -> list[Command]:
        """A plan is loaded when its weights are there and the Programs that the planner wants before."""
        if resident.weights is None or resident.urgent_shapes:
            return []
        resident.loaded = True
        self.plans.step(resident, "loaded", now)
        return self._ready_if_complete(resident)

    def _built(self, event: ProgramBuilt, now: float) -> list[Command]:
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

    def _peer(self, event: PeerJoined | PeerRefused | PeerLost | PeerFrameDropped, now: float) -> list[Command]:
        if isinstance(event, PeerRefused):
            self._mesh.record_refused(event.peer, (event.model, event.plan_version))
            return []
        if isinstance(event, PeerLost):
            text = f"{self.device}: the connection to {event.peer} is lost ({event.reason})"
            return self.runs.fail_after_loss(event.peer, self._mesh.record_lost(event.peer, now), text)
        if isinstance(event, PeerFrameDropped):
            text = f"{self.device}: {event.peer} reads too slowly; a frame of {event.nbytes} bytes is lost"
            return self.runs.fail_after_loss(None, self._mesh.plans_read_by(event.peer), text)
        resident = self.plans.get(event.model, event.plan_version)
        if resident is None or not self._mesh.record_joined(event.peer, resident.key):
            return []
        if not resident.subscribed:
            return self._subscribed_if_complete(resident, now)
        # What the peer sent while the connection was away went nowhere.
        text = f"{self.device}: the connection to {event.peer} was away"
        return self.runs.fail_after_loss(event.peer, [resident.key], text)

    def _report_unreachable(self, late: UnreachablePeers, now: float) -> list[Command]:
        """Report unreachable peers; a plan that was ready once stays until the planner replaces it."""
        resident = self.plans.get(*late.key)
        if resident is None:
            return []
        text = f"{self.device} has no connection to {', '.join(late.peers)}"
        out = [] if resident.subscribed else self._release([late.key], "failed", now, text)
        failed = self._failed(resident.transaction_id, late.key, "mesh", text, 0, late.peers)
        return [*out, LogTrouble("mesh_unheard", text), failed]

    def _hand_over(self, message: messages.HandOver, now: float) -> list[Command]:
        resident = self.plans.get(message.model, message.plan_version)
        try:
            after = Plan.from_dict(message.plan)
            check_plan(after.root, after)
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"the plan that run {message.run_id} goes on under cannot be read ({error!r})") from error
        if resident is None:
            self.counters["dead_epoch"] += 1
            return []
        return self.runs.leave(resident, message, after, now)

    def _activate(self, message: messages.Activate, now: float) -> list[Command]:
        out = self._release_unconfirmed(self.plans.unconfirmed(message.model, message.plan_version), "outlived", now)
        resident = self.plans.get(message.model, message.plan_version)
        if resident is None:
            self.counters["dead_epoch"] += 1
        elif resident.ready:
            self.plans.step(resident, "activate", now)
        return out

    def _release_unconfirmed(self, keys: list[PlanKey], event: EndEvent, now: float) -> list[Command]:
        out: list[Command] = []
        for model, plan_version in keys:
            text = f"{self.device} released plan {plan_version} of {model}: after a reconnection it could not tell "
            text += "whether the plan was still in use"
            out += [LogTrouble("epochs_forgotten", text), self._failed(0, (model, plan_version), "forgotten", text)]
        return [*out, *self._release(keys, event, now)]

    def _release(self, keys: Collection[PlanKey], event: EndEvent, now: float, why: str = "") -> list[Command]:
        out = [c for key in keys if self._being_analysed.pop(key, None) is not None for c in self._mesh.leave(key)]
        self._doubted &= self._being_analysed.keys()
        self.plans.end(keys, event, now, why)
        return [*out, *self._unload()]

    def _unload(self) -> list[Command]:
        """Give up the weights, filters and routes of released plans."""
        released = self.plans.take_released()
        if not released:
            return []
        for resident in released:
            self.runs.drop_plan(resident.key, resident.layout)
        out: list[Command] = [c for resident in released for c in self._mesh.leave(resident.key)]
        keep = self._keep()
        out += [Unload(*resident.key, keep) for resident in released]
        filters = {f for resident in released for f in resident.filters} - self.plans.filters()
        works = {resident.work_topic for resident in released} - self.plans.work_topics()
        if filters or works:
            out.append(Unsubscribe(tuple(sorted(filters)), tuple(sorted(works))))
        if self.counters["illegal_step"] != self._illegal:
            self._illegal = self.counters["illegal_step"]
            out.append(LogTrouble("illegal_steps", "\n".join([self.plans.story.title, *self.plans.story.as_text()])))
        return out

    def _keep(self) -> frozenset[Place]:
        """Return the matrices that stay resident, and drop kept KV caches for which no memory is left."""
        places = self.plans.keep(self.memory_bytes)
        self.runs.limit_kept_caches(self.plans.spare_bytes)
        return places

    def _restore_saved(self, event: CachesRead) -> list[Command]:
        """Use KV caches that an earlier process of this device has saved."""
        self.runs.add_kept_caches(event.caches)
        resident = self.plans.get(event.model, event.plan_version)
        out = [] if resident is None else self.runs.restore_caches(resident)
        self._keep()
        return out

    def end(self, now: float) -> tuple[KeptCache, ...]:
        """End all plans, because this device stops; return the KV caches to save, the oldest first."""
        self._release([*self.plans], "drain", now)
        return self.runs.take_kept_caches()

    # -- frames ---------------------------------------------------------------------------------------------------

    def _frame(self, frame: Frame, now: float) -> list[Command]:
        resident = self.plans.get(frame.model, frame.plan_version)
        if resident is None or not resident.ready:
            self.counters["dead_epoch"] += 1
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

    def next_step(self) -> Step | None:
        """Return the next step; the shell runs it and calls `finish_step` or `fail_step`."""
        return self.runs.next_step()

    def finish_step(self, step: Step, outgoing: OutgoingTensor | None, seconds: float, now: float) -> list[Command]:
        """Take the result of steps as `WorkerRuns.finish_step` does."""
        out = self.runs.finish_step(step, outgoing, seconds, now)
        # What is built only while no request runs may have waited for this one's end.
        return [*out, *self.runs.next_build(self.plans.residents())] if self.runs.idle else out

    def fail_step(self, step: Step, error: Exception) -> list[Command]:
        """Give up a request whose op raised; the planner hears why."""
        return self.runs.fail_step(step, error)

    def _up(self, message: messages.Message) -> Publish:
        return Publish(self.topics.reports(self.device), messages.encode(message), 1)

    def check(self) -> None:
        """Raise AssertionError if an invariant of the session is broken; tests call it after every event."""
        self.runs.check(self.plans)
        self.plans.check()
