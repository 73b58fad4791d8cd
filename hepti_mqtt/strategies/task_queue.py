"""The task queue of a run, with one leasing rule for planner and simulator; and the Programs of plans with tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from hepti_mqtt.core.ids import PLANNER
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.program import Compute, Program, Recv, Send, Slot, SlotSpec, WeightRef
from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.layouts import Table
from hepti_mqtt.lowering.lower import Lowered
from hepti_mqtt.strategies import Division


def initial_task(devices: Sequence[str], device: str, tasks: int) -> int | None:
    """Return the task that a device begins with before its first lease, None if no task is left for it."""
    place = devices.index(device)
    return place if place < tasks else None


class TaskQueue:
    """Leases of tasks: which device computes which task, and which device has completed it.

    A device has one lease at a time. If no task waits, a free device duplicates the oldest lease once it has lasted
    longer than the free device's last task, which would have completed it by then. The first result counts.
    """

    def __init__(self, tasks: int, devices: Sequence[str], now: float) -> None:
        self.tasks = tasks
        self._devices = list(devices)
        first = {device: initial_task(devices, device, tasks) for device in devices}
        self._leases = {device: (task, now) for device, task in first.items() if task is not None}
        self._waiting = deque(range(min(len(self._devices), tasks), tasks))
        self.completed_by: dict[int, str] = {}  #: by task: the device of the result that counted
        self._last_duration_s: dict[str, float] = {}

    def complete_task(self, device: str, task: int, now: float) -> None:
        """Record that a device has computed a task; ignored without its lease."""
        lease = self._leases.get(device)
        if lease is None or lease[0] != task:
            return
        del self._leases[device]
        self._last_duration_s[device] = now - lease[1]
        self.completed_by.setdefault(task, device)

    def remove_device(self, device: str) -> None:
        """Requeue all tasks of a device that has left, since its results may not have arrived."""
        if device not in self._devices:
            return
        self._devices.remove(device)
        requeued = [task for task, by in self.completed_by.items() if by == device]
        for task in requeued:
            del self.completed_by[task]
        lease = self._leases.pop(device, None)
        if lease is not None and lease[0] not in self.completed_by:
            requeued.append(lease[0])
        leased = {task for task, _ in self._leases.values()}
        self._waiting.extendleft(sorted(set(requeued) - leased, reverse=True))

    def lease_tasks(self, now: float) -> list[tuple[str, int]]:
        """Lease tasks to free devices; return (device, task)."""
        out = []
        for device in self._idle_devices():
            if self._waiting:
                task = self._waiting.popleft()
            else:
                late = [
                    (since, task)
                    for since, task in self._unduplicated_leases()
                    if now >= since + self._expected_duration_s(device)
                ]
                if not late:
                    continue
                task = min(late)[1]
            self._leases[device] = (task, now)
            out.append((device, task))
        return out

    @property
    def next_takeover_s(self) -> float:
        """Return the time at which a free device would duplicate a lease, infinity if none would."""
        return min(
            (
                since + self._expected_duration_s(d)
                for d in self._idle_devices()
                for since, _ in self._unduplicated_leases()
            ),
            default=inf,
        )

    def assert_invariants(self) -> None:
        """Raise AssertionError unless every task is completed, leased or waiting."""
        leased = {task for task, _ in self._leases.values()}
        assert set(self.completed_by) | leased | set(self._waiting) == set(range(self.tasks))
        assert not set(self._waiting) & (leased | set(self.completed_by))

    def _idle_devices(self) -> list[str]:
        """Return the devices without a lease, the fastest first."""
        return sorted((d for d in self._devices if d not in self._leases), key=self._expected_duration_s)

    def _expected_duration_s(self, device: str) -> float:
        """Return the duration of a device's last task; without one, that of the slowest device, or infinity."""
        return self._last_duration_s.get(device, max(self._last_duration_s.values(), default=inf))

    def _unduplicated_leases(self) -> list[tuple[float, int]]:
        """Return (lease start, task) of unfinished tasks with a single lease."""
        leased = [task for task, _ in self._leases.values()]
        return [
            (s, task) for task, s in self._leases.values() if task not in self.completed_by and leased.count(task) == 1
        ]


# ----------------------------------------------------------------------------------------------------------------------
# Programs of plans with a task queue: every device has those of all tasks, and computes the tasks leased to it.
#
# A method's table has a place for each task, and one for the root device, which continues after them. Tasks exchange
# nothing with each other. Every device that computes a task sends the root the same parts.


ROOT_PART = "head"
PARTS_PER_TASK = 1 << 8  # messages per task; part numbers of a task begin at a multiple of it


class LoweredTasks(Lowered):
    """A graph under the table of a method with leased tasks; its devices' names are the tasks and the root's part."""

    def __init__(self, graph: Graph, plan: Plan, tasks: int, table: Callable[[Division], Table]) -> None:
        apart = _plan_per_task(plan, tasks)
        names = apart.devices
        super().__init__(graph, replace(table(Division(graph, apart)), uniform=False), names)
        self._plan, self._tasks = plan, names[:tasks]

    def compact_program(self, device: str) -> Program:
        """Return a device's Program, with every layer."""
        return self.full_program(device)

    def full_program(self, device: str) -> Program:
        """Return the Program of a device: the root's own part if it is the root, then all tasks."""
        merged = _ProgramMerger(self._plan, self._tasks)
        if device == self._plan.root:
            merged.add(super().full_program(ROOT_PART), -1)
        for number, name in enumerate(self._tasks):
            merged.add(super().full_program(name), number)
        return Program(device, tuple(merged.slots), tuple(merged.ops), self.nodes)

    def computes_role(self, device: str, role: str) -> bool:
        """Return whether a device may compute tensors of a role."""
        return any(super(LoweredTasks, self).computes_role(name, role) for name in self._parts(device))

    def senders(self, device: str) -> frozenset[str]:
        """Return the devices that a device receives from, and the planner: the root receives from all others."""
        others = set(self._plan.devices) - {device} if device == self._plan.root else set()
        return frozenset(others | {PLANNER})

    def weight_refs(self, device: str) -> tuple[WeightRef, ...]:
        """Return the distinct weight ranges of a device's Program."""
        refs = (ref for name in self._parts(device) for ref in super(LoweredTasks, self).weight_refs(name))
        return tuple(dict.fromkeys(refs))

    def weight_counts(self, device: str) -> dict[WeightRef, int]:
        """Return the weight ranges of a device's Program, each alone."""
        return dict.fromkeys(self.weight_refs(device), 1)

    def _parts(self, device: str) -> tuple[str, ...]:
        return (*([ROOT_PART] if device == self._plan.root else []), *self._tasks)


def nonempty_tasks(graph: Graph, plan: Plan, tasks: int, table: Callable[[Division], Table]) -> int:
    """Return how many tasks have anything to compute; they are the first ones. A small map has fewer tiles."""
    rules = table(Division(graph, _plan_per_task(plan, tasks)))
    placed = ((op, rule(op)) for op in graph.ops if (rule := rules.rule(op)) is not None)
    busy = {p.device for op, pieces in placed for p in pieces or () if all(p.region)}
    return len(busy & set(range(tasks)))


def _plan_per_task(plan: Plan, tasks: int) -> Plan:
    """Return the plan with a place for each task, with equal shares, and one for the root's own part."""
    names = (*(f"task {n}" for n in range(tasks)), ROOT_PART)
    return replace(plan, devices=names, root=ROOT_PART, shares=dict.fromkeys(plan.shares, (*[1.0] * tasks, 0.0)))


class _ProgramMerger:
    """Programs of several tasks merged into one, with exchanges by task instead of by device."""

    def __init__(self, plan: Plan, tasks: tuple[str, ...]) -> None:
        self.root, self.tasks = plan.root, tasks
        self.others = tuple(d for d in plan.devices if d != plan.root)
        self.slots: list[SlotSpec] = []
        self.ops: list[Compute | Send | Recv] = []

    def add(self, program: Program, task: int) -> None:
        """Append a Program: that of a task, or -1 for the root's own part."""
        by = len(self.slots)
        self.slots += [s if s.base is None else s._replace(base=s.base + by) for s in program.slots]
        for op in program.ops:
            if isinstance(op, Compute):
                reads, writes = (tuple(s + by for s in slots) for slots in (op.reads, op.writes))
                self.ops.append(op._replace(reads=reads, writes=writes))
            elif isinstance(op, Send):
                self.ops.append(self._sent(op, op.slot + by, task))
            else:
                self.ops.append(self._received(op, op.slot + by, task))

    def _sent(self, op: Send, slot: Slot, task: int) -> Send:
        if op.to == (PLANNER,):
            return op._replace(slot=slot)
        if op.to != (ROOT_PART,):
            name = self.tasks[task] if task >= 0 else "the root device"
            raise ValueError(f"{name} sends to {', '.join(op.to)}: leased tasks must not exchange tensors")
        return op._replace(slot=slot, to=(self.root,), part=PARTS_PER_TASK * (task + 1) + op.part)

    def _received(self, op: Recv, slot: Slot, task: int) -> Recv:
        if op.source == PLANNER:
            return op._replace(slot=slot, part=PARTS_PER_TASK * (task + 1) + op.part, task=task)
        if op.source not in self.tasks:
            raise ValueError(
                f"{self.tasks[task]} receives from the root device: leased tasks must not exchange tensors"
            )
        part = PARTS_PER_TASK * (self.tasks.index(op.source) + 1) + op.part
        return op._replace(slot=slot, source=self.root, alternates=self.others, part=part)
