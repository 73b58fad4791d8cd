"""A growing text, independent of the interface: visible text, thoughts, tool calls, and the end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pydantic import Field

from hepti_mqtt.client import Answer
from hepti_mqtt.gateway.bodies import Key, seed
from hepti_mqtt.gateway.site import Parts
from hepti_mqtt.gateway.tool_calls import Call, ToolText
from hepti_mqtt.protocol.messages import LOGPROBS, THINKING
from hepti_mqtt.service.messages import MAX_TOOLS, read_tools
from hepti_mqtt.service.options import OPTIONS, naming

_SAME: Final = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
)  # fmt: skip
#: options that OpenAI's and Ollama's interfaces name alike
SAMPLED: Final[Mapping[str, Key]] = {
    **{name: Key(OPTIONS[name]) for name in _SAME},
    "top_k": Key(OPTIONS["top_k"], lambda k: None if k <= 0 else k, ("minimum",)),
    "seed": Key(OPTIONS["seed"], seed, ("minimum", "maximum")),
    "stop": Key(OPTIONS["stop"], lambda stop: stop or None),
}


def bounded(most: Any) -> Any:
    """Return a limit of tokens; None, for as many as fit, if it is negative."""
    return None if most < 0 else most


class Piece(NamedTuple):
    """The part of a token to show."""

    text: str
    thinking: str = ""


class Finished(NamedTuple):
    """The end of a text."""

    #: text not shown yet
    rest: Piece
    calls: list[Call]
    reason: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    #: of the tokens that were not shown yet, in the format of Hepti's answers; empty unless requested
    logprobs: list[dict[str, Any]]

    @property
    def usage(self) -> dict[str, Any]:
        """Return the tokens as OpenAI counts them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Writing:
    """A growing text: releases the part in which no tool call can begin."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None, most_calls: int | None = None) -> None:
        self._tools, self._most_calls = ToolText(tools), most_calls
        self._fed = self._thought = 0  # characters
        self._logprobs, self._taken = list[dict[str, Any]](), 0
        #: when the first token came, by `time.perf_counter`; 0 before
        self.begun_s = 0.0

    def add(self, token: Mapping[str, Any]) -> Piece:
        """Add a token; return the text that may be shown now."""
        self.begun_s = self.begun_s or time.perf_counter()
        thinking = token.get(THINKING, "")
        self._fed += len(token["text"])
        self._thought += len(thinking)
        self._logprobs += [token[LOGPROBS]] if LOGPROBS in token else []
        return Piece(self._tools.feed(token["text"]), thinking)

    async def events(
        self, parts: Parts, show: Callable[[Piece], str], finish: Callable[[Finished], Iterable[str]], ping: str = ""
    ) -> AsyncIterator[str]:
        """Yield the events of a text's parts and of its end; ping: event of a pause; "": an empty piece."""
        async for part in parts:
            if part is None:
                yield ping or show(Piece(""))
            elif isinstance(part, Answer):
                for event in finish(self.end(part)):
                    yield event
            elif any(piece := self.add(part)):
                yield show(piece)

    def take_logprobs(self) -> list[dict[str, Any]]:
        """Return the probabilities of the tokens since the last call."""
        taken, self._logprobs = self._logprobs, []
        self._taken += len(taken)
        return taken

    def end(self, answer: Answer) -> Finished:
        """Take the whole answer, in which no token is missing."""
        result = answer.result
        shown = self._tools.feed(result["text"][self._fed :])
        rest, calls = self._tools.end()
        return Finished(
            Piece(shown + rest, result.get(THINKING, "")[self._thought :]),
            calls[: self._most_calls],
            "tool_calls" if calls else result["finish"],
            answer.tokens,
            answer.raw.get("cached_tokens", 0),
            len(result["ids"]),
            result.get(LOGPROBS, [])[self._taken :],
        )


#: JSON schemas of what `named_tools` takes: a function, and a tool as chats have it
FUNCTION: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
}
TOOL: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["function"],
    "properties": {"type": {"const": "function"}, "function": FUNCTION},
}


def tools_field(tool: dict[str, Any]) -> Any:
    """Return the description of a list of tools with this JSON schema."""
    return Field(json_schema_extra={"items": tool, "maxItems": MAX_TOOLS})


def named_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools; raises RequestError for a tool without a function and its name."""
    with naming("tools"):
        return read_tools([{"type": "function", **tool} for tool in tools]) or []
