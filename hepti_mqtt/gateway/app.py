"""The ASGI application: keys, bounds, errors and metrics around the routes."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from hepti_mqtt import __version__
from hepti_mqtt.errors import HeptiError, RemoteError
from hepti_mqtt.gateway.bodies import Body, read_form, read_json
from hepti_mqtt.gateway.dashboard import Dashboard, View, page_routes
from hepti_mqtt.gateway.errors import UnauthorizedError, error_response
from hepti_mqtt.gateway.routes import FORMS, ROUTES, Handler
from hepti_mqtt.gateway.site import Site

_log = logging.getLogger(__name__)
# For load balancers, which have no key, and for who looks at the dashboard, which shows no request's content.
_OPEN: Final = frozenset({"/health", "/ping", "/events"})
_HUNG_UP: Final = 499  # nobody reads it; it stands in the metrics


class Metrics:
    """What `/metrics` says, in Prometheus' names."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "hepti_gateway_requests", "HTTP requests by route and status", ("route", "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "hepti_gateway_request_seconds", "Time from request to answer", ("route",), registry=self.registry
        )
        self.running = Gauge("hepti_gateway_requests_running", "HTTP requests being answered", registry=self.registry)


def create_app(site: Site, keys: Sequence[str] = (), stopping: Callable[[], bool] = lambda: False) -> Starlette:
    """Return the gateway to a site.

    keys: those that clients may send as bearer tokens, none for no check. stopping: whether the process ends.
    """
    metrics, known = Metrics(), [key.encode() for key in keys]

    def guarded(
        answer: Callable[[Request], Awaitable[Response]], route: str
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guard(request: Request) -> Response:
            begun = time.perf_counter()
            with metrics.running.track_inprogress():
                response = await _answer(request, answer, known if route not in _OPEN else ())
            metrics.requests.labels(route, response.status_code).inc()
            metrics.seconds.labels(route).observe(time.perf_counter() - begun)
            return response

        return guard

    async def health(_request: Request) -> Response:
        await site.models()
        return PlainTextResponse("ok")

    async def ping(_request: Request) -> Response:
        return PlainTextResponse("pong")

    async def show_metrics(_request: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    routes = [
        Route(path, guarded(_json(site, handler), path), methods=[method]) for (method, path), handler in ROUTES.items()
    ]
    dashboard = Dashboard(View(site.client).look, lambda: _beside(site, bool(known)), stopping)
    plain = {"/events": dashboard.watch, "/health": health, "/ping": ping, "/metrics": show_metrics}
    routes += [Route(path, guarded(answer, path)) for path, answer in plain.items()]
    return Starlette(routes=[*routes, *page_routes()], exception_handlers={404: _nothing_here, 405: _nothing_here})


def _beside(site: Site, locked: bool) -> dict[str, Any]:
    """Return what the gateway itself knows for the dashboard; locked: whether a request needs a key."""
    told = site.journal.to_dict(site.client.answers(), time.time())
    if locked:  # a message may quote its request
        told["errors"] = [{**error, "message": ""} for error in told["errors"]]
    return {"site": site.client.site, "locked": locked, "version": __version__, **told}


def _json(site: Site, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        read = read_form if request.url.path in FORMS else read_json
        body = await read(request) if request.method == "POST" else Body({})
        async with _cancelled_by_hangup(request):
            found = await handler(site, body)
            return PlainTextResponse(found) if isinstance(found, str) else JSONResponse(found)

    return answer


@contextlib.asynccontextmanager
async def _cancelled_by_hangup(request: Request) -> AsyncIterator[None]:
    """Cancel what is inside when the client hangs up; raises ClientDisconnect then."""
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


async def _answer(
    request: Request, answer: Callable[[Request], Awaitable[Response]], keys: Sequence[bytes]
) -> Response:
    try:
        _check_key(request, keys)
        return await answer(request)
    except HeptiError as error:
        return error_response(error)
    except ClientDisconnect:
        return Response(status_code=_HUNG_UP)
    except Exception as error:  # a mistake here must not end the process, nor show its insides
        _log.exception("%s %s failed", request.method, request.url.path)
        return error_response(RemoteError(f"the gateway failed ({type(error).__name__}); see its log"))


def _check_key(request: Request, keys: Sequence[bytes]) -> None:
    """Raise UnauthorizedError unless the request carries one of the keys, or none is wanted."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    given = token.strip().encode() if scheme.lower() == "bearer" else b""
    found = [hmac.compare_digest(given, key) for key in keys]  # all of them: the time says nothing of the place
    if keys and not any(found):
        raise UnauthorizedError("wrong or missing key; send Authorization: Bearer KEY with one of HEPTI_GATEWAY_KEYS")


async def _nothing_here(request: Request, _error: Exception) -> Response:
    known = sorted({f"{method} {path}" for method, path in ROUTES})
    message = f"no route {request.method} {request.url.path}; known are {', '.join(known)}"
    body: dict[str, Any] = {"message": message, "type": "invalid_request_error", "param": None, "code": "not_found"}
    return JSONResponse({"error": body}, 404)
