"""The fastest number of threads for an op on this machine, measured in its runs.

A threshold in bytes or multiply-adds would be wrong on most machines: the cost of a hand-over, the speed of a storage's
products, the share of the memory's rate that one core reaches, and the load of other processes differ by factors of
ten, and change. An op runs often, with the same result on any number of threads, so runs are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

# Tries of other numbers cost this share of the time at most, and this many seconds at once. So a longer op is never
# tried on half its threads: the cost of its hand-over does not matter.
_SHARE: Final = 0.01
_MOST_SECONDS: Final = 3e-3
# Twice the threads must take 5 % less time: they take it from others, and from the battery.
_WORTH: Final = 0.07
# How many measured runs a try has, how many there are between two tries, and how many runs between two of these.
_TRIES: Final = 4
_BETWEEN: Final = 16
_SKIPS: Final = 3
# How many runs a mean is over, about, and how many times as long as the mean a run counts at most: it was held up.
_WINDOW: Final = 32
_OUTLIER: Final = 8
# How many runs in a row that had to wake unused threads say nothing: a later one finds them awake.
_WAKES: Final = 3


class Choice:
    """How many threads to use `next`, by its place in `threads`; the first is believed until others were tried.

    skips: how many runs need not be measured, which who runs them counts down.
    """

    __slots__ = (
        "_best",
        "_budget",
        "_left",
        "_means",
        "_seen",
        "_threads",
        "_tried",
        "_trying",
        "_wakes",
        "next",
        "skips",
    )

    def __init__(self, threads: Sequence[int]) -> None:
        self.next = self._best = self.skips = 0
        self._threads = tuple(threads)
        self._means = [float("inf")] * len(threads)
        self._seen = [0] * len(threads)
        self._budget = _MOST_SECONDS
        self._left, self._tried, self._wakes, self._trying = 1 + _TRIES, 0, 0, False

    @property
    def threads(self) -> int:
        """Return the number of threads of the next run."""
        return self._threads[self.next]

    def note(self, place: int, seconds: float, woke: bool = False) -> None:
        """Record the time of a run with threads[place], and choose the next; woke: unused threads had to be woken."""
        if woke and self._wakes < _WAKES:
            self._wakes += 1
            return
        self._wakes = 0
        self._count(place, seconds)
        self._left -= 1
        if self._left <= 0 or self._budget < 0:
            self._turn()
        elif not self._trying:
            self.next = self._best
        self.skips = 0 if self._trying or self._seen[self.next] <= _TRIES else _SKIPS

    def _count(self, place: int, seconds: float) -> None:
        means, runs = self._means, self._seen[place]
        self._seen[place] = min(runs + 1, _WINDOW)
        if not runs:
            return  # the first run has cold caches
        mean = means[place]
        seconds = min(seconds, _OUTLIER * mean)
        means[place] = seconds if runs == 1 else mean + (seconds - mean) / runs
        lost = seconds - means[self._best] if place != self._best else 0.0
        earned = _SHARE * (1 + _SKIPS) * seconds
        self._budget = min(self._budget + earned - max(lost, 0.0), _MOST_SECONDS)
        self._best = min(range(len(means)), key=lambda i: means[i] * self._threads[i] ** _WORTH)

    def _turn(self) -> None:
        """End a try, or begin one of the number not tried for longest, unless it would cost too much."""
        untried = 0 in self._seen
        may_try = untried or not self._trying
        self.next, self._left, self._trying = self._best, _BETWEEN, False
        if may_try:
            self._tried = self._seen.index(0) if untried else (self._tried + 1) % len(self._threads)
            if self._tried != self._best and self._cost(self._tried) <= self._budget:
                self.next, self._left, self._trying = self._tried, _TRIES + untried, True

    def _cost(self, place: int) -> float:
        """Return the seconds that a run is expected to lose."""
        best = self._means[self._best]
        if self._seen[place] > 1:
            return self._means[place] - best
        return best * max(self._threads[self._best] / self._threads[place] - 1, 1)
