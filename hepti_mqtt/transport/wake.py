"""A thread that polls sockets, woken by other threads."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable


class Wake:
    """A pipe that is readable from `set` until `clear`; setting it again before costs no system call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set = False
        self._open = True
        self._reader, self._writer = os.pipe()

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._reader

    def set(self) -> None:
        """Wake the poller; from any thread, also after `close`."""
        with self._lock:
            if self._open and not self._set:
                self._set = True
                os.write(self._writer, b"\0")

    def clear(self) -> None:
        """Take the wake-up; call it before looking for what it announces."""
        with self._lock:
            if self._open and self._set:
                os.read(self._reader, 1)
                self._set = False

    def wait(self, timeout_s: float) -> None:
        """Sleep until woken, at most `timeout_s`, and take the wake-up."""
        poller = select.poll()
        poller.register(self._reader, select.POLLIN)
        if poller.poll(timeout_s * 1000):
            self.clear()

    def pause(self, delay_s: float, stop: Callable[[], bool]) -> None:
        """Sleep for `delay_s`, however often woken, unless `stop()`."""
        until = time.monotonic() + delay_s
        while not stop() and (left := until - time.monotonic()) > 0:
            self.wait(left)

    def close(self) -> None:
        """Give the descriptors back."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._reader)
                os.close(self._writer)

    def __del__(self) -> None:
        self.close()
