"""Requests cut into runs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.models.shapes import Images, PackedTokens
from hepti_mqtt.service.requests import Prepared, cut

LIMIT = 20


@given(st.lists(st.integers(1, LIMIT), min_size=1, max_size=30), st.data())
def test_chunks_hold_the_whole_request_in_order(lengths, data):
    total = sum(lengths)
    rows = tuple(sorted(data.draw(st.sets(st.integers(0, total - 1), max_size=8))))
    inputs = np.arange(total, dtype=np.int32)
    chunks = cut(Prepared(PackedTokens(tuple(lengths), "task", rows), inputs, True, 5), LIMIT)
    assert [n for c in chunks for n in c.shape.lengths] == lengths
    assert np.concatenate([c.inputs for c in chunks]).tolist() == list(range(total))
    assert all(c.shape.tokens == len(c.inputs) <= LIMIT for c in chunks)
    # What a mask row points at is the same value in its chunk.
    assert [int(c.inputs[r]) for c in chunks for r in c.shape.mask_rows] == list(rows)
    # Greedy: the first sequence of each chunk did not fit into the one before.
    for before, after in pairwise(chunks):
        assert before.shape.tokens + after.shape.lengths[0] > LIMIT


@given(st.integers(1, 9), st.integers(1, 4))
def test_pictures_are_cut_along_the_batch(count, fit):
    pixels = np.arange(count * 12, dtype=np.uint8).reshape(count, 3, 2, 2)
    chunks = cut(Prepared(Images(count, 5), pixels, True, 5), 5 * fit)
    assert all(len(c.inputs) == len(c.shape.lengths) <= fit for c in chunks)
    np.testing.assert_array_equal(np.concatenate([c.inputs for c in chunks]), pixels)


def test_want_is_kept():
    (chunk,) = cut(Prepared(PackedTokens((3,), "hidden"), np.zeros(3, np.int32), False, 5), LIMIT)
    assert chunk.shape.want == "hidden"


def test_a_sequence_that_fits_no_run_is_an_error():
    with pytest.raises(ValueError, match="item 1"):
        cut(Prepared(PackedTokens((3, LIMIT + 1)), np.zeros(LIMIT + 4, np.int32), True, 5), LIMIT)
