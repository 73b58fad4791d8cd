"""A connection of a user's program to one site."""

from __future__ import annotations

import base64
import io
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypedDict, Union, Unpack

from PIL import Image

from hepti_mqtt.client.session import (
    Answer,
    ClientSession,
    PartialAnswer,
    RequestEnded,
    RequestPublish,
    odd_clocks,
)
from hepti_mqtt.config import Settings
from hepti_mqtt.errors import (
    BadNameError,
    ConfigError,
    DeadlineError,
    HeptiError,
    NetworkError,
    PlanError,
    RefusedError,
    RequestError,
    UnknownModelError,
)
from hepti_mqtt.ids import check_name
from hepti_mqtt.protocol.messages import TOKEN
from hepti_mqtt.transport import BrokerUrl, Connected, Disconnected, PahoTransport, Refused, State, Subscribed


def client_name(user: str | None) -> str:
    """Return the broker's user if it is valid in a topic, as access lists require, else a random name."""
    try:
        return check_name("client", user or "")
    except BadNameError:
        return f"py-{uuid.uuid4().hex[:12]}"


def refusal_error(client_id: str, what: str, state: Refused) -> RefusedError:
    """Return the error of a client whose publish or subscription the broker refused; what: "publish to" ...."""
    return RefusedError(
        f"the broker does not let client {client_id} {what} {', '.join(state.topics)}: {state.reason}; "
        "a client's name must be its user's, and the user a client (`hepti site add client NAME`, --client NAME)"
    )


class AnswerStream(Future[Answer]):
    """The future of an answer, with its parts as they come; None in `parts` is the end."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()


def settle(token: object, outcome: Answer | HeptiError) -> None:
    """Give a future its answer or error, unless it was cancelled."""
    assert isinstance(token, Future)
    if not token.set_running_or_notify_cancel():
        return
    if isinstance(outcome, HeptiError):
        token.set_exception(outcome)
    else:
        token.set_result(outcome)


# ----------------------------------------------------------------------------------------------------------------------
# A request's JSON from what Python users have at hand.


Picture = Union[str, bytes, "PathLike[str]", Image.Image]
Recording = Union[str, bytes, "PathLike[str]"]
_LONGEST_PATH: Final = 1024


def encode_picture(picture: Picture) -> str:
    """Return a picture as base64, from a path, a file's bytes, a Pillow image, or base64.

    Raises RequestError if the file cannot be read.
    """
    if isinstance(picture, Image.Image):
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        return base64.b64encode(buffer.getvalue()).decode()
    return encode_file(picture, "picture")


def encode_file(file: Recording, what: str) -> str:
    """Return a file as base64, from a path, its bytes, or base64; what: it is, for errors.

    Raises RequestError if it cannot be read.
    """
    if isinstance(file, bytes | bytearray):
        return base64.b64encode(file).decode()
    if isinstance(file, str) and (len(file) > _LONGEST_PATH or not os.path.isfile(file)):
        if Path(file[-_LONGEST_PATH:]).suffix:  # base64 has no dot
            raise RequestError(f"there is no {what} {file[-80:]!r}")
        return file
    try:
        return base64.b64encode(Path(file).read_bytes()).decode()
    except OSError as error:
        raise RequestError(f"cannot read the {what} {file}: {error.strerror or error}") from error


def request_body(
    *,
    image: Picture | None = None,
    images: Sequence[Picture] | None = None,
    audio: Recording | None = None,
    devices: Sequence[str] | None = None,
    options: Mapping[str, str] | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Return the JSON object of a request without the keys whose value is None."""
    body: dict[str, Any] = {
        **others,
        "image": None if image is None else encode_picture(image),
        "images": None if images is None else [encode_picture(i) for i in images],
        "audio": None if audio is None else encode_file(audio, "recording"),
        "devices": None if devices is None else list(devices),
        "options": None if options is None else dict(options),
    }
    return {key: value for key, value in body.items() if value is not None}


class RequestKeys(TypedDict, total=False):
    """The keys of a request; docs/reference/requests.md says what each means, and which belong together.

    Inputs: text, texts, ids (with token_types), text and text_pair, pairs, query and documents, question and context,
    text or texts with candidate_labels, image, images (each a path, a file's bytes, a Pillow image or base64), audio (a
    path, a file's bytes or base64) with language, task ("translate": into English) and window (seconds).
    want="hidden": final hidden states instead of the task's result; want="plan": computes nothing; the answer comes
    when the plan is active and has the predicted cost. strategy ("auto" to free it), options, devices, wire, accuracy,
    weights, route, objective pin the planner's choice for this request alone. report: the answer waits for the devices'
    counters.
    """

    text: str | None
    texts: Sequence[str] | None
    ids: Sequence[int] | Sequence[Sequence[int]] | None
    token_types: Sequence[int] | Sequence[Sequence[int]] | None
    text_pair: str | None
    pairs: Sequence[Sequence[str]] | None
    query: str | None
    documents: Sequence[str] | None
    question: str | None
    context: str | None
    candidate_labels: Sequence[str] | None
    image: Picture | None
    images: Sequence[Picture] | None
    audio: Recording | None
    language: str | None
    task: str | None
    window: float | None
    truncate: bool | None
    empty: str | None
    want: str | None
    top_k: int | None
    prompt: str | None
    dimensions: int | None
    raw_scores: bool | None
    return_documents: bool | None
    aggregation: str | None
    no_answer: bool | None
    max_answer_tokens: int | None
    multi_label: bool | None
    hypothesis_template: str | None
    max_new_tokens: int | None
    deadline_ms: float | None
    strategy: str | None
    options: Mapping[str, str] | None
    devices: Sequence[str] | None
    wire: str | None
    accuracy: float | None
    weights: str | None
    route: str | None
    objective: str | None
    report: bool | None


# ----------------------------------------------------------------------------------------------------------------------
# The connection.


GRACE_S: Final = 1.0  # at most, between a planner's retained status and its plans
PAUSE_S: Final = 0.2  # at most, between two retained records
ANSWER_S: Final = 60.0  # for an answer, if the caller names no time
PLANNER_S: Final = 5.0  # for a planner that restarts


class Hepti:
    """A user's connection to a site; use it in a `with` statement. All methods may be called from any thread."""

    def __init__(self, url: BrokerUrl, site: str, client_id: str) -> None:
        self.site, self.client_id = check_name("site", site), check_name("client", client_id)
        self._session = ClientSession(site, client_id)
        self._changed = threading.Condition()  # guards the session and what follows
        self._connected = False
        self._refused: RefusedError | None = None
        self._unseen: RefusedError | None = None  # of devices alone: requests go on
        self._subscribed: set[int] = set()
        self._watching: int | None = None
        # Two programs of one user must not disconnect each other.
        own = f"hepti-{site}-client-{client_id}-{uuid.uuid4().hex[:8]}"
        self._transport = PahoTransport(url, own, on_message=self._heard, on_state=self._state, name="hepti-client")

    @classmethod
    def connect(
        cls,
        url: str | BrokerUrl | None = None,
        site: str | None = None,
        client_id: str | None = None,
        timeout: float = 10.0,
    ) -> Hepti:
        """Return a connection to a site's broker.

        url: mqtt[s]://host:port, or a login file, by default HEPTI_BROKER. site: by default HEPTI_SITE, else home.
        client_id: the name in topics, by default the broker's user, to whom an access list binds it, else a random one.
        Raises ConfigError without a URL, NetworkError if no broker answers within `timeout` seconds, RefusedError.
        """
        settings = Settings.from_environment(broker=str(url) if isinstance(url, str) else None, site=site)
        if isinstance(url, BrokerUrl):
            place = url
        elif settings.broker is None:
            raise ConfigError("no broker: give a URL such as mqtt://HOST:1883, or set HEPTI_BROKER")
        else:
            place = BrokerUrl.parse(settings.broker)
        hepti = cls(place, settings.site, client_id or client_name(place.user))
        try:
            hepti._open(timeout)
        except BaseException:
            hepti.close()
            raise
        return hepti

    def close(self) -> None:
        """Disconnect; pending requests end with NetworkError."""
        self._transport.close()
        with self._changed:
            ended = self._session.abandon()
        for token in ended:
            settle(token, NetworkError("the client was closed before the answer came"))

    def __enter__(self) -> Hepti:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- requests ---------------------------------------------------------------------------------------------------

    def infer(
        self,
        model: str,
        *,
        timeout_s: float | None = None,
        wait_for_plan: bool | None = None,
        **request: Unpack[RequestKeys],
    ) -> Answer:
        """Ask a model and wait for the answer; request: exactly one input, and options, as `RequestKeys` has them.

        timeout_s: 60 by default. wait_for_plan: whether a first plan of a model that has none is waited for, too; by
        default if timeout_s is given. If the broker is lost, the request is sent again after reconnection.

        Raises the planner's error by its class (RequestError, PlanError, OverloadedError, ...), DeadlineError after
        deadline_ms or without an answer within timeout_s, NetworkError if broker or planner are away all that time.
        """
        wait_s = ANSWER_S if timeout_s is None else timeout_s
        until = time.monotonic() + wait_s
        while True:
            beside_a_plan = self._has_plan(model)  # before it is sent: a plan made between error and look is no reason
            future = self.submit(model, **request)
            try:
                return future.result(max(until - time.monotonic(), 0.0))
            except TimeoutError:
                future.cancel()
                raise self._timeout_error(wait_s) from None
            except PlanError:
                waits = timeout_s is not None if wait_for_plan is None else wait_for_plan
                if not waits or beside_a_plan:
                    raise
                if not self._wait_until(lambda: self._has_plan(model), until - time.monotonic()):
                    raise

    def _has_plan(self, model: str) -> bool:
        record = self._session.record(model)
        return record is not None and record["active"] is not None

    def generate(
        self, model: str, *, max_new_tokens: int, timeout_s: float = 60.0, **request: Any
    ) -> Generator[dict[str, Any], None, Answer]:
        """Ask a decoder and yield its tokens as they come, each once and in order: {"index", "token", "text"}.

        request: what `infer` takes; timeout_s: for each token. The generator's value is the whole answer. Tokens whose
        messages were lost come with it. Raises as `infer` does.
        """
        if request.get("want") not in (None, "task"):
            raise RequestError(f"want {request['want']!r} generates no tokens; leave it out, or send it with infer")
        future = AnswerStream()
        self._send(model, uuid.uuid4().hex, request_body(**request, max_new_tokens=max_new_tokens), future)
        future.add_done_callback(lambda _: future.parts.put(None))
        shown = 0
        try:
            while (part := future.parts.get(timeout=timeout_s)) is not None:
                if part.get("index") == shown:
                    shown += 1
                    yield {key: part[key] for key in TOKEN}
        except queue.Empty:
            raise self._timeout_error(timeout_s) from None
        finally:
            future.cancel()
        answer = future.result()
        for index, token in enumerate(answer.result["ids"][shown:], shown):
            yield {"index": index, "token": token, "text": ""}
        return answer

    def foretold(self, answer: Answer, **request: Any) -> Answer:
        """Return an answer with its simulated forecast, if it came with an estimate.

        request: what `infer` was given, without the model; not want="hidden". It is sent again with want="plan". If
        that fails, or another plan is active by then, the answer is returned unchanged.
        """
        if answer.raw.get("forecast") != "estimated":
            return answer
        try:
            told = self.infer(answer.model, **{**request, "want": "plan"})
        except HeptiError:  # the answer itself is complete
            return answer
        if told.plan["id"] != answer.plan["id"]:
            return answer
        keys = ("forecast", "predicted_ms", "expected_ms", "predicted_bytes", "plan")
        return replace(answer, raw={**answer.raw, **{key: told.raw[key] for key in keys if key in told.raw}})

    def submit(self, model: str, *, request_id: str | None = None, **request: Any) -> Future[Answer]:
        """Send a request with the arguments of `infer` and return its future; cancelling it ends the wait.

        request_id: repeating a request with its id returns the same answer without computing it again; another request
        with that id raises IdInUseError. Raises RequestError if the request is not valid JSON, BadNameError,
        NetworkError if the send queue is full.
        """
        future: Future[Answer] = Future()
        self._send(model, request_id or uuid.uuid4().hex, request_body(**request), future)
        return future

    def _send(self, model: str, name: str, body: Mapping[str, Any], future: Future[Answer]) -> None:
        with self._changed:
            publication = self._session.add_request(model, name, body, future, time.perf_counter())
        future.add_done_callback(lambda _: self._forget(model, name, future))
        try:
            self._transport.publish(publication.topic, publication.payload, 1)
        except HeptiError:
            self._forget(model, name, future)
            raise

    def _forget(self, model: str, name: str, future: Future[Answer]) -> None:
        with self._changed:
            self._session.forget(model, name, future)

    def _timeout_error(self, timeout_s: float) -> HeptiError:
        with self._changed:
            connected, planner = self._connected, self._session.planner_online
        if not connected:
            return NetworkError(f"The connection to the broker was lost for {timeout_s:g} s")
        if not planner:
            return NetworkError(f"no planner answers at site {self.site}; start one with: hepti planner --model ...")
        return DeadlineError(f"no answer within {timeout_s:g} s; the planner is there, see `hepti plan` and its log")

    # -- the site ---------------------------------------------------------------------------------------------------

    def models(self, timeout: float = PLANNER_S) -> list[str]:
        """Return the names of the models that the planner serves; raises NetworkError if there is no planner."""
        self._require_planner(timeout)
        count = 0

        def has_more() -> bool:
            return len(self._session.models()) > count

        # Retained records come one by one, and none is marked as the last.
        while self._wait_until(has_more, PAUSE_S if count else GRACE_S):
            with self._changed:
                count = len(self._session.models())
        with self._changed:
            return self._session.models()

    def plan(self, model: str, timeout: float = PLANNER_S) -> dict[str, Any]:
        """Return the record of a model's plans: active, preparing, spec, candidates, reason, directory, error, story.

        Raises NetworkError if there is no planner, UnknownModelError if it does not serve the model, WireError if its
        version is incompatible.
        """
        self._require_planner(timeout)
        self._wait_until(lambda: self._session.record(model) is not None, GRACE_S)
        with self._changed:
            record, names = self._session.record(model), self._session.models()
        if record is None:
            raise UnknownModelError(f"no model {model} at site {self.site}; there are: {', '.join(names) or 'none'}")
        return record

    def wait_ready(
        self,
        model: str,
        timeout: float = 60.0,
        predicate: Callable[[Mapping[str, Any]], bool] | None = None,
        patience_s: float | None = None,
    ) -> dict[str, Any]:
        """Wait until a plan of the model is active (and `predicate(record)` holds); return its record.

        patience_s: give up after the planner has reported an error for this long; by default the whole timeout.
        Raises as `plan` does, and PlanError with the planner's message.
        """
        until = time.monotonic() + timeout
        hopeless_since: float | None = None

        def ready() -> bool:
            nonlocal hopeless_since
            record = self._session.record(model)
            if record is None or record["active"] is not None or record["error"] is None:
                hopeless_since = None
            elif hopeless_since is None:
                hopeless_since = time.monotonic()
            return bool(record and record["active"] is not None and (predicate is None or predicate(record)))

        while time.monotonic() < until:
            if self._wait_until(ready, min(until - time.monotonic(), GRACE_S)):
                return self.plan(model)
            if patience_s is not None and hopeless_since is not None and time.monotonic() - hopeless_since > patience_s:
                break
        record = self.plan(model, timeout=GRACE_S)
        error = record["error"]
        raise PlanError(error["message"] if error else f"no plan of {model} was active within {timeout:g} s")

    def devices(self, wait_s: float = 1.5) -> list[dict[str, Any]]:
        """Return every device's own description: device, status, boot, its caps, and `heartbeat` or None.

        wait_s: longest wait for the heartbeats of all online devices. Raises RefusedError if the broker refuses that;
        requests go on.
        """
        with self._changed:
            if self._watching is None:
                t = self._session.topics
                filters = [(t.all_status(), 1), (t.all_caps(), 1), (t.all_heartbeats(), 0)]
                self._watching = self._transport.subscribe(filters)
            for device in self._session.devices.values():
                device.heartbeat = None
        self._wait_until(lambda: self._unseen is not None or self._all_heard(), wait_s)
        with self._changed:
            if self._unseen is not None:
                raise self._unseen
            return [d.to_dict(name) for name, d in sorted(self._session.devices.items())]

    @property
    def planner_online(self) -> bool:
        """Return whether the site's planner is known to be online."""
        with self._changed:
            return self._session.planner_online

    def unused(self) -> dict[str, str]:
        """Return why the planner leaves online devices out of all plans, by name; empty without a planner."""
        with self._changed:
            return self._session.unused()

    def odd_clocks(self, found: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return in words which clocks of the site differ from most others; found: by `devices`, just now."""
        now_s = time.time()
        with self._changed:
            return odd_clocks(found, self._session.clocks(), now_s)

    def _all_heard(self) -> bool:
        online = [d for d in self._session.devices.values() if d.status is not None and d.status.state == "online"]
        return self._watching in self._subscribed and bool(online) and all(d.heartbeat is not None for d in online)

    # -- waiting ----------------------------------------------------------------------------------------------------

    def _open(self, timeout: float) -> None:
        t = self._session.topics
        self._transport.subscribe([(t.responses(self.client_id), 1), (t.planner_status(), 1), (t.all_plans(), 1)])
        self._transport.connect(timeout)
        if not self._wait_until(lambda: self._connected, timeout):
            raise NetworkError(f"the broker did not acknowledge the subscriptions within {timeout:g} s")

    def _wait_until(self, predicate: Callable[[], bool], timeout: float) -> bool:
        """Wait until `predicate` holds, looking again after every message; raises RefusedError."""
        with self._changed:
            found = self._changed.wait_for(lambda: self._refused is not None or predicate(), timeout)
            if self._refused is not None:
                raise self._refused
            return found

    def _require_planner(self, timeout: float) -> None:
        if not self._wait_until(lambda: self._session.planner_online, timeout):
            raise self._timeout_error(timeout)

    # -- network thread ---------------------------------------------------------------------------------------------

    def _heard(self, topic: str, payload: bytes) -> None:
        now = time.perf_counter()
        with self._changed:
            out = self._session.handle_message(topic, payload, now)
            self._changed.notify_all()
        for item in out:
            if isinstance(item, RequestEnded):
                settle(item.handle, item.outcome)
            elif isinstance(item, PartialAnswer):
                if isinstance(item.handle, AnswerStream):
                    item.handle.parts.put(item.data)
            else:
                self._transport.publish(item.topic, item.payload, 1)

    def _state(self, state: State) -> None:
        again: list[RequestPublish] = []
        refused: list[object] = []
        refusal = refusal_error(self.client_id, "publish to", state) if isinstance(state, Refused) else None
        with self._changed:
            if isinstance(state, Connected):
                again = self._session.to_resend()
                self._connected = True
            elif isinstance(state, Disconnected):
                self._connected = False
            elif isinstance(state, Subscribed):
                self._subscribed.add(state.token)
            elif state.token is None:
                refused = self._session.drop_refused(state.topics)
            elif state.token == self._watching:
                self._unseen = refusal_error(self.client_id, "subscribe to", state)
            else:
                self._refused = refusal_error(self.client_id, "subscribe to", state)
            self._changed.notify_all()
        for token in refused:
            assert refusal is not None
            settle(token, refusal)
        for publication in again:
            self._transport.publish(publication.topic, publication.payload, 1)
