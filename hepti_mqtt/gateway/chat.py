"""Chat and completions in OpenAI's format, whole or as server-sent events, with calls of tools."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Final, Literal, NotRequired

from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import TypedDict

from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.gateway import answers
from hepti_mqtt.gateway.bodies import Body, Key, texts_field, texts_of, whole
from hepti_mqtt.gateway.operations import JSON, Operation
from hepti_mqtt.gateway.site import Parts, Site
from hepti_mqtt.gateway.streams import EVENTS, PING, Stream, event
from hepti_mqtt.gateway.writing import SAMPLED, TOOL, Finished, Piece, Writing, bounded, named_tools, tools_field
from hepti_mqtt.service.options import MAX_LIKELY, OPTIONS

DONE: Final = "data: [DONE]\n\n"
PROMPTS: Final = 64
Fields = dict[str, Any]


class StreamOptions(Body):
    """Options of a stream."""

    ignored = frozenset({"include_obfuscation"})
    include_usage: bool = False


class TemplateOptions(Body):
    """Options of the chat template."""

    keys: ClassVar = {"enable_thinking": Key(OPTIONS["thinking"])}


class Written(Body):
    """Options of chats and completions."""

    keys: ClassVar = {**SAMPLED, "max_tokens": Key(OPTIONS["max_new_tokens"], bounded)}
    ignored = frozenset(
        {"user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
    )
    neutral: ClassVar = {
        "n": (1,), "best_of": (1,), "echo": (False,), "suffix": (), "prediction": (), "audio": (), "functions": (),
        "function_call": ("none", "auto"), "modalities": (["text"],), "verbosity": ("medium",),
        "web_search_options": (), "moderation": (),
    }  # fmt: skip
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    def request(self) -> Fields:
        """Return the options of a request."""
        return {**self.chosen, "fit": True}


class FunctionName(TypedDict):
    """A function by its name."""

    name: str


class Demanded(TypedDict):
    """A function that must be called."""

    type: Literal["function"]
    function: FunctionName


class Format(TypedDict):
    """The format of a text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NotRequired[dict[str, Any]]


Tools = Annotated[list[dict[str, Any]], AfterValidator(named_tools), tools_field(TOOL)]
ToolChoice = Annotated[
    Literal["auto", "none", "required"] | Demanded,
    Field(description="auto, none, required, or an object that names a function"),
]
#: what OpenAI's models take; the effort itself is not chosen
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def thinks(effort: Effort | None) -> bool | None:
    """Return whether the model should think; None if unspecified."""
    return None if effort is None else effort != "none"


class ChatBody(Written):
    """A conversation."""

    model_config: ClassVar = {  # a number of top_logprobs requires logprobs, see `request`
        "json_schema_extra": {
            "anyOf": [
                {"required": ["logprobs"], "properties": {"logprobs": {"const": True}}},
                {"properties": {"top_logprobs": {"enum": [None, 0]}}},
            ]
        }
    }
    keys: ClassVar = {**Written.keys, "max_completion_tokens": Key(OPTIONS["max_new_tokens"], bounded)}
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, description="a list of at least one message")]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LIKELY), BeforeValidator(whole)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    response_format: Format | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()

    @property
    def callable_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that may be called."""
        return self.tools or None if self.tool_choice != "none" else None

    def request(self) -> Fields:
        """Return the request of MQTT."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs is for logprobs true; send both", "top_logprobs")
        return {
            **super().request(),
            "messages": self.messages,
            "tools": self.callable_tools,
            "tool_choice": self.tool_choice if self.tool_choice not in ("auto", "none") else None,
            "response_format": self.response_format,
            "logprobs": self.top_logprobs or 0 if self.logprobs else None,
            "thinking": self.chat_template_kwargs.chosen.get("thinking", thinks(self.reasoning_effort)),
        }


class CompletionBody(Written):
    """Texts to continue."""

    keys: ClassVar = {**Written.keys, "logprobs": Key(OPTIONS["logprobs"])}
    prompt: Annotated[list[str], BeforeValidator(lambda value: texts_of(value, PROMPTS)), texts_field(PROMPTS)]


async def chat(site: Site, body: ChatBody) -> Any:
    """The next message of a conversation."""
    model, request = await site.model_named(body.model), body.request()
    writing = Writing(body.callable_tools, None if body.parallel_tool_calls else 1)
    about = _about("chat.completion", "chatcmpl", model)
    if body.stream:
        parts = await site.stream(model, request)
        return Stream(_chat_events(parts, writing, about, body.stream_options.include_usage), EVENTS)
    (answer,) = await site.write(model, [request])
    end = writing.end(answer)
    message: Fields = {"role": "assistant", "content": end.rest.text or (None if end.calls else ""), "refusal": None}
    message |= {"reasoning_content": end.rest.thinking} if end.rest.thinking else {}
    message |= {"tool_calls": [call.to_dict() for call in end.calls]} if end.calls else {}
    choice = {"index": 0, "message": message, "logprobs": _chat_logprobs(end.logprobs), "finish_reason": end.reason}
    return {**about, "choices": [choice], "usage": end.usage}


async def complete(site: Site, body: CompletionBody) -> Any:
    """The continuation of texts."""
    model = await site.model_named(body.model)
    about = _about("text_completion", "cmpl", model)
    requests = [{**body.request(), "text": prompt} for prompt in body.prompt]
    if body.stream:
        parts = await site.stream(model, requests[0])
        return Stream(_text_events(site, requests, parts, about, body.stream_options.include_usage), EVENTS)
    ends = [Writing().end(answer) for answer in await site.write(model, requests)]
    choices = [
        {"index": i, "text": end.rest.text, "logprobs": TextOffsets().take(end.logprobs), "finish_reason": end.reason}
        for i, end in enumerate(ends)
    ]
    return {**about, "choices": choices, "usage": _summed(ends)}


def _summed(ends: Sequence[Finished]) -> Fields:
    """Return the tokens of several texts."""
    counts = {name: sum(getattr(end, name) for end in ends) for name in ("prompt_tokens", "cached_tokens", "tokens")}
    return ends[0]._replace(**counts).usage


def _chat_logprobs(tokens: Sequence[Fields]) -> Fields | None:
    """Return tokens with their probabilities in the format of OpenAI's chats, None without tokens."""
    content = [{**_in_bytes(one), "top_logprobs": [_in_bytes(other) for other in one["top"]]} for one in tokens]
    return {"content": content, "refusal": None} if content else None


def _in_bytes(token: Fields) -> Fields:
    text = token["token"]
    return {"token": text, "logprob": token["logprob"], "bytes": token.get("bytes") or list(text.encode())}


class TextOffsets:
    """Tokens in the format of OpenAI's completions: each with its probability and the offset where it begins."""

    def __init__(self) -> None:
        self._characters = 0

    def take(self, tokens: Sequence[Fields]) -> Fields | None:
        """Return the next tokens, None without tokens."""
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


def _about(kind: str, prefix: str, model: str) -> Fields:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


async def _chat_events(parts: Parts, writing: Writing, about: Fields, has_usage: bool) -> AsyncIterator[str]:
    about = {**about, "object": "chat.completion.chunk", **({"usage": None} if has_usage else {})}

    def chunk(delta: Fields, reason: str | None = None, tokens: Sequence[Fields] = ()) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": _chat_logprobs(tokens), "finish_reason": reason}
        return event({**about, "choices": [choice]})

    def delta_of(piece: Piece) -> Fields:
        thinking = {"reasoning_content": piece.thinking} if piece.thinking else {}
        return thinking | ({"content": piece.text} if piece.text else {})

    def show(piece: Piece) -> str:
        return chunk(delta_of(piece), None, writing.take_logprobs())

    def finish(end: Finished) -> Iterator[str]:
        if any(end.rest):
            yield chunk(delta_of(end.rest), tokens=end.logprobs)
        for place, call in enumerate(end.calls):
            yield chunk({"tool_calls": [{"index": place, **call.to_dict()}]})
        yield chunk({}, end.reason, () if any(end.rest) else end.logprobs)
        if has_usage:
            yield event({**about, "choices": [], "usage": end.usage})

    yield chunk({"role": "assistant", "content": ""})
    async for part in writing.events(parts, show, finish, PING):
        yield part
    yield DONE


async def _text_events(
    site: Site, requests: Sequence[Fields], parts: Parts, about: Fields, has_usage: bool
) -> AsyncIterator[str]:
    """Yield the events of texts, one after the other; parts: the stream of the first text."""
    about, ends = {**about, **({"usage": None} if has_usage else {})}, list[Finished]()

    def events(place: int, read: Parts) -> AsyncIterator[str]:
        offsets, writing = TextOffsets(), Writing()

        def chunk(text: str, tokens: Sequence[Fields], reason: str | None = None) -> str:
            choice = {"index": place, "text": text, "logprobs": offsets.take(tokens), "finish_reason": reason}
            return event({**about, "choices": [choice]})

        def finish(end: Finished) -> Iterator[str]:
            ends.append(end)
            yield chunk(end.rest.text, end.logprobs, end.reason)

        return writing.events(read, lambda piece: chunk(piece.text, writing.take_logprobs()), finish, PING)

    for place, request in enumerate(requests):
        async for part in events(place, parts if not place else await site.stream(about["model"], request)):
            yield part
    if has_usage:
        yield event({**about, "choices": [], "usage": _summed(ends)})
    yield DONE


OPERATIONS: Final = (
    Operation("POST", "/v1/chat/completions", chat, {JSON: answers.CHAT, EVENTS: Any}, ChatBody),
    Operation("POST", "/v1/completions", complete, {JSON: answers.COMPLETION, EVENTS: Any}, CompletionBody),
)
