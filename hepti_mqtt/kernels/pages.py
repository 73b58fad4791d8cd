"""Memory for weights: aligned to cache lines, and on huge pages if it is large.

A row of activations reads every weight once, and one address translation per 4 KB would cost some 10 %. Many weights
are smaller than a huge page (2 MB), so they share a mapping; a freed array returns its pages immediately, the mapping
ends with its last array.
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
# Address space of one mapping; only used pages take memory.
_MAPPING: Final = 32 * _HUGE
# Smaller arrays stay in the heap: rounded to whole pages they would waste too much memory.
_LEAST: Final = 16 * mmap.PAGESIZE
# None without huge pages (not Linux): all arrays are then in the heap.
_ADVICE: Final[int | None] = getattr(mmap, "MADV_HUGEPAGE", None)


class _Mapping:
    """Anonymous memory for arrays, from its first huge page on, in whole pages."""

    def __init__(self, nbytes: int) -> None:
        self._size = max(_MAPPING, nbytes + _HUGE)
        self._memory = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._at = -np.frombuffer(self._memory, np.uint8).ctypes.data % _HUGE
        if _ADVICE is not None:
            with contextlib.suppress(OSError):  # a kernel that was built without huge pages
                self._memory.madvise(_ADVICE)

    def take(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return zeros that begin at a page, or None without room."""
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

    Padding takes no memory until it is touched, except within a used huge page.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    array = None if nbytes < _LEAST or _ADVICE is None else _mapped(nbytes)
    return (_heap(nbytes) if array is None else array).view(dtype).reshape(shape)


def _heap(nbytes: int) -> NDArray[np.uint8]:
    heap = np.zeros(nbytes + _LINE, np.uint8)
    skip = -heap.ctypes.data % _LINE
    return heap[skip : skip + nbytes]


def _mapped(nbytes: int) -> NDArray[np.uint8] | None:
    """Return zeros of a mapping, None if the system gives no more mappings.

    A mapping is larger than its first array, so the heap may still have room for the array.
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
