"""A prompt in which rows of pictures replace some tokens: the rows that a run carries, and where runs may end."""

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
    """The rows of pictures in a prompt."""

    places: Ids  #: their places in the prompt, ascending [n]
    marks: Ids  #: a negative hash of the picture at each place, so that equal prompts have equal pictures [n]
    rows: Ids  #: values to add to the token embeddings, in fixed point [n, width]; no rows before the tower has run
    #: Range of each picture with attention between all of its rows: one run computes exactly these rows.
    wholes: tuple[tuple[int, int], ...] = ()

    def is_within(self, first: int, stop: int) -> bool:
        """Return whether places from `first` to `stop` include a row of a picture."""
        low, high = np.searchsorted(self.places, (first, stop))
        return bool(low < high)

    def added(self, first: int, stop: int) -> Ids:
        """Return the values to add to the embeddings from `first` to `stop`: zeros for tokens outside pictures."""
        low, high = np.searchsorted(self.places, (first, stop))
        out = np.zeros((stop - first, self.rows.shape[1]), np.int32)
        out[self.places[low:high] - first] = self.rows[low:high]
        return out.reshape(-1)

    def marked(self, prompt: Sequence[int]) -> Sequence[int]:
        """Return the prompt with marks in place of the tokens of pictures."""
        ids = np.array(prompt, np.int32)
        ids[self.places] = self.marks
        return tuple(ids.tolist())

    def next_rows(self, cached: int, total: int) -> tuple[int, int]:
        """Return the rows of the next run, see `shapes.next_rows`; each of `wholes` is one run."""
        edges = sorted({0, total, *(edge for whole in self.wholes for edge in whole)})
        start, stop = next((pair for pair in pairwise(edges) if pair[0] <= cached < pair[1]), (0, total))
        if (start, stop) in self.wholes:
            return start, stop
        first, last = next_rows(cached - start, stop - start)
        return start + first, start + last
