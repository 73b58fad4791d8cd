"""A site on a virtual clock: a real coordinator, devices under a truth, one request after the other.

Runs take the time of the product's own simulator under the truth of their beginning, times what that does not know;
long ones that of each of their blocks, from one of which on they may go on under another plan. Searches are really
made, and take a time on the planner's machine that goes with their work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import exp, inf
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.weather.devices import LOAD, SimulatedDevice
from benchmarks.weather.truth import STEP_S, Truth
from hepti_mqtt.core.errors import ConfigError, HeptiError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import Cluster
from hepti_mqtt.core.program import Program
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.cost.simulator import Simulation, TopicNames, simulate
from hepti_mqtt.models import random_inputs, representative_shape
from hepti_mqtt.planner import Question
from hepti_mqtt.planner.decisions import RULE
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import Frame, decode, decode_continued
from hepti_mqtt.protocol.messages import Endpoint, Status
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.batches import Batch
from hepti_mqtt.runtime.coordinator.plans import ServedModel
from hepti_mqtt.runtime.coordinator.requests import Pins, Request, RequestKey
from hepti_mqtt.runtime.coordinator.session import CoordinatorSession
from hepti_mqtt.runtime.machinery import Publish, Transition
from hepti_mqtt.strategies.plan_programs import compact_programs, device_programs, handover_moves, lower_plan

TICK_S: Final = 0.25
PERIOD_S: Final = 1.5  # from one request to the next, or one after the other where they take longer
LATENCY_S: Final = 1e-3  # of a message
HEARTBEAT_S: Final = 1.0
PAUSE_S: Final = 0.03  # of the planner's machine, by call of `Question.pause`: 2 to 8 s for a search over four devices
PROGRESS_S: Final = 0.25  # between two words of how far a long run is, as `runtime.worker.runs` has it
BESIDE_SEARCH: Final = 1.3  # how many times as long a request takes beside a search
WAITED: Final = 0.5  # of the bytes of exchanges a device waits for and has nothing else to do
LOADED_BYTES: Final = 1e6
MOST_SIMULATIONS: Final = 64
LONG_S: Final = 0.8  # a run that takes longer is played block by block: devices may change in the middle of it
SECRET: Final = bytes(32)


class Answered(NamedTuple):
    """One request: when it was asked, its latency, what its last run took but for loads and searches, step and plan."""

    asked_s: float
    seconds: float
    run_s: float
    step: int
    plan: Plan


class Change(NamedTuple):
    """An activation: when, of which plan, bytes that were loaded for it, and why."""

    now: float
    plan: Plan
    loaded_bytes: float
    why: str

    @property
    def loads(self) -> bool:
        """Return whether devices loaded more than norms and biases."""
        return self.loaded_bytes > LOADED_BYTES

    @property
    def text(self) -> str:
        """Return it in words."""
        where, loaded = ", ".join(self.plan.devices), f"loads {self.loaded_bytes / 1e6:.0f} MB"
        return f"{self.now:.1f} s: {self.plan.method} on {where}, {loaded}; {self.why}"


@dataclass(slots=True)
class History:
    """What happened on a site: everything that a verdict and a picture need.

    searches: times of `Solve`, with how many seconds each took. log: (time, kind, words) of what the planner logged;
    story: the steps of plans in its record.
    """

    file: Cluster
    question: Question
    truth: Truth
    answers: list[Answered] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    searches: list[tuple[float, float]] = field(default_factory=list)
    log: list[tuple[float, str, str]] = field(default_factory=list)
    story: tuple[Transition, ...] = ()
    refused: Counter[str] = field(default_factory=Counter)
    _programs: dict[int, tuple[Plan, tuple[int, int] | None, dict[str, Program]]] = field(default_factory=dict)
    _simulations: dict[tuple[int, int], Simulation] = field(default_factory=dict)  #: by id of the plan and step

    def simulated(self, plan: Plan, step: int) -> Simulation:
        """Return what the simulator says of a request under a plan and the truth of a step."""
        step -= step % 2  # once a second
        key = id(plan), step
        if key not in self._simulations:
            asked = self.question
            if id(plan) not in self._programs:  # equal layers once, as the search does it
                repeated = lower_plan(asked.spec, plan, asked.shape).repeated_layer
                make = device_programs if repeated is None else compact_programs
                self._programs[id(plan)] = plan, repeated, make(asked.spec, plan, asked.shape)
            _, repeated, programs = self._programs[id(plan)]
            cluster = self.truth.cluster(self.file, step)
            if len(self._simulations) == MOST_SIMULATIONS:
                self._simulations.pop(next(iter(self._simulations)))
            simulation = simulate(asked.naming, asked.spec, asked.shape, programs, cluster, repeated=repeated)
            self._simulations[key] = simulation
        return self._simulations[key]

    def run_s(self, plan: Plan, step: int) -> float:
        """Return how long a run really takes that begins in a step, where nobody loads or searches."""
        tail = float(self.truth.run_tail[step])
        return self.simulated(plan, step).seconds * self.truth.methods(plan) * exp(tail)


@dataclass(slots=True, eq=False)
class _LongRun:
    """A run that is played block by block; heir: what goes on with it from the block `stop` on, moved_s later.

    told_s: when the coordinator last heard how far it is. compute_s: by device.
    """

    work: Frame
    plan: Plan
    boots: dict[str, int]
    begun_s: float
    step: int
    stop: int
    block: int = 0
    heir: _LongRun | None = None
    moved_s: float = 0.0
    told_s: float = 0.0
    compute_s: dict[str, float] = field(default_factory=dict)


def play(
    file: Cluster,
    spec: Spec,
    truth: Truth,
    solve: Callable[[interface.Solve], interface.Solved],
    *,
    tokens: int = 128,
    pins: Pins | None = None,
    in_flight: int = 1,
    resident: bool = False,
) -> History:
    """Return what a planner makes of a site in the whole time of its truth.

    file: devices and links as the site file has them. solve: `service.solver.solve`. resident: every device holds all
    weights from the start. Raises AssertionError if an invariant of the coordinator is broken, ConfigError for a model
    that generates tokens.
    """
    shape = representative_shape(spec, tokens)
    if shape.session_rows:
        raise ConfigError(f"weather is for models that answer in one run, and {spec.architecture} generates tokens")
    naming, served = TopicNames("home", "model"), ServedModel("model", spec, bytes(32), tokens, pins or Pins())
    version = PlanVersion(1, 1)
    question = served.pins.question(naming, spec, file, shape, version, in_flight=in_flight, is_exhaustive=False)
    site = _Site(History(file, question, truth), served, solve)
    for device in site.devices.values():
        device.resident = resident
        device.disk = {} if truth.kind == "cold" else None
    return site.play()


class _Site:
    def __init__(
        self,
        history: History,
        served: ServedModel,
        solve: Callable[[interface.Solve], interface.Solved],
    ) -> None:
        self.history, self.solver = history, solve
        self.file, self.truth, question = history.file, history.truth, history.question
        self.spec, shape = question.spec, question.shape
        broker = self.file.broker_bytes_per_s if self.file.broker_bytes_per_s < inf else None
        self.session = CoordinatorSession("home", 1, (served,), question.in_flight, broker, SECRET)
        self.devices = {name: SimulatedDevice(name, self.file.devices[name]) for name in self.truth.names}
        self.batch = Batch(shape, random_inputs(self.spec, shape, np.random.default_rng(0)))
        self.output = np.zeros(self.spec.output_shape(shape), np.float32)
        self.now, self.number, self.searching = 0.0, 0, 0
        self.busy: frozenset[str] = frozenset()  # devices of the run under way
        self.runs: dict[int, tuple[float, int, Plan]] = {}  # seconds alone, step and plan of the run, by its number
        self.last_run: tuple[float, int, Plan] | None = None
        self.long: dict[int, _LongRun] = {}
        self.blocks = served.block_count(shape)
        self.loaded_before = self.tiles = 0.0
        self.chance = np.random.default_rng(7)
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    def play(self) -> History:
        """Let all of the time pass."""
        for i, (name, device) in enumerate(self.devices.items()):
            self.at(0.01 * i, self.join, device)
            if not self.truth.recorded:
                self.at(0.5 + 0.2 * i, self.beat, name)
        for when, name, heartbeat in self.truth.recorded:
            self.at(when, self.tell, interface.DeviceHeartbeat(name, replace(heartbeat, boot=1)))
        self.at(0.02, self.tick)
        self.at(STEP_S, self.step)
        self.at(0.03, self.ask)
        while self._queue and self._queue[0][0] < self.truth.seconds:
            self.now, _, act, what = heappop(self._queue)
            act(*what)
        return self.history

    def at(self, when: float, act: Callable[..., None], *what: Any) -> None:
        """Call `act` when it is time."""
        self._serial += 1
        heappush(self._queue, (when, self._serial, act, what))

    def tell(self, event: interface.CoordinatorEvent) -> None:
        """Hand the coordinator an event, and do what it commands."""
        commands = self.session.handle(event, self.now)
        self.session.assert_invariants()
        for command in commands:
            self.execute(command)

    def execute(self, command: interface.CoordinatorCommand) -> None:
        """Do what the coordinator commands."""
        if isinstance(command, Publish) and "/work/" in command.topic:
            self.at(self.now + self.hub_s(), self.begin_run, decode(command.payload))
        elif isinstance(command, Publish):
            device, message = self.devices[command.topic.split("/")[-2]], messages.decode(command.payload)
            if isinstance(message, messages.Cancel):
                self.long.pop(message.run_id, None)
            for answer in device.take(message, self.spec) if device.up else ():
                self.at(self.now + LATENCY_S, self.tell, interface.DeviceMessage(device.name, answer))
        elif isinstance(command, interface.Solve):
            self.search(command)
        elif isinstance(command, interface.AnswerRequest):
            self.answered(command)
        elif isinstance(command, interface.RefuseRequest):
            self.history.refused[command.error.code] += 1
            self.at(self.now + PERIOD_S, self.ask)
        elif isinstance(command, interface.PublishPlan):
            self.note_plan(command)
        elif isinstance(command, interface.LogEvent):
            self.history.log.append((self.now, command.kind, command.text))

    # -- what happens by itself -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let the coordinator look at its clock."""
        self.at(self.now + TICK_S, self.tick)
        self.tell(interface.Tick())

    def beat(self, name: str) -> None:
        """Let a device say how it is."""
        self.at(self.now + HEARTBEAT_S, self.beat, name)
        device = self.devices[name]
        if device.up:
            device.seq += 1
            load, busy = device.slower(self.now, 1.0), name in self.busy
            heartbeat = self.truth.heartbeat(self.file, name, self.now, (device.boot, device.seq), load, busy)
            heartbeat = replace(heartbeat, slowdown=device.meter(heartbeat.slowdown, self.now))
            self.tell(interface.DeviceHeartbeat(name, replace(heartbeat, edges=device.edges)))

    def join(self, device: SimulatedDevice) -> None:
        """Let a device say what it can do and that it is there."""
        place = self.truth.names.index(device.name)
        endpoint = Endpoint(f"192.168.1.{place + 1}", 1883) if device.name in self.file.endpoints else None
        self.tell(interface.DeviceCaps(device.name, device.caps(endpoint)))
        self.tell(interface.DeviceStatus(device.name, Status("online", device.boot)))

    def step(self) -> None:
        """Let devices come, go and load for a step."""
        self.at(self.now + STEP_S, self.step)
        k, serving = self.truth.step(self.now), bool(self.runs)
        links = self.file.links
        hub = min(self.file.broker_bytes_per_s, max(link.down_bytes_per_s for link in links.values()))
        self.tiles = 0.0
        for i, device in enumerate(self.devices.values()):
            if device.up and not self.truth.up[k, i]:
                device.up = False
                self.tell(interface.DeviceStatus(device.name, Status("offline", device.boot)))
                device.restart()
            elif not device.up and self.truth.up[k, i]:
                device.up = True
                self.join(device)
            rate = self.file.links[device.name].down_bytes_per_s * self.truth.real.rate[k, i]
            is_shared = self.now - device.ran_s < LOAD.in_use_s
            share = device.loads[0].prepare.share if device.loads else 0.0
            most = LOAD.bytes_per_s * (max(LOAD.cpu_share, share) if is_shared else 1.0)
            allowed = rate * max(LOAD.link_share, share) if serving else rate
            coming_rate = min(allowed, rate, hub)  # a tile leaves the hub once and travels on between devices
            for message in device.advance(self.now, STEP_S, self.truth.real.slowdown[k, i], coming_rate, most):
                self.tell(interface.DeviceMessage(device.name, message))
            self.tiles += device.net_taken
            device.link_taken = min(device.net_taken / (STEP_S * rate), 0.9)

    # -- requests and their runs ----------------------------------------------------------------------------------

    def ask(self) -> None:
        """Send the next request."""
        self.number += 1
        key = RequestKey("model", "client", str(self.number))
        self.tell(interface.RequestArrived(Request(key, (self.batch,), None, None)))

    def begin_run(self, work: Frame) -> None:
        """Let the devices of a plan compute, if all of them are there."""
        found = [d.plans.get(work.plan_version) for d in self.devices.values() if d.up]
        plan = next((plan for plan in found if plan is not None), None)
        if plan is None or found.count(plan) < len(plan.devices):
            return  # a device is gone; the coordinator will hear of it
        k = self.truth.step(self.now)
        alone_s, searched = self.history.run_s(plan, k), self.searched
        self.busy, self.runs[work.run_id] = frozenset(plan.devices), (alone_s, k, plan)
        boots = {device: self.devices[device].boot for device in plan.devices}
        for device in plan.devices:
            self.devices[device].ran_s = self.now
        continued = decode_continued(work)
        if continued is not None or alone_s > LONG_S:
            run = _LongRun(work, plan, boots, self.now, k, self.blocks, told_s=self.now)
            if continued is not None:
                self.continue_run(run, *continued)
            else:
                self.long[work.run_id] = run
                self.play_block(run)
            return
        real, beside = self.history.simulated(plan, k), self.beside(plan)
        compute_s = {d: real.devices[d].compute_s * beside for d in plan.devices}
        seconds = alone_s * beside
        self.at(self.now + seconds * searched, self.end_run, work, plan, compute_s, seconds, boots)

    @property
    def searched(self) -> float:
        """Return how many times as long runs take for what the planner's machine does, not the devices."""
        return BESIDE_SEARCH if self.searching else 1.0

    def beside(self, plan: Plan) -> float:
        """Return how many times as long runs take for what devices load."""
        real = self.history.simulated(plan, self.truth.step(self.now))
        compute = min(max(real.devices[d].compute_s for d in plan.devices) / real.seconds, 1.0)
        return max(self.devices[d].slower(self.now, compute) for d in plan.devices)

    def hub_s(self) -> float:
        """Return by how much a request is late because the hub sends tiles."""
        return float(self.chance.exponential(LOAD.hub_s)) if self.tiles > 0 else 0.0

    def continue_run(self, run: _LongRun, run_id: int, block: int) -> None:
        """Let a run go on with another one from a block on, if that is not past it."""
        before = self.long.get(run_id)
        if before is None or before.block >= block:
            failed = messages.RunFailed("model", run.plan.version, run.work.run_id, "passed", "it is past that")
            self.at(self.now + LATENCY_S, self.tell, interface.DeviceMessage(run.plan.root, failed))
            return
        sent = Counter[str]()
        for move in handover_moves(self.spec, before.plan, run.plan, self.history.question.shape, block):
            sent[move.source] += move.nbytes
        links = self.truth.cluster(self.file, self.truth.step(self.now)).links
        run.moved_s = RULE.handover_s + max((n / links[d].up_bytes_per_s for d, n in sent.items()), default=0.0)
        run.block, run.begun_s, before.stop, before.heir = block, before.begun_s, block, run

    def play_block(self, run: _LongRun) -> None:
        """Let a run go through its next block, or end."""
        if self.long.get(run.work.run_id) is not run:
            return  # cancelled
        if run.block == run.stop:
            del self.long[run.work.run_id]
            self.leave_run(run)
            return
        k, plan = self.truth.step(self.now), run.plan
        real, beside = self.history.simulated(plan, k), self.beside(plan)
        for device in plan.devices:
            before_s = run.compute_s.get(device, 0.0)
            run.compute_s[device] = before_s + real.devices[device].compute_s * beside / self.blocks
        run.block += 1
        seconds = self.history.run_s(plan, k) * beside * self.searched / self.blocks
        self.at(self.now + seconds, self.play_block, run)
        if self.now - run.told_s > PROGRESS_S:
            run.told_s = self.now
            said = messages.RunProgress("model", plan.version, run.work.run_id, run.block - 1)
            self.tell(interface.DeviceMessage(plan.root, said))

    def leave_run(self, run: _LongRun) -> None:
        """End a run, or begin with what goes on with it."""
        if run.heir is None:
            seconds = self.now - run.begun_s
            self.runs[run.work.run_id] = seconds, run.step, run.plan
            self.end_run(run.work, run.plan, run.compute_s, seconds, run.boots)
            return
        del self.runs[run.work.run_id]
        run.heir.compute_s = run.compute_s
        self.long[run.heir.work.run_id] = run.heir
        self.at(self.now + run.heir.moved_s, self.play_block, run.heir)

    def end_run(
        self, work: Frame, plan: Plan, compute_s: Mapping[str, float], seconds: float, boots: dict[str, int]
    ) -> None:
        """Let the devices of a run report, unless one of them has gone meanwhile; compute_s: by device."""
        self.busy, self.last_run = frozenset(), self.runs.pop(work.run_id)
        if any(not self.devices[d].up or self.devices[d].boot != boot for d, boot in boots.items()):
            return
        out = replace(work, kind="output", source=plan.root, dtype="f32", shape=self.output.shape, numbers=())
        self.tell(interface.DeviceFrame(plan.root, replace(out, body=self.output)))
        k = self.last_run[1]
        real = self.history.simulated(plan, k)
        for device in plan.devices:
            use, error = real.devices[device], exp(self.truth.part_tail[k, self.truth.names.index(device)])
            busy_s = compute_s[device] * error
            wait_s = max(seconds - busy_s, 0.0)
            numbers = (int(busy_s * 1e6), int(wait_s * 1e6), use.sent_bytes, int(device == plan.root))
            done = replace(work, kind="done", source=device, dtype="u8", shape=(0,), numbers=numbers, body=b"")
            self.tell(interface.DeviceFrame(device, done))
            if plan.route == "mesh":
                self.exchange(plan, device, k, use.sent_bytes)

    def exchange(self, plan: Plan, source: str, step: int, nbytes: int) -> None:
        """Let the peers of a device note at what rate its exchanges came: its link carries a copy for each of them."""
        real, peers = self.truth.cluster(self.file, step).links, [d for d in plan.devices if d != source]
        error = exp(self.truth.part_tail[step, self.truth.names.index(source)])
        for peer in peers:
            rate = min(real[source].up_bytes_per_s, real[peer].down_bytes_per_s) / len(peers) * error
            self.devices[peer].receive(source, WAITED * nbytes / len(peers), rate)

    def answered(self, command: interface.AnswerRequest) -> None:
        """Note an answer; the next request follows."""
        assert self.last_run is not None
        asked_s = command.request.arrived_s
        self.history.answers.append(Answered(asked_s, self.now - asked_s, *self.last_run))
        self.at(max(asked_s + PERIOD_S, self.now + 0.05), self.ask)

    # -- plans ----------------------------------------------------------------------------------------------------

    def search(self, command: interface.Solve) -> None:
        """Search; the answer comes when the planner's machine would have found it."""
        pauses = Counter[str]()

        def pause() -> None:
            pauses["search"] += 1

        try:
            solved = self.solver(replace(command, question=replace(command.question, pause=pause)))
        except HeptiError as error:
            solved = interface.Solved(command.model, command.ticket, None, error=error)
        took_s = PAUSE_S * pauses["search"]
        self.history.searches.append((self.now, took_s))
        self.searching += 1
        self.at(self.now + took_s, self.solved, solved)

    def solved(self, solved: interface.Solved) -> None:
        """Hand over what a search has found."""
        self.searching -= 1
        self.tell(solved)

    def note_plan(self, shown: interface.PublishPlan) -> None:
        """Note a plan that became active."""
        active, changes, self.history.story = shown.active, self.history.changes, shown.story
        if active is None or (changes and active.version == changes[-1].plan.version):
            return
        loaded = sum(device.loaded_bytes for device in self.devices.values())
        why = next(
            (t.cause for t in shown.story if t.after == "preparing" and str(active.version) in t.subject), active.reason
        )
        changes.append(Change(self.now, active, loaded - self.loaded_before, why))
        self.loaded_before = loaded
