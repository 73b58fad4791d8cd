"""Reads headers and metadata of a file from front to back, never beyond its end."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

_READ: Final = 1 << 16  # least number of bytes of a read, unless the file ends


class Cursor:
    """A place in a file of `end` bytes, read by pread(offset, count).

    Raises ValueError for a length beyond the end, before it reads or allocates so much.
    """

    def __init__(self, pread: Callable[[int, int], bytes], end: int) -> None:
        self._pread, self._end, self.at = pread, end, 0
        self._piece, self._start = b"", 0

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        self._require(count)
        if self.at < self._start or self.at + count > self._start + len(self._piece):
            self._start = self.at
            self._piece = self._pread(self.at, min(max(count, _READ), self._end - self.at))
        first = self.at - self._start
        self.at += count
        return self._piece[first : first + count]

    def numbers(self, form: str) -> tuple[Any, ...]:
        """Return numbers in a format of `struct`."""
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def skip(self, count: int) -> None:
        """Move forward without reading."""
        self._require(count)
        self.at += count

    def _require(self, count: int) -> None:
        if not 0 <= count <= self._end - self.at:
            raise ValueError("it ends too early")
