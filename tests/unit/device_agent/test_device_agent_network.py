"""Both connections: what comes becomes an event, a tile or an echo, and what is not valid is counted and dropped."""

from __future__ import annotations

import logging

import msgpack
import numpy as np
import pytest
from device_agent_support import MODEL, ListTransport, sha
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from device_agent.network import Network, OwnStatus, PlaneState, PlannerStatus
from device_agent.probes import Prober
from hepti_mqtt.config.process import RateLimitedLog
from hepti_mqtt.core.errors import WireError
from hepti_mqtt.core.ids import PLANNER, PlanVersion
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.protocol import frames, messages
from hepti_mqtt.protocol import messages as protocol_messages
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.worker.interface import MessageIn
from hepti_mqtt.transport.base import Connected, Disconnected, Inbox, Refused, Subscribed

TOPICS = Topics("home")
EPOCH = PlanVersion(3, 4)


class Wired:
    def __init__(self, limit=1000):
        self.inbox = Inbox(limit)
        self.tiles = []
        self.prober = Prober("d1", 9)
        self.complaints = RateLimitedLog(logging.getLogger("test"))
        self.planes = {}
        self.network = Network(TOPICS, "d1", self.inbox, self.prober, self.tiles.append, self.complaints, self.make)

    def make(self, plane, on_message, on_state):
        self.planes[plane] = ListTransport(on_message, on_state)
        return self.planes[plane]

    def hear(self, topic, payload, plane="control"):
        self.planes[plane].hear(topic, payload)

    def events(self):
        out = []
        while not self.inbox.empty():
            out.append(self.inbox.get())
        return out


@pytest.fixture
def wired():
    return Wired()


def tensor(model=MODEL, layer=2, source="d2", kind="tensor"):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    frame = frames.Frame(kind, model, EPOCH, 5, layer, 1, source, dtype="f32", shape=(2, 3), body=array)
    return frames.encode(frame)


STATUS, CAPS = TOPICS.status("d1"), TOPICS.caps("d1")


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        (STATUS, protocol_messages.encode_status(protocol_messages.Status("offline", 9))),
        (STATUS, protocol_messages.encode_status(protocol_messages.Status("starting", 8))),
        (STATUS, b"{}"),
        (STATUS, b""),
        (CAPS, b"{}"),
        (CAPS, b""),
    ],
)
def test_what_was_published_in_this_device_s_name_is_replaced_at_once(wired, topic, said):
    own = {STATUS: protocol_messages.encode_status(protocol_messages.Status("online", 9)), CAPS: b'{"device": "d1"}'}
    wired.hear(topic, said)
    for place, payload in own.items():
        wired.network.publish("control", place, payload, 1, True)
        wired.hear(place, payload)
    sent = wired.planes["control"].published
    assert len(sent) == 2, "neither before there is something of its own, nor for its own echo"
    wired.hear(topic, said)
    assert sent[2:] == [(topic, own[topic], 1, True)]
    wired.events()
    later = protocol_messages.Status("online", 10)
    wired.hear(STATUS, protocol_messages.encode_status(later))
    assert len(sent) == 3, "a later start keeps the name"
    assert wired.events() == [OwnStatus(later)]


def work(model=MODEL):
    return frames.encode_work(model, EPOCH, 5, TokenBatch((2,)), np.array([1, 2], np.int32))


def test_frames_tiles_and_probes_go_where_they_belong(wired):
    wired.hear(TOPICS.work(MODEL, "d0"), work())
    for to in ("d1", "all"):
        wired.hear(TOPICS.activation(MODEL, 2, "d2", to), tensor(), "data")
    wired.hear(TOPICS.weights("d1"), frames.encode(frames.Frame("tile", MODEL, EPOCH, 0, shape=(4,), body=b"tile")))
    (probe,) = wired.prober.due_probes(0.0, True)
    for payload in (bytes(5000), probe):  # the former is a trial of a large packet
        wired.hear(TOPICS.probe("d1"), payload, "data")
    request, *activations = wired.events()
    assert frames.decode_work(request.frame)[0] == TokenBatch((2,)).plain()
    for event in activations:
        assert event.frame.source == "d2"
        np.testing.assert_array_equal(event.frame.array(), [[0, 1, 2], [3, 4, 5]])
    assert len(activations) == 2
    assert [(sha(t.body), t.source) for t in wired.tiles] == [(sha(b"tile"), PLANNER)]
    assert wired.prober.round_trip_s() is not None
    assert not wired.complaints.counters


PREPARE = msgpack.unpackb(messages.encode(messages.Prepare(1, {}, {}, bytes(32), 1)))


@pytest.mark.parametrize(
    ("topic", "payload"),
    [
        (TOPICS.command("d1"), b"junk"),
        *((TOPICS.command("d1"), msgpack.packb(other)) for other in (PREPARE[:-2], [*PREPARE, 1], [250, *PREPARE[1:]])),
        (TOPICS.command("d1"), messages.encode(messages.ReleaseAll(1))[:-1]),
        (TOPICS.work(MODEL, "d0"), tensor()),
        (TOPICS.work(MODEL, "d0"), work("other")),
        (TOPICS.weights("d1"), tensor()),
        (TOPICS.weights("d1"), b""),
        (TOPICS.planner_status(), b"{}"),
        (TOPICS.status("d1"), b"\xff"),
        (TOPICS.activation(MODEL, 2, "d2", "d1"), tensor(source="d3")),  # not the sender that the topic names
        (TOPICS.activation(MODEL, 2, "d2", "d1"), tensor(layer=3)),
        (TOPICS.activation(MODEL, 2, "d2", "d1"), tensor(model="other")),
        (TOPICS.activation(MODEL, 2, "d2", "d1"), tensor(kind="output")),
        (TOPICS.activation(MODEL, 2, "d2", "d1"), tensor()[:-1]),
        (TOPICS.probe("d1"), frames.MAGIC + b"junk"),
        ("some/other/topic", b""),
    ],
)
def test_what_is_not_valid_is_counted_and_dropped(wired, topic, payload):
    wired.hear(topic, payload)
    assert wired.events() == []
    assert wired.tiles == []
    assert wired.complaints.counters["bad_payload"] == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    topic=st.sampled_from(
        [TOPICS.command("d1"), TOPICS.work(MODEL, "d0"), TOPICS.weights("d1"), TOPICS.probe("d1"), "x"]
    ),
    payload=st.one_of(st.binary(max_size=300), st.binary(max_size=40).map(lambda b: b + work()[len(b) :])),
)
def test_no_bytes_of_a_peer_crash_a_network_thread(wired, topic, payload):
    wired.hear(topic, payload)
    wired.events()


def test_commands_statuses_and_states_are_never_dropped_by_a_full_inbox():
    wired = Wired(limit=0)
    states = [Connected(4, None, True), Disconnected("gone"), Subscribed(3), Refused(4, ("a",), "no")]
    for state in states:
        wired.planes["data"].tell(state)
    assert wired.events() == [PlaneState("data", state) for state in states]
    commands = [
        messages.Activate(1, MODEL, EPOCH),
        messages.Release(2, MODEL, EPOCH),
        messages.Cancel(MODEL, EPOCH, 5),
        messages.ReleaseAll(3),
    ]
    status = protocol_messages.Status("offline", 8)
    wired.hear(TOPICS.work(MODEL, "d0"), work())
    wired.hear(TOPICS.activation(MODEL, 2, "d2", "d1"), tensor(), "data")
    for command in commands:
        wired.hear(TOPICS.command("d1"), messages.encode(command))
    wired.hear(TOPICS.planner_status(), messages.encode_status(status))
    wired.hear(TOPICS.status("d1"), messages.encode_status(status))
    assert wired.events() == [*map(MessageIn, commands), PlannerStatus(status), OwnStatus(status)]
    assert wired.complaints.counters == {"inbox_overflow": 2}, "a run that misses one of these is issued again"


def test_complaints_are_logged_ever_more_rarely(caplog):
    complaints = RateLimitedLog(logging.getLogger("test"))
    for _ in range(100):
        complaints.record("kind", "trouble", WireError("why"))
    assert complaints.counters["kind"] == 100
    assert len(caplog.records) == 7  # 1, 2, 4, ... 64
