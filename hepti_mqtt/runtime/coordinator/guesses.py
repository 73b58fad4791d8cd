"""Tokens that may follow a text, guessed from the text itself and checked by the run that computes the next one.

Source: prompt lookup, a form of speculative decoding (Leviathan et al., 2023) without a second model.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from typing import Final

SIZES: Final = (2, 4, 8)  # rows of a run with guesses: few Programs, and kernels of few rows
_LONGEST, _SHORTEST = 3, 2  # tokens that must have been there before in the same order
_KEPT: Final = 5  # durations of each size
_NEW: Final = 2  # runs of a size before it is judged by them: the first one may have waited for its Program
_PRIOR: Final = (1.0, 1.0)  # guesses that were right and wrong before any was checked


class StepPace:
    """How long runs of a session take by their rows under one plan.

    expected_s: the same by prediction, for sizes of which too few runs were seen.
    """

    def __init__(self, expected_s: Callable[[int], float]) -> None:
        self._expected_s = cache(expected_s)
        self._seconds: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._counts: dict[int, int] = defaultdict(int)

    def record(self, rows: int, seconds: float) -> None:
        """Take a run that was alone on its devices."""
        if rows == 1 or rows in SIZES:
            self._counts[rows] += 1
            self._seconds[rows].append(seconds)

    def cost(self, rows: int) -> float:
        """Return the time of a run as a multiple of that of one row, at least 1."""
        known = [r for r in (1, *SIZES) if r <= rows and self._counts[r] > _NEW]
        if 1 not in known:
            return max(self._expected_s(rows) / self._expected_s(1), 1.0)
        nearest = known[-1]
        more_s = self._expected_s(rows) - self._expected_s(nearest)
        return max((median(self._seconds[nearest]) + more_s) / max(median(self._seconds[1]), 1e-9), 1.0)


class Guesses:
    """What followed the last tokens of a text where they stood in it before.

    How often that is right shows in runs without guesses, too.
    """

    def __init__(self) -> None:
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # of some tokens, where they stood last, but for the text's end
        self._foreseen = list[int]()  # what may follow, whether it was guessed or not
        self._right, self._wrong = _PRIOR

    def propose(
        self, prompt: Sequence[int], tokens: Sequence[int], most: int, pace: StepPace | None
    ) -> tuple[int, ...]:
        """Return as many tokens as are worth a larger run, none where that is not expected to save time.

        tokens: behind the prompt, so far. most: that may be of use. pace: None for a run that can have none.
        """
        self._read(prompt, tokens)
        self._foreseen.clear()
        sizes = range(min(_LONGEST, len(self._text)), _SHORTEST - 1, -1)
        last = (tuple(self._text[-size:]) for size in sizes)
        at = next((self._ends[key] for key in last if key in self._ends), None)
        if at is None:
            return ()
        for place in range(at, at + SIZES[-1]):  # what repeats goes on repeating
            known = place < len(self._text)
            self._foreseen.append(self._text[place] if known else self._foreseen[place - len(self._text)])
        right = self._right / (self._right + self._wrong)
        costs = [] if pace is None else [(r, pace.cost(r)) for r in SIZES if r - 1 <= most]
        rates = {1: 1.0} | {rows: (1 - right**rows) / (1 - right) / cost for rows, cost in costs}
        return tuple(self._foreseen[: max(rates, key=rates.__getitem__) - 1])

    def record(self, taken: Sequence[int]) -> None:
        """Take the tokens that followed; those behind one that was not foreseen say nothing."""
        for token, foreseen in zip(taken, self._foreseen, strict=False):
            self._right += token == foreseen
            self._wrong += token != foreseen
            if token != foreseen:
                break
        self._foreseen.clear()

    def _read(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        known = len(self._text)
        behind = known - len(prompt)
        if not 0 <= behind <= len(tokens) or (behind and self._text[-1] != tokens[behind - 1]):
            self._text, self._ends, known = [*prompt, *tokens], {}, 0
        else:
            self._text += tokens[behind:]
        for end in range(max(known, 1), len(self._text)):
            for n in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._ends[tuple(self._text[end - n : end])] = end
