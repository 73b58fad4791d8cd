"""Errors as HTTP: the code of a `HeptiError` decides the status, and the body has OpenAI's shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from starlette.responses import JSONResponse

from hepti_mqtt.errors import HeptiError, RequestError

RETRY_AFTER_S: Final = 1
# Errors of status 429 and 503 have Retry-After.
_STATUS: Final[Mapping[str, int]] = {
    "bad_request": 400,
    "bad_name": 400,
    "config": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "context_length_exceeded": 400,
    "unknown_model": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "slow_body": 408,
    "id_in_use": 409,
    "too_large": 413,
    "media_type": 415,
    "unprocessable": 422,
    "overloaded": 429,
    "no_plan": 503,
    "network": 503,
    "packet_limit": 503,
    "deadline": 504,
}
LATER: Final = frozenset({429, 503})
# Statuses besides 200.
MEANINGS: Final[Mapping[int, str]] = {
    400: "the request is wrong; the message names the key",
    401: "no key, or a wrong one",
    403: "a page of another site asks a gateway without keys",
    404: "the model is not served; the message lists the served models",
    405: "the path has another method",
    408: "the body came too slowly",
    409: "a request of this id runs",
    413: "the body is too long",
    415: "the body is of another media type",
    422: "a form without a valid task",
    429: "the site is overloaded",
    502: "the site failed",
    503: "the site has no device, no planner or no broker now",
    504: "no answer in time",
}


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
    if status == 504:  # a client that asks again would begin the same work again
        headers["x-should-retry"] = "false"
    return JSONResponse(as_body(error), status, headers)


def renamed(error: HeptiError, names: Mapping[str, str]) -> HeptiError:
    """Return an error in the client's words; names: its keys, by MQTT's."""
    if error.param is None or (name := names.get(error.param)) is None:
        return error
    copy = type(error)(str(error).replace(error.param, name, 1))
    copy.param = name
    return copy
