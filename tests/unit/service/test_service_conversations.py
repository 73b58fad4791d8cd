"""Conversations as programs send them: what is read, room, tools and thoughts by the model's template, and refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.core.errors import ContextLengthError, RequestError
from hepti_mqtt.service.messages import MAX_MESSAGES, read_messages, read_tools
from hepti_mqtt.service.requests import read_input
from hepti_mqtt.service.thinking import Parts, Thoughts, divide

WORDS = "{% for one in messages %}{{ one.role + ' ' + one.content + ' ' }}{% endfor %}"
THINKS = WORDS + "{% if enable_thinking is defined and not enable_thinking %}no{% else %}the <think>{% endif %}"
TOOLS = WORDS + "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
HELLO = {"role": "user", "content": "the room"}
TOOL = {"type": "function", "function": {"name": "open"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directories = {}
    for name, template in {"plain": WORDS, "thinks": THINKS, "tools": TOOLS}.items():
        directory = make_model("tiny-llama", tmp_path_factory.mktemp("chat") / name, seed=1)
        (directory / "chat_template.jinja").write_text(template)
        directories[name] = Checkpoint.open(directory)
    return directories


def read(model, **options):
    return read_input(model, {"messages": [HELLO], **options})


def test_a_bound_is_cut_to_the_room_and_a_demand_is_refused(models):
    model = models["plain"]
    room = read(model).new_tokens
    for most in (3000, 32_000, 128_000):
        assert read(model, max_new_tokens=most, fit=True).new_tokens == room
        with pytest.raises(RequestError):
            read(model, max_new_tokens=most)
    assert read(model, max_new_tokens=2, fit=True).new_tokens == 2
    with pytest.raises(ContextLengthError) as refused:
        read(model, messages=[{**HELLO, "content": "the room " * 2000}], max_new_tokens=3, fit=True)
    assert refused.value.param == "messages"


def test_tools_and_thoughts_are_those_of_the_template(models):
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


REFUSED = {
    "tools": ([{"type": "web_search"}],),
    "tool_choice": ("required",),
    "response_format": ({"type": "xml"},),
    "stop": (3, [""], ["x"] * 17, [3]),
    "logit_bias": ([1], {"a": 1}, {"999999": 1}, {"1": 101}),
    "top_p": (0,),
    "max_new_tokens": (5000,),
    "aggregation": ("simple",),
    "messages": (
        ["hello"],
        [HELLO] * (MAX_MESSAGES + 1),
        [{"role": "king", "content": "x"}],
        [{"role": "user"}],
        *([{**HELLO, "content": content}] for content in (7, "x" * 400_001)),
        [{**HELLO, "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        *([{**HELLO, **more}] for more in ({"images": ["x"]}, {"foo": None})),
        [{"role": "assistant", "content": "x", "audio": {"id": "1"}}],
        *([{"role": "assistant", "tool_calls": calls}] for calls in (
            {"a": 1}, *([{"function": {"name": "f", "arguments": text}}] for text in ("not json", "[1]")),
        )),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [(key, one) for key, values in REFUSED.items() for one in values])
def test_a_refusal_names_its_key(models, key, value):
    with pytest.raises(RequestError) as refused:
        read(models["tools"], **{key: value})
    assert refused.value.param == key


def test_parts_are_joined_and_arguments_become_objects():
    parts = {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    first, second = read_messages([parts, {"role": "assistant", "content": None, "tool_calls": [CALL]}])
    assert first == {"role": "system", "content": "a\nb"}
    assert (second["content"], second["tool_calls"][0]["function"]["arguments"]) == ("", {"a": 1})


def test_what_clients_send_back_is_read():
    sent = {"content": None, "tool_calls": [], "refusal": None, "annotations": [], "audio": None, "function_call": None}
    assert read_messages([{"role": "assistant", **sent}]) == [{"role": "assistant", "content": ""}]
    (thought,) = read_messages([{"role": "assistant", "content": "x", "reasoning": "well"}])
    assert thought["reasoning_content"] == "well"
    for empty in ("", None, "{}", {}):
        function = {"name": "f", "arguments": empty}
        (turn,) = read_messages([{"role": "assistant", "tool_calls": [{**CALL, "function": function}]}])
        assert turn["tool_calls"][0]["function"]["arguments"] == {}
    assert [read_tools(none) for none in (None, [])] == [None, None]


# Thoughts and answer of a text, whole and piece by piece.


@pytest.mark.parametrize(
    ("text", "inside", "parts"),
    [
        ("<think>\nwell\n</think>\n\nyes", False, ("well", "yes")),
        ("well\n</think>\n\nyes", True, ("well", "yes")),
        *((text, False, ("", text)) for text in ("yes", "  yes", "<thinner", "<thi")),
        ("\n<think></think>yes", False, ("", "yes")),
        ("<think>it goes on", False, ("it goes on", "")),
        ("a </thin b </think>c <think> d", True, ("a </thin b", "c <think> d")),
        ("", True, ("", "")),
    ],
)
def test_thoughts_and_answer(text, inside, parts):
    assert divide(text, inside) == parts


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "th", "ink>", " ", "\n", "yes", ""]), max_size=8)


@given(PIECES, st.booleans())
def test_pieces_give_what_the_whole_gives(pieces, inside):
    thoughts = Thoughts(inside)
    shown = [*map(thoughts.feed, pieces), thoughts.end()]
    joined = Parts(*("".join(part) for part in zip(*shown, strict=True)))
    assert joined == divide("".join(pieces), inside)
    assert joined.thinking == joined.thinking.strip()
