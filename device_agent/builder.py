"""The builder's thread: Programs are built beside the session's, which goes on with what runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from hepti_mqtt.kernels import Workers
from hepti_mqtt.runtime.device.building import build, study
from hepti_mqtt.runtime.device.commands import Build, Study
from hepti_mqtt.runtime.device.events import Built, Studied
from hepti_mqtt.wire.topics import Topics


class BuilderThread:
    """Builds Programs, and studies plans, of `device`; `post` is safe from any thread, `emit` is called on its own.

    The session orders one Program at a time and each plan once, so that nothing piles up here.
    """

    def __init__(self, device: str, topics: Topics, workers: Workers, emit: Callable[[Built | Studied], None]) -> None:
        self._device, self._topics, self._workers, self._emit = device, topics, workers, emit
        self._orders: SimpleQueue[Build | Study | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hepti-builder", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._orders.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def post(self, order: Build | Study) -> None:
        """Hand over an order."""
        self._orders.put(order)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            if isinstance(order, Study):
                self._emit(study(order, self._device, self._topics))
            else:
                self._emit(build(order, self._device, self._workers))
