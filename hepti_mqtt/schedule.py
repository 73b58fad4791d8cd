"""The one machine by which Programs run: the executor gives it arrays and kernels, the simulator costs and links.

It decides which op of a device runs next, what an exchange that arrives does, and when a slot and a run are over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Generic, Literal, NamedTuple, TypeVar

from hepti_mqtt.ids import PLANNER
from hepti_mqtt.program import Compute, ExchangeKey, Op, Program, Recv, Send, Slot, slots_written


def route_to_replicas(now: float, replicas: Sequence[tuple[float, float]], sizes: Iterable[float]) -> Iterator[int]:
    """Yield for each request in turn the replica that answers it first, behind those that were dealt before it.

    A slow replica that is free gets none that a fast one will have answered sooner, though it is busy. replicas: of
    each, until when it is busy, and the seconds of a request of size 1 there.
    """
    free_s = [max(busy_s, now) for busy_s, _ in replicas]
    for size in sizes:
        done_s = [free + size * seconds for free, (_, seconds) in zip(free_s, replicas, strict=True)]
        first = min(range(len(replicas)), key=done_s.__getitem__)
        free_s[first] = done_s[first]
        yield first


class OpEffects(NamedTuple):
    """What an op changes that has run: what nothing else has a part in, and what is counted.

    ready_ops: readers of what it wrote that wait for nothing else. waiting_ops: its other readers. freed_slots: slots
    that nobody reads from then on. shared_slots: slots that it read, and others.
    """

    ready_ops: tuple[int, ...]
    waiting_ops: tuple[int, ...]
    freed_slots: tuple[Slot, ...]
    shared_slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class RunTemplate:
    """A Program prepared for running: readiness is a counter per op, and a slot is free after its last reader.

    state_slots: slots that are filled from the start. pending: distinct slots that an op waits for. effects: what
    each op changes. readers: ops that read a slot or a view of it. reader_counts: how many of them. slot_of_exchange:
    the slot that an exchange fills. inputs: the exchanges that the request itself brings. ready_at_start: ops that wait
    for nothing. op_count: how many ops run whatever is leased; a Recv does not, its exchange arrives. task_inputs:
    the exchanges with which each leased task begins. task_of_op: that of each op, -1 for none; empty without tasks.
    ops_per_task: how many ops of each task run. places: of the ops; of a stretch that runs as one op, the first.
    """

    program: Program
    state_slots: tuple[Slot, ...]
    pending: tuple[int, ...]
    effects: tuple[OpEffects, ...]
    readers: tuple[tuple[int, ...], ...]
    reader_counts: tuple[int, ...]
    slot_of_exchange: Mapping[ExchangeKey, Slot]
    inputs: tuple[ExchangeKey, ...]
    ready_at_start: tuple[int, ...]
    op_count: int
    task_inputs: Mapping[int, tuple[ExchangeKey, ...]]
    task_of_op: tuple[int, ...]
    ops_per_task: Mapping[int, int]
    places: tuple[int, ...]

    def without(self, places: AbstractSet[int]) -> RunTemplate:
        """Return the template in which some ops never become ready, and so free nothing."""

        def others(readers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple([reader for reader in readers if reader not in places])

        effects = [e._replace(ready_ops=others(e.ready_ops), waiting_ops=others(e.waiting_ops)) for e in self.effects]
        return replace(self, effects=tuple(effects), readers=tuple(map(others, self.readers)))


def _task_of(program: Program) -> tuple[int, ...]:
    """Return the task of each op: that of what it is computed from; empty without tasks."""
    if not any(isinstance(op, Recv) and op.task >= 0 for op in program.ops):
        return ()
    of: dict[Slot, int] = {}
    found = []
    for op in program.ops:
        task = op.task if isinstance(op, Recv) else max((of[s] for s in program.reads(op) if s in of), default=-1)
        of.update(dict.fromkeys(slots_written(op), task))
        found.append(task)
    return tuple(found)


def _after(
    writes: Sequence[Slot], reads: Sequence[Slot], readers: Sequence[Sequence[int]], pending: Sequence[int]
) -> OpEffects:
    ready: list[int] = []
    waiting: list[int] = []
    freed = [slot for slot in writes if not readers[slot]]
    shared: list[int] = []
    for slot in writes:
        for reader in readers[slot]:
            (ready if pending[reader] == 1 else waiting).append(reader)
    for slot in reads:
        (freed if len(readers[slot]) == 1 else shared).append(slot)
    return OpEffects(tuple(ready), tuple(waiting), tuple(freed), tuple(shared))


def _awaited(program: Program) -> list[int]:
    """Return for each op the Recvs before it that it waits for, itself among them, as bits of their places."""
    of_slot: dict[Slot, int] = {}
    out = []
    for place, op in enumerate(program.ops):
        bits = 1 << place if isinstance(op, Recv) else 0
        for slot in program.reads(op):
            bits |= of_slot.get(slot, 0)
        of_slot.update(dict.fromkeys(slots_written(op), bits))
        out.append(bits)
    return out


def is_direct(program: Program, op: Op) -> bool:
    """Return whether an op is an exchange with one device or more, over their own connections if it is a Send."""
    if isinstance(op, Send):
        return op.route == "mesh" and PLANNER not in op.to and program.device not in op.to
    return isinstance(op, Recv) and op.source not in (PLANNER, program.device)


def _is_in_line(program: Program, awaited: Sequence[int]) -> bool:
    """Return whether the last Recv that an op waits for is never before that of the op before it.

    Then to wait in this order delays no op, if exchanges come in the order of the graph. They are exchanges of devices
    over their own connections.
    """
    recvs = [(place, op) for place, op in enumerate(program.ops) if isinstance(op, Recv)]
    sends = [op for op in program.ops if isinstance(op, Send) and op.to != (PLANNER,)]
    if any(op.alternates or op.task >= 0 for _, op in recvs) or not all(is_direct(program, op) for op in sends):
        return False
    from_peers = sum(1 << place for place, op in recvs if is_direct(program, op))
    last = [
        (b & from_peers).bit_length() for b, op in zip(awaited, program.ops, strict=True) if not isinstance(op, Recv)
    ]
    return all(before <= after for before, after in pairwise(last))


def stretches_of(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the places of ops in groups that run as one, each in the order in which they run but for its first.

    Computes that wait for the same exchanges are a stretch. Where ops wait in the order of their Recvs, exchanges with
    devices are in it, too: a Recv before what reads it, or behind that if it is the first. Other Sends and Recvs are
    alone. So stretches run in the order in which their ops would run.

    The ops of a stretch belong to one block of the graph, because another plan may take the run over before the next
    one; it never does so within a run of a session.
    """
    may_be_held = not program.state_inputs()
    awaited = _awaited(program)
    in_line = _is_in_line(program, awaited)
    out: list[list[int]] = []
    before: list[list[int]] = []
    last: tuple[int, int] | None = None
    coming: dict[Slot, int] = {}
    for place, op in enumerate(program.ops):
        if isinstance(op, Recv):  # it does not run, so it ends no stretch
            if in_line and is_direct(program, op):
                coming[op.slot] = place
            else:
                before.append([place])
            continue
        joins = isinstance(op, Compute) or (in_line and is_direct(program, op))
        block = program.block_of(op.node) if may_be_held else 0
        key = (0 if in_line else awaited[place], block) if joins else None
        received = [coming.pop(slot) for slot in program.reads(op) if slot in coming]
        if key is None:
            before += [[recv] for recv in received]
            out.append([place])
        elif key == last:
            out[-1] += [*received, place]
        else:
            out.append([place, *received])
        last = key
    return tuple(map(tuple, [*before, *([place] for place in coming.values()), *out]))


def make_template(program: Program, stretches: Sequence[tuple[int, ...]] | None = None) -> RunTemplate:
    """Return the template of a Program; stretches: the places of ops that run as one, by default each alone."""
    groups = stretches or tuple((place,) for place in range(len(program.ops)))
    readers: list[list[int]] = [[] for _ in program.slots]
    pending, first = [0] * len(program.ops), []
    reads: dict[int, list[Slot]] = {}
    recv: dict[ExchangeKey, Slot] = {}
    kept = program.state_inputs()
    for place, *others in groups:
        op, group = program.ops[place], [program.ops[p] for p in (place, *others)]
        within = {slot for each in group for slot in slots_written(each)}
        used = dict.fromkeys(slot for each in group for slot in program.reads(each))
        reads[place] = [slot for slot in used if slot not in within]
        for slot in reads[place]:
            readers[slot].append(place)
        pending[place] = len(set(reads[place]).difference(kept))
        for each in group:
            if isinstance(each, Recv):
                recv.update(dict.fromkeys(each.keys, each.slot))
        if not isinstance(op, Recv) and not pending[place]:
            first.append(place)
    effects = [OpEffects((), (), (), ())] * len(program.ops)
    for place, *others in groups:
        written = [slot for p in (place, *others) for slot in slots_written(program.ops[p])]
        if others:
            written = [slot for slot in written if readers[slot]]
        effects[place] = _after(written, reads[place], readers, pending)
    places = tuple(sorted(place for place, *_ in groups))
    task, runs = _task_of(program), Counter[int]()
    of_ops = [place for place in places if not isinstance(program.ops[place], Recv)]
    if task:
        runs.update(task[place] for place in of_ops if task[place] >= 0)
    begun = {t: tuple(op.key for op in program.ops if isinstance(op, Recv) and op.task == t) for t in runs}
    late = {key for keys in begun.values() for key in keys}
    return RunTemplate(
        program=program,
        state_slots=kept,
        pending=tuple(pending),
        effects=tuple(effects),
        readers=tuple(tuple(r) for r in readers),
        reader_counts=tuple(len(r) for r in readers),
        slot_of_exchange=recv,
        inputs=tuple(key for key in recv if key[2] == PLANNER and key not in late),
        ready_at_start=tuple(sorted(first)),
        op_count=len(of_ops) - runs.total(),
        task_inputs=begun,
        task_of_op=task,
        ops_per_task=runs,
        places=places,
    )


DropReason = Literal["duplicate", "unexpected"]


class ProgramRun:
    """One request on one device, under its run id: what its ops still wait for, and who still reads a slot.

    ops_left: ops that have not run, those of leased tasks left out. task_ops_left: how many ops are left of each
    task that is leased here. accepts_leases: more may be leased, and nothing else says when the run is over. A
    subclass adds what its user keeps of a run. awaited: where stretches go on once a slot of theirs is filled.
    """

    __slots__ = (
        "accepts_leases",
        "awaited",
        "ops_left",
        "pending",
        "readers_left",
        "received",
        "run_id",
        "task_ops_left",
        "template",
    )

    def __init__(self, run_id: int, template: RunTemplate) -> None:
        self.run_id = run_id
        self.template = template
        self.pending = list(template.pending)
        self.readers_left = list(template.reader_counts)
        self.received = [False] * len(template.reader_counts)
        self.ops_left = template.op_count
        self.task_ops_left: dict[int, int] = {}
        self.awaited: dict[Slot, int] = {}
        self.accepts_leases = bool(template.task_inputs) and not template.op_count

    def start_task(self, task: int) -> tuple[ExchangeKey, ...]:
        """Take a task; return the exchanges that it begins with, none if it was taken before or is unknown."""
        if task in self.task_ops_left or task not in self.template.task_inputs:
            return ()
        self.task_ops_left[task] = self.template.ops_per_task[task]
        return self.template.task_inputs[task]

    def task_completed_by(self, place: int) -> int | None:
        """Return the task of which the op at a place, which has run, was the last; None if it was of none."""
        if not self.template.task_of_op:
            return None
        task = self.template.task_of_op[place]
        return task if task >= 0 and not self.task_ops_left[task] else None


R = TypeVar("R", bound=ProgramRun)


class RunMachine(Generic[R]):
    """The runs of one device: of all ready ops the first by (run id, position in the Program) is next.

    An exchange fills its slot as soon as it is taken; it waits for no turn.
    """

    def __init__(self) -> None:
        self.runs: dict[int, R] = {}
        self._ready: list[tuple[int, int]] = []

    def admit(self, run: R) -> None:
        """Begin a run; raises ValueError if one of this run id runs already."""
        if run.run_id in self.runs:
            raise ValueError(f"request {run.run_id} runs already")
        self.runs[run.run_id] = run
        for place in run.template.ready_at_start:
            heappush(self._ready, (run.run_id, place))

    def slot_for(self, run: R, key: ExchangeKey) -> Slot | DropReason:
        """Return the slot that an exchange is to `fill`, or why it is dropped."""
        slot = run.template.slot_of_exchange.get(key)
        if slot is None:
            return "unexpected"
        return "duplicate" if run.received[slot] else slot

    def fill_slot(self, run: R, slot: Slot) -> bool:
        """Take an exchange for good; return whether anybody reads its slot."""
        run.received[slot] = True
        readers, pending = run.template.readers[slot], run.pending
        for place in readers:
            pending[place] -= 1
            if not pending[place]:
                heappush(self._ready, (run.run_id, place))
        if run.awaited and (going_on := run.awaited.pop(slot, None)) is not None:
            heappush(self._ready, (run.run_id, going_on))
        return bool(readers)

    def suspend(self, run: R, place: int, awaits: Slot | None = None) -> None:
        """Take a stretch back that has begun, to go on at a place of it, once a slot is filled if it awaits one."""
        if awaits is None:
            heappush(self._ready, (run.run_id, place))
        else:
            run.awaited[awaits] = place

    def is_alone(self, run: R) -> bool:
        """Return whether nothing else is ready, or could become ready."""
        return len(self.runs) == 1 and run.run_id in self.runs and not self._ready

    def next_op(self, of: int | None = None) -> tuple[R, int] | None:
        """Return the run and the place of the op that is next, or None if every run waits; it must run now.

        of: an run id; None where the next op is of another run.
        """
        while self._ready:
            if of is not None and self._ready[0][0] != of:
                return None
            run_id, place = heappop(self._ready)
            run = self.runs.get(run_id)
            if run is not None:
                return run, place
        return None

    def hold(self, run: R, node: int) -> bool:
        """Let a run end before the ops of a tensor and those after it; False, and nothing has changed, if one has run.

        What the ops before have filled for those behind stays.
        """
        ops = run.template.program.ops
        behind = frozenset(p for p in run.template.places if ops[p].node >= node and not isinstance(ops[p], Recv))
        ready = {place for run_id, place in self._ready if run_id == run.run_id}
        if any(not run.pending[place] and place not in ready for place in behind):
            return False
        run.template = run.template.without(behind)
        run.ops_left -= len(behind)
        self._ready = [(i, place) for i, place in self._ready if i != run.run_id or place not in behind]
        heapify(self._ready)
        return True

    def finish_op(self, run: R, place: int) -> tuple[Slot, ...]:
        """Count an op as run; return the slots that nobody reads any more, what it wrote itself perhaps among them."""
        template, pending = run.template, run.pending
        begins, awaited, over, shared = template.effects[place]
        for reader in begins:
            pending[reader] = 0
            heappush(self._ready, (run.run_id, reader))
        for reader in awaited:  # as in `fill`; a call more is felt here
            pending[reader] -= 1
            if not pending[reader]:
                heappush(self._ready, (run.run_id, reader))
        for slot in shared:
            run.readers_left[slot] -= 1
            if not run.readers_left[slot]:
                over = (*over, slot)
        if template.task_of_op and (task := template.task_of_op[place]) >= 0:
            run.task_ops_left[task] -= 1
        else:
            run.ops_left -= 1
        return over

    def remove(self, run_id: int) -> R | None:
        """Forget a run, whether it is over or not; return it, None if there is none."""
        return self.runs.pop(run_id, None)
