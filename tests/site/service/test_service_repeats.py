"""Repeated requests: each is computed once, also if the first answer is ready while a repeat is read."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hepti_mqtt.config.options import PlannerOptions
from hepti_mqtt.core.ids import PlanVersion, Start
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.service import planner
from hepti_mqtt.service.handler import OpenModel
from hepti_mqtt.service.setup import PlannerConfig
from hepti_mqtt.transport.url import BrokerUrl


@pytest.fixture
def unconnected(bert, tmp_path):
    """A planner without a broker: tests pass it messages, and run its reader and answer threads step by step."""
    url, options = BrokerUrl.parse("mqtt://127.0.0.1:1"), PlannerOptions({"bert": bert.path}, home_assistant=None)
    new_planner = planner._Planner(
        PlannerConfig(url, "full", options, state_dir=tmp_path), Start(1, 7), {"bert": OpenModel("bert", bert, Pins())}
    )
    yield new_planner
    for connection in (new_planner.control, new_planner.channel, new_planner.bulk):
        connection.close()


@pytest.fixture
def said(unconnected, monkeypatch):
    """What the planner that is not connected would publish to users."""
    out = []
    monkeypatch.setattr(unconnected.channel, "_publish", lambda answer: out.append(answer.reply))
    return out


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
