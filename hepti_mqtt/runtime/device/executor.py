"""The executor: runs the Programs of admitted requests on one device, one op at a time.

Which op is next is the machine's to say (`schedule.py`). Overlap of communication and computation falls out of its
rule: while a Recv is outstanding, whatever else is ready runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.kernels import KERNELS, Weight, Workers
from hepti_mqtt.program import NUMPY_DTYPE, Compute, Key, Program, Recv, Send, Slot, SlotSpec, WeightRef
from hepti_mqtt.schedule import ProgramRun, Refusal, RunMachine, Template, template

Array = NDArray[Any]
KernelRun = Callable[[Sequence[Array], Sequence[Array]], None]
Delivery = Literal["filled"] | Refusal
_NO_STATES: Final[Mapping[str, Array]] = {}


class View(NamedTuple):
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


def view(program: Program, slot: Slot) -> View:
    """Return where the values of a slot lie."""
    spec = program.slots[slot]
    if spec.base is None:
        return View(slot, None, None)
    whole = program.slots[spec.base].shape
    row = prod(whole[1:])
    stop = spec.start + prod(spec.shape) // row if row else spec.start + spec.shape[0]
    rows = None if (spec.start, stop) == (0, whole[0]) else slice(spec.start, stop)
    return View(spec.base, rows, None if whole[1:] == spec.shape[1:] else spec.shape)


class BoundKernel(NamedTuple):
    """A kernel bound to weights and shapes.

    whole: the slots that it reads where all of them are arrays of their own, else None; `reads` says more then.
    """

    run: KernelRun
    reads: tuple[View, ...]
    whole: tuple[Slot, ...] | None
    writes: tuple[Slot, ...]


class BoundOp(NamedTuple):
    """A Compute op, ready to run: the slots that it fills, what each of them needs, and its kernels."""

    writes: tuple[Slot, ...]
    buffers: tuple[SlotSpec, ...]
    kernels: tuple[BoundKernel, ...]


class BoundSend(NamedTuple):
    """A Send, and where its values lie."""

    op: Send
    read: View


@dataclass(frozen=True, slots=True)
class Bound:
    """A Program ready to run on this device, for any number of requests of its shape.

    sends: what those who run it keep with each Send, by its place, since it is the same in every run.
    """

    template: Template
    ops: tuple[BoundOp | BoundSend | None, ...]
    sends: dict[int, Any] = field(default_factory=dict)


def bind(program: Program, weights: Mapping[WeightRef, Weight], workers: Workers) -> Bound:
    """Bind every kernel of a Program to its weights; raises KeyError for a weight that is not resident."""
    return Bound(template(program), tuple(_bind(program, op, weights, workers) for op in program.ops))


def _bind(
    program: Program, op: Compute | Send | Recv, weights: Mapping[WeightRef, Weight], workers: Workers
) -> BoundOp | BoundSend | None:
    if isinstance(op, Send):
        return BoundSend(op, view(program, op.slot))
    if isinstance(op, Recv):
        return None
    kernels = tuple(_bound_kernel(program, step, weights, workers) for step in op.steps)
    return BoundOp(op.writes, tuple(program.slots[w] for w in op.writes), kernels)


def _bound_kernel(program: Program, op: Compute, weights: Mapping[WeightRef, Weight], workers: Workers) -> BoundKernel:
    run = KERNELS[op.kernel].bind(op, program.slots, [weights[ref] for ref in op.weights], workers)
    reads = tuple(view(program, slot) for slot in op.reads)
    whole = None if any(r.rows or r.shape is not None for r in reads) else tuple(r.base for r in reads)
    return BoundKernel(run, reads, whole, op.writes)


class Outgoing(NamedTuple):
    """What a Send wants to leave the device: `array` is a view that stays valid until the next op runs."""

    admission: int
    op: Send
    array: Array
    place: int


class _Running(ProgramRun):
    """A run with its arrays, by slot. owned: those that the executor has made, and keeps."""

    __slots__ = ("bound", "owned", "slots", "states")

    def __init__(self, admission: int, bound: Bound, states: Mapping[str, Array]) -> None:
        super().__init__(admission, bound.template)
        n = len(bound.template.program.slots)
        self.bound = bound
        self.states = states
        self.slots: list[Array | None] = [None] * n
        self.owned = [False] * n


class Step(NamedTuple):
    """The next op to run: a kernel, or None for a Send."""

    admission: int
    place: int
    kernel: str | None
    executor: Executor
    running: _Running

    def run(self) -> Outgoing | None:
        """Compute the op; return what must be sent, if it was a Send."""
        return self.executor.run(self.running, self.place)

    def following(self) -> Step | None:
        """Return the next op if it is of the same run; it must run now."""
        return self.executor.next(self.admission)


class Executor:
    """Runs admitted requests; holds their slots, and freed buffers by shape for the next op of the same shape."""

    def __init__(self) -> None:
        self._machine: RunMachine[_Running] = RunMachine()
        self._free: dict[SlotSpec, list[Array]] = {}

    def __contains__(self, admission: int) -> bool:
        return admission in self._machine.runs

    @property
    def admissions(self) -> tuple[int, ...]:
        """Return the admission numbers of the requests that run."""
        return tuple(self._machine.runs)

    def admit(self, admission: int, bound: Bound, states: Mapping[str, Array] = _NO_STATES) -> None:
        """Begin a request under its admission number; raises ValueError if it runs already.

        states: the arrays of its session by name, which stay the session's.
        """
        running = _Running(admission, bound, states)
        specs = bound.template.program.slots
        for slot in bound.template.kept:
            running.slots[slot] = states[specs[slot].state]
        self._machine.admit(running)
        self._trim()

    def deliver(self, admission: int, key: Key, array: Array) -> Delivery:
        """Fill the slot of an exchange with `array` (not copied); a second delivery and an unknown key change nothing.

        Raises KeyError if the request does not run, ValueError if shape or dtype are not the slot's.
        """
        machine = self._machine
        running = machine.runs[admission]
        slot = machine.awaited(running, key)
        if not isinstance(slot, int):
            return slot
        spec = running.template.program.slots[slot]
        if array.shape != spec.shape or array.dtype != NUMPY_DTYPE[spec.dtype]:
            raise ValueError(f"{key}: got {array.dtype}{list(array.shape)}, the Program expects {spec}")
        if machine.fill(running, slot):
            running.slots[slot] = array
        return "filled"

    def awaits(self, admission: int, source: str) -> bool:
        """Return whether a running request has yet to receive something that only this device sends."""
        running = self._machine.runs[admission]
        ops = running.template.program.ops
        recvs = (op for op in ops if isinstance(op, Recv) and op.source == source and not op.others)
        return any(not running.received[op.slot] for op in recvs)

    def lease(self, admission: int, task: int, array: Array) -> None:
        """Begin a task of a bag with what the request has brought; one that was begun is left alone."""
        for key in self._machine.runs[admission].lease(task):
            self.deliver(admission, key, array)

    def close(self, admission: int) -> None:
        """Nothing more will be leased: what is left of tasks is nobody's any more."""
        self._machine.runs[admission].open = False

    def next(self, admission: int | None = None) -> Step | None:
        """Return the first ready op, or None if every request waits, or if it is of another run than `admission`."""
        found = self._machine.next(admission)
        if found is None:
            return None
        running, place = found
        op = running.template.program.ops[place]
        return Step(running.admission, place, op.kernel if isinstance(op, Compute) else None, self, running)

    def finished(self, admission: int) -> bool:
        """Return whether a running request has no op left; drop it then."""
        running = self._machine.runs.get(admission)
        if running is None or running.left or running.open:
            return False
        self.drop(admission)
        return True

    def drop(self, admission: int) -> None:
        """Forget a request and give its buffers back."""
        running = self._machine.drop(admission)
        if running is None:
            return
        for slot, array in enumerate(running.slots):
            if array is not None and running.owned[slot]:
                self._free.setdefault(running.template.program.slots[slot], []).append(array)
        self._trim()

    def held_bytes(self) -> int:
        """Return the bytes of buffers that the executor owns and keeps for re-use."""
        return sum(spec.nbytes * len(arrays) for spec, arrays in self._free.items())

    def run(self, running: _Running, place: int) -> Outgoing | None:
        """Run one op of a request; `Step.run` calls it."""
        op = running.bound.ops[place]
        slots = running.slots
        if isinstance(op, BoundOp):
            for slot, spec in zip(op.writes, op.buffers, strict=True):
                if spec.state:
                    array = running.states[spec.state]
                else:
                    kept = self._free.get(spec)
                    array = kept.pop() if kept else np.empty(spec.shape, NUMPY_DTYPE[spec.dtype])
                    running.owned[slot] = True
                slots[slot] = array
            for run, views, whole, filled in op.kernels:
                reads: Sequence[Any] = (
                    [read.of(slots) for read in views] if whole is None else [slots[i] for i in whole]
                )
                writes: Sequence[Any] = [slots[i] for i in filled]
                run(reads, writes)
            out = None
        else:
            assert op is not None
            out = Outgoing(running.admission, op.op, op.read.of(slots), place)
        for slot in self._machine.ran(running, place):
            freed = slots[slot]
            slots[slot] = None
            if freed is not None and running.owned[slot]:
                running.owned[slot] = False
                self._free.setdefault(running.template.program.slots[slot], []).append(freed)
        return out

    def _trim(self) -> None:
        """Drop kept buffers of shapes that no running request uses, so that ragged lengths do not pile up."""
        runs = self._machine.runs
        if not runs:
            return
        wanted = {spec for running in runs.values() for spec in running.template.program.slots}
        for spec in [s for s in self._free if s not in wanted]:
            del self._free[spec]
