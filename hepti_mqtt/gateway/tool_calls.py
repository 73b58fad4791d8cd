"""Calls of tools in a model's text, as Hermes and Qwen write them, or Llama 3."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from typing import Any, Final, NamedTuple

_TAG: Final = "<tool_call>"
_TAGGED: Final = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_PYTHON: Final = "<|python_tag|>"


class Call(NamedTuple):
    """A call of a tool; arguments: JSON."""

    id: str
    name: str
    arguments: str

    def to_dict(self) -> dict[str, Any]:
        """Return the call as OpenAI's interface has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolText:
    """A text as it grows, divided into what may be shown and calls of tools; names: of the tools, none for no calls."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text, self._shown = "", 0

    def feed(self, text: str) -> str:
        """Take more text; return what may be shown now, because it is the beginning of no call."""
        self._text += text
        return self._show(self._safe())

    def end(self) -> tuple[str, list[Call]]:
        """Return what is left to be shown, and the calls; a text that only looked like a call is shown."""
        start, calls = self._calls()
        rest = self._show(start)
        return (rest.rstrip() if calls else rest), calls

    def _show(self, stop: int) -> str:
        shown = self._text[self._shown : stop]
        self._shown = max(self._shown, stop)
        return shown

    def _safe(self) -> int:
        if not self._names:
            return len(self._text)
        if self._text.lstrip().startswith(("{", _PYTHON)) or _PYTHON.startswith(self._text.lstrip()):
            return 0
        if (start := self._text.find(_TAG)) >= 0:
            return start
        ends = (n for n in range(min(len(_TAG), len(self._text)), 0, -1) if self._text.endswith(_TAG[:n]))
        return len(self._text) - next(ends, 0)

    def _calls(self) -> tuple[int, list[Call]]:
        """Return where the text before the calls ends, and the calls."""
        whole = len(self._text)
        if not self._names:
            return whole, []
        if (start := self._text.find(_TAG)) >= 0:
            found = [self._call(body) for body in _TAGGED.findall(self._text)]
            calls = [call for call in found if call is not None]
            return (start, calls) if len(calls) == len(found) else (whole, [])
        call = self._call(self._text.strip().removeprefix(_PYTHON))
        return (0, [call]) if call is not None else (whole, [])

    def _call(self, body: str) -> Call | None:
        """Return a call that is well formed and names one of the tools."""
        try:
            call = json.loads(body)
            name, given = call["name"], call.get("arguments", call.get("parameters", {}))
            arguments = json.loads(given) if isinstance(given, str) else given
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        whole = text.encode(errors="replace").decode()  # half a character, as an escape may be, cannot be sent
        return Call(f"call_{uuid.uuid4().hex[:24]}", name, whole)
