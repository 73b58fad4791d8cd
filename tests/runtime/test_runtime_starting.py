"""Requests that wait for devices that are starting, and devices that die of a plan, on a virtual clock."""

from __future__ import annotations

from scripted_site import Site, everyone

from hepti_mqtt.errors import DeadlineError, PlanError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.fleet import AGAIN_S, PART, REST_S, RETURN_S, SILENT_S, STARTING_S, YOUNG_S, Falls
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.session import COMING_S


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


def test_nobody_waits_for_a_device_that_has_fallen_silent_while_it_started() -> None:
    site = Site()
    says_it_starts(site, "a")
    site.submit("r1")
    site.tick(SILENT_S - 1.0)
    assert not site.errors
    site.tick(2.0)
    assert "no device is online" in str(site.errors["r1"])


def test_nobody_waits_for_ever_for_a_device_that_goes_on_starting() -> None:
    site = Site()
    says_it_starts(site, "a")
    site.submit("r1", within=2 * STARTING_S)
    passes(site, STARTING_S + 2, "a")
    assert "no device is online" in str(site.errors["r1"])


def test_a_device_that_is_gone_before_it_was_online_is_not_waited_for() -> None:
    site = Site()
    says_it_starts(site, "a")
    site.submit("r1")
    site.tick(2.0)
    site.event(interface.DeviceStatus("a", Status("offline", 1)))
    site.tick(0.1)
    assert "no device is online" in str(site.errors["r1"])


def test_the_deadline_holds_while_a_device_is_starting() -> None:
    site = Site()
    says_it_starts(site, "a")
    site.submit("r1", within=3.0)
    passes(site, 5, "a")
    assert isinstance(site.errors["r1"], DeadlineError)


def test_who_is_online_serves_while_others_start() -> None:
    site = Site(decider=everyone)
    says_it_starts(site, "b")
    site.join("a")
    assert site.settle().devices == ("a",)
    site.submit("r1")
    site.answer(1)
    assert "r1" in site.answers


def test_pins_wait_for_those_of_their_devices_that_are_starting() -> None:
    site = Site(decider=everyone)
    site.join("a")
    site.settle()
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
    passes(site, 3 * COMING_S, "b")
    assert not site.errors
    site.join("b")
    assert set(site.settle().devices) == {"a", "b"}


def test_a_device_that_restarts_is_gone_and_coming() -> None:
    site = Site(decider=everyone)
    site.join("a")
    site.settle()
    says_it_starts(site, "a", boot=2)
    assert not site.session.membership.usable()
    assert site.session.membership.coming(site.now) == {"a"}
    site.submit("r1")
    site.boots.clear()
    for _ in range(30):
        site.tick(1.0)
        says_it_starts(site, "a", boot=2)
    assert not site.errors


def test_nothing_is_searched_while_the_only_device_may_come_back() -> None:
    site = Site()
    site.join("a")
    site.settle()
    site.leave("a")
    site.submit("r1")
    before = len(site.solves)
    passes(site, RETURN_S - 1)
    assert len(site.solves) == before
    assert not site.errors
    passes(site, 2)
    assert "no device is online" in str(site.errors["r1"])


def memory(site: Site, device: str) -> float:
    """Return the memory that the last search could plan with."""
    return site.solves[-1].question.cluster.devices[device].memory_bytes


def test_a_device_that_dies_of_a_plan_again_gets_less_for_a_while() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.settle()
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
    passes(site, REST_S + 1)
    assert memory(site, "b") == 1 << 30


def test_a_device_that_was_only_away_has_not_died() -> None:
    """Its connection was lost, or it had no core for too long: it comes back as the same start."""
    site = Site(decider=everyone)
    site.join("a", "b")
    site.settle()
    for _ in range(3):
        site.leave("b")
        site.settle()
        site.join("b")
        site.settle()
    assert memory(site, "b") == 1 << 30


def test_a_device_that_hangs_has_not_died() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.settle()
    site.mute = {"b"}
    for number in range(2):
        site.submit(f"r{number}", within=1e9)
        while "b" in site.session.membership.usable():
            site.tick(0.1)
        site.ready("a")
        site.event(interface.UpMessage("b", messages.RequestFailed("m", Epoch(7, 1), 1, "wire", "late")))
        for _ in range(3):
            site.tick(1.1)
            site.ready()
    assert memory(site, "b") == 1 << 30


def test_each_death_makes_the_rest_longer_and_a_long_life_ends_that() -> None:
    falls = Falls()
    boots = iter(range(1, 100))

    def fell(needed_bytes: int, given_s: float, now: float) -> None:
        falls.gone("a", next(boots), needed_bytes, given_s, now)
        falls.back("a", next(boots), now)

    fell(1000, 0.0, YOUNG_S + 1.0)
    fell(1000, 100.0, 108.0)
    assert falls.most_bytes(108.0) == {}, "only one plan was young"
    fell(1000, 110.0, 116.0)
    assert falls.most_bytes(116.0) == {"a": int(PART * 1000)}
    assert falls.rested(117.0) == []
    fell(750, 120.0, 126.0)
    assert falls.most_bytes(126.0 + 2 * REST_S - 1.0) == {"a": int(PART * 750)}
    assert falls.rested(126.0 + 2 * REST_S) == ["a"]
    assert falls.rested(127.0 + 2 * REST_S) == []
    assert falls.most_bytes(126.0 + 2 * REST_S) == {}
    falls.rested(127.0 + 2 * REST_S + AGAIN_S)
    fell(1000, 900.0, 901.0)
    assert falls.most_bytes(901.0) == {}, "it begins anew"
