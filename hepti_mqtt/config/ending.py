"""How a process ends that has made what must not stay behind: through every `finally`, or when it has said goodbye."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_by_signals() -> Iterator[None]:
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
    """Return an event that `farewells` set."""
    stop = threading.Event()
    for number in farewells():
        signal.signal(number, lambda *_: stop.set())
    return stop


def farewells() -> tuple[signal.Signals, ...]:
    """Return the signals that tell a process to say goodbye: SIGTERM, SIGINT, and SIGHUP unless `nohup` ignores it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *(() if ignored else (signal.SIGHUP,)))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let a second Ctrl-C, or another such signal, wait until everything is removed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
