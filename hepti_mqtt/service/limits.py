"""How much a request may bring: every bound is checked before the work that it bounds.

docs/requests.md tells users, and what the worst allowed request costs.
"""

from __future__ import annotations

from typing import Final

from hepti_mqtt.errors import RequestError

MAX_REQUEST_BYTES: Final = 16_000_000
MAX_SEQUENCES: Final = 64
MAX_CHARACTERS: Final = 400_000  # read of all texts of a request; what truncation cuts off is hardly read


class Characters:
    """What is left of the characters that one request may have read."""

    def __init__(self) -> None:
        self._left = MAX_CHARACTERS

    def take(self, count: int) -> None:
        """Count characters that are about to be read; raises RequestError if the request has had too many."""
        self._left -= count
        if self._left < 0:
            raise RequestError(
                f"the texts are too long: {MAX_CHARACTERS} characters of one request are read at the most; shorten "
                "them, or send fewer at once"
            )
