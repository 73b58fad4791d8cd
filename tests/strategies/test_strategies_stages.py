"""Stages of a pipeline: what the programme finds costs as little as the best of all cuts, and fits where it can."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sites import FAMILIES, plan, request

from hepti_mqtt.cost.profiles import Cluster, Curve, DeviceProfile, Link
from hepti_mqtt.cost.simulator import Naming
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.models import graph, largest_shape
from hepti_mqtt.plan_programs import programs
from hepti_mqtt.planner import Question, decide
from hepti_mqtt.program import Send
from hepti_mqtt.shares import Lane
from hepti_mqtt.shares.stages import PARTS, Chain, chain_of, stages

ENCODER = FAMILIES["bert-embedding"]


def seconds(chain, speeds, lanes, goal, order):
    """Return what stages cost, given as (device, first, stop) in the order of the parts."""

    def way(source, target, cut):
        a, b = lanes[source], lanes[target]
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
    lanes = [Lane(data.draw(numbers), data.draw(numbers) / 10, data.draw(st.floats(2.0, 60.0))) for _ in speeds]
    found = stages(chain, speeds, lanes, goal)
    order = sorted(((i, *parts) for i, parts in enumerate(found) if parts[0] < parts[1]), key=lambda s: s[1])

    def fits(stages):
        return all(sum(chain.weights[a:z]) <= lanes[i].memory_bytes for i, a, z in stages)

    possible = list(every(n, devices))
    fitting = [stages for stages in possible if fits(stages)] or possible
    least = min(seconds(chain, speeds, lanes, goal, stages) for stages in fitting)
    assert [a for _, a, _ in order] == [0, *(z for _, _, z in order[:-1])]
    assert order[-1][2] == n
    assert fits(order) or not any(map(fits, possible))
    assert seconds(chain, speeds, lanes, goal, order) == pytest.approx(least)


def test_more_than_eight_devices_keep_the_order_of_the_plan():
    chain = Chain([1.0] * 12, [1.0] * 12, [0.0] * 13)
    found = stages(chain, [1.0] * 12, [Lane()] * 12, "throughput")
    assert found == tuple((i, i + 1) for i in range(12))


def test_a_layer_is_four_parts_and_a_cut_inside_it_sends_the_residual_too():
    shape, _ = request(ENCODER, (10,))
    chain = chain_of(graph(ENCODER, shape))
    m, h, f = 10, ENCODER.hidden, ENCODER.mlp
    assert len(chain.flops) == PARTS * ENCODER.layers
    assert chain.flops[:4] == [2 * m * h * 3 * h + 4 * m * m * h, 2 * m * h * h, 2 * m * h * f, 2 * m * f * h]
    assert chain.weights[:4] == [4 * 3 * h * h, 4 * h * h, 4 * h * f, 4 * h * f]
    assert [c / (4 * m * h) for c in chain.cuts[:5]] == [1, 2, 1, 1 + f / h, 1]


@pytest.mark.parametrize("part", range(1, PARTS))
@pytest.mark.parametrize("family", ["bert-embedding", "vit-classifier"])
def test_what_is_sent_at_a_cut_inside_a_layer_is_what_the_programme_counts(family, part):
    spec = FAMILIES[family]
    shape, _ = request(spec, (10,), "hidden")
    ranges = {"stages": ((0, PARTS + part), (PARTS + part, PARTS * spec.layers))}
    cut = replace(plan(spec, ("pipeline", {}), (1.0, 1.0)), ranges=ranges)
    made = programs(spec, cut, shape)["d0"]
    sent = sum(prod(made.slots[op.slot].shape) for op in made.ops if isinstance(op, Send) and "d1" in op.to)
    assert 4 * sent == chain_of(graph(spec, shape)).cuts[PARTS + part]


def site(devices, memory=float("inf")):
    curve = Curve(1024, 1024, ((64, 1e-3), (256, 4e-3)))
    names = [f"d{i}" for i in range(devices)]
    profiles = {n: DeviceProfile(n, (curve,), 1e9, 1e9, memory_bytes=memory) for n in names}
    return Cluster(profiles, {n: Link() for n in names})


def asked(cluster, **pins):
    return decide(Question(Naming("home", "m"), ENCODER, cluster, largest_shape(ENCODER), Epoch(1, 1), **pins))


def test_more_stages_than_parts_are_refused_with_both_numbers():
    cluster = site(13)
    with pytest.raises(ConfigError, match="13 devices are more stages than the 12 parts of 3 layers; use 12"):
        asked(cluster, strategy="pipeline", devices=tuple(cluster.devices))


def test_least_latency_is_one_device_where_memory_does_not_forbid_it():
    chosen = asked(site(3), strategy="pipeline", options={"goal": "latency"}, devices=("d0", "d1", "d2")).chosen.plan
    assert sorted(chosen.ranges["stages"]) == [(0, 0), (0, 0), (0, PARTS * ENCODER.layers)]
