"""The executor: runs the Programs of admitted requests on one device, one op at a time.

Which op is next is the machine's to say (`schedule.py`). Overlap of communication and computation falls out of its
rule: while a Recv is outstanding, whatever else is ready runs.

Between two ops a matmul has put its weights into the caches, so what an op costs beside its kernel is what must come
back from memory: distinct code, and distinct objects. So all that is alike in every run is worked out when a Program is
bound, what is alike for every op of a run when it is admitted, and an op makes no object but the arrays' sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.ids import PLANNER
from hepti_mqtt.kernels import KERNELS, Weight, Workers, allocate
from hepti_mqtt.program import NUMPY_DTYPE, Compute, ExchangeKey, Program, Recv, Send, Slot, SlotSpec, WeightRef
from hepti_mqtt.schedule import DropReason, ProgramRun, RunMachine, RunTemplate, make_template
from hepti_mqtt.storage import StoredRows

Array = NDArray[Any]
KernelRun = Callable[[Sequence[Array], Sequence[Array]], None]
ArraySelector = Callable[[Sequence[Array | None]], Sequence[Any]]
DeliveryResult = Literal["filled"] | DropReason
_NO_STATES: Final[Mapping[str, Array]] = {}


class SlotView(NamedTuple):
    """Where a slot's values lie: rows of a slot that has memory, in another shape perhaps."""

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
    """Return where the values of a slot lie."""
    spec = program.slots[slot]
    if spec.base is None:
        return SlotView(slot, None, None)
    whole = program.slots[spec.base].shape
    row = prod(whole[1:])
    stop = spec.start + prod(spec.shape) // row if row else spec.start + spec.shape[0]
    rows = None if (spec.start, stop) == (0, whole[0]) else slice(spec.start, stop)
    return SlotView(spec.base, rows, None if whole[1:] == spec.shape[1:] else spec.shape)


def _selector(program: Program, slots: Sequence[Slot]) -> ArraySelector:
    """Return the function from the arrays of a run, by slot, to those of some slots: where none is a view, one of C."""
    views = [view_of_slot(program, slot) for slot in slots]
    if not views or any(v.rows or v.shape is not None for v in views):
        return lambda arrays: [v.of(arrays) for v in views]
    first, *others = (v.base for v in views)
    # Of a single place it would return no sequence.
    return itemgetter(first, *others) if others else itemgetter(slice(first, first + 1))


class BoundKernel(NamedTuple):
    """A kernel bound to weights and shapes, and the functions from a run's arrays to those that it reads and writes."""

    run: KernelRun
    reads: ArraySelector
    writes: ArraySelector


class BoundOp(NamedTuple):
    """A Compute op, ready to run: the slots that it fills with arrays of the executor, and its kernels."""

    fills: tuple[Slot, ...]
    kernels: tuple[BoundKernel, ...]


class BoundSend(NamedTuple):
    """A Send, and the function from a run's arrays to what it sends, which is the first."""

    op: Send
    read: ArraySelector


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A Program ready to run on this device, for any number of requests of its shape.

    kernels: the name of the kernel of each op, None for what is no Compute. states: the names of those slots that are
    arrays of the session. buffers: the slots that ops fill with arrays of the executor, by what array it is. sends:
    what those who run it keep with each Send, by its place, since it is the same in every run. taken: of a run that
    goes on where another one ends, the slots of that one that fill exchanges of this one.
    """

    template: RunTemplate
    ops: tuple[BoundOp | BoundSend | None, ...]
    kernels: tuple[str | None, ...]
    states: Mapping[Slot, str]
    buffers: Mapping[SlotSpec, tuple[Slot, ...]]
    sends: dict[int, Any] = field(default_factory=dict)
    taken: tuple[tuple[ExchangeKey, Slot], ...] = ()


def bind(
    program: Program,
    weights: Mapping[WeightRef, Weight],
    workers: Workers,
    taken: tuple[tuple[ExchangeKey, Slot], ...] = (),
) -> BoundProgram:
    """Bind every kernel of a Program to its weights; raises KeyError for a weight that is not resident."""
    ops = tuple(_bind(program, op, weights, workers) for op in program.ops)
    buffers: dict[SlotSpec, list[Slot]] = {}
    for slot in (slot for op in ops if isinstance(op, BoundOp) for slot in op.fills):
        buffers.setdefault(program.slots[slot], []).append(slot)
    return BoundProgram(
        make_template(program),
        ops,
        tuple(op.kernel if isinstance(op, Compute) else None for op in program.ops),
        {slot: spec.state for slot, spec in enumerate(program.slots) if spec.state and spec.base is None},
        {spec: tuple(slots) for spec, slots in buffers.items()},
        taken=taken,
    )


def _bind(
    program: Program, op: Compute | Send | Recv, weights: Mapping[WeightRef, Weight], workers: Workers
) -> BoundOp | BoundSend | None:
    if isinstance(op, Send):
        return BoundSend(op, _selector(program, (op.slot,)))
    if isinstance(op, Recv):
        return None
    kernels = tuple(_bound_kernel(program, step, weights, workers) for step in op.kernels)
    return BoundOp(tuple(slot for slot in op.writes if not program.slots[slot].state), kernels)


def _bound_kernel(program: Program, op: Compute, weights: Mapping[WeightRef, Weight], workers: Workers) -> BoundKernel:
    run = KERNELS[op.kernel].bind(op, program.slots, [weights[ref] for ref in op.weights], workers)
    return BoundKernel(run, _selector(program, op.reads), _selector(program, op.writes))


class OutgoingTensor(NamedTuple):
    """What a Send wants to leave the device: `array` is a view that stays valid until the next op runs."""

    run_id: int
    op: Send
    array: Array
    place: int


class _ExecutorRun(ProgramRun):
    """A run with its arrays, by slot. free: of each slot that an op fills the buffers kept for it, None for others."""

    __slots__ = ("bound", "free", "slots")

    def __init__(self, run_id: int, bound: BoundProgram, free: list[list[Array] | None]) -> None:
        super().__init__(run_id, bound.template)
        self.bound = bound
        self.free = free
        self.slots: list[Array | None] = [None] * len(free)

    def array(self, slot: Slot) -> Array:
        """Return a new array for a slot."""
        spec = self.template.program.slots[slot]
        return np.empty(spec.shape, NUMPY_DTYPE[spec.dtype])


class Step:
    """The next op of a run: its place, and its kernel, or None for a Send.

    There is one for a run: it becomes the next op when `Executor.next` or `next_of_run` returns it again.
    """

    __slots__ = ("_machine", "kernel", "place", "run_id", "running")

    def __init__(self, machine: RunMachine[_ExecutorRun], running: _ExecutorRun) -> None:
        self._machine = machine
        self.run_id, self.running = running.run_id, running
        self.place = -1
        self.kernel: str | None = None

    def run(self) -> OutgoingTensor | None:
        """Compute the op; return what must be sent, if it was a Send."""
        running, place = self.running, self.place
        op, slots, free = running.bound.ops[place], running.slots, running.free
        out = None
        if isinstance(op, BoundOp):
            filled, kernels = op
            for slot in filled:
                kept = free[slot]
                slots[slot] = kept.pop() if kept else running.array(slot)
            for run, reads, writes in kernels:
                run(reads(slots), writes(slots))
        else:
            assert op is not None
            out = OutgoingTensor(running.run_id, op.op, op.read(slots)[0], place)
        for slot in self._machine.finish_op(running, place):
            freed, slots[slot], kept = slots[slot], None, free[slot]
            if freed is not None and kept is not None:
                kept.append(freed)
        return out

    def next_of_run(self) -> Step | None:
        """Return the next op if it is of the same run; it must run now."""
        found = self._machine.next_op(self.run_id)
        return None if found is None else self.move_to(found[1])

    def move_to(self, place: int) -> Step:
        """Become the op at a place."""
        self.place, self.kernel = place, self.running.bound.kernels[place]
        return self


class Executor:
    """Runs admitted requests; holds their slots, and freed buffers by shape for the next op of the same shape."""

    def __init__(self) -> None:
        self._machine: RunMachine[_ExecutorRun] = RunMachine()
        self._steps: dict[int, Step] = {}
        self._free: dict[SlotSpec, list[Array]] = {}

    def __contains__(self, run_id: int) -> bool:
        return run_id in self._machine.runs

    @property
    def run_ids(self) -> tuple[int, ...]:
        """Return the ids of the runs under way."""
        return tuple(self._machine.runs)

    def admit(self, run_id: int, bound: BoundProgram, states: Mapping[str, Array] = _NO_STATES) -> None:
        """Begin a run under its id; raises ValueError if it runs already.

        states: the arrays of its session by name, which stay the session's.
        """
        free: list[list[Array] | None] = [None] * len(bound.template.program.slots)
        for spec, slots in bound.buffers.items():
            kept = self._free.setdefault(spec, [])
            for slot in slots:
                free[slot] = kept
        running = _ExecutorRun(run_id, bound, free)
        for slot, name in bound.states.items():
            running.slots[slot] = states[name]
        self._machine.admit(running)
        self._steps[run_id] = Step(self._machine, running)
        self._trim()

    def deliver(self, run_id: int, key: ExchangeKey, array: Array) -> DeliveryResult:
        """Fill the slot of an exchange with `array` (not copied); a second delivery and an unknown key change nothing.

        Raises KeyError if the request does not run, ValueError if shape, dtype or layout are not the slot's: kernels
        trust it.
        """
        machine = self._machine
        running = machine.runs[run_id]
        slot = machine.slot_for(running, key)
        if not isinstance(slot, int):
            return slot
        spec = running.template.program.slots[slot]
        if array.shape != spec.shape or array.dtype != NUMPY_DTYPE[spec.dtype] or not array.flags.c_contiguous:
            text = f"{array.dtype}{list(array.shape)} with strides {array.strides}"
            raise ValueError(f"{key}: got {text}, the Program expects {spec}, row by row")
        if machine.fill_slot(running, slot):
            running.slots[slot] = array
        return "filled"

    def awaits_source(self, run_id: int, source: str) -> bool:
        """Return whether a running request has yet to receive something that only this device sends."""
        running = self._machine.runs[run_id]
        ops = running.template.program.ops
        recvs = (op for op in ops if isinstance(op, Recv) and op.source == source and not op.alternates)
        return any(not running.received[op.slot] for op in recvs)

    def start_task(self, run_id: int, task: int, array: Array) -> None:
        """Begin a leased task with the inputs of the request; one that was begun is left alone."""
        for key in self._machine.runs[run_id].start_task(task):
            self.deliver(run_id, key, array)

    def end_leases(self, run_id: int) -> None:
        """Accept no more leases: tasks that were not leased here are never run here."""
        self._machine.runs[run_id].accepts_leases = False

    def next_step(self, run_id: int | None = None) -> Step | None:
        """Return the first ready op; None if every run waits, or if it is of another run than `run_id`."""
        found = self._machine.next_op(run_id)
        return None if found is None else self._steps[found[0].run_id].move_to(found[1])

    def hold(self, run_id: int, block: int) -> bool:
        """Let a run end before a block of the graph; False, and nothing has changed, if an op of it has run."""
        running = self._machine.runs[run_id]
        blocks = running.template.program.blocks
        return 0 < block < len(blocks) and self._machine.hold(running, blocks[block])

    def is_done(self, run_id: int) -> bool:
        """Return whether no op of a run is left."""
        running = self._machine.runs[run_id]
        return not running.ops_left and not running.accepts_leases

    def hand_over(self, run_id: int, heir: int) -> None:
        """Fill what a run takes of one that is done; that one ends."""
        before = self._machine.runs[run_id]
        for key, slot in self._machine.runs[heir].bound.taken:
            view = view_of_slot(before.template.program, slot)
            self.deliver(heir, key, view.of(before.slots))
            before.free[view.base] = None  # the buffer is the heir's
        self.drop(run_id)

    def finish_if_done(self, run_id: int) -> bool:
        """Return whether a running request has no op left; drop it then."""
        running = self._machine.runs.get(run_id)
        if running is None or running.ops_left or running.accepts_leases:
            return False
        self.drop(run_id)
        return True

    def drop(self, run_id: int) -> None:
        """Forget a request and give its buffers back."""
        running = self._machine.remove(run_id)
        if running is None:
            return
        del self._steps[run_id]
        for array, kept in zip(running.slots, running.free, strict=True):
            if array is not None and kept is not None:
                kept.append(array)
        self._trim()

    def free_buffers(self) -> None:
        """Drop what is kept for the next request, unless one runs."""
        if not self._machine.runs:
            self._free.clear()

    def cached_bytes(self) -> int:
        """Return the bytes of buffers that the executor owns and keeps for re-use."""
        return sum(spec.nbytes * len(arrays) for spec, arrays in self._free.items())

    def _trim(self) -> None:
        """Drop kept buffers of shapes that no running request uses, so that ragged lengths do not pile up."""
        runs = self._machine.runs
        if not runs:
            return
        wanted = {spec for running in runs.values() for spec in running.bound.buffers}
        for spec in [s for s in self._free if s not in wanted]:
            del self._free[spec]


# ----------------------------------------------------------------------------------------------------------------------
# One Program run to its end in this process: for `model verify`, benchmarks and tests.


def pack(tensors: Mapping[str, NDArray[Any] | StoredRows], refs: Iterable[WeightRef]) -> dict[WeightRef, Weight]:
    """Return weight ranges as the loader would make them, from whole canonical tensors [in, out] or [n], or blocks."""
    held = {}
    for ref in refs:
        buffer = allocate(ref)
        tensor = tensors[ref.tensor]
        buffer.put(tensor.reshape(1, -1) if isinstance(tensor, np.ndarray) and tensor.ndim == 1 else tensor, 0, 0)
        held[ref] = buffer.finish()
    return held


def run_local(
    program: Program,
    tensors: Mapping[str, NDArray[Any] | StoredRows],
    inputs: NDArray[Any],
    workers: Workers | None = None,
) -> NDArray[Any]:
    """Return what a Program without peers sends to the planner.

    Raises ValueError if it waits for a peer or sends nothing.
    """
    bound = bind(program, pack(tensors, program.weights()), workers or Workers(1))
    executor = Executor()
    states = {spec.state: np.empty(spec.shape, NUMPY_DTYPE[spec.dtype]) for spec in program.slots if spec.state}
    executor.admit(1, bound, states)
    for key in bound.template.inputs:
        executor.deliver(1, key, inputs)
    parts: list[tuple[int, NDArray[Any]]] = []
    while (step := executor.next_step()) is not None:
        outgoing = step.run()
        if outgoing is not None and outgoing.op.to == (PLANNER,):
            parts.append((outgoing.op.row, np.array(outgoing.array)))
    if not parts or not executor.finish_if_done(1):
        raise ValueError(f"the Program of {program.device} cannot run alone")
    return np.concatenate([part for _, part in sorted(parts, key=lambda entry: entry[0])])
