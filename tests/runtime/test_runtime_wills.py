"""Last words that a broker says of everybody when it ends, and those of a device that is gone."""

from __future__ import annotations

from scripted_site import Site, everyone

from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.fleet import BACK_S, HELD_S, Wills


def site() -> tuple[Site, Wills]:
    made = Site(decider=everyone)
    made.join("a", "b")
    made.settle()
    return made, Wills(made.session)


def offline(device: str) -> interface.DeviceStatus:
    return interface.DeviceStatus(device, Status("offline", 1))


def test_a_broker_that_ends_takes_no_plan_with_it() -> None:
    made, wills = site()
    plan = made.session.plan("m")
    for device in ("a", "b"):
        assert wills.handle(offline(device), made.now) == []
    wills.handle(interface.Connection(online=False), made.now + HELD_S / 2)
    wills.handle(interface.Connection(online=True), made.now + 1)
    for device in ("a", "b"):  # what the broker has retained
        wills.handle(offline(device), made.now + 1.1)
    wills.handle(interface.Tick(), made.now + BACK_S)
    for device in ("a", "b"):
        wills.handle(interface.DeviceStatus(device, Status("online", 1)), made.now + BACK_S)
    wills.handle(interface.Tick(), made.now + 2 * BACK_S)
    assert made.session.plan("m") == plan


def test_a_device_that_is_gone_is_so_a_moment_later() -> None:
    made, wills = site()
    wills.handle(offline("b"), made.now)
    wills.handle(interface.Tick(), made.now + HELD_S / 2)
    assert made.session.plan("m") is not None
    wills.handle(interface.Tick(), made.now + HELD_S)
    assert made.session.plan("m") is None
    assert set(made.session.membership.usable()) == {"a"}


def test_a_device_that_starts_anew_is_a_new_one_at_once() -> None:
    made, wills = site()
    wills.handle(offline("b"), made.now)
    wills.handle(interface.DeviceStatus("b", Status("online", 2)), made.now)
    assert made.session.plan("m") is None


def test_a_device_that_the_broker_has_retained_as_gone_is_so_in_the_end() -> None:
    made, wills = site()
    wills.handle(interface.Connection(online=False), made.now)
    wills.handle(interface.Connection(online=True), made.now)
    wills.handle(offline("b"), made.now)
    wills.handle(interface.Tick(), made.now + BACK_S - 0.1)
    assert made.session.plan("m") is not None
    wills.handle(interface.Tick(), made.now + BACK_S)
    assert made.session.plan("m") is None
