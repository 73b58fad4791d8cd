"""Narrower wire formats: any strategy, half or a quarter of the bytes, errors that are reported and bounded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sites import FAMILIES, METHODS, always, plan, request, served, tensors
from swarm import Swarm

from hepti_mqtt import models
from hepti_mqtt.cost.simulator import Naming, sent_bytes
from hepti_mqtt.plan_programs import program, programs
from hepti_mqtt.program import Recv, Send, check
from hepti_mqtt.strategies import STRATEGIES

SPLIT = [m for m in METHODS if STRATEGIES[m[0]].most_devices is None]
IDS = ["-".join([m[0], *m[1].values()]) for m in SPLIT]
# The values are of the order of 1 to 5; f16 keeps 11 bits, i8 7 bits of the largest in a row.
BOUNDS = {"f16": 0.02, "i8": 0.6}


@pytest.mark.parametrize("wire", BOUNDS)
@pytest.mark.parametrize("method", SPLIT, ids=IDS)
@pytest.mark.parametrize("family", ["bert-embedding", "vit-classifier"])
def test_stays_near_the_reference(family, method, wire):
    spec = FAMILIES[family]
    fixed = replace(plan(spec, method, (1.0, 2.0, 1.0)), wire=wire)
    swarm = Swarm(spec, tensors(spec), {f"d{i}": (1e9, 1 << 30) for i in range(3)}, decider=always(fixed))
    shape, inputs = request(spec, served(spec, (13, 4)), "hidden")
    hidden, _ = models.reference(spec, tensors(spec), inputs, shape)
    swarm.submit("r", shape, inputs)
    swarm.run(30, until=lambda: bool(swarm.answers or swarm.errors))
    got, stats = swarm.answers["r"][0]
    error = np.abs(got - hidden).max()
    assert 0 < error < BOUNDS[wire]
    counted = sum(s.dispatch_bytes + sum(s.sent_bytes.values()) for s in stats)
    assert counted == sent_bytes(Naming("home", "m"), spec, shape, programs(spec, fixed, shape))


@pytest.mark.parametrize("method", SPLIT, ids=IDS)
def test_every_exchange_is_narrow_and_f32_changes_nothing(method):
    spec = FAMILIES["bert-embedding"]
    fixed = plan(spec, method, (1.0, 1.0))
    shape, _ = request(spec, (9,))
    whole = program(spec, fixed, shape, "d0")
    for wire, size in (("f16", 2), ("i8", 1)):
        narrowed = program(spec, replace(fixed, wire=wire), shape, "d0")
        check(narrowed)
        assert len(narrowed.sources()) == len(whole.sources())
        for op in narrowed.ops:
            devices = "planner" not in (getattr(op, "source", None), *getattr(op, "to", ()))
            if isinstance(op, Send | Recv) and devices and not op.exact:
                assert narrowed.slots[op.slot].dtype == wire
                assert narrowed.slots[op.slot].nbytes <= size * (np.prod(narrowed.slots[op.slot].shape))
