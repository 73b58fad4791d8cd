"""Texts of a chat as they come: nothing of a call is shown, nothing is lost, calls are told whole."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any

import pytest
from gateway_client import Client
from starlette.testclient import TestClient

from hepti_mqtt.client import Answer
from hepti_mqtt.client.connection import AnswerStream
from hepti_mqtt.core.errors import OverloadedError
from hepti_mqtt.gateway.app import create_app
from hepti_mqtt.gateway.site import Site

CALL = '<tool_call>{"name": "open", "arguments": {"door": 1}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "open", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "open"}}
HELLO = [{"role": "user", "content": "hello"}]


def likely(text: str) -> dict[str, Any]:
    other = {"id": 7, "token": "\ufffd", "bytes": [0xE2], "logprob": -2.0}
    return {"id": 3, "token": text, "logprob": -0.5, "top": [{"id": 3, "token": text, "logprob": -0.5}, other]}


class Talker(Client):
    """Writes one text, token by token; what is lost does not arrive."""

    def __init__(self, *tokens: str, lost: int | None = None, error: Exception | None = None) -> None:
        super().__init__()
        self.tokens, self.lost, self.error = tokens, lost, error

    def _answer(self) -> Answer:
        text = "".join(self.tokens)
        told = {"ids": list(range(len(self.tokens))), "text": text, "finish": "stop"}
        if self.asked[-1].get("logprobs") is not None:
            told["logprobs"] = [likely(text) for text in self.tokens]
        return Answer({"result": told, "tokens": 5}, 1.0)

    def submit(self, model: str, **request: Any) -> Future[Answer]:
        self.asked.append(request)
        future: Future[Answer] = Future()
        future.set_result(self._answer())
        return future

    def stream(self, model: str, request: Any, put: Any) -> AnswerStream:
        self.asked.append(request)
        stream = AnswerStream(put)
        if self.error is not None:
            stream.set_exception(self.error)
            return stream
        for index, text in enumerate(self.tokens):
            if index != self.lost:
                told = {"logprobs": likely(text)} if self.asked[-1].get("logprobs") is not None else {}
                put({"index": index, "token": index, "text": text, **told})
        stream.set_result(self._answer())
        return stream


def asked(client: Talker, **body: Any) -> Any:
    http = TestClient(create_app(Site(client, 5.0)))
    answer = http.post("/v1/chat/completions", json={"model": "m", "messages": HELLO, **body})
    if not body.get("stream") or answer.status_code != 200:
        return answer.status_code, answer.json()
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events[:-1]]


@pytest.mark.parametrize(
    ("tokens", "options", "content", "calls"),
    [
        (("It", " is", " open"), {}, "It is open", 0),
        (("It", " is", " open"), {"tools": [TOOL]}, "It is open", 0),
        (("Well.", *CALL), {"tools": [TOOL]}, "Well.", 1),
        (tuple(CALL * 2), {"tools": [TOOL]}, "", 2),
        (tuple(CALL), {}, CALL, 0),
        (tuple(CALL), {"tools": [TOOL], "tool_choice": "none"}, CALL, 0),
        (("ab", "c ", ""), {"stop": "END"}, "abc ", 0),
    ],
)
@pytest.mark.parametrize("lost", [None, 1])
def test_a_stream_has_what_the_whole_answer_has(tokens, options, content, calls, lost):
    status, whole = asked(Talker(*tokens), **options)
    assert status == 200
    message, reason = whole["choices"][0]["message"], whole["choices"][0]["finish_reason"]
    assert ((message["content"] or ""), len(message.get("tool_calls", ()))) == (content, calls)
    chunks = asked(Talker(*tokens, lost=lost), stream=True, **options)
    deltas = [chunk["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    told = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in told] == list(range(calls))
    assert all(json.loads(call["function"]["arguments"]) == {"door": 1} for call in told)
    assert chunks[-1]["finish_reason"] == reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("lost", [None, 2])
@pytest.mark.parametrize("tokens", [("It", " is", " o", "pen"), ("Ä", "b", "", " de")])
def test_probabilities_come_with_the_tokens_that_they_are_of(tokens, lost):
    client = Talker(*tokens, lost=lost)
    _, whole = asked(client, logprobs=True, top_logprobs=2)
    assert client.asked[-1]["logprobs"] == 2
    content = whole["choices"][0]["logprobs"]["content"]
    assert [(one["token"], bytes(one["bytes"]).decode(), one["logprob"]) for one in content] == [
        (text, text, -0.5) for text in tokens
    ]
    assert content[0]["top_logprobs"][1] == {"token": "\ufffd", "logprob": -2.0, "bytes": [0xE2]}
    chunks = asked(client, stream=True, logprobs=True, top_logprobs=2)
    assert [one for chunk in chunks for one in (chunk["logprobs"] or {"content": []})["content"]] == content
    http = TestClient(create_app(Site(client, 5.0)))
    body = {"model": "m", "prompt": "hello", "logprobs": 2}
    told = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert (told["tokens"], told["token_logprobs"]) == ([*tokens], [-0.5] * 4)
    assert told["text_offset"] == [len("".join(tokens[:place])) for place in range(4)]
    assert told["top_logprobs"][1] == {tokens[1]: -0.5, "\ufffd": -2.0}
    events = http.post("/v1/completions", json={**body, "stream": True}).text.splitlines()
    parts = [json.loads(line[6:])["choices"][0]["logprobs"] for line in events if line.startswith("data: {")]
    joined = {key: [one for part in parts if part for one in part[key]] for key in told}
    assert joined == told
    assert asked(client)[1]["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("choice", "demanded"),
    [("none", None), ("auto", None), ("required", "required"), (NAMED, NAMED)],
)
def test_what_follows_a_schema_is_asked_of_the_planner(choice, demanded):
    client, schema = Talker('{"name": "open", ', '"arguments": {"door": 1}}'), {"type": "object"}
    formatted = {"type": "json_schema", "json_schema": {"name": "d", "strict": True, "schema": schema}}
    chunks = asked(client, stream=True, tools=[TOOL], tool_choice=choice, response_format=formatted)
    sent = client.asked[0]
    assert (sent.get("tool_choice"), sent["response_format"]["json_schema"]["schema"]) == (demanded, schema)
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls] == ["open"] * (choice != "none"), "a call without its tags"
    http = TestClient(create_app(Site(client, 5.0)))
    for wanted, told in (("json", {"type": "json_object"}), (schema, formatted), ("", None), (None, None)):
        http.post("/api/chat", json={"model": "m", "messages": HELLO, "stream": False, "format": wanted})
        found = client.asked[-1].get("response_format")
        assert found == told or found["json_schema"]["schema"] == schema


def test_an_error_before_the_first_token_is_no_stream():
    status, told = asked(Talker("x", error=OverloadedError("full")), stream=True)
    assert (status, told["error"]["code"]) == (429, "overloaded")


@pytest.mark.parametrize(("tokens", "content", "calls"), [(("It", " is"), "It is", 0), (("Well.", *CALL), "Well.", 1)])
def test_ollamas_lines_have_what_its_whole_answer_has(tokens, content, calls):
    http = TestClient(create_app(Site(Talker(*tokens), 5.0)))
    options = {"num_predict": -1, "temperature": 0.5, "num_ctx": 8192, "stop": ["END"]}
    body = {"model": "m:latest", "messages": HELLO, "tools": [TOOL], "options": options, "keep_alive": -1}
    lines = [json.loads(line) for line in http.post("/api/chat", json=body).text.splitlines()]
    whole = http.post("/api/chat", json={**body, "stream": False}).json()
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"] == content
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    made = [{"function": {"name": "open", "arguments": {"door": 1}}}] * calls
    assert lines[-1]["message"].get("tool_calls", []) == whole["message"].get("tool_calls", []) == made
    assert lines[-1]["eval_count"] == len(tokens)
