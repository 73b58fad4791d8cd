"""The builder's thread: Programs are built beside the session's, which goes on with what runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from hepti_mqtt.kernels import Workers
from hepti_mqtt.runtime.building import build
from hepti_mqtt.runtime.commands import Build
from hepti_mqtt.runtime.events import Built


class BuilderThread:
    """Builds the Programs of `device` one after the other; `post` is safe from any thread, `emit` is called on its own.

    The session orders one at a time, so that nothing piles up here.
    """

    def __init__(self, device: str, workers: Workers, emit: Callable[[Built], None]) -> None:
        self._device, self._workers, self._emit = device, workers, emit
        self._orders: SimpleQueue[Build | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hepti-builder", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._orders.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def post(self, order: Build) -> None:
        """Hand over an order."""
        self._orders.put(order)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            self._emit(build(order, self._device, self._workers))
