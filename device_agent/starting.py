"""What a device does before it is online, and how the site and the log hear how far it is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from math import ceil
from time import perf_counter
from types import TracebackType
from typing import Final, Self

from device_agent.limits import cores, free_memory
from hepti_mqtt.errors import NetworkError
from hepti_mqtt.kernels import TILING, ahead, isa
from hepti_mqtt.wire.described import Status

SAY_S: Final = 2.0  # so often at the least; the planner waits for a device that goes on saying that it starts
LOG_S: Final = 5.0
COMPILER_BYTES: Final = 300 << 20  # what one process that compiles needs at most


class Starting:
    """Says what the device is doing until the `with` block ends.

    publish: carries a status to the site. clock: seconds that only grow.
    """

    def __init__(
        self,
        publish: Callable[[Status], None],
        boot: int,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publish, self._log, self._clock = publish, log, clock
        self._status = Status("starting", boot)
        self._logged_s = float("-inf")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="hepti-starting", daemon=True)

    def __enter__(self) -> Self:
        self._say()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def tell(self, doing: str, done: int = 0, total: int = 0) -> None:
        """Say what is done now, and how much of it is done already."""
        status = Status("starting", self._status.boot, doing, done, total)
        if status == self._status:
            return
        now, other = self._clock(), doing != self._status.doing
        if other or now - self._logged_s >= LOG_S:
            self._logged_s = now
            self._log.info("%s%s", doing, f": {done} of {total}" if total else "")
        self._status = status
        self._say()

    def _say(self) -> None:
        with suppress(NetworkError):  # the next one may get through
            self._publish(self._status)

    def _repeat(self) -> None:
        while not self._over.wait(SAY_S):
            self._say()


def prepare_kernels(threads: int, everything: bool, starting: Starting, log: logging.Logger) -> None:
    """Compile what f32 weights need, or `everything`, in other processes; load what is there."""
    start = perf_counter()
    whole = everything or ahead.ready(threads)
    most = max(1, min(ceil(cores()), free_memory() // COMPILER_BYTES))
    ahead.fill_cache(
        "all" if whole else "first",
        threads,
        lambda done, total: starting.tell("compiling kernels", done, total) if done < total else None,
        most,
    )
    warm = ahead.load(whole)
    took_s = perf_counter() - start
    log.info(
        "kernels for %s, tile %s, ready after %.1f s (%d compiled here, %d from the cache)",
        isa(),
        TILING.name,
        took_s,
        *warm,
    )
