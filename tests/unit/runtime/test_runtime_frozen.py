"""A broker that is frozen while the planner's connection to it stands, and what comes when it is back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from scripted_site import Site, everyone, heartbeat, preparing, settled

from hepti_mqtt.core.errors import OverloadedError
from hepti_mqtt.cost.loads import LoadRates
from hepti_mqtt.planner import Decision, Question, decide
from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.admission import BURST_S, MAX_IN_BURST, MAX_QUEUED_PER_CLIENT
from hepti_mqtt.runtime.coordinator.fleet import FROZEN_S, QUIET_S, BrokerWatch, LastWillDebounce

TICK_S = 0.1


@dataclass
class Frozen:
    """A site with the watch of the planner's shell."""

    site: Site
    watch: BrokerWatch = field(default_factory=BrokerWatch)

    def tick(self, heard_s: float) -> None:
        state = self.watch.look(heard_s, self.site.now)
        if state in ("away", "back"):
            self.site.event(interface.BrokerState(online=state == "back", is_new=False))
        self.site.event(interface.Tick(heard_s=heard_s))

    def freeze(self, seconds: float) -> None:
        heard_s = self.site.now
        for _ in range(round(seconds / TICK_S)):
            self.site.now += TICK_S
            self.tick(heard_s)

    def thaw(self) -> None:
        self.site.now += TICK_S
        self.tick(self.site.now)
        for device, boot in self.site.boots.items():
            self.site.event(interface.DeviceHeartbeat(device, heartbeat(boot)))


@pytest.mark.parametrize("seconds", [1.0, 3.5, 5.0, 120.0])
@pytest.mark.parametrize(("devices", "decider"), [("a", everyone), ("ab", everyone), ("ab", decide)])
def test_no_request_suffers_from_a_broker_that_is_frozen_for_any_time(
    devices: str, decider: Callable[[Question], Decision], seconds: float
) -> None:
    site = settled(*devices, decider=decider)
    plan = site.plan
    site.submit("running", within=2 * seconds + 60)
    site.submit("other", within=2 * seconds + 60)
    site.mute.update(devices)
    frozen = Frozen(site)
    frozen.freeze(seconds)
    assert site.plan.version == plan.version, "no device is blamed"
    assert not site.errors
    site.mute.clear()
    frozen.thaw()
    for _ in range(30):
        site.tick(0.2)
        for run in [run for group in site.session.groups for run in group.runs.values()]:
            site.answer(run.run_id)
    assert set(site.answers) == {"running", "other"}
    assert site.plan.version == plan.version


def test_a_preparation_goes_on_after_a_freeze() -> None:
    site = preparing("a", "b", decider=everyone)
    site.submit("r1", within=1000)
    frozen = Frozen(site)
    frozen.freeze(200)
    frozen.thaw()
    site.tick(0.2)
    assert not site.errors
    site.ready()
    site.answer(1)
    assert site.answers["r1"].plan.devices == ("a", "b")


def test_a_device_that_is_silent_beside_a_broker_that_answers_is_lost_as_ever() -> None:
    site = settled("a", "b", decider=everyone)
    frozen = Frozen(site)
    del site.boots["b"]
    for _ in range(80):
        site.now += TICK_S
        frozen.tick(site.now)
        site.event(interface.DeviceHeartbeat("a", heartbeat(1)))
    assert set(site.session.fleet.usable()) == {"a"}


@pytest.mark.parametrize("load_s", [1.6, 16.0])
def test_a_silent_device_is_put_aside_where_the_broker_has_nothing_to_say_but_heartbeats(load_s: float) -> None:
    site = settled("a", "b", decider=everyone)
    site.mute = {"b"}
    site.submit("r1", within=1e9)
    nbytes = site.session.groups.default("m").plans.active.needed_bytes("a")
    for name in "ab":  # loads are slow, so a silent device has longer than the time between two heartbeats
        site.session.fleet.member(name).reported_rates = LoadRates(receive_bytes_per_s=nbytes / load_s)
    frozen, heard_s = Frozen(site), site.now
    for tick in range(40):
        site.now += TICK_S
        heard_s = site.now if tick % 10 == 0 else heard_s
        probed = site.notes()["doubt"]
        frozen.tick(heard_s)
        if site.notes()["doubt"] > probed:  # the broker acknowledges the probe
            heard_s = site.now + 0.01
    assert "b" not in site.session.fleet.usable()
    assert not site.notes()["overdue"], "the run would be retried with the same devices"


def test_the_watch_asks_once_before_it_calls_a_broker_silent() -> None:
    watch, states = BrokerWatch(), []
    for tenth in range(100):
        now = tenth / 10
        state = watch.look(0.0 if now < 8 else now, now)
        states += [(state, now)] if state else []
    assert states == [("ask", QUIET_S), ("away", QUIET_S + FROZEN_S), ("back", 8.0)]
    assert all(later > sooner for (_, sooner), (_, later) in pairwise(states))


def test_a_burst_after_a_pause_is_admitted() -> None:
    site = settled("a")
    burst = MAX_QUEUED_PER_CLIENT + 100
    site.event(interface.BrokerState(online=True))
    for number in range(burst):
        site.submit(f"r{number}")
    assert not site.errors
    site.now += BURST_S + 1
    site.submit("later")
    assert isinstance(site.errors["later"], OverloadedError)
    assert burst < MAX_IN_BURST


def test_wills_that_a_frozen_broker_delivers_on_the_same_connection_count() -> None:
    """They are not published again, as after a restart."""
    site = settled("a")
    wills = LastWillDebounce(site.session)
    wills.handle(interface.DeviceStatus("a", Status("offline", 1)), site.now)
    wills.handle(interface.BrokerState(online=False, is_new=False), site.now + 0.1)
    wills.handle(interface.BrokerState(online=True, is_new=False), site.now + 0.2)
    wills.handle(interface.Tick(), site.now + 10)
    assert not site.session.fleet.usable()
