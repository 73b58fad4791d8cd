"""Calls of tools in a text that grows: nothing of a call is shown, and no text is lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.gateway.tool_calls import ToolText

PARAMETERS = {"type": "object", "properties": {"door": {}}}
TOOLS = [{"function": {"name": name, "parameters": PARAMETERS}} for name in ("open", "shut")]
HERMES = '<tool_call>\n{"name": "open", "arguments": {"door": "é"}}\n</tool_call>'
LLAMA = '{"name": "shut", "parameters": {"door": 1}}'
CASES = [
    ("It is open.", "It is open.", []),
    ("a < b <tool", "a < b <tool", []),
    (HERMES, "", ["open"]),
    (f"Let me see.\n{HERMES}\n{HERMES}", "Let me see.", ["open", "open"]),
    (LLAMA, "", ["shut"]),
    (f"<|python_tag|>{LLAMA}", "", ["shut"]),
    ("<tool_call>{broken", "<tool_call>{broken", []),
    (HERMES.replace("open", "unknown"), HERMES.replace("open", "unknown"), []),
    ('{"name": "open", "arguments": 3}', '{"name": "open", "arguments": 3}', []),
    ('{"answer": 3}', '{"answer": 3}', []),
    ('{"name": ["open"]}', '{"name": ["open"]}', []),
    ('{"name": "open", "arguments": "{}"}', "", ["open"]),
    ('{"name": "open", "arguments": "the door"}', '{"name": "open", "arguments": "the door"}', []),
    ('{"name": "open", "arguments": {"door": NaN}}', '{"name": "open", "arguments": {"door": NaN}}', []),
    ('{"name": "open", "arguments": {"door": "\\ud800"}}', "", ["open"]),
    (HERMES.removesuffix("</tool_call>"), "", ["open"]),
    ('<tool_call>\n{"name": "open", "arguments": ""}\n</tool_call>', "", ["open"]),
    ('<tool_call>{"name": "open"}</tool_call>', "", ["open"]),
    ('[TOOL_CALLS][{"name": "open", "arguments": {"door": 1}}, {"name": "shut", "arguments": {}}]', "",
     ["open", "shut"]),
    ('[{"name": "open", "arguments": {"door": 1}}]', "", ["open"]),
    ('[TOOL_CALLS]open[ARGS]{"door": "}"}', "", ["open"]),
    ('open{"door": {"a": "\\"}"}}shut{}', "", ["open", "shut"]),
    ('functools[{"name": "open", "arguments": {"door": 1}}]', "", ["open"]),
    ('Well. <|tool_call|>[{"name": "open", "arguments": {"door": 1}}]<|/tool_call|>', "Well.", ["open"]),
    ("<start_function_call>call:open{door:<escape>a, b: }<escape>,wide:true}<end_function_call>", "", ["open"]),
    ("call:open{door:1}", "", ["open"]),
    (f"{LLAMA}; {LLAMA}", "", ["shut", "shut"]),
    (f"```json\n{LLAMA}\n```", "", ["shut"]),
    ('{"type": "function", "function": {"name": "open", "arguments": {}}}', "", ["open"]),
    ("open the door", "open the door", []),
    ("[1, 2]", "[1, 2]", []),
    ("```json\n{}\n```", "```json\n{}\n```", []),
    ("call:", "call:", []),
    ("open{", "open{", []),
]  # fmt: skip


def divided(text, tools, cuts):
    parser, shown, at = ToolText(tools), "", 0
    for stop in [*sorted(cuts), len(text)]:
        shown += parser.feed(text[at:stop])
        at = max(at, stop)
    rest, calls = parser.end()
    assert all(isinstance(json.loads(call.arguments.encode()), dict) for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    return shown + rest, [call.name for call in calls]


@pytest.mark.parametrize(("text", "content", "names"), CASES)
@given(data=st.data())
def test_a_text_is_divided_alike_wherever_it_is_cut(text, content, names, data):
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    shown, calls = divided(text, TOOLS, cuts)
    assert (shown.rstrip(), calls) == (content, names)


@pytest.mark.parametrize("text", [case[0] for case in CASES])
def test_without_tools_all_is_text_at_once(text):
    parser = ToolText(())
    assert parser.feed(text) == text
    assert parser.end() == ("", [])


@pytest.mark.parametrize(
    ("text", "tool", "arguments"),
    [
        ('{"name": "open", "arguments": {"door": 1}}', TOOLS[0], {"door": 1}),
        ('{"name": "open", "arguments": {"door": 1}}', {"function": {"name": "open"}}, {}),  # it has no parameters
        (
            "call:open{door:<escape>a, b: }<escape>,wide:true,at:{x:1.5}}",  # Gemma's
            TOOLS[0],
            {"door": "a, b: }", "wide": True, "at": {"x": 1.5}},
        ),
    ],
)
def test_arguments_of_a_call(text, tool, arguments):
    parser = ToolText([tool])
    parser.feed(text)
    _, (call,) = parser.end()
    assert json.loads(call.arguments) == arguments
