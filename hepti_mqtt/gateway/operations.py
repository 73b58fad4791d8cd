"""Operations of the gateway: a method and a path with what it reads and answers, and the document of all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from hepti_mqtt import __version__
from hepti_mqtt.errors import HeptiError
from hepti_mqtt.gateway.errors import LATER, MEANINGS, openai_error
from hepti_mqtt.gateway.schemas import INTEGER, NUMBER, TEXT, Schema, answer, array
from hepti_mqtt.gateway.site import Site

JSON: Final = "application/json"
PLAIN: Final = "text/plain"
FORM: Final = "multipart/form-data"

Handler = Callable[[Site, dict[str, Any]], Awaitable[Any]]


class Operation(NamedTuple):
    """One route. Its summary is the first line of the handler's docstring.

    answers: schemas by media type. body: of a request that has one. reads: the body's media type. is_open: it asks for
    no key. as_error: the shape of its errors.
    """

    method: str
    path: str
    handler: Handler
    answers: Mapping[str, Schema]
    body: Schema | None = None
    reads: str = JSON
    is_open: bool = False
    as_error: Callable[[HeptiError, str | None], dict[str, Any]] = openai_error


MODEL: Final[Schema] = {"type": "string", "description": "the name of a served model"}
TEXTS_AT_ONCE: Final = 2048  # as OpenAI's limit
TEXTS: Final = array(TEXT, f"a list of 1 to {TEXTS_AT_ONCE} texts", 1, TEXTS_AT_ONCE)
INPUT: Final[Schema] = {
    "anyOf": [TEXT, TEXTS],
    "description": f"a text or a list of 1 to {TEXTS_AT_ONCE} texts. Token ids belong to another tokenizer: programs "
    "that send them must send texts (LangChain: OpenAIEmbeddings(..., check_embedding_ctx_length=False))",
}
USAGE: Final = answer("Usage", prompt_tokens=INTEGER, total_tokens=INTEGER)
_FUNCTION: Final[Schema] = {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}
TOOL: Final[Schema] = {"type": "object", "properties": {"function": _FUNCTION}, "required": ["function"]}
VECTOR: Final = array(NUMBER)
LABEL: Final = answer("Label", label=TEXT, score=NUMBER)
_OR_NULL: Final[Schema] = {"type": ["string", "null"]}
_ERROR: Final = answer("Error", error=answer("ErrorBody", message=TEXT, type=TEXT, param=_OR_NULL, code=TEXT))
_KEY: Final = {"type": "http", "scheme": "bearer", "description": "one of HEPTI_GATEWAY_KEYS"}


def texts_of(value: str | list[str]) -> list[str]:
    """Return what `INPUT` allows as a list."""
    return [value] if isinstance(value, str) else value


def document(operations: Sequence[Operation], locked: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of operations; locked: whether requests need a key."""
    schemas: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        path, method = paths.setdefault(one.path, {}), one.method.lower()
        now = _described(one, locked, schemas)
        path[method] = _beside(path[method], now) if method in path else now
    errors = {_name(status): _error(status, schemas) for status in MEANINGS}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Hepti gateway", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": schemas, "responses": errors, "securitySchemes": {"key": _KEY}},
    }


def _beside(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
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


def _described(one: Operation, locked: bool, schemas: dict[str, Any]) -> dict[str, Any]:
    content = {kind: {"schema": _named(schema, schemas)} for kind, schema in one.answers.items()}
    responses = {"200": {"description": "the answer", "content": content}}
    responses |= {str(status): {"$ref": f"#/components/responses/{_name(status)}"} for status in MEANINGS}
    told = {
        "operationId": f"{one.method.lower()}{one.path.replace('/', '_').replace('.', '_')}",
        "summary": (one.handler.__doc__ or "").partition("\n")[0],
        "security": [{"key": []}] if locked and not one.is_open else [],
        "responses": responses,
    }
    if one.body is not None:
        body = {one.reads: {"schema": _named(one.body, schemas)}}
        told["requestBody"] = {"required": True, "content": body}
    return told


def _name(status: int) -> str:
    return f"Error{status}"


def _error(status: int, schemas: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"description": MEANINGS[status]}
    if status in LATER:
        told["headers"] = {"Retry-After": {"schema": INTEGER, "required": True, "description": "seconds"}}
    return told | {"content": {JSON: {"schema": _named(_ERROR, schemas)}}}


def _named(schema: Any, schemas: dict[str, Any]) -> Any:
    """Return a schema with a reference in place of each part that has a title; `schemas` gets those parts."""
    if isinstance(schema, list | tuple):
        return [_named(one, schemas) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    if schema.get("type") == "file":
        return {**schema, "type": "string", "format": "binary"}
    found = {key: _named(part, schemas) for key, part in schema.items()}
    if isinstance(title := found.get("title"), str) and "type" in found:
        schemas[title] = found
        return {"$ref": f"#/components/schemas/{title}"}
    return found
