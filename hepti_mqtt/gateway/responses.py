"""OpenAI's `/v1/responses` without its state: each request brings the whole conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.gateway.bodies import Body, Key
from hepti_mqtt.gateway.chat import Effort, Written, thinks
from hepti_mqtt.gateway.operations import JSON, Operation
from hepti_mqtt.gateway.site import Parts, Site
from hepti_mqtt.gateway.streams import EVENTS, PING, Stream, event
from hepti_mqtt.gateway.writing import FUNCTION, SAMPLED, Finished, Piece, Writing, bounded, named_tools, tools_field
from hepti_mqtt.service.options import OPTIONS

Fields = dict[str, Any]
_TEXTS: Final = ("input_text", "output_text", "text")


class TextOptions(Body):
    """What the text looks like."""

    neutral: ClassVar = {"verbosity": ("medium",)}
    format: dict[str, Any] | None = None


class Reasoning(Body):
    """Whether the model thinks."""

    neutral: ClassVar = {"summary": ("auto",), "generate_summary": ("auto",)}
    effort: Effort | None = None


def _tools(tools: list[Fields]) -> list[Fields]:
    """Return tools in the form of chats; raises RequestError for a tool other than a function."""
    about = ("name", "description", "parameters", "strict")
    for place, tool in enumerate(tools):
        if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise RequestError(f"tools[{place}] is no function with a name; only functions are called", "tools")
    return named_tools(
        [{"type": tool.get("type"), "function": {key: tool[key] for key in about if key in tool}} for tool in tools]
    )


_TOOL: Final = {
    **FUNCTION,
    "required": ["type", "name"],
    "properties": {"type": {"const": "function"}, **FUNCTION["properties"]},
}


class Named(TypedDict):
    """A function that must be called."""

    type: Literal["function"]
    name: str


class ResponseBody(Written):
    """A conversation."""

    keys: ClassVar = {**SAMPLED, "max_output_tokens": Key(OPTIONS["max_new_tokens"], bounded)}
    ignored = Written.ignored | {"client_metadata"}
    neutral: ClassVar = {
        **Written.neutral, "previous_response_id": (), "conversation": (),
        "include": (["reasoning.encrypted_content"],), "truncation": ("disabled",), "background": (False,),
        "prompt": (), "max_tool_calls": (), "top_logprobs": (0,), "context_management": (),
    }  # fmt: skip
    input: Annotated[str | list[Fields], Field(description="a text, or a list of items")]
    instructions: str | None = None
    tools: Annotated[list[Fields], AfterValidator(_tools), tools_field(_TOOL)] = Field(default_factory=list)
    tool_choice: Literal["auto", "none", "required"] | Named = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()

    def request(self) -> Fields:
        """Return the request of MQTT."""
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        choice: Any = self.tool_choice if self.tool_choice not in ("auto", "none") else None
        if isinstance(choice, Mapping):
            choice = {"type": "function", "function": {"name": choice["name"]}}
        return {
            **super().request(),
            "messages": [*system, *_messages(items)],
            "tools": self.callable_tools or None,
            "tool_choice": choice,
            "response_format": _format(self.text.format),
            "thinking": thinks(self.reasoning.effort),
        }

    @property
    def callable_tools(self) -> list[Fields]:
        """Return the tools that may be called."""
        return [] if self.tool_choice == "none" else self.tools


def _format(value: Fields | None) -> Fields | None:
    if value is None or value.get("type") in (None, "text"):
        return None
    if value["type"] == "json_schema":
        return {"type": "json_schema", "json_schema": {key: value[key] for key in ("name", "schema") if key in value}}
    return {"type": value["type"]}


def _messages(items: list[Fields]) -> Iterator[Fields]:
    """Yield the messages that items are; raises RequestError for another item."""
    for place, item in enumerate(items):
        match item.get("type", "message"):
            case "message":
                yield {"role": item.get("role"), "content": _content(place, item.get("content"))}
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                yield {"role": "assistant", "content": None, "tool_calls": [call]}
            case "function_call_output":
                content = _content(place, item.get("output"))
                yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            case "reasoning":  # of an earlier answer: models read none of it
                continue
            case kind:
                raise RequestError(f"input[{place}] is of type {str(kind)[:40]!r}, which is not supported", "input")


def _content(place: int, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [_part(place, part) for part in value]


def _part(place: int, part: Any) -> Fields:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXTS:
        return {"type": "text", "text": part.get("text")}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        detail = {"detail": part["detail"]} if part.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
    raise RequestError(
        f"input[{place}] has a part that is neither a text nor a picture; send input_text, or input_image with the "
        "picture in image_url",
        "input",
    )


async def respond(site: Site, body: ResponseBody) -> Any:
    """The answer to a conversation; nothing is stored."""
    model, request = await site.model_named(body.model), body.request()
    writing = Writing(body.callable_tools, None if body.parallel_tool_calls else 1)
    head = _head(model, body)
    if body.stream:
        return Stream(_events(await site.stream(model, request), writing, head), EVENTS)
    (answer,) = await site.write(model, [request])
    end = writing.end(answer)
    return _ended(head, _items(end.rest, end), end)


def _head(model: str, body: ResponseBody) -> Fields:
    about = {"id": _id("resp"), "object": "response", "created_at": int(time.time()), "model": model}
    tools = [{"type": "function", "strict": False, "parameters": {}, **tool["function"]} for tool in body.tools]
    return {
        **about,
        **{key: body.chosen.get(key) for key in ("temperature", "top_p")},
        **{key: getattr(body, key) for key in ("instructions", "parallel_tool_calls", "tool_choice")},
        **dict.fromkeys(("error", "incomplete_details", "previous_response_id", "usage")),
        **{"status": "in_progress", "output": [], "metadata": {}, "store": False, "tools": tools},
    }


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _ended(head: Fields, items: list[Fields], end: Finished) -> Fields:
    """Return a finished response."""
    is_whole = end.reason != "length"
    usage = {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens},
        "output_tokens": end.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": end.prompt_tokens + end.tokens,
    }
    return {
        **head,
        "status": "completed" if is_whole else "incomplete",
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "output": items,
        "usage": usage,
    }


def _items(whole: Piece, end: Finished) -> list[Fields]:
    """Return the items of a text: its thoughts, the text, and calls."""
    thoughts, message = _reasoning(whole.thinking), _message(whole.text)
    items = [thoughts] * bool(whole.thinking) + [message] * bool(whole.text or not end.calls)
    return items + [
        {
            "type": "function_call", "id": _id("fc"), "call_id": call.id, "name": call.name,
            "arguments": call.arguments, "status": "completed",
        }
        for call in end.calls
    ]  # fmt: skip


def _reasoning(text: str) -> Fields:
    return {"type": "reasoning", "id": _id("rs"), "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def _message(text: str) -> Fields:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": _id("msg"), "status": "completed", "role": "assistant", "content": content}


class _Events:
    """The events of a response, numbered; one item at a time is open."""

    def __init__(self) -> None:
        self._number = 0
        self._open: Fields | None = None
        #: items that have ended, and the text of the open one
        self.items, self._text = list[Fields](), ""

    def event(self, kind: str, **fields: Any) -> str:
        """Return an event."""
        self._number += 1
        return f"event: {kind}\n{event({'type': kind, 'sequence_number': self._number - 1, **fields})}"

    def add(self, item: Fields, kind: str, text: str) -> Iterator[str]:
        """Yield the events of a piece of text; item: begins here unless one of its type is open."""
        if self._open is None or self._open["type"] != item["type"]:
            yield from self.close()
            self._open, self._text = item, ""
            empty = {**item, "content": []} | ({"status": "in_progress"} if "status" in item else {})
            yield self.event("response.output_item.added", output_index=len(self.items), item=empty)
            part = {**item["content"][0], "text": ""}
            yield self.event("response.content_part.added", **self._place(), part=part)
        self._text += text
        yield self.event(f"response.{kind}.delta", **self._place(), delta=text, logprobs=[])

    def close(self) -> Iterator[str]:
        """Yield the events that end the open item."""
        if (item := self._open) is None:
            return
        (part,) = item["content"]
        part["text"] = self._text
        kind = part["type"]
        yield self.event(f"response.{kind}.done", **self._place(), text=self._text, logprobs=[])
        yield self.event("response.content_part.done", **self._place(), part=part)
        yield self.event("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self._open = None

    def call(self, item: Fields) -> Iterator[str]:
        """Yield the events of a tool call."""
        place = {"item_id": item["id"], "output_index": len(self.items)}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self.event("response.output_item.added", output_index=len(self.items), item=begun)
        yield self.event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        yield self.event(
            "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
        )
        yield self.event("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)

    def _place(self) -> Fields:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.items), "content_index": 0}


async def _events(parts: Parts, writing: Writing, head: Fields) -> AsyncIterator[str]:
    events = _Events()

    def show(piece: Piece) -> str:
        shown = [*events.add(_reasoning(""), "reasoning_text", piece.thinking)] if piece.thinking else []
        return "".join([*shown, *(events.add(_message(""), "output_text", piece.text) if piece.text else ())])

    def finish(end: Finished) -> Iterator[str]:
        yield show(end.rest)
        yield from events.close()
        for item in _items(Piece(""), end):
            if item["type"] == "function_call":
                yield from events.call(item)
        response = _ended(head, events.items, end)
        yield events.event(f"response.{response['status']}", response=response)

    yield events.event("response.created", response=head)
    yield events.event("response.in_progress", response=head)
    async for part in writing.events(parts, show, finish, PING):
        yield part


OPERATIONS: Final = (Operation("POST", "/v1/responses", respond, {JSON: Fields, EVENTS: Any}, ResponseBody),)
