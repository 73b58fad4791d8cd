"""Shares of few units, tried one unit at a time: weights change those of all sizes at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, permutations
from typing import Final

from hepti_mqtt.plan import Range
from hepti_mqtt.planner.decision import Candidate
from hepti_mqtt.planner.fitting import improved
from hepti_mqtt.planner.price import Question
from hepti_mqtt.strategies import STRATEGIES

MOST: Final = 256  # units of a share; more are divided as finely as weights say
ROUNDS: Final = 2  # over all shares, those of the fewest units first: the others then make up for them
MOVES: Final = 56  # of one share: of more units, several move at once


def unit_by_unit(question: Question, c: Candidate) -> Candidate:
    """Move single units of a plan's ranges from device to device, as long as that makes it faster."""
    if not STRATEGIES[c.plan.strategy].few:
        return c
    best = c
    few = sorted((parts[-1][1], kind) for kind, parts in c.plan.ranges.items() if parts[-1][1] <= MOST)
    looked: dict[str, Candidate] = {}
    for _, kind in few * ROUNDS:
        if looked.get(kind) is best:
            continue  # nothing has moved since
        while (better := _better(question, best, kind)) is not None:
            best = better
        looked[kind] = best
    return best


def _better(question: Question, c: Candidate, kind: str) -> Candidate | None:
    """Return the first plan that is faster with one unit of a kind at another device."""
    busy = [c.price.use[device].compute_s for device in c.plan.devices]
    for ranges in _moved(c.plan.ranges[kind], busy):
        plan = replace(c.plan, ranges={**c.plan.ranges, kind: ranges})
        if (found := improved(question, c, plan, c.weights)) is not None:
            return found
    return None


def _moved(ranges: Sequence[Range], busy: Sequence[float]) -> Iterator[tuple[Range, ...]]:
    """Yield ranges with a unit, or a few, moved from one device to a less busy one.

    Devices that differ most come first; nobody who had some is left without. busy: seconds of each device, in all.
    """
    counts = [stop - start for start, stop in ranges]
    by = -(-sum(counts) // MOVES)
    pairs = sorted(permutations(range(len(counts)), 2), key=lambda pair: busy[pair[1]] - busy[pair[0]])
    for source, target in pairs:
        if counts[source] > by and busy[source] > busy[target]:
            moved = [n + by * ((i == target) - (i == source)) for i, n in enumerate(counts)]
            yield tuple(pairwise(accumulate(moved, initial=0)))
