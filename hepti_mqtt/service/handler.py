"""The desk: users' JSON in, jobs for the coordinator; the coordinator's results in, JSON for the users.

Several threads use it, so that tokenising and writing JSON hold up neither the session nor other clients.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.config.options import RequestPins
from hepti_mqtt.errors import HeptiError, IdInUseError, PacketLimitError, RemoteError, RequestError, UnknownModelError
from hepti_mqtt.models import largest_shape
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.coordinator.interface import AnswerRequest, RefuseRequest, TokenReady
from hepti_mqtt.runtime.coordinator.requests import Generation, Pins, Request, RequestKey, RunStats
from hepti_mqtt.service import answers, requests
from hepti_mqtt.service.forecast import Forecasts, shares
from hepti_mqtt.service.requests import (
    MAX_WAITING_BYTES,
    MemoryQuota,
    digest,
    parse,
    peek_id,
    request_id,
    split_envelope,
    split_into_batches,
)

DEADLINE_S: Final = 600.0  # of requests that name none: every request ends
SIMULATED: Final = "simulated"
ESTIMATED: Final = "estimated"  # the answer was ready before its forecast
MAX_CACHED_ANSWERS: Final = 256
LATE: Final = 8  # requests of a model by which the planner knows its own part
MAX_CACHED_BYTES: Final = 64 << 20


class Reply(NamedTuple):
    """What to publish to a user; request_id: the name under which it was asked, or one that was made for it."""

    topic: str
    payload: bytes
    request_id: str


class _CachedAnswer(NamedTuple):
    """An answer that is remembered, and the digest of what was asked."""

    digest: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A served model: its files, and what the planner's user pinned."""

    name: str
    checkpoint: Checkpoint
    pins: Pins


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _ReplyContext:
    """How to answer a job."""

    topic: str
    request_id: str
    model_input: requests.ModelInput
    received_s: float


class RequestHandler:
    """Turns requests into jobs and results into answers; keeps late answers for requests that come again.

    forecasts: wanted with every request, and told in its answer as far as they have come. request_pins: whether
    requests may pin anything.
    """

    def __init__(
        self, site: str, models: Mapping[str, OpenModel], forecasts: Forecasts, request_pins: RequestPins = "any"
    ) -> None:
        self._topics = Topics(site)
        self._request_pins = request_pins
        self._models = models
        self._forecasts = forecasts
        self._room = MemoryQuota(MAX_WAITING_BYTES)
        self._lock = threading.Lock()  # guards the answers that are kept
        self._answered: OrderedDict[RequestKey, _CachedAnswer] = OrderedDict()
        self._answered_bytes = 0
        self._read_s: dict[str, deque[float]] = {}  # by model: from a request to its first dispatch, of late

    def read_request(
        self, model: str, client: str, payload: bytes, now: float, made: Callable[[], str] | None = None
    ) -> Request | Reply:
        """Return the job of a user's request, or the answer if there is one already: an error, or what it was told.

        now: on the session's clock; deadlines count from it. made: gives the name of a request that brings none.
        """
        made = made or _new_name
        name: str | None = None
        try:
            data = parse(payload)
            name = request_id(data)
            return self._build_request(model, client, name or made(), data, now)
        except HeptiError as error:
            name = name or peek_id(payload)
            asked = name or made()
            return Reply(self._topics.response(model, client, asked), _failure(name, error), asked)

    def _build_request(
        self, model: str, client: str, name: str, data: Mapping[str, Any], now: float
    ) -> Request | Reply:
        served = self._models.get(model)
        if served is None:
            raise UnknownModelError(f"no model {model} is served here; there are: {', '.join(sorted(self._models))}")
        parts = split_envelope(data, served.pins)
        if parts.pins is not None and self._request_pins == "none":
            raise RequestError(
                f"this planner was started with --request-pins none: leave {', '.join(requests.PINS)} out, or ask its "
                "operator"
            )
        topic = parts.reply_to or self._topics.response(model, client, name)
        if parts.reply_to and not self._topics.response_allowed(parts.reply_to, model, client):
            own = self._topics.responses(client, model).removesuffix("+")
            raise RequestError(f"reply_to must be a topic below {own}, where only {client} reads")
        key = RequestKey(model, client, name)
        asked = digest(data) if parts.id else b""  # an id that was made here cannot come again
        known = self._cached_answer(key)
        if known is not None and known.digest != asked:
            raise IdInUseError.of(name)
        if known is not None:
            return Reply(topic, known.payload, name)
        prepared = requests.read_input(served.checkpoint, parts.body)
        chunks = split_into_batches(prepared, largest_shape(served.checkpoint.spec).size)
        generation = None
        if prepared.new_tokens:
            prompt = tuple(prepared.inputs[1:].tolist())
            end = requests.end_token(served.checkpoint)
            generation = Generation(prompt, prepared.new_tokens, prepared.shape, end)
        deadline_s = now + (DEADLINE_S if parts.deadline_s is None else parts.deadline_s)
        ticket = _ReplyContext(topic, name, prepared, now)
        self._room.take(prepared.inputs.nbytes, ticket)
        pins, computes, report = parts.pins, prepared.wants_result, parts.report
        return Request(
            key, chunks, ticket, deadline_s, pins, computes, generation=generation, digest=asked, wants_report=report
        )

    def refuse_unread(self, model: str, client: str, payload: bytes, error: HeptiError, made: str = "") -> Reply:
        """Return the answer to a request that is not even looked at; callable on any thread."""
        name = peek_id(payload)
        asked = name or made or _new_name()
        return Reply(self._topics.response(model, client, asked), _failure(name, error), asked)

    def request_forecast(self, request: Request) -> None:
        """Want worked out, on another thread, what a job will cost: its answer tells it, but does not wait for it."""
        self._forecasts.request(request.key.model, dict.fromkeys(request.run_shapes()))

    def _overhead_s(self, command: AnswerRequest, ticket: _ReplyContext) -> float:
        """Return what the planner itself takes until a request of a model is dispatched: the least of late."""
        begun_s = min((s.dispatched_s for s in command.stats if s.dispatched_s is not None), default=None)
        with self._lock:
            late = self._read_s.setdefault(command.request.key.model, deque(maxlen=LATE))
            if begun_s is not None:
                late.append(max(begun_s - ticket.received_s, 0.0))
            return min(late, default=0.0)

    def encode_token(self, command: TokenReady) -> Reply:
        """Return the JSON of one token of an answer: it goes out before the answer, which has all of them."""
        request, ticket = command.request, command.request.reply_context
        assert isinstance(ticket, _ReplyContext)
        told = {
            "request": ticket.request_id,
            "index": command.index,
            "token": command.tokens[-1],
            "text": answers.token_text(self._models[request.key.model].checkpoint, command.tokens),
            "final": False,
        }
        return Reply(ticket.topic, json.dumps(told).encode(), ticket.request_id)

    def encode_answer(self, command: AnswerRequest, now: float) -> Reply:
        """Return the JSON of a result; a result that cannot be told becomes an error."""
        request, ticket = command.request, command.request.reply_context
        assert isinstance(ticket, _ReplyContext)
        model = self._models[request.key.model]
        try:
            result = (
                answers.decode_output(model.checkpoint, ticket.model_input, request.output())
                if request.wants_result
                else None
            )
        except HeptiError as error:
            return self.encode_refusal(RefuseRequest(request, error))
        except ValueError as error:  # outputs of the chunks that do not fit together
            return self.encode_refusal(
                RefuseRequest(request, RemoteError(f"the devices' outputs do not fit together: {error}"))
            )
        forecasts = [self._forecasts.lookup(s.plan, s.shape) for s in command.stats]
        for stats in command.stats:
            if stats.requests > 1:
                self._forecasts.record_batched_run(stats)
        plan, reading_s = command.plan, self._overhead_s(command, ticket)
        expected_s = sum(f.seconds * s.correction for f, s in zip(forecasts, command.stats, strict=True))
        told = {
            "plan": {
                "id": str(plan.version),
                "epoch": list(plan.version),
                "strategy": plan.strategy,
                "options": dict(plan.options),
                "wire": plan.wire,
                "wire_error": plan.wire_error,
                "weights": plan.weight_dtype,
                "route": plan.route,
                "devices": shares(forecasts),
                "reason": plan.reason,
                "predicted_ms": plan.predicted_s * 1e3,
                "predicted_tokens": plan.predicted_tokens,
            },
            "tokens": ticket.model_input.shape.size,
            "runs": len(command.stats) if request.wants_result else 0,
            "batched_with": sum(s.requests - 1 for s in command.stats),
            **_reported_costs(command.stats),
            "forecast": SIMULATED if all(f.simulated for f in forecasts) else ESTIMATED,
            "predicted_ms": (reading_s + sum(f.seconds for f in forecasts)) * 1e3,
            "expected_ms": (reading_s + expected_s) * 1e3,
            "predicted_bytes": round(sum(f.nbytes for f in forecasts)),
            "latency_ms": (now - ticket.received_s) * 1e3,
        }
        if request.generation is not None:
            told["final"] = True
        head = {"id": ticket.request_id, "model": request.key.model, "ok": True}
        text = "null" if result is None else answers.to_json(result)
        payload = f'{json.dumps(head)[:-1]}, "result": {text}, {json.dumps(told, allow_nan=False)[1:]}'.encode()
        self._cache_answer(request, payload)
        return Reply(ticket.topic, payload, ticket.request_id)

    def encode_too_large(self, reply: Reply, error: PacketLimitError) -> Reply:
        """Return the error that takes the place of an answer which the broker does not take; callable on any thread."""
        return reply._replace(payload=_failure(json.loads(reply.payload)["id"], error))

    def encode_refusal(self, command: RefuseRequest) -> Reply:
        """Return the JSON of an error; the same request may be sent again."""
        ticket = command.request.reply_context
        assert isinstance(ticket, _ReplyContext)
        return Reply(ticket.topic, _failure(ticket.request_id, command.error), ticket.request_id)

    def _cached_answer(self, key: RequestKey) -> _CachedAnswer | None:
        with self._lock:
            known = self._answered.get(key)
            if known is not None:
                self._answered.move_to_end(key)
            return known

    def _cache_answer(self, request: Request, payload: bytes) -> None:
        with self._lock:
            if (before := self._answered.pop(request.key, None)) is not None:
                self._answered_bytes -= len(before.payload)
            self._answered_bytes += len(payload)
            self._answered[request.key] = _CachedAnswer(request.digest, payload)
            while len(self._answered) > MAX_CACHED_ANSWERS or self._answered_bytes > MAX_CACHED_BYTES:
                _, old = self._answered.popitem(last=False)
                self._answered_bytes -= len(old.payload)


def _new_name() -> str:
    return uuid.uuid4().hex


def mark_repeated(reply: Reply) -> Reply:
    """Return a reply that says that there may have been one before."""
    return reply._replace(payload=b'{"repeated": true, ' + reply.payload.removeprefix(b"{"))


def _failure(name: str | None, error: HeptiError) -> bytes:
    return json.dumps({"id": name, "ok": False, "error": {"code": error.code, "message": str(error)}}).encode()


def _reported_costs(runs: Sequence[RunStats]) -> dict[str, Any]:
    """Return what the devices counted; null unless all of them have said so of every run."""
    if not all(s.reported for s in runs):
        return {"compute_ms": None, "wait_ms": None, "bytes_on_wire": None}
    return {
        "compute_ms": _sum_ms(s.compute_us for s in runs),
        "wait_ms": _sum_ms(s.wait_us for s in runs),
        "bytes_on_wire": sum(s.dispatch_bytes + sum(s.sent_bytes.values()) for s in runs),
    }


def _sum_ms(runs: Iterable[Mapping[str, int]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for by_device in runs:
        for device, micros in by_device.items():
            total[device] = total.get(device, 0.0) + micros / 1e3
    return total
