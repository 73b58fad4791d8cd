"""Rows that others wait for come first, and those that wait for nobody need nothing of others."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from nets import divided, net, run, tensors

from hepti_mqtt import models
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.cost.explain import work_factor
from hepti_mqtt.ids import PLANNER, Epoch
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import lowered, make_plan
from hepti_mqtt.program import Compute, Recv

AHEAD = {"cut": "none", "halo": "ahead"}
NET = net(24, [("conv", 4, 3), ("conv", 4, 3), ("conv", 4, 1), ("stride", 6, 5), ("conv", 6, 3)])


@pytest.fixture
def made():
    return divided(NET, "map_rows", (1.0, 2.0, 1.0), AHEAD)


def rows(made, name, device):
    return [tile.region[0] for tile in made.tiles[name] if tile.device == device]


def test_both_ends_of_a_share_are_one_piece_where_somebody_waits(made):
    # A middle begins and ends at an even row.
    assert rows(made, "0.map", 0) == [((4, 6),), ((0, 4),)]
    assert rows(made, "0.map", 1) == [((6, 8), (16, 18)), ((8, 16),)]
    # The window of five behind the next map sees two rows above and one below: of those the next one is made.
    assert rows(made, "2.map", 1) == [((6, 8), (16, 18)), ((8, 16),)]
    assert rows(made, "3.map", 1) == [((3, 4), (8, 9)), ((4, 8),)]
    # Its last map goes to all: there is nothing of it that nobody waits for.
    assert rows(made, "4.map", 1) == [((3, 9),)]


def test_ends_are_one_convolution_so_that_weights_are_read_twice_at_most(made):
    program = made.program("d1")
    calls = defaultdict(list)
    for op in program.ops:
        if isinstance(op, Compute) and op.kernel == "conv2d":
            calls[op.node].append(op)
    assert [len(ops) for ops in calls.values()] == [2, 2, 2, 2, 1]
    first, second = ([op.attrs.get("bands") for op in ops] for ops in list(calls.values())[:2])
    # Two rows with one above and one below, twice, on a map of which all is there, and of which only these are.
    assert first == second == [((0, 4, 0, 0, 6), (4, 8, 0, 0, 16)), None]


@pytest.mark.parametrize("halo", [{}, {"halo": "ahead"}], ids=["plain", "ahead"])
def test_ends_and_middle_have_the_bits_of_the_whole(halo):
    lines = [("conv", 32, 3), ("conv", 32, 3), ("conv", 40, 1), ("stride", 32, 5), "pool", ("conv", 8, 3)]
    graph = net(56, lines)
    held = tensors(graph)
    got = run(divided(graph, "map_rows", (1.0, 1.3, 0.9), {"cut": "none", **halo}), held)
    np.testing.assert_array_equal(got, run(divided(graph, "single", (1.0,)), held))


def test_what_is_small_is_in_one_piece():
    made = divided(net(6, [("conv", 4, 3), ("conv", 4, 3), ("conv", 4, 3)]), "map_rows", (1.0, 1.0), AHEAD)
    assert [rows(made, "1.map", d) for d in (0, 1)] == [[((0, 3),)], [((3, 6),)]]


def test_a_device_sends_before_it_computes_the_rest_and_that_needs_no_halo(made):
    program = made.program("d1")
    first, second = ([op for op in program.ops if op.node == made.graph.by_name[n].index] for n in ("0.map", "1.map"))
    kinds = [op.kernel if isinstance(op, Compute) else type(op).__name__ for op in first]
    assert kinds == ["Recv", "assemble", "conv2d", "Send", "Send", "conv2d", "Recv"]
    heard = {op.slot for op in program.ops if isinstance(op, Recv) and op.source != PLANNER}
    joined = [op.reads for op in second if isinstance(op, Compute) and op.kernel == "assemble"]
    # Rows of the middle that the ends see are taken out of it; they and the halo are what the ends see.
    assert [any(slot in heard for slot in reads) for reads in joined] == [False, True, False]


def test_everyone_adds_up_own_rows_of_a_mean_instead_of_sending_them():
    spec = spec_of_kind("tiny-resnet")
    shape = models.largest_shape(spec)

    def whole_maps(options):
        template = Plan("m", Epoch(1, 1), "map_rows", ("d0", "d1"), "d0")
        plan = make_plan(spec, template, "map_rows", options, (1.0, 1.0))
        alone = make_plan(spec, Plan("m", Epoch(1, 1), "single", ("d0",), "d0"), "single", {}, (1.0,))
        found = work_factor(lowered(spec, plan, shape), lowered(spec, alone, shape)).maps
        assert found is not None
        return found.gathered

    # The halo of its smallest maps is all of them; the last one is 2 x 2 pixels of 32 channels, half of them sent.
    assert whole_maps({"cut": "none"}) - whole_maps(AHEAD) == 2 * 32 * 4
