"""The discrete-event simulator: the executor's own machine on devices with one session thread each, links that queue.

A device's thread does one thing at a time, as its shell does: it takes what has arrived, in that order, and only then
begins the op that the machine says. Taking a frame costs time like an op. A request is answered with the last part of
its output, and has left the devices with their last report.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import repeat
from typing import Any, Final

from hepti_mqtt.cluster import Cluster
from hepti_mqtt.ids import ALL, PLANNER
from hepti_mqtt.models import input_bytes
from hepti_mqtt.program import Compute, Key, Program, Send, addresses
from hepti_mqtt.schedule import RunMachine, deal
from hepti_mqtt.simulate.bytes import Naming, dispatch_bytes, done_bytes
from hepti_mqtt.simulate.devices import Device, DeviceRun, Part
from hepti_mqtt.simulate.leases import Leases
from hepti_mqtt.simulate.links import Links
from hepti_mqtt.simulate.load import RunTimes
from hepti_mqtt.simulate.outcome import Arrival, Event, Outcome, Replica, Request, Simulation, Slows
from hepti_mqtt.spec import RequestShape, Spec

_ARRIVES: Final = 0  # of what happens at one time, first arrivals, then what a device begins next
_ENDS: Final = 1


@dataclass(slots=True)
class _Flight:
    """A request that was dispatched; outputs, reports: parts of the answer, and words of devices, that are to come.

    until_s: when it should be over, by prediction.
    """

    request: Request
    parts: dict[str, Part]
    asked_s: float
    dispatched_s: float
    outputs: int
    reports: int
    until_s: float
    answered_s: float | None = None


class Clock:
    """Devices, links and the planner at a moment; `layer` is the one that stands for several."""

    def __init__(
        self, naming: Naming, spec: Spec, cluster: Cluster, in_flight: int, record: bool, layer: int | None
    ) -> None:
        self.naming, self.spec, self.cluster = naming, spec, cluster
        self.in_flight, self.record, self.layer = in_flight, record, layer
        self.links = Links(cluster, self.note)
        self.devices: dict[str, Device] = {}
        self.listeners: dict[str, tuple[str, ...]] = {}
        self.flights: dict[int, _Flight] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[_Flight] = []
        self.nbytes = self._serial = 0
        self.ends: dict[int, float] = {}  # when the last op of a layer was over
        self.events: list[Event] = []
        self.arrivals: list[Arrival] = []
        self.ran: list[tuple[str, int, int]] = []
        self._known: dict[tuple[str, int], Part] = {}
        self._queue: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.leases = Leases(self)
        self.slows: Mapping[str, Slows] = {}

    def play(self, requests: Sequence[Request]) -> None:
        """Let time pass until all requests are answered, or nothing happens any more."""
        choices = [choice.programs for r in requests for choice in r.choices]
        names = dict.fromkeys(name for programs in choices for name in programs)
        self.devices = {name: Device(name, self.cluster.devices[name]) for name in names}
        heard: dict[str, set[str]] = {name: set() for name in names}
        for programs in {id(programs): programs for programs in choices}.values():
            for name, program in programs.items():
                heard[name].update(*(op.to for op in program.ops if isinstance(op, Send) and op.route == "broker"))
        # Whoever hears a device at all over the broker hears what it publishes to ALL.
        self.listeners = {n: tuple(d for d in names if d in heard[n]) for n in names}
        self.waiting = deque(requests)
        for asked_s in {r.asked_s or 0.0 for r in requests}:
            self.at(asked_s, _ARRIVES, self.pump)
        while self._queue:
            now, _, _, act, what = heappop(self._queue)
            act(now, *what)

    def at(self, when: float, rank: int, act: Callable[..., None], *what: object) -> None:
        """Call `act` with the time and `what` when it is time."""
        self._serial += 1
        heappush(self._queue, (when, rank, self._serial, act, what))

    def note(self, device: str, lane: str, label: str, start: float, stop: float) -> None:
        """Add a bar to the time line."""
        if self.record and stop > start:
            self.events.append(Event(device, lane, label, start, stop))

    # -- the planner ----------------------------------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """Dispatch what waits, as far as it has been asked and there is room beside what runs."""
        while self.waiting and (self.waiting[0].asked_s or 0.0) <= now:
            choices = self.waiting[0].choices
            beside = [self.beside(choice) for choice in choices]
            has_room = [len(runs) < self.in_flight for runs in beside]
            if not any(has_room):
                return
            free_s = [max((run.until_s for run in runs), default=now) for runs in beside]
            waiting = sum((request.asked_s or 0.0) <= now for request in self.waiting)
            lanes = [(free, choice.seconds) for free, choice in zip(free_s, choices, strict=True)]
            chosen = next((i for i in deal(now, lanes, repeat(1.0, waiting)) if has_room[i]), None)
            if chosen is None:
                return
            until_s = max(free_s[chosen], now) + choices[chosen].seconds
            self.dispatch(now, self.waiting.popleft(), choices[chosen], until_s)

    def beside(self, choice: Replica) -> list[_Flight]:
        """Return what runs on devices of a replica."""
        return [flight for flight in self.running if not flight.parts.keys().isdisjoint(choice.programs)]

    def dispatch(self, now: float, request: Request, choice: Replica, until_s: float) -> None:
        """Send a request to the devices of its plan."""
        admission = len(self.flights) + 1
        parts = {name: self.part(name, program) for name, program in choice.programs.items()}
        outputs = sum(isinstance(op, Send) and PLANNER in op.to for p in parts.values() for op in p.program.ops)
        asked_s = now if request.asked_s is None else request.asked_s
        flight = _Flight(request, parts, asked_s, now, outputs, len(parts), until_s)
        self.flights[admission] = flight
        self.running.append(flight)
        self.leases.begin(now, admission, tuple(parts), max(len(p.template.begins) for p in parts.values()))
        size = dispatch_bytes(self.naming, self.spec, request.shape, choice.programs)
        self.nbytes += size
        body = input_bytes(self.spec, request.shape)
        for to, when in self.links.transmit(now, PLANNER, tuple(parts), size, "dispatch").items():
            self.at(when, _ARRIVES, self.arrive, Arrival(when, to, admission, None, body, "dispatch"))

    def part(self, name: str, program: Program) -> Part:
        """Return a device's Program with its costs."""
        key = (name, id(program))
        if key not in self._known:
            self._known[key] = Part(self.naming, name, self.cluster.devices[name], program, self.layer)
        return self._known[key]

    def heard(self, now: float, admission: int) -> None:
        """Take a part of an answer: with the last one it leaves, whoever has yet to report."""
        flight = self.flights[admission]
        flight.outputs -= 1
        if not flight.outputs:
            flight.answered_s = now
        self.left(now, flight)

    def reported(self, now: float, admission: int) -> None:
        """Take a device's report; after the last one there is room for another request."""
        flight = self.flights[admission]
        flight.reports -= 1
        self.left(now, flight)

    def left(self, now: float, flight: _Flight) -> None:
        """Dispatch what waits, if nothing of this request is to come any more."""
        if not flight.outputs and not flight.reports:
            self.running = [other for other in self.running if other is not flight]
            self.pump(now)

    # -- the devices ----------------------------------------------------------------------------------------------

    def arrive(self, now: float, frame: Arrival) -> None:
        """Put a frame into a device's inbox."""
        device = self.devices[frame.device]
        device.inbox.append(frame)
        if self.record:
            self.arrivals.append(frame)
        if not device.busy:
            self.turn(now, device)

    def turn(self, now: float, device: Device) -> None:
        """Begin what a device does next: what has arrived goes first."""
        if device.inbox:
            frame = device.inbox.popleft()
            until = now + device.profile.frame_seconds(1, frame.nbytes, frame.route)
            self.note(device.name, "send", frame.label, now, until)
            device.busy = True
            self.at(until, _ENDS, self.taken, device, frame)
            return
        if (found := device.machine.next()) is None:
            return
        run, place = found
        seconds = run.part.costs[place] * self.slowness(now, device.name)
        if isinstance(run.part.program.ops[place], Compute):
            device.use.compute_s += seconds
        until = now + seconds
        if self.record:
            self.record_op(now, until, device, run, place)
        device.busy = True
        self.at(until, _ENDS, self.computed, device, run, place)

    def slowness(self, now: float, device: str) -> float:
        """Return how many times as long as by its curves an op takes that a device begins now."""
        slows = self.slows.get(device)
        return 1.0 if slows is None or now < slows.since_s else slows.times

    def record_op(self, now: float, until: float, device: Device, run: DeviceRun, place: int) -> None:
        """Write down that an op begins."""
        op = run.part.program.ops[place]
        lane, label = ("compute", op.label) if isinstance(op, Compute) else ("send", run.part.program.node(op.node))
        self.note(device.name, lane, label, now, until)
        self.ran.append((device.name, run.admission, place))

    def taken(self, now: float, device: Device, frame: Arrival) -> None:
        """Do what a frame is for, now that the device has taken it.

        An exchange over mesh may come before its request, which has another way. Over the broker one may come after the
        end of its run, if it was for others.
        """
        device.busy = False
        machine, admission = device.machine, frame.admission
        if frame.leased is not None:
            self.leases.heard(now, device, frame)
        elif frame.key is None:
            run = DeviceRun(admission, self.flights[admission].parts[device.name])
            device.use.flops += run.part.flops
            machine.admit(run)
            device.begun.add(admission)
            for key in (*run.template.inputs, *device.early.pop(admission, ())):
                self.deliver(machine, run, key)
            self.leases.admit(now, device, run)
            self.end(now, device, run)
        elif (known := machine.runs.get(admission)) is not None:
            self.deliver(machine, known, frame.key)
        elif admission not in device.begun:
            device.early.setdefault(admission, []).append(frame.key)
        if not device.busy:
            self.turn(now, device)

    def deliver(self, machine: RunMachine[DeviceRun], run: DeviceRun, key: Key) -> None:
        """Hand an exchange to its run, which drops what it does not await."""
        slot = machine.awaited(run, key)
        if isinstance(slot, int):
            machine.fill(run, slot)

    def computed(self, now: float, device: Device, run: DeviceRun, place: int) -> None:
        """Take the end of an op: send, wake its readers, go on."""
        device.busy, device.finished_s = False, now
        op = run.part.program.ops[place]
        if self.layer is not None:
            self.ends[op.layer] = now
        if isinstance(op, Send) and op.to == (device.name,):
            self.deliver(device.machine, run, (op.node, op.part, device.name))
        elif isinstance(op, Send):
            self.send(now, device, run, op, run.part.sizes[place])
        device.machine.ran(run, place)
        self.leases.computed(now, device, run, place)
        self.end(now, device, run)
        if not device.busy:
            self.turn(now, device)

    def send(self, now: float, device: Device, run: DeviceRun, op: Send, sizes: Sequence[int]) -> None:
        """Publish a slot to whom it is for; over the broker, to everyone who listens."""
        name, program = device.name, run.part.program
        device.use.sent_bytes += sum(sizes)
        label, nbytes, key = program.node(op.node), program.slots[op.slot].nbytes, (op.node, op.part, name)
        if op.route == "mesh":
            for to, size in zip(op.to, sizes, strict=True):
                when = self.links.direct(now, name, to, size, label)
                frame = Arrival(when, to, run.admission, key, nbytes, label, op.route)
                self.at(when, _ARRIVES, self.arrive, frame)
            return
        for to, size in zip(addresses(op), sizes, strict=True):
            targets = self.listeners[name] if to == ALL else (to,)
            for target, when in self.links.transmit(now, name, targets, size, label).items():
                if target == PLANNER:
                    self.at(when, _ARRIVES, self.heard, run.admission)
                else:
                    self.at(when, _ARRIVES, self.arrive, Arrival(when, target, run.admission, key, nbytes, label))

    def end(self, now: float, device: Device, run: DeviceRun) -> None:
        """Begin the report of a run that has no op left."""
        if not run.left and not run.open and run.admission in device.machine.runs:
            device.machine.drop(run.admission)
            self.leases.ended(now, device.name, run)
            device.busy = True
            self.at(now + device.profile.frame_seconds(1, 0), _ENDS, self.report, device, run.admission)

    def report(self, now: float, device: Device, admission: int) -> None:
        """Send the planner the report of a run."""
        device.busy = False
        size = done_bytes(self.naming, device.name)
        device.use.sent_bytes += size
        [when] = self.links.transmit(now, device.name, (PLANNER,), size, "done").values()
        self.at(when, _ARRIVES, self.reported, admission)
        self.at(when, _ARRIVES, self.leases.reported, admission, device.name)
        self.turn(now, device)

    # -- the outcome ----------------------------------------------------------------------------------------------

    def period(self) -> float:
        """Return by how much the repeated layer ends after the one before it."""
        assert self.layer is not None
        return self.ends.get(self.layer, 0.0) - self.ends.get(self.layer - 1, 0.0)

    def outcome(self) -> Outcome:
        """Return what came of all requests; raises ValueError if Programs wait for each other for ever."""
        stuck = {
            name: sum(pending > 0 for run in device.machine.runs.values() for pending in run.pending)
            for name, device in self.devices.items()
            if device.machine.runs
        }
        if stuck:
            raise ValueError(f"Programs wait for each other: ops never ready {stuck}")
        runs = []
        for flight in self.flights.values():
            assert flight.answered_s is not None
            sequences = len(flight.request.shape.sizes)
            runs.append(RunTimes(flight.asked_s, flight.dispatched_s, flight.answered_s, sequences))
        use = {name: device.use for name, device in self.devices.items()}
        for device in self.devices.values():
            device.use.wait_s = max(device.finished_s - device.use.compute_s, 0.0)
        nbytes = self.nbytes + sum(u.sent_bytes for u in use.values())
        return Outcome(tuple(runs), nbytes, use, self.events, self.arrivals, self.ran)


def play(
    naming: Naming,
    spec: Spec,
    requests: Sequence[Request],
    cluster: Cluster,
    in_flight: int,
    record: bool = False,
) -> Outcome:
    """Play requests in their order, at most `in_flight` of them at once on a device, on measured curves and links.

    The Programs are whole ones: of equal layers none may stand for others, since several requests share the devices.
    record: keep time line, arrivals and order of ops. Raises ValueError if Programs wait for each other for ever.
    """
    clock = Clock(naming, spec, cluster, in_flight, record, None)
    clock.play(requests)
    return clock.outcome()


def simulate(
    naming: Naming,
    spec: Spec,
    shape: RequestShape,
    programs: Mapping[str, Program],
    cluster: Cluster,
    *,
    record: bool = False,
    repeated: tuple[int, int] | None = None,
    slows: Mapping[str, Slows] | None = None,
) -> Simulation:
    """Play one request's Programs on a virtual clock with the cluster's measured curves and links.

    record: keep the time line's events. repeated: (layer, times), a layer that stands for several: each further one
    takes what that one adds to the layer before it. slows: devices that become slower while it runs. Raises ValueError
    if the Programs wait for each other for ever.
    """
    clock = Clock(naming, spec, cluster, 1, record, None if repeated is None else repeated[0])
    clock.slows = slows or {}
    clock.play((Request(shape, programs),))
    played = clock.outcome()
    seconds, nbytes = played.runs[0].answered_s, played.nbytes
    if repeated is not None:
        more, period = repeated[1] - 1, clock.period()
        seconds += more * period
        for name, use in played.devices.items():
            inner = clock.part(name, programs[name]).inner
            use.compute_s += more * inner.compute_s
            use.flops += more * inner.flops
            use.sent_bytes += more * inner.sent_bytes
            nbytes += more * inner.sent_bytes
            use.wait_s = max(clock.devices[name].finished_s + more * period - use.compute_s, 0.0)
    return Simulation(seconds, nbytes, played.devices, played.events)
