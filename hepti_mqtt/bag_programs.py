"""Programs of plans with a bag: every device has those of all tasks, and computes what is leased to it.

A method's table is made for as many places as there are tasks, and one more for the head device, which goes on behind
them. Tasks exchange nothing with each other. Whichever device computes a task sends the head device the same parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hepti_mqtt.ids import PLANNER
from hepti_mqtt.lowering import Graph, Lowered, Table
from hepti_mqtt.plan import Plan
from hepti_mqtt.program import Compute, Program, Recv, Send, Slot, SlotSpec, WeightRef
from hepti_mqtt.strategies import Division

HEAD = "head"
PARTS = 1 << 8  # messages of one task; part numbers of a task begin at its own multiple


class Bagged(Lowered):
    """A graph under the table of a method with a bag; its names are those of the tasks and of the head's own part."""

    def __init__(self, graph: Graph, plan: Plan, tasks: int, table: Callable[[Division], Table]) -> None:
        apart = _apart(plan, tasks)
        names = apart.devices
        super().__init__(graph, replace(table(Division(graph, apart)), uniform=False), names)
        self._plan, self._tasks = plan, names[:tasks]

    def short(self, device: str) -> Program:
        """Return a device's Program; no layer stands for others in it."""
        return self.program(device)

    def program(self, device: str) -> Program:
        """Return the Program of a device: the head's own part, if it is that, then all tasks."""
        merged = _Merged(device, self._plan, self._tasks)
        if device == self._plan.head:
            merged.add(super().program(HEAD), -1)
        for number, name in enumerate(self._tasks):
            merged.add(super().program(name), number)
        return Program(device, tuple(merged.slots), tuple(merged.ops), self.nodes)

    def holds(self, device: str, role: str) -> bool:
        """Return whether a device may compute tensors of a role."""
        return any(super(Bagged, self).holds(name, role) for name in self._parts(device))

    def sources(self, device: str) -> frozenset[str]:
        """Return the devices, and the planner, that a device hears: the head device any other one."""
        others = set(self._plan.devices) - {device} if device == self._plan.head else set()
        return frozenset(others | {PLANNER})

    def refs(self, device: str) -> tuple[WeightRef, ...]:
        """Return the distinct weight ranges of a device's Program."""
        refs = (ref for name in self._parts(device) for ref in super(Bagged, self).refs(name))
        return tuple(dict.fromkeys(refs))

    def _parts(self, device: str) -> tuple[str, ...]:
        return (*([HEAD] if device == self._plan.head else []), *self._tasks)


def with_work(graph: Graph, plan: Plan, tasks: int, table: Callable[[Division], Table]) -> int:
    """Return how many of the tasks have anything to compute; they are the first ones. A small map has fewer tiles."""
    rules = table(Division(graph, _apart(plan, tasks)))
    placed = ((op, rule(op)) for op in graph.ops if (rule := rules.rule(op)) is not None)
    found = {p.device for op, pieces in placed for p in pieces or () if all(p.region)}
    return len(found & set(range(tasks)))


def _apart(plan: Plan, tasks: int) -> Plan:
    """Return the plan of a place for each task, with equal shares, and of one more for the head's own part."""
    names = (*(f"task {n}" for n in range(tasks)), HEAD)
    return replace(plan, devices=names, head=HEAD, weights=dict.fromkeys(plan.weights, (*[1.0] * tasks, 0.0)))


class _Merged:
    """Programs side by side in one, with exchanges by task instead of by device."""

    def __init__(self, device: str, plan: Plan, tasks: tuple[str, ...]) -> None:
        self.device, self.head, self.tasks = device, plan.head, tasks
        self.others = tuple(d for d in plan.devices if d != plan.head)
        self.slots: list[SlotSpec] = []
        self.ops: list[Compute | Send | Recv] = []

    def add(self, program: Program, task: int) -> None:
        """Append a Program: that of a task, or -1 for the head's own part."""
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
        if op.to != (HEAD,):
            name = self.tasks[task] if task >= 0 else "the head device"
            raise ValueError(f"{name} sends to {', '.join(op.to)}: tasks of a bag exchange nothing")
        return op._replace(slot=slot, to=(self.head,), part=PARTS * (task + 1) + op.part)

    def _received(self, op: Recv, slot: Slot, task: int) -> Recv:
        if op.source == PLANNER:
            return op._replace(slot=slot, part=PARTS * (task + 1) + op.part, task=task)
        if op.source not in self.tasks:
            raise ValueError(f"{self.tasks[task]} hears the head device: tasks of a bag exchange nothing")
        part = PARTS * (self.tasks.index(op.source) + 1) + op.part
        return op._replace(slot=slot, source=self.head, others=self.others, part=part)
