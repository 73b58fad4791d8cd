"""Users' JSON to requests for the coordinator, and its results to JSON.

Several threads use it, so that tokenising and writing JSON delay neither the session nor other clients.
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
from hepti_mqtt.errors import HeptiError, IdInUseError, PacketLimitError, RemoteError, RequestError, UnknownModelError
from hepti_mqtt.ids import asked_name, check_name
from hepti_mqtt.models import largest_shape
from hepti_mqtt.models.shapes import ImageInput, TextInput
from hepti_mqtt.plan import Plan
from hepti_mqtt.protocol.messages import LOGPROBS, TAKEN_BY, THINKING
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.coordinator.batches import Batch
from hepti_mqtt.runtime.coordinator.guesses import Guesses
from hepti_mqtt.runtime.coordinator.interface import AnswerRequest, RefuseRequest, TokenReady
from hepti_mqtt.runtime.coordinator.requests import Pins, Request, RequestKey, RunStats
from hepti_mqtt.runtime.coordinator.texts import Generation
from hepti_mqtt.runtime.coordinator.transcriptions import Transcription
from hepti_mqtt.service import answers, requests
from hepti_mqtt.service.decoder import RawRequest
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
from hepti_mqtt.service.requests import MAX_WAITING_BYTES, MemoryQuota, split_into_batches
from hepti_mqtt.service.seen import has_pictures, rows_of
from hepti_mqtt.service.thinking import Thoughts
from hepti_mqtt.service.written import WrittenText

DEADLINE_S: Final = 600.0  # of requests without one: every request ends
SIMULATED: Final = "simulated"
ESTIMATED: Final = "estimated"  # the answer was ready before its forecast
MAX_CACHED_ANSWERS: Final = 256
LATE: Final = 8  # last requests of a model whose overhead in the planner is remembered
MAX_CACHED_BYTES: Final = 64 << 20


class Reply(NamedTuple):
    """What to publish to a user; the id in `key` is the client's own, or a generated one.

    outcome: ok, or a code. plan: under which it was computed; predicted_ms: by that plan, None for an error.
    """

    topic: str
    payload: bytes
    key: RequestKey
    outcome: str = "ok"
    plan: str = ""
    predicted_ms: float | None = None

    def as_repeated(self) -> Reply:
        """Return the reply with the note that there may have been one before."""
        return self._replace(payload=b'{"repeated": true, ' + self.payload.removeprefix(b"{"))

    def too_large(self, error: PacketLimitError) -> Reply:
        """Return the error that replaces an answer which the broker rejects."""
        return self._replace(payload=encode_failure(json.loads(self.payload)["id"], error), outcome=error.code)


class _CachedAnswer(NamedTuple):
    """An answer kept for repetitions, and the digest of its request."""

    digest: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A served model: its files, and what the planner's user pinned."""

    name: str
    checkpoint: Checkpoint
    pins: Pins


class Asked(NamedTuple):
    """A request as its client asked it, under the name that people know, and its digest."""

    key: RequestKey
    digest: bytes


class Joint:
    """Requests of one client's request, whose answer is made of all their answers; callable on any thread.

    requests: in the order of their models; the last one has the question. words: of a prompt with pictures, the model
    of the text, which begins when the rows of the pictures are there.
    """

    def __init__(self, words: Checkpoint | None = None) -> None:
        self.requests: tuple[Request, ...] = ()
        self.words = words
        self._lock = threading.Lock()
        self._answers: dict[RequestKey, AnswerRequest] = {}
        self._failed = False

    def add(self, answer: AnswerRequest) -> tuple[AnswerRequest, ...]:
        """Take an answer; return all of them, in order, with the last one, else nothing."""
        with self._lock:
            self._answers[answer.request.key] = answer
            whole = len(self._answers) == len(self.requests) and not self._failed
            return tuple(self._answers[request.key] for request in self.requests) if whole else ()

    def fail(self) -> bool:
        """Take a failure; return whether it is the first one."""
        with self._lock:
            before, self._failed = self._failed, True
            return not before


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _ReplyContext:
    """How to answer a request; weakly referenced by the memory quota.

    asked: what its client calls it. streams: what is known goes out before the answer; written: the text of its tokens,
    None without. joint: of a request whose answer needs the outputs of several models.
    """

    topic: str
    model_input: requests.ModelInput
    received_s: float
    streams: bool
    written: WrittenText | None
    asked: Asked
    joint: Joint | None = None
    #: divides the tokens' text; None for a model that does not think
    thoughts: Thoughts | None = None


MakeId = Callable[[RawRequest], str]


def _new_id(_raw: RawRequest) -> str:
    return uuid.uuid4().hex


class RequestHandler:
    """Reads requests and writes answers; keeps the last answers for repeated requests.

    forecasts: requested with every request; its answer contains what is ready. request_pins: whether requests may pin
    anything.
    """

    def __init__(
        self, site: str, models: Mapping[str, OpenModel], forecasts: Forecasts, request_pins: RequestPins = "any"
    ) -> None:
        self._topics = Topics(site)
        self._request_pins = request_pins
        self._models = models
        self._asked: dict[str, list[OpenModel]] = {}  # by the name that people know
        for model in models.values():
            self._asked.setdefault(asked_name(model.name), []).append(model)
        self._forecasts = forecasts
        self._quota = MemoryQuota(MAX_WAITING_BYTES)
        self._lock = threading.Lock()  # guards the answers that are kept
        self._answered: OrderedDict[RequestKey, _CachedAnswer] = OrderedDict()
        self._answered_bytes = 0
        self._read_s: dict[str, deque[float]] = {}  # by model: from arrival to first dispatch, of the last requests

    def read_request(self, raw: RawRequest, now: float, make_id: MakeId = _new_id) -> Request | Reply | RequestKey:
        """Return the parsed request, or its answer if there is one: an error, or the answer given before.

        A cancel returns the key of the client's request.

        now: on the session's clock; deadlines count from it. make_id: gives the id of a request without one.
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
        served = self._asked.get(model)
        if served is None:
            raise UnknownModelError(f"no model {model} is served here; there are: {', '.join(sorted(self._asked))}")
        parts, pins = split_envelope(data), {one.name: request_pins(data, one.pins) for one in served}
        if pins[served[0].name] is not None and self._request_pins == "none":
            raise RequestError(
                f"this planner was started with --request-pins none: leave {', '.join(requests.PINS)} out, or ask its "
                "operator"
            )
        topic = parts.reply_to or _reply_topic(topics, key, bare)
        if parts.reply_to and not topics.response_allowed(parts.reply_to, model, client):
            own = topics.responses(client, model).removesuffix("+")
            raise RequestError(f"reply_to must be a topic below {own}, where only {client} reads")
        asked = digest(data) if parts.id else b""  # a generated id is never repeated by the client
        known = self._cached_answer(key)
        if known is not None and known.digest != asked:
            raise IdInUseError.of(key.id)
        if known is not None:
            return Reply(topic, known.payload, key)
        found = _read_by(served, parts.body)
        sees = found[-1][1].pictured is not None
        joint = Joint(found[-1][0].checkpoint if sees else None) if len(found) > 1 else None
        made, specs = [], [one.checkpoint.spec for one, _ in found]
        for one, prepared in found:
            written = None if bare or not prepared.new_tokens else WrittenText(one.checkpoint, prepared.stop)
            thoughts = None if prepared.thoughts is None else Thoughts(prepared.thoughts)
            context = _ReplyContext(topic, prepared, now, not bare, written, Asked(key, asked), joint, thoughts)
            self._quota.take(prepared.inputs.nbytes, context)
            given = pins[one.name]
            able = None if given is None else supported_pins(given, one.checkpoint.spec, specs)
            made.append(_request(replace(key, model=one.name), one, prepared, context, parts, able))
        if joint is not None:
            joint.requests = tuple(made)
        return made[0]

    @staticmethod
    def parts_of(request: Request) -> tuple[Request, ...]:
        """Return the requests of a client's request that begin at once, of which this is the first."""
        joint = _context(request).joint
        return (request,) if joint is None or joint.words is not None else joint.requests

    def following(self, answer: AnswerRequest) -> Request | None:
        """Return the request that begins with an answer: the text, when the rows of its pictures are there.

        Raises ModelError for rows that no text can have.
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
    def asked(request: Request) -> Asked:
        """Return what a request's client calls it."""
        return _context(request).asked

    def _topics_of(self, raw: RawRequest) -> Topics:
        return Topics(raw.site) if raw.site else self._topics

    def refuse_unread(
        self, raw: RawRequest, error: HeptiError, make_id: MakeId = _new_id, own_id: str | None = None
    ) -> Reply:
        """Return the error that answers a request; callable on any thread. own_id: searched for unless given."""
        own_id = None if raw.bare else own_id or peek_id(raw.payload)
        key = RequestKey(raw.model, raw.client, own_id or make_id(raw))
        topic = _reply_topic(self._topics_of(raw), key, raw.bare)
        return Reply(topic, encode_failure(own_id, error), key, error.code)

    def request_forecast(self, request: Request) -> None:
        """Request a cost forecast on another thread; the answer contains it if it is ready in time."""
        self._forecasts.request(request.key.model, dict.fromkeys(request.run_shapes()))

    @staticmethod
    def age_s(request: Request, now: float) -> float:
        """Return the seconds since a request was received."""
        return now - _context(request).received_s

    def _overhead_s(self, command: AnswerRequest, received_s: float) -> float:
        """Return the planner's time from arrival to first dispatch: the minimum over the model's last requests."""
        begun_s = min((s.dispatched_s for s in command.stats if s.dispatched_s is not None), default=None)
        with self._lock:
            late = self._read_s.setdefault(command.request.key.model, deque(maxlen=LATE))
            if begun_s is not None:
                late.append(max(begun_s - received_s, 0.0))
            return min(late, default=0.0)

    def encode_token(self, command: TokenReady) -> Reply | None:
        """Return the JSON of one token, sent before the answer, which has all; None where only that is wanted."""
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
        if command.attempt:  # the text begins again
            fields["attempt"] = command.attempt
        return Reply(_context(request).topic, json.dumps(fields).encode(), _context(request).asked.key)

    def encode_taken(self, request: Request, group: str) -> Reply | None:
        """Return the JSON that says which group has a request; None where only the answer is wanted."""
        if not _context(request).streams:
            return None
        fields = {"id": request.key.id, TAKEN_BY: group, "final": False}
        return Reply(_context(request).topic, json.dumps(fields).encode(), _context(request).asked.key)

    def encode_answer(self, command: AnswerRequest, now: float) -> Reply | None:
        """Return the JSON of a result; an invalid result becomes an error; None while another output is missing."""
        context = _context(command.request)
        together = (command,) if context.joint is None else context.joint.add(command)
        if not together:
            return None
        return self._encode_answers(together, now)

    def _encode_answers(self, together: Sequence[AnswerRequest], now: float) -> Reply | None:
        """Return the JSON of the answer that one output gives, or several together; the plan is the last one's."""
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
            return self.encode_refusal(RefuseRequest(request, error))
        except ValueError as error:  # the outputs of the batches have different shapes
            return self.encode_refusal(
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
        head = {"id": request.key.id, "model": context.asked.key.model, "ok": True}
        text = "null" if result is None else answers.to_json(result)
        payload = f'{json.dumps(head)[:-1]}, "result": {text}, {json.dumps(fields, allow_nan=False)[1:]}'.encode()
        self._cache_answer(context.asked, payload)
        return Reply(context.topic, payload, context.asked.key, "ok", str(plan.version), fields["predicted_ms"])

    def encode_refusal(self, command: RefuseRequest) -> Reply | None:
        """Return the JSON of an error, which is not cached: the same request may be sent again; None if one went out.

        A request whose answer needs several outputs ends with the first error.
        """
        context = _context(command.request)
        if context.joint is not None and not context.joint.fail():
            return None
        key = context.asked.key
        return Reply(context.topic, encode_failure(key.id, command.error), key, command.error.code)

    def _cached_answer(self, key: RequestKey) -> _CachedAnswer | None:
        with self._lock:
            known = self._answered.get(key)
            if known is not None:
                self._answered.move_to_end(key)
            return known

    def _cache_answer(self, asked: Asked, payload: bytes) -> None:
        with self._lock:
            if (before := self._answered.pop(asked.key, None)) is not None:
                self._answered_bytes -= len(before.payload)
            self._answered_bytes += len(payload)
            self._answered[asked.key] = _CachedAnswer(asked.digest, payload)
            while len(self._answered) > MAX_CACHED_ANSWERS or self._answered_bytes > MAX_CACHED_BYTES:
                _, old = self._answered.popitem(last=False)
                self._answered_bytes -= len(old.payload)


def _plan_fields(plan: Plan, devices: Mapping[str, float]) -> dict[str, Any]:
    """Return what an answer says of its plan; devices: with their shares."""
    return {
        "id": str(plan.version),
        "epoch": list(plan.version),
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
    """Return which of the models under one name read a request, and what; raises RequestError, ModelError."""
    if any({*form} <= body.keys() for form in requests.MATCHED_FORMS):
        pair = [m for kind in (TextInput, ImageInput) for m in served if isinstance(m.checkpoint.spec.input_spec, kind)]
        if len(pair) == 2 and pair[0].checkpoint.similarity is not None:
            words, pictures = pair
            return list(zip(pair, requests.read_matched(words.checkpoint, pictures.checkpoint, body), strict=True))
    if served[0].checkpoint.sees and has_pictures(body):
        words, eyes = served
        seen, text = requests.read_seen(words.checkpoint, eyes.checkpoint, body)
        return [(eyes, seen), (words, text)] if text.wants_result else [(words, text)]
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
    else:  # its session is divided into runs
        batches = (Batch(prepared.shape, prepared.inputs),)
        prompt, carried = np.split(prepared.inputs[1:], [prepared.shape.new_rows])
        shape, rules = prepared.shape, prepared.rules
        if shape.want == "task" and not rules.needs_logits and not carried.size:
            shape = shape.with_want("candidates")
        made = Transcription if rules.needs_attempts else Generation
        generation = made(tuple(prompt.tolist()), prepared.new_tokens, shape, rules, carried)
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
        digest=context.asked.digest,
        wants_report=parts.report,
    )


def _reply_topic(topics: Topics, key: RequestKey, bare: bool) -> str:
    return topics.text_response(key.model, key.client) if bare else topics.response(key.model, key.client, key.id)


def _context(request: Request) -> _ReplyContext:
    assert isinstance(request.reply_context, _ReplyContext)
    return request.reply_context


def encode_failure(name: str | None, error: HeptiError) -> bytes:
    """Return the JSON of an answer that is an error."""
    about = {"code": error.code, "message": str(error)} | ({"param": error.param} if error.param else {})
    return json.dumps({"id": name, "ok": False, "error": about}).encode()


def _reported_costs(runs: Sequence[RunStats]) -> dict[str, Any]:
    """Return what the devices counted; null unless every device has reported every run."""
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
