"""The weight loader's thread, and what is posted to it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

from device_agent.loader import WeightLoader
from hepti_mqtt.errors import ModelError
from hepti_mqtt.runtime.device.commands import Load, Unload

QUEUED_BYTES: Final = 64 << 20  # tiles that wait for the loader's thread; more than the window only if others' tiles


@dataclass(frozen=True, slots=True)
class TileIn:
    """The body of a tile frame; `mine` as in `WeightLoader.tile`."""

    body: bytes | memoryview
    mine: bool


@dataclass(frozen=True, slots=True)
class AskAgain:
    """The connection or the planner is back."""


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


Input = Load | Unload | TileIn | AskAgain | _Stop


class LoaderThread:
    """Runs a `WeightLoader` in a thread of its own; `post` is safe from any thread."""

    def __init__(self, loader: WeightLoader, counters: Counter[str], log: logging.Logger) -> None:
        self._loader = loader
        self._counters = counters
        self._log = log
        self._inputs: SimpleQueue[Input] = SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._thread = threading.Thread(target=self._run, name="hepti-loader", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._inputs.put(_Stop())
        if self._thread.is_alive():
            self._thread.join()

    def post(self, item: Input) -> None:
        """Hand over work; tiles beyond `QUEUED_BYTES` are dropped and counted, and asked for again later."""
        if isinstance(item, TileIn):
            with self._lock:
                if self._queued_bytes + len(item.body) > QUEUED_BYTES:
                    self._counters["tiles_overflowed"] += 1
                    return
                self._queued_bytes += len(item.body)
        self._inputs.put(item)

    def _run(self) -> None:
        busy = False
        while True:
            deadline = self._loader.deadline()
            timeout = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                item = self._inputs.get(block=not busy, timeout=timeout)
            except Empty:
                item = None
            if isinstance(item, _Stop):
                return
            try:
                busy = self._turn(item)
            except Exception as exc:
                self._abandon(exc)
                busy = True  # the next load may be on disk, and then nothing else wakes this thread

    def _abandon(self, cause: Exception) -> None:
        """Give up the load that is under way, whatever comes of that: this thread must not end."""
        try:
            self._log.exception("the weight loader failed")
            error = ModelError(f"the weight loader failed: {cause!r}; see the agent's log")
            self._loader.abandon(error, time.monotonic())
        except Exception:
            self._log.exception("the load that failed could not be given up")

    def _turn(self, item: Load | Unload | TileIn | AskAgain | None) -> bool:
        now = time.monotonic()
        match item:
            case Load():
                self._loader.load(item, now)
            case Unload():
                self._loader.unload(item, now)
            case TileIn(body, mine):
                with self._lock:
                    self._queued_bytes -= len(body)
                self._loader.tile(body, mine, now)
            case AskAgain():
                self._loader.again(now)
            case None:
                self._loader.tick(now)
        return self._loader.step(now)
