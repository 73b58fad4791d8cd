"""How long to wait before a broker is tried again."""

from __future__ import annotations

import random
import time
from typing import Final

BACKOFF_S: Final = (0.1, 5.0)
SOON_S: Final = 30.0  # a broker that is away for no longer than a restart is met within ...
SOON_DELAY_S: Final = 0.5  # ... so long


class Backoff:
    """Pauses that double, with jitter, so that the devices of a site do not come back all at once."""

    def __init__(self) -> None:
        self._delay_s, self._lost_at = BACKOFF_S[0], float("-inf")

    def lost(self, stood_s: float) -> None:
        """A connection that stood for so long is lost."""
        if stood_s > BACKOFF_S[1]:
            # Not sooner: two clients of one name would throw each other out for ever.
            self._delay_s, self._lost_at = BACKOFF_S[0], time.monotonic()

    def pause_s(self) -> float:
        """Return how long to wait now."""
        pause_s = self._delay_s * random.uniform(0.5, 1.0)
        soon = time.monotonic() - self._lost_at < SOON_S
        self._delay_s = min(2 * self._delay_s, SOON_DELAY_S if soon else BACKOFF_S[1])
        return pause_s
