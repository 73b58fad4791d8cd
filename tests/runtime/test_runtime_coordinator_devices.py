"""The coordinator as devices join, load, fall silent, drift and leave, on a virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted_site import CURVES, LOST_S, SPEC, Site, caps, everyone, heartbeat

from hepti_mqtt.cluster import Link, PeerLink
from hepti_mqtt.errors import ModelError, PlanError, RemoteError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import programs_digest
from hepti_mqtt.planner import Decision
from hepti_mqtt.runtime.planner import commands, events
from hepti_mqtt.runtime.planner.dispatcher import OVERDUE_MOST_S
from hepti_mqtt.runtime.planner.flight import Pins
from hepti_mqtt.runtime.planner.membership import ASIDE_S, CALM_S, MEMBERS, RETURN_S, SLOWDOWNS, Membership
from hepti_mqtt.runtime.planner.rollout import ASK_AGAIN_S, REFUSALS, RETRY_S
from hepti_mqtt.wire import messages
from hepti_mqtt.wire.described import Status
from hepti_mqtt.wire.peers import Endpoint, LinkReport


def test_a_site_without_devices_says_so() -> None:
    site = Site()
    site.submit("r1")
    site.tick(0.0)
    site.tick(1.1)
    assert isinstance(site.errors["r1"], PlanError)
    assert "no device is online" in str(site.errors["r1"])
    site.submit("r2")
    assert isinstance(site.errors["r2"], PlanError), "the next one is refused at once"
    site.join("a")
    site.submit("r3")
    site.settle()
    site.answer(1)
    assert "r3" in site.answers


def test_lost_device_in_flight_is_issued_again_once_under_a_new_plan() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    first = site.settle()
    assert set(first.devices) == {"a", "b"}
    site.submit("r1")
    site.leave("b")
    assert ("a", messages.Cancel("m", first.epoch, 1)) in site.told
    site.ready()
    assert list(site.work) == [1, 2]
    assert site.work[2].epoch > first.epoch
    site.answer(2)
    site.answer(1)  # what the survivors of the first run still send comes late
    assert site.answers["r1"].plan.devices == ("a",)
    assert site.session.counters["late"] > 0


def test_nobody_is_silent_while_what_was_said_waits_to_be_read() -> None:
    site = Site()
    site.join("a")
    site.now += LOST_S
    site.event(events.Tick(behind=True))
    assert "a" in site.session.membership.usable()
    site.event(events.DeviceHeartbeat("a", heartbeat(1)))
    site.event(events.Tick())
    assert "a" in site.session.membership.usable()
    site.now += LOST_S
    site.event(events.Tick())
    assert "a" not in site.session.membership.usable()


def test_silent_device_counts_as_lost_and_comes_back_with_a_heartbeat() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.settle()
    site.submit("r1")
    del site.boots["b"]
    site.tick(LOST_S)
    site.ready()
    site.answer(2)
    assert site.answers["r1"].plan.devices == ("a",)
    site.boots["b"] = 1
    site.tick(0.1)
    assert site.notes()["joined"] == 3
    site.settle()
    assert set(site.session.plan("m").devices) == {"a", "b"}


def test_silence_while_the_planner_is_offline_condemns_nobody() -> None:
    site = Site()
    site.join("a")
    plan = site.settle()
    site.submit("r1")
    site.event(events.Connection(online=False))
    site.tick(100, alive=False)
    site.event(events.Connection(online=True))
    site.tick(3, alive=False)
    assert site.session.plan("m") == plan
    assert "r1" in site.errors, "but deadlines hold"
    site.tick(LOST_S, alive=False)
    assert site.session.plan("m") is None


def test_device_that_rejoins_drops_what_it_holds() -> None:
    site = Site()
    site.join("a")
    site.settle()
    site.told.clear()
    site.leave("a")
    site.join("a")
    kinds = [type(m) for d, m in site.told if d == "a"]
    assert messages.Drain in kinds
    assert messages.Prepare not in kinds[: kinds.index(messages.Drain)]


def test_restarted_agent_replaces_its_former_self_and_a_late_will_changes_nothing() -> None:
    site = Site()
    site.join("a", boot=1)
    site.settle()
    site.submit("r1")
    site.join("a", boot=2)
    site.event(events.DeviceStatus("a", Status("offline", 1)))
    site.settle()
    site.answer(max(site.work))
    assert "r1" in site.answers


def test_device_that_leaves_during_the_search_is_not_planned_with() -> None:
    site = Site(searches=False, decider=everyone)
    site.join("a", "b")
    site.tick(1.1)
    first = site.solves[0]
    site.leave("b")
    site.solve(first)
    assert not site.prepares()
    site.solve(site.solves[-1])
    assert set(site.prepares()) == {"a"}


def test_device_that_leaves_during_preparation_ends_it() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.tick(1.1)
    txn = site.prepares()["a"].txn
    site.leave("b")
    assert any(isinstance(m, messages.Release) for d, m in site.told if d == "a")
    assert site.prepares()["a"].txn > txn
    site.ready()
    assert site.session.plan("m").devices == ("a",)


def test_memory_refusal_swaps_plans_when_old_and_new_do_not_fit_together() -> None:
    site = Site(decider=everyone)
    site.join("a")
    old = site.settle()
    site.submit("r1")
    site.join("b")
    site.tick(1.1)
    refused = site.prepares()["a"]
    epoch = Plan.from_dict(refused.plan).epoch
    site.event(events.UpMessage("a", messages.Failed(refused.txn, "m", epoch, "memory", "too much", 1000)))
    assert site.prepares()["a"] == refused, "the run under the old plan comes first"
    site.answer(1)
    assert ("a", "m", old.epoch) in [(d, m.model, m.epoch) for d, m in site.told if isinstance(m, messages.Release)]
    assert site.prepares()["a"].txn > refused.txn
    site.ready()
    assert set(site.session.plan("m").devices) == {"a", "b"}
    assert "r1" in site.answers


def test_memory_refusal_without_another_plan_makes_the_next_question_tighter() -> None:
    site = Site()
    site.join("a", memory=1 << 24)
    site.tick(1.1)
    refused = site.prepares()["a"]
    epoch = Plan.from_dict(refused.plan).epoch
    site.event(events.UpMessage("a", messages.Failed(refused.txn, "m", epoch, "memory", "too much", 5 << 20)))
    site.tick(1.1)
    assert site.solves[-1].question.cluster.devices["a"].memory_bytes == (1 << 24) - (5 << 20)


def test_preparation_that_keeps_failing_ends_the_requests_that_wait() -> None:
    site = Site()
    site.join("a")
    site.submit("r1", within=1000)
    for _ in range(REFUSALS):
        site.tick(1.1)
        message = site.prepares()["a"]
        epoch = Plan.from_dict(message.plan).epoch
        site.event(events.UpMessage("a", messages.Failed(message.txn, "m", epoch, "wire", "corrupt tile", 0)))
    assert isinstance(site.errors["r1"], RemoteError)
    assert "corrupt tile" in str(site.errors["r1"])
    site.tick(RETRY_S + 0.1)
    site.ready()
    assert site.session.plan("m") is not None, "it tries again after a while"


def test_weights_that_cannot_be_read_end_the_requests_that_wait_at_once() -> None:
    site = Site()
    site.join("a")
    site.submit("r1", within=1000)
    site.tick(1.1)
    assert site.prepares()
    cut = ModelError("the file ends early")
    site.event(events.Unreadable("m", "b", cut))
    assert "r1" not in site.errors, "the plan is not for that device"
    site.event(events.Unreadable("m", "a", cut))
    assert site.errors["r1"] is cut
    site.submit("r2", within=1000)
    site.tick(RETRY_S + 0.1)
    site.event(events.Unreadable("m", "a", cut))
    assert site.errors["r2"] is cut
    site.tick(RETRY_S + 0.1)
    site.ready()
    assert site.session.plan("m") is not None, "the file may be whole again"


def test_prepare_that_was_lost_is_sent_again_to_those_who_are_not_ready() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.tick(1.1)
    first = site.prepares()
    site.ready("a")
    site.told.clear()
    site.tick(ASK_AGAIN_S - 0.5)
    assert not site.prepares()
    site.tick(1)
    assert site.prepares() == {"b": first["b"]}
    site.ready("b")
    assert site.session.plan("m") is not None


def test_preparation_without_progress_is_given_up() -> None:
    site = Site()
    site.join("a")
    site.tick(1.1)
    first = site.prepares()["a"]
    epoch = Plan.from_dict(first.plan).epoch
    for _ in range(30):
        site.tick(5)
    assert site.prepares()["a"].txn > first.txn
    second = site.prepares()["a"]
    for _ in range(30):
        site.tick(5)
        plan = Plan.from_dict(second.plan)
        site.event(events.UpMessage("a", messages.Progress(second.txn, "m", plan.epoch, 1, 2)))
    assert site.prepares()["a"] == second, "progress keeps it alive"
    site.event(events.UpMessage("a", messages.Ready(first.txn, "m", epoch, 0, bytes(8))))
    assert site.session.plan("m") is None, "a Ready of the one given up activates nothing"


def test_progress_of_weights_is_shown_at_most_once_a_second() -> None:
    site = Site()
    site.join("a")
    site.tick(1.1)
    prepare = site.prepares()["a"]
    epoch = Plan.from_dict(prepare.plan).epoch
    shown = []
    for part in range(10):
        out = site.event(events.UpMessage("a", messages.Progress(prepare.txn, "m", epoch, part, 10)))
        shown += [c.progress for c in out if isinstance(c, commands.ShowPlan)]
        site.now += 0.25
    assert shown == [{"a": (0, 10)}, {"a": (4, 10)}, {"a": (8, 10)}]
    site.ready()
    last = [c for c in site.seen if isinstance(c, commands.ShowPlan)][-1]
    assert (last.preparing, last.progress) == (None, {})


@pytest.mark.parametrize(
    ("limits", "smallest"),
    [((0, 50_000, 60_000, 4 << 20), 50_000), ((0, 4 << 20, 256 << 20), None)],
    ids=["met", "what passed on trial is no limit"],
)
def test_search_knows_the_smallest_packet_limit_that_a_device_met(
    limits: tuple[int, ...], smallest: int | None
) -> None:
    site = Site()
    for name, limit in zip("abcd", limits, strict=False):
        site.boots[name] = 1
        site.event(events.DeviceCaps(name, replace(caps(name, 1), largest_packet_bytes=limit)))
        site.event(events.DeviceStatus(name, Status("online", 1)))
    site.tick(1.1)
    assert site.solves[-1].question.packet_bytes == smallest


def test_drift_plans_again_and_keeps_a_plan_that_is_no_worse() -> None:
    site = Site()
    site.join("a", "b")
    plan = site.settle()
    site.submit("r1")
    site.answer(1)
    solves = len(site.solves)
    site.drift({plan.devices[0]: 8.0}, 40)
    assert len(site.solves) > solves
    assert site.notes()["drift"] >= 1
    site.ready()
    assert site.session.plan("m").devices != plan.devices, "another device is faster now"


def test_a_model_that_nobody_asks_is_not_planned_again_for_drift() -> None:
    site = Site()
    site.join("a", "b")
    plan = site.settle()
    solves = len(site.solves)
    site.drift({plan.devices[0]: 8.0}, 40)
    assert len(site.solves) == solves
    site.submit("r1")
    site.answer(1)
    site.drift({plan.devices[0]: 8.0}, 7)
    assert len(site.solves) == solves + 1


def test_what_is_observed_while_weights_are_loaded_starts_no_search() -> None:
    site = Site("m", "other")
    site.join("a", "b")
    site.tick(1.1)
    for device, message in [told for told in site.told if isinstance(told[1], messages.Prepare)]:
        plan = Plan.from_dict(message.plan)
        digest = programs_digest(SPEC, plan)
        site.event(events.UpMessage(device, messages.Ready(message.txn, plan.model, plan.epoch, 1000, digest)))
    site.submit("r1")
    site.answer(1)
    pinned = Pins(strategy="row", options={"variant": "kv"}, devices=("a", "b"))
    site.submit("r2", model="other", pins=pinned)
    site.tick(0.1)
    site.drift(dict.fromkeys(site.boots, 8.0), 20)  # the other model's plan is on its way all the time
    assert not site.notes()["drift"]
    assert {m.profile(0).slowdown for m in site.session.membership.usable().values()} == {1.0}
    site.ready()
    site.drift(dict.fromkeys(site.boots, 1.0), 30)
    assert not site.notes()["drift"]


def test_a_device_that_starts_anew_while_weights_are_loaded_is_not_what_it_was() -> None:
    site = Site(searches=False)
    site.join("a", "b")
    site.drift({"a": 8.0}, 2)
    membership = site.session.membership
    membership.loading(site.now)
    site.join("a", boot=2)
    site.drift({"a": 9.0}, 1)
    assert membership.members["a"].profile(0).slowdown == 1.0
    assert membership.members["b"].calm is not None
    site.drift({"a": 9.0}, int(CALM_S))
    assert membership.members["a"].profile(0).slowdown == 9.0


def test_what_a_device_has_never_told_in_calm_is_taken_from_now() -> None:
    site = Site(searches=False)
    site.session.membership.loading(site.now)
    site.join("a")
    site.drift({}, 1)
    assert site.session.membership.members["a"].link().up_bytes_per_s == 1e8  # as its heartbeats say


def test_a_moment_of_load_is_not_what_a_device_is() -> None:
    site = Site(searches=False)
    site.join("a")
    member = site.session.membership.members["a"]
    site.drift({}, SLOWDOWNS)
    site.drift({"a": 6.0}, SLOWDOWNS // 2)
    assert member.profile(0).slowdown == 1.0
    site.drift({"a": 6.0}, 1)
    assert member.profile(0).slowdown == 6.0
    site.join("a", boot=2)
    site.drift({"a": 2.0}, 1)
    assert member.profile(0).slowdown == 2.0, "what it was before it started anew does not count"


def test_a_link_is_the_better_of_what_was_told_in_calm_and_of_late() -> None:
    site = Site(searches=False)
    site.join("a")
    member = site.session.membership.members["a"]

    def told(round_trip_s: float | None, rate: float | None) -> tuple[float, float]:
        beat = replace(heartbeat(1), round_trip_s=round_trip_s, bandwidth_bytes_per_s=rate)
        site.event(events.DeviceHeartbeat("a", beat))
        return 2 * member.link().latency_s, member.link().up_bytes_per_s

    assert told(17e-3, None) == (17e-3, Link().up_bytes_per_s), "it has just started"
    site.session.membership.loading(site.now)
    assert told(1e-3, 1e8) == (1e-3, 1e8)
    site.now += CALM_S
    assert told(2e-3, 3e7) == (2e-3, 3e7), "calm again: the link is slower now"
    site.session.membership.loading(site.now)
    assert told(9e-3, 1e7) == (2e-3, 3e7), "it is full of weights"
    assert told(None, None) == (2e-3, 3e7)


def test_plans_are_made_with_what_devices_measured_of_their_peers() -> None:
    found = Membership(mesh=True)
    for name in ("a", "b", "c"):
        endpoint = None if name == "c" else Endpoint("192.0.2.7", 1883)
        found.caps(name, replace(caps(name, 1), endpoint=endpoint))
        found.status(name, Status("online", 1), 0.0)
    reports = {"b": LinkReport(4e-3, None), "c": LinkReport(2e-3, 3e7), "gone": LinkReport(1e-3, 1e6)}
    found.heartbeat("a", replace(heartbeat(1), peers=reports), 0.0)
    found.heartbeat("b", replace(heartbeat(1), peers={"a": LinkReport(6e-3, 1e7)}), 0.0)
    found.loading(0.0)
    found.heartbeat("b", replace(heartbeat(1), peers={"a": LinkReport(5e-3, 5e6)}), 1.0)
    links = found.cluster({}).peer_links
    assert links["a", "b"] == PeerLink(2e-3, None), "as a has measured it"
    assert links["b", "a"] == PeerLink(2.5e-3, 1e7), "the better of calm and late"
    assert links["c", "a"] == links["a", "c"] == PeerLink(1e-3, 3e7), "c has told nothing"
    assert ("b", "c") not in links
    assert not [pair for pair in links if "gone" in pair]
    assert found.cluster({}).endpoints == {"a", "b"}


def test_drift_during_a_search_does_not_void_it() -> None:
    site = Site(searches=False, decider=everyone)
    site.join("a", "b")
    site.tick(1.1)
    site.solve(site.solves[-1])
    site.ready()
    site.submit("r1")
    site.answer(1)
    site.drift(dict.fromkeys(site.boots, 8.0), 40)
    assert len(site.solves) == 2, "one search at a time, however long it takes"
    ticket = site.solves[-1].ticket
    site.solve(site.solves[-1])
    assert site.session.slots.own("m").plans.searching is None
    assert all(s.ticket == ticket for s in site.solves[1:])


def test_unreadable_caps_are_noted_and_the_device_stays_out() -> None:
    site = Site()
    bad = replace(caps("x", 1), curves={"linear": []})
    site.event(events.DeviceCaps("x", bad))
    site.event(events.DeviceStatus("x", Status("online", 1)))
    site.join("a")
    site.settle()
    assert site.notes()["refused"] == 1
    assert set(site.solves[-1].question.cluster.devices) == {"a"}


def points(*seconds: object) -> dict[str, object]:
    return {"linear": [{"k": 32, "n": 32, "points": [[1 << i, s] for i, s in enumerate(seconds)]}]}


@pytest.mark.parametrize(
    "wrong",
    [
        points(0.0, 0.0),
        points(-1e-5, 1e-4),
        points(1e-5, 10**400),
        points(1e-5, float("inf")),
        points(1e-3, 1e-5),
        points(1e-5, True),
        points(1e-5, "1"),
        points(1e9),
        {"linear": [{"k": 32, "n": 0, "points": [[1, 1e-5]]}]},
        {"linear": [{"k": 32, "n": 32, "points": [[4, 1e-5], [2, 1e-5]]}]},
        {"linear": [{"k": 32, "n": 32, "points": [[1, 1e-5]], "storage": "f64"}]},
        {"linear": CURVES["linear"] * 1000},
        {"attention_flops_per_s": 0},
        {"attention_flops_per_s": -1e9},
        {"rowwise_bytes_per_s": 10**400},
        {"op_overhead_s": 1e9},
        {"frame_s": -1},
        {"copy_bytes_per_s": 1e300},
        {"mesh_frame_s": "fast"},
        {"mesh_copy_bytes_per_s": 0},
    ],
    ids=str,
)
def test_caps_that_no_device_can_have_are_refused_and_the_device_is_named_once(wrong: dict[str, object]) -> None:
    site = Site()
    for _ in range(3):
        site.event(events.DeviceCaps("x", replace(caps("x", 1), curves={**CURVES, **wrong})))
    site.event(events.DeviceStatus("x", Status("online", 1)))
    site.join("a")
    site.settle()
    assert set(site.solves[-1].question.cluster.devices) == {"a"}
    assert [c.text.split()[2] for c in site.seen if isinstance(c, commands.Note) and c.kind == "refused"] == ["x"]
    assert site.session.counters["foreign_caps"] == 3


def test_memory_that_no_device_has_is_refused() -> None:
    site = Site()
    site.join("x", memory=1 << 60)
    assert site.notes()["refused"] == 1
    assert not site.session.membership.usable()


@pytest.mark.parametrize(
    "wrong",
    [
        {"slowdown": 1e12},
        {"round_trip_s": -5.0},
        {"round_trip_s": 1e12},
        {"bandwidth_bytes_per_s": 0.0},
        {"bandwidth_bytes_per_s": -1e9},
        {"peers": {"b": LinkReport(1e12, None)}},
        {"peers": {"b": LinkReport(1e-3, 1e-9)}},
    ],
    ids=str,
)
def test_a_heartbeat_is_believed_but_for_numbers_that_cannot_be(wrong: dict[str, float]) -> None:
    site = Site()
    site.join("a")
    site.settle()
    member = site.session.membership.members["a"]
    site.event(events.DeviceHeartbeat("a", heartbeat(1)))
    rate, slowdown = member.link().up_bytes_per_s, member.profile(0).slowdown
    for _ in range(2 * SLOWDOWNS):
        site.now += 1
        site.event(events.DeviceHeartbeat("a", replace(heartbeat(1), **wrong)))
        site.event(events.Tick())
    assert "a" in site.session.membership.usable(), "it is there"
    assert member.profile(0).slowdown == slowdown
    assert 0 <= member.link().latency_s < 1
    assert member.link().up_bytes_per_s >= rate > 1
    assert site.session.counters["implausible_heartbeat"] == 2 * SLOWDOWNS
    what = {"peers": "a link to a peer"}.get(key := next(iter(wrong)), key)
    assert [c.text for c in site.seen if isinstance(c, commands.Note) and what in c.text], "named, once"
    assert not member.peer_links()
    assert site.notes()["refused"] == 1


def test_no_prediction_stretches_the_time_after_which_a_run_is_overdue() -> None:
    site = Site(decider=lambda q: _slow(everyone(q)))
    site.join("a")
    site.settle()
    site.submit("r1", within=1e9)
    for _ in range(int(OVERDUE_MOST_S)):
        assert not site.notes()["overdue"]
        site.tick(1)
    site.tick(1)
    assert site.notes()["overdue"] == 1


def _slow(decision: Decision) -> Decision:
    return replace(decision, chosen=replace(decision.chosen, plan=replace(decision.chosen.plan, predicted_s=8.6e9)))


def test_a_run_that_is_lost_under_an_old_plan_ends_where_there_is_no_plan_any_more() -> None:
    site = Site(decider=everyone)
    site.join("b")
    site.settle()
    site.submit("r1", within=1e9)
    site.join("a")
    site.tick(1.1)
    site.ready()  # r1 runs under the plan before, without a
    site.event(events.Pin("m", Pins(devices=("a",))))
    site.leave("a")
    for _ in range(int(RETURN_S)):
        assert site.session.slots.own("m").plans.hopeful(), "a may come back"
        assert "r1" not in site.errors, "it may yet be answered"
        site.tick(1)
    for _ in range(20):
        site.tick(1)
    assert not site.session.slots.own("m").plans.hopeful()
    assert isinstance(site.errors["r1"], PlanError)


def test_invented_devices_are_forgotten_for_those_that_are_there() -> None:
    site = Site()
    site.join("a", "b")
    site.settle()
    for number in range(4 * MEMBERS):
        name = f"invented{number}"
        site.event(events.DeviceStatus(name, Status("online", 1)))
        site.event(events.DeviceHeartbeat(name, heartbeat(1)))
    assert len(site.session.membership.members) == MEMBERS
    assert set(site.session.membership.usable()) == {"a", "b"}
    site.join("late")
    assert "late" in site.session.membership.usable()


def test_devices_beyond_what_is_remembered_are_counted() -> None:
    site = Site(searches=False)
    site.join(*(f"d{number}" for number in range(MEMBERS)))
    site.join("beyond")
    assert "beyond" not in site.session.membership.members
    assert site.session.counters["devices_beyond"] == 2
    site.leave("d7")
    site.join("beyond")
    assert "beyond" in site.session.membership.usable()


def test_a_device_that_beats_and_does_not_compute_is_put_aside_and_tried_again_later() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    first = site.settle()
    site.mute = {"b"}
    site.submit("r1")
    for _ in range(12):
        site.tick(0.1)
    assert site.session.plan("m") is None, "within a second"
    site.ready("a")
    second = site.session.plan("m")
    assert (set(first.devices), second.devices) == ({"a", "b"}, ("a",))
    site.answer(max(site.work))
    assert "r1" in site.answers
    for _ in range(int(ASIDE_S)):
        assert site.session.plan("m") == second, "its heartbeats say nothing of what computes"
        site.tick(1)
    site.tick(1)
    site.tick(1.1)
    site.ready()
    assert set(site.session.plan("m").devices) == {"a", "b"}
    site.submit("r2")
    for _ in range(12):
        site.tick(0.1)
    assert site.session.membership.members["b"].aside_until_s - site.now > 1.5 * ASIDE_S, "longer each time"


def test_a_device_that_was_stopped_is_back_with_its_first_word() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.settle()
    site.mute = {"b"}
    site.submit("r1")
    for _ in range(12):
        site.tick(0.1)
    site.ready("a")
    assert "b" not in site.session.membership.usable()
    site.event(events.UpMessage("b", messages.RequestFailed("m", Epoch(7, 1), 1, "wire", "late")))
    assert "b" in site.session.membership.usable()


def test_nobody_is_put_aside_who_speaks_or_for_whom_nobody_else_can_serve() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    plan = site.settle()
    site.submit("r1", within=1e9)
    for _ in range(25):
        site.tick(0.1)
    assert site.session.plan("m") == plan, "both say that they have it: it only takes long"
    assert site.notes()["doubt"] == 1
    site.mute = {"a", "b"}
    site.submit("r2", within=1e9)
    for _ in range(12):
        site.tick(0.1)
    assert set(site.session.membership.usable()) == {"a", "b"}


def test_nobody_is_put_aside_whom_pins_name() -> None:
    site = Site(pins=Pins(devices=("a", "b")), decider=everyone)
    site.join("a", "b", "c")
    plan = site.settle()
    assert set(plan.devices) == {"a", "b"}
    site.mute = {"b"}
    site.submit("r1", within=1e9)
    for _ in range(20):
        site.tick(0.1)
    assert set(site.session.membership.usable()) == {"a", "b", "c"}, "c cannot serve what a and b are asked for"
    assert not site.errors


def test_a_planner_that_was_held_up_itself_suspects_nobody() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    plan = site.settle()
    site.mute = {"b"}
    site.submit("r1", within=1e9)
    for _ in range(3):
        site.tick(0.7)
    assert site.session.plan("m") == plan


@pytest.mark.parametrize("speaks", [True, False])
def test_a_device_that_prepares_without_progress_holds_nobody_up(speaks: bool) -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.tick(1.1)
    prepare = site.prepares()["b"]
    epoch = Plan.from_dict(prepare.plan).epoch
    site.ready("a")
    site.submit("r1")
    begun = site.now
    while site.now < begun + 30:
        site.tick(0.5)
        if speaks:
            site.event(events.UpMessage("b", messages.Progress(prepare.txn, "m", epoch, 0, 0)))
        if "b" not in site.session.membership.usable():
            break
    assert site.now - begun < (25 if speaks else 8)
    site.ready("a")
    assert site.session.plan("m").devices == ("a",)


def test_a_device_that_is_missing_for_a_moment_refuses_no_request() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.settle()
    pins = Pins(devices=("b",))
    site.leave("b")
    site.submit("r1", pins=pins)
    site.ready()
    site.tick(3)
    assert not site.errors
    site.join("b", boot=2)
    for _ in range(3):
        site.tick(1)
        site.ready()
    site.answer(max(site.work))
    assert site.answers["r1"].plan.devices == ("b",)
    site.leave("b")
    site.submit("r2", pins=pins)
    site.ready()
    for _ in range(int(RETURN_S) + 2):
        site.tick(1)
    assert isinstance(site.errors["r2"], PlanError), "but not for ever"


def test_what_the_broker_took_with_it_is_issued_again_when_all_devices_are_back() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    plan = site.settle()
    site.submit("r1")
    site.event(events.Connection(online=False))
    site.now += 0.2
    site.event(events.Connection(online=True))
    site.event(events.DeviceHeartbeat("a", heartbeat(1)))
    assert list(site.work) == [1], "b is not there yet, and would miss it"
    site.event(events.DeviceHeartbeat("b", heartbeat(1)))
    assert list(site.work) == [1, 2]
    assert site.work[2].epoch == plan.epoch
    site.answer(2)
    assert "r1" in site.answers
    assert not site.notes()["overdue"]


def test_a_planner_that_meets_the_broker_just_now_gives_devices_a_moment_to_do_so_too() -> None:
    site = Site()
    site.event(events.Connection(online=True))
    site.submit("r1")
    for _ in range(2):
        site.tick(1.0)
    assert not site.errors
    site.join("a")
    site.tick(1.0)
    site.ready()
    site.answer(1)
    assert "r1" in site.answers
