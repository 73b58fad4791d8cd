"""Timeouts for slow HTTP clients: uvicorn waits forever for request heads and for clients that do not read."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

STALLED_S: Final = 30.0
LEAST_BYTES_PER_S: Final = 1024
SWEEP_TICKS: Final = 50  # of uvicorn's loop, which ticks ten times a second


class Connection(H11Protocol):
    """Closes if its client stalls for 30 s: it sends no whole head or refused body, or does not read the answer."""

    _late_since = 0.0
    _unread_bytes = 0  # largest backlog since then

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._late_since = self.loop.time()

    def sweep(self, now: float) -> None:
        """Abort the connection if its client stalls for too long; now: of the loop's clock."""
        unread = self.transport.get_write_buffer_size()
        self._unread_bytes = max(self._unread_bytes, unread)
        elapsed = now - self._late_since
        reads_slowly = unread > max(0, self._unread_bytes - LEAST_BYTES_PER_S * elapsed)
        if not reads_slowly and not self._owes():
            self._late_since, self._unread_bytes = now, unread
        elif elapsed > STALLED_S:
            self.transport.abort()

    def _owes(self) -> bool:
        """Return whether the client owes bytes that no other timeout covers."""
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            return bool(self.cycle.response_complete)
        return state is h11.IDLE and (self.cycle is None or bool(self.conn.trailing_data[0]))


class Server(uvicorn.Server):
    """Looks at its connections every five seconds."""

    async def on_tick(self, counter: int) -> bool:
        """Abort connections of late clients."""
        if counter % SWEEP_TICKS == 0:
            now = asyncio.get_running_loop().time()
            for one in list(self.server_state.connections):
                if isinstance(one, Connection):
                    one.sweep(now)
        return await super().on_tick(counter)
