"""Streamed answers: an error after the first part becomes the last part; metrics count each outcome."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Final

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from hepti_mqtt.core.errors import HeptiError, RemoteError
from hepti_mqtt.gateway.errors import ollama_error, openai_error, status_of

_log = logging.getLogger(__name__)
EVENTS: Final = "text/event-stream"
LINES: Final = "application/x-ndjson"
PING: Final = ": ping\n\n"  # a comment, which readers of events skip
HUNG_UP: Final = 499  # the client left; only the metrics show it
# A proxy must neither store nor collect the parts of a stream.
_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(value: Any) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


def line(value: Any) -> str:
    """Return a line of JSON."""
    return f"{json.dumps(value)}\n"


_ERROR_PARTS: Final[dict[str, Callable[[HeptiError], str]]] = {
    EVENTS: lambda error: event(openai_error(error)),
    LINES: lambda error: line(ollama_error(error)),
}


class Stream(StreamingResponse):
    """A streamed answer; outcome: the status that the metrics count once it has ended."""

    def __init__(self, parts: AsyncIterator[str], media_type: str) -> None:
        self.outcome = HUNG_UP
        self._parts = self._until_end(parts, _ERROR_PARTS[media_type])
        super().__init__(self._parts, media_type=media_type, headers=_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts; a client that hangs up ends the request."""
        async with contextlib.aclosing(self._parts):
            await super().__call__(scope, receive, send)

    async def _until_end(
        self, parts: AsyncIterator[str], as_part: Callable[[HeptiError], str]
    ) -> AsyncGenerator[str, None]:
        try:
            async for part in parts:
                yield part
            self.outcome = 200
        except HeptiError as error:
            self.outcome = status_of(error)
            yield as_part(error)
        except Exception as error:  # the status has been sent, so that only a part can carry the cause
            _log.exception("a stream failed")
            self.outcome = 502
            yield as_part(RemoteError(f"the gateway failed ({type(error).__name__}); see its log"))
