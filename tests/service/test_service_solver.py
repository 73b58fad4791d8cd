"""The search as a command: whole, or hurried where requests wait."""

from __future__ import annotations

from scripted_site import Site

from hepti_mqtt.runtime.planner import events
from hepti_mqtt.runtime.planner.flight import Pins
from hepti_mqtt.service.solver import solve


def test_requests_that_have_no_plan_get_one_device_soon_and_the_whole_search_follows() -> None:
    site = Site(searches=False)
    site.join("a", "b")
    site.submit("r1")
    site.tick(1.1)
    (command,) = site.solves
    assert command.hurried
    found = solve(command)
    assert found.decision is not None
    assert {len(c.plan.devices) for c in found.decision.ranking} == {1}
    site.event(found)
    site.ready()
    assert site.session.plan("m") == found.decision.chosen.plan
    site.tick(1.1)
    whole = site.solves[-1]
    assert not whole.hurried
    assert {len(c.plan.devices) for c in solve(whole).decision.ranking} > {1}


def test_a_search_is_whole_where_nobody_waits_or_somebody_has_pinned_something() -> None:
    site = Site(searches=False)
    site.join("a", "b")
    site.tick(1.1)
    assert not site.solves[-1].hurried
    site.event(events.Solved("m", site.solves[-1].ticket, None, None))
    site.submit("r1", pins=Pins(strategy="row"))
    site.tick(1.1)
    assert not site.solves[-1].hurried


def test_a_hurried_search_that_finds_nothing_is_followed_by_the_whole_one() -> None:
    site = Site(searches=False)
    site.join("a", "b", memory=1)
    site.submit("r1")
    site.tick(1.1)
    found = solve(site.solves[-1])
    assert not found.hurried
    assert "memory" in str(found.error) or found.decision is not None
