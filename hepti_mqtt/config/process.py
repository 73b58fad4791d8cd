"""Orderly exit on signals: run every `finally`, or publish `offline` first."""

from __future__ import annotations

import ctypes
import logging
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final, Self

from hepti_mqtt.errors import ConfigError

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
# How a process logs: our own words in detail on request.


MAX_SUBJECTS: Final = 64  # of each kind: names cost a peer nothing to invent
OWN_LOGGERS: Final = ("hepti", "hepti_mqtt", "device_agent")  # Numba alone writes megabytes at DEBUG


class RateLimitedLog:
    """Counts kinds of trouble and logs few of them, so that a peer cannot flood the log; usable from any thread.

    counters: by kind; shared if given.
    """

    def __init__(self, log: logging.Logger, counters: Counter[str] | None = None) -> None:
        self.log, self.counters = log, Counter[str]() if counters is None else counters
        self._lock = threading.Lock()  # guards the counters and what follows
        self._warned: dict[str, set[str]] = {}  # subjects by kind

    def record(self, kind: str, text: str, error: BaseException | None = None) -> None:
        """Count one of `kind` and log the 1st, 2nd, 4th, 8th ...; `error` is logged with its traceback."""
        with self._lock:
            self.counters[kind] += 1
            count = self.counters[kind]
        if count & (count - 1) == 0:
            self.log.warning("%s (%s, %d so far)", text, kind, count, exc_info=error)

    def warn_once(self, kind: str, subject: str, text: str) -> None:
        """Count one of `kind` and log it once for each subject, of at most `MAX_SUBJECTS` subjects of a kind."""
        with self._lock:
            self.counters[kind] += 1
            warned = self._warned.setdefault(kind, set())
            if subject in warned or len(warned) >= MAX_SUBJECTS:
                return
            warned.add(subject)
        self.log.warning("%s", text)


def setup_logging(handler: logging.Handler, form: str, verbose: bool = False) -> None:
    """Send the log to a handler; verbose: our own at DEBUG, others as always."""
    logging.basicConfig(level=logging.INFO, format=form, handlers=[handler])
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.DEBUG if verbose else logging.NOTSET)


@contextmanager
def requires_extra(extra: str, what: str) -> Iterator[None]:
    """Raise ConfigError where an import inside fails for a library of an extra; what: needs it."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{what} needs {error.name}, of the extra `{extra}`: in the checkout, pip install '.[{extra}]'"
        ) from None


# ----------------------------------------------------------------------------------------------------------------------
# Memory of a process that serves for long.


LARGE_BYTES: Final = 1 << 20  # blocks of so much have pages of their own, which go back as soon as a block is freed
KEPT_BYTES: Final = 8 << 20  # at the end of a heap that stay: a window of tiles is taken and given back all the time
_M_TRIM_THRESHOLD: Final = -1  # of mallopt(3)
_M_MMAP_THRESHOLD: Final = -3


def return_large_blocks() -> None:
    """Have large blocks go back to the system when they are freed, where the C library is glibc.

    By itself it raises the limit to the size of what was freed, up to 32 MB: after the first large message or given up
    weights, later ones lie among small blocks, and leave holes that stay.
    """
    with suppress(OSError, AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(_M_MMAP_THRESHOLD, LARGE_BYTES)
        set_option(_M_TRIM_THRESHOLD, KEPT_BYTES)
