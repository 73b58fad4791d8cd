"""Reports of devices, links and runs: which ones count, and when they change a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
from scripted_site import CURVES, Site, caps, everyone, heartbeat, settled

from hepti_mqtt.client.described import cluster_of_devices
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import Cluster, default_frame_cost
from hepti_mqtt.planner import Candidate, Decision, Question, price
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.messages import Endpoint, LinkReport, Status
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.fleet import FIRST_PROBES_S, Fleet
from hepti_mqtt.strategies.plan_programs import make_plan, programs_digest


def test_packet_limits_limit_only_plans_on_their_devices() -> None:
    site = Site(searches=False)
    for name, limit in {"a": 0, "b": 5_000, "d": 4 << 20}.items():
        site.boots[name] = 1
        site.event(interface.DeviceCaps(name, replace(caps(name, 1), largest_packet_bytes=limit)))
        site.event(interface.DeviceStatus(name, Status("online", 1)))
    site.tick(1.1)
    (search,) = site.solves
    assert search.question.packet_bytes == {"b": 5_000}, "a probed size is not a limit"
    site.solve(search)
    site.ready()
    assert "b" not in site.plan.devices, "the weights do not get through"


def test_drift_of_a_plans_device_moves_the_model_to_a_faster_one() -> None:
    site = settled("a", "b")
    plan = site.plan
    site.serve("r1")
    solves = len(site.solves)
    site.drift({plan.devices[0]: 8.0}, 5)
    assert len(site.solves) > solves
    site.ready()
    assert site.plan.devices != plan.devices


@pytest.mark.parametrize("has_requests", [True, False], ids=["an unused device", "a model without requests"])
def test_drift_without_an_effect_on_requests_starts_no_search(has_requests: bool) -> None:
    site = settled("a", "b")
    (unused,) = {"a", "b"} - set(site.plan.devices)
    if has_requests:
        site.serve("r1")
    site.drift({unused: 0.95}, 20)  # the first heartbeats may start a search
    searched = site.notes()["drift"]
    site.drift({unused if has_requests else site.plan.root: 8.0}, 30)
    assert site.notes()["drift"] == searched


def test_an_answer_has_the_expectation_at_its_dispatch() -> None:
    site = settled("a", "b")
    plan = site.plan
    (model,) = site.session.groups.defaults()
    site.submit("r1")
    for _ in range(8):
        model.durations.record_run(
            plan, plan.predicted_tokens, 3 * plan.predicted_s, site.now, model.judgement.judged_s
        )
    site.answer(1)
    site.serve("r2")
    means = [stats.expectation.mean for name in ("r1", "r2") for stats in site.answers[name].stats]
    assert means == pytest.approx([1.0, 3.0])


def test_questions_have_the_links_that_devices_measured_to_peers() -> None:
    fleet = Fleet(secret=bytes(32))
    for name in ("a", "b", "c"):
        endpoint = None if name == "c" else Endpoint("192.0.2.7", 1883)
        fleet.record_caps(name, replace(caps(name, 1), endpoint=endpoint))
        fleet.record_status(name, Status("online", 1), 0.0)
    reports = {"b": LinkReport(4e-3, None), "c": LinkReport(2e-3, 3e7), "gone": LinkReport(1e-3, 1e6)}
    fleet.record_heartbeat("a", replace(heartbeat(1), peers=reports), 0.0)
    fleet.record_heartbeat("b", replace(heartbeat(1), peers={"a": LinkReport(6e-3, 1e7)}), 0.0)
    late = replace(heartbeat(1), peers={"a": LinkReport(5e-3, 5e6)})
    fleet.record_heartbeat("b", late, 1.0, busy=True, loading=True)
    links = fleet.cluster({}).peer_links
    assert links["a", "b"].bytes_per_s is None
    assert links["b", "a"].bytes_per_s == pytest.approx(1e7, rel=0.2), "a measurement on a busy link does not count"
    assert links["c", "a"] == links["a", "c"], "c has not reported"
    assert ("b", "c") not in links
    assert not [pair for pair in links if "gone" in pair]
    assert fleet.cluster({}).endpoints == {"a", "b"}


# -- implausible reports ----------------------------------------------------------------------------------------------


def points(
    *seconds: object, k: object = 32, n: object = 32, rows: Sequence[object] = (1, 2, 4), **more: object
) -> dict:
    return {"linear": [{"k": k, "n": n, "points": [[r, s] for r, s in zip(rows, seconds, strict=False)], **more}]}


IMPOSSIBLE = (
    *({"linear": []}, {"linear": CURVES["linear"] * 1000}),
    *(points(*s) for s in ((0.0, 0.0), (-1e-5, 1e-4), (1e-5, 10**400), (1e-5, float("inf")), (1e-3, 1e-5))),
    *(points(*s) for s in ((1e-5, True), (1e-5, "1"), (1e9,))),
    *(
        points(1e-5, n=0),
        points(1e-5, 1e-5, rows=(4, 2)),
        points(1e-5, storage="f64"),
        points(1e-5, 2e-5, rows=(1.2, 1.7)),
    ),
    *({"attention_flops_per_s": 0}, {"attention_flops_per_s": -1e9}, {"rowwise_bytes_per_s": 10**400}),
    *({"op_overhead_s": 1e9}, {"frame_s": -1}, {"copy_bytes_per_s": 1e300}),
    *({"mesh_frame_s": "fast"}, {"mesh_copy_bytes_per_s": 0}),
)


ABSURD = ({"largest_packet_bytes": 1}, {"cores": 0}, {"threads": 1 << 40}, {"memory_budget_bytes": 1 << 60})


@pytest.mark.parametrize("wrong", [*ABSURD, *({"curves": {**CURVES, **curves}} for curves in IMPOSSIBLE)], ids=str)
def test_a_device_with_implausible_caps_is_unused_and_named_once(wrong: dict[str, object]) -> None:
    site = settled("a")
    site.event(interface.DeviceCaps("a", replace(caps("a", 1), **wrong)))
    for _ in range(3):
        site.event(interface.DeviceCaps("b", replace(caps("b", 1), **wrong)))
    site.event(interface.DeviceStatus("b", Status("online", 1)))
    site.tick(1.1)
    assert set(site.session.fleet.usable()) == {"a"}, "its earlier caps still count"
    assert set(site.session.fleet.unused_reasons()) == {"b"}
    assert site.notes()["refused"] == 2
    assert site.session.counters["foreign_caps"] == 4
    site.join("b")
    assert not site.session.fleet.unused_reasons()


@pytest.mark.parametrize(
    "wrong",
    [
        {"peers": {"b": LinkReport(1e12, None)}},
        {"slowdown": 1e12},
        {"round_trip_s": -5.0},
        {"round_trip_s": 1e12},
        {"bandwidth_bytes_per_s": 0.0},
        {"bandwidth_bytes_per_s": -1e9},
        {"peers": {"b": LinkReport(1e-3, 1e-9)}},
    ],
    ids=str,
)
def test_only_the_implausible_numbers_of_a_heartbeat_are_ignored(wrong: dict[str, float]) -> None:
    site = settled("a")
    estimates = site.session.fleet.estimates
    site.event(interface.DeviceHeartbeat("a", heartbeat(1)))
    rate, slowdown = estimates.link("a").up_bytes_per_s, estimates.slowdown("a")
    for _ in range(10):
        site.now += 1
        site.event(interface.DeviceHeartbeat("a", replace(heartbeat(1), **wrong)))
        site.event(interface.Tick())
    assert "a" in site.session.fleet.usable()
    assert estimates.slowdown("a") == slowdown
    assert 0 <= estimates.link("a").latency_s < 1
    assert estimates.link("a").up_bytes_per_s >= rate > 1
    assert site.session.counters["implausible_heartbeat"] == 10
    assert not estimates.peer_links("a")
    assert site.notes()["refused"] == 1


def priced(question: Question) -> Decision:
    decision = everyone(question)
    chosen, seconds = decision.chosen, price(question, decision.chosen.plan).seconds
    plan = replace(chosen.plan, predicted_s=seconds, predicted_tokens=question.shape.size)
    chosen = replace(chosen, plan=plan, price=replace(chosen.price, seconds=seconds))
    return replace(decision, chosen=chosen, ranking=(chosen,))


def test_a_snapshot_has_the_simulation_of_its_plan() -> None:
    def simulated(question: Question) -> Decision:
        chosen = everyone(question).chosen
        plan = make_plan(question.spec, chosen.plan, "row", chosen.plan.options, (1.0, 1.0))
        candidate = replace(chosen, plan=plan, price=price(question, plan, full=True))
        return Decision(candidate, (candidate,), "", question.cluster, programs_digest(question.spec, plan))

    site = settled("a", "b", decider=simulated)
    (before,) = site.session.snapshot()
    assert before.simulated == site.session.groups.default("m").plans.active.decision.chosen.price.simulated[0]
    site.serve("r1", 16)
    site.drift(dict.fromkeys(site.boots, 4.0), 40)
    (slower,) = site.session.snapshot()
    assert slower.plan.version == before.plan.version
    assert slower.simulated.shape == before.simulated.shape
    assert slower.simulated.simulation.seconds > before.simulated.simulation.seconds


# -- cost of frames between peers -------------------------------------------------------------------------------------

HERE, THERE = Endpoint("127.0.0.1", 1), Endpoint("192.0.2.7", 2)
MUCH = 1 << 20
Cost = tuple[float | None, float | None]


def as_the_planner_sees(endpoint: Endpoint | None, costs: dict[str, tuple[Cost, float]]) -> Cluster:
    """Return the cluster of devices that report costs of frames and bytes, and a slowdown."""
    members = Fleet(secret=bytes(32))
    for name, ((frame_s, byte_s), slowdown) in costs.items():
        members.record_caps(name, replace(caps(name, 1), endpoint=endpoint))
        members.record_status(name, Status("online", 1), 0.0)
        for i in range(30):  # each report differs a little, because repeated ones are ignored
            byte_s = byte_s and byte_s * (1 + 1e-6)
            beat = replace(heartbeat(1, slowdown * (1 + 1e-6 * i)), peer_frame_s=frame_s, peer_byte_s=byte_s)
            members.record_heartbeat(name, beat, float(i))
    return members.cluster({})


def as_a_client_sees(endpoint: Endpoint | None, costs: dict[str, tuple[Cost, float]]) -> Cluster:
    devices = [
        {
            "device": name,
            "curves": caps(name, 1).curves,
            "memory_budget_bytes": 1,
            "endpoint": endpoint and asdict(endpoint),
            "heartbeat": {"slowdown": slowdown, "peer_frame_s": frame_s, "peer_byte_s": byte_s},
        }
        for name, ((frame_s, byte_s), slowdown) in costs.items()
    ]
    return cluster_of_devices(devices, [*costs])


NONE = (None, None)
SEE = pytest.mark.parametrize("see", [as_the_planner_sees, as_a_client_sees])


@SEE
@pytest.mark.parametrize("endpoint", [HERE, None, THERE], ids=["on loopback", "no endpoint", "network"])
def test_without_measurements_frames_have_the_cost_on_loopback_or_of_packets(see, endpoint: Endpoint | None) -> None:
    for device in see(endpoint, {"a": (NONE, 1.0), "b": (NONE, 3.0)}).devices.values():
        frame_s, byte_s = device.mesh_frame_s, 1 / device.mesh_copy_bytes_per_s
        if endpoint is THERE:
            frame_s, byte_s = default_frame_cost(device)
            assert byte_s > 1.5 / device.mesh_copy_bytes_per_s
        expected = pytest.approx(device.slowdown * (2 * frame_s + MUCH * byte_s))
        assert device.frame_seconds(2, MUCH, "mesh") == expected


@SEE
def test_a_device_without_measurements_has_the_mean_cost_of_others(see) -> None:
    costs = {"a": (NONE, 3.0), "b": ((2e-4, 1e-8), 1.0), "c": ((4e-4, 3e-8), 1.0)}
    devices = see(THERE, costs).devices
    assert devices["b"].frame_seconds(2, MUCH, "mesh") == pytest.approx(2 * 2e-4 + MUCH * 1e-8, rel=0.05)
    expected = devices["a"].slowdown * (2 * 3e-4 + MUCH * 2e-8)
    assert devices["a"].frame_seconds(2, MUCH, "mesh") == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    "costs", [(1e12, 1e-8), (1e-4, 1.0), (None, 1e-8), (1e-4, None), (None, None), (-1.0, 1e-8)], ids=str
)
def test_incomplete_and_implausible_costs_are_ignored(costs: Cost) -> None:
    site = settled("a")
    measured = site.session.fleet.cluster({}).devices["a"].frame_seconds(2, MUCH, "mesh")
    site.event(interface.DeviceHeartbeat("a", replace(heartbeat(1), peer_frame_s=costs[0], peer_byte_s=costs[1])))
    assert site.session.fleet.cluster({}).devices["a"].frame_seconds(2, MUCH, "mesh") == measured


@pytest.mark.parametrize(
    ("endpoint", "factor", "again"),
    [(THERE, 4.0, True), (THERE, 1.0, False), (HERE, 4.0, False)],
    ids=["unexpected", "expected", "on loopback"],
)
def test_unexpected_costs_of_frames_start_a_search(endpoint, factor: float, again: bool) -> None:
    site = Site(decider=everyone)
    for name in "ab":
        site.boots[name] = 1
        site.event(interface.DeviceCaps(name, replace(caps(name, 1), endpoint=endpoint)))
        site.event(interface.DeviceHeartbeat(name, heartbeat(1)))
        site.event(interface.DeviceStatus(name, Status("online", 1)))
    site.tick(FIRST_PROBES_S)
    site.settle()
    site.serve("r1")
    cost = default_frame_cost(site.session.fleet.cluster({}).devices["a"])
    costs = {"peer_frame_s": factor * cost.frame_s, "peer_byte_s": factor * cost.byte_s}
    for i in range(40):
        site.now += 1
        for name in "ab":
            beat = replace(heartbeat(1), **{key: value * (1 + 1e-3 * (i % 3)) for key, value in costs.items()})
            site.event(interface.DeviceHeartbeat(name, beat))
        site.event(interface.Tick())
    assert bool(site.notes()["drift"]) is again


# -- estimates from runs ----------------------------------------------------------------------------------------------


def computing(question: Question) -> Decision:
    """Decide for a plan with 10 ms of computation on each device."""
    decision = priced(question)
    chosen = decision.chosen
    use = {device: replace(used, compute_s=0.01) for device, used in chosen.price.use.items()}
    return replace(decision, chosen=replace(chosen, price=replace(chosen.price, use=use)))


def computed(question: Question, plan: Plan) -> Candidate:
    """Return the active plan with the price of `computing`."""
    return replace(computing(question).chosen, plan=plan)


def run_times(site: Site, compute_us: int, times: int) -> None:
    plan, site.compute_us = site.plan, compute_us
    for _ in range(times):
        site.submit(f"r{len(site.work) + 1}", plan.predicted_tokens)
        site.now += 0.1
        site.answer(len(site.work))
        site.event(interface.Tick())


def test_compute_times_of_runs_overrule_contradicting_heartbeats() -> None:
    site = settled("a", "b", decider=computing, pricer=computed)
    for _ in range(30):
        site.drift({"a": 0.2}, 1)
        run_times(site, 10_000, 1)
    estimates = site.session.fleet.estimates
    assert estimates.slowdown("a") == pytest.approx(estimates.slowdown("b"), rel=0.1)
    assert any("a contradicts itself" in c.text for c in site.commands if isinstance(c, interface.LogEvent))
    run_times(site, 30_000, 3)
    assert estimates.slowdown("a") == pytest.approx(3.0, rel=0.2)
    assert site.session.fleet.cluster({}).devices["b"].slowdown == pytest.approx(3.0, rel=0.2)


def test_late_runs_during_a_load_do_not_stop_it() -> None:
    site = settled("a")
    serving = site.plan
    site.join("b")
    site.tick(1.1)
    coming = site.session.groups.default("m").plans.preparing
    assert coming is not None
    for run in (1, 2):
        site.submit(f"r{run}")
        site.now += 1000 * serving.predicted_s
        progress = messages.RunProgress("m", serving.version, run, 0)
        for _ in range(3):  # a run is late once
            site.receive("a", progress)
        site.answer(run)
    assert site.session.groups.default("m").plans.preparing is coming
    assert site.plan == serving
    assert site.session.fleet.estimates.last_change_s < 0
