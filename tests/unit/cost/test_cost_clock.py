"""The virtual clock against times and bytes computed by hand, over the broker and over the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_builder import ProgramBuilder
from sites import FAMILIES, always, plan, request, sent_bytes, tensors
from swarm import Swarm

from hepti_mqtt.core.ids import PLANNER
from hepti_mqtt.core.profiles import LOCAL_BYTES_PER_S, Cluster, Curve, DeviceProfile, Link, PeerLink, make_cluster
from hepti_mqtt.core.program import LINE_BYTES, Program, Send, SlotSpec
from hepti_mqtt.core.spec import TaskHead
from hepti_mqtt.cost.memory import live_bytes
from hepti_mqtt.cost.simulator import (
    LinkQueues,
    TopicNames,
    dispatch_bytes,
    report_bytes,
    send_bytes,
    simulate,
)
from hepti_mqtt.lowering.passes import set_routes
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.models.transformer import ModelSpec, TextStem
from hepti_mqtt.strategies.plan_programs import device_programs

NAMING = TopicNames("home", "m")
SPEC = ModelSpec(
    "bert", "BertModel", 1, 8, 1, 8, False, "gelu", 1e-12, 8, TaskHead("embedding", "mean"), TextStem(9, 9, 1)
)
SHAPE = TokenBatch((4,))
RATE = 1e6
LATENCY = 0.01
SLOT = SlotSpec((4, 8))


def site(*names: str) -> Cluster:
    """Devices on which a copied byte costs 1 µs and everything else nothing."""
    free = {"frame_s": 0.0, "copy_bytes_per_s": 1e18, "mesh_frame_s": 0.0, "mesh_copy_bytes_per_s": 1e18}
    profiles = {n: DeviceProfile(n, (Curve(1, 1, ((1, 1.0),)),), 1e9, 1e6, 0.0, **free) for n in names}
    links = {n: Link(LATENCY, RATE, RATE) for n in names}
    return Cluster(profiles, links, Link(0.0, 1e18, 1e18))


def relay(devices: int) -> dict[str, Program]:
    """The head sends its input to all, each of them sends it back, the head answers."""
    names = [f"d{i}" for i in range(devices)]
    head = ProgramBuilder("d0")
    x = head.recv((4, 8), PLANNER, 0)
    head.send(x, tuple(names[1:]), 1)
    parts = [head.recv((4, 8), n, 2) for n in names[1:]]
    copies = tuple((i, ((0, 4), (0, 8)), ((4 * i, 4 * i + 4), (0, 8))) for i in range(len(parts)))
    head.send(head.compute("assemble", parts, (4 * len(parts), 8), copies=copies), (PLANNER,), 3)
    others = {}
    for name in names[1:]:
        b = ProgramBuilder(name)
        b.send(b.recv((4, 8), "d0", 1), ("d0",), 2)
        others[name] = b.build()
    return {"d0": head.build(), **others}


def arrivals(cluster: Cluster, names: tuple[str, ...]) -> dict[str, list[float]]:
    """Return when each of the others has what the first sends at once, and when the first has what they send."""
    events = simulate(NAMING, SPEC, SHAPE, relay(len(names)), cluster, record=True).events
    ends = {n: [e.stop for e in events if (e.device, e.lane, e.label) == (n, "down", "1")] for n in names[1:]}
    return {**ends, names[0]: [e.stop for e in events if (e.device, e.lane, e.label) == (names[0], "down", "2")]}


def test_every_copy_goes_over_the_brokers_own_link():
    names = ("d0", "d1", "d2", "d3")
    free = arrivals(site(*names), names)
    shared = arrivals(replace(site(*names), broker_bytes_per_s=RATE), names)
    size = next(send_bytes(NAMING, "d0", op, SLOT)[0] for op in relay(4)["d0"].ops if isinstance(op, Send))
    # Three copies at the rate of one link: the second and the third wait for those before them.
    later = [shared[n][0] - free[n][0] for n in names[1:]]
    assert later == pytest.approx([0.0, size / RATE, 2 * size / RATE])
    # What comes back has to pass one downlink anyway, and comes after one another now.
    assert shared["d0"][-1] - free["d0"][-1] == pytest.approx(0.0, abs=2 * size / RATE)
    assert shared["d0"][-1] >= free["d0"][-1]


@given(broker=st.floats(1e5, 1e7), devices=st.integers(2, 5))
def test_a_slower_broker_never_makes_a_request_faster(broker, devices):
    cluster = site(*(f"d{i}" for i in range(devices)))
    times = [
        simulate(NAMING, SPEC, SHAPE, relay(devices), replace(cluster, broker_bytes_per_s=b)).seconds
        for b in (inf, 2 * broker, broker)
    ]
    assert times == sorted(times)


def test_the_brokers_link_is_taken_to_be_the_fastest_that_is_a_link():
    profiles = site("a", "b", "c").devices
    links = {"a": Link(0.0, 1e7, 1e7), "b": Link(0.0, 3e7, 2e7), "c": Link(0.0, 1e9, 1e9)}
    assert make_cluster(profiles, links).broker_bytes_per_s == 2e7
    assert make_cluster(profiles, {"c": links["c"]}).broker_bytes_per_s == inf
    assert make_cluster(profiles, links, 3e7).broker_bytes_per_s == 3e7


@pytest.mark.parametrize("route", ["broker", "mesh"])
def test_one_round_trip_by_hand(route):
    """Two links carry an exchange at once over mesh, and one after the other over the broker."""
    parts = relay(2) if route == "broker" else mesh(relay(2))
    result = simulate(NAMING, SPEC, SHAPE, parts, site("d0", "d1"))
    sends = (op for op in parts["d0"].ops if isinstance(op, Send))
    scatter, out = (send_bytes(NAMING, "d0", op, parts["d0"].slots[op.slot])[0] for op in sends)
    gather = send_bytes(NAMING, "d1", parts["d1"].ops[1], parts["d1"].slots[0])[0]
    dispatch = dispatch_bytes(NAMING, SPEC, SHAPE, ("d0",))
    concat = 2 * 4 * 8 * 4 / 1e6  # read and written once
    links_of_exchanges = 2 if route == "broker" else 1
    # Nobody waits for the report, which comes after the answer.
    hops = (dispatch + links_of_exchanges * (scatter + gather) + out) / RATE
    assert result.seconds == pytest.approx(hops + 6 * LATENCY + concat, rel=1e-9)
    assert result.nbytes == dispatch + scatter + gather + out + report_bytes(NAMING, "d0") + report_bytes(NAMING, "d1")


def test_programs_that_wait_for_each_other_are_named():
    a, b = ProgramBuilder("d0"), ProgramBuilder("d1")
    a.send(a.recv((1, 1), "d1", 1), ("d1",), 1)
    b.send(b.recv((1, 1), "d0", 1), ("d0",), 1)
    with pytest.raises(ValueError, match="d0"):
        simulate(NAMING, SPEC, SHAPE, {"d0": a.build(), "d1": b.build()}, site("d0", "d1"))


def test_live_bytes_frees_after_the_last_reader():
    b = ProgramBuilder("d0")
    x = b.recv((4, 8), PLANNER, 0)
    for _ in range(10):
        x = b.compute("add", (x,), (4, 8), bias=False)
    b.send(x, (PLANNER,), 3)
    # Input, output, and two slots between them: the one being read and the one being written.
    assert live_bytes(b.build()) == 4 * 4 * 8 * 4 + LINE_BYTES


def test_a_device_that_is_slowed_takes_longer_for_its_frames_too():
    cluster = site("d0", "d1")

    def seconds(**slowed: float) -> float:
        profiles = {n: replace(p, frame_s=0.1, slowdown=slowed.get(n, 1.0)) for n, p in cluster.devices.items()}
        return simulate(NAMING, SPEC, SHAPE, relay(2), replace(cluster, devices=profiles)).seconds

    # d1 takes one frame and sends one. It takes the request while d0 does, and reports while d0 takes the answer.
    assert seconds(d1=2.0) - seconds() == pytest.approx(2 * 1 * 0.1)


def test_an_exchange_for_others_costs_every_subscriber():
    def seconds(frame_s: float) -> float:
        head, other, last = ProgramBuilder("d0"), ProgramBuilder("d1"), ProgramBuilder("d2")
        x = head.recv((4, 8), PLANNER, 0)
        head.send(x, ("d1", "d3"), 1)
        head.send(x, ("d2",), 2)
        other.recv((4, 8), "d0", 1)
        last.send(last.recv((4, 8), "d0", 2), (PLANNER,), 3)
        parts = {b.device: b.build() for b in (head, other, last)} | {"d3": replace(other.build(), device="d3")}
        cluster = site(*parts)
        slow = replace(cluster.devices["d2"], frame_s=frame_s)
        return simulate(NAMING, SPEC, SHAPE, parts, replace(cluster, devices={**cluster.devices, "d2": slow})).seconds

    # One after the other: the request, the exchange for all, its own exchange and its answer.
    assert seconds(2.0) - seconds(1.0) == pytest.approx(4.0)


SIZE = 1000
NAMES = ("d0", "d1", "d2", "d3")


def mesh(programs: Mapping[str, Program], relayed: tuple[tuple[str, str], ...] = ()) -> dict[str, Program]:
    return {name: set_routes(program, "mesh", relayed) for name, program in programs.items()}


def links(cluster: Cluster) -> LinkQueues:
    return LinkQueues(cluster, lambda *_: None)


def everyone_to_everyone(cluster: Cluster) -> dict[str, float]:
    """Return when each device has the copies of all others that are sent at once, in the order of their names."""
    on, last = links(cluster), dict.fromkeys(NAMES, 0.0)
    for source in NAMES:
        for target in NAMES:
            if source != target:
                last[target] = max(last[target], on.via_mesh(0.0, source, target, SIZE, ""))
    return last


def test_a_sender_pays_for_every_receiver_and_the_broker_carries_none_of_it():
    on = links(replace(site(*NAMES), broker_bytes_per_s=1.0))
    arrivals = [on.via_mesh(0.0, "d0", target, SIZE, "") for target in NAMES[1:]]
    assert arrivals == pytest.approx([2 * LATENCY + copies * SIZE / RATE for copies in (1, 2, 3)])


def test_an_all_gather_takes_as_long_as_each_link_carries_all_others():
    assert everyone_to_everyone(site(*NAMES)) == pytest.approx(dict.fromkeys(NAMES, 2 * LATENCY + 3 * SIZE / RATE))


def test_what_was_measured_of_a_pair_counts_instead_of_its_links_to_the_broker():
    measured = {
        ("d0", "d1"): PeerLink(1e-4, RATE / 10),
        ("d2", "d3"): PeerLink(1e-4, 5 * RATE),
        ("d1", "d0"): PeerLink(0),
    }
    cluster = replace(site(*NAMES), peer_links=measured)
    assert links(cluster).via_mesh(0.0, "d0", "d1", SIZE, "") == pytest.approx(1e-4 + 10 * SIZE / RATE)
    assert links(cluster).via_mesh(0.0, "d2", "d3", SIZE, "") == pytest.approx(1e-4 + SIZE / (5 * RATE))
    assert links(cluster).via_mesh(0.0, "d1", "d0", SIZE, "") == pytest.approx(SIZE / RATE), "no rate was measured"
    on = links(cluster)  # a slow pair leaves the rest of its sender's link to others
    on.via_mesh(0.0, "d0", "d1", SIZE, "")
    assert on.via_mesh(0.0, "d0", "d2", SIZE, "") == pytest.approx(2 * LATENCY + 2 * SIZE / RATE)


def test_a_shared_medium_carries_everything_once_more():
    station = replace(site(*NAMES), shared_medium=frozenset(NAMES))
    assert max(everyone_to_everyone(station).values()) == pytest.approx(2 * LATENCY + 24 * SIZE / RATE)
    wired = replace(station, shared_medium=frozenset({"d1"}))
    assert links(wired).via_mesh(0.0, "d0", "d1", SIZE, "") == pytest.approx(2 * LATENCY + SIZE / RATE)
    on = links(station)  # over the broker, which has a wire: once up, and once to each receiver
    arrived = on.via_broker(0.0, "d0", NAMES[1:], SIZE, "")
    assert max(arrived.values()) == pytest.approx(2 * LATENCY + 4 * SIZE / RATE)


def test_who_sits_on_the_brokers_machine_has_its_link():
    cluster = replace(site(*NAMES), broker_bytes_per_s=RATE / 4)
    fast = Link(LATENCY, LOCAL_BYTES_PER_S, LOCAL_BYTES_PER_S)
    on_broker = replace(cluster, links={**cluster.links, "d0": fast, "d1": fast})
    on = links(on_broker)
    assert on.via_mesh(0.0, "d0", "d1", SIZE, "") == pytest.approx(2 * LATENCY + SIZE / LOCAL_BYTES_PER_S)
    arrivals = [on.via_mesh(0.0, source, "d2", SIZE, "") for source in ("d0", "d1")]
    assert arrivals == pytest.approx([2 * LATENCY + copies * 4 * SIZE / RATE for copies in (1, 2)])
    back = on.via_mesh(0.0, "d3", "d0", SIZE, "")
    assert back == pytest.approx(2 * LATENCY + 4 * SIZE / RATE), "the other way is free"


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
    assert played.nbytes == plain + sum(expected) - 1, "the broker's topic names d3 in place of all"


def test_devices_count_what_the_simulator_does():
    spec = FAMILIES["bert-embedding"]
    fixed = plan(spec, ("row", {"variant": "kv"}), (1.0, 2.0, 1.0, 1.0))
    fixed = replace(fixed, route="mesh", relayed_pairs=(("d0", "d2"), ("d0", "d3")))
    swarm = Swarm(spec, tensors(spec), {f"d{i}": (1e9, 1 << 30) for i in range(4)}, decider=always(fixed))
    shape, inputs = request(spec, (13, 4))
    swarm.submit("r", shape, inputs)
    swarm.run(30, until=lambda: bool(swarm.answers or swarm.errors))
    [(_, stats)] = swarm.answers["r"]
    assert swarm.direct
    parts = device_programs(spec, fixed, shape)
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
