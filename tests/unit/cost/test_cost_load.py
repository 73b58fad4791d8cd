"""Several requests on the virtual clock: latency, throughput, overlapping micro-batches, and leased tasks."""

from __future__ import annotations

import pytest
from questions import NAMING, bundled, question
from sites import FAMILIES, METHODS, method_id, plan, request
from small_cnns import cnn, conv, pool, relu

from hepti_mqtt.checkpoint import KINDS, spec_of_kind
from hepti_mqtt.core.profiles import Cluster, Curve, DeviceProfile, Link
from hepti_mqtt.cost.simulator import (
    RequestTimes,
    SimulatedRequest,
    simulate,
    simulate_requests,
    simulate_throughput,
    steady_state,
)
from hepti_mqtt.models.cnn.nodes import CnnSpec
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.planner import decide, price
from hepti_mqtt.strategies import plan_programs
from hepti_mqtt.strategies.plan_programs import device_programs

SPEC = FAMILIES["vit-classifier"]
SHAPE = request(SPEC, (17,))[0]


def site(devices):
    """Return equal devices with work that takes much longer than exchanges."""
    profiles = {
        f"d{i}": DeviceProfile(f"d{i}", (Curve(32, 32, ((1, 1e-3), (20, 2e-2))),), 1e6, 1e8) for i in range(devices)
    }
    return Cluster(profiles, dict.fromkeys(profiles, Link()))


def requested(name, devices=2, shape=SHAPE, options=None):
    return SimulatedRequest(shape, device_programs(SPEC, plan(SPEC, (name, options or {}), (1.0,) * devices), shape))


def alone(wanted, cluster):
    return simulate(NAMING, SPEC, wanted.shape, wanted.programs, cluster)


def loaded(wanted, cluster, in_flight=2):
    return simulate_throughput(NAMING, SPEC, wanted, cluster, in_flight, 6 * in_flight)


@pytest.mark.parametrize("method", METHODS[::4], ids=method_id)
def test_requests_that_do_not_overlap_are_requests_alone(method):
    devices = 1 if method[0] == "single" else 2
    wanted, cluster = requested(method[0], devices, options=method[1]), site(devices)
    one = alone(wanted, cluster)
    times = [3 * n * one.seconds for n in range(3)]
    several = simulate_requests(NAMING, SPEC, [wanted._replace(arrives_s=at) for at in times], cluster, in_flight=2)
    assert [run.latency_s for run in several.runs] == pytest.approx([one.seconds] * 3)
    assert several.nbytes == 3 * one.nbytes
    for name, use in several.devices.items():
        assert use.sent_bytes == 3 * one.devices[name].sent_bytes
        assert use.flops == pytest.approx(3 * one.devices[name].flops)


def test_a_pipeline_takes_the_next_request_while_the_last_one_is_on_its_way():
    cluster, wanted = site(3), requested("pipeline", 3)  # three layers, one each
    one = alone(wanted, cluster).seconds
    assert loaded(wanted, cluster, in_flight=2).requests_per_s > 1.5 / one
    full = loaded(wanted, cluster, in_flight=3)
    assert full.requests_per_s > 2.0 / one  # not 3: the first stage has stem and task too
    assert full.latency_s >= one
    by_turns = loaded(wanted, cluster, in_flight=1).requests_per_s
    assert 0.999 / one < by_turns < 1 / one, "the next one waits for the reports of the last, an answer does not"


def test_the_sequences_of_a_request_are_micro_batches():
    shape = TokenBatch((17,) * 4)
    wanted, cluster = requested("pipeline", 3, shape), site(3)
    events = simulate(NAMING, SPEC, shape, wanted.programs, cluster, record=True).events
    busy = {d: [(e.start, e.stop) for e in events if e.device == d and e.lane == "compute"] for d in wanted.programs}
    both = sum(max(min(stop, end) - max(start, begin), 0.0) for start, stop in busy["d0"] for begin, end in busy["d1"])
    second = sum(stop - start for start, stop in busy["d1"])
    assert both > 0.5 * second, "the second stage has one sequence while the first has the next"
    one, four = alone(requested("pipeline", 3), cluster).seconds, alone(wanted, cluster).seconds
    assert four < 0.7 * 4 * one
    simulation = loaded(wanted, cluster)
    assert simulation.sequences_per_s == pytest.approx(4 * simulation.requests_per_s)


def test_never_more_in_flight_than_the_coordinator_lets_run():
    wanted, cluster = requested("pipeline", 3), site(3)
    runs = simulate_requests(NAMING, SPEC, [wanted._replace(arrives_s=0.0)] * 7, cluster, in_flight=2).runs
    for run in runs:
        others = [r for r in runs if r.dispatched_s <= run.dispatched_s < r.answered_s]
        assert len(others) <= 2
    assert [r.dispatched_s for r in runs] == sorted(r.dispatched_s for r in runs)
    assert runs[-1].latency_s > 3 * runs[0].latency_s, "a request without room waits"


def test_a_full_price_has_the_throughput_of_whole_programs():
    cluster = site(3)
    chosen = plan(SPEC, ("row", {"variant": "kv"}), (1.0,) * 3)
    query = question(SPEC, cluster, SHAPE, in_flight=2, requests=8)
    assert price(query, chosen).load is None, "the search prices latency alone"
    assert price(query, chosen, full=True).load == simulate_throughput(
        NAMING, SPEC, SimulatedRequest(SHAPE, device_programs(SPEC, chosen, SHAPE)), cluster, 2, 8
    )
    assert price(question(SPEC, cluster, SHAPE), chosen, full=True).load is None


def test_the_steady_state_is_whole_rounds_between_the_first_and_the_last():
    # Bunches of two, 1 s apart; the first and the last two are not counted, nor is the odd one.
    ends = [10.0, 10.1, 11.0, 11.1, 12.0, 12.1, 13.0, 13.1, 20.0]
    simulation = steady_state([RequestTimes(0.0, 0.0, end, 3) for end in ends], in_flight=2)
    assert simulation.requests_per_s == pytest.approx(4 / (13.0 - 11.0))
    assert simulation.sequences_per_s == pytest.approx(3 * simulation.requests_per_s)
    assert (simulation.latency_s, simulation.longest_s) == (12.0, 20.0)


SMALL = [k for k in KINDS if k.startswith("tiny-") and isinstance(spec_of_kind(k), CnnSpec)]
SLOW = (1.0, 0.02, 0.5, 0.9)  # speeds; the second device is much slower
LEASED = ("fused_tiles", {"cut": "none", "owners": "leased"})


def site_of(speeds, latency_s=2e-4):
    """Return devices d0, d1, ... of given speeds."""
    profiles = {
        f"d{i}": DeviceProfile(f"d{i}", (Curve(32, 32, ((1, 1e-5 / s), (64, 6e-4 / s))),), 1e8 * s, 1e8 * s)
        for i, s in enumerate(speeds)
    }
    return Cluster(profiles, dict.fromkeys(profiles, Link(latency_s, 1e7, 1e7)))


def played(kind, speeds, requests, in_flight, method=LEASED, gap_s=None):
    spec = spec_of_kind(kind) if isinstance(kind, str) else kind
    shape = request(spec, (1,))[0]
    device_parts = plan_programs.device_programs(spec, plan(spec, method, (1.0,) * len(speeds)), shape)
    requested = [SimulatedRequest(shape, device_parts, None if gap_s is None else n * gap_s) for n in range(requests)]
    return simulate_requests(NAMING, spec, requested, site_of(speeds), in_flight, record=True)


def bag_of(kind):
    return plan_programs.task_count(spec_of_kind(kind), plan(spec_of_kind(kind), LEASED, (1.0,)))


def tasks(outcome, device=None):
    """Return the labels of the tasks that were computed to their ends."""
    return [e.label for e in outcome.events if e.lane == "task" and device in (None, e.device) and "(" not in e.label]


@pytest.mark.parametrize("kind", SMALL)
def test_requests_that_share_devices_are_all_answered(kind):
    for speeds, in_flight in ((SLOW, 3), ((0.02, 1.0, 1.0), 2), ((1.0,) * 10, 4)):
        simulation = played(kind, speeds, 4 * in_flight, in_flight)
        assert len(simulation.runs) == 4 * in_flight
        for task in range(bag_of(kind)):
            assert tasks(simulation).count(f"task {task}") >= 4 * in_flight


@pytest.mark.parametrize("gap_ms", range(1, 12, 4))
def test_the_message_without_tasks_ends_a_run_in_any_state_of_the_device(gap_ms):
    for speeds in (SLOW, (0.02, 1.0), (1.0, 1.0, 1.0, 0.01, 0.01)):
        simulation = played("tiny-convnet", speeds, 6, 3, gap_s=gap_ms * 1e-3)
        assert all(run.answered_s > run.arrived_s for run in simulation.runs)


def test_a_slow_device_computes_fewer_tasks_and_gives_up_what_others_have_taken_over():
    simulation = played("tiny-convnet", SLOW, 1, 1)
    counts = {device: len(tasks(simulation, device)) for device in simulation.devices}
    assert sum(counts.values()) == bag_of("tiny-convnet") == 8
    assert (counts["d1"], counts["d2"]) == (0, 2)
    assert [e.label for e in simulation.events if e.lane == "task" and "(" in e.label] == ["task 1 (given up)"]
    owned = played("tiny-convnet", SLOW, 1, 1, ("fused_tiles", {"cut": "none"}))
    assert simulation.runs[0].answered_s < 0.6 * owned.runs[0].answered_s
    assert not tasks(owned)


@pytest.mark.parametrize(("window", "bag"), [((1, 12), 4), ((1, 11), 8), ((11, 12), 2)], ids=str)
def test_a_narrow_map_has_no_tasks_without_work(window, bag):
    spec = cnn(12, conv(), relu(), pool(*window))
    assert plan_programs.task_count(spec, plan(spec, LEASED, (1.0,))) == bag
    simulation = played(spec, SLOW, 1, 1)
    assert {f"task {n}" for n in range(bag)} == set(tasks(simulation))


def slower_from(device, since_s, factor):
    return lambda name, now: factor if name == device and now >= since_s else 1.0


def test_ops_of_a_device_that_becomes_slower_take_longer_from_then_on():
    spec = spec_of_kind("tiny-convnet")
    shape = request(spec, (1,))[0]
    parts = plan_programs.device_programs(spec, plan(spec, ("single", {}), (1.0,)), shape)
    cluster = site_of((1.0,))

    def ends(since=float("inf")):
        slowness = slower_from("d0", since, 3.0)
        simulation = simulate(NAMING, spec, shape, parts, cluster, record=True, slowness=slowness)
        return [e.stop - e.start for e in simulation.events if e.lane == "compute"], simulation

    times, steady = ends()
    since = next(e.start for e in steady.events if e.lane == "compute" and e.start > 0.5 * steady.seconds)
    slower, simulation = ends(since)
    many = [round(b / a, 6) for a, b in zip(times, slower, strict=True)]
    assert set(many) == {1.0, 3.0}
    assert many == sorted(many)
    assert simulation.devices["d0"].compute_s == pytest.approx(sum(slower))


def test_tasks_that_would_read_what_the_head_device_computes_are_refused():
    """A map of one row stays there."""
    spec = cnn(12, conv(), relu(), pool(12, 1), conv(4, 2))
    leased = plan(spec, LEASED, (1.0, 1.0))
    for device in ("d0", "d1"):
        with pytest.raises(ValueError, match="task 0"):
            plan_programs.device_program(spec, leased, request(spec, (1,))[0], device)


def test_leasing_gains_where_a_device_becomes_slower():
    """The figures of docs/methods/fused_tiles.md, loosely: fixed owners are waited for, leases are taken over."""
    simulation = {}
    cluster, spec = bundled("mixed-four"), spec_of_kind("vgg16")
    shape = request(spec, (1,))[0]
    for owners in ({}, {"owners": "leased"}):
        pins = {"strategy": "fused_tiles", "options": {"cut": "3", **owners}, "devices": tuple(cluster.devices)}
        chosen = decide(question(spec, cluster, shape, **pins)).chosen.plan
        parts = plan_programs.device_programs(spec, chosen, shape)
        simulation[bool(owners)] = [
            simulate(NAMING, spec, shape, parts, cluster, slowness=slows).seconds
            for slows in (None, slower_from("pi1", 0.05, 2.0))
        ]
    fixed, leased = simulation[False], simulation[True]
    assert leased[0] < 1.1 * fixed[0]
    assert fixed[1] > 1.2 * fixed[0]
    assert leased[1] < 0.85 * fixed[1]
