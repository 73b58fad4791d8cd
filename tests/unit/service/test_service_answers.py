"""Answers: from the runs of a request to JSON, by a broker that may be full or deaf, over the lives of a planner."""

import base64
import gc
import json
import threading
import time
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from service_support import CLUSTER, plan_for
from sites import sent_bytes

from hepti_mqtt.config.process import MAX_SUBJECTS
from hepti_mqtt.core import errors
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.cost.simulator import TopicNames, simulate
from hepti_mqtt.protocol.messages import missing_answer_key
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.coordinator.batches import concatenate
from hepti_mqtt.runtime.coordinator.interface import AnswerRequest, RefuseRequest
from hepti_mqtt.runtime.coordinator.plans import PlanSnapshot
from hepti_mqtt.runtime.coordinator.requests import Expectation, Pins, Request, RequestKey, RunStats, WorkItem
from hepti_mqtt.runtime.coordinator.runs import OtherWork, Run, RunKind, RunTimes
from hepti_mqtt.service import channel
from hepti_mqtt.service import handler as desk_module
from hepti_mqtt.service.answers import decode_output
from hepti_mqtt.service.channel import CLIENT_UNDELIVERED, RESEND_S, UNDELIVERED, Journal, RequestChannel
from hepti_mqtt.service.decoder import MessageDecoder, RawRequest
from hepti_mqtt.service.forecast import Forecasts
from hepti_mqtt.service.handler import OpenModel, Reply, RequestHandler, RequestIdentity
from hepti_mqtt.service.requests import MAX_REQUEST_BYTES, read_input
from hepti_mqtt.strategies.plan_programs import device_programs
from hepti_mqtt.transport.base import Delivery, Receipt
from hepti_mqtt.transport.url import BrokerUrl

TOPICS, NAMES = Topics("home"), TopicNames("home", "bert")


@pytest.fixture
def forecasts(bert):
    return Forecasts("home", {"bert": bert.spec}, lambda: 100.0)


@pytest.fixture
def desk(bert, forecasts):
    return RequestHandler("home", {"bert": OpenModel("bert", bert, Pins())}, forecasts)


def foreseen(forecasts, answer):
    """Return an Answer after the forecasts of its runs are ready."""
    ready = []
    forecasts.call_when_ready(answer.stats, lambda: ready.append(True))
    assert forecasts.step()
    assert ready
    return answer


def ask(desk, data, model="bert", client="me", now=100.0):
    payload = data if isinstance(data, bytes) else json.dumps(data).encode()
    return desk.read_request(RawRequest(model, client, payload), now)


def answer_of(reply):
    assert isinstance(reply, Reply)
    return json.loads(reply.payload)


def ran(items, shape, plan, begun_s=100.0):
    """Return a run of two devices with their reports."""
    run = Run(1, items, shape, plan, CLUSTER, RunTimes(begun_s), 100, OtherWork(alone=True), RunKind((1, 32)))
    run.answers.reports = {"a": (2000, 500, 70), "b": (1000, 1500, 30)}
    return run


def finish(job, checkpoint, outputs=None, plans=None, begun_s=100.0):
    """Return the Answer of a request after all of its runs."""
    for place, chunk in enumerate(job.batches):
        plan = plans[place] if plans else plan_for(checkpoint.spec)
        job.outputs[place] = outputs[place] if outputs else np.ones((len(chunk.shape.sizes), 32), np.float32)
        job.stats.append(ran((WorkItem(job, place),), chunk.shape, plan, begun_s).stats())
    return AnswerRequest(job, job.stats[-1].plan, tuple(job.stats))


def exact_bytes(checkpoint, plan, shape):
    return sent_bytes(NAMES, checkpoint.spec, shape, device_programs(checkpoint.spec, plan, shape))


def exact_s(checkpoint, plan, shape):
    return simulate(NAMES, checkpoint.spec, shape, device_programs(checkpoint.spec, plan, shape), CLUSTER).seconds


def test_a_bare_text_is_the_same_request_and_its_answers_have_one_topic(desk, bert):
    text = 'He said "hi"\n{and left}'
    bare = desk.read_request(RawRequest("bert", "me", text.encode(), bare=True), 100.0)
    assert np.array_equal(bare.batches[0].inputs, ask(desk, {"text": text}).batches[0].inputs)
    reply = desk.encode_answer(finish(bare, bert), 100.1)
    assert (reply.topic, answer_of(reply)["ok"]) == (TOPICS.text_response("bert", "me"), True)


@pytest.mark.parametrize(
    "payload",
    [
        *(b"{'text': 'a'}", b'{"text": "He said "hi""}', b' {"id": "q1", "text": "a"}', b"\xff", b" \n "),
        b"a" * (MAX_REQUEST_BYTES + 1),
    ],
    ids=range(6),
)
def test_a_bare_text_that_is_none_is_refused_on_the_same_topic(desk, payload):
    reply = desk.read_request(RawRequest("bert", "me", payload, bare=True), 100.0)
    code = answer_of(reply)["error"]["code"]
    assert (reply.topic, code) == (TOPICS.text_response("bert", "me"), "bad_request")


def test_an_embedding_is_told_to_the_last_bit_in_nine_digits(desk, bert, forecasts):
    bits = np.random.default_rng(0).integers(0, 2**32, 32, np.uint32).view(np.float32)
    row = np.where(np.isfinite(bits), bits, 0)
    row[:3] = 16777217, 1e-45, 0.1
    job = ask(desk, {"text": "hello"})
    reply = desk.encode_answer(foreseen(forecasts, finish(job, bert, [row[None]])), now=100.5)
    embedding = answer_of(reply)["result"]["embedding"]
    assert np.array(embedding, np.float32).tolist() == row.tolist()
    assert b"0.100000001," in reply.payload


def test_an_answer_tells_everything(desk, bert, forecasts):
    job = ask(desk, {"texts": ["hello world", "more"], "id": "q1"})
    reply = desk.encode_answer(foreseen(forecasts, finish(job, bert)), now=100.5)
    data, plan, shape = answer_of(reply), plan_for(bert.spec), job.batches[0].shape
    assert missing_answer_key(data) is None
    assert data["plan"]["predicted_ms"] == pytest.approx(4.0)
    devices = data["plan"]["devices"]
    assert sum(devices.values()) == pytest.approx(1.0)
    assert devices["a"] > devices["b"] > 0
    assert data["predicted_ms"] == pytest.approx(exact_s(bert, plan, shape) * 1e3)
    assert data["result"]["results"][0]["embedding"] == [1.0] * 32
    assert (reply.topic, data["id"], data["ok"]) == (TOPICS.response("bert", "me", "q1"), "q1", True)
    assert (data["plan"]["id"], data["plan"]["version"]) == ("9.1", [9, 1])
    assert (data["tokens"], data["batched_with"], data["forecast"]) == (shape.size, 0, "simulated")
    assert (data["compute_ms"], data["wait_ms"]) == ({"a": 2.0, "b": 1.0}, {"a": 0.5, "b": 1.5})
    assert (data["bytes_on_wire"], data["predicted_bytes"]) == (200, exact_bytes(bert, plan, shape))
    assert data["latency_ms"] == pytest.approx(500.0)


def test_an_answer_tells_with_how_many_others_it_ran_and_what_the_run_took(desk, bert, forecasts):
    jobs = [ask(desk, {"text": text}) for text in ("hello world", "more")]
    items = tuple(WorkItem(job, 0) for job in jobs)
    whole = concatenate([item.batch for item in items]).shape
    run = ran(items, whole, plan_for(bert.spec))
    for job in jobs:
        job.outputs[0] = np.ones((1, 32), np.float32)
        answer = foreseen(forecasts, AnswerRequest(job, run.plan, (run.stats(),)))
        data = answer_of(desk.encode_answer(answer, now=100.5))
        assert (data["batched_with"], data["tokens"]) == (1, job.batches[0].shape.size)
        assert data["compute_ms"] == {"a": 2.0, "b": 1.0}
        assert data["predicted_bytes"] == exact_bytes(bert, run.plan, whole)


def test_runs_under_several_plans_are_each_foretold_under_their_own(desk, bert, forecasts):
    job = ask(desk, {"ids": [[1] * bert.spec.max_tokens, [2] * 4]})
    plans = [plan_for(bert.spec, 1), replace(plan_for(bert.spec, 2), shares={"rows": (1.0, 1.0)})]
    data = answer_of(desk.encode_answer(foreseen(forecasts, finish(job, bert, plans=plans)), now=101.0))
    exact = [exact_bytes(bert, plan, one.shape) for plan, one in zip(plans, job.batches, strict=True)]
    assert data["predicted_bytes"] == sum(exact)
    assert (data["runs"], data["compute_ms"]["a"], data["plan"]["id"]) == (2, 4.0, "9.2")


def test_a_prediction_has_what_the_planner_took_of_late_and_what_runs_had_taught(desk, bert, forecasts):
    alone, taught = [], Expectation(1.5, 1.2, 1.8)
    for number, begun_s in enumerate((100.03, 100.02, 100.5, 100.0)):  # the third one has waited for others
        job = ask(desk, {"text": "hello", "id": f"q{number}"})
        answer = foreseen(forecasts, finish(job, bert, begun_s=begun_s))
        answer = replace(answer, stats=tuple(replace(stats, expectation=taught) for stats in answer.stats))
        data = answer_of(desk.encode_answer(answer, now=101.0))
        alone.append(data["predicted_ms"])
    assert [ms - alone[3] for ms in alone] == pytest.approx([30.0, 20.0, 20.0, 0.0])
    estimates = [data[f"{name}_ms"] for name in ("predicted_p10", "expected", "predicted_p90")]
    assert estimates == pytest.approx([factor * alone[3] for factor in (1.2, 1.5, 1.8)])


def test_a_request_for_the_plan_alone_is_told_the_forecast(desk, bert, forecasts):
    job = ask(desk, {"texts": ["hello world", "more"], "want": "plan", "id": "q1"})
    plan, shape = plan_for(bert.spec), job.batches[0].shape
    answer = AnswerRequest(job, plan, (RunStats(plan, CLUSTER, shape, {}, {}, {}, 0),))
    data = answer_of(desk.encode_answer(foreseen(forecasts, answer), now=100.5))
    assert data["predicted_ms"] == 1e3 * exact_s(bert, plan, shape)
    assert data["predicted_bytes"] == exact_bytes(bert, plan, shape)
    assert (data["result"], data["runs"], data["bytes_on_wire"], data["compute_ms"]) == (None, 0, 0, {})


WRONG = (
    *({"text": ""}, {"text": "x", "image": "y"}, {"text": "x", "colour": 1}, {"text": "x", "strategy": "magic"}),
    *({"text": "x", "reply_to": f"hepti/v1/home/{topic}"} for topic in ("dev/a/cmd", "infer/bert/res/you/q")),
)


@pytest.mark.parametrize(
    ("payload", "model", "id_", "code"),
    [
        *((json.dumps({"id": "q", **wrong}), "bert", "q", "bad_request") for wrong in WRONG),
        ('{"id": "q7", "text": "LARGE"}', "bert", "q7", "bad_request"),
        ('{"text": "LARGE", "id" :"q7"}', "bert", "q7", "bad_request"),
        ('{"id": "q", "text": ' + "[" * 990 + "]" * 990 + "}", "bert", "q", "bad_request"),
        ("{broken", "bert", None, "bad_request"),
        ('{"id": "q", "text": "x"}', "nothing", "q", "unknown_model"),
    ],
)
def test_what_cannot_be_read_is_answered_under_its_id_if_there_is_one(desk, payload, model, id_, code):
    large = '\\"id\\": \\"no\\" ' * 1_500_000  # quotes within a text are escaped: they begin no id
    reply = ask(desk, payload.replace("LARGE", large).encode(), model)
    assert reply.topic.startswith(TOPICS.response(model, "me", id_ or "x").removesuffix("x"))
    assert (answer_of(reply)["id"], answer_of(reply)["error"]["code"]) == (id_, code)


def test_hidden_states_of_several_chunks_are_one_array(desk, bert):
    limit = bert.spec.max_tokens
    job = ask(desk, {"ids": [[1] * limit, [2] * 3], "want": "hidden"})
    values = np.arange((limit + 3) * 32, dtype=np.float32).reshape(-1, 32)
    data = answer_of(desk.encode_answer(finish(job, bert, outputs=[values[:limit], values[limit:]]), now=101.0))
    assert data["result"]["shape"] == [limit + 3, 32]
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(data["result"]["base64"]), "<f4").reshape(-1, 32), values
    )


def test_outputs_that_are_not_the_models_become_errors(desk, bert):
    ids = [[1] * bert.spec.max_tokens, [2]]  # two runs
    for shapes, value, error in (
        ([(1, 32), (1, 31)], 1.0, errors.RemoteError),
        ([(7, 3), (7, 3)], 1.0, errors.WireError),
        *(([(1, 32), (1, 32)], value, errors.ModelError) for value in (np.nan, np.inf, -np.inf)),
    ):
        outputs = [np.ones(shapes[0], np.float32), np.full(shapes[1], value, np.float32)]
        answer = finish(ask(desk, {"ids": ids}), bert, outputs)
        assert answer_of(desk.encode_answer(answer, now=101.0))["error"]["code"] == error.code


def test_an_answer_never_waits_for_its_forecast(desk, bert, forecasts):
    forecasts.set_plans((PlanSnapshot(plan_for(bert.spec), CLUSTER),))
    job = ask(desk, {"text": "hello"})
    desk.request_forecast(job)  # nobody takes a step of it
    plan = replace(plan_for(bert.spec), predicted_bytes=1000, predicted_tokens=2 * job.batches[0].shape.size)
    data = answer_of(desk.encode_answer(finish(job, bert, plans=[plan]), now=101.0))
    assert (data["forecast"], data["predicted_bytes"]) == ("estimated", 500)
    assert data["predicted_ms"] == pytest.approx(2.0)
    assert data["plan"]["devices"] == {"a": 0.75, "b": 0.25}


def test_what_waits_is_bounded_in_total_until_it_is_answered(bert, forecasts, monkeypatch):
    monkeypatch.setattr(desk_module, "MAX_WAITING_BYTES", 100)
    desk = RequestHandler("home", {"bert": OpenModel("bert", bert, Pins())}, forecasts)
    first = ask(desk, {"ids": [7] * 20})
    assert answer_of(ask(desk, {"ids": [7] * 20}))["error"]["code"] == "overloaded"
    assert isinstance(ask(desk, {"ids": [7] * 5}), Request)
    desk.encode_answer(finish(first, bert), 101.0)
    del first
    gc.collect()  # a traceback of the refusal may hold the answer's frame
    assert isinstance(ask(desk, {"ids": [7] * 20}), Request)


def test_an_operator_may_forbid_pins(bert, forecasts):
    desk = RequestHandler("home", {"bert": OpenModel("bert", bert, Pins())}, forecasts, "none")
    job = ask(desk, {"text": "hello", "deadline_ms": 250})
    assert (job.deadline_s, ask(desk, {"text": "hello"}).deadline_s < float("inf")) == (100.25, True)
    for pin in ({"strategy": "auto"}, {"weights": "f16"}, {"devices": ["a"]}):
        assert answer_of(ask(desk, {"text": "hello", **pin}))["error"]["code"] == "bad_request"


TOPIC = "hepti/v1/home/infer/m/req/me"


class Answers:
    """A connection that answers go out on; room: for how many more. limit: of bytes, that the broker takes."""

    def __init__(self):
        self.room, self.limit, self.sent = 10_000, 10_000_000_000, []

    def publish(self, topic, payload, qos, taken=None):
        if len(payload) > self.limit:
            raise errors.PacketLimitError("it is too large")
        if not self.room:
            raise errors.NetworkError("it is full")
        self.room -= 1
        self.sent.append((topic, payload, taken))

    def taken(self, heard):
        """The broker has all that was sent; return the payloads."""
        sent, self.sent = self.sent, []
        for _, _, taken in sent:
            if taken is not None:
                taken(heard)
        return [payload for _, payload, _ in sent]


class Site:
    """The post of a planner that is not connected, and what it does. settled: packet ids of acknowledged requests."""

    def __init__(self, place, monkeypatch):
        self.now, self.answers, self.requests, self.settled = 100.0, Answers(), [], []
        broker = Mock(acknowledge=lambda receipt: self.settled.append(receipt.packet))
        monkeypatch.setattr(channel, "BrokerConnection", lambda *_, **__: broker)
        monkeypatch.setattr(channel, "PROBE_S", inf)
        monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: self.now))
        url, decoder = BrokerUrl.parse("mqtt://127.0.0.1:1"), MessageDecoder("home")
        self.post = RequestChannel(url, "p", place, self.answers, decoder, self.requests.append, lambda _state: None)
        self.counters = decoder.counters

    def pass_time(self, seconds=RESEND_S):
        """Send the answers that are due after a time."""
        self.now += seconds
        self.post.resend_due(self.now)

    def answer(self, packet, payload=b"{}", client="me"):
        """Answer a request that the broker keeps."""
        request = RawRequest("m", client, b"{}", Delivery(TOPIC, b"{}", Receipt(1, packet), repeated=False))
        self.post.send(Reply("res", payload, RequestKey("m", client, f"q{packet}")), [request])


@pytest.fixture
def site(tmp_path, monkeypatch):
    new_site = Site(tmp_path / "requests", monkeypatch)
    yield new_site
    new_site.post.close()


def test_a_request_that_the_broker_retains_is_acknowledged_and_not_computed(site, caplog):
    """It would be computed again at every start and reconnection."""
    for packet, topic in enumerate((TOPIC, TOPIC, f"{TOPIC}2")):
        site.post.handle_delivery(Delivery(topic, b"{}", Receipt(1, packet), repeated=False, retained=True))
    assert (site.requests, site.settled, site.counters["retained"]) == ([], [0, 1, 2], 3)
    assert len(caplog.records) == 2, "once of each topic"
    site.post.handle_delivery(Delivery(TOPIC, b"{}", Receipt(1, 3), repeated=False))
    assert (len(site.requests), site.settled) == (1, [0, 1, 2])
    for n in range(MAX_SUBJECTS + 10):
        site.post.handle_delivery(Delivery(f"{TOPIC}{n}", b"{}", None, repeated=False, retained=True))
    assert len(caplog.records) == MAX_SUBJECTS, "they do not fill the log"


def test_a_request_that_is_neither_answered_nor_waiting_is_warned_of(site):
    """Some of them fill what the broker delivers at once; one whose answer nobody hears yet is not lost."""
    lost, waits = [RequestKey("m", "me", name) for name in ("lost", "waits")]
    for packet in (1, 2):
        site.post.handle_delivery(Delivery(TOPIC, b"{}", Receipt(1, packet), repeated=False))
        site.post.begin(site.requests[-1])
    site.post.journal.record_waiting(site.requests[1], RequestIdentity(waits, b""), "to")
    site.pass_time(0)
    assert (site.post.unacknowledged, site.counters["unacknowledged"]) == (2, 0)
    site.now += 2 * channel.LOST_S
    site.post.send(Reply("answers", b"{}", waits), [raw for _, raw in site.post.journal.take_waiting(waits)])
    for _ in range(2):
        site.pass_time(0)
    assert site.counters["unacknowledged"] == 1, "one waits for its answer, the other is lost"
    while not site.settled:
        site.answers.taken(heard=False)
        site.pass_time()
    assert (site.settled, site.post.unacknowledged, site.counters["unacknowledged"]) == ([2], 1, 1)
    site.post.journal.record_waiting(site.requests[0], RequestIdentity(lost, b""), "to")
    site.post.journal.settle([raw for _, raw in site.post.journal.take_waiting(lost)])
    assert site.post.unacknowledged == 0


@pytest.mark.parametrize(
    ("topic", "to"),
    [
        ("hepti/v1/home/infer/m/req/Anna.K", "hepti/v1/home/infer/m/res/Anna.K/q1"),
        ("hepti/v1/home/infer/MiniLM/req/me", "hepti/v1/home/infer/MiniLM/res/me/q1"),
    ],
)
def test_a_request_under_a_name_that_cannot_be_is_refused_where_its_sender_reads(site, caplog, topic, to):
    for packet in range(3):
        site.post.handle_delivery(Delivery(topic, b'{"id": "q1", "text": "a"}', Receipt(1, packet), repeated=False))
    for other in ("hepti/v1/home/infer/m/req/\n", "hepti/v1/home/infer//req/me", "elsewhere/infer/M/req/me"):
        site.post.handle_delivery(Delivery(other, b"{}", None, repeated=False))
    assert (site.requests, site.settled, len(caplog.records)) == ([], [0, 1, 2], 1)
    assert [sent_to for sent_to, _, _ in site.answers.sent] == [to] * 3
    answer = json.loads(site.answers.taken(heard=True)[0])
    assert (answer["id"], answer["error"]["code"]) == ("q1", "bad_name")


@pytest.mark.parametrize("full_s", [0.0, 2 * channel.RESEND_FOR_S])
def test_an_answer_that_nobody_hears_goes_out_again_for_a_while(site, full_s):
    """The while begins when there is room for it."""
    site.answers.room = 0 if full_s else 10
    site.answer(1)
    site.now += full_s
    site.answers.room = 100
    site.pass_time(0)
    until = site.now + channel.RESEND_FOR_S
    while site.now <= until:
        assert site.answers.taken(heard=False) == [b"{}"]
        assert not site.settled
        site.pass_time()
    site.answers.taken(heard=False)
    assert site.settled == [1]


def test_requests_of_a_client_that_does_not_listen_do_not_fill_the_broker(site):
    for packet in range(CLIENT_UNDELIVERED):
        site.answer(packet)
    site.answers.taken(heard=False)
    assert not site.settled, "as when a broker has been killed, and all readers are on their way back"
    for packet in range(CLIENT_UNDELIVERED, CLIENT_UNDELIVERED + 100):
        site.answer(packet)
    site.answers.taken(heard=False)
    assert site.settled == list(range(CLIENT_UNDELIVERED, CLIENT_UNDELIVERED + 100))
    site.pass_time()
    site.answers.taken(heard=True)
    assert sorted(site.settled) == list(range(CLIENT_UNDELIVERED + 100)), "one that is heard makes room"
    del site.settled[:]
    site.answer(1000)
    site.answers.taken(heard=False)
    assert not site.settled


def test_answers_that_nobody_hears_fill_no_memory(site):
    for packet in range(3):
        site.answer(packet, b"{%d" % packet + b" " * (channel.CLIENT_UNDELIVERED_BYTES // 2))
    site.answers.taken(heard=False)
    assert site.settled == [1, 2]
    site.pass_time()
    site.answers.taken(heard=True)
    site.answer(3, b" " * (2 * channel.CLIENT_UNDELIVERED_BYTES))
    site.answers.taken(heard=False)
    assert site.settled == [1, 2, 0], "one waits, however large"


@pytest.mark.parametrize("size", [10, channel.UNDELIVERED_BYTES // 100], ids=["many", "large"])
def test_clients_that_do_not_listen_push_out_no_answer_of_one_that_does(site, size):
    site.answer(0, client="late")
    for packet in range(1, 2 * UNDELIVERED):
        site.answer(packet, b" " * size, client=f"deaf-{packet % 5}")
    site.answers.taken(heard=False)
    assert 0 not in site.settled
    kept = 2 * UNDELIVERED - len(site.settled)
    assert kept <= UNDELIVERED
    assert (kept - 1) * size <= channel.UNDELIVERED_BYTES
    site.pass_time(3.0)
    assert b"{}" in site.answers.taken(heard=True)


def test_an_answer_that_finds_no_room_goes_out_when_there_is_some(site, caplog):
    site.answers.room = 1
    for packet in range(4):
        site.answer(packet, b"%d" % packet)
    assert site.answers.taken(heard=True) == [b"0"]
    site.pass_time()
    assert site.counters["unpublished"] == 4, "who finds no room is the last that is tried"
    site.answers.room = 10
    while len(site.settled) < 4:
        site.pass_time()
        site.answers.taken(heard=True)
    assert sorted(site.settled) == [0, 1, 2, 3]
    assert "it is full" in caplog.text
    assert len(caplog.records) == 3, "the 1st, the 2nd and the 4th"


@pytest.mark.parametrize("limit", [1000, 10])
def test_an_answer_that_the_broker_does_not_take_becomes_an_error_or_ends(site, limit):
    site.answers.limit = limit
    site.answer(1, b'{"id": "q1"}' + b" " * 2000)
    said = [json.loads(payload) for payload in site.answers.taken(heard=True)]
    assert [(one["id"], one["ok"], one["error"]["code"]) for one in said] == (
        [("q1", False, "packet_limit")] if limit > 100 else []
    )
    assert site.settled == [1], "or it would come again for ever"


KEY = RequestKey("m", "me", "q1")


@pytest.fixture
def live(tmp_path):
    """Return a new life of the planner: its journal, and the receipts that it has acknowledged."""
    lives = []

    def begin():
        acknowledged = []
        lives.append(Journal(tmp_path / "requests", acknowledged.append))
        return lives[-1], acknowledged

    yield begin
    for one in lives:
        one.close()


def delivered(packet=1, repeated=False, payload=b"{}"):
    return RawRequest("m", "me", payload, Delivery("t", payload, Receipt(1, packet), repeated))


def test_deliveries_of_a_request_wait_for_one_answer_and_another_request_with_its_id_is_refused(live):
    journal, acknowledged = live()
    new = [journal.record_waiting(delivered(packet), RequestIdentity(KEY, b"d"), f"to/{packet}") for packet in (1, 2)]
    assert (new, journal.counters["repeated_request"]) == ([True, False], 1)
    with pytest.raises(errors.IdInUseError):
        journal.record_waiting(delivered(3), RequestIdentity(KEY, b"other"), "to/3")
    waiting = journal.take_waiting(KEY)
    assert waiting == [(f"to/{packet}", delivered(packet)) for packet in (1, 2)]
    assert not journal.take_waiting(KEY)
    assert not acknowledged
    journal.settle([raw for _, raw in waiting])
    assert acknowledged == [Receipt(1, 1), Receipt(1, 2)]
    journal.settle([delivered(4)])
    assert acknowledged[2:] == [Receipt(1, 4)]


def test_an_answer_of_an_earlier_life_is_known(live):
    first, _ = live()
    assert not first.record_answer(KEY)
    second, _ = live()
    assert second.was_answered(KEY)
    assert second.record_answer(KEY)
    assert not second.was_answered(RequestKey("m", "you", "q1"))


def test_a_request_without_a_name_has_the_same_one_when_it_comes_again(live):
    first, _ = live()
    name = first.id_for(delivered())
    second, _ = live()
    assert second.id_for(delivered(repeated=True)) == name
    assert second.id_for(delivered(packet=2, repeated=True)) != name
    assert second.id_for(RawRequest("m", "me", b"{}")) != name
    second.record_answer(RequestKey("m", "me", name))
    assert second.id_for(delivered()) != name, "the broker has begun to count its packets anew"


def test_a_request_that_ends_planner_after_planner_is_refused(live):
    for life in range(channel.MAX_REDELIVERIES + 1):
        journal, _ = live()
        assert (
            journal.count_redelivery(delivered(repeated=True))
            == journal.count_redelivery(delivered(repeated=True))
            == min(life + 1, channel.MAX_REDELIVERIES + 1)
        )
        assert journal.count_redelivery(delivered(payload=b"[]")) == 0
    journal.settle([delivered(repeated=True)])
    for _ in range(2):
        journal, _ = live()
        assert journal.count_redelivery(delivered(repeated=True)) == 1
        journal.close()  # the request did not end this planner


def yielding(frame, *_):
    """Let other threads run between each line of the journal and the next."""
    if frame.f_code.co_filename != channel.__file__:
        return None
    time.sleep(1e-6)
    return yielding


def test_several_desk_threads_use_it_at_once(live):
    """Each delivery is acknowledged once, and of the answers to one request one is the first."""
    journal, acknowledged = live()
    keys = [RequestKey("m", "me", f"q{n}") for n in range(100)]
    together, firsts, settle = threading.Barrier(4), [], []

    def desk(thread):
        for n, key in enumerate(keys):
            together.wait()
            journal.record_waiting(delivered(4 * n + thread), RequestIdentity(key, b"d"), "to")
            settle.append([raw for _, raw in journal.take_waiting(key)])
            if not journal.record_answer(key):
                firsts.append(key.id)

    threads = [threading.Thread(target=desk, args=(n,)) for n in range(4)]
    traced = threading.gettrace()
    threading.settrace(yielding)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.settrace(traced)
    for waiting in settle:
        journal.settle(waiting)
    assert sorted(receipt.packet for receipt in acknowledged) == list(range(4 * len(keys)))
    assert sorted(firsts) == sorted(key.id for key in keys)


def test_what_is_kept_is_bounded(live, tmp_path, monkeypatch):
    monkeypatch.setattr(channel, "FILE_BYTES", channel.MAX_MARKS * 17 + 100)
    journal, _ = live()
    for n in range(channel.MAX_MARKS + 50):
        journal.record_answer(RequestKey("m", "me", f"q{n}"))
    assert not journal.was_answered(RequestKey("m", "me", "q49"))
    assert journal.was_answered(RequestKey("m", "me", "q50"))
    assert (tmp_path / "requests").stat().st_size <= channel.MAX_MARKS * 17 + 117


def test_a_file_that_was_cut_short_or_cannot_be_written_stops_nothing(live, tmp_path, caplog):
    first, _ = live()
    first.record_answer(KEY)
    with (tmp_path / "requests").open("ab") as file:
        file.write(b"A123")
    second, _ = live()
    assert second.record_answer(KEY)
    assert not second.record_answer(RequestKey("m", "me", "q2"))
    assert live()[0].was_answered(RequestKey("m", "me", "q2"))
    nowhere = Journal(tmp_path / "missing" / "requests", print)
    assert not nowhere.record_answer(KEY)
    assert nowhere.record_answer(KEY)
    assert str(tmp_path / "missing") in caplog.text


def test_an_id_is_for_one_request_of_its_client(desk, bert):
    first = desk.encode_answer(finish(ask(desk, {"text": "hello", "id": "q1"}), bert), now=101.0)
    assert ask(desk, {"text": "hello", "id": "q1"}, now=200.0) == first._replace(plan="", predicted_ms=None)
    assert isinstance(ask(desk, {"text": "hello", "id": "q1"}, client="other"), Request)
    for other in ({"text": "other"}, {"text": "hello", "top_k": 3}, {"text": "hello", "wire": "f16"}):
        reply = ask(desk, {**other, "id": "q1"})
        assert (reply.topic, answer_of(reply)["error"]["code"]) == (first.topic, "id_in_use")
    again = {"reply_to": TOPICS.response("bert", "me", "there"), "deadline_ms": 9, "id": "q1", "text": "hello"}
    assert ask(desk, again) == Reply(again["reply_to"], first.payload, first.key), "when and where is not what is asked"


def test_few_answers_are_kept_and_no_refusal(desk, bert, monkeypatch):
    def answered(name):
        desk.encode_answer(finish(ask(desk, {"text": "hello", "id": name}), bert), now=101.0)

    def kept(*names):
        return [isinstance(ask(desk, {"text": "hello", "id": name}), Reply) for name in names]

    monkeypatch.setattr(desk_module, "MAX_CACHED_ANSWERS", 2)
    for name in ("q1", "q2", "q3"):
        answered(name)
    assert kept("q1", "q3") == [False, True]
    monkeypatch.setattr(desk_module, "MAX_CACHED_BYTES", 10)
    answered("q4")
    assert kept("q3") == [False]
    refused = desk.encode_error(
        RefuseRequest(ask(desk, {"text": "hello", "id": "q5"}), errors.OverloadedError("too much"))
    )
    assert answer_of(refused) == {"id": "q5", "ok": False, "error": {"code": "overloaded", "message": "too much"}}
    assert kept("q5") == [False]


def test_a_part_that_finds_no_room_and_what_comes_after_the_end_are_not_kept(site):
    site.answers.room = 0
    site.post.send(Reply("res", b"{}", RequestKey("m", "me", "q1")))  # the answer has all parts
    site.post.close()
    site.answer(1)
    site.answers.room = 10
    site.pass_time()
    assert not site.answers.sent


@pytest.mark.parametrize(
    ("dtypes", "advice"),
    [({}, ["verify"]), ({"wire": "f16"}, ["--wire f32", "65,504"]), ({"weight_dtype": "w8a8"}, ["--weights f32"])],
)
def test_an_answer_that_is_not_finite_names_what_may_be_too_narrow(bert, dtypes, advice):
    plan = Plan("bert", PlanVersion(1, 1), "single", ("a",), "a", **dtypes)
    prepared = read_input(bert, {"text": "hello"})
    with pytest.raises(errors.ModelError) as caught:
        decode_output(bert, prepared, np.full(bert.spec.output_shape(prepared.shape), np.inf), plan)
    assert all(words in str(caught.value) for words in advice)
