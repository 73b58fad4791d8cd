"""What devices report of themselves, their links and their runs: what of it counts, and when it changes a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from math import log

import pytest
from scripted_site import CURVES, SPEC, Site, caps, everyone, heartbeat, settled

from hepti_mqtt.client.described import cluster_of_devices
from hepti_mqtt.cost.profiles import Cluster, default_frame_cost
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import make_plan, programs_digest
from hepti_mqtt.planner import Candidate, Decision, Question, price
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.messages import Endpoint, LinkReport, Status
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.fleet import FIRST_PROBES_S, Fleet
from hepti_mqtt.runtime.coordinator.requests import Pins


def with_limits(**limits: int) -> Site:
    """Return a site whose devices have met these packet limits."""
    site = Site(searches=False)
    for name, limit in limits.items():
        site.boots[name] = 1
        site.event(interface.DeviceCaps(name, replace(caps(name, 1), largest_packet_bytes=limit)))
        site.event(interface.DeviceStatus(name, Status("online", 1)))
    site.tick(1.1)
    return site


def test_search_knows_the_packet_limit_that_each_device_met() -> None:
    site = with_limits(a=0, b=50_000, c=60_000, d=4 << 20, e=256 << 20)
    assert site.solves[-1].question.packet_bytes == {"b": 50_000, "c": 60_000}, "what passed on trial is no limit"


def test_a_device_with_a_packet_limit_limits_its_own_plans_alone() -> None:
    site = with_limits(a=0, b=5_000)
    site.solve(site.solves[-1])
    site.ready()
    assert site.plan is not None
    assert site.plan.devices == ("a",), "the weights do not get through to the other one"
    site.submit("r1")
    site.answer(1)
    assert "r1" in site.answers


@pytest.mark.parametrize(
    "absurd",
    [{"largest_packet_bytes": 1}, {"cores": 0}, {"threads": 1 << 40}, {"memory_budget_bytes": 1 << 60}],
    ids=lambda absurd: next(iter(absurd)),
)
def test_a_device_that_says_what_cannot_be_is_put_aside_and_named(absurd: dict[str, int]) -> None:
    site = settled("a")
    site.event(interface.DeviceCaps("a", replace(caps("a", 1), **absurd)))
    site.event(interface.DeviceCaps("b", replace(caps("b", 1), **absurd)))
    site.event(interface.DeviceStatus("b", Status("online", 1)))
    site.tick(1.1)
    assert set(site.session.fleet.usable()) == {"a"}, "one that was believed before serves on with that"
    assert set(site.session.fleet.unused_reasons()) == {"b"}
    site.submit("r1")
    site.answer(1)
    assert "r1" in site.answers
    site.join("b")
    assert not site.session.fleet.unused_reasons()


def test_drift_plans_again_and_keeps_a_plan_that_is_no_worse() -> None:
    site = settled("a", "b")
    plan = site.plan
    site.submit("r1")
    site.answer(1)
    solves = len(site.solves)
    site.drift({plan.devices[0]: 8.0}, 5)
    assert len(site.solves) > solves
    assert site.notes()["drift"] >= 1
    site.ready()
    assert site.plan.devices != plan.devices, "another device is faster now"


def test_a_device_that_slows_down_while_a_search_runs_is_no_part_of_what_its_plan_was_made_for() -> None:
    site = Site(searches=False)
    site.join("a", "b")
    site.tick(1.1)
    search = site.solves[-1]
    site.drift({"b": 4.0}, 2)
    site.solve(search)
    site.ready()
    plan = site.plan
    assert plan is not None
    site.submit("r1")
    site.answer(1)
    site.drift({"b": 4.0}, 20)
    assert site.notes()["drift"] == 1
    assert site.solves[-1] is not search


def test_an_answer_knows_what_runs_before_it_had_taught() -> None:
    site = settled("a", "b")
    plan = site.plan
    (model,) = site.session.groups.defaults()
    site.submit("r1")
    for _ in range(8):
        model.durations.record_run(
            plan, plan.predicted_tokens, 3 * plan.predicted_s, site.now, model.judgement.judged_s
        )
    site.answer(1)
    site.submit("r2")
    site.answer(2)
    taught = [stats.expectation.mean for name in ("r1", "r2") for stats in site.answers[name].stats]
    assert taught == pytest.approx([1.0, 3.0]), "as it was when each was dispatched"


def test_runs_on_a_link_that_had_failed_unnoticed_are_no_fault_of_the_method() -> None:
    site = settled("a", "b", decider=priced)
    (model,) = site.session.groups.defaults()
    plan = site.plan
    for second in range(30):
        site.now += 1
        beat = replace(heartbeat(1), bandwidth_bytes_per_s=1e8 + second)
        site.event(interface.DeviceHeartbeat(plan.devices[0], beat))
        site.event(interface.DeviceHeartbeat(plan.devices[1], heartbeat(1)))
        model.durations.record_run(plan, plan.predicted_tokens, plan.predicted_s, site.now, model.judgement.judged_s)
    for second in range(8):
        site.now += 1
        beat = replace(heartbeat(1), bandwidth_bytes_per_s=1e6 + second)
        site.event(interface.DeviceHeartbeat(plan.devices[0], beat))
        site.event(interface.DeviceHeartbeat(plan.devices[1], heartbeat(1)))
        site.event(interface.Tick())
        model.durations.record_run(
            plan, plan.predicted_tokens, 3 * plan.predicted_s, site.now, model.judgement.judged_s
        )
    assert model.durations.methods.factor(plan) == pytest.approx(1.0, rel=0.15)


def test_a_device_outside_of_the_plan_starts_a_search_by_what_has_become_better_alone() -> None:
    site = settled("a", "b")
    plan = site.plan
    assert len(plan.devices) == 1
    (outside,) = {"a", "b"} - set(plan.devices)
    site.submit("r1")
    site.answer(1)
    site.drift({outside: 0.95}, 20)  # whatever the first heartbeats told is planned for then
    searched, estimates = site.notes()["drift"], site.session.fleet.estimates
    then = estimates.means()
    site.drift({outside: 8.0}, 30)
    assert site.notes()["drift"] == searched
    assert estimates.slowdown(outside) == pytest.approx(8.0, rel=0.1)
    assert estimates.moved(then, plan.devices, site.now) is None
    assert outside in str(estimates.moved(then, (outside,), site.now))
    faster = {**then, ("slowdown", (outside,)): log(9.0), ("rate up", (outside,)): log(5e7)}
    assert "rate" in str(estimates.moved(faster, plan.devices, site.now))


def test_a_model_that_nobody_asks_is_not_planned_again_for_drift() -> None:
    site = settled("a", "b", decider=everyone)
    plan = site.plan
    solves = len(site.solves)
    site.drift({plan.devices[0]: 8.0}, 40)
    assert len(site.solves) == solves
    site.submit("r1")
    site.answer(1)
    site.drift({plan.devices[0]: 8.0}, 7)
    assert len(site.solves) == solves + 1


def test_what_is_observed_while_weights_are_loaded_starts_no_search() -> None:
    site = Site("m", "other", decider=everyone)
    site.join("a", "b")
    site.tick(1.1)
    for device, message in [told for told in site.told if isinstance(told[1], messages.Prepare)]:
        plan = Plan.from_dict(message.plan)
        digest = programs_digest(SPEC, plan)
        site.event(
            interface.DeviceMessage(
                device, messages.Ready(message.transaction_id, plan.model, plan.version, 1000, digest)
            )
        )
    site.submit("r1")
    site.answer(1)
    pinned = Pins(strategy="row", options={"variant": "kv"}, devices=("a", "b"))
    site.drift({}, 30)
    searched = site.notes()["drift"]
    site.submit("r2", model="other", pins=pinned)
    site.tick(0.1)
    site.drift(dict.fromkeys(site.boots, 8.0), 20)  # the other model's plan is on its way all the time
    assert site.notes()["drift"] == searched
    for name in site.boots:
        assert site.session.fleet.estimates.slowdown(name) < 1.6
    site.ready()
    site.drift(dict.fromkeys(site.boots, 1.0), 30)
    assert site.notes()["drift"] == searched


def test_a_device_that_starts_anew_is_not_what_it_was() -> None:
    site = Site(searches=False)
    site.join("a", "b")
    site.drift({"a": 8.0}, 20)
    estimates = site.session.fleet.estimates
    assert estimates.slowdown("a") == pytest.approx(8.0, rel=0.1)
    site.join("a", boot=2)
    assert estimates.slowdown("a") == 1.0
    assert estimates.slowdown("b") == pytest.approx(1.0, abs=0.01)


def test_a_moment_of_load_is_not_what_a_device_is() -> None:
    site = Site(searches=False)
    site.join("a")
    site.drift({}, 30)
    site.drift({"a": 6.0}, 1)
    assert site.session.fleet.cluster({}).devices["a"].slowdown < 1.2
    site.drift({"a": 6.0}, 4)
    assert site.session.fleet.cluster({}).devices["a"].slowdown == pytest.approx(6.0, rel=0.1)


def test_devices_of_one_kind_that_differ_by_noise_get_equal_slowdowns() -> None:
    site = Site(searches=False)
    site.join("a", "b", "c")
    site.drift({"a": 1.06, "b": 1.0, "c": 0.97}, 40)
    found = [profile.slowdown for profile in site.session.fleet.cluster({}).devices.values()]
    assert max(found) / min(found) < 1.05
    site.drift({"b": 3.0}, 40)
    found = site.session.fleet.cluster({}).devices
    assert found["b"].slowdown == pytest.approx(3.0, rel=0.1)
    assert found["a"].slowdown == pytest.approx(1.0, rel=0.1)


def test_plans_are_made_with_what_devices_measured_of_their_peers() -> None:
    found = Fleet(secret=bytes(32))
    for name in ("a", "b", "c"):
        endpoint = None if name == "c" else Endpoint("192.0.2.7", 1883)
        found.record_caps(name, replace(caps(name, 1), endpoint=endpoint))
        found.record_status(name, Status("online", 1), 0.0)
    reports = {"b": LinkReport(4e-3, None), "c": LinkReport(2e-3, 3e7), "gone": LinkReport(1e-3, 1e6)}
    found.record_heartbeat("a", replace(heartbeat(1), peers=reports), 0.0)
    found.record_heartbeat("b", replace(heartbeat(1), peers={"a": LinkReport(6e-3, 1e7)}), 0.0)
    late = replace(heartbeat(1), peers={"a": LinkReport(5e-3, 5e6)})
    found.record_heartbeat("b", late, 1.0, busy=True, loading=True)
    links = found.cluster({}).peer_links
    assert links["a", "b"].bytes_per_s is None, "as a has measured it"
    assert links["b", "a"].bytes_per_s == pytest.approx(1e7, rel=0.2), "a busy link shows less"
    assert links["c", "a"] == links["a", "c"], "c has told nothing"
    assert ("b", "c") not in links
    assert not [pair for pair in links if "gone" in pair]
    assert found.cluster({}).endpoints == {"a", "b"}


# -- numbers that cannot be -------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("wrong", IMPOSSIBLE, ids=str)
def test_caps_that_no_device_can_have_are_refused_and_the_device_is_named_once(wrong: dict[str, object]) -> None:
    site = Site()
    for _ in range(3):
        site.event(interface.DeviceCaps("x", replace(caps("x", 1), curves={**CURVES, **wrong})))
    site.event(interface.DeviceStatus("x", Status("online", 1)))
    site.join("a")
    site.settle()
    assert set(site.solves[-1].question.cluster.devices) == {"a"}
    assert site.notes()["refused"] == 1
    assert site.session.counters["foreign_caps"] == 3


def test_memory_that_no_device_has_is_refused() -> None:
    site = Site()
    site.join("x", memory=1 << 60)
    assert site.notes()["refused"] == 1
    assert not site.session.fleet.usable()


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
def test_a_heartbeat_is_believed_but_for_numbers_that_cannot_be(wrong: dict[str, float]) -> None:
    site = settled("a")
    estimates = site.session.fleet.estimates
    site.event(interface.DeviceHeartbeat("a", heartbeat(1)))
    rate, slowdown = estimates.link("a").up_bytes_per_s, estimates.slowdown("a")
    for _ in range(10):
        site.now += 1
        site.event(interface.DeviceHeartbeat("a", replace(heartbeat(1), **wrong)))
        site.event(interface.Tick())
    assert "a" in site.session.fleet.usable(), "it is there"
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


def test_a_plan_that_is_found_again_has_its_price_by_the_measurements_of_now() -> None:
    site = settled("a", "b", decider=priced)
    plan = site.plan
    site.submit("r1")
    site.answer(1)
    (before,) = site.session.snapshot()
    site.drift(dict.fromkeys(site.boots, 2.0), 40)
    assert site.notes()["drift"] >= 1
    now = site.plan
    assert now.version == plan.version, "the devices know of nothing"
    assert now.predicted_s / now.predicted_tokens > 1.5 * plan.predicted_s / plan.predicted_tokens
    (after,) = site.session.snapshot()
    assert after.cluster != before.cluster
    assert after.plan.predicted_s == now.predicted_s


def test_the_own_simulation_of_the_search_goes_with_the_plan_that_it_simulated() -> None:
    def simulated(question: Question) -> Decision:
        chosen = everyone(question).chosen
        plan = make_plan(question.spec, chosen.plan, "row", chosen.plan.options, (1.0, 1.0))
        candidate = replace(chosen, plan=plan, price=price(question, plan, full=True))
        return Decision(candidate, (candidate,), "", question.cluster, programs_digest(question.spec, plan))

    site = settled("a", "b", decider=simulated)
    (before,) = site.session.snapshot()
    assert before.simulated == site.session.groups.default("m").plans.active.decision.chosen.price.simulated[0]
    site.submit("r1", 16)
    site.answer(1)
    site.drift(dict.fromkeys(site.boots, 4.0), 40)
    (slower,) = site.session.snapshot()
    assert slower.plan.version == before.plan.version
    assert slower.simulated.shape == before.simulated.shape
    assert slower.simulated.simulation.seconds > before.simulated.simulation.seconds, "by the measurements of now"


# -- what frames between peers cost -----------------------------------------------------------------------------------

HERE, THERE = Endpoint("127.0.0.1", 1), Endpoint("192.0.2.7", 2)
MUCH = 1 << 20
Told = tuple[float | None, float | None]


def as_the_planner_sees(endpoint: Endpoint | None, told: dict[str, tuple[Told, float]]) -> Cluster:
    """Return the cluster of devices that told what frames and bytes cost, and a slowdown."""
    members = Fleet(secret=bytes(32))
    for name, ((frame_s, byte_s), slowdown) in told.items():
        members.record_caps(name, replace(caps(name, 1), endpoint=endpoint))
        members.record_status(name, Status("online", 1), 0.0)
        for i in range(30):  # each of them a little different, or it would be no news
            byte_s = byte_s and byte_s * (1 + 1e-6)
            beat = replace(heartbeat(1, slowdown * (1 + 1e-6 * i)), peer_frame_s=frame_s, peer_byte_s=byte_s)
            members.record_heartbeat(name, beat, float(i))
    return members.cluster({})


def as_a_client_sees(endpoint: Endpoint | None, told: dict[str, tuple[Told, float]]) -> Cluster:
    found = [
        {
            "device": name,
            "curves": caps(name, 1).curves,
            "memory_budget_bytes": 1,
            "endpoint": endpoint and asdict(endpoint),
            "heartbeat": {"slowdown": slowdown, "peer_frame_s": frame_s, "peer_byte_s": byte_s},
        }
        for name, ((frame_s, byte_s), slowdown) in told.items()
    ]
    return cluster_of_devices(found, [*told])


NONE = (None, None)
SEE = pytest.mark.parametrize("see", [as_the_planner_sees, as_a_client_sees])


@SEE
@pytest.mark.parametrize("endpoint", [HERE, None], ids=["on loopback", "no endpoint"])
def test_frames_on_loopback_cost_what_was_measured_there(see, endpoint: Endpoint | None) -> None:
    for device in see(endpoint, {"a": (NONE, 1.0), "b": (NONE, 3.0)}).devices.values():
        cost = 2 * device.mesh_frame_s + MUCH / device.mesh_copy_bytes_per_s
        assert device.frame_seconds(2, MUCH, "mesh") == pytest.approx(device.slowdown * cost)


@SEE
def test_before_anybody_has_met_tensors_bytes_cost_packets_off_loopback(see) -> None:
    for device in see(THERE, {"a": (NONE, 1.0), "b": (NONE, 3.0)}).devices.values():
        frame_s, byte_s = default_frame_cost(device)
        assert device.frame_seconds(2, 0, "mesh") == pytest.approx(2 * device.slowdown * frame_s)
        assert device.frame_seconds(0, MUCH, "mesh") == pytest.approx(device.slowdown * MUCH * byte_s)
        assert byte_s > 1.5 / device.mesh_copy_bytes_per_s


@SEE
def test_who_has_met_none_is_priced_as_others_of_the_site_have_met_them(see) -> None:
    told = {"a": (NONE, 3.0), "b": ((2e-4, 1e-8), 1.0), "c": ((4e-4, 3e-8), 1.0)}
    devices = see(THERE, told).devices
    assert devices["b"].frame_seconds(2, MUCH, "mesh") == pytest.approx(2 * 2e-4 + MUCH * 1e-8, rel=0.05)
    expected = devices["a"].slowdown * (2 * 3e-4 + MUCH * 2e-8)
    assert devices["a"].frame_seconds(2, MUCH, "mesh") == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    "told", [(1e12, 1e-8), (1e-4, 1.0), (None, 1e-8), (1e-4, None), (None, None), (-1.0, 1e-8)], ids=str
)
def test_half_a_word_and_an_implausible_one_count_as_none(told: Told) -> None:
    site = settled("a")
    measured = site.session.fleet.cluster({}).devices["a"].frame_seconds(2, MUCH, "mesh")
    site.event(interface.DeviceHeartbeat("a", replace(heartbeat(1), peer_frame_s=told[0], peer_byte_s=told[1])))
    assert site.session.fleet.cluster({}).devices["a"].frame_seconds(2, MUCH, "mesh") == measured


@pytest.mark.parametrize(
    ("endpoint", "factor", "again"),
    [(THERE, 4.0, True), (THERE, 1.0, False), (HERE, 4.0, False)],
    ids=["others than foreseen", "as foreseen", "on loopback"],
)
def test_plans_are_made_again_when_frames_cost_other_than_was_foreseen(endpoint, factor: float, again: bool) -> None:
    site = Site(decider=everyone)
    for name in "ab":
        site.boots[name] = 1
        site.event(interface.DeviceCaps(name, replace(caps(name, 1), endpoint=endpoint)))
        site.event(interface.DeviceHeartbeat(name, heartbeat(1)))
        site.event(interface.DeviceStatus(name, Status("online", 1)))
    site.tick(FIRST_PROBES_S)
    site.settle()
    site.submit("r1")
    site.answer(1)
    cost = default_frame_cost(site.session.fleet.cluster({}).devices["a"])
    told = {"peer_frame_s": factor * cost.frame_s, "peer_byte_s": factor * cost.byte_s}
    for i in range(40):
        site.now += 1
        for name in "ab":
            beat = replace(heartbeat(1), **{key: value * (1 + 1e-3 * (i % 3)) for key, value in told.items()})
            site.event(interface.DeviceHeartbeat(name, beat))
        site.event(interface.Tick())
    assert bool(site.notes()["drift"]) is again


# -- what runs say of devices -----------------------------------------------------------------------------------------


def computing(question: Question) -> Decision:
    """Decide for a plan in which each device computes for 10 ms."""
    decision = priced(question)
    chosen = decision.chosen
    use = {device: replace(used, compute_s=0.01) for device, used in chosen.price.use.items()}
    return replace(decision, chosen=replace(chosen, price=replace(chosen.price, use=use)))


def computed(question: Question, plan: Plan) -> Candidate:
    """Return the active plan with such a price."""
    return replace(computing(question).chosen, plan=plan)


def served(site: Site, compute_us: int, times: int) -> None:
    plan, site.compute_us = site.plan, compute_us
    for _ in range(times):
        site.submit(f"r{len(site.work) + 1}", plan.predicted_tokens)
        site.now += 0.1
        site.answer(len(site.work))
        site.event(interface.Tick())


def test_runs_say_how_slow_devices_are_and_their_meters_are_held_against_that() -> None:
    site = settled("a", "b", decider=computing, pricer=computed)
    for _ in range(30):
        site.drift({"a": 0.2}, 1)
        served(site, 10_000, 1)
    estimates = site.session.fleet.estimates
    assert estimates.slowdown("a") == pytest.approx(estimates.slowdown("b"), rel=0.1)
    assert any("a contradicts itself" in c.text for c in site.seen if isinstance(c, interface.LogEvent))
    served(site, 30_000, 3)
    assert estimates.slowdown("a") == pytest.approx(3.0, rel=0.2)
    assert site.session.fleet.cluster({}).devices["b"].slowdown == pytest.approx(3.0, rel=0.2)


def test_runs_beside_loads_say_nothing() -> None:
    site = settled("a", "b", decider=computing, pricer=computed)
    served(site, 10_000, 10)
    pinned = Pins(strategy="row", options={"variant": "kv"}, devices=("a", "b"))
    site.submit("pinned", pins=pinned)
    plan, site.compute_us = site.plan, 40_000
    for _ in range(4):
        job = site.submit(f"late{len(site.seen)}", plan.predicted_tokens)
        site.now += 0.1
        if job.key.id not in site.answers:
            site.answer(max(site.work))
    assert site.session.fleet.estimates.slowdown("a") == pytest.approx(1.0, rel=0.1)


def test_a_load_goes_on_although_runs_are_late_during_it() -> None:
    site = settled("a")
    serving = site.plan
    assert serving is not None
    site.join("b")
    site.tick(1.1)
    coming = site.session.groups.default("m").plans.preparing
    assert coming is not None
    for run in (1, 2):
        site.submit(f"r{run}")
        site.now += 1000 * serving.predicted_s
        said = messages.RunProgress("m", serving.version, run, 0)
        for _ in range(3):  # a run is late once
            site.event(interface.DeviceMessage("a", said))
        site.answer(run)
    assert site.session.groups.default("m").plans.preparing is coming
    assert site.plan == serving
    assert site.session.fleet.estimates.last_change_s < 0, "a run during a load says nothing of devices"
