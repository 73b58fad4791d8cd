"""Whether what we send reaches the other end."""

from __future__ import annotations


class Flow:
    """Looks now and then whether bytes leave, from our queue to the kernel or from the kernel to the other end.

    The kernel may hold megabytes, and says nothing while it sends them: over a slow link that takes longer than an
    answer may.
    """

    def __init__(self, now: float) -> None:
        self.waiting = False  # whether something is on its way
        self.moved_at = now  # when bytes were last seen to leave, or nothing waited
        self._kept = 0
        self._wrote = False

    def wrote(self) -> None:
        """The kernel had room for some of what waits in our own queue."""
        self._wrote = True

    def look(self, now: float, queued: bool, kept: int) -> None:
        """Take what waits now; queued: in our own queue. kept: bytes in the kernel's."""
        self.waiting = queued or kept > 0
        if not self.waiting or self._wrote or kept < self._kept:
            self.moved_at = now
        self._kept, self._wrote = kept, False
