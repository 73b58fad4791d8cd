"""Timing of contenders that alternate within one round, and what their ratios are worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple

import numpy as np

Contender = Callable[[], object]

# A sample repeats a short call until it takes this long: the clock and the call's overhead must not show.
SAMPLE_S: Final = 2e-3
_RESAMPLES: Final = 1000


class Ratio(NamedTuple):
    """How many times as fast as a rival: ratio of the medians, with a 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def interleaved(
    contenders: Mapping[str, Contender], rounds: int, pause_s: float = 0.0, sample_s: float = SAMPLE_S
) -> dict[str, list[float]]:
    """Return the seconds per call of every contender in every round; each is warmed up before.

    The order turns by one place per round, so that nobody always runs behind the same neighbour. Before its sample a
    contender runs once unmeasured: what the neighbour left in the caches is not its own. pause_s: before that, so that
    the neighbour's idle threads spin no longer. sample_s: how long a sample takes at least; a tenth of it, and one call
    at least, runs before.
    """
    names = list(contenders)
    times = {name: _calls(contenders[name], sample_s) for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            time.sleep(pause_s)
            _clock(contenders[name], 1 + times[name] // 10)
            samples[name].append(_clock(contenders[name], times[name]))
    return samples


def ratio(ours: Sequence[float], theirs: Sequence[float], seed: int) -> Ratio:
    """Return how many times as fast `ours` is; rounds are resampled as pairs, since both sides drift together."""
    mine, other = np.asarray(ours), np.asarray(theirs)
    drawn = np.random.default_rng(seed).integers(0, len(mine), (_RESAMPLES, len(mine)))
    resampled = np.median(other[drawn], axis=1) / np.median(mine[drawn], axis=1)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Ratio(median(theirs) / median(ours), float(low), float(high))


def _calls(contender: Contender, sample_s: float) -> int:
    contender()
    contender()
    return max(1, round(sample_s / max(_clock(contender, 1), 1e-7)))


def _clock(contender: Contender, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        contender()
    return (time.perf_counter() - start) / times
