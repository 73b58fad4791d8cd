"""Compiled code exchanges over real sockets what Python has exchanged before, and leaves to Python all else."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import time
from dataclasses import replace

import numpy as np
import pytest
from exchanging import MODEL, PATIENCE_S, TOPICS, Site
from sites import EVERY_FAMILY, TOLERANCE, plan, request, tensors
from together import bound, run_together

from hepti_mqtt import models
from hepti_mqtt.kernels import Workers, transfers
from hepti_mqtt.kernels.jit import JIT
from hepti_mqtt.protocol import frames
from hepti_mqtt.protocol.keys import FrameKey
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import device_programs, handover_program
from hepti_mqtt.transport.sockets import mesh_possible

pytestmark = pytest.mark.skipif(not mesh_possible(), reason="the mesh needs Linux")
compiled_only = pytest.mark.skipif(not JIT, reason="nothing is compiled")
IN_LINE = [("bert-embedding", "megatron"), ("tiny-gpt2", "decoder"), ("tiny-qwen3", "megatron")]
LEARNING = 2  # runs: Python checks frames in the first one, and knows their exchanges in the second


def programs(family: str, name: str, devices: int = 2, lengths: tuple[int, ...] = (5,)):
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


def stop_everywhere(pools) -> None:
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

    def disturb(device) -> None:
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


def hold_little(device, peer: str) -> None:
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
