"""Bodies of requests: read within bounds, and their keys one by one; a key that nobody reads is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from email import message_from_bytes
from email.message import Message
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request

from hepti_mqtt.errors import RequestError
from hepti_mqtt.gateway.errors import MediaTypeError, SlowBodyError, TooLargeError

MAX_BODY_BYTES: Final = 32 << 20  # some pictures in base64, or 2,048 long texts
BODY_S: Final = 30.0  # a client that sends one byte a second does not hold a connection for longer
MAX_FIELDS: Final = 64  # of a form
MAX_INPUTS: Final = 2048  # as OpenAI's limit


class Body:
    """The JSON object of a request. `take` reads a key once; `end` refuses the keys that are left."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._left = dict(values)

    def take(self, key: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a key's value, the default if it is missing or null; raises RequestError for another type."""
        value = self._left.pop(key, None)
        if value is None:
            return default
        wanted = kinds if isinstance(kinds, tuple) else (kinds,)
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            names = " or ".join(kind.__name__ for kind in wanted)
            raise RequestError(f"{key!r} is a {type(value).__name__}; send a {names}")
        return value

    def drop(self, *keys: str) -> None:
        """Ignore keys that change nothing of an answer."""
        for key in keys:
            self._left.pop(key, None)

    def end(self) -> None:
        """Raise RequestError if a key is left: what is not understood may change the answer."""
        if self._left:
            names = ", ".join(sorted(map(repr, self._left)))
            raise RequestError(f"the gateway does not know the keys {names}; leave them out")


async def read_form(request: Request) -> Body:
    """Return the fields of a form: texts, and files as their bytes; raises as `read_json` does."""
    head = Message()
    head["content-type"] = request.headers.get("content-type", "")
    boundary = head.get_boundary()
    if head.get_content_type() != "multipart/form-data" or not boundary:
        raise MediaTypeError("the body is no form; send the file as multipart/form-data")
    # Between the boundaries all bytes are the field's own.
    _, *parts = (b"\r\n" + await _read(request)).split(b"\r\n--" + boundary.encode("latin-1", "replace"))
    if len(parts) < 2 or not parts[-1].startswith(b"--") or len(parts) > MAX_FIELDS:
        raise RequestError("the form is not complete; send the file as multipart/form-data")
    values: dict[str, Any] = {}
    for part in parts[:-1]:
        header, _, content = part.partition(b"\r\n\r\n")
        about = message_from_bytes(header.lstrip(b"\r\n"))
        name, file = (about.get_param(key, header="content-disposition") for key in ("name", "filename"))
        is_list = isinstance(name, str) and name.endswith("[]")
        if not isinstance(name, str) or (name in values and not is_list):
            raise RequestError(f"a field of the form has no name, or one that another has: {str(name)[:40]!r}")
        value = content if file is not None else content.decode("utf-8", "replace")
        values[name] = [*values.get(name, ()), value] if is_list else value
    return Body(values)


async def read_json(request: Request) -> Body:
    """Return the JSON object of a request.

    Raises TooLargeError, SlowBodyError, MediaTypeError, RequestError; ClientDisconnect if the client hangs up.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise MediaTypeError(f"the body is {kind}; send JSON with Content-Type: application/json")
    raw = await _read(request)
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise RequestError("the body is not a JSON object")
    return Body(values)


async def _read(request: Request) -> bytes:
    too_large = TooLargeError(f"the body is longer than {MAX_BODY_BYTES >> 20} MiB; send fewer inputs at once")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise too_large
    parts = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                parts += part
                if len(parts) > MAX_BODY_BYTES:
                    raise too_large
    except TimeoutError:
        raise SlowBodyError(f"the body did not arrive within {BODY_S:g} s") from None
    return bytes(parts)


def texts_of(value: Any, key: str = "input") -> list[str]:
    """Return the texts of a string or a list of strings; raises RequestError.

    Token ids are refused: programs send those of their own tokenizer, which mean other words to this model.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise RequestError(f"{key!r} is neither a text nor a list of texts")
    if any(isinstance(item, int | list) for item in value):
        raise RequestError(
            f"{key!r} holds token ids, which belong to another tokenizer; send texts "
            "(LangChain: OpenAIEmbeddings(..., check_embedding_ctx_length=False))"
        )
    if not all(isinstance(item, str) for item in value):
        raise RequestError(f"{key!r} holds something that is not a text")
    if len(value) > MAX_INPUTS:
        raise RequestError(f"{key!r} has {len(value)} texts; send at most {MAX_INPUTS} at once")
    return value


__all__ = ["Body", "ClientDisconnect", "read_form", "read_json", "texts_of"]
