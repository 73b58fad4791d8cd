"""Methods for CNNs: shares, cuts, units, and the result of one device whatever the shares."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import divided, net, run, tensors
from small_cnns import cnn, conv, pool, relu

from hepti_mqtt import models
from hepti_mqtt.cost.explain import work_factor
from hepti_mqtt.cost.profiles import Power
from hepti_mqtt.lowering import Graph, roles
from hepti_mqtt.shares import Lane
from hepti_mqtt.shares.maps import Costs, alone, costs_of, least, pixels, seconds_of, shares_of, units
from hepti_mqtt.shares.share import consecutive, greedy
from hepti_mqtt.shares.stages import of_units
from hepti_mqtt.strategies import STRATEGIES

METHODS = ("map_rows", "modnn", "coedge", "edgeflow", "fused_tiles", "pipeline")
# Pools, a residual, strides, and a window of seven rows on maps of six and three.
VGG = net(24, [("conv", 8, 3), "pool", ("conv", 8, 3), ("conv", 8, 3), "residual", "pool", ("conv", 8, 7)], (40, 300))
STRIDES = net(23, [("stride", 4, 7), ("conv", 4, 1), ("conv", 4, 5), "residual", ("stride", 6, 3), ("conv", 5, 3)])
SLOW = Lane(3e3, 1e-3)


@pytest.mark.parametrize("graph", [VGG, STRIDES], ids=["pools", "strides"])
@pytest.mark.parametrize("method", METHODS)
def test_one_to_five_devices_give_the_result_of_one(graph, method):
    held = tensors(graph)
    alone = run(divided(graph, "single", (1.0,)), held)
    most = np.abs(alone).max()
    for options in STRATEGIES[method].choices(1, graph):
        for n, head in ((1, 0), (2, 1), (3, 0), (5, 2)):
            speeds = (1e6, 3e6, 0.0, 2e6, 1e5)[:n]
            for lanes in ((), [Lane(1e6, 1e-4, 1e9)] * n):
                got = run(divided(graph, method, speeds, options, lanes, head), held)
                assert np.abs(got - alone).max() < 1e-4 * most, (options, n)


@pytest.mark.parametrize("method", ["map_rows", "modnn", "coedge", "fused_tiles"])
def test_tiles_of_several_outputs_are_the_same_ones_wherever_a_map_is_cut(method):
    graph = net(15, [("conv", 32, 3), ("conv", 32, 3), ("conv", 32, 3)])
    held, lanes = tensors(graph), [Lane(1e9, 1e-6, 1e9)] * 3
    made = divided(graph, method, (1.0, 1.1, 0.9), lanes=lanes)
    calls = [op for name in made.names for _, _, op in made.draft(name).ops if getattr(op, "kernel", "") == "conv2d"]
    assert any(op.attrs["origin"][0] % 2 for op in calls)
    assert all(op.attrs["whole"] == (15, 15) for op in calls)
    np.testing.assert_array_equal(run(made, held), run(divided(graph, "single", (1.0,)), held))


def test_windows_larger_than_a_share_get_rows_of_several_neighbours():
    made = divided(VGG, "map_rows", (1.0,) * 5)
    source = made.tiles["5.pool"]  # six rows on five devices, of which a window of seven sees nearly all
    assert max(len(message.to) for tile in source for message in tile.messages) >= 3


def test_more_devices_than_rows_leave_some_without_work_and_say_who():
    graph = net(6, [("conv", 4, 3), ("conv", 4, 3)], dense=())
    made, alone = divided(graph, "map_rows", (1.0,) * 8), divided(graph, "single", (1.0,))
    work = work_factor(made, alone)
    assert work.idle == ("d6", "d7")
    assert "nothing to do for d6, d7" in work.text()
    assert work.to_dict()["idle"] == ["d6", "d7"]
    np.testing.assert_allclose(run(made, tensors(graph)), run(alone, tensors(graph)), rtol=1e-5, atol=1e-5)


def test_bytes_of_halo_and_of_whole_maps_are_counted():
    graph = net(8, [("conv", 4, 3), ("conv", 4, 3)], dense=(10,))
    work = work_factor(divided(graph, "map_rows", (1.0, 1.0)), divided(graph, "single", (1.0,)))
    row = 8 * 4 * 4
    # Of the first map each device sends a row to the other; of the second one four, so that both have all of it.
    assert work.maps == (2 * row, 2 * 4 * row, 0)
    assert f"halo {2 * row / 1e3:.1f} kB, whole maps {8 * row / 1e3:.1f} kB" in work.text()
    again = work_factor(divided(graph, "fused_tiles", (1.0, 1.0)), divided(graph, "single", (1.0,))).maps
    assert again is not None
    assert (again.halo, again.flops_again > 0) == (0, True)


# -- where one device goes on alone -----------------------------------------------------------------------------------


def test_cuts_are_where_few_bytes_come_together():
    firsts = [next(unit.op.name for unit in units(VGG) if unit.op.name in alone(VGG, n)) for n in (1, 2)]
    assert firsts == ["2.map", "6.map"]  # behind each pooling
    residual = net(16, [("conv", 4, 3), ("stride", 8, 3), ("conv", 8, 3), ("conv", 8, 3), "residual"])
    block = alone(residual, 1)
    assert "1.map" not in block
    assert "4.map" in block or {"2.map", "3.map"} & block == set()  # not inside, where two maps are live


def test_a_map_that_is_larger_than_the_one_before_can_stand_behind_a_cut():
    spec = cnn(32, conv(), relu(), pool(2, 2, 2), conv(4, 2), relu())
    whole = models.graph(spec, models.largest_shape(spec))
    assert [op.space[0] for op in whole.ops if op.role == roles.MAP] == [32, 16, 17]
    cuts = [options["cut"] for options in STRATEGIES["fused_tiles"].choices(3, whole)]
    assert cuts == ["none", "1"]
    assert {"n2", "n3", "n4"} & alone(whole, 1) == {"n4"}


def test_nets_that_differ_in_names_alone_have_units_of_their_own():
    other = Graph(
        tuple(op.renamed(name=f"other.{op.name}", inputs=tuple(f"other.{x}" for x in op.inputs)) for op in VGG.ops),
        VGG.blocks,
    )
    assert {unit.op.name for unit in units(other)} == {f"other.{unit.op.name}" for unit in units(VGG)}
    assert alone(other, 1) == {f"other.{name}" for name in alone(VGG, 1)}


def test_only_cuts_that_a_net_has_are_priced():
    assert STRATEGIES["map_rows"].choices(3, VGG) == [
        {"cut": cut, **halo} for halo in ({}, {"halo": "ahead"}) for cut in ("none", "1", "2")
    ]
    one = STRATEGIES["map_rows"].choices(3, net(9, [("conv", 4, 3)], dense=()))
    assert [options["cut"] for options in one] == ["none", "none"]
    assert not STRATEGIES["modnn"].knows({"cut": "1"})


def test_behind_a_cut_the_head_device_is_alone():
    made = divided(VGG, "map_rows", (1.0,) * 3, {"cut": "1"}, head=1)
    owners = {name: {tile.device for tile in made.tiles[name]} for name in ("0.map", "1.pool", "2.map", "fc0")}
    assert owners == {"0.map": {0, 1, 2}, "1.pool": {0, 1, 2}, "2.map": {1}, "fc0": {1}}


# -- shares -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 12), st.lists(st.sampled_from((0.0, 0.5, 1.0, 1.7, 4.0)), min_size=1, max_size=4).filter(any))
def test_greedy_rows_end_as_early_as_any(total, speeds):
    ranges = greedy(total, speeds)
    counts = [z - a for a, z in ranges]
    assert ranges[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert sum(counts) == total
    assert not any(n for n, s in zip(counts, speeds, strict=True) if s == 0)
    able = [s for s in speeds if s]
    every = (c for c in product(range(total + 1), repeat=len(able)) if sum(c) == total)
    best = min(max(n / s for n, s in zip(c, able, strict=True)) for c in every)
    assert max(n / s for n, s in zip(counts, speeds, strict=True) if s) == pytest.approx(best)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_consecutive_ranges_are_the_best_of_all(devices, points, seed):
    costs = np.random.default_rng(seed).random((devices, points + 1, points + 1))
    costs[:, np.tri(points + 1, k=-1, dtype=bool)] = np.inf
    found = consecutive(costs)
    every = [(0, *ends, points) for ends in product(range(points + 1), repeat=devices - 1)]

    def cost(ends):
        return max(costs[i, a, z] for i, (a, z) in enumerate(pairwise(ends)))

    assert cost((0, *[z for _, z in found])) == min(map(cost, every))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_linear_programme_against_all_vertices(n, m, seed):
    """The least of a linear programme is at a point where n of its constraints are exact, if there is one."""
    rng = np.random.default_rng(seed)
    costs, rows, bounds = rng.random(n) + 0.1, rng.integers(-3, 4, (m, n)).astype(float), rng.integers(-3, 4, m) * 1.0
    every, limits = np.vstack([rows, np.eye(n)]), np.concatenate([bounds, np.zeros(n)])
    best = None
    for chosen in combinations(range(m + n), n):
        square = every[list(chosen)]
        if abs(np.linalg.det(square)) > 1e-9:
            x = np.linalg.solve(square, limits[list(chosen)])
            if (every @ x >= limits - 1e-9).all():
                best = min(costs @ x, np.inf if best is None else best)
    found = least(costs, rows, bounds)
    assert (found is None) == (best is None)
    if found is not None:
        assert (every @ found >= limits - 1e-7).all()
        assert costs @ found == pytest.approx(best, abs=1e-7)


def costs(*, compute, halo=0.0, gather=0.0, most=1.0, smallest=0.0, layers=3) -> Costs:
    n = len(compute)
    gathers = np.array([0.0] + [gather] * (n - 1))
    return Costs(np.array([compute] * layers), np.full((layers, n), halo), gathers, np.full(n, most), smallest)


def test_shares_are_by_speed_where_links_cost_nothing():
    np.testing.assert_allclose(shares_of(costs(compute=(1.0, 2.0, 4.0))), np.array([4, 2, 1]) / 7)


def test_shares_by_memory_and_by_the_link_to_the_head():
    fitting = shares_of(costs(compute=(1.0, 9.0), most=0.6))
    np.testing.assert_allclose(fitting, [0.6, 0.4])
    assert shares_of(costs(compute=(1.0, 1.0), most=0.4)) is None
    # Bringing the second one's part to the head costs three times what computing it there does.
    np.testing.assert_allclose(shares_of(costs(compute=(1.0, 1.0), gather=9.0)), [1.0, 0.0])


def test_a_share_is_nothing_or_at_least_the_halo():
    np.testing.assert_allclose(shares_of(costs(compute=(1.0, 1.0, 30.0), smallest=0.1)), [0.5, 0.5, 0.0])


def test_energy_under_a_deadline():
    asked = costs(compute=(1.0, 4.0))
    power = [Power(10.0, 0.0), Power(1.0, 0.0)]  # the slow one takes 4 J a layer, the fast one 10
    np.testing.assert_allclose(shares_of(asked, power, deadline_s=100.0), [0.0, 1.0], atol=1e-9)
    np.testing.assert_allclose(shares_of(asked, power, deadline_s=6.0), [0.5, 0.5])  # 3 layers of 2 s
    assert shares_of(asked, power, deadline_s=2.0) is None  # 2.4 s is the least


def test_who_saves_energy_but_not_time_enough_alone_gets_help_of_at_least_the_halo():
    asked = costs(compute=(1.0, 4.0), smallest=0.3)
    power = [Power(10.0, 0.0), Power(1.0, 0.0)]
    # Alone it takes 12 s and would be a second late: 0.09 of the rows elsewhere would do, and 0.3 are the least.
    np.testing.assert_allclose(shares_of(asked, power, deadline_s=11.0), [0.3, 0.7])


def test_the_estimate_of_shares_is_what_the_programme_makes_least():
    asked = costs(compute=(1.0, 4.0), gather=2.0)
    found = shares_of(asked)
    assert seconds_of(asked, found) == pytest.approx(
        min(seconds_of(asked, np.array([x, 1 - x])) for x in np.linspace(0.01, 1, 991)), rel=1e-3
    )


def test_the_least_energy_under_a_deadline_and_one_that_cannot_be_met():
    strong, weak = (Lane(1e9, 0.0, 1e9, None, Power(*watts), 1.0) for watts in ((40.0, 1.0), (2.0, 1.0)))

    small = net(24, [("conv", 8, 3), "pool", ("conv", 8, 3)])

    def shares(*lanes):
        return STRATEGIES["coedge"].divide(small, {"goal": "energy"}, (2e7, 1e7), lanes)[0]["coedge_rows"]

    assert shares(strong, weak) == pytest.approx((0.0, 1.0), abs=1e-6)
    alone = seconds_of(costs_of(small, (2e7, 1e7), [strong, weak]), np.array([0.0, 1.0]))
    soon = [lane._replace(deadline_s=0.7 * alone) for lane in (strong, weak)]
    assert 0.2 < shares(*soon)[0] < 0.5
    with pytest.raises(ValueError, match=r"no shares meet the deadline of 1 ms: the fastest take \d+ ms"):
        shares(*(lane._replace(deadline_s=1e-3) for lane in (strong, weak)))


def test_costs_of_a_net_are_its_flops_its_halo_and_its_last_map():
    graph = net(8, [("conv", 4, 3), ("conv", 4, 3)], dense=(10,))
    found = costs_of(graph, (2.0, 1.0), [Lane(100.0, 0.5), Lane(50.0, 0.25)])
    first, second = (2 * 8 * 8 * (9 * c + 1) * 4 + 0 for c in (3, 4))
    np.testing.assert_allclose(found.compute_s[:, 1], [first, second], rtol=0.05)  # and the activations
    np.testing.assert_allclose(found.compute_s[:, 1], 2 * found.compute_s[:, 0])
    row = 8 * 4 * 4
    np.testing.assert_allclose(found.halo_s, [[0, 0], [0.5 + 2 * row / 100, 0.25 + 2 * row / 50]])
    np.testing.assert_allclose(found.gather_s, [0, 0.25 + 8 * row / 50])
    assert found.least == 1 / 8


def test_layers_have_shares_of_their_own_and_one_device_where_links_are_slow():
    _, free = STRATEGIES["edgeflow"].divide(VGG, {}, (1.0, 1.0, 2.0))
    assert {unit.op.name for unit in units(VGG)} == set(free)
    assert all(len({r for r in ranges if r[0] < r[1]}) > 1 for name, ranges in free.items() if name != "6.map")
    assert free["0.map"] == ((0, 6), (6, 12), (12, 24))
    _, slow = STRATEGIES["edgeflow"].divide(VGG, {}, (1e6, 1e6, 2e6), [SLOW] * 3)
    behind = slow["fc1"]
    assert len([r for r in behind if r[0] < r[1]]) == 1


def test_dense_layers_are_shared_by_what_devices_do_with_one_row():
    lanes = [Lane(row_flops_per_s=1.0), Lane(row_flops_per_s=3.0), Lane(row_flops_per_s=1.0)]
    for method, first in (("map_rows", 96), ("modnn", 64)):  # in units of 32, of which there are ten
        _, ranges = STRATEGIES[method].divide(VGG, {"cut": "none"}, (9.0, 3.0, 0.0), lanes)
        assert ranges["dense 300"] == ((0, first), (first, 300), (300, 300)), method
    _, ranges = STRATEGIES["edgeflow"].divide(VGG, {}, (9.0, 3.0, 0.0), lanes)
    assert ranges["fc1"][1][1] - ranges["fc1"][1][0] > ranges["fc1"][0][1] - ranges["fc1"][0][0]
    assert ranges["0.map"][0][1] == 18


def test_pixels_of_a_net_are_those_of_half_its_work():
    assert pixels(VGG) == 12 * 12
    assert pixels(net(8, [("conv", 4, 3), ("conv", 4, 3)])) == 64


def test_stages_of_a_pipeline_are_by_work():
    found = of_units(VGG, (1.0, 1.0), [Lane()] * 2)
    work = [unit.flops * unit.size for unit in units(VGG)]
    slowest = max(sum(work[a:z]) for a, z in found)
    assert slowest == min(max(sum(work[:i]), sum(work[i:])) for i in range(len(work) + 1))
