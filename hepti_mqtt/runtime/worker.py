"""WorkerSession: one device's part in the protocol, without sockets, threads or clocks.

The shell hands it what arrived with the time, runs the ops that `next` returns, and carries out the commands.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from hepti_mqtt.errors import HeptiError, WireError
from hepti_mqtt.ids import ALL, PLANNER, Epoch
from hepti_mqtt.kernels import Weight, Workers
from hepti_mqtt.program import NUMPY_DTYPE, SlotDtype, WeightRef
from hepti_mqtt.runtime.commands import Command, Load, Publish, Subscribe, Unload, Unsubscribe
from hepti_mqtt.runtime.early import EarlyFrames
from hepti_mqtt.runtime.executor import Array, Bound, Executor, Outgoing, Step, bind
from hepti_mqtt.runtime.resident import Resident, resident_bytes, resident_of
from hepti_mqtt.simulate import weight_total
from hepti_mqtt.spec import RequestShape
from hepti_mqtt.strategies import program
from hepti_mqtt.wire import messages
from hepti_mqtt.wire.frames import Frame, FrameKind, decode_work, encode, frame_bytes
from hepti_mqtt.wire.topics import Topics, publish_bytes

MODEL_PROGRAMS: Final = 16  # shapes whose bound Programs are kept per epoch
REMEMBERED: Final = 1024  # admission numbers that are over, per model

_DTYPE: Final[Mapping[str, SlotDtype]] = {dtype.str: name for name, dtype in NUMPY_DTYPE.items()}  # type: ignore[misc]

Key = tuple[str, Epoch]


@dataclass(frozen=True, slots=True)
class MessageIn:
    """A control message from the planner."""

    message: messages.Message


@dataclass(frozen=True, slots=True)
class FrameIn:
    """A frame: a request from the planner, or activations from a peer."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class Loaded:
    """The shell has made the weights of an epoch resident."""

    model: str
    epoch: Epoch
    weights: Mapping[WeightRef, Weight]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The shell has some of the tiles."""

    model: str
    epoch: Epoch
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The shell could not make the weights resident."""

    model: str
    epoch: Epoch
    error: HeptiError


@dataclass(frozen=True, slots=True)
class Subscribed:
    """Every SUBACK of an epoch's filters is in."""

    model: str
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class PlannerLost:
    """The planner restarted: its boot counter changed, so everything of the earlier boot is void."""

    boot: int


WorkerEvent = MessageIn | FrameIn | Loaded | LoadProgress | LoadFailed | Subscribed | PlannerLost


@dataclass(slots=True)
class _Request:
    key: Key
    started_s: float
    compute_s: float = 0.0
    sent_bytes: int = 0


class WorkerSession:
    """The state machine of one agent.

    memory_bytes: budget for weights and live slots together. counters: frames dropped, by reason.
    """

    def __init__(self, device: str, site: str, memory_bytes: int, workers: Workers) -> None:
        self.device = device
        self.topics = Topics(site)
        self.memory_bytes = memory_bytes
        self.counters: Counter[str] = Counter()
        self._workers = workers
        self._resident: dict[Key, Resident] = {}
        self._executor = Executor()
        self._requests: dict[int, _Request] = {}
        self._early = EarlyFrames()
        self._over: OrderedDict[int, None] = OrderedDict()

    # -- events ---------------------------------------------------------------------------------------------------

    def handle(self, event: WorkerEvent, now: float) -> list[Command]:
        """Take one event and return the commands that follow from it."""
        if isinstance(event, FrameIn):
            return self._frame(event.frame, now)
        if isinstance(event, MessageIn):
            handler = self._messages().get(type(event.message))
            if handler is None:
                self.counters["foreign_message"] += 1
                return []
            return handler(event.message)
        if isinstance(event, PlannerLost):
            out = self._forget([key for key in self._resident if key[1].boot != event.boot])
            self._over.clear()  # a new planner counts its requests from the beginning
            self._early.clear()
            return out
        resident = self._resident.get((event.model, event.epoch))
        if resident is None:
            return []
        if isinstance(event, LoadProgress):
            return [
                self._up(messages.Progress(resident.txn, event.model, event.epoch, event.done_bytes, event.total_bytes))
            ]
        if isinstance(event, LoadFailed):
            return self._fail(resident, event.error.code, str(event.error), 0)
        if isinstance(event, Loaded):
            resident.weights = event.weights
        else:
            resident.subscribed = True
        return self._ready_if_complete(resident)

    def _messages(self) -> Mapping[type, Callable[..., list[Command]]]:
        return {
            messages.Prepare: self._prepare,
            messages.Activate: self._activate,
            messages.Release: self._release,
            messages.Cancel: self._cancel,
            messages.Drain: self._drain,
        }

    def _activate(self, message: messages.Activate) -> list[Command]:
        if (message.model, message.epoch) not in self._resident:
            self.counters["dead_epoch"] += 1
        return []  # requests carry their epoch: the first one under it is what makes it count here

    def _release(self, message: messages.Release) -> list[Command]:
        return self._forget([(message.model, message.epoch)])

    def _drain(self, _: messages.Drain) -> list[Command]:
        return self._forget(list(self._resident))

    def _prepare(self, message: messages.Prepare) -> list[Command]:
        try:
            resident = resident_of(message, self.device, self.topics)
        except WireError:
            self.counters["bad_prepare"] += 1
            raise
        plan = resident.plan
        key = (plan.model, plan.epoch)
        if (known := self._resident.get(key)) is not None:
            known.txn = message.txn
            return self._ready_if_complete(known)
        needed = resident_bytes([*self._resident.values(), resident])
        if needed > self.memory_bytes:
            missing = needed - self.memory_bytes
            text = (
                f"{self.device} needs {needed / 2**20:.1f} MiB for plan {plan.epoch} of {plan.model} beside what it "
                f"holds, its budget is {self.memory_bytes / 2**20:.1f} MiB"
            )
            return self._fail(resident, "memory", text, missing)
        self._resident[key] = resident
        load = Load(message.txn, plan.model, plan.epoch, message.manifest, resident.refs, self._spare_bytes())
        return [Subscribe(plan.model, plan.epoch, resident.filters), load]

    def _ready_if_complete(self, resident: Resident) -> list[Command]:
        if not resident.ready:
            return []
        plan = resident.plan
        return [self._up(messages.Ready(resident.txn, plan.model, plan.epoch, weight_total(resident.refs)))]

    def _fail(self, resident: Resident, code: str, text: str, missing: int) -> list[Command]:
        plan = resident.plan
        failed = messages.Failed(resident.txn, plan.model, plan.epoch, code, text, missing)
        return [*self._forget([(plan.model, plan.epoch)]), self._up(failed)]

    def _forget(self, keys: Iterable[Key]) -> list[Command]:
        out: list[Command] = []
        dropped: set[str] = set()
        for key in [k for k in keys if k in self._resident]:
            dropped |= set(self._resident.pop(key).filters)
            out.append(Unload(*key, self._spare_bytes()))
            for admission in [a for a, r in self._requests.items() if r.key == key]:
                self._end(admission)
        unused = dropped - {f for r in self._resident.values() for f in r.filters}
        return [*out, Unsubscribe(tuple(sorted(unused)))] if unused else out

    def _spare_bytes(self) -> float:
        return max(self.memory_bytes - resident_bytes(self._resident.values()), 0)

    def _cancel(self, message: messages.Cancel) -> list[Command]:
        self._end(message.admission)
        return []

    # -- frames ---------------------------------------------------------------------------------------------------

    def _frame(self, frame: Frame, now: float) -> list[Command]:
        resident = self._resident.get((frame.model, frame.epoch))
        if resident is None or resident.weights is None:
            self.counters["dead_epoch"] += 1
            return []
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
        bound = self._bound(resident, shape)
        self._requests[frame.admission] = _Request((frame.model, frame.epoch), now)
        self._executor.admit(frame.admission, bound)
        self._executor.deliver(frame.admission, (0, "input", PLANNER), inputs)
        out: list[Command] = []
        for early in self._early.take(frame.admission):
            out += self._deliver(early)
        return out + self._finish(frame.admission, now)

    def _deliver(self, frame: Frame) -> list[Command]:
        try:
            outcome = self._executor.deliver(frame.admission, (frame.layer, frame.point, frame.source), frame.array())
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
        payload = encode(
            self._frame_of(
                "output" if output else "tensor",
                model,
                epoch,
                outgoing.admission,
                outgoing.array,
                layer=op.layer,
                point=op.point,
                row_start=0 if op.rows is None else op.rows[0],
            )
        )
        out: list[Publish] = []
        for to in op.to:
            if output:
                out.append(Publish(self.topics.up(self.device), payload, 1))
            else:
                target = ALL if to == ALL else to
                topic = self.topics.activation(model, op.layer, self.device, target)
                out.append(Publish(topic, payload, 0, "data"))
            request.sent_bytes += publish_bytes(out[-1].topic, len(payload), out[-1].qos)
        return out

    def _frame_of(
        self,
        kind: FrameKind,
        model: str,
        epoch: Epoch,
        admission: int,
        array: Array,
        *,
        layer: int = 0,
        point: str = "output",
        row_start: int = 0,
        numbers: tuple[int, ...] = (),
    ) -> Frame:
        return Frame(
            kind=kind,
            model=model,
            epoch=epoch,
            admission=admission,
            layer=layer,
            point=point,
            source=self.device,
            sequence=0,
            dtype=_DTYPE[array.dtype.str],
            shape=array.shape,
            row_start=row_start,
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
        numbers = (int(request.compute_s * 1e6), int(wait * 1e6), sent)
        self._end(admission)
        done = self._frame_of("done", model, epoch, admission, np.empty(0, np.uint8), numbers=numbers)
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
        assert all(r.key in self._resident for r in self._requests.values())
