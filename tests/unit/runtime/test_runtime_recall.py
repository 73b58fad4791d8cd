"""A restarted planner recalls the plan of its predecessor, because devices have kept its weights and Programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from scripted_site import ROW, SPEC, Site, everyone, settled
from sites import FAMILIES

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.cost.loads import LoadRates
from hepti_mqtt.planner import EarlierPlan
from hepti_mqtt.protocol import messages
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.rollout import SETTLE_UNSERVED_S
from hepti_mqtt.runtime.coordinator.search_kinds import PRICED_S, SearchKind
from hepti_mqtt.service.record import encode_record, read_recalled
from hepti_mqtt.service.solver import solve

OLD = 7  # boot of a planner


def record_of(site: Site, spec: Any = SPEC) -> bytes:
    """Return what a site's planner has retained last."""
    shown = [c for c in site.commands if isinstance(c, interface.PublishPlan)][-1]
    return encode_record((spec, Path("/models/m")), OLD, shown)


def restarted(recalled: EarlierPlan | None, *devices: str, pins: Pins | None = None) -> Site:
    """Return a planner that starts where devices are, and has heard the record of the one before."""
    site = Site(searches=False, pins=pins, recalls=True)
    site.join(*devices)
    site.submit("waits")
    site.tick(SETTLE_UNSERVED_S)
    if recalled is not None:
        site.event(interface.PlanRecalled("m", recalled))
    assert not site.solves, "devices have not heard of it before it has met the broker"
    site.event(interface.BrokerState(online=True))
    site.event(interface.PlanRecalled("m", None))  # our own record comes back
    return site


def recalled_from(site: Site) -> EarlierPlan:
    boot, recalled = read_recalled(record_of(site), "m", SPEC)
    assert boot == OLD
    assert recalled is not None
    return recalled


def test_the_recalled_plan_is_prepared_immediately_and_priced_later() -> None:
    before = settled("a", "b", pins=ROW)
    site = restarted(recalled_from(before), "a", "b", pins=ROW)
    site.join("c")
    site.tick(2 * SETTLE_UNSERVED_S)
    (search,) = site.solves
    assert search.recalled is not None
    site.event(solve(search))
    site.ready()
    assert site.plan.division == before.plan.division
    assert len(site.work) == 1
    record = site.session.groups.default("m").plans.active
    assert {d: record.needed_bytes(d) for d in ("a", "b")} == recalled_from(before).needs
    assert all(record.needed_bytes(d) for d in ("a", "b"))
    site.answer(1)
    site.pass_by(3, 0.5)
    assert len(site.solves) == 1
    site.tick(PRICED_S)
    whole = site.solves[-1]
    assert (whole.kind, whole.active) == (SearchKind.WHOLE, site.plan)
    site.event(solve(whole))
    assert record.is_priced
    assert site.session.groups.default("m").plans.active is record, "it stands, and loses no request"
    site.pass_by(3)


@pytest.mark.parametrize("is_loaded_first", [True, False])
def test_a_plan_that_loads_during_the_whole_search_is_compared_with_others(is_loaded_first: bool) -> None:
    site = restarted(recalled_from(settled("a", "b", pins=ROW)), "a", "b", pins=ROW)
    site.event(solve(site.solves[-1]))
    site.pass_by(12, 0.5)
    whole = site.solves[-1]
    assert (whole.kind, whole.active) == (SearchKind.WHOLE, None)
    if is_loaded_first:
        site.ready()
    site.event(solve(whole))
    site.ready()
    site.tick(0.2)
    record = site.session.groups.default("m").plans.active
    assert record is not None
    assert record.is_priced
    assert site.session.groups.default("m").judgement.judged_s >= record.begun_s


@pytest.mark.parametrize("why", ["a device is away", "other pins", "a plan that cannot be", "no record"])
def test_without_a_usable_recalled_plan_a_search_begins(why: str) -> None:
    record = recalled_from(settled("a", "b", pins=ROW))
    pins: Pins | None = ROW
    if why == "a device is away":
        pins = None
    if why == "other pins":
        pins = Pins(strategy="single")
    if why == "a plan that cannot be":
        shares = {kind: (*values, 1.0, 1.0) for kind, values in record.plan.shares.items()}
        record = EarlierPlan(replace(record.plan, shares=shares, ranges={}), record.needs)
    site = restarted(None if why == "no record" else record, *("a" if why == "a device is away" else "ab"), pins=pins)
    search, site.searches = list(site.solves), True
    assert all(command.recalled for command in search) or why == "no record"
    for command in search:
        site.event(solve(command))
    site.tick(1.1)
    assert [s.recalled for s in site.solves][-1] is None
    if why != "a device is away":
        site.ready()
        assert site.plan is not None
    assert not site.errors


def test_only_a_valid_record_of_the_same_model_is_recalled() -> None:
    site = settled("a")
    payload = record_of(site)
    assert site.plan is not None
    assert recalled_from(site).plan == site.plan
    assert read_recalled(payload, "n", SPEC) == (OLD, None)
    assert read_recalled(payload, "m", FAMILIES["bert-embedding"]) == (OLD, None)
    record = msgpack.unpackb(payload)
    for changes in (
        {"active": None},
        {"active": 1},
        {"active": {**record["active"], "predicted_s": float("nan")}},
        {"needs": {"a": -1}},
        {"needs": {"z": 1}},
        {"needs": []},
        {"spec": {}},
    ):
        assert read_recalled(msgpack.packb({**record, **changes}), "m", SPEC)[1] is None, changes
    assert read_recalled(b"\xc1", "m", SPEC) == read_recalled(b"", "m", SPEC) == (0, None)
    assert Plan.from_dict(record["active"]).version == PlanVersion(OLD, 1)
    assert messages.missing_record_key(record) is None


def loading_elsewhere(lost: str) -> tuple[Site, Plan]:
    """Return a site whose plan has lost a device while requests wait, and the plan; another device loads weights."""
    site = settled("a", "b", decider=everyone)
    site.event(interface.BrokerState(online=True))
    before = site.plan
    assert before is not None
    if lost == "silent":
        site.mute = {"b"}
        site.submit("r")
        site.pass_by(12, 0.1)
    else:
        site.leave("b")
        site.submit("r")
        site.tick(0.2)
    assert Plan.from_dict(site.prepares()["a"].plan).devices == ("a",)
    assert site.plan is None
    return site, before


@pytest.mark.parametrize("lost", ["silent", "cut off"])
def test_a_device_that_is_back_serves_before_others_have_its_weights(lost: str) -> None:
    site, before = loading_elsewhere(lost)
    site.searches = False
    if lost == "silent":
        site.receive("b", messages.RunFailed("m", PlanVersion(7, 1), 1, "wire", "late"))
    else:
        site.join("b")
    search = site.solves[-1]
    assert search.recalled is not None
    site.event(solve(search))
    site.ready()
    assert site.plan.division == before.division


def test_a_device_that_has_restarted_does_not_recall_its_plan() -> None:
    site, _ = loading_elsewhere("cut off")
    site.searches = False
    site.join("b", boot=2)
    assert not [command for command in site.solves if command.recalled]
    site.ready("a")
    assert site.plan.devices == ("a",)


def test_a_late_device_has_as_long_as_others_would_load() -> None:
    site = settled("a", "b", decider=everyone)
    for name in "ab":  # of the 1.4 MB that a device needs
        site.session.fleet.member(name).reported_rates = LoadRates(receive_bytes_per_s=1e6)
    site.mute = {"b"}
    site.submit("r")
    site.pass_by(15, 0.1)
    assert site.plan is not None
    site.pass_by(10, 0.1)
    assert site.plan is None
