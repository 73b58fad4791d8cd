"""How much a request may bring: every bound is checked before the work that it bounds.

docs/requests.md tells users, and what the worst allowed request costs.
"""

from __future__ import annotations

import threading
import weakref
from typing import Final

from hepti_mqtt.errors import OverloadedError, RequestError

MAX_REQUEST_BYTES: Final = 16_000_000
MAX_ITEMS: Final = 500_000  # commas and opening brackets of a request's JSON, also those within texts
MAX_SEQUENCES: Final = 64
MAX_CHARACTERS: Final = 400_000  # read of all texts of a request; what truncation cuts off is hardly read
MAX_PIXELS: Final = 25_000_000  # of all pictures of a request; those of WebP count twice
MAX_SCANS: Final = 64  # of a JPEG file: each goes over all of its pixels, and may be a few bytes long
MAX_OUTPUT: Final = 8_000_000  # numbers that the devices answer a request with
MAX_WAITING_BYTES: Final = 128 << 20  # ids and pixels of all requests that are not answered


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


class Room:
    """Bytes that are held for as long as their holders live: nobody needs to give them back."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._lock = threading.RLock()  # a holder may be collected while its own thread is in here

    def take(self, nbytes: int, holder: object) -> None:
        """Hold bytes until `holder` is gone; raises OverloadedError if there are not so many left."""
        with self._lock:
            if nbytes > self._left:
                raise OverloadedError(
                    f"the requests that wait hold nearly {MAX_WAITING_BYTES >> 20} MB already, and this one brings "
                    f"{nbytes} bytes; try again later"
                )
            self._left -= nbytes
        weakref.finalize(holder, self._give, nbytes).atexit = False

    def _give(self, nbytes: int) -> None:
        with self._lock:
            self._left += nbytes
