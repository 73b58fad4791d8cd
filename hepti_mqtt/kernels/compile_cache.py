"""What Numba's compile cache lacks: it survives damaged files and full disks, and processes share it under locks.

Compiling and measuring speed disturb each other, so one process at a time holds the `compile_lock` of a cache. The
system
releases a lock when its process ends.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO, Any, Final

_log: Final = logging.getLogger("hepti.kernels")


def make_robust(cache: Any, stamp: str) -> None:
    """Give a kernel's cache the stamp of its sources, and make it return this kernel's complete code or None."""
    # Private in Numba: without it Numba's own stamp stays, and a test fails.
    if (file := getattr(cache, "_cache_file", None)) is not None:
        _make_files_robust(file, stamp)
    load, save = cache.load_overload, cache.save_overload

    def load_what_is_whole(signature: Any, context: Any) -> Any:
        try:
            code = load(signature, context)
        except Exception as error:  # a damaged file, as a power cut leaves it
            _log.debug("%s is damaged and compiled again: %r", cache.cache_path, error)
            return None
        return code if code is not None and tuple(code.signature.args) == tuple(signature) else None

    def save_where_there_is_room(*compiled: Any) -> None:
        try:
            with saving(Path(cache.cache_path)):
                save(*compiled)
        except OSError as error:  # a full disk
            _log.debug("%s cannot be written, so the next process compiles again: %s", cache.cache_path, error)

    cache.load_overload, cache.save_overload = load_what_is_whole, save_where_there_is_room


def is_cached(cache: Any, arguments: tuple[Any, ...], codegen: Any) -> bool:
    """Return whether a kernel's cache has its complete code; False if this version of Numba cannot tell."""
    try:
        return cache._cache_file.load(cache._index_key(arguments, codegen)) is not None
    except Exception as error:  # pickle raises nearly anything for a damaged file
        _log.debug("the compile cache cannot say whether it has a kernel: %r", error)
        return False


def _make_files_robust(file: Any, stamp: str) -> None:
    load_index = file._load_index

    def load_what_is_whole() -> Any:
        try:
            return load_index()
        except Exception as error:
            _log.debug("a damaged index of the compile cache is written again: %r", error)
            return {}

    def save_code_first(key: Any, code: Any) -> None:
        """Save as Numba does, but add code to the index after it is written, so an interruption does no harm.

        Two kernels share a file if two processes saved at the same time; then this kernel gets a file of its own.
        """
        index = file._load_index()
        names, name = list(index.values()), index.get(key)
        if names.count(name) != 1:
            name = next(free for free in map(file._data_name, count(1)) if free not in names)
        file._save_data(name, code)
        if index.get(key) != name:
            file._save_index({**index, key: name})

    file._source_stamp, file._load_index, file.save = stamp, load_what_is_whole, save_code_first


COMPILING: Final = "hepti-compile.lock"
SAVING: Final = "hepti-saving.lock"
LOOK_S: Final = 0.2


@contextmanager
def compile_lock(directory: Path | None, wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold the lock of a compile cache; `wait` is called before each further attempt, and may raise.

    Without a directory, or where it cannot be written, nothing is locked.
    """
    with _opened(directory, COMPILING) as file:
        while file is not None and not _acquired(file):
            wait()
            time.sleep(LOOK_S)
        yield


@contextmanager
def saving(directory: Path) -> Iterator[None]:
    """Save to a compile cache while no other process does: its files refer to each other."""
    with _opened(directory, SAVING) as file:
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _acquired(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _opened(directory: Path | None, name: str) -> Iterator[IO[bytes] | None]:
    file = None
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = (directory / name).open("ab")
        except OSError as error:
            _log.debug("%s cannot be locked: %s", directory, error)
    try:
        yield file
    finally:
        if file is not None:
            file.close()
