"""Narrow numbers on the wire cost few ops of their own, and the bits are those of an op for each conversion."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from programs_run import run_programs
from sites import EVERY_FAMILY, METHODS, plan, request, tensors

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.cost.explain import explain
from hepti_mqtt.cost.memory import live_bytes
from hepti_mqtt.cost.profiles import Curve, DeviceProfile
from hepti_mqtt.kernels import works
from hepti_mqtt.lowering.passes import fuse, joined, narrow
from hepti_mqtt.plan_programs import lowered, programs
from hepti_mqtt.planner.accuracy import _Together, _Weights
from hepti_mqtt.program import Builder, Compute, Recv, check
from hepti_mqtt.strategies import STRATEGIES

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


def ops_of_a_layer(spec, fixed, wire):
    """Return the most ops that a device runs for an inner layer."""
    shape, _ = request(spec, (16,))
    parts = programs(spec, replace(fixed, wire=wire), shape)
    return max(sum(op.layer == 1 and not isinstance(op, Recv) for op in part.ops) for part in parts.values())


# {method: (ops of f32, how many more f16 has, and i8)}: relays of a ring narrow i8 anew, since its scales may differ.
MORE = {
    ("row", "heads"): (21, 0, 0),
    ("row", "kv"): (13, 0, 0),
    ("megatron", "direct"): (19, 0, 0),
    ("megatron", "ring"): (27, 0, 4),
    ("galaxy", "direct"): (28, 0, 0),
    ("galaxy", "ring"): (38, 0, 4),
}


@pytest.mark.parametrize(("name", "variant"), MORE)
def test_ops_of_a_layer_and_how_many_more_a_narrow_wire_has(name, variant):
    spec = EVERY_FAMILY["bert-embedding"]
    options = next(o for n, o in METHODS if n == name and variant in o.values())
    fixed = plan(spec, (name, options), (1.0,) * 4)
    f32, f16, i8 = (ops_of_a_layer(spec, fixed, wire) for wire in ("f32", "f16", "i8"))
    assert (f32, f16 - f32, i8 - f32) == MORE[name, variant]


@pytest.mark.parametrize("wire", ["f16", "i8"])
def test_parts_that_are_only_put_together_are_widened_in_their_places(wire):
    spec = EVERY_FAMILY["bert-embedding"]
    fixed = replace(plan(spec, ("row", {"variant": "heads"}), SHARES), wire=wire)
    shape, _ = request(spec, (12,))
    part = programs(spec, fixed, shape)["d0"]
    attention = [op for op in part.ops if isinstance(op, Compute) and op.label == "assemble" and op.layer == 1]
    dtypes = [sorted(part.slots[slot].dtype for slot in op.reads) for op in attention]
    assert sorted([wire, wire, "f32"]) in dtypes


def test_an_op_waits_for_no_more_than_it_did():
    b = Builder("a")
    early, late = (b.recv((2, 3), "b", n, dtype="f16") for n in range(2))
    wide = [b.compute("from_f16", (s,), (2, 3)) for s in (early, late)]
    both = b.compute("add", wide, (2, 3), bias=False)
    one = b.compute("sum", wide[:1], (2, 3), activation=None)
    b.send(both, ("c",), 2)
    b.send(one, ("c",), 3)
    made = fuse(b.build())
    check(made)
    # `sum` may run before `late` is there, so `add` must not be the op that widens what `sum` reads.
    labels = [op.label for op in made.ops if isinstance(op, Compute)]
    assert labels == ["from_f16", "from_f16+add", "sum"]


def test_an_op_of_several_kernels_costs_what_they_cost_and_is_called_by_their_names():
    spec = EVERY_FAMILY["bert-embedding"]
    fixed = replace(plan(spec, ("row", {"variant": "heads"}), SHARES), wire="f16")
    shape, _ = request(spec, (12,))
    part = programs(spec, fixed, shape)["d0"]
    op = next(op for op in part.ops if isinstance(op, Compute) and op.label == "linear+to_f16")
    assert op.weights == op.steps[0].weights
    assert any("linear+to_f16 " in line for line in explain(part))
    profile = DeviceProfile("d0", (Curve(1 << 10, 1 << 10, ((8, 1e-3), (16, 2e-3))),), 1e9, 1e9, op_overhead_s=1e-4)
    alone = [profile.seconds(*works(step, part.slots)) for step in op.steps]
    assert profile.seconds(*works(op, part.slots)) == pytest.approx(sum(alone) - 1e-4, rel=1e-9)
    wrong = replace(part, ops=tuple(o._replace(writes=o.writes[:1]) if o is op else o for o in part.ops))
    with pytest.raises(ValueError, match="than its parts"):
        check(wrong)


@pytest.mark.parametrize("wire", ["f16", "i8"])
def test_devices_need_less_memory_than_with_separate_ops_or_that_of_a_frame_more(wire):
    spec = EVERY_FAMILY["bert-embedding"]
    for method in SPLIT:
        fixed = replace(plan(spec, method, SHARES), wire=wire)
        shape, _ = request(spec, (13,))
        before, after = separate(spec, fixed, shape), programs(spec, fixed, shape)
        ratios = [live_bytes(after[d]) / live_bytes(before[d]) for d in after]
        assert max(ratios) < 1.07, method  # what came stays as it came until the op that reads it
        assert sum(ratios) / len(ratios) < 1.03, method


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
