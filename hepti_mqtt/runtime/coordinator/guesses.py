"""Speculative decoding without a second model: guess tokens from repetitions in the text, and verify them in one run.

Source: prompt lookup decoding; speculative decoding (Leviathan et al., 2023).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from typing import Final

SIZES: Final = (2, 4, 8)  # rows of a run with guesses: few Programs, and kernels of few rows
_LONGEST, _SHORTEST = 3, 2  # length of the token sequences that are looked up
_KEPT: Final = 5  # durations of each size
_NEW: Final = 2  # runs of a size that do not count: the first one may have waited for its Program
_PRIOR: Final = (1.0, 1.0)  # prior counts of right and wrong guesses


class StepPace:
    """Duration of decoding runs by their rows under one plan; expected_s: the prediction, used before enough runs."""

    def __init__(self, expected_s: Callable[[int], float]) -> None:
        self._expected_s = cache(expected_s)
        self._seconds: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._counts: dict[int, int] = defaultdict(int)

    def record(self, rows: int, seconds: float) -> None:
        """Record a run that ran alone on its devices."""
        if rows == 1 or rows in SIZES:
            self._counts[rows] += 1
            self._seconds[rows].append(seconds)

    def cost(self, rows: int) -> float:
        """Return the duration of a run as a multiple of a one-row run's, at least 1."""
        measured = [r for r in (1, *SIZES) if r <= rows and self._counts[r] > _NEW]
        if 1 not in measured:
            return max(self._expected_s(rows) / self._expected_s(1), 1.0)
        nearest = measured[-1]
        more_s = self._expected_s(rows) - self._expected_s(nearest)
        return max((median(self._seconds[nearest]) + more_s) / max(median(self._seconds[1]), 1e-9), 1.0)


class Guesses:
    """Proposes the tokens that followed the last tokens at their previous occurrence in the text.

    The hit rate counts runs without guesses, too.
    """

    def __init__(self) -> None:
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # end of the last occurrence of each sequence before the text's end
        self._foreseen = list[int]()  # the tokens of the last lookup, computed or not
        self._right, self._wrong = _PRIOR

    def propose(
        self, prompt: Sequence[int], tokens: Sequence[int], most: int, pace: StepPace | None
    ) -> tuple[int, ...]:
        """Return the guesses whose larger run is expected to save time, none if no size is.

        tokens: generated so far. most: limit of useful guesses. pace: None if the run cannot have guesses.
        """
        self._read(prompt, tokens)
        self._foreseen.clear()
        sizes = range(min(_LONGEST, len(self._text)), _SHORTEST - 1, -1)
        last = (tuple(self._text[-size:]) for size in sizes)
        at = next((self._ends[key] for key in last if key in self._ends), None)
        if at is None:
            return ()
        for place in range(at, at + SIZES[-1]):  # beyond the text's end the repetition continues
            is_in_text = place < len(self._text)
            self._foreseen.append(self._text[place] if is_in_text else self._foreseen[place - len(self._text)])
        right = self._right / (self._right + self._wrong)
        costs = [] if pace is None else [(r, pace.cost(r)) for r in SIZES if r - 1 <= most]
        rates = {1: 1.0} | {rows: (1 - right**rows) / (1 - right) / cost for rows, cost in costs}
        return tuple(self._foreseen[: max(rates, key=rates.__getitem__) - 1])

    def record(self, taken: Sequence[int]) -> None:
        """Count right and wrong guesses up to the first wrong one."""
        for token, foreseen in zip(taken, self._foreseen, strict=False):
            self._right += token == foreseen
            self._wrong += token != foreseen
            if token != foreseen:
                break
        self._foreseen.clear()

    def _read(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        length = len(self._text)
        generated = length - len(prompt)
        if not 0 <= generated <= len(tokens) or (generated and self._text[-1] != tokens[generated - 1]):
            self._text, self._ends, length = [*prompt, *tokens], {}, 0
        else:
            self._text += tokens[generated:]
        for end in range(max(length, 1), len(self._text)):
            for n in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._ends[tuple(self._text[end - n : end])] = end
