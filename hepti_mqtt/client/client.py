"""The blocking client: runs the steps of a connection in the caller's thread."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, TypeVar, Unpack

from hepti_mqtt.client.body import RequestKeys
from hepti_mqtt.client.connection import PLANNER_S, Connection, Steps, Wait
from hepti_mqtt.client.session import Answer
from hepti_mqtt.transport import BrokerUrl

T = TypeVar("T")


class Hepti(Connection):
    """A user's connection to a site; use it in a `with` statement. All methods may be called from any thread."""

    @classmethod
    def connect(
        cls,
        url: str | BrokerUrl | None = None,
        site: str | None = None,
        client_id: str | None = None,
        timeout: float = 10.0,
    ) -> Hepti:
        """Return a connection to a site's broker.

        url: mqtt[s]:// or ws[s]://host:port, or a login file, by default HEPTI_BROKER. site: by default HEPTI_SITE,
        else home.
        client_id: the name in topics, by default the broker's user, to whom an access list binds it, else a random one.
        Raises ConfigError without a URL, NetworkError if no broker answers within `timeout` seconds, RefusedError.
        """
        hepti = cls._create(url, site, client_id)
        try:
            hepti._connect(timeout)
            hepti._run(hepti._require_connection(timeout))
        except BaseException:
            hepti.close()
            raise
        return hepti

    def close(self) -> None:
        """Disconnect; pending requests end with NetworkError."""
        self._close()

    def __enter__(self) -> Hepti:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
        return self._run(self._infer(model, timeout_s, wait_for_plan, request))

    def generate(
        self, model: str, *, max_new_tokens: int, timeout_s: float = 60.0, **request: Any
    ) -> Generator[dict[str, Any], None, Answer]:
        """Ask a decoder and yield its tokens as they come, each once and in order: {"index", "token", "text"}.

        request: what `infer` takes; where it has "logprobs", tokens have them, too. timeout_s: for each token. The
        generator's value is the whole answer. Tokens whose messages were lost come with it. Raises as `infer` does.
        """
        parts: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        stream = self.stream(model, {**request, "max_new_tokens": max_new_tokens}, parts.put)
        try:
            while (part := parts.get(timeout=timeout_s)) is not None:
                yield from stream.take(part)
        except queue.Empty:
            raise self._timeout_error(timeout_s) from None
        finally:
            stream.cancel()
        yield from stream.rest()
        return stream.result()

    def foretold(self, answer: Answer, **request: Any) -> Answer:
        """Return an answer with its simulated forecast, if it came with an estimate.

        request: what `infer` was given, without the model; not want="hidden". It is sent again with want="plan". If
        that fails, or another plan is active by then, the answer is returned unchanged.
        """
        return self._run(self._foretold(answer, request))

    def submit(self, model: str, *, request_id: str | None = None, **request: Any) -> Future[Answer]:
        """Send a request with the arguments of `infer` and return its future; cancelling it ends the wait.

        request_id: repeating a request with its id returns the same answer without computing it again; another request
        with that id raises IdInUseError. Raises RequestError if the request is not valid JSON, BadNameError,
        NetworkError if the send queue is full.
        """
        return self._submit(model, request_id, request)

    def models(self, timeout: float = PLANNER_S) -> list[str]:
        """Return the names of the models that the planner serves; raises NetworkError if there is no planner."""
        return self._run(self._models(timeout))

    def plan(self, model: str, timeout: float = PLANNER_S) -> dict[str, Any]:
        """Return the record of a model's plans: active, preparing, spec, candidates, reason, directory, error, story.

        Raises NetworkError if there is no planner, UnknownModelError if it does not serve the model, WireError if its
        version is incompatible.
        """
        return self._run(self._plan(model, timeout))

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
        return self._run(self._wait_ready(model, timeout, predicate, patience_s))

    def devices(self, wait_s: float = 1.5) -> list[dict[str, Any]]:
        """Return every device's own description: device, status, boot, its caps, and `heartbeat` or None.

        wait_s: longest wait for the heartbeats of all online devices.
        """
        return self._run(self._devices(wait_s))

    def _run(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                step = steps.send(self._wait(step))
        except StopIteration as end:
            found: T = end.value
            return found
        finally:
            steps.close()

    def _wait(self, step: Wait) -> bool:
        holds = step.holds
        if isinstance(holds, Future):
            return bool(wait([holds], step.timeout_s).done)
        with self._changed:
            return self._changed.wait_for(lambda: self._holds(holds), step.timeout_s)
