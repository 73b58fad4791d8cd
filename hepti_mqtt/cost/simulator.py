"""Discrete-event simulation of Programs on measured devices and links, and the bytes that a request sends."""

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

from hepti_mqtt.core.ids import ALL_DEVICES, PLANNER, PlanVersion
from hepti_mqtt.core.plan import Plan, Route
from hepti_mqtt.core.profiles import BROKER_IN, BROKER_OUT, LOCAL_BYTES_PER_S, Cluster, DeviceProfile, Paths, Queue
from hepti_mqtt.core.program import Compute, ExchangeKey, Program, SameProgram, Send, SlotSpec, Work, publish_targets
from hepti_mqtt.core.schedule import (
    ProgramRun,
    RunMachine,
    RunTemplate,
    make_template,
    route_to_replicas,
    stretches_of,
)
from hepti_mqtt.core.spec import RequestShape, Spec
from hepti_mqtt.lowering.lower import LOWERED_CACHE_SIZE
from hepti_mqtt.models import input_bytes
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import frame_bytes, work_bytes
from hepti_mqtt.protocol.topics import Topics, publish_bytes
from hepti_mqtt.strategies.plan_programs import device_programs
from hepti_mqtt.strategies.task_queue import TaskQueue, initial_task


class TopicNames(NamedTuple):
    """Names in topics, which packet sizes depend on."""

    site: str
    model: str


def send_bytes(naming: TopicNames, device: str, op: Send, slot: SlotSpec) -> tuple[int, ...]:
    """Return the size of each PUBLISH packet of a Send."""
    topics, nbytes = Topics(naming.site), frame_bytes(slot.nbytes)
    return tuple(
        publish_bytes(topics.reports(device), nbytes, 1)
        if to == PLANNER
        else publish_bytes(topics.activation(naming.model, op.layer, device, to), nbytes, 0)
        for to in publish_targets(op)
    )


def dispatch_bytes(naming: TopicNames, spec: Spec, shape: RequestShape, devices: Iterable[str]) -> int:
    """Return the size of the planner's PUBLISH that dispatches a request to the devices of a plan, in their order."""
    topic = Topics(naming.site).work(naming.model, next(iter(devices)))
    return publish_bytes(topic, work_bytes(shape, input_bytes(spec, shape)), 1)


def report_bytes(naming: TopicNames, device: str) -> int:
    """Return the size of the PUBLISH with which a device reports the end of a run."""
    return publish_bytes(Topics(naming.site).reports(device), frame_bytes(0), 1)


def largest_packet_bytes(naming: TopicNames, spec: Spec, shape: RequestShape, programs: dict[str, Program]) -> int:
    """Return the size of a request's largest PUBLISH over the broker."""
    sizes = [dispatch_bytes(naming, spec, shape, programs)]
    for device, program in programs.items():
        sends = (op for op in program.ops if isinstance(op, Send) and op.route == "broker")
        sizes += [size for op in sends for size in send_bytes(naming, device, op, program.slots[op.slot])]
    return max(sizes)


# ----------------------------------------------------------------------------------------------------------------------
# Latency and throughput of several requests, from their times of arrival, dispatch and answer.


ROUNDS: Final = 6  # rounds of requests in flight that make a steady load: the first and the last round do not count


class RequestTimes(NamedTuple):
    """The times of a request in seconds: arrival, dispatch and answer."""

    arrived_s: float
    dispatched_s: float
    answered_s: float
    sequences: int = 1  #: sequences in the request

    @property
    def latency_s(self) -> float:
        """Return the seconds from arrival to answer, including the wait for dispatch."""
        return self.answered_s - self.arrived_s


@dataclass(frozen=True, slots=True)
class Throughput:
    """The performance of a plan under consecutive requests."""

    requests: int
    in_flight: int  #: requests at the same time
    requests_per_s: float  #: in the steady state
    sequences_per_s: float  #: in the steady state
    latency_s: float  #: median of the requests
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
        """Return the figures as a sentence."""
        each = "" if self.sequences_per_s == self.requests_per_s else f" ({self.sequences_per_s:.3g} sequences/s)"
        return (
            f"throughput {self.requests_per_s:.3g} requests/s{each} with {self.in_flight} in flight; "
            f"median latency {self.latency_s * 1e3:.1f} ms, longest of {self.requests} {self.longest_s * 1e3:.1f} ms"
        )


def steady_state(runs: Sequence[RequestTimes], in_flight: int) -> Throughput:
    """Return the performance under these requests; raises ValueError without requests.

    The steady state lies between two answers: after the first all devices are busy, and at the second the last request
    is dispatched. It covers whole rounds of `in_flight` answers, because answers may come in such groups. If the
    requests are too few for one round, all of them count, from the first arrival on: a lower bound.
    """
    if not runs:
        raise ValueError("cannot measure throughput without requests")
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
# Inputs and outputs of the virtual clock: requests, bars of a time line, times, bytes.


class TimelineEvent(NamedTuple):
    """One bar of a time line, in seconds."""

    device: str
    #: Of a device `compute`, `send` (any frame) and `task` (from a task's lease to its end); of a link
    #: `up` and `down`.
    lane: str
    label: str
    start: float
    stop: float


class Span(NamedTuple):
    """A time in which a device's thread was busy, in seconds."""

    start: float
    stop: float
    device: str
    is_frame: bool  #: busy with sending or receiving a frame


@dataclass(slots=True)
class DeviceUse:
    """The use of one device by the simulated requests."""

    compute_s: float = 0.0
    product_s: float = 0.0  #: of compute_s, in products with weights
    overhead_s: float = 0.0  #: of compute_s, before and after all ops
    wait_s: float = 0.0  #: idle until its last op
    flops: float = 0.0
    sent_bytes: int = 0
    frame_s: float = 0.0  #: of its thread for sending and receiving frames
    alone_s: float = 0.0  #: of compute and frames until the answer, while all other devices were idle


class ReplicaPrograms(NamedTuple):
    """A complete plan that a request may use: its devices' Programs, and the predicted seconds."""

    programs: Mapping[str, Program]
    seconds: float = 0.0


class SimulatedRequest(NamedTuple):
    """One of several requests."""

    shape: RequestShape
    programs: Mapping[str, Program]
    arrives_s: float | None = None  #: None: as soon as there is room
    #: In place of `programs`, those of several replicas; the request uses one of them.
    replicas: tuple[ReplicaPrograms, ...] = ()

    @property
    def choices(self) -> tuple[ReplicaPrograms, ...]:
        """Return the Programs that the request may use."""
        return self.replicas or (ReplicaPrograms(self.programs),)


class FrameArrival(NamedTuple):
    """A frame that arrives at a device: a request, one of its exchanges, or leased tasks."""

    seconds: float
    device: str
    run_id: int
    key: ExchangeKey | None  #: of the exchange, None for other frames
    nbytes: int
    label: str
    route: Route = "broker"
    leased: tuple[int, ...] | None = None  #: leased tasks of the request; empty: no task is left; None: no lease


@dataclass(slots=True)
class Simulation:
    """The outcome of one or several requests, in the order of dispatch."""

    runs: tuple[RequestTimes, ...]
    nbytes: int  #: of all senders
    devices: dict[str, DeviceUse]
    events: list[TimelineEvent] = field(default_factory=list)  #: the time line, if recorded

    @property
    def seconds(self) -> float:
        """Return the latency of the first request."""
        return self.runs[0].latency_s


# ----------------------------------------------------------------------------------------------------------------------
# Devices on the virtual clock: their costed Programs, runs and inboxes.


class CostedProgram:
    """A device's Program with the costs of its ops, for any number of requests."""

    __slots__ = ("costs", "flops", "inner", "products", "program", "sizes", "template")

    def __init__(
        self, naming: TopicNames, device: str, profile: DeviceProfile, same: SameProgram, layer: int | None
    ) -> None:
        self.program = program = same.program
        self.template, work = _prepared(same)
        self.costs: list[float] = []
        self.products: list[float] = []  #: seconds of each op in products with weights
        self.sizes: list[tuple[int, ...]] = []  #: of each PUBLISH packet, by op
        self.flops = 0.0
        self.inner = DeviceUse()  #: of the layer that stands for several
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


@lru_cache(maxsize=LOWERED_CACHE_SIZE)
def _prepared(same: SameProgram) -> tuple[RunTemplate, tuple[tuple[Work, ...], ...]]:
    """Return the run template of a Program and the work of each op; many plans share them."""
    from hepti_mqtt.kernels import works  # Numba takes longer to import than the rest of a planner

    program = same.program
    work = tuple(works(op, program.slots) if isinstance(op, Compute) else () for op in program.ops)
    return make_template(program, stretches_of(program), by_op=True), work


_costed: Final = lru_cache(maxsize=LOWERED_CACHE_SIZE)(CostedProgram)


class DeviceRun(ProgramRun):
    """A run of a Program, with the costs of its ops."""

    __slots__ = ("costed",)

    def __init__(self, run_id: int, part: CostedProgram) -> None:
        super().__init__(run_id, part.template)
        self.costed = part


class SimulatedDevice:
    """A device's session thread."""

    def __init__(self, name: str, profile: DeviceProfile) -> None:
        self.name, self.profile = name, profile
        self.machine: RunMachine[DeviceRun] = RunMachine()
        self.inbox: deque[FrameArrival] = deque()
        #: exchanges without an active run: they arrived before their request, or after the end of their run
        self.early: dict[int, list[ExchangeKey]] = {}
        self.use = DeviceUse()
        self.busy, self.finished_s = False, 0.0


# ----------------------------------------------------------------------------------------------------------------------
# The links of a site on the virtual clock: each direction of each link is a queue.


Note = Callable[[str, str, str, float, float], None]  # device, lane, label, start, stop


class LinkQueues:
    """The arrival times of packets over the links of a site; `note` records when each link is busy."""

    def __init__(self, cluster: Cluster, note: Note) -> None:
        self._broker_bytes_per_s, self._note = cluster.broker_bytes_per_s, note
        self._links = {**cluster.links, PLANNER: cluster.planner_link}
        self._paths = Paths(cluster)
        self._free: dict[Queue, float] = {}  #: time from which each queue is free

    def via_broker(self, now: float, source: str, targets: Sequence[str], size: int, label: str) -> dict[str, float]:
        """Return the arrival time at each target, by the queues of the source's uplink, the broker and the downlinks.

        The broker's own link carries a packet at the same time as the other end's link; each target gets a copy.
        """
        free, up, queue = self._free, self._links[source], self._paths.link_queue(source, "up")
        start = max(now, free.get(queue, 0.0))
        stop = max(start + size / up.up_bytes_per_s, self._pass_broker(start, BROKER_IN, up.up_bytes_per_s, size))
        free[queue] = stop
        self._note(source, "up", label, start, stop)
        at_broker = stop + up.latency_s
        arrivals = {}
        for target in targets:
            down, queue = self._links[target], self._paths.link_queue(target, "down")
            through = self._pass_broker(at_broker, BROKER_OUT, down.down_bytes_per_s, size)
            begin = max(at_broker, free.get(queue, 0.0))
            end = max(begin + size / down.down_bytes_per_s, through)
            free[queue] = end
            self._note(target, "down", label, begin, end)
            arrivals[target] = end + down.latency_s
        return arrivals

    def via_mesh(self, now: float, source: str, target: str, size: int, label: str) -> float:
        """Return the arrival time of a peer's packet over the mesh: both ends' links carry it at the same time.

        Copies leave in order. Connections share the links that several of them need, so a packet queues at the
        receiver's link from now on, even if the sender's backlog delays it; the later of the two ends counts.
        """
        free, path = self._free, self._paths.between(source, target)
        start = max(now, free.get(path.up, 0.0))
        sent = free[path.up] = start + size / path.up_bytes_per_s
        down_s = size / path.down_bytes_per_s
        received = free[path.down] = max(now, free.get(path.down, 0.0)) + down_s
        stop = max(sent, received, start + size / path.bytes_per_s)
        self._note(source, "up", label, start, sent)
        self._note(target, "down", label, stop - down_s, stop)
        return stop + path.latency_s

    def _pass_broker(self, start: float, queue: Queue, rate: float, size: int) -> float:
        """Return when a packet has passed the broker's own link; its start if it does not use that link."""
        if rate >= LOCAL_BYTES_PER_S or self._broker_bytes_per_s == inf:
            return start
        self._free[queue] = through = max(start, self._free.get(queue, 0.0)) + size / self._broker_bytes_per_s
        return through


def lease_message_bytes(naming: TopicNames, device: str, lease: bool) -> int:
    """Return the size of the PUBLISH of a lease, or of the message that a task is done."""
    topics, key = Topics(naming.site), (naming.model, PlanVersion(1, 1), 1)
    if lease:
        return publish_bytes(topics.command(device), len(messages.encode(messages.LeaseTasks(*key, (1,)))), 1)
    return publish_bytes(topics.reports(device), len(messages.encode(messages.TaskDone(*key, 1))), 1)


# ----------------------------------------------------------------------------------------------------------------------
# The discrete-event simulator: the executor's run machine on devices with one session thread each, and link queues.
#
# A device's thread does one thing at a time: it takes frames in the order of arrival, and only then begins the op that
# the machine selects. Taking a frame costs time like an op. The last part of its output answers a request, and the
# last device's report ends it.


# Order of events at one time: arrivals first, so that a device chooses its next step knowing them.
_ARRIVES: Final = 0
_ENDS: Final = 1


@dataclass(slots=True)
class _InFlight:
    """A dispatched request."""

    request: SimulatedRequest
    parts: dict[str, CostedProgram]
    arrived_s: float
    dispatched_s: float
    outputs: int  #: missing parts of the answer
    reports: int  #: missing reports of devices
    until_s: float  #: predicted end
    tasks: TaskQueue | None = None
    answered_s: float | None = None  #: of the last part of the answer so far
    takeover_s: float | None = None  #: next check for a lease to duplicate
    root: str = ""  #: the device that needs the tasks' results
    leased_s: dict[tuple[str, int], float] = field(default_factory=dict)  #: time at which a device received a task


class Simulator:
    """Devices, links and the planner on a virtual clock.

    layer: the layer that stands for several. slowness: factor on the time of an op, by device and time.
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
    ) -> None:
        self.naming, self.spec, self.cluster = naming, spec, cluster
        self.in_flight, self.record, self.layer = in_flight, record, layer
        self.slowness = slowness
        self.links = LinkQueues(cluster, self.record_bar)
        self.devices: dict[str, SimulatedDevice] = {}
        self.listeners: dict[str, tuple[str, ...]] = {}
        self.flights: dict[int, _InFlight] = {}
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[_InFlight] = []
        self.nbytes = self._serial = 0
        self.ends: dict[int, float] = {}  #: end of the last op of each layer
        self.events: list[TimelineEvent] = []
        self.spans: list[Span] = []
        self._parts: dict[tuple[str, int], CostedProgram] = {}
        self._queue: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []

    def run(self, requests: Sequence[SimulatedRequest]) -> None:
        """Advance time until all requests are answered, or no event is left."""
        choices = [choice.programs for r in requests for choice in r.choices]
        names = dict.fromkeys(name for choice in choices for name in choice)
        self.devices = {name: SimulatedDevice(name, self.cluster.devices[name]) for name in names}
        listeners: dict[str, set[str]] = {name: set() for name in names}
        for choice in {id(c): c for c in choices}.values():
            for name, program in choice.items():
                listeners[name].update(*(op.to for op in program.ops if isinstance(op, Send) and op.route == "broker"))
        # A device that receives from another one over the broker receives all that it publishes to ALL.
        self.listeners = {n: tuple(d for d in names if d in listeners[n]) for n in names}
        self.waiting = deque(requests)
        for arrives_s in {r.arrives_s or 0.0 for r in requests}:
            self.schedule(arrives_s, _ARRIVES, self.dispatch_waiting)
        while self._queue:
            now, _, _, act, arguments = heappop(self._queue)
            act(now, *arguments)

    def schedule(self, time: float, rank: int, act: Callable[..., None], *arguments: object) -> None:
        """Call `act` with the time and the arguments when the time comes."""
        self._serial += 1
        heappush(self._queue, (time, rank, self._serial, act, arguments))

    def record_bar(self, device: str, lane: str, label: str, start: float, stop: float) -> None:
        """Add a bar to the time line."""
        if self.record and stop > start:
            self.events.append(TimelineEvent(device, lane, label, start, stop))

    # -- the planner ----------------------------------------------------------------------------------------------

    def dispatch_waiting(self, now: float) -> None:
        """Dispatch queued requests that have arrived, while the limit of requests in flight allows."""
        while self.waiting and (self.waiting[0].arrives_s or 0.0) <= now:
            choices = self.waiting[0].choices
            running = [
                [flight for flight in self.running if not flight.parts.keys().isdisjoint(choice.programs)]
                for choice in choices
            ]
            has_room = [len(runs) < self.in_flight for runs in running]
            if not any(has_room):
                return
            free_s = [max((run.until_s for run in runs), default=now) for runs in running]
            waiting = sum((request.arrives_s or 0.0) <= now for request in self.waiting)
            lanes = [(free, choice.seconds) for free, choice in zip(free_s, choices, strict=True)]
            chosen = next((i for i in route_to_replicas(now, lanes, repeat(1.0, waiting)) if has_room[i]), None)
            if chosen is None:
                return
            until_s = max(free_s[chosen], now) + choices[chosen].seconds
            self.dispatch(now, self.waiting.popleft(), choices[chosen], until_s)

    def dispatch(self, now: float, request: SimulatedRequest, choice: ReplicaPrograms, until_s: float) -> None:
        """Send a request to the devices of its plan."""
        run_id = len(self.flights) + 1
        parts = {name: self.part(name, program) for name, program in choice.programs.items()}
        outputs = sum(isinstance(op, Send) and PLANNER in op.to for p in parts.values() for op in p.program.ops)
        arrived_s = now if request.arrives_s is None else request.arrives_s
        tasks = max(len(p.template.task_inputs) for p in parts.values())
        queue = TaskQueue(tasks, tuple(parts), now) if tasks else None
        flight = _InFlight(request, parts, arrived_s, now, outputs, len(parts), until_s, queue)
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
        if key not in self._parts:
            self._parts[key] = _costed(self.naming, name, self.cluster.devices[name], SameProgram(program), self.layer)
        return self._parts[key]

    def on_output(self, now: float, run_id: int) -> None:
        """Receive a part of an answer; the last part answers the request, perhaps before all reports."""
        flight = self.flights[run_id]
        flight.outputs -= 1
        flight.answered_s = now
        self.release_if_done(now, flight)

    def on_report(self, now: float, run_id: int, device: str) -> None:
        """Receive a device's report: the root's ends all tasks, the last one makes room for a request."""
        flight = self.flights[run_id]
        flight.reports -= 1
        self.release_if_done(now, flight)
        if flight.root == device:
            for name in flight.parts:
                if name != device:
                    self.send_lease(now, name, run_id, ())

    def release_if_done(self, now: float, flight: _InFlight) -> None:
        """Dispatch queued requests if no output and no report of this request is missing."""
        if not flight.outputs and not flight.reports:
            self.running = [other for other in self.running if other is not flight]
            self.dispatch_waiting(now)

    def on_task_done(self, now: float, run_id: int, device: str, task: int) -> None:
        """Receive a device's message that a task is done."""
        tasks = self.flights[run_id].tasks
        assert tasks is not None
        tasks.complete_task(device, task, now)
        self.lease_tasks(now, run_id)

    def lease_tasks(self, now: float, run_id: int) -> None:
        """Lease waiting or late tasks, and schedule the next check for late tasks."""
        flight = self.flights[run_id]
        assert flight.tasks is not None
        for name, task in flight.tasks.lease_tasks(now):
            self.send_lease(now, name, run_id, (task,))
        due = flight.tasks.next_takeover_s
        if now < due < inf and flight.takeover_s != due:
            flight.takeover_s = due
            self.schedule(due, _ARRIVES, self.lease_tasks, run_id)

    def send_lease(self, now: float, to: str, run_id: int, tasks: tuple[int, ...]) -> None:
        """Send a device a lease; without tasks: no task is left."""
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
        if not device.busy:
            self.start_next(now, device)

    def start_next(self, now: float, device: SimulatedDevice) -> None:
        """Begin a device's next step: frames that have arrived go first."""
        if device.inbox:
            frame = device.inbox.popleft()
            until = now + device.profile.frame_seconds(1, frame.nbytes, frame.route)
            self.record_bar(device.name, "send", frame.label, now, until)
            self.spans.append(Span(now, until, device.name, True))
            device.busy = True
            self.schedule(until, _ENDS, self.on_frame_taken, device, frame)
            return
        if (selected := device.machine.next_op()) is None:
            return
        run, place = selected
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
        device.busy = True
        self.schedule(until, _ENDS, self.on_op_done, device, run, place)

    def on_frame_taken(self, now: float, device: SimulatedDevice, frame: FrameArrival) -> None:
        """Process a frame after its time at the device.

        An exchange over the mesh may overtake its request, which takes another route. An exchange over the broker may
        arrive after its run has ended, if it was meant for other devices.
        """
        device.busy = False
        machine, run_id = device.machine, frame.run_id
        if frame.leased is not None:
            self.on_lease(now, device, frame)
        elif frame.key is None:
            run = DeviceRun(run_id, self.flights[run_id].parts[device.name])
            device.use.flops += run.costed.flops
            machine.admit(run)
            for key in (*run.template.inputs, *device.early.pop(run_id, ())):
                self.deliver(machine, run, key)
            self.begin_tasks(now, device, run)
            self.finish_run(now, device, run)
        elif (run_of_frame := machine.runs.get(run_id)) is not None:
            self.deliver(machine, run_of_frame, frame.key)
        else:
            device.early.setdefault(run_id, []).append(frame.key)
        if not device.busy:
            self.start_next(now, device)

    def begin_tasks(self, now: float, device: SimulatedDevice, run: DeviceRun) -> None:
        """Begin a device's first task of a request that it has received."""
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
        """Process a lease, or the message that no task is left, which ends runs that only waited for leases.

        Frames are processed in order, so the lease's request has begun.
        """
        run = device.machine.runs.get(frame.run_id)
        if run is None:
            return  # the root device has ended the run
        for task in frame.leased or ():
            self.begin_task(now, device, run, task)
        if not frame.leased:
            run.accepts_leases = False
            self.finish_run(now, device, run)

    def record_task(self, now: float, device: str, run_id: int, task: int, end: str = "") -> None:
        """Add a task's bar, from its lease on."""
        self.record_bar(device, "task", f"task {task}{end}", self.flights[run_id].leased_s[device, task], now)

    def deliver(self, machine: RunMachine[DeviceRun], run: DeviceRun, key: ExchangeKey) -> None:
        """Fill the slot of an exchange; drop an exchange that its run does not expect."""
        slot = machine.slot_for(run, key)
        if isinstance(slot, int):
            machine.fill_slot(run, slot)

    def on_op_done(self, now: float, device: SimulatedDevice, run: DeviceRun, place: int) -> None:
        """Process the end of an op: send its result, wake its readers, continue."""
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
        """Publish a slot to its receivers; over the broker, to every subscriber of the device."""
        name, program = device.name, run.costed.program
        device.use.sent_bytes += sum(sizes)
        label, nbytes, key = program.node(op.node), program.slots[op.slot].nbytes, (op.node, op.part, name)
        for to, size in zip(publish_targets(op), sizes, strict=True):
            if op.route == "mesh":
                arrivals = {to: self.links.via_mesh(now, name, to, size, label)}
            else:
                targets = self.listeners[name] if to == ALL_DEVICES else (to,)
                arrivals = self.links.via_broker(now, name, targets, size, label)
            for target, when in arrivals.items():
                if target == PLANNER:
                    self.schedule(when, _ARRIVES, self.on_output, run.run_id)
                else:
                    frame = FrameArrival(when, target, run.run_id, key, nbytes, label, op.route)
                    self.schedule(when, _ARRIVES, self.on_arrival, frame)

    def finish_run(self, now: float, device: SimulatedDevice, run: DeviceRun) -> None:
        """Begin the report of a run without ops left."""
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

    def outcome(self) -> Simulation:
        """Return the outcome of all requests; raises ValueError if Programs wait for each other forever."""
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
            runs.append(RequestTimes(flight.arrived_s, flight.dispatched_s, flight.answered_s, sequences))
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
) -> Simulation:
    """Simulate requests in order, at most `in_flight` at once on a device, on measured curves and links.

    The Programs must have all layers, since several requests share the devices. record: the time line. Raises
    ValueError if Programs wait for each other forever.
    """
    clock = Simulator(naming, spec, cluster, in_flight, record)
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
    """Simulate one request's Programs on a virtual clock with the cluster's measured curves and links.

    record: the time line. repeated: (layer, times), a layer that stands for several: each further layer adds the time
    from the end of the layer before it to its own end. slowness: factor on the time of an op, by device and time.
    Raises ValueError if the Programs wait for each other forever.
    """
    clock = Simulator(
        naming, spec, cluster, 1, record, layer=None if repeated is None else repeated[0], slowness=slowness
    )
    clock.run((SimulatedRequest(shape, programs),))
    simulation = clock.outcome()
    _divide_time(simulation, clock.spans, 0.0, simulation.seconds, 1)
    if repeated is not None:
        more, run = repeated[1] - 1, simulation.runs[0]
        begin_s, end_s = (clock.ends.get(layer, 0.0) for layer in (repeated[0] - 1, repeated[0]))
        _divide_time(simulation, clock.spans, begin_s, end_s, more)
        period = end_s - begin_s
        simulation.runs = (run._replace(answered_s=run.answered_s + more * period),)
        for name, use in simulation.devices.items():
            inner = clock.part(name, programs[name]).inner
            use.compute_s += more * inner.compute_s
            use.product_s += more * inner.product_s
            use.overhead_s += more * inner.overhead_s
            use.flops += more * inner.flops
            use.sent_bytes += more * inner.sent_bytes
            simulation.nbytes += more * inner.sent_bytes
            use.wait_s = max(clock.devices[name].finished_s + more * period - use.compute_s, 0.0)
    return simulation


def _divide_time(simulation: Simulation, spans: Iterable[Span], since: float, until: float, times: int) -> None:
    """Add the frame time and the time alone of an interval, `times` over, to the use of devices."""
    edges: list[tuple[float, bool, str]] = []
    for span in spans:
        start, stop = max(span.start, since), min(span.stop, until)
        if start < stop:
            edges += ((start, True, span.device), (stop, False, span.device))
            simulation.devices[span.device].frame_s += times * (stop - start) * span.is_frame
    busy: set[str] = set()
    at = since
    for when, begins, device in sorted(edges):
        if len(busy) == 1:
            simulation.devices[next(iter(busy))].alone_s += times * (when - at)
        at = when
        (busy.add if begins else busy.discard)(device)


# ----------------------------------------------------------------------------------------------------------------------
# Several requests under a plan or its replicas: latency and throughput.


def simulated_request(
    naming: TopicNames,
    spec: Spec,
    plan: Plan,
    shape: RequestShape,
    cluster: Cluster,
    parts: Mapping[str, Program] | None = None,
) -> SimulatedRequest:
    """Return a request under a plan; parts: its Programs if they exist already.

    It may use any replica; the simulated time of one request there decides.
    """
    if not plan.replicas:
        return SimulatedRequest(shape, parts or device_programs(spec, plan, shape))
    programs = [device_programs(spec, replica, shape) for replica in plan.replicas]
    choices = (ReplicaPrograms(p, simulate(naming, spec, shape, p, cluster).seconds) for p in programs)
    return SimulatedRequest(shape, programs[0], replicas=tuple(choices))


def simulate_throughput(
    naming: TopicNames, spec: Spec, request: SimulatedRequest, cluster: Cluster, in_flight: int, requests: int
) -> Throughput:
    """Return latency and throughput of `requests` copies of a request, for each replica; the Programs have all layers.

    Raises as `simulate_requests` does.
    """
    several = len(request.choices)
    runs = simulate_requests(naming, spec, (request,) * (requests * several), cluster, in_flight).runs
    return steady_state(runs, in_flight * several)
