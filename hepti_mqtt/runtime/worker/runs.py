"""Activations and leases that arrive before the request that they belong to: kept for a while, within bounds."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

import numpy as np

from hepti_mqtt.errors import HeptiError, PlanError
from hepti_mqtt.ids import PLANNER, Epoch
from hepti_mqtt.program import NUMPY_DTYPE, Program, SlotDtype, addresses
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import (
    Arrival,
    Frame,
    FrameKind,
    Session,
    about,
    decode_session,
    decode_work,
    encode,
    frame_bytes,
    head,
    held_bytes,
)
from hepti_mqtt.protocol.topics import Topics, publish_bytes
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.runtime.worker.executor import Array, Bound, Executor, Outgoing, Step
from hepti_mqtt.runtime.worker.interface import Built, Command, Complain
from hepti_mqtt.runtime.worker.programs import Building, next_step
from hepti_mqtt.runtime.worker.residents import Epochs, Key, Resident, shape_of
from hepti_mqtt.spec import RequestShape
from hepti_mqtt.task_queue import first_task

EARLY_BYTES: Final = 64 << 20  # in all
EARLY_S: Final = 10.0
EARLY_LEASES: Final = 256  # in all


class EarlyFrames:
    """Frames by admission number, those of the longest waiting request first to go.

    Each counts for the buffer that it holds: many of a few bytes would fill a board's memory within any sum of theirs.
    """

    def __init__(self) -> None:
        self._frames: OrderedDict[int, list[tuple[float, Frame]]] = OrderedDict()
        self._bytes = 0

    def keep(self, frame: Frame, now: float) -> int:
        """Keep a frame; return how many others were dropped for it, or had waited too long."""
        self._frames.setdefault(frame.admission, []).append((now, frame))
        self._bytes += held_bytes(len(frame.body))
        dropped = 0
        while self._frames and (self._bytes > EARLY_BYTES or now - self._oldest_s() > EARLY_S):
            dropped += self.drop(next(iter(self._frames)))
        return dropped

    def take(self, admission: int, now: float) -> tuple[list[Frame], int]:
        """Return the frames of a request, as they came, and how many had waited too long; forget all."""
        kept = self._frames.get(admission, [])
        frames = [frame for since_s, frame in kept if now - since_s <= EARLY_S]
        self.drop(admission)
        return frames, len(kept) - len(frames)

    def drop(self, admission: int) -> int:
        """Forget the frames of a request; return how many there were."""
        frames = self._frames.pop(admission, [])
        self._bytes -= sum(held_bytes(len(frame.body)) for _, frame in frames)
        return len(frames)

    def clear(self) -> None:
        """Forget everything."""
        self._frames.clear()
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes that all frames that are kept hold, counted anew."""
        return sum(held_bytes(len(frame.body)) for frames in self._frames.values() for _, frame in frames)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert self._bytes == self.nbytes <= EARLY_BYTES

    def _oldest_s(self) -> float:
        return next(iter(self._frames.values()))[0][0]


class EarlyLeases:
    """Leases of requests that are not here yet, or wait for their Programs, as they came; the oldest are first to go.

    Without them a device would wait for ever for the word that no task is left, which comes once.
    """

    def __init__(self) -> None:
        self._leases: deque[messages.Lease] = deque(maxlen=EARLY_LEASES)

    def keep(self, lease: messages.Lease) -> int:
        """Keep a lease; return how many others were dropped for it."""
        full = len(self._leases) == EARLY_LEASES
        self._leases.append(lease)
        return int(full)

    def take(self, admission: int) -> list[messages.Lease]:
        """Return the leases of a request, and forget them."""
        found = [lease for lease in self._leases if lease.admission == admission]
        for lease in found:
            self._leases.remove(lease)
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._leases.clear()


# ----------------------------------------------------------------------------------------------------------------------
# Sessions on one device: the arrays that a request keeps from run to run, a decoder's keys and values.


SessionKey = tuple[str, Epoch, int]  # model, epoch, number


class SessionLostError(Exception):
    """A run goes on where its session is not: it was given up here, or rows of it never came."""


@dataclass(slots=True)
class _Session:
    arrays: dict[str, Array]
    rows: int = 0  # that have been asked for so far


class Sessions:
    """The open sessions, those used last at the end. counters: sessions given up for others, and runs without one."""

    def __init__(self, counters: Counter[str]) -> None:
        self._open: OrderedDict[SessionKey, _Session] = OrderedDict()
        self._counters = counters

    def __len__(self) -> int:
        return len(self._open)

    def arrays(
        self,
        key: SessionKey,
        program: Program,
        at: int,
        stop: int,
        most: int,
        busy: frozenset[SessionKey] = frozenset(),
    ) -> Mapping[str, Array]:
        """Return the arrays of a session for a run that adds rows at..stop; at 0 the session begins.

        most: sessions kept of one model and epoch; of more, the one used longest ago and not `busy` is given up. Number
        0 is a run without a session: its arrays are its own. Raises SessionLostError if rows before `at` are missing.
        """
        states = program.states()
        if not states:
            return {}
        number = key[2]
        known = self._open.get(key)
        if at > (known.rows if known else 0):
            self._counters["session_lost"] += 1
            raise SessionLostError(f"session {number} has no rows before {at} here")
        if known is None:
            known = _Session({name: np.empty(spec.shape, NUMPY_DTYPE[spec.dtype]) for name, spec in states.items()})
            if number:
                self._open[key] = known
                self._give_up(key, most, busy)
        if any(known.arrays[name].shape != spec.shape for name, spec in states.items()):
            self._counters["session_lost"] += 1
            raise SessionLostError(f"session {number} was begun with another cache")
        if number:
            self._open.move_to_end(key)
        known.rows = max(known.rows, stop)
        return known.arrays

    def end(self, key: SessionKey) -> None:
        """Forget a session."""
        self._open.pop(key, None)

    def forget(self, model: str, epoch: Epoch) -> None:
        """Forget the sessions of an epoch."""
        for key in [k for k in self._open if k[:2] == (model, epoch)]:
            del self._open[key]

    def _give_up(self, newest: SessionKey, most: int, busy: frozenset[SessionKey]) -> None:
        alike = [k for k in self._open if k[:2] == newest[:2]]
        idle = [k for k in alike if k != newest and k not in busy]
        for key in idle[: max(len(alike) - most, 0)]:
            del self._open[key]
            self._counters["session_given_up"] += 1


# ----------------------------------------------------------------------------------------------------------------------
# One run on one device, and what is written once for all runs of its Program.


class Way(NamedTuple):
    """How what a Send sends leaves the device, in every run of its Program: what was checked and written once.

    about: the header but for the admission number. nbytes: of all PUBLISH packets. filled: whether there is a body.
    """

    about: bytes
    topics: tuple[str, ...]
    plane: Literal["mesh", "data"]
    nbytes: int
    filled: bool


@dataclass(slots=True)
class Run:
    """A request that is under way here.

    frame: what began it. inputs: what it brought, for tasks that are leased later. sends: of its Program. compute_s: of
    its ops so far. sent_bytes: of its PUBLISH packets. outputs: parts of the answer that were sent. key: the model and
    the epoch of its plan. number: its admission number, as the headers of its frames end with it.
    """

    frame: Frame
    started_s: float
    session: Session
    inputs: Array
    sends: dict[int, Way]
    compute_s: float = 0.0
    sent_bytes: int = 0
    outputs: int = 0
    key: Key = field(init=False)
    number: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.frame.model, self.frame.epoch
        self.number = head(b"", self.frame.admission)


# ----------------------------------------------------------------------------------------------------------------------
# The runs on one device: the requests that are under way here, their sessions, and what they send.


_NOTHING: Final = memoryview(b"")
REMEMBERED: Final = 1024  # admission numbers that are over, per model

_DTYPE: Final[Mapping[str, SlotDtype]] = {dtype.str: name for name, dtype in NUMPY_DTYPE.items()}  # type: ignore[misc]


class Runs:
    """All runs of a device. counters: frames dropped, by reason."""

    def __init__(self, device: str, topics: Topics, counters: Counter[str]) -> None:
        self._device, self._topics, self._counters = device, topics, counters
        self._building = Building(counters)
        self._executor = Executor()
        self._runs: dict[int, Run] = {}
        self._early = EarlyFrames()
        self._leases = EarlyLeases()
        self._sessions = Sessions(counters)
        self._over: OrderedDict[int, None] = OrderedDict()
        self._waited_s: float | None = None  # for others, in the last run that ended

    @property
    def open_sessions(self) -> int:
        """Return how many sessions have arrays here."""
        return len(self._sessions)

    @property
    def idle(self) -> bool:
        """Return whether no request is under way."""
        return not self._runs

    def take_waited(self) -> float | None:
        """Return for how many seconds the last run that ended waited for others, None where it is known already."""
        waited_s, self._waited_s = self._waited_s, None
        return waited_s

    @property
    def early_bytes(self) -> int:
        """Return the bytes of frames that wait for their requests."""
        return self._early.nbytes

    def over(self, admission: int) -> bool:
        """Return whether a request has ended here."""
        return admission in self._over

    def restart(self) -> None:
        """Forget the numbers of requests: a new planner counts its own from the beginning."""
        self._over.clear()
        self._early.clear()
        self._leases.clear()

    def forget(self, key: Key) -> None:
        """Give up the runs and sessions of an epoch, what is being built for it, and what the runs have left."""
        self._building.forget(key)
        self._sessions.forget(*key)
        for admission in [a for a, r in self._runs.items() if r.key == key]:
            self.end(admission)
        self._executor.give_back()

    def cancel(self, admission: int) -> None:
        """Give up a request of which somebody else may have lost something."""
        if (request := self._runs.get(admission)) is not None:  # what was cached may be incomplete
            self._sessions.end((*request.key, request.session.number))
        if (frame := self._building.drop(admission)) is not None:
            self._sessions.end((frame.model, frame.epoch, decode_session(frame).number))
        self.end(admission)

    # -- Programs -------------------------------------------------------------------------------------------------

    def build(self, residents: Iterable[Resident]) -> list[Command]:
        """Return the order for the next Program, if there is one to be built."""
        order = self._building.next(residents, idle=not self._runs)
        return [] if order is None else [order]

    def built(self, event: Built, now: float) -> tuple[Resident | None, list[Command]]:
        """Begin the requests that waited for a Program, or end them if there is none; return whose plan it is of."""
        found = self._building.built(event)
        if found is None:
            return None, []
        resident, shape, waited = found
        out: list[Command] = []
        if isinstance(event.made, Exception):
            text = f"{self._device} cannot build the Program of {shape}: {event.made!r}"
            code = event.made.code if isinstance(event.made, HeptiError) else "device"
            out.append(Complain("programs_failed", text))
            for frame in waited:
                self.end(frame.admission)
                out.append(self._up(messages.RequestFailed(frame.model, frame.epoch, frame.admission, code, text)))
            return resident, out
        for frame in waited:
            out += self.work(resident, frame, now)
        return resident, out

    # -- frames ---------------------------------------------------------------------------------------------------

    def work(self, resident: Resident, frame: Frame, now: float) -> list[Command]:
        """Begin a request, or keep it until its Program is built; raises WireError for a frame that is none."""
        begun = self._runs.get(frame.admission)
        known = self._building.frame(frame.admission) if begun is None else begun.frame
        if known is not None:
            return self._twice(known, frame)
        plain, inputs = decode_work(frame)
        session = decode_session(frame)
        try:
            shape = shape_of(resident.spec, plain)
        except PlanError as error:
            self.end(frame.admission)
            return [self._refused(frame, error.code, str(error))]
        dims, dtype = resident.spec.reads.input(shape)
        if inputs.shape != dims or inputs.dtype != NUMPY_DTYPE[dtype]:
            self.end(frame.admission)
            text = f"inputs {inputs.dtype}{list(inputs.shape)} are not the {dtype}{list(dims)} that {frame.model} reads"
            return [self._refused(frame, "wire", text)]
        bound = resident.bound.get(shape)
        if bound is None:
            self._building.wait(frame, shape)
            return []
        resident.bound.move_to_end(shape)
        resident.foresee(next_step(shape, session))
        try:
            states = self._states(resident, bound, session, inputs, shape)
        except SessionLostError as error:
            self.end(frame.admission)
            return [self._refused(frame, "session", str(error))]
        self._runs[frame.admission] = Run(frame, now, session, inputs, bound.sends)
        self._executor.admit(frame.admission, bound, states)
        for key in bound.template.inputs:
            self._executor.deliver(frame.admission, key, inputs)
        first = first_task(resident.plan.devices, self._device, len(bound.template.begins))
        if first is not None:
            self._executor.lease(frame.admission, first, inputs)
        out = [c for lease in self._leases.take(frame.admission) for c in self.lease(lease, now)]
        kept, stale = self._early.take(frame.admission, now)
        if stale:
            self._counters["early_dropped"] += stale
        for early in kept:
            if frame.admission not in self._executor:
                break  # one before it has ended the request
            out += self._deliver(early)
        return out + self._finish(frame.admission, now)

    def _twice(self, known: Frame, frame: Frame) -> list[Command]:
        """Ignore what has come before; give a run up if other work claims its number: one of both is forged."""
        if frame.says(known):
            self._counters["duplicate"] += 1
            return []
        self._counters["contradicted"] += 1
        self.cancel(frame.admission)
        epochs = {(f.model, f.epoch): f for f in (known, frame)}.values()
        return [self._refused(f, "wire", f"two frames with different work claim run {f.admission}") for f in epochs]

    def lease(self, message: messages.Lease, now: float) -> list[Command]:
        """Take tasks of a request's bag; if there are none left, end what only waited for more."""
        request = self._runs.get(message.admission)
        if request is None:
            if self.over(message.admission):
                self._counters["late"] += 1
            elif dropped := self._leases.keep(message):
                self._counters["early_dropped"] += dropped
            return []
        for task in message.tasks:
            self._executor.lease(message.admission, task, request.inputs)
        if message.tasks:
            return []
        self._executor.close(message.admission)
        return self._finish(message.admission, now)

    def _refused(self, frame: Frame, code: str, text: str) -> Command:
        text = f"{self._device}: {text}"
        return self._up(messages.RequestFailed(frame.model, frame.epoch, frame.admission, code, text))

    def _states(
        self, resident: Resident, bound: Bound, session: Session, inputs: Array, shape: RequestShape
    ) -> Mapping[str, Array]:
        """Return the arrays that a run's session keeps here."""
        if not shape.session_rows:
            return {}
        at, plan = int(inputs[0]), resident.plan
        key = (plan.model, plan.epoch, session.number)
        busy = frozenset((*r.key, r.session.number) for r in self._runs.values())
        return self._sessions.arrays(key, bound.template.program, at, at + shape.size, resident.sessions, busy)

    def tensor(self, frame: Frame, now: float) -> list[Command]:
        """Take what a peer has sent, or keep it until its request is here."""
        if frame.admission in self._executor:
            return self._deliver(frame)
        if dropped := self._early.keep(frame, now):
            self._counters["early_dropped"] += dropped
        return []

    def fills(self, arrival: Arrival) -> bool:
        """Fill the slot of a run that waits for this arrival; False, and nothing has changed, where it is not so."""
        request = self._runs.get(arrival.admission)
        if request is None or request.key != arrival.exchange.of:
            return False
        try:
            return self._executor.deliver(arrival.admission, arrival.exchange.key, arrival.array()) == "filled"
        except ValueError:
            return False  # not what the Program expects; `tensor` says so

    def _deliver(self, frame: Frame) -> list[Command]:
        try:
            outcome = self._executor.deliver(frame.admission, (frame.node, frame.part, frame.source), frame.array())
        except ValueError as exc:
            self._counters["bad_shape"] += 1
            return self._request_failed(frame.admission, "wire", f"{self._device}: frame of {frame.source}: {exc}")
        if outcome != "filled":
            self._counters[outcome] += 1
        return []

    # -- ops ------------------------------------------------------------------------------------------------------

    def next(self) -> Step | None:
        """Return the next op to run; the shell runs it and calls `done` or `broke`."""
        return self._executor.next()

    def done(self, step: Step, outgoing: Outgoing | None, seconds: float, now: float) -> list[Command]:
        """Take the result of steps of one run, of which `step` was the last; return what must be published.

        seconds: that their kernels took.
        """
        request = self._runs.get(step.admission)
        if request is None:
            return []
        request.compute_s += seconds
        out = [] if outgoing is None else self.send(request, outgoing)
        task = step.running.completes(step.place)
        if task is not None:
            out.append(self._up(messages.TaskDone(*request.key, step.admission, task)))
        return out if step.running.left else out + self._finish(step.admission, now)

    def broke(self, step: Step, error: Exception) -> list[Command]:
        """Give up a request whose op raised; the planner hears why."""
        text = f"{self._device}: {step.kernel or 'send'} failed: {error}"
        return self._request_failed(step.admission, "device", text)

    def send(self, request: Run, outgoing: Outgoing) -> list[Command]:
        """Return the publishes of what an op of a run sends."""
        way = request.sends.get(outgoing.place)
        if way is None:
            op = outgoing.op
            if op.to == (PLANNER,):
                return [self._output(request, outgoing)]
            if op.to == (self._device,):  # a task that the head device has computed itself
                self._executor.deliver(outgoing.admission, (op.node, op.part, self._device), outgoing.array.copy())
                return []
            way = request.sends[outgoing.place] = self._way(request, outgoing)
        body = outgoing.array.data.cast("B") if way.filled else _NOTHING
        request.sent_bytes += way.nbytes
        return [Publish(topic, way.about + request.number, 0, way.plane, False, body) for topic in way.topics]

    def _way(self, request: Run, outgoing: Outgoing) -> Way:
        op, (model, _) = outgoing.op, request.key
        topics = tuple(self._topics.activation(model, op.layer, self._device, to) for to in addresses(op))
        nbytes = sum(publish_bytes(topic, frame_bytes(outgoing.array.nbytes), 0) for topic in topics)
        header = about(self._placed(request, outgoing), outgoing.array.nbytes)
        return Way(header, topics, "mesh" if op.route == "mesh" else "data", nbytes, outgoing.array.size > 0)

    def _output(self, request: Run, outgoing: Outgoing) -> Publish:
        request.outputs += 1
        out = Publish(self._topics.up(self._device), encode(self._placed(request, outgoing, "output")), 1)
        request.sent_bytes += publish_bytes(out.topic, out.nbytes, out.qos)
        return out

    def _placed(self, request: Run, outgoing: Outgoing, kind: FrameKind = "tensor") -> Frame:
        op, array = outgoing.op, outgoing.array
        frame = self._frame_of(kind, *request.key, outgoing.admission, array)
        return replace(frame, layer=op.layer, node=op.node, part=op.part, row_start=op.row)

    def _frame_of(
        self,
        kind: FrameKind,
        model: str,
        epoch: Epoch,
        admission: int,
        array: Array,
        numbers: tuple[int, ...] = (),
    ) -> Frame:
        return Frame(
            kind=kind,
            model=model,
            epoch=epoch,
            admission=admission,
            source=self._device,
            dtype=_DTYPE[array.dtype.str],
            shape=array.shape,
            numbers=numbers,
            body=array.data.cast("B") if array.size else b"",
        )

    def _finish(self, admission: int, now: float) -> list[Command]:
        if not self._executor.finished(admission):
            return []
        request = self._runs[admission]
        model, epoch = request.key
        wait = self._waited_s = max(now - request.started_s - request.compute_s, 0.0)
        topic = self._topics.up(self._device)
        sent = request.sent_bytes + publish_bytes(topic, frame_bytes(0), 1)
        numbers = (int(request.compute_s * 1e6), int(wait * 1e6), sent, request.outputs)
        self.end(admission)
        if request.session.final:
            self._sessions.end((model, epoch, request.session.number))
        done = self._frame_of("done", model, epoch, admission, np.empty(0, np.uint8), numbers)
        return [Publish(topic, encode(done), 1)]

    def lost(self, source: str | None, keys: Iterable[Key], text: str) -> list[Command]:
        """Give up the runs of epochs that miss frames of a device, or all of them; they are issued again."""
        of = set(keys)
        running = [(a, r.key) for a, r in self._runs.items() if source is None or self._executor.awaits(a, source)]
        out: list[Command] = []
        for admission, key in [(a, k) for a, k in [*running, *self._building.waiting()] if k in of]:
            self.end(admission)
            out.append(self._up(messages.RequestFailed(*key, admission, "link", text)))
        return out

    def _request_failed(self, admission: int, code: str, text: str) -> list[Command]:
        request = self._runs.get(admission)
        if request is None:
            return []
        self.end(admission)
        return [self._up(messages.RequestFailed(*request.key, admission, code, text))]

    def end(self, admission: int) -> None:
        """Forget a request; what still comes of it is late."""
        self._executor.drop(admission)
        self._runs.pop(admission, None)
        self._building.drop(admission)
        self._early.drop(admission)
        self._leases.take(admission)
        self._over[admission] = None
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    def _up(self, message: messages.Message) -> Publish:
        return Publish(self._topics.up(self._device), messages.encode(message), 1)

    def check(self, epochs: Epochs) -> None:
        """Raise AssertionError if an invariant is broken; epochs: those that are here."""
        assert set(self._runs) == set(self._executor.admissions)
        self._early.check()
        self._building.check()
        assert not set(self._over) & set(self._runs)
        assert all(r.key in epochs for r in self._runs.values())
