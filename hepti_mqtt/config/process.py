"""Signals, logging and memory settings of a process."""

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

from hepti_mqtt.core.errors import ConfigError

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Exit on SIGTERM and SIGHUP as on Ctrl-C, unless the signal is handled or ignored already.

    Does nothing outside the main thread, which alone may handle signals.
    """
    is_main = threading.current_thread() is threading.main_thread()
    caught = [number for number in _ENDING if is_main and signal.getsignal(number) is signal.SIG_DFL]
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

    Not a KeyboardInterrupt: after one in `exec`, as in many imports, Python kills itself with SIGINT.
    """


class StopSignals:
    """A stop request by a signal or `request`: StopRequested during startup, then the callback of `on_stop`.

    A context manager that handles the signals of `stop_signals` if the main thread enters it. The request is also
    stored, because Python drops an exception in some callbacks, e.g. of weak references.
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
        """Call `act` for each later request, and now after an earlier request."""
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
    """Delay Ctrl-C and similar signals during a clean-up."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


# ----------------------------------------------------------------------------------------------------------------------
# Logging.


MAX_SUBJECTS: Final = 64  # per kind, because a peer can invent names
OWN_LOGGERS: Final = ("hepti", "hepti_mqtt", "device_agent")  # only these at DEBUG; Numba writes megabytes


class RateLimitedLog:
    """Counts problems by kind and logs few of them, so that a peer cannot flood the log; thread-safe."""

    def __init__(self, log: logging.Logger) -> None:
        self.log, self.counters = log, Counter[str]()
        self._lock = threading.Lock()  # guards the counters and `_warned`
        self._warned: dict[str, set[str]] = {}  # subjects by kind

    def record(self, kind: str, text: str, error: BaseException | None = None) -> None:
        """Count a problem and log the 1st, 2nd, 4th, 8th ... of its kind; error: logged with its traceback."""
        with self._lock:
            self.counters[kind] += 1
            count = self.counters[kind]
        if count & (count - 1) == 0:
            self.log.warning("%s (%s, %d so far)", text, kind, count, exc_info=error)

    def warn_once(self, kind: str, subject: str, text: str) -> None:
        """Count a problem and log it once per subject, for at most `MAX_SUBJECTS` subjects of a kind."""
        with self._lock:
            self.counters[kind] += 1
            warned = self._warned.setdefault(kind, set())
            if subject in warned or len(warned) >= MAX_SUBJECTS:
                return
            warned.add(subject)
        self.log.warning("%s", text)


def setup_logging(handler: logging.Handler, form: str, verbose: bool = False) -> None:
    """Send the log to a handler; verbose: log Hepti's own loggers at DEBUG."""
    logging.basicConfig(level=logging.INFO, format=form, handlers=[handler])
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.DEBUG if verbose else logging.NOTSET)


@contextmanager
def requires_extra(extra: str, what: str) -> Iterator[None]:
    """Turn an ImportError for a library of an extra into ConfigError; what: the feature that needs it."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{what} needs {error.name}, of the extra `{extra}`: in the checkout, pip install '.[{extra}]'"
        ) from None


# ----------------------------------------------------------------------------------------------------------------------
# Memory of a long-running process.


LARGE_BYTES: Final = 1 << 20  # smallest block with its own pages, which the system gets back after `free`
KEPT_BYTES: Final = 8 << 20  # free bytes at the end of a heap, because windows of tiles are allocated repeatedly
_M_TRIM_THRESHOLD: Final = -1  # of mallopt(3)
_M_MMAP_THRESHOLD: Final = -3


def return_large_blocks() -> None:
    """Make glibc return large freed blocks to the system.

    Otherwise glibc raises its threshold to the size of a freed block, up to 32 MB. Later large blocks then lie between
    small blocks, and freeing them leaves permanent holes.
    """
    with suppress(OSError, AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(_M_MMAP_THRESHOLD, LARGE_BYTES)
        set_option(_M_TRIM_THRESHOLD, KEPT_BYTES)
