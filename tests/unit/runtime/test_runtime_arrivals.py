"""Frames of cached exchanges take a shorter path to their slots, with the same effects."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sites import FAMILIES, everyone, request, tensors
from swarm import MODEL, Swarm, plan_of

from hepti_mqtt.protocol.frames import ExchangeCache, Frame, decode, encode
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.worker.interface import FrameIn

SPEC = FAMILIES["bert-embedding"]
TENSORS = tensors(SPEC)
SHAPE, INPUTS = request(SPEC, (9, 4))


def site(seed: int = 0, **network) -> Swarm:
    devices = {f"d{i}": (1e9 * (i + 1), 1 << 30) for i in range(3)}
    decider = everyone(("row", {"variant": "kv"}))
    swarm = Swarm(SPEC, TENSORS, devices, decider=decider, pins=Pins(route="mesh"), seed=seed, **network)
    swarm.run(60, until=lambda: plan_of(swarm) is not None)
    return swarm


def exchanges(swarm: Swarm) -> list[Frame]:
    """Return what d0 awaits of d1, as frames of a run, each with an array of the shape that d0 expects."""
    version = plan_of(swarm).version
    template = swarm.hosts["d0"].session.plans.get(MODEL, version).programs[SHAPE].template
    frames = []
    for key, slot in template.slot_of_exchange.items():
        if key[2] == "d1":
            spec = template.program.slots[slot]
            body = np.zeros(spec.shape, np.float32)
            frames.append(
                Frame("tensor", MODEL, version, 2, 0, key[0], "d1", key[1], spec.dtype, spec.shape, 0, (), body)
            )
    return frames


def other_shape(frame: Frame) -> Frame:
    return replace(frame, shape=(2, 2), body=np.zeros((2, 2), np.float32))


CASES = {
    "as expected": lambda f: [f],
    "twice": lambda f: [f, f],
    "twice with other values": lambda f: [f, replace(f, body=f.body + 1)],
    "another shape": lambda f: [other_shape(f)],
    "after one of another shape": lambda f: [other_shape(f), f],
    "of no exchange": lambda f: [replace(f, node=9999)],
    "of another device": lambda f: [replace(f, source="d9")],
    "of a run that has yet to come": lambda f: [replace(f, run_id=77)],
    "of a run that is over": lambda f: [replace(f, run_id=1)],
    "of another plan version": lambda f: [replace(f, plan_version=f.plan_version._replace(number=9999))],
    "of a model that is not here": lambda f: [replace(f, model="other")],
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_frame_has_the_effects_that_it_has_when_it_is_read(case) -> None:
    outcomes = []
    for by_cache in (False, True):
        swarm = site()
        swarm.submit("first", SHAPE, INPUTS)
        swarm.run(60, until=lambda swarm=swarm: "first" in swarm.answers)
        session = swarm.hosts["d0"].session
        before, out = session.counters.copy(), []
        swarm.submit("second", SHAPE, INPUTS)
        swarm.run(60, until=lambda session=session: not session.runs.idle)
        assert not session.runs.idle
        for frame in case(exchanges(swarm)[0]):
            payload, remembered = memoryview(encode(frame)), ExchangeCache()
            remembered.learn("d1", "topic", payload, decode(payload))
            event = remembered.arrival("d1", "topic", payload) if by_cache else FrameIn(decode(payload))
            assert event is not None
            out += session.handle(event, swarm.now)
            session.check()
        session.counters.subtract(before)
        outcomes.append((out, +session.counters, session.runs.idle, session.runs.early.nbytes))
    assert outcomes[0] == outcomes[1]
