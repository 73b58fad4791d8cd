"""JSON schemas as plain values: a body is checked by the same one that the OpenAPI document shows."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from math import inf
from typing import Any, Final

from hepti_mqtt.errors import RequestError

Schema = Mapping[str, Any]

_SHOWN: Final = 40  # characters of a value in an error
_KINDS: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "string": ((str,), "a text"),
    "integer": ((int,), "an integer"),
    "number": ((int, float), "a number"),
    "boolean": ((bool,), "true or false"),
    "array": ((list,), "a list"),
    "object": ((dict,), "an object"),
    "null": ((type(None),), "null"),
    "file": ((bytes,), "a file"),
}


def body(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """Return the schema of an object that has these keys and no other; an optional one may be null, too.

    A key that is not understood may change the answer, so it is refused.
    """
    return form(required, {key: _nullable(schema) for key, schema in (optional or {}).items()})


def form(required: Mapping[str, Schema], optional: Mapping[str, Schema]) -> Schema:
    """Return the schema of a form that has these fields and no other."""
    properties = {**required, **optional}
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def _nullable(schema: Schema) -> Schema:
    default = {key: schema[key] for key in ("default",) if key in schema}
    return {"anyOf": [{key: part for key, part in schema.items() if key != "default"}, NULL], **default}


def answer(title: str, **properties: Schema) -> Schema:
    """Return the schema of an object that has all of these keys; title: its name in the document."""
    return {"title": title, "type": "object", "properties": properties, "required": [*properties]}


def array(items: Schema, description: str = "", least: int = 0, most: int | None = None) -> Schema:
    """Return the schema of a list."""
    bounds = {key: bound for key, bound in (("minItems", least), ("maxItems", most)) if bound}
    return {"type": "array", "items": items, **bounds, **({"description": description} if description else {})}


TEXT: Final[Schema] = {"type": "string"}
FLAG: Final[Schema] = {"type": "boolean", "default": False}
INTEGER: Final[Schema] = {"type": "integer"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 1}
NUMBER: Final[Schema] = {"type": "number"}
NULL: Final[Schema] = {"type": "null"}
ANY: Final[Schema] = {}
OBJECT: Final[Schema] = {"type": "object"}
IGNORED: Final[Schema] = {"description": "ignored: it changes nothing of the answer"}


def checked(value: Any, schema: Schema, name: str = "the body") -> Any:
    """Return a value as its schema has it: with the default, or None, of each key that is missing or null.

    Raises RequestError, which names the part at fault and what is wanted instead.
    """
    if "anyOf" in schema:
        return _checked_any(value, schema, name)
    kind = schema.get("type")
    if kind is None:
        return value
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    if not _is_of(value, kind):
        raise _refusal(value, schema, name)
    if "enum" in schema and value not in schema["enum"]:
        raise _refusal(value, schema, name)
    if kind in ("integer", "number") and not schema.get("minimum", -inf) <= value <= schema.get("maximum", inf):
        raise _refusal(value, schema, name)
    if kind == "string":
        _check_unicode(value, name)
    if kind == "array":
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            raise _refusal(value, schema, name)
        return [checked(one, schema["items"], f"an element of {name}") for one in value]
    return _checked_object(value, schema, name) if kind == "object" and "properties" in schema else value


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, _KINDS[kind][0]) and (kind == "boolean" or not isinstance(value, bool))


def _checked_any(value: Any, schema: Schema, name: str) -> Any:
    """Return the value as the first alternative that it fits has it."""
    others = [one for one in schema["anyOf"] if one is not NULL]
    if value is None and len(others) < len(schema["anyOf"]):
        return schema.get("default")
    if len(others) == 1:
        return checked(value, others[0], name)
    for one in others:
        with contextlib.suppress(RequestError):
            return checked(value, one, name)
    raise _refusal(value, schema, name)


def _checked_object(value: dict[str, Any], schema: Schema, name: str) -> dict[str, Any]:
    known = schema["properties"]
    if unknown := sorted(value.keys() - known.keys()) if not schema.get("additionalProperties", True) else ():
        some = ", ".join(repr(key[:_SHOWN]) for key in unknown[:8])
        raise RequestError(f"{name} has the unknown keys {some}; leave them out")
    if missing := [key for key in schema["required"] if key not in value]:
        what = " and ".join(f"{key!r} ({_wanted(known[key])})" for key in missing)
        raise RequestError(f"{name} lacks {what}")
    found = {key: checked(value[key], each, repr(key)) for key, each in known.items() if key in value}
    if schema.get("additionalProperties", True):
        return value | found
    return {key: each.get("default") for key, each in known.items()} | found


def _check_unicode(value: str, name: str) -> None:
    """Raise RequestError for half a surrogate pair, which JSON can carry and no other text can."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is no Unicode text at character {error.start}; send it as UTF-8") from None


def _wanted(schema: Schema) -> str:
    if "description" in schema:
        return str(schema["description"])
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    if "anyOf" in schema:
        return " or ".join(_wanted(one) for one in schema["anyOf"] if one is not NULL)
    words = _KINDS[schema["type"]][1]
    low, high = (schema.get(a, schema.get(b)) for a, b in (("minimum", "minItems"), ("maximum", "maxItems")))
    size = (f" of at least {low}" if low is not None else "") + (f" and at most {high}" if high is not None else "")
    return words + size


def _refusal(value: Any, schema: Schema, name: str) -> RequestError:
    if isinstance(value, dict | list):
        shown = f"{_KINDS['array' if isinstance(value, list) else 'object'][1]} of {len(value)}"
    elif isinstance(value, bytes):
        shown = "a file"
    else:
        shown = repr(value)[:_SHOWN]
    return RequestError(f"{name} is {shown}; send {_wanted(schema)}")
