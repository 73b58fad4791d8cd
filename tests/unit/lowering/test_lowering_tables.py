"""Any table gives the single-device result, or an error with the tensor; equal layers are lowered once."""

from __future__ import annotations

import gc
import random
import tracemalloc
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from program_builder import validate
from sites import EVERY_FAMILY, FAMILIES, TOLERANCE, plan, request, tensors
from together import run_programs

from hepti_mqtt import models
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan, apportion
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.graph import GraphBuilder
from hepti_mqtt.lowering.layouts import PLANNER_INDEX, Rule, Table, on_device, split_along
from hepti_mqtt.lowering.lower import Lowered
from hepti_mqtt.lowering.ops import LayerNorm, Linear, Moments, Op, OpaqueOp
from hepti_mqtt.lowering.regions import span
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import device_program as program_of
from hepti_mqtt.strategies.plan_programs import lower_plan as lowered_of
from hepti_mqtt.strategies.plan_programs import make_plan

FRAME = {roles.INPUT: on_device(PLANNER_INDEX), roles.STEM: on_device(0), roles.TASK: on_device(0)}


@dataclass(frozen=True)
class ByName(Table):
    """A table of tensors by name instead of by role."""

    names: dict[str, Rule] = field(default_factory=dict)

    def rule(self, op: Op) -> Rule | None:
        """Return the layout of an op."""
        return self.names.get(op.name) or self.optional_rules.get(op.role)


def cut(rng: random.Random, op: Op, devices: int) -> tuple[int, list[tuple[tuple[int, int], ...]]]:
    """Return a dimension of the op that can be cut, and parts of it, some perhaps empty."""
    dims = [d for d in range(len(op.space)) if not (isinstance(op, Moments) and d == 1)]
    dim = rng.choice(dims)
    weights = [rng.choice([0.0, 0.01, 1, 1, 2]) for _ in range(devices)]
    if not any(weights):
        weights[0] = 1.0
    unit = min(op.granularity()[dim], op.space[dim])
    ranges = apportion(-(-op.space[dim] // unit), weights)
    return dim, [span(a * unit, min(z * unit, op.space[dim])) for a, z in ranges]


def layout(rng: random.Random, op: Op, devices: int) -> Rule:
    """Return any device, parts along any dimension, parts that overlap, partial sums with or without who adds them."""
    dim, parts = cut(rng, op, devices)
    rows = [span(*r) for r in apportion(op.space[0], [rng.choice([0.5, 1, 2]) for _ in range(devices)])]
    kind = rng.choice(["one", "parts", "parts", "overlap", "reduced"])
    if kind == "one":
        return on_device(rng.randrange(devices))
    if kind == "overlap" and dim < op.rank:
        wide = [span(max(p[0][0] - 3, 0), p[0][1]) if p and op.granularity()[dim] == 1 else p for p in parts]
        return split_along(wide, dim)
    if kind == "reduced" and dim >= op.rank and isinstance(op, Linear):
        sums = split_along(rows, 0)
        return lambda op: split_along(parts, dim)(op) + [piece._replace(relay=True) for piece in sums(op)]
    return split_along(parts, dim)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_tables_give_the_result_of_one_device(family):
    spec, rng = FAMILIES[family], random.Random(f"tables of {family}")
    held = tensors(spec)
    for turn in range(6):
        shape, inputs = request(spec, (5, 7, 3) if turn % 2 else (11,), "task" if turn % 3 else "hidden")
        graph = models.graph(spec, shape)
        hidden, output = models.reference(spec, held, inputs, shape)
        devices = rng.randint(1, 5)
        names = {
            op.name: layout(rng, op, devices)
            for op in graph.ops
            if op.role not in FRAME and rng.random() < 0.6 and not isinstance(op, OpaqueOp | LayerNorm)
        }
        compact = Lowered(graph, ByName({}, FRAME, False, names), [f"d{i}" for i in range(devices)])
        parts = {name: compact.full_program(name) for name in compact.names}
        for program in parts.values():
            validate(program)
        runs = [run_programs(parts, held, inputs, seed) for seed in range(2)]
        assert runs[0].tobytes() == runs[1].tobytes(), "the bits depend on the order of arrival"
        np.testing.assert_allclose(runs[0], hidden if shape.want == "hidden" else output, atol=TOLERANCE)


def lowered(lines: dict[str, Rule], devices: int = 2) -> Lowered:
    graph = models.graph(FAMILIES["bert-embedding"], TokenBatch((8,)))
    return Lowered(graph, Table(lines).with_defaults(Table(optional_rules=FRAME)), [f"d{i}" for i in range(devices)])


DEEP = {name: replace(s, layers=7) for name, s in EVERY_FAMILY.items() if type(s) is ModelSpec}
OF_ALL_LAYERS = {"pipeline"}  # its table looks at the layer


def methods(spec):
    whole = models.graph(spec, models.largest_shape(spec))
    able = (m for m in STRATEGIES.values() if m.why_unsupported(whole) is None and m.groups is None)
    return [(m.name, dict(o)) for m in able for o in m.variants_for(3)]


@pytest.mark.parametrize("family", DEEP)
def test_the_same_programs_as_with_every_layer_worked_out(family):
    """Each family under every third method, with weights and peers by tiles alone."""
    spec = DEEP[family]
    shape, _ = request(spec, (7, 5))
    for method in methods(spec)[list(DEEP).index(family) % 3 :: 3]:
        fixed = plan(spec, method, (1.0,) if method[0] == "single" else (3.0, 2.0, 1.0))
        compact = lowered_of(spec, fixed, shape)
        whole = Lowered(compact.full_graph, replace(compact.table, uniform=False), fixed.devices)
        assert (compact.repeat is None) == (method[0] in OF_ALL_LAYERS or compact.full_graph.repeat is None)
        for device in fixed.devices:
            assert compact.full_program(device) == whole.full_program(device), method
            assert set(compact.weight_refs(device)) == set(whole.weight_refs(device))
            assert set(compact.weight_refs(device)) == set(compact.full_program(device).weights())
            assert compact.senders(device) == frozenset(whole.full_program(device).sources())


SPEC = spec_of_kind("tiny-bert")
WAYS = (("row", {"variant": "kv"}), ("row", {"variant": "heads"}), ("megatron", {"reduce": "direct"}))
PLANS = 60


def lower_many(rng: random.Random) -> None:
    """Build the Programs of one device under plans with new shares."""
    for number in range(PLANS):
        names = ("a", "b", "c")[: rng.choice((2, 3))]
        name, options = rng.choice(WAYS)
        weights = tuple(rng.uniform(0.5, 2) for _ in names)
        plan = make_plan(SPEC, Plan("m", PlanVersion(1, number), name, names, names[0]), name, options, weights)
        for length in (5, 17, 40):
            program_of(SPEC, plan, TokenBatch((length,)), "a")


@pytest.mark.nightly
def test_a_device_keeps_as_much_of_many_plans_as_of_few() -> None:
    rng = random.Random(1)
    tracemalloc.start()
    try:
        held = []
        for _ in range(3):
            lower_many(rng)
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0] / 2**20)
    finally:
        tracemalloc.stop()
    assert held[2] - held[0] < 0.7, held


WRONG = {
    "nobody": ({roles.AFTER_MLP: split_along([span(0, 4), ()], 0)}, r"2\.x.*d0"),
    "overlap": ({roles.MLP_DOWN: split_along([span(0, 24), span(16, 48)], 2)}, r"2\.down"),
    "dimension": ({roles.AFTER_MLP: split_along([span(0, 16), span(16, 32)], 2)}, r"0\.x.*2"),
    "beyond": ({roles.AFTER_MLP: split_along([span(0, 4), span(4, 9)], 0)}, r"0\.x.*d1"),
    "device": ({roles.AFTER_MLP: on_device(5)}, r"0\.x.*5"),
    "inside a head": ({roles.ATTENTION: split_along([span(0, 12), span(12, 32)], 1)}, r"0\.attention.*d0"),
    "role": ({roles.BEFORE_MLP: on_device(0)}, "before_mlp"),
}


@pytest.mark.parametrize(("lines", "named"), WRONG.values(), ids=WRONG)
def test_a_table_that_is_wrong_is_refused_with_tensor_and_device(lines, named):
    with pytest.raises(ValueError, match=named):
        lowered(lines)


@pytest.mark.parametrize("rows", [(2, 1), (1, 1)])
def test_rows_that_do_not_ascend_are_refused(rows):
    net = GraphBuilder()
    x = net.input("x", (4, 2), "f32")
    with pytest.raises(ValueError, match="ascend"):
        net.rows("rows", x, roles.TASK, rows)
