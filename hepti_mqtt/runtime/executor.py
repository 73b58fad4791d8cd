"""The executor: runs the Programs of admitted requests on one device, one op at a time.

Of the ready ops the first by (admission number, position in the Program) runs. Overlap of communication and computation
falls out of that rule: while a Recv is outstanding, whatever else is ready runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import prod
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.kernels import KERNELS, Weight, Workers
from hepti_mqtt.program import NUMPY_DTYPE, Compute, Key, Program, Recv, Send, Slot, SlotSpec, WeightRef
from hepti_mqtt.schedule import Template, template

Array = NDArray[Any]
KernelRun = Callable[[Sequence[Array], Sequence[Array]], None]
Delivery = Literal["filled", "duplicate", "unexpected"]
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


class BoundOp(NamedTuple):
    """A Compute op with its kernel bound to weights and shapes; `buffers` says what each write needs."""

    run: KernelRun
    reads: tuple[View, ...]
    frees: tuple[Slot, ...]
    writes: tuple[Slot, ...]
    buffers: tuple[SlotSpec, ...]


class BoundSend(NamedTuple):
    """A Send, and where its values lie."""

    op: Send
    read: View


@dataclass(frozen=True, slots=True)
class Bound:
    """A Program ready to run on this device, for any number of requests of its shape."""

    template: Template
    ops: tuple[BoundOp | BoundSend | None, ...]


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
    run = KERNELS[op.kernel].bind(op, program.slots, [weights[ref] for ref in op.weights], workers)
    reads = tuple(view(program, slot) for slot in op.reads)
    return BoundOp(run, reads, program.reads(op), op.writes, tuple(program.slots[w] for w in op.writes))


class Outgoing(NamedTuple):
    """What a Send wants to leave the device: `array` is a view that stays valid until the next op runs."""

    admission: int
    op: Send
    array: Array


@dataclass(slots=True)
class _Running:
    bound: Bound
    pending: list[int]
    uses: list[int]
    slots: list[Array | None]
    owned: list[bool]
    states: Mapping[str, Array]
    received: list[bool]
    left: int


class Step(NamedTuple):
    """The next op to run: a kernel, or None for a Send."""

    admission: int
    place: int
    kernel: str | None
    executor: Executor
    running: _Running

    def run(self) -> Outgoing | None:
        """Compute the op; return what must be sent, if it was a Send."""
        return self.executor.run(self.admission, self.running, self.place)


class Executor:
    """Runs admitted requests; holds their slots, and freed buffers by shape for the next op of the same shape."""

    def __init__(self) -> None:
        self._running: dict[int, _Running] = {}
        self._ready: list[tuple[int, int]] = []
        self._free: dict[SlotSpec, list[Array]] = {}

    def __contains__(self, admission: int) -> bool:
        return admission in self._running

    @property
    def admissions(self) -> tuple[int, ...]:
        """Return the admission numbers of the requests that run."""
        return tuple(self._running)

    def admit(self, admission: int, bound: Bound, states: Mapping[str, Array] = _NO_STATES) -> None:
        """Begin a request under its admission number; raises ValueError if it runs already.

        states: the arrays of its session by name, which stay the session's.
        """
        if admission in self._running:
            raise ValueError(f"request {admission} runs already")
        t = bound.template
        n = len(t.program.slots)
        slots: list[Array | None] = [None] * n
        for slot in t.kept:
            slots[slot] = states[t.program.slots[slot].state]
        self._running[admission] = _Running(
            bound, list(t.pending), list(t.uses), slots, [False] * n, states, [False] * n, t.runnable
        )
        for place in t.first:
            heappush(self._ready, (admission, place))
        self._trim()

    def deliver(self, admission: int, key: Key, array: Array) -> Delivery:
        """Fill the slot of an exchange with `array` (not copied); a second delivery and an unknown key change nothing.

        Raises KeyError if the request does not run, ValueError if shape or dtype are not the slot's.
        """
        running = self._running[admission]
        found = running.bound.template.recv.get(key)
        if found is None:
            return "unexpected"
        slot = found[1]
        if running.received[slot]:
            return "duplicate"
        spec = running.bound.template.program.slots[slot]
        if array.shape != spec.shape or array.dtype != NUMPY_DTYPE[spec.dtype]:
            raise ValueError(f"{key}: got {array.dtype}{list(array.shape)}, the Program expects {spec}")
        running.received[slot] = True
        running.slots[slot] = array
        self._fill(admission, running, slot)
        return "filled"

    def next(self) -> Step | None:
        """Return the first ready op, or None if every request waits."""
        while self._ready:
            admission, place = heappop(self._ready)
            running = self._running.get(admission)
            if running is not None:
                program = running.bound.template.program
                op = program.ops[place]
                kernel = op.kernel if isinstance(op, Compute) else None
                return Step(admission, place, kernel, self, running)
        return None

    def finished(self, admission: int) -> bool:
        """Return whether a running request has no op left; drop it then."""
        running = self._running.get(admission)
        if running is None or running.left:
            return False
        self.drop(admission)
        return True

    def drop(self, admission: int) -> None:
        """Forget a request and give its buffers back."""
        running = self._running.pop(admission, None)
        if running is None:
            return
        for slot, array in enumerate(running.slots):
            if array is not None and running.owned[slot]:
                self._free.setdefault(running.bound.template.program.slots[slot], []).append(array)
        self._trim()

    def held_bytes(self) -> int:
        """Return the bytes of buffers that the executor owns and keeps for re-use."""
        return sum(spec.nbytes * len(arrays) for spec, arrays in self._free.items())

    def run(self, admission: int, running: _Running, place: int) -> Outgoing | None:
        """Run one op of a request; `Step.run` calls it."""
        op = running.bound.ops[place]
        slots = running.slots
        running.left -= 1
        if isinstance(op, BoundOp):
            writes = []
            for slot, spec in zip(op.writes, op.buffers, strict=True):
                kept = self._free.get(spec)
                if spec.state:
                    array = running.states[spec.state]
                else:
                    array = kept.pop() if kept else np.empty(spec.shape, NUMPY_DTYPE[spec.dtype])
                    running.owned[slot] = True
                slots[slot] = array
                writes.append(array)
            op.run([read.of(slots) for read in op.reads], writes)
            for slot in op.writes:
                self._fill(admission, running, slot)
            for slot in op.frees:
                self._release(running, slot)
            return None
        assert op is not None
        out = op.read.of(slots)
        self._release(running, op.read.base)
        return Outgoing(admission, op.op, out)

    def _fill(self, admission: int, running: _Running, slot: int) -> None:
        pending = running.pending
        readers = running.bound.template.readers[slot]
        for place in readers:
            pending[place] -= 1
            if not pending[place]:
                heappush(self._ready, (admission, place))
        if not readers:
            running.uses[slot] = 1
            self._release(running, slot)

    def _release(self, running: _Running, slot: int) -> None:
        running.uses[slot] -= 1
        if running.uses[slot] > 0:
            return
        array = running.slots[slot]
        running.slots[slot] = None
        if array is not None and running.owned[slot]:
            running.owned[slot] = False
            self._free.setdefault(running.bound.template.program.slots[slot], []).append(array)

    def _trim(self) -> None:
        """Drop kept buffers of shapes that no running request uses, so that ragged lengths do not pile up."""
        if not self._running:
            return
        wanted = {spec for running in self._running.values() for spec in running.bound.template.program.slots}
        for spec in [s for s in self._free if s not in wanted]:
            del self._free[spec]
