"""The session thread over list transports: events go in, what was published is looked at."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import sites
from hypothesis import given
from hypothesis import strategies as st
from shell_support import BOOT, PLAN, SPEC, TENSORS, TOPICS, TWO, devices, request, unloaded

from device_agent import heartbeat as metering
from device_agent.loader import RequestAgain
from device_agent.network import OwnStatus, PlaneState, PlannerStatus, Stop, Subscriptions
from device_agent.shell import MAX_REPEATED
from hepti_mqtt import __version__, models
from hepti_mqtt.core.errors import ConfigError, RefusedError, RemoteError, WireError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.protocol import frames, messages
from hepti_mqtt.protocol import messages as protocol_messages
from hepti_mqtt.protocol.plausible import PROGRAMS_BYTES
from hepti_mqtt.runtime.worker.interface import FrameIn, LogTrouble, MessageIn, Unload
from hepti_mqtt.strategies.plan_programs import resident_weights
from hepti_mqtt.transport.base import Connected, Disconnected, Refused


def raising(error):
    """Return what raises an error, whatever it is called with."""

    def call(*_):
        raise error

    return call


@pytest.fixture
def device():
    yield from devices()


def test_announced_again_after_the_control_connection_was_lost(device):
    d = device()
    d.join()
    d.run(PlaneState("data", Disconnected("x")), PlaneState("data", Connected(4, None)))
    assert len(d.announced) == 1
    d.run(PlaneState("control", Disconnected("x")), PlaneState("control", Connected(4, None)))
    assert d.announced == [Connected(5, None), Connected(4, None)]
    assert d.loader.posted.count(RequestAgain()) == 3, "when control is up, when both are, and when it is up again"


def test_ready_after_weights_and_every_acknowledgement(device):
    d = device()
    d.join()
    d.prepare()
    (load,) = d.loader.loads()
    assert tuple(load.matrices) == resident_weights(SPEC, PLAN, "d0")
    d.loaded()
    assert [type(m) for m in d.ups()] == [messages.PrepareProgress], "it gets further"
    d.acknowledge()
    (ready,) = [m for m in d.ups() if isinstance(m, messages.Ready)]
    assert (ready.transaction_id, ready.plan_version) == (1, PLAN.version)


def test_a_plan_of_two_subscribes_sends_activations_on_the_data_plane_and_leaves_its_filters(device):
    d = device()
    d.ready(TWO)
    x = TOPICS.activations_from(TWO.model, "d1", "d0")
    assert set(d.planes["data"].subscribed[2]) == {(f, 0) for f in x}
    assert d.planes["control"].subscribed[2] == ((TOPICS.work(TWO.model, TWO.devices[0]), 1),)
    d.run(request(plan=TWO)[2])
    sent = d.planes["data"].published
    assert sent
    for topic, payload, qos, retain in sent:
        parsed, frame = TOPICS.parse(topic), frames.decode(payload)
        assert (parsed.source, parsed.layer, frame.source, qos, retain) == ("d0", frame.layer, "d0", 0, False)
    before = len(sent)
    cancel = MessageIn(messages.Cancel(TWO.model, TWO.version, 2))
    d.run(request(2, plan=TWO)[2], cancel)
    assert len(sent) == before, "events of the network go before further ops"
    d.run(MessageIn(messages.Release(2, TWO.model, TWO.version)))
    assert set(d.planes["data"].left) == set(x)
    assert d.planes["control"].left == [TOPICS.work(TWO.model, TWO.devices[0])]
    (load,) = d.loader.loads()
    assert d.loader.posted[-1] == Unload(TWO.model, TWO.version, load.keep), "they stay while there is room"


def test_a_request_is_answered_right_and_its_matmuls_are_metered(device, monkeypatch):
    d = device()
    d.ready()
    shape, inputs, event = request()
    d.run(event)
    output, done = d.ups(frames.Frame)
    expected = models.reference(SPEC, TENSORS, inputs, shape)[1]
    np.testing.assert_allclose(output.array(), expected, atol=sites.TOLERANCE)
    assert (output.kind, done.kind, done.run_id) == ("output", "done", 1)
    assert len(done.numbers) == 4
    assert done.numbers[3] == 1  # parts of the answer
    assert len(d.meter.samples) == sum(op.kernel == "linear" for op, _, _ in d.meter.samples) > SPEC.layers
    assert all(seconds > 0 for _, _, seconds in d.meter.samples)
    monkeypatch.setattr(metering, "SHORTEST_S", 0.0)
    assert 0 < d.meter.update_slowdown(0.0) != 1.0


UNREADABLE = frames.encode(frames.Frame("work", PLAN.model, PLAN.version, 1, shape=(64,), body=bytes(64)))
UNKNOWN_WORD = frames.encode_work(PLAN.model, PLAN.version, 1, TokenBatch((2,)), np.array([1, 10**6], np.int32))
PICTURE = frames.encode_work(PLAN.model, PLAN.version, 1, TokenBatch((3,)), np.zeros((1, 1, 1, 5), np.uint8))


@pytest.mark.parametrize(
    ("work", "code"),
    [(UNKNOWN_WORD, "device"), (UNREADABLE, "wire"), (PICTURE, "wire")],
    ids=["an op fails", "unreadable", "no input of the model"],
)
def test_work_that_fails_ends_its_request_alone(device, work, code):
    d = device()
    d.ready()
    d.run(FrameIn(frames.decode(work)), request(2)[2])
    (failed,) = d.ups(messages.RunFailed)
    assert (failed.run_id, failed.code, failed.plan_version) == (1, code, PLAN.version)
    assert [f.run_id for f in d.ups(frames.Frame)] == [2, 2]
    assert d.session.runs.idle


def test_a_mistake_in_the_session_is_survived(device, monkeypatch):
    d = device()
    d.ready()

    def mistaken(event, now):
        raise RuntimeError("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(d.session, "handle", mistaken)
        d.run(request(1)[2], MessageIn(messages.Cancel(PLAN.model, PLAN.version, 1)))
    assert d.complaints.counters["event_errors"] == 2
    assert [m.run_id for m in d.ups(messages.RunFailed)] == [1]
    d.run(request(2)[2])
    assert [f.run_id for f in d.ups(frames.Frame)] == [2, 2]


@pytest.mark.parametrize("error", [MemoryError(), WireError("a mistake")])
def test_a_mistake_anywhere_on_the_session_thread_is_survived_and_does_not_take_the_core(device, monkeypatch, error):
    d, pauses = device(), []
    d.ready()

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 5:
            d.inbox.post(Stop())

    monkeypatch.setattr("device_agent.shell.time", SimpleNamespace(perf_counter=time.perf_counter, sleep=pause))
    with monkeypatch.context() as patch:
        patch.setattr(d.shell, "_links", SimpleNamespace(wait=raising(error), mesh=SimpleNamespace(wake=int)))
        d.shell.run()
    assert d.complaints.counters["session_errors"] == len(pauses) == 5
    assert min(pauses) > 0
    d.run(request()[2])
    assert [f.run_id for f in d.ups(frames.Frame)] == [1, 1]


def test_a_device_whose_errors_repeat_without_end_says_why_it_is_offline(device, monkeypatch):
    d = device()
    d.ready()
    now = [0.0]

    def pause(seconds):
        now[0] += seconds

    monkeypatch.setattr("device_agent.shell.time", SimpleNamespace(perf_counter=lambda: now[0], sleep=pause))
    with monkeypatch.context() as patch:
        patch.setattr(d.shell, "_links", SimpleNamespace(wait=raising(OSError("no such socket")), open=False))
        with pytest.raises(RemoteError):
            d.shell.run()
    assert d.complaints.counters["session_errors"] == MAX_REPEATED
    assert d.shell.announce_offline
    assert "no such socket" in d.shell.fault


def test_a_refused_subscription_fails_the_plan_and_a_refused_publish_is_a_complaint(device):
    d = device()
    d.join()
    d.prepare(TWO)
    d.run(
        PlaneState("data", Refused(2, ("hepti/x",), "not authorised")),
        PlaneState("control", Refused(None, ("t",), "no")),
    )
    (failed,) = d.ups()
    assert (failed.code, failed.plan_version) == ("refused", TWO.version)
    assert d.complaints.counters["publish_refused"] == 1


def test_a_refused_base_subscription_ends_the_agent(device):
    d = device()
    d.inbox.post(PlaneState("control", Refused(1, ("hepti/cmd",), "not authorised")))
    with pytest.raises(RefusedError):
        d.shell.run()
    assert d.shell.announce_offline


def test_a_plan_that_cannot_be_read_is_reported_if_it_says_whose_it_is(device):
    d = device()
    d.join()
    for txn, plan in ((3, {**PLAN.to_dict(), "strategy": "of the future"}), (4, {}), (5, {"model": 7})):
        d.run(MessageIn(messages.Prepare(txn, plan, SPEC.to_dict(), bytes(32), 1)))
    (failed,) = d.ups()
    assert (failed.transaction_id, failed.plan_version, failed.code) == (3, PLAN.version, "no_plan")
    assert d.complaints.counters["event_errors"] == 3


def test_a_plan_of_a_planner_of_another_version_is_answered_as_one_that_differs_and_not_prepared(device):
    d = device()
    d.join()
    d.run(PlannerStatus(protocol_messages.Status("online", PLAN.version.boot)))
    d.prepare()
    assert d.ups() == [messages.Ready(1, PLAN.model, PLAN.version, 0, bytes(PROGRAMS_BYTES))]
    assert not d.loader.loads()


def test_other_commands_are_done_though_a_message_of_the_run_cannot_leave(device, monkeypatch):
    d = device(limit=1100)
    d.ready()
    done = d.session.finish_step
    monkeypatch.setattr(d.session, "finish_step", lambda *a: [*done(*a), LogTrouble("wanted", "besides")])
    shape, inputs = sites.request(SPEC, (7,), "hidden")
    d.run(FrameIn(frames.decode(frames.encode_work(PLAN.model, PLAN.version, 1, shape, inputs))))
    [_] = d.ups(messages.RunFailed)
    assert d.ups(frames.Frame) == [], "neither the answer nor that it is done"
    assert d.complaints.counters["wanted"] > 0


# -- statuses: the planner's, its own as the site hears it, and those of others ----------------------------------------


def test_a_newer_planner_alone_voids_what_the_old_one_prepared(device):
    d = device()

    def hear(state, boot):
        d.run(PlannerStatus(protocol_messages.Status(state, boot, version=__version__)))

    boot = PLAN.version.boot
    hear("online", boot)
    d.ready()
    requests = d.loader.posted.count(RequestAgain())
    hear("offline", boot)
    hear("online", boot)
    assert d.loader.posted.count(RequestAgain()) == requests + 1
    hear("online", boot - 1)  # a broker still retains it
    assert unloaded(d) == []
    d.run(request()[2])
    assert [f.run_id for f in d.ups(frames.Frame)] == [1, 1]
    hear("online", boot + 1)
    assert unloaded(d) == [(PLAN.model, PLAN.version)]
    d.run(request(2)[2])
    assert len(d.ups(frames.Frame)) == 2


NEXT = replace(PLAN, version=PlanVersion(1, 2))
AWAY = (PlaneState("control", Disconnected("x")), PlaneState("control", Connected(5, None)))
WILL = (OwnStatus(protocol_messages.Status("offline", BOOT)),)


@pytest.mark.parametrize("away", [AWAY, WILL])
def test_plans_from_before_a_reconnection_go_when_a_newer_one_is_activated(device, away):
    d = device()
    d.ready()
    d.run(*away)
    d.prepare(NEXT)
    assert unloaded(d) == []
    d.run(MessageIn(messages.Activate(2, NEXT.model, NEXT.version)))
    assert unloaded(d) == [(PLAN.model, PLAN.version)]
    assert d.complaints.counters["plans_forgotten"] == 1


def test_single_forged_statuses_are_contradicted(device):
    d = device()
    d.ready()
    for forged in range(1, 4):
        d.run(OwnStatus(protocol_messages.Status("online", 4_000_000_000 + forged, term=9)))
    assert len(d.announced) == 4, "what was forged is overwritten"
    assert d.inbox.empty(), "and nobody ends"


def test_a_late_will_of_an_earlier_start_voids_nothing(device):
    d = device()
    d.ready()
    d.run(OwnStatus(protocol_messages.Status("offline", BOOT - 1)))
    d.prepare(NEXT)
    d.run(MessageIn(messages.Activate(2, NEXT.model, NEXT.version)))
    assert unloaded(d) == []


def test_another_agent_of_the_same_name_wins(device):
    d = device()
    d.join()
    for _ in range(2):  # it contradicts us, so it is there
        d.inbox.post(OwnStatus(protocol_messages.Status("online", 7, term=2)))
    with pytest.raises(ConfigError):
        d.shell.run()
    assert not d.shell.announce_offline


# -- subscriptions ----------------------------------------------------------------------------------------------------

WORK = TOPICS.work("m", "d0")


def of(model):
    return TOPICS.work(model, "d0")


class Broker:
    def __init__(self):
        self.tokens = []
        self.held = []

    def subscribe(self, plane, filters):
        assert filters
        self.tokens.append((plane, tuple(filters)))
        self.held += [(plane, f) for f in filters]
        return len(self.tokens)

    def unsubscribe(self, plane, filters):
        for f in filters:
            self.held.remove((plane, f))


@pytest.fixture
def broker():
    return Broker()


@pytest.fixture
def subscriptions(broker):
    return Subscriptions(broker)


def test_ready_only_after_every_acknowledgement(broker, subscriptions):
    assert not subscriptions.subscribe("m", PlanVersion(1, 1), ("a", "b"), WORK)
    assert broker.tokens == [("control", (WORK,)), ("data", ("a", "b"))]
    assert subscriptions.acknowledged("data", 1) == []  # a token of the other plane
    assert subscriptions.acknowledged("control", 1) == []
    assert subscriptions.acknowledged("data", 2) == [("m", PlanVersion(1, 1))]
    assert subscriptions.acknowledged("data", 2) == []  # after a reconnection


def test_a_refusal_hits_the_epochs_that_wait_for_it(broker, subscriptions):
    subscriptions.subscribe("m", PlanVersion(1, 1), ("a",), WORK)
    subscriptions.acknowledged("control", 1)
    subscriptions.subscribe("m", PlanVersion(1, 2), (), WORK)
    assert subscriptions.refused("data", 2) == [("m", PlanVersion(1, 1))]
    assert broker.held == [("control", WORK)]
    assert not subscriptions.subscribe("m", PlanVersion(1, 3), ("a",), WORK)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "release", "ack"]),
            st.sampled_from("mn"),
            st.integers(1, 4),
            st.sets(st.sampled_from("abc")),
        ),
        max_size=40,
    )
)
def test_what_is_held_is_what_the_epochs_need(operations):
    broker = Broker()
    subscriptions = Subscriptions(broker)
    wanted, ready, acked = {}, set(), 0
    for what, model, number, filters in operations:
        key = (model, PlanVersion(1, number))
        if what == "enter" and key not in wanted:
            wanted[key] = {f"{model}{f}" for f in filters}
            if subscriptions.subscribe(*key, tuple(sorted(wanted[key])), of(model)):
                ready.add(key)
        elif what == "release" and key in wanted:
            gone = wanted.pop(key)
            subscriptions.forget(*key)
            works = () if any(m == model for m, _ in wanted) else (of(model),)
            subscriptions.unsubscribe(tuple(gone - {f for own in wanted.values() for f in own}), works)
            ready.discard(key)
        elif what == "ack":
            while acked < len(broker.tokens):
                acked += 1
                done = subscriptions.acknowledged(broker.tokens[acked - 1][0], acked)
                assert not ready & set(done)
                ready |= set(done)
            assert ready == set(wanted)
        needed = {("data", f) for own in wanted.values() for f in own}
        needed |= {("control", of(model)) for model, _ in wanted}
        assert sorted(broker.held) == sorted(needed)
