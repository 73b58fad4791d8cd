"""Devices that start, join, fall silent, crash, are quarantined and return, on a virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted_site import LOST_S, Site, caps, everyone, heartbeat, settled

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.core.errors import PlanError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.cost.loads import LoadRates, TileMap
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.manifest import Manifest, TensorEntry
from hepti_mqtt.protocol.messages import Endpoint, Status
from hepti_mqtt.runtime.coordinator import fleet, interface
from hepti_mqtt.runtime.coordinator.dispatch import OVERDUE_MAX_S
from hepti_mqtt.runtime.coordinator.plans import ServedModel
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.searches import RETRY_WHILE_EXPECTED_S


def test_no_device_is_silent_while_unread_messages_wait() -> None:
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


def test_silence_while_the_planner_is_offline_condemns_nobody() -> None:
    site = settled("a")
    plan = site.plan
    site.submit("r1")
    site.event(interface.BrokerState(online=False))
    site.tick(100, alive=False)
    site.event(interface.BrokerState(online=True))
    site.tick(3, alive=False)
    assert site.plan.version == plan.version
    assert "r1" in site.errors, "but deadlines hold"
    site.tick(LOST_S, alive=False)
    assert site.plan is None


def test_device_that_rejoins_drops_what_it_holds() -> None:
    site = settled("a")
    site.sent.clear()
    site.leave("a")
    site.join("a")
    kinds = [type(m) for d, m in site.sent if d == "a"]
    assert messages.ReleaseAll in kinds
    assert messages.Prepare not in kinds[: kinds.index(messages.ReleaseAll)]


def test_no_prediction_stretches_the_time_after_which_a_run_is_overdue() -> None:
    def slow(question):
        decision = everyone(question)
        plan = replace(decision.chosen.plan, predicted_s=8.6e9)
        return replace(decision, chosen=replace(decision.chosen, plan=plan))

    site = settled("a", decider=slow)
    site.submit("r1", within=1e9)
    for _ in range(int(OVERDUE_MAX_S)):
        assert not site.notes()["overdue"]
        site.tick(1)
    site.tick(1)
    assert site.notes()["overdue"] == 1


def test_invented_devices_are_forgotten_for_usable_ones() -> None:
    site = settled("a", "b")
    site.receive("unknown", messages.PrepareFailed(1, "m", site.plan.version, "mesh", "", 0, ("a",)))
    assert list(site.session.fleet.members) == ["a", "b"], "a message makes no member"
    for number in range(fleet.MAX_MEMBERS + 50):
        name = f"invented{number}"
        site.event(interface.DeviceStatus(name, Status("online", 1)))
        site.event(interface.DeviceHeartbeat(name, heartbeat(1)))
    assert len(site.session.fleet.members) == fleet.MAX_MEMBERS
    assert set(site.session.fleet.usable()) == {"a", "b"}
    site.join("late")
    assert "late" in site.session.fleet.usable()


def test_devices_beyond_the_limit_are_counted() -> None:
    site = Site(searches=False)
    site.join(*(f"d{number}" for number in range(fleet.MAX_MEMBERS)))
    site.join("beyond")
    assert "beyond" not in site.session.fleet.members
    assert site.session.counters["devices_beyond"] == 2
    site.leave("d7")
    site.join("beyond")
    assert "beyond" in site.session.fleet.usable()


def test_a_device_with_heartbeats_that_does_not_compute_is_quarantined_each_time_longer() -> None:
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
    for _ in range(int(fleet.QUARANTINE_S)):
        assert site.plan.version == second.version
        site.tick(1)
    site.tick(1)
    site.settle()
    assert set(site.plan.devices) == {"a", "b"}
    assert not site.session.fleet.unused_reasons()
    site.submit("r2")
    site.pass_by(12, 0.1)
    assert site.session.fleet.members["b"].quarantined_until_s - site.now > 1.5 * fleet.QUARANTINE_S, "longer each time"


@pytest.mark.parametrize(
    ("mute", "pins", "tick_s"),
    [
        ("", Pins(), 0.1),  # devices answer the probe: the run only takes long
        ("ab", Pins(), 0.1),  # no other device can serve
        ("b", Pins(devices=("a", "b")), 0.1),  # pins name the device
        ("b", Pins(), 0.7),  # the planner itself was held up
    ],
)
def test_a_device_of_a_late_run_stays_usable(mute: str, pins: Pins, tick_s: float) -> None:
    site = settled("a", "b", pins=pins, decider=everyone)
    version = site.plan.version
    site.mute = set(mute)
    site.submit("r1", within=1e9)
    site.pass_by(round(2.1 / tick_s), tick_s)
    assert site.plan.version == version
    assert set(site.session.fleet.usable()) == {"a", "b"}
    assert site.notes()["doubt"] or tick_s > 0.1


def test_a_plan_that_a_doubting_device_released_is_prepared_again_and_its_runs_are_retried() -> None:
    site = settled("a")
    first = site.plan
    site.submit("r1")
    gone = messages.PrepareFailed(0, "m", first.version, "forgotten", "a has released it", 0)
    for _ in range(2):
        site.receive("a", gone)
    site.submit("r2")
    assert list(site.work) == [1]
    site.ready()
    assert [frame.plan_version > first.version for frame in site.work.values()] == [False, True, True]
    site.answer(2)
    site.answer(3)
    assert set(site.answers) == {"r1", "r2"}


@pytest.mark.parametrize(("model", "newer"), [("m", 1), ("n", 0)])
def test_the_release_of_a_plan_that_is_not_in_use_changes_nothing(model: str, newer: int) -> None:
    site = settled("a")
    plan = site.plan
    site.submit("r1")
    other = plan.version._replace(number=plan.version.number + newer)
    site.receive("a", messages.PrepareFailed(0, model, other, "forgotten", "gone", 0))
    assert site.plan.version == plan.version
    site.answer(1)
    assert set(site.answers) == {"r1"}


def test_runs_that_a_broker_lost_are_retried_when_all_devices_are_back() -> None:
    site = settled("a", "b", decider=everyone)
    plan = site.plan
    site.submit("r1")
    site.event(interface.BrokerState(online=False))
    site.now += 0.2
    site.event(interface.BrokerState(online=True))
    site.event(interface.DeviceHeartbeat("a", heartbeat(1)))
    assert list(site.work) == [1], "b is not there yet, and would miss it"
    site.event(interface.DeviceHeartbeat("b", heartbeat(1)))
    assert list(site.work) == [1, 2]
    assert site.work[2].plan_version == plan.version
    site.answer(2)
    assert "r1" in site.answers
    assert not site.notes()["overdue"]


# -- starting ---------------------------------------------------------------------------------------------------------


def starting(site: Site, device: str, boot: int = 1, done: int = 0) -> None:
    site.event(interface.DeviceStatus(device, Status("starting", boot, "compiling kernels", done, 23)))


def passes(site: Site, seconds: float, *devices: str) -> None:
    """Let time pass while devices report that they are starting."""
    for second in range(int(seconds)):
        site.tick(1.0)
        for device in devices:
            starting(site, device, done=second)


@pytest.mark.parametrize(
    "wait", ["for a starting device", "after a refusal", "for devices to reconnect", "after a loss"]
)
def test_requests_wait_for_devices_that_may_join(wait: str) -> None:
    site = settled("a") if wait == "after a loss" else Site()
    seconds, reporting = 60, "a"
    if wait == "after a refusal":
        site.submit("early")
        site.tick(2.0)
        assert isinstance(site.errors.pop("early"), PlanError)
    if wait == "for devices to reconnect":
        site.event(interface.BrokerState(online=True))
        seconds, reporting = 2, ""
    elif wait == "after a loss":
        site.leave("a")
        seconds, reporting = int(fleet.RETURN_S) - 1, ""
    else:
        starting(site, "a")
    site.submit("r1", within=600.0)
    searches = len(site.solves)
    passes(site, seconds, *reporting)
    assert not site.errors
    assert len(site.solves) == searches
    site.join("a", boot=2)
    site.settle()
    site.answer(1)
    assert "r1" in site.answers


@pytest.mark.parametrize("end", ["it falls silent", "it never ends", "it is gone", "it does not return"])
def test_the_wait_for_a_device_is_limited(end: str) -> None:
    site = settled("a") if end == "it does not return" else Site()
    if end == "it does not return":
        site.leave("a")
    else:
        starting(site, "a")
    site.submit("r1", within=2 * fleet.STARTING_S)
    passes(site, min(fleet.SILENT_S, fleet.RETURN_S) - 1)
    assert not site.errors
    if end == "it is gone":
        site.event(interface.DeviceStatus("a", Status("offline", 1)))
        site.tick(0.1)
    elif end == "it never ends":
        passes(site, fleet.STARTING_S + 2, "a")
    else:
        passes(site, fleet.SILENT_S)
    assert isinstance(site.errors["r1"], PlanError)


def test_a_search_without_a_plan_is_repeated_while_devices_start() -> None:
    def large(question):
        if len(question.cluster.devices) < 2:
            raise PlanError("it does not fit")
        return everyone(question)

    site = Site(decider=large)
    site.join("a")
    starting(site, "b")
    site.submit("r1")
    passes(site, 3 * RETRY_WHILE_EXPECTED_S, "b")
    assert not site.errors
    site.join("b")
    assert set(site.settle().devices) == {"a", "b"}


def test_a_device_that_restarts_is_lost_and_expected() -> None:
    site = settled("a", decider=everyone)
    starting(site, "a")
    assert "a" in site.session.fleet.usable(), "of the start that is online: it is late or forged"
    starting(site, "a", boot=2)
    assert not site.session.fleet.usable()
    assert site.session.fleet.expected(site.now) == {"a"}
    site.submit("r1")
    site.boots.clear()
    for _ in range(30):
        site.tick(1.0)
        starting(site, "a", boot=2)
    assert not site.errors


# -- crashes ----------------------------------------------------------------------------------------------------------


def memory(site: Site, device: str) -> float:
    """Return the memory of a device in the last search."""
    return site.solves[-1].question.cluster.devices[device].memory_bytes


@pytest.mark.parametrize(
    ("reason", "boots", "crashed"),
    [("stopped", (2, 3, 4), False), ("", (1, 1, 1), False), ("", (2,), False), ("", (2, 3), True)],
    ids=["stopped", "cut off", "once", "again"],
)
def test_a_device_that_crashes_again_under_a_plan_gets_less_memory_for_a_while(reason, boots, crashed) -> None:
    site = settled("a", "b", decider=everyone)
    for boot in boots:
        site.leave("b", reason)
        site.settle()
        site.join("b", boot=boot)
        site.settle()
    assert (memory(site, "b") < 1 << 30) is crashed
    assert memory(site, "a") == 1 << 30
    passes(site, fleet.BACKOFF_S + 1)
    assert memory(site, "b") == 1 << 30


def test_the_only_device_serves_again_after_crashes() -> None:
    site = settled("a")
    for boot in (2, 3, 4):
        site.leave("a")
        site.pass_by(1)
        site.join("a", boot=boot)
        site.submit(f"r{boot}")
        site.pass_by(4, 1.1, ready=True)
        assert site.plan is not None
    assert not site.errors
    assert site.notes()["crash_limit"] == 2, "the first crash may have been a restart"


def test_a_device_that_hangs_has_not_crashed() -> None:
    site = settled("a", "b", decider=everyone)
    site.mute = {"b"}
    for number in range(2):
        site.submit(f"r{number}", within=1e9)
        while "b" in site.session.fleet.usable():
            site.tick(0.1)
        site.ready("a")
        site.receive("b", messages.RunFailed("m", PlanVersion(7, 1), 1, "wire", "late"))
        site.pass_by(3, 1.1, ready=True)
    assert memory(site, "b") == 1 << 30


def test_each_crash_doubles_the_limit_and_a_long_life_forgets_crashes() -> None:
    backoff = fleet.CrashBackoff()
    boots = iter(range(1, 100))

    def crash(needed_bytes: int, given_s: float, now: float) -> None:
        backoff.record_departure("a", next(boots), needed_bytes, given_s, now)
        backoff.record_return("a", next(boots), now)

    crash(1000, 0.0, fleet.CRASH_WINDOW_S + 1.0)
    crash(1000, 100.0, 108.0)
    assert backoff.memory_limits(108.0) == {}, "only one plan was young"
    crash(1000, 110.0, 116.0)
    assert backoff.memory_limits(116.0) == {"a": int(fleet.MEMORY_FACTOR * 1000)}
    assert backoff.lift_expired(117.0) == []
    crash(750, 120.0, 126.0)
    assert backoff.memory_limits(126.0 + 2 * fleet.BACKOFF_S - 1.0) == {"a": int(fleet.MEMORY_FACTOR * 750)}
    assert backoff.lift_expired(126.0 + 2 * fleet.BACKOFF_S) == ["a"]
    assert backoff.lift_expired(127.0 + 2 * fleet.BACKOFF_S) == []
    assert backoff.memory_limits(126.0 + 2 * fleet.BACKOFF_S) == {}
    backoff.lift_expired(127.0 + 2 * fleet.BACKOFF_S + fleet.REPEAT_WINDOW_S)
    crash(1000, 900.0, 901.0)
    assert backoff.memory_limits(901.0) == {}


# -- last wills -------------------------------------------------------------------------------------------------------


class Debounced:
    """A site of a and b behind a `LastWillDebounce`, with times in seconds after its start."""

    def __init__(self) -> None:
        self.site = settled("a", "b", decider=everyone)
        self.wills = fleet.LastWillDebounce(self.site.session)

    def __call__(self, event: interface.CoordinatorEvent, at_s: float = 0.0) -> object:
        return self.wills.handle(event, self.site.now + at_s)

    def status(self, device: str, state: str = "offline", boot: int = 1, at_s: float = 0.0, reason: str = "") -> object:
        return self(interface.DeviceStatus(device, Status(state, boot, reason=reason)), at_s)


def test_a_device_that_goes_offline_with_a_reason_is_lost_immediately() -> None:
    scene = Debounced()
    scene.status("a", reason="stopped")
    assert scene.site.session.fleet.usable().keys() == {"b"}
    scene(interface.DeviceHeartbeat("a", heartbeat(1)))  # it came by another connection
    assert scene.site.session.fleet.usable().keys() == {"b"}
    scene.status("a", "online")
    assert scene.site.session.fleet.usable().keys() == {"a", "b"}


def test_wills_of_a_broker_that_ends_cost_no_plan() -> None:
    scene = Debounced()
    plan = scene.site.plan
    assert [scene.status(device) for device in "ab"] == [[], []]
    scene(interface.BrokerState(online=False), fleet.DEBOUNCE_S / 2)
    scene(interface.BrokerState(online=True), 1)
    for device in "ab":  # what the broker has retained
        scene.status(device, at_s=1.1)
    scene(interface.Tick(), fleet.WILL_RECONNECT_S)
    for device in "ab":
        scene.status(device, "online", at_s=fleet.WILL_RECONNECT_S)
    scene(interface.Tick(), 2 * fleet.WILL_RECONNECT_S)
    assert scene.site.plan == plan


@pytest.mark.parametrize(("reconnected", "held_s"), [(False, fleet.DEBOUNCE_S), (True, fleet.WILL_RECONNECT_S)])
def test_a_will_counts_after_its_delay(reconnected: bool, held_s: float) -> None:
    scene = Debounced()
    for online in (False, True) if reconnected else ():
        scene(interface.BrokerState(online=online))
    scene.status("b")
    scene(interface.Tick(), held_s - 0.1)
    assert scene.site.plan is not None
    scene(interface.Tick(), held_s)
    assert scene.site.plan is None
    assert set(scene.site.session.fleet.usable()) == {"a"}


def test_a_new_start_ends_the_delay_of_a_will() -> None:
    scene = Debounced()
    scene.status("b")
    scene.status("b", "online", 2)
    assert scene.site.plan is None


# -- setbacks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", ["ab", "b"])
def test_a_device_that_leaves_often_under_requests_is_quarantined_unless_it_is_the_only_one(devices: str) -> None:
    site = settled(*devices, decider=everyone)
    for number in range(fleet.SETBACKS):
        assert set(site.plan.devices) == {*devices}
        site.submit(f"r{number}")
        site.leave("b")
        site.join("b")
        site.settle()
        site.answer(max(site.work))
        site.settle()
    assert len(site.answers) == fleet.SETBACKS
    assert set(site.plan.devices) == {*devices[:1]}
    site.pass_by(int(fleet.QUARANTINE_S) + 2)
    site.ready()
    assert set(site.plan.devices) == {*devices}


def test_a_device_that_refuses_every_plan_is_quarantined_before_requests_are_refused() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.submit("r1")
    for _ in range(fleet.SETBACKS):
        site.tick(1.1)
        site.failed("b", "plan")
    site.tick(1.1)
    site.ready("a")
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


def test_a_preparation_with_endless_progress_is_abandoned() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.submit("r1", within=1e6)
    site.tick(1.1)
    for _ in range(int(fleet.LOAD_MAX_S) + 30):
        site.ready("a")
        if site.plan is not None:
            break
        site.progress("b", int(site.now), 1 << 40)
        site.tick(1.0)
    assert site.plan.devices == ("a",)
    site.answer(max(site.work))
    assert "r1" in site.answers


# -- peers ------------------------------------------------------------------------------------------------------------

HERE, THERE = Endpoint("127.0.0.1", 1), Endpoint("192.0.2.7", 2)
SECRET = bytes(range(32))
SECURE = replace(THERE, fingerprint="0f" * 32)


def membership(*, mesh: bool = True, **endpoints: Endpoint | None) -> fleet.Fleet:
    members = fleet.Fleet(secret=SECRET if mesh else None)
    for name, endpoint in endpoints.items():
        start(members, name, 1, endpoint)
    return members


def start(members: fleet.Fleet, name: str, boot: int, endpoint: Endpoint | None) -> None:
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
def test_the_broker_relays_between_pairs_that_cannot_connect(places: tuple, relayed: str) -> None:
    members = membership(**dict(zip("abc", places, strict=True)))
    assert members.relayed_pairs(0.0) == {tuple(pair) for pair in relayed.split()}
    assert members.cluster({}).endpoints == {name for name, place in zip("abc", places, strict=True) if place}


def test_a_pair_that_could_not_connect_is_tried_again_after_a_while_or_a_new_start():
    members = membership(a=THERE, b=THERE)
    members.record_unreachable("b", ("a", "nobody"), 10.0)
    assert members.relayed_pairs(10.0) == {("a", "b")}
    assert members.relayed_pairs(10.0 + fleet.RELAYED_S) == set()
    members.record_unreachable("b", ("a",), 10.0)
    start(members, "a", 2, THERE)
    assert members.relayed_pairs(11.0) == set()


def test_each_pair_and_plan_version_has_its_own_tokens():
    members = membership(a=THERE, b=THERE, c=THERE)
    peers = {d: {p.device: p for p in fleet.peers_of(mesh(), d, members)} for d in "abc"}
    for one in "abc":
        for other in set("abc") - {one}:
            assert peers[one][other].token_in == peers[other][one].token_out != ""
    tokens = [p.token_in for each in peers.values() for p in each.values()]
    assert len(set(tokens)) == len(tokens) == 6
    assert fleet.peers_of(mesh(), "a", members) == tuple(peers["a"].values()), "a repeated Prepare has the same tokens"
    later = fleet.peers_of(replace(mesh(), version=PlanVersion(1, 2)), "a", members)
    assert not {p.token_in for p in later} & set(tokens)


def test_pairs_have_tokens_for_tiles_too_unless_they_are_relayed_or_there_is_no_secret():
    members = membership(a=THERE, b=THERE, c=None)
    (b,) = fleet.peers_of(mesh(relayed_pairs=(("b", "a"), ("a", "c"), ("c", "a"))), "a", members)
    assert (b.device, b.token_out) == ("b", "")
    assert b.token_in
    assert fleet.peers_of(replace(mesh(), route="broker"), "a", members) == fleet.peers_of(mesh(), "a", members)
    members = membership(mesh=False, a=THERE, b=THERE)  # the planner has no secret
    assert members.cluster({}).endpoints == frozenset()
    assert all(not p.token_in and not p.token_out for p in fleet.peers_of(mesh(), "a", members))


def test_plans_do_not_use_a_device_that_is_switched_off() -> None:
    site = settled("a", "b", decider=everyone)
    site.submit("r1")
    site.sent.clear()
    site.event(interface.DeviceUse("b", wanted=False))
    assert messages.ReleaseAll in [type(m) for d, m in site.sent if d == "b"]
    site.ready()
    site.answer(2)
    assert site.answers["r1"].plan.devices == ("a",)
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


def test_requests_are_refused_if_all_devices_are_switched_off() -> None:
    site = Site()
    site.event(interface.DeviceUse("a", wanted=False))  # retained: it comes before the device
    site.join("a")
    site.tick(1.1)
    site.submit("r1")
    assert fleet.UNWANTED in str(site.errors["r1"])
    assert not site.session.fleet.expected(site.now)


def test_devices_with_one_address_share_a_machine() -> None:
    site = Site()
    for device, host in (("a", "10.0.0.1"), ("b", "10.0.0.1"), ("c", "10.0.0.2")):
        site.event(interface.DeviceCaps(device, replace(caps(device, 1), endpoint=Endpoint(host, 1, ""))))
        site.event(interface.DeviceStatus(device, Status("online", 1)))
    site.join("d")
    assert site.session.fleet.machines() == {"a": "10.0.0.1", "b": "10.0.0.1"}


def test_reported_tiles_count_for_the_served_manifest_until_the_next_start() -> None:
    members = membership(a=THERE, b=THERE)
    manifest = Manifest("m", (TensorEntry("w", (600, 256), "f32", False, (bytes(32), b"1" * 32, b"2" * 32)),))
    served = ServedModel("m", spec_of_kind("tiny-bert"), manifest.digest, tiles=TileMap(manifest))
    for name, digest, bits in (("a", manifest.digest, b"\xa0"), ("b", bytes(32), b"\xe0"), ("b", manifest.digest, b"")):
        members.record_tiles(name, messages.CachedTiles("m", digest, bits, 2e8), served)
    assert {name: mask.tolist() for name, mask in members.cached("m").items()} == {"a": [True, False, True]}
    assert members.load_rates()["a"].read_bytes_per_s == 2e8
    speed = members.cluster({}).devices["a"].speed(fleet.TYPICAL_ROWS)
    received = LoadRates.expected(speed).receive_bytes_per_s
    assert members.load_rates()["a"].receive_bytes_per_s == received, "not measured yet"
    members.record_status("a", Status("online", 99, term=9), 1.0)
    assert not members.cached("m")
