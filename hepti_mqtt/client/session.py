"""Answers as Python objects, errors as exceptions, and the client's session without I/O."""

from __future__ import annotations

import base64
import json
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from math import isfinite
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.core.errors import (
    BadNameError,
    HeptiError,
    IdInUseError,
    PlanError,
    RemoteError,
    RequestError,
    WireError,
)
from hepti_mqtt.core.ids import check_name, whole_model
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.messages import ACCEPTED_BY, TOKEN, missing_answer_key, missing_record_key, unreadable
from hepti_mqtt.protocol.topics import ANSWERS, ParsedTopic, Topics

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Answer:
    """The answer to one request.

    raw: the planner's JSON. latency_ms: from publish to answer, measured by the client.
    """

    raw: Mapping[str, Any]
    latency_ms: float

    @property
    def id(self) -> str:
        """Return the request's id."""
        return str(self.raw["id"])

    @property
    def model(self) -> str:
        """Return the model that answered."""
        return str(self.raw["model"])

    @property
    def result(self) -> Any:
        """Return the result as JSON: embedding, labels, ranking, hidden states ...; None with want="plan"."""
        return self.raw["result"]

    @property
    def plan(self) -> Mapping[str, Any]:
        """Return the plan: id, version, strategy, options, wire, weights, route, devices (shares), predicted_ms."""
        plan: Mapping[str, Any] = self.raw["plan"]
        return plan

    @property
    def tokens(self) -> int:
        """Return the number of tokens computed."""
        return int(self.raw["tokens"])

    @property
    def embedding(self) -> Floats:
        """Return the sentence embedding [h] of a request with one text."""
        rows = self.embeddings
        if len(rows) != 1:
            raise RequestError(f"the answer has {len(rows)} embeddings; use .embeddings")
        row: Floats = rows[0]
        return row

    @property
    def embeddings(self) -> Floats:
        """Return the embeddings [B, h]; raises RequestError if there are none."""
        return np.array(self._parts("embedding"), np.float32)

    @property
    def labels(self) -> list[Any]:
        """Return [{label, score}] best first; for a request with a list, one such list for each."""
        return self._listed("labels")

    @property
    def masks(self) -> list[Any]:
        """Return [{position, tokens: [{token, id, score}]}]; for a request with a list, one such list for each."""
        return self._listed("masks")

    @property
    def ranking(self) -> list[Any]:
        """Return [{index, score}] of the documents, best first; with `document` if the request wants it."""
        return list(self._parts("ranking")[0])

    @property
    def entities(self) -> list[Any]:
        """Return [{label, score, start, end, text, tokens}]; for a request with a list, one such list for each."""
        return self._listed("entities")

    @property
    def generated(self) -> str:
        """Return the generated text; raises RequestError if there is none."""
        return str(self._parts("text")[0])

    @property
    def hidden(self) -> Floats:
        """Return the final hidden states [m, h] of a request with want="hidden"."""
        result = self.result
        if not isinstance(result, Mapping) or "base64" not in result:
            raise RequestError('the answer has no hidden states; ask with want="hidden"')
        data = base64.b64decode(result["base64"])
        return np.frombuffer(data, "<f4").reshape(result["shape"])

    @property
    def _several(self) -> bool:
        return isinstance(self.result, Mapping) and "results" in self.result

    def _listed(self, what: str) -> list[Any]:
        """Return a list of what one input has; of a request with a list, one such list for each."""
        parts = self._parts(what)
        return parts if self._several else list(parts[0])

    def _parts(self, what: str) -> list[Any]:
        parts = self.result["results"] if self._several else [self.result]
        if self.result is None:
            raise RequestError(f'the answer has no {what}: want="plan" computes nothing')
        if any(what not in part for part in parts):
            raise RequestError(f"the answer has no {what}; it has {', '.join(sorted(parts[0]))}")
        return [part[what] for part in parts]


def _tree(cls: type[HeptiError]) -> dict[str, type[HeptiError]]:
    classes: dict[str, type[HeptiError]] = {}
    for child in cls.__subclasses__():
        if child.__module__ == HeptiError.__module__:  # subclasses elsewhere inherit their code
            classes.update(_tree(child))
    return {**classes, cls.code: cls}  # a code names the class that defines it


_BY_CODE = _tree(HeptiError)


def error_from(data: Mapping[str, Any]) -> HeptiError:
    """Return the exception of an error answer; an unknown code becomes RemoteError.

    Raises WireError if `data` is not an error answer.
    """
    error = data.get("error")
    if not isinstance(error, Mapping) or not isinstance(error.get("message"), str):
        raise WireError("an answer is neither a result nor an error; update client or planner")
    exception = _BY_CODE.get(str(error.get("code")), RemoteError)(error["message"])
    exception.param = param if isinstance(param := error.get("param"), str) else None
    return exception


# ----------------------------------------------------------------------------------------------------------------------
# ClientSession: pending requests and the state of the site; no sockets, threads or clocks.


class RequestPublish(NamedTuple):
    """A request to publish at QoS 1."""

    topic: str
    payload: bytes


class PartialAnswer(NamedTuple):
    """A part of an answer; `handle` is the caller's own."""

    handle: object
    data: Mapping[str, Any]


class RequestEnded(NamedTuple):
    """The end of a request; `handle` is the caller's own."""

    handle: object
    outcome: Answer | HeptiError


class _Caller(NamedTuple):
    handle: object  #: the caller's own, returned with its answer
    since_s: float


class CheckLater(NamedTuple):
    """Call `resend_unaccepted` after this delay."""

    after_s: float


ClientEvent = RequestEnded | PartialAnswer | RequestPublish | CheckLater
REPEAT_S: Final = 10.0  # shortest time without an answer until a request is sent again
REPEAT_FACTOR: Final = 1.25  # of the slowest answer's time
MOST_REPEATED: Final = 64  # repeated requests per check
ACCEPTANCE_S: Final = 0.5  # for a group to accept a request, and for other groups' wills to arrive


class ModelOfGroup(NamedTuple):
    """A model of the site's own planner, or of a group's."""

    model: str
    group: str


@dataclass(slots=True)
class _PendingRequest:
    """A pending request and all its callers, who sent it under one id."""

    publication: RequestPublish
    callers: list[_Caller]
    #: time of its last publish or token
    sent_s: float
    #: group that accepted it, "" if unknown
    accepted_by: str = ""
    #: may be lost; sent again after `ACCEPTANCE_S` unless a group accepts it
    may_be_lost: bool = False
    #: groups that refused it with `no_plan`
    refusals: int = 0
    #: repetitions because no answer came
    repeats: int = 0

    def resend(self, now: float) -> RequestPublish:
        """Mark it as sent now and accepted by no group; return its publication."""
        self.sent_s, self.accepted_by, self.may_be_lost = now, "", False
        return self.publication


MAX_DEVICES: Final = 1024  # because a peer can invent names at no cost
MAX_PLANNERS: Final = 1024
MAX_ANSWERS: Final = 240  # the last ones of the site


@dataclass(slots=True)
class DeviceView:
    """A device's own description; caps_error: why its last caps are invalid, else ""."""

    status: messages.Status | None = None
    caps: messages.Caps | None = None
    heartbeat: messages.Heartbeat | None = None
    caps_error: str = ""

    def to_dict(self, name: str) -> dict[str, Any]:
        """Return plain data: device, status, boot, the fields of its caps, and `heartbeat` (a map, or None).

        A starting device adds `doing`, `done` and `total`, an offline one `reason`. `caps_unread`: why its caps are
        invalid. `caps_boot`: the boot of its caps.
        """
        out: dict[str, Any] = {} if self.caps is None else {**asdict(self.caps), "caps_boot": self.caps.boot}
        out |= {"caps_unread": self.caps_error} if self.caps_error else {}
        out["device"] = name
        out["status"] = "unknown" if self.status is None else self.status.state
        out["boot"] = 0 if self.status is None else self.status.boot
        if self.status is not None and self.status.state == "starting":
            out |= {"doing": self.status.doing, "done": self.status.done, "total": self.status.total}
        elif self.status is not None and self.status.reason:
            out["reason"] = self.status.reason
        current = self.heartbeat is not None and self.heartbeat.boot == out["boot"]
        out["heartbeat"] = _heartbeat_dict(self.heartbeat) if current and self.heartbeat is not None else None
        return out


@dataclass(slots=True)
class ClientSession:
    """The state of one client."""

    site: str
    client: str
    #: by group, "" for the site's own
    planners: dict[str, messages.Status] = field(default_factory=dict)
    records: dict[ModelOfGroup, dict[str, Any]] = field(default_factory=dict)
    #: the missing key of each unreadable record
    unreadable_records: dict[ModelOfGroup, str] = field(default_factory=dict)
    devices: dict[str, DeviceView] = field(default_factory=dict)
    #: the last answers to all clients of the site
    answers: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_ANSWERS))
    #: dropped messages by reason
    counters: Counter[str] = field(default_factory=Counter)
    _pending: dict[tuple[str, str], _PendingRequest] = field(default_factory=dict)
    #: the longest time to an answer so far
    _slowest_s: float = 0.0

    @property
    def topics(self) -> Topics:
        """Return the site's topics."""
        return Topics(self.site)

    @property
    def planner_online(self) -> bool:
        """Return whether a planner is online."""
        return any(map(self._online, self.planners))

    @property
    def has_pending(self) -> bool:
        """Return whether a request waits for its answer."""
        return bool(self._pending)

    def _online(self, group: str) -> bool:
        return group in self.planners and self.planners[group].state == "online"

    def record(self, model: str) -> dict[str, Any] | None:
        """Return the record of a model's plans if a current planner published it; of several, one with a plan.

        Raises WireError if it is of an incompatible version, or another program has changed it.
        """
        keys = sorted(filter(self._is_current, self.records), key=lambda key: self.records[key].get("active") is None)
        for key in keys:
            if key.model == model:
                if key in self.unreadable_records:
                    raise unreadable(f"the record of model {model} lacks {self.unreadable_records[key]!r}")
                return self.records[key]
        return None

    def models(self) -> list[str]:
        """Return the public names of the served models."""
        return sorted({whole_model(key.model) for key in self.records if self._is_current(key)})

    def unused(self) -> dict[str, str]:
        """Return why a planner leaves online devices out of all plans, by name, from the readable records."""
        keys = sorted(key for key in self.records if self._is_current(key) and key not in self.unreadable_records)
        return {device: why for key in keys for device, why in self.records[key]["unused"].items()}

    def clocks(self) -> dict[str, float] | None:
        """Return the planner's measured clock offsets of devices, in seconds ahead of it; None without a planner."""
        clocks = [self.records[key].get("clocks", {}) for key in sorted(filter(self._is_current, self.records))]
        return clocks[0] if clocks else None

    def _is_current(self, key: ModelOfGroup) -> bool:
        if not self._online(key.group):
            return False
        boot = self.planners[key.group].boot
        return bool(self.records[key].get("boot", boot) == boot)

    def add_request(
        self, model: str, request_id: str, body: Mapping[str, Any], handle: object, now: float
    ) -> RequestPublish:
        """Add a request, or one more caller of a pending one, and return what to publish.

        Raises BadNameError, RequestError if it is not valid JSON, IdInUseError if another request with this id is
        pending.
        """
        check_name("request", request_id)
        try:
            payload = json.dumps({**body, "id": request_id}, allow_nan=False, default=_plain).encode()
        except (TypeError, ValueError) as error:
            raise RequestError(f"the request cannot be written as JSON: {error}") from error
        publication = RequestPublish(self.topics.request(model, self.client), payload)
        waiting = self._pending.get((model, request_id), _PendingRequest(publication, [], now))
        if waiting.publication != publication:
            raise IdInUseError.of(request_id)
        waiting.callers.append(_Caller(handle, now))
        self._pending[model, request_id] = waiting
        return publication

    def forget(self, model: str, request_id: str, handle: object) -> RequestPublish | None:
        """Remove one caller of a request.

        Return the cancel message, or None if the request has ended or other callers wait.
        """
        waiting = self._pending.get((model, request_id))
        if waiting is None:
            return None
        waiting.callers[:] = [caller for caller in waiting.callers if caller.handle is not handle]
        if waiting.callers:
            return None
        del self._pending[model, request_id]
        return RequestPublish(waiting.publication.topic, json.dumps({"cancel": request_id}).encode())

    def abandon(self) -> list[object]:
        """Drop all requests; return their handles."""
        handles = [caller.handle for p in self._pending.values() for caller in p.callers]
        self._pending.clear()
        return handles

    def drop_refused(self, topics: Iterable[str]) -> list[object]:
        """Drop the requests that the broker refused; return their handles."""
        gone = {key: p.callers for key, p in self._pending.items() if p.publication.topic in set(topics)}
        for key in gone:
            del self._pending[key]
        return [caller.handle for callers in gone.values() for caller in callers]

    def to_resend(self, now: float) -> list[RequestPublish]:
        """Return the requests to publish again after a reconnection: their answers may have been missed."""
        return [p.resend(now) for p in self._pending.values()]

    def resend_unaccepted(self, now: float) -> list[RequestPublish]:
        """Return the requests to publish again: they may be lost, and no group has accepted them."""
        return [p.resend(now) for p in self._pending.values() if p.may_be_lost and not p.accepted_by]

    def resend_unanswered(self, now: float) -> list[RequestPublish]:
        """Return requests without an answer for too long: the broker may have dropped request or answer.

        The limit is `REPEAT_S`, or 1.25 times the slowest answer so far if that is longer, doubled after each
        repetition. The planner computes a repeated request once. Requests that a group has accepted are not repeated.
        """
        if not self.planner_online:
            return []
        limit_s = max(REPEAT_S, REPEAT_FACTOR * self._slowest_s)
        late = (p for p in self._pending.values() if not p.accepted_by and now - p.sent_s >= limit_s * 2**p.repeats)
        out = []
        for pending in islice(late, MOST_REPEATED):
            pending.repeats += 1
            out.append(pending.resend(now))
        return out

    def handle_message(self, topic: str, payload: bytes, now: float) -> list[ClientEvent]:
        """Handle a message; return ended requests, parts of answers, and requests to publish again."""
        try:
            return self._handle(self.topics.parse(topic), payload, now)
        except (WireError, BadNameError, ValueError, TypeError, KeyError, RecursionError) as error:
            self.counters[f"malformed {type(error).__name__}"] += 1
            return []

    def _handle(self, topic: ParsedTopic, payload: bytes, now: float) -> list[ClientEvent]:
        if topic.kind == "response":
            return self._handle_answer(topic, payload, now)
        if topic.kind == "planner_status":
            status = messages.decode_status(payload) if payload else None
            if status == messages.QUESTION:
                return []
            return self._resend_lost(topic.group, now) if self._record_planner(topic.group, status) else []
        if topic.kind == "plan":
            self._handle_plan(ModelOfGroup(topic.model, topic.group), payload)
        elif topic.kind in ("status", "caps", "heartbeat"):
            self._handle_device(topic, payload)
        elif topic.kind == "event" and topic.event == ANSWERS:
            self.answers.extend(_read_answers(payload))
        return []

    def _record_planner(self, group: str, status: messages.Status | None) -> bool:
        """Record a planner's status; return whether requests may be lost.

        They may be if the planner went offline, is new, or announces itself again: a broker without persistence may
        have dropped requests while a planner was away. A planner recognises repeated requests.
        """
        was_online, others = self._online(group), any(self._online(other) for other in self.planners if other != group)
        if status is None:
            self.planners.pop(group, None)
        elif group in self.planners or len(self.planners) < MAX_PLANNERS:
            self.planners[group] = status
        if not self._online(group):
            return was_online and others
        return was_online or not others

    def _resend_lost(self, group: str, now: float) -> list[ClientEvent]:
        """Return the requests to publish again because a group, or the site's own planner, may have lost them."""
        events: list[ClientEvent] = []
        for pending in self._pending.values():
            if pending.accepted_by == group or (not pending.accepted_by and now - pending.sent_s >= ACCEPTANCE_S):
                events.append(pending.resend(now))
            elif not pending.accepted_by and not pending.may_be_lost:
                pending.may_be_lost = True
                events.append(CheckLater(ACCEPTANCE_S))
        return events

    def _handle_answer(self, topic: ParsedTopic, payload: bytes, now: float) -> list[ClientEvent]:
        pending = self._pending.get((topic.model, topic.request))
        if pending is None:
            self.counters["unexpected answer"] += 1
            return []
        data = json.loads(payload)
        if not isinstance(data, dict):
            raise WireError("an answer is a JSON object")
        if data.get("final") is False and ACCEPTED_BY in data:
            pending.accepted_by = check_name("site", data[ACCEPTED_BY])
            return []
        if data.get("final") is False:
            if not data.keys() >= set(TOKEN):
                raise WireError(f"a token of an answer has {', '.join(TOKEN)}")
            pending.sent_s = now
            return [PartialAnswer(caller.handle, data) for caller in pending.callers]
        error = None if data.get("ok") is True else error_from(data)
        if error is None and (lacks := missing_answer_key(data)) is not None:
            error = unreadable(f"the answer lacks {lacks!r}")
        if isinstance(error, PlanError) and pending.refusals + 1 < sum(map(self._online, self.planners)):
            pending.refusals += 1  # another group may have a plan
            return [pending.resend(now)]
        del self._pending[topic.model, topic.request]
        self._slowest_s = max(self._slowest_s, *(now - since_s for _, since_s in pending.callers), 0.0)
        return [
            RequestEnded(handle, Answer(data, (now - since_s) * 1e3) if error is None else error)
            for handle, since_s in pending.callers
        ]

    def _handle_plan(self, key: ModelOfGroup, payload: bytes) -> None:
        if not payload:
            self.records.pop(key, None)
            self.unreadable_records.pop(key, None)
            return
        record = msgpack.unpackb(payload)
        if not isinstance(record, dict):
            raise WireError("a plan's record is a map")
        self.records[key] = record
        if (lacks := missing_record_key(record)) is None:
            self.unreadable_records.pop(key, None)
        else:
            self.unreadable_records[key] = lacks

    def _handle_device(self, topic: ParsedTopic, payload: bytes) -> None:
        if not payload:
            return
        device = self.devices.get(topic.device, DeviceView())
        if topic.kind == "status":
            status = messages.decode_status(payload)
            if status == messages.QUESTION:
                return
            device.status = status
        elif topic.kind == "caps":
            self._read_caps(device, payload)
        else:
            device.heartbeat = messages.decode_heartbeat(payload)
        if topic.device not in self.devices and len(self.devices) >= MAX_DEVICES:
            self.counters["devices beyond"] += 1
            return
        self.devices[topic.device] = device

    def _read_caps(self, device: DeviceView, payload: bytes) -> None:
        try:
            device.caps, device.caps_error = messages.decode_caps(payload), ""
        except (WireError, ValueError, TypeError) as error:
            self.counters["unread caps"] += 1
            device.caps, device.caps_error = None, str(error)


def _read_answers(payload: bytes) -> list[dict[str, Any]]:
    """Return the answers of an event; raises as a malformed message does."""

    def number(value: Any) -> float:
        if not (isinstance(value, int | float) and isfinite(value)):
            raise WireError(f"{value!r} is not a number")
        return float(value)

    return [
        {
            "time": number(one["time"]),
            "model": check_name("model", one["model"]),
            "outcome": check_name("event", one["outcome"]),
            "latency_ms": number(one["latency_ms"]),
            "predicted_ms": None if one["predicted_ms"] is None else number(one["predicted_ms"]),
            "plan": None if one["plan"] is None else str(one["plan"])[:40],
        }
        for one in json.loads(payload)["answers"][-MAX_ANSWERS:]
    ]


ODD_CLOCK_S: Final = 60.0  # a clock that differs by more is named
HERE: Final = "this machine"


def odd_clocks(
    devices: Sequence[Mapping[str, Any]], seen_by_planner: Mapping[str, float] | None, now_s: float
) -> list[str]:
    """Return a sentence per clock that differs from most others.

    devices: of `Hepti.devices`, just now. seen_by_planner: seconds by which clocks are ahead of the planner's, if they
    are; None without a planner. now_s: unix time here.
    """
    ahead = {HERE: 0.0}
    for device in devices:
        if clock_s := (device.get("heartbeat") or {}).get("clock_s"):
            ahead[device["device"]] = clock_s - now_s
    if seen_by_planner is not None and len(ahead) > 1:
        name = next(name for name in ahead if name != HERE)
        ahead["the planner"] = ahead[name] - seen_by_planner.get(name, 0.0)
    # The clock with the most similar ones; at a tie the first, which is this machine's.
    usual = max(ahead.values(), key=lambda one: sum(abs(one - other) <= ODD_CLOCK_S for other in ahead.values()))
    odd = {name: s - usual for name, s in ahead.items() if abs(s - usual) > ODD_CLOCK_S}
    lines = []
    for name, ahead_s in odd.items():
        unit, one_s = next(u for u in (("days", 86_400), ("hours", 3600), ("minutes", 60)) if abs(ahead_s) >= u[1])
        way = "ahead" if ahead_s > 0 else "behind"
        lines.append(f"the clock of {name} is {abs(ahead_s) / one_s:.3g} {unit} {way}")
    return lines


def _plain(value: Any) -> Any:
    """Return a NumPy array or number as plain data."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no plain data")


def _heartbeat_dict(heartbeat: messages.Heartbeat) -> dict[str, Any]:
    """Return a heartbeat and its nested reports as plain data."""
    peers = {name: report._asdict() for name, report in heartbeat.peers.items()}
    edges = {name: edge._asdict() for name, edge in heartbeat.edges.items()}
    return asdict(heartbeat) | {"peers": peers, "edges": edges}
