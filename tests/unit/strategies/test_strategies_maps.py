"""Methods for CNNs: the result of one device whatever the shares, cuts, and rows that others wait for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from nets import VGG, divided, net, run, tensors
from nets_agree import BAR, METHODS, SHARES, SMALL, Net, variants
from sites import plan
from sites import tensors as seeded
from small_cnns import cnn, conv, pool, relu

from hepti_mqtt import models
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.core.ids import PLANNER
from hepti_mqtt.core.program import Compute, Recv
from hepti_mqtt.cost.explain import WorkFactor, plan_work_factor, work_factor
from hepti_mqtt.lowering import roles
from hepti_mqtt.models.cnn.builder import NodeBuilder
from hepti_mqtt.shares import DeviceResources
from hepti_mqtt.shares.maps import after_cut, execution_units
from hepti_mqtt.strategies import STRATEGIES

STRIDES = net(23, [("stride", 4, 7), ("conv", 4, 1), ("conv", 4, 5), "residual", ("stride", 6, 3), ("conv", 5, 3)])


@pytest.mark.parametrize("graph", [VGG, STRIDES], ids=["pools", "strides"])
@pytest.mark.parametrize("method", METHODS)
def test_one_to_five_devices_give_the_result_of_one(graph, method):
    held = tensors(graph)
    alone = run(divided(graph, "single", (1.0,)), held)
    most = np.abs(alone).max()
    each = DeviceResources(1e6, 1e-4, 1e9)
    for options in STRATEGIES[method].variants_for(1, graph):
        for n, head, resources in ((1, 0, ()), (2, 1, [each] * 2), (3, 0, ()), (5, 2, [each] * 5)):
            speeds = (1e6, 3e6, 0.0, 2e6, 1e5)[:n]
            got = run(divided(graph, method, speeds, options, resources, head), held)
            assert np.abs(got - alone).max() < 1e-4 * most, (options, n)


@pytest.mark.parametrize("method", ["map_rows", "fused_tiles"])
def test_tiles_of_several_outputs_are_the_same_ones_wherever_a_map_is_cut(method):
    graph = net(15, [("conv", 32, 3), ("conv", 32, 3), ("conv", 32, 3)])
    held, resources = tensors(graph), [DeviceResources(1e9, 1e-6, 1e9)] * 3
    lowered = divided(graph, method, (1.0, 1.1, 0.9), resources=resources)
    np.testing.assert_array_equal(run(lowered, held), run(divided(graph, "single", (1.0,)), held))


def test_more_devices_than_rows_leave_some_without_work_and_say_who():
    graph = net(6, [("conv", 4, 3), ("conv", 4, 3)], dense=())
    lowered, alone = divided(graph, "map_rows", (1.0,) * 8), divided(graph, "single", (1.0,))
    work = work_factor(lowered, alone)
    assert work.idle == ("d6", "d7")
    assert work.to_dict()["idle"] == ["d6", "d7"]
    np.testing.assert_allclose(run(lowered, tensors(graph)), run(alone, tensors(graph)), rtol=1e-5, atol=1e-5)


def test_bytes_of_halo_and_of_whole_maps_are_counted():
    graph = net(8, [("conv", 4, 3), ("conv", 4, 3)], dense=(10,))
    work = work_factor(divided(graph, "map_rows", (1.0, 1.0)), divided(graph, "single", (1.0,)))
    row = 8 * 4 * 4
    # Of the first map each device sends a row to the other; of the second one four, so that both have all of it.
    assert work.maps == (2 * row, 2 * 4 * row, 0)
    again = work_factor(divided(graph, "fused_tiles", (1.0, 1.0)), divided(graph, "single", (1.0,))).maps
    assert again is not None
    assert (again.halo, again.flops_again > 0) == (0, True)


def test_cuts_are_where_few_bytes_come_together():
    firsts = [next(unit.op.name for unit in execution_units(VGG) if unit.op.name in after_cut(VGG, n)) for n in (1, 2)]
    assert firsts == ["2.map", "6.map"]  # after each pooling
    residual = net(16, [("conv", 4, 3), ("stride", 8, 3), ("conv", 8, 3), ("conv", 8, 3), "residual"])
    block = after_cut(residual, 1)
    assert "1.map" not in block
    assert "4.map" in block or {"2.map", "3.map"} & block == set()  # not inside, where two maps are live


def test_a_map_that_is_larger_than_the_one_before_can_stand_behind_a_cut():
    spec = cnn(32, conv(), relu(), pool(2, 2, 2), conv(4, 2), relu())
    whole = models.graph(spec, models.largest_shape(spec))
    assert [op.space[0] for op in whole.ops if op.role == roles.MAP] == [32, 16, 17]
    cuts = [options["cut"] for options in STRATEGIES["fused_tiles"].variants_for(3, whole)]
    assert cuts == ["none", "1"]
    assert {"n2", "n3", "n4"} & after_cut(whole, 1) == {"n4"}


AHEAD = {"cut": "none", "halo": "ahead"}
NET = net(24, [("conv", 4, 3), ("conv", 4, 3), ("conv", 4, 1), ("stride", 6, 5), ("conv", 6, 3)])


@pytest.mark.parametrize("halo", [{}, {"halo": "ahead"}], ids=["plain", "ahead"])
def test_ends_and_middle_have_the_bits_of_the_whole(halo):
    lines = [("conv", 32, 3), ("conv", 32, 3), ("conv", 40, 1), ("stride", 32, 5), "pool", ("conv", 8, 3)]
    graph = net(56, lines)
    held = tensors(graph)
    got = run(divided(graph, "map_rows", (1.0, 1.3, 0.9), {"cut": "none", **halo}), held)
    np.testing.assert_array_equal(got, run(divided(graph, "single", (1.0,)), held))


def test_a_device_sends_before_it_computes_the_rest_and_that_needs_no_halo():
    lowered = divided(NET, "map_rows", (1.0, 2.0, 1.0), AHEAD)
    program = lowered.full_program("d1")
    first, second = (
        [op for op in program.ops if op.node == lowered.graph.by_name[n].index] for n in ("0.map", "1.map")
    )
    kinds = [op.kernel if isinstance(op, Compute) else type(op).__name__ for op in first]
    assert kinds == ["Recv", "assemble", "conv2d", "Send", "Send", "conv2d", "Recv"]
    heard = {op.slot for op in program.ops if isinstance(op, Recv) and op.source != PLANNER}
    joined = [op.reads for op in second if isinstance(op, Compute) and op.kernel == "assemble"]
    # Rows of the middle that the ends see are taken out of it; they and the halo are what the ends see.
    assert [any(slot in heard for slot in reads) for reads in joined] == [False, True, False]


def work_of(kind: str, method: str, devices: int, **options: str) -> WorkFactor:
    spec = spec_of_kind(kind)
    return plan_work_factor(spec, plan(spec, (method, options), (1.0,) * devices), models.largest_shape(spec))


def test_everyone_adds_up_own_rows_of_a_mean_instead_of_sending_them():
    plain, ahead = (work_of("tiny-resnet", "map_rows", 2, **options).maps for options in ({"cut": "none"}, AHEAD))
    # The halo of its smallest maps is all of them; the last one is 2 x 2 pixels of 32 channels, half of them sent.
    assert plain.gathered - ahead.gathered == 2 * 32 * 4


# Work done over work needed, on four devices. Norms and squeezes cost nothing again where rows are divided; tiles end
# at each map that is squeezed, and compute their halo.
@pytest.mark.parametrize(
    ("kind", "method", "most"),
    [
        *(("tiny-efficientnet", method, 1.02) for method in ("map_rows", "modnn", "coedge", "edgeflow")),
        *(("tiny-convnext", method, 1.02) for method in ("map_rows", "modnn", "coedge", "edgeflow")),
        ("tiny-efficientnet", "fused_tiles", 1.6),
    ],
)
def test_norms_of_pixels_and_means_that_scale_maps_are_divided(kind, method, most):
    assert work_of(kind, method, 4, cut="none").total <= most


def check_answers(spec, shares):
    """Check that methods give the answer of one device, in every variant."""
    model = Net(spec, seeded(spec))
    for name in METHODS:
        for weights in shares:
            for options in variants(model, STRATEGIES[name], len(weights)):
                assert model.off(name, options, weights) < BAR, (name, options, len(weights))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", SMALL)
def test_answers_are_those_of_one_device(kind):
    check_answers(spec_of_kind(kind), SHARES)


def test_residuals_between_dense_layers_are_no_maps():
    stack = NodeBuilder(17)
    stack.conv("conv", 6, 3, 2, 1, function="relu")
    stack.conv("mix", 6, 3, pad=1)
    stack.classifier("up", 24)
    first = stack.activation("relu")
    stack.linear("mid", 24)
    second = stack.add("sum", first, "relu")
    stack.linear("more", 24)
    stack.add("more sum", second)
    stack.linear("classifier", 5)
    check_answers(replace(spec_of_kind("tiny-convnet"), nodes=tuple(stack.nodes)), (SHARES[1], SHARES[3]))
