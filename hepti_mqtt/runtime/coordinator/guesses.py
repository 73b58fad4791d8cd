"""Tokens that may follow a text, guessed from the text itself and checked by the run that computes the next one.

Source: prompt lookup, a form of speculative decoding (Leviathan et al., 2023) without a second model.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median
from typing import Final

SIZES: Final = (2, 4, 8)  # rows of a run with guesses: few Programs, and kernels of few rows
_LONGEST, _SHORTEST = 3, 2  # tokens that must have been there before in the same order
_KEPT: Final = 5  # durations of each size
_NEW: Final = 2  # runs of a size before it is judged by them: the first one may have waited for its Program
_PRIOR: Final = (1.0, 1.0)  # guesses that were right and wrong before any was checked


class StepPace:
    """How long runs of a session take by their rows, under one plan."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._counts: dict[int, int] = defaultdict(int)

    def record(self, rows: int, seconds: float) -> None:
        """Take a run that was alone on its devices."""
        if rows == 1 or rows in SIZES:
            self._counts[rows] += 1
            self._seconds[rows].append(seconds)

    def cost(self, rows: int) -> float:
        """Return the time of a run as a multiple of that of one row; unknown sizes count as the next smaller one."""
        usual_s = [median(self._seconds[r]) for r in (1, *SIZES) if r <= rows and self._counts[r] > _NEW]
        return max(usual_s[-1] / usual_s[0], 1.0) if len(usual_s) > 1 else 1.0


class Guesses:
    """What followed the last tokens of a text where they stood in it before."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # of some tokens, where they stood last, but for the text's end
        self._right, self._wrong = _PRIOR

    def propose(self, prompt: Sequence[int], tokens: Sequence[int], most: int, pace: StepPace) -> tuple[int, ...]:
        """Return as many tokens as are worth a larger run, none where that is not expected to save time.

        tokens: behind the prompt, so far. most: that may be of use.
        """
        self._read(prompt, tokens)
        at = next((self._ends[key] for key in self._last() if key in self._ends), None)
        if at is None:
            return ()
        right = self._right / (self._right + self._wrong)
        rates = {1: 1.0} | {r: (1 - right**r) / (1 - right) / pace.cost(r) for r in SIZES if r - 1 <= most}
        count = max(rates, key=rates.__getitem__) - 1
        guessed = list[int]()
        for place in range(at, at + count):  # what repeats goes on repeating
            guessed.append(self._text[place] if place < len(self._text) else guessed[place - len(self._text)])
        return tuple(guessed)

    def record(self, guessed: int, right: int) -> None:
        """Take how many of some guesses were right; those behind a wrong one say nothing."""
        self._right += right
        self._wrong += right < guessed

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

    def _last(self) -> list[tuple[int, ...]]:
        return [tuple(self._text[-n:]) for n in range(_LONGEST, _SHORTEST - 1, -1) if n <= len(self._text)]
