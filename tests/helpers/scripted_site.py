"""A planner's session on a virtual clock whose devices the test plays: what a device must never do can be played too.

Devices that behave are those of `swarm`; processes are those of `site_processes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from hepti_mqtt import __version__
from hepti_mqtt.core.errors import HeptiError, PlanError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.spec import TaskHead
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.models.transformer import ModelSpec, TextStem
from hepti_mqtt.planner import Candidate, Decision, Question, decide, price, price_plans, simulate_plan, with_loads
from hepti_mqtt.protocol import keys, messages
from hepti_mqtt.protocol.frames import Frame, decode, decode_work, encode
from hepti_mqtt.protocol.keys import Channel, FrameKey
from hepti_mqtt.protocol.messages import Caps, Heartbeat, Status
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.batches import Batch
from hepti_mqtt.runtime.coordinator.fair_queue import Batching
from hepti_mqtt.runtime.coordinator.plans import ServedModel
from hepti_mqtt.runtime.coordinator.requests import Pins, Request, RequestKey
from hepti_mqtt.runtime.coordinator.search_kinds import SearchKind
from hepti_mqtt.runtime.coordinator.session import CoordinatorSession
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import make_plan, programs_digest

SPEC = ModelSpec(
    family="bert",
    architecture="BertModel",
    layers=2,
    hidden=32,
    heads=4,
    mlp=64,
    norm_first=False,
    activation="gelu",
    norm_eps=1e-12,
    max_tokens=64,
    head=TaskHead("embedding", "mean"),
    text=TextStem(vocab=100, positions=64, types=2),
)
CURVES = {
    "linear": [{"k": 32, "n": 32, "points": [[1, 1e-5], [32, 1e-4]]}],
    "attention_flops_per_s": 1e9,
    "rowwise_bytes_per_s": 1e9,
    "op_overhead_s": 1e-5,
    "frame_s": 1e-4,
    "copy_bytes_per_s": 1e9,
}
MANIFEST = bytes(32)
ROW = Pins(strategy="row", options={"variant": "kv"}, devices=("a", "b"))
APART = Batching(1)
LOST_S = 7.0  # more than the heartbeats that may be missed


def caps(device: str, boot: int, memory: int = 1 << 30) -> Caps:
    return Caps(device, boot, 1, 1, memory, 0, "plain", __version__, CURVES, 0, 4)


def heartbeat(boot: int, slowdown: float = 1.0) -> Heartbeat:
    return Heartbeat(boot, 0, 0.0, 1 << 30, None, 1e-3, 1e8, slowdown, 0)


def everyone(question: Question) -> Decision:
    """Decide for the pinned strategy (default `row`) on the pinned devices (default all)."""
    devices = question.devices or tuple(sorted(question.cluster.devices))
    missing = set(devices) - set(question.cluster.devices)
    if missing or not devices:
        raise PlanError(f"devices {', '.join(sorted(missing)) or 'none'} are not online")
    strategy = question.strategy or "row"
    template = Plan(question.naming.model, question.plan_version, strategy, devices, devices[0])
    template = replace(template, wire=question.wire, weight_dtype=question.weight_dtype)
    options = question.options or STRATEGIES[strategy].options[0]
    plan = make_plan(question.spec, template, strategy, options, (1.0,) * len(devices))
    candidate = Candidate(plan, replace(price(question, plan), seconds=0.0), (1.0,) * len(devices))
    return Decision(candidate, (candidate,), "", question.cluster, programs_digest(question.spec, plan))


class Site:
    """A coordinator with scripted devices; `searches` = False leaves Solve commands to the test.

    Requests run one by one unless `batching` says otherwise.
    """

    def __init__(
        self,
        *names: str,
        in_flight: int = 2,
        batching: Batching = APART,
        pins: Pins | None = None,
        searches: bool = True,
        decider: Callable[[Question], Decision] = decide,
        pricer: Callable[[Question, Plan], Candidate] = simulate_plan,
        secret: bytes | None = None,
        recalls: bool = False,
    ) -> None:
        served = tuple(ServedModel(n, SPEC, MANIFEST, 16, pins or Pins(), batching) for n in names or ("m",))
        self.session = CoordinatorSession("home", 7, served, in_flight, secret=secret, recalls=recalls, checks=True)
        self.now = 0.0
        self.searches, self.decider, self.pricer = searches, decider, pricer
        self.boots: dict[str, int] = {}
        self.commands: list[interface.CoordinatorCommand] = []
        self.sent: list[tuple[str, messages.Message]] = []
        self.work: dict[int, Frame] = {}
        self.answers: dict[str, interface.AnswerRequest] = {}
        self.errors: dict[str, HeptiError] = {}
        self.solves: list[interface.Solve] = []
        self.compute_us = 0  # reported compute time of every device in every run
        self.mute: set[str] = set()  # devices that do not answer probes
        self.probes: list[tuple[str, messages.Prepare]] = []

    def event(self, event: interface.CoordinatorEvent) -> list[interface.CoordinatorCommand]:
        out = self.session.handle(event, self.now)
        for command in out:
            self._note(command)
        self.commands += out
        for command in out:
            if isinstance(command, interface.Solve) and self.searches:
                self.solve(command)
        while self.probes:
            self._speak(*self.probes.pop())
        return out

    def pin(self, pins: Pins) -> None:
        """Search for a plan of the model `m` with other pins."""
        plans = self.session.groups.default("m").plans
        plans.pins = pins
        plans.request_search(self.now, self.now, "pinned", forced=True)
        self.event(interface.Tick())

    def _speak(self, device: str, probe: messages.Prepare) -> None:
        if device in self.mute or device not in self.boots:
            return
        plan = Plan.from_dict(probe.plan)
        self.receive(device, messages.Ready(probe.transaction_id, plan.model, plan.version, 1000, bytes(8)))

    def _will_serve(self, message: messages.Prepare) -> bool:
        """Return whether a Prepare is for the plan being prepared, not a probe."""
        model = Plan.from_dict(message.plan).model
        return self.session.groups.group_of_preparation(model, message.transaction_id) is not None

    def _note(self, command: interface.CoordinatorCommand) -> None:
        if isinstance(command, Publish) and "/work/" in command.topic:
            frame = decode(command.payload)
            decode_work(frame)
            self.work[frame.run_id] = frame
        elif isinstance(command, Publish):
            device, message = command.topic.split("/")[-2], messages.decode(command.payload)
            if isinstance(message, messages.Prepare) and not self._will_serve(message):
                self.probes.append((device, message))
            else:
                self.sent.append((device, message))
        elif isinstance(command, interface.Solve):
            self.solves.append(command)
        elif isinstance(command, interface.AnswerRequest | interface.RefuseRequest):
            name = command.request.key.id
            assert name not in self.answers, f"{name} ended twice"
            assert name not in self.errors, f"{name} ended twice"
            if isinstance(command, interface.AnswerRequest):
                self.answers[name] = command
            else:
                self.errors[name] = command.error

    def solve(self, command: interface.Solve) -> None:
        question = command.question
        try:
            decision = price_plans(question, command.plans) if command.plans else self.decider(question)
        except HeptiError as error:
            self.event(interface.Solved(command.model, command.ticket, None, error=error))
            return
        active = command.active and self.pricer(question, command.active)
        if command.kind is SearchKind.HURRIED:
            decision = with_loads(question, decision, active)
        self.event(interface.Solved(command.model, command.ticket, decision, active))

    def join(self, *devices: str, boot: int = 1, memory: int = 1 << 30) -> None:
        for device in devices:
            self.boots[device] = boot
            self.event(interface.DeviceCaps(device, caps(device, boot, memory)))
            self.event(interface.DeviceStatus(device, Status("online", boot)))

    def leave(self, device: str, reason: str = "") -> None:
        """Let a device go offline, by its last will or with a reason."""
        boot = self.boots.pop(device)
        self.event(interface.DeviceStatus(device, Status("offline", boot, reason=reason)))

    def tick(self, seconds: float, alive: bool = True) -> None:
        self.now += seconds
        for device, boot in self.boots.items() if alive else ():
            self.event(interface.DeviceHeartbeat(device, heartbeat(boot)))
        self.event(interface.Tick())

    def drift(self, slowdowns: Mapping[str, float], seconds: int) -> None:
        """Let time pass while some devices are slow; readings vary, because repeated ones are ignored."""
        for _ in range(seconds):
            self.now += 1
            for device, boot in self.boots.items():
                slowdown = slowdowns.get(device, 1.0) * (1 + 0.001 * (int(self.now) % 3))
                self.event(interface.DeviceHeartbeat(device, heartbeat(boot, slowdown)))
            self.event(interface.Tick())

    def prepares(self) -> dict[str, messages.Prepare]:
        """Return the last Prepare of every device."""
        return {d: m for d, m in self.sent if isinstance(m, messages.Prepare)}

    def ready_message(self, device: str) -> messages.Ready:
        """Return the Ready of a device to its last Prepare."""
        prepare = self.prepares()[device]
        plan = Plan.from_dict(prepare.plan)
        return messages.Ready(prepare.transaction_id, plan.model, plan.version, 1000, programs_digest(SPEC, plan))

    def ready(self, *devices: str) -> None:
        """Let devices, by default all, answer their last Prepare with Ready."""
        for device in self.prepares():
            if device in devices or not devices:
                self.receive(device, self.ready_message(device))

    def receive(self, device: str, message: messages.Message) -> list[interface.CoordinatorCommand]:
        """Let a message of a device arrive."""
        return self.event(interface.DeviceMessage(device, message))

    def progress(self, device: str, done: int, total: int, prepare: messages.Prepare | None = None) -> None:
        """Let a device report loaded bytes for a Prepare, by default its last one."""
        prepare = prepare or self.prepares()[device]
        plan = Plan.from_dict(prepare.plan)
        message = messages.PrepareProgress(prepare.transaction_id, plan.model, plan.version, done, total)
        self.receive(device, message)

    @property
    def plan(self) -> Plan | None:
        """Return the active plan of the model `m`."""
        return self.session.groups.default("m").active

    def settle(self) -> Plan:
        """Complete search and preparation after joins; return the active plan."""
        self.tick(1.1)
        self.ready()
        assert self.plan is not None
        return self.plan

    def pass_by(self, times: int, seconds: float = 1.0, *, ready: bool = False) -> None:
        """Let time pass in steps with heartbeats; ready: devices answer each Prepare."""
        for _ in range(times):
            self.tick(seconds)
            if ready:
                self.ready()

    def failed(self, device: str, code: str = "memory", missing: int = 10) -> messages.Prepare:
        """Let a device refuse its last Prepare; return the Prepare."""
        prepare = self.prepares()[device]
        plan = Plan.from_dict(prepare.plan)
        failed = messages.PrepareFailed(prepare.transaction_id, plan.model, plan.version, code, "no", missing)
        self.receive(device, failed)
        return prepare

    def run_failed(self, device: str, run_id: int, code: str) -> None:
        """Let a device report a failed run."""
        frame = self.work[run_id]
        self.receive(device, messages.RunFailed(frame.model, frame.plan_version, run_id, code, "no"))

    def released(self) -> list[tuple[str, PlanVersion]]:
        """Return the releases that were sent, as (device, plan version)."""
        return [(device, m.plan_version) for device, m in self.sent if isinstance(m, messages.Release)]

    def submit(
        self,
        name: str,
        *lengths: int,
        model: str = "m",
        pins: Pins | None = None,
        within: float = 60.0,
        client: str = "c",
        computes: bool = True,
    ) -> Request:
        chunks = tuple(Batch(TokenBatch((n,)), np.zeros(n, np.int32)) for n in lengths or (8,))
        job = Request(RequestKey(model, client, name), chunks, None, self.now + within, pins, computes)
        self.event(interface.RequestArrived(job))
        return job

    def prepared_plan(self, run_id: int) -> Plan:
        """Return the plan of a run."""
        frame = self.work[run_id]
        return next(p for p in self.plans(frame.model) if p.version == frame.plan_version)

    def answer(self, run_id: int) -> None:
        """Let every device of a run report, the root with an output that names the length of each sequence."""
        plan = self.prepared_plan(run_id)
        sizes = np.array(decode_work(self.work[run_id])[0].sizes, np.float32)
        self.hear(self.part(run_id, plan.root, np.repeat(sizes[:, None], SPEC.hidden, axis=1)))
        for device in plan.devices:
            self.hear(self.done(run_id, device, int(device == plan.root)))

    def serve(self, name: str, *lengths: int, **options: Any) -> None:
        """Submit a request, and answer its run."""
        self.submit(name, *lengths, **options)
        self.answer(max(self.work))
        assert name in self.answers

    def part(self, run_id: int, source: str, body: np.ndarray, **fields: Any) -> Frame:
        """Return a part of the output of a run."""
        frame = replace(self.work[run_id], kind="output", source=source, dtype="f32", shape=body.shape, body=body)
        return replace(frame, **fields)

    def done(self, run_id: int, source: str, parts: int) -> Frame:
        """Return a device's report of a run, in which it sent so many parts of the output."""
        numbers = (self.compute_us, 500, 100, parts)
        return replace(self.work[run_id], kind="done", source=source, dtype="u8", shape=(0,), numbers=numbers, body=b"")

    def hear(self, *frames: Frame) -> None:
        """Let frames of devices arrive."""
        for frame in frames:
            self.event(interface.DeviceFrame(frame.source, frame))

    def plans(self, model: str) -> list[Plan]:
        plans = [c.plan for c in self.commands if isinstance(c, interface.AnswerRequest)]
        shown = [c for c in self.commands if isinstance(c, interface.PublishPlan) and c.model == model]
        plans += [p for c in shown for p in (c.active, *c.pinned) if p]
        return plans

    def notes(self) -> Counter[str]:
        return Counter(c.kind for c in self.commands if isinstance(c, interface.LogEvent))


def preparing(*devices: str, **options: Any) -> Site:
    """Return a site that prepares its first plan."""
    site = Site(**options)
    site.join(*devices)
    site.tick(1.1)
    return site


def settled(*devices: str, models: Sequence[str] = (), **options: Any) -> Site:
    """Return a site with an active plan."""
    site = Site(*models, **options)
    site.join(*devices)
    site.settle()
    return site


SECRET = b"1" * 32  # of the planner


def private_of(device: str) -> bytes:
    """Return the private key of a scripted device."""
    return device.encode().ljust(32, b"-")


class KeyedSite(Site):
    """A site whose devices have joined and agreed on a secret with the planner."""

    def __init__(self, *devices: str, **options: Any) -> None:
        super().__init__(secret=SECRET, **options)
        self.channels: dict[str, Channel] = {}
        for device in devices:
            secret = keys.agree(private_of(device), keys.public_key(SECRET))
            self.channels[device] = Channel(secret, count(1), at_planner=False)
            self.boots[device] = 1
            self.describe(device, private_of(device))
            self.event(interface.DeviceStatus(device, Status("online", 1)))
        self.tick(1.1)

    def describe(self, device: str, private: bytes) -> None:
        """Let a device publish its caps, with this key."""
        report = replace(caps(device, self.boots[device]), public_key=keys.public_key(private))
        self.event(interface.DeviceCaps(device, report))

    def say(self, device: str, message: messages.Message, channel: Channel | None) -> None:
        """Let a message arrive in the name of a device, sealed by a channel."""
        payload = messages.encode(message) if channel is None else channel.seal(messages.encode(message))
        self.event(interface.DeviceMessage(device, *messages.decode_sealed(payload)))

    def ready(self, *devices: str) -> None:
        """Let devices answer their last Prepare with Ready."""
        for device in devices or self.prepares():
            self.say(device, self.ready_message(device), self.channels[device])

    def pin(self, pins: Pins) -> None:
        """Search for a plan of the model `m` with other pins."""
        plans = self.session.groups.default("m").plans
        plans.pins = pins
        plans.request_search(self.now, self.now, "pinned", forced=True)
        self.event(interface.Tick())

    def _speak(self, device: str, probe: messages.Prepare) -> None:
        plan = Plan.from_dict(probe.plan)
        ready = messages.Ready(probe.transaction_id, plan.model, plan.version, 1000, bytes(8))
        self.say(device, ready, self.channels[device])

    def frame_key(self, device: str) -> FrameKey:
        """Return the key of the last plan's frames on a device."""
        prepare = self.prepares()[device]
        plan = Plan.from_dict(prepare.plan)
        return FrameKey(self.channels[device].wrapped(prepare.key, plan.model, plan.version), prepare.checked)

    def give_answer(self, run_id: int, key: FrameKey, value: float) -> None:
        """Let every device of a run report, the root with an output of this value."""
        sizes, plan = decode_work(self.work[run_id])[0].sizes, self.prepared_plan(run_id)
        body = np.full((len(sizes), SPEC.hidden), value, np.float32)
        frames = [self.part(run_id, plan.root, body)]
        frames += [self.done(run_id, device, int(device == plan.root)) for device in plan.devices]
        self.hear(*(decode(encode(frame, key)) for frame in frames))
