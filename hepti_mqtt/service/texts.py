"""Texts to token ids: no more of a long one is read than it takes to know the tokens that the model reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tokenizers import Encoding, Tokenizer

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.errors import ModelError, RequestError
from hepti_mqtt.models.config import Config
from hepti_mqtt.models.reads import Text
from hepti_mqtt.models.text import prompt
from hepti_mqtt.service.limits import Characters
from hepti_mqtt.service.values import kind

CHARACTERS_PER_TOKEN: Final = 4  # first guess; twice as many are read where these are too few


def encoded(
    checkpoint: Checkpoint, reads: Text, name: str, value: Any, truncate: bool, characters: Characters
) -> list[int]:
    """Return the ids of a text; truncation keeps the tokens that the tokenizer adds at both ends.

    Without truncation a text that is too long may end early, still longer than the model reads. characters: what the
    request may have read. Raises RequestError naming the text, ModelError for a tokenizer that does not fit the model.
    """
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string, not {kind(value)}")
    if not value.strip():
        raise RequestError(f"{name} is empty; send some words")
    if not checkpoint.has_tokenizer and not reads.masks:
        raise ModelError(
            f"{checkpoint.path / 'tokenizer.json'} is missing, so texts cannot be read; copy it, or send token ids"
        )
    tokenizer = checkpoint.tokenizer
    encoding = _beginning(tokenizer, name, _cleaned(checkpoint, value), reads.longest, characters)
    room = reads.longest - tokenizer.num_special_tokens_to_add(False)
    if truncate and len(encoding) > room:
        _check_side(checkpoint, name)
        encoding.truncate(max(room, 0))
    ids: list[int] = tokenizer.post_process(encoding).ids
    if not ids:
        raise RequestError(f"{name} has no tokens for model {checkpoint.model}; send some words")
    if max(ids) >= reads.vocab:
        raise ModelError(
            f"{checkpoint.path / 'tokenizer.json'} gives id {max(ids)}, but config.json's vocab_size is "
            f"{reads.vocab}; both must be of the same model"
        )
    return ids


def _cleaned(checkpoint: Checkpoint, text: str) -> str:
    """Return a text as the model's tokenizer is given it: sentence-transformers does more than its tokenizer says."""
    if "modules.json" not in checkpoint.extras or checkpoint.spec.head.task != "embedding":
        return text
    file = "sentence_bert_config.json"
    text = f"{prompt(checkpoint.extras)}{text}".strip()
    return text.lower() if Config(file, checkpoint.extras.get(file, {})).flag("do_lower_case", False) else text


def _check_side(checkpoint: Checkpoint, name: str) -> None:
    """Raise RequestError where the model was made to read the ends of long texts, whose beginnings are read here."""
    options = checkpoint.extras.get("tokenizer_config.json")
    if isinstance(options, Mapping) and options.get("truncation_side") == "left":
        raise RequestError(
            f"{name} is too long, and of such a text model {checkpoint.model} reads the end ('truncation_side' in "
            "tokenizer_config.json), which truncate would cut off; shorten it"
        )


def _beginning(tokenizer: Tokenizer, name: str, text: str, longest: int, characters: Characters) -> Encoding:
    """Return the tokens of a text: all of them, or more than the first `longest`, which are those of the whole."""
    window = CHARACTERS_PER_TOKEN * longest
    while window < len(text):
        characters.take(window)
        encoding = _encode(tokenizer.encode_batch, name, text[:window])
        # The last word may go on behind the window, or be the beginning of a special token, and be other tokens then.
        words, sure = encoding.word_ids, window - _longest_special(tokenizer)
        pairs = zip(words, encoding.offsets, strict=True)
        if words and sum(word != words[-1] and stop <= sure for word, (_, stop) in pairs) > longest:
            return encoding
        window *= 2
    characters.take(len(text))
    return _encode(tokenizer.encode_batch_fast, name, text)  # which knows no words


def _longest_special(tokenizer: Tokenizer) -> int:
    return max((len(token.content) for token in tokenizer.get_added_tokens_decoder().values()), default=0)


def _encode(encode: Callable[..., list[Encoding]], name: str, text: str) -> Encoding:
    """Return a text's tokens; of the library's ways to encode, only those of batches let other threads run."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode ({error.reason}); send it as UTF-8") from error
    return encode([text], add_special_tokens=False)[0]
