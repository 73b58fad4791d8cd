"""The asyncio client: runs the steps of a connection as a coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, Unpack

from hepti_mqtt.client.body import RequestKeys
from hepti_mqtt.client.connection import PLANNER_S, Connection, Steps, Wait
from hepti_mqtt.client.session import Answer
from hepti_mqtt.transport import BrokerUrl

T = TypeVar("T")


class AsyncHepti(Connection):
    """`Hepti` for asyncio, with the same names, arguments and errors: `async with AsyncHepti.connect(url) as hepti`.

    Cancelling a call frees what it held. A client belongs to the event loop that connected it.
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
        """Return what connects when it is awaited or entered; arguments and errors as `Hepti.connect` has them."""
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
            await self._run(self._require_connection(self._timeout_s))
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

    async def infer(
        self,
        model: str,
        *,
        timeout_s: float | None = None,
        wait_for_plan: bool | None = None,
        **request: Unpack[RequestKeys],
    ) -> Answer:
        """Ask a model and wait for the answer; see `Hepti.infer`."""
        return await self._run(self._infer(model, timeout_s, wait_for_plan, request))

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

    async def foretold(self, answer: Answer, **request: Any) -> Answer:
        """Return an answer with its simulated forecast; see `Hepti.foretold`."""
        return await self._run(self._foretold(answer, request))

    def submit(self, model: str, *, request_id: str | None = None, **request: Any) -> asyncio.Future[Answer]:
        """Send a request and return its future; cancelling it ends the wait; see `Hepti.submit`."""
        return asyncio.wrap_future(self._submit(model, request_id, request))

    async def models(self, timeout: float = PLANNER_S) -> list[str]:
        """Return the names of the models that the planner serves; see `Hepti.models`."""
        return await self._run(self._models(timeout))

    async def plan(self, model: str, timeout: float = PLANNER_S) -> dict[str, Any]:
        """Return the record of a model's plans; see `Hepti.plan`."""
        return await self._run(self._plan(model, timeout))

    async def wait_ready(
        self,
        model: str,
        timeout: float = 60.0,
        predicate: Callable[[Mapping[str, Any]], bool] | None = None,
        patience_s: float | None = None,
    ) -> dict[str, Any]:
        """Wait until a plan of the model is active; return its record; see `Hepti.wait_ready`."""
        return await self._run(self._wait_ready(model, timeout, predicate, patience_s))

    async def devices(self, wait_s: float = 1.5) -> list[dict[str, Any]]:
        """Return every device's own description; see `Hepti.devices`."""
        return await self._run(self._devices(wait_s))

    async def _run(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                step = steps.send(await self._wait(step))
        except StopIteration as end:
            found: T = end.value
            return found
        finally:
            steps.close()

    async def _wait(self, step: Wait) -> bool:
        loop, changed, holds = asyncio.get_running_loop(), asyncio.Event(), step.holds

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
            async with asyncio.timeout(step.timeout_s):
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
    """Call on the loop from any thread; a loop that has ended waits for nothing."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, *arguments)
