"""Which core a thread runs on, and leaving one that another thread has; on Linux, elsewhere nothing happens.

Linux wakes a thread on the core of whoever wakes it, unless it knows of an idle one that shares a cache: on a virtual
machine it knows of none. Two threads of a pool on one core then take turns, and its load balancer, which looks every
few milliseconds, sees one that runs and one that sleeps.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

NOWHERE: Final = -1


def _found() -> Callable[[], int]:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a C library without it
            return ctypes.CDLL(None).sched_getcpu
    return lambda: NOWHERE


# Returns the number of the core that the calling thread runs on, NOWHERE where nobody tells.
core: Final = _found()


def leave(taken: Collection[int]) -> None:
    """Move the calling thread to another core if it is on one of `taken` and may run on a core that is none of them.

    It may go anywhere afterwards, as before: this is no pinning.
    """
    if sys.platform == "linux" and core() in taken:
        allowed = os.sched_getaffinity(0)
        if free := allowed.difference(taken):
            with suppress(OSError):  # the allowed cores have changed meanwhile
                os.sched_setaffinity(0, free)
                os.sched_setaffinity(0, allowed)
