"""Log probabilities of tokens as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from tokenizers import pre_tokenizers

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.models.generation import Likely

DIGITS: Final = 6
_ANCHOR: Final = "a"  # before a token, because decoders strip the space at the start of a text


def described(checkpoint: Checkpoint, likely: Sequence[Likely]) -> dict[str, Any]:
    """Return {"id", "token", "logprob", "top"} of a token; `top` lists the likeliest tokens at its place, best first.

    "token" is its text. A token with a part of a character also has "bytes".
    """
    own, *top = ({**piece(checkpoint, one.token), "logprob": round(one.logprob, DIGITS)} for one in likely)
    return {**own, "top": top}


def piece(checkpoint: Checkpoint, token: int) -> dict[str, Any]:
    """Return {"id", "token"} of a token, and its "bytes" if they are no text."""
    stored = checkpoint.tokenizer.id_to_token(token) if checkpoint.has_tokenizer else None
    if stored is None:  # padding of the vocabulary
        return {"id": token, "token": ""}
    decoder = checkpoint.tokenizer.decoder
    text = stored if decoder is None else decoder.decode([_ANCHOR, stored]).removeprefix(_ANCHOR)
    return {"id": token, "token": text} | ({"bytes": values} if "\ufffd" in text and (values := _bytes(stored)) else {})


def _bytes(stored: str) -> list[int]:
    """Return the bytes of a token with a part of a character, in byte-level BPE or SentencePiece."""
    if stored.startswith("<0x") and stored.endswith(">"):
        return [int(stored[3:-1], 16)]
    byte_of = _byte_level()
    return [byte_of[one] for one in stored] if all(one in byte_of for one in stored) else []


@lru_cache(maxsize=1)
def _byte_level() -> Mapping[str, int]:
    """Return the byte of each character of byte-level BPE; printable characters are their own byte."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain = {one: ord(one) for one in alphabet if ord(one) < 256}
    others = sorted(set(range(256)) - set(plain.values()))
    return plain | {chr(256 + place): byte for place, byte in enumerate(others)}
