"""Words of a transcript and their times; tokens are grouped as in openai-whisper and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from string import punctuation
from typing import Any, Final, NamedTuple

import numpy.typing as npt

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.models.speech import ROWS_PER_S

UNSPACED: Final = frozenset({"zh", "ja", "th", "lo", "my", "yue"})  # languages that write no spaces between words
OPENING: Final = "\"'“¡¿([{-"  # belongs to the next word
CLOSING: Final = "\"'.。,，!！?？:：”)]}、"  # belongs to the word before
_BROKEN: Final = "\ufffd"  # a part of a character


class TokenTimes(NamedTuple):
    """Start and end of a token in the sound, in seconds."""

    start: float
    end: float


class Word(NamedTuple):
    """A word with its leading space, and the range of its tokens."""

    text: str
    first: int
    stop: int


def token_times(ids: Sequence[int], beginnings: npt.NDArray[Any] | None) -> list[TokenTimes]:
    """Return the times of each token: from the beginning of the token before it to its own.

    beginnings: rows of sound of all tokens but the last, None for a text of one token.
    """
    moments = [] if beginnings is None else [round(float(row) / ROWS_PER_S, 2) for row in beginnings]
    moments = (moments + [moments[-1] if moments else 0.0] * len(ids))[: len(ids)]
    return [TokenTimes(*pair) for pair in pairwise([0.0, *moments])]


def words_of(
    checkpoint: Checkpoint, language: str, ids: Sequence[int], times: Sequence[TokenTimes]
) -> list[dict[str, Any]]:
    """Return {"word", "start", "end"} of each word of a segment; times: of its tokens."""
    spoken = [place for place, token in enumerate(ids) if token < checkpoint.speech.end]
    words = split_words(checkpoint, language, [ids[place] for place in spoken])
    return [
        {"word": word.text, "start": times[spoken[word.first]].start, "end": times[spoken[word.stop - 1]].end}
        for word in words
    ]


def split_words(checkpoint: Checkpoint, language: str, ids: Sequence[int]) -> list[Word]:
    """Return the words of tokens; single characters for languages without spaces."""
    pieces = _characters(checkpoint, ids)
    if language not in UNSPACED:
        pieces = _spaced(pieces)
    return _with_punctuation(pieces)


def _characters(checkpoint: Checkpoint, ids: Sequence[int]) -> list[Word]:
    """Return the shortest runs of tokens with whole characters."""
    decode, whole = checkpoint.tokenizer.decode, checkpoint.tokenizer.decode(list(ids))
    words, first, offset = list[Word](), 0, 0
    for stop in range(1, len(ids) + 1):
        text = str(decode(list(ids[first:stop])))
        broken = offset + text.find(_BROKEN)
        if (
            _BROKEN not in text or broken >= len(whole) or whole[broken] == _BROKEN
        ):  # the text itself contains this character
            words.append(Word(text, first, stop))
            first, offset = stop, offset + len(text)
    if first < len(ids):  # the reference drops these tokens
        words.append(Word(str(decode(list(ids[first:]))), first, len(ids)))
    return words


def _spaced(pieces: Sequence[Word]) -> list[Word]:
    """Join pieces to words; a word starts at a space or is punctuation."""
    words = list[Word]()
    for piece in pieces:
        if not words or piece.text.startswith(" ") or piece.text.strip() in punctuation:
            words.append(piece)
        else:
            words[-1] = Word(words[-1].text + piece.text, words[-1].first, piece.stop)
    return words


def _with_punctuation(words: Sequence[Word]) -> list[Word]:
    """Join opening punctuation to the next word, and closing punctuation to the word before."""
    joined = list[Word]()
    for word in reversed(words):
        if joined and word.text.startswith(" ") and word.text.strip() in OPENING:
            joined[-1] = Word(word.text + joined[-1].text, word.first, joined[-1].stop)
        else:
            joined.append(word)
    words = list[Word]()
    for word in reversed(joined):
        if words and not words[-1].text.endswith(" ") and word.text in CLOSING:
            words[-1] = Word(words[-1].text + word.text, words[-1].first, word.stop)
        else:
            words.append(word)
    return words
