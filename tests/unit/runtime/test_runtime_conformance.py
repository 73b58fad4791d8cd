"""Executor and simulator run the same ops in the same order on both routes, if exchanges arrive at the same times.

Sessions with real kernels and frames are driven as the agent's shell drives them, each on a clock of its own: an op or
a frame takes what the device's profile says, and frames arrive when they did in the simulation.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace
from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sites import EVERY_FAMILY, TOLERANCE, plan, request, tensors

from hepti_mqtt import models
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.profiles import Cluster, Curve, DeviceProfile, Link, PeerLink
from hepti_mqtt.core.program import Compute, Recv
from hepti_mqtt.cost.simulator import SimulatedRequest, Simulator, TopicNames, send_bytes
from hepti_mqtt.kernels import Workers, works
from hepti_mqtt.models.shapes import ImageInput
from hepti_mqtt.protocol import frames, messages
from hepti_mqtt.protocol.frames import DecoderSession, encode_work
from hepti_mqtt.protocol.messages import Endpoint, Peer
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.runtime.worker import interface
from hepti_mqtt.runtime.worker.executor import pack
from hepti_mqtt.runtime.worker.programs import analyse, build
from hepti_mqtt.runtime.worker.session import WorkerSession
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import device_programs, resident_weights

NAMING = TopicNames("home", "m")
VERSION = PlanVersion(1, 1)
WORKERS = Workers(1)
ABLE = [
    (family, name)
    for family, spec in EVERY_FAMILY.items()
    for name, method in STRATEGIES.items()
    if method.why_unsupported(models.graph(spec, models.largest_shape(spec))) is None
]


def profile(name, speed, frame_s):
    curve = Curve(32, 32, ((1, 1e-4 / speed), (20, 1e-3 / speed)))
    return DeviceProfile(
        name,
        (curve,),
        1e6 * speed,
        1e7 * speed,
        1e-5,
        frame_s=frame_s,
        copy_bytes_per_s=1e7,
        mesh_frame_s=frame_s / 3,
        mesh_copy_bytes_per_s=4e7,
    )


@st.composite
def sites(draw, names):
    """Return devices of speeds and links between which exchanges overtake each other."""
    speeds = {n: draw(st.floats(0.2, 5.0), label=f"speed of {n}") for n in names}
    rates = {n: draw(st.floats(1e5, 1e7), label=f"rate of {n}") for n in names}
    late = {n: draw(st.floats(1e-5, 5e-3), label=f"latency of {n}") for n in names}
    frame_s = draw(st.floats(1e-5, 1e-3), label="seconds per frame")
    return Cluster(
        {n: profile(n, speeds[n], frame_s) for n in names},
        {n: Link(late[n], rates[n], rates[n]) for n in names},
        peer_links={
            pair: PeerLink(draw(st.floats(1e-6, 1e-3), label=f"latency of {pair}"), 1e7)
            for pair in permutations(names, 2)
        },
    )


@st.composite
def questions(draw):
    """Return spec, plan and requests of a family under a method that can divide it."""
    family, name = draw(st.sampled_from(ABLE), label="family and method")
    spec, method = EVERY_FAMILY[family], STRATEGIES[name]
    devices = draw(st.integers(2, 4), label="devices")
    devices = min(devices, method.max_devices or devices)
    weights = draw(st.lists(st.sampled_from((0.5, 1.0, 2.0)), min_size=devices, max_size=devices), label="weights")
    # Tasks that are leased one by one take a planner, which is not here.
    options = draw(
        st.sampled_from([o for o in method.variants_for(devices) if not method.task_count(o)]), label="options"
    )
    # Of replicas a run is under one, which is all that its devices know.
    fixed = replace(plan(spec, (name, options), weights).executables[0], version=VERSION)
    batches = (
        ((1,),) if isinstance(spec.input_spec, ImageInput) else ((5,), (4, 3), (1,), (2, 6, 1))
    )  # a run has one picture
    lengths = draw(st.lists(st.sampled_from(batches), min_size=2, max_size=3), label="lengths")
    if draw(st.booleans(), label="over mesh"):
        pairs = tuple(permutations(fixed.devices, 2))
        relayed = draw(st.sets(st.sampled_from(pairs)), label="relayed") if pairs else ()
        fixed = replace(fixed, route="mesh", relayed_pairs=tuple(sorted(relayed)))
    return spec, fixed, [request(spec, one, seed=seed) for seed, one in enumerate(lengths)]


class Driven:
    """One device's session, driven as the shell does."""

    def __init__(self, spec, fixed, requests, cluster, name, arrivals):
        self.name, self.requests, self.profile = name, requests, cluster.devices[name]
        self.programs = [parts[name] for _, _, parts in requests]
        self.arrivals = deque(arrivals)
        self.session = WorkerSession(name, NAMING.site, 1 << 30)
        self.now = 0.0
        self.ran, self.prices = [], {}
        self.prepare(spec, fixed)

    def prepare(self, spec, fixed):
        shapes = tuple(dict.fromkeys(shape.plain() for shape, _, _ in self.requests))
        peers = tuple(Peer(d, Endpoint("127.0.0.1", 1), "out", "in") for d in fixed.devices if d != self.name)
        begun = messages.Prepare(
            1, fixed.to_dict(), spec.to_dict(), bytes(32), len(self.requests), shapes, len(shapes), peers
        )
        weights = pack(tensors(spec), resident_weights(spec, fixed, self.name))
        for event in (
            interface.MessageIn(begun),
            interface.Loaded("m", VERSION, weights),
            interface.Subscribed("m", VERSION),
            *(interface.PeerJoined(peer.device, "m", VERSION) for peer in peers),
            interface.MessageIn(messages.Activate(2, "m", VERSION)),
        ):
            self.handle(event)

    def handle(self, event):
        """Hand an event to the session, and what it orders built at once; return what else it wants."""
        out = []
        for command in self.session.handle(event, self.now):
            if isinstance(command, interface.AnalysePrepare):
                out += self.handle(analyse(command, self.name, self.session.topics))
            elif isinstance(command, interface.BuildProgram):
                out += self.handle(build(command, self.name, WORKERS))
            else:
                out.append(command)
        return out

    def advance(self, sent):
        """Go on until there is nothing to do, or a frame is due that its sender has not sent yet in `sent`."""
        while True:
            if self.arrivals and self.arrivals[0].seconds <= self.now:
                frame = self.arrivals[0]
                if (payload := self.payload(frame, sent)) is None:
                    return
                self.arrivals.popleft()
                self.now += self.profile.frame_seconds(1, frame.nbytes, frame.route)
                self.publish(self.handle(interface.FrameIn(frames.decode(payload))), sent)
            elif (step := self.session.next_step()) is not None:
                ran, seconds = (step.run_id, step.place), self.seconds(step)
                outgoing = step.run(ops=1)
                # A stretch may only wait for, or take, what it receives: in the simulation that is no op.
                if not any(isinstance(self.op(step.run_id, place), Recv) for place in (ran[1], step.place)):
                    self.ran.append(ran)
                    self.now += seconds
                self.publish(self.session.finish_step(step, outgoing, 0.0, self.now), sent)
            elif self.arrivals:
                self.now = self.arrivals[0].seconds
            else:
                return

    def payload(self, frame, sent):
        if frame.key is not None:
            return sent.get((frame.run_id, frame.key))
        shape, inputs, _ = self.requests[frame.run_id - 1]
        sessions = (DecoderSession(frame.run_id, final=True),) if shape.session_rows else ()
        return encode_work("m", VERSION, frame.run_id, shape, inputs, sessions)

    def op(self, run_id, place):
        return self.programs[run_id - 1].ops[place]

    def seconds(self, step):
        program, op = self.programs[step.run_id - 1], self.op(step.run_id, step.place)
        seconds = self.prices.get(id(op))
        if seconds is None:
            seconds = self.prices[id(op)] = self.price(program, op)
        return seconds

    def price(self, program, op):
        if isinstance(op, Recv):
            return 0.0
        if isinstance(op, Compute):
            return self.profile.seconds(*works(op, program.slots))
        sizes = send_bytes(NAMING, self.name, op, program.slots[op.slot])
        return self.profile.frame_seconds(len(op.to), sum(sizes), op.route)

    def publish(self, commands, sent):
        for command in commands:
            assert isinstance(command, Publish), command
            if command.payload[:4] != frames.MAGIC:
                assert isinstance(messages.decode(command.payload), messages.RunProgress)
                continue  # which costs about nothing, so the simulator leaves it out
            frame = frames.decode(command.joined_payload)
            if frame.kind == "done":
                self.now += self.profile.frame_seconds(1, 0)
            else:
                assert frame.kind in {"tensor", "output"}
                sent[frame.run_id, (frame.node, frame.part, frame.source)] = command.joined_payload


def answers(sent, run_ids):
    """Return the answer of each request from the frames that are outputs."""
    parts = defaultdict(list)
    for payload in sent.values():
        frame = frames.decode(payload)
        if frame.kind == "output":
            parts[frame.run_id].append((frame.row_start, frame.array()))
    return [np.concatenate([a for _, a in sorted(parts[n], key=lambda part: part[0])]) for n in run_ids]


class ObservedSimulator(Simulator):
    """Notes the frames that arrive, and the ops (run, place in the Program) that each device runs."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.arrivals, self.ran = [], defaultdict(list)

    def on_arrival(self, now, frame):
        self.arrivals.append(frame)
        super().on_arrival(now, frame)

    def on_op_done(self, now, device, run, place):
        self.ran[device.name].append((run.run_id, place))
        super().on_op_done(now, device, run, place)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_executor_and_simulator_run_the_same_ops_in_the_same_order(data):
    spec, fixed, requests = data.draw(questions())
    cluster = data.draw(sites(fixed.devices))
    lowered = [(shape, inputs, device_programs(spec, fixed, shape)) for shape, inputs in requests]
    times = data.draw(st.lists(st.floats(0, 0.05), min_size=len(lowered), max_size=len(lowered)), label="asked")
    simulator = ObservedSimulator(NAMING, spec, cluster, data.draw(st.integers(1, 3), label="in flight"), record=False)
    simulator.run(
        [SimulatedRequest(shape, parts, at) for (shape, _, parts), at in zip(lowered, sorted(times), strict=True)]
    )
    simulator.outcome()
    driven = {
        name: Driven(spec, fixed, lowered, cluster, name, [a for a in simulator.arrivals if a.device == name])
        for name in fixed.devices
    }
    sent = {}
    while any(d.arrivals for d in driven.values()):
        before = [len(d.arrivals) for d in driven.values()]
        for device in driven.values():
            device.advance(sent)
        assert [len(d.arrivals) for d in driven.values()] != before, "a frame arrived that nobody has sent"
    for name, device in driven.items():
        assert device.ran == simulator.ran[name], name
        assert not device.session.counters["duplicate"], "one frame, one exchange"
        device.session.check()
    for (shape, inputs, _), got in zip(lowered, answers(sent, range(1, len(lowered) + 1)), strict=True):
        wanted = models.reference(spec, tensors(spec), inputs, shape)[1]
        np.testing.assert_allclose(got, wanted, atol=TOLERANCE, rtol=1e-5)
