"""How a process ends that has made what must not stay behind: through every `finally`, or when it has said goodbye."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

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
    """Return an event that `stop_signals` set."""
    stop = threading.Event()
    for number in stop_signals():
        signal.signal(number, lambda *_: stop.set())
    return stop


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that tell a process to say goodbye: SIGTERM, SIGINT, and SIGHUP unless `nohup` ignores it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *(() if ignored else (signal.SIGHUP,)))


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
MAX_SUBJECTS: Final = 64  # of each kind: names cost a peer nothing to invent
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
    """Send the log to a handler, sparingly; verbose: our own at DEBUG, others as always."""
    handler.addFilter(RepeatFilter(handler))
    logging.basicConfig(level=logging.INFO, format=form, handlers=[handler])
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.DEBUG if verbose else logging.NOTSET)
