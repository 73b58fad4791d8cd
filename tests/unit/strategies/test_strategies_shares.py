"""Solvers for shares: rows of maps, stages of a pipeline and the ring of `galaxy`, against all alternatives."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import prod

import numpy as np
import pytest
import questions
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import VGG, net
from sites import FAMILIES, plan, request

from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.core.profiles import Power
from hepti_mqtt.core.program import Send
from hepti_mqtt.models import graph
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.planner import decide
from hepti_mqtt.shares import DeviceResources
from hepti_mqtt.shares.maps import Costs, costs_of, execution_units, minimise, solve_shares
from hepti_mqtt.shares.share import assign_greedily, partition_in_order
from hepti_mqtt.shares.stages import PARTS, Chain, chain_of, stages
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.method import HEADS
from hepti_mqtt.strategies.plan_programs import device_programs

SLOW = DeviceResources(3e3, 1e-3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "speeds", "expected"),
    [
        (4, 2, (1, 1), (2, 2)),
        (4, 2, (1, 1, 1, 1), (1, 1, 1, 1)),
        (14, 2, (1, 1, 1), (6, 4, 4)),
        (14, 2, (1, 1, 1, 1), (4, 3, 4, 3)),
        (9, 3, (1, 1, 1), (3, 3, 3)),
        (9, 3, (2, 1, 1, 0), (6, 3, 0, 0)),  # one head more for the third would need keys and values of its own
        (32, 8, (1, 1, 1), (12, 12, 8)),  # of whole groups where that is as fast
        (32, 8, (3, 2, 1), (17, 11, 4)),
    ],
)
def test_heads_follow_speed_and_what_keys_and_values_cost_each_device_that_needs_them(
    heads, kv_heads, speeds, expected
):
    spec = spec_of_kind("tiny-llama")
    spec = replace(spec, heads=heads, block=replace(spec.block, kv_heads=kv_heads))
    result = HEADS.ranges(graph(spec, TokenBatch((1,), cache=64)), speeds)
    assert [(stop - start) // spec.head_dim for start, stop in result] == list(expected)


@given(st.integers(0, 12), st.lists(st.sampled_from((0.0, 0.5, 1.0, 1.7, 4.0)), min_size=1, max_size=4).filter(any))
def test_greedy_rows_end_as_early_as_any(total, speeds):
    ranges = assign_greedily(total, speeds)
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
    result = partition_in_order(costs)
    every = [(0, *ends, points) for ends in product(range(points + 1), repeat=devices - 1)]

    def cost(ends):
        return max(costs[i, a, z] for i, (a, z) in enumerate(pairwise(ends)))

    assert cost((0, *[z for _, z in result])) == min(map(cost, every))


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
    result = minimise(costs, rows, bounds)
    assert (result is None) == (best is None)
    if result is not None:
        assert (every @ result >= limits - 1e-7).all()
        assert costs @ result == pytest.approx(best, abs=1e-7)


def costs(*, compute, halo=0.0, gather=0.0, most=1.0, smallest=0.0, layers=3) -> Costs:
    n = len(compute)
    gathers = np.array([0.0] + [gather] * (n - 1))
    return Costs(np.array([compute] * layers), np.full((layers, n), halo), gathers, np.full(n, most), smallest)


POWER = (Power(10.0, 0.0), Power(1.0, 0.0))  # the slow device takes 4 J a layer, the fast one 10


@pytest.mark.parametrize(
    ("given", "limits", "expected"),
    [
        ({"compute": (1.0, 2.0, 4.0)}, (), (4 / 7, 2 / 7, 1 / 7)),
        ({"compute": (1.0, 9.0), "most": 0.6}, (), (0.6, 0.4)),
        ({"compute": (1.0, 1.0), "most": 0.4}, (), None),
        # Sending the second device's part to the root costs three times as much as computing it there.
        ({"compute": (1.0, 1.0), "gather": 9.0}, (), (1.0, 0.0)),
        ({"compute": (1.0, 1.0, 30.0), "smallest": 0.1}, (), (0.5, 0.5, 0.0)),
        ({"compute": (1.0, 4.0)}, (POWER, 100.0), (0.0, 1.0)),
        ({"compute": (1.0, 4.0)}, (POWER, 6.0), (0.5, 0.5)),  # 3 layers of 2 s
        ({"compute": (1.0, 4.0)}, (POWER, 2.0), None),  # the least is 2.4 s
        # The second device alone takes 12 s: 0.09 of the rows elsewhere would be enough, but 0.3 are the least.
        ({"compute": (1.0, 4.0), "smallest": 0.3}, (POWER, 11.0), (0.3, 0.7)),
    ],
)
def test_shares_of_least_time_or_of_least_energy_under_a_deadline(given, limits, expected):
    """By speed, memory and the link to the root; a share is nothing or at least the halo."""
    shares = solve_shares(costs(**given), *limits)
    assert (shares is None) == (expected is None)
    np.testing.assert_allclose(() if shares is None else shares, expected or (), rtol=1e-7, atol=1e-9)


def test_costs_of_a_net_are_its_flops_its_halo_and_its_last_map():
    graph = net(8, [("conv", 4, 3), ("conv", 4, 3)], dense=(10,))
    result = costs_of(graph, (2.0, 1.0), [DeviceResources(100.0, 0.5), DeviceResources(50.0, 0.25)])
    first, second = (2 * 8 * 8 * (9 * c + 1) * 4 + 0 for c in (3, 4))
    np.testing.assert_allclose(result.compute_s[:, 1], [first, second], rtol=0.05)  # and the activations
    np.testing.assert_allclose(result.compute_s[:, 1], 2 * result.compute_s[:, 0])
    row = 8 * 4 * 4
    np.testing.assert_allclose(result.halo_s, [[0, 0], [0.5 + 2 * row / 100, 0.25 + 2 * row / 50]])
    np.testing.assert_allclose(result.gather_s, [0, 0.25 + 8 * row / 50])
    assert result.min_share == 1 / 8


def test_layers_have_shares_of_their_own_and_one_device_where_links_are_slow():
    _, free = STRATEGIES["edgeflow"].make_shares(VGG, {}, (1.0, 1.0, 2.0))
    assert {unit.op.name for unit in execution_units(VGG)} == set(free)
    assert all(len({r for r in ranges if r[0] < r[1]}) > 1 for name, ranges in free.items() if name != "6.map")
    assert free["0.map"] == ((0, 6), (6, 12), (12, 24))
    _, slow = STRATEGIES["edgeflow"].make_shares(VGG, {}, (1e6, 1e6, 2e6), [SLOW] * 3)
    assert len([r for r in slow["fc1"] if r[0] < r[1]]) == 1


def test_dense_layers_are_shared_by_what_devices_do_with_one_row():
    resources = [
        DeviceResources(row_flops_per_s=1.0),
        DeviceResources(row_flops_per_s=3.0),
        DeviceResources(row_flops_per_s=1.0),
    ]
    for method, first in (("map_rows", 96), ("modnn", 64)):  # in ten units of 32
        _, ranges = STRATEGIES[method].make_shares(VGG, {"cut": "none"}, (9.0, 3.0, 0.0), resources)
        assert ranges["dense 300"] == ((0, first), (first, 300), (300, 300)), method
    _, ranges = STRATEGIES["edgeflow"].make_shares(VGG, {}, (9.0, 3.0, 0.0), resources)
    assert ranges["fc1"][1][1] - ranges["fc1"][1][0] > ranges["fc1"][0][1] - ranges["fc1"][0][0]
    assert ranges["0.map"][0][1] == 18


def seconds(chain, speeds, resources, goal, order):
    """Return what stages cost, given as (device, first, stop) in the order of the parts."""

    def way(source, target, cut):
        a, b = resources[source], resources[target]
        rate = min(a.bytes_per_s, b.bytes_per_s)
        return 0.0 if source == target else a.latency_s + b.latency_s + chain.cuts[cut] / rate

    times, before = [], 0
    for device, first, stop in order:
        times += [way(before, device, first), sum(chain.flops[first:stop]) / speeds[device]]
        before = device
    times.append(way(before, 0, len(chain.flops)))
    return sum(times) if goal == "latency" else max(times)


def every(n, devices):
    """Yield all ways to give n parts to some devices, in any order."""
    for count in range(1, min(n, devices) + 1):
        for cuts in itertools.combinations(range(1, n), count - 1):
            for order in itertools.permutations(range(devices), count):
                yield list(zip(order, (0, *cuts), (*cuts, n), strict=True))


numbers = st.floats(0.1, 10.0)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), goal=st.sampled_from(["latency", "throughput"]))
def test_no_other_cut_and_no_other_order_costs_less(data, goal):
    n, devices = data.draw(st.integers(3, 6)), data.draw(st.integers(1, 3))
    chain = Chain(*(data.draw(st.lists(numbers, min_size=size, max_size=size)) for size in (n, n, n + 1)))
    speeds = data.draw(st.lists(numbers, min_size=devices, max_size=devices))
    resources = [
        DeviceResources(data.draw(numbers), data.draw(numbers) / 10, data.draw(st.floats(2.0, 60.0))) for _ in speeds
    ]
    result = stages(chain, speeds, resources, goal)
    order = sorted(((i, *parts) for i, parts in enumerate(result) if parts[0] < parts[1]), key=lambda s: s[1])

    def fits(stages):
        return all(sum(chain.weights[a:z]) <= resources[i].memory_bytes for i, a, z in stages)

    possible = list(every(n, devices))
    fitting = [stages for stages in possible if fits(stages)] or possible
    least = min(seconds(chain, speeds, resources, goal, stages) for stages in fitting)
    assert [a for _, a, _ in order] == [0, *(z for _, _, z in order[:-1])]
    assert order[-1][2] == n
    assert fits(order) or not any(map(fits, possible))
    assert seconds(chain, speeds, resources, goal, order) == pytest.approx(least)


def test_more_than_eight_devices_keep_the_order_of_the_plan():
    chain = Chain([1.0] * 12, [1.0] * 12, [0.0] * 13)
    result = stages(chain, [1.0] * 12, [DeviceResources()] * 12, "throughput")
    assert result == tuple((i, i + 1) for i in range(12))


@pytest.mark.parametrize("part", range(1, PARTS))
@pytest.mark.parametrize("family", ["bert-embedding", "vit-classifier"])
def test_what_is_sent_at_a_cut_inside_a_layer_is_what_the_programme_counts(family, part):
    spec = FAMILIES[family]
    shape, _ = request(spec, (10,), "hidden")
    ranges = {"stages": ((0, PARTS + part), (PARTS + part, PARTS * spec.layers))}
    cut = replace(plan(spec, ("pipeline", {}), (1.0, 1.0)), ranges=ranges)
    sender = device_programs(spec, cut, shape)["d0"]
    sent = sum(prod(sender.slots[op.slot].shape) for op in sender.ops if isinstance(op, Send) and "d1" in op.to)
    assert 4 * sent == chain_of(graph(spec, shape)).cuts[PARTS + part]


SPEC = replace(FAMILIES["bert-embedding"], layers=6)
RING = ("galaxy", {"exchange": "ring"})
RING_DEVICES, TOKENS, LAYER = 4, 16, 3  # a layer in the middle
SHAPE, _ = request(SPEC, (TOKENS,), "hidden")


def of_a_layer(kind, method=RING):
    """Return the ops of each device in the middle layer."""
    result = device_programs(SPEC, plan(SPEC, method, (1.0,) * RING_DEVICES), SHAPE)
    return {d: [op for op in p.ops if isinstance(op, kind) and op.layer == LAYER] for d, p in result.items()}, result


def test_each_device_sends_to_its_neighbour_alone_what_a_reduce_scatter_and_an_all_gather_are():
    sends, result = of_a_layer(Send)
    names = list(result)
    for i, (device, ops) in enumerate(sends.items()):
        assert {op.to for op in ops} == {(names[(i + 1) % RING_DEVICES],)}
        assert len(ops) == 4 * (RING_DEVICES - 1)
        sizes = {result[device].slots[op.slot].shape for op in ops}
        assert sizes == {(TOKENS // RING_DEVICES, SPEC.hidden)}


def test_shares_follow_speed_and_what_memory_leaves():
    def decided(room):
        speeds = {"d0": (30.0, room), "d1": (10.0, 1e9), "d2": (10.0, 1e9)}
        site = questions.cluster(*(questions.device(name, *one) for name, one in speeds.items()), mbit=800)
        pins = {"strategy": "galaxy", "options": {"exchange": "ring"}, "devices": tuple(speeds)}
        return decide(questions.question(SPEC, site, SHAPE, **pins)).chosen

    fast = decided(1e9)
    widths = [z - a for a, z in fast.plan.ranges["mlp"]]
    assert widths[0] > widths[1]
    assert dict(fast.plan.options) == {"exchange": "ring"}
    room = 0.5 * fast.price.needs["d0"]
    tight = decided(room)
    assert tight.price.feasible
    assert tight.price.needs["d0"] <= room
    assert tight.plan.ranges["mlp"][0] != fast.plan.ranges["mlp"][0]
