"""The blocking client: runs the steps of a connection in the caller's thread."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, wait
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from hepti_mqtt.client.connection import Connection, Steps, Wait
from hepti_mqtt.client.session import Answer
from hepti_mqtt.transport import BrokerUrl

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(steps: Callable[Concatenate[Connection, P], Steps[T]]) -> Callable[Concatenate[Hepti, P], T]:
    """Return the method that runs steps in the caller's thread."""

    @wraps(steps)
    def method(self: Hepti, /, *arguments: P.args, **options: P.kwargs) -> T:
        return self._run(steps(self, *arguments, **options))

    return method


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

    def submit(self, model: str, *, request_id: str | None = None, **request: Any) -> Future[Answer]:
        """Send a request with the arguments of `infer` and return its future; cancelling it ends the wait.

        request_id: repeating a request with its id returns the same answer without computing it again; another request
        with that id raises IdInUseError. Raises RequestError if the request is not valid JSON, BadNameError,
        NetworkError if the send queue is full.
        """
        return self._submit(model, request_id, request)

    infer = _blocking(Connection._infer)
    foretold = _blocking(Connection._foretold)
    models = _blocking(Connection._models)
    plan = _blocking(Connection._plan)
    wait_ready = _blocking(Connection._wait_ready)
    devices = _blocking(Connection._devices)

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
