"""Bytes on the wire of a request, exactly as the agents and the planner count them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import repeat
from math import inf
from statistics import median
from typing import Any, Final, NamedTuple

from hepti_mqtt.cost.profiles import (
    BROKER_IN,
    BROKER_OUT,
    LOCAL_BYTES_PER_S,
    Cluster,
    DeviceProfile,
    Link,
    Paths,
    Queue,
)
from hepti_mqtt.ids import ALL_DEVICES, PLANNER, PlanVersion
from hepti_mqtt.models import input_bytes
from hepti_mqtt.plan import Plan, Route
from hepti_mqtt.plan_programs import device_programs
from hepti_mqtt.program import Compute, ExchangeKey, Program, Send, SlotSpec, publish_targets
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import frame_bytes, work_bytes
from hepti_mqtt.protocol.topics import Topics, publish_bytes
from hepti_mqtt.schedule import ProgramRun, RunMachine, make_template, route_to_replicas
from hepti_mqtt.spec import RequestShape, Spec
from hepti_mqtt.task_queue import TaskQueue, initial_task


class TopicNames(NamedTuple):
    """The names that stand in topics, on which the bytes depend."""

    site: str
    model: str


def send_bytes(naming: TopicNames, device: str, op: Send, slot: SlotSpec) -> tuple[int, ...]:
    """Return the size of each PUBLISH packet of a Send."""
    topics = Topics(naming.site)
    out = []
    for to in publish_targets(op):
        if to == PLANNER:
            out.append(publish_bytes(topics.reports(device), frame_bytes(slot.nbytes), 1))
        else:
            topic = topics.activation(naming.model, op.layer, device, to)
            out.append(publish_bytes(topic, frame_bytes(slot.nbytes), 0))
    return tuple(out)


def dispatch_bytes(naming: TopicNames, spec: Spec, shape: RequestShape, devices: Iterable[str]) -> int:
    """Return the size of the planner's PUBLISH that hands a request to the devices of a plan, in their order."""
    topic = Topics(naming.site).work(naming.model, next(iter(devices)))
    return publish_bytes(topic, work_bytes(shape, input_bytes(spec, shape)), 1)


def report_bytes(naming: TopicNames, device: str) -> int:
    """Return the size of the PUBLISH by which a device reports that it has finished a request."""
    return publish_bytes(Topics(naming.site).reports(device), frame_bytes(0), 1)


def largest_packet_bytes(naming: TopicNames, spec: Spec, shape: RequestShape, programs: dict[str, Program]) -> int:
    """Return the size of the largest single PUBLISH of a request that the broker carries."""
    sizes = [dispatch_bytes(naming, spec, shape, programs)]
    for device, program in programs.items():
        sends = (op for op in program.ops if isinstance(op, Send) and op.route == "broker")
        sizes += [size for op in sends for size in send_bytes(naming, device, op, program.slots[op.slot])]
    return max(sizes)


def sent_bytes(naming: TopicNames, spec: Spec, shape: RequestShape, programs: dict[str, Program]) -> int:
    """Return all bytes that planner and devices send for one request, copies made by a broker excluded."""
    total = dispatch_bytes(naming, spec, shape, programs)
    for device, program in programs.items():
        total += report_bytes(naming, device)
        for op in program.ops:
            if isinstance(op, Send):
                total += sum(send_bytes(naming, device, op, program.slots[op.slot]))
    return total


# ----------------------------------------------------------------------------------------------------------------------
# Latency and throughput of several requests, from when each was asked, dispatched and answered.


ROUNDS: Final = 6  # as many requests in flight make a load that is steady: two rounds at its ends do not count


class RequestTimes(NamedTuple):
    """When a request was asked, dispatched and answered, in seconds; how many sequences it had."""

    arrived_s: float
    dispatched_s: float
    answered_s: float
    sequences: int = 1

    @property
    def latency_s(self) -> float:
        """Return the seconds from question to answer, what it waited for room among them."""
        return self.answered_s - self.arrived_s


@dataclass(frozen=True, slots=True)
class Throughput:
    """What a plan does with requests that follow one another: of so many, `in_flight` at once.

    requests_per_s, sequences_per_s: in the steady state. latency_s, longest_s: the median and the longest of a request.
    """

    requests: int
    in_flight: int
    requests_per_s: float
    sequences_per_s: float
    latency_s: float
    longest_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "requests": self.requests,
            "in_flight": self.in_flight,
            "requests_per_s": self.requests_per_s,
            "sequences_per_s": self.sequences_per_s,
            "latency_ms": self.latency_s * 1e3,
            "longest_ms": self.longest_s * 1e3,
        }

    def text(self) -> str:
        """Return it as a sentence."""
        each = "" if self.sequences_per_s == self.requests_per_s else f" ({self.sequences_per_s:.3g} sequences/s)"
        return (
            f"throughput {self.requests_per_s:.3g} requests/s{each} with {self.in_flight} in flight; "
            f"latency then {self.latency_s * 1e3:.1f} ms, the longest of {self.requests} {self.longest_s * 1e3:.1f} ms"
        )


def steady_state(runs: Sequence[RequestTimes], in_flight: int) -> Throughput:
    """Return the load that these requests were; raises ValueError without any.

    The steady state lies between two answers: after the first the devices are full, at the second the last request was
    dispatched. Between them are whole rounds of `in_flight` answers, because answers may come in bunches of that. Where
    requests are too few for one round it is all of them, from the first question on: less than what can be kept up.
    """
    if not runs:
        raise ValueError("no request, no load")
    answered = sorted(runs, key=lambda run: run.answered_s)
    stop = len(answered) - in_flight
    start = in_flight + stop % in_flight
    if start < stop:
        counted = answered[start:stop]
        since = answered[start - 1].answered_s
    else:
        counted, since = answered, min(run.arrived_s for run in runs)
    seconds = counted[-1].answered_s - since
    per_s = 1 / seconds if seconds else inf
    latencies = [run.latency_s for run in runs]
    return Throughput(
        len(runs),
        in_flight,
        len(counted) * per_s,
        sum(run.sequences for run in counted) * per_s,
        median(latencies),
        max(latencies),
    )


# ----------------------------------------------------------------------------------------------------------------------
# What goes into the virtual clock and comes out of it: requests, bars of a time line, times, bytes.


class TimelineEvent(NamedTuple):
    """One bar of a time line: what a device (`compute`, `send`) or a link (`up`, `down`) did, in seconds.

    What a device does to take a frame is in `send` too. Lane `task`: from the lease of a bag's task to its end there.
    """

    device: str
    lane: str
    label: str
    start: float
    stop: float


class Slowdown(NamedTuple):
    """A device becomes slower: from a time on, in seconds, its ops take so many times as long."""

    since_s: float
    factor: float


@dataclass(slots=True)
class DeviceUse:
    """What one device did: seconds of compute, seconds idle until its last op, FLOPs, bytes sent."""

    compute_s: float = 0.0
    wait_s: float = 0.0
    flops: float = 0.0
    sent_bytes: int = 0


@dataclass(slots=True)
class Simulation:
    """The outcome of one request: seconds from dispatch to answer at the planner, all bytes sent, and each device."""

    seconds: float
    nbytes: int
    devices: dict[str, DeviceUse]
    events: list[TimelineEvent] = field(default_factory=list)


class ReplicaPrograms(NamedTuple):
    """One of several complete plans under which a request may run: its devices' Programs, and seconds by prediction."""

    programs: Mapping[str, Program]
    seconds: float = 0.0


class SimulatedRequest(NamedTuple):
    """One of several requests: its shape, its devices' Programs, when it is asked; None: as soon as there is room.

    replicas: instead of `programs`, those of several plans side by side, of which it runs under one.
    """

    shape: RequestShape
    programs: Mapping[str, Program]
    arrives_s: float | None = None
    replicas: tuple[ReplicaPrograms, ...] = ()

    @property
    def choices(self) -> tuple[ReplicaPrograms, ...]:
        """Return under what it may run."""
        return self.replicas or (ReplicaPrograms(self.programs),)


class FrameArrival(NamedTuple):
    """A frame that a device has from now on: the request itself (no key), or an exchange of it by one route.

    leased: instead of both, tasks of the request's bag; no task: none is left.
    """

    seconds: float
    device: str
    admission: int
    key: ExchangeKey | None
    nbytes: int
    label: str
    route: Route = "broker"
    leased: tuple[int, ...] | None = None


@dataclass(slots=True)
class LoadSimulation:
    """The outcome of several requests, by admission: all bytes sent, and each device.

    events, arrivals, op_order: if recorded, the time line, which frames arrived, and (device, admission, place in the
    Program) of every op, in the order in which they began.
    """

    runs: tuple[RequestTimes, ...]
    nbytes: int
    devices: dict[str, DeviceUse]
    events: list[TimelineEvent] = field(default_factory=list)
    arrivals: list[FrameArrival] = field(default_factory=list)
    op_order: list[tuple[str, int, int]] = field(default_factory=list)


# ----------------------------------------------------------------------------------------------------------------------
# Devices on the virtual clock: what each has of a Program, what runs there, and what it has been sent.


class CostedProgram:
    """A device's Program with what its ops cost there, for any number of requests.

    sizes: of each PUBLISH packet, by op. inner: of the layer that stands for several.
    """

    __slots__ = ("costs", "flops", "inner", "program", "sizes", "template")

    def __init__(
        self, naming: TopicNames, device: str, profile: DeviceProfile, program: Program, layer: int | None
    ) -> None:
        from hepti_mqtt.kernels import works  # here, since Numba takes longer to import than the rest of a planner

        self.program, self.template = program, make_template(program)
        self.costs: list[float] = []
        self.sizes: list[tuple[int, ...]] = []
        self.flops, self.inner = 0.0, DeviceUse()
        for op in program.ops:
            cost = 0.0
            sizes: tuple[int, ...] = ()
            if isinstance(op, Compute):
                work = works(op, program.slots)
                cost, flops = profile.seconds(*work), sum(part.flops for part in work)
                self.flops += flops
                if op.layer == layer:
                    self.inner.compute_s += cost
                    self.inner.flops += flops
            elif isinstance(op, Send):
                sizes = send_bytes(naming, device, op, program.slots[op.slot])
                cost = profile.frame_seconds(len(op.to), sum(sizes), op.route)
                self.inner.sent_bytes += sum(sizes) if op.layer == layer else 0
            self.costs.append(cost)
            self.sizes.append(sizes)


class DeviceRun(ProgramRun):
    """A run of a Program, and what its ops cost."""

    __slots__ = ("costed",)

    def __init__(self, run_id: int, part: CostedProgram) -> None:
        super().__init__(run_id, part.template)
        self.costed = part


class SimulatedDevice:
    """A device's session thread: what runs there, and what has arrived; early: exchanges that came before requests."""

    def __init__(self, name: str, profile: DeviceProfile) -> None:
        self.name, self.profile = name, profile
        self.machine: RunMachine[DeviceRun] = RunMachine()
        self.inbox: deque[FrameArrival] = deque()
        self.begun: set[int] = set()
        self.early: dict[int, list[ExchangeKey]] = {}
        self.use = DeviceUse()
        self.busy, self.finished_s = False, 0.0


# ----------------------------------------------------------------------------------------------------------------------
# The links of a site on the virtual clock: each way of each is a queue.


Note = Callable[[str, str, str, float, float], None]  # device, lane, label, start, stop


class LinkQueues:
    """When packets arrive that are sent over them; `note` is told how long each link is taken."""

    def __init__(self, cluster: Cluster, note: Note) -> None:
        self._cluster, self._note = cluster, note
        self._ways = Paths(cluster)
        self._free: dict[Queue, float] = {}  # from when on

    def via_broker(self, now: float, source: str, targets: Sequence[str], size: int, label: str) -> dict[str, float]:
        """Return when each target has the packet: the source's uplink, the broker, each target's downlink, all FIFO.

        The broker's own link carries a packet while the other end's does, and each target gets a copy.
        """
        free, up, queue = self._free, self._link(source), self._ways.link_queue(source, "up")
        start = max(now, free.get(queue, 0.0))
        stop = max(start + size / up.up_bytes_per_s, self._pass_broker(start, BROKER_IN, up.up_bytes_per_s, size))
        free[queue] = stop
        self._note(source, "up", label, start, stop)
        at_broker = stop + up.latency_s
        arrivals = {}
        for target in targets:
            down, queue = self._link(target), self._ways.link_queue(target, "down")
            through = self._pass_broker(at_broker, BROKER_OUT, down.down_bytes_per_s, size)
            begin = max(at_broker, free.get(queue, 0.0))
            end = max(begin + size / down.down_bytes_per_s, through)
            free[queue] = end
            self._note(target, "down", label, begin, end)
            arrivals[target] = end + down.latency_s
        return arrivals

    def via_mesh(self, now: float, source: str, target: str, size: int, label: str) -> float:
        """Return when a device has what a peer sends it over mesh: a copy of its own on both ends' links at once.

        Copies leave in their order. Connections share a link that several of them need, so a packet has its place on
        the receiver's from now on, wherever its sender's backlog ends, and the later of the two ends counts.
        """
        free, way = self._free, self._ways.between(source, target)
        start = max(now, free.get(way.up, 0.0))
        sent = free[way.up] = start + size / way.up_bytes_per_s
        down_s = size / way.down_bytes_per_s
        heard = free[way.down] = max(now, free.get(way.down, 0.0)) + down_s
        stop = max(sent, heard, start + size / way.bytes_per_s)
        self._note(source, "up", label, start, sent)
        self._note(target, "down", label, stop - down_s, stop)
        return stop + way.latency_s

    def _link(self, device: str) -> Link:
        return self._cluster.planner_link if device == PLANNER else self._cluster.links[device]

    def _pass_broker(self, start: float, queue: Queue, rate: float, size: int) -> float:
        """Return when a packet from or to a link of this rate is through the broker's own, at once if not over it."""
        broker = self._cluster.broker_bytes_per_s
        if rate >= LOCAL_BYTES_PER_S or broker == inf:
            return start
        self._free[queue] = through = max(start, self._free.get(queue, 0.0)) + size / broker
        return through


# ----------------------------------------------------------------------------------------------------------------------
# Bags on the virtual clock: the planner's leases and the devices' words that a task is computed.


_ARRIVES: Final = 0
_EPOCH: Final = PlanVersion(1, 1)


class LeaseSimulation:
    """The bags of a clock's requests, by admission number.

    A lease waits its turn behind what came before it, as every frame does: so it is taken when its request has been.
    """

    def __init__(self, clock: Simulator) -> None:
        self._clock = clock
        self._bags: dict[int, TaskQueue] = {}
        self._due_s: dict[int, float] = {}
        self._heads: dict[int, str] = {}
        self._since_s: dict[tuple[str, int, int], float] = {}  # by device, admission and task

    def begin(self, now: float, run_id: int, devices: tuple[str, ...], tasks: int) -> None:
        """A request with so many tasks is dispatched."""
        if tasks:
            self._bags[run_id] = TaskQueue(tasks, devices, now)

    def on_admitted(self, now: float, device: SimulatedDevice, run: DeviceRun) -> None:
        """A device has a request: it begins with its first task."""
        if run.template.task_inputs:
            if run.template.op_count:
                self._heads[run.run_id] = device.name
            devices = tuple(self._clock.flights[run.run_id].parts)
            first = initial_task(devices, device.name, len(run.template.task_inputs))
            if first is not None:
                self._lease(now, device, run, first)

    def on_op_done(self, now: float, device: SimulatedDevice, run: DeviceRun, place: int) -> None:
        """An op has run: if it was the last of a task, the planner hears of it."""
        task = run.task_completed_by(place)
        if task is not None:
            self._note(now, device.name, run.run_id, task)
            when = self._transmit(now, device.name, PLANNER)
            self._clock.schedule(when, _ARRIVES, self._said, run.run_id, device.name, task)

    def _said(self, now: float, run_id: int, device: str, task: int) -> None:
        self._bags[run_id].complete_task(device, task, now)
        self._next(now, run_id)

    def on_report(self, now: float, run_id: int, device: str) -> None:
        """A device is done with a request: if it is the head, the others hear that no task is left."""
        if self._heads.get(run_id) == device:
            for name in self._clock.flights[run_id].parts:
                if name != device:
                    self._tell(now, name, run_id, ())

    def _next(self, now: float, run_id: int) -> None:
        """Lease what waits or is late, and look again when something becomes late."""
        bag = self._bags[run_id]
        for name, task in bag.lease_tasks(now):
            self._tell(now, name, run_id, (task,))
        if now < bag.next_takeover_s < inf and self._due_s.get(run_id) != bag.next_takeover_s:
            self._due_s[run_id] = bag.next_takeover_s
            self._clock.schedule(bag.next_takeover_s, _ARRIVES, self._next, run_id)

    def on_lease(self, now: float, device: SimulatedDevice, frame: FrameArrival) -> None:
        """A device has taken a lease, or the word that none is left, which ends what only waited for more."""
        run = device.machine.runs.get(frame.admission)
        if run is None:
            return  # the head device is done with it
        for task in frame.leased or ():
            self._lease(now, device, run, task)
        if not frame.leased:
            run.accepts_leases = False
            self._clock.finish_run(now, device, run)

    def on_run_ended(self, now: float, device: str, run: DeviceRun) -> None:
        """A run is over on a device: what is left of its tasks is nobody's any more."""
        for task, left in run.task_ops_left.items():
            if left:
                self._note(now, device, run.run_id, task, " (given up)")

    def _lease(self, now: float, device: SimulatedDevice, run: DeviceRun, task: int) -> None:
        self._since_s.setdefault((device.name, run.run_id, task), now)
        for key in run.start_task(task):
            self._clock.deliver(device.machine, run, key)

    def _note(self, now: float, device: str, run_id: int, task: int, end: str = "") -> None:
        self._clock.record_bar(device, "task", f"task {task}{end}", self._since_s[device, run_id, task], now)

    def _tell(self, now: float, to: str, run_id: int, tasks: tuple[int, ...]) -> None:
        """Send a device a lease; no task: none is left."""
        when = self._transmit(now, PLANNER, to)
        frame = FrameArrival(when, to, run_id, None, 0, "lease", leased=tasks)
        self._clock.schedule(when, _ARRIVES, self._clock.on_arrival, frame)

    def _transmit(self, now: float, source: str, to: str) -> float:
        """Return when a lease is there, or the word that a task is computed."""
        size = lease_message_bytes(self._clock.naming, to if source == PLANNER else source, source == PLANNER)
        if source == PLANNER:
            self._clock.nbytes += size
        else:
            self._clock.devices[source].use.sent_bytes += size
        return self._clock.links.via_broker(now, source, (to,), size, "lease")[to]


def lease_message_bytes(naming: TopicNames, device: str, lease: bool) -> int:
    """Return the size of the PUBLISH of a lease, or of the word that a task is computed."""
    topics, key = Topics(naming.site), (naming.model, _EPOCH, 1)
    if lease:
        return publish_bytes(topics.command(device), len(messages.encode(messages.LeaseTasks(*key, (1,)))), 1)
    return publish_bytes(topics.reports(device), len(messages.encode(messages.TaskDone(*key, 1))), 1)


# ----------------------------------------------------------------------------------------------------------------------
# The discrete-event simulator: the executor's own machine on devices with one session thread each, links that queue.
#
# A device's thread does one thing at a time, as its shell does: it takes what has arrived, in that order, and only
# then
# begins the op that the machine says. Taking a frame costs time like an op. A request is answered with the last part
# of
# its output, and has left the devices with their last report.


# of what happens at one time, first arrivals, then what a device begins next
_ENDS: Final = 1


@dataclass(slots=True)
class _InFlight:
    """A request that was dispatched; outputs, reports: parts of the answer, and words of devices, that are to come.

    until_s: when it should be over, by prediction.
    """

    request: SimulatedRequest
    parts: dict[str, CostedProgram]
    asked_s: float
    dispatched_s: float
    outputs: int
    reports: int
    until_s: float
    answered_s: float | None = None


class Simulator:
    """Devices, links and the planner at a moment; `layer` is the one that stands for several."""

    def __init__(
        self, naming: TopicNames, spec: Spec, cluster: Cluster, in_flight: int, record: bool, layer: int | None
    ) -> None:
        self.naming, self.spec, self.cluster = naming, spec, cluster
        self.in_flight, self.record, self.layer = in_flight, record, layer
        self.links = LinkQueues(cluster, self.record_bar)
        self.devices: dict[str, SimulatedDevice] = {}
        self.listeners: dict[str, tuple[str, ...]] = {}
        self.flights: dict[int, _InFlight] = {}
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[_InFlight] = []
        self.nbytes = self._serial = 0
        self.ends: dict[int, float] = {}  # when the last op of a layer was over
        self.events: list[TimelineEvent] = []
        self.arrivals: list[FrameArrival] = []
        self.op_order: list[tuple[str, int, int]] = []
        self._known: dict[tuple[str, int], CostedProgram] = {}
        self._queue: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.leases = LeaseSimulation(self)
        self.slowdowns: Mapping[str, Slowdown] = {}

    def run(self, requests: Sequence[SimulatedRequest]) -> None:
        """Let time pass until all requests are answered, or nothing happens any more."""
        choices = [choice.programs for r in requests for choice in r.choices]
        names = dict.fromkeys(name for choice in choices for name in choice)
        self.devices = {name: SimulatedDevice(name, self.cluster.devices[name]) for name in names}
        heard: dict[str, set[str]] = {name: set() for name in names}
        for choice in {id(c): c for c in choices}.values():
            for name, program in choice.items():
                heard[name].update(*(op.to for op in program.ops if isinstance(op, Send) and op.route == "broker"))
        # Whoever hears a device at all over the broker hears what it publishes to ALL.
        self.listeners = {n: tuple(d for d in names if d in heard[n]) for n in names}
        self.waiting = deque(requests)
        for asked_s in {r.arrives_s or 0.0 for r in requests}:
            self.schedule(asked_s, _ARRIVES, self.dispatch_waiting)
        while self._queue:
            now, _, _, act, what = heappop(self._queue)
            act(now, *what)

    def schedule(self, when: float, rank: int, act: Callable[..., None], *what: object) -> None:
        """Call `act` with the time and `what` when it is time."""
        self._serial += 1
        heappush(self._queue, (when, rank, self._serial, act, what))

    def record_bar(self, device: str, lane: str, label: str, start: float, stop: float) -> None:
        """Add a bar to the time line."""
        if self.record and stop > start:
            self.events.append(TimelineEvent(device, lane, label, start, stop))

    # -- the planner ----------------------------------------------------------------------------------------------

    def dispatch_waiting(self, now: float) -> None:
        """Dispatch what waits, as far as it has been asked and there is room beside what runs."""
        while self.waiting and (self.waiting[0].arrives_s or 0.0) <= now:
            choices = self.waiting[0].choices
            beside = [self.running_on(choice) for choice in choices]
            has_room = [len(runs) < self.in_flight for runs in beside]
            if not any(has_room):
                return
            free_s = [max((run.until_s for run in runs), default=now) for runs in beside]
            waiting = sum((request.arrives_s or 0.0) <= now for request in self.waiting)
            lanes = [(free, choice.seconds) for free, choice in zip(free_s, choices, strict=True)]
            chosen = next((i for i in route_to_replicas(now, lanes, repeat(1.0, waiting)) if has_room[i]), None)
            if chosen is None:
                return
            until_s = max(free_s[chosen], now) + choices[chosen].seconds
            self.dispatch(now, self.waiting.popleft(), choices[chosen], until_s)

    def running_on(self, choice: ReplicaPrograms) -> list[_InFlight]:
        """Return what runs on devices of a replica."""
        return [flight for flight in self.running if not flight.parts.keys().isdisjoint(choice.programs)]

    def dispatch(self, now: float, request: SimulatedRequest, choice: ReplicaPrograms, until_s: float) -> None:
        """Send a request to the devices of its plan."""
        run_id = len(self.flights) + 1
        parts = {name: self.part(name, program) for name, program in choice.programs.items()}
        outputs = sum(isinstance(op, Send) and PLANNER in op.to for p in parts.values() for op in p.program.ops)
        asked_s = now if request.arrives_s is None else request.arrives_s
        flight = _InFlight(request, parts, asked_s, now, outputs, len(parts), until_s)
        self.flights[run_id] = flight
        self.running.append(flight)
        self.leases.begin(now, run_id, tuple(parts), max(len(p.template.task_inputs) for p in parts.values()))
        size = dispatch_bytes(self.naming, self.spec, request.shape, choice.programs)
        self.nbytes += size
        body = input_bytes(self.spec, request.shape)
        for to, when in self.links.via_broker(now, PLANNER, tuple(parts), size, "dispatch").items():
            self.schedule(when, _ARRIVES, self.on_arrival, FrameArrival(when, to, run_id, None, body, "dispatch"))

    def part(self, name: str, program: Program) -> CostedProgram:
        """Return a device's Program with its costs."""
        key = (name, id(program))
        if key not in self._known:
            self._known[key] = CostedProgram(self.naming, name, self.cluster.devices[name], program, self.layer)
        return self._known[key]

    def on_output(self, now: float, run_id: int) -> None:
        """Take a part of an answer: with the last one it leaves, whoever has yet to report."""
        flight = self.flights[run_id]
        flight.outputs -= 1
        if not flight.outputs:
            flight.answered_s = now
        self.release_if_done(now, flight)

    def on_report(self, now: float, run_id: int) -> None:
        """Take a device's report; after the last one there is room for another request."""
        flight = self.flights[run_id]
        flight.reports -= 1
        self.release_if_done(now, flight)

    def release_if_done(self, now: float, flight: _InFlight) -> None:
        """Dispatch what waits, if nothing of this request is to come any more."""
        if not flight.outputs and not flight.reports:
            self.running = [other for other in self.running if other is not flight]
            self.dispatch_waiting(now)

    # -- the devices ----------------------------------------------------------------------------------------------

    def on_arrival(self, now: float, frame: FrameArrival) -> None:
        """Put a frame into a device's inbox."""
        device = self.devices[frame.device]
        device.inbox.append(frame)
        if self.record:
            self.arrivals.append(frame)
        if not device.busy:
            self.start_next(now, device)

    def start_next(self, now: float, device: SimulatedDevice) -> None:
        """Begin what a device does next: what has arrived goes first."""
        if device.inbox:
            frame = device.inbox.popleft()
            until = now + device.profile.frame_seconds(1, frame.nbytes, frame.route)
            self.record_bar(device.name, "send", frame.label, now, until)
            device.busy = True
            self.schedule(until, _ENDS, self.on_frame_taken, device, frame)
            return
        if (found := device.machine.next_op()) is None:
            return
        run, place = found
        seconds = run.costed.costs[place] * self.slowness(now, device.name)
        if isinstance(run.costed.program.ops[place], Compute):
            device.use.compute_s += seconds
        until = now + seconds
        if self.record:
            self.record_op(now, until, device, run, place)
        device.busy = True
        self.schedule(until, _ENDS, self.on_op_done, device, run, place)

    def slowness(self, now: float, device: str) -> float:
        """Return how many times as long as by its curves an op takes that a device begins now."""
        slows = self.slowdowns.get(device)
        return 1.0 if slows is None or now < slows.since_s else slows.factor

    def record_op(self, now: float, until: float, device: SimulatedDevice, run: DeviceRun, place: int) -> None:
        """Write down that an op begins."""
        op = run.costed.program.ops[place]
        lane, label = ("compute", op.label) if isinstance(op, Compute) else ("send", run.costed.program.node(op.node))
        self.record_bar(device.name, lane, label, now, until)
        self.op_order.append((device.name, run.run_id, place))

    def on_frame_taken(self, now: float, device: SimulatedDevice, frame: FrameArrival) -> None:
        """Do what a frame is for, now that the device has taken it.

        An exchange over mesh may come before its request, which has another way. Over the broker one may come after the
        end of its run, if it was for others.
        """
        device.busy = False
        machine, run_id = device.machine, frame.admission
        if frame.leased is not None:
            self.leases.on_lease(now, device, frame)
        elif frame.key is None:
            run = DeviceRun(run_id, self.flights[run_id].parts[device.name])
            device.use.flops += run.costed.flops
            machine.admit(run)
            device.begun.add(run_id)
            for key in (*run.template.inputs, *device.early.pop(run_id, ())):
                self.deliver(machine, run, key)
            self.leases.on_admitted(now, device, run)
            self.finish_run(now, device, run)
        elif (known := machine.runs.get(run_id)) is not None:
            self.deliver(machine, known, frame.key)
        elif run_id not in device.begun:
            device.early.setdefault(run_id, []).append(frame.key)
        if not device.busy:
            self.start_next(now, device)

    def deliver(self, machine: RunMachine[DeviceRun], run: DeviceRun, key: ExchangeKey) -> None:
        """Hand an exchange to its run, which drops what it does not await."""
        slot = machine.slot_for(run, key)
        if isinstance(slot, int):
            machine.fill_slot(run, slot)

    def on_op_done(self, now: float, device: SimulatedDevice, run: DeviceRun, place: int) -> None:
        """Take the end of an op: send, wake its readers, go on."""
        device.busy, device.finished_s = False, now
        op = run.costed.program.ops[place]
        if self.layer is not None:
            self.ends[op.layer] = now
        if isinstance(op, Send) and op.to == (device.name,):
            self.deliver(device.machine, run, (op.node, op.part, device.name))
        elif isinstance(op, Send):
            self.send(now, device, run, op, run.costed.sizes[place])
        device.machine.finish_op(run, place)
        self.leases.on_op_done(now, device, run, place)
        self.finish_run(now, device, run)
        if not device.busy:
            self.start_next(now, device)

    def send(self, now: float, device: SimulatedDevice, run: DeviceRun, op: Send, sizes: Sequence[int]) -> None:
        """Publish a slot to whom it is for; over the broker, to everyone who listens."""
        name, program = device.name, run.costed.program
        device.use.sent_bytes += sum(sizes)
        label, nbytes, key = program.node(op.node), program.slots[op.slot].nbytes, (op.node, op.part, name)
        if op.route == "mesh":
            for to, size in zip(op.to, sizes, strict=True):
                when = self.links.via_mesh(now, name, to, size, label)
                frame = FrameArrival(when, to, run.run_id, key, nbytes, label, op.route)
                self.schedule(when, _ARRIVES, self.on_arrival, frame)
            return
        for to, size in zip(publish_targets(op), sizes, strict=True):
            targets = self.listeners[name] if to == ALL_DEVICES else (to,)
            for target, when in self.links.via_broker(now, name, targets, size, label).items():
                if target == PLANNER:
                    self.schedule(when, _ARRIVES, self.on_output, run.run_id)
                else:
                    self.schedule(
                        when, _ARRIVES, self.on_arrival, FrameArrival(when, target, run.run_id, key, nbytes, label)
                    )

    def finish_run(self, now: float, device: SimulatedDevice, run: DeviceRun) -> None:
        """Begin the report of a run that has no op left."""
        if not run.ops_left and not run.accepts_leases and run.run_id in device.machine.runs:
            device.machine.remove(run.run_id)
            self.leases.on_run_ended(now, device.name, run)
            device.busy = True
            self.schedule(now + device.profile.frame_seconds(1, 0), _ENDS, self.send_report, device, run.run_id)

    def send_report(self, now: float, device: SimulatedDevice, run_id: int) -> None:
        """Send the planner the report of a run."""
        device.busy = False
        size = report_bytes(self.naming, device.name)
        device.use.sent_bytes += size
        [when] = self.links.via_broker(now, device.name, (PLANNER,), size, "done").values()
        self.schedule(when, _ARRIVES, self.on_report, run_id)
        self.schedule(when, _ARRIVES, self.leases.on_report, run_id, device.name)
        self.start_next(now, device)

    # -- the outcome ----------------------------------------------------------------------------------------------

    def period(self) -> float:
        """Return by how much the repeated layer ends after the one before it."""
        assert self.layer is not None
        return self.ends.get(self.layer, 0.0) - self.ends.get(self.layer - 1, 0.0)

    def outcome(self) -> LoadSimulation:
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
            runs.append(RequestTimes(flight.asked_s, flight.dispatched_s, flight.answered_s, sequences))
        use = {name: device.use for name, device in self.devices.items()}
        for device in self.devices.values():
            device.use.wait_s = max(device.finished_s - device.use.compute_s, 0.0)
        nbytes = self.nbytes + sum(u.sent_bytes for u in use.values())
        return LoadSimulation(tuple(runs), nbytes, use, self.events, self.arrivals, self.op_order)


def simulate_requests(
    naming: TopicNames,
    spec: Spec,
    requests: Sequence[SimulatedRequest],
    cluster: Cluster,
    in_flight: int,
    record: bool = False,
) -> LoadSimulation:
    """Play requests in their order, at most `in_flight` of them at once on a device, on measured curves and links.

    The Programs are whole ones: of equal layers none may stand for others, since several requests share the devices.
    record: keep time line, arrivals and order of ops. Raises ValueError if Programs wait for each other for ever.
    """
    clock = Simulator(naming, spec, cluster, in_flight, record, None)
    clock.run(requests)
    return clock.outcome()


def simulate(
    naming: TopicNames,
    spec: Spec,
    shape: RequestShape,
    programs: Mapping[str, Program],
    cluster: Cluster,
    *,
    record: bool = False,
    repeated: tuple[int, int] | None = None,
    slowdowns: Mapping[str, Slowdown] | None = None,
) -> Simulation:
    """Play one request's Programs on a virtual clock with the cluster's measured curves and links.

    record: keep the time line's events. repeated: (layer, times), a layer that stands for several: each further one
    takes what that one adds to the layer before it. slowdowns: devices that become slower while it runs. Raises
    ValueError if the Programs wait for each other for ever.
    """
    clock = Simulator(naming, spec, cluster, 1, record, None if repeated is None else repeated[0])
    clock.slowdowns = slowdowns or {}
    clock.run((SimulatedRequest(shape, programs),))
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


# ----------------------------------------------------------------------------------------------------------------------
# Several requests under a plan: latency and throughput, also of replicas that share them.


def simulated_request(
    naming: TopicNames,
    spec: Spec,
    plan: Plan,
    shape: RequestShape,
    cluster: Cluster,
    parts: Mapping[str, Program] | None = None,
) -> SimulatedRequest:
    """Return a request under a plan; parts: its Programs where they are known already.

    Of replicas it may run under each, and which one is chosen by the times that one request takes there.
    """
    if not plan.replicas:
        return SimulatedRequest(shape, parts or device_programs(spec, plan, shape))
    made = [device_programs(spec, replica, shape) for replica in plan.replicas]
    choices = (ReplicaPrograms(p, simulate(naming, spec, shape, p, cluster).seconds) for p in made)
    return SimulatedRequest(shape, made[0], replicas=tuple(choices))


def simulate_throughput(
    naming: TopicNames, spec: Spec, request: SimulatedRequest, cluster: Cluster, in_flight: int, requests: int
) -> Throughput:
    """Return latency and throughput of so many requests like this one, of whole Programs; raises as `play` does.

    Of replicas, so many requests for each of them.
    """
    several = len(request.choices)
    runs = simulate_requests(naming, spec, (request,) * (requests * several), cluster, in_flight).runs
    return steady_state(runs, in_flight * several)
