"""Large probes between runs: whom they go to, and when."""

import time
from itertools import pairwise

import pytest
from shell_support import TOPICS, TWO, devices, request
from test_device_agent_mesh_links import Pair

from device_agent.links import APART_S, RUNS, Pauses
from device_agent.probes import FIRST_LARGE, LARGE_BYTES, LARGE_EVERY_S, SMALL_BYTES
from hepti_mqtt.protocol import frames
from hepti_mqtt.transport.mesh import mesh_possible

RATE = 1e7


@pytest.fixture
def device():
    yield from devices()


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.a.links.close()
    made.b.links.close()


def probes(d):
    """Return the large probes that a device has sent itself through the broker."""
    sent = d.planes["data"].published
    return [p for topic, p, _, _ in sent if topic == TOPICS.probe("d0") and len(p) > LARGE_BYTES]


def measured(d, large=True):
    """Let a device know its way to the broker."""
    for now in range(6):
        answer(d.network.prober, d.network.prober.due(float(now), not large), float(now))


def answer(prober, payloads, now, rate=RATE):
    for payload in payloads:
        frame = frames.decode(payload)
        prober.received(frame, now + 0.001 + 2 * (len(frame.body) - SMALL_BYTES) / rate)


def test_a_large_probe_leaves_when_a_run_has_ended(device):
    d = device()
    d.ready()
    measured(d)
    d.run(request()[2])
    (probe,) = probes(d)
    assert len(probe) > LARGE_BYTES
    d.run(request(admission=2)[2])
    assert len(probes(d)) == 1, "the next one has time"


def test_none_leaves_while_a_run_awaits_others(device):
    d = device()
    d.ready(TWO)
    measured(d)
    d.run(request(plan=TWO)[2])
    assert probes(d) == []


def test_without_peers_the_broker_alone_is_probed_no_more_often_than_when_idle(device):
    d = device()
    d.join()
    measured(d)
    pauses = Pauses(d.network, None)
    times = []
    for tenth in range(600):
        now = 100 + tenth / 10
        pauses.take(now, 0.1)
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
    d.run(request(admission=2)[2])
    assert d.complaints.counters["command_errors"] == 2, "the session goes on"


def test_how_long_a_run_waited_is_told_once(device):
    d = device()
    d.ready()
    told = []
    d.shell._pauses.take = lambda now, waited_s: told.append(waited_s)
    d.run(request()[2])
    d.shell._probe_in_pause(1.0)
    assert told[:-1]
    assert None not in told[:-1]
    assert told[-1] is None


@pytest.mark.skipif(not mesh_possible(), reason="the mesh needs Linux")
def test_ways_take_turns_and_all_are_measured_again_once_one_has_fallen(device, pair):
    d = device()
    d.join()
    measured(d, large=False)
    pair.introduce()
    links = pair.a.links
    links.probe(time.perf_counter(), busy=True)
    pair.until(lambda: "b" in links.probes.reports(), "a has measured its way to b")

    def sent():
        """Return how many large ones have left by each way."""
        return len(probes(d)), links.edges()["b"].bytes_out // LARGE_BYTES

    pauses, now, seen = Pauses(d.network, links), 1e6, []
    for _ in range(4):
        pauses.take(now, 0.1)
        pauses.take(now + APART_S / 2, 0.1)  # too soon
        seen.append(sent())
        now += APART_S
    assert seen == [(1, 0), (1, 1), (2, 1), (2, 2)]
    pauses.take(now, 0.1)
    for _ in range(2 * FIRST_LARGE):
        pauses.take(now, 0.1)
        now += APART_S
    before = sent()
    pauses.take(now, 0.1)
    assert sent() == before, "nothing is due"
    d.network.prober.falls += 1
    pauses.take(now, 0.1)
    pauses.take(now + APART_S, 0.1)
    assert sent() == (before[0] + 1, before[1] + 1)


def test_a_link_is_measured_again_once_runs_wait_longer(device):
    d = device()
    d.join()
    measured(d)
    pauses, now = Pauses(d.network, None), 1e6
    pauses.take(now, 0.1)
    before = len(probes(d))
    for more, waited_s in enumerate([0.1] * RUNS + [0.11, 0.4, 0.1, 0.4]):  # one long wait is an accident
        pauses.take(now + 1 + more / 10, waited_s)
    assert len(probes(d)) == before, "nothing is due"
    pauses.take(now + 5, 0.4)
    assert len(probes(d)) == before + 1
