"""The fake site for the pure core: real sessions of planner and devices on a virtual clock, in one process.

`scripted_site` is its second face: the same planner session, with devices that the test itself plays. Everything that
needs processes, a broker or time that passes is tested on the other fake site, `site_processes`.

Topics, frames and messages are the real bytes; only sockets and time are replaced. Per topic the order is kept, between
topics it is not; packets of the data plane may come twice; a subscription takes effect late, and what was published
before is lost; a device can be cut off at any moment and come back. Between peers that a plan introduces to each other
frames go directly, in order and never twice, until their connection is cut; frames under way are lost then.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from hepti_mqtt import __version__
from hepti_mqtt.core.errors import HeptiError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import Curve
from hepti_mqtt.kernels import Workers
from hepti_mqtt.models import single_sequence
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.planner import Question, decide, price_plans, simulate_plan
from hepti_mqtt.protocol import frames, messages
from hepti_mqtt.protocol.frames import ExchangeCache, TensorArrival
from hepti_mqtt.protocol.messages import Endpoint
from hepti_mqtt.protocol.topics import publish_bytes
from hepti_mqtt.runtime.coordinator import interface as coordinator_interface
from hepti_mqtt.runtime.coordinator import session as coordinator_session
from hepti_mqtt.runtime.coordinator.batches import Batch
from hepti_mqtt.runtime.coordinator.fair_queue import Batching
from hepti_mqtt.runtime.coordinator.plans import ServedModel
from hepti_mqtt.runtime.coordinator.requests import Pins, Request, RequestKey, RunStats
from hepti_mqtt.runtime.coordinator.texts import Generation
from hepti_mqtt.runtime.worker import interface, programs
from hepti_mqtt.runtime.worker.executor import pack
from hepti_mqtt.runtime.worker.session import WorkerSession

SITE, MODEL = "home", "m"
SECRET = b"\1" * 32  # of the planner
ALONE = Batching(max_requests=1)  # each request has a run of its own, so that its bytes are what the simulator says


def curves(flops_per_s: float) -> dict[str, object]:
    """Return the caps' curves of a device of a constant speed."""
    points = [[rows, 2.0 * rows * 64 * 64 / flops_per_s] for rows in (1, 32, 128)]
    return {
        "linear": [{"k": 64, "n": 64, "points": points}],
        "attention_flops_per_s": flops_per_s,
        "rowwise_bytes_per_s": 1e9,
        "op_overhead_s": 1e-5,
        "frame_s": 1e-4,
        "copy_bytes_per_s": 1e9,
    }


def profile_curve(flops_per_s: float) -> tuple[Curve, ...]:
    """Return the same as `cluster.Curve`."""
    return (Curve(64, 64, tuple((r, 2.0 * r * 64 * 64 / flops_per_s) for r in (1, 32, 128))),)


@dataclass
class Host:
    """One device: its session, what it is subscribed to, and whether its cable is plugged."""

    session: WorkerSession
    flops_per_s: float
    memory: int
    boot: int
    filters: set[str] = field(default_factory=set)
    works: set[str] = field(default_factory=set)
    alive: bool = True
    slowness: float = 1.0  # times as long as others take for an op
    busy: bool = False
    admitted: dict[tuple[str, object], str] = field(default_factory=dict)  # tokens by (user, key)
    joins: dict[tuple[str, object], str] = field(default_factory=dict)  # tokens by (peer, key)
    hears: set[tuple[str, object]] = field(default_factory=set)  # joins that are granted
    cuts: Counter = field(default_factory=Counter)  # how often the connection to a peer was cut


class Swarm:
    """The site. `duplicates` is the probability of one; delays are random by `seed`; batching: none by default."""

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, np.ndarray],
        devices: Mapping[str, tuple[float, int]],
        *,
        seed: int = 0,
        duplicates: float = 0.0,
        jitter_s: float = 0.0,
        decider: Callable[[Question], object] = decide,
        pins: Pins | None = None,
        batching: Batching = ALONE,
        in_flight: int = 2,
    ) -> None:
        self.spec, self.tensors = spec, tensors
        self.rng = random.Random(seed)
        self.duplicates, self.jitter_s = duplicates, jitter_s
        self.decider = decider
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.serial = 0
        self.last_on: dict[tuple[str, str], float] = {}
        self.workers = Workers(1)
        served = ServedModel(MODEL, spec, b"\0" * 32, 16, pins or Pins(), batching)
        self.planner = coordinator_session.CoordinatorSession(SITE, 1, (served,), in_flight, secret=SECRET, checks=True)
        self.walls: set[tuple[str, str]] = set()  # (source, target) that cannot connect
        self.direct = 0  # frames that went between peers
        self.learns, self.known, self.exchanges = True, 0, ExchangeCache()  # decoded by cached exchanges
        self.hosts: dict[str, Host] = {}
        self.answers: dict[object, list[tuple[np.ndarray, tuple[RunStats, ...]]]] = {}
        self.tokens: dict[object, list[tuple[int, int]]] = {}
        self.logits: dict[int, np.ndarray] = {}  # outputs of runs, by run id
        self.errors: dict[object, list[HeptiError]] = {}
        self.notes: list[coordinator_interface.LogEvent] = []
        self.sent = Counter()  # bytes of PUBLISH packets by kind of frame
        self.work: list[frames.Frame] = []  # work frames of the planner
        self.lost_filter: Callable[[str, str], bool] = lambda topic, target: False
        for name, (flops, memory) in devices.items():
            self.join(name, flops, memory)
        self.after(0.25, self._tick)

    # -- time and network ---------------------------------------------------------------------------------------------

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.serial += 1
        heappush(self.queue, (self.now + delay, self.serial, action))

    def run(self, seconds: float = 60.0, until: Callable[[], bool] = lambda: False) -> None:
        """Play until `until` holds or the virtual time is over."""
        end = self.now + seconds
        while self.queue and self.queue[0][0] <= end and not until():
            self.now, _, action = heappop(self.queue)
            action()
            for host in self.hosts.values():
                host.session.check()

    def carry(self, topic: str, target: str, qos: int, deliver: Callable[[], None]) -> None:
        """Bring one packet to one target: in order within a topic, maybe twice, never at a predictable time."""
        if self.lost_filter(topic, target):
            return
        for _ in range(2 if self.rng.random() < self.duplicates else 1):
            at = self.now + 1e-4 + self.rng.random() * self.jitter_s
            at = max(at, self.last_on.get((topic, target), 0.0))
            self.last_on[topic, target] = at
            self.after(at - self.now, deliver)

    # -- the planner's shell ------------------------------------------------------------------------------------------

    def tell_planner(self, event: coordinator_interface.CoordinatorEvent) -> None:
        for command in self.planner.handle(event, self.now):
            self._planner_command(command)

    def pin(self, pins: Pins) -> None:
        """Search for a plan with other pins."""
        plans = self.planner.groups.default(MODEL).plans
        plans.pins = pins
        plans.request_search(self.now, self.now, "pinned", forced=True)
        self.tell_planner(coordinator_interface.Tick())

    def _planner_command(self, command: coordinator_interface.CoordinatorCommand) -> None:
        if isinstance(command, interface.Publish):
            self._count(command)
            if "/work/" in command.topic:
                self.work.append(frames.decode(command.payload))
            for name, host in self.hosts.items():
                if command.topic in {self.planner.topics.command(name), *host.works}:
                    self._to_host(name, command)
        elif isinstance(command, coordinator_interface.Solve):
            self.after(0.05, lambda: self._solve(command))
        elif isinstance(command, coordinator_interface.TokenReady):
            self.tokens.setdefault(command.request.reply_context, []).append((command.index, command.tokens[-1]))
        elif isinstance(command, coordinator_interface.AnswerRequest):
            output = command.request.output()
            self.answers.setdefault(command.request.reply_context, []).append((output, command.stats))
        elif isinstance(command, coordinator_interface.RefuseRequest):
            self.errors.setdefault(command.request.reply_context, []).append(command.error)
        elif isinstance(command, coordinator_interface.LogEvent):
            self.notes.append(command)

    def _solve(self, command: coordinator_interface.Solve) -> None:
        query, active = command.question, command.active
        try:
            decision = price_plans(query, command.plans) if command.plans else self.decider(query)
        except HeptiError as error:
            self.tell_planner(coordinator_interface.Solved(command.model, command.ticket, None, error=error))
            return
        is_there = active is not None and set(active.devices) <= set(query.cluster.devices)
        priced = simulate_plan(query, active) if active is not None and is_there else None
        self.tell_planner(coordinator_interface.Solved(command.model, command.ticket, decision, priced))

    def _tick(self) -> None:
        for name, host in self.hosts.items():
            if host.alive and self.rng.random() < 0.5:
                hb = messages.Heartbeat(host.boot, 1, 0.0, 1 << 30, None, 2e-4, 1e8, 1.0, 0, {})
                self.tell_planner(coordinator_interface.DeviceHeartbeat(name, hb))
            if self.now >= host.session.deadline:
                self._tell_host(name, host, interface.Tick())
        self.tell_planner(coordinator_interface.Tick())
        self.after(0.25, self._tick)

    def submit(
        self,
        token: object,
        shape: TokenBatch,
        inputs: np.ndarray,
        deadline_s: float | None = None,
        pins: Pins | None = None,
    ) -> None:
        """Hand a request of one chunk to the planner."""
        job = Request(RequestKey(MODEL, "user", str(token)), (Batch(shape, inputs),), token, deadline_s, pins)
        self.tell_planner(coordinator_interface.RequestArrived(job))

    def generate(self, token: object, spec: ModelSpec, ids: np.ndarray, most: int, client: str = "user") -> None:
        """Hand a request for `most` tokens after `ids` to the planner."""
        shape, inputs = single_sequence(spec, ids, tokens=len(ids) + most)
        self.begin(token, Batch(shape, inputs), Generation(tuple(ids.tolist()), most, shape), client)

    def begin(self, token: object, first: Batch, generation: Generation, client: str = "user") -> None:
        """Hand a request that generates tokens to the planner."""
        key = RequestKey(MODEL, client, str(token))
        job = Request(key, (first,), token, None, generation=generation)
        self.tell_planner(coordinator_interface.RequestArrived(job))

    # -- the devices' shells ------------------------------------------------------------------------------------------

    def join(self, name: str, flops_per_s: float, memory: int) -> None:
        """Start (or restart) a device."""
        boot = self.hosts[name].boot + 1 if name in self.hosts else 1
        session = WorkerSession(name, SITE, memory)
        self.hosts[name] = Host(session, flops_per_s, memory, boot)
        own = {"curves": curves(flops_per_s), "endpoint": Endpoint("10.0.0.1", 1000 + len(self.hosts))}
        caps = messages.Caps(
            name, boot, 1, 1, memory, 0, "test", __version__, largest_packet_bytes=1 << 24, mqtt=4, **own
        )
        self.tell_planner(coordinator_interface.DeviceCaps(name, caps))
        self.tell_planner(coordinator_interface.DeviceStatus(name, messages.Status("online", boot)))

    def kill(self, name: str) -> None:
        """Pull a device's plug; its will follows a little later."""
        host = self.hosts[name]
        host.alive = False
        for other in self.hosts:
            self.cut(name, other)
        status = messages.Status("offline", host.boot)
        self.after(0.01, lambda: self.tell_planner(coordinator_interface.DeviceStatus(name, status)))

    def _to_host(self, name: str, publish: interface.Publish, over: tuple[str, int] | None = None) -> None:
        host = self.hosts[name]

        def deliver() -> None:
            if over is not None and host.cuts[over[0]] != over[1]:
                return
            if not host.alive or self.hosts.get(name) is not host:
                return
            if publish.topic == self.planner.topics.command(name):
                event: interface.WorkerEvent = interface.MessageIn(messages.decode(publish.payload))
            else:
                event = self._arrived(over[0] if over is not None and self.learns else "", publish)
            self._host_commands(name, host, host.session.handle(event, self.now))
            self._work(name, host)

        self.carry(publish.topic, name, publish.qos, deliver)

    def _arrived(self, peer: str, publish: interface.Publish) -> interface.FrameIn | TensorArrival:
        """Return a frame as MeshLinks gives those of a peer, or as a broker's connection does."""
        payload = memoryview(publish.payload)
        arrival = self.exchanges.arrival(peer, publish.topic, payload)
        if arrival is not None:
            self.known += 1
            return arrival
        frame = frames.decode(payload)
        if peer:
            self.exchanges.learn(peer, publish.topic, payload, frame)
        return interface.FrameIn(frame)

    def _host_commands(self, name: str, host: Host, out: list[interface.Command]) -> None:
        for command in out:
            if isinstance(command, interface.Publish):
                self._host_publish(name, command)
            elif isinstance(command, interface.Subscribe):
                self._subscribe(name, host, command)
            elif isinstance(command, interface.Unsubscribe):
                host.filters -= set(command.filters)
                host.works -= set(command.work_topics)
            elif isinstance(command, interface.Load):
                self.after(0.02 + self.rng.random() * 0.05, lambda c=command: self._loaded(name, host, c))
            elif isinstance(command, interface.BuildProgram):
                self.after(self.rng.random() * 0.02, lambda c=command: self._built(name, host, c))
            elif isinstance(command, interface.AnalysePrepare):
                self.after(self.rng.random() * 0.02, lambda c=command: self._studied(name, host, c))
            elif isinstance(command, interface.AllowPeers):
                key = (command.model, command.plan_version)
                host.admitted |= {(peer.device, key): peer.token_in for peer in command.peers}
            elif isinstance(command, interface.JoinPeers):
                for peer in command.peers:
                    key = (command.model, command.plan_version)
                    host.joins[peer.device, key] = peer.token_out
                    self._connect(name, host, peer.device, key)
            elif isinstance(command, interface.LeavePeers):
                self._part(host, (command.model, command.plan_version))

    # -- between peers ------------------------------------------------------------------------------------------------

    def cut(self, source: str, target: str) -> None:
        """Cut the connection by which a device hears another one; it is made again."""
        host = self.hosts[target]
        host.cuts[source] += 1
        cut = {(peer, key) for peer, key in host.hears if peer == source}
        host.hears -= cut
        if cut:
            self._tell_host(target, host, interface.PeerLost(source, "cut"))
            for peer, key in cut:
                self._connect(target, host, peer, key)

    def _connect(self, name: str, host: Host, peer: str, key: tuple[str, PlanVersion]) -> None:
        """Try until the peer lets us in, or the epoch is over."""

        def attempt() -> None:
            token, other = host.joins.get((peer, key)), self.hosts[peer]
            if token is None or (peer, key) in host.hears or self.hosts[name] is not host:
                return
            if other.alive and (peer, name) not in self.walls:
                if other.admitted.get((name, key)) == token:
                    host.hears.add((peer, key))
                    self._tell_host(name, host, interface.PeerJoined(peer, *key))
                    return
                self._tell_host(name, host, interface.PeerRefused(peer, *key))
            self._connect(name, host, peer, key)

        self.after(0.01 + self.rng.random() * 0.2, attempt)

    def _part(self, host: Host, key: tuple[str, PlanVersion]) -> None:
        for parts in (host.admitted, host.joins):
            for entry in [e for e in parts if e[1] == key]:
                del parts[entry]
        host.hears = {(peer, of) for peer, of in host.hears if of != key}

    def _tell_host(self, name: str, host: Host, event: interface.WorkerEvent) -> None:
        if host.alive:
            self._host_commands(name, host, host.session.handle(event, self.now))
            self._work(name, host)

    def _direct(self, name: str, publish: interface.Publish) -> None:
        """Bring a frame to the peers that hear it, unless their connection is cut while it travels."""
        target = publish.topic.rsplit("/", 1)[1]
        whole = publish._replace(payload=publish.joined_payload, body=memoryview(b""))
        for other, host in self.hosts.items():
            if other == target and any(peer == name for peer, _ in host.hears):
                self.direct += 1
                self._to_host(other, whole, (name, host.cuts[name]))

    def _subscribe(self, name: str, host: Host, command: interface.Subscribe) -> None:
        def effective() -> None:
            host.filters |= set(command.filters)
            host.works.add(command.work_topic)
            if host.alive:
                event = interface.Subscribed(command.model, command.plan_version)
                self._host_commands(name, host, host.session.handle(event, self.now))

        self.after(self.rng.random() * 0.2, effective)

    def _loaded(self, name: str, host: Host, command: interface.Load) -> None:
        if host.alive:
            event = interface.Loaded(command.model, command.plan_version, pack(self.tensors, command.matrices))
            self._host_commands(name, host, host.session.handle(event, self.now))

    def _built(self, name: str, host: Host, command: interface.BuildProgram) -> None:
        if host.alive:
            out = host.session.handle(programs.build(command, name, self.workers), self.now)
            self._host_commands(name, host, out)
            self._work(name, host)

    def _studied(self, name: str, host: Host, command: interface.AnalysePrepare) -> None:
        if host.alive:
            event = programs.analyse(command, name, host.session.topics)
            self._host_commands(name, host, host.session.handle(event, self.now))

    def _host_publish(self, name: str, publish: interface.Publish) -> None:
        self._count(publish)
        if publish.plane == "mesh":
            self._direct(name, publish)
            return
        if publish.plane == "data":
            publish = publish._replace(
                payload=publish.joined_payload, body=memoryview(b"")
            )  # the body changes with the next op
            for other, host in self.hosts.items():
                if other != name and any(matches(f, publish.topic) for f in host.filters):
                    self._to_host(other, publish)
            return

        def deliver() -> None:
            up = messages.decode_sealed_report(publish.payload)[0]
            frame = isinstance(up, frames.Frame)
            if frame and up.kind == "output":
                self.logits[up.run_id] = up.array()
            self.tell_planner(
                coordinator_interface.DeviceFrame(name, up) if frame else coordinator_interface.DeviceMessage(name, up)
            )

        self.carry(publish.topic, "planner", publish.qos, deliver)

    def _count(self, publish: interface.Publish) -> None:
        if publish.payload[:4] == frames.MAGIC:
            kind = frames.decode(publish.joined_payload).kind
            self.sent[kind] += publish_bytes(publish.topic, publish.nbytes, publish.qos)

    def _work(self, name: str, host: Host) -> None:
        """Run ops one by one, each taking a little virtual time in which other packets may arrive."""
        if host.busy:
            return
        step = host.session.next_step()
        if step is None:
            return
        host.busy = True
        outgoing, error = None, None
        try:
            outgoing = step.run(ops=1)  # at once: no event comes between the choice of an op and its run
        except Exception as exc:
            error = exc

        def finish() -> None:
            if not host.alive or self.hosts.get(name) is not host:
                return
            host.busy = False
            if error is not None:
                out = host.session.fail_step(step, error)
            else:
                out = host.session.finish_step(step, outgoing, 1e-5, self.now)
            self._host_commands(name, host, out)
            self._work(name, host)

        self.after(self.op_s(host, step.run_id), finish)

    def op_s(self, host: Host, _run_id: int) -> float:
        """Return what an op takes."""
        return self.rng.random() * 2e-5 * host.slowness


def matches(pattern: str, topic: str) -> bool:
    """Return whether an MQTT filter with single-level wildcards matches a topic."""
    a, b = pattern.split("/"), topic.split("/")
    return len(a) == len(b) and all(x in {"+", y} for x, y in zip(a, b, strict=True))


def plan_of(swarm: Swarm) -> Plan | None:
    """Return the active plan."""
    return swarm.planner.groups.default(MODEL).active
