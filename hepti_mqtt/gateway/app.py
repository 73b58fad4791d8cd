"""The ASGI application: keys, bounds, errors and metrics around the routes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from hepti_mqtt import __version__
from hepti_mqtt.core.errors import HeptiError, RemoteError
from hepti_mqtt.gateway import chat, immich, llama_cpp, ollama, responses, routes, tei
from hepti_mqtt.gateway.bodies import FORM, Body, Room, checked, media_type, read_form, read_json
from hepti_mqtt.gateway.dashboard import Dashboard, View, page_routes
from hepti_mqtt.gateway.errors import HttpError, error_response, ollama_error, openai_error, renamed
from hepti_mqtt.gateway.hosts import OwnSite
from hepti_mqtt.gateway.operations import JSON, PLAIN, Operation, document
from hepti_mqtt.gateway.site import Site
from hepti_mqtt.gateway.streams import EVENTS, HUNG_UP, Stream

_log = logging.getLogger(__name__)


async def ping(_site: Site, _body: None) -> Any:
    """Report that the gateway runs."""
    return "pong"


# Routes for load balancers need no key. Neither does the dashboard, because it shows no content of requests.
OPERATIONS: Final = (
    *(one for module in (routes, chat, responses, tei, ollama, immich, llama_cpp) for one in module.OPERATIONS),
    Operation("GET", "/ping", ping, {PLAIN: str}, is_open=True),
)


class Metrics:
    """The metrics of `/metrics`, in Prometheus' names."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "hepti_gateway_requests", "HTTP requests by route and status", ("route", "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "hepti_gateway_request_seconds", "Time from request to answer", ("route",), registry=self.registry
        )
        self.running = Gauge("hepti_gateway_requests_running", "HTTP requests being answered", registry=self.registry)


class _Endpoint:
    """A path; several operations differ by the body's media type, and the first is the default."""

    def __init__(
        self, site: Site, operations: Sequence[Operation], keys: Sequence[bytes], room: Room, metrics: Metrics
    ) -> None:
        self._site, self._operations, self._keys = site, operations, keys
        self._room, self._metrics = room, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; of a stream, the metrics count the end."""
        request, several = Request(scope, receive), self._operations
        kind = media_type(request) if len(several) > 1 else ""
        one = next((one for one in several if one.reads == kind), several[0])
        begun, metrics = time.perf_counter(), self._metrics
        with metrics.running.track_inprogress():
            response = await _answer(self._site, one, request, () if one.is_open else self._keys, self._room)
            if isinstance(response, Stream):
                with contextlib.suppress(ClientDisconnect):  # counted as 499
                    await response(scope, receive, send)
        status = response.outcome if isinstance(response, Stream) else response.status_code
        metrics.requests.labels(one.path, status).inc()
        metrics.seconds.labels(one.path).observe(time.perf_counter() - begun)
        if not isinstance(response, Stream):
            await response(scope, receive, send)


def create_app(
    site: Site,
    keys: Sequence[str] = (),
    stopping: Callable[[], bool] = lambda: False,
    *,
    origins: Sequence[str] = (),
    names: Sequence[str] | None = None,
) -> Starlette:
    """Return the gateway to a site.

    keys: valid bearer tokens, empty for no check. stopping: whether the process ends. origins:
    of pages that may call the gateway. names: hosts of a gateway without keys, None for any.
    """
    metrics, secrets, room = Metrics(), [key.encode() for key in keys], Room()

    async def show_metrics(_site: Site, _body: None) -> Response:
        """The gateway's own figures, for Prometheus."""
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    async def openapi(_site: Site, _body: None) -> Any:
        """This document."""
        return await asyncio.to_thread(described)  # some 0.2 s of computing

    dashboard = Dashboard(View(site.client).look, lambda: _more(site, bool(secrets)), stopping)
    operations = (
        *OPERATIONS,
        Operation("GET", "/metrics", show_metrics, {PLAIN: str}),
        Operation("GET", "/events", dashboard.watch, {EVENTS: Any}, is_open=True),
        Operation("GET", "/openapi.json", openapi, {JSON: dict[str, Any]}, is_open=True),
    )
    described = functools.cache(lambda: document(operations, bool(secrets)))
    by_route: dict[tuple[str, str], list[Operation]] = {}
    for one in operations:
        by_route.setdefault((one.method, one.path), []).append(one)
    paths = [
        Route(path, _Endpoint(site, several, secrets, room, metrics), methods=[method])
        for (method, path), several in by_route.items()
    ]
    layers = []
    if origins:
        layers.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    if not secrets and names is not None:
        layers.append(Middleware(OwnSite, names=names, origins=origins))
    refusals = {404: _nothing_here, 405: _nothing_here}
    return Starlette(routes=[*paths, *page_routes()], exception_handlers=refusals, middleware=layers)


def _more(site: Site, locked: bool) -> dict[str, Any]:
    """Return the gateway's own part of the dashboard; locked: whether requests need a key."""
    statistics = site.statistics.to_dict(site.client.answers(), time.time())
    if locked:  # a message may quote its request
        statistics["errors"] = [{**error, "message": ""} for error in statistics["errors"]]
    return {"site": site.client.site, "locked": locked, "version": __version__, **statistics}


@contextlib.asynccontextmanager
async def _cancelled_by_hangup(request: Request) -> AsyncIterator[None]:
    """Cancel the block when the client hangs up, and raise ClientDisconnect."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()


async def _answer(site: Site, operation: Operation, request: Request, keys: Sequence[bytes], room: Room) -> Response:
    body: Body | None = None
    try:
        _check_key(request, keys)
        with room.part() as take:
            if operation.body is not None:
                read = read_form if operation.reads == FORM else read_json
                # Other methods read their values from the path.
                values = await read(request, take) if operation.method == "POST" else request.path_params
                body = checked(operation.body, values)
            async with _cancelled_by_hangup(request):
                answer = await operation.handler(site, body)
        if isinstance(answer, Response):
            return answer
        return PlainTextResponse(answer) if isinstance(answer, str) else JSONResponse(answer)
    except HeptiError as error:
        return error_response(renamed(error, {} if body is None else body.names()), operation.as_error)
    except ClientDisconnect:
        return Response(status_code=HUNG_UP)
    except Exception as error:  # log it, and show the client only its class
        _log.exception("%s %s failed", request.method, request.url.path)
        return error_response(
            RemoteError(f"the gateway failed ({type(error).__name__}); see its log"), operation.as_error
        )


def _check_key(request: Request, keys: Sequence[bytes]) -> None:
    """Raise HttpError unless the request carries one of the keys, or no key is configured."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    given = token.strip().encode() if scheme.lower() == "bearer" else b""
    matches = [hmac.compare_digest(given, key) for key in keys]  # with all, so that the time reveals nothing
    if keys and not any(matches):
        raise HttpError(
            "unauthorized", "wrong or missing key; send Authorization: Bearer KEY with one of HEPTI_GATEWAY_KEYS"
        )


async def _nothing_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "not_found" if error.status_code == 404 else "method_not_allowed"
    refusal = HttpError(code, f"no route {request.method} {request.url.path[:80]}; see /openapi.json")
    response = error_response(refusal, ollama_error if request.url.path.startswith("/api/") else openai_error)
    response.headers.update(error.headers or {})
    return response
