"""Compiling kernels at the start, with progress in the log and the retained status, and tuning in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import ceil, inf
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Final, Self

from device_agent.budget import Budget
from device_agent.heartbeat import Meter
from device_agent.machine import free_memory, usable_cores
from device_agent.measure import has_narrow_curves, load_or_measure
from hepti_mqtt import __version__
from hepti_mqtt.core.errors import NetworkError
from hepti_mqtt.core.ids import Start
from hepti_mqtt.kernels import Workers, isa, precompile
from hepti_mqtt.kernels.compile_cache import compile_lock
from hepti_mqtt.kernels.jit import cache_directory, release_compiler, return_memory
from hepti_mqtt.protocol.messages import Status

REPEAT_S: Final = 2.0  # the planner waits for a device while it keeps reporting
LOG_S: Final = 5.0
COMPILER_BYTES: Final = 300 << 20  # what one process that compiles needs at most


class StartupStatus:
    """Publishes the startup's progress until the `with` block ends.

    publish: carries a status to the site. clock: seconds that only grow.
    """

    def __init__(
        self,
        publish: Callable[[Status], None],
        start: Start,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publish, self._log, self._clock = publish, log, clock
        self._status = Status("starting", start.boot, version=__version__, term=start.term)
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

    def update(self, doing: str, done: int = 0, total: int = 0) -> None:
        """Publish the current activity and its progress."""
        status = replace(self._status, doing=doing, done=done, total=total)
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
        while not self._over.wait(REPEAT_S):
            self._say()


def prepare_kernels(status: StartupStatus, log: logging.Logger) -> None:
    """Compile the kernels of f32 weights in other processes, and load them."""
    start = perf_counter()
    most = max(1, min(ceil(usable_cores()), free_memory() // COMPILER_BYTES))
    precompile.fill_cache(
        "first", lambda done, total: status.update("compiling kernels", done, total) if done < total else None, most
    )
    warm = precompile.load_first()
    took_s = perf_counter() - start
    log.info("kernels for %s ready after %.1f s (%d compiled here, %d from the cache)", isa(), took_s, *warm)


# ----------------------------------------------------------------------------------------------------------------------
# Background tuning of an online agent: compiles the remaining kernels, and measures again if requests contradict it.


POLL_S: Final = 1.0
AFTER_PLAN_S: Final = 30.0  # links are measured and the first load has begun before
CLOSE_S: Final = 1.0
MISMATCH_RATIO: Final = 1.5  # of observed to measured time, in either direction
MISMATCH_S: Final = 30.0  # of requests
REMEASURE_S: Final = 600.0  # before the next measurement; doubles each time, as a mismatch may be permanent


class RemeasurePolicy:
    """Decides when to repeat the self-measurement: after requests have contradicted it for MISMATCH_S."""

    def __init__(self) -> None:
        self._wrong_s = 0.0
        self._last_s: float | None = None
        self._not_before_s, self._pause_s = -inf, REMEASURE_S

    def should_remeasure(self, slowdown: float, now: float) -> bool:
        """Record the current slowdown (1.0 without requests); return whether to measure again."""
        passed_s, self._last_s = 0.0 if self._last_s is None else now - self._last_s, now
        if max(slowdown, 1 / max(slowdown, 1e-9)) > MISMATCH_RATIO:
            self._wrong_s += passed_s
        elif slowdown != 1.0:
            self._wrong_s = 0.0
        return self._wrong_s >= MISMATCH_S and now >= self._not_before_s

    def postpone(self) -> None:
        """Wait for as much doubt again: a run has ended the measurement."""
        self._wrong_s = 0.0

    def record_measurement(self, now: float) -> None:
        """Record that the device was measured again."""
        self._wrong_s = 0.0
        self._not_before_s, self._pause_s = now + self._pause_s, 2 * self._pause_s


class BackgroundTuning:
    """A thread from `start` to `close`.

    measurement: its file. threads, memory_bytes: as at the first measurement. publish_caps: publishes the curves of
    `meter`. budget: of background work; a measurement needs the whole device.
    """

    def __init__(
        self,
        measurement: Path,
        threads: int,
        memory_bytes: int,
        meter: Meter,
        budget: Budget,
        publish_caps: Callable[[], None],
        log: logging.Logger,
    ) -> None:
        self._file, self._threads, self._memory_bytes = measurement, threads, memory_bytes
        self._meter, self._budget, self._announce = meter, budget, publish_caps
        self._log = log
        self._count = 0  #: of measured products, narrow ones among them
        self._is_measured = False  #: all products are
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hepti-tuning", daemon=True)

    def start(self) -> None:
        """Start the thread, the first time."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Stop soon."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        self._closing.wait(AFTER_PLAN_S)
        try:
            self._rest(0.0)
            warm = precompile.load_rest(lambda *_: self._give_up(), self._rest)
            release_compiler()
            self._log.info("all kernels ready (%d compiled here, %d from the cache)", *warm)
            self._watch()
        except InterruptedError:
            pass
        except Exception:
            self._log.exception("background tuning failed; the agent keeps serving")

    def _watch(self) -> None:
        doubts, self._is_measured = RemeasurePolicy(), has_narrow_curves(self._meter.curves)
        while not self._closing.wait(POLL_S):
            doubted = doubts.should_remeasure(self._meter.last_slowdown, time.monotonic())
            if (doubted or not self._is_measured) and self._idle():
                is_over = self._measure(force=doubted)
                if doubted and is_over:
                    doubts.record_measurement(time.monotonic())
                elif doubted:
                    doubts.postpone()

    def _rest(self, seconds: float) -> None:
        """Charge a kernel's seconds to the budget, and wait until the next one may be compiled."""
        self._budget.spend(seconds * self._budget.cores, time.perf_counter())  # by the wall, other processes included
        while (pause_s := self._pause_s()) and not self._closing.wait(pause_s):
            continue
        self._give_up()

    def _pause_s(self) -> float:
        return POLL_S if self._budget.loading else self._budget.pause_s(time.perf_counter())

    def _idle(self) -> bool:
        return not self._budget.loading and self._budget.is_unused(time.perf_counter())

    def _measure(self, force: bool) -> bool:
        """Measure within the free memory; return False if a run in the meantime has ended the measurement.

        Narrow weights are measured one storage at a time, because an agent that starts here waits for the lock.
        """
        workers = Workers(self._threads)
        memory_bytes = min(self._memory_bytes, free_memory())

        def check() -> None:
            self._give_up()
            if self._budget.last_run_s(time.perf_counter()) >= begun_s:
                raise InterruptedError("a run needs the device")

        try:
            with compile_lock(cache_directory(), self._give_up):
                begun_s = time.perf_counter()
                curves, _ = load_or_measure(
                    self._file, workers, memory_bytes, force=force, check=check, most_storages=1
                )
                check()
        except InterruptedError:
            return False
        finally:
            workers.close()
            return_memory()
        before, self._count = self._count, len(curves["linear"])
        if not force and not has_narrow_curves(curves) and self._count > before:  # else the disk keeps nothing
            return True
        self._is_measured = True
        self._meter.set_curves(curves)
        self._log.info("measured again" if force else "measured with narrow weights too")
        try:
            self._announce()
        except NetworkError as error:
            self._log.warning("cannot publish the new measurement: %s", error)
        return True

    def _give_up(self) -> None:
        if self._closing.is_set():
            raise InterruptedError("the agent ends")
