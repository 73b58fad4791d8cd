"""Leased tasks of a run: assignment to devices, and takeover by others."""

from __future__ import annotations

from hepti_mqtt.protocol import messages
from hepti_mqtt.runtime.coordinator.interface import CoordinatorCommand
from hepti_mqtt.runtime.coordinator.orders import Orders
from hepti_mqtt.runtime.coordinator.runs import Run


class Leases:
    """Orders tasks of runs from devices."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    def complete(self, run: Run, device: str, task: int, now: float) -> list[CoordinatorCommand]:
        """Record a task that a device has computed; lease it the next one, or say that none is left."""
        if run.task_queue is None:
            return []
        if run.plan.root in run.answers.reports:  # it began after the others heard that none is left
            return [self._lease(run, device, ())]
        run.task_queue.complete_task(device, task, now)
        return self.lease(run, now)

    def lease(self, run: Run, now: float) -> list[CoordinatorCommand]:
        """Lease queued and overdue tasks to the free devices of a run."""
        if run.task_queue is None or run.plan.root in run.answers.reports:
            return []
        return [self._lease(run, d, (task,)) for d, task in run.task_queue.lease_tasks(now)]

    def end(self, run: Run) -> list[CoordinatorCommand]:
        """Tell the devices of a run whose root has ended that no task is left.

        Only then: results that are lost with their device on the way are leased again until the root has ended.
        """
        others = (d for d in run.plan.devices if d != run.plan.root and d not in run.answers.lost_devices)
        return [self._lease(run, device, ()) for device in others]

    def _lease(self, run: Run, device: str, tasks: tuple[int, ...]) -> CoordinatorCommand:
        message = messages.LeaseTasks(run.plan.model, run.plan_version, run.run_id, tasks)
        return self._orders.command(device, message)
