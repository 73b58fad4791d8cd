"""The inbox between the threads that hear things and the one thread that acts on them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

Event = TypeVar("Event")


class Inbox(Generic[Event]):
    """Events for one reading thread.

    What comes again or may be missed (`offer`) is bounded by number and bytes, because a peer may send faster than the
    reader works. What nobody repeats (`post`: wills, outputs, reports, control messages, what this process itself
    reports) is never refused. `overflowed` counts refused offers; `empty()` tells whether nothing waits. wake: called
    after every event that was put, by the thread that did, for a reader that waits elsewhere too.
    """

    def __init__(self, limit: int = 16_384, limit_bytes: int = 96 << 20) -> None:
        self._queue: SimpleQueue[tuple[Event, int]] = SimpleQueue()
        self._limit, self._limit_bytes = limit, limit_bytes
        self._lock = threading.Lock()
        self._offered_bytes = 0
        self._taken_bytes = 0  # written by the reading thread only, so that taking needs no lock
        self.overflowed = 0
        self.wake: Callable[[], None] = _nobody
        self.empty: Callable[[], bool] = self._queue.empty  # asked before every op, so without a call in between

    def offer(self, event: Event, nbytes: int) -> bool:
        """Put an event that holds `nbytes`; return False, and count, if there is no room for it."""
        with self._lock:
            waiting = self._offered_bytes - self._taken_bytes
            # One that is larger than the bound may still come alone, or it could never come at all.
            full = waiting > 0 and waiting + nbytes > self._limit_bytes
            if full or self._queue.qsize() >= self._limit:
                self.overflowed += 1
                return False
            self._offered_bytes += nbytes
        self._queue.put((event, nbytes))
        self.wake()
        return True

    def post(self, event: Event) -> None:
        """Put an event that must not be lost, whatever waits already; safe in a signal handler."""
        self._queue.put((event, 0))
        self.wake()

    def get(self, timeout_s: float | None = None) -> Event:
        """Wait for the next event and return it; raises queue.Empty if none comes within `timeout_s`."""
        event, nbytes = self._queue.get(timeout=timeout_s)
        self._taken_bytes += nbytes
        return event


def _nobody() -> None:
    """Wake nobody: the reader waits in `get`."""
