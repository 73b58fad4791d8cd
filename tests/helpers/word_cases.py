"""Texts of speech that are aligned with their sound: what the reference answers is in tests/golden/words.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ANSWERS = Path(__file__).parent.parent / "golden" / "words.json"
ROWS = 24
PROMPT = (3, 6, 7)


class WordCase(NamedTuple):
    """A text behind `PROMPT`, and the heads that generation_config.json names; None: it names none."""

    name: str
    kind: str
    text: tuple[int, ...]
    #: rows of sound that count
    sound_rows: int
    heads: tuple[tuple[int, int], ...] | None = None

    @property
    def frames(self) -> np.ndarray:
        """Return frames of sound [2 rows, bands], in fixed point."""
        bands = {"tiny-whisper": 8, "tiny-whisper-turbo": 128}[self.kind]
        noise = np.random.default_rng(len(self.text)).standard_normal((2 * ROWS, bands))
        return np.rint(noise * 2**19).astype(np.int32)


CASES = (
    WordCase("all of the last half", "tiny-whisper", (5, 9, 17, 2, 33, 12, 40, 8), ROWS),
    WordCase("some heads of two layers", "tiny-whisper", (21, 9, 17, 30, 6), 20, ((1, 3), (0, 0), (1, 1))),
    WordCase("one head", "tiny-whisper-turbo", (73, 5, 9, 17, 2, 33, 90, 63), 17, ((0, 2),)),
    WordCase("one word", "tiny-whisper-turbo", (14, 63), ROWS),
)

#: (code of the language, its name, text)
TEXTS = (
    ("en", "english", " Hello, world! It's (really) “fine”; 5.5% of [it] - “yes”."),
    ("de", "german", " Grüße an „Jörg“: 12:30 Uhr… ja?"),
    ("ja", "japanese", "「日本語」です。はい、そう！"),
    ("en", "english", ' "Quoted" \U0001f600 words '),
)


def bytes_tokenizer(*words: str, added: Sequence[str] = (), special: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer whose tokens are bytes and a few words, so that a character may be several of them."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    tokenizer.add_tokens([*added])
    tokenizer.add_special_tokens([*special])
    return tokenizer


def sentence_piece(words: Sequence[str], special: Sequence[str], decoder: object = None) -> Tokenizer:
    """Return a tokenizer of words with their spaces, and of bytes for all other text; by default Llama 2's decoder."""
    pieces = [*special, *words, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token=special[0]))
    tokenizer.decoder = decoder or spaces(decoders.Strip(" ", 1, 0))
    tokenizer.add_special_tokens([*special])
    return tokenizer


def spaces(*last: object) -> object:
    """Return a decoder that turns marks into spaces and bytes into text, and then applies `last`."""
    return decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *last])
