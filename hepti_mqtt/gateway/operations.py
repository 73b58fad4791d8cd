"""Operations of the gateway: a method and a path with what it reads and answers, and the document of all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter

from hepti_mqtt import __version__
from hepti_mqtt.core.errors import HeptiError
from hepti_mqtt.gateway.answers import ERROR, OLLAMA_ERROR
from hepti_mqtt.gateway.bodies import Body
from hepti_mqtt.gateway.errors import LATER, MEANINGS, ollama_error, openai_error
from hepti_mqtt.gateway.site import Site

JSON: Final = "application/json"
PLAIN: Final = "text/plain"

Handler = Callable[[Site, Any], Awaitable[Any]]


class Operation(NamedTuple):
    """One route. Its summary is the first line of the handler's docstring."""

    method: str
    path: str
    handler: Handler
    #: types of answers by media type; `str` for any text, `Any` for a stream: a schema would describe each part
    answers: Mapping[str, Any]
    #: type of the body (POST), or of the values in the path; None without
    body: type[Body] | None = None
    #: the body's media type
    reads: str = JSON
    #: needs no key
    is_open: bool = False
    #: the shape of its errors
    as_error: Callable[[HeptiError], dict[str, Any]] = openai_error


#: name and type of errors by their writer
_ERRORS: Final[Mapping[Callable[[HeptiError], dict[str, Any]], tuple[str, Any]]] = {
    openai_error: ("Error", ERROR),
    ollama_error: ("OllamaError", OLLAMA_ERROR),
}
_KEY: Final = {"type": "http", "scheme": "bearer", "description": "one of HEPTI_GATEWAY_KEYS"}


def document(operations: Sequence[Operation], locked: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of operations; locked: whether requests need a key."""
    types: list[Any] = [kind for _, kind in _ERRORS.values()]
    for one in operations:
        types += [kind for kind in (one.body, *one.answers.values()) if kind is not None]
    named = [(place, "validation", TypeAdapter(kind)) for place, kind in enumerate(types)]
    by_place, together = TypeAdapter.json_schemas(named, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas = {place: schema for (place, _), schema in by_place.items()}
    parts = iter([schemas[place] for place in range(len(types))])
    error_schemas = {name: next(parts) for name, _ in _ERRORS.values()}
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        body = None if one.body is None else next(parts)
        content = {kind: {"schema": next(parts)} for kind in one.answers}
        path, method = paths.setdefault(one.path, {}), one.method.lower()
        described = _described(one, body, content, locked)
        path[method] = _merged(path[method], described) if method in path else described
    errors = {f"{name}{s}": _error(s, schema) for name, schema in error_schemas.items() for s in MEANINGS}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Hepti gateway", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": together.get("$defs", {}),
            "responses": errors,
            "securitySchemes": {"key": _KEY},
        },
    }


def _merged(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return two operations at one path, which read bodies of different types, as one."""
    answers = (one["responses"]["200"]["content"][JSON]["schema"] for one in (first, other))
    content = {**first["responses"]["200"]["content"], JSON: {"schema": {"anyOf": [*answers]}}}
    bodies = first["requestBody"]["content"] | other["requestBody"]["content"]
    return {
        **first,
        "summary": f"{first['summary']} As a form: {other['summary']}",
        "responses": {**first["responses"], "200": {"description": "the answer", "content": content}},
        "requestBody": {"required": True, "content": bodies},
    }


def _described(one: Operation, body: Any, content: Mapping[str, Any], locked: bool) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    error, _ = _ERRORS[one.as_error]
    responses |= {str(status): {"$ref": f"#/components/responses/{error}{status}"} for status in MEANINGS}
    name = "".join(letter if letter.isalnum() else "_" for letter in one.path)
    described = {
        "operationId": f"{one.method.lower()}{name}",
        "summary": (one.handler.__doc__ or "").partition("\n")[0],
        "security": [{"key": []}] if locked and not one.is_open else [],
        "responses": responses,
    }
    if body is not None and one.method == "POST":
        described["requestBody"] = {"required": True, "content": {one.reads: {"schema": body}}}
    elif one.body is not None:
        described["parameters"] = [
            {"name": key, "in": "path", "required": True, "schema": {"type": "string"}} for key in one.body.model_fields
        ]
    return described


def _error(status: int, schema: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"description": MEANINGS[status], "content": {JSON: {"schema": schema}}}
    if status in LATER:
        about = {"schema": {"type": "integer"}, "required": True, "description": "seconds"}
        described["headers"] = {"Retry-After": about}
    return described
