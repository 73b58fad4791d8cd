"""Words of a transcript: those of the reference, with the times of their tokens."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from word_cases import ANSWERS, TEXTS, bytes_tokenizer

from hepti_mqtt.service.word_times import TokenTimes, split_words, token_times, words_of

REFERENCE = json.loads(ANSWERS.read_text())
END = 1000


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    return SimpleNamespace(tokenizer=bytes_tokenizer(), speech=SimpleNamespace(end=END))


@pytest.mark.parametrize(("code", "text"), [(code, text) for code, _, text in TEXTS], ids=str)
def test_words_are_those_of_the_reference(checkpoint: Any, code: str, text: str) -> None:
    ids = checkpoint.tokenizer.encode(text).ids
    word_list = split_words(checkpoint, code, ids)
    assert [word.text for word in word_list] == REFERENCE[text]
    assert [*(word.first for word in word_list), len(ids)] == [0, *(word.stop for word in word_list)], (
        "no token is left out"
    )


def test_no_word_is_lost_behind_a_broken_character(checkpoint: Any) -> None:
    text = "one \ufffd two"
    ids = checkpoint.tokenizer.encode(text).ids
    word_list = split_words(checkpoint, "en", ids)
    assert word_list[0].text == "one"
    assert (word_list[-1].text[-4:], word_list[-1].stop) == (" two", len(ids))


def test_a_word_lasts_from_its_first_token_to_its_last_one(checkpoint: Any) -> None:
    first = checkpoint.tokenizer.encode("ab cd").ids
    ids = [END + 5, *first, END + 9, END]  # moments before and behind
    beginnings = np.array([0, 3, 7, 9, 12, 20, 22], np.float32)
    times = token_times(ids, beginnings)
    assert times[1] == TokenTimes(0.0, 0.06)
    assert times[-1] == TokenTimes(0.44, 0.44), "nothing is known of the last token"
    assert words_of(checkpoint, "en", ids, times) == [
        {"word": "ab", "start": 0.0, "end": 0.14},
        {"word": " cd", "start": 0.14, "end": 0.4},
    ]


def test_a_text_without_tokens_has_no_words(checkpoint: Any) -> None:
    assert words_of(checkpoint, "en", [END], token_times([END], None)) == []
