"""Which devices are introduced to each other, by what they said and what could not connect."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted_site import caps, heartbeat

from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan import Plan
from hepti_mqtt.protocol.messages import Endpoint, LinkReport, Status
from hepti_mqtt.runtime.coordinator.fleet import RELAYED_S, Introductions, Membership, believed

HERE, THERE = Endpoint("127.0.0.1", 1), Endpoint("192.0.2.7", 2)
SECRET = bytes(range(32))


def site(*, mesh: bool = True, **endpoints: Endpoint | None) -> Membership:
    members = Membership(mesh=mesh)
    for name, endpoint in endpoints.items():
        start(members, name, 1, endpoint)
    return members


def start(members: Membership, name: str, boot: int, endpoint: Endpoint | None) -> None:
    members.caps(name, replace(caps(name, boot), endpoint=endpoint))
    members.status(name, Status("online", boot), 0.0)


def mesh(**more) -> Plan:
    return Plan("m", Epoch(1, 1), "row", ("a", "b", "c"), "a", route="mesh", **more)


def test_a_device_without_an_endpoint_is_reached_over_the_broker():
    members = site(a=THERE, b=THERE, c=None)
    assert members.relayed(0.0) == {("a", "c"), ("c", "a"), ("b", "c"), ("c", "b")}
    assert members.cluster({}).endpoints == {"a", "b"}


def test_what_listens_on_loopback_is_heard_on_its_own_machine_alone():
    members = site(a=HERE, b=HERE, c=THERE)
    assert members.relayed(0.0) == {("a", "c"), ("b", "c")}


def test_one_with_tls_and_one_without_do_not_connect():
    secure = replace(THERE, fingerprint="0f" * 32)
    assert site(a=THERE, b=secure, c=secure).relayed(0.0) == {("a", "b"), ("b", "a"), ("a", "c"), ("c", "a")}


def test_a_pair_that_could_not_connect_is_tried_again_after_a_while_or_a_new_start():
    members = site(a=THERE, b=THERE)
    members.unheard("b", ("a", "nobody"), 10.0)
    assert members.relayed(10.0) == {("a", "b")}
    assert members.relayed(10.0 + RELAYED_S) == set()
    members.unheard("b", ("a",), 10.0)
    start(members, "a", 2, THERE)
    assert members.relayed(11.0) == set()


def test_measured_ways_between_peers_are_in_the_cluster_and_impossible_ones_are_not():
    members = site(a=THERE, b=THERE)
    told = {"b": LinkReport(0.004, 1e6), "gone": LinkReport(0.1, None), "c": LinkReport(1e9, None)}
    beat, wrong = believed(replace(heartbeat(1), peers=told))
    assert wrong
    assert "c" not in beat.peers
    members.heartbeat("a", beat, 1.0)
    links = members.cluster({}).peer_links
    assert links.keys() == {("a", "b"), ("b", "a")}
    assert links["a", "b"].latency_s == pytest.approx(0.002)
    assert links["a", "b"].bytes_per_s == 1e6


def test_both_ends_of_a_pair_are_told_one_token_and_nobody_else_is():
    members = site(a=THERE, b=THERE, c=THERE)
    introductions = Introductions(SECRET, members)
    told = {d: {p.device: p for p in introductions.of(mesh(), d)} for d in "abc"}
    for one in "abc":
        for other in set("abc") - {one}:
            assert told[one][other].token_in == told[other][one].token_out != ""
    tokens = [p.token_in for peers in told.values() for p in peers.values()]
    assert len(set(tokens)) == len(tokens) == 6
    assert introductions.of(mesh(), "a") == tuple(told["a"].values()), "a Prepare that is repeated says the same"
    later = Introductions(SECRET, members).of(replace(mesh(), epoch=Epoch(1, 2)), "a")
    assert not {p.token_in for p in later} & set(tokens)


def test_relayed_pairs_and_plans_over_the_broker_have_no_tokens():
    members = site(a=THERE, b=THERE, c=None)
    introductions = Introductions(SECRET, members)
    (b,) = introductions.of(mesh(relayed=(("b", "a"), ("a", "c"), ("c", "a"))), "a")
    assert (b.device, b.token_out) == ("b", "")
    assert b.token_in
    assert introductions.of(replace(mesh(), route="broker"), "a") == ()


def test_without_a_secret_nobody_is_introduced():
    members = site(mesh=False, a=THERE, b=THERE)
    assert members.cluster({}).endpoints == frozenset()
    assert all(not p.token_in and not p.token_out for p in Introductions(None, members).of(mesh(), "a"))
