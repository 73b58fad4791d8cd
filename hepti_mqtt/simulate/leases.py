"""Bags on the virtual clock: the planner's leases and the devices' words that a task is computed."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from hepti_mqtt.bag import Bag, first_task
from hepti_mqtt.ids import PLANNER, Epoch
from hepti_mqtt.simulate.bytes import Naming
from hepti_mqtt.simulate.devices import Device, DeviceRun
from hepti_mqtt.simulate.outcome import Arrival
from hepti_mqtt.wire import messages
from hepti_mqtt.wire.topics import Topics, publish_bytes

if TYPE_CHECKING:
    from hepti_mqtt.simulate.clock import Clock

_ARRIVES: Final = 0
_EPOCH: Final = Epoch(1, 1)


class Leases:
    """The bags of a clock's requests, by admission number.

    A lease waits its turn behind what came before it, as every frame does: so it is taken when its request has been.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._bags: dict[int, Bag] = {}
        self._due_s: dict[int, float] = {}
        self._heads: dict[int, str] = {}
        self._since_s: dict[tuple[str, int, int], float] = {}  # by device, admission and task

    def begin(self, now: float, admission: int, devices: tuple[str, ...], tasks: int) -> None:
        """A request with so many tasks is dispatched."""
        if tasks:
            self._bags[admission] = Bag(tasks, devices, now)

    def admit(self, now: float, device: Device, run: DeviceRun) -> None:
        """A device has a request: it begins with its first task."""
        if run.template.begins:
            if run.template.runnable:
                self._heads[run.admission] = device.name
            devices = tuple(self._clock.flights[run.admission].parts)
            first = first_task(devices, device.name, len(run.template.begins))
            if first is not None:
                self._lease(now, device, run, first)

    def computed(self, now: float, device: Device, run: DeviceRun, place: int) -> None:
        """An op has run: if it was the last of a task, the planner hears of it."""
        task = run.completes(place)
        if task is not None:
            self._note(now, device.name, run.admission, task)
            when = self._transmit(now, device.name, PLANNER)
            self._clock.at(when, _ARRIVES, self._said, run.admission, device.name, task)

    def _said(self, now: float, admission: int, device: str, task: int) -> None:
        self._bags[admission].done(device, task, now)
        self._next(now, admission)

    def reported(self, now: float, admission: int, device: str) -> None:
        """A device is done with a request: if it is the head, the others hear that no task is left."""
        if self._heads.get(admission) == device:
            for name in self._clock.flights[admission].parts:
                if name != device:
                    self._tell(now, name, admission, ())

    def _next(self, now: float, admission: int) -> None:
        """Lease what waits or is late, and look again when something becomes late."""
        bag = self._bags[admission]
        for name, task in bag.leases(now):
            self._tell(now, name, admission, (task,))
        if now < bag.due_s < inf and self._due_s.get(admission) != bag.due_s:
            self._due_s[admission] = bag.due_s
            self._clock.at(bag.due_s, _ARRIVES, self._next, admission)

    def heard(self, now: float, device: Device, frame: Arrival) -> None:
        """A device has taken a lease, or the word that none is left, which ends what only waited for more."""
        run = device.machine.runs.get(frame.admission)
        if run is None:
            return  # the head device is done with it
        for task in frame.leased or ():
            self._lease(now, device, run, task)
        if not frame.leased:
            run.open = False
            self._clock.end(now, device, run)

    def ended(self, now: float, device: str, run: DeviceRun) -> None:
        """A run is over on a device: what is left of its tasks is nobody's any more."""
        for task, left in run.tasks.items():
            if left:
                self._note(now, device, run.admission, task, " (given up)")

    def _lease(self, now: float, device: Device, run: DeviceRun, task: int) -> None:
        self._since_s.setdefault((device.name, run.admission, task), now)
        for key in run.lease(task):
            self._clock.deliver(device.machine, run, key)

    def _note(self, now: float, device: str, admission: int, task: int, end: str = "") -> None:
        self._clock.note(device, "task", f"task {task}{end}", self._since_s[device, admission, task], now)

    def _tell(self, now: float, to: str, admission: int, tasks: tuple[int, ...]) -> None:
        """Send a device a lease; no task: none is left."""
        when = self._transmit(now, PLANNER, to)
        frame = Arrival(when, to, admission, None, 0, "lease", leased=tasks)
        self._clock.at(when, _ARRIVES, self._clock.arrive, frame)

    def _transmit(self, now: float, source: str, to: str) -> float:
        """Return when a lease is there, or the word that a task is computed."""
        size = message_bytes(self._clock.naming, to if source == PLANNER else source, source == PLANNER)
        if source == PLANNER:
            self._clock.nbytes += size
        else:
            self._clock.devices[source].use.sent_bytes += size
        return self._clock.links.transmit(now, source, (to,), size, "lease")[to]


def message_bytes(naming: Naming, device: str, lease: bool) -> int:
    """Return the size of the PUBLISH of a lease, or of the word that a task is computed."""
    topics, key = Topics(naming.site), (naming.model, _EPOCH, 1)
    if lease:
        return publish_bytes(topics.command(device), len(messages.encode(messages.Lease(*key, (1,)))), 1)
    return publish_bytes(topics.up(device), len(messages.encode(messages.TaskDone(*key, 1))), 1)
