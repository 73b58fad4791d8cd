"""The one machine by which Programs run: the executor gives it arrays and kernels, the simulator costs and links.

It decides which op of a device runs next, what an exchange that arrives does, and when a slot and a run are over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, Literal, NamedTuple, TypeVar

from hepti_mqtt.ids import PLANNER
from hepti_mqtt.program import Key, Program, Recv, Slot, written


def deal(now: float, replicas: Sequence[tuple[float, float]], sizes: Iterable[float]) -> Iterator[int]:
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


class After(NamedTuple):
    """What an op changes that has run: what nothing else has a part in, and what is counted.

    begins: readers of what it wrote that wait for nothing else. awaited: its other readers. over: slots that nobody
    reads from then on. shared: slots that it read, and others.
    """

    begins: tuple[int, ...]
    awaited: tuple[int, ...]
    over: tuple[Slot, ...]
    shared: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """A Program prepared for running: readiness is a counter per op, and a slot is free after its last reader.

    kept: slots that are filled from the start. pending: distinct slots that an op waits for. after: what each op
    changes. readers: ops that read a slot or a view of it. uses: how many of them. recv: the slot that an exchange
    fills. inputs: the exchanges that the request itself brings. first: ops that wait for nothing. runnable: how many
    ops run whatever is leased; a Recv does not, its exchange arrives. begins: the exchanges with which each task of a
    bag begins. task: that of each op, -1 for none; empty without a bag. sizes: how many ops of each task run.
    """

    program: Program
    kept: tuple[Slot, ...]
    pending: tuple[int, ...]
    after: tuple[After, ...]
    readers: tuple[tuple[int, ...], ...]
    uses: tuple[int, ...]
    recv: Mapping[Key, Slot]
    inputs: tuple[Key, ...]
    first: tuple[int, ...]
    runnable: int
    begins: Mapping[int, tuple[Key, ...]]
    task: tuple[int, ...]
    sizes: Mapping[int, int]


def _task_of(program: Program) -> tuple[int, ...]:
    """Return the task of each op: that of what it is computed from; empty without a bag."""
    if not any(isinstance(op, Recv) and op.task >= 0 for op in program.ops):
        return ()
    of: dict[Slot, int] = {}
    found = []
    for op in program.ops:
        task = op.task if isinstance(op, Recv) else max((of[s] for s in program.reads(op) if s in of), default=-1)
        of.update(dict.fromkeys(written(op), task))
        found.append(task)
    return tuple(found)


def _after(
    writes: Sequence[Slot], reads: Sequence[Slot], readers: Sequence[Sequence[int]], pending: Sequence[int]
) -> After:
    woken = [reader for slot in writes for reader in readers[slot]]
    unread = (slot for slot in writes if not readers[slot])
    return After(
        begins=tuple(reader for reader in woken if pending[reader] == 1),
        awaited=tuple(reader for reader in woken if pending[reader] > 1),
        over=(*unread, *(slot for slot in reads if len(readers[slot]) == 1)),
        shared=tuple(slot for slot in reads if len(readers[slot]) > 1),
    )


def template(program: Program) -> Template:
    """Return the Template of a Program."""
    readers: list[list[int]] = [[] for _ in program.slots]
    pending, first, reads = [], [], []
    recv: dict[Key, Slot] = {}
    kept = program.kept()
    for place, op in enumerate(program.ops):
        slots = program.reads(op)
        reads.append(slots)
        for slot in slots:
            readers[slot].append(place)
        pending.append(len(set(slots).difference(kept)))
        if isinstance(op, Recv):
            recv.update(dict.fromkeys(op.keys, op.slot))
        elif not pending[-1]:
            first.append(place)
    task = _task_of(program)
    runs = Counter(t for op, t in zip(program.ops, task, strict=False) if t >= 0 and not isinstance(op, Recv))
    begun = {t: tuple(op.key for op in program.ops if isinstance(op, Recv) and op.task == t) for t in runs}
    late = {key for keys in begun.values() for key in keys}
    return Template(
        program=program,
        kept=kept,
        pending=tuple(pending),
        after=tuple(_after(written(op), slots, readers, pending) for op, slots in zip(program.ops, reads, strict=True)),
        readers=tuple(tuple(r) for r in readers),
        uses=tuple(len(r) for r in readers),
        recv=recv,
        inputs=tuple(key for key in recv if key[2] == PLANNER and key not in late),
        first=tuple(first),
        runnable=sum(not isinstance(op, Recv) for op in program.ops) - runs.total(),
        begins=begun,
        task=task,
        sizes=runs,
    )


Refusal = Literal["duplicate", "unexpected"]


class ProgramRun:
    """One request on one device, under its admission number: what its ops still wait for, and who still reads a slot.

    left: ops that have not run, those of a bag's tasks left out. tasks: how many ops are left of each task that is
    leased here. open: more may be leased, and nothing else says when the run is over. A subclass adds what its user
    keeps of a run.
    """

    __slots__ = ("admission", "left", "open", "pending", "received", "tasks", "template", "uses")

    def __init__(self, admission: int, template: Template) -> None:
        self.admission = admission
        self.template = template
        self.pending = list(template.pending)
        self.uses = list(template.uses)
        self.received = [False] * len(template.uses)
        self.left = template.runnable
        self.tasks: dict[int, int] = {}
        self.open = bool(template.begins) and not template.runnable

    def lease(self, task: int) -> tuple[Key, ...]:
        """Take a task; return the exchanges that it begins with, none if it was taken before or is unknown."""
        if task in self.tasks or task not in self.template.begins:
            return ()
        self.tasks[task] = self.template.sizes[task]
        return self.template.begins[task]

    def completes(self, place: int) -> int | None:
        """Return the task of which the op at a place, which has run, was the last; None if it was of none."""
        if not self.template.task:
            return None
        task = self.template.task[place]
        return task if task >= 0 and not self.tasks[task] else None


R = TypeVar("R", bound=ProgramRun)


class RunMachine(Generic[R]):
    """The runs of one device: of all ready ops the first by (admission number, position in the Program) is next.

    An exchange fills its slot as soon as it is taken; it waits for no turn.
    """

    def __init__(self) -> None:
        self.runs: dict[int, R] = {}
        self._ready: list[tuple[int, int]] = []

    def admit(self, run: R) -> None:
        """Begin a run; raises ValueError if one of this admission number runs already."""
        if run.admission in self.runs:
            raise ValueError(f"request {run.admission} runs already")
        self.runs[run.admission] = run
        for place in run.template.first:
            heappush(self._ready, (run.admission, place))

    def awaited(self, run: R, key: Key) -> Slot | Refusal:
        """Return the slot that an exchange is to `fill`, or why it is dropped."""
        slot = run.template.recv.get(key)
        if slot is None:
            return "unexpected"
        return "duplicate" if run.received[slot] else slot

    def fill(self, run: R, slot: Slot) -> bool:
        """Take an exchange for good; return whether anybody reads its slot."""
        run.received[slot] = True
        readers, pending = run.template.readers[slot], run.pending
        for place in readers:
            pending[place] -= 1
            if not pending[place]:
                heappush(self._ready, (run.admission, place))
        return bool(readers)

    def next(self, of: int | None = None) -> tuple[R, int] | None:
        """Return the run and the place of the op that is next, or None if every run waits; it must run now.

        of: an admission number; None where the next op is of another run.
        """
        while self._ready:
            if of is not None and self._ready[0][0] != of:
                return None
            admission, place = heappop(self._ready)
            run = self.runs.get(admission)
            if run is not None:
                return run, place
        return None

    def ran(self, run: R, place: int) -> tuple[Slot, ...]:
        """Count an op as run; return the slots that nobody reads any more, what it wrote itself perhaps among them."""
        template, pending = run.template, run.pending
        begins, awaited, over, shared = template.after[place]
        for reader in begins:
            pending[reader] = 0
            heappush(self._ready, (run.admission, reader))
        for reader in awaited:  # as in `fill`; a call more is felt here
            pending[reader] -= 1
            if not pending[reader]:
                heappush(self._ready, (run.admission, reader))
        for slot in shared:
            run.uses[slot] -= 1
            if not run.uses[slot]:
                over = (*over, slot)
        if template.task and (task := template.task[place]) >= 0:
            run.tasks[task] -= 1
        else:
            run.left -= 1
        return over

    def drop(self, admission: int) -> R | None:
        """Forget a run, whether it is over or not; return it, None if there is none."""
        return self.runs.pop(admission, None)
