"""Calls of tools in a model's text, as Hermes, Qwen, Llama 3, Mistral, Phi and Gemma write them.

Tokenizers with special tokens for a call leave them out of the text, so a call may also come without its mark.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from hepti_mqtt.service.detokenizer import mark_start

#: a call may begin at one of these anywhere in the text
_MARKS: Final = ("<tool_call>", "[TOOL_CALLS]", "<|tool_call|>", "<start_function_call>", "functools[")
#: and at one of these at the beginning of the text: Llama 3's mark, JSON, fenced JSON, and Gemma's word
_STARTS: Final = ("<|python_tag|>", "{", "[", "```", "call:")
#: what stands around calls
_AROUND: Final = re.compile(
    r"</?tool_call>|<\|/?tool_call\|>|\[TOOL_CALLS\]|\[CALL_ID\]\w*|\[ARGS\]|<\|python_tag\|>|functools(?=\[)|```(?:json)?"
    r"|<(?:start|end)_function_call>"
)
_BETWEEN: Final = re.compile(r"[\s;,]*")
_NAMED: Final = re.compile(r"(?:call:)?([\w.-]+)\s*(?=\{)")
_ESCAPED: Final = re.compile(r"<escape>(.*?)<escape>", re.DOTALL)
_BARE_KEY: Final = re.compile(r"([{,])\s*([A-Za-z_]\w*)\s*:")
_JSON: Final = json.JSONDecoder()


class Call(NamedTuple):
    """A call of a tool; arguments: JSON."""

    id: str
    name: str
    arguments: str

    def to_dict(self) -> dict[str, Any]:
        """Return the call as OpenAI's interface has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolText:
    """A text as it grows, divided into what may be shown and calls of tools."""

    def __init__(self, tools: Iterable[Mapping[str, Any]] | None) -> None:
        """tools: as OpenAI's interface has them; none for no calls."""
        functions = [tool["function"] for tool in tools or ()]
        #: whether a tool takes arguments, by name
        self._tools = {one["name"]: "parameters" in one for one in functions}
        self._text, self._shown = "", 0

    def feed(self, text: str) -> str:
        """Take more text; return what may be shown now, because it is the beginning of no call."""
        self._text += text
        return self._show(self._safe())

    def end(self) -> tuple[str, list[Call]]:
        """Return the rest of the text and the calls; text that only resembles a call is shown."""
        start = self._safe() if self._tools else len(self._text)
        calls = self._calls(self._text[start:])
        rest = self._show(start if calls else len(self._text))
        return (rest.rstrip() if calls else rest), calls

    def _show(self, stop: int) -> str:
        shown = self._text[self._shown : stop]
        self._shown = max(self._shown, stop)
        return shown

    def _safe(self) -> int:
        """Return up to where the text is no call."""
        if not self._tools:
            return len(self._text)
        begun = self._text.lstrip()
        if any(begun.startswith(start) or start.startswith(begun) for start in _STARTS):
            return 0
        for name in self._tools:  # Gemma's calls may begin with a bare name
            if name.startswith(begun) or (begun.startswith(name) and begun[len(name) :].lstrip()[:1] in ("", "{", "[")):
                return 0
        if places := [at for mark in _MARKS if (at := self._text.find(mark)) >= 0]:
            return min(places)
        return mark_start(self._text, _MARKS)

    def _calls(self, text: str) -> list[Call]:
        """Return the calls in a text; none if any part is not a call of one of the tools."""
        try:
            calls = [self._call(*one) for one in _written(_AROUND.sub(" ", text))]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []
        return [call for call in calls if call is not None] if None not in calls else []

    def _call(self, name: Any, given: Any) -> Call | None:
        arguments = json.loads(given) if isinstance(given, str) and given.strip() else given or {}
        if not isinstance(name, str) or name not in self._tools or not isinstance(arguments, dict):
            return None
        if not self._tools[name]:  # models invent arguments of a function that takes none
            arguments = {}
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        whole = text.encode(errors="replace").decode()  # half a character, as an escape may be, cannot be sent
        return Call(f"call_{uuid.uuid4().hex[:24]}", name, whole)


def _written(text: str) -> Iterator[tuple[Any, Any]]:
    """Yield name and arguments of each call in a text of nothing else; raises ValueError, KeyError, TypeError."""
    at = _skipped(text, 0)
    while at < len(text):
        if named := _NAMED.match(text, at):  # a name before its arguments, which Gemma writes without quotes
            end = _closed(text, named.end())
            yield named[1], _loaded(text[named.end() : end])
        else:
            value, end = _JSON.raw_decode(text, at)
            for one in value if isinstance(value, list) else [value]:
                function = one.get("function", one)
                function = one if isinstance(function, str) else function
                yield function["name"], function.get("arguments", function.get("parameters", {}))
        at = _skipped(text, end)


def _skipped(text: str, at: int) -> int:
    between = _BETWEEN.match(text, at)
    return at if between is None else between.end()


def _loaded(body: str) -> Any:
    """Return an object of JSON, or as Gemma writes it: with bare keys, and texts between `<escape>`."""
    try:
        return json.loads(body)
    except ValueError:
        parts = _ESCAPED.split(body)  # every second one is a text
        parts[::2] = [_BARE_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
        parts[1::2] = map(json.dumps, parts[1::2])
        return json.loads("".join(parts))


def _closed(text: str, at: int) -> int:
    """Return where the object that begins at a place ends; raises ValueError."""
    depth, quoted, place = 0, "", at
    while place < len(text):
        if quoted:
            if text.startswith("\\", place) and quoted == '"':
                place += 1
            elif text.startswith(quoted, place):
                place += len(quoted) - 1
                quoted = ""
        elif start := next((one for one in ('"', "<escape>") if text.startswith(one, place)), ""):
            quoted, place = start, place + len(start) - 1
        else:
            depth += (text[place] == "{") - (text[place] == "}")
            if depth == 0:
                return place + 1
        place += 1
    raise ValueError("an object does not end")
