"""Compiled code exchanges over real sockets what Python has exchanged before, and leaves to Python all else."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from sites import EVERY_FAMILY, TOLERANCE, plan, request, tensors
from together import bound, run_together

from device_agent.links import MeshLinks
from hepti_mqtt import models
from hepti_mqtt.config.process import RateLimitedLog
from hepti_mqtt.core.ids import PLANNER, PlanVersion
from hepti_mqtt.core.program import NUMPY_DTYPE
from hepti_mqtt.kernels import Workers, transfers
from hepti_mqtt.kernels.jit import JIT
from hepti_mqtt.protocol import frames
from hepti_mqtt.protocol.frames import Frame, TensorArrival
from hepti_mqtt.protocol.keys import UNKEYED, FrameKey
from hepti_mqtt.protocol.messages import Endpoint, Peer
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.runtime.worker.executor import Executor, Stretch
from hepti_mqtt.runtime.worker.interface import AllowPeers, FrameIn, JoinPeers, PeerJoined, PeerLost
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import device_programs, handover_program
from hepti_mqtt.transport.sockets import mesh_possible

pytestmark = pytest.mark.skipif(not mesh_possible(), reason="the mesh needs Linux")
compiled_only = pytest.mark.skipif(not JIT, reason="nothing is compiled")
IN_LINE = [("bert-embedding", "megatron"), ("tiny-gpt2", "decoder"), ("tiny-qwen3", "megatron")]
LEARNING = 2  # runs: Python checks frames in the first one, and knows their exchanges in the second
TOPICS, MODEL, VERSION = Topics("home"), "m", PlanVersion(1, 1)
PATIENCE_S = 30.0
_DTYPE = {dtype.str: name for name, dtype in NUMPY_DTYPE.items()}


class Device:
    """One device of a site: what `device_agent.shell` and `runtime.worker.runs` do around an executor, and no more."""

    def __init__(self, name, bound):
        self.name, self.bound = name, bound
        self.executor, self.joined = Executor(), set()
        self.complaints = RateLimitedLog(logging.getLogger("test"))
        self.links = MeshLinks(TOPICS, name, 1, self.complaints, "127.0.0.1")
        self.outputs, self.early, self.over, self.key = {}, [], [], UNKEYED
        self.checks_all = False  # whether Python exchanges all frames
        self.before_step = lambda _: None
        self.sent, self.lost = [], []  # whole frames that Python has sent, and peers that were lost

    @property
    def compiled(self):
        """Return how many frames compiled code has sent and received."""
        return self.links.mesh.channels.traffic[0]

    def introduce(self, others):
        peers = tuple(
            Peer(name, Endpoint("127.0.0.1", other.links.mesh.port), f"{name}-{self.name}", f"{self.name}-{name}")
            for name, other in others.items()
            if other is not self
        )
        self.links.admit(AllowPeers(MODEL, VERSION, peers))
        self.links.join(JoinPeers(MODEL, VERSION, peers))

    def admit(self, run_id, inputs, bound=None):
        bound = bound or self.bound
        slots = bound.template.program.slots
        states = {spec.state: np.zeros(spec.shape, NUMPY_DTYPE[spec.dtype]) for spec in slots if spec.state}
        self.executor.admit(run_id, bound, states)
        self.outputs[run_id] = []
        for key in bound.template.inputs:
            self.executor.deliver(run_id, key, inputs)
        early, self.early = self.early, []
        for event in early:
            self.take(event)

    def take(self, event):
        if isinstance(event, PeerJoined):
            self.joined.add(event.peer)
        elif isinstance(event, PeerLost):
            self.lost.append(event.peer)
        elif isinstance(event, TensorArrival | FrameIn):
            run_id = event.run_id if isinstance(event, TensorArrival) else event.frame.run_id
            if run_id not in self.executor:
                self.early += [] if run_id in self.over else [event]
            elif isinstance(event, TensorArrival):
                assert event.has_tag(self.key)
                self.executor.deliver(run_id, event.exchange.key, event.array(), event.exchange.head, self.key)
            else:
                frame = event.frame
                self.executor.deliver(run_id, (frame.node, frame.part, frame.source), frame.array())

    def publish(self, out):
        if out.op.to == (PLANNER,):
            self.outputs[out.run_id].append((out.op.row, np.array(out.array)))
            return
        op, array = out.op, out.array
        frame = Frame(
            "tensor", MODEL, VERSION, out.run_id, op.layer, op.node, self.name, op.part, _DTYPE[array.dtype.str],
            array.shape, op.row, body=array.data.cast("B") if array.size else b"",
        )  # fmt: skip
        header, body = frames.encode_parts(frame, self.key)
        for place, to in enumerate(op.to):
            topic = TOPICS.activation(MODEL, op.layer, self.name, to)
            self.links.publish(Publish(topic, header, 0, "mesh", body=body))
            self.sent = [*self.sent[-8:], bytes(header) + bytes(body)]
            if array.size and out.rows:
                prefix = frames.header_prefix(frame, body.nbytes)
                out.rows[place].learn(frames.frame_header(prefix, bytes(8), b"", UNKEYED), self.key, topic)

    def turn(self, timeout_s, limit_s=0.0):
        """Run a step, or wait for peers."""
        step = self.executor.next_step()
        if step is None:
            for event in self.links.wait(timeout_s):
                self.take(event)
            return
        self.before_step(self)
        out = step.run(limit_s, sockets=None if self.checks_all else self.links.mesh.channels)
        if out is not None:
            self.publish(out)
        for event in self.links.wait(0.0) if limit_s else ():
            self.take(event)

    def work(self, run_ids, limit_s, continues=lambda _: True):
        """Work until some runs are over, or are ended."""
        until = time.monotonic() + PATIENCE_S
        left = set(run_ids)
        while left:
            assert time.monotonic() < until, (self.name, left)
            if not continues(self):
                for run_id in left:
                    self.executor.drop(run_id)
            else:
                self.turn(0.02, limit_s)
            for run_id in [r for r in left if r not in self.executor or self.executor.finish_if_done(r)]:
                left.discard(run_id)
                self.over.append(run_id)


class Site:
    """Devices by name; a context manager."""

    def __init__(self, bound):
        self.devices = {name: Device(name, programs) for name, programs in bound.items()}

    def __enter__(self):
        for device in self.devices.values():
            device.introduce(self.devices)
        until = time.monotonic() + PATIENCE_S
        while any(len(d.joined) < len(self.devices) - 1 for d in self.devices.values()):
            assert time.monotonic() < until
            for device in self.devices.values():
                for event in device.links.wait(0.005):
                    device.take(event)
        return self

    def __exit__(self, *_):
        for device in self.devices.values():
            device.links.close()

    def run(self, inputs, limit_s=0.0):
        """Return the answers to some runs at once, by number."""
        self._together(inputs, limit_s, lambda _: True)
        return {run_id: self.answer(run_id) for run_id in inputs}

    def end_after(self, run_id, inputs, steps):
        """End a run everywhere once the first device has taken so many steps; return whether it was under way."""
        first, ended, taken = next(iter(self.devices.values())), threading.Event(), 0

        def continues(device):
            nonlocal taken
            taken += device is first
            if taken > steps:
                ended.set()
            return not ended.is_set()

        self._together({run_id: inputs}, 0.0, continues)
        return ended.is_set()

    def go_on(self, run_ids, heirs, inputs, block, steps):
        """Return the answer to a run that ends before a block, and goes on in other Programs under a number of its own.

        steps: of the first device, after which it is told; the others are told at the start.
        """
        first, taken, (run_id, heir) = next(iter(self.devices.values())), 0, run_ids
        for device in self.devices.values():
            device.admit(run_id, inputs)
            device.admit(heir, inputs, heirs[device.name])
            assert device is first or device.executor.hold(run_id, block)

        def continues(device):
            nonlocal taken
            if device is first:
                taken += 1
                assert taken != steps or device.executor.hold(run_id, block)
            is_held = device is not first or taken >= steps
            if is_held and run_id in device.executor and device.executor.is_done(run_id):
                device.executor.hand_over(run_id, heir)
                device.over.append(run_id)
            return True

        self._together({heir: inputs}, 0.0, continues)
        return self.answer(heir)

    def _together(self, inputs, limit_s, continues):
        def work(device):
            for run_id, array in inputs.items():
                if run_id not in device.executor:
                    device.admit(run_id, array)
            device.work(tuple(inputs), limit_s, continues)

        with ThreadPoolExecutor(len(self.devices)) as pool:
            list(pool.map(work, self.devices.values()))

    def answer(self, run_id):
        parts = [part for device in self.devices.values() for part in device.outputs[run_id]]
        return np.concatenate([array for _, array in sorted(parts, key=lambda part: part[0])])


def programs(family, name, devices=2, lengths=(5,)):
    spec, method = EVERY_FAMILY[family], STRATEGIES[name]
    shape, inputs = request(spec, lengths)
    chosen = plan(spec, (name, method.options[0]), (1.0,) * devices)
    chosen = replace(chosen, route="mesh").executables[0]
    parts = device_programs(spec, chosen, shape)
    pools = {name: Workers(1) for name in parts}  # one pool per device
    chosen = {name: bound({name: part}, tensors(spec), pools[name])[name] for name, part in parts.items()}
    return chosen, inputs, pools


def cases():
    """Yield every method that exchanges, each with a third of its families."""
    for first, (name, method) in enumerate(STRATEGIES.items()):
        if method.max_devices != 1 and not method.task_count(method.options[0]):
            able = [
                family
                for family, spec in EVERY_FAMILY.items()
                if method.why_unsupported(models.graph(spec, models.largest_shape(spec))) is None
            ]
            yield from ((family, name) for family in able[first % 3 % len(able) :: 3])


@pytest.mark.parametrize(("family", "name"), list(cases()))
def test_each_method_answers_as_without_sockets(family, name):
    bound_programs, inputs, _ = programs(family, name)
    expected = run_together(bound_programs, inputs)
    with Site(bound_programs) as site:
        for run in range(1, LEARNING + 3):
            answers = site.run({run: inputs})
            np.testing.assert_array_equal(answers[run], expected)
        in_line = [device for device in site.devices.values() if device.bound.in_line and device.bound.received]
        assert not JIT or all(device.compiled for device in in_line)


def stop_everywhere(pools):
    """Let tapes stop before each of their rows."""
    for pool in pools.values():
        pool.interrupt()


@pytest.mark.parametrize("often", [False, True])
@pytest.mark.parametrize(("family", "name"), IN_LINE)
def test_runs_at_once_answer_as_alone(family, name, often):
    bound_programs, inputs, pools = programs(family, name, devices=3)
    expected = run_together(bound_programs, inputs)
    with Site(bound_programs) as site:
        for first in (1, 4, 7, 10):
            if often and first > 1:
                stop_everywhere(pools)
            answers = site.run(dict.fromkeys(range(first, first + 3), inputs), limit_s=3e-4)
            for answer in answers.values():
                np.testing.assert_array_equal(answer, expected)
        assert not JIT or all(device.compiled for device in site.devices.values())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("family", "name"), IN_LINE)
def test_what_else_a_peer_sends_changes_nothing(family, name, seed):
    bound_programs, inputs, pools = programs(family, name)
    expected, rng = run_together(bound_programs, inputs), random.Random(seed)

    def disturb(device):
        (peer,) = (other for other in site.devices if other != device.name)
        name = TOPICS.activation(MODEL, rng.randrange(3), device.name, peer)
        body = rng.randbytes(rng.choice((0, 1, 7, 300, 20_000)))
        sent = device.sent[-1] if device.sent else body
        cut = bytearray(sent)
        if cut:
            cut[rng.randrange(len(cut))] ^= 1 << rng.randrange(8)
        device.links.mesh.publish(name, rng.choice((body, frames.MAGIC + body, sent, bytes(cut)[:256] + body)))

    with Site(bound_programs) as site:
        for run in range(1, LEARNING + 6):
            if run > LEARNING:
                stop_everywhere(pools)
                for device in site.devices.values():
                    device.before_step = disturb
            np.testing.assert_array_equal(site.run({run: inputs})[run], expected)
        assert not JIT or all(device.compiled for device in site.devices.values())


@compiled_only
def test_each_packet_header_is_looked_up_once(monkeypatch):
    bound_programs, inputs, _ = programs(*IN_LINE[0])
    with Site(bound_programs) as site:
        lookups = {device: [] for device in site.devices}
        for name, device in site.devices.items():
            channels, route = device.links.mesh.channels, device.links.mesh.channels.route
            monkeypatch.setattr(
                channels, "route", lambda *of, route=route, name=name: (lookups[name].append(of), route(*of))[1]
            )
        for run in range(1, LEARNING + 3):
            site.run({run: inputs})
        for name, device in site.devices.items():
            stretches = {id(op): op for op in device.bound.ops if isinstance(op, Stretch)}.values()
            assert len(lookups[name]) == sum(len(stretch.transfers.sends) for stretch in stretches) > 2


def test_another_plan_version_learns_anew():
    bound_programs, inputs, _ = programs(*IN_LINE[0])
    with Site(bound_programs) as site:
        for run in range(1, LEARNING + 2):
            site.run({run: inputs})
        before = [device.compiled for device in site.devices.values()]
        for device in site.devices.values():
            device.bound = device.bound.renewed()
        site.run({LEARNING + 2: inputs})
        assert [device.compiled for device in site.devices.values()] == before


@pytest.mark.parametrize("checked", ["header", "whole"])
def test_tagged_frames_are_those_of_python(checked):
    bound_programs, inputs, _ = programs(*IN_LINE[0])
    expected = run_together(bound_programs, inputs)
    with Site(bound_programs) as site:
        one, other = site.devices.values()
        one.key = other.key = FrameKey(bytes(range(32)), checked)
        for run in range(1, LEARNING + 3):
            one.checks_all = run == LEARNING + 2  # what compiled code sends passes the checks of Python
            np.testing.assert_array_equal(site.run({run: inputs})[run], expected)
        assert not JIT or bool(other.compiled) == (checked == "header")


@pytest.mark.parametrize(("family", "name"), IN_LINE)
def test_a_run_may_end_before_any_row(family, name):
    bound_programs, inputs, pools = programs(family, name)
    expected = run_together(bound_programs, inputs)
    with Site(bound_programs) as site:
        for run in range(1, LEARNING + 1):
            site.run({run: inputs})
        stop_everywhere(pools)
        run, ended, steps = LEARNING + 1, True, 0
        while ended:
            steps += 1
            ended = site.end_after(run, inputs, steps)
            np.testing.assert_array_equal(site.run({run + 1: inputs})[run + 1], expected)
            run += 2
        assert steps > 5


def hold_little(device, peer):
    """Let the kernel hold a few KB for a peer, so that large frames go in parts.

    The peer's memory stays: with little of that, TCP itself waits for 40 ms again and again.
    """
    channels = device.links.mesh.channels
    words = (ctypes.c_int64 * transfers.CHANNEL).from_address(channels.channel(peer))
    with channels.hold() as is_held:
        assert is_held
        with socket.socket(fileno=os.dup(words[transfers.OUT])) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)


@pytest.mark.parametrize("often", [False, True])
@pytest.mark.parametrize("name", ["megatron", "row", "galaxy"])
def test_a_run_goes_on_in_other_programs_from_a_block_on(name, often):
    spec, method = EVERY_FAMILY["bert-embedding"], (name, STRATEGIES[name].options[0])
    shape, inputs = request(spec, (13,))
    before, after = (
        replace(plan(spec, method, shares), route="mesh").executables[0] for shares in ((1.0, 1.0), (3.0, 2.0))
    )
    pools = {device: Workers(1) for device in before.devices}
    parts = device_programs(spec, before, shape)
    block = len(models.graph(spec, shape).blocks) - 3
    handed = {d: handover_program(spec, before, after, shape, block, d) for d in before.devices}
    bound_programs = {d: bound({d: part}, tensors(spec), pools[d])[d] for d, part in parts.items()}
    heirs = {
        d: replace(bound({d: each.program}, tensors(spec), pools[d])[d], taken=each.taken) for d, each in handed.items()
    }
    expected = models.reference(spec, tensors(spec), inputs, shape)[1]
    with Site(bound_programs) as site:
        for steps in range(1, 7):
            if often and steps > LEARNING:
                stop_everywhere(pools)
            answer = site.go_on((2 * steps, 2 * steps + 1), heirs, inputs, block, steps if often else 1)
            np.testing.assert_allclose(answer, expected, atol=TOLERANCE)
        assert not JIT or all(device.compiled for device in site.devices.values())


@compiled_only
def test_a_frame_of_which_a_part_is_sent_follows_whole(monkeypatch):
    bound_programs, inputs, pools = programs("bert-embedding", "megatron", lengths=(20,) * 64)
    expected = run_together(bound_programs, inputs)
    with Site(bound_programs) as site:
        for run in range(1, LEARNING + 1):
            site.run({run: inputs})
        parts = []
        for device in site.devices.values():
            (peer,) = (name for name in site.devices if name != device.name)
            hold_little(device, peer)
            channels, keep = device.links.mesh.channels, device.links.mesh.channels.keep
            monkeypatch.setattr(channels, "keep", lambda *kept, keep=keep: (parts.append(kept[2]), keep(*kept)))
        for run in range(LEARNING + 1, LEARNING + 4):
            if run % 2:
                stop_everywhere(pools)
            np.testing.assert_array_equal(site.run({run: inputs})[run], expected)
        assert parts
        assert all(parts)


def test_a_peer_that_leaves_is_noticed_within_a_run():
    bound_programs, inputs, _ = programs(*IN_LINE[0])
    with Site(bound_programs) as site:
        for run in range(1, LEARNING + 2):
            site.run({run: inputs})
        one, other = site.devices.values()
        one.admit(99, inputs)
        until = time.monotonic() + PATIENCE_S
        site.devices.pop(other.name).links.close()
        while not one.lost:
            assert time.monotonic() < until
            one.turn(0.02)
        assert one.lost == [other.name]
        assert 99 in one.executor
