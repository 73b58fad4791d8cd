"""Narrow numbers on the wire cost few ops of their own, and the bits are those of an op for each conversion."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from programs_run import run_programs
from sites import EVERY_FAMILY, METHODS, plan, request, tensors

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.passes import joined, narrow
from hepti_mqtt.planner.accuracy import _Together, _Weights
from hepti_mqtt.program import check
from hepti_mqtt.strategies import STRATEGIES, lowered, programs

SHARES = (1.0, 2.0, 1.0)
SPLIT = [m for m in METHODS if STRATEGIES[m[0]].most_devices is None]
MAPS = [(name, {}) for name in ("map_rows", "coedge", "fused_tiles")]
DECODER = [(s.name, dict(o)) for s in STRATEGIES.values() if s.name == "decoder" for o in s.options]
CASES = [
    *(("bert-embedding", method) for method in SPLIT),
    *(("tiny-gpt2", method) for method in DECODER),
    *(("tiny-resnet", method) for method in MAPS),
]
IDS = ["-".join([kind, name, *options.values()]) for kind, (name, options) in CASES]


def spec_of(kind):
    return EVERY_FAMILY.get(kind) or spec_of_kind(kind)


def separate(spec, fixed, shape):
    """Return the Programs with an op for each conversion."""
    made = lowered(spec, fixed, shape)
    return {device: narrow(joined(made.program(device)), fixed.wire) for device in fixed.runs[0].devices}


def by_references(parts, inputs, held):
    """Return the answer by the kernels' NumPy references."""
    together = _Together(parts, inputs, _Weights(held))
    while together.advance():
        pass
    return together.answer()


@pytest.mark.parametrize("wire", ["f16", "i8"])
@pytest.mark.parametrize(("kind", "method"), CASES, ids=IDS)
def test_the_bits_are_those_of_an_op_for_each_conversion(kind, method, wire):
    spec = spec_of(kind)
    held = tensors(spec)
    fixed = replace(plan(spec, method, SHARES), wire=wire)
    shape, inputs = request(spec, (13,) if kind != "tiny-resnet" else (1,))
    before, after = separate(spec, fixed, shape), programs(spec, fixed, shape)
    for part in after.values():
        check(part)
    assert sum(len(part.ops) for part in after.values()) <= sum(len(part.ops) for part in before.values())
    runs = [by_references] if any(part.states() for part in after.values()) else [by_references, executed]
    for run in runs:
        np.testing.assert_array_equal(run(after, inputs, held), run(before, inputs, held))


def executed(parts, inputs, held):
    return run_programs(parts, held, inputs)
