"""What a quota of processor time really gives, and which times of runs that it stops count.

The kernel looks at a quota no more often than its clock ticks.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Final

from device_agent.limits import Allowed

EXACT_S: Final = 0.01  # a period of several ticks (of 1 to 4 ms): quotas of Docker and systemd have 0.1 s
PERIODS: Final = 50
WINDOWS: Final = 3  # the most of them counts: what others take of the machine is not the quota's doing
HELD_UP: Final = 4.0  # times as long as any other run
_BLOCK: Final = bytes(1 << 16)  # hashed without the interpreter's lock


@lru_cache(maxsize=8)
def given(allowed: Allowed, threads: int) -> float:
    """Return how many cores so many busy threads get of those that are allowed.

    With periods shorter than a tick it is less: at 250 ticks a second, 0.45 of a core for a quota of 1 ms in 1.85, and
    0.56 for 1 ms in 1.25. A device that believed its quota found itself a fifth faster than its requests did.
    """
    if allowed.cores >= threads or allowed.period_s is None or allowed.period_s >= EXACT_S:
        return allowed.cores
    return min(allowed.cores, busy(threads, PERIODS * allowed.period_s))


def busy(
    threads: int,
    window_s: float,
    clock: Callable[[], float] = time.perf_counter,
    cpu: Callable[[], float] = time.process_time,
) -> float:
    """Return the cores that so many threads were given in the best of a few windows, in which they did nothing else."""
    enough = threading.Event()
    crew = [threading.Thread(target=_spin, args=(enough.is_set,), daemon=True) for _ in range(threads - 1)]
    for member in crew:
        member.start()
    most = 0.0
    for _ in range(WINDOWS):
        begin, spent = clock(), cpu()
        _spin(partial(_past, clock, begin + window_s))
        most = max(most, (cpu() - spent) / (clock() - begin))
    enough.set()
    for member in crew:
        member.join()
    return most


def not_held_up(spent: Sequence[float]) -> list[float]:
    """Return times without the longest, while that is out of all proportion to the next one.

    Not all that are far above the usual: of an op that fits several times into what a hidden quota gives at once, every
    few take ten times as long, and they are what the quota costs.
    """
    left = sorted(spent)
    while len(left) > 1 and left[-1] > HELD_UP * left[-2]:
        left.pop()
    return left


def _past(clock: Callable[[], float], until_s: float) -> bool:
    return clock() >= until_s


def _spin(enough: Callable[[], bool]) -> None:
    while not enough():
        hashlib.sha256(_BLOCK)
