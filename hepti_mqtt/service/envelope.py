"""The planner's part of a request: JSON, id, deadline, reply topic and pins."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from hepti_mqtt.core.errors import BadNameError, RequestError
from hepti_mqtt.core.ids import check_name
from hepti_mqtt.core.plan import Objective, Route, WeightDtype, WireDtype
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.models import graph, largest_shape
from hepti_mqtt.planner.candidates import options_error
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.service.requests import MAX_ITEMS, MAX_REQUEST_BYTES, PINS, REQUEST_KEYS
from hepti_mqtt.service.texts import is_number, quoted
from hepti_mqtt.strategies import STRATEGIES

MAX_DEADLINE_MS: Final = 86_400_000
AUTO: Final = "auto"
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "strategy": (AUTO, *STRATEGIES),
    "wire": get_args(WireDtype),
    "weights": get_args(WeightDtype),
    "route": (AUTO, *get_args(Route)),
    "objective": get_args(Objective),
}
_PEEK_BYTES: Final = 1024  # bytes at both ends of an unparsed request to search for an id
_OBJECT: Final = re.compile(rb"\s*\{\s*[\"'](?:" + "|".join(sorted(REQUEST_KEYS)).encode() + rb")[\"']\s*:")
_ID: Final = re.compile(rb'(?<!\\)"id"\s*:\s*"([^"\\]*)"')
_SHORT: Final = 1024  # characters
_DELIVERY_KEYS: Final = ("id", "deadline_ms", "reply_to", "report")


@dataclass(frozen=True, slots=True)
class RequestEnvelope:
    """The planner's part of a request; `body` is the model's part, for `read_input`."""

    id: str | None
    deadline_s: float | None
    reply_to: str | None
    body: Mapping[str, Any]
    report: bool = False


def parse(payload: bytes) -> Mapping[str, Any]:
    """Return the JSON object of a request; raises RequestError for anything else."""
    _check_bytes(payload)
    items = sum(map(payload.count, (b",", b"[", b"{"))) if len(payload) > MAX_ITEMS else 0
    if items > MAX_ITEMS:
        raise RequestError(
            f"the request has {items} commas and brackets, which is over the limit of {MAX_ITEMS}; send less at once, "
            "or only the part of a text that you need"
        )
    try:
        data = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f'The request is not valid JSON ({error}). Send an object such as {{"text": "..."}}{_json_advice(payload)}.'
        ) from error
    if not isinstance(data, dict):
        raise RequestError('A request is a JSON object such as {"text": "..."}.')
    return data


def _check_bytes(payload: bytes) -> None:
    if len(payload) > MAX_REQUEST_BYTES:
        raise RequestError(f"a request of {len(payload)} bytes is over the limit of {MAX_REQUEST_BYTES}; send less")


def bare_text(payload: bytes) -> str:
    """Return the text of a payload; raises RequestError for a JSON request."""
    _check_bytes(payload)
    if _OBJECT.match(payload[:_PEEK_BYTES]) is not None:
        raise RequestError(
            "This topic accepts plain text, not a JSON object. Publish the text alone, or publish the object to the "
            f"model's topic `req`{_json_advice(payload)}."
        )
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"The text is not UTF-8 ({error.reason} at byte {error.start}). Send it as UTF-8."
        ) from error


def _json_advice(payload: bytes) -> str:
    """Return advice for templates that write their own quotes, as in Home Assistant."""
    single = re.match(rb"\s*\{\s*'", payload) is not None
    if single or (payload[:_PEEK_BYTES].lstrip().startswith(b"{") and b'"' in payload):
        quotes = "keys and texts in double quotes" if single else "quotes and line breaks within a text escaped"
        return f", with {quotes}; a template does that by `{{{{ {{'text': text}} | to_json }}}}`"
    return ""


def request_id(data: Mapping[str, Any]) -> str | None:
    """Return the client's own id of a request, or None; raises RequestError if it is invalid in a topic."""
    value = data.get("id")
    if value is None:
        return None
    try:
        return check_name("request", value)
    except BadNameError as error:
        raise RequestError(f"id: {error}") from error


def peek_id(payload: bytes) -> str | None:
    """Return the id of an unparsed request, None if it is not near the start or end."""
    for part in (payload[:_PEEK_BYTES], payload[-_PEEK_BYTES:]):
        if match := _ID.search(part):
            with suppress(BadNameError, UnicodeDecodeError):
                return check_name("request", match[1].decode())
    return None


def digest(data: Mapping[str, Any]) -> bytes:
    """Return a hash of a request without its delivery keys; raises RequestError if nested too deeply."""
    question = {k: v for k, v in data.items() if k not in _DELIVERY_KEYS}
    # Pictures and long texts are hashed directly: encoding them as JSON takes longer than the hash.
    long = {k: v for k, v in sorted(question.items()) if isinstance(v, str) and len(v) > _SHORT}
    question.update((k, len(v)) for k, v in long.items())
    try:
        text = json.dumps(question, sort_keys=True, separators=(",", ":"))
    except RecursionError as error:
        raise RequestError("the request is nested too deeply; send at most lists of lists") from error
    hasher = hashlib.sha256(text.encode())
    for value in long.values():
        hasher.update(value.encode("utf-8", "surrogatepass"))
    return hasher.digest()


def split_envelope(data: Mapping[str, Any]) -> RequestEnvelope:
    """Split a request into envelope and body; raises RequestError for invalid values."""
    deadline = data.get("deadline_ms")
    if deadline is not None and not (is_number(deadline) and 0 < deadline <= MAX_DEADLINE_MS):
        raise RequestError(f"deadline_ms must be a number above 0, at most {MAX_DEADLINE_MS}")
    reply_to = data.get("reply_to")
    if reply_to is not None and not isinstance(reply_to, str):
        raise RequestError("reply_to must be a topic")
    report = data.get("report", False)
    if not isinstance(report, bool):
        raise RequestError("report must be true or false: whether the answer waits for the devices' measurements")
    return RequestEnvelope(
        id=request_id(data),
        deadline_s=None if deadline is None else deadline / 1e3,
        reply_to=reply_to,
        body={k: v for k, v in data.items() if k not in (*PINS, *_DELIVERY_KEYS)},
        report=report,
    )


def validate_pins(pins: Pins) -> Pins:
    """Return pins with sorted devices and None for `auto`; raises RequestError for invalid values."""
    values = {"strategy": pins.strategy, "wire": pins.wire, "weights": pins.weight_dtype, "route": pins.route}
    for name, value in {**values, "objective": pins.objective}.items():
        if value is not None and value not in _CHOICES[name]:
            raise RequestError(f"{name} must be one of {', '.join(_CHOICES[name])}, not {quoted(value)}", name)
    strategy = None if pins.strategy == AUTO else pins.strategy
    route = pins.route if pins.route in get_args(Route) else None
    if not isinstance(pins.options, Mapping):
        raise RequestError('options must be an object such as {"variant": "kv"}')
    if (error := options_error(strategy, pins.options)) is not None:
        raise RequestError(f"options: {error}")
    accuracy, devices = pins.accuracy, pins.devices
    if accuracy is not None and not (is_number(accuracy) and 0 < accuracy <= 1):
        raise RequestError("accuracy must be in (0, 1]: the largest relative error that a narrow wire dtype may cause")
    if devices is not None:
        if not isinstance(devices, list | tuple) or not devices:
            raise RequestError("devices must be a list of at least one name")
        try:
            devices = tuple(sorted({check_name("device", name) for name in devices}))
        except BadNameError as wrong:
            raise RequestError(f"devices: {wrong}") from wrong
    return replace(pins, strategy=strategy, options=dict(pins.options), devices=devices, route=route, accuracy=accuracy)


def supported_pins(pins: Pins, spec: Spec, specs: Iterable[Spec]) -> Pins:
    """Return a model's pins, if several models answer a request together.

    Drop the strategy if its method supports only other models of the request. If the method supports none of the
    models, keep the strategy, so that the planner refuses the request.
    """
    if pins.strategy is None:
        return pins
    method = STRATEGIES[pins.strategy]
    able = [one for one in specs if method.why_unsupported(graph(one, largest_shape(one))) is None]
    return pins if not able or spec in able else replace(pins, strategy=None, options={})


def request_pins(data: Mapping[str, Any], own: Pins) -> Pins | None:
    """Return the pins of a request, None if it has none; raises RequestError for invalid values.

    own: the operator's pins, the default for the request's.
    """
    given = {key: data[key] for key in PINS if data.get(key) is not None}
    if not given:
        return None
    if "wire" in given and "accuracy" in given:
        raise RequestError(
            "wire and accuracy exclude each other: accuracy lets the planner choose wire. Send one of them."
        )
    # A strategy, wire or accuracy of the request replaces the operator's options, accuracy or wire.
    replaced: dict[str, Any] = {"options": {}} if "strategy" in given else {}
    replaced |= {"accuracy": None} if "wire" in given else {"wire": "f32"} if "accuracy" in given else {}
    named = {"weight_dtype" if key == "weights" else key: value for key, value in given.items()}
    return validate_pins(replace(own, **replaced | named))
