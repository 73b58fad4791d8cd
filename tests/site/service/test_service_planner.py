"""The planner in this process: models, what its inbox takes, its shell over a real broker."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from site_processes import PATIENCE_S, Voice

from hepti_mqtt import __version__
from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.config.options import PinOptions, PlannerOptions
from hepti_mqtt.config.process import MAX_SUBJECTS
from hepti_mqtt.core.errors import ConfigError, ModelError, OverloadedError
from hepti_mqtt.core.ids import PlanVersion, Start
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.planner import EarlierPlan
from hepti_mqtt.protocol import frames, messages
from hepti_mqtt.protocol import messages as protocol_messages
from hepti_mqtt.protocol.messages import Status, decode_status, encode_status
from hepti_mqtt.protocol.topics import DROPPED_TOPIC, Topics
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.interface import DeviceMessage, DeviceStatus, Tick
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.session import CoordinatorSession
from hepti_mqtt.service import planner
from hepti_mqtt.service.decoder import MessageDecoder, PlannerStatus, RawRequest, RetainedPlan
from hepti_mqtt.service.handler import OpenModel
from hepti_mqtt.service.last_state import read_state, save_state
from hepti_mqtt.service.planner import run_planner
from hepti_mqtt.service.setup import PlannerConfig, open_models, state_directory
from hepti_mqtt.service.threads import FairExecutor
from hepti_mqtt.transport.base import SENDER_EVENTS, Connected, Delivery, Receipt
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.url import BrokerUrl


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "planner").write_text("in the way")
    with pytest.raises(ConfigError):
        state_directory("s", tmp_path)


NOWHERE = BrokerUrl.parse("mqtt://127.0.0.1:1")


@pytest.fixture
def cnn(tmp_path, kept_hashes):
    make_model("tiny-resnet", tmp_path / "cnn", seed=1)
    return tmp_path / "cnn"


def pinned(storage, **models):
    return PlannerConfig(NOWHERE, "s", PlannerOptions(models, PinOptions(weights=storage)))


def test_weights_that_the_only_model_cannot_have_end_the_planner_at_the_start(cnn):
    with contextlib.ExitStack() as stack, pytest.raises(ConfigError):
        open_models(pinned("w8a8", cnn=cnn), stack)


def test_of_several_models_one_that_cannot_have_the_weights_keeps_f32(cnn, bert, caplog):
    with contextlib.ExitStack() as stack:
        opened = open_models(pinned("w8a8", cnn=cnn, bert=bert.path), stack)
    assert {name: model.pins.weight_dtype for name, model in opened.items()} == {"cnn": "f32", "bert": "w8a8"}
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "model cnn" in said


HOME = Topics("home")
CAPS = protocol_messages.Caps("a", 1, 4, 4, 1 << 30, 1 << 20, "plain", "0", {}, 0, 4)
BEAT = protocol_messages.Heartbeat(1, 2, 0.0, 1 << 30, None, None, None, 1.0, 0)

EVERY_TOPIC = [
    HOME.status("a"),
    HOME.caps("a"),
    HOME.heartbeat("a"),
    HOME.reports("a"),
    HOME.request("m", "c"),
    HOME.planner_status(),
    HOME.plan("m"),
    HOME.work("m", "a"),
    "hepti/v1/elsewhere/dev/a/up",
]


def test_every_kind_becomes_its_event():
    ready = messages.Ready(1, "m", PlanVersion(1, 1), 5, bytes(8))
    frame = frames.Frame("done", "m", PlanVersion(1, 1), 3, source="a", numbers=(1, 2, 3))
    status = protocol_messages.Status("online", 1)
    examples = {
        (HOME.status("a"), messages.encode_status(status)): interface.DeviceStatus("a", status),
        (HOME.caps("a"), messages.encode_caps(CAPS)): interface.DeviceCaps("a", CAPS),
        (HOME.heartbeat("a"), messages.encode_heartbeat(BEAT)): interface.DeviceHeartbeat("a", BEAT),
        (HOME.reports("a"), messages.encode(ready)): interface.DeviceMessage("a", ready),
        (HOME.request("m", "c"), b"{"): RawRequest("m", "c", b"{"),
        (HOME.text("m", "c"), b"{"): RawRequest("m", "c", b"{", bare=True),
        (HOME.use("a"), b"OFF"): interface.DeviceUse("a", wanted=False),
        (HOME.use("a"), b""): interface.DeviceUse("a", wanted=True),
        (HOME.planner_status(), messages.encode_status(status)): PlannerStatus(status),
        (HOME.plan("m"), b"x"): RetainedPlan("m", b"x"),
    }
    decoder = MessageDecoder("home")
    for (topic, payload), event in examples.items():
        assert decoder.decode(topic, payload) == event
    up = decoder.decode(HOME.reports("a"), frames.encode(frame))
    assert isinstance(up, interface.DeviceFrame)
    assert up.frame.numbers == (1, 2, 3)
    assert not decoder.counters


def test_cleared_foreign_and_lying_messages_are_dropped():
    decoder = MessageDecoder("home")
    assert decoder.decode(HOME.caps("b"), messages.encode_caps(CAPS)) is None, "caps under another device's name"
    assert decoder.decode(HOME.status("a"), b"") is None
    assert decoder.decode(HOME.work("m", "a"), b"x") is None
    assert decoder.counters == {"malformed": 1, "foreign": 1}


@given(st.sampled_from(EVERY_TOPIC), st.binary(max_size=300) | st.binary(max_size=300).map(lambda b: frames.MAGIC + b))
def test_no_bytes_raise(topic, payload):
    MessageDecoder("home").decode(topic, payload)


def test_a_device_whose_caps_cannot_be_read_is_told_of_once(caplog):
    decoder = MessageDecoder("home")
    for _ in range(3):
        assert decoder.decode(HOME.caps("a"), b'{"device": "a", "boot": 1}') is None
        assert decoder.decode(HOME.heartbeat("a"), b"x") is None
    assert decoder.counters["malformed"] == 6
    assert len(caplog.records) == 1
    for number in range(2 * MAX_SUBJECTS):
        decoder.decode(HOME.caps(f"d{number}"), b"x")
    assert len(caplog.records) == MAX_SUBJECTS, "names cost nothing to invent"


class Listener(Voice):
    """Hears topics of a site, retained ones included."""

    def __init__(self, url, site):
        self.topics = Topics(site)
        super().__init__(str(url), self.topics.planner_status(), self.topics.all_plans(), self.topics.responses("me"))

    def until(self, topic, holds=lambda payload: True):
        """Return the next payload on a topic for which `holds`."""
        while not holds(payload := self.next(topic)[1]):
            continue
        return payload

    def status(self, state):
        return self.until(self.topics.planner_status(), lambda p: bool(p) and decode_status(p).state == state)

    def ask(self, model, **data):
        self.say(self.topics.request(model, "me"), json.dumps(data).encode())
        return json.loads(self.until(self.topics.response(model, "me", data["id"])))


@pytest.fixture
def url(mosquitto):
    return BrokerUrl.parse(str(mosquitto.url))


@pytest.fixture
def listen(url):
    with contextlib.ExitStack() as stack:
        yield lambda site: stack.enter_context(Listener(url, site))


@pytest.fixture
def run(url, bert, tmp_path):
    """Run a planner of a site on a thread; its future has the outcome. Planners that still run end with the test."""
    started = []

    def start(site, **options):
        stop, outcome = threading.Event(), Future()
        models = {"bert": bert.path}
        config = PlannerConfig(url, site, PlannerOptions(models, home_assistant=None, **options), tmp_path)

        def work():
            try:
                outcome.set_result(run_planner(config, stop))
            except Exception as error:
                outcome.set_exception(error)

        thread = threading.Thread(target=work)
        thread.start()
        started.append((stop, thread))
        return stop, outcome

    yield start
    for stop, thread in started:
        stop.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_it_says_that_it_is_there_and_takes_everything_back(run, listen):
    ear = listen("coming")
    stop, outcome = run("coming")
    ear.status("online")
    stop.set()
    assert outcome.result(PATIENCE_S) is None
    ear.until(ear.topics.plan("bert"), lambda payload: payload == b"")
    ear.status("offline")


def test_a_planner_that_never_serves_leaves_the_last_state_to_the_next_one(run, listen, bert, tmp_path):
    directory, models, log = state_directory("idle", tmp_path), {"bert": bert}, logging.getLogger("test")
    plans = {"bert": EarlierPlan(Plan("bert", PlanVersion(4, 2), "single", ("a",), "a", predicted_s=0.5), {"a": 9})}
    save_state(directory, plans, (), models, log)
    ear = listen("idle")
    stop, outcome = run("idle")
    ear.status("online")
    stop.set()
    outcome.result(PATIENCE_S)
    assert read_state(directory, models, log).plans == plans


def test_a_newer_planner_takes_over(run, listen):
    ear = listen("contested")
    _, outcome = run("contested")
    own = decode_status(ear.status("online"))
    newer = Status("online", 7, term=own.term + 1)
    ear.say(ear.topics.planner_status(), encode_status(newer), retain=True)
    assert decode_status(ear.status("online")) == newer
    assert decode_status(ear.status("online")) == own, "a single one may be forged"
    ear.say(ear.topics.planner_status(), encode_status(newer), retain=True)
    with pytest.raises(ConfigError):
        outcome.result(PATIENCE_S)
    last = listen("contested")
    assert decode_status(last.status("online")) == newer, "the status of the newer one is left alone"


def test_a_late_will_is_contradicted(run, listen):
    ear = listen("late")
    run("late")
    own = decode_status(ear.status("online"))
    for late in (Status("offline", 7), replace(own, state="offline")):
        ear.say(ear.topics.planner_status(), encode_status(late), retain=True)
        ear.status("offline")
        assert decode_status(ear.status("online")) == own


def test_records_of_models_that_are_no_longer_served_are_cleared(run, listen):
    ear = listen("tidy")
    ear.say(ear.topics.plan("former"), b"left behind", retain=True)
    run("tidy")
    ear.until(ear.topics.plan("former"), lambda payload: payload == b"")


def test_too_many_unread_requests_are_refused_under_their_id(run, listen, monkeypatch):
    monkeypatch.setattr(planner, "UNREAD_BYTES", 1)
    ear = listen("busy")
    run("busy")
    ear.status("online")
    assert ear.ask("bert", id="q1", text="hello")["error"]["code"] == "overloaded"


@pytest.fixture
def unconnected(bert, tmp_path, monkeypatch):
    """A planner that only hears what it is told here, with an inbox that takes nothing that may be lost."""
    monkeypatch.setattr(planner, "INBOX", 0)
    config = PlannerConfig(
        NOWHERE, "full", PlannerOptions({"bert": bert.path}, home_assistant=None), state_dir=tmp_path
    )
    new_planner = planner._Planner(config, Start(1, 7), {"bert": OpenModel("bert", bert, Pins())})
    yield new_planner
    new_planner.control.close()
    new_planner.channel.close()
    new_planner.bulk.close()


def waiting(inbox):
    commands = []
    while not inbox.empty():
        commands.append(inbox.get())
    return commands


def test_a_device_that_floods_keeps_no_word_of_another_out(unconnected):
    version, topics = PlanVersion(7, 1), unconnected.topics
    will = Status("offline", 3)
    output = frames.Frame(
        "output", "bert", version, 5, source="a", dtype="f32", shape=(1,), body=np.ones(1, np.float32)
    )
    done = frames.Frame("done", "bert", version, 5, source="a", numbers=(1, 2, 3))
    said = [
        messages.Ready(1, "bert", version, 5, bytes(8)),
        messages.PrepareFailed(1, "bert", version, "memory", "no room", 5),
        messages.RunFailed("bert", version, 5, "device", "broken"),
        messages.RequestTiles("bert", (b"\0" * 32,)),
    ]
    for _ in range(SENDER_EVENTS + 2):
        unconnected._handle_message(topics.reports("loud"), messages.encode(said[0]))
    unconnected._handle_message(topics.status("a"), encode_status(will))
    for message in said:
        unconnected._handle_message(topics.reports("a"), messages.encode(message))
    for frame in (output, done):
        unconnected._handle_message(topics.reports("a"), frames.encode(frame))
    unconnected._handle_connection(Connected(4, None))
    kept = waiting(unconnected.inbox)[SENDER_EVENTS:]
    assert kept[0] == DeviceStatus("a", will)
    assert kept[1:5] == [DeviceMessage("a", message) for message in said]
    assert [event.frame.kind for event in kept[5:7]] == ["output", "done"]
    assert kept[7:] == [unconnected._connected]
    assert unconnected.decoder.counters == {"flood": 2}


def test_single_forged_statuses_end_no_planner(unconnected, monkeypatch):
    said = []
    unconnected._say("online")
    monkeypatch.setattr(unconnected.control, "publish", lambda topic, payload, *_: said.append((topic, payload)))
    topic = unconnected.topics.planner_status()
    for boot in (4_000_000_000, 4_000_000_001, 2**62):
        unconnected._handle_message(topic, json.dumps({"state": "online", "boot": boot, "term": 9}).encode())
    for action in waiting(unconnected.inbox):
        action()
    assert unconnected.failure is None
    key = unconnected.session.fleet.public_key
    own = Status("online", unconnected.start.boot, version=__version__, public_key=key, term=unconnected.start.term)
    assert said == [(topic, encode_status(own))] * 2, "what is retained is put right"


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO], ids=logging.getLevelName)
def test_invariants_are_checked_in_service_at_debug_level(bert, tmp_path, monkeypatch, caplog, level):
    log = logging.getLogger(f"planner at {level}")
    log.setLevel(level)
    config = PlannerConfig(
        NOWHERE,
        "checked",
        PlannerOptions({"bert": bert.path}, home_assistant=None),
        state_dir=tmp_path,
        log=log,
    )
    started = planner._Planner(config, Start(1, 7), {"bert": OpenModel("bert", bert, Pins())})
    monkeypatch.setattr(CoordinatorSession, "assert_invariants", lambda _: 1 // 0)
    started._run_guarded(lambda: started._handle(Tick()))
    for connection in (started.control, started.channel, started.bulk):
        connection.close()
    errors = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert errors == ([ZeroDivisionError] if level == logging.DEBUG else [])


@pytest.fixture
def said(unconnected, monkeypatch):
    """What the planner that is not connected would publish to users."""
    out = []
    monkeypatch.setattr(unconnected.channel, "_publish", lambda answer: out.append(answer.reply))
    return out


def test_a_request_that_finds_the_inbox_full_is_refused_under_its_id(unconnected, said):
    unconnected._handle_message(unconnected.topics.request("bert", "me"), b'{"id": "q1", "text": "hello"}')
    assert unconnected.reading.step()
    (reply,) = said
    assert json.loads(reply.payload)["id"] == "q1"
    assert json.loads(reply.payload)["error"]["code"] == "overloaded"


@pytest.fixture
def begun(unconnected, monkeypatch):
    """The requests that the planner that is not connected has begun to compute."""
    out = []
    monkeypatch.setattr(unconnected.inbox, "offer", lambda event, _: out.append(event.request) or True)
    return out


def answer_to(request, checkpoint):
    request.outputs[0] = np.ones(checkpoint.spec.output_shape(request.batches[0].shape), np.float32)
    return interface.AnswerRequest(request, Plan("bert", PlanVersion(1, 1), "single", ("a",), "a"), ())


def ask(unconnected, **delivery):
    body = json.dumps({"id": "q1", "text": "hello", **delivery}).encode()
    unconnected._handle_message(unconnected.topics.request("bert", "me"), body)


def test_a_repeated_request_is_computed_once_and_answered_on_each_of_its_topics(unconnected, said, begun, bert):
    topics = [unconnected.topics.response("bert", "me", name) for name in ("q1", "there")]
    ask(unconnected)
    ask(unconnected, reply_to=topics[1])
    ask(unconnected, top_k=3)
    while unconnected.reading.step():
        continue
    (request,) = begun
    (refused,) = said
    assert json.loads(refused.payload)["error"]["code"] == "id_in_use"
    unconnected._execute(answer_to(request, bert))
    while unconnected.answering.step():
        continue
    assert [reply.topic for reply in said[1:]] == topics
    assert all(json.loads(reply.payload)["ok"] for reply in said[1:])


def test_a_request_that_is_answered_while_its_repeat_is_read_is_computed_once(
    unconnected, said, begun, bert, monkeypatch
):
    ask(unconnected)
    assert unconnected.reading.step()
    read = unconnected.handler.read_request

    def read_slowly(*args):
        result = read(*args)
        unconnected._answer(answer_to(begun[0], bert))
        return result

    monkeypatch.setattr(unconnected.handler, "read_request", read_slowly)
    ask(unconnected)
    assert unconnected.reading.step()
    assert len(begun) == 1
    assert [json.loads(reply.payload)["ok"] for reply in said] == [True, True]


def test_a_request_that_is_taken_back_keeps_no_place_at_the_broker(unconnected, monkeypatch):
    acknowledged = []
    monkeypatch.setattr(BrokerConnection, "acknowledge", lambda _, receipt: acknowledged.append(receipt))
    topic, receipt = unconnected.topics.request("bert", "me"), Receipt(1, 7)
    unconnected.channel.handle_delivery(Delivery(topic, b'{"cancel": "q1"}', receipt, repeated=False))
    assert unconnected.reading.step()
    assert acknowledged == [receipt]


def test_each_client_has_its_turn_with_requests_and_with_answers(unconnected, said, begun):
    topics = unconnected.topics
    for client in ("greedy", "greedy", "greedy", "small"):
        unconnected._handle_message(topics.request("bert", client), b"not JSON")
    assert unconnected.reading.step()
    assert unconnected.reading.step()
    assert [reply.topic.split("/")[-2] for reply in said] == ["greedy", "small"]
    for client in ("greedy", "greedy", "small"):
        unconnected._handle_message(topics.request("bert", client), b'{"text": "a"}')
    while unconnected.reading.step():
        continue
    for job in sorted(begun, key=lambda request: request.key.client):
        unconnected._execute(interface.RefuseRequest(job, OverloadedError("no")))
    del said[:]
    while unconnected.answering.step():
        continue
    assert [reply.topic.split("/")[-2] for reply in said] == ["greedy", "small", "greedy"]


def test_the_network_thread_parses_no_request_even_to_refuse_it(unconnected, said):
    unconnected.reading = FairExecutor("reader", 0, unconnected._run_guarded, limit=0)
    unconnected.refusing = FairExecutor("refuser", 0, unconnected._run_guarded, limit=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hepti_mqtt.service.handler.parse", None)
        for name in ("q1", "q2"):
            unconnected._handle_message(unconnected.topics.request("bert", "me"), json.dumps({"id": name}).encode())
    assert (said, unconnected.decoder.counters) == ([], {"untold": 1})
    assert unconnected.refusing.step()
    assert json.loads(said[0].payload)["id"] == "q1"


def test_a_request_larger_than_all_that_may_wait_to_be_refused_is_refused_too(unconnected, said, monkeypatch):
    monkeypatch.setattr(planner, "MAX_UNREFUSED_BYTES", 10)
    unconnected.reading = FairExecutor("reader", 0, unconnected._run_guarded, limit=0)
    unconnected.refusing = FairExecutor("refuser", 0, unconnected._run_guarded, limit_bytes=10)
    unconnected._handle_message(unconnected.topics.request("bert", "me"), b'{"id": "q1", "text": "hello"}')
    assert unconnected.refusing.step()
    answer = json.loads(said[0].payload)
    assert (answer["id"], answer["error"]["code"]) == ("q1", "overloaded")


def test_messages_that_the_broker_drops_are_named_and_clients_asked_to_send_again(unconnected, caplog):
    said = []
    unconnected.control.publish = lambda topic, payload, *_: said.append((topic, decode_status(payload).state))
    unconnected.away.clear()
    for count in (b"7", b"7", b"9", b"no number"):
        unconnected._handle_message(DROPPED_TOPIC, count)
    for act in waiting(unconnected.inbox):
        act()
    assert [record.args[0] for record in caplog.records] == [2]
    assert said == [(unconnected.topics.planner_status(), "online")]


def test_a_broker_that_lost_the_planners_session_is_logged(unconnected, caplog):
    unconnected.channel._handle_state(Connected(5, None))
    unconnected.channel._handle_state(Connected(5, None, resumed=True))
    assert not caplog.records, "the first connection of a planner has no session"
    unconnected.channel._handle_state(Connected(5, None, resumed=False))
    assert len(caplog.records) == 1


def test_requests_that_wait_for_others_are_due_before_the_next_regular_tick(unconnected, monkeypatch):
    stop, handled = threading.Event(), []
    unconnected.inbox.post(stop.set)
    monkeypatch.setattr(type(unconnected.session), "due_s", 0.0)
    monkeypatch.setattr(unconnected, "_handle", lambda event: (handled.append(event), stop.set()))
    unconnected._serve(stop)
    assert handled == [Tick(has_backlog=True, heard_s=unconnected.control.heard_s)], (
        "what is in the inbox may be a heartbeat"
    )


def test_a_mistake_with_one_request_does_not_end_the_planner(run, listen, monkeypatch):
    ear = listen("clumsy")
    run("clumsy")
    ear.status("online")
    with monkeypatch.context() as patch:
        patch.setattr("hepti_mqtt.service.requests.read_input", None)
        assert ear.ask("bert", id="q1", text="hello")["error"]["code"] == "remote"
    assert ear.ask("bert", id="q2", text="")["error"]["code"] == "bad_request"


def test_a_bad_model_and_a_bad_pin_end_it(bert, tmp_path):
    model = bert.path
    for error, models, pins in (
        (ModelError, {"m": tmp_path / "nothing"}, PinOptions()),
        (ConfigError, {}, PinOptions()),
        (ConfigError, {"m": model}, PinOptions("magic")),
    ):
        with pytest.raises(error):
            run_planner(PlannerConfig(NOWHERE, "s", PlannerOptions(models, pins), state_dir=tmp_path))
