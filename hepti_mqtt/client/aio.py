"""The asyncio client: its waits suspend, so the coroutines of a connection are its methods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any

from hepti_mqtt.client.connection import Connection
from hepti_mqtt.client.session import Answer
from hepti_mqtt.transport.url import BrokerUrl


class AsyncHepti(Connection):
    """`Hepti` for asyncio, with the same names, arguments and errors: `async with AsyncHepti.connect(url) as hepti`.

    Cancelling a call cancels its request. A client belongs to the event loop that connected it.
    """

    _timeout_s = 10.0

    @classmethod
    def connect(
        cls,
        url: str | BrokerUrl | None = None,
        site: str | None = None,
        client_id: str | None = None,
        timeout: float = 10.0,
    ) -> AsyncHepti:
        """Return an unconnected client; `await` or `async with` connects it. Arguments, errors: as `Hepti.connect`."""
        hepti = cls._create(url, site, client_id)
        hepti._timeout_s = timeout
        return hepti

    def __await__(self) -> Generator[Any, None, AsyncHepti]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> AsyncHepti:
        if self._connected:  # `async with await` does both
            return self
        try:
            await asyncio.to_thread(self._connect, self._timeout_s)
            await self._require_connection(self._timeout_s)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Disconnect; pending requests end with NetworkError."""
        await asyncio.shield(asyncio.to_thread(self._close))

    async def generate(
        self, model: str, *, max_new_tokens: int, timeout_s: float = 60.0, **request: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Ask a decoder and yield its tokens; see `Hepti.generate`. An asynchronous generator has no value."""
        loop, parts = asyncio.get_running_loop(), asyncio.Queue[Mapping[str, Any] | None]()
        put = parts.put_nowait
        body = {**request, "max_new_tokens": max_new_tokens}
        stream = self.stream(model, body, lambda part: _call_soon(loop, put, part))
        try:
            while (part := await asyncio.wait_for(parts.get(), timeout_s)) is not None:
                for token in stream.take(part):
                    yield token
        except TimeoutError:
            raise self._timeout_error(timeout_s) from None
        finally:
            stream.cancel()
        for token in stream.rest():
            yield token

    def submit(self, model: str, *, request_id: str | None = None, **request: Any) -> asyncio.Future[Answer]:
        """Send a request and return its future; cancelling it cancels the request; see `Hepti.submit`."""
        return asyncio.wrap_future(self._submit(model, request_id, request))

    infer = Connection._infer
    foretold = Connection._foretold
    models = Connection._models
    plan = Connection._plan
    wait_ready = Connection._wait_ready
    devices = Connection._devices

    async def _wait(self, holds: Future[Answer] | Callable[[], bool], timeout_s: float) -> bool:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake(*_: object) -> None:
            _call_soon(loop, changed.set)

        if isinstance(holds, Future):  # others' answers do not wake it
            holds.add_done_callback(wake)
            over = holds.done
        else:
            over = partial(self._holds, holds)
            with self._changed:
                self._wakes.add(wake)
        try:
            async with asyncio.timeout(timeout_s):
                while not over():
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            return False
        else:
            return True
        finally:
            with self._changed:
                self._wakes.discard(wake)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: object) -> None:
    """Call on the loop from any thread; do nothing if the loop is closed."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, *arguments)
