"""Conversations as programs send them: what is taken, and what is refused with its place."""

from __future__ import annotations

from typing import Any

import pytest

from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.service.messages import MAX_MESSAGES, read_messages, read_tools

HELLO = {"role": "user", "content": "hello"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def test_parts_are_joined_and_arguments_become_objects() -> None:
    parts = {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    first, second = read_messages([parts, called])
    assert first == {"role": "system", "content": "a\nb"}
    assert second["content"] == ""
    assert second["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(
    "messages",
    [
        ["hello"],
        [HELLO] * (MAX_MESSAGES + 1),
        [{"role": "king", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user", "content": "x" * 400_001}],
        [{**HELLO, "images": ["x"]}],
        [{**HELLO, "foo": None}],
        [{"role": "assistant", "content": "x", "audio": {"id": "1"}}],
        [{"role": "assistant", "tool_calls": {"a": 1}}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "not json"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(RequestError):
        read_messages(messages)


def test_what_clients_send_back_is_read() -> None:
    sent = {"content": None, "tool_calls": [], "refusal": None, "annotations": [], "audio": None, "function_call": None}
    assert read_messages([{"role": "assistant", **sent}]) == [{"role": "assistant", "content": ""}]
    (thought,) = read_messages([{"role": "assistant", "content": "x", "reasoning": "well"}])
    assert thought["reasoning_content"] == "well"
    for empty in ("", None, "{}", {}):
        function = {"name": "f", "arguments": empty}
        (turn,) = read_messages([{"role": "assistant", "tool_calls": [{**CALL, "function": function}]}])
        assert turn["tool_calls"][0]["function"]["arguments"] == {}


def test_no_tools_are_none() -> None:
    assert read_tools(None) is None
    assert read_tools([]) is None
