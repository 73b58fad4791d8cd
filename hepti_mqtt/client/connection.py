"""The base of the blocking and the asyncio client: methods as coroutines; each client implements `_wait`."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Self, Unpack

from hepti_mqtt.client.body import RequestKeys, request_body
from hepti_mqtt.client.session import (
    Answer,
    CheckLater,
    ClientSession,
    PartialAnswer,
    RequestEnded,
    RequestPublish,
    odd_clocks,
)
from hepti_mqtt.config import Settings
from hepti_mqtt.core.errors import (
    ConfigError,
    DeadlineError,
    HeptiError,
    NetworkError,
    PlanError,
    RefusedError,
    RequestError,
    UnknownModelError,
)
from hepti_mqtt.core.ids import check_name, is_name
from hepti_mqtt.protocol.messages import LOGPROBS, THINKING, TOKEN
from hepti_mqtt.protocol.topics import ANSWERS
from hepti_mqtt.transport.base import Connected, Disconnected, Refused, State, Subscribed
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.url import BrokerUrl

GRACE_S: Final = 1.0  # longest wait for a planner's records after its status
PAUSE_S: Final = 0.2  # longest pause between two retained records
ANSWER_S: Final = 60.0  # default timeout of an answer
CHECK_S: Final = 2.0  # between two checks for late requests
PLANNER_S: Final = 5.0  # longest wait for a planner that restarts


def refusal_error(client_id: str, what: str, state: Refused) -> RefusedError:
    """Return the error of a refused publish or subscription; what: "publish to" or "subscribe to"."""
    return RefusedError(
        f"the broker does not let client {client_id} {what} {', '.join(state.topics)}: {state.reason}; "
        "a client's name must be its user's, and the user a client (`hepti site add client NAME`, --client NAME)"
    )


class AnswerStream(Future[Answer]):
    """The future of a streamed answer: its parts go to `put` on arrival, then None."""

    def __init__(self, put: Callable[[Mapping[str, Any] | None], None]) -> None:
        super().__init__()
        self.put, self._shown, self._attempt = put, list[int](), 0
        self.add_done_callback(lambda _: put(None))

    def take(self, part: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the token of a part, unless it was shown or an earlier token is missing.

        A retried text begins with index 0 again.
        """
        if isinstance(attempt := part.get("attempt", 0), int) and attempt > self._attempt:
            self._shown, self._attempt = [], attempt
        if attempt != self._attempt or part.get("index") != len(self._shown):
            return []
        self._shown.append(part["token"])
        return [{key: part[key] for key in (*TOKEN, LOGPROBS, THINKING) if key in TOKEN or key in part}]

    def rest(self) -> list[dict[str, Any]]:
        """Return the tokens of lost messages, or all if other tokens were shown; raises the planner's error."""
        tokens = self.result().result["ids"]
        first = len(self._shown) if tokens[: len(self._shown)] == self._shown else 0
        return [{"index": index, "token": tokens[index], "text": ""} for index in range(first, len(tokens))]


def settle(handle: object, outcome: Answer | HeptiError) -> None:
    """Give a future its answer or error, unless it was cancelled."""
    assert isinstance(handle, Future)
    if not handle.set_running_or_notify_cancel():
        return
    if isinstance(outcome, HeptiError):
        handle.set_exception(outcome)
    else:
        handle.set_result(outcome)


def _start_timer(seconds: float, act: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    return timer


class Connection:
    """A client's connection to a site; all methods may be called from any thread."""

    def __init__(self, url: BrokerUrl, site: str, client_id: str) -> None:
        self.site, self.client_id = check_name("site", site), check_name("client", client_id)
        self._session = ClientSession(site, client_id)
        self._changed = threading.Condition()  # guards the session and the following fields
        self._wakes: set[Callable[[], object]] = set()  # called after every change
        self._connected = False
        self._refused: RefusedError | None = None
        self._devices_refused: RefusedError | None = None  # only for devices; requests still work
        self._subscribed: set[int] = set()
        self._devices_token: int | None = None
        self._late_timer: threading.Timer | None = None  # of the next check for late requests
        self._closed = False
        self._answers_token: int | None = None
        # Two programs of one user must not disconnect each other.
        own = f"hepti-{site}-client-{client_id}-{uuid.uuid4().hex[:8]}"
        self._transport = BrokerConnection(
            url, own, on_message=self._handle_message, on_state=self._handle_state, name="hepti-client"
        )

    @classmethod
    def _create(cls, url: str | BrokerUrl | None, site: str | None, client_id: str | None) -> Self:
        settings = Settings.from_environment(broker=str(url) if isinstance(url, str) else None, site=site)
        if isinstance(url, BrokerUrl):
            place = url
        elif settings.broker is None:
            raise ConfigError("no broker: give a URL such as mqtt://HOST:1883, or set HEPTI_BROKER")
        else:
            place = BrokerUrl.parse(settings.broker)
        # An access list requires the broker's user as name.
        user = place.user if is_name(place.user) else f"py-{uuid.uuid4().hex[:12]}"
        return cls(place, settings.site, client_id or user)

    def _close(self) -> None:
        self._transport.close()
        with self._changed:
            self._closed = True
            if self._late_timer is not None:
                self._late_timer.cancel()
            ended = self._session.abandon()
        for handle in ended:
            settle(handle, NetworkError("the client was closed before the answer came"))

    # -- requests ---------------------------------------------------------------------------------------------------

    async def _infer(
        self,
        model: str,
        *,
        timeout_s: float | None = None,
        wait_for_plan: bool | None = None,
        **request: Unpack[RequestKeys],
    ) -> Answer:
        """Send a request and wait for its answer; request: exactly one input, and options of `RequestKeys`.

        timeout_s: 60 by default. wait_for_plan: also wait for a model's first plan; by default if timeout_s is given.
        After a lost connection the request is sent again.

        Raises the planner's error by its class (RequestError, PlanError, OverloadedError, ...), DeadlineError after
        deadline_ms or without an answer within timeout_s, NetworkError if broker or planner are away all that time.
        """
        wait_s = ANSWER_S if timeout_s is None else timeout_s
        until = time.monotonic() + wait_s
        while True:
            had_plan = self._has_plan(model)  # before sending: if a plan comes later, send again
            future = self._submit(model, None, request)
            try:
                if not await self._wait(future, max(until - time.monotonic(), 0.0)):
                    raise self._timeout_error(wait_s)
                return future.result(0.0)
            except PlanError:
                waits = timeout_s is not None if wait_for_plan is None else wait_for_plan
                if not waits or had_plan:
                    raise
                if not await self._wait(lambda: self._has_plan(model), until - time.monotonic()):
                    raise
            finally:
                future.cancel()

    def _has_plan(self, model: str) -> bool:
        record = self._session.record(model)
        return record is not None and record["active"] is not None

    def stream(
        self, model: str, request: Mapping[str, Any], put: Callable[[Mapping[str, Any] | None], None]
    ) -> AnswerStream:
        """Send a request to a decoder; parts of its answer go to `put` in the network's thread, and None at the end.

        Raises RequestError for a request that generates no tokens, NetworkError.
        """
        if request.get("want") not in (None, "task"):
            raise RequestError(f"want {request['want']!r} generates no tokens; leave it out, or send it with infer")
        stream = AnswerStream(put)
        self._send(model, uuid.uuid4().hex, request_body(**request), stream)
        return stream

    async def _foretold(self, /, answer: Answer, **request: Any) -> Answer:
        """Return an answer with its simulated forecast, if it came with an estimate.

        request: the arguments of `infer` without the model; not want="hidden". It is sent again with want="plan". If
        that fails, or another plan is active by then, the answer is returned unchanged.
        """
        if answer.raw.get("forecast") != "estimated":
            return answer
        try:
            forecast = await self._infer(answer.model, **{**request, "want": "plan"})
        except HeptiError:  # the answer itself is complete
            return answer
        if forecast.plan["id"] != answer.plan["id"]:
            return answer
        keys = ("forecast", "predicted_ms", "expected_ms", "predicted_bytes", "plan")
        return replace(answer, raw={**answer.raw, **{key: forecast.raw[key] for key in keys if key in forecast.raw}})

    def _submit(self, model: str, request_id: str | None, request: Mapping[str, Any]) -> Future[Answer]:
        future: Future[Answer] = Future()
        self._send(model, request_id or uuid.uuid4().hex, request_body(**request), future)
        return future

    def _send(self, model: str, request_id: str, body: Mapping[str, Any], future: Future[Answer]) -> None:
        with self._changed:
            publication = self._session.add_request(model, request_id, body, future, time.perf_counter())
            self._schedule_check()
        future.add_done_callback(lambda _: self._forget(model, request_id, future))
        try:
            self._transport.publish(publication.topic, publication.payload, 1)
        except HeptiError:
            self._forget(model, request_id, future)
            raise

    def _forget(self, model: str, request_id: str, future: Future[Answer]) -> None:
        with self._changed:
            cancel = self._session.forget(model, request_id, future)
            is_reachable = self._connected and self._session.planner_online
        if cancel is not None:  # no caller is left
            # At QoS 0 the cancel overtakes requests that the broker holds back.
            with suppress(NetworkError):
                self._transport.publish(cancel.topic, cancel.payload, 0 if is_reachable else 1)

    def _timeout_error(self, timeout_s: float) -> HeptiError:
        with self._changed:
            connected, planner = self._connected, self._session.planner_online
        if not connected:
            return NetworkError(f"The connection to the broker was lost for {timeout_s:g} s")
        if not planner:
            return NetworkError(f"no planner answers at site {self.site}; start one with: hepti planner --model ...")
        return DeadlineError(f"no answer within {timeout_s:g} s; the planner is there, see `hepti plan` and its log")

    # -- the site ---------------------------------------------------------------------------------------------------

    async def _models(self, timeout: float = PLANNER_S) -> list[str]:
        """Return the names of the models that the planner serves; raises NetworkError if there is no planner."""
        await self._require_planner(timeout)
        count = 0

        def has_more() -> bool:
            return len(self._session.models()) > count

        # Retained records come one by one, and none is marked as the last, so wait for a pause.
        while await self._wait(has_more, PAUSE_S if count else GRACE_S):
            with self._changed:
                count = len(self._session.models())
        with self._changed:
            return self._session.models()

    async def _plan(self, model: str, timeout: float = PLANNER_S) -> dict[str, Any]:
        """Return the record of a model's plans: active, preparing, spec, candidates, reason, directory, error, story.

        Raises NetworkError if there is no planner, UnknownModelError if it does not serve the model, WireError if the
        record is of an incompatible version, or another program has changed it.
        """
        await self._require_planner(timeout)
        await self._wait(lambda: self._session.record(model) is not None, GRACE_S)
        with self._changed:
            record, names = self._session.record(model), self._session.models()
        if record is None:
            raise UnknownModelError(f"no model {model} at site {self.site}; there are: {', '.join(names) or 'none'}")
        return record

    async def _wait_ready(
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
            if await self._wait(ready, min(until - time.monotonic(), GRACE_S)):
                return await self._plan(model, PLANNER_S)
            if patience_s is not None and hopeless_since is not None and time.monotonic() - hopeless_since > patience_s:
                break
        record = await self._plan(model, GRACE_S)
        error = record["error"]
        raise PlanError(error["message"] if error else f"no plan of {model} was active within {timeout:g} s")

    async def _devices(self, wait_s: float = 1.5) -> list[dict[str, Any]]:
        """Return every device's own description: device, status, boot, its caps, and `heartbeat` or None.

        wait_s: longest wait for the heartbeats of all online devices.
        """
        with self._changed:
            if self._devices_token is None:
                t = self._session.topics
                filters = [(t.all_status(), 1), (t.all_caps(), 1), (t.all_heartbeats(), 0)]
                self._devices_token = self._transport.subscribe(filters)
            for device in self._session.devices.values():
                device.heartbeat = None
        await self._wait(self._all_heard, wait_s)
        with self._changed:
            if self._devices_refused is not None:
                raise self._devices_refused
            return [d.to_dict(name) for name, d in sorted(self._session.devices.items())]

    @property
    def planner_online(self) -> bool:
        """Return whether the site's planner is online, by its last status."""
        with self._changed:
            return self._session.planner_online

    def unused(self) -> dict[str, str]:
        """Return why the planner does not use online devices, by name; empty without a planner."""
        with self._changed:
            return self._session.unused()

    def answers(self) -> list[dict[str, Any]]:
        """Return the last answers and errors of all clients since the first call, oldest first.

        Each has time (unix seconds), model, outcome (ok, or an error's code), latency_ms in the planner, and
        predicted_ms and plan, None for an error.
        """
        with self._changed:
            if self._answers_token is None:
                self._answers_token = self._transport.subscribe([(self._session.topics.event(ANSWERS), 0)])
            return list(self._session.answers)

    def odd_clocks(self, devices: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return a sentence per clock that differs from most others; devices: of `devices`, just now."""
        now_s = time.time()
        with self._changed:
            return odd_clocks(devices, self._session.clocks(), now_s)

    def _all_heard(self) -> bool:
        online = [d for d in self._session.devices.values() if d.status is not None and d.status.state == "online"]
        if self._devices_refused is not None:
            return True
        return self._devices_token in self._subscribed and bool(online) and all(d.heartbeat is not None for d in online)

    # -- waiting ----------------------------------------------------------------------------------------------------

    def _connect(self, timeout: float) -> None:
        t = self._session.topics
        self._transport.subscribe([(topic, 1) for topic in (t.responses(self.client_id), *t.every_group())])
        self._transport.connect(timeout)

    async def _require_connection(self, timeout: float) -> None:
        if not await self._wait(lambda: self._connected, timeout):
            raise NetworkError(f"the broker did not acknowledge the subscriptions within {timeout:g} s")

    async def _require_planner(self, timeout: float) -> None:
        if not await self._wait(lambda: self._session.planner_online, timeout):
            raise self._timeout_error(timeout)

    async def _wait(self, holds: Future[Answer] | Callable[[], bool], timeout_s: float) -> bool:
        """Return whether a future ended, or `holds` became true, within the time; every message may change it."""
        raise NotImplementedError

    def _holds(self, predicate: Callable[[], bool]) -> bool:
        """Return whether a wait is over; raises RefusedError."""
        with self._changed:
            if self._refused is not None:
                raise self._refused
            return predicate()

    def _notify(self) -> None:
        self._changed.notify_all()
        for wake in self._wakes:
            wake()

    # -- network thread ---------------------------------------------------------------------------------------------

    def _handle_message(self, topic: str, payload: bytes) -> None:
        now = time.perf_counter()
        with self._changed:
            out = self._session.handle_message(topic, payload, now)
            self._notify()
        for item in out:
            if isinstance(item, RequestEnded):
                settle(item.handle, item.outcome)
            elif isinstance(item, PartialAnswer) and isinstance(item.handle, AnswerStream):
                item.handle.put(item.data)
        self._publish_again([item for item in out if isinstance(item, RequestPublish)])
        if delays_s := [item.after_s for item in out if isinstance(item, CheckLater)]:
            _start_timer(max(delays_s), self._resend_unaccepted)

    def _schedule_check(self) -> None:
        """Start the timer of the next check for late requests, unless it runs; the caller holds the lock."""
        if self._late_timer is None and not self._closed:
            self._late_timer = _start_timer(CHECK_S, self._resend_late)

    def _resend_late(self) -> None:
        with self._changed:
            self._late_timer = None
            late = self._session.resend_unanswered(time.perf_counter()) if self._connected else []
            if self._session.has_pending:
                self._schedule_check()
        self._publish_again(late)

    def _resend_unaccepted(self) -> None:
        with self._changed:
            again = self._session.resend_unaccepted(time.perf_counter())
        self._publish_again(again)

    def _publish_again(self, again: Sequence[RequestPublish]) -> None:
        for publication in again:
            with suppress(NetworkError):  # closed meanwhile, or the send queue is full
                self._transport.publish(publication.topic, publication.payload, 1)

    def _handle_state(self, state: State) -> None:
        again: list[RequestPublish] = []
        refused: list[object] = []
        refusal = refusal_error(self.client_id, "publish to", state) if isinstance(state, Refused) else None
        with self._changed:
            if isinstance(state, Connected):
                again = self._session.to_resend(time.perf_counter())
                self._connected = True
            elif isinstance(state, Disconnected):
                self._connected = False
            elif isinstance(state, Subscribed):
                self._subscribed.add(state.token)
            elif state.token is None:
                refused = self._session.drop_refused(state.topics)
            elif state.token == self._devices_token:
                self._devices_refused = refusal_error(self.client_id, "subscribe to", state)
            elif state.token != self._answers_token:
                self._refused = refusal_error(self.client_id, "subscribe to", state)
            self._notify()
        for handle in refused:
            assert refusal is not None
            settle(handle, refusal)
        self._publish_again(again)
