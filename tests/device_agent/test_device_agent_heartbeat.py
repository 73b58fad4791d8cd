import logging
import threading

import pytest
import swarm
from device_agent_support import ListTransport

from device_agent.heartbeat import IDLE_S, HeartbeatThread, Meter
from device_agent.machine import Health
from device_agent.network import Complaints, Network
from device_agent.probes import LARGE_BYTES, Prober
from hepti_mqtt.program import Compute, SlotSpec, WeightRef
from hepti_mqtt.protocol import frames, messages
from hepti_mqtt.protocol import messages as protocol_messages
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.transport import Inbox

TOPICS = Topics("home")


class Machine:
    def look(self):
        return Health(0.25, 1000, 45.5, 2000)


class Device:
    def __init__(self):
        self.planes = {}
        self.complaints = Complaints(logging.getLogger("test"))
        self.prober = Prober("d1", 9)
        self.network = Network(TOPICS, "d1", Inbox(), self.prober, None, self.complaints, self.make)
        self.stepped_s, self.counts = float("-inf"), {"late": 3}
        self.thread = HeartbeatThread(
            TOPICS,
            "d1",
            9,
            self.network,
            Machine(),
            self.prober,
            Meter(swarm.curves(1e9)),
            lambda: self.stepped_s,
            lambda: self.counts,
            None,
            self.complaints,
        )

    def make(self, plane, on_message, on_state):
        self.planes[plane] = ListTransport(on_message, on_state)
        return self.planes[plane]

    def beats(self):
        return [messages.decode_heartbeat(p) for _, p, _, _ in self.planes["control"].published]

    def probes(self):
        return [frames.decode(p) for _, p, _, _ in self.planes["data"].published]

    def echo(self, now):
        for frame in self.probes():
            self.prober.received(frame, now)


@pytest.fixture
def device():
    return Device()


def test_a_beat_says_how_the_device_is(device):
    device.thread.beat(10.0)
    device.echo(10.25)
    device.thread.beat(11.0)
    assert device.beats() == [
        protocol_messages.Heartbeat(9, 1, 0.25, 1000, 45.5, None, None, 1.0, 2000, {"late": 3}),
        protocol_messages.Heartbeat(9, 2, 0.25, 1000, 45.5, 0.25, None, 1.0, 2000, {"late": 3}),
    ]
    topic, _, qos, retain = device.planes["control"].published[0]
    assert (topic, qos, retain) == (TOPICS.heartbeat("d1"), 0, False)
    assert {topic for topic, _, _, _ in device.planes["data"].published} == {TOPICS.probe("d1")}


def test_requests_of_before_are_no_more_of_late_while_the_device_is_offline(device):
    meter = device.thread._meter
    op = Compute("linear", (0,), (1,), (WeightRef("w", (0, 64), (0, 64)),), {"bias": False})
    meter.samples.append((op, (SlotSpec((128, 64)), SlotSpec((128, 64))), 1.0))
    device.thread.beat(10.0)
    assert meter.slowdown_now > 2
    device.planes["data"].connected = False
    device.thread.beat(10.0 + 2 * IDLE_S)
    assert meter.slowdown_now == 1.0
    assert len(device.beats()) == 1


def test_no_large_probe_while_ops_run(device):
    device.thread.beat(10.0)
    device.echo(10.01)
    device.stepped_s = 10.9
    device.thread.beat(11.0)
    assert max(len(f.body) for f in device.probes()) < LARGE_BYTES
    device.thread.beat(12.0)
    assert max(len(f.body) for f in device.probes()) == LARGE_BYTES


def test_the_thread_beats_at_once_survives_a_mistake_and_ends(device):
    seen = threading.Event()

    def mistaken():
        seen.set()
        raise RuntimeError("a mistake")

    device.thread._counters = mistaken
    device.thread.start()
    device.thread.start()  # announced again
    assert seen.wait(30)
    device.thread.close()
    assert device.complaints.counters["heartbeat_errors"] >= 1


def test_a_thread_that_never_started_ends_too(device):
    device.thread.close()
    assert device.beats() == []
