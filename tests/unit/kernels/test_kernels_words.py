"""Embeddings of words in every storage are the values of the matrix; only words of a range are there."""

from __future__ import annotations

import numpy as np
import pytest
from gguf_writer import quantised
from kernels_support import RNG, Case, array, held

from hepti_mqtt.core.storage import BLOCK_STORAGES, STORAGES, StoredRows

H = 512
WORDS, VOCABULARY, FIRST = 150, 200, 30
STORED = ["f32", "f16", "w8a32", "w8a8", *BLOCK_STORAGES]


def matrix(storage):
    """Return a matrix of H rows and WORDS columns."""
    values, is_in_blocks = array(WORDS, H), storage in BLOCK_STORAGES
    return held(StoredRows(STORAGES[storage], quantised(values, storage)) if is_in_blocks else values.T, storage)


def embedded(ids, word, first=0, vocabulary=WORDS):
    attrs = {"parts": ("word",), "lengths": (len(ids),), "position_offset": 0, "words": (first, vocabulary)}
    return Case("embed_tokens", [np.asarray(ids, np.int32)], [(len(ids), H)], [word], **attrs).run()[0]


@pytest.mark.parametrize("storage", STORED)
def test_embeddings_are_the_values_of_the_matrix(storage):
    word = matrix(storage)
    ids = RNG.randint(0, WORDS, 17)
    np.testing.assert_array_equal(embedded(ids, word), word.plain().T[ids])


@pytest.mark.parametrize("storage", ["f32", "q4_1"])
def test_words_beyond_a_range_are_zeros(storage):
    word = matrix(storage)
    ids = np.array([0, FIRST - 1, FIRST, FIRST + WORDS - 1, FIRST + WORDS, VOCABULARY - 1])
    want = np.zeros((len(ids), H), np.float32)
    want[2:4] = word.plain().T[[0, WORDS - 1]]
    np.testing.assert_array_equal(embedded(ids, word, FIRST, VOCABULARY), want)


@pytest.mark.parametrize("storage", ["f32", "q6_k"])
def test_an_id_outside_the_vocabulary_is_refused(storage):
    with pytest.raises(ValueError, match=f"token id {WORDS} is outside the vocabulary"):
        embedded([3, WORDS], matrix(storage))
