"""Errors as HTTP: the code of a `HeptiError` decides the status, and the body has OpenAI's shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from starlette.responses import JSONResponse

from hepti_mqtt.core.errors import HeptiError, RequestError

RETRY_AFTER_S: Final = 1
LATER: Final = frozenset({429, 503})  # with Retry-After
#: what each status besides 200 means, and the codes of its errors
_STATUSES: Final[Mapping[int, tuple[str, ...]]] = {
    400: ("the request is wrong; the message names the key", "bad_request", "bad_name", "config",
          "context_length_exceeded"),
    401: ("no key, or a wrong one", "unauthorized"),
    403: ("a page of another site asks a gateway without keys", "forbidden"),
    404: ("the model is not served; the message lists the served models", "unknown_model", "not_found"),
    405: ("the path has another method", "method_not_allowed"),
    408: ("the body came too slowly", "slow_body"),
    413: ("the body is too long", "too_large"),
    415: ("the body is of another media type", "media_type"),
    422: ("a form without a valid task", "unprocessable"),
    429: ("the site is overloaded", "overloaded"),
    502: ("the site failed",),
    503: ("the site has no device, no planner or no broker now", "no_plan", "network", "packet_limit"),
    504: ("no answer in time", "deadline"),
}  # fmt: skip
MEANINGS: Final = {status: meaning for status, (meaning, *_) in _STATUSES.items()}
_STATUS: Final = {code: status for status, (_, *codes) in _STATUSES.items() for code in codes}


class HttpError(RequestError):
    """An error of HTTP alone: of a key, or of a body's size, time or type; code: one of `_STATUS`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def status_of(error: HeptiError) -> int:
    """Return the HTTP status of an error; 502 if the site failed."""
    return _STATUS.get(error.code, 502)


def openai_error(error: HeptiError) -> dict[str, Any]:
    """Return an error in OpenAI's shape."""
    status = status_of(error)
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    code = "model_not_found" if error.code == "unknown_model" else error.code
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": code}}


def ollama_error(error: HeptiError) -> dict[str, Any]:
    """Return an error in Ollama's shape."""
    return {"error": str(error)}


def error_response(error: HeptiError, as_body: Callable[[HeptiError], dict[str, Any]] = openai_error) -> JSONResponse:
    """Return the response to an error; as_body: its shape."""
    status = status_of(error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in LATER else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 504:  # a retry would start the same work again
        headers["x-should-retry"] = "false"
    return JSONResponse(as_body(error), status, headers)


def renamed(error: HeptiError, names: Mapping[str, str]) -> HeptiError:
    """Return an error in the client's words; names: its keys, by MQTT's."""
    if error.param is None or (name := names.get(error.param)) is None:
        return error
    copy = type(error)(str(error).replace(error.param, name, 1))
    copy.param = name
    return copy
