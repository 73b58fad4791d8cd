"""Bags on the virtual clock: the planner's leases and the devices' words that a task is computed."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from hepti_mqtt.bag import Bag, first_task
from hepti_mqtt.ids import PLANNER, Epoch
from hepti_mqtt.simulate.bytes import Naming
from hepti_mqtt.wire import messages
from hepti_mqtt.wire.topics import Topics, publish_bytes

if TYPE_CHECKING:
    from hepti_mqtt.simulate.clock import Clock, Device, DeviceRun

_ARRIVES: Final = 0
_EPOCH: Final = Epoch(1, 1)


class Leases:
    """The bags of a clock's requests, by admission number."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._bags: dict[int, Bag] = {}
        self._due_s: dict[int, float] = {}
        self._heads: dict[int, str] = {}

    def begin(self, now: float, admission: int, devices: tuple[str, ...], tasks: int) -> None:
        """A request with so many tasks is dispatched."""
        if tasks:
            self._bags[admission] = Bag(tasks, devices, now)

    def admit(self, device: Device, run: DeviceRun) -> None:
        """A device has a request: it begins with its first task."""
        if run.template.begins:
            if run.template.runnable:
                self._heads[run.admission] = device.name
            devices = tuple(self._clock.flights[run.admission].parts)
            first = first_task(devices, device.name, len(run.template.begins))
            if first is not None:
                self._lease(device, run, first)

    def computed(self, now: float, device: Device, run: DeviceRun, place: int) -> None:
        """An op has run: if it was the last of a task, the planner hears of it."""
        task = run.completes(place)
        if task is not None:
            self._tell(now, device.name, PLANNER, self._said, run.admission, device.name, task)

    def _said(self, now: float, admission: int, device: str, task: int) -> None:
        bag = self._bags[admission]
        bag.done(device, task, now)
        self._next(now, admission)

    def reported(self, now: float, admission: int, device: str) -> None:
        """A device is done with a request: if it is the head, the others hear that no task is left."""
        if self._heads.get(admission) == device:
            for name in self._clock.flights[admission].parts:
                if name != device:
                    self._tell(now, PLANNER, name, self._heard, name, admission, None)

    def _next(self, now: float, admission: int) -> None:
        """Lease what waits or is late, and look again when something becomes late."""
        bag = self._bags[admission]
        for name, task in bag.leases(now):
            self._tell(now, PLANNER, name, self._heard, name, admission, task)
        if now < bag.due_s < inf and self._due_s.get(admission) != bag.due_s:
            self._due_s[admission] = bag.due_s
            self._clock.at(bag.due_s, _ARRIVES, self._next, admission)

    def _heard(self, now: float, name: str, admission: int, task: int | None) -> None:
        """A device hears of a lease, or that none is left."""
        device = self._clock.devices[name]
        run = device.machine.runs.get(admission)
        if run is None:
            return
        if task is not None:
            self._lease(device, run, task)
        else:
            run.open = False
        if not device.busy:
            if task is None:
                self._clock.end(now, device, run)
            if not device.busy:
                self._clock.turn(now, device)

    def _lease(self, device: Device, run: DeviceRun, task: int) -> None:
        for key in run.lease(task):
            self._clock.deliver(device.machine, run, key)

    def _tell(self, now: float, source: str, to: str, act: object, admission: object, *what: object) -> None:
        size = message_bytes(self._clock.naming, to if source == PLANNER else source, source == PLANNER)
        if source == PLANNER:
            self._clock.nbytes += size
        else:
            self._clock.devices[source].use.sent_bytes += size
        for when in self._clock.links.transmit(now, source, (to,), size, "lease").values():
            self._clock.at(when, _ARRIVES, act, admission, *what)  # type: ignore[arg-type]


def message_bytes(naming: Naming, device: str, lease: bool) -> int:
    """Return the size of the PUBLISH of a lease, or of the word that a task is computed."""
    topics, key = Topics(naming.site), (naming.model, _EPOCH, 1)
    if lease:
        return publish_bytes(topics.command(device), len(messages.encode(messages.Lease(*key, (1,)))), 1)
    return publish_bytes(topics.up(device), len(messages.encode(messages.TaskDone(*key, 1))), 1)
