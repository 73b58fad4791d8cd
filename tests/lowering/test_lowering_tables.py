"""Any table gives the single-device result, or an error that says what is wrong with it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from programs_run import run_programs
from sites import FAMILIES, METHODS, TOLERANCE, plan, request, tensors

from hepti_mqtt import models
from hepti_mqtt.lowering import PLANNER_PLACE, Lowered, Piece, Rule, Table, box, on, roles, span, split
from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.layouts import pieces_of
from hepti_mqtt.lowering.ops import Attention, LayerNorm, Linear, Moments, Op, Whole
from hepti_mqtt.models.shapes import PackedTokens
from hepti_mqtt.plan import apportion
from hepti_mqtt.plan_programs import frame
from hepti_mqtt.plan_programs import lowered as lowered_of
from hepti_mqtt.program import check
from hepti_mqtt.strategies import STRATEGIES, Division

FRAME = {roles.INPUT: on(PLANNER_PLACE), roles.STEM: on(0), roles.TASK: on(0)}


@dataclass(frozen=True)
class ByName(Table):
    """A table of tensors by name instead of by role."""

    names: dict[str, Rule] = field(default_factory=dict)

    def rule(self, op: Op) -> Rule | None:
        """Return the layout of an op."""
        return self.names.get(op.name) or self.where_present.get(op.role)


def cut(rng: random.Random, op: Op, devices: int) -> tuple[int, list[tuple[tuple[int, int], ...]]]:
    """Return a dimension of the op that can be cut, and parts of it, some perhaps empty."""
    dims = [d for d in range(len(op.space)) if not (isinstance(op, Moments) and d == 1)]
    dim = rng.choice(dims)
    weights = [rng.choice([0.0, 0.01, 1, 1, 2]) for _ in range(devices)]
    if not any(weights):
        weights[0] = 1.0
    unit = min(op.grain()[dim], op.space[dim])
    ranges = apportion(-(-op.space[dim] // unit), weights)
    return dim, [span(a * unit, min(z * unit, op.space[dim])) for a, z in ranges]


def layout(rng: random.Random, op: Op, devices: int) -> Rule:
    """Return any device, parts along any dimension, parts that overlap, partial sums with or without who adds them."""
    dim, parts = cut(rng, op, devices)
    rows = [span(*r) for r in apportion(op.space[0], [rng.choice([0.5, 1, 2]) for _ in range(devices)])]
    kind = rng.choice(["one", "parts", "parts", "overlap", "reduced"])
    if kind == "one":
        return on(rng.randrange(devices))
    if kind == "overlap" and dim < op.rank:
        wide = [span(max(p[0][0] - 3, 0), p[0][1]) if p and op.grain()[dim] == 1 else p for p in parts]
        return split(wide, dim)
    if kind == "reduced" and dim >= op.rank and isinstance(op, Linear):
        return lambda op: split(parts, dim)(op) + split(rows, 0, relay=True)(op)
    return split(parts, dim)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_tables_give_the_result_of_one_device(family):
    spec, rng = FAMILIES[family], random.Random(f"tables of {family}")
    held = tensors(spec)
    for turn in range(14):
        shape, inputs = request(spec, (5, 7, 3) if turn % 2 else (11,), "task" if turn % 3 else "hidden")
        graph = models.graph(spec, shape)
        hidden, output = models.reference(spec, held, inputs, shape)
        devices = rng.randint(1, 5)
        names = {
            op.name: layout(rng, op, devices)
            for op in graph.ops
            if op.role not in FRAME and rng.random() < 0.6 and not isinstance(op, Whole | LayerNorm)
        }
        made = Lowered(graph, ByName({}, FRAME, False, names), [f"d{i}" for i in range(devices)])
        parts = {name: made.program(name) for name in made.names}
        for program in parts.values():
            check(program)
        runs = [run_programs(parts, held, inputs, seed) for seed in range(2)]
        assert runs[0].tobytes() == runs[1].tobytes(), "the bits depend on the order of arrival"
        np.testing.assert_allclose(runs[0], hidden if shape.want == "hidden" else output, atol=TOLERANCE)


def lowered(lines: dict[str, Rule], devices: int = 2) -> Lowered:
    graph = models.graph(FAMILIES["bert-embedding"], PackedTokens((8,)))
    return Lowered(graph, Table(lines).over(Table(where_present=FRAME)), [f"d{i}" for i in range(devices)])


def test_a_region_that_nobody_holds_is_named():
    with pytest.raises(ValueError, match=r"2\.x: no device holds \[4:8, 0:32\], which d0 needs"):
        lowered({roles.AFTER_MLP: split([span(0, 4), ()], 0)})


def test_partial_sums_that_overlap_are_refused():
    rule = split([span(0, 24), span(16, 48)], 2)
    with pytest.raises(ValueError, match=r"2\.down: partial results that .* needs of .* overlap"):
        lowered({roles.MLP_DOWN: rule})


def test_a_dimension_that_a_tensor_does_not_have_is_named():
    with pytest.raises(ValueError, match=r"0\.x has no dimension 2: its space is \[0:8, 0:32\]"):
        lowered({roles.AFTER_MLP: split([span(0, 16), span(16, 32)], 2)})


def test_a_region_beyond_the_tensor_is_named():
    with pytest.raises(ValueError, match=r"0\.x: d1 is to hold \[4:9, 0:32\], its space is"):
        lowered({roles.AFTER_MLP: split([span(0, 4), span(4, 9)], 0)})


def test_a_device_that_there_is_not_is_named():
    with pytest.raises(ValueError, match=r"0\.x: device 5 is none of the 2"):
        lowered({roles.AFTER_MLP: on(5)})


def test_a_share_inside_a_head_is_refused():
    with pytest.raises(ValueError, match=r"0\.attention: d0 is to hold .*cut in units of 8 only"):
        lowered({roles.ATTENTION: split([span(0, 12), span(12, 32)], 1)})


def test_a_role_that_no_tensor_has_is_an_error():
    with pytest.raises(ValueError, match="no tensor has the role 'before_mlp'"):
        lowered({roles.BEFORE_MLP: on(0)})


def test_empty_pieces_are_none():
    graph = models.graph(FAMILIES["bert-embedding"], PackedTokens((8,)))
    x = graph.first(roles.AFTER_MLP)
    assert pieces_of(x, split([span(0, 8), ()], 0)(x), ("d0", "d1")) == (Piece(0, box(x, {})),)
    assert isinstance(graph.first(roles.ATTENTION), Attention)


def fresh_programs(spec, fixed, shape):
    """Return Programs that come from no cache."""
    table = STRATEGIES[fixed.strategy].table(Division(models.graph(spec, shape), fixed)).over(frame_of(fixed))
    made = Lowered(models.graph(spec, shape), table, fixed.devices)
    return {device: made.program(device) for device in fixed.devices}


def frame_of(fixed):
    return frame(Division(models.graph(FAMILIES["bert-embedding"], PackedTokens((8,))), fixed))


@pytest.mark.parametrize("method", sorted({name for name, _ in METHODS if STRATEGIES[name].groups is None}))
@pytest.mark.parametrize("family", ["bert-embedding", "vit-classifier"])
def test_equal_layers_worked_out_once_are_what_they_are_one_by_one(method, family, monkeypatch):
    spec = replace(FAMILIES[family], layers=9)
    shape, _ = request(spec, (4, 3))
    devices = 1 if STRATEGIES[method].most_devices == 1 else 3
    fixed = plan(spec, (method, STRATEGIES[method].options[0]), (1.0, 2.0, 1.0)[:devices])
    quick = fresh_programs(spec, fixed, shape)
    refs = {d: lowered_of(spec, fixed, shape).refs(d) for d in fixed.devices}
    models.graph.cache_clear()  # what has been made knows its run
    monkeypatch.setattr(Graph, "run", None)
    assert models.graph(spec, shape).run is None
    slow = fresh_programs(spec, fixed, shape)
    for device in fixed.devices:
        assert quick[device].ops == slow[device].ops
        assert quick[device].slots == slow[device].slots
        assert set(refs[device]) == set(slow[device].weights())
