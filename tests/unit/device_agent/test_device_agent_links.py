"""Two devices with real sockets in one process: what is sent comes, and large probes leave between runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from shell_support import TOPICS, devices, request

from device_agent.config import AgentConfig, listen_address, local_address_toward, mesh_address, parse_mesh_host
from device_agent.links import APART_S, REMEMBERED_RUNS, IdleProbes, MeshLinks, open_links
from device_agent.probes import FIRST_LARGE, LARGE_BYTES, LARGE_EVERY_S, SMALL_BYTES, PeerProbes
from hepti_mqtt.config.process import RateLimitedLog
from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.protocol import frames
from hepti_mqtt.protocol.frames import Frame, TensorArrival
from hepti_mqtt.protocol.messages import Endpoint, Heartbeat, Peer, encode_heartbeat
from hepti_mqtt.protocol.plausible import MAX_PEERS
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.runtime.worker import interface
from hepti_mqtt.transport.sockets import mesh_possible
from hepti_mqtt.transport.url import BrokerUrl

EPOCH = PlanVersion(1, 1)
pytestmark = pytest.mark.skipif(not mesh_possible(), reason="the mesh needs Linux")
PATIENCE_S = 30.0
ARRAY = np.arange(12, dtype=np.float32).reshape(3, 4)


class Device:
    """One device's links, with what came of them."""

    def __init__(self, name: str) -> None:
        self.name, self.events = name, []
        self.complaints = RateLimitedLog(logging.getLogger("test"))
        self.links = MeshLinks(TOPICS, name, 1, self.complaints, "127.0.0.1")

    def peer(self, token_out: str, token_in: str) -> Peer:
        """Return this device as another one is told of it."""
        return Peer(self.name, Endpoint("127.0.0.1", self.links.mesh.port), token_out, token_in)


class Pair:
    """Two devices that are driven in turn."""

    def __init__(self) -> None:
        self.a, self.b = Device("a"), Device("b")

    def until(self, holds, what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end, what
            for device in (self.a, self.b):
                device.events += device.links.wait(0.005)

    def introduce(self) -> None:
        for one, other, out, back in ((self.a, self.b, "1", "2"), (self.b, self.a, "2", "1")):
            one.links.admit(interface.AllowPeers("m", EPOCH, (other.peer(out, back),)))
            one.links.join(interface.JoinPeers("m", EPOCH, (other.peer(out, back),)))
        joined = [interface.PeerJoined(d.name, "m", EPOCH) for d in (self.b, self.a)]
        self.until(lambda: joined[0] in self.a.events and joined[1] in self.b.events, "both are joined")

    def frames(self, device: Device) -> list[Frame]:
        return [event.frame for event in device.events if isinstance(event, interface.FrameIn)]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.a.links.close()
    made.b.links.close()


def tensor(source: str, kind: str = "tensor", array: np.ndarray = ARRAY) -> tuple[bytes, memoryview]:
    return frames.encode_parts(
        Frame(kind, "m", EPOCH, 7, layer=2, node=3, source=source, dtype="f32", shape=array.shape, body=array)
    )


def test_a_frame_comes_as_a_view_of_aligned_memory_and_the_next_as_arrivals_all_counted_at_both_ends(
    pair: Pair,
) -> None:
    pair.introduce()
    for number in range(3):
        head, body = tensor("a", array=ARRAY + number)
        command = Publish(TOPICS.activation("m", 2, "a", "b"), head, 0, "mesh", body=body)
        pair.a.links.publish(command)
    pair.until(
        lambda: len([e for e in pair.b.events if isinstance(e, interface.FrameIn | TensorArrival)]) == 3,
        "all have come",
    )
    (frame,) = pair.frames(pair.b)
    assert (frame.source, frame.layer, frame.node) == ("a", 2, 3)
    arrivals = [event for event in pair.b.events if isinstance(event, TensorArrival)]
    assert [(a.run_id, a.exchange.key) for a in arrivals] == [(7, (frame.node, frame.part, frame.source))] * 2
    for number, event in enumerate((frame, *arrivals)):
        array = event.array()
        np.testing.assert_array_equal(array, ARRAY + number)
        assert not array.flags.owndata
        assert array.ctypes.data % 64 == 0
    sent, came = pair.a.links.peer_stats()["b"], pair.b.links.peer_stats()["a"]
    assert (sent.frames_out, sent.bytes_out) == (came.frames_in, came.bytes_in) == (3, 3 * command.nbytes)
    assert pair.a.links.tensor_traffic == pair.b.links.tensor_traffic == (3, 3 * command.nbytes)


def test_a_tensor_of_any_size_that_a_frame_can_have_comes(pair: Pair) -> None:
    pair.introduce()
    array = np.arange(9_000_000, dtype=np.float32)
    head, body = tensor("a", array=array)
    pair.a.links.publish(Publish(TOPICS.activation("m", 2, "a", "b"), head, 0, "mesh", body=body))
    pair.until(lambda: pair.frames(pair.b), "the frame has come")
    np.testing.assert_array_equal(pair.frames(pair.b)[0].array(), array)
    assert not any(isinstance(event, interface.PeerLost) for event in pair.b.events)


@pytest.mark.parametrize(
    ("source", "topic"),
    [("c", TOPICS.activation("m", 2, "a", "b")), ("a", TOPICS.activation("m", 1, "a", "b"))],
    ids=["another's name", "another layer"],
)
def test_what_contradicts_its_topic_or_its_sender_is_dropped(pair: Pair, source: str, topic: str) -> None:
    pair.introduce()
    for claimed, where in ((source, topic), ("a", TOPICS.activation("m", 2, "a", "b"))):
        head, body = tensor(claimed)
        pair.a.links.publish(Publish(where, head, 0, "mesh", body=body))
    pair.until(lambda: pair.frames(pair.b), "the right frame has come")
    assert len(pair.frames(pair.b)) == 1
    assert pair.b.complaints.counters["bad_payload"] == 1


def test_a_wrong_token_is_refused_and_the_end_of_an_epoch_ends_the_connection(pair: Pair) -> None:
    pair.b.links.join(interface.JoinPeers("m", EPOCH, (pair.a.peer("wrong", ""),)))
    pair.a.links.admit(interface.AllowPeers("m", EPOCH, (pair.b.peer("", "right"),)))
    pair.until(lambda: any(isinstance(e, interface.PeerRefused) for e in pair.b.events), "b is refused")
    pair.b.links.leave(interface.LeavePeers("m", EPOCH))
    assert not pair.b.links.has_peers
    pair.b.links.join(interface.JoinPeers("m", EPOCH, (pair.a.peer("right", ""),)))
    pair.until(lambda: interface.PeerJoined("a", "m", EPOCH) in pair.b.events, "b is in")
    pair.a.links.leave(interface.LeavePeers("m", EPOCH))
    pair.until(lambda: any(isinstance(e, interface.PeerLost) for e in pair.b.events), "b is out")


def test_peers_that_hear_each_other_are_measured(pair: Pair) -> None:
    pair.introduce()
    now = 0.0

    def measured() -> bool:
        nonlocal now
        now += 1.0
        pair.a.links.probe(time.perf_counter(), busy=False)
        return "b" in pair.a.links.probes.link_reports()

    pair.until(measured, "a has measured its way to b")
    assert pair.a.links.probes.link_reports()["b"].round_trip_s > 0
    assert not pair.frames(pair.a) + pair.frames(pair.b), "probes are no frames of a request"
    assert pair.a.links.tensor_traffic == pair.b.links.tensor_traffic == (0, 0), "nor do they say what tensors cost"
    pair.a.links.leave(interface.LeavePeers("m", EPOCH))
    pair.a.links.probe(time.perf_counter(), busy=False)
    assert not pair.a.links.probes.link_reports()


def test_a_heartbeat_tells_of_no_more_peers_than_it_can_and_first_of_those_that_are_there(pair: Pair) -> None:
    links, place = pair.a.links, Endpoint("127.0.0.1", pair.b.links.mesh.port)
    for n in range(MAX_PEERS + 6):
        links.join(interface.JoinPeers("m", PlanVersion(1, n), (Peer(f"d{n}", place, "1", ""),)))
        if n not in (0, 1):
            links.leave(interface.LeavePeers("m", PlanVersion(1, n)))
    told = links.peer_stats()
    assert set(told) == {"d0", "d1", *(f"d{n}" for n in range(8, MAX_PEERS + 6))}
    encode_heartbeat(Heartbeat(1, 1, 0.0, 1, None, None, None, 1.0, 1, {}, {}, told))


def test_probes_take_turns() -> None:
    probes = PeerProbes("a", 1)
    seen = [probes.due(float(second), {"b", "c", "d"}, busy=True) for second in range(6)]
    assert sorted(peer for peer, _ in seen) == ["b", "b", "c", "c", "d", "d"]
    assert all(len(payloads) == 1 for _, payloads in seen), "no large ones while it computes"
    assert probes.due(7.0, (), busy=False) is None


def test_peers_are_told_the_address_on_the_way_to_the_broker() -> None:
    assert local_address_toward(BrokerUrl("127.0.0.1", 1883)) == "127.0.0.1"
    assert listen_address("127.0.0.1") == "127.0.0.1", "nobody else reaches it"
    assert listen_address("192.0.2.7") == "0.0.0.0"
    assert listen_address("2001:db8::1") == "::"
    assert parse_mesh_host("192.0.2.7") == "192.0.2.7"
    with pytest.raises(ConfigError):
        parse_mesh_host("pi.local")


@pytest.mark.parametrize(
    ("own", "told"),
    [("fe80::1%eth0", None), ("2001:db8::7", "2001:db8::7"), ("169.254.3.4", "169.254.3.4"), ("::1", "::1")],
)
def test_nobody_is_told_an_address_that_holds_on_one_link_alone(monkeypatch, own, told) -> None:
    connected = SimpleNamespace(connect=lambda _place: None, getsockname=lambda: (own, 5))
    monkeypatch.setattr("device_agent.config.socket.getaddrinfo", lambda *_, **__: [(10, 2, 17, "", ("x", 1))])
    monkeypatch.setattr("device_agent.config.socket.socket", lambda *_: nullcontext(connected))
    assert local_address_toward(BrokerUrl("broker", 1883)) == told


def opened(**options) -> MeshLinks | None:
    url = options.pop("url", BrokerUrl("127.0.0.1", 1883))
    config = AgentConfig(url, "home", "a", **options)
    return open_links(config, TOPICS, 1, RateLimitedLog(logging.getLogger("test")))


def test_an_endpoint_is_told_where_it_listens() -> None:
    links = opened()
    try:
        config = AgentConfig(BrokerUrl("127.0.0.1", 1883), "home", "a")
        told = links.endpoint(mesh_address(config))
        assert (told.host, told.fingerprint) == ("127.0.0.1", "")
        with pytest.raises(ConfigError):
            opened(mesh_port=told.port)
    finally:
        links.close()


@pytest.mark.parametrize(
    "options",
    [{"mesh": False}, {"url": BrokerUrl("127.0.0.1", 8883, tls=True)}],
    ids=["--no-mesh", "an encrypted broker and no certificate"],
)
def test_where_peers_are_not_to_connect_there_is_none(options: dict) -> None:
    assert opened(**options) is None


# -- large probes between runs ----------------------------------------------------------------------------------------

RATE = 1e7


@pytest.fixture
def device():
    yield from devices()


def probes(d):
    """Return the large probes that a device has sent itself through the broker."""
    sent = d.planes["data"].published
    return [p for topic, p, _, _ in sent if topic == TOPICS.probe("d0") and len(p) > LARGE_BYTES]


def measured(d, large=True):
    """Let a device know its way to the broker."""
    for now in range(FIRST_LARGE + 2):
        answer(d.network.prober, d.network.prober.due_probes(float(now), not large), float(now))


def answer(prober, payloads, now, rate=RATE):
    for payload in payloads:
        frame = frames.decode(payload)
        prober.on_answer(frame, now + 0.001 + 2 * (len(frame.body) - SMALL_BYTES) / rate)


def test_a_large_probe_leaves_when_a_run_has_ended(device):
    d = device()
    d.ready()
    measured(d)
    d.run(request()[2])
    (probe,) = probes(d)
    assert len(probe) > LARGE_BYTES
    d.run(request(run_id=2)[2])
    assert len(probes(d)) == 1, "the next one has time"


def test_without_peers_the_broker_alone_is_probed_no_more_often_than_when_idle(device):
    d = device()
    d.join()
    measured(d)
    pauses = IdleProbes(d.network, None)
    times = []
    for tenth in range(600):
        now = 100 + tenth / 10
        pauses.on_idle(now, 0.1)
        if len(probes(d)) > len(times):
            times.append(now)
            answer(d.network.prober, probes(d)[-1:], now)
    assert [b - a for a, b in pairwise(times)] == pytest.approx([LARGE_EVERY_S] * (len(times) - 1))
    assert len(times) >= 60 // LARGE_EVERY_S


def test_a_probe_that_cannot_leave_is_counted_and_ends_nothing(device, monkeypatch):
    d = device()
    d.ready()

    def away(now):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(d.network, "probe_large", away)
    d.run(request()[2])
    assert d.complaints.counters["command_errors"] == 1
    d.run(request(run_id=2)[2])
    assert d.complaints.counters["command_errors"] == 2, "the session goes on"


@pytest.mark.skipif(not mesh_possible(), reason="the mesh needs Linux")
def test_ways_take_turns_and_all_are_measured_again_once_one_has_fallen(device, pair):
    d = device()
    d.join()
    measured(d, large=False)
    pair.introduce()
    links = pair.a.links
    links.probe(time.perf_counter(), busy=True)
    pair.until(lambda: "b" in links.probes.link_reports(), "a has measured its way to b")

    def sent():
        """Return how many large ones have left by each way."""
        return len(probes(d)), links.peer_stats()["b"].bytes_out // LARGE_BYTES

    pauses, now, seen = IdleProbes(d.network, links), 1e6, []
    for _ in range(4):
        pauses.on_idle(now, 0.1)
        pauses.on_idle(now + APART_S / 2, 0.1)  # too soon
        seen.append(sent())
        now += APART_S
    assert seen == [(1, 0), (1, 1), (2, 1), (2, 2)]
    pauses.on_idle(now, 0.1)
    for _ in range(2 * FIRST_LARGE):
        pauses.on_idle(now, 0.1)
        now += APART_S
    before = sent()
    pauses.on_idle(now, 0.1)
    assert sent() == before, "nothing is due"
    d.network.prober.bandwidth_drops += 1
    pauses.on_idle(now, 0.1)
    pauses.on_idle(now + APART_S, 0.1)
    assert sent() == (before[0] + 1, before[1] + 1)


def test_a_link_is_measured_again_once_runs_wait_longer(device):
    d = device()
    d.join()
    measured(d)
    pauses, now = IdleProbes(d.network, None), 1e6
    pauses.on_idle(now, 0.1)
    before = len(probes(d))
    for more, waited_s in enumerate([0.1] * REMEMBERED_RUNS + [0.11, 0.4, 0.1, 0.4]):  # one long wait is an accident
        pauses.on_idle(now + 1 + more / 10, waited_s)
    assert len(probes(d)) == before, "nothing is due"
    pauses.on_idle(now + 5, 0.4)
    assert len(probes(d)) == before + 1
