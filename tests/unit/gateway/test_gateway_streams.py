"""Streams that fail, wait or are left by their client: what the client reads and what the metrics count."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from gateway_client import WRITTEN, Client
from starlette.testclient import TestClient

from hepti_mqtt.client.connection import AnswerStream
from hepti_mqtt.core.errors import DeadlineError, HeptiError, PlanError, RemoteError
from hepti_mqtt.gateway import site as site_module
from hepti_mqtt.gateway.app import create_app
from hepti_mqtt.gateway.site import Site

HELLO = [{"role": "user", "content": "hello"}]
ROUTES = {
    "/v1/chat/completions": {"model": "m", "messages": HELLO, "stream": True},
    "/v1/completions": {"model": "m", "prompt": "hello", "stream": True},
    "/api/chat": {"model": "m", "messages": HELLO},
    "/api/generate": {"model": "m", "prompt": "hello"},
}


class Failing(Client):
    """Writes a token and ends with an error, or with what is no error of Hepti's."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def stream(self, model: str, request: Any, put: Any) -> AnswerStream:
        stream = AnswerStream(put)
        put({"index": 0, "token": 7, "text": "Light"})
        stream.set_exception(self.error)
        return stream


class Silent(Client):
    """Gives its streams to the test."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[AnswerStream] = []

    def stream(self, model: str, request: Any, put: Any) -> AnswerStream:
        self.asked.append(request)
        self.streams.append(AnswerStream(put))
        return self.streams[-1]


def lines_of(answer: Any) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]


CHAT = "/v1/chat/completions"
LATE = (DeadlineError("late"), "deadline", 504)
FAILURES = [
    (RemoteError("a device was lost"), "remote", 502),
    (PlanError("no device"), "no_plan", 503),
    (ZeroDivisionError("a mistake"), "remote", 502),
]


@pytest.mark.parametrize(
    ("path", "error", "code", "status"), [*((path, *LATE) for path in ROUTES), *((CHAT, *one) for one in FAILURES)]
)
def test_a_stream_that_fails_ends_with_its_cause(path: str, error: Exception, code: str, status: int) -> None:
    http = TestClient(create_app(Site(Failing(error), 5.0)))
    answer = http.post(path, json=ROUTES[path])
    assert answer.status_code == 200
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
    *_, text, last = lines_of(answer)
    assert "Light" in json.dumps(text)
    if path.startswith("/api/"):
        assert isinstance(last["error"], str)
        assert last.keys() == {"error"}
    else:
        assert last["error"]["code"] == code
    if isinstance(error, HeptiError):
        assert str(error) in json.dumps(last)
    counted = http.get("/metrics").text.splitlines()
    assert f'hepti_gateway_requests_total{{route="{path}",status="{status}"}} 1.0' in counted


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_a_client_that_leaves_a_stream_is_counted_and_ends_the_request(path: str) -> None:
    client = Silent()
    app = create_app(Site(client, 5.0))
    body = json.dumps(ROUTES[path]).encode()

    async def leave() -> None:
        left, sent = asyncio.Event(), list[dict[str, Any]]()
        messages = iter([{"type": "http.request", "body": body}])

        async def receive() -> Any:
            if (message := next(messages, None)) is not None:
                return message
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            if b"Light" in message.get("body", b""):
                left.set()

        async def write() -> None:
            while not client.streams:
                await asyncio.sleep(0)
            client.streams[0].put({"index": 0, "token": 7, "text": "Light"})

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        await asyncio.gather(app(scope, receive, send), write())
        assert sent[0]["status"] == 200

    asyncio.run(leave())
    assert client.streams[0].cancelled()
    counted = TestClient(app).get("/metrics").text.splitlines()
    assert f'hepti_gateway_requests_total{{route="{path}",status="499"}} 1.0' in counted
    assert "hepti_gateway_requests_running 1.0" in counted, "the look at the metrics alone"


def test_a_stream_that_waits_says_so_until_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_module, "PING_S", 0.001)
    client = Silent()

    async def wait() -> list[Any]:
        site = Site(client, 5.0, text_timeout_s=600.0)
        parts = await site.stream("m", {"text": "hello"})
        found = [await anext(parts), await anext(parts)]
        client.streams[0].set_result(WRITTEN)
        found += [part async for part in parts if part is not None]
        assert client.asked[0]["deadline_ms"] == 600_000
        with pytest.raises(DeadlineError):
            _ = [part async for part in await Site(client, 0.003).stream("m", {"text": "hello"})]
        return found

    assert asyncio.run(wait()) == [None, None, WRITTEN]
    assert client.streams[1].cancelled()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_pings_are_no_text(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_module, "PING_S", 0.001)
    answer = TestClient(create_app(Site(Silent(), 0.004))).post(path, json=ROUTES[path])
    if path.startswith("/api/"):
        first, *_, last = lines_of(answer)
        assert (first["done"], [*last]) == (False, ["error"])
    else:
        assert ": ping\n\n" in answer.text
        assert answer.text.splitlines()[-2].startswith('data: {"error"')
