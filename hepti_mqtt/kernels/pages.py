"""Memory for weights: it begins at a cache line, and lies on huge pages where it is large.

A row of activations reads every weight once, and one address translation per 4 KB would cost some 10 %. Many weights
are smaller than a huge page (2 MB), so they lie side by side in one mapping; an array that dies gives its pages back at
once, the mapping goes with the last of its arrays.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from threading import Lock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_LINE: Final = 64  # bytes of a cache line
_HUGE: Final = 1 << 21
# Address space of one mapping, of which only what is used takes memory.
_MAPPING: Final = 32 * _HUGE
# Smaller arrays stay in the heap: rounded to whole pages they would take too much more than their size.
_LEAST: Final = 16 * mmap.PAGESIZE
# Of what a huge page is on Linux alone; elsewhere everything lies in the heap.
_ADVICE: Final[int | None] = getattr(mmap, "MADV_HUGEPAGE", None)


class _Mapping:
    """Anonymous memory that is handed out from its first huge page on, in whole pages."""

    def __init__(self, nbytes: int) -> None:
        self._size = max(_MAPPING, nbytes + _HUGE)
        self._memory = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._at = -np.frombuffer(self._memory, np.uint8).ctypes.data % _HUGE
        if _ADVICE is not None:
            with contextlib.suppress(OSError):  # a kernel that was built without huge pages
                self._memory.madvise(_ADVICE)

    def take(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return zeros that begin at a page, or None where no room is left."""
        start, pages = self._at, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if start + pages > self._size:
            return None
        self._at += pages
        array = np.frombuffer(self._memory, np.uint8, nbytes, start)
        weakref.finalize(array, self._memory.madvise, mmap.MADV_DONTNEED, start, pages).atexit = False
        return array


_lock = Lock()
_open: _Mapping | None = None


def aligned_zeros(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Return zeros that begin at a cache line, so that no vector lies across two; large ones on huge pages.

    Padding costs no memory until it is touched, but for what its huge page has.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    array = None if nbytes < _LEAST or _ADVICE is None else _mapped(nbytes)
    return (_heap(nbytes) if array is None else array).view(dtype).reshape(shape)


def _heap(nbytes: int) -> NDArray[np.uint8]:
    heap = np.zeros(nbytes + _LINE, np.uint8)
    skip = -heap.ctypes.data % _LINE
    return heap[skip : skip + nbytes]


def _mapped(nbytes: int) -> NDArray[np.uint8] | None:
    """Return zeros of a mapping, None where the system gives no more of them.

    A mapping is larger than what it is made for, so the heap may still have that much, or says that it has not.
    """
    global _open  # noqa: PLW0603
    with _lock:
        array = _open.take(nbytes) if _open is not None else None
        if array is None:
            try:
                _open = _Mapping(nbytes)
            except OSError:
                return None
            array = _open.take(nbytes)
    return array
