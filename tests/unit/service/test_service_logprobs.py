"""Tokens by themselves: their bytes, one behind the other, are those of the text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from hepti_mqtt.models.generation import Likely
from hepti_mqtt.service.logprobs import described, piece


def byte_level() -> Tokenizer:
    vocab = {one: place for place, one in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "is", "Ġis"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("i", "s"), ("Ġ", "is")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer


def sentencepiece() -> Tokenizer:
    vocab = {**{f"<0x{i:02X}>": i for i in range(256)}, "▁": 256, "i": 257, "s": 258, "is": 259, "▁is": 260}
    tokenizer = Tokenizer(models.BPE(vocab, [("i", "s"), ("▁", "is")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_the_bytes_of_tokens_are_those_of_the_text(make: Any) -> None:
    tokenizer = make()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    text = " is \U0001f642 é is<|end|>"
    checkpoint = SimpleNamespace(tokenizer=tokenizer, has_tokenizer=True)
    pieces = [piece(checkpoint, token) for token in tokenizer.encode(text).ids]
    assert b"".join(bytes(one.get("bytes") or one["token"].encode()) for one in pieces).decode() == text
    assert pieces[0]["token"] == " is"
    assert pieces[-1]["token"] == "<|end|>"
    assert any("bytes" in one for one in pieces)
    ids = [tokenizer.token_to_id("is"), 5, 9999]
    tokens = described(checkpoint, [Likely(token, -0.123456789) for token in ids])
    assert (tokens["id"], tokens["token"], tokens["logprob"]) == (ids[0], "is", -0.123457)
    assert [one["id"] for one in tokens["top"]] == ids[1:]
    assert tokens["top"][1]["token"] == "", "a vocabulary may be larger than its tokenizer"
