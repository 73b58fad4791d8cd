"""Orderly exit on signals: run every `finally`, or publish `offline` first."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, Self

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the process like Ctrl-C does; one that somebody handles or ignores is left alone.

    Signals are the main thread's: in another one it does nothing.
    """
    here = threading.current_thread() is threading.main_thread()
    caught = [number for number in _ENDING if here and signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in caught:
            signal.signal(number, _leave)
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


def stop_event() -> threading.Event:
    """Return an event that the signals of `stop_signals` set."""
    stop = threading.Event()
    for number in stop_signals():
        signal.signal(number, lambda *_: stop.set())
    return stop


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that request a shutdown: SIGTERM, SIGINT, and SIGHUP unless `nohup` ignores it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *(() if ignored else (signal.SIGHUP,)))


class StopRequested(BaseException):
    """A stop was requested during startup.

    No KeyboardInterrupt: one that passes through `exec`, as in many imports, makes Python end itself with SIGINT.
    """


class StopSignals:
    """A stop request, by a signal or by `request`: an interrupt at first, a call after `on_stop`, then nothing.

    A context manager that handles the signals of `stop_signals` if the main thread enters it. Python drops an interrupt
    that falls into a callback, such as that of a weak reference, so the request is kept too.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self._act: Callable[[], object] | None = None
        self._ending = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def request(self) -> None:
        """Request a stop; thread-safe."""
        self.requested.set()
        if self._act is not None:
            self._act()

    def on_stop(self, act: Callable[[], object]) -> None:
        """Call `act` for each request from now on, and at once if there was one."""
        self._act = act
        if self.requested.is_set():
            act()

    def raise_if_requested(self) -> None:
        """Raise StopRequested if a stop was requested."""
        if self.requested.is_set():
            raise StopRequested

    def ignore_further(self) -> None:
        """Ignore further signals: the process is shutting down."""
        self._ending = True

    def _handle(self, *_: object) -> None:
        self.request()
        if self._act is None and not self._ending:
            raise StopRequested


@contextmanager
def block_signals() -> Iterator[None]:
    """Let a second Ctrl-C, or another such signal, wait until everything is removed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


# ----------------------------------------------------------------------------------------------------------------------
# How a process logs: our own words in detail on request, and the same words not again and again.


REPEAT_S: Final = 10.0
MAX_REMEMBERED: Final = 256
OWN_LOGGERS: Final = ("hepti", "hepti_mqtt", "device_agent")  # Numba alone writes megabytes at DEBUG

_Key = tuple[str, int, str]


class RepeatFilter(logging.Filter):
    """Lets a line through once in `EVERY_S`; says how often it came meanwhile, once that time is over.

    handler: the one that it is added to. clock: seconds that only grow. May be used from any thread.
    """

    def __init__(self, handler: logging.Handler, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._handler, self._clock = handler, clock
        self._lock = threading.Lock()
        self._seen: dict[_Key, tuple[float, int]] = {}  # since when, and how often it was held back

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is to be written; writes what is due of others before it."""
        now = self._clock()
        key = (record.name, record.levelno, record.getMessage())
        with self._lock:
            due = [k for k, (since_s, _) in self._seen.items() if now - since_s >= REPEAT_S]
            told = [(k, count) for k in due if (count := self._seen.pop(k)[1])]
            since_s, count = self._seen.get(key, (now, -1))
            fresh = count < 0
            if fresh and len(self._seen) >= MAX_REMEMBERED:
                self._seen.pop(next(iter(self._seen)))
            self._seen[key] = (since_s, count + 1)
        for (name, level, text), times in told:
            again = f"{text} ({times} more like it in {REPEAT_S:.0f} s)"
            self._handler.emit(logging.LogRecord(name, level, "", 0, again, None, None))
        return fresh


def setup_logging(handler: logging.Handler, form: str, verbose: bool = False) -> None:
    """Send the log to a handler, sparingly; verbose: our own at DEBUG, others as always."""
    handler.addFilter(RepeatFilter(handler))
    logging.basicConfig(level=logging.INFO, format=form, handlers=[handler])
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.DEBUG if verbose else logging.NOTSET)
