"""A prompt in which rows of pictures stand for some tokens: what a run brings for them, and where runs may end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.models.shapes import next_rows

Ids = NDArray[np.int32]


@dataclass(slots=True)
class PicturedPrompt:
    """Where rows of pictures stand in a prompt, and the rows."""

    #: places in the prompt, ascending [n]
    places: Ids
    #: a negative number for each place, by what is in its picture: equal texts have equal pictures, too [n]
    marks: Ids
    #: what is added to the embeddings of the tokens there, in fixed point [n, width]; of no rows until it is computed
    rows: Ids
    #: start and stop of each picture whose rows see each other: a run has all of them, and no others
    wholes: tuple[tuple[int, int], ...] = ()

    def is_within(self, first: int, stop: int) -> bool:
        """Return whether rows of a picture stand at some of the places."""
        low, high = np.searchsorted(self.places, (first, stop))
        return bool(low < high)

    def added(self, first: int, stop: int) -> Ids:
        """Return what is added to the embeddings of the tokens at some places: zeros where no picture is."""
        low, high = np.searchsorted(self.places, (first, stop))
        out = np.zeros((stop - first, self.rows.shape[1]), np.int32)
        out[self.places[low:high] - first] = self.rows[low:high]
        return out.reshape(-1)

    def marked(self, prompt: Sequence[int]) -> Sequence[int]:
        """Return the prompt with the marks of pictures in place of their tokens."""
        ids = np.array(prompt, np.int32)
        ids[self.places] = self.marks
        return tuple(ids.tolist())

    def next_rows(self, cached: int, total: int) -> tuple[int, int]:
        """Return which rows the next run computes, see `shapes.next_rows`; a whole picture is one run."""
        edges = sorted({0, total, *(edge for whole in self.wholes for edge in whole)})
        start, stop = next((pair for pair in pairwise(edges) if pair[0] <= cached < pair[1]), (0, total))
        if (start, stop) in self.wholes:
            return start, stop
        first, last = next_rows(cached - start, stop - start)
        return start + first, start + last
