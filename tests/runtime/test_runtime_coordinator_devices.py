"""The coordinator as devices join, fall silent, are put aside and leave, on a virtual clock."""

from __future__ import annotations

from dataclasses import replace

from scripted_site import LOST_S, Site, everyone, heartbeat

from hepti_mqtt.errors import PlanError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.planner import Decision
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.fleet import ASIDE_S, MEMBERS, RETURN_S
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.scheduler import OVERDUE_MOST_S


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
    site.event(interface.Tick(behind=True))
    assert "a" in site.session.membership.usable()
    site.event(interface.DeviceHeartbeat("a", heartbeat(1)))
    site.event(interface.Tick())
    assert "a" in site.session.membership.usable()
    site.now += LOST_S
    site.event(interface.Tick())
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
    site.event(interface.Connection(online=False))
    site.tick(100, alive=False)
    site.event(interface.Connection(online=True))
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
    site.event(interface.DeviceStatus("a", Status("offline", 1)))
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
    site.event(interface.Pin("m", Pins(devices=("a",))))
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
    for number in range(MEMBERS + 50):
        name = f"invented{number}"
        site.event(interface.DeviceStatus(name, Status("online", 1)))
        site.event(interface.DeviceHeartbeat(name, heartbeat(1)))
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
    assert site.session.membership.unused() == {
        "b": "it said nothing while others waited for it; it is tried again later"
    }
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
    assert not site.session.membership.unused()
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
    site.event(interface.UpMessage("b", messages.RequestFailed("m", Epoch(7, 1), 1, "wire", "late")))
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


def test_a_plan_that_a_device_has_given_up_in_doubt_is_prepared_anew_and_its_runs_are_issued_again() -> None:
    site = Site()
    site.join("a")
    first = site.settle()
    site.submit("r1")
    gone = messages.Failed(0, "m", first.epoch, "forgotten", "a has given it up", 0)
    for _ in range(2):
        site.event(interface.UpMessage("a", gone))
    site.submit("r2")
    assert list(site.work) == [1], "nothing more goes to a plan that is not there"
    site.ready()
    assert [frame.epoch > first.epoch for frame in site.work.values()] == [False, True, True]
    site.answer(2)
    site.answer(3)
    assert set(site.answers) == {"r1", "r2"}


def test_a_device_that_gives_up_a_plan_that_is_not_in_use_changes_nothing() -> None:
    site = Site()
    site.join("a")
    plan = site.settle()
    site.submit("r1")
    other = plan.epoch._replace(number=plan.epoch.number + 1)
    for model, epoch in (("m", other), ("n", plan.epoch)):
        site.event(interface.UpMessage("a", messages.Failed(0, model, epoch, "forgotten", "gone", 0)))
    assert site.session.plan("m") == plan
    site.answer(1)
    assert set(site.answers) == {"r1"}


def test_what_the_broker_took_with_it_is_issued_again_when_all_devices_are_back() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    plan = site.settle()
    site.submit("r1")
    site.event(interface.Connection(online=False))
    site.now += 0.2
    site.event(interface.Connection(online=True))
    site.event(interface.DeviceHeartbeat("a", heartbeat(1)))
    assert list(site.work) == [1], "b is not there yet, and would miss it"
    site.event(interface.DeviceHeartbeat("b", heartbeat(1)))
    assert list(site.work) == [1, 2]
    assert site.work[2].epoch == plan.epoch
    site.answer(2)
    assert "r1" in site.answers
    assert not site.notes()["overdue"]


def test_a_planner_that_meets_the_broker_just_now_gives_devices_a_moment_to_do_so_too() -> None:
    site = Site()
    site.event(interface.Connection(online=True))
    site.submit("r1")
    for _ in range(2):
        site.tick(1.0)
    assert not site.errors
    site.join("a")
    site.tick(1.0)
    site.ready()
    site.answer(1)
    assert "r1" in site.answers
