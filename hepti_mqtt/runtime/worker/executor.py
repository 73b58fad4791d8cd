"""The executor: runs Programs on one device, a stretch of ops at a time.

The run machine (`schedule.py`) chooses the next stretch. Its rule overlaps communication and computation: during an
outstanding Recv, any ready stretch runs. A stretch has a tape (`kernels.tape`): compiled code runs it without Python,
and stops before any row if the session's thread is interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.core.ids import PLANNER
from hepti_mqtt.core.program import (
    NUMPY_DTYPE,
    Compute,
    ExchangeKey,
    Program,
    Recv,
    Send,
    Slot,
    SlotSpec,
    WeightRef,
    slots_written,
)
from hepti_mqtt.core.schedule import (
    DropReason,
    ProgramRun,
    RunMachine,
    RunTemplate,
    in_turn,
    is_direct,
    make_template,
    stretches_of,
)
from hepti_mqtt.core.storage import StoredRows, Tiles
from hepti_mqtt.kernels import KERNELS, Weight, Workers, allocate
from hepti_mqtt.kernels.calls import Call, Calls, operand, received, sent
from hepti_mqtt.kernels.jit import JIT
from hepti_mqtt.kernels.tape import AWAITED, UNSENT, Tape
from hepti_mqtt.kernels.transfers import NO_PEERS, Peers
from hepti_mqtt.protocol.keys import UNKEYED, FrameKey
from hepti_mqtt.runtime.worker.transfers import KnownTransfer, Sockets, StretchTransfers

Array = NDArray[Any]
DeliveryResult = Literal["filled"] | DropReason
_NO_STATES: Final[Mapping[Any, Array]] = {}
PATIENCE_MS: Final = 10  #: wait of compiled code for one peer, before Python waits for all peers
LOOK_S: Final = 0.1  #: longest stay in compiled code that receives everything a run waits for


class SlotView(NamedTuple):
    """The memory of a slot: rows of a base slot, possibly in another shape."""

    base: Slot
    rows: slice | None
    shape: tuple[int, ...] | None

    def of(self, slots: Sequence[Array | None]) -> Array:
        """Return the array."""
        array = slots[self.base]
        assert array is not None
        if self.rows is not None:
            array = array[self.rows]
        return array if self.shape is None else array.reshape(self.shape)


def view_of_slot(program: Program, slot: Slot) -> SlotView:
    """Return the view of a slot."""
    spec = program.slots[slot]
    if spec.base is None:
        return SlotView(slot, None, None)
    whole = program.slots[spec.base].shape
    row = prod(whole[1:])
    stop = spec.start + prod(spec.shape) // row if row else spec.start + spec.shape[0]
    rows = None if (spec.start, stop) == (0, whole[0]) else slice(spec.start, stop)
    return SlotView(spec.base, rows, None if whole[1:] == spec.shape[1:] else spec.shape)


class Stretch(NamedTuple):
    """Ops that run together on a tape."""

    places: tuple[int, ...]  #: places of its ops in the Program, in their order on the tape
    tape: Tape
    fills: tuple[Slot, ...]  #: slots that it fills with buffers of the executor
    transfers: StretchTransfers
    leader: int  #: place by which the run machine identifies it


class BoundSend(NamedTuple):
    """A Send, and the view of its slot."""

    op: Send
    view: SlotView


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A Program bound to weights, for any number of runs of its shape."""

    template: RunTemplate
    ops: tuple[Stretch | BoundSend | None, ...]  #: stretch or Send of each place; None for a Recv
    in_line: bool  #: stretches wait for all tensors of peers in the order of their rows (`core.schedule`)
    states: Mapping[Slot, str]  #: names of the slots that are arrays of a session
    sessions: tuple[Mapping[str, SlotSpec], ...]  #: arrays of each item's session, by name
    received: Mapping[Slot, tuple[Stretch, int]]  #: stretch and row of each slot that a stretch receives
    buffers: Mapping[SlotSpec, tuple[Slot, ...]]  #: slots that stretches fill with buffers of the executor
    scratch_bytes: int  #: scratch memory of its largest stretch
    #: data of the callers for each Send, by place and receivers, the same in every run
    sends: dict[tuple[int, tuple[str, ...]], Any] = field(default_factory=dict)
    #: in a run that continues another run: exchanges of this Program, and the other one's slots that fill them
    taken: tuple[tuple[ExchangeKey, Slot], ...] = ()

    def renewed(self) -> BoundProgram:
        """Return the Program for another plan version and key, without the frame heads of the old version."""
        for op in self.ops:
            if isinstance(op, Stretch):
                op.transfers.forget()
        return replace(self, sends={})


def bind(
    program: Program,
    weights: Mapping[WeightRef, Weight],
    workers: Workers,
    taken: tuple[tuple[ExchangeKey, Slot], ...] = (),
) -> BoundProgram:
    """Bind every kernel of a Program to its weights; raises KeyError if a weight is not resident."""
    groups = stretches_of(program)
    template = make_template(program, groups)
    states = {slot: spec.state for slot, spec in enumerate(program.slots) if spec.state and spec.base is None}
    ops: list[Stretch | BoundSend | None] = [None] * len(program.ops)
    buffers: dict[SlotSpec, list[Slot]] = {}
    inline: dict[Slot, tuple[Stretch, int]] = {}
    for group in groups:
        first = program.ops[group[0]]
        if isinstance(first, Send) and not is_direct(program, first):
            ops[group[0]] = BoundSend(first, view_of_slot(program, first.slot))
        elif not isinstance(first, Recv):
            stretch = _stretch(template, group, weights, workers, states)
            for place in group:
                ops[place] = stretch
            for slot in stretch.fills:
                buffers.setdefault(program.slots[slot], []).append(slot)
            for row, each in stretch.transfers.receives.items():
                inline[each.op.slot] = stretch, row
    return BoundProgram(
        template,
        tuple(ops),
        all(op.slot in inline for op in program.ops if isinstance(op, Recv) and is_direct(program, op)),
        states,
        program.sessions(),
        inline,
        {spec: tuple(slots) for spec, slots in buffers.items()},
        max((op.tape.nbytes for op in ops if isinstance(op, Stretch)), default=0),
        taken=taken,
    )


def _stretch(
    template: RunTemplate,
    places: tuple[int, ...],
    weights: Mapping[WeightRef, Weight],
    workers: Workers,
    states: Mapping[Slot, str],
) -> Stretch:
    program, leader, places = template.program, places[0], in_turn(template.program, places)
    calls, read, written = list[Calls](), dict[Slot, None](), dict[Slot, None]()
    exchanges: list[tuple[Send | Recv, str]] = []
    for op in (program.ops[place] for place in places):
        of_op = Calls()
        if isinstance(op, Compute):
            for step in op.kernels:
                bound = KERNELS[step.kernel].bind(step, program.slots, [weights[ref] for ref in step.weights], workers)
                of_op += bound.calls
        else:
            peers = op.to if isinstance(op, Send) else (op.source,)
            of_op += [Call(sent if isinstance(op, Send) else received, (operand(program.slots, op.slot),))] * len(peers)
            exchanges += [(op, peer) for peer in peers]
        calls.append(of_op)
        read.update(dict.fromkeys(program.reads(op)))
        written.update(dict.fromkeys(slots_written(op)))
    fills = tuple(slot for slot in written if template.readers[slot] and slot not in states)
    externals = dict.fromkeys(slot for slot in (*read, *fills) if slot not in written or slot in fills)
    externals.update(dict.fromkeys(slot for slot in (*read, *written) if slot in states))
    growing = [slot for slot in externals if slot in states]
    tape = Tape(calls, workers, list(externals), growing)
    transfers = StretchTransfers(tape)
    for row, (op, peer) in zip(
        (row for row, call in enumerate(tape.calls) if call.function in (sent, received)), exchanges, strict=True
    ):
        rows = transfers.sends if isinstance(op, Send) else transfers.receives
        rows[row] = KnownTransfer(transfers, row, op, peer)
    transfers.last_rows = {each.memory: row for row, call in enumerate(tape.calls) for each in call.operands()}
    return Stretch(places, tape, fills, transfers, leader)


class OutgoingTensor(NamedTuple):
    """A tensor to send."""

    run_id: int
    op: Send  #: with the remaining receivers
    array: Array  #: a view, valid until the next op runs
    place: int
    rows: tuple[KnownTransfer, ...] = ()  #: rows of the stretch for these receivers


class _ExecutorRun(ProgramRun):
    """A run with its arrays."""

    __slots__ = ("bound", "delivered", "free", "rows", "scratch", "slots")

    def __init__(self, run_id: int, bound: BoundProgram, free: list[list[Array] | None]) -> None:
        super().__init__(run_id, bound.template)
        self.bound = bound
        self.free = free  #: free buffers for each slot that a stretch fills, None for other slots
        self.slots: list[Array | None] = [None] * len(free)
        self.rows: dict[int, int] = {}  #: next row of each suspended stretch, by leader
        self.scratch: dict[int, Array] = {}  #: scratch memory of each suspended stretch, by leader
        self.delivered: dict[int, dict[Slot, Array]] = {}  #: arrays that Python received for rows, by leader and slot

    def array(self, slot: Slot) -> Array:
        """Return a new array for a slot."""
        spec = self.template.program.slots[slot]
        return np.empty(spec.shape, NUMPY_DTYPE[spec.dtype])


class Step:
    """The next stretch or Send of a run; one object per run, updated by `Executor.next_step`."""

    __slots__ = ("_executor", "exchanged_s", "place", "run_id", "running", "sent_bytes", "timings", "waited_s")

    def __init__(self, executor: Executor, running: _ExecutorRun) -> None:
        self._executor = executor
        self.run_id, self.running = running.run_id, running
        self.place = -1  #: place of the next op; after `run`, of the last or failed op
        self.timings: list[tuple[int, float]] = []  #: measured seconds of ops, by place
        #: bytes that compiled code sent to peers, and its seconds of waiting and exchange
        self.sent_bytes, self.waited_s, self.exchanged_s = 0, 0.0, 0.0

    @property
    def kernel(self) -> str | None:
        """Return the name of the op's kernel, None for an exchange."""
        op = self.running.template.program.ops[self.place]
        return op.kernel if isinstance(op, Compute) else None

    def run(self, limit_s: float = 0.0, ops: int = 0, sockets: Sockets | None = None) -> OutgoingTensor | None:
        """Run the stretch; return the tensor to send, if there is one.

        limit_s, ops: suspend it after these seconds and ops, 0 for no limit. `Workers.interrupt`, and a row that waits
        for a peer, suspend it, too. sockets: connections for exchanges by compiled code.
        """
        running, place = self.running, self.place
        op, self.timings = running.bound.ops[place], []
        self.sent_bytes, self.waited_s, self.exchanged_s = 0, 0.0, 0.0
        if isinstance(op, BoundSend):
            out = OutgoingTensor(running.run_id, op.op, op.view.of(running.slots), place)
            self._finish(place)
            return out
        assert op is not None
        following = min(op.places.index(place) + ops, len(op.places)) if ops else len(op.places)
        try:
            # Tags depend on the run: with several runs, rewriting them costs more than compiled exchange saves.
            is_tagged = bool(op.transfers.tags) and not self._executor.machine.is_alone(running)
            if sockets is None or not JIT or is_tagged or not (op.transfers.sends or op.transfers.receives):
                return self._advance(op, following, limit_s)
            with sockets.hold() as is_held:
                return self._advance(op, following, limit_s, sockets if is_held else None)
        except BaseException:
            self.place = op.places[op.tape.op_at(op.tape.row)]
            raise

    def _advance(
        self, op: Stretch, following: int, limit_s: float, sockets: Sockets | None = None
    ) -> OutgoingTensor | None:
        """Run rows up to the op at index `following` of the stretch."""
        running, tape, leader = self.running, op.tape, op.leader
        begin = running.rows.pop(leader, None)
        if begin is None:
            begin = 0
            for slot in op.fills:
                if running.slots[slot] is None:
                    kept = running.free[slot]
                    running.slots[slot] = kept.pop() if kept else running.array(slot)
        scratch = running.scratch.pop(leader, None)
        if scratch is None:
            scratch = self._executor.take_scratch(running.bound)
        row = self._run_rows(op, begin, tape.starts[following], scratch, limit_s, sockets)
        for at, each in op.transfers.receives.items():
            if begin <= at < row:
                running.received[each.op.slot] = True
        if delivered := running.delivered.get(leader):
            for slot in [slot for slot in delivered if op.transfers.last_rows[slot] < row]:
                del delivered[slot]
        out = self._outgoing(op, row) if tape.code == UNSENT else None
        awaited = op.transfers.receives[row].op.slot if tape.code == AWAITED else None
        row += 0 if out is None else len(out.rows)
        if row < len(tape.calls):
            running.rows[leader], running.scratch[leader] = row, scratch
            place = tape.op_at(row)
            self.place = op.places[max(place - 1, 0)]
            self._executor.machine.suspend(running, op.places[place], awaited)
            return out
        self._executor.give_scratch(scratch)
        running.delivered.pop(leader, None)
        self.place = op.places[-1]
        if tape.measured:
            self.timings = list(zip(op.places, tape.seconds(), strict=True))
        self._finish(leader)
        return out

    def _run_rows(
        self, op: Stretch, row: int, stop: int, scratch: Array, limit_s: float, sockets: Sockets | None
    ) -> int:
        """Run rows; hand partially read or sent frames to the sockets; return the row where it stopped."""
        running, tape, transfers = self.running, op.tape, op.transfers
        peers = NO_PEERS
        if sockets is not None:
            transfers.apply(sockets)
            transfers.tag(running.run_id)
            patience_ms = 0
            if transfers.complete and running.bound.in_line and self._executor.machine.is_alone(running):
                limit_s, patience_ms = LOOK_S, PATIENCE_MS
            peers = Peers(running.run_id, sockets.wake, patience_ms)
        arrays: list[Any] = [running.slots[slot] for slot in tape.slots]
        delivered = running.delivered.get(op.leader, _NO_STATES)
        while True:
            row = tape.run(arrays, scratch, row, stop, limit_s, delivered, peers)
            self.sent_bytes += tape.sent_bytes
            self.waited_s += tape.waited_s
            self.exchanged_s += tape.exchanged_s
            if sockets is None:
                break
            if tape.code == AWAITED and (data := tape.came(row)):
                sockets.give_back(transfers.receives[row].peer, data)
            if tape.code != UNSENT or not (frame := tape.unsent(row)):
                break
            sockets.keep(transfers.sends[row].peer, *frame)
            row += 1
        return row

    def _outgoing(self, op: Stretch, row: int) -> OutgoingTensor:
        """Return the tensor of a row for Python to send, with the next rows of its Send that have no known header."""
        sends, tape = op.transfers.sends, op.tape
        rows = [sends[row]]
        while (each := sends.get(row + len(rows))) and each.op is rows[0].op and not tape.knows(each.row):
            rows.append(each)
        send = rows[0].op
        assert isinstance(send, Send)
        return OutgoingTensor(
            self.run_id,
            send._replace(to=tuple(each.peer for each in rows)),
            tape.array_of(row),
            op.places[tape.op_at(row)],
            tuple(rows),
        )

    def _finish(self, place: int) -> None:
        running = self.running
        slots, free = running.slots, running.free
        for slot in self._executor.machine.finish_op(running, place):
            freed, slots[slot], kept = slots[slot], None, free[slot]
            if freed is not None and kept is not None:
                kept.append(freed)

    def move_to(self, place: int) -> Step:
        """Become the stretch or Send at a place."""
        self.place = place
        return self


class Executor:
    """Executes runs; holds their slots, and free buffers by shape for later ops."""

    def __init__(self) -> None:
        self.machine: RunMachine[_ExecutorRun] = RunMachine()
        self._steps: dict[int, Step] = {}
        self._free: dict[SlotSpec, list[Array]] = {}
        self._scratch: list[Array] = []

    def __contains__(self, run_id: int) -> bool:
        return run_id in self.machine.runs

    @property
    def run_ids(self) -> tuple[int, ...]:
        """Return the ids of the active runs."""
        return tuple(self.machine.runs)

    def admit(self, run_id: int, bound: BoundProgram, states: Mapping[str, Array] = _NO_STATES) -> None:
        """Begin a run; raises ValueError if its id is active.

        states: arrays of its sessions by name, which the sessions own.
        """
        free: list[list[Array] | None] = [None] * len(bound.template.program.slots)
        for spec, slots in bound.buffers.items():
            kept = self._free.setdefault(spec, [])
            for slot in slots:
                free[slot] = kept
        running = _ExecutorRun(run_id, bound, free)
        for slot, name in bound.states.items():
            running.slots[slot] = states[name]
        self.machine.admit(running)
        self._steps[run_id] = Step(self, running)
        self._trim()

    def take_scratch(self, bound: BoundProgram) -> Array:
        """Return scratch memory for any stretch of a Program."""
        if self._scratch and len(self._scratch[-1]) >= bound.scratch_bytes:
            return self._scratch.pop()
        self._scratch.clear()
        return np.empty(bound.scratch_bytes, np.uint8)

    def give_scratch(self, scratch: Array) -> None:
        """Return scratch memory to the executor."""
        self._scratch.append(scratch)

    def deliver(
        self, run_id: int, key: ExchangeKey, array: Array, head: bytes = b"", frame_key: FrameKey = UNKEYED
    ) -> DeliveryResult:
        """Fill the slot of an exchange with `array`, not copied; ignore repeated deliveries and unknown keys.

        head: frame head of the exchange in each run; empty if compiled code must not receive it. frame_key: key of the
        tag. Raises KeyError if the run is not active, ValueError if shape, dtype or layout differ from the slot's,
        because kernels do not check them.
        """
        machine = self.machine
        running = machine.runs[run_id]
        slot = machine.slot_for(running, key)
        if not isinstance(slot, int):
            return slot
        spec = running.template.program.slots[slot]
        _check_array(array, spec, str(key))
        inside = running.bound.received.get(slot)
        if inside is not None:
            stretch, row = inside
            running.delivered.setdefault(stretch.leader, {})[slot] = array
            if head:
                stretch.transfers.receives[row].learn(head, frame_key)
        if machine.fill_slot(running, slot) or (inside is not None and running.free[slot] is not None):
            kept, before = running.free[slot], running.slots[slot]
            running.slots[slot] = array
            if kept is not None:
                running.free[slot] = None  # the array is not the executor's
                if before is not None:
                    kept.append(before)
        return "filled"

    def awaits_source(self, run_id: int, source: str) -> bool:
        """Return whether a run has yet to receive a tensor that only this device sends."""
        running = self.machine.runs[run_id]
        ops = running.template.program.ops
        recvs = (op for op in ops if isinstance(op, Recv) and op.source == source and not op.alternates)
        return any(not running.received[op.slot] for op in recvs)

    def start_task(self, run_id: int, task: int, array: Array) -> None:
        """Begin a leased task with the inputs of the run, unless it has begun."""
        for key in self.machine.runs[run_id].start_task(task):
            self.deliver(run_id, key, array)

    def end_leases(self, run_id: int) -> None:
        """Accept no more leases, so that the run can end."""
        self.machine.runs[run_id].accepts_leases = False

    def next_step(self) -> Step | None:
        """Return the first ready step; None if every run waits."""
        ready = self.machine.next_op()
        return None if ready is None else self._steps[ready[0].run_id].move_to(ready[1])

    def hold(self, run_id: int, block: int) -> bool:
        """Stop a run before a block of the graph; return False, without a change, if that is impossible."""
        running = self.machine.runs[run_id]
        program = running.template.program
        if program.state_inputs():  # its stretches cross blocks
            return False
        return 0 < block < len(program.blocks) and self.machine.hold(running, program.blocks[block])

    def is_done(self, run_id: int) -> bool:
        """Return whether all ops of a run have run."""
        running = self.machine.runs[run_id]
        return not running.ops_left and not running.accepts_leases

    def hand_over(self, run_id: int, heir: int) -> None:
        """Deliver the tensors of a finished run to the run that continues it; drop the finished run."""
        before = self.machine.runs[run_id]
        for key, slot in self.machine.runs[heir].bound.taken:
            view = view_of_slot(before.template.program, slot)
            self.deliver(heir, key, view.of(before.slots))
            before.free[view.base] = None  # the heir owns the buffer
        self.drop(run_id)

    def finish_if_done(self, run_id: int) -> bool:
        """Drop a run if all of its ops have run; return whether it was dropped."""
        is_done = run_id in self and self.is_done(run_id)
        if is_done:
            self.drop(run_id)
        return is_done

    def drop(self, run_id: int) -> None:
        """Drop a run, and free its buffers."""
        running = self.machine.remove(run_id)
        if running is None:
            return
        del self._steps[run_id]
        self._scratch += running.scratch.values()
        for slot in chain.from_iterable(running.bound.buffers.values()):
            array, kept = running.slots[slot], running.free[slot]
            if array is not None and kept is not None:
                kept.append(array)
        self._trim()

    def free_buffers(self) -> None:
        """Drop all free buffers unless a run is active."""
        if not self.machine.runs:
            self._free.clear()
            self._scratch.clear()

    def cached_bytes(self) -> int:
        """Return the bytes of free buffers."""
        of_slots = sum(spec.nbytes * len(arrays) for spec, arrays in self._free.items())
        return of_slots + sum(map(len, self._scratch))

    def _trim(self) -> None:
        """Drop free buffers of shapes that no active run uses, so that they do not accumulate over many lengths."""
        runs = self.machine.runs
        if not runs:
            return
        wanted = {spec for running in runs.values() for spec in running.bound.buffers}
        for spec in [s for s in self._free if s not in wanted]:
            del self._free[spec]
        most = max(running.bound.scratch_bytes for running in runs.values())
        self._scratch = [scratch for scratch in self._scratch if len(scratch) <= most]


def _check_array(array: Array, spec: SlotSpec, name: str) -> None:
    """Raise ValueError if an array does not have a slot's shape, dtype and layout."""
    if array.shape != spec.shape or array.dtype != NUMPY_DTYPE[spec.dtype] or not array.flags.c_contiguous:
        text = f"{array.dtype}{list(array.shape)} with strides {array.strides}"
        raise ValueError(f"{name}: got {text}, the Program expects {spec}, row by row")


# ----------------------------------------------------------------------------------------------------------------------
# Run one Program in this process: for `model verify`, benchmarks and tests.


def pack(
    tensors: Mapping[str, NDArray[Any] | StoredRows | Tiles], refs: Iterable[WeightRef]
) -> dict[WeightRef, Weight]:
    """Return weight ranges as the loader packs them.

    tensors: by canonical name, whole ([in, out] or [n], or in blocks) or as tiles; elements without a tile are zero.
    """
    packed = {}
    for ref in refs:
        buffer, tensor = allocate(ref), tensors[ref.tensor]
        if isinstance(tensor, np.ndarray | StoredRows):
            buffer.put(tensor.reshape(1, -1) if isinstance(tensor, np.ndarray) and tensor.ndim == 1 else tensor, 0, 0)
            packed[ref] = buffer.finish()
        else:
            for tile, row, column in tensor:
                buffer.put(tile, row, column)
            packed[ref] = buffer.weight()
    return packed


def run_local(
    program: Program,
    tensors: Mapping[str, NDArray[Any] | StoredRows | Tiles],
    inputs: NDArray[Any],
    workers: Workers | None = None,
    release: Callable[[], None] = lambda: None,
) -> NDArray[Any]:
    """Return the answer of a Program without peers; only the weights of the running op are in memory.

    tensors: as `pack` takes them. release: called after each op, to return memory that loading its kernels took.
    Raises ValueError if the Program has peers or sends nothing to the planner.
    """
    pool, template = workers or Workers(1), make_template(program)
    exchanges = [op for op in program.ops if not isinstance(op, Compute)]
    peers = {p for op in exchanges for p in (op.to if isinstance(op, Send) else [key[2] for key in op.keys])}
    if peers != {PLANNER} or not any(isinstance(op, Send) for op in exchanges):
        raise ValueError(f"the Program of {program.device} cannot run alone")
    states = {slot: spec.state for slot, spec in enumerate(program.slots) if spec.state and spec.base is None}
    sessions = {spec.state: np.empty(spec.shape, NUMPY_DTYPE[spec.dtype]) for spec in program.slots if spec.state}
    slots: list[Array | None] = [None] * len(program.slots)
    for slot, name in states.items():
        slots[slot] = sessions[name]
    parts: list[tuple[int, Array]] = []
    left = list(template.reader_counts)
    for place, op in enumerate(program.ops):
        if isinstance(op, Recv):
            _check_array(inputs, program.slots[op.slot], "the input")
            slots[op.slot] = inputs
        elif isinstance(op, Send):
            parts.append((op.row, np.array(view_of_slot(program, op.slot).of(slots))))
        else:
            stretch = _stretch(template, (place,), pack(tensors, op.weights), pool, states)
            for slot in stretch.fills:
                slots[slot] = np.empty(program.slots[slot].shape, NUMPY_DTYPE[program.slots[slot].dtype])
            arrays: list[Any] = [slots[slot] for slot in stretch.tape.slots]
            stretch.tape.run(arrays, np.empty(stretch.tape.nbytes, np.uint8))
            del stretch  # its weights, before the next op's
            release()
        effects = template.effects[place]
        for slot in effects.shared_slots:
            left[slot] -= 1
        for slot in (*effects.freed_slots, *(slot for slot in effects.shared_slots if not left[slot])):
            if slot not in states:
                slots[slot] = None
    return np.concatenate([part for _, part in sorted(parts, key=lambda part: part[0])])
