"""Devices as they start, join, fall silent, die, are put aside and come back, on a virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted_site import LOST_S, Site, caps, everyone, heartbeat, settled

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.cost.loads import LoadRates, TileMap
from hepti_mqtt.errors import PlanError
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Decision
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.manifest import Manifest, TensorEntry
from hepti_mqtt.protocol.messages import Endpoint, Status
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.dispatch import OVERDUE_MAX_S
from hepti_mqtt.runtime.coordinator.fleet import (
    BACKOFF_S,
    CRASH_WINDOW_S,
    DEBOUNCE_S,
    LOAD_MAX_S,
    MAX_MEMBERS,
    MEMORY_FACTOR,
    QUARANTINE_S,
    RELAYED_S,
    REPEAT_WINDOW_S,
    RETURN_S,
    SETBACKS,
    SILENT_S,
    STARTING_S,
    TYPICAL_ROWS,
    UNWANTED,
    WILL_RECONNECT_S,
    CrashBackoff,
    Fleet,
    LastWillDebounce,
    peers_of,
)
from hepti_mqtt.runtime.coordinator.plans import ServedModel
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.searches import RETRY_WHILE_EXPECTED_S


def test_a_site_without_devices_refuses_requests_until_one_joins() -> None:
    site = Site()
    site.submit("r1")
    site.tick(0.0)
    site.tick(1.1)
    assert isinstance(site.errors["r1"], PlanError)
    site.submit("r2")
    assert isinstance(site.errors["r2"], PlanError), "the next one is refused at once"
    site.join("a")
    site.submit("r3")
    site.settle()
    site.answer(1)
    assert "r3" in site.answers


def test_lost_device_in_flight_is_issued_again_once_under_a_new_plan() -> None:
    site = settled("a", "b", decider=everyone)
    first = site.plan
    assert set(first.devices) == {"a", "b"}
    site.submit("r1")
    site.leave("b")
    assert ("a", messages.Cancel("m", first.version, 1)) in site.told
    site.ready()
    assert list(site.work) == [1, 2]
    assert site.work[2].plan_version > first.version
    site.answer(2)
    site.answer(1)  # what the survivors of the first run still send comes late
    assert site.answers["r1"].plan.devices == ("a",)
    assert site.session.counters["late"] > 0


def test_a_device_that_is_online_has_not_started_again_before_its_status_says_so() -> None:
    """Caps and statuses can be forged; the device itself says at once what is right."""
    site = settled("a")
    for boot in (1, 2):
        site.event(interface.DeviceCaps("a", caps("a", boot)))
    site.event(interface.DeviceStatus("a", Status("starting", 1, "measuring")))
    site.submit("r1")
    site.answer(1)
    assert "r1" in site.answers
    assert not site.notes()["left"]
    site.boots["a"] = 2
    site.event(interface.DeviceStatus("a", Status("online", 2)))
    assert site.notes()["left"] == 1
    assert "a" in site.session.fleet.usable(), "by the caps that came before"


def test_nobody_is_silent_while_what_was_said_waits_to_be_read() -> None:
    site = Site()
    site.join("a")
    site.now += LOST_S
    site.event(interface.Tick(has_backlog=True))
    assert "a" in site.session.fleet.usable()
    site.event(interface.DeviceHeartbeat("a", heartbeat(1)))
    site.event(interface.Tick())
    assert "a" in site.session.fleet.usable()
    site.now += LOST_S
    site.event(interface.Tick())
    assert "a" not in site.session.fleet.usable()


def test_silent_device_counts_as_lost_and_comes_back_with_a_heartbeat() -> None:
    site = settled("a", "b", decider=everyone)
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
    assert set(site.plan.devices) == {"a", "b"}


def test_silence_while_the_planner_is_offline_condemns_nobody() -> None:
    site = settled("a")
    plan = site.plan
    site.submit("r1")
    site.event(interface.BrokerConnection(online=False))
    site.tick(100, alive=False)
    site.event(interface.BrokerConnection(online=True))
    site.tick(3, alive=False)
    assert site.plan.version == plan.version
    assert "r1" in site.errors, "but deadlines hold"
    site.tick(LOST_S, alive=False)
    assert site.plan is None


def test_device_that_rejoins_drops_what_it_holds() -> None:
    site = settled("a")
    site.told.clear()
    site.leave("a")
    site.join("a")
    kinds = [type(m) for d, m in site.told if d == "a"]
    assert messages.ReleaseAll in kinds
    assert messages.Prepare not in kinds[: kinds.index(messages.ReleaseAll)]


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


def test_no_prediction_stretches_the_time_after_which_a_run_is_overdue() -> None:
    site = settled("a", decider=lambda q: _slow(everyone(q)))
    site.submit("r1", within=1e9)
    for _ in range(int(OVERDUE_MAX_S)):
        assert not site.notes()["overdue"]
        site.tick(1)
    site.tick(1)
    assert site.notes()["overdue"] == 1


def _slow(decision: Decision) -> Decision:
    return replace(decision, chosen=replace(decision.chosen, plan=replace(decision.chosen.plan, predicted_s=8.6e9)))


def test_a_run_that_is_lost_under_an_old_plan_ends_where_there_is_no_plan_any_more() -> None:
    site = settled("b", decider=everyone)
    site.submit("r1", within=1e9)
    site.join("a")
    site.tick(1.1)
    site.ready()  # r1 runs under the plan before, without a
    site.event(interface.PinPlan("m", Pins(devices=("a",))))
    site.leave("a")
    for _ in range(int(RETURN_S)):
        assert site.session.groups.default("m").plans.may_serve(), "a may come back"
        assert "r1" not in site.errors, "it may yet be answered"
        site.tick(1)
    site.pass_by(20, 1)
    assert not site.session.groups.default("m").plans.may_serve()
    assert isinstance(site.errors["r1"], PlanError)


def test_invented_devices_are_forgotten_for_those_that_are_there() -> None:
    site = settled("a", "b")
    for number in range(MAX_MEMBERS + 50):
        name = f"invented{number}"
        site.event(interface.DeviceStatus(name, Status("online", 1)))
        site.event(interface.DeviceHeartbeat(name, heartbeat(1)))
    assert len(site.session.fleet.members) == MAX_MEMBERS
    assert set(site.session.fleet.usable()) == {"a", "b"}
    site.join("late")
    assert "late" in site.session.fleet.usable()


def test_devices_beyond_what_is_remembered_are_counted() -> None:
    site = Site(searches=False)
    site.join(*(f"d{number}" for number in range(MAX_MEMBERS)))
    site.join("beyond")
    assert "beyond" not in site.session.fleet.members
    assert site.session.counters["devices_beyond"] == 2
    site.leave("d7")
    site.join("beyond")
    assert "beyond" in site.session.fleet.usable()


def test_a_device_that_beats_and_does_not_compute_is_put_aside_and_tried_again_later() -> None:
    site = settled("a", "b", decider=everyone)
    first = site.plan
    site.mute = {"b"}
    site.submit("r1")
    site.pass_by(12, 0.1)
    assert site.plan is None, "within a second"
    assert list(site.session.fleet.unused_reasons()) == ["b"]
    site.ready("a")
    second = site.plan
    assert (set(first.devices), second.devices) == ({"a", "b"}, ("a",))
    site.answer(max(site.work))
    assert "r1" in site.answers
    for _ in range(int(QUARANTINE_S)):
        assert site.plan.version == second.version, "its heartbeats say nothing of what computes"
        site.tick(1)
    site.tick(1)
    site.tick(1.1)
    site.ready()
    assert set(site.plan.devices) == {"a", "b"}
    assert not site.session.fleet.unused_reasons()
    site.submit("r2")
    site.pass_by(12, 0.1)
    assert site.session.fleet.members["b"].quarantined_until_s - site.now > 1.5 * QUARANTINE_S, "longer each time"


def test_a_device_that_was_stopped_is_back_with_its_first_word() -> None:
    site = settled("a", "b", decider=everyone)
    site.mute = {"b"}
    site.submit("r1")
    site.pass_by(12, 0.1)
    site.ready("a")
    assert "b" not in site.session.fleet.usable()
    site.event(interface.DeviceMessage("b", messages.RunFailed("m", PlanVersion(7, 1), 1, "wire", "late")))
    assert "b" in site.session.fleet.usable()


def test_nobody_is_put_aside_who_speaks_or_for_whom_nobody_else_can_serve() -> None:
    site = settled("a", "b", decider=everyone)
    plan = site.plan
    site.submit("r1", within=1e9)
    site.pass_by(25, 0.1)
    assert site.plan.version == plan.version, "both say that they have it: it only takes long"
    assert site.notes()["doubt"] == 1
    site.mute = {"a", "b"}
    site.submit("r2", within=1e9)
    site.pass_by(12, 0.1)
    assert set(site.session.fleet.usable()) == {"a", "b"}


def test_nobody_is_put_aside_whom_pins_name() -> None:
    site = settled("a", "b", "c", pins=Pins(devices=("a", "b")), decider=everyone)
    plan = site.plan
    assert set(plan.devices) == {"a", "b"}
    site.mute = {"b"}
    site.submit("r1", within=1e9)
    site.pass_by(20, 0.1)
    assert set(site.session.fleet.usable()) == {"a", "b", "c"}, "c cannot serve what a and b are asked for"
    assert not site.errors


def test_a_planner_that_was_held_up_itself_suspects_nobody() -> None:
    site = settled("a", "b", decider=everyone)
    plan = site.plan
    site.mute = {"b"}
    site.submit("r1", within=1e9)
    site.pass_by(3, 0.7)
    assert site.plan.version == plan.version


def test_a_device_that_is_missing_for_a_moment_refuses_no_request() -> None:
    site = settled("a", "b", decider=everyone)
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
    site.pass_by(int(RETURN_S) + 2, 1)
    assert isinstance(site.errors["r2"], PlanError), "but not for ever"


def test_who_is_only_not_heard_is_waited_for_and_who_has_left_is_not() -> None:
    site = settled("a")
    silent = site.boots.pop("a")
    site.tick(LOST_S)
    site.submit("r1", within=1e9)
    site.pass_by(4 * int(RETURN_S), 1.0)
    assert not site.errors, "a flood, or a way that is cut: the broker has not published its will"
    site.event(interface.DeviceStatus("a", Status("offline", silent)))
    site.pass_by(7, 1.0)
    assert isinstance(site.errors["r1"], PlanError)


def test_a_plan_that_a_device_has_given_up_in_doubt_is_prepared_anew_and_its_runs_are_issued_again() -> None:
    site = settled("a")
    first = site.plan
    site.submit("r1")
    gone = messages.PrepareFailed(0, "m", first.version, "forgotten", "a has given it up", 0)
    for _ in range(2):
        site.event(interface.DeviceMessage("a", gone))
    site.submit("r2")
    assert list(site.work) == [1], "nothing more goes to a plan that is not there"
    site.ready()
    assert [frame.plan_version > first.version for frame in site.work.values()] == [False, True, True]
    site.answer(2)
    site.answer(3)
    assert set(site.answers) == {"r1", "r2"}


@pytest.mark.parametrize(("model", "newer"), [("m", 1), ("n", 0)])
def test_a_device_that_gives_up_a_plan_that_is_not_in_use_changes_nothing(model: str, newer: int) -> None:
    site = settled("a")
    plan = site.plan
    site.submit("r1")
    other = plan.version._replace(number=plan.version.number + newer)
    site.event(interface.DeviceMessage("a", messages.PrepareFailed(0, model, other, "forgotten", "gone", 0)))
    assert site.plan.version == plan.version
    site.answer(1)
    assert set(site.answers) == {"r1"}


def test_what_the_broker_took_with_it_is_issued_again_when_all_devices_are_back() -> None:
    site = settled("a", "b", decider=everyone)
    plan = site.plan
    site.submit("r1")
    site.event(interface.BrokerConnection(online=False))
    site.now += 0.2
    site.event(interface.BrokerConnection(online=True))
    site.event(interface.DeviceHeartbeat("a", heartbeat(1)))
    assert list(site.work) == [1], "b is not there yet, and would miss it"
    site.event(interface.DeviceHeartbeat("b", heartbeat(1)))
    assert list(site.work) == [1, 2]
    assert site.work[2].plan_version == plan.version
    site.answer(2)
    assert "r1" in site.answers
    assert not site.notes()["overdue"]


def test_a_planner_that_meets_the_broker_just_now_gives_devices_a_moment_to_do_so_too() -> None:
    site = Site()
    site.event(interface.BrokerConnection(online=True))
    site.submit("r1")
    site.pass_by(2, 1.0)
    assert not site.errors
    site.join("a")
    site.tick(1.0)
    site.ready()
    site.answer(1)
    assert "r1" in site.answers


# -- starting ---------------------------------------------------------------------------------------------------------


def says_it_starts(site: Site, device: str, boot: int = 1, done: int = 0) -> None:
    site.event(interface.DeviceStatus(device, Status("starting", boot, "compiling kernels", done, 23)))


def passes(site: Site, seconds: float, *starting: str) -> None:
    """Let time pass while devices go on saying that they start."""
    for second in range(int(seconds)):
        site.tick(1.0)
        for device in starting:
            says_it_starts(site, device, done=second)


def test_a_request_waits_for_a_device_that_is_starting() -> None:
    site = Site()
    says_it_starts(site, "a")
    site.submit("r1", within=600.0)
    passes(site, 60, "a")
    assert not site.errors
    site.join("a")
    site.settle()
    site.answer(1)
    assert "r1" in site.answers


def test_a_device_that_says_it_starts_gives_hope_again() -> None:
    site = Site()
    site.submit("early")
    site.tick(2.0)
    assert isinstance(site.errors["early"], PlanError)
    says_it_starts(site, "a")
    site.submit("r1")
    passes(site, 5, "a")
    assert "r1" not in site.errors


@pytest.mark.parametrize("end", ["it falls silent", "it never ends", "it is gone"])
def test_nobody_waits_for_ever_for_a_device_that_starts(end: str) -> None:
    site = Site()
    says_it_starts(site, "a")
    site.submit("r1", within=2 * STARTING_S)
    site.tick(SILENT_S - 1.0)
    assert not site.errors
    if end == "it is gone":
        site.event(interface.DeviceStatus("a", Status("offline", 1)))
        site.tick(0.1)
    elif end == "it never ends":
        passes(site, STARTING_S + 2, "a")
    else:
        site.tick(2.0)
    assert isinstance(site.errors["r1"], PlanError)


def test_pins_wait_for_those_of_their_devices_that_are_starting() -> None:
    site = settled("a", decider=everyone)
    says_it_starts(site, "b")
    before = len(site.solves)
    site.submit("r1", pins=Pins(devices=("a", "b")))
    passes(site, 10, "b")
    assert len(site.solves) == before
    site.join("b")
    for _ in range(3):
        site.tick(1.1)
        site.ready()
    assert ("a", "b") in [solve.question.devices for solve in site.solves[before:]]
    assert not site.errors


def test_a_plan_that_fits_nobody_yet_is_looked_for_again_while_others_start() -> None:
    def large(question):
        if len(question.cluster.devices) < 2:
            raise PlanError("it does not fit")
        return everyone(question)

    site = Site(decider=large)
    site.join("a")
    says_it_starts(site, "b")
    site.submit("r1")
    passes(site, 3 * RETRY_WHILE_EXPECTED_S, "b")
    assert not site.errors
    site.join("b")
    assert set(site.settle().devices) == {"a", "b"}


def test_a_device_that_restarts_is_gone_and_coming() -> None:
    site = settled("a", decider=everyone)
    says_it_starts(site, "a", boot=2)
    assert not site.session.fleet.usable()
    assert site.session.fleet.expected(site.now) == {"a"}
    site.submit("r1")
    site.boots.clear()
    for _ in range(30):
        site.tick(1.0)
        says_it_starts(site, "a", boot=2)
    assert not site.errors


def test_nothing_is_searched_while_the_only_device_may_come_back() -> None:
    site = settled("a")
    site.leave("a")
    site.submit("r1")
    before = len(site.solves)
    passes(site, RETURN_S - 1)
    assert len(site.solves) == before
    assert not site.errors
    passes(site, 2)
    assert isinstance(site.errors["r1"], PlanError)


# -- deaths -----------------------------------------------------------------------------------------------------------


def memory(site: Site, device: str) -> float:
    """Return the memory that the last search could plan with."""
    return site.solves[-1].question.cluster.devices[device].memory_bytes


def test_a_device_that_dies_of_a_plan_again_gets_less_for_a_while() -> None:
    site = settled("a", "b", decider=everyone)
    site.leave("b")
    site.settle()
    site.join("b", boot=2)
    site.settle()
    assert memory(site, "b") == 1 << 30, "somebody may have restarted it"
    site.leave("b")
    site.settle()
    site.join("b", boot=3)
    site.settle()
    assert memory(site, "b") < 1 << 30
    assert memory(site, "a") == 1 << 30
    passes(site, BACKOFF_S + 1)
    assert memory(site, "b") == 1 << 30


def test_a_device_that_is_stopped_has_not_died() -> None:
    site = settled("a", "b", decider=everyone)
    for boot in (2, 3, 4):
        site.leave("b", reason="stopped")
        site.settle()
        site.join("b", boot=boot)
        site.settle()
    assert memory(site, "b") == 1 << 30


def test_the_last_device_serves_again_although_it_died_of_its_plans() -> None:
    site = settled("a")
    for boot in (2, 3, 4):
        site.leave("a")
        site.pass_by(1)
        site.join("a", boot=boot)
        site.submit(f"r{boot}")
        for _ in range(4):
            site.tick(1.0)
            site.ready()
        assert site.plan is not None
    assert not site.errors
    assert site.notes()["crash_limit"] == 2, "the first death may have been a restart"


def test_a_device_that_was_only_away_has_not_died() -> None:
    """Its connection was lost, or it had no core for too long: it comes back as the same start."""
    site = settled("a", "b", decider=everyone)
    for _ in range(3):
        site.leave("b")
        site.settle()
        site.join("b")
        site.settle()
    assert memory(site, "b") == 1 << 30


def test_a_device_that_hangs_has_not_died() -> None:
    site = settled("a", "b", decider=everyone)
    site.mute = {"b"}
    for number in range(2):
        site.submit(f"r{number}", within=1e9)
        while "b" in site.session.fleet.usable():
            site.tick(0.1)
        site.ready("a")
        site.event(interface.DeviceMessage("b", messages.RunFailed("m", PlanVersion(7, 1), 1, "wire", "late")))
        for _ in range(3):
            site.tick(1.1)
            site.ready()
    assert memory(site, "b") == 1 << 30


def test_each_death_makes_the_rest_longer_and_a_long_life_ends_that() -> None:
    falls = CrashBackoff()
    boots = iter(range(1, 100))

    def fell(needed_bytes: int, given_s: float, now: float) -> None:
        falls.record_departure("a", next(boots), needed_bytes, given_s, now)
        falls.record_return("a", next(boots), now)

    fell(1000, 0.0, CRASH_WINDOW_S + 1.0)
    fell(1000, 100.0, 108.0)
    assert falls.memory_limits(108.0) == {}, "only one plan was young"
    fell(1000, 110.0, 116.0)
    assert falls.memory_limits(116.0) == {"a": int(MEMORY_FACTOR * 1000)}
    assert falls.lift_expired(117.0) == []
    fell(750, 120.0, 126.0)
    assert falls.memory_limits(126.0 + 2 * BACKOFF_S - 1.0) == {"a": int(MEMORY_FACTOR * 750)}
    assert falls.lift_expired(126.0 + 2 * BACKOFF_S) == ["a"]
    assert falls.lift_expired(127.0 + 2 * BACKOFF_S) == []
    assert falls.memory_limits(126.0 + 2 * BACKOFF_S) == {}
    falls.lift_expired(127.0 + 2 * BACKOFF_S + REPEAT_WINDOW_S)
    fell(1000, 900.0, 901.0)
    assert falls.memory_limits(901.0) == {}, "it begins anew"


# -- last wills -------------------------------------------------------------------------------------------------------


class Heard:
    """A site of a and b whose events go through `LastWillDebounce`, at seconds after the beginning."""

    def __init__(self) -> None:
        self.site = settled("a", "b", decider=everyone)
        self.wills = LastWillDebounce(self.site.session)

    def __call__(self, event: interface.CoordinatorEvent, at_s: float = 0.0) -> object:
        return self.wills.handle(event, self.site.now + at_s)

    def word(self, device: str, state: str = "offline", boot: int = 1, at_s: float = 0.0, reason: str = "") -> object:
        return self(interface.DeviceStatus(device, Status(state, boot, reason=reason)), at_s)


def test_a_device_that_says_why_it_goes_offline_is_gone_at_once() -> None:
    heard = Heard()
    heard.word("a", reason="stopped")
    assert heard.site.session.fleet.usable().keys() == {"b"}
    heard(interface.DeviceHeartbeat("a", heartbeat(1)))  # it came by another connection
    assert heard.site.session.fleet.usable().keys() == {"b"}
    heard.word("a", "online")
    assert heard.site.session.fleet.usable().keys() == {"a", "b"}


def test_a_broker_that_ends_takes_no_plan_with_it() -> None:
    heard = Heard()
    plan = heard.site.plan
    assert [heard.word(device) for device in "ab"] == [[], []]
    heard(interface.BrokerConnection(online=False), DEBOUNCE_S / 2)
    heard(interface.BrokerConnection(online=True), 1)
    for device in "ab":  # what the broker has retained
        heard.word(device, at_s=1.1)
    heard(interface.Tick(), WILL_RECONNECT_S)
    for device in "ab":
        heard.word(device, "online", at_s=WILL_RECONNECT_S)
    heard(interface.Tick(), 2 * WILL_RECONNECT_S)
    assert heard.site.plan == plan


@pytest.mark.parametrize(("reconnected", "held_s"), [(False, DEBOUNCE_S), (True, WILL_RECONNECT_S)])
def test_a_device_that_is_gone_is_so_in_the_end(reconnected: bool, held_s: float) -> None:
    """Also by what a broker has retained."""
    heard = Heard()
    for online in (False, True) if reconnected else ():
        heard(interface.BrokerConnection(online=online))
    heard.word("b")
    heard(interface.Tick(), held_s - 0.1)
    assert heard.site.plan is not None
    heard(interface.Tick(), held_s)
    assert heard.site.plan is None
    assert set(heard.site.session.fleet.usable()) == {"a"}


def test_a_device_that_starts_anew_is_a_new_one_at_once() -> None:
    heard = Heard()
    heard.word("b")
    heard.word("b", "online", 2)
    assert heard.site.plan is None


# -- devices that cost others runs or plans ---------------------------------------------------------------------------


def test_a_device_that_comes_and_goes_under_requests_is_put_aside_and_costs_none_its_answer() -> None:
    site = settled("a", "b", decider=everyone)
    for number in range(SETBACKS):
        assert set(site.plan.devices) == {"a", "b"}
        site.submit(f"r{number}")
        site.leave("b")
        site.join("b")
        site.settle()
        site.answer(max(site.work))
        site.settle()
    assert len(site.answers) == SETBACKS
    assert site.plan.devices == ("a",)
    assert set(site.session.fleet.unused_reasons()) == {"b"}
    site.pass_by(int(QUARANTINE_S) + 2)
    site.ready()
    assert set(site.plan.devices) == {"a", "b"}, "after a while it is tried again"


def test_a_device_that_refuses_every_plan_is_put_aside_before_requests_are_refused_for_it() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.submit("r1")
    for _ in range(SETBACKS):
        site.tick(1.1)
        site.failed("b", "plan")
    site.tick(1.1)
    site.ready("a")
    assert site.plan is not None
    assert site.plan.devices == ("a",)
    site.answer(max(site.work))
    assert "r1" in site.answers


def test_a_device_that_comes_and_goes_all_the_time_keeps_no_plan_from_another() -> None:
    site = Site()
    site.join("a")
    site.submit("r1")
    for _ in range(200):
        site.tick(0.05)
        site.join("b")
        site.leave("b")
        site.ready(*{"a"} & set(site.prepares()))
        if site.work:
            break
    site.answer(1)
    assert "r1" in site.answers


def test_a_device_that_makes_progress_for_ever_holds_no_plan_up_for_ever() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.submit("r1", within=1e6)
    site.tick(1.1)
    for _ in range(int(LOAD_MAX_S) + 30):
        site.ready("a")
        if site.plan is not None:
            break
        asked = site.prepares()["b"]
        plan = Plan.from_dict(asked.plan)
        more = messages.PrepareProgress(asked.transaction_id, plan.model, plan.version, int(site.now), 1 << 40)
        site.event(interface.DeviceMessage("b", more))
        site.tick(1.0)
    assert site.plan is not None
    assert site.plan.devices == ("a",)
    site.answer(max(site.work))
    assert "r1" in site.answers


def test_the_only_device_is_not_put_aside() -> None:
    site = settled("a")
    for number in range(1 + SETBACKS):
        site.submit(f"r{number}")
        site.leave("a")
        site.join("a")
        site.settle()
        site.answer(max(site.work))
    assert len(site.answers) == SETBACKS + 1


# -- introductions ----------------------------------------------------------------------------------------------------

HERE, THERE = Endpoint("127.0.0.1", 1), Endpoint("192.0.2.7", 2)
SECRET = bytes(range(32))
SECURE = replace(THERE, fingerprint="0f" * 32)


def membership(*, mesh: bool = True, **endpoints: Endpoint | None) -> Fleet:
    members = Fleet(secret=SECRET if mesh else None)
    for name, endpoint in endpoints.items():
        start(members, name, 1, endpoint)
    return members


def start(members: Fleet, name: str, boot: int, endpoint: Endpoint | None) -> None:
    members.record_caps(name, replace(caps(name, boot), endpoint=endpoint))
    members.record_status(name, Status("online", boot), 0.0)


def mesh(**more) -> Plan:
    return Plan("m", PlanVersion(1, 1), "row", ("a", "b", "c"), "a", route="mesh", **more)


@pytest.mark.parametrize(
    ("places", "relayed"),
    [
        ((THERE, SECURE, SECURE), "ab ba ac ca"),  # one with TLS and one without do not connect
        ((THERE, THERE, None), "ac ca bc cb"),
        ((HERE, HERE, THERE), "ac bc"),  # what listens on loopback is heard on its own machine alone
    ],
)
def test_pairs_that_cannot_connect_are_reached_over_the_broker(places: tuple, relayed: str) -> None:
    members = membership(**dict(zip("abc", places, strict=True)))
    assert members.relayed_pairs(0.0) == {tuple(pair) for pair in relayed.split()}
    assert members.cluster({}).endpoints == {name for name, place in zip("abc", places, strict=True) if place}


def test_a_pair_that_could_not_connect_is_tried_again_after_a_while_or_a_new_start():
    members = membership(a=THERE, b=THERE)
    members.record_unreachable("b", ("a", "nobody"), 10.0)
    assert members.relayed_pairs(10.0) == {("a", "b")}
    assert members.relayed_pairs(10.0 + RELAYED_S) == set()
    members.record_unreachable("b", ("a",), 10.0)
    start(members, "a", 2, THERE)
    assert members.relayed_pairs(11.0) == set()


def test_both_ends_of_a_pair_are_told_one_token_and_nobody_else_is():
    members = membership(a=THERE, b=THERE, c=THERE)
    told = {d: {p.device: p for p in peers_of(mesh(), d, members)} for d in "abc"}
    for one in "abc":
        for other in set("abc") - {one}:
            assert told[one][other].token_in == told[other][one].token_out != ""
    tokens = [p.token_in for peers in told.values() for p in peers.values()]
    assert len(set(tokens)) == len(tokens) == 6
    assert peers_of(mesh(), "a", members) == tuple(told["a"].values()), "a Prepare that is repeated says the same"
    later = peers_of(replace(mesh(), version=PlanVersion(1, 2)), "a", members)
    assert not {p.token_in for p in later} & set(tokens)


def test_relayed_pairs_have_no_tokens_and_plans_over_the_broker_have_them_for_tiles():
    members = membership(a=THERE, b=THERE, c=None)
    (b,) = peers_of(mesh(relayed_pairs=(("b", "a"), ("a", "c"), ("c", "a"))), "a", members)
    assert (b.device, b.token_out) == ("b", "")
    assert b.token_in
    assert peers_of(replace(mesh(), route="broker"), "a", members) == peers_of(mesh(), "a", members)


def test_without_a_secret_nobody_is_introduced():
    members = membership(mesh=False, a=THERE, b=THERE)
    assert members.cluster({}).endpoints == frozenset()
    assert all(not p.token_in and not p.token_out for p in peers_of(mesh(), "a", members))


def test_a_device_that_people_switch_off_is_in_no_plan_until_they_switch_it_on() -> None:
    site = settled("a", "b", decider=everyone)
    site.submit("r1")
    site.told.clear()
    site.event(interface.DeviceUse("b", wanted=False))
    assert messages.ReleaseAll in [type(m) for d, m in site.told if d == "b"], "it frees what it holds"
    site.ready()
    site.answer(2)
    assert site.answers["r1"].plan.devices == ("a",), "what it computed runs again elsewhere"
    assert site.session.fleet.unused_reasons().keys() == {"b"}
    assert any("b" in t.cause for story in site.session.stories() for t in story.last(20))
    site.event(interface.DeviceStatus("b", Status("online", 2)))
    site.event(interface.DeviceCaps("b", caps("b", 2)))
    assert "b" not in site.session.fleet.usable(), "a new start changes nothing"
    site.event(interface.DeviceUse("b", wanted=True))
    site.boots["b"] = 2
    site.settle()
    assert set(site.plan.devices) == {"a", "b"}
    assert not site.session.fleet.unused_reasons()


def test_where_all_are_switched_off_requests_end_with_the_reason() -> None:
    site = Site()
    site.event(interface.DeviceUse("a", wanted=False))  # retained: it comes before the device
    site.join("a")
    site.tick(1.1)
    site.submit("r1")
    assert UNWANTED in str(site.errors["r1"])
    assert not site.session.fleet.expected(site.now), "nobody waits for it"


def test_devices_with_one_address_share_a_machine() -> None:
    site = Site()
    for device, host in (("a", "10.0.0.1"), ("b", "10.0.0.1"), ("c", "10.0.0.2")):
        site.event(interface.DeviceCaps(device, replace(caps(device, 1), endpoint=Endpoint(host, 1, ""))))
        site.event(interface.DeviceStatus(device, Status("online", 1)))
    site.join("d")
    assert site.session.fleet.machines() == {"a": "10.0.0.1", "b": "10.0.0.1"}


def test_tiles_that_a_device_reports_are_those_of_its_start_and_of_the_served_manifest() -> None:
    members = membership(a=THERE, b=THERE)
    manifest = Manifest("m", (TensorEntry("w", (600, 256), "f32", False, (bytes(32), b"1" * 32, b"2" * 32)),))
    served = ServedModel("m", spec_of_kind("tiny-bert"), manifest.digest, tiles=TileMap(manifest))
    for name, digest, bits in (("a", manifest.digest, b"\xa0"), ("b", bytes(32), b"\xe0"), ("b", manifest.digest, b"")):
        members.record_tiles(name, messages.CachedTiles("m", digest, bits, 2e8), served)
    assert {name: mask.tolist() for name, mask in members.cached("m").items()} == {"a": [True, False, True]}
    assert members.load_rates()["a"].read_bytes_per_s == 2e8
    speed = members.cluster({}).devices["a"].speed(TYPICAL_ROWS)
    received = LoadRates.expected(speed).receive_bytes_per_s
    assert members.load_rates()["a"].receive_bytes_per_s == received, "not measured yet"
    members.record_status("a", Status("online", 99, term=9), 1.0)
    assert not members.cached("m")
