"""Bodies of requests, read within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from email import message_from_bytes
from email.message import Message
from typing import Any, Final

from starlette.requests import Request

from hepti_mqtt.errors import OverloadedError, RequestError
from hepti_mqtt.gateway.errors import MediaTypeError, SlowBodyError, TooLargeError

MAX_BODY_BYTES: Final = 32 << 20  # some pictures in base64, or 2,048 long texts
ROOM_BYTES: Final = 256 << 20
BODY_S: Final = 30.0  # a client that sends one byte a second does not hold a connection for longer
MAX_FIELDS: Final = 64  # of a form


class Room:
    """What the bodies of all requests that are being answered may take together."""

    def __init__(self, nbytes: int = ROOM_BYTES) -> None:
        self._left = nbytes

    @contextlib.contextmanager
    def part(self) -> Iterator[Callable[[int], None]]:
        """Give what takes bytes until the end of the block; it raises OverloadedError if too few are left."""
        taken = 0

        def take(nbytes: int) -> None:
            nonlocal taken
            if nbytes > self._left:
                raise OverloadedError("the bodies of other requests fill the gateway's memory; try again later")
            self._left -= nbytes
            taken += nbytes

        try:
            yield take
        finally:
            self._left += taken


def media_type(request: Request) -> str:
    """Return the media type of the body."""
    return _content_type(request).get_content_type()


def _content_type(request: Request) -> Message:
    head = Message()
    head["content-type"] = request.headers.get("content-type", "")
    return head


async def read_form(request: Request, take: Callable[[int], None]) -> dict[str, Any]:
    """Return the fields of a form: texts, and files as their bytes; raises as `read_json` does."""
    head = _content_type(request)
    boundary = head.get_boundary()
    if head.get_content_type() != "multipart/form-data" or not boundary:
        raise MediaTypeError("the body is no form; send the file as multipart/form-data")
    # Between the boundaries all bytes are the field's own.
    _, *parts = (b"\r\n" + await _read(request, take)).split(b"\r\n--" + boundary.encode("latin-1", "replace"))
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
    return values


async def read_json(request: Request, take: Callable[[int], None]) -> dict[str, Any]:
    """Return the JSON object of a request.

    take: room for its bytes. Raises TooLargeError, SlowBodyError, MediaTypeError, OverloadedError, RequestError;
    ClientDisconnect if the client hangs up.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise MediaTypeError(f"the body is {kind}; send JSON with Content-Type: application/json")
    raw = await _read(request, take)
    try:
        values = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise RequestError("the body is not a JSON object")
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


async def _read(request: Request, take: Callable[[int], None]) -> bytes:
    too_large = TooLargeError(f"the body is longer than {MAX_BODY_BYTES >> 20} MiB; send fewer inputs at once")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise too_large
    parts = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                if len(parts) + len(part) > MAX_BODY_BYTES:
                    raise too_large
                take(len(part))
                parts += part
    except TimeoutError:
        raise SlowBodyError(f"the body did not arrive within {BODY_S:g} s") from None
    return bytes(parts)
