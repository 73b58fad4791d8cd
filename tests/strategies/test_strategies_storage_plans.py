"""Plans that keep weights narrow: any strategy in a running site stays near the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sites import FAMILIES, METHODS, always, plan, request, served, tensors
from swarm import Swarm

from hepti_mqtt import models
from hepti_mqtt.strategies import STRATEGIES

IDS = ["-".join([m[0], *m[1].values()]) for m in METHODS]
# The values are of the order of 1 to 5; f16 keeps 11 bits of each weight, int8 7 bits of the largest in its column.
BOUNDS = {"f16": 0.02, "w8a32": 0.3, "w8a8": 0.6}


@pytest.mark.parametrize("storage", BOUNDS)
@pytest.mark.parametrize("method", METHODS, ids=IDS)
@pytest.mark.parametrize("family", ["bert-embedding", "vit-classifier"])
def test_stays_near_the_reference(family, method, storage):
    spec = FAMILIES[family]
    devices = 1 if STRATEGIES[method[0]].most_devices == 1 else 3
    fixed = replace(plan(spec, method, (1.0, 2.0, 1.0)[:devices]), storage=storage)
    swarm = Swarm(spec, tensors(spec), {f"d{i}": (1e9, 1 << 30) for i in range(devices)}, decider=always(fixed))
    shape, inputs = request(spec, served(spec, (13, 4)), "hidden")
    hidden, _ = models.reference(spec, tensors(spec), inputs, shape)
    swarm.submit("r", shape, inputs)
    swarm.run(30, until=lambda: bool(swarm.answers or swarm.errors))
    got, _ = swarm.answers["r"][0]
    assert 0 < np.abs(got - hidden).max() < BOUNDS[storage]
