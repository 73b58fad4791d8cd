"""Graphs that are built without most of their equal layers make the same Programs as whole ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sites import EVERY_FAMILY, plan, request

from hepti_mqtt import models
from hepti_mqtt.lowering import Lowered, Net, SkippedError, roles
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.plan_programs import frame, lowered
from hepti_mqtt.strategies import STRATEGIES, Division

DEEP = {name: replace(s, layers=11) for name, s in EVERY_FAMILY.items() if type(s) is ModelSpec}
OF_ALL_LAYERS = {"pipeline"}  # its table looks at the layer


def methods(spec):
    whole = models.graph(spec, models.largest_shape(spec))
    able = (m for m in STRATEGIES.values() if m.unsupported(whole) is None and m.groups is None)
    return [(m.name, dict(o)) for m in able for o in m.choices(3)]


@pytest.mark.parametrize("family", DEEP)
def test_the_same_programs_as_from_the_whole_graph(family):
    spec = DEEP[family]
    shape, _ = request(spec, (7, 5))
    skipped = models.graph(spec, shape, skip=True)
    assert skipped.skipped.blocks == 3
    assert len(skipped.ops) + skipped.skipped.ops == len(models.graph(spec, shape).ops)
    for method in methods(spec):
        fixed = plan(spec, method, (1.0,) if method[0] == "single" else (3.0, 2.0, 1.0))
        division = Division(models.graph(spec, shape), fixed)
        if (rewrite := STRATEGIES[method[0]].rewrite) is not None:
            division = division._replace(graph=rewrite(division)(division.graph))
        table = STRATEGIES[method[0]].table(division).over(frame(division))
        whole, made = Lowered(division.graph, table, fixed.devices), lowered(spec, fixed, shape)
        assert (made.whole is not whole.whole) == (method[0] not in OF_ALL_LAYERS)
        for device in fixed.devices:
            assert made.program(device) == whole.program(device), method
            assert made.refs(device) == whole.refs(device)
            assert made.sources(device) == frozenset(whole.program(device).sources())
        assert made.repeated == whole.repeated


@pytest.mark.parametrize("family", DEEP)
def test_weights_by_tiles_are_those_of_the_program(family):
    spec = DEEP[family]
    shape, _ = request(spec, (7, 5))
    for method in methods(spec):
        fixed = plan(spec, method, (1.0,) if method[0] == "single" else (3.0, 2.0, 1.0))
        made = lowered(spec, fixed, shape)
        for device in fixed.devices:
            assert set(made.refs(device)) == set(made.program(device).weights())


def rows(net, layers, inner):
    """Add layers that each double their input, one of them of another kind."""
    x = net.input("x", (4, 8), "i32")
    for layer in net.layers(layers):
        net.block()
        y = net.activation(f"{layer}.a", x, roles.MLP_HIDDEN, "relu" if layer == inner else "gelu")
        x = net.add(f"{layer}.x", x, y, roles.AFTER_MLP)
    net.block()
    net.rows("out", x, roles.TASK)
    return net.graph()


@pytest.mark.parametrize("layers", range(1, 12))
def test_few_layers_are_all_there(layers):
    short, whole = rows(Net(skip=True), layers, None), rows(Net(), layers, None)
    assert bool(short.skipped.blocks) == (layers > 8)
    kept = {op.name: op.index for op in short.ops}
    assert kept == {op.name: op.index for op in whole.ops if op.name in kept}
    assert short.like(whole) == (layers > 8)


def test_a_layer_of_its_own_kind_among_those_left_out_needs_the_whole_graph():
    short, whole = rows(Net(skip=True), 12, 6), rows(Net(), 12, 6)
    assert "6.a" not in short.by_name
    assert not short.like(whole)


def test_layers_that_are_not_worked_out_alike_need_the_whole_graph():
    spec = DEEP["bert-embedding"]
    shape, _ = request(spec, (9,))
    short, whole = models.graph(spec, shape, skip=True), models.graph(spec, models.largest_shape(spec))
    fixed = plan(spec, ("pipeline", {}), (1.0, 1.0))
    division = Division(short, fixed)
    table = replace(STRATEGIES["pipeline"].table(division).over(frame(division)), uniform=True)
    with pytest.raises(SkippedError):
        Lowered(short, table, fixed.devices, whole)
