"""The bags of runs: tasks are leased to devices that are free, and again where one is lost or slow."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from hepti_mqtt.runtime.planner.commands import CoordinatorCommand
from hepti_mqtt.runtime.planner.flight import Run
from hepti_mqtt.runtime.planner.slots import Slots
from hepti_mqtt.runtime.publish import Publish
from hepti_mqtt.wire import messages
from hepti_mqtt.wire.topics import Topics


class Bags:
    """Leases of all runs that have a bag."""

    def __init__(self, topics: Topics, slots: Slots) -> None:
        self._topics, self._slots = topics, slots

    @property
    def due_s(self) -> float:
        """Return when a free device would take over a lease, infinity if none would."""
        bags = (run.bag for run in self._runs() if run.plan.head not in run.done)
        return min((bag.due_s for bag in bags if bag is not None), default=inf)

    def done(self, device: str, message: messages.TaskDone, now: float) -> list[CoordinatorCommand]:
        """A device has computed a task: lease it the next one, or say that none is left."""
        model = self._slots.running(message.model, message.admission)
        run = None if model is None else model.runs[message.admission]
        if run is None or run.bag is None or run.epoch != message.epoch:
            return []
        if run.plan.head in run.done:  # it began when all others were told that none is left
            return [self._lease(run, device, ())]
        run.bag.done(device, message.task, now)
        return self.lease(run, now)

    def close(self, run: Run) -> list[CoordinatorCommand]:
        """The head device has all tasks and is done, so nothing is left for the others.

        Not before: what a device has computed may be lost with it on its way, and is leased anew then.
        """
        return [self._lease(run, d, ()) for d in run.plan.devices if d != run.plan.head and d not in run.gone]

    def lease(self, run: Run, now: float) -> list[CoordinatorCommand]:
        """Lease what waits, or is late, to the devices of a run that are free."""
        if run.bag is None or run.plan.head in run.done:
            return []
        return [self._lease(run, d, (task,)) for d, task in run.bag.leases(now)]

    def tick(self, now: float) -> list[CoordinatorCommand]:
        """Lease anew what has become late."""
        return [command for run in self._runs() for command in self.lease(run, now)]

    def without(self, run: Run, device: str, now: float) -> list[CoordinatorCommand] | None:
        """Go on without a device; None where a run cannot: without its bag, or without the head device."""
        if run.bag is None or device == run.plan.head:
            return None
        run.gone.add(device)
        run.done.pop(device, None)
        run.bag.lost(device)
        return self.lease(run, now)

    def _runs(self) -> Iterable[Run]:
        return (run for slot in self._slots for run in slot.runs.values())

    def _lease(self, run: Run, device: str, tasks: tuple[int, ...]) -> CoordinatorCommand:
        lease = messages.Lease(run.plan.model, run.epoch, run.admission, tasks)
        return Publish(self._topics.command(device), messages.encode(lease), 1)
