"""Streams that fail, wait or are left by their client: what the client reads and what the metrics count."""

import asyncio
import json

import pytest
from gateway_client import CHAT, GENERATE, NEEDED, OLLAMA, TEXT, WRITTEN, Unfinished, events, http_of
from starlette.testclient import TestClient

from hepti_mqtt.core.errors import DeadlineError, HeptiError, PlanError, RemoteError
from hepti_mqtt.gateway import site as site_module
from hepti_mqtt.gateway.app import create_app
from hepti_mqtt.gateway.site import Site

FAILURES = [
    *((path, DeadlineError("late"), "deadline", 504) for path in (CHAT, TEXT, OLLAMA, GENERATE)),
    (CHAT, RemoteError("a device was lost"), "remote", 502),
    (CHAT, PlanError("no device"), "no_plan", 503),
    (CHAT, ZeroDivisionError("a mistake"), "remote", 502),
]


@pytest.mark.parametrize(("path", "error", "code", "status"), FAILURES)
def test_a_stream_that_fails_ends_with_its_cause(path, error, code, status):
    http = http_of(Unfinished("Light", error))
    answer = http.post(path, json={**NEEDED[path], "stream": True})
    assert answer.status_code == 200
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
    *_, text, last = events(answer)
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


@pytest.mark.parametrize("path", [CHAT, OLLAMA])
def test_a_client_that_leaves_a_stream_is_counted_and_ends_the_request(path):
    client = Unfinished()
    app = create_app(Site(client, 5.0))
    body = json.dumps({"model": "m", **NEEDED[path], "stream": True}).encode()

    async def leave():
        left, sent = asyncio.Event(), []
        messages = iter([{"type": "http.request", "body": body}])

        async def receive():
            if (message := next(messages, None)) is not None:
                return message
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if b"Light" in message.get("body", b""):
                left.set()

        async def write():
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


def test_a_stream_that_waits_says_so_until_its_limit(monkeypatch):
    monkeypatch.setattr(site_module, "PING_S", 0.001)
    client = Unfinished()

    async def wait():
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


@pytest.mark.parametrize("path", [CHAT, OLLAMA])
def test_pings_are_no_text(path, monkeypatch):
    monkeypatch.setattr(site_module, "PING_S", 0.001)
    body = {"model": "m", **NEEDED[path], "stream": True}
    answer = TestClient(create_app(Site(Unfinished(), 0.004))).post(path, json=body)
    *_, last = events(answer)
    assert [*last] == ["error"]
    assert events(answer)[0]["done"] is False if path == OLLAMA else ": ping\n\n" in answer.text
