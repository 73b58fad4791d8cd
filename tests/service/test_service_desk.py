"""JSON in, jobs out; results in, JSON out."""

from __future__ import annotations

import base64
import gc
import json
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from swarm import profile_curve

from hepti_mqtt.cost.profiles import Cluster, DeviceProfile, Link
from hepti_mqtt.cost.simulator import Naming, sent_bytes, simulate
from hepti_mqtt.errors import OverloadedError, PacketLimitError, RemoteError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import make_plan, programs
from hepti_mqtt.protocol.messages import answer_lacks
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.coordinator.interface import Answer, Refuse
from hepti_mqtt.runtime.coordinator.plans import Standing
from hepti_mqtt.runtime.coordinator.requests import Item, Job, Pins, Run, RunStats, packed
from hepti_mqtt.service import handler as module
from hepti_mqtt.service.forecast import PAUSE_S, Forecasts
from hepti_mqtt.service.handler import Desk, Model, Reply
from hepti_mqtt.service.requests import Room

TOPICS = Topics("home")
_PROFILE = DeviceProfile("any", profile_curve(1e9), 1e9, 1e9)
CLUSTER = Cluster({"a": _PROFILE, "b": _PROFILE}, {"a": Link(), "b": Link()})


@pytest.fixture
def clock():
    return Mock(return_value=100.0)


@pytest.fixture
def forecasts(checkpoints, clock):
    return Forecasts("home", {n: c.spec for n, c in checkpoints.items()}, clock)


@pytest.fixture
def desk(checkpoints, forecasts):
    return Desk("home", {n: Model(n, c, Pins()) for n, c in checkpoints.items()}, forecasts)


def foreseen(forecasts, answer):
    """Return an Answer whose runs' forecasts are made."""
    made = []
    forecasts.then(answer.stats, lambda: made.append(True))
    assert forecasts.step()
    assert made
    return answer


def ask(desk, data, model="bert", client="me", now=100.0):
    payload = data if isinstance(data, bytes) else json.dumps(data).encode()
    return desk.request(model, client, payload, now)


def told(reply):
    assert isinstance(reply, Reply)
    return json.loads(reply.payload)


def plan_for(checkpoint, number=1):
    template = Plan(checkpoint.model, Epoch(9, number), "row", ("a", "b"), "a")
    return replace(make_plan(checkpoint.spec, template, "row", {"variant": "kv"}, (3.0, 1.0)), predicted_s=0.004)


def finish(job, checkpoint, outputs=None, plans=None, begun_s=100.0):
    """Return the Answer of a job whose runs all ended."""
    for place, chunk in enumerate(job.chunks):
        plan = plans[place] if plans else plan_for(checkpoint)
        run = Run(place + 1, (Item(job, place),), chunk.shape, plan, CLUSTER, begun_s, 0.0, 100, alone=True)
        run.done = {"a": (2000, 500, 70), "b": (1000, 1500, 30)}
        job.outputs[place] = outputs[place] if outputs else np.ones((len(chunk.shape.lengths), 32), np.float32)
        job.stats.append(run.stats())
    return Answer(job, job.stats[-1].plan, tuple(job.stats))


def test_a_text_becomes_a_job(desk):
    job = ask(desk, {"text": "hello world", "id": "q1", "deadline_ms": 250})
    assert isinstance(job, Job)
    assert (job.key.model, job.key.client, job.key.request) == ("bert", "me", "q1")
    assert job.deadline_s == 100.25
    assert job.pins is None
    assert job.chunks[0].inputs.dtype == np.int32


def test_a_name_is_made_only_where_it_is_needed(desk):
    def made():
        raise AssertionError("the request has a name")

    assert desk.request("bert", "me", b'{"text": "a", "id": "q1"}', 0.0, made).key.request == "q1"
    assert desk.request("bert", "me", b'{"text": "a"}', 0.0, lambda: "m1").key.request == "m1"
    assert desk.request("bert", "me", b"{", 0.0, lambda: "m2").request == "m2"


def test_an_embedding_is_told_to_the_last_bit_in_nine_digits(desk, checkpoints, forecasts):
    bits = np.random.default_rng(0).integers(0, 2**32, 32, np.uint32).view(np.float32)
    row = np.where(np.isfinite(bits), bits, 0)
    row[:3] = 16777217, 1e-45, 0.1
    checkpoint = checkpoints["bert"]
    job = ask(desk, {"text": "hello"})
    reply = desk.answer(foreseen(forecasts, finish(job, checkpoint, [row[None]])), now=100.5)
    found = told(reply)["result"]["embedding"]
    assert np.array(found, np.float32).tolist() == row.tolist()
    assert b"0.100000001," in reply.payload


def test_every_request_has_an_end(desk):
    assert ask(desk, {"text": "hello"}).deadline_s == 100.0 + module.DEADLINE_S


def test_an_answer_tells_everything(desk, checkpoints, forecasts):
    checkpoint = checkpoints["bert"]
    job = ask(desk, {"texts": ["hello world", "more"], "id": "q1"})
    reply = desk.answer(foreseen(forecasts, finish(job, checkpoint)), now=100.5)
    assert reply.topic == TOPICS.response("bert", "me", "q1")
    data = told(reply)
    plan, shape = plan_for(checkpoint), job.chunks[0].shape
    assert answer_lacks(data) is None
    assert data["ok"] is True
    assert data["id"] == "q1"
    assert data["result"]["results"][0]["embedding"] == [1.0] * 32
    assert data["plan"]["id"] == "9.1"
    assert data["plan"]["epoch"] == [9, 1]
    assert data["plan"]["predicted_ms"] == pytest.approx(4.0)
    parts = programs(checkpoint.spec, plan_for(checkpoint), job.chunks[0].shape)
    played = simulate(Naming("home", "bert"), checkpoint.spec, job.chunks[0].shape, parts, CLUSTER)
    assert data["predicted_ms"] == pytest.approx(played.seconds * 1e3)
    assert sum(data["plan"]["devices"].values()) == pytest.approx(1.0)
    assert data["plan"]["devices"]["a"] > data["plan"]["devices"]["b"] > 0
    assert data["tokens"] == shape.tokens
    assert data["batched_with"] == 0
    assert data["compute_ms"] == {"a": 2.0, "b": 1.0}
    assert data["wait_ms"] == {"a": 0.5, "b": 1.5}
    assert data["bytes_on_wire"] == 100 + 70 + 30
    parts = programs(checkpoint.spec, plan, shape)
    assert data["predicted_bytes"] == sent_bytes(Naming("home", "bert"), checkpoint.spec, shape, parts)
    assert data["forecast"] == "simulated"
    assert data["latency_ms"] == pytest.approx(500.0)


def test_an_answer_tells_with_how_many_others_it_ran_and_what_the_run_took(desk, checkpoints, forecasts):
    checkpoint = checkpoints["bert"]
    jobs = [ask(desk, {"text": text}) for text in ("hello world", "more")]
    items = tuple(Item(job, 0) for job in jobs)
    whole = packed([item.part for item in items])
    run = Run(1, items, whole.shape, plan_for(checkpoint), CLUSTER, 0.0, 0.0, 100, alone=True)
    run.done = {"a": (2000, 500, 70), "b": (1000, 1500, 30)}
    for job in jobs:
        job.outputs[0] = np.ones((1, 32), np.float32)
        told_of = told(desk.answer(foreseen(forecasts, Answer(job, run.plan, (run.stats(),))), now=100.5))
        assert told_of["batched_with"] == 1
        assert told_of["tokens"] == job.chunks[0].shape.tokens
        assert told_of["compute_ms"] == {"a": 2.0, "b": 1.0}
        parts = programs(checkpoint.spec, run.plan, whole.shape)
        assert told_of["predicted_bytes"] == sent_bytes(Naming("home", "bert"), checkpoint.spec, whole.shape, parts)


def test_runs_under_several_plans_are_each_foretold_under_their_own(desk, checkpoints, forecasts):
    checkpoint = checkpoints["bert"]
    limit = checkpoint.spec.max_tokens
    job = ask(desk, {"ids": [[1] * limit, [2] * 4]})
    assert len(job.chunks) == 2
    plans = [plan_for(checkpoint, 1), replace(plan_for(checkpoint, 2), weights={"rows": (1.0, 1.0)})]
    data = told(desk.answer(foreseen(forecasts, finish(job, checkpoint, plans=plans)), now=101.0))
    exact = sum(
        sent_bytes(Naming("home", "bert"), checkpoint.spec, c.shape, programs(checkpoint.spec, p, c.shape))
        for p, c in zip(plans, job.chunks, strict=True)
    )
    assert data["predicted_bytes"] == exact
    assert data["runs"] == 2
    assert data["compute_ms"]["a"] == 4.0
    assert data["plan"]["id"] == "9.2"


def test_a_prediction_has_what_the_planner_itself_took_of_late(desk, checkpoints, forecasts):
    checkpoint, found = checkpoints["bert"], []
    for number, begun_s in enumerate((100.03, 100.02, 100.5, 100.0)):  # the third one has waited for others
        job = ask(desk, {"text": "hello", "id": f"q{number}"})
        answer = foreseen(forecasts, finish(job, checkpoint, begun_s=begun_s))
        found.append(told(desk.answer(answer, now=101.0))["predicted_ms"])
    assert [ms - found[3] for ms in found] == pytest.approx([30.0, 20.0, 20.0, 0.0])


def test_an_answer_tells_what_was_expected_after_what_runs_had_taught(desk, checkpoints, forecasts):
    checkpoint = checkpoints["bert"]
    answer = foreseen(forecasts, finish(ask(desk, {"text": "hello"}), checkpoint, begun_s=100.02))
    taught = replace(answer, stats=tuple(replace(stats, learned=1.5) for stats in answer.stats))
    data = told(desk.answer(taught, now=101.0))
    assert data["expected_ms"] - 20.0 == pytest.approx(1.5 * (data["predicted_ms"] - 20.0))


def test_a_request_for_the_plan_alone_is_told_the_forecast(desk, checkpoints, forecasts):
    checkpoint = checkpoints["bert"]
    job = ask(desk, {"texts": ["hello world", "more"], "want": "plan", "id": "q1"})
    assert not job.computes
    plan, shape = plan_for(checkpoint), job.chunks[0].shape
    answer = Answer(job, plan, (RunStats(plan, CLUSTER, shape, {}, {}, {}, 0),))
    data = told(desk.answer(foreseen(forecasts, answer), now=100.5))
    parts = programs(checkpoint.spec, plan, shape)
    assert (
        data["predicted_ms"] == 1e3 * simulate(Naming("home", "bert"), checkpoint.spec, shape, parts, CLUSTER).seconds
    )
    assert data["predicted_bytes"] == sent_bytes(Naming("home", "bert"), checkpoint.spec, shape, parts)
    assert (data["result"], data["runs"], data["bytes_on_wire"], data["compute_ms"]) == (None, 0, 0, {})
    assert data["plan"]["id"] == "9.1"


def test_the_same_request_again_gets_the_same_answer(desk, checkpoints):
    job = ask(desk, {"text": "hello", "id": "q1"})
    first = desk.answer(finish(job, checkpoints["bert"]), now=101.0)
    assert ask(desk, {"text": "hello", "id": "q1"}, now=200.0) == first
    assert isinstance(ask(desk, {"text": "hello", "id": "q1"}, client="other"), Job), "ids belong to a client"


def test_another_request_under_a_remembered_id_is_an_error_that_names_it(desk, checkpoints):
    first = desk.answer(finish(ask(desk, {"text": "hello", "id": "q1"}), checkpoints["bert"]), now=101.0)
    for other in ({"text": "other"}, {"text": "hello", "top_k": 3}, {"text": "hello", "wire": "f16"}):
        reply = ask(desk, {**other, "id": "q1"})
        assert reply.topic == first.topic
        error = told(reply)["error"]
        assert error["code"] == "id_in_use"
        assert "id q1 " in error["message"]
    again = {"reply_to": TOPICS.response("bert", "me", "there"), "deadline_ms": 9, "id": "q1", "text": "hello"}
    assert ask(desk, again) == Reply(again["reply_to"], first.payload, "q1"), "when and where is not what is asked"


def test_the_running_requests_digest_tells_a_repetition_from_another_request(desk):
    first, again, other = (ask(desk, {"text": text, "id": "q1"}) for text in ("hello", "hello", "other"))
    assert first.digest == again.digest != other.digest


def test_a_request_nested_deeply_under_an_id_is_an_error(desk):
    deep = b'{"id": "q", "text": ' + b"[" * 990 + b"]" * 990 + b"}"
    assert told(ask(desk, deep))["error"]["code"] == "bad_request"


def test_few_answers_are_kept(desk, checkpoints, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 2)
    for name in ("q1", "q2", "q3"):
        desk.answer(finish(ask(desk, {"text": "hello", "id": name}), checkpoints["bert"]), now=101.0)
    assert isinstance(ask(desk, {"text": "hello", "id": "q1"}), Job)
    assert isinstance(ask(desk, {"text": "hello", "id": "q3"}), Reply)
    monkeypatch.setattr(module, "KEPT_BYTES", 10)
    desk.answer(finish(ask(desk, {"text": "hello", "id": "q4"}), checkpoints["bert"]), now=101.0)
    assert isinstance(ask(desk, {"text": "hello", "id": "q3"}), Job)
    assert desk._answered_bytes == 0


def test_a_refusal_is_told_and_not_kept(desk):
    job = ask(desk, {"text": "hello", "id": "q1"})
    data = told(desk.refuse(Refuse(job, OverloadedError("too much"))))
    assert data == {"id": "q1", "ok": False, "error": {"code": "overloaded", "message": "too much"}}
    assert isinstance(ask(desk, {"text": "hello", "id": "q1"}), Job)


def test_malformed_json_is_answered_on_a_topic_of_the_client(desk):
    reply = ask(desk, b"{broken")
    assert reply.topic.startswith(TOPICS.responses("me", "bert").removesuffix("+"))
    assert told(reply)["id"] is None
    assert told(reply)["error"]["code"] == "bad_request"


@pytest.mark.parametrize(
    ("data", "code", "word"),
    [
        ({"id": "q", "text": ""}, "bad_request", "empty"),
        ({"id": "q", "text": "x", "image": "y"}, "bad_request", "exactly one"),
        ({"id": "q", "text": "x", "colour": 1}, "bad_request", "colour"),
        ({"id": "q", "text": "x", "reply_to": "hepti/v1/home/dev/a/cmd"}, "bad_request", "reply_to"),
        ({"id": "q", "text": "x", "reply_to": "hepti/v1/home/infer/bert/res/you/q"}, "bad_request", "reply_to"),
        ({"id": "q", "text": "x", "strategy": "magic"}, "bad_request", "magic"),
    ],
)
def test_errors_are_answered_under_the_requests_id(desk, data, code, word):
    reply = ask(desk, data)
    assert reply.topic == TOPICS.response("bert", "me", "q")
    assert told(reply)["id"] == "q"
    assert told(reply)["error"]["code"] == code
    assert word in told(reply)["error"]["message"]


def test_an_unknown_model_names_those_that_are_served(desk):
    reply = ask(desk, {"text": "x", "id": "q"}, model="nothing")
    assert reply.topic == TOPICS.response("nothing", "me", "q")
    assert told(reply)["error"]["code"] == "unknown_model"
    assert "bert, mask, vit" in told(reply)["error"]["message"]


def test_reply_to_is_honoured(desk, checkpoints):
    topic = TOPICS.response("bert", "me", "q1") + "/there"
    job = ask(desk, {"text": "hello", "id": "q1", "reply_to": topic})
    assert desk.answer(finish(job, checkpoints["bert"]), now=101.0).topic == topic


def test_hidden_states_of_several_chunks_are_one_array(desk, checkpoints):
    checkpoint = checkpoints["bert"]
    limit = checkpoint.spec.max_tokens
    job = ask(desk, {"ids": [[1] * limit, [2] * 3], "want": "hidden"})
    values = np.arange((limit + 3) * 32, dtype=np.float32).reshape(-1, 32)
    data = told(desk.answer(finish(job, checkpoint, outputs=[values[:limit], values[limit:]]), now=101.0))
    assert data["result"]["shape"] == [limit + 3, 32]
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(data["result"]["base64"]), "<f4").reshape(-1, 32), values
    )


@pytest.mark.parametrize("output", [np.ones((7, 3), np.float32), np.full((1, 32), np.nan, np.float32)])
def test_outputs_that_are_not_the_models_become_errors(desk, checkpoints, output):
    job = ask(desk, {"text": "hello", "id": "q1"})
    data = told(desk.answer(finish(job, checkpoints["bert"], outputs=[output]), now=101.0))
    assert data["ok"] is False
    job = ask(desk, {"ids": [[1] * checkpoints["bert"].spec.max_tokens, [2]], "id": "q2"})
    odd = [np.ones((1, 32), np.float32), np.ones((1, 31), np.float32)]
    data = told(desk.answer(finish(job, checkpoints["bert"], outputs=odd), now=101.0))
    assert data["error"]["code"] == RemoteError.code


def test_a_forecast_is_made_on_a_thread_of_its_own(desk, checkpoints, forecasts, clock, monkeypatch):
    checkpoint = checkpoints["bert"]
    forecasts.stand((Standing(plan_for(checkpoint), CLUSTER),))
    built = []
    monkeypatch.setattr("hepti_mqtt.service.forecast.programs", lambda *a: built.append(a) or programs(*a))
    job = ask(desk, {"text": "hello"})
    desk.foresee(job)
    assert not built, "not on the desk's thread"
    clock.return_value += PAUSE_S
    assert forecasts.step()
    assert len(built) == 1
    data = told(desk.answer(finish(job, checkpoint), now=101.0))
    assert len(built) == 1, "the answer found it ready"
    assert data["forecast"] == "simulated"


def test_an_answer_never_waits_for_its_forecast(desk, checkpoints, forecasts, monkeypatch):
    checkpoint = checkpoints["bert"]
    forecasts.stand((Standing(plan_for(checkpoint), CLUSTER),))
    monkeypatch.setattr("hepti_mqtt.service.forecast.programs", None)
    job = ask(desk, {"text": "hello"})
    desk.foresee(job)
    plan = replace(plan_for(checkpoint), predicted_bytes=1000, predicted_tokens=2 * job.chunks[0].shape.tokens)
    data = told(desk.answer(finish(job, checkpoint, plans=[plan]), now=101.0))
    assert data["forecast"] == "estimated"
    assert data["predicted_ms"] == pytest.approx(2.0)
    assert data["predicted_bytes"] == 500
    assert data["plan"]["devices"] == {"a": 0.75, "b": 0.25}


@pytest.mark.parametrize("request_of", ['{{"id": "q7", "text": "{}"}}', '{{"text": "{}", "id" :"q7"}}'])
def test_a_request_that_is_too_large_to_be_read_is_refused_under_its_id(desk, request_of):
    # Quotes within a text are escaped: what stands there is no id.
    reply = desk.request("bert", "me", request_of.format('\\"id\\": \\"no\\" ' * 1_500_000).encode(), 0.0)
    assert (told(reply)["id"], told(reply)["error"]["code"]) == ("q7", "bad_request")
    assert reply.topic.endswith("/q7")


def test_an_unread_request_is_refused_under_its_id(desk):
    reply = desk.refuse_unread("bert", "me", b'{"id": "q7", "text": "x"}', OverloadedError("later"))
    assert told(reply)["id"] == "q7"
    assert reply.topic.endswith("/q7")
    assert told(desk.refuse_unread("bert", "me", b"{", OverloadedError("later")))["id"] is None


def test_an_answer_that_the_broker_does_not_take_becomes_an_error_under_the_same_id(desk):
    payload = json.dumps({"id": "q", "ok": True, "result": [0] * 1000}).encode()
    long = Reply(TOPICS.response("bert", "me", "q"), payload, "q")
    short = desk.too_large(long, PacketLimitError("raise max_packet_size"))
    assert short.topic == long.topic
    assert told(short) == {
        "id": "q",
        "ok": False,
        "error": {"code": "packet_limit", "message": "raise max_packet_size"},
    }


def test_what_waits_is_bounded_in_total_until_it_is_answered(desk, checkpoints, monkeypatch):
    desk._room = Room(100)
    first = ask(desk, {"ids": [7] * 20})
    assert told(ask(desk, {"ids": [7] * 20}))["error"]["code"] == "overloaded"
    assert isinstance(ask(desk, {"ids": [7] * 5}), Job)
    answer = finish(first, checkpoints["bert"])
    desk.answer(answer, 101.0)
    del first, answer
    gc.collect()  # a traceback of the refusal may hold the answer's frame
    assert isinstance(ask(desk, {"ids": [7] * 20}), Job)


@pytest.mark.parametrize("pin", [{"strategy": "auto"}, {"weights": "f16"}, {"devices": ["a"]}])
def test_an_operator_may_forbid_pins(checkpoints, forecasts, pin):
    desk = Desk("home", {"bert": Model("bert", checkpoints["bert"], Pins())}, forecasts, "none")
    assert isinstance(ask(desk, {"text": "hello"}), Job)
    refused = told(ask(desk, {"text": "hello", **pin}))["error"]
    assert refused["code"] == "bad_request"
    assert "--request-pins none" in refused["message"]
