"""The planner in this process: models, what its inbox takes, its shell over a real broker."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from played_broker import PlayedBroker, usual
from site_processes import PATIENCE_S, Voice, free_port, poll

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.config.options import PinOptions, PlannerOptions
from hepti_mqtt.config.process import MAX_SUBJECTS
from hepti_mqtt.core.errors import ConfigError, ModelError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.planner import EarlierPlan
from hepti_mqtt.protocol import frames, messages
from hepti_mqtt.protocol.messages import Status, decode_status, encode_status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.fleet import LastWillDebounce
from hepti_mqtt.runtime.coordinator.interface import DeviceFrame, DeviceMessage, DeviceStatus
from hepti_mqtt.runtime.coordinator.session import CoordinatorSession
from hepti_mqtt.service import handler, planner
from hepti_mqtt.service.channel import RequestChannel
from hepti_mqtt.service.decoder import MessageDecoder, PlannerStatus, RawRequest, RetainedPlan
from hepti_mqtt.service.last_state import read_state, save_state
from hepti_mqtt.service.planner import run_planner
from hepti_mqtt.service.setup import PlannerConfig, open_models, state_directory
from hepti_mqtt.service.threads import FairExecutor
from hepti_mqtt.transport import base
from hepti_mqtt.transport.base import SENDER_EVENTS, Connected
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.codec import Connack, Connect
from hepti_mqtt.transport.url import BrokerUrl


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "planner").write_text("in the way")
    with pytest.raises(ConfigError):
        state_directory("s", tmp_path)


NOWHERE = BrokerUrl.parse("mqtt://127.0.0.1:1")


def test_of_several_models_one_that_cannot_have_the_weights_keeps_f32_and_the_only_one_ends_the_planner(
    tmp_path, bert, caplog
):
    def opened(**models):
        with contextlib.ExitStack() as stack:
            options = PlannerOptions(models, PinOptions(weights="w8a8"))
            models = open_models(PlannerConfig(NOWHERE, "s", options), stack)
            return {name: model.pins.weight_dtype for name, model in models.items()}

    cnn = make_model("tiny-resnet", tmp_path / "cnn", seed=1)
    with pytest.raises(ConfigError):
        opened(cnn=cnn)
    assert opened(cnn=cnn, bert=bert.path) == {"cnn": "f32", "bert": "w8a8"}
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "model cnn" in said


HOME = Topics("home")
CAPS = messages.Caps("a", 1, 4, 4, 1 << 30, 1 << 20, "plain", "0", {}, 0, 4)
BEAT = messages.Heartbeat(1, 2, 0.0, 1 << 30, None, None, None, 1.0, 0)

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
    status = messages.Status("online", 1)
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
        """Return the next status of the planner with this state."""
        return decode_status(
            self.until(self.topics.planner_status(), lambda p: bool(p) and decode_status(p).state == state)
        )

    def say_status(self, status):
        self.say(self.topics.planner_status(), encode_status(status), retain=True)

    def request(self, client="me", **data):
        self.say(self.topics.request("bert", client), json.dumps(data).encode())

    def error(self, name):
        """Return the code of the error that answers a request."""
        return json.loads(self.until(self.topics.response("bert", "me", name)))["error"]["code"]


@pytest.fixture
def listen(url):
    with contextlib.ExitStack() as stack:
        yield lambda site: stack.enter_context(Listener(url, site))


@pytest.fixture
def run(url, bert, tmp_path):
    """Run a planner of a site on a thread; its future has the outcome. Planners that still run end with the test."""
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:

        def start(site, **how):
            stop = threading.Event()
            stack.callback(stop.set)
            options = PlannerOptions({"bert": bert.path}, home_assistant=None)
            return stop, pool.submit(run_planner, PlannerConfig(url, site, options, tmp_path, **how), stop)

        yield start


@pytest.fixture
def serve(run, listen):
    """Run the planner of a site; return a listener, which has heard that the planner is online."""

    def start(site, **how):
        ear = listen(site)
        run(site, **how)
        ear.status("online")
        return ear

    return start


def test_it_says_that_it_is_there_and_takes_everything_back(run, listen):
    ear = listen("coming")
    ear.say(ear.topics.plan("former"), b"of a model that is no longer served", retain=True)
    stop, outcome = run("coming")
    ear.until(ear.topics.plan("former"), lambda payload: payload == b"")
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


def test_late_wills_are_contradicted_and_a_newer_planner_takes_over(run, listen):
    ear = listen("contested")
    _, outcome = run("contested")
    own = ear.status("online")
    for late in (Status("offline", 7), replace(own, state="offline")):
        ear.say_status(late)
        ear.status("offline")
        assert ear.status("online") == own
    newer = Status("online", 7, term=own.term + 1)
    ear.say_status(newer)
    assert ear.status("online") == newer
    assert ear.status("online") == own, "a single one may be forged"
    ear.say_status(newer)
    with pytest.raises(ConfigError):
        outcome.result(PATIENCE_S)
    last = listen("contested")
    assert last.status("online") == newer, "the status of the newer one is left alone"


@pytest.mark.parametrize(
    "limits", [{"UNREAD_BYTES": 1}, {"UNREAD_BYTES": 1, "MAX_UNREFUSED_BYTES": 10}, {"INBOX": 0}], ids=str
)
def test_a_request_for_which_there_is_no_room_is_refused_under_its_id(serve, monkeypatch, limits):
    for name, value in limits.items():
        monkeypatch.setattr(planner, name, value)
    ear = serve("busy")
    ear.request(id="q1", text="hello")
    assert ear.error("q1") == "overloaded"


def test_a_device_that_floods_keeps_no_word_of_another_out(serve, monkeypatch, caplog):
    events, gate = [], threading.Event()
    handle, version = LastWillDebounce.handle, PlanVersion(7, 1)

    def gated(debounce, event, now):
        events.append(event)
        if isinstance(event, DeviceStatus):
            assert gate.wait(PATIENCE_S)
        return handle(debounce, event, now)

    monkeypatch.setattr(LastWillDebounce, "handle", gated)
    ear = serve("flooded")
    will = Status("offline", 3)
    words = [
        messages.Ready(1, "bert", version, 5, bytes(8)),
        messages.PrepareFailed(1, "bert", version, "memory", "no room", 5),
        messages.RunFailed("bert", version, 5, "device", "broken"),
        messages.RequestTiles("bert", (b"\0" * 32,)),
    ]
    body = np.ones(1, np.float32)
    output = frames.Frame("output", "bert", version, 5, source="a", dtype="f32", shape=(1,), body=body)
    ear.say(ear.topics.status("first"), encode_status(will))  # the session thread waits at it
    for _ in range(SENDER_EVENTS + 2):
        ear.say(ear.topics.reports("loud"), messages.encode(words[0]))
    ear.say(ear.topics.status("a"), encode_status(will))
    for word in [*map(messages.encode, words), frames.encode(output)]:
        ear.say(ear.topics.reports("a"), word)
    poll(lambda: sum("loud" in record.getMessage() for record in caplog.records) == 2, "two words of the flood dropped")
    gate.set()
    poll(lambda: any(isinstance(event, DeviceFrame) for event in events), "the last word")
    said = [event for event in events if getattr(event, "device", "") in ("a", "loud")]
    assert said[SENDER_EVENTS:-1] == [DeviceStatus("a", will), *(DeviceMessage("a", word) for word in words)]
    assert said[-1].frame.kind == "output"


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO], ids=logging.getLevelName)
def test_invariants_are_checked_in_service_at_debug_level(run, listen, monkeypatch, caplog, level):
    site = f"level-{level}"
    ear, log = listen(site), logging.getLogger(f"planner at {level}")
    log.setLevel(level)
    monkeypatch.setattr(CoordinatorSession, "assert_invariants", lambda _: 1 // 0)
    run(site, log=log)
    if level == logging.DEBUG:
        poll(lambda: any(record.exc_info for record in caplog.records), "a broken invariant")
    else:
        ear.status("online")
    errors = {record.exc_info[0] for record in caplog.records if record.exc_info}
    assert errors == ({ZeroDivisionError} if level == logging.DEBUG else set())


def test_a_request_that_is_taken_back_keeps_no_place_at_the_broker(serve, monkeypatch):
    acknowledged = queue.SimpleQueue()
    monkeypatch.setattr(BrokerConnection, "acknowledge", lambda _, receipt: acknowledged.put(receipt))
    ear = serve("cancels")
    ear.request(cancel="q1")
    assert acknowledged.get(timeout=PATIENCE_S)


def test_each_client_has_its_turn_with_requests_and_with_answers(serve, monkeypatch):
    """Turns themselves: tests/unit/service/test_service_threads.py."""
    clients = set()
    for method in ("submit", "submit_or_run"):
        act = getattr(FairExecutor, method)

        def noted(executor, client, *how, act=act, **more):
            clients.add(client)
            return act(executor, client, *how, **more)

        monkeypatch.setattr(FairExecutor, method, noted)
    ear = serve("fair")
    for client in ("other", "me"):
        ear.request(client, id="q1", text="a", deadline_ms=1)
    assert ear.error("q1")
    assert {"me/bert", "other/bert", "me"} <= clients


def test_the_network_thread_parses_no_request_even_to_refuse_it(serve, monkeypatch, caplog):
    threads, gate, refuse = [], threading.Event(), handler.RequestHandler.refuse_unread

    def gated(*raw_and_error):
        threads.append(threading.current_thread().name)
        assert gate.wait(PATIENCE_S)
        return refuse(*raw_and_error)

    monkeypatch.setattr(handler.RequestHandler, "refuse_unread", gated)
    monkeypatch.setattr(handler, "parse", None)
    monkeypatch.setattr(planner, "UNREAD_BYTES", 1)
    monkeypatch.setattr(planner, "MAX_UNREFUSED", 1)
    ear = serve("refusing")
    ear.request(id="q1")
    poll(lambda: threads, "the first is being refused")
    for name in ("q2", "q3"):
        ear.request(id=name)
    poll(lambda: "untold" in caplog.text, "a request that not even a refusal has room for")
    gate.set()
    assert [ear.error(name) for name in ("q1", "q2")] == ["overloaded"] * 2
    assert {name.rpartition("-")[0] for name in threads} == {"planner-refuser"}


def test_messages_that_the_broker_drops_are_named_and_clients_asked_to_send_again(serve, monkeypatch, caplog):
    monkeypatch.setattr(planner, "DROPPED_TOPIC", "dropped")  # clients cannot publish the broker's own
    ear = serve("dropping")
    for count in (b"7", b"7", b"9", b"no number"):
        ear.say("dropped", count)
    ear.status("online")
    assert [record.args[0] for record in caplog.records if record.args and record.args[0] == 2]


def test_a_broker_that_lost_the_planners_session_is_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(base, "BACKOFF_S", (0.01, 0.05))
    states, answers = queue.SimpleQueue(), SimpleNamespace(publish=lambda *_: None)

    def answer(event, connection):
        return Connack(0, present=connection == 1) if isinstance(event, Connect) else usual(event)

    with contextlib.closing(PlayedBroker(answer)) as broker:
        url = BrokerUrl.parse(broker.url)
        channel = RequestChannel(url, "p", tmp_path / "r", answers, MessageDecoder("home"), print, states.put)
        with contextlib.closing(channel):
            channel.connect()
            for warnings in (0, 0, 1):  # a planner has no session before its first connection
                while not isinstance(states.get(timeout=PATIENCE_S), Connected):
                    continue
                assert len(caplog.records) == warnings
                broker.cut()


def test_requests_that_wait_for_others_are_due_before_the_next_regular_tick(run, listen, monkeypatch):
    ticks = queue.SimpleQueue()
    monkeypatch.setattr(planner, "TICK_S", 1000.0)
    monkeypatch.setattr(CoordinatorSession, "due_s", 0.0)
    monkeypatch.setattr(LastWillDebounce, "handle", lambda _, event, now: ticks.put(event) or [])
    run("due")
    while not getattr(ticks.get(timeout=PATIENCE_S), "has_backlog", False):  # what waits may be a heartbeat
        continue


def test_a_mistake_with_one_request_does_not_end_the_planner(serve, monkeypatch):
    ear = serve("clumsy")
    with monkeypatch.context() as patch:
        patch.setattr("hepti_mqtt.service.requests.read_input", None)
        ear.request(id="q1", text="hello")
        assert ear.error("q1") == "remote"
    ear.request(id="q2", text="")
    assert ear.error("q2") == "bad_request"


def test_a_planner_waits_for_its_broker(bert, tmp_path):
    port, stop, waits, log = free_port(), threading.Event(), threading.Event(), logging.Logger("late")
    url, options = BrokerUrl.parse(f"mqtt://127.0.0.1:{port}"), PlannerOptions({"bert": bert.path}, home_assistant=None)
    log.addFilter(lambda record: record.levelno < logging.WARNING or not waits.set())
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(run_planner, PlannerConfig(url, "late", options, tmp_path, log=log), stop)
        try:
            assert waits.wait(PATIENCE_S), "it says that it waits"
            with start_broker(port=port), Listener(url, "late") as ear:
                ear.status("online")
        finally:
            stop.set()
        assert outcome.result(PATIENCE_S) is None


def test_a_bad_model_and_a_bad_pin_end_it(bert, tmp_path):
    model = bert.path
    for error, models, pins in (
        (ModelError, {"m": tmp_path / "nothing"}, PinOptions()),
        (ConfigError, {}, PinOptions()),
        (ConfigError, {"m": model}, PinOptions("magic")),
    ):
        with pytest.raises(error):
            run_planner(PlannerConfig(NOWHERE, "s", PlannerOptions(models, pins), state_dir=tmp_path))
