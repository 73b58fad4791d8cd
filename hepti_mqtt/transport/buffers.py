"""Aligned memory for payloads, used again when nobody refers to it any more."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, Final

import numpy as np

from hepti_mqtt.protocol.frames import BUFFER_GRANULARITY, held_bytes

ALIGN: Final = 64
LOOKED_AT: Final = 8  # how many of one size are asked whether they are free before a new one is made

_Array = np.ndarray[Any, Any]


class Buffers:
    """Buffers by size; the reference count says when one is free, so that none is released too early.

    limit_bytes: what is kept to be used again; more may be in use.
    """

    def __init__(self, limit_bytes: int = 64 << 20) -> None:
        self._kept: dict[int, deque[_Array]] = {}
        self._bytes, self._limit = 0, limit_bytes

    def take(self, nbytes: int) -> memoryview:
        """Return `nbytes` of memory at an address that is a multiple of 64, its content undefined."""
        size = held_bytes(nbytes)
        array = _free_one(self._kept.get(size))
        if array is None:
            array = _aligned(size)
            if self._bytes + size > self._limit:
                self._kept, self._bytes = {}, 0  # what is still in use lives on without us
            self._kept.setdefault(size, deque()).append(array)
            self._bytes += size
        return array.data[:nbytes]


def _aligned(size: int) -> _Array:
    raw = np.empty(size + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + size]


def _free_one(kept: deque[_Array] | None) -> _Array | None:
    """Return one that nobody uses; the one looked at comes last the next time."""
    for _ in range(min(len(kept), LOOKED_AT) if kept else 0):
        assert kept is not None
        array = kept.popleft()
        kept.append(array)
        if sys.getrefcount(array) == _FREE:
            return array
    return None


def _count_of_free() -> int:
    """Return the count that `_free_one` sees where there is no view: interpreters differ in what they count."""
    kept: deque[_Array] = deque((_aligned(BUFFER_GRANULARITY),))
    array = kept.popleft()
    kept.append(array)
    return sys.getrefcount(array)


_FREE: Final = _count_of_free()
