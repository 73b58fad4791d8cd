"""The dashboard: the state of the site as one value, read while somebody watches, and the page that draws it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib import resources
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from hepti_mqtt.client import Hepti
from hepti_mqtt.client.described import cluster_of_devices, unusable_reason, usable
from hepti_mqtt.client.simulated import simulate_plan
from hepti_mqtt.core.errors import HeptiError, OverloadedError
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.cost.explain import timeline_busy
from hepti_mqtt.models import representative_shape, spec_from_dict
from hepti_mqtt.models.shapes import DecoderInput, ImageInput, TextInput
from hepti_mqtt.models.speech import SpeechInput
from hepti_mqtt.protocol.messages import unreadable

HEARTBEATS_S: Final = 1.5  # for the heartbeats of all devices: each sends one a second
EVERY_S: Final = 2.0
PLANNER_S: Final = 1.0
WATCHERS: Final = 64
MOMENTS: Final = 120  # of a time line
SIMULATED_S: Final = 20.0
COST: Final = 20  # a simulation is kept for at least 20 times what it took
STEPS: Final = 40  # of a model's story
CANDIDATES: Final = 10  # the best
#: What a model reads, as the page asks for it; a decoder reads texts too.
READS: Final[Mapping[type, str]] = {DecoderInput: "chat", SpeechInput: "sound", TextInput: "text", ImageInput: "image"}
PAGE: Final[Mapping[str, tuple[str, str]]] = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
# The page connects only to its own gateway, and never runs text from names.
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob: data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _Simulated(NamedTuple):
    """The simulation of a plan, kept until `due`: measurements of links change."""

    version: object
    due: float
    figures: dict[str, Any]


class View:
    """Looks at a site through its client; blocking, for one thread at a time."""

    def __init__(self, client: Hepti) -> None:
        self._client = client
        self._simulated: dict[str, _Simulated] = {}  # by model

    def look(self) -> dict[str, Any]:
        """Return the devices and models of the site, and in `trouble` the error that hides them, else None."""
        try:
            devices = self._client.devices(wait_s=HEARTBEATS_S)
            unused = self._client.unused()
        except HeptiError as error:
            return {"devices": [], "models": [], "trouble": str(error)}
        site: dict[str, Any] = {"devices": [describe_device(d, unused) for d in devices], "models": [], "trouble": None}
        try:
            for name in self._client.models(PLANNER_S):
                site["models"].append(self._model(name, devices))
        except HeptiError as error:
            site["trouble"] = str(error)
        return site

    def _model(self, name: str, devices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        record = self._client.plan(name, PLANNER_S)
        keys = ("reason", "error", "progress", "in_flight")
        shown = {"name": name, "reads": None, **{key: record[key] for key in keys}}
        shown |= {
            "machines": record.get("machines", {}),
            "chats": record.get("card", {}).get("chat", True),  # a planner may be older
            "candidates": record["candidates"][:CANDIDATES],
            "story": record["story"][-STEPS:],
            "active": record["active"],
            "preparing": record["preparing"],
        }
        if record["active"] is None:
            return shown
        version, begun = record["active"]["version"], time.monotonic()
        last = self._simulated.get(name)
        if last is None or last.version != version or begun > last.due:
            figures = simulated(self._client.site, record, devices)
            now = time.monotonic()
            self._simulated[name] = _Simulated(version, now + max(SIMULATED_S, COST * (now - begun)), figures)
        return shown | self._simulated[name].figures


def describe_device(device: Mapping[str, Any], unused: Mapping[str, str]) -> dict[str, Any]:
    """Return the page's fields of a device of `Hepti.devices`; unused: why the planner does not use devices."""
    heartbeat = device.get("heartbeat") or {}
    names = ("cpu_other", "free_bytes", "rss_bytes", "temperature_c", "round_trip_s", "slowdown")
    measured, edges = heartbeat.get("peers", {}), heartbeat.get("edges", {})
    links = {
        peer: {
            "joined": bool(edges.get(peer, {}).get("joined")),
            "trouble": edges.get(peer, {}).get("trouble", ""),
            **{key: measured.get(peer, {}).get(key) for key in ("round_trip_s", "bytes_per_s")},
        }
        for peer in sorted({*measured, *edges})
    }
    shown = {key: device.get(key) for key in ("device", "status", "doing", "done", "total", "memory_budget_bytes")}
    shown |= {"threads": device.get("threads"), **{key: heartbeat.get(key) for key in names}}
    return shown | {"links": links, "unused": unused.get(device["device"]) or unusable_reason(device)}


def simulated(site: str, record: Mapping[str, Any], devices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the simulation of the active plan: shares of the work, and a time line, in milliseconds.

    Without the plan's devices, or with an unreadable record, `unknown` holds the reason.
    """
    try:
        spec, plan = spec_from_dict(record["spec"]), Plan.from_dict(record["active"])
        kind = spec.input_spec
        reads = next((name for type_, name in READS.items() if isinstance(kind, type_)), "other")
        shape = representative_shape(spec, plan.predicted_tokens or 128)
        result = simulate_plan(site, spec, plan, shape, cluster_of_devices(usable(devices), plan.devices)).result
    except HeptiError as error:
        return {"unknown": str(error)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return {"unknown": str(unreadable(f"the plan cannot be read here ({error!r})"))}
    total = sum(use.flops for use in result.devices.values()) or 1.0
    shares = {
        name: {"share": use.flops / total, "compute_ms": use.compute_s * 1e3, "wait_ms": use.wait_s * 1e3}
        | {"wire_ms": use.frame_s * 1e3, "sent_bytes": use.sent_bytes}
        for name, use in result.devices.items()
    }
    busy = timeline_busy(result.events, plan.devices, result.seconds, MOMENTS)
    lanes = [
        {"device": device, "lane": lane, "busy": [round(min(b, 1.0), 3) for b in parts]}
        for (device, lane), parts in busy.items()
    ]
    return {
        "reads": reads,
        "shares": shares,
        "simulated_ms": result.seconds * 1e3,
        "simulated_tokens": shape.size,
        "timeline": lanes,
    }


class Dashboard:
    """Serves the page and, to all who watch, one look at the site every two seconds.

    look: blocking; returns a part of the value. more: the rest, at once. stopping: whether the process ends.
    """

    def __init__(
        self,
        look: Callable[[], dict[str, Any]],
        more: Callable[[], dict[str, Any]],
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._look, self._more, self._stopping = look, more, stopping
        self._looking = asyncio.Lock()
        self._last: tuple[float, dict[str, Any]] | None = None
        self._watchers = 0

    async def current(self) -> dict[str, Any]:
        """Return the state of the site, at most two seconds old, however many pages watch."""
        async with self._looking:
            if self._last is None or time.monotonic() - self._last[0] > EVERY_S:
                self._last = time.monotonic(), await asyncio.to_thread(self._look)
            return {"time": time.time(), **self._last[1], **self._more()}

    async def watch(self, _site: object, _asked: object) -> Response:
        """Server-sent events, each the whole site.

        Raises OverloadedError if too many watch.
        """
        if self._watchers >= WATCHERS:
            raise OverloadedError(f"{WATCHERS} pages watch this gateway already; close one")
        headers = {**HEADERS, "X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(), media_type="text/event-stream", headers=headers)

    async def _events(self) -> AsyncIterator[str]:
        self._watchers += 1
        try:
            while not self._stopping():
                yield f"data: {json.dumps(await self.current(), allow_nan=False, default=float)}\n\n"
                for _ in range(8):
                    if not self._stopping():
                        await asyncio.sleep(EVERY_S / 8)
        finally:
            self._watchers -= 1


def page_routes() -> list[Route]:
    """Return the routes of the page's files."""
    folder = resources.files("hepti_mqtt.gateway") / "page"

    def route(path: str, name: str, kind: str) -> Route:
        content = (folder / name).read_bytes()

        async def answer(_request: Request) -> Response:
            return Response(content, media_type=kind, headers=dict(HEADERS))

        return Route(path, answer)

    return [route(path, name, kind) for path, (name, kind) in PAGE.items()]
