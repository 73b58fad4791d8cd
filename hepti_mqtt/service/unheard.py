"""Answers that go out again: nobody was subscribed to them, or there was no room for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hepti_mqtt.service.desk import Reply

UNHEARD: Final = 64  # that wait at once: each holds one of the requests that the broker hands over at most (512)
UNHEARD_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An answer on its way; taken: what to do when the broker has it, None for a part of one.

    until_s: nobody need have heard it after; None until the broker has said for the first time that nobody did.
    """

    reply: Reply
    taken: Callable[[], None] | None
    until_s: float | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of its payload."""
        return len(self.reply.payload)


class Unheard:
    """Answers by the time when they go out again; all methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all that follows
        self._waiting: deque[tuple[float, Outgoing]] = deque()  # who is due first comes first
        self._nbytes = 0

    def room(self, answer: Outgoing) -> bool:
        """Return whether one more may wait because nobody heard it; of a large one this is alone."""
        with self._lock:
            few = len(self._waiting) < UNHEARD
            return few and (not self._waiting or self._nbytes + answer.nbytes <= UNHEARD_BYTES)

    def put(self, due_s: float, answer: Outgoing) -> None:
        """Keep an answer until it is due."""
        with self._lock:
            self._waiting.append((due_s, answer))
            self._nbytes += answer.nbytes

    def due(self, now: float) -> Outgoing | None:
        """Take out the first answer that is due, None if none is."""
        with self._lock:
            if not self._waiting or self._waiting[0][0] > now:
                return None
            _, answer = self._waiting.popleft()
            self._nbytes -= answer.nbytes
            return answer
