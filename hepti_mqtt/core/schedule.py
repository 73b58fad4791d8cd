"""The run machine of Programs, shared by executor and simulator: it decides which op of a device runs next.

The executor adds arrays and kernels, the simulator costs and links. The machine also decides the effect of an
exchange, and when a slot is free and a run is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Generic, Literal, NamedTuple, TypeVar

from hepti_mqtt.core.ids import PLANNER
from hepti_mqtt.core.program import Compute, ExchangeKey, Op, Program, Recv, Send, Slot, slots_written


def route_to_replicas(now: float, replicas: Sequence[tuple[float, float]], sizes: Iterable[float]) -> Iterator[int]:
    """Yield for each request in turn the replica that answers it first, given the requests dealt before.

    A busy fast replica may answer sooner than a free slow one. replicas: (end of its work, seconds of a request of
    size 1) of each.
    """
    free_s = [max(busy_s, now) for busy_s, _ in replicas]
    for size in sizes:
        done_s = [free + size * seconds for free, (_, seconds) in zip(free_s, replicas, strict=True)]
        first = min(range(len(replicas)), key=done_s.__getitem__)
        free_s[first] = done_s[first]
        yield first


class OpEffects(NamedTuple):
    """The effects of an op after it has run."""

    ready_ops: tuple[int, ...]  #: readers of its results that wait for nothing else
    waiting_ops: tuple[int, ...]  #: other readers of its results
    freed_slots: tuple[Slot, ...]  #: slots without further readers
    shared_slots: tuple[Slot, ...]  #: slots that it read and other ops read too


@dataclass(frozen=True, slots=True)
class RunTemplate:
    """A Program prepared for running: readiness is a counter per op, and a slot is free after its last reader."""

    program: Program
    state_slots: tuple[Slot, ...]  #: slots that are filled from the start
    pending: tuple[int, ...]  #: number of distinct slots that each op waits for
    effects: tuple[OpEffects, ...]
    readers: tuple[tuple[int, ...], ...]  #: ops that read each slot or a view of it
    reader_counts: tuple[int, ...]  #: number of these ops
    woken: tuple[tuple[int, ...], ...]  #: ops that wait for each slot's exchange; none if a stretch itself receives it
    slot_of_exchange: Mapping[ExchangeKey, Slot]
    inputs: tuple[ExchangeKey, ...]  #: exchanges that the work frame itself brings
    ready_at_start: tuple[int, ...]  #: ops that wait for nothing
    op_count: int  #: ops that run without a lease; a Recv does not run, its exchange arrives
    task_inputs: Mapping[int, tuple[ExchangeKey, ...]]  #: exchanges that begin each leased task
    task_of_op: tuple[int, ...]  #: leased task of each op, -1 for none; empty without tasks
    ops_per_task: Mapping[int, int]  #: ops that run for each task
    places: tuple[int, ...]  #: places of ops; of a stretch, which runs as one op, its first

    def without(self, places: AbstractSet[int]) -> RunTemplate:
        """Return the template in which some ops never become ready, and so free nothing."""

        def remaining(readers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple([reader for reader in readers if reader not in places])

        effects = [
            e._replace(ready_ops=remaining(e.ready_ops), waiting_ops=remaining(e.waiting_ops)) for e in self.effects
        ]
        readers, woken = (tuple(map(remaining, ops)) for ops in (self.readers, self.woken))
        return replace(self, effects=tuple(effects), readers=readers, woken=woken)


def _task_of(program: Program) -> tuple[int, ...]:
    """Return each op's task: the task of its inputs. Empty without tasks."""
    if not any(isinstance(op, Recv) and op.task >= 0 for op in program.ops):
        return ()
    task_of: dict[Slot, int] = {}
    tasks = []
    for op in program.ops:
        inputs = (task_of[s] for s in program.reads(op) if s in task_of)
        task = op.task if isinstance(op, Recv) else max(inputs, default=-1)
        task_of.update(dict.fromkeys(slots_written(op), task))
        tasks.append(task)
    return tuple(tasks)


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
    """Return the earlier Recvs that each op waits for, and a Recv itself, as bits of their places."""
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
    """Return whether an op is an exchange between devices; a Send must go over the mesh to be direct."""
    if isinstance(op, Send):
        return op.route == "mesh" and PLANNER not in op.to and program.device not in op.to
    return isinstance(op, Recv) and op.source not in (PLANNER, program.device)


def _is_in_line(program: Program, awaited: Sequence[int]) -> bool:
    """Return whether a device may wait for its Recvs one after the other, in the order of the ops.

    awaited: for each op, the Recvs that it depends on, as bits by place. If the last of them ascend, no op that is
    ready waits behind another op's Recv. Only direct exchanges count.
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
    """Return places of ops in groups, the stretches, that run as one op, in the order in which they run.

    Computes that wait for the same exchanges are a stretch. If ops wait in the order of their Recvs, a stretch includes
    direct exchanges: a Recv comes before its first reader, or after it if that begins the stretch. Other exchanges are
    stretches of their own. So stretches run in the order in which their ops would run, unless exchanges arrive in
    another order than that in which a stretch awaits them.

    The ops of a stretch belong to one block of the graph, because another plan may take over a run before the next
    block; it never takes over a session's run.
    """
    may_be_handed_over = not program.state_inputs()
    recvs = _awaited(program)
    in_line = _is_in_line(program, recvs)
    out: list[list[int]] = []
    before: list[list[int]] = []
    last: tuple[int, int] | None = None
    expected: dict[Slot, int] = {}
    for place, op in enumerate(program.ops):
        if isinstance(op, Recv):  # it does not run, so it ends no stretch
            if in_line and is_direct(program, op):
                expected[op.slot] = place
            else:
                before.append([place])
            continue
        joins = isinstance(op, Compute) or (in_line and is_direct(program, op))
        block = program.block_of(op.node) if may_be_handed_over else 0
        key = (0 if in_line else recvs[place], block) if joins else None
        received = [expected.pop(slot) for slot in program.reads(op) if slot in expected]
        if key is None:
            before += [[recv] for recv in received]
            out.append([place])
        elif key == last:
            out[-1] += [*received, place]
        else:
            out.append([place, *received])
        last = key
    return tuple(map(tuple, [*before, *([place] for place in expected.values()), *out]))


def in_turn(program: Program, stretch: Sequence[int]) -> tuple[int, ...]:
    """Return the places of a stretch in the order in which they run: first the Recvs that its first op reads."""
    leader, *others = stretch
    first = program.reads(program.ops[leader])
    before = [place for place in others if isinstance(op := program.ops[place], Recv) and op.slot in first]
    return (*before, leader, *(place for place in others if place not in before))


def _take_turns(
    program: Program,
    stretch: Sequence[int],
    pending: list[int],
    effects: list[OpEffects],
    woken: dict[Slot, tuple[int, ...]],
) -> int:
    """Let each op of a stretch wait for the op before it and the Recvs between them; return the last op."""
    before, received = -1, list[Slot]()
    for place in in_turn(program, stretch):
        op = program.ops[place]
        if isinstance(op, Recv):
            received.append(op.slot)
            continue
        woken.update(dict.fromkeys(received, (place,)))
        pending[place] += len(received)
        if before >= 0:
            pending[place] += 1
            effects[before] = OpEffects((), (place,), (), ())
        before, received = place, []
    return before


def make_template(
    program: Program, stretches: Sequence[tuple[int, ...]] | None = None, *, by_op: bool = False
) -> RunTemplate:
    """Return the template of a Program; stretches: places of ops that run as one, by default each op alone.

    by_op: the ops of a stretch run one by one, in the same order, and show their results together, after the last.
    """
    groups = stretches or tuple((place,) for place in range(len(program.ops)))
    readers: list[list[int]] = [[] for _ in program.slots]
    pending = [0] * len(program.ops)
    reads: dict[int, list[Slot]] = {}
    slot_of: dict[ExchangeKey, Slot] = {}
    state_slots = program.state_inputs()
    for place, *others in groups:
        group = [program.ops[p] for p in (place, *others)]
        within = {slot for each in group for slot in slots_written(each)}
        used = dict.fromkeys(slot for each in group for slot in program.reads(each))
        reads[place] = [slot for slot in used if slot not in within]
        for slot in reads[place]:
            readers[slot].append(place)
        pending[place] = len(set(reads[place]).difference(state_slots))
        for each in group:
            if isinstance(each, Recv):
                slot_of.update(dict.fromkeys(each.keys, each.slot))
    effects = [OpEffects((), (), (), ())] * len(program.ops)
    last, woken = dict[int, int](), dict[Slot, tuple[int, ...]](enumerate(map(tuple, readers)))
    for stretch in groups:
        woken.update({op.slot: () for p in stretch[1:] if isinstance(op := program.ops[p], Recv)})
        has_turns = by_op and len(stretch) > 1
        last[stretch[0]] = _take_turns(program, stretch, pending, effects, woken) if has_turns else stretch[0]
    for place, *others in groups:
        written = [slot for p in (place, *others) for slot in slots_written(program.ops[p])]
        if others:
            written = [slot for slot in written if readers[slot]]
        effects[last[place]] = _after(written, reads[place], readers, pending)
    places = tuple(range(len(program.ops)) if by_op else sorted(place for place, *_ in groups))
    task_of, runs = _task_of(program), Counter[int]()
    of_ops = [place for place in places if not isinstance(program.ops[place], Recv)]
    if task_of:
        runs.update(task_of[place] for place in of_ops if task_of[place] >= 0)
    begun = {t: tuple(op.key for op in program.ops if isinstance(op, Recv) and op.task == t) for t in runs}
    late = {key for keys in begun.values() for key in keys}
    return RunTemplate(
        program=program,
        state_slots=state_slots,
        pending=tuple(pending),
        effects=tuple(effects),
        readers=tuple(tuple(r) for r in readers),
        reader_counts=tuple(len(r) for r in readers),
        woken=tuple(woken.values()),
        slot_of_exchange=slot_of,
        inputs=tuple(key for key in slot_of if key[2] == PLANNER and key not in late),
        ready_at_start=tuple(place for place in of_ops if not pending[place]),
        op_count=len(of_ops) - runs.total(),
        task_inputs=begun,
        task_of_op=task_of,
        ops_per_task=runs,
        places=places,
    )


DropReason = Literal["duplicate", "unexpected"]


class ProgramRun:
    """One run on one device: the slots that its ops wait for, and the readers of slots.

    A subclass adds the state of its user.
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
        self.ops_left = template.op_count  #: ops that have not run, without those of leased tasks
        self.task_ops_left: dict[int, int] = {}  #: the same for each task that is leased to this device
        self.awaited: dict[Slot, int] = {}  #: places where suspended stretches continue, by the slot that they wait for
        #: More tasks may be leased, so only the planner ends the run.
        self.accepts_leases = bool(template.task_inputs) and not template.op_count

    def start_task(self, task: int) -> tuple[ExchangeKey, ...]:
        """Begin a task; return the exchanges that begin it, none if it has begun before or is unknown."""
        if task in self.task_ops_left or task not in self.template.task_inputs:
            return ()
        self.task_ops_left[task] = self.template.ops_per_task[task]
        return self.template.task_inputs[task]

    def task_completed_by(self, place: int) -> int | None:
        """Return the task that the op at a place, which has run, completes; None if it completes no task."""
        if not self.template.task_of_op:
            return None
        task = self.template.task_of_op[place]
        return task if task >= 0 and not self.task_ops_left[task] else None


R = TypeVar("R", bound=ProgramRun)


class RunMachine(Generic[R]):
    """The runs of one device: the first ready op by (run id, position in the Program) is next.

    An exchange fills its slot on arrival, without waiting for a turn.
    """

    def __init__(self) -> None:
        self.runs: dict[int, R] = {}
        self._ready: list[tuple[int, int]] = []

    def admit(self, run: R) -> None:
        """Begin a run; raises ValueError if a run of this id has begun."""
        if run.run_id in self.runs:
            raise ValueError(f"run {run.run_id} has already begun")
        self.runs[run.run_id] = run
        for place in run.template.ready_at_start:
            heappush(self._ready, (run.run_id, place))

    def slot_for(self, run: R, key: ExchangeKey) -> Slot | DropReason:
        """Return the slot that an exchange fills, or the reason to drop it."""
        slot = run.template.slot_of_exchange.get(key)
        if slot is None:
            return "unexpected"
        return "duplicate" if run.received[slot] else slot

    def fill_slot(self, run: R, slot: Slot) -> bool:
        """Mark a slot as received; return whether ops wait for it."""
        run.received[slot] = True
        woken, pending = run.template.woken[slot], run.pending
        for place in woken:
            pending[place] -= 1
            if not pending[place]:
                heappush(self._ready, (run.run_id, place))
        if run.awaited and (suspended := run.awaited.pop(slot, None)) is not None:
            heappush(self._ready, (run.run_id, suspended))
        return bool(woken)

    def suspend(self, run: R, place: int, awaits: Slot | None = None) -> None:
        """Make a stretch continue later at one of its places: in its turn, or after a slot is filled."""
        if awaits is None:
            heappush(self._ready, (run.run_id, place))
        else:
            run.awaited[awaits] = place

    def is_alone(self, run: R) -> bool:
        """Return whether nothing else is ready, or could become ready."""
        return len(self.runs) == 1 and run.run_id in self.runs and not self._ready

    def next_op(self) -> tuple[R, int] | None:
        """Return run and place of the next op, which must run now; None if no op is ready."""
        while self._ready:
            run_id, place = heappop(self._ready)
            run = self.runs.get(run_id)
            if run is not None:
                return run, place
        return None

    def hold(self, run: R, node: int) -> bool:
        """Remove the ops of a tensor and all later ones from a run.

        Return False, without a change, if one of them has run. Slots that earlier ops fill for later ones stay filled.
        """
        ops = run.template.program.ops
        later = frozenset(p for p in run.template.places if ops[p].node >= node and not isinstance(ops[p], Recv))
        ready = {place for run_id, place in self._ready if run_id == run.run_id}
        if any(not run.pending[place] and place not in ready for place in later):
            return False
        run.template = run.template.without(later)
        run.ops_left -= len(later)
        self._ready = [(i, place) for i, place in self._ready if i != run.run_id or place not in later]
        heapify(self._ready)
        return True

    def finish_op(self, run: R, place: int) -> tuple[Slot, ...]:
        """Count an op as run; return the slots without further readers, perhaps some that it wrote."""
        template, pending = run.template, run.pending
        ready, waiting, freed, shared = template.effects[place]
        for reader in ready:
            pending[reader] = 0
            heappush(self._ready, (run.run_id, reader))
        for reader in waiting:  # inlined from `fill_slot`: a call would be slower
            pending[reader] -= 1
            if not pending[reader]:
                heappush(self._ready, (run.run_id, reader))
        for slot in shared:
            run.readers_left[slot] -= 1
            if not run.readers_left[slot]:
                freed = (*freed, slot)
        if template.task_of_op and (task := template.task_of_op[place]) >= 0:
            run.task_ops_left[task] -= 1
        else:
            run.ops_left -= 1
        return freed

    def remove(self, run_id: int) -> R | None:
        """Remove a run, finished or not; return it, None if there is none."""
        return self.runs.pop(run_id, None)
