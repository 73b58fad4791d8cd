"""What a device reports of itself while it works: its slowdown, what frames cost, its health, and the beat."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import swarm
from device_agent_support import ListTransport
from hypothesis import example, given
from hypothesis import strategies as st

from device_agent import machine as monitoring
from device_agent.heartbeat import FRAMES, IDLE_S, KEEP_SMALL_S, METERED, SHORTEST_S, HeartbeatThread, Meter
from device_agent.machine import (
    WINDOW_S,
    CpuTimes,
    HealthMonitor,
    HealthSample,
    cpu_other,
    is_this_machine,
    local_brokers,
)
from device_agent.network import Network
from device_agent.probes import Prober
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.config.process import RateLimitedLog
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.program import Compute, Send, SlotSpec, WeightRef
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.kernels import works
from hepti_mqtt.models import largest_shape
from hepti_mqtt.protocol import frames, messages
from hepti_mqtt.protocol import messages as protocol_messages
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.strategies.plan_programs import device_programs
from hepti_mqtt.transport.base import Inbox
from hepti_mqtt.transport.url import BrokerUrl

ROWS, K, N = 8, 64, 64
SECONDS = 1e-3
OVERHEAD = 1e-5
CURVES = {
    "linear": [{"k": K, "n": N, "points": [[1, SECONDS / ROWS], [ROWS, SECONDS], [10 * ROWS, 10 * SECONDS]]}],
    "attention_flops_per_s": 1e9,
    "rowwise_bytes_per_s": 1e9,
    "op_overhead_s": OVERHEAD,
    "frame_s": 1e-4,
    "copy_bytes_per_s": 1e9,
}


def linear(rows=ROWS):
    slots = (SlotSpec((rows, K)), SlotSpec((rows, N)))
    attrs = {"bias": False, "activation": None, "residual": False}
    return Compute("linear", (0,), (1,), (WeightRef("w", (0, K), (0, N)),), attrs), slots


OP, SLOTS = linear()


@pytest.fixture
def meter():
    return Meter(CURVES)


@given(factor=st.floats(0.1, 20), counts=st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_a_constant_slowdown_is_told_as_it_is(factor, counts):
    meter = Meter(CURVES)
    for now, count in enumerate(counts):
        meter.samples.extend([(OP, SLOTS, factor * (SECONDS + OVERHEAD))] * count)
        assert meter.update_slowdown(float(now)) == pytest.approx(factor)


def second(meter, factor, now, count=10):
    meter.samples.extend([(OP, SLOTS, factor * (SECONDS + OVERHEAD))] * count)
    return meter.update_slowdown(now)


def test_a_change_shows_within_seconds_and_idleness_forgets_it(meter):
    assert second(meter, 1.0, 0.0) == pytest.approx(1.0)
    assert second(meter, 3.0, 1.0) > 2.0
    reading = second(meter, 3.0, 2.0)
    assert 2.5 < reading < 3.0
    assert meter.update_slowdown(2.0 + IDLE_S) == reading
    assert meter.update_slowdown(2.1 + IDLE_S) == 1.0
    assert second(meter, 3.0, 20.0) == pytest.approx(3.0)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.2])
def test_who_computes_about_as_fast_as_measured_is_known_for_it_for_minutes(meter, factor):
    reading = second(meter, factor, 0.0)
    assert reading == pytest.approx(factor)
    assert meter.update_slowdown(10 * IDLE_S) == reading
    assert meter.update_slowdown(KEEP_SMALL_S) == reading
    assert meter.update_slowdown(KEEP_SMALL_S + 0.1) == 1.0


def test_a_few_ops_behind_many_say_little(meter):
    second(meter, 1.1, 0.0, 1000)
    assert second(meter, 3.0, 1.0, 10) == pytest.approx(1.1, rel=0.05)
    assert second(meter, 3.0, 60.0, 10) == pytest.approx(1.1, rel=0.1), "nor do they after a pause"


def test_what_was_seen_against_another_measurement_does_not_count(meter):
    second(meter, 1.3, 0.0)
    meter.set_curves(CURVES)
    assert meter.update_slowdown(0.1) == 1.0
    assert second(meter, 1.1, 0.2) == pytest.approx(1.1)


def test_long_ops_weigh_more_than_short_ones(meter):
    big, slots = linear(9 * ROWS)
    meter.samples.append((OP, SLOTS, 2 * SECONDS))
    meter.samples.append((big, slots, 9 * SECONDS))
    assert meter.update_slowdown(0.0) == pytest.approx(11 / 10, rel=0.01)


def test_ops_too_short_to_say_anything_do_not_count(meter):
    op, slots = linear(0)
    assert OVERHEAD < SHORTEST_S
    meter.samples.append((op, slots, 1.0))
    meter.samples.append((Send(0, ("d2",), 1), SLOTS, 1.0))
    assert meter.update_slowdown(0.0) == 1.0


@pytest.mark.parametrize("kind", ["tiny-bert", "tiny-vgg", "tiny-resnet", "tiny-gpt2"])
def test_all_that_is_priced_by_the_curves_of_matmuls_is_metered(kind):
    spec = spec_of_kind(kind)
    (program,) = device_programs(
        spec, Plan("m", PlanVersion(1, 1), "single", ("d",), "d"), largest_shape(spec)
    ).values()
    ops = [op for op in program.ops if isinstance(op, Compute)]
    priced = {op.kernel for op in ops if any(work.kind == "linear" for work in works(op, program.slots))}
    assert priced
    assert priced <= METERED


def test_samples_are_bounded(meter):
    meter.samples.extend([(OP, SLOTS, SECONDS)] * 100_000)
    assert len(meter.samples) < 10_000


FRAME_S, BYTES_PER_S = 1e-4, 1e9


def frame_meter():
    return Meter({**CURVES, "mesh_frame_s": FRAME_S, "mesh_copy_bytes_per_s": BYTES_PER_S})


def prices_of(meter, windows, cost):
    """Return what the meter tells after looks at so many frames of so many bytes each, at `cost` times the price."""
    frames = nbytes = 0
    price_estimate = meter.frame_cost(0, 0)
    assert price_estimate is None
    for count, each in windows:
        frames, nbytes = frames + count, nbytes + count * each
        meter.frames_s += cost[0] * count * FRAME_S + cost[1] * count * each / BYTES_PER_S
        price_estimate = meter.frame_cost(frames, nbytes)
    assert price_estimate is not None
    return price_estimate.frame_s / FRAME_S, price_estimate.byte_s * BYTES_PER_S


@given(of_frames=st.floats(0.2, 5), of_bytes=st.floats(1, 30), rounds=st.integers(2, 5))
def test_frames_and_bytes_are_told_apart_where_there_are_small_and_large_ones(of_frames, of_bytes, rounds):
    price_estimate = prices_of(frame_meter(), [(1000, 2000), (1000, 200_000)] * rounds, (of_frames, of_bytes))
    assert price_estimate == (pytest.approx(of_frames, rel=0.15, abs=0.15), pytest.approx(of_bytes, rel=0.05))


@given(of_bytes=st.floats(1, 30), each=st.integers(60_000, 10**6), rounds=st.integers(1, 5))
def test_where_all_frames_are_alike_their_price_is_what_they_cost(of_bytes, each, rounds):
    of_frames, price_estimate = prices_of(frame_meter(), [(300, each)] * rounds, (1.0, of_bytes))
    price, cost = (p * FRAME_S + q * each / BYTES_PER_S for p, q in ((of_frames, price_estimate), (1.0, of_bytes)))
    assert price == pytest.approx(cost, rel=0.05)
    assert 0.2 < of_frames < 1.5  # no more is the frame's than loopback lets expect


@given(windows=st.lists(st.tuples(st.integers(FRAMES, 500), st.integers(0, 10**6)), min_size=1, max_size=5))
@example(windows=[(FRAMES, 0)])
def test_what_is_told_is_never_negative_and_explains_what_was_seen(windows):
    meter = frame_meter()
    of_frames, of_bytes = prices_of(meter, windows, (0.0, 3.0))  # frames that cost nothing but their bytes
    assert of_frames > 0
    assert of_bytes > 0


def test_what_probes_cost_between_two_looks_is_not_what_tensors_cost():
    meter, other = frame_meter(), frame_meter()
    other.frames_s += 3 * FRAMES * FRAME_S
    expected = other.frame_cost(FRAMES, 0)
    meter.frames_s += 7.0
    assert meter.frame_cost(0, 0) is None
    meter.frames_s += 3 * FRAMES / 2 * FRAME_S
    assert meter.frame_cost(FRAMES // 2, 0) is None
    meter.frames_s += 7.0
    assert meter.frame_cost(FRAMES // 2, 0) is None
    meter.frames_s += 3 * FRAMES / 2 * FRAME_S
    assert meter.frame_cost(FRAMES, 0) == pytest.approx(expected)
    meter.frames_s += 7.0
    assert meter.frame_cost(FRAMES, 0) == pytest.approx(expected)


# -- the beat ---------------------------------------------------------------------------------------------------------

TOPICS = Topics("home")


class Machine:
    def sample(self):
        return HealthSample(0.25, 1000, 45.5, 2000)


class Device:
    def __init__(self):
        self.planes = {}
        self.complaints = RateLimitedLog(logging.getLogger("test"))
        self.prober = Prober("d1", 9)
        self.network = Network(TOPICS, "d1", Inbox(), self.prober, None, self.complaints, self.make)
        self.counters = lambda: {"late": 3}
        self.thread = HeartbeatThread(
            TOPICS,
            "d1",
            9,
            self.network,
            Machine(),
            Meter(swarm.curves(1e9)),
            lambda: float("-inf"),
            lambda: self.counters(),  # noqa: PLW0108 - tests replace it
            None,
            Inbox(),
            self.complaints,
        )

    def make(self, plane, on_message, on_state):
        self.planes[plane] = ListTransport(on_message, on_state)
        return self.planes[plane]

    def beats(self):
        beats = [messages.decode_heartbeat(p) for _, p, _, _ in self.planes["control"].published]
        return [replace(beat, clock_s=0.0) for beat in beats]

    def probes(self):
        return [frames.decode(p) for _, p, _, _ in self.planes["data"].published]

    def echo(self, now):
        for frame in self.probes():
            self.prober.on_answer(frame, now)


@pytest.fixture
def device():
    return Device()


def test_a_beat_says_how_the_device_is(device):
    device.thread.publish_heartbeat(10.0)
    device.echo(10.25)
    device.thread.publish_heartbeat(11.0)
    assert device.beats() == [
        protocol_messages.Heartbeat(9, 1, 0.25, 1000, 45.5, None, None, 1.0, 2000, {"late": 3}),
        protocol_messages.Heartbeat(9, 2, 0.25, 1000, 45.5, 0.25, None, 1.0, 2000, {"late": 3}),
    ]
    topic, _, qos, retain = device.planes["control"].published[0]
    assert (topic, qos, retain) == (TOPICS.heartbeat("d1"), 0, False)
    assert {topic for topic, _, _, _ in device.planes["data"].published} == {TOPICS.probe("d1")}


def test_the_thread_beats_at_once_survives_a_mistake_and_ends(device):
    second_beat = threading.Event()

    def mistaken():
        second_beat.set()
        raise RuntimeError("a mistake")

    device.counters = mistaken
    device.thread.start()
    device.thread.start()  # announced again
    assert second_beat.wait(30)
    device.thread.close()
    assert device.complaints.counters["heartbeat_errors"] >= 1


# -- health -----------------------------------------------------------------------------------------------------------

seconds = st.floats(0, 100)


def test_others_are_what_is_busy_without_us_and_a_local_broker():
    before = CpuTimes(10.0, 100.0, 50.0, 5.0)
    after = CpuTimes(12.0, 103.0, 51.5, 5.5)
    assert cpu_other(before, after, 4) == pytest.approx((3.0 - 1.5 - 0.5) / (2 * 4))


@given(st.builds(CpuTimes, seconds, seconds, seconds, seconds), st.builds(CpuTimes, seconds, seconds, seconds, seconds))
def test_a_share_is_a_share(before, after):
    assert 0.0 <= cpu_other(before, after, 4) <= 1.0


def test_a_restarted_broker_counts_as_nothing_once():
    before, after = CpuTimes(0.0, 0.0, 0.0, 50.0), CpuTimes(1.0, 0.5, 0.0, 0.1)
    assert cpu_other(before, after, 1) == 0.5


class Clock:
    """The system's counters, as the test sets them."""

    def __init__(self, monkeypatch):
        self.now, self.busy = 100.0, 0.0
        times = lambda: SimpleNamespace(user=self.busy, nice=0.0, system=0.0)  # noqa: E731
        monkeypatch.setattr(monitoring.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(monitoring.psutil, "cpu_times", times)
        monkeypatch.setattr(monitoring.psutil, "cpu_count", lambda: 2)

    def pass_by(self, seconds, cores):
        self.now += seconds
        self.busy += seconds * cores


def test_a_look_just_after_another_repeats_it(monkeypatch):
    clock = Clock(monkeypatch)
    monitor = HealthMonitor(BrokerUrl.parse("mqtt://192.0.2.1"))
    clock.pass_by(WINDOW_S / 10, 2)
    assert monitor.sample().cpu_other == 0.0
    clock.pass_by(1.0, 1)
    share = monitor.sample().cpu_other
    assert 0.4 <= share < 0.6  # less what this process takes
    clock.pass_by(WINDOW_S / 10, 2)
    assert monitor.sample().cpu_other == share
    clock.pass_by(1.0, 0)
    assert monitor.sample().cpu_other < 0.1


def test_a_look_at_this_machine():
    monitor = HealthMonitor(BrokerUrl.parse("mqtt://127.0.0.1"))
    health = monitor.sample()
    assert 0.0 <= health.cpu_other <= 1.0
    assert health.free_bytes > 0
    assert health.rss_bytes > 1 << 20
    assert health.temperature_c is None or -50 < health.temperature_c < 150


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("192.0.2.1", False), ("no such host", False)],
)
def test_where_a_broker_is(host, local):
    assert is_this_machine(host) is local


def test_a_broker_of_this_machine_is_found():
    before = {p.pid for p in local_brokers()}
    with start_broker():
        new_brokers = {p.pid for p in local_brokers()} - before
    assert new_brokers
    assert os.getpid() not in new_brokers
