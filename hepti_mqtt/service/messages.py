"""Check the messages and tools of a conversation before the chat template reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.service.texts import CharacterBudget, describe, quoted

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
# Keys of a message for templates, and keys of earlier answers that clients send back.
KEYS: Final = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "annotations", "reasoning_content",
     "reasoning", "audio", "function_call"}
)  # fmt: skip
_NULL: Final = ("audio", "function_call")  # must be null
#: resolution of a picture: low for a single view, else by the model's files
DETAILS: Final = ("auto", "low", "high")
MAX_MESSAGES: Final = 1000
MAX_TOOLS: Final = 128


class GivenPicture(NamedTuple):
    """A picture of a request, in base64 or as a data URL."""

    name: str  #: for errors
    value: Any  #: None for a part of a message without data
    whole: bool = False  #: read as a single view


def read_messages(value: Any, pictures: list[GivenPicture] | None = None) -> list[dict[str, Any]]:
    """Return messages with plain texts, or with lists of parts for a vision model.

    pictures: of a vision model; the messages' pictures are appended. Raises RequestError for invalid messages.
    """
    if not isinstance(value, list) or not value:
        raise RequestError(f"messages must be a list with at least one message, not {describe(value)}")
    if len(value) > MAX_MESSAGES:
        raise RequestError(f"messages has {len(value)} elements; send at most {MAX_MESSAGES}")
    characters = CharacterBudget()
    return [_message(f"messages[{place}]", one, characters, pictures) for place, one in enumerate(value)]


def _message(name: str, value: Any, characters: CharacterBudget, pictures: list[GivenPicture] | None) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f'{name} must be an object such as {{"role": "user", "content": "..."}}')
    unknown = [key for key in value if key not in KEYS or (key in _NULL and value[key] is not None)]
    if unknown:
        raise RequestError(f"{name} has {', '.join(map(quoted, unknown[:8]))}, which no model reads; leave it out")
    role = value.get("role")
    if role not in ROLES:
        raise RequestError(f"{name}.role must be one of {', '.join(ROLES)}, not {quoted(role)}")
    calls = value.get("tool_calls")
    unread = ("content", "tool_calls", "refusal", "annotations", "reasoning")
    message = {key: one for key, one in value.items() if key not in unread and one is not None}
    if value.get("reasoning") and "reasoning_content" not in message:
        message["reasoning_content"] = value["reasoning"]
    message["role"] = "system" if role == "developer" else role
    content, missing_ok = value.get("content"), role == "assistant"
    if pictures is None:
        message["content"] = _text(f"{name}.content", content, missing_ok=missing_ok)
        characters.take(len(message["content"]))
    else:
        message["content"] = _parts(f"{name}.content", content, missing_ok, pictures)
        characters.take(sum(len(part.get("text", "")) for part in message["content"]))
    if calls:
        message["tool_calls"] = _calls(f"{name}.tool_calls", calls)
    return message


def _parts(name: str, value: Any, missing_ok: bool, pictures: list[GivenPicture]) -> list[dict[str, str]]:
    """Return a content as parts for templates of vision models; append its pictures to `pictures`."""
    if not isinstance(value, list):
        return [{"type": "text", "text": _text(name, value, missing_ok=missing_ok)}]
    parts: list[dict[str, str]] = []
    for place, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("image", "image_url"):
            pictures.append(_picture(f"{name}[{place}]", part))
            parts.append({"type": "image"})
        else:
            parts.append({"type": "text", "text": _text(name, [part], missing_ok=False)})
    return parts


def _picture(name: str, part: Mapping[str, Any]) -> GivenPicture:
    """Return the picture of a part, in OpenAI's form (`image_url`) or in the form `image`."""
    key = str(part["type"])
    given = part.get(key)
    wrapped: Mapping[str, Any] = given if key == "image_url" and isinstance(given, Mapping) else {"url": given}
    unknown = [one for one in part if one not in ("type", key)] + [
        one for one in wrapped if one not in ("url", "detail")
    ]
    if unknown:
        raise RequestError(f"{name} has {', '.join(map(quoted, unknown[:8]))}, which is not supported; leave it out")
    detail, data = wrapped.get("detail"), wrapped.get("url")
    if detail not in (None, *DETAILS):
        raise RequestError(f"{name}.image_url.detail must be one of {', '.join(DETAILS)}, not {quoted(detail)}")
    if isinstance(data, str) and data[:5].lower() in ("http:", "https"):
        raise RequestError(
            f"{name}: pictures are not fetched from the network; send the file itself as a data URL "
            "(data:image/jpeg;base64,...)"
        )
    if key == "image_url" and not isinstance(data, str):
        raise RequestError(f'{name}.image_url must be an object such as {{"url": "data:image/jpeg;base64,..."}}')
    return GivenPicture(name, data, detail == "low")


def _text(name: str, value: Any, *, missing_ok: bool) -> str:
    """Return a content's text; several parts are joined."""
    if value is None and missing_ok:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{name} must be a text, or a list of parts, not {describe(value)}")
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"{name} has a part of type {quoted(kind)}; this model reads only texts")
    return "\n".join(part["text"] for part in value)


def _calls(name: str, value: Any) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects; clients send the arguments as JSON text."""
    if not isinstance(value, list):
        raise RequestError(f"{name} must be a list, not {describe(value)}")
    calls = []
    for place, call in enumerate(value):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{name}[{place}] must have a function with a name")
        given = function.get("arguments")
        try:
            arguments = (json.loads(given) if isinstance(given, str) and given.strip() else given) or {}
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, Mapping):
            raise RequestError(f"{name}[{place}].function.arguments must be a JSON object")
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools of a request, None without tools; raises RequestError for an invalid tool."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise RequestError(f"tools must be a list of at most {MAX_TOOLS} functions, not {describe(value)}")
    for place, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                f'tools[{place}] must be an object such as {{"type": "function", "function": {{"name": "..."}}}}'
            )
        if not isinstance(function.get("parameters", {}), Mapping):
            raise RequestError(f"tools[{place}].function.parameters must be a JSON schema, which is an object")
    return value or None
