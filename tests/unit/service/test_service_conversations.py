"""Conversations with a tiny model: room, tools and thoughts by its template."""

from __future__ import annotations

from pathlib import Path

import pytest

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.core.errors import ContextLengthError, RequestError
from hepti_mqtt.service.requests import ModelInput, read_input

WORDS = "{% for one in messages %}{{ one.role + ' ' + one.content + ' ' }}{% endfor %}"
THINKS = WORDS + "{% if enable_thinking is defined and not enable_thinking %}no{% else %}the <think>{% endif %}"
TOOLS = WORDS + "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
HELLO = [{"role": "user", "content": "the room"}]
TOOL = {"type": "function", "function": {"name": "open"}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    directories = {}
    for name, template in {"plain": WORDS, "thinks": THINKS, "tools": TOOLS}.items():
        directory: Path = make_model("tiny-llama", tmp_path_factory.mktemp("chat") / name, seed=1)
        (directory / "chat_template.jinja").write_text(template)
        directories[name] = Checkpoint.open(directory)
    return directories


def read(model: Checkpoint, **options: object) -> ModelInput:
    return read_input(model, {"messages": HELLO, **options})


def test_a_bound_is_cut_to_the_room_and_a_demand_is_refused(models: dict[str, Checkpoint]) -> None:
    model = models["plain"]
    room = read(model).new_tokens
    for most in (3000, 32_000, 128_000):
        assert read(model, max_new_tokens=most, fit=True).new_tokens == room
        with pytest.raises(RequestError):
            read(model, max_new_tokens=most)
    assert read(model, max_new_tokens=2, fit=True).new_tokens == 2
    long = [{"role": "user", "content": "the room " * 2000}]
    with pytest.raises(ContextLengthError) as refused:
        read_input(model, {"messages": long, "max_new_tokens": 3, "fit": True})
    assert refused.value.param == "messages"


def test_tools_and_thoughts_are_those_of_the_template(models: dict[str, Checkpoint]) -> None:
    thinks, plain = models["thinks"], models["plain"]
    assert read(models["tools"], tools=[TOOL]).new_tokens
    assert read(plain, tools=[]).new_tokens
    assert [read(plain, **more).thoughts for more in ({}, {"thinking": False})] == [None, None]
    assert read(thinks).thoughts is not None
    on, off = (read(thinks, thinking=is_on).inputs.tolist() for is_on in (True, False))
    assert read(thinks).inputs.tolist() == on != off
    for key, value in (("tools", [TOOL]), ("thinking", True)):
        with pytest.raises(RequestError) as refused:
            read(plain, **{key: value})
        assert refused.value.param == key


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"top_p": 0}, "top_p"),
        ({"max_new_tokens": 5000}, "max_new_tokens"),
        ({"aggregation": "simple"}, "aggregation"),
    ],
)
def test_a_refusal_names_its_key(models: dict[str, Checkpoint], options: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_input(models["tools"], {"messages": HELLO, **options})
    assert refused.value.param == param
