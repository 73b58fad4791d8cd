"""Leases of the tasks of one run: planner and simulator give them out by this one rule."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf


def first_task(devices: Sequence[str], device: str, tasks: int) -> int | None:
    """Return the task that a device begins with before it hears of any lease, None if there is none for it."""
    place = devices.index(device)
    return place if place < tasks else None


class Bag:
    """Which device computes which task, who has computed it, and what is to be leased next.

    A device has one lease at a time. When no task waits, a free device takes over the oldest lease of another one as
    soon as it has lasted longer than its own last task: it would have been done with it. The first result counts.
    """

    def __init__(self, tasks: int, devices: Sequence[str], now: float) -> None:
        self.tasks = tasks
        self._devices = list(devices)
        first = {device: first_task(devices, device, tasks) for device in devices}
        self._held = {device: (task, now) for device, task in first.items() if task is not None}
        self._waiting = deque(range(min(len(self._devices), tasks), tasks))
        self._by: dict[int, str] = {}
        self._took_s: dict[str, float] = {}

    @property
    def empty(self) -> bool:
        """Return whether every task has been computed."""
        return len(self._by) == self.tasks

    def counts(self) -> dict[str, int]:
        """Return how many tasks of each device counted."""
        return {device: list(self._by.values()).count(device) for device in self._devices}

    def done(self, device: str, task: int, now: float) -> None:
        """A device has computed a task; what it does not hold a lease of is no news."""
        held = self._held.get(device)
        if held is None or held[0] != task:
            return
        del self._held[device]
        self._took_s[device] = now - held[1]
        self._by.setdefault(task, device)

    def lost(self, device: str) -> None:
        """A device is gone: what it has computed may not have arrived, so all of it is leased anew."""
        if device not in self._devices:
            return
        self._devices.remove(device)
        again = [task for task, by in self._by.items() if by == device]
        for task in again:
            del self._by[task]
        held = self._held.pop(device, None)
        if held is not None and held[0] not in self._by:
            again.append(held[0])
        now_held = {task for task, _ in self._held.values()}
        self._waiting.extendleft(sorted(set(again) - now_held, reverse=True))

    def leases(self, now: float) -> list[tuple[str, int]]:
        """Lease tasks to the devices that are free; return (device, task)."""
        out = []
        for device in self._free():
            if self._waiting:
                task = self._waiting.popleft()
            else:
                late = [(since, task) for since, task in self._single() if now >= since + self._took(device)]
                if not late:
                    continue
                task = min(late)[1]
            self._held[device] = (task, now)
            out.append((device, task))
        return out

    @property
    def due_s(self) -> float:
        """Return when a free device would take over a lease, infinity if none would."""
        return min((since + self._took(d) for d in self._free() for since, _ in self._single()), default=inf)

    def check(self) -> None:
        """Raise AssertionError unless every task is computed, leased or waits."""
        held = {task for task, _ in self._held.values()}
        assert set(self._by) | held | set(self._waiting) == set(range(self.tasks))
        assert not set(self._waiting) & (held | set(self._by))

    def _free(self) -> list[str]:
        """Return the devices without a lease, the fastest first."""
        return sorted((d for d in self._devices if d not in self._held), key=self._took)

    def _took(self, device: str) -> float:
        """Return what a device's last task took; of one that had none, what the slowest took, if any is done."""
        return self._took_s.get(device, max(self._took_s.values(), default=inf))

    def _single(self) -> list[tuple[float, int]]:
        """Return (since, task) of what one device computes and nobody has computed."""
        held = [task for task, _ in self._held.values()]
        return [(s, task) for task, s in self._held.values() if task not in self._by and held.count(task) == 1]
