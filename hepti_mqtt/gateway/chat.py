"""Chat and completions as OpenAI has them, whole or as server-sent events, with calls of tools."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

from hepti_mqtt.client import Answer
from hepti_mqtt.errors import RequestError
from hepti_mqtt.gateway import schemas as s
from hepti_mqtt.gateway.operations import JSON, MODEL, TOOL, Operation
from hepti_mqtt.gateway.site import Site
from hepti_mqtt.gateway.streams import EVENTS, PING, Stream, event
from hepti_mqtt.gateway.tool_calls import Call, ToolText
from hepti_mqtt.protocol.messages import LOGPROBS

DONE: Final = "data: [DONE]\n\n"
Asked = dict[str, Any]


class Finished(NamedTuple):
    """The end of a text: what is left to show, calls of tools, why it ended, and the tokens of prompt and text.

    logprobs: of the tokens that were not shown yet, in the words of Hepti's answers; none where they are not wanted.
    """

    rest: str
    calls: list[Call]
    reason: str
    prompt_tokens: int
    tokens: int
    logprobs: list[Asked]

    @property
    def usage(self) -> dict[str, int]:
        """Return the tokens as OpenAI counts them."""
        both = self.prompt_tokens + self.tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens, "total_tokens": both}


class Writing:
    """A text as it comes: what of it may be shown, because no call of a tool begins there."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self._tools = ToolText({tool["function"]["name"] for tool in tools or ()})
        self._fed = 0
        self._logprobs, self._taken = list[Asked](), 0

    def add(self, token: Mapping[str, Any]) -> str:
        """Take a token; return what may be shown now."""
        self._logprobs += [token[LOGPROBS]] if LOGPROBS in token else []
        self._fed += len(token["text"])
        return self._tools.feed(token["text"])

    def take_logprobs(self) -> list[Asked]:
        """Return the probabilities of the tokens since the last call."""
        taken, self._logprobs = self._logprobs, []
        self._taken += len(taken)
        return taken

    def end(self, answer: Answer) -> Finished:
        """Take the whole answer, in which no token is missing."""
        result = answer.result
        shown = self._tools.feed(result["text"][self._fed :])
        rest, calls = self._tools.end()
        reason = "tool_calls" if calls else result["finish"]
        logprobs = result.get(LOGPROBS, [])[self._taken :]
        return Finished(shown + rest, calls, reason, answer.tokens, len(result["ids"]), logprobs)


def _options(asked: Asked) -> Asked:
    """Return the options of a request that choose and end its tokens."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    most = asked.get("max_completion_tokens") or asked["max_tokens"]
    bias = asked["logit_bias"] or None
    return {name: asked[name] for name in (*names, "seed", "stop")} | {"max_new_tokens": most, "logit_bias": bias}


async def chat(site: Site, asked: Asked) -> Any:
    """The next message of a conversation."""
    model = await site.model_named(asked["model"])
    tools = asked["tools"] if asked["tool_choice"] != "none" else None
    if asked["top_logprobs"] is not None and not asked["logprobs"]:
        raise RequestError("top_logprobs is for logprobs true; send both")
    choice = asked["tool_choice"] if asked["tool_choice"] not in ("auto", "none") else None
    wanted = {
        "tool_choice": choice,
        "response_format": asked["response_format"],
        "logprobs": asked["top_logprobs"] or 0 if asked["logprobs"] else None,
    }
    request = {"messages": asked["messages"], "tools": tools or None, **wanted, **_options(asked)}
    writing, about = Writing(tools), _about("chat.completion", "chatcmpl", model)
    if asked["stream"]:
        parts = await site.stream(model, request)
        return Stream(_chat_events(parts, writing, about, asked["stream_options"]), EVENTS)
    end = writing.end((await site.write(model, [request]))[0])
    message: Asked = {"role": "assistant", "content": end.rest or (None if end.calls else "")}
    if end.calls:
        message["tool_calls"] = [call.to_dict() for call in end.calls]
    choice = {"index": 0, "message": message, "logprobs": _chat_logprobs(end.logprobs), "finish_reason": end.reason}
    return {**about, "choices": [choice], "usage": end.usage}


async def complete(site: Site, asked: Asked) -> Any:
    """The continuation of a text."""
    model = await site.model_named(asked["model"])
    writing, about = Writing(None), _about("text_completion", "cmpl", model)
    request = {"text": asked["prompt"], "logprobs": asked["logprobs"], **_options(asked)}
    if asked["stream"]:
        parts = await site.stream(model, request)
        return Stream(_text_events(parts, writing, about, asked["stream_options"]), EVENTS)
    end = writing.end((await site.write(model, [request]))[0])
    choice = {"index": 0, "text": end.rest, "logprobs": TextOffsets().take(end.logprobs), "finish_reason": end.reason}
    return {**about, "choices": [choice], "usage": end.usage}


def _chat_logprobs(tokens: Sequence[Asked]) -> Asked | None:
    """Return tokens as OpenAI's chats have them with their probabilities, None without any."""
    found = [{**_in_bytes(one), "top_logprobs": [_in_bytes(other) for other in one["top"]]} for one in tokens]
    return {"content": found, "refusal": None} if found else None


def _in_bytes(token: Asked) -> Asked:
    text = token["token"]
    return {"token": text, "logprob": token["logprob"], "bytes": token.get("bytes") or list(text.encode())}


class TextOffsets:
    """Tokens as OpenAI's completions have them with their probabilities: each with the place where it begins."""

    def __init__(self) -> None:
        self._characters = 0

    def take(self, tokens: Sequence[Asked]) -> Asked | None:
        """Return the next tokens, None without any."""
        texts = [one["token"] for one in tokens]
        ends = [*accumulate(map(len, texts), initial=self._characters)]
        self._characters = ends[-1]
        return (
            {
                "tokens": texts,
                "token_logprobs": [one["logprob"] for one in tokens],
                "top_logprobs": [{other["token"]: other["logprob"] for other in one["top"]} for one in tokens],
                "text_offset": ends[:-1],
            }
            if tokens
            else None
        )


def _about(kind: str, prefix: str, model: str) -> Asked:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


async def _chat_events(
    parts: AsyncIterator[Mapping[str, Any] | Answer | None], writing: Writing, about: Asked, options: Asked | None
) -> AsyncIterator[str]:
    about = {**about, "object": "chat.completion.chunk"}

    def chunk(delta: Asked, reason: str | None = None, tokens: Sequence[Asked] = ()) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": _chat_logprobs(tokens), "finish_reason": reason}
        return _event(about, choice)

    yield chunk({"role": "assistant", "content": ""})
    async for part in parts:
        if part is None:
            yield PING
            continue
        if not isinstance(part, Answer):
            if text := writing.add(part):
                yield chunk({"content": text}, tokens=writing.take_logprobs())
            continue
        end = writing.end(part)
        if end.rest:
            yield chunk({"content": end.rest}, tokens=end.logprobs)
        for place, call in enumerate(end.calls):
            yield chunk({"tool_calls": [{"index": place, **call.to_dict()}]})
        yield chunk({}, end.reason, () if end.rest else end.logprobs)
        if (options or {}).get("include_usage"):
            yield _event({**about, "usage": end.usage})
    yield DONE


async def _text_events(
    parts: AsyncIterator[Mapping[str, Any] | Answer | None], writing: Writing, about: Asked, options: Asked | None
) -> AsyncIterator[str]:
    offsets = TextOffsets()

    def chunk(text: str, tokens: Sequence[Asked], reason: str | None = None) -> str:
        return _event(about, {"index": 0, "text": text, "logprobs": offsets.take(tokens), "finish_reason": reason})

    async for part in parts:
        if part is None:
            yield PING
            continue
        if not isinstance(part, Answer):
            if text := writing.add(part):
                yield chunk(text, writing.take_logprobs())
            continue
        end = writing.end(part)
        yield chunk(end.rest, end.logprobs, end.reason)
        if (options or {}).get("include_usage"):
            yield _event({**about, "usage": end.usage})
    yield DONE


def _event(about: Asked, *choices: Asked) -> str:
    return event({**about, "choices": list(choices)})


def _only(value: Any, why: str) -> s.Schema:
    """Return the schema of a key whose other values would change the answer."""
    return {**value, "description": why}


_STREAM_OPTIONS: Final = s.body({}, {"include_usage": s.FLAG, "include_obfuscation": s.IGNORED})
_ONE: Final = _only({"type": "integer", "minimum": 1, "maximum": 1}, "1: one answer is written")
_LIKELY: Final[s.Schema] = {"type": "integer", "minimum": 0, "maximum": 20}
_KIND: Final = {"type": "string", "enum": ["text", "json_object", "json_schema"]}
_FORMAT: Final = s.body({"type": _KIND}, {"json_schema": s.OBJECT})
_DEMANDED: Final = {"type": "object", "properties": {"function": s.OBJECT}, "required": ["function"]}
_CHOICE_OF_TOOLS: Final = {
    "anyOf": [{"type": "string", "enum": ["auto", "none", "required"]}, _DEMANDED],
    "default": "auto",
    "description": "auto, none, required, or an object that names a function",
}
_SAMPLED: Final[Mapping[str, s.Schema]] = {
    "model": MODEL,
    "max_tokens": s.COUNT,
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"), s.NUMBER
    ),
    "top_k": s.COUNT,
    "seed": s.INTEGER,
    "stop": {"anyOf": [s.TEXT, s.array(s.TEXT, "", 0, 16)], "description": "a text or a list of up to 16 texts"},
    "logit_bias": s.OBJECT,
    "stream": s.FLAG,
    "stream_options": _STREAM_OPTIONS,
    "n": _ONE,
    **dict.fromkeys(("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"), s.IGNORED),
}
_USAGE: Final = s.answer(
    "CompletionUsage", prompt_tokens=s.INTEGER, completion_tokens=s.INTEGER, total_tokens=s.INTEGER
)
_NAMED: Final = {"id": s.TEXT, "object": s.TEXT, "created": s.INTEGER, "model": s.TEXT}
_CHOICE: Final = s.answer("ChatChoice", index=s.INTEGER, message=s.OBJECT, finish_reason=s.TEXT)
_TEXT_CHOICE: Final = s.answer("TextChoice", index=s.INTEGER, text=s.TEXT, finish_reason=s.TEXT)
OPERATIONS: Final = (
    Operation(
        "POST",
        "/v1/chat/completions",
        chat,
        {JSON: s.answer("ChatCompletion", **_NAMED, choices=s.array(_CHOICE), usage=_USAGE), EVENTS: s.ANY},
        s.body(
            {"messages": s.array(s.OBJECT, "a list of at least one message", 1)},
            {
                **_SAMPLED,
                "max_completion_tokens": s.COUNT,
                "logprobs": s.FLAG,
                "top_logprobs": _LIKELY,
                "tools": s.array(TOOL),
                "tool_choice": _CHOICE_OF_TOOLS,
                "parallel_tool_calls": s.IGNORED,
                "response_format": _FORMAT,
            },
        ),
    ),
    Operation(
        "POST",
        "/v1/completions",
        complete,
        {JSON: s.answer("Completion", **_NAMED, choices=s.array(_TEXT_CHOICE), usage=_USAGE), EVENTS: s.ANY},
        s.body({"prompt": _only(s.TEXT, "one text")}, {**_SAMPLED, "logprobs": _LIKELY}),
    ),
)
