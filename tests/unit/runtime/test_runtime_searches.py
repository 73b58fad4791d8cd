"""Searches of a model: each ends with a plan or another search, until a plan serves."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from scripted_site import Site, caps, everyone, heartbeat

from hepti_mqtt.core.errors import PlanError
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.planner import Assessment, Candidate, Verdict, decide, simulate_plan, with_loads
from hepti_mqtt.planner.decisions import Kind, Option
from hepti_mqtt.protocol.messages import Endpoint, Status
from hepti_mqtt.runtime.coordinator.interface import DeviceCaps, DeviceHeartbeat, DeviceStatus, Solve, Solved
from hepti_mqtt.runtime.coordinator.search_kinds import SearchKind
from hepti_mqtt.runtime.coordinator.searches import LOOK_AGAIN_S, is_worth_finishing
from hepti_mqtt.service.solver import solve


def unanswered(*devices: str) -> tuple[Site, Solve]:
    """Return a site with a running search."""
    site = Site(searches=False)
    site.join(*devices)
    site.tick(1.1)
    return site, site.solves[-1]


def test_a_named_plan_that_can_never_be_priced_leaves_the_other_plan() -> None:
    site, search = unanswered("a", "b")
    for _ in range(9):
        if search.kind is SearchKind.NAMED:
            site.event(Solved("m", search.ticket, None, error=PlanError("no")))
        else:
            both = everyone(search.question)
            slow = simulate_plan(search.question, both.chosen.plan)
            ranking = (slow, *decide(search.question).ranking)
            site.event(Solved("m", search.ticket, replace(both, chosen=slow, ranking=ranking)))
        search = site.solves[-1]
        site.ready()
    assert site.plan is not None


@pytest.mark.parametrize("device_joins", [False, True])
def test_a_model_without_a_plan_is_searched_for_again(device_joins: bool) -> None:
    site, search = unanswered("a")
    site.event(Solved("m", search.ticket, None, error=PlanError("no")))
    site.tick(1.0)
    assert site.solves[-1] is search
    if device_joins:
        site.join("b")
    site.pass_by(2 if device_joins else int(LOOK_AGAIN_S))
    again = site.solves[-1]
    assert again.kind is SearchKind.WHOLE
    assert again is not search
    site.event(Solved("m", again.ticket, None, error=PlanError("no")))
    assert site.notes()["no_plan"] == 1


@pytest.mark.parametrize("seed", range(6))
def test_three_models_that_fill_three_devices_each_get_a_plan(seed: int) -> None:
    """Each device holds one model; searches end in any order."""
    rng = Random(seed)
    _, search = unanswered("a")
    room = int(1.6 * decide(search.question).chosen.price.needs["a"])
    models = ("a", "b", "c")
    site = Site(*models, searches=False)
    late = list(models)
    rng.shuffle(late)
    answered = set[int]()
    for _ in range(400):
        if late and rng.random() < 0.2:
            site.join(late.pop(), memory=room)
        for search in [s for s in site.solves if s.ticket not in answered]:
            if rng.random() < 0.3:
                answered.add(search.ticket)
                site.event(solve(search))
        if rng.random() < 0.5:
            site.ready()
        site.tick(rng.choice((0.1, 0.5, 1.0)))
    inactive = {model for model in models if site.session.groups.default(model).active is None}
    assert not inactive


def loading(*devices: str) -> Site:
    """Return a site whose first plan is being prepared."""
    site = Site(decider=everyone)
    site.submit("waits")
    site.join(*devices)
    site.tick(1.1, alive=False)
    assert {*site.prepares()} == {*devices}
    return site


def test_a_device_that_joins_during_the_first_load_is_part_of_the_next_plan() -> None:
    site = loading("a")
    first = Plan.from_dict(site.prepares()["a"].plan)
    site.join("b")
    site.tick(0.2)
    assert site.released() == [("a", first.version)]
    site.ready()
    assert site.plan.devices == ("a", "b")


def test_a_search_without_a_plan_during_a_load_refuses_no_request() -> None:
    site = loading("a")
    site.searches = False
    site.join("b")
    site.tick(0.2)
    while site.solves[-1].kind is not SearchKind.WHOLE:
        site.event(Solved("m", site.solves[-1].ticket, None, error=PlanError("no")))
    site.event(Solved("m", site.solves[-1].ticket, None, error=PlanError("no")))
    assert not site.errors
    site.ready()
    assert site.plan is not None


@pytest.mark.parametrize("is_whole", [True, False])
def test_only_an_incomplete_hurried_search_is_repeated_during_the_load(is_whole: bool) -> None:
    site = Site(searches=False)
    site.submit("waits")
    site.join("a", "b")
    site.tick(1.1)
    hurried = site.solves[-1]
    assert hurried.kind is SearchKind.HURRIED
    decision = with_loads(hurried.question, everyone(hurried.question), None)
    site.event(Solved("m", hurried.ticket, decision, is_whole=is_whole))
    site.pass_by(10)
    assert (site.solves[-1] is hurried) is is_whole


@pytest.mark.parametrize("first", ["status", "heartbeat"])
def test_the_first_search_waits_for_link_probes(first: str) -> None:
    site = Site(decider=everyone, secret=bytes(32))
    site.submit("waits")
    for place, device in enumerate("ab"):
        site.boots[device] = 1
        endpoint = Endpoint(f"192.168.1.{place}", 1883)
        site.event(DeviceCaps(device, replace(caps(device, 1), endpoint=endpoint)))
        come = [DeviceStatus(device, Status("online", 1)), DeviceHeartbeat(device, heartbeat(1))]
        for event in come if first == "status" else reversed(come):
            site.event(event)
    for _ in range(4):
        site.tick(0.5)
        assert not site.solves
    site.tick(1.0)
    assert site.solves


def test_the_first_search_does_not_wait_for_a_device_without_heartbeats() -> None:
    site = Site(decider=everyone, secret=bytes(32))
    site.submit("waits")
    site.boots["a"] = 1
    site.event(DeviceCaps("a", replace(caps("a", 1), endpoint=Endpoint("192.168.1.1", 1883))))
    site.event(DeviceStatus("a", Status("online", 1)))
    for _ in range(3):
        site.tick(1.0, alive=False)
    assert site.solves


@pytest.mark.parametrize(
    ("own_s", "other_s", "kind", "finishes"),
    [
        (10.0, 11.0, "go", True),  # the difference is below the cost of an activation
        (10.0, 13.0, "go", False),
        (-0.1, None, "go", False),
        (0.1, None, "go", True),
        (-50.0, -49.0, "must", True),  # no plan serves
        (-50.0, -40.0, "must", False),
        (-50.0, None, "must", True),
    ],
)
def test_a_load_is_abandoned_if_another_plan_is_worth_more(
    own_s: float, other_s: float | None, kind: Kind, finishes: bool
) -> None:
    _, search = unanswered("a", "b")
    both = everyone(search.question).chosen
    alone = everyone(replace(search.question, devices=("a",))).chosen

    def assessed(candidate: Candidate, value_s: float) -> Assessment:
        return Assessment(Option(candidate, np.ones(1), np.ones(1)), 0.1, 1.0, 10.0, 0.0, value_s, kind, "")

    considered = [assessed(both, own_s), *([] if other_s is None else [assessed(alone, other_s)])]
    assert is_worth_finishing(Verdict(None, tuple(considered)), both.plan) is finishes
