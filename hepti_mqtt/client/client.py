"""The blocking client: its waits block the caller's thread, so the coroutines of a connection never suspend."""

from __future__ import annotations

import queue
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future, wait
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from hepti_mqtt.client.connection import Connection
from hepti_mqtt.client.session import Answer
from hepti_mqtt.transport.url import BrokerUrl

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[Connection, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Hepti, P], T]:
    """Return a method that runs a coroutine to its end in the caller's thread."""

    @wraps(method)
    def blocking(self: Hepti, /, *arguments: P.args, **options: P.kwargs) -> T:
        try:
            method(self, *arguments, **options).send(None)
        except StopIteration as end:
            answer: T = end.value
            return answer
        raise AssertionError("a wait suspended its coroutine instead of blocking")

    return blocking


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
            hepti._require_connected(timeout)
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
        generator's value is the whole answer. Tokens of lost messages come with it. Raises as `infer` does.
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
        """Send a request with the arguments of `infer` and return its future; cancelling it cancels the request.

        request_id: repeating a request under its id returns the same answer. It is not computed again while it runs, or
        while the planner caches its answer (the last 256, until a restart). Another request with that id raises
        IdInUseError. Raises RequestError if the request is not valid JSON, BadNameError, NetworkError if the send queue
        is full.
        """
        return self._submit(model, request_id, request)

    infer = _blocking(Connection._infer)
    foretold = _blocking(Connection._foretold)
    models = _blocking(Connection._models)
    plan = _blocking(Connection._plan)
    wait_ready = _blocking(Connection._wait_ready)
    devices = _blocking(Connection._devices)
    _require_connected = _blocking(Connection._require_connection)

    async def _wait(self, holds: Future[Answer] | Callable[[], bool], timeout_s: float) -> bool:
        if isinstance(holds, Future):
            return bool(wait([holds], timeout_s).done)
        with self._changed:
            return self._changed.wait_for(lambda: self._holds(holds), timeout_s)
