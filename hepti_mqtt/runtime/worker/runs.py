"""The runs on a device: work frames, early frames, steps, outgoing tensors, and ends."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from hepti_mqtt.core.errors import HeptiError, PlanError
from hepti_mqtt.core.ids import PLANNER
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.program import NUMPY_DTYPE, SlotDtype, publish_targets, state_name
from hepti_mqtt.core.recent import Recent
from hepti_mqtt.core.spec import PlainShape, RequestShape, Spec
from hepti_mqtt.models.generation import drawn_token
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
from hepti_mqtt.runtime.worker.kv_caches import DecoderSessions, SessionLostError, SessionRun
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
from hepti_mqtt.strategies.task_queue import initial_task

EARLY_BYTES: Final = 64 << 20  # limit of all early frames
EARLY_S: Final = 10.0  # age at which an early frame is dropped
EARLY_LEASES: Final = 256  # limit of all early leases
PROGRESS_S: Final = 0.25  # between two progress messages; shorter runs send none


class EarlyFrames:
    """Frames that arrived before their runs, by run id; the oldest run's frames are dropped first.

    Each frame counts with its whole buffer, so that many small frames cannot fill a board's memory.
    """

    def __init__(self) -> None:
        self._frames: OrderedDict[int, list[tuple[float, Frame]]] = OrderedDict()
        self._bytes = 0

    def store(self, frame: Frame, now: float) -> int:
        """Keep a frame; return the number of other frames dropped by age or for lack of room."""
        self._frames.setdefault(frame.run_id, []).append((now, frame))
        self._bytes += held_bytes(len(frame.body))
        dropped = 0
        while self._frames and (self._bytes > EARLY_BYTES or now - self._oldest_s() > EARLY_S):
            dropped += self.drop(next(iter(self._frames)))
        return dropped

    def take(self, run_id: int, now: float) -> tuple[list[Frame], int]:
        """Remove and return the frames of a run in order of arrival, and the number dropped by age."""
        kept = self._frames.get(run_id, [])
        frames = [frame for arrived_s, frame in kept if now - arrived_s <= EARLY_S]
        self.drop(run_id)
        return frames, len(kept) - len(frames)

    def drop(self, run_id: int) -> int:
        """Drop the frames of a run; return their number."""
        frames = self._frames.pop(run_id, [])
        self._bytes -= sum(held_bytes(len(frame.body)) for _, frame in frames)
        return len(frames)

    def clear(self) -> None:
        """Drop all frames."""
        self._frames.clear()
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of all kept frames."""
        return sum(held_bytes(len(frame.body)) for frames in self._frames.values() for _, frame in frames)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert self._bytes == self.nbytes <= EARLY_BYTES

    def _oldest_s(self) -> float:
        return next(iter(self._frames.values()))[0][0]


# ----------------------------------------------------------------------------------------------------------------------
# One run on one device, and the data that all runs of its Program share.


class PreparedSend(NamedTuple):
    """The publishes of a Send, the same in every run of its Program."""

    header_prefix: bytes  #: frame header without tag and run id
    topics: tuple[str, ...]
    plane: Literal["mesh", "data"]
    nbytes: int  #: of all PUBLISH packets
    has_body: bool


@dataclass(slots=True)
class WorkerRun:
    """A run on this device."""

    plan: Plan
    frame: Frame  #: its work frame
    started_s: float
    sessions: tuple[DecoderSession, ...]  #: of its items
    inputs: Array  #: kept for tasks that are leased later
    sends: dict[tuple[int, tuple[str, ...]], PreparedSend]
    frame_key: FrameKey = UNKEYED  #: of its plan
    chooses: bool = False  #: its output is candidates
    compute_s: float = 0.0  #: of its ops so far
    sent_bytes: int = 0  #: of its PUBLISH packets
    outputs_sent: int = 0  #: number of sent parts of the output
    reported_s: float = field(init=False)  #: last progress message
    key: PlanKey = field(init=False)
    run_id_bytes: bytes = field(init=False)  #: end of its frames' headers

    def __post_init__(self) -> None:
        self.reported_s = self.started_s
        self.key = self.frame.model, self.frame.plan_version
        self.run_id_bytes = run_id_bytes(self.frame.run_id)


# ----------------------------------------------------------------------------------------------------------------------
# All runs of a device.


_NOTHING: Final = memoryview(b"")
MAX_REMEMBERED_RUNS: Final = 1024  # ids of ended runs
MAX_ANSWERS: Final = 64  # candidates of the last runs, for steps ahead


@lru_cache(maxsize=KEPT_SHAPES)
def _may_begin(shape: RequestShape) -> bool:
    """Return whether a run of this shape may be the first of its session."""
    return any(shape == shape.decode_step(shape.new_rows, begins=True, added=added) for added in (False, True))


_DTYPE: Final[Mapping[str, SlotDtype]] = {dtype.str: name for name, dtype in NUMPY_DTYPE.items()}  # type: ignore[misc]


class WorkerRuns:
    """All runs of a device; counters: dropped frames by reason."""

    def __init__(self, device: str, topics: Topics, counters: Counter[str]) -> None:
        self._device, self._topics, self._counters = device, topics, counters
        self._building = ProgramBuildQueue(counters)
        self._executor = Executor()
        self.next_step = self._executor.next_step  #: the shell runs the step and calls `finish_step` or `fail_step`
        self._runs: dict[int, WorkerRun] = {}
        self._heirs: dict[int, int] = {}  # run that stops before a block -> its heir, the run that continues it
        self._left: dict[int, Plan] = {}  # heir in which this device has no part -> its plan
        self._followers: dict[int, tuple[ResidentPlan, Frame]] = {}  # steps ahead, by the run before them
        self._answers = Recent[int, Array](MAX_ANSWERS)  # candidates of each item, by run
        self.early = EarlyFrames()
        self._early_leases: deque[messages.LeaseTasks] = deque(maxlen=EARLY_LEASES)  # before their runs
        self.sessions = DecoderSessions(counters)
        self._ended = Recent[int, None](MAX_REMEMBERED_RUNS)
        self._waited_s: float | None = None  # wait for other devices in the last ended run

    @property
    def idle(self) -> bool:
        """Return whether no run is active."""
        return not self._runs

    @property
    def has_any(self) -> bool:
        """Return whether a run is active, or waits for its Program."""
        return bool(self._runs or self._building.waiting())

    def take_waited(self) -> float | None:
        """Return the seconds that the last ended run waited for other devices, once per run."""
        waited_s, self._waited_s = self._waited_s, None
        return waited_s

    def has_ended(self, run_id: int) -> bool:
        """Return whether a run has ended on this device."""
        return run_id in self._ended

    def reset(self) -> None:
        """Forget all run ids, because a new planner issues its own."""
        self._ended.clear()
        self._answers.clear()
        self.early.clear()
        self._early_leases.clear()

    def drop_plan(self, key: PlanKey, layout: bytes) -> None:
        """End the runs and builds of a plan version; keep its KV caches, except those that a run was writing to.

        layout: layout of the plan.
        """
        self._building.drop_plan(key)
        busy = frozenset((*r.key, session.number) for r in self._runs.values() for session in r.sessions)
        self.sessions.keep(*key, layout, busy)
        for run_id in [a for a, r in self._runs.items() if r.key == key]:
            self.end(self._heirs.get(run_id, run_id))
        self._executor.free_buffers()

    def cancel(self, run_id: int) -> None:
        """End a run that the planner cancels; count and ignore an unknown run id.

        An unknown id is not remembered, because a Cancel never precedes its work frame. The rows that the run wrote
        stay valid: the planner continues only complete sessions, possibly before this Cancel arrives.
        """
        if self._is_active(run_id):
            self.end(run_id)
        else:
            self._counters["unknown_cancel"] += 1

    def restore_caches(self, resident: ResidentPlan) -> list[Command]:
        """Let a plan continue the kept caches of its layout, and report them to the planner."""
        kept = self.sessions.restore(*resident.key, resident.layout, resident.session_rows)
        return [self._up(messages.KeptSessions(*resident.key, kept))] if kept else []

    # -- Programs -------------------------------------------------------------------------------------------------

    def next_build(self, residents: Iterable[ResidentPlan]) -> list[Command]:
        """Return the order for the next Program to build, if there is one."""
        order = self._building.next_order(residents, idle=not self._runs)
        return [] if order is None else [order]

    def handle_built(self, event: ProgramBuilt, now: float) -> tuple[ResidentPlan | None, list[Command]]:
        """Start the runs that waited for a Program, or fail them if it cannot be built; return its plan."""
        built = self._building.complete(event)
        if built is None:
            return None, []
        resident, shape, waiting = built
        if not isinstance(event.result, Exception):
            return resident, [command for frame in waiting for command in self.start(resident, frame, now)]
        text = f"{self._device} cannot build the Program of {shape}: {event.result!r}"
        code = event.result.code if isinstance(event.result, HeptiError) else "device"
        unexpected = None if isinstance(event.result, HeptiError) else event.result
        out: list[Command] = [LogTrouble("programs_failed", text, unexpected)]
        for frame in waiting:
            out += self._end_failed(resident.key, frame.run_id, code, text)
        return resident, out

    # -- frames ---------------------------------------------------------------------------------------------------

    def start(self, resident: ResidentPlan, frame: Frame, now: float) -> list[Command]:
        """Start a run, or let it wait for its Program or the run before it; raises WireError for an invalid frame."""
        begun = self._runs.get(frame.run_id)
        earlier = self._waiting_frame(frame.run_id) if begun is None else begun.frame
        if earlier is not None:
            return self._handle_duplicate(earlier, frame)
        plain, inputs = decode_work(frame)
        followed = decode_followed(frame)
        if followed is not None and self._is_active(followed.run_id):
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
        if followed is not None and self._device == resident.plan.root:  # other devices need no token ids
            if (drawn := self._drawn(followed, resident.spec, shape, inputs)) is None:
                return self._refuse(frame, "session", f"the answer of run {followed.run_id} decides no token")
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
        early_frames, stale = self.early.take(frame.run_id, now)
        if stale:
            self._counters["early_dropped"] += stale
        for early in early_frames:
            if frame.run_id not in self._executor:
                break  # an invalid frame has ended the run
            out += self._deliver(early)
        if continued is not None:
            out += self._hand_over(continued.run_id, now)
        return out + self._finish_if_done(frame.run_id, now)

    def _keep_follower(self, before: int, resident: ResidentPlan, frame: Frame) -> list[Command]:
        """Let a step wait for the end of the run before it."""
        if before in self._followers:
            return self._refuse(frame, "wire", f"two runs follow run {before}")
        self._followers[before] = resident, frame
        return []

    def _drawn(self, followed: Followed, spec: Spec, shape: RequestShape, inputs: Array) -> Array | None:
        """Return the inputs of a step, i32 [items places, items ids, ...], with the ids drawn from the run before it.

        None without the candidates of that run, or if they do not decide a token.
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

    def _is_active(self, run_id: int) -> bool:
        return run_id in self._runs or self._waiting_frame(run_id) is not None

    def _waiting_frame(self, run_id: int) -> Frame | None:
        """Return the work frame of a run that waits for its Program or for the run before it, None otherwise."""
        following = (frame for _, frame in self._followers.values() if frame.run_id == run_id)
        return self._building.waiting_frame(run_id) or next(following, None)

    def leave(self, resident: ResidentPlan, message: messages.HandOver, after: Plan, now: float) -> list[Command]:
        """Stop a run before a block and send its tensors to the devices that continue it under the new plan."""
        if self.has_ended(message.heir):
            self._counters["duplicate"] += 1
            return []
        before = self._runs.get(message.run_id)
        if before is None or before.key != resident.key:
            text = f"{self._device}: run {message.run_id} is not active"
            return [self._up(messages.RunFailed(*resident.key, message.heir, "passed", text))]
        self._left[message.heir] = after
        return self.start(resident, continue_frame(before.frame, message.heir, message.block), now)

    def _hold(self, continued: Continued, frame: Frame, shape: PlainShape) -> Plan | None:
        """Stop a run before the block where another run continues it; return its plan, None if that is impossible."""
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
        """Deliver the tensors of a stopped run to its heir, if the run is done and the heir has started."""
        heir = self._heirs.get(run_id)
        if heir is None or heir not in self._runs or not self._executor.is_done(run_id):
            return []
        before, run = self._runs[run_id], self._runs[heir]
        run.compute_s, run.sent_bytes, run.started_s = before.compute_s, before.sent_bytes, before.started_s
        self._executor.hand_over(run_id, heir)
        del self._heirs[run_id]
        self.end(run_id)
        return self._finish_if_done(heir, now)

    def _handle_duplicate(self, earlier: Frame, frame: Frame) -> list[Command]:
        """Ignore a repeated work frame; fail the run if the frames differ, because one of them is forged."""
        if frame.equals(earlier):
            self._counters["duplicate"] += 1
            return []
        self._counters["contradicted"] += 1
        self.cancel(frame.run_id)
        frames = {(f.model, f.plan_version): f for f in (earlier, frame)}.values()
        text = f"two frames with different work claim run {frame.run_id}"
        return [command for f in frames for command in self._refuse(f, "wire", text)]

    def handle_lease(self, message: messages.LeaseTasks, now: float) -> list[Command]:
        """Start leased tasks of a run; without tasks, end a run that only waited for more."""
        run = self._runs.get(message.run_id)
        if run is None:
            if self.has_ended(message.run_id):
                self._counters["late"] += 1
            else:  # keep it, because the end of the tasks is sent only once
                if len(self._early_leases) == EARLY_LEASES:
                    self._counters["early_dropped"] += 1
                self._early_leases.append(message)
            return []
        for task in message.tasks:
            self._executor.start_task(message.run_id, task, run.inputs)
        if message.tasks:
            return []
        self._executor.end_leases(message.run_id)
        return self._finish_if_done(message.run_id, now)

    def _take_leases(self, run_id: int) -> list[messages.LeaseTasks]:
        leases = [lease for lease in self._early_leases if lease.run_id == run_id]
        for lease in leases:
            self._early_leases.remove(lease)
        return leases

    def _refuse(self, frame: Frame, code: str, text: str, sessions: tuple[int, ...] = ()) -> list[Command]:
        """Fail a run that cannot begin."""
        key, text = (frame.model, frame.plan_version), f"{self._device}: {text}"
        return self._end_failed(key, frame.run_id, code, text, sessions)

    def _end_failed(
        self, key: PlanKey, run_id: int, code: str, text: str, sessions: tuple[int, ...] = ()
    ) -> list[Command]:
        """Fail a run, or its heir if it has one, and report the reason to the planner."""
        if (heir := self._heirs.get(run_id)) is not None:
            run = self._runs.get(heir)
            frame = run.frame if run is not None else self._building.waiting_frame(heir)
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
        """Return the session arrays of a run; raises SessionLostError."""
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
                arrays = self.sessions.arrays(key, states, run, resident.session_rows, busy)
            except SessionLostError as error:
                lost.append(error)
                continue
            out |= {state_name(name, item): array for name, array in arrays.items()} if item else arrays
        if lost:
            raise SessionLostError(str(lost[0]), tuple(number for error in lost for number in error.sessions))
        return out

    def handle_tensor(self, frame: Frame, now: float) -> list[Command]:
        """Deliver a peer's tensor, or keep it until its run begins."""
        if frame.run_id in self._executor:
            return self._deliver(frame)
        if dropped := self.early.store(frame, now):
            self._counters["early_dropped"] += dropped
        return []

    def try_fill(self, arrival: TensorArrival) -> bool:
        """Fill the slot of a run that waits for this arrival; return False, without a change, if none does."""
        run = self._runs.get(arrival.run_id)
        if run is None or run.key != arrival.exchange.plan_key or not arrival.has_tag(run.frame_key):
            return False
        try:
            exchange, key = arrival.exchange, run.frame_key
            return self._executor.deliver(arrival.run_id, exchange.key, arrival.array(), exchange.head, key) == "filled"
        except ValueError:
            return False  # the Program expects another shape; `handle_tensor` reports it

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

    def finish_step(self, step: Step, outgoing: OutgoingTensor | None, seconds: float, now: float) -> list[Command]:
        """Take the result of one or more steps of a run; return the publishes.

        step: the last step. seconds: kernel time of all steps.
        """
        run = self._runs.get(step.run_id)
        if run is None:
            return []
        run.compute_s += seconds
        run.sent_bytes += step.sent_bytes
        out = [] if outgoing is None else self.publish_sent(run, outgoing)
        if now - run.reported_s > PROGRESS_S:
            program = step.running.bound.template.program
            run.reported_s, block = now, program.block_of(program.ops[step.place].node)
            out.append(self._up(messages.RunProgress(*run.key, step.run_id, block)))
        task = step.running.task_completed_by(step.place)
        if task is not None:
            out.append(self._up(messages.TaskDone(*run.key, step.run_id, task)))
        return out if step.running.ops_left else out + self._finish_if_done(step.run_id, now)

    def fail_step(self, step: Step, error: Exception) -> list[Command]:
        """Fail a run whose op raised, and report the error to the planner."""
        text = f"{self._device}: {step.kernel or 'send'} failed: {error}"
        return self._fail_run(step.run_id, "device", text)

    def publish_sent(self, run: WorkerRun, outgoing: OutgoingTensor) -> list[Command]:
        """Return the publishes of an outgoing tensor."""
        op = outgoing.op
        send = run.sends.get((outgoing.place, op.to))
        if send is None:
            if op.to == (PLANNER,):
                return [self._output(run, outgoing)]
            if op.to == (self._device,):  # a task that the root device has computed itself
                self._executor.deliver(outgoing.run_id, (op.node, op.part, self._device), outgoing.array.copy())
                return []
            send = run.sends[outgoing.place, op.to] = self._prepare_send(run, outgoing)
            if send.has_body:
                for row, topic in zip(outgoing.rows, send.topics, strict=False):
                    header = frame_header(send.header_prefix, run_id_bytes(0), b"", UNKEYED)
                    row.learn(header, run.frame_key, topic)
        body = outgoing.array.data.cast("B") if send.has_body else _NOTHING
        run.sent_bytes += send.nbytes
        header = frame_header(send.header_prefix, run.run_id_bytes, body, run.frame_key)
        return [Publish(topic, header, 0, send.plane, False, body) for topic in send.topics]

    def _prepare_send(self, run: WorkerRun, outgoing: OutgoingTensor) -> PreparedSend:
        op, (model, _) = outgoing.op, run.key
        topics = tuple(self._topics.activation(model, op.layer, self._device, to) for to in publish_targets(op))
        nbytes = sum(publish_bytes(topic, frame_bytes(outgoing.array.nbytes), 0) for topic in topics)
        header = header_prefix(self._frame_for(run, outgoing), outgoing.array.nbytes)
        return PreparedSend(header, topics, "mesh" if op.route == "mesh" else "data", nbytes, outgoing.array.size > 0)

    def _output(self, run: WorkerRun, outgoing: OutgoingTensor) -> Publish:
        run.outputs_sent += 1
        if run.chooses:
            self._answers[outgoing.run_id] = outgoing.array[-len(run.sessions) :].copy()
        frame = self._frame_for(run, outgoing, "output")
        if decode_followed(run.frame) is not None:  # the planner compares the token ids with its own
            items = len(run.sessions)
            frame = replace(frame, numbers=tuple(run.inputs[items : 2 * items].tolist()))
        out = Publish(self._topics.reports(self._device), encode(frame, run.frame_key), 1)
        run.sent_bytes += publish_bytes(out.topic, out.nbytes, out.qos)
        return out

    def _frame_for(self, run: WorkerRun, outgoing: OutgoingTensor, kind: FrameKind = "tensor") -> Frame:
        op = outgoing.op
        place = {"layer": op.layer, "node": op.node, "part": op.part, "row_start": op.row}
        return self._frame_of(kind, run, outgoing.run_id, outgoing.array, **place)

    def _frame_of(self, kind: FrameKind, run: WorkerRun, run_id: int, array: Array, **fields: Any) -> Frame:
        return Frame(
            kind=kind,
            model=run.key[0],
            plan_version=run.key[1],
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
        run = self._runs[run_id]
        wait_s = self._waited_s = max(now - run.started_s - run.compute_s, 0.0)
        topic = self._topics.reports(self._device)
        sent = run.sent_bytes + publish_bytes(topic, frame_bytes(0), 1)
        numbers = (int(run.compute_s * 1e6), int(wait_s * 1e6), sent, run.outputs_sent)
        self._counters.update(compute_us=numbers[0], wait_us=numbers[1])
        follower = self._followers.pop(run_id, None)
        self.end(run_id)
        for session in run.sessions:
            if session.final:
                self.sessions.end((*run.key, session.number))
        done = self._frame_of("done", run, run_id, np.empty(0, np.uint8), numbers=numbers)
        out: list[Command] = [Publish(topic, encode(done, run.frame_key), 1)]
        return out if follower is None else out + self.start(*follower, now)

    def fail_after_loss(self, source: str | None, keys: Iterable[PlanKey], text: str) -> list[Command]:
        """Fail the runs of plan versions that wait for frames of `source`, all if it is None; they are retried."""
        plans = set(keys)
        running = [
            (a, r.key) for a, r in self._runs.items() if source is None or self._executor.awaits_source(a, source)
        ]
        failed = [(run_id, key) for run_id, key in [*running, *self._building.waiting()] if key in plans]
        return [command for run_id, key in failed for command in self._end_failed(key, run_id, "link", text)]

    def _fail_run(self, run_id: int, code: str, text: str) -> list[Command]:
        run = self._runs.get(run_id)
        return [] if run is None else self._end_failed(run.key, run_id, code, text)

    def end(self, run_id: int) -> None:
        """End a run, the run that it continues, and its steps ahead; their later frames count as late."""
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
        self.early.drop(run_id)
        self._take_leases(run_id)
        self._ended[run_id] = None

    def _up(self, message: messages.Message) -> Publish:
        return Publish(self._topics.reports(self._device), messages.encode(message), 1)

    def check(self, plans: ResidentPlans) -> None:
        """Raise AssertionError if an invariant is broken; plans: the resident plans."""
        assert set(self._runs) == set(self._executor.run_ids)
        self.early.check()
        self._building.check()
        assert not set(self._ended) & set(self._runs)
        assert set(self._heirs) <= set(self._runs)
        assert all(map(self._is_active, self._followers))
        assert set(self._left) <= {*self._runs, *(run_id for run_id, _ in self._building.waiting())}
        assert all(r.key in plans for r in self._runs.values())
