"""Requests that the broker has handed over and waits for: beyond a number of them a small queue overflows."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hepti_mqtt.transport import Receipt


class Window:
    """Unacknowledged requests of the connection that stands; all methods may be called from any thread.

    spilled: called when all are acknowledged after there had been as many as the broker hands over at once: it may have
    dropped what came beyond. limit: how many that is, None where the broker keeps enough beyond.
    """

    def __init__(self, spilled: Callable[[], None]) -> None:
        self._spilled = spilled
        self.limit: int | None = None
        self._lock = threading.Lock()  # guards all that follows
        self._connection = 0
        self._waiting: set[int] = set()  # packet ids
        self._full = False

    def opened(self, receipt: Receipt) -> None:
        """Note a request."""
        with self._lock:
            if receipt.connection != self._connection:
                self._connection = receipt.connection
                self._waiting.clear()
            self._waiting.add(receipt.packet)
            self._full |= self.limit is not None and len(self._waiting) >= self.limit

    def closed(self, receipt: Receipt) -> None:
        """Note an acknowledgement."""
        with self._lock:
            if receipt.connection != self._connection:
                return
            self._waiting.discard(receipt.packet)
            spilled = self._full and not self._waiting
            self._full &= not spilled
        if spilled:
            self._spilled()
