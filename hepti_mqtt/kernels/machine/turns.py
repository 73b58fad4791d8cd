"""Turns among the agents of one machine: whoever compiles makes a measurement of speed wrong, and so does who measures.

Files in a directory that they share, normally that of the compile cache. An agent has the first one, together with
others, from its start until it is online. Who compiles has the second one together with others, who measures has it
alone. Who saves compiled code has the third one alone. The system lets go of a lock when its process ends, however it
ends.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

STARTING: Final = "hepti-starting.lock"
SPEED: Final = "hepti-speed.lock"
SAVING: Final = "hepti-saving.lock"
LOOK_S: Final = 0.2


@contextmanager
def starting(directory: Path | None) -> Iterator[None]:
    """Say that this agent is starting: what is compiled for later waits."""
    with _opened(directory, STARTING) as file:
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def nobody_starts(directory: Path) -> bool:
    """Return whether no agent is starting."""
    with _opened(directory, STARTING) as file:
        return file is None or _taken(file, fcntl.LOCK_EX)


@contextmanager
def compiling(directory: Path) -> Iterator[None]:
    """Compile while nobody measures."""
    with _opened(directory, SPEED) as file:
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


@contextmanager
def measuring(directory: Path | None, wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Measure while nobody compiles or measures; `wait` is called before each further attempt."""
    with _opened(directory, SPEED) as file:
        while file is not None and not _taken(file, fcntl.LOCK_EX):
            wait()
            time.sleep(LOOK_S)
        yield


@contextmanager
def saving(directory: Path) -> Iterator[None]:
    """Save to this directory while nobody else does: files there name each other."""
    with _opened(directory, SAVING) as file:
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _taken(file: IO[bytes], how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _opened(directory: Path | None, name: str) -> Iterator[IO[bytes] | None]:
    """Give a file of the directory, None where there is none or it cannot be written: then nobody takes turns."""
    file = None
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = (directory / name).open("ab")
        except OSError:
            file = None
    try:
        yield file
    finally:
        if file is not None:
            file.close()
