"""Activations and leases that arrive before the request that they belong to: kept for a while, within bounds."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from hepti_mqtt.wire import messages
from hepti_mqtt.wire.frames import Frame
from hepti_mqtt.wire.payloads import held_bytes

EARLY_BYTES: Final = 64 << 20  # in all
EARLY_S: Final = 10.0
EARLY_LEASES: Final = 256  # in all


class EarlyFrames:
    """Frames by admission number, those of the longest waiting request first to go.

    Each counts for the buffer that it holds: many of a few bytes would fill a board's memory within any sum of theirs.
    """

    def __init__(self) -> None:
        self._frames: OrderedDict[int, list[tuple[float, Frame]]] = OrderedDict()
        self._bytes = 0

    def keep(self, frame: Frame, now: float) -> int:
        """Keep a frame; return how many others were dropped for it, or had waited too long."""
        self._frames.setdefault(frame.admission, []).append((now, frame))
        self._bytes += held_bytes(len(frame.body))
        dropped = 0
        while self._frames and (self._bytes > EARLY_BYTES or now - self._oldest_s() > EARLY_S):
            dropped += self.drop(next(iter(self._frames)))
        return dropped

    def take(self, admission: int, now: float) -> tuple[list[Frame], int]:
        """Return the frames of a request, as they came, and how many had waited too long; forget all."""
        kept = self._frames.get(admission, [])
        frames = [frame for since_s, frame in kept if now - since_s <= EARLY_S]
        self.drop(admission)
        return frames, len(kept) - len(frames)

    def drop(self, admission: int) -> int:
        """Forget the frames of a request; return how many there were."""
        frames = self._frames.pop(admission, [])
        self._bytes -= sum(held_bytes(len(frame.body)) for _, frame in frames)
        return len(frames)

    def clear(self) -> None:
        """Forget everything."""
        self._frames.clear()
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes that all frames that are kept hold, counted anew."""
        return sum(held_bytes(len(frame.body)) for frames in self._frames.values() for _, frame in frames)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert self._bytes == self.nbytes <= EARLY_BYTES

    def _oldest_s(self) -> float:
        return next(iter(self._frames.values()))[0][0]


class EarlyLeases:
    """Leases of requests that are not here yet, or wait for their Programs, as they came; the oldest are first to go.

    Without them a device would wait for ever for the word that no task is left, which comes once.
    """

    def __init__(self) -> None:
        self._leases: deque[messages.Lease] = deque(maxlen=EARLY_LEASES)

    def keep(self, lease: messages.Lease) -> int:
        """Keep a lease; return how many others were dropped for it."""
        full = len(self._leases) == EARLY_LEASES
        self._leases.append(lease)
        return int(full)

    def take(self, admission: int) -> list[messages.Lease]:
        """Return the leases of a request, and forget them."""
        found = [lease for lease in self._leases if lease.admission == admission]
        for lease in found:
            self._leases.remove(lease)
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._leases.clear()
