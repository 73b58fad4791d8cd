"""The search over routes: mesh where devices can connect and it takes less time, the broker where it is better."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from test_planner_search import BASE, four_pis, question

from hepti_mqtt.cost.profiles import Cluster, Link, PeerLink
from hepti_mqtt.planner import decide, price
from hepti_mqtt.planner.candidates import on_route, relayed, routes
from hepti_mqtt.planner.price import plan_packet

NAMES = ("pi0", "pi1", "pi2", "pi3")


def meshed(site: Cluster) -> Cluster:
    return replace(site, endpoints=frozenset(site.devices))


@pytest.mark.no_cover  # the search is measured elsewhere
def test_mesh_makes_splitting_worth_it_on_a_network_on_which_a_broker_does_not():
    assert decide(question(BASE, four_pis(50))).chosen.plan.strategy == "single"
    found = decide(question(BASE, meshed(four_pis(50))))
    chosen = found.chosen
    assert (chosen.plan.route, chosen.plan.relayed, len(chosen.plan.devices)) == ("mesh", (), 4)
    assert "over mesh" in found.reason


def test_the_broker_carries_what_a_slow_uplink_would_have_to_send_to_each():
    """Every device has a slow uplink; the broker, on a fast one, makes the copies."""
    site = meshed(four_pis(940))
    slow_up = {n: Link(0.2e-3, 10e6, 117e6) for n in site.devices}
    broker = replace(site, links=slow_up, broker_bytes_per_s=117e6)
    pins = {"strategy": "row", "options": {"variant": "kv"}, "devices": NAMES}
    decision = decide(question(BASE, broker, **pins))
    assert decision.chosen.plan.route == "broker"
    over_mesh = decide(question(BASE, broker, route="mesh", **pins)).chosen
    assert over_mesh.plan.route == "mesh"
    assert over_mesh.price.seconds > decision.chosen.price.seconds


def test_pins_are_obeyed():
    site = meshed(four_pis(940))
    for route in ("broker", "mesh"):
        decision = decide(question(BASE, site, route=route, strategy="row", devices=NAMES))
        assert {c.plan.route for c in decision.ranking} == {route}
    assert decide(question(BASE, four_pis(940), strategy="row")).chosen.plan.route == "broker"


def test_pairs_that_cannot_connect_are_relayed_and_so_is_who_has_no_endpoint():
    site = meshed(four_pis(940))
    apart = frozenset({("pi2", "pi0"), ("elsewhere", "pi1")})
    asked = question(BASE, site, strategy="row", devices=NAMES, relayed=apart)
    chosen = decide(asked).chosen.plan
    assert (chosen.route, chosen.relayed) == ("mesh", (("pi2", "pi0"),))
    some = question(BASE, replace(site, endpoints=frozenset(NAMES[:3])), route="mesh", devices=NAMES)
    assert relayed(some, NAMES) == tuple(pair for pair in permutations(NAMES, 2) if "pi3" in pair)


def test_mesh_is_no_choice_where_somebody_cannot_or_nobody_connects():
    site = four_pis(940)
    assert routes(question(BASE, meshed(site)), NAMES) == ("mesh", "broker")
    assert routes(question(BASE, meshed(site)), NAMES[:1]) == ("broker",)
    assert routes(question(BASE, meshed(site), route="mesh"), NAMES[:1]) == ("broker",)
    assert routes(question(BASE, replace(site, endpoints=frozenset(NAMES[:3]))), NAMES) == ("broker",)
    assert routes(question(BASE, replace(site, endpoints=frozenset(NAMES[:3]))), NAMES[:3]) == ("mesh", "broker")
    nobody = question(BASE, meshed(site), relayed=frozenset(permutations(NAMES, 2)))
    assert routes(nobody, NAMES) == ("broker",)


def test_a_slow_pair_is_seen_in_the_price():
    asked = question(BASE, meshed(four_pis(940)), strategy="row", devices=NAMES)
    plan = decide(asked).chosen.plan
    slow = {pair: PeerLink(5e-3, 2e6) for pair in (("pi0", "pi1"), ("pi1", "pi0"))}
    slowed = replace(asked, cluster=replace(asked.cluster, peer_links=slow))
    assert price(slowed, plan).seconds > 1.5 * price(asked, plan).seconds
    over_broker = on_route(asked, plan, "broker")
    assert price(slowed, over_broker).seconds == price(asked, over_broker).seconds


def test_what_the_broker_does_not_carry_does_not_meet_its_packet_limit():
    """With f32 rows of 512 tokens a broker of small packets lets no exchange through, and mesh every one."""
    asked = question(BASE, meshed(four_pis(940)), strategy="row", devices=NAMES, tokens=512)
    plan = decide(asked).chosen.plan
    by_broker = plan_packet(asked, on_route(asked, plan, "broker"))
    assert plan_packet(asked, plan) < by_broker
    limit = replace(asked, packet_bytes=by_broker - 1, options=plan.options)
    assert decide(limit).chosen.plan.route == "mesh"


@pytest.mark.parametrize("route", ["broker", "mesh"])
def test_both_routes_have_the_same_memory(route):
    asked = question(BASE, meshed(four_pis(940)), strategy="row", devices=NAMES)
    chosen = decide(asked).chosen
    assert price(asked, on_route(asked, chosen.plan, route)).needs == price(asked, chosen.plan).needs
