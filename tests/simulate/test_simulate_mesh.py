"""Exchanges over mesh on the virtual clock against times and bytes worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from sites import FAMILIES, always, plan, request, tensors
from swarm import Swarm
from test_simulate_clock import LATENCY, NAMING, RATE, SHAPE, SLOT, SPEC, relay, site

from hepti_mqtt.cost.profiles import FAST_BYTES_PER_S, Cluster, Link, PeerLink, Ways
from hepti_mqtt.cost.simulator import Links, dispatch_bytes, done_bytes, send_bytes, sent_bytes, simulate
from hepti_mqtt.ids import PLANNER
from hepti_mqtt.lowering.passes import routed
from hepti_mqtt.plan_programs import programs
from hepti_mqtt.program import Builder, Program, Send

SIZE = 1000
NAMES = ("d0", "d1", "d2", "d3")


def mesh(programs: Mapping[str, Program], relayed: tuple[tuple[str, str], ...] = ()) -> dict[str, Program]:
    return {name: routed(program, "mesh", relayed) for name, program in programs.items()}


def links(cluster: Cluster) -> Links:
    return Links(cluster, lambda *_: None)


def everyone_to_everyone(cluster: Cluster) -> dict[str, float]:
    """Return when each device has the copies of all others that are sent at once, in the order of their names."""
    on, last = links(cluster), dict.fromkeys(NAMES, 0.0)
    for source in NAMES:
        for target in NAMES:
            if source != target:
                last[target] = max(last[target], on.direct(0.0, source, target, SIZE, ""))
    return last


def test_a_sender_pays_for_every_receiver_and_the_broker_carries_none_of_it():
    on = links(replace(site(*NAMES), broker_bytes_per_s=1.0))
    arrivals = [on.direct(0.0, "d0", target, SIZE, "") for target in NAMES[1:]]
    assert arrivals == pytest.approx([2 * LATENCY + copies * SIZE / RATE for copies in (1, 2, 3)])


def test_an_all_gather_takes_as_long_as_each_link_carries_all_others():
    assert everyone_to_everyone(site(*NAMES)) == pytest.approx(dict.fromkeys(NAMES, 2 * LATENCY + 3 * SIZE / RATE))


def test_a_slow_downlink_delays_its_own_copies_alone():
    cluster = site(*NAMES)
    slow = replace(cluster, links={**cluster.links, "d3": Link(LATENCY, RATE, RATE / 100)})
    on = links(slow)
    late, prompt = (on.direct(0.0, "d0", target, SIZE, "") for target in ("d3", "d1"))
    assert late == pytest.approx(2 * LATENCY + 100 * SIZE / RATE)
    assert prompt == pytest.approx(2 * LATENCY + 2 * SIZE / RATE)


def test_what_was_measured_of_a_pair_counts_instead_of_its_links_to_the_broker():
    told = {("d0", "d1"): PeerLink(1e-4, RATE / 10), ("d2", "d3"): PeerLink(1e-4, 5 * RATE), ("d1", "d0"): PeerLink(0)}
    cluster = replace(site(*NAMES), peer_links=told)
    assert links(cluster).direct(0.0, "d0", "d1", SIZE, "") == pytest.approx(1e-4 + 10 * SIZE / RATE)
    assert links(cluster).direct(0.0, "d2", "d3", SIZE, "") == pytest.approx(1e-4 + SIZE / (5 * RATE))
    assert links(cluster).direct(0.0, "d1", "d0", SIZE, "") == pytest.approx(SIZE / RATE), "no rate could be told"
    on = links(cluster)  # a slow pair leaves the rest of its sender's link to others
    on.direct(0.0, "d0", "d1", SIZE, "")
    assert on.direct(0.0, "d0", "d2", SIZE, "") == pytest.approx(2 * LATENCY + 2 * SIZE / RATE)


def test_a_shared_medium_carries_everything_once_more():
    station = replace(site(*NAMES), shared=frozenset(NAMES))
    assert max(everyone_to_everyone(station).values()) == pytest.approx(2 * LATENCY + 24 * SIZE / RATE)
    wired = replace(station, shared=frozenset({"d1"}))
    assert links(wired).direct(0.0, "d0", "d1", SIZE, "") == pytest.approx(2 * LATENCY + SIZE / RATE)
    on = links(station)  # over the broker, which has a wire: once up, and once to each receiver
    arrived = on.transmit(0.0, "d0", NAMES[1:], SIZE, "")
    assert max(arrived.values()) == pytest.approx(2 * LATENCY + 4 * SIZE / RATE)


def test_who_sits_on_the_brokers_machine_has_its_link():
    cluster = replace(site(*NAMES), broker_bytes_per_s=RATE / 4)
    fast = Link(LATENCY, FAST_BYTES_PER_S, FAST_BYTES_PER_S)
    beside = replace(cluster, links={**cluster.links, "d0": fast, "d1": fast})
    on = links(beside)
    assert on.direct(0.0, "d0", "d1", SIZE, "") == pytest.approx(2 * LATENCY + SIZE / FAST_BYTES_PER_S)
    arrivals = [on.direct(0.0, source, "d2", SIZE, "") for source in ("d0", "d1")]
    assert arrivals == pytest.approx([2 * LATENCY + copies * 4 * SIZE / RATE for copies in (1, 2)])
    assert on.direct(0.0, "d3", "d0", SIZE, "") == pytest.approx(2 * LATENCY + 4 * SIZE / RATE), "the other way is free"


def test_the_way_of_a_pair_does_not_depend_on_the_order_of_questions():
    ways = Ways(site(*NAMES))
    assert ways.way("d0", "d1") == Ways(site(*NAMES)).way("d0", "d1")
    assert ways.way("d0", "d1") is ways.way("d0", "d1")


def test_one_round_trip_by_hand():
    cluster = site("d0", "d1")
    parts = mesh(relay(2))
    result = simulate(NAMING, SPEC, SHAPE, parts, cluster, record=True)
    scatter, out = (
        send_bytes(NAMING, "d0", op, parts["d0"].slots[op.slot])[0] for op in parts["d0"].ops if isinstance(op, Send)
    )
    gather = send_bytes(NAMING, "d1", parts["d1"].ops[1], parts["d1"].slots[0])[0]
    dispatch = dispatch_bytes(NAMING, SPEC, SHAPE, NAMES)
    concat = 2 * 4 * 8 * 4 / 1e6
    # Two links carry an exchange at once, a broker one after the other.
    hops = (dispatch + scatter + gather + out) / RATE
    assert result.seconds == pytest.approx(hops + 6 * LATENCY + concat, rel=1e-9)
    assert result.nbytes == dispatch + scatter + gather + out + 2 * done_bytes(NAMING, "d0")
    drawn = {(e.device, e.lane): e for e in result.events if e.label == "1"}
    assert drawn["d0", "up"].start < drawn["d1", "down"].stop
    assert result.seconds < simulate(NAMING, SPEC, SHAPE, relay(2), cluster).seconds


def test_bytes_are_those_of_a_publish_to_each_receiver():
    """MQTT 3.1.1: a byte of type, the remaining length, the topic with two bytes of length, header, tensor."""
    parts = mesh(relay(4), relayed=(("d0", "d3"),))
    sends = [op for op in parts["d0"].ops if isinstance(op, Send)]
    assert [(op.to, op.route) for op in sends] == [(("d3",), "broker"), (("d1", "d2"), "mesh"), ((PLANNER,), "broker")]
    topics = ["hepti/v1/home/x/m/0/d0/d1", "hepti/v1/home/x/m/0/d0/d2"]
    expected = tuple(1 + 2 + 2 + len(topic) + 256 + 4 * 8 * 4 for topic in topics)
    assert send_bytes(NAMING, "d0", sends[1], SLOT) == expected
    played = simulate(NAMING, SPEC, SHAPE, parts, site(*NAMES))
    assert played.nbytes == sent_bytes(NAMING, SPEC, SHAPE, parts)
    plain = sent_bytes(NAMING, SPEC, SHAPE, relay(4))
    assert played.nbytes == plain + sum(expected) - 1, "d3 instead of all in the topic of the one that stays"


@pytest.mark.parametrize("method", [("row", {"variant": "kv"}), ("two_d", {"x": "2"})], ids=["row", "two_d"])
def test_devices_count_what_the_simulator_does(method):
    spec = FAMILIES["bert-embedding"]
    fixed = replace(plan(spec, method, (1.0, 2.0, 1.0, 1.0)), route="mesh", relayed=(("d0", "d2"), ("d0", "d3")))
    swarm = Swarm(spec, tensors(spec), {f"d{i}": (1e9, 1 << 30) for i in range(4)}, decider=always(fixed))
    shape, inputs = request(spec, (13, 4))
    swarm.submit("r", shape, inputs)
    swarm.run(30, until=lambda: bool(swarm.answers or swarm.errors))
    [(_, stats)] = swarm.answers["r"]
    assert swarm.direct
    parts = programs(spec, fixed, shape)
    assert sum(s.dispatch_bytes + sum(s.sent_bytes.values()) for s in stats) == sent_bytes(NAMING, spec, shape, parts)
    played = simulate(NAMING, spec, shape, parts, site(*parts))
    assert {n: u.sent_bytes for n, u in played.devices.items()} == dict(stats[0].sent_bytes)


def test_taking_and_sending_cost_what_they_do_over_mesh():
    def seconds(programs: Mapping[str, Program], **costs: float) -> float:
        cluster = site(*NAMES)
        profiles = {n: replace(p, **costs) for n, p in cluster.devices.items()}
        return simulate(NAMING, SPEC, SHAPE, programs, replace(cluster, devices=profiles)).seconds

    parts = mesh(relay(4))
    # d0 sends three copies and takes three frames; in between each of the others takes one and sends one.
    assert seconds(parts, mesh_frame_s=1.0) - seconds(parts) == pytest.approx(8.0, abs=0.1)
    assert seconds(relay(4), mesh_frame_s=1.0) == seconds(relay(4))


def test_an_exchange_may_come_before_its_request():
    head, other = Builder("d0"), Builder("d1")
    head.send(head.recv((4, 8), PLANNER, 0), ("d1",), 1)
    other.send(other.recv((4, 8), "d0", 1), (PLANNER,), 2)
    cluster = site("d0", "d1")
    far = replace(
        cluster,
        links={**cluster.links, "d1": Link(50 * LATENCY, RATE, RATE)},
        peer_links={("d0", "d1"): PeerLink(LATENCY)},
    )
    parts = mesh({"d0": head.build(), "d1": other.build()})
    result = simulate(NAMING, SPEC, SHAPE, parts, far, record=True)
    taken = {e.label: e.stop for e in result.events if (e.device, e.lane) == ("d1", "down")}
    assert taken["1"] + LATENCY < taken["dispatch"] + 50 * LATENCY < result.seconds
