"""Which peers this device hears directly under each epoch, and what follows when it does not.

An epoch is not ready before all of these are joined. A peer that cannot be reached within a while is told to the
planner, which makes a plan whose frames from there go over the broker. A connection that is lost later takes with it
what was on it: requests that await frames of that peer end at once and are issued again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from hepti_mqtt.cost.memory import weight_total
from hepti_mqtt.errors import HeptiError, PlanError, WireError
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import Arrival, Frame
from hepti_mqtt.protocol.messages import Peer, Prepare
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.runtime.worker.executor import Outgoing, Step
from hepti_mqtt.runtime.worker.interface import (
    Admit,
    Built,
    Command,
    Complain,
    FrameIn,
    Join,
    Load,
    Loaded,
    LoadFailed,
    LoadProgress,
    MessageIn,
    Part,
    PeerBehind,
    PeerJoined,
    PeerLost,
    PeerRefused,
    PlannerLost,
    Studied,
    Study,
    Subscribe,
    Subscribed,
    Tick,
    Unload,
    Unsubscribe,
    WorkerEvent,
)
from hepti_mqtt.runtime.worker.residents import EndEvent, Epochs, Key, Resident, plan_key
from hepti_mqtt.runtime.worker.runs import Runs

JOIN_S: Final = 5.0  # a peer that cannot be connected to for so long will not be
WELCOME_S: Final = 20.0  # one that is there, but has not heard of the epoch, is waited for
RETURN_S: Final = 2.0  # a connection that was lost comes back within so long, or its pair is given up


@dataclass(slots=True)
class _Routes:
    """One epoch's. heard: peers by name; missing: those that are not joined now, with when each is given up.

    welcome_by_s: until then a peer that is there may have yet to hear of the epoch.
    """

    heard: Mapping[str, Peer]
    missing: dict[str, float]
    welcome_by_s: float


@dataclass(frozen=True, slots=True)
class Overdue:
    """An epoch that waits in vain for peers."""

    key: Key
    peers: tuple[str, ...]


class MeshRoutes:
    """The mesh routes of all epochs on one device."""

    def __init__(self) -> None:
        self._admitted: dict[Key, frozenset[str]] = {}  # who may read here under each epoch
        self._routes: dict[Key, _Routes] = {}

    def admit(self, key: Key, message: Prepare) -> list[Command]:
        """Let those in that a Prepare names, before this device itself is as far: its peers may be faster."""
        guests = tuple(peer for peer in message.peers if peer.token_in)
        if not guests:
            return []
        self._admitted[key] = frozenset(peer.device for peer in guests)
        return [Admit(*key, guests)]

    def join(self, key: Key, peers: Iterable[Peer], now: float) -> list[Command]:
        """Hear peers directly from now on."""
        heard = {peer.device: peer for peer in peers}
        if not heard:
            return []
        self._admitted.setdefault(key, frozenset())
        self._routes[key] = _Routes(heard, dict.fromkeys(heard, now + JOIN_S), now + WELCOME_S)
        return [Join(*key, tuple(heard.values()))]

    def part(self, key: Key) -> list[Command]:
        """An epoch is over."""
        self._routes.pop(key, None)
        return [] if self._admitted.pop(key, None) is None else [Part(*key)]

    def complete(self, key: Key) -> bool:
        """Return whether every peer that an epoch hears directly is joined."""
        routes = self._routes.get(key)
        return routes is None or not routes.missing

    def joined(self, peer: str, key: Key) -> bool:
        """Take it that a peer is joined; return whether it was missing."""
        routes = self._routes.get(key)
        return routes is not None and routes.missing.pop(peer, None) is not None

    def refused(self, peer: str, key: Key) -> None:
        """Take it that a peer is there but does not know this device yet."""
        routes = self._routes.get(key)
        if routes is not None and peer in routes.missing:
            routes.missing[peer] = max(routes.missing[peer], routes.welcome_by_s)

    def lost(self, peer: str, now: float) -> list[Key]:
        """Take it that the connection to a peer is gone; return the epochs that heard it."""
        keys = [k for k, r in self._routes.items() if peer in r.heard and peer not in r.missing]
        for key in keys:
            self._routes[key].missing[peer] = now + RETURN_S
        return keys

    def deadline(self) -> float:
        """Return when `overdue` has something to tell, infinity if nothing is waited for."""
        deadline = inf
        for routes in self._routes.values():
            if routes.missing:  # hardly ever; this is asked between ops
                deadline = min(deadline, *routes.missing.values())
        return deadline

    def overdue(self, now: float) -> list[Overdue]:
        """Return the epochs that wait for peers in vain, each peer once."""
        found = []
        for key, routes in self._routes.items():
            late = [peer for peer, at in routes.missing.items() if at <= now]
            for peer in late:
                routes.missing[peer] = inf
            if late:
                found.append(Overdue(key, tuple(sorted(late))))
        return found

    def sends_to(self, peer: str) -> list[Key]:
        """Return the epochs under which a peer reads what this device sends, whether it is heard or not."""
        return [key for key, guests in self._admitted.items() if peer in guests]


# ----------------------------------------------------------------------------------------------------------------------
# WorkerSession: one device's part in the protocol, without sockets, threads or clocks.
#
# The shell hands it what arrived with the time, runs the ops that `next` returns, and carries out the commands.


ASKED: Final = 32  # plans that wait to be studied


class WorkerSession:
    """The state machine of one agent.

    memory_bytes: budget for weights and live slots together. counters: frames dropped, by reason. epochs: the plans
    that are here. runs: the requests that are under way.
    """

    def __init__(self, device: str, site: str, memory_bytes: int) -> None:
        self.device = device
        self.topics = Topics(site)
        self.memory_bytes = memory_bytes
        self.counters: Counter[str] = Counter()
        self.epochs = Epochs(device, self.counters)
        self._mesh = MeshRoutes()
        self._asked: dict[Key, messages.Prepare] = {}  # that are being studied; the last of each
        self.runs = Runs(device, self.topics, self.counters)
        self._illegal = 0  # steps that the log tells of

    @property
    def open_sessions(self) -> int:
        """Return how many sessions have arrays here."""
        return self.runs.open_sessions

    @property
    def deadline(self) -> float:
        """Return when the session wants to hear a `Tick`, infinity if never."""
        return self._mesh.deadline()

    # -- events ---------------------------------------------------------------------------------------------------

    def handle(self, event: WorkerEvent, now: float) -> list[Command]:
        """Take one event and return the commands that follow from it."""
        if isinstance(event, Arrival):
            if self.runs.fills(event):
                return []
            event = FrameIn(event.frame())
        if isinstance(event, FrameIn):
            out = self._frame(event.frame, now)
            if not out and event.frame.kind == "tensor":
                return out  # what a peer has sent, as most events are, changes no plan and no order
        elif isinstance(event, MessageIn):
            out = self._message(event.message, now)
        elif isinstance(event, Loaded | LoadProgress | LoadFailed | Subscribed):
            out = self._preparation(event, now)
        elif isinstance(event, Studied):
            out = self._studied(event, now)
        elif isinstance(event, Built):
            out = self._built(event, now)
        elif isinstance(event, PeerJoined | PeerRefused | PeerLost | PeerBehind):
            out = self._peer(event, now)
        elif isinstance(event, Tick):
            out = [c for late in self._mesh.overdue(now) for c in self._unheard(late, now)]
        elif isinstance(event, PlannerLost):
            out = self._forget(
                [k for k in (*self.epochs, *self._asked) if k[1].boot != event.boot], "planner lost", now
            )
            self.runs.restart()
        else:
            out = [c for key in self._asked for c in self._mesh.part(key)]
            self._asked.clear()  # a planner that still wants them asks again
            self.epochs.doubt(now, event.why)
        return [*out, *self._unload(), *self.runs.build(self.epochs.residents())]

    def _message(self, message: messages.Message, now: float) -> list[Command]:
        handler = self._messages().get(type(message))
        if handler is None:
            self.counters["foreign_message"] += 1
            return []
        return handler(message, now)

    def _messages(self) -> Mapping[type, Callable[..., list[Command]]]:
        return {
            messages.Prepare: self._prepare,
            messages.Activate: self._activate,
            messages.Release: lambda m, now: self._forget([(m.model, m.epoch)], "release", now),
            messages.Cancel: self._cancel,
            messages.Lease: self.runs.lease,
            messages.Drain: lambda _, now: self._forget([*self.epochs, *self._asked], "drain", now),
        }

    # -- epochs ---------------------------------------------------------------------------------------------------

    def _prepare(self, message: messages.Prepare, _now: float) -> list[Command]:
        try:
            key = plan_key(message)
        except WireError:
            self.counters["bad_prepare"] += 1
            raise
        if (known := self.epochs.get(*key)) is not None:
            known.txn = message.txn
            return self._ready_if_complete(known) or [self._at_it(message.txn, key)]
        if key not in self._asked and len(self._asked) >= ASKED:
            text = f"{self.device} has {ASKED} plans to study already"
            return [self._failed(message.txn, key, PlanError.code, text, 0)]
        studied, self._asked[key] = key in self._asked, message
        return [self._at_it(message.txn, key)] if studied else [*self._mesh.admit(key, message), Study(message)]

    def _at_it(self, txn: int, key: Key) -> Publish:
        """Say to a planner that asks again that this device is there, and has not got further."""
        return self._up(messages.Progress(txn, *key, 0, 0))

    def _studied(self, event: Studied, now: float) -> list[Command]:
        key = plan_key(event.prepare)
        message = self._asked.get(key)
        if message is None:  # released meanwhile
            return []
        if message.plan != event.prepare.plan:  # asked for anew as another plan: one of both was forged
            return [*self._mesh.admit(key, message), Study(message)]
        del self._asked[key]
        if isinstance(event.found, HeptiError):
            self.counters["bad_prepare"] += 1
            text = f"{self.device}: {event.found}"
            failed = self._failed(message.txn, key, event.found.code, text, 0)
            return [*self._mesh.part(key), Complain("event_errors", text), failed]
        resident = event.found
        resident.txn = message.txn
        plan = resident.plan
        out: list[Command] = []
        if self.epochs.needed_bytes(resident) > self.memory_bytes:
            out = self._forget_doubted(self.epochs.doubted(), "memory", now)
        needed = self.epochs.needed_bytes(resident)
        if needed > self.memory_bytes:
            missing = needed - self.memory_bytes
            text = (
                f"{self.device} needs {needed / 2**20:.1f} MiB for plan {plan.epoch} of {plan.model} beside what it "
                f"holds, its budget is {self.memory_bytes / 2**20:.1f} MiB"
            )
            return [*out, *self._mesh.part(key), self._failed(resident.txn, key, "memory", text, missing)]
        self.epochs.enter(resident, now)
        load = Load(message.txn, plan.model, plan.epoch, message.manifest, resident.refs, self._spare_bytes())
        out += self._mesh.join(key, resident.heard, now)
        return [*out, Subscribe(plan.model, plan.epoch, resident.filters, resident.work), load]

    def _preparation(self, event: Loaded | LoadProgress | LoadFailed | Subscribed, now: float) -> list[Command]:
        resident = self.epochs.get(event.model, event.epoch)
        if resident is None:
            return []
        if isinstance(event, LoadProgress):
            progress = messages.Progress(resident.txn, *resident.key, event.done_bytes, event.total_bytes)
            return [self._up(progress)]
        if isinstance(event, LoadFailed):
            out = self._forget([resident.key], "failed", now, str(event.error))
            return [*out, self._failed(resident.txn, resident.key, event.error.code, str(event.error), 0)]
        if isinstance(event, Loaded):
            resident.weights = event.weights
            return self._loaded(resident, now) or [self._further(resident)]
        resident.acknowledged = True
        return self._connected(resident, now)

    def _connected(self, resident: Resident, now: float) -> list[Command]:
        """A plan is subscribed when the broker has acknowledged its filters and its peers are joined."""
        if not resident.acknowledged or not self._mesh.complete(resident.key):
            return []
        resident.subscribed = True
        self.epochs.step(resident, "subscribed", now)
        return self._ready_if_complete(resident)

    def _loaded(self, resident: Resident, now: float) -> list[Command]:
        """A plan is loaded when its weights are there and the Programs that the planner wants before."""
        if resident.weights is None or resident.urgent:
            return []
        resident.loaded = True
        self.epochs.step(resident, "loaded", now)
        return self._ready_if_complete(resident)

    def _built(self, event: Built, now: float) -> list[Command]:
        resident, out = self.runs.built(event, now)
        if resident is None or resident.loaded:
            return out
        return [*out, *(self._loaded(resident, now) or [self._further(resident)])]

    def _further(self, resident: Resident) -> Publish:
        """Say that a plan whose weights are there has got further, though it is not ready."""
        nbytes = max(weight_total(resident.refs), 1)
        return self._up(messages.Progress(resident.txn, *resident.key, nbytes, nbytes))

    def _ready_if_complete(self, resident: Resident) -> list[Command]:
        if not resident.ready:
            return []
        ready = messages.Ready(resident.txn, *resident.key, weight_total(resident.refs), resident.digest)
        return [self._up(ready)]

    def _failed(self, txn: int, key: Key, code: str, text: str, missing: int, peers: tuple[str, ...] = ()) -> Publish:
        return self._up(messages.Failed(txn, *key, code, text, missing, peers))

    # -- peers ----------------------------------------------------------------------------------------------------

    def _peer(self, event: PeerJoined | PeerRefused | PeerLost | PeerBehind, now: float) -> list[Command]:
        if isinstance(event, PeerRefused):
            self._mesh.refused(event.peer, (event.model, event.epoch))
            return []
        if isinstance(event, PeerLost):
            text = f"{self.device}: the connection to {event.peer} is lost ({event.reason})"
            return self.runs.lost(event.peer, self._mesh.lost(event.peer, now), text)
        if isinstance(event, PeerBehind):
            text = f"{self.device}: {event.peer} does not take what it is sent; a frame of {event.nbytes} bytes is lost"
            return self.runs.lost(None, self._mesh.sends_to(event.peer), text)
        resident = self.epochs.get(event.model, event.epoch)
        if resident is None or not self._mesh.joined(event.peer, resident.key):
            return []
        if not resident.subscribed:
            return self._connected(resident, now)
        # What the peer sent while the connection was away went nowhere.
        return self.runs.lost(event.peer, [resident.key], f"{self.device}: the connection to {event.peer} was away")

    def _unheard(self, late: Overdue, now: float) -> list[Command]:
        """Tell the planner of peers that cannot be heard; a plan that was ready once goes on until it knows better."""
        resident = self.epochs.get(*late.key)
        if resident is None:
            return []
        text = f"{self.device} has no connection to {', '.join(late.peers)}"
        out = [] if resident.subscribed else self._forget([late.key], "failed", now, text)
        failed = self._failed(resident.txn, late.key, "mesh", text, 0, late.peers)
        return [*out, Complain("mesh_unheard", text), failed]

    def _activate(self, message: messages.Activate, now: float) -> list[Command]:
        out = self._forget_doubted(self.epochs.doubted(message.model, message.epoch), "outlived", now)
        resident = self.epochs.get(message.model, message.epoch)
        if resident is None:
            self.counters["dead_epoch"] += 1
        elif resident.ready:
            self.epochs.step(resident, "activate", now)
        return out

    def _forget_doubted(self, keys: list[Key], event: EndEvent, now: float) -> list[Command]:
        out: list[Command] = []
        for model, epoch in keys:
            out.append(Complain("epochs_forgotten", f"plan {epoch} of {model} was given up while we were away"))
            text = f"{self.device} has given up plan {epoch} of {model}, not knowing whether it is in use"
            out.append(self._failed(0, (model, epoch), "forgotten", text, 0))
        return [*out, *self._forget(keys, event, now)]

    def _forget(self, keys: Collection[Key], event: EndEvent, now: float, why: str = "") -> list[Command]:
        out = [c for key in keys if self._asked.pop(key, None) is not None for c in self._mesh.part(key)]
        self.epochs.end(keys, event, now, why)
        return [*out, *self._unload()]

    def _unload(self) -> list[Command]:
        """Give up what the epochs hold that have been released."""
        released = self.epochs.take_released()
        if not released:
            return []
        for resident in released:
            self.runs.forget(resident.key)
        out: list[Command] = [c for resident in released for c in self._mesh.part(resident.key)]
        out += [Unload(*resident.key, self._spare_bytes()) for resident in released]
        filters = {f for resident in released for f in resident.filters} - self.epochs.filters()
        works = {resident.work for resident in released} - self.epochs.works()
        if filters or works:
            out.append(Unsubscribe(tuple(sorted(filters)), tuple(sorted(works))))
        if self.counters["illegal_step"] != self._illegal:
            self._illegal = self.counters["illegal_step"]
            out.append(Complain("illegal_steps", "\n".join([self.epochs.story.title, *self.epochs.story.lines()])))
        return out

    def _spare_bytes(self) -> float:
        return max(self.memory_bytes - self.epochs.needed_bytes(), 0)

    def _cancel(self, message: messages.Cancel, _now: float) -> list[Command]:
        self.runs.cancel(message.admission)
        return []

    # -- frames ---------------------------------------------------------------------------------------------------

    def _frame(self, frame: Frame, now: float) -> list[Command]:
        resident = self.epochs.get(frame.model, frame.epoch)
        if resident is None or not resident.ready:
            self.counters["dead_epoch"] += 1
            return []
        if frame.kind == "work" and resident.state != "active":
            self.epochs.step(resident, "request", now)
        if self.runs.over(frame.admission):
            self.counters["late"] += 1
            return []
        if frame.kind == "work":
            return self.runs.work(resident, frame, now)
        if frame.kind != "tensor":
            self.counters["foreign_frame"] += 1
            return []
        return self.runs.tensor(frame, now)

    # -- ops ------------------------------------------------------------------------------------------------------

    def next(self) -> Step | None:
        """Return the next op to run; the shell runs it and calls `done` or `broke`."""
        return self.runs.next()

    def done(self, step: Step, outgoing: Outgoing | None, seconds: float, now: float) -> list[Command]:
        """Take the result of steps of one run, as `Runs.done`; return what must be published."""
        out = self.runs.done(step, outgoing, seconds, now)
        # What is built only while no request runs may have waited for this one's end.
        return [*out, *self.runs.build(self.epochs.residents())] if self.runs.idle else out

    def broke(self, step: Step, error: Exception) -> list[Command]:
        """Give up a request whose op raised; the planner hears why."""
        return self.runs.broke(step, error)

    def _up(self, message: messages.Message) -> Publish:
        return Publish(self.topics.up(self.device), messages.encode(message), 1)

    def check(self) -> None:
        """Raise AssertionError if an invariant of the session is broken; tests call it after every event."""
        self.runs.check(self.epochs)
        self.epochs.check()
