"""The discrete-event simulator of Programs on measured devices and links, and the bytes that a request sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
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
from hepti_mqtt.lowering.lower import KEPT_PARTS
from hepti_mqtt.models import input_bytes
from hepti_mqtt.plan import Plan, Route
from hepti_mqtt.plan_programs import device_programs
from hepti_mqtt.program import Compute, ExchangeKey, Program, SameProgram, Send, SlotSpec, Work, publish_targets
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import frame_bytes, work_bytes
from hepti_mqtt.protocol.topics import Topics, publish_bytes
from hepti_mqtt.schedule import ProgramRun, RunMachine, RunTemplate, make_template, route_to_replicas
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

    What a device does to take a frame is in `send` too. Lane `task`: from the lease of a task to its end there.
    """

    device: str
    lane: str
    label: str
    start: float
    stop: float


class Span(NamedTuple):
    """A time in which a device's thread was busy, in seconds; is_frame: with sending or taking a frame."""

    start: float
    stop: float
    device: str
    is_frame: bool


@dataclass(slots=True)
class DeviceUse:
    """What one device did: seconds of compute, seconds idle until its last op, FLOPs, bytes sent.

    product_s, overhead_s: seconds of compute in products with weights, and before and behind all ops. frame_s: seconds
    of its thread for sending and taking frames. alone_s: seconds of compute and frames, until the answer, in which no
    other device did anything.
    """

    compute_s: float = 0.0
    product_s: float = 0.0
    overhead_s: float = 0.0
    wait_s: float = 0.0
    flops: float = 0.0
    sent_bytes: int = 0
    frame_s: float = 0.0
    alone_s: float = 0.0


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

    leased: instead of both, tasks of the request; no task: none is left.
    """

    seconds: float
    device: str
    run_id: int
    key: ExchangeKey | None
    nbytes: int
    label: str
    route: Route = "broker"
    leased: tuple[int, ...] | None = None


@dataclass(slots=True)
class Simulation:
    """The outcome of one or several requests, in the order of dispatch: times, all bytes sent, and each device.

    events: the time line, if it was recorded.
    """

    runs: tuple[RequestTimes, ...]
    nbytes: int
    devices: dict[str, DeviceUse]
    events: list[TimelineEvent] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Return the seconds from question to answer of the first request."""
        return self.runs[0].latency_s


# What a test may observe: a frame that arrives, or (device, run, place in the Program) of an op that begins.
Observer = Callable[[FrameArrival | tuple[str, int, int]], None]


# ----------------------------------------------------------------------------------------------------------------------
# Devices on the virtual clock: what each has of a Program, what runs there, and what it has been sent.


class CostedProgram:
    """A device's Program with what its ops cost there, for any number of requests.

    sizes: of each PUBLISH packet, by op. inner: of the layer that stands for several.
    """

    __slots__ = ("costs", "flops", "inner", "products", "program", "sizes", "template")

    def __init__(
        self, naming: TopicNames, device: str, profile: DeviceProfile, program: Program, layer: int | None
    ) -> None:
        self.program = program
        self.template, work = _prepared(SameProgram(program))
        self.costs: list[float] = []
        self.products: list[float] = []  # seconds of each op in them
        self.sizes: list[tuple[int, ...]] = []
        self.flops, self.inner = 0.0, DeviceUse()
        for op, parts in zip(program.ops, work, strict=True):
            cost = product_s = 0.0
            sizes: tuple[int, ...] = ()
            if isinstance(op, Compute):
                cost, flops = profile.seconds(*parts), sum(part.flops for part in parts)
                product_s = profile.product_seconds(*parts)
                self.flops += flops
                if op.layer == layer:
                    self.inner.compute_s += cost
                    self.inner.product_s += product_s
                    self.inner.overhead_s += profile.op_overhead_s
                    self.inner.flops += flops
            elif isinstance(op, Send):
                sizes = send_bytes(naming, device, op, program.slots[op.slot])
                cost = profile.frame_seconds(len(op.to), sum(sizes), op.route)
                self.inner.sent_bytes += sum(sizes) if op.layer == layer else 0
            self.costs.append(cost)
            self.products.append(product_s)
            self.sizes.append(sizes)


@lru_cache(maxsize=KEPT_PARTS)
def _prepared(same: SameProgram) -> tuple[RunTemplate, tuple[tuple[Work, ...], ...]]:
    """Return what runs of a Program follow, and how much work each op is; many plans have it in common."""
    from hepti_mqtt.kernels import works  # here, since Numba takes longer to import than the rest of a planner

    program = same.program
    work = tuple(works(op, program.slots) if isinstance(op, Compute) else () for op in program.ops)
    return make_template(program), work


@lru_cache(maxsize=KEPT_PARTS)
def _costed(
    naming: TopicNames, device: str, profile: DeviceProfile, same: SameProgram, layer: int | None
) -> CostedProgram:
    return CostedProgram(naming, device, profile, same.program, layer)


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
    """When packets arrive that are sent over them; `note` records how long each link is busy."""

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


_VERSION: Final = PlanVersion(1, 1)


def lease_message_bytes(naming: TopicNames, device: str, lease: bool) -> int:
    """Return the size of the PUBLISH of a lease, or of the word that a task is computed."""
    topics, key = Topics(naming.site), (naming.model, _VERSION, 1)
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


# Of what happens at one time, first arrivals, then what a device begins next.
_ARRIVES: Final = 0
_ENDS: Final = 1


@dataclass(slots=True)
class _InFlight:
    """A request that was dispatched; outputs, reports: parts of the answer, and words of devices, that are to come.

    until_s: when it should be over, by prediction. tasks: its task queue, if it has one; takeover_s: when a lease of it
    is looked at again; root: the device that needs the tasks' results; leased_s: when a device got a task.
    """

    request: SimulatedRequest
    parts: dict[str, CostedProgram]
    asked_s: float
    dispatched_s: float
    outputs: int
    reports: int
    until_s: float
    tasks: TaskQueue | None = None
    answered_s: float | None = None
    takeover_s: float | None = None
    root: str = ""
    leased_s: dict[tuple[str, int], float] = field(default_factory=dict)


class Simulator:
    """Devices, links and the planner at a moment.

    layer: the one that stands for several. slowness: of a device at a time, how many times as long as by its curves an
    op takes.
    """

    def __init__(
        self,
        naming: TopicNames,
        spec: Spec,
        cluster: Cluster,
        in_flight: int,
        record: bool,
        *,
        layer: int | None = None,
        slowness: Callable[[str, float], float] | None = None,
        observe: Observer | None = None,
    ) -> None:
        self.naming, self.spec, self.cluster = naming, spec, cluster
        self.in_flight, self.record, self.layer = in_flight, record, layer
        self.slowness, self.observe = slowness, observe
        self.links = LinkQueues(cluster, self.record_bar)
        self.devices: dict[str, SimulatedDevice] = {}
        self.listeners: dict[str, tuple[str, ...]] = {}
        self.flights: dict[int, _InFlight] = {}
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[_InFlight] = []
        self.nbytes = self._serial = 0
        self.ends: dict[int, float] = {}  # when the last op of a layer was over
        self.events: list[TimelineEvent] = []
        self.spans: list[Span] = []
        self._known: dict[tuple[str, int], CostedProgram] = {}
        self._queue: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []

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
        tasks = max(len(p.template.task_inputs) for p in parts.values())
        queue = TaskQueue(tasks, tuple(parts), now) if tasks else None
        flight = _InFlight(request, parts, asked_s, now, outputs, len(parts), until_s, queue)
        self.flights[run_id] = flight
        self.running.append(flight)
        size = dispatch_bytes(self.naming, self.spec, request.shape, choice.programs)
        self.nbytes += size
        body = input_bytes(self.spec, request.shape)
        for to, when in self.links.via_broker(now, PLANNER, tuple(parts), size, "dispatch").items():
            self.schedule(when, _ARRIVES, self.on_arrival, FrameArrival(when, to, run_id, None, body, "dispatch"))

    def part(self, name: str, program: Program) -> CostedProgram:
        """Return a device's Program with its costs."""
        key = (name, id(program))
        if key not in self._known:
            self._known[key] = _costed(self.naming, name, self.cluster.devices[name], SameProgram(program), self.layer)
        return self._known[key]

    def on_output(self, now: float, run_id: int) -> None:
        """Take a part of an answer: with the last one it leaves, before all reports."""
        flight = self.flights[run_id]
        flight.outputs -= 1
        if not flight.outputs:
            flight.answered_s = now
        self.release_if_done(now, flight)

    def on_report(self, now: float, run_id: int, device: str) -> None:
        """Take a device's report: after the root's, no task is left; after the last, there is room for a request."""
        flight = self.flights[run_id]
        flight.reports -= 1
        self.release_if_done(now, flight)
        if flight.root == device:
            for name in flight.parts:
                if name != device:
                    self.send_lease(now, name, run_id, ())

    def release_if_done(self, now: float, flight: _InFlight) -> None:
        """Dispatch what waits, if nothing of this request is to come any more."""
        if not flight.outputs and not flight.reports:
            self.running = [other for other in self.running if other is not flight]
            self.dispatch_waiting(now)

    def on_task_done(self, now: float, run_id: int, device: str, task: int) -> None:
        """Take a device's message that a task is computed."""
        tasks = self.flights[run_id].tasks
        assert tasks is not None
        tasks.complete_task(device, task, now)
        self.lease_tasks(now, run_id)

    def lease_tasks(self, now: float, run_id: int) -> None:
        """Lease what waits or is late, and look again when something becomes late."""
        flight = self.flights[run_id]
        assert flight.tasks is not None
        for name, task in flight.tasks.lease_tasks(now):
            self.send_lease(now, name, run_id, (task,))
        due = flight.tasks.next_takeover_s
        if now < due < inf and flight.takeover_s != due:
            flight.takeover_s = due
            self.schedule(due, _ARRIVES, self.lease_tasks, run_id)

    def send_lease(self, now: float, to: str, run_id: int, tasks: tuple[int, ...]) -> None:
        """Send a device a lease; no task: none is left."""
        size = lease_message_bytes(self.naming, to, True)
        self.nbytes += size
        [when] = self.links.via_broker(now, PLANNER, (to,), size, "lease").values()
        frame = FrameArrival(when, to, run_id, None, 0, "lease", leased=tasks)
        self.schedule(when, _ARRIVES, self.on_arrival, frame)

    # -- the devices ----------------------------------------------------------------------------------------------

    def on_arrival(self, now: float, frame: FrameArrival) -> None:
        """Put a frame into a device's inbox."""
        device = self.devices[frame.device]
        device.inbox.append(frame)
        if self.observe is not None:
            self.observe(frame)
        if not device.busy:
            self.start_next(now, device)

    def start_next(self, now: float, device: SimulatedDevice) -> None:
        """Begin what a device does next: what has arrived goes first."""
        if device.inbox:
            frame = device.inbox.popleft()
            until = now + device.profile.frame_seconds(1, frame.nbytes, frame.route)
            self.record_bar(device.name, "send", frame.label, now, until)
            self.spans.append(Span(now, until, device.name, True))
            device.busy = True
            self.schedule(until, _ENDS, self.on_frame_taken, device, frame)
            return
        if (found := device.machine.next_op()) is None:
            return
        run, place = found
        slowness = 1.0 if self.slowness is None else self.slowness(device.name, now)
        op, seconds = run.costed.program.ops[place], slowness * run.costed.costs[place]
        lane, until = "send", now + seconds
        if isinstance(op, Compute):
            lane = "compute"
            device.use.compute_s += seconds
            device.use.product_s += slowness * run.costed.products[place]
            device.use.overhead_s += slowness * device.profile.op_overhead_s
        self.spans.append(Span(now, until, device.name, lane == "send"))
        if self.record:
            label = op.label if isinstance(op, Compute) else run.costed.program.node(op.node)
            self.record_bar(device.name, lane, label, now, until)
        if self.observe is not None:
            self.observe((device.name, run.run_id, place))
        device.busy = True
        self.schedule(until, _ENDS, self.on_op_done, device, run, place)

    def on_frame_taken(self, now: float, device: SimulatedDevice, frame: FrameArrival) -> None:
        """Do what a frame is for, now that the device has taken it.

        An exchange over mesh may come before its request, which has another way. Over the broker one may come after the
        end of its run, if it was for others.
        """
        device.busy = False
        machine, run_id = device.machine, frame.run_id
        if frame.leased is not None:
            self.on_lease(now, device, frame)
        elif frame.key is None:
            run = DeviceRun(run_id, self.flights[run_id].parts[device.name])
            device.use.flops += run.costed.flops
            machine.admit(run)
            device.begun.add(run_id)
            for key in (*run.template.inputs, *device.early.pop(run_id, ())):
                self.deliver(machine, run, key)
            self.begin_tasks(now, device, run)
            self.finish_run(now, device, run)
        elif (known := machine.runs.get(run_id)) is not None:
            self.deliver(machine, known, frame.key)
        elif run_id not in device.begun:
            device.early.setdefault(run_id, []).append(frame.key)
        if not device.busy:
            self.start_next(now, device)

    def begin_tasks(self, now: float, device: SimulatedDevice, run: DeviceRun) -> None:
        """Begin a device's first task of a request that it has taken."""
        if run.template.task_inputs:
            flight = self.flights[run.run_id]
            if run.template.op_count:
                flight.root = device.name
            first = initial_task(tuple(flight.parts), device.name, len(run.template.task_inputs))
            if first is not None:
                self.begin_task(now, device, run, first)

    def begin_task(self, now: float, device: SimulatedDevice, run: DeviceRun, task: int) -> None:
        """Begin a leased task."""
        self.flights[run.run_id].leased_s.setdefault((device.name, task), now)
        for key in run.start_task(task):
            self.deliver(device.machine, run, key)

    def on_lease(self, now: float, device: SimulatedDevice, frame: FrameArrival) -> None:
        """Take a lease, or the message that no task is left, which ends what only waited for more.

        A lease waits its turn behind what came before it, as every frame does, so its request has been taken.
        """
        run = device.machine.runs.get(frame.run_id)
        if run is None:
            return  # the root device is done with it
        for task in frame.leased or ():
            self.begin_task(now, device, run, task)
        if not frame.leased:
            run.accepts_leases = False
            self.finish_run(now, device, run)

    def record_task(self, now: float, device: str, run_id: int, task: int, end: str = "") -> None:
        """Add a task's bar, from its lease on."""
        self.record_bar(device, "task", f"task {task}{end}", self.flights[run_id].leased_s[device, task], now)

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
        if (task := run.task_completed_by(place)) is not None:
            self.record_task(now, device.name, run.run_id, task)
            size = lease_message_bytes(self.naming, device.name, False)
            device.use.sent_bytes += size
            [when] = self.links.via_broker(now, device.name, (PLANNER,), size, "lease").values()
            self.schedule(when, _ARRIVES, self.on_task_done, run.run_id, device.name, task)
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
            for task, left in run.task_ops_left.items():
                if left:
                    self.record_task(now, device.name, run.run_id, task, " (given up)")
            device.busy = True
            self.schedule(now + device.profile.frame_seconds(1, 0), _ENDS, self.send_report, device, run.run_id)

    def send_report(self, now: float, device: SimulatedDevice, run_id: int) -> None:
        """Send the planner the report of a run."""
        device.busy = False
        size = report_bytes(self.naming, device.name)
        device.use.sent_bytes += size
        [when] = self.links.via_broker(now, device.name, (PLANNER,), size, "done").values()
        self.schedule(when, _ARRIVES, self.on_report, run_id, device.name)
        self.start_next(now, device)

    # -- the outcome ----------------------------------------------------------------------------------------------

    def period(self) -> float:
        """Return by how much the repeated layer ends after the one before it."""
        assert self.layer is not None
        return self.ends.get(self.layer, 0.0) - self.ends.get(self.layer - 1, 0.0)

    def outcome(self) -> Simulation:
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
        return Simulation(tuple(runs), nbytes, use, self.events)


def simulate_requests(
    naming: TopicNames,
    spec: Spec,
    requests: Sequence[SimulatedRequest],
    cluster: Cluster,
    in_flight: int,
    record: bool = False,
    observe: Observer | None = None,
) -> Simulation:
    """Simulate requests in their order, at most `in_flight` of them at once on a device, on measured curves and links.

    The Programs are whole ones: of equal layers none may stand for others, since several requests share the devices.
    record: keep the time line. Raises ValueError if Programs wait for each other for ever.
    """
    clock = Simulator(naming, spec, cluster, in_flight, record, observe=observe)
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
    slowness: Callable[[str, float], float] | None = None,
) -> Simulation:
    """Play one request's Programs on a virtual clock with the cluster's measured curves and links.

    record: keep the time line's events. repeated: (layer, times), a layer that stands for several: each further one
    takes what that one adds to the layer before it. slowness: factor on the time of an op that a device begins at a
    time. Raises ValueError if the Programs wait for each other for ever.
    """
    clock = Simulator(
        naming, spec, cluster, 1, record, layer=None if repeated is None else repeated[0], slowness=slowness
    )
    clock.run((SimulatedRequest(shape, programs),))
    played = clock.outcome()
    _divide_time(played, clock.spans, 0.0, played.seconds, 1)
    if repeated is not None:
        more, period, run = repeated[1] - 1, clock.period(), played.runs[0]
        end_s = clock.ends.get(repeated[0], 0.0)
        _divide_time(played, clock.spans, end_s - period, end_s, more)
        played.runs = (run._replace(answered_s=run.answered_s + more * period),)
        for name, use in played.devices.items():
            inner = clock.part(name, programs[name]).inner
            use.compute_s += more * inner.compute_s
            use.product_s += more * inner.product_s
            use.overhead_s += more * inner.overhead_s
            use.flops += more * inner.flops
            use.sent_bytes += more * inner.sent_bytes
            played.nbytes += more * inner.sent_bytes
            use.wait_s = max(clock.devices[name].finished_s + more * period - use.compute_s, 0.0)
    return played


def _divide_time(played: Simulation, spans: Iterable[Span], since: float, until: float, times: int) -> None:
    """Add a part of the time, `times` over, to the use of devices: what was frames, and what each did alone."""
    edges: list[tuple[float, bool, str]] = []
    for span in spans:
        start, stop = max(span.start, since), min(span.stop, until)
        if start < stop:
            edges += ((start, True, span.device), (stop, False, span.device))
            played.devices[span.device].frame_s += times * (stop - start) * span.is_frame
    busy: set[str] = set()
    at = since
    for when, begins, device in sorted(edges):
        if len(busy) == 1:
            played.devices[next(iter(busy))].alone_s += times * (when - at)
        at = when
        (busy.add if begins else busy.discard)(device)


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
