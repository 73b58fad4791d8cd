"""Wait for a broker that does not answer yet: a site's machines start in any order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import inf
from typing import Final, TypeVar

from hepti_mqtt.errors import NetworkError
from hepti_mqtt.transport.base import Backoff

SAY_S: Final = 10.0  # between two lines about the wait

T = TypeVar("T")


def wait_for_broker(
    connect: Callable[[float], T],
    say: Callable[[str], None],
    *,
    within_s: float = inf,
    stop: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> T | None:
    """Return what `connect` returns once a broker answers, None after `stop`.

    connect: takes the seconds that are left. say: takes a line every SAY_S.
    Raises the last NetworkError after `within_s` seconds, and any other error at once.
    """
    stop, backoff = stop or threading.Event(), Backoff()
    until, said_s = clock() + within_s, -inf
    while not stop.is_set():
        try:
            return connect(until - clock())
        except NetworkError as error:
            now = clock()
            if now >= until:
                raise
            if now - said_s >= SAY_S:
                said_s = now
                say(f"waiting for the broker: {error}")
        stop.wait(min(backoff.pause_s(), max(until - clock(), 0.0)))
    return None
