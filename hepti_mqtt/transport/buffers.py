"""Aligned memory for payloads, reused after the last reference is gone."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, Final

import numpy as np

from hepti_mqtt.protocol.frames import BUFFER_GRANULARITY, held_bytes

ALIGN: Final = 64
LOOKED_AT: Final = 8  # buffers of one size to examine before a new one is allocated

_Array = np.ndarray[Any, Any]


class Buffers:
    """Buffers by size; a buffer is free if its reference count says so.

    limit_bytes: of the pool; the pool forgets all its buffers rather than exceed it.
    """

    def __init__(self, limit_bytes: int = 64 << 20) -> None:
        self._kept: dict[int, deque[_Array]] = {}
        self._bytes, self._limit = 0, limit_bytes

    def take(self, nbytes: int) -> memoryview:
        """Return `nbytes` of uninitialised memory, aligned to 64 bytes."""
        size = held_bytes(nbytes)
        array = _free_one(self._kept.get(size))
        if array is None:
            array = _aligned(size)
            if self._bytes + size > self._limit:
                self._kept, self._bytes = {}, 0  # users keep their own references
            self._kept.setdefault(size, deque()).append(array)
            self._bytes += size
        return array.data[:nbytes]


def _aligned(size: int) -> _Array:
    raw = np.empty(size + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + size]


def _free_one(kept: deque[_Array] | None) -> _Array | None:
    """Return a free buffer, None without one; examined buffers move to the end."""
    kept = deque() if kept is None else kept
    for _ in range(min(len(kept), LOOKED_AT)):
        array = kept.popleft()
        kept.append(array)
        if sys.getrefcount(array) == _FREE:
            return array
    return None


def _count_of_free() -> int:
    """Return a free buffer's reference count in `_free_one`, which depends on the interpreter."""
    kept: deque[_Array] = deque((_aligned(BUFFER_GRANULARITY),))
    array = kept.popleft()
    kept.append(array)
    return sys.getrefcount(array)


_FREE: Final = _count_of_free()
