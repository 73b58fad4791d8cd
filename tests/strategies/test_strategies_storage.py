"""Narrower weights: any strategy, less memory, errors that are reported and bounded, and f32 as it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sites import FAMILIES, METHODS, always, plan, request, tensors
from swarm import Swarm

from hepti_mqtt import models
from hepti_mqtt.kernels import weight_bytes
from hepti_mqtt.program import check
from hepti_mqtt.strategies import STRATEGIES, program, programs, resident_weights

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
    shape, inputs = request(spec, (13, 4), "hidden")
    hidden, _ = models.reference(spec, tensors(spec), inputs, shape)
    swarm.submit("r", shape, inputs)
    swarm.run(30, until=lambda: bool(swarm.answers or swarm.errors))
    got, _ = swarm.answers["r"][0]
    assert 0 < np.abs(got - hidden).max() < BOUNDS[storage]


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_only_how_matrices_of_the_layers_are_kept_differs(method):
    spec = FAMILIES["bert-embedding"]
    devices = 1 if STRATEGIES[method[0]].most_devices == 1 else 2
    fixed = plan(spec, method, (1.0,) * devices)
    shape, _ = request(spec, (9,))
    for device in fixed.devices:
        whole = program(spec, fixed, shape, device)
        for storage in BOUNDS:
            kept = program(spec, replace(fixed, storage=storage), shape, device)
            check(kept)
            assert [replace(op, weights=()) if hasattr(op, "weights") else op for op in kept.ops] == [
                replace(op, weights=()) if hasattr(op, "weights") else op for op in whole.ops
            ]
            for before, after in zip(whole.weights(), kept.weights(), strict=True):
                layer = before.layout == "packed" and before.tensor.startswith("layers.")
                assert after == before._replace(storage=storage if layer else "f32")


def test_narrow_weights_need_less_memory():
    spec = FAMILIES["bert-embedding"]
    fixed = plan(spec, ("single", {}), (1.0,))

    def held(storage):
        refs = resident_weights(spec, replace(fixed, storage=storage), "d0")
        return sum(weight_bytes(r) for r in refs if r.layout == "packed" and r.tensor.startswith("layers."))

    assert held("f16") < 0.75 * held("f32")
    assert held("w8a8") < 0.5 * held("f32")
    assert set(programs(spec, fixed, request(spec, (3,))[0])) == {"d0"}
