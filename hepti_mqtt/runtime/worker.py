"""WorkerSession: one device's part in the protocol, without sockets, threads or clocks.

The shell hands it what arrived with the time, runs the ops that `next` returns, and carries out the commands.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from hepti_mqtt.errors import WireError
from hepti_mqtt.ids import PLANNER, Epoch
from hepti_mqtt.kernels import Workers
from hepti_mqtt.program import NUMPY_DTYPE, SlotDtype, addresses
from hepti_mqtt.runtime.commands import Command, Complain, Load, Publish, Subscribe, Unload, Unsubscribe
from hepti_mqtt.runtime.early import EarlyFrames
from hepti_mqtt.runtime.epochs import EndEvent, Epochs, Key
from hepti_mqtt.runtime.events import (
    FrameIn,
    Loaded,
    LoadFailed,
    LoadProgress,
    MessageIn,
    PlannerLost,
    Subscribed,
    WorkerEvent,
)
from hepti_mqtt.runtime.executor import Array, Bound, Executor, Outgoing, Step, bind
from hepti_mqtt.runtime.resident import Resident, resident_of
from hepti_mqtt.runtime.sessions import SessionLostError, Sessions
from hepti_mqtt.simulate import weight_total
from hepti_mqtt.spec import RequestShape
from hepti_mqtt.strategies import program
from hepti_mqtt.wire import messages
from hepti_mqtt.wire.frames import (
    Frame,
    FrameKind,
    Session,
    decode_session,
    decode_work,
    encode,
    frame_bytes,
)
from hepti_mqtt.wire.topics import Topics, publish_bytes

MODEL_PROGRAMS: Final = 16  # shapes whose bound Programs are kept per epoch
REMEMBERED: Final = 1024  # admission numbers that are over, per model

_DTYPE: Final[Mapping[str, SlotDtype]] = {dtype.str: name for name, dtype in NUMPY_DTYPE.items()}  # type: ignore[misc]


@dataclass(slots=True)
class _Request:
    key: Key
    started_s: float
    session: Session
    compute_s: float = 0.0
    sent_bytes: int = 0
    outputs: int = 0  # parts of the answer that were sent


class WorkerSession:
    """The state machine of one agent.

    memory_bytes: budget for weights and live slots together. counters: frames dropped, by reason. epochs: the plans
    that are here.
    """

    def __init__(self, device: str, site: str, memory_bytes: int, workers: Workers) -> None:
        self.device = device
        self.topics = Topics(site)
        self.memory_bytes = memory_bytes
        self.counters: Counter[str] = Counter()
        self._workers = workers
        self.epochs = Epochs(device, self.counters)
        self._executor = Executor()
        self._requests: dict[int, _Request] = {}
        self._early = EarlyFrames()
        self._sessions = Sessions(self.counters)
        self._over: OrderedDict[int, None] = OrderedDict()
        self._illegal = 0  # steps that the log tells of

    @property
    def open_sessions(self) -> int:
        """Return how many sessions have arrays here."""
        return len(self._sessions)

    # -- events ---------------------------------------------------------------------------------------------------

    def handle(self, event: WorkerEvent, now: float) -> list[Command]:
        """Take one event and return the commands that follow from it."""
        if isinstance(event, FrameIn):
            out = self._frame(event.frame, now)
        elif isinstance(event, MessageIn):
            out = self._message(event.message, now)
        elif isinstance(event, Loaded | LoadProgress | LoadFailed | Subscribed):
            out = self._preparation(event, now)
        elif isinstance(event, PlannerLost):
            out = self._forget([key for key in self.epochs if key[1].boot != event.boot], "planner lost", now)
            self._over.clear()  # a new planner counts its requests from the beginning
            self._early.clear()
        else:
            self.epochs.doubt(now, event.why)
            out = []
        return out + self._unload()

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
            messages.Drain: lambda _, now: self._forget(self.epochs, "drain", now),
        }

    # -- epochs ---------------------------------------------------------------------------------------------------

    def _prepare(self, message: messages.Prepare, now: float) -> list[Command]:
        try:
            resident = resident_of(message, self.device, self.topics)
        except WireError:
            self.counters["bad_prepare"] += 1
            raise
        plan = resident.plan
        if (known := self.epochs.get(plan.model, plan.epoch)) is not None:
            known.txn = message.txn
            return self._ready_if_complete(known)
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
            return [*out, self._failed(resident, "memory", text, missing)]
        self.epochs.enter(resident, now)
        load = Load(message.txn, plan.model, plan.epoch, message.manifest, resident.refs, self._spare_bytes())
        return [*out, Subscribe(plan.model, plan.epoch, resident.filters), load]

    def _preparation(self, event: Loaded | LoadProgress | LoadFailed | Subscribed, now: float) -> list[Command]:
        resident = self.epochs.get(event.model, event.epoch)
        if resident is None:
            return []
        if isinstance(event, LoadProgress):
            progress = messages.Progress(resident.txn, *resident.key, event.done_bytes, event.total_bytes)
            return [self._up(progress)]
        if isinstance(event, LoadFailed):
            out = self._forget([resident.key], "failed", now, str(event.error))
            return [*out, self._failed(resident, event.error.code, str(event.error), 0)]
        if isinstance(event, Loaded):
            resident.weights = event.weights
            self.epochs.step(resident, "loaded", now)
        else:
            resident.subscribed = True
            self.epochs.step(resident, "subscribed", now)
        return self._ready_if_complete(resident)

    def _ready_if_complete(self, resident: Resident) -> list[Command]:
        if not resident.ready:
            return []
        plan = resident.plan
        return [self._up(messages.Ready(resident.txn, plan.model, plan.epoch, weight_total(resident.refs)))]

    def _failed(self, resident: Resident, code: str, text: str, missing: int) -> Publish:
        return self._up(messages.Failed(resident.txn, *resident.key, code, text, missing))

    def _activate(self, message: messages.Activate, now: float) -> list[Command]:
        out = self._forget_doubted(self.epochs.doubted(message.model, message.epoch), "outlived", now)
        resident = self.epochs.get(message.model, message.epoch)
        if resident is None:
            self.counters["dead_epoch"] += 1
        elif resident.ready:
            self.epochs.step(resident, "activate", now)
        return out

    def _forget_doubted(self, keys: list[Key], event: EndEvent, now: float) -> list[Command]:
        texts = (f"plan {epoch} of {model} was given up while we were away" for model, epoch in keys)
        return [*(Complain("epochs_forgotten", text) for text in texts), *self._forget(keys, event, now)]

    def _forget(self, keys: Iterable[Key], event: EndEvent, now: float, why: str = "") -> list[Command]:
        self.epochs.end(keys, event, now, why)
        return self._unload()

    def _unload(self) -> list[Command]:
        """Give up what the epochs hold that have been released."""
        released = self.epochs.take_released()
        if not released:
            return []
        for resident in released:
            self._sessions.forget(*resident.key)
        for admission in [a for a, r in self._requests.items() if r.key not in self.epochs]:
            self._end(admission)
        out: list[Command] = [Unload(*resident.key, self._spare_bytes()) for resident in released]
        filters = {f for resident in released for f in resident.filters} - self.epochs.filters()
        models = {resident.plan.model for resident in released} - self.epochs.models()
        if filters or models:
            out.append(Unsubscribe(tuple(sorted(filters)), tuple(sorted(models))))
        if self.counters["illegal_step"] != self._illegal:
            self._illegal = self.counters["illegal_step"]
            out.append(Complain("illegal_steps", "\n".join([self.epochs.story.title, *self.epochs.story.lines()])))
        return out

    def _spare_bytes(self) -> float:
        return max(self.memory_bytes - self.epochs.needed_bytes(), 0)

    def _cancel(self, message: messages.Cancel, _now: float) -> list[Command]:
        if (request := self._requests.get(message.admission)) is not None:  # what was cached may be incomplete
            self._sessions.end((*request.key, request.session.number))
        self._end(message.admission)
        return []

    # -- frames ---------------------------------------------------------------------------------------------------

    def _frame(self, frame: Frame, now: float) -> list[Command]:
        resident = self.epochs.get(frame.model, frame.epoch)
        if resident is None or not resident.ready:
            self.counters["dead_epoch"] += 1
            return []
        if frame.kind == "work" and resident.state != "active":
            self.epochs.step(resident, "request", now)
        if frame.admission in self._over:
            self.counters["late"] += 1
            return []
        if frame.kind == "work":
            return self._work(resident, frame, now)
        if frame.kind != "tensor":
            self.counters["foreign_frame"] += 1
            return []
        if frame.admission in self._executor:
            return self._deliver(frame)
        if dropped := self._early.keep(frame, now):
            self.counters["early_dropped"] += dropped
        return []

    def _work(self, resident: Resident, frame: Frame, now: float) -> list[Command]:
        if frame.admission in self._executor:
            self.counters["duplicate"] += 1
            return []
        shape, inputs = decode_work(frame)
        session = decode_session(frame)
        bound = self._bound(resident, shape)
        try:
            states = self._states(resident, bound, session, inputs, shape)
        except SessionLostError as error:
            self._end(frame.admission)
            text = f"{self.device}: {error}"
            return [self._up(messages.RequestFailed(frame.model, frame.epoch, frame.admission, "session", text))]
        self._requests[frame.admission] = _Request((frame.model, frame.epoch), now, session)
        self._executor.admit(frame.admission, bound, states)
        for key in bound.template.inputs:
            self._executor.deliver(frame.admission, key, inputs)
        out: list[Command] = []
        for early in self._early.take(frame.admission):
            out += self._deliver(early)
        return out + self._finish(frame.admission, now)

    def _states(
        self, resident: Resident, bound: Bound, session: Session, inputs: Array, shape: RequestShape
    ) -> Mapping[str, Array]:
        """Return the arrays that a run's session keeps here."""
        if not shape.cache:
            return {}
        at, plan = int(inputs[0]), resident.plan
        key = (plan.model, plan.epoch, session.number)
        busy = frozenset((*r.key, r.session.number) for r in self._requests.values())
        return self._sessions.arrays(key, bound.template.program, at, at + shape.tokens, resident.sessions, busy)

    def _deliver(self, frame: Frame) -> list[Command]:
        try:
            outcome = self._executor.deliver(frame.admission, (frame.node, frame.part, frame.source), frame.array())
        except ValueError as exc:
            self.counters["bad_shape"] += 1
            return self._request_failed(frame.admission, "wire", f"{self.device}: frame of {frame.source}: {exc}")
        if outcome != "filled":
            self.counters[outcome] += 1
        return []

    def _bound(self, resident: Resident, shape: RequestShape) -> Bound:
        bound = resident.bound.get(shape)
        if bound is None:
            assert resident.weights is not None
            bound = bind(program(resident.spec, resident.plan, shape, self.device), resident.weights, self._workers)
            resident.bound[shape] = bound
            while len(resident.bound) > MODEL_PROGRAMS:
                resident.bound.popitem(last=False)
        resident.bound.move_to_end(shape)
        return bound

    # -- ops ------------------------------------------------------------------------------------------------------

    def next(self) -> Step | None:
        """Return the next op to run; the shell runs it and calls `done` or `broke`."""
        return self._executor.next()

    def done(self, step: Step, outgoing: Outgoing | None, seconds: float, now: float) -> list[Command]:
        """Take the result of a step that took `seconds`; return what must be published."""
        request = self._requests.get(step.admission)
        if request is None:
            return []
        out: list[Command] = []
        if outgoing is None:
            request.compute_s += seconds
        else:
            out += self._send(request, outgoing)
        return out + self._finish(step.admission, now)

    def broke(self, step: Step, error: Exception) -> list[Command]:
        """Give up a request whose op raised; the planner hears why."""
        text = f"{self.device}: {step.kernel or 'send'} failed: {error}"
        return self._request_failed(step.admission, "device", text)

    def _send(self, request: _Request, outgoing: Outgoing) -> list[Publish]:
        op, (model, epoch) = outgoing.op, request.key
        output = op.to == (PLANNER,)
        frame = self._frame_of("output" if output else "tensor", model, epoch, outgoing.admission, outgoing.array)
        payload = encode(replace(frame, layer=op.layer, node=op.node, part=op.part, row_start=op.row))
        request.outputs += output
        out: list[Publish] = []
        for to in addresses(op):
            if output:
                out.append(Publish(self.topics.up(self.device), payload, 1))
            else:
                out.append(Publish(self.topics.activation(model, op.layer, self.device, to), payload, 0, "data"))
            request.sent_bytes += publish_bytes(out[-1].topic, len(payload), out[-1].qos)
        return out

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
            source=self.device,
            dtype=_DTYPE[array.dtype.str],
            shape=array.shape,
            numbers=numbers,
            body=array.data.cast("B") if array.size else b"",
        )

    def _finish(self, admission: int, now: float) -> list[Command]:
        if not self._executor.finished(admission):
            return []
        request = self._requests[admission]
        model, epoch = request.key
        wait = max(now - request.started_s - request.compute_s, 0.0)
        topic = self.topics.up(self.device)
        sent = request.sent_bytes + publish_bytes(topic, frame_bytes(0), 1)
        numbers = (int(request.compute_s * 1e6), int(wait * 1e6), sent, request.outputs)
        self._end(admission)
        if request.session.final:
            self._sessions.end((model, epoch, request.session.number))
        done = self._frame_of("done", model, epoch, admission, np.empty(0, np.uint8), numbers)
        return [Publish(topic, encode(done), 1)]

    def _request_failed(self, admission: int, code: str, text: str) -> list[Command]:
        request = self._requests.get(admission)
        if request is None:
            return []
        self._end(admission)
        return [self._up(messages.RequestFailed(*request.key, admission, code, text))]

    def _end(self, admission: int) -> None:
        self._executor.drop(admission)
        self._requests.pop(admission, None)
        self._early.take(admission)
        self._over[admission] = None
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    def _up(self, message: messages.Message) -> Publish:
        return Publish(self.topics.up(self.device), messages.encode(message), 1)

    def check(self) -> None:
        """Raise AssertionError if an invariant of the session is broken; tests call it after every event."""
        assert set(self._requests) == set(self._executor.admissions)
        self._early.check()
        assert not set(self._over) & set(self._requests)
        assert all(r.key in self.epochs for r in self._requests.values())
        self.epochs.check()
