"""A gateway without keys answers no page of another site: checks of Host and Origin against DNS rebinding.

A page of a foreign site reaches a private address under a public name of its own. So a name is served only if no
public server can give it: an address, a name without a dot, a name below `.local` and the like, or a name of the user's
own.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from hepti_mqtt.gateway.errors import HttpError, error_response

_PRIVATE: Final = (".local", ".localhost", ".lan", ".home.arpa", ".internal", ".home")


class OwnSite:
    """Answers only requests to its own names and, of pages, from its own origin; origins: further ones."""

    def __init__(self, app: ASGIApp, names: Collection[str], origins: Collection[str]) -> None:
        self._app, self._origins = app, origins
        self._names = {name.lower() for name in (*names, socket.gethostname(), socket.getfqdn())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and (why := self._refusal(Request(scope))):
            await error_response(HttpError("forbidden", why))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> str:
        host, origin = request.headers.get("host", ""), request.headers.get("origin", "")
        if host and not self._is_own(urlsplit(f"//{host}").hostname or ""):
            return (
                f"the gateway has no keys, and {host[:80]!r} is none of its names; start it with --host, or with keys"
            )
        if origin and origin not in self._origins and "*" not in self._origins and urlsplit(origin).netloc != host:
            return f"the gateway has no keys, and a page of {origin[:80]} asks; start it with --cors {origin[:80]}"
        return ""

    def _is_own(self, name: str) -> bool:
        name = name.lower().rstrip(".")
        if name in self._names or "." not in name or name.endswith(_PRIVATE):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
