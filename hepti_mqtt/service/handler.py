"""Convert users' JSON to requests for the coordinator, and results to JSON.

Several threads call this module, so tokenising and encoding delay neither the session nor other clients.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.config.options import RequestPins
from hepti_mqtt.core.errors import (
    HeptiError,
    IdInUseError,
    PacketLimitError,
    RemoteError,
    RequestError,
    UnknownModelError,
)
from hepti_mqtt.core.ids import check_name, whole_model
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.models import largest_shape
from hepti_mqtt.models.shapes import ImageInput, TextInput
from hepti_mqtt.protocol.messages import ACCEPTED_BY, LOGPROBS, THINKING
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.coordinator.batches import Batch
from hepti_mqtt.runtime.coordinator.guesses import Guesses
from hepti_mqtt.runtime.coordinator.interface import AnswerRequest, RefuseRequest, TokenReady
from hepti_mqtt.runtime.coordinator.requests import Pins, Request, RequestKey, RunStats
from hepti_mqtt.runtime.coordinator.texts import Generation
from hepti_mqtt.runtime.coordinator.transcriptions import Transcription
from hepti_mqtt.service import answers, requests
from hepti_mqtt.service.decoder import RawRequest
from hepti_mqtt.service.detokenizer import WrittenText
from hepti_mqtt.service.envelope import (
    RequestEnvelope,
    bare_text,
    digest,
    parse,
    peek_id,
    request_id,
    request_pins,
    split_envelope,
    supported_pins,
)
from hepti_mqtt.service.forecast import Forecasts, shares
from hepti_mqtt.service.logprobs import described
from hepti_mqtt.service.picture_prompts import has_pictures, rows_of
from hepti_mqtt.service.requests import MAX_WAITING_BYTES, MemoryQuota, split_into_batches
from hepti_mqtt.service.thinking import Thoughts

DEADLINE_S: Final = 600.0  # of a request that names no deadline
SIMULATED: Final = "simulated"
ESTIMATED: Final = "estimated"  # the answer was ready before its forecast
MAX_CACHED_ANSWERS: Final = 256
OVERHEADS: Final = 8  # planner overheads kept per model, of its last requests
MAX_CACHED_BYTES: Final = 64 << 20


class Reply(NamedTuple):
    """A message to publish to a user."""

    topic: str
    payload: bytes
    key: RequestKey  #: its id is the client's own, or a generated one
    outcome: str = "ok"  #: or the code of an error
    plan: str = ""  #: plan version of the request's runs
    predicted_ms: float | None = None  #: latency predicted by this plan, None for an error

    def as_error(self, error: PacketLimitError) -> Reply:
        """Return an error reply in place of an answer that the broker rejects as too large."""
        return self._replace(payload=encode_failure(json.loads(self.payload)["id"], error), outcome=error.code)


class _CachedAnswer(NamedTuple):
    """An answer kept for repetitions of its request."""

    digest: bytes  #: of the request
    payload: bytes


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A served model."""

    name: str
    checkpoint: Checkpoint
    pins: Pins  #: of the planner's operator


class RequestIdentity(NamedTuple):
    """A request's identity to its client: key and content hash."""

    key: RequestKey  #: with the model's public name
    digest: bytes  #: of the request, b"" without an id of the client


class Joint:
    """The requests to several models that answer one client's request together; callable on any thread."""

    def __init__(self, words: Checkpoint | None = None) -> None:
        self.requests: tuple[Request, ...] = ()  #: in the order of their models; the last has the question
        self.words = words  #: text model of a prompt with pictures; its request starts after the pictures' answer
        self._lock = threading.Lock()
        self._answers: dict[RequestKey, AnswerRequest] = {}
        self._failed = False

    def add(self, answer: AnswerRequest) -> tuple[AnswerRequest, ...]:
        """Add an answer; return all answers in order once they are complete, else nothing."""
        with self._lock:
            self._answers[answer.request.key] = answer
            whole = len(self._answers) == len(self.requests) and not self._failed
            return tuple(self._answers[request.key] for request in self.requests) if whole else ()

    def fail(self) -> bool:
        """Mark the request as failed; return whether this failure is the first."""
        with self._lock:
            before, self._failed = self._failed, True
            return not before


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _ReplyContext:
    """Context for the answer of a request; weakly referenced by the memory quota."""

    topic: str
    model_input: requests.ModelInput
    received_s: float
    streams: bool  #: publish partial answers before the whole answer
    written: WrittenText | None  #: text of the generated tokens, None if the request does not stream text
    identity: RequestIdentity
    joint: Joint | None = None  #: of a request whose answer needs outputs of several models
    thoughts: Thoughts | None = None  #: separates thoughts from text; None without thoughts


MakeId = Callable[[RawRequest], str]


def _new_id(_raw: RawRequest) -> str:
    return uuid.uuid4().hex


class RequestHandler:
    """Decode requests and encode answers; cache the last answers for repeated requests."""

    def __init__(
        self, site: str, models: Mapping[str, OpenModel], forecasts: Forecasts, request_pins: RequestPins = "any"
    ) -> None:
        self._topics = Topics(site)
        self._request_pins = request_pins  # whether requests may pin parts of the plan
        self._models = models
        self._models_by_public_name: dict[str, list[OpenModel]] = {}
        for model in models.values():
            self._models_by_public_name.setdefault(whole_model(model.name), []).append(model)
        self._forecasts = forecasts
        self._quota = MemoryQuota(MAX_WAITING_BYTES)
        self._lock = threading.Lock()  # guards the cached answers and the overheads
        self._answered: OrderedDict[RequestKey, _CachedAnswer] = OrderedDict()
        self._answered_bytes = 0
        self._overheads_s: dict[str, deque[float]] = {}  # by model: from arrival to first dispatch

    def read_request(self, raw: RawRequest, now: float, make_id: MakeId = _new_id) -> Request | Reply | RequestKey:
        """Return the parsed request; the reply to an invalid or cached request; for a cancel, the key of its request.

        now: on the session's clock; deadlines count from it. make_id: returns an id for a request without one.
        """
        own_id: str | None = None
        try:
            data = {"text": bare_text(raw.payload)} if raw.bare else parse(raw.payload)
            if data.keys() == {"cancel"}:
                return RequestKey(raw.model, raw.client, check_name("request", data["cancel"]))
            own_id = request_id(data)
            key = RequestKey(raw.model, raw.client, own_id or make_id(raw))
            return self._build_request(key, data, now, self._topics_of(raw), raw.bare)
        except HeptiError as error:
            return self.refuse_unread(raw, error, make_id, own_id)

    def _build_request(
        self, key: RequestKey, data: Mapping[str, Any], now: float, topics: Topics, bare: bool
    ) -> Request | Reply:
        model, client = key.model, key.client
        candidates = self._models_by_public_name.get(model)
        if candidates is None:
            raise UnknownModelError(
                f"this planner serves no model {model}, only: {', '.join(sorted(self._models_by_public_name))}"
            )
        parts, pins = split_envelope(data), {reader.name: request_pins(data, reader.pins) for reader in candidates}
        if pins[candidates[0].name] is not None and self._request_pins == "none":
            raise RequestError(
                f"this planner was started with --request-pins none: leave {', '.join(requests.PINS)} out, or ask its "
                "operator"
            )
        topic = parts.reply_to or _reply_topic(topics, key, bare)
        if parts.reply_to and not topics.response_allowed(parts.reply_to, model, client):
            own = topics.responses(client, model).removesuffix("+")
            raise RequestError(f"reply_to must be a topic below {own}, where only {client} reads")
        request_digest = digest(data) if parts.id else b""  # without an id, only the broker repeats a request
        cached = self._cached_answer(key)
        if cached is not None and cached.digest != request_digest:
            raise IdInUseError.of(key.id)
        if cached is not None:
            return Reply(topic, cached.payload, key)
        inputs = _read_by(candidates, parts.body)
        with_pictures = inputs[-1][1].pictured is not None
        joint = Joint(inputs[-1][0].checkpoint if with_pictures else None) if len(inputs) > 1 else None
        built, specs = [], [reader.checkpoint.spec for reader, _ in inputs]
        for reader, prepared in inputs:
            written = None if bare or not prepared.new_tokens else WrittenText(reader.checkpoint, prepared.stop)
            thoughts = None if prepared.thoughts is None else Thoughts(prepared.thoughts)
            context = _ReplyContext(
                topic, prepared, now, not bare, written, RequestIdentity(key, request_digest), joint, thoughts
            )
            self._quota.take(prepared.inputs.nbytes, context)
            own_pins = pins[reader.name]
            usable_pins = None if own_pins is None else supported_pins(own_pins, reader.checkpoint.spec, specs)
            built.append(_request(replace(key, model=reader.name), reader, prepared, context, parts, usable_pins))
        if joint is not None:
            joint.requests = tuple(built)
        return built[0]

    @staticmethod
    def parts_of(request: Request) -> tuple[Request, ...]:
        """Return the requests to start now: all models of a joint request, but no text that waits for its pictures."""
        joint = _context(request).joint
        return (request,) if joint is None or joint.words is not None else joint.requests

    def following(self, answer: AnswerRequest) -> Request | None:
        """Return the text request that waited for these pictures, None for other answers.

        Raises ModelError if the answer has rows that no prompt can contain.
        """
        joint = _context(answer.request).joint
        if joint is None or joint.words is None or answer.request is joint.requests[-1]:
            return None
        text = joint.requests[-1]
        assert text.generation is not None
        assert text.generation.pictured is not None
        text.generation.pictured.rows = rows_of(joint.words, answer.request.output())
        return text

    @staticmethod
    def address(request: Request) -> tuple[RequestIdentity, str]:
        """Return a request's identity as its client sent it, and the topic of its answer."""
        return _context(request).identity, _context(request).topic

    def cached_reply(self, request: Request) -> Reply | None:
        """Return the answer to an earlier delivery of a request, None without one."""
        context = _context(request)
        cached = self._cached_answer(context.identity.key)
        is_same = cached is not None and cached.digest == context.identity.digest
        return Reply(context.topic, cached.payload, context.identity.key) if cached and is_same else None

    def _topics_of(self, raw: RawRequest) -> Topics:
        return Topics(raw.site) if raw.site else self._topics

    def refuse_unread(
        self, raw: RawRequest, error: HeptiError, make_id: MakeId = _new_id, own_id: str | None = None
    ) -> Reply:
        """Return the error reply to a request; callable on any thread. own_id: read from the payload unless given."""
        own_id = None if raw.bare else own_id or peek_id(raw.payload)
        key = RequestKey(raw.model, raw.client, own_id or make_id(raw))
        topic = _reply_topic(self._topics_of(raw), key, raw.bare)
        return Reply(topic, encode_failure(own_id, error), key, error.code)

    def request_forecast(self, request: Request) -> None:
        """Start a cost forecast on another thread; the answer contains the forecast if it is ready in time."""
        self._forecasts.request(request.key.model, dict.fromkeys(request.run_shapes()))

    @staticmethod
    def age_s(request: Request, now: float) -> float:
        """Return the seconds since the receipt of a request."""
        return now - _context(request).received_s

    def _overhead_s(self, command: AnswerRequest, received_s: float) -> float:
        """Return the planner's time from arrival to first dispatch: the minimum over the model's last requests."""
        first_dispatch_s = min((s.dispatched_s for s in command.stats if s.dispatched_s is not None), default=None)
        with self._lock:
            overheads = self._overheads_s.setdefault(command.request.key.model, deque(maxlen=OVERHEADS))
            if first_dispatch_s is not None:
                overheads.append(max(first_dispatch_s - received_s, 0.0))
            return min(overheads, default=0.0)

    def encode_token(self, command: TokenReady) -> Reply | None:
        """Return the JSON of one token, None if the client streams no text; the final answer repeats all tokens."""
        request, written = command.request, _context(command.request).written
        if written is None:
            return None
        fields: dict[str, Any] = {
            "request": request.key.id,
            "index": command.index,
            "token": command.tokens[-1],
            "text": written.extend_to(command.tokens),
            "final": False,
        }
        if (thoughts := _context(request).thoughts) is not None:
            fields[THINKING], fields["text"] = thoughts.feed(fields["text"])
        if command.likely:
            fields[LOGPROBS] = described(self._models[request.key.model].checkpoint, command.likely)
        if command.attempt:  # another attempt: tokens are numbered from 0 again
            fields["attempt"] = command.attempt
        return Reply(_context(request).topic, json.dumps(fields).encode(), _context(request).identity.key)

    def encode_acceptance(self, request: Request, group: str) -> Reply | None:
        """Return the partial answer `accepted_by`, None if the client gets a single message."""
        if not _context(request).streams:
            return None
        fields = {"id": request.key.id, ACCEPTED_BY: group, "final": False}
        return Reply(_context(request).topic, json.dumps(fields).encode(), _context(request).identity.key)

    def encode_answer(self, command: AnswerRequest, now: float) -> Reply | None:
        """Return the JSON of a result, or of an error if it is invalid; None while another output is missing."""
        context = _context(command.request)
        together = (command,) if context.joint is None else context.joint.add(command)
        if not together:
            return None
        return self._encode_answers(together, now)

    def _encode_answers(self, together: Sequence[AnswerRequest], now: float) -> Reply | None:
        """Return the JSON of one output's answer, or of several outputs together; the plan is the last output's."""
        command = replace(together[-1], stats=tuple(stats for one in together for stats in one.stats))
        request, context = command.request, _context(command.request)
        model = self._models[request.key.model]
        try:
            before = [one.request.output() for one in together[:-1]]
            result = (
                answers.decode_output(
                    model.checkpoint, context.model_input, request.output(), command.plan, request.generation, before
                )
                if request.wants_result
                else None
            )
        except HeptiError as error:
            return self.encode_error(RefuseRequest(request, error))
        except ValueError as error:  # the outputs of the batches have different shapes
            return self.encode_error(
                RefuseRequest(request, RemoteError(f"the devices' outputs do not fit together: {error}"))
            )
        by_model = [[self._forecasts.lookup(s.plan, s.shape) for s in one.stats] for one in together]
        forecasts = [forecast for of_model in by_model for forecast in of_model]
        for stats in command.stats:
            if stats.requests > 1:
                self._forecasts.record_batched_run(stats)
        plan, overhead_s = command.plan, self._overhead_s(command, context.received_s)
        pairs = list(zip(forecasts, command.stats, strict=True))
        expected_s, p10_s, p90_s = (
            overhead_s + sum(f.seconds * s.expectation[which] for f, s in pairs) for which in range(3)
        )
        plans = {
            one.request.key.model: _plan_fields(one.plan, shares(of_model))
            for one, of_model in zip(together, by_model, strict=True)
        }
        fields = {
            "plan": plans[request.key.model],
            **({"plans": plans} if len(plans) > 1 else {}),
            "tokens": sum(_context(one.request).model_input.shape.size for one in together),
            "runs": len(command.stats) if request.wants_result else 0,
            "batched_with": sum(s.requests - 1 for s in command.stats),
            **_reported_costs(command.stats),
            "forecast": SIMULATED if all(f.simulated for f in forecasts) else ESTIMATED,
            "predicted_ms": (overhead_s + sum(f.seconds for f in forecasts)) * 1e3,
            "predicted_p10_ms": p10_s * 1e3,
            "predicted_p90_ms": p90_s * 1e3,
            "expected_ms": expected_s * 1e3,
            "predicted_bytes": round(sum(f.nbytes for f in forecasts)),
            "latency_ms": (now - context.received_s) * 1e3,
        }
        if context.model_input.new_tokens:
            fields["final"] = True
            fields["cached_tokens"] = 0 if request.generation is None else request.generation.session.reused_rows
        head = {"id": request.key.id, "model": context.identity.key.model, "ok": True}
        text = "null" if result is None else answers.to_json(result)
        payload = f'{json.dumps(head)[:-1]}, "result": {text}, {json.dumps(fields, allow_nan=False)[1:]}'.encode()
        self._cache_answer(context.identity, payload)
        return Reply(context.topic, payload, context.identity.key, "ok", str(plan.version), fields["predicted_ms"])

    def encode_error(self, command: RefuseRequest) -> Reply | None:
        """Return the JSON of an error, None after another error of the same joint request.

        Errors are not cached, so that the client may send the same request again.
        """
        context = _context(command.request)
        if context.joint is not None and not context.joint.fail():
            return None
        key = context.identity.key
        return Reply(context.topic, encode_failure(key.id, command.error), key, command.error.code)

    def _cached_answer(self, key: RequestKey) -> _CachedAnswer | None:
        with self._lock:
            answer = self._answered.get(key)
            if answer is not None:
                self._answered.move_to_end(key)
            return answer

    def _cache_answer(self, request: RequestIdentity, payload: bytes) -> None:
        with self._lock:
            if (replaced := self._answered.pop(request.key, None)) is not None:
                self._answered_bytes -= len(replaced.payload)
            self._answered_bytes += len(payload)
            self._answered[request.key] = _CachedAnswer(request.digest, payload)
            while len(self._answered) > MAX_CACHED_ANSWERS or self._answered_bytes > MAX_CACHED_BYTES:
                _, dropped = self._answered.popitem(last=False)
                self._answered_bytes -= len(dropped.payload)


def _plan_fields(plan: Plan, devices: Mapping[str, float]) -> dict[str, Any]:
    """Return the plan's fields in an answer; devices: their shares."""
    return {
        "id": str(plan.version),
        "version": list(plan.version),
        "strategy": plan.strategy,
        "options": dict(plan.options),
        "wire": plan.wire,
        "wire_error": plan.wire_error,
        "weights": plan.weight_dtype,
        "weight_error": plan.weight_error,
        "route": plan.route,
        "devices": dict(devices),
        "reason": plan.reason,
        "predicted_ms": plan.predicted_s * 1e3,
        "predicted_tokens": plan.predicted_tokens,
    }


def _read_by(served: Sequence[OpenModel], body: Mapping[str, Any]) -> list[tuple[OpenModel, requests.ModelInput]]:
    """Return the models of one public name that read a request, with their inputs; raises RequestError, ModelError."""
    if any({*form} <= body.keys() for form in requests.MATCHED_FORMS):
        pair = [m for kind in (TextInput, ImageInput) for m in served if isinstance(m.checkpoint.spec.input_spec, kind)]
        if len(pair) == 2 and pair[0].checkpoint.similarity is not None:
            words, pictures = pair
            return list(zip(pair, requests.read_matched(words.checkpoint, pictures.checkpoint, body), strict=True))
    if served[0].checkpoint.sees and has_pictures(body):
        words, eyes = served
        views, text = requests.read_seen(words.checkpoint, eyes.checkpoint, body)
        return [(eyes, views), (words, text)] if text.wants_result else [(words, text)]
    place = requests.reader_of([model.checkpoint for model in served], body)
    chosen, others = served[place], [model.checkpoint for i, model in enumerate(served) if i != place]
    return [(chosen, requests.read_input(chosen.checkpoint, body, others))]


def _request(
    key: RequestKey,
    model: OpenModel,
    prepared: requests.ModelInput,
    context: _ReplyContext,
    parts: RequestEnvelope,
    pins: Pins | None,
) -> Request:
    """Return a request to one model."""
    generation = None
    if not prepared.shape.session_rows:
        batches = split_into_batches(prepared, largest_shape(model.checkpoint.spec).size)
    else:  # the coordinator divides a generation into runs
        batches = (Batch(prepared.shape, prepared.inputs),)
        prompt, carried = np.split(prepared.inputs[1:], [prepared.shape.new_rows])
        shape, rules = prepared.shape, prepared.rules
        if shape.want == "task" and not rules.needs_logits and not carried.size:
            shape = shape.with_want("candidates")
        kind = Transcription if rules.needs_attempts else Generation
        generation = kind(tuple(prompt.tolist()), prepared.new_tokens, shape, rules, carried)
        if isinstance(generation, Transcription):
            generation.sound_rows = prepared.sound_rows
        generation.pictured = prepared.pictured
        generation.vocab = model.checkpoint.spec.head.outputs
        generation.guesses = Guesses() if prepared.guesses and generation.rules.judge is None else None
    return Request(
        key,
        batches,
        context,
        context.received_s + (DEADLINE_S if parts.deadline_s is None else parts.deadline_s),
        pins,
        prepared.wants_result,
        generation=generation,
        wants_report=parts.report,
    )


def _reply_topic(topics: Topics, key: RequestKey, bare: bool) -> str:
    return topics.text_response(key.model, key.client) if bare else topics.response(key.model, key.client, key.id)


def _context(request: Request) -> _ReplyContext:
    assert isinstance(request.reply_context, _ReplyContext)
    return request.reply_context


def encode_failure(name: str | None, error: HeptiError) -> bytes:
    """Return the JSON of an error."""
    about = {"code": error.code, "message": str(error)} | ({"param": error.param} if error.param else {})
    return json.dumps({"id": name, "ok": False, "error": about}).encode()


def _reported_costs(runs: Sequence[RunStats]) -> dict[str, Any]:
    """Return the devices' time and traffic; null unless every device has reported every run."""
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
