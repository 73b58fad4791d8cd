"""The runs on a device: frames that arrive early, and what runs compute and send."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from hepti_mqtt.errors import HeptiError, PlanError
from hepti_mqtt.ids import PLANNER
from hepti_mqtt.models.generation import drawn_token
from hepti_mqtt.plan import Plan
from hepti_mqtt.program import NUMPY_DTYPE, SlotDtype, publish_targets, state_name
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import (
    Continued,
    DecoderSession,
    Followed,
    Frame,
    FrameKind,
    TensorArrival,
    continue_frame,
    decode_continued,
    decode_followed,
    decode_sessions,
    decode_work,
    encode,
    frame_bytes,
    frame_header,
    header_prefix,
    held_bytes,
    run_id_bytes,
)
from hepti_mqtt.protocol.keys import UNKEYED, FrameKey
from hepti_mqtt.protocol.topics import Topics, publish_bytes
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.runtime.worker.executor import Array, BoundProgram, Executor, OutgoingTensor, Step
from hepti_mqtt.runtime.worker.interface import Command, LogTrouble, ProgramBuilt
from hepti_mqtt.runtime.worker.kv_caches import DecoderSessions, KeptCache, SessionLostError, SessionRun
from hepti_mqtt.runtime.worker.programs import ProgramBuildQueue, next_step
from hepti_mqtt.runtime.worker.residents import (
    KEPT_SHAPES,
    Continuation,
    PlanKey,
    ProgramKey,
    ResidentPlan,
    ResidentPlans,
    shape_of,
)
from hepti_mqtt.spec import PlainShape, RequestShape, Spec
from hepti_mqtt.task_queue import initial_task

EARLY_BYTES: Final = 64 << 20  # in all
EARLY_S: Final = 10.0
EARLY_LEASES: Final = 256  # in all
PROGRESS_S: Final = 0.25  # between two words of how far a run is; shorter runs say nothing


class EarlyFrames:
    """Frames by run id; those of the run that has waited longest are dropped first.

    Each counts with the whole buffer that it holds, so many small frames cannot fill a board's memory.
    """

    def __init__(self) -> None:
        self._frames: OrderedDict[int, list[tuple[float, Frame]]] = OrderedDict()
        self._bytes = 0

    def store(self, frame: Frame, now: float) -> int:
        """Keep a frame; return how many others were dropped for it or by age."""
        self._frames.setdefault(frame.run_id, []).append((now, frame))
        self._bytes += held_bytes(len(frame.body))
        dropped = 0
        while self._frames and (self._bytes > EARLY_BYTES or now - self._oldest_s() > EARLY_S):
            dropped += self.drop(next(iter(self._frames)))
        return dropped

    def take(self, run_id: int, now: float) -> tuple[list[Frame], int]:
        """Remove and return the frames of a run in order of arrival, and the number dropped by age."""
        kept = self._frames.get(run_id, [])
        frames = [frame for since_s, frame in kept if now - since_s <= EARLY_S]
        self.drop(run_id)
        return frames, len(kept) - len(frames)

    def drop(self, run_id: int) -> int:
        """Forget the frames of a request; return how many there were."""
        frames = self._frames.pop(run_id, [])
        self._bytes -= sum(held_bytes(len(frame.body)) for _, frame in frames)
        return len(frames)

    def clear(self) -> None:
        """Forget everything."""
        self._frames.clear()
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes that the kept frames hold, summed up again."""
        return sum(held_bytes(len(frame.body)) for frames in self._frames.values() for _, frame in frames)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert self._bytes == self.nbytes <= EARLY_BYTES

    def _oldest_s(self) -> float:
        return next(iter(self._frames.values()))[0][0]


# ----------------------------------------------------------------------------------------------------------------------
# One run on one device, and what all runs of its Program share.


class PreparedSend(NamedTuple):
    """How the tensor of a Send leaves the device, the same in every run of its Program.

    header_prefix: the frame header without tag and run id. nbytes: of all PUBLISH packets.
    """

    header_prefix: bytes
    topics: tuple[str, ...]
    plane: Literal["mesh", "data"]
    nbytes: int
    has_body: bool


@dataclass(slots=True)
class WorkerRun:
    """A run on this device, begun by `frame` under `plan`.

    sessions: of its items. inputs: kept for tasks that are leased later. compute_s: of its ops so far. sent_bytes: of
    its PUBLISH packets. outputs_sent: parts of the output that were sent. frame_key: of its plan. reported_s: when the
    planner last heard how far it is. run_id_bytes: the end of its frames' headers. chooses: its answer are candidates.
    """

    plan: Plan
    frame: Frame
    started_s: float
    sessions: tuple[DecoderSession, ...]
    inputs: Array
    sends: dict[tuple[int, tuple[str, ...]], PreparedSend]
    frame_key: FrameKey = UNKEYED
    chooses: bool = False
    compute_s: float = 0.0
    sent_bytes: int = 0
    outputs_sent: int = 0
    reported_s: float = field(init=False)
    key: PlanKey = field(init=False)
    run_id_bytes: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.reported_s = self.started_s
        self.key = self.frame.model, self.frame.plan_version
        self.run_id_bytes = run_id_bytes(self.frame.run_id)


# ----------------------------------------------------------------------------------------------------------------------
# All runs of a device.


_NOTHING: Final = memoryview(b"")
MAX_REMEMBERED_RUNS: Final = 1024  # ids of runs that have ended
MAX_ANSWERS: Final = 64  # of the last runs, that another one may follow


@lru_cache(maxsize=KEPT_SHAPES)
def _may_begin(shape: RequestShape) -> bool:
    """Return whether a run of one session may be its first."""
    return any(shape == shape.decode_step(shape.new_rows, begins=True, added=added) for added in (False, True))


_DTYPE: Final[Mapping[str, SlotDtype]] = {dtype.str: name for name, dtype in NUMPY_DTYPE.items()}  # type: ignore[misc]


class WorkerRuns:
    """All runs of a device. counters: frames dropped, by reason."""

    def __init__(self, device: str, topics: Topics, counters: Counter[str]) -> None:
        self._device, self._topics, self._counters = device, topics, counters
        self._building = ProgramBuildQueue(counters)
        self._executor = Executor()
        self._runs: dict[int, WorkerRun] = {}
        self._heirs: dict[int, int] = {}  # runs that end before a block, and those that go on there
        self._left: dict[int, Plan] = {}  # of those the ones that go on elsewhere, and under which plan
        self._followers: dict[int, tuple[ResidentPlan, Frame]] = {}  # by the run that is under way before each
        self._answers: OrderedDict[int, Array] = OrderedDict()  # candidates of each item, by run
        self._early = EarlyFrames()
        self._early_leases: deque[messages.LeaseTasks] = deque(maxlen=EARLY_LEASES)  # of runs that are not here yet
        self._sessions = DecoderSessions(counters)
        self._over: OrderedDict[int, None] = OrderedDict()
        self._waited_s: float | None = None  # for others, in the last run that ended

    @property
    def open_sessions(self) -> int:
        """Return how many sessions have arrays here."""
        return len(self._sessions)

    @property
    def session_rows(self) -> int:
        """Return for how many rows the arrays of all sessions have room."""
        return self._sessions.rows

    @property
    def idle(self) -> bool:
        """Return whether no request is under way."""
        return not self._runs

    @property
    def has_any(self) -> bool:
        """Return whether a request is under way, or waits for its Program."""
        return bool(self._runs) or self._building.has_waiting

    def take_waited(self) -> float | None:
        """Return for how many seconds the last run that ended waited for others, None where it is known already."""
        waited_s, self._waited_s = self._waited_s, None
        return waited_s

    @property
    def early_bytes(self) -> int:
        """Return the bytes of frames that wait for their requests."""
        return self._early.nbytes

    def has_ended(self, run_id: int) -> bool:
        """Return whether a request has ended here."""
        return run_id in self._over

    def reset(self) -> None:
        """Forget the numbers of requests: a new planner counts its own from the beginning."""
        self._over.clear()
        self._answers.clear()
        self._early.clear()
        self._early_leases.clear()

    def drop_plan(self, key: PlanKey, layout: bytes) -> None:
        """Give up the runs of a plan version, what is being built for it, and what the runs have left.

        KV caches are kept, except those to which a run was writing; layout: of the plan.
        """
        self._building.drop_plan(key)
        busy = frozenset((*r.key, session.number) for r in self._runs.values() for session in r.sessions)
        self._sessions.keep(*key, layout, busy)
        for run_id in [a for a, r in self._runs.items() if r.key == key]:
            self.end(self._heirs.get(run_id, run_id))
        self._executor.free_buffers()

    def cancel(self, run_id: int) -> None:
        """Give up a request of which somebody else may have lost something; one that is not here is no business of it.

        A run is cancelled behind its work frame, so a number that is unknown here would only keep a later run out. The
        rows of its sessions count as they did: the planner goes on from those alone that it knows to be whole, perhaps
        before this comes.
        """
        request = self._runs.get(run_id)
        if request is None and self._waiting_frame(run_id) is None:
            self._counters["unknown_cancel"] += 1
            return
        self.end(run_id)

    def end_sessions(self, key: PlanKey, numbers: Iterable[int]) -> None:
        """Forget sessions of a plan."""
        for number in numbers:
            self._sessions.end((*key, number))

    def restore_caches(self, resident: ResidentPlan) -> list[Command]:
        """Let a plan use the kept caches of its layout, and tell the planner."""
        kept = self._sessions.restore(*resident.key, resident.layout, resident.session_rows)
        return [self._up(messages.KeptSessions(*resident.key, kept))] if kept else []

    def add_kept_caches(self, caches: Sequence[KeptCache]) -> None:
        """Take caches that an earlier process of this device has saved."""
        self._sessions.add_kept(caches)

    def limit_kept_caches(self, nbytes: int) -> None:
        """Drop the oldest kept caches until all of them fit into some bytes."""
        self._sessions.limit_kept(nbytes)

    def take_kept_caches(self) -> tuple[KeptCache, ...]:
        """Return all kept caches, the oldest first, and forget them."""
        return self._sessions.take_kept()

    # -- Programs -------------------------------------------------------------------------------------------------

    def next_build(self, residents: Iterable[ResidentPlan]) -> list[Command]:
        """Return the order for the next Program, if there is one to be built."""
        order = self._building.next_order(residents, idle=not self._runs)
        return [] if order is None else [order]

    def handle_built(self, event: ProgramBuilt, now: float) -> tuple[ResidentPlan | None, list[Command]]:
        """Begin the requests that waited for a Program, or end them if there is none; return whose plan it is of."""
        found = self._building.complete(event)
        if found is None:
            return None, []
        resident, shape, waited = found
        out: list[Command] = []
        if isinstance(event.result, Exception):
            text = f"{self._device} cannot build the Program of {shape}: {event.result!r}"
            code = event.result.code if isinstance(event.result, HeptiError) else "device"
            unexpected = None if isinstance(event.result, HeptiError) else event.result
            out.append(LogTrouble("programs_failed", text, unexpected))
            for frame in waited:
                out += self._end_failed(resident.key, frame.run_id, code, text)
            return resident, out
        for frame in waited:
            out += self.start(resident, frame, now)
        return resident, out

    # -- frames ---------------------------------------------------------------------------------------------------

    def start(self, resident: ResidentPlan, frame: Frame, now: float) -> list[Command]:
        """Begin a request, or keep it until its Program is built; raises WireError for an invalid frame."""
        begun = self._runs.get(frame.run_id)
        known = self._waiting_frame(frame.run_id) if begun is None else begun.frame
        if known is not None:
            return self._handle_duplicate(known, frame)
        plain, inputs = decode_work(frame)
        followed = decode_followed(frame)
        if followed is not None and self._is_under_way(followed.run_id):
            return self._keep_follower(followed.run_id, resident, frame)
        sessions = decode_sessions(frame)
        try:
            shape = shape_of(resident.spec, plain)
        except PlanError as error:
            return self._refuse(frame, error.code, str(error))
        dims, dtype = resident.spec.input_spec.input_layout(shape)
        if inputs.shape != dims or inputs.dtype != NUMPY_DTYPE[dtype]:
            text = f"inputs {inputs.dtype}{list(inputs.shape)} are not the {dtype}{list(dims)} that {frame.model} reads"
            return self._refuse(frame, "wire", text)
        if followed is not None and self._device == resident.plan.root:  # others need no ids
            if (drawn := self._drawn(followed, resident.spec, shape, inputs)) is None:
                return self._refuse(frame, "session", f"no token follows from what run {followed.run_id} answered here")
            inputs = drawn
        program_key: ProgramKey = shape
        if (continued := decode_continued(frame)) is not None:
            if (before := self._hold(continued, frame, plain)) is None:
                return self._refuse(frame, "passed", f"run {continued.run_id} cannot end before {continued.block}")
            after = self._left.get(frame.run_id, resident.plan)
            program_key = Continuation(shape, before, after, continued.block)
        bound = resident.programs.get(program_key)
        if bound is None:
            self._building.enqueue(frame, program_key)
            return []
        resident.programs.move_to_end(program_key)
        resident.request_program(next_step(shape, sessions))
        try:
            states = self._session_arrays(resident, bound, sessions, inputs, shape)
        except SessionLostError as error:
            return self._refuse(frame, "session", str(error), error.sessions)
        self._runs[frame.run_id] = WorkerRun(
            resident.plan, frame, now, sessions, inputs, bound.sends, resident.frame_key, plain.want == "candidates"
        )
        self._executor.admit(frame.run_id, bound, states)
        for key in bound.template.inputs:
            self._executor.deliver(frame.run_id, key, inputs)
        first = initial_task(resident.plan.devices, self._device, len(bound.template.task_inputs))
        if first is not None:
            self._executor.start_task(frame.run_id, first, inputs)
        out = [c for lease in self._take_leases(frame.run_id) for c in self.handle_lease(lease, now)]
        kept, stale = self._early.take(frame.run_id, now)
        if stale:
            self._counters["early_dropped"] += stale
        for early in kept:
            if frame.run_id not in self._executor:
                break  # one before it has ended the request
            out += self._deliver(early)
        if continued is not None:
            out += self._hand_over(continued.run_id, now)
        return out + self._finish_if_done(frame.run_id, now)

    def _keep_follower(self, before: int, resident: ResidentPlan, frame: Frame) -> list[Command]:
        """Keep a run until the one that it follows has ended here."""
        if before in self._followers:
            return self._refuse(frame, "wire", f"two runs follow run {before}")
        self._followers[before] = resident, frame
        return []

    def _drawn(self, followed: Followed, spec: Spec, shape: RequestShape, inputs: Array) -> Array | None:
        """Return the inputs of a step, i32 [items places, items ids, ...], with the ids that follow from an answer.

        None without that answer, and where candidates leave one open.
        """
        rows, items = self._answers.get(followed.run_id), len(followed.draws)
        if rows is None or len(rows) != items:
            return None
        out, vocab = inputs.copy(), spec.output_shape(shape.with_want("task"))[1]
        for item in np.flatnonzero(out[items : 2 * items] < 0):
            token = drawn_token(followed.draws[item], rows[item], vocab)
            if token is None:
                return None
            out[items + item] = token
        return out

    def _is_under_way(self, run_id: int) -> bool:
        return run_id in self._runs or self._waiting_frame(run_id) is not None

    def _waiting_frame(self, run_id: int) -> Frame | None:
        """Return the work frame of a run that waits for its Program, or for the run before it; None if it does not."""
        following = (frame for _, frame in self._followers.values() if frame.run_id == run_id)
        return self._building.waiting_frame(run_id) or next(following, None)

    def leave(self, resident: ResidentPlan, message: messages.HandOver, after: Plan, now: float) -> list[Command]:
        """Let a run end before a block, and send what is here of it to those that go on under another plan."""
        if self.has_ended(message.heir):
            self._counters["duplicate"] += 1
            return []
        before = self._runs.get(message.run_id)
        if before is None or before.key != resident.key:
            text = f"{self._device}: run {message.run_id} is not here"
            return [self._up(messages.RunFailed(*resident.key, message.heir, "passed", text))]
        self._left[message.heir] = after
        return self.start(resident, continue_frame(before.frame, message.heir, message.block), now)

    def _hold(self, continued: Continued, frame: Frame, shape: PlainShape) -> Plan | None:
        """Let a run end where another one goes on; return its plan, None if it is not here or is past that."""
        before = self._runs.get(continued.run_id)
        if before is None or before.key[0] != frame.model or decode_continued(before.frame) is not None:
            return None
        heir = self._heirs.get(continued.run_id)
        if heir is None and decode_work(before.frame)[0] == shape:
            heir = frame.run_id if self._executor.hold(continued.run_id, continued.block) else None
        if heir != frame.run_id:
            return None
        self._heirs[continued.run_id] = heir
        return before.plan

    def _hand_over(self, run_id: int, now: float) -> list[Command]:
        """Give what a run has computed to the one that goes on with it, once both are so far."""
        heir = self._heirs.get(run_id)
        if heir is None or heir not in self._runs or not self._executor.is_done(run_id):
            return []
        before, run = self._runs[run_id], self._runs[heir]
        run.compute_s, run.sent_bytes, run.started_s = before.compute_s, before.sent_bytes, before.started_s
        self._executor.hand_over(run_id, heir)
        del self._heirs[run_id]
        self.end(run_id)
        return self._finish_if_done(heir, now)

    def _handle_duplicate(self, known: Frame, frame: Frame) -> list[Command]:
        """Ignore what has come before; give a run up if other work claims its number: one of both is forged."""
        if frame.equals(known):
            self._counters["duplicate"] += 1
            return []
        self._counters["contradicted"] += 1
        self.cancel(frame.run_id)
        plans = {(f.model, f.plan_version): f for f in (known, frame)}.values()
        text = f"two frames with different work claim run {frame.run_id}"
        return [command for f in plans for command in self._refuse(f, "wire", text)]

    def handle_lease(self, message: messages.LeaseTasks, now: float) -> list[Command]:
        """Start leased tasks of a run; if none are left, end what only waited for more."""
        request = self._runs.get(message.run_id)
        if request is None:
            if self.has_ended(message.run_id):
                self._counters["late"] += 1
            else:  # kept: that no task is left is said only once
                if len(self._early_leases) == EARLY_LEASES:
                    self._counters["early_dropped"] += 1
                self._early_leases.append(message)
            return []
        for task in message.tasks:
            self._executor.start_task(message.run_id, task, request.inputs)
        if message.tasks:
            return []
        self._executor.end_leases(message.run_id)
        return self._finish_if_done(message.run_id, now)

    def _take_leases(self, run_id: int) -> list[messages.LeaseTasks]:
        found = [lease for lease in self._early_leases if lease.run_id == run_id]
        for lease in found:
            self._early_leases.remove(lease)
        return found

    def _refuse(self, frame: Frame, code: str, text: str, sessions: tuple[int, ...] = ()) -> list[Command]:
        """End a run that cannot begin."""
        key, text = (frame.model, frame.plan_version), f"{self._device}: {text}"
        return self._end_failed(key, frame.run_id, code, text, sessions)

    def _end_failed(
        self, key: PlanKey, run_id: int, code: str, text: str, sessions: tuple[int, ...] = ()
    ) -> list[Command]:
        """End a run, or the one that was to go on with it; the planner hears why."""
        if (heir := self._heirs.get(run_id)) is not None:
            known = self._runs.get(heir)
            frame = known.frame if known is not None else self._building.waiting_frame(heir)
            if frame is not None:
                key, run_id = (frame.model, frame.plan_version), heir
        self.end(run_id)
        return [self._up(messages.RunFailed(*key, run_id, code, text, sessions))]

    def _session_arrays(
        self,
        resident: ResidentPlan,
        bound: BoundProgram,
        sessions: Sequence[DecoderSession],
        inputs: Array,
        shape: RequestShape,
    ) -> Mapping[str, Array]:
        """Return the arrays that the sessions of a run keep here; raises SessionLostError."""
        if not bound.sessions:
            return {}
        rows = shape.sizes if len(sessions) > 1 else (shape.new_rows,)
        begins = len(sessions) > 1 or _may_begin(shape)
        used = {(*r.key, session.number) for r in self._runs.values() for session in r.sessions}
        keys = [(*resident.key, session.number) for session in sessions]
        busy, out, lost = frozenset({*used, *keys}), dict[str, Array](), list[SessionLostError]()
        for item, (key, session, count, states) in enumerate(zip(keys, sessions, rows, bound.sessions, strict=True)):
            at = int(inputs[item])
            run = SessionRun(at, at + count, shape.session_rows, begins, session.source, session.takes_over)
            try:
                arrays = self._sessions.arrays(key, states, run, resident.session_rows, busy)
            except SessionLostError as error:
                lost.append(error)
                continue
            out |= {state_name(name, item): array for name, array in arrays.items()} if item else arrays
        if lost:
            raise SessionLostError(str(lost[0]), tuple(number for error in lost for number in error.sessions))
        return out

    def handle_tensor(self, frame: Frame, now: float) -> list[Command]:
        """Take what a peer has sent, or keep it until its request is here."""
        if frame.run_id in self._executor:
            return self._deliver(frame)
        if dropped := self._early.store(frame, now):
            self._counters["early_dropped"] += dropped
        return []

    def try_fill(self, arrival: TensorArrival) -> bool:
        """Fill the slot of a run that waits for this arrival; False, and nothing has changed, where it is not so."""
        request = self._runs.get(arrival.run_id)
        if request is None or request.key != arrival.exchange.plan_key or not arrival.has_tag(request.frame_key):
            return False
        try:
            exchange, key = arrival.exchange, request.frame_key
            return self._executor.deliver(arrival.run_id, exchange.key, arrival.array(), exchange.head, key) == "filled"
        except ValueError:
            return False  # not what the Program expects; `tensor` says so

    def _deliver(self, frame: Frame) -> list[Command]:
        try:
            outcome = self._executor.deliver(frame.run_id, (frame.node, frame.part, frame.source), frame.array())
        except ValueError as exc:
            self._counters["bad_shape"] += 1
            return self._fail_run(frame.run_id, "wire", f"{self._device}: frame of {frame.source}: {exc}")
        if outcome != "filled":
            self._counters[outcome] += 1
        return []

    # -- ops ------------------------------------------------------------------------------------------------------

    def next_step(self) -> Step | None:
        """Return the next op to run; the shell runs it and calls `done` or `fail_step`."""
        return self._executor.next_step()

    def finish_step(self, step: Step, outgoing: OutgoingTensor | None, seconds: float, now: float) -> list[Command]:
        """Take the result of steps of one run, of which `step` was the last; return what must be published.

        seconds: that their kernels took.
        """
        request = self._runs.get(step.run_id)
        if request is None:
            return []
        request.compute_s += seconds
        request.sent_bytes += step.sent_bytes
        out = [] if outgoing is None else self.publish_sent(request, outgoing)
        if now - request.reported_s > PROGRESS_S:
            program = step.running.bound.template.program
            request.reported_s, block = now, program.block_of(program.ops[step.place].node)
            out.append(self._up(messages.RunProgress(*request.key, step.run_id, block)))
        task = step.running.task_completed_by(step.place)
        if task is not None:
            out.append(self._up(messages.TaskDone(*request.key, step.run_id, task)))
        return out if step.running.ops_left else out + self._finish_if_done(step.run_id, now)

    def fail_step(self, step: Step, error: Exception) -> list[Command]:
        """Give up a request whose op raised; the planner hears why."""
        text = f"{self._device}: {step.kernel or 'send'} failed: {error}"
        return self._fail_run(step.run_id, "device", text)

    def publish_sent(self, request: WorkerRun, outgoing: OutgoingTensor) -> list[Command]:
        """Return the publishes of what an op of a run sends."""
        op = outgoing.op
        way = request.sends.get((outgoing.place, op.to))
        if way is None:
            if op.to == (PLANNER,):
                return [self._output(request, outgoing)]
            if op.to == (self._device,):  # a task that the head device has computed itself
                self._executor.deliver(outgoing.run_id, (op.node, op.part, self._device), outgoing.array.copy())
                return []
            way = request.sends[outgoing.place, op.to] = self._prepare_send(request, outgoing)
            if way.has_body:
                for each, topic in zip(outgoing.rows, way.topics, strict=False):
                    header = frame_header(way.header_prefix, run_id_bytes(0), b"", UNKEYED)
                    each.learn(header, request.frame_key, topic)
        body = outgoing.array.data.cast("B") if way.has_body else _NOTHING
        request.sent_bytes += way.nbytes
        header = frame_header(way.header_prefix, request.run_id_bytes, body, request.frame_key)
        return [Publish(topic, header, 0, way.plane, False, body) for topic in way.topics]

    def _prepare_send(self, request: WorkerRun, outgoing: OutgoingTensor) -> PreparedSend:
        op, (model, _) = outgoing.op, request.key
        topics = tuple(self._topics.activation(model, op.layer, self._device, to) for to in publish_targets(op))
        nbytes = sum(publish_bytes(topic, frame_bytes(outgoing.array.nbytes), 0) for topic in topics)
        header = header_prefix(self._frame_for(request, outgoing), outgoing.array.nbytes)
        return PreparedSend(header, topics, "mesh" if op.route == "mesh" else "data", nbytes, outgoing.array.size > 0)

    def _output(self, request: WorkerRun, outgoing: OutgoingTensor) -> Publish:
        request.outputs_sent += 1
        if request.chooses:
            self._answers[outgoing.run_id] = outgoing.array[-len(request.sessions) :].copy()
            while len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        frame = self._frame_for(request, outgoing, "output")
        if decode_followed(request.frame) is not None:  # the planner compares the ids with its own
            items = len(request.sessions)
            frame = replace(frame, numbers=tuple(request.inputs[items : 2 * items].tolist()))
        out = Publish(self._topics.reports(self._device), encode(frame, request.frame_key), 1)
        request.sent_bytes += publish_bytes(out.topic, out.nbytes, out.qos)
        return out

    def _frame_for(self, request: WorkerRun, outgoing: OutgoingTensor, kind: FrameKind = "tensor") -> Frame:
        op = outgoing.op
        place = {"layer": op.layer, "node": op.node, "part": op.part, "row_start": op.row}
        return self._frame_of(kind, request, outgoing.run_id, outgoing.array, **place)

    def _frame_of(self, kind: FrameKind, request: WorkerRun, run_id: int, array: Array, **fields: Any) -> Frame:
        return Frame(
            kind=kind,
            model=request.key[0],
            plan_version=request.key[1],
            run_id=run_id,
            source=self._device,
            dtype=_DTYPE[array.dtype.str],
            shape=array.shape,
            body=array.data.cast("B") if array.size else b"",
            **fields,
        )

    def _finish_if_done(self, run_id: int, now: float) -> list[Command]:
        if run_id in self._heirs:
            return self._hand_over(run_id, now)
        if not self._executor.finish_if_done(run_id):
            return []
        if run_id in self._left:
            self.end(run_id)
            return []
        request = self._runs[run_id]
        wait = self._waited_s = max(now - request.started_s - request.compute_s, 0.0)
        topic = self._topics.reports(self._device)
        sent = request.sent_bytes + publish_bytes(topic, frame_bytes(0), 1)
        numbers = (int(request.compute_s * 1e6), int(wait * 1e6), sent, request.outputs_sent)
        self._counters.update(compute_us=numbers[0], wait_us=numbers[1])
        follower = self._followers.pop(run_id, None)
        self.end(run_id)
        for session in request.sessions:
            if session.final:
                self._sessions.end((*request.key, session.number))
        done = self._frame_of("done", request, run_id, np.empty(0, np.uint8), numbers=numbers)
        out: list[Command] = [Publish(topic, encode(done, request.frame_key), 1)]
        return out if follower is None else out + self.start(*follower, now)

    def fail_after_loss(self, source: str | None, keys: Iterable[PlanKey], text: str) -> list[Command]:
        """Give up the runs of plan versions that miss frames of a device, or all of them; they are retried."""
        of = set(keys)
        running = [
            (a, r.key) for a, r in self._runs.items() if source is None or self._executor.awaits_source(a, source)
        ]
        out: list[Command] = []
        for run_id, key in [(a, k) for a, k in [*running, *self._building.waiting()] if k in of]:
            out += self._end_failed(key, run_id, "link", text)
        return out

    def _fail_run(self, run_id: int, code: str, text: str) -> list[Command]:
        run = self._runs.get(run_id)
        return [] if run is None else self._end_failed(run.key, run_id, code, text)

    def end(self, run_id: int) -> None:
        """Forget a request, and one that it was to go on with; what still comes of it is late."""
        self._heirs.pop(run_id, None)
        self._left.pop(run_id, None)
        for before in [run for run, heir in self._heirs.items() if heir == run_id]:
            self.end(before)
        for before in [run for run, (_, frame) in self._followers.items() if run_id in (run, frame.run_id)]:
            _, frame = self._followers.pop(before)
            if frame.run_id != run_id:
                self.end(frame.run_id)
        self._executor.drop(run_id)
        self._runs.pop(run_id, None)
        self._building.drop(run_id)
        self._early.drop(run_id)
        self._take_leases(run_id)
        self._over[run_id] = None
        while len(self._over) > MAX_REMEMBERED_RUNS:
            self._over.popitem(last=False)

    def _up(self, message: messages.Message) -> Publish:
        return Publish(self._topics.reports(self._device), messages.encode(message), 1)

    def check(self, epochs: ResidentPlans) -> None:
        """Raise AssertionError if an invariant is broken; plan versions: those that are here."""
        assert set(self._runs) == set(self._executor.run_ids)
        self._early.check()
        self._building.check()
        assert not set(self._over) & set(self._runs)
        assert set(self._heirs) <= set(self._runs)
        assert all(map(self._is_under_way, self._followers))
        assert set(self._left) <= {*self._runs, *(run_id for run_id, _ in self._building.waiting())}
        assert all(r.key in epochs for r in self._runs.values())
