"""The routes of Ollama."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from hepti_mqtt import __version__
from hepti_mqtt.client import Answer
from hepti_mqtt.gateway.chat import Writing
from hepti_mqtt.gateway.errors import ollama_error
from hepti_mqtt.gateway.operations import INPUT, JSON, MODEL, TOOL, VECTOR, Operation, texts_of
from hepti_mqtt.gateway.schemas import COUNT, FLAG, IGNORED, INTEGER, NUMBER, OBJECT, TEXT, Schema, answer, array, body
from hepti_mqtt.gateway.site import Site
from hepti_mqtt.gateway.streams import LINES, Stream, line
from hepti_mqtt.gateway.tool_calls import Call


async def embed(site: Site, asked: dict[str, Any]) -> Any:
    """Embeddings, as Ollama gives them; durations in nanoseconds."""
    begun = time.perf_counter()
    model = await site.model_named(asked["model"])
    found = await site.embed(model, texts_of(asked["input"]), asked["truncate"], dimensions=asked["dimensions"])
    spent_ns = int((time.perf_counter() - begun) * 1e9)
    return {
        "model": asked["model"] or model,
        "embeddings": found.vectors.tolist(),
        "total_duration": spent_ns,
        "load_duration": 0,
        "prompt_eval_count": found.tokens,
    }


async def tags(site: Site, _asked: dict[str, Any]) -> Any:
    """The served models, as Ollama lists them."""
    return {"models": [{"name": name, "model": name, "size": 0, "details": {}} for name in await site.models()]}


async def version(_site: Site, _asked: dict[str, Any]) -> Any:
    """The version of Hepti."""
    return {"version": __version__}


async def chat(site: Site, asked: dict[str, Any]) -> Any:
    """The next message of a conversation, as Ollama gives it: by default line by line."""
    tools, options = asked["tools"] or None, asked["options"] or {}
    request = {"messages": asked["messages"], "tools": tools, **_format(asked["format"]), **_sampled(options)}

    def as_fields(text: str, calls: Sequence[Call] = ()) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            made = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls]
            message["tool_calls"] = [{"function": one} for one in made]
        return {"message": message}

    return await _write(site, asked, request, Writing(tools), as_fields)


async def generate(site: Site, asked: dict[str, Any]) -> Any:
    """The continuation of a text, as Ollama gives it: with `raw` as it is, else as the answer to a message."""
    options = asked["options"] or {}
    system = [{"role": "system", "content": asked["system"]}] if asked["system"] else []
    messages = [*system, {"role": "user", "content": asked["prompt"]}]
    request = {"text": asked["prompt"]} if asked["raw"] else {"messages": messages}

    def as_fields(text: str, _calls: Sequence[Call] = ()) -> dict[str, Any]:
        return {"response": text}

    request |= {**_format(asked["format"]), **_sampled(options)}
    return await _write(site, asked, request, Writing(None), as_fields)


async def _write(
    site: Site,
    asked: dict[str, Any],
    request: dict[str, Any],
    writing: Writing,
    as_fields: Callable[..., dict[str, Any]],
) -> Any:
    begun = time.perf_counter()
    model = await site.model_named(asked["model"])

    def part_of(fields: dict[str, Any], **more: Any) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": asked["model"] or model, "created_at": now, **fields, "done": False, **more}

    def last(answer: Answer) -> dict[str, Any]:
        end = writing.end(answer)
        spent_ns = int((time.perf_counter() - begun) * 1e9)
        reason = "length" if end.reason == "length" else "stop"
        counts = {"prompt_eval_count": end.prompt_tokens, "eval_count": end.tokens}
        return part_of(as_fields(end.rest, end.calls), done=True, done_reason=reason, total_duration=spent_ns, **counts)

    if not asked["stream"]:
        return last((await site.write(model, [request]))[0])
    parts = await site.stream(model, request)

    async def lines() -> AsyncIterator[str]:
        async for part in parts:
            if isinstance(part, Answer):
                yield line(last(part))
            elif part is None:
                yield line(part_of(as_fields("")))  # lines have no comments
            elif text := writing.add(part):
                yield line(part_of(as_fields(text)))

    return Stream(lines(), LINES)


def _format(asked: str | dict[str, Any] | None) -> dict[str, Any]:
    """Return Ollama's `format` as a request has it."""
    if not asked:
        return {}
    if asked == "json":
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": asked}}}


def _sampled(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of Ollama that choose and end tokens under their names here; -1 tokens are all."""
    names = {"repeat_penalty": "repetition_penalty", "num_predict": "max_new_tokens"}
    found = {names.get(key, key): value for key, value in options.items() if value is not None and key in _SAMPLED}
    if (found.get("max_new_tokens") or 0) < 0:
        del found["max_new_tokens"]
    return found


_SAMPLED: Final[dict[str, Schema]] = {
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"), NUMBER
    ),
    "top_k": COUNT,
    "seed": INTEGER,
    "num_predict": INTEGER,
    "stop": {"anyOf": [TEXT, array(TEXT, "", 0, 16)]},
}
# They change how Ollama computes, and no token.
_COMPUTES: Final = ("num_ctx", "num_thread", "num_gpu", "num_batch", "num_keep", "main_gpu", "use_mmap", "low_vram")
_WRITTEN: Final[dict[str, Schema]] = {
    "model": MODEL,
    "stream": {**FLAG, "default": True},
    "options": body({}, {**_SAMPLED, **dict.fromkeys(_COMPUTES, IGNORED)}),
    "keep_alive": IGNORED,
    "format": {"anyOf": [{"type": "string", "enum": ["", "json"]}, OBJECT], "description": '"json", or a JSON schema'},
    "think": {"type": "boolean", "enum": [False], "description": "false: the model's text is not divided"},
}
_WHOLE: Final = {"model": TEXT, "created_at": TEXT, "done": FLAG, "total_duration": INTEGER, "eval_count": INTEGER}
_OPERATIONS: Final = (
    Operation(
        "POST",
        "/api/chat",
        chat,
        {JSON: answer("OllamaMessage", message=OBJECT, **_WHOLE), LINES: TEXT},
        body({"messages": array(OBJECT, "a list of at least one message", 1)}, {"tools": array(TOOL), **_WRITTEN}),
    ),
    Operation(
        "POST",
        "/api/generate",
        generate,
        {JSON: answer("OllamaText", response=TEXT, **_WHOLE), LINES: TEXT},
        body({"prompt": TEXT}, {"system": TEXT, "raw": FLAG, **_WRITTEN}),
    ),
    Operation(
        "POST",
        "/api/embed",
        embed,
        {
            JSON: answer(
                "OllamaEmbeddings",
                model=TEXT,
                embeddings=array(VECTOR),
                total_duration=INTEGER,
                load_duration=INTEGER,
                prompt_eval_count=INTEGER,
            )
        },
        body(
            {"input": INPUT},
            {
                "model": MODEL,
                "truncate": {**FLAG, "default": True},
                "dimensions": COUNT,
                "keep_alive": IGNORED,
                "options": IGNORED,
            },
        ),
    ),
    Operation(
        "GET",
        "/api/tags",
        tags,
        {
            JSON: answer(
                "OllamaModels", models=array(answer("OllamaModel", name=TEXT, model=TEXT, size=INTEGER, details=OBJECT))
            )
        },
    ),
    Operation("GET", "/api/version", version, {JSON: answer("OllamaVersion", version=TEXT)}),
)
OPERATIONS: Final = tuple(one._replace(as_error=ollama_error) for one in _OPERATIONS)
