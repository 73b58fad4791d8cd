"""How a request is to be served: its JSON, id, deadline, reply topic and pins, apart from what it asks of a model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from hepti_mqtt.errors import BadNameError, RequestError
from hepti_mqtt.ids import check_name
from hepti_mqtt.models import graph, largest_shape
from hepti_mqtt.plan import Objective, Route, WeightDtype, WireDtype
from hepti_mqtt.planner.candidates import options_error
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.service.requests import MAX_ITEMS, MAX_REQUEST_BYTES, PINS, REQUEST_KEYS
from hepti_mqtt.spec import Spec
from hepti_mqtt.strategies import STRATEGIES

MAX_DEADLINE_MS: Final = 86_400_000
AUTO: Final = "auto"
WIRES: Final[tuple[WireDtype, ...]] = get_args(WireDtype)
WEIGHT_DTYPES: Final[tuple[WeightDtype, ...]] = get_args(WeightDtype)
ROUTES: Final[tuple[Route, ...]] = get_args(Route)
OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)
_GLIMPSED: Final = 1024  # bytes at either end of a request in which an id is looked for unparsed
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
    """Return the text of a payload; raises RequestError for a JSON request, which would be read as a text here."""
    _check_bytes(payload)
    if _OBJECT.match(payload[:_GLIMPSED]) is not None:
        raise RequestError(
            "This topic takes a text as it is, and this is an object. Publish the text alone, or the object to the "
            f"model's topic `req`{_json_advice(payload)}."
        )
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"The text is not UTF-8 ({error.reason} at byte {error.start}). Send it as UTF-8."
        ) from error


def _json_advice(payload: bytes) -> str:
    """Return what to do about a template that writes its own quotes, as in Home Assistant."""
    single = re.match(rb"\s*\{\s*'", payload) is not None
    if single or (payload[:_GLIMPSED].lstrip().startswith(b"{") and b'"' in payload):
        quotes = "keys and texts in double quotes" if single else "quotes and line breaks within a text escaped"
        return f", with {quotes}; a template does that by `{{{{ {{'text': text}} | to_json }}}}`"
    return ""


def request_id(data: Mapping[str, Any]) -> str | None:
    """Return the client's own id of a request, None without one; raises RequestError if it cannot stand in a topic."""
    value = data.get("id")
    if value is None:
        return None
    try:
        return check_name("request", value)
    except BadNameError as error:
        raise RequestError(f"id: {error}") from error


def peek_id(payload: bytes) -> str | None:
    """Return the id of an unparsed request, None if it is not near its beginning or end."""
    for part in (payload[:_GLIMPSED], payload[-_GLIMPSED:]):
        if found := _ID.search(part):
            with suppress(BadNameError, UnicodeDecodeError):
                return check_name("request", found[1].decode())
    return None


def digest(data: Mapping[str, Any]) -> bytes:
    """Return a hash of what a request asks, not of how it is delivered; raises RequestError if nested too deeply."""
    question = {k: v for k, v in data.items() if k not in _DELIVERY_KEYS}
    # Pictures and long texts are hashed directly: encoding them as JSON takes longer than the hash.
    long = {k: v for k, v in sorted(question.items()) if isinstance(v, str) and len(v) > _SHORT}
    question.update((k, len(v)) for k, v in long.items())
    try:
        text = json.dumps(question, sort_keys=True, separators=(",", ":"))
    except RecursionError as error:
        raise RequestError("the request is nested too deeply; send lists of lists at the most") from error
    found = hashlib.sha256(text.encode())
    for value in long.values():
        found.update(value.encode("utf-8", "surrogatepass"))
    return found.digest()


def split_envelope(data: Mapping[str, Any]) -> RequestEnvelope:
    """Split a request into envelope and body; raises RequestError naming what is invalid."""
    deadline = data.get("deadline_ms")
    if deadline is not None:
        number = isinstance(deadline, int | float) and not isinstance(deadline, bool)
        if not number or not 0 < deadline <= MAX_DEADLINE_MS:
            raise RequestError(f"deadline_ms must be a number above 0, at most {MAX_DEADLINE_MS}")
    reply_to = data.get("reply_to")
    if reply_to is not None and not isinstance(reply_to, str):
        raise RequestError("reply_to must be a topic")
    report = data.get("report", False)
    if not isinstance(report, bool):
        raise RequestError("report must be true or false: whether the answer waits for what the devices counted")
    return RequestEnvelope(
        id=request_id(data),
        deadline_s=None if deadline is None else deadline / 1e3,
        reply_to=reply_to,
        body={k: v for k, v in data.items() if k not in (*PINS, *_DELIVERY_KEYS)},
        report=report,
    )


def validate_pins(
    strategy: Any, options: Any, devices: Any, wire: Any, weights: Any, route: Any = None, accuracy: Any = None
) -> Pins:
    """Return validated pins: devices sorted, `auto` as None.

    Raises RequestError for an unknown strategy, variant, wire dtype, weight dtype or route, or an invalid device name.
    """
    if strategy is not None and strategy not in (choices := (AUTO, *STRATEGIES)):
        raise RequestError(f"Unknown strategy {str(strategy)[:40]!r}. Choose one of {', '.join(choices)}.")
    chosen = None if strategy == AUTO else strategy
    if not isinstance(options, Mapping):
        raise RequestError('options must be an object such as {"variant": "kv"}')
    if (error := options_error(chosen, options)) is not None:
        raise RequestError(f"options: {error}")
    if wire not in WIRES:
        raise RequestError(f"wire must be one of {', '.join(WIRES)}")
    if weights not in WEIGHT_DTYPES:
        raise RequestError(f"weights must be one of {', '.join(WEIGHT_DTYPES)}")
    way = None if route == AUTO else route
    if way not in (None, *ROUTES):
        raise RequestError(f"route must be one of {', '.join((AUTO, *ROUTES))}")
    budget = _budget(accuracy)
    if devices is None:
        return Pins(chosen, dict(options), None, wire, weights, way, accuracy=budget)
    if not isinstance(devices, list | tuple) or not devices:
        raise RequestError("devices must be a list of at least one name")
    try:
        names = {check_name("device", name) for name in devices}
    except BadNameError as error:
        raise RequestError(f"devices: {error}") from error
    return Pins(chosen, dict(options), tuple(sorted(names)), wire, weights, way, accuracy=budget)


def _budget(accuracy: Any) -> float | None:
    if accuracy is None:
        return None
    if not isinstance(accuracy, int | float) or isinstance(accuracy, bool) or not 0 < accuracy <= 1:
        raise RequestError("accuracy must be in (0, 1]: the largest relative error that a narrow wire dtype may cause")
    return float(accuracy)


def supported_pins(pins: Pins, spec: Spec, specs: Iterable[Spec]) -> Pins:
    """Return the pins of one of several models that answer together.

    A method that divides only others of the models pins only those. If it divides no model, the planner refuses it.
    """
    if pins.strategy is None:
        return pins
    method = STRATEGIES[pins.strategy]
    able = [one for one in specs if method.why_unsupported(graph(one, largest_shape(one))) is None]
    return pins if not able or spec in able else replace(pins, strategy=None, options={})


def request_pins(data: Mapping[str, Any], own: Pins) -> Pins | None:
    """Return the pins of a request, None if it has none; raises RequestError naming what is invalid.

    own: the operator's pins, the default for the request's.
    """
    if all(data.get(key) is None for key in PINS):
        return None
    strategy = data.get("strategy")
    options = data.get("options")
    devices = data.get("devices")
    wire, accuracy = data.get("wire"), data.get("accuracy")
    if wire is not None and accuracy is not None:
        raise RequestError(
            "wire and accuracy exclude each other: accuracy lets the planner choose wire. Send one of them."
        )
    objective = own.objective if data.get("objective") is None else data["objective"]
    if objective not in OBJECTIVES:
        raise RequestError(f"objective must be one of {', '.join(OBJECTIVES)}")
    pins = validate_pins(
        own.strategy if strategy is None else strategy,
        (own.options if strategy is None else {}) if options is None else options,
        own.devices if devices is None else devices,
        (own.wire if accuracy is None else "f32") if wire is None else wire,
        own.weight_dtype if data.get("weights") is None else data["weights"],
        own.route if data.get("route") is None else data["route"],
        (own.accuracy if wire is None else None) if accuracy is None else accuracy,
    )
    return replace(pins, objective=objective)
