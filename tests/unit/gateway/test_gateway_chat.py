"""Texts of a chat as they come: nothing of a call is shown, nothing is lost, calls are told whole."""

import json

import pytest
from gateway_client import CALL, CHAT, HELLO, OLLAMA, TEXT, TOOL, Writer, events, http_of, post

from hepti_mqtt.core.errors import OverloadedError

NAMED = {"type": "function", "function": {"name": "open"}}


def asked(client, **body):
    answer = post(CHAT, client, **body)
    if not body.get("stream"):
        return answer.json()["choices"][0]
    assert answer.text.endswith("data: [DONE]\n\n")
    return [event["choices"][0] for event in events(answer)]


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
    whole = asked(Writer(*tokens), **options)
    message, reason = whole["message"], whole["finish_reason"]
    assert ((message["content"] or ""), len(message.get("tool_calls", ()))) == (content, calls)
    chunks = asked(Writer(*tokens, lost=lost), stream=True, **options)
    deltas = [chunk["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    told = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in told] == list(range(calls))
    assert all(json.loads(call["function"]["arguments"]) == {"door": 1} for call in told)
    assert chunks[-1]["finish_reason"] == reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("lost", [None, 2])
@pytest.mark.parametrize("tokens", [("It", " is", " o", "pen"), ("Ä", "b", "", " de")])
def test_probabilities_come_with_the_tokens_that_they_are_of(tokens, lost):
    client = Writer(*tokens, lost=lost)
    content = asked(client, logprobs=True, top_logprobs=2)["logprobs"]["content"]
    assert client.asked[-1]["logprobs"] == 2
    assert [(one["token"], bytes(one["bytes"]).decode(), one["logprob"]) for one in content] == [
        (text, text, -0.5) for text in tokens
    ]
    assert content[0]["top_logprobs"][1] == {"token": "\ufffd", "logprob": -2.0, "bytes": [0xE2]}
    chunks = asked(client, stream=True, logprobs=True, top_logprobs=2)
    assert [one for chunk in chunks for one in (chunk["logprobs"] or {"content": []})["content"]] == content
    told = post(TEXT, client, logprobs=2).json()["choices"][0]["logprobs"]
    assert (told["tokens"], told["token_logprobs"]) == ([*tokens], [-0.5] * 4)
    assert told["text_offset"] == [len("".join(tokens[:place])) for place in range(4)]
    assert told["top_logprobs"][1] == {tokens[1]: -0.5, "\ufffd": -2.0}
    parts = [event["choices"][0]["logprobs"] for event in events(post(TEXT, client, logprobs=2, stream=True))]
    assert {key: [one for part in parts if part for one in part[key]] for key in told} == told
    assert asked(client)["logprobs"] is None


@pytest.mark.parametrize(
    ("choice", "demanded"), [("none", None), ("auto", None), ("required", "required"), (NAMED, NAMED)]
)
def test_what_follows_a_schema_is_asked_of_the_planner(choice, demanded):
    client, schema = Writer('{"name": "open", ', '"arguments": {"door": 1}}'), {"type": "object"}
    formatted = {"type": "json_schema", "json_schema": {"name": "d", "strict": True, "schema": schema}}
    chunks = asked(client, stream=True, tools=[TOOL], tool_choice=choice, response_format=formatted)
    sent = client.asked[0]
    assert (sent.get("tool_choice"), sent["response_format"]["json_schema"]["schema"]) == (demanded, schema)
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls] == ["open"] * (choice != "none"), "a call without its tags"
    for wanted, told in (("json", {"type": "json_object"}), (schema, formatted), ("", None), (None, None)):
        post(OLLAMA, client, format=wanted)
        found = client.asked[-1].get("response_format")
        assert found == told or found["json_schema"]["schema"] == schema


def test_an_error_before_the_first_token_is_no_stream():
    answer = post(CHAT, Writer(error=OverloadedError("full")), stream=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")


@pytest.mark.parametrize(("tokens", "content", "calls"), [(("It", " is"), "It is", 0), (("Well.", *CALL), "Well.", 1)])
def test_ollamas_lines_have_what_its_whole_answer_has(tokens, content, calls):
    options = {"num_predict": -1, "temperature": 0.5, "num_ctx": 8192, "stop": ["END"]}
    body = {"model": "m:latest", "messages": HELLO, "tools": [TOOL], "options": options, "keep_alive": -1}
    client = Writer(*tokens)
    lines = events(http_of(client).post(OLLAMA, json=body))  # a stream, unless a body refuses it
    whole = post(OLLAMA, client, **body).json()
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"] == content
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    made = [{"function": {"name": "open", "arguments": {"door": 1}}}] * calls
    assert lines[-1]["message"].get("tool_calls", []) == whole["message"].get("tool_calls", []) == made
    assert lines[-1]["eval_count"] == len(tokens)
