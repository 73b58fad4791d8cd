"""The discrete-event simulator: devices with one compute thread each, links that queue, the executor's own rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from hepti_mqtt.cluster import FAST_BYTES_PER_S, Cluster, Link
from hepti_mqtt.ids import ALL, PLANNER
from hepti_mqtt.kernels import KERNELS
from hepti_mqtt.program import Compute, Key, Program, Send, addresses, written
from hepti_mqtt.schedule import Template, template
from hepti_mqtt.simulate.bytes import Naming, dispatch_bytes, done_bytes, send_bytes
from hepti_mqtt.spec import RequestShape, Spec


class Event(NamedTuple):
    """One bar of a time line: what a device (`compute`) or a link (`up`, `down`) did from start to stop, in seconds."""

    device: str
    lane: str
    label: str
    start: float
    stop: float


@dataclass(slots=True)
class DeviceUse:
    """What one device did for a request: seconds of compute, seconds idle until its last op, FLOPs, bytes sent."""

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
    events: list[Event] = field(default_factory=list)


@dataclass(slots=True)
class _Device:
    program: Program
    template: Template
    costs: Sequence[float]
    pending: list[int]
    ready: list[int]
    use: DeviceUse
    inner: DeviceUse  # in the layer that stands for several
    busy: bool = False
    started: bool = False
    finished_s: float = 0.0


class _Clock:
    def __init__(
        self, naming: Naming, cluster: Cluster, programs: Mapping[str, Program], record: bool, layer: int | None
    ) -> None:
        self.naming, self.cluster, self.record, self.layer = naming, cluster, record, layer
        self.ends: dict[int, float] = {}  # when the last op of a layer was over
        self.names = tuple(programs)
        self.queue: list[tuple[float, int, str, int]] = []
        self.payload: dict[int, tuple[str, object]] = {}
        self.serial = 0
        self.free: dict[tuple[str, str], float] = {}
        self.events: list[Event] = []
        self.answered_s = 0.0
        self.devices: dict[str, _Device] = {}
        for name, program in programs.items():
            t = template(program)
            profile = cluster.devices[name]
            costs, flops, inner = [], 0.0, DeviceUse()
            for op in program.ops:
                if isinstance(op, Compute):
                    work = KERNELS[op.kernel].work(op, program.slots)
                    costs.append(profile.seconds(work))
                    flops += work.flops
                    if op.layer == layer:
                        inner.compute_s += costs[-1]
                        inner.flops += work.flops
                elif isinstance(op, Send):
                    size = sum(send_bytes(naming, name, op, program.slots[op.slot]))
                    costs.append(profile.frame_seconds(len(op.to), size))
                    inner.sent_bytes += size if op.layer == layer else 0
                else:
                    costs.append(profile.frame_seconds(1, program.slots[op.slot].nbytes))
            use = DeviceUse(flops=flops)
            self.devices[name] = _Device(program, t, costs, list(t.pending), [], use, inner)
        # Whoever hears a device at all hears what it publishes to ALL.
        hears = {name: set(program.sources()) for name, program in programs.items()}
        self.listeners = {n: tuple(d for d in self.names if n in hears[d] and d != n) for n in self.names}

    def at(self, when: float, device: str, kind: str, value: object) -> None:
        self.serial += 1
        self.payload[self.serial] = (kind, value)
        heappush(self.queue, (when, self.serial, device, self.serial))

    def link(self, device: str) -> Link:
        return self.cluster.planner_link if device == PLANNER else self.cluster.links[device]

    def transmit(self, now: float, source: str, targets: Sequence[str], size: int, label: str) -> dict[str, float]:
        """Return when each target has the packet: the source's uplink, the broker, each target's downlink, all FIFO.

        The broker's own link carries a packet while the other end's does, and each target gets a copy.
        """
        up = self.link(source)
        start = max(now, self.free.get((source, "up"), 0.0))
        stop = max(start + size / up.up_bytes_per_s, self.pass_broker(start, "in", up.up_bytes_per_s, size))
        self.free[source, "up"] = stop
        self.note(source, "up", label, start, stop)
        at_broker = stop + up.latency_s
        arrivals = {}
        for target in targets:
            down = self.link(target)
            through = self.pass_broker(at_broker, "out", down.down_bytes_per_s, size)
            begin = max(at_broker, self.free.get((target, "down"), 0.0))
            end = max(begin + size / down.down_bytes_per_s, through)
            self.free[target, "down"] = end
            self.note(target, "down", label, begin, end)
            arrivals[target] = end + down.latency_s
        return arrivals

    def pass_broker(self, start: float, way: str, rate: float, size: int) -> float:
        """Return when a packet from or to a link of this rate is through the broker's own, at once if not over it."""
        broker = self.cluster.broker_bytes_per_s
        if rate >= FAST_BYTES_PER_S or broker == inf:
            return start
        self.free["", way] = through = max(start, self.free.get(("", way), 0.0)) + size / broker
        return through

    def note(self, device: str, lane: str, label: str, start: float, stop: float) -> None:
        if self.record and stop > start:
            self.events.append(Event(device, lane, label, start, stop))

    def fill(self, state: _Device, slot: int) -> None:
        for place in state.template.readers[slot]:
            state.pending[place] -= 1
            if not state.pending[place]:
                heappush(state.ready, place)

    def run_next(self, name: str, now: float) -> None:
        state = self.devices[name]
        if state.busy or not state.started or not state.ready:
            return
        place = heappop(state.ready)
        cost = state.costs[place]
        op = state.program.ops[place]
        state.busy = True
        state.use.compute_s += cost if isinstance(op, Compute) else 0.0
        label = op.kernel if isinstance(op, Compute) else state.program.node(op.node)
        self.note(name, "compute" if isinstance(op, Compute) else "send", label, now, now + cost)
        self.at(now + cost, name, "done", place)

    def finish_op(self, name: str, place: int, now: float) -> None:
        state = self.devices[name]
        state.busy = False
        state.finished_s = now
        op = state.program.ops[place]
        self.ends[op.layer] = now
        if isinstance(op, Send):
            sizes = send_bytes(self.naming, name, op, state.program.slots[op.slot])
            state.use.sent_bytes += sum(sizes)
            label = state.program.node(op.node)
            for to, size in zip(addresses(op), sizes, strict=True):
                targets = self.listeners[name] if to == ALL else (to,)
                for target, when in self.transmit(now, name, targets, size, label).items():
                    self.at(when, target, "arrive", (op.node, op.part, name))
        for slot in written(op):
            self.fill(state, slot)
        self.run_next(name, now)

    def arrive(self, name: str, key: Key, now: float) -> None:
        if name == PLANNER:
            self.answered_s = now
            return
        state = self.devices[name]
        if (found := state.template.recv.get(key)) is not None:
            heappush(state.ready, found[0])  # taking a frame costs the device time, as an op does
            self.run_next(name, now)

    def period(self) -> float:
        """Return by how much the repeated layer ends after the one before it."""
        assert self.layer is not None
        return self.ends.get(self.layer, 0.0) - self.ends.get(self.layer - 1, 0.0)

    def play(self, dispatch: int) -> None:
        for target, when in self.transmit(0.0, PLANNER, self.names, dispatch, "dispatch").items():
            self.at(when, target, "start", None)
        while self.queue:
            now, _, name, serial = heappop(self.queue)
            kind, value = self.payload.pop(serial)
            if kind == "start":
                state = self.devices[name]
                state.started = True
                for place in state.template.first:
                    heappush(state.ready, place)
                for key in state.template.inputs:
                    self.arrive(name, key, now)
                self.run_next(name, now)
            elif kind == "arrive":
                assert isinstance(value, tuple)
                self.arrive(name, value, now)
            else:
                assert isinstance(value, int)
                self.finish_op(name, value, now)


def simulate(
    naming: Naming,
    spec: Spec,
    shape: RequestShape,
    programs: Mapping[str, Program],
    cluster: Cluster,
    record: bool = False,
    repeated: tuple[int, int] | None = None,
) -> Simulation:
    """Play one request's Programs on a virtual clock with the cluster's measured curves and links.

    record: keep the time line's events. repeated: (layer, times), a layer that stands for several: each further one
    takes what that one adds to the layer before it. Raises ValueError if the Programs wait for each other for ever.
    """
    clock = _Clock(naming, cluster, programs, record, None if repeated is None else repeated[0])
    dispatch = dispatch_bytes(naming, spec, shape)
    clock.play(dispatch)
    stuck = {n: sum(1 for p in s.pending if p > 0) for n, s in clock.devices.items() if any(p > 0 for p in s.pending)}
    if stuck:
        raise ValueError(f"Programs wait for each other: ops never ready {stuck}")
    total = dispatch
    more, period = (0, 0.0) if repeated is None else (repeated[1] - 1, clock.period())
    for name, state in clock.devices.items():
        use, inner = state.use, state.inner
        use.compute_s += more * inner.compute_s
        use.flops += more * inner.flops
        use.sent_bytes += more * inner.sent_bytes + done_bytes(naming, name)
        use.wait_s = max(state.finished_s + more * period - use.compute_s, 0.0)
        total += use.sent_bytes
    seconds = clock.answered_s + more * period
    return Simulation(seconds, total, {n: s.use for n, s in clock.devices.items()}, clock.events)
