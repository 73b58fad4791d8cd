"""Convert texts and pairs of texts to token ids; of a long text, tokenise only the part that the model reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from tokenizers import Encoding, Tokenizer

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.core.errors import ContextLengthError, ModelError, RequestError
from hepti_mqtt.models.shapes import TextInput
from hepti_mqtt.models.transformer import ModelSpec

MAX_CHARACTERS: Final = 400_000  # tokenised per request; truncated text hardly counts
CHARACTERS_PER_TOKEN: Final = 4  # first estimate, doubled until it suffices


def is_int(value: Any) -> bool:
    """Return whether a JSON value is an integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def describe(value: Any) -> str:
    """Return a short description of a JSON value."""
    if value is None or isinstance(value, bool | int | float):
        return str(value)[:40]
    words: dict[str, str] = {"str": "a string", "list": "a list", "dict": "an object"}
    name = type(value).__name__
    return words.get(name, name)


def quoted(value: Any) -> str:
    """Return the beginning of a string, or a short description of another JSON value."""
    return repr(value[:40]) if isinstance(value, str) else describe(value)


class CharacterBudget:
    """The remaining characters that a request may tokenise."""

    def __init__(self) -> None:
        self._left = MAX_CHARACTERS

    def take(self, count: int) -> None:
        """Count characters to be tokenised; raises RequestError above the limit."""
        self._left -= count
        if self._left < 0:
            raise RequestError(
                f"the texts are too long: the limit is {MAX_CHARACTERS} characters per request; shorten "
                "them, or send fewer in one request"
            )


class Tokens(NamedTuple):
    """A sequence for the model."""

    ids: Sequence[int]  #: token id + token type x vocabulary
    encoding: Encoding | None = None  #: of the tokenizer, None for a user's own ids


class TextReader:
    """Convert the texts of a request to token ids, by the rules of its model.

    truncate: cut texts that are too long instead of refusing them. offsets: keep the positions of tokens in their
    texts. Raises RequestError naming the text, ModelError for a tokenizer of another model.
    """

    def __init__(
        self, checkpoint: Checkpoint, reads: TextInput, truncate: bool = False, *, offsets: bool = False
    ) -> None:
        self._checkpoint, self._reads, self._truncate, self._offsets = checkpoint, reads, truncate, offsets
        self._characters = CharacterBudget()

    def text(self, name: str, value: Any, prompt: str | None = None) -> Tokens:
        """Return the ids of a text; truncation keeps the special tokens at both ends.

        prompt: prefix of the text, by default the model's default prompt. Without truncation, the ids of a text above
        the limit may be incomplete.
        """
        encoding = self._encoded(name, value, prompt)
        tokenizer = self._checkpoint.tokenizer
        room = max(self._reads.longest - tokenizer.num_special_tokens_to_add(False), 0)
        if self._truncate and len(encoding) > room:
            encoding.truncate(room, direction=self._checkpoint.texts.side)
        return self._finished(name, tokenizer.post_process(encoding))

    def pair(self, names: tuple[str, str], values: tuple[Any, Any], *, first_only: bool = False) -> Tokens:
        """Return the ids of two texts as one sequence; truncation cuts the longer first, or only the first."""
        self._check_pairs()
        a, b = (self._encoded(name, value) for name, value in zip(names, values, strict=True))
        if self._truncate and not first_only and min(len(a), len(b)) > self._reads.longest:
            # The full lengths decide which text keeps an additional token.
            a, b = (self._encoded(name, value, whole=True) for name, value in zip(names, values, strict=True))
        texts, tokenizer = self._checkpoint.texts, self._checkpoint.tokenizer
        room = max(self._reads.longest - tokenizer.num_special_tokens_to_add(True), 0)
        if self._truncate:
            kept = (max(room - len(b), 0), len(b)) if first_only else longest_first(len(a), len(b), room)
            for half, most in zip((a, b), kept, strict=True):
                if len(half) > most:
                    half.truncate(most, direction=texts.side)
        return self._finished(" with ".join(names), tokenizer.post_process(a, b))

    def windows(
        self, names: tuple[str, str], values: tuple[Any, Any], longest: int, overlap: int, most: int
    ) -> list[Tokens]:
        """Return the sequences of the first text with parts of the second, each of at most `longest` tokens.

        overlap: shared tokens of consecutive parts, at most half a sequence. most: limit of parts.
        """
        self._check_pairs()
        tokenizer, longest = self._checkpoint.tokenizer, min(longest, self._reads.longest)
        a, b = self._encoded(names[0], values[0]), self._encoded(names[1], values[1], whole=True)
        room = longest - tokenizer.num_special_tokens_to_add(True) - len(a)
        if room < 1:
            raise RequestError(
                f"{names[0]} has {len(a)} tokens, which leaves no room for {names[1]}: model "
                f"{self._checkpoint.model} takes at most {longest} of both; shorten it"
            )
        stride = min(overlap, longest // 2, room - 1)
        if len(b) > (fits := stride + most * (room - stride)):
            raise RequestError(
                f"{names[1]} has {len(b)} tokens, and at most {fits} fit with this {names[0]}; send it in parts"
            )
        b.truncate(room, stride=stride)
        parts = (b, *b.overflowing)
        return [self._finished(" with ".join(names), tokenizer.post_process(a, part)) for part in parts]

    def ids(self, name: str, value: Any, types: Any = None) -> Tokens:
        """Return a user's own ids; types: of each token, all 0 by default."""
        reads, model = self._reads, self._checkpoint.model
        if not isinstance(value, list):
            raise RequestError(f"{name} must be a list of integers, not {describe(value)}")
        if not value:
            raise RequestError(f"{name} is empty; send at least one token id")
        for place, token in enumerate(value):
            if not is_int(token):
                raise RequestError(f"{name}[{place}] must be an integer, not {quoted(token)}")
            if not 0 <= token < reads.vocab:
                raise RequestError(f"{name} has the id {token}; model {model} knows 0 to {reads.vocab - 1}")
        self._check_own(name, value, types)
        if len(value) > reads.longest and not self._truncate:
            raise self._too_long(name)
        typed = value if types is None else [i + reads.vocab * kind for i, kind in zip(value, types, strict=True)]
        return Tokens(self._as_read(name, typed[: reads.longest]))

    def _as_read(self, name: str, ids: Sequence[int]) -> Sequence[int]:
        """Return a text's ids up to the token of its vector, or padded to the model's length."""
        end, model = self._reads.end, self._checkpoint.model
        if end is not None:
            last = max(ids) if end == self._reads.vocab else end
            if last not in ids:
                raise RequestError(
                    f"{name} has no token {end}, from which model {model} reads the vector; put it at the end, or "
                    "send a text"
                )
            ids = ids[: ids.index(last) + 1]
        short = self._reads.longest - len(ids)
        return [*ids, *[self._checkpoint.padding_id] * short] if self._reads.padded and short else ids

    def _check_own(self, name: str, ids: Sequence[int], types: Any) -> None:
        """Raise RequestError for ids that the model would interpret differently from the user's intention."""
        spec, model, reads = self._checkpoint.spec, self._checkpoint.model, self._reads
        stem = spec.text if isinstance(spec, ModelSpec) else None
        offset = stem.position_offset if stem is not None else 0
        if offset and offset - 1 in ids:
            raise RequestError(f"{name} has the padding id {offset - 1}; send ids without padding")
        if types is not None:
            if not isinstance(types, list) or len(types) != len(ids) or not all(map(is_int, types)):
                raise RequestError(f"token_types must have one integer for each of the {len(ids)} tokens of {name}")
            if not all(0 <= kind < reads.types for kind in types):
                valid = f"0 to {reads.types - 1}" if reads.types > 1 else "0 alone"
                raise RequestError(f"model {model} knows the token types {valid}")
            return
        separator = self._checkpoint.texts.separator if reads.types > 1 and self._checkpoint.has_tokenizer else None
        if separator is not None and separator in ids[:-1]:
            raise RequestError(
                f"{name} has the separator {separator} before its end: it is a pair of texts, or has padding, which "
                f"model {model} would read as one text; send token_types with it, or the two texts themselves"
            )

    def _check_pairs(self) -> None:
        if why := self._require_tokenizer().pair_refusal:
            raise ModelError(
                f"model {self._checkpoint.model} cannot read pairs of texts: {why}; save the tokenizer again, or send "
                "ids with token_types"
            )

    def _require_tokenizer(self) -> Any:
        checkpoint = self._checkpoint
        if not checkpoint.has_tokenizer and not self._reads.masks:
            raise ModelError(
                f"{checkpoint.path / 'tokenizer.json'} is missing, so texts cannot be read; copy it, or send token ids"
            )
        return checkpoint.texts

    def _encoded(self, name: str, value: Any, prompt: str | None = None, *, whole: bool = False) -> Encoding:
        """Return the tokens of a text without special tokens; whole: tokenise the whole text."""
        if not isinstance(value, str):
            raise RequestError(f"{name} must be a string, not {describe(value)}")
        if not value.strip():
            raise RequestError(f"{name} is empty; send some words")
        texts, checkpoint = self._require_tokenizer(), self._checkpoint
        tokenizer, rules = texts.tokenizer, checkpoint.text_rules
        # As sentence-transformers does before its tokenizer.
        text = f"{rules.prompt if prompt is None else prompt}{value}"
        text = text.strip() if rules.strip else text
        text = text.lower() if rules.lower == "text" else text
        # Truncation at the start needs all tokens.
        cut = self._truncate and texts.side == "left"
        longest = len(text) if whole or cut else self._reads.longest
        encoding = _encode_prefix(tokenizer, name, text, longest, self._characters, self._offsets)
        if (control := next((i for i in encoding.ids if i in texts.controls), None)) is not None:
            raise RequestError(
                f"{name} has the model's control token {tokenizer.id_to_token(control)!r} in it, which this tokenizer "
                "cannot read as text; remove it"
            )
        if not encoding.ids:  # only control characters: the special tokens alone would have an embedding, too
            raise RequestError(f"{name} has no tokens for model {checkpoint.model}; send some words")
        return encoding

    def _finished(self, name: str, encoding: Encoding) -> Tokens:
        """Return the tokens of a sequence with special tokens, each with its type."""
        ids, checkpoint, vocab = encoding.ids, self._checkpoint, self._reads.vocab
        if max(ids) >= vocab:
            raise ModelError(
                f"{checkpoint.path / 'tokenizer.json'} gives id {max(ids)}, but config.json's vocab_size is "
                f"{vocab}; both must be of the same model"
            )
        if len(ids) > self._reads.longest:
            raise self._too_long(name)
        types = encoding.type_ids
        if self._reads.types == 1 or not any(types):
            return Tokens(self._as_read(name, ids), encoding)
        if checkpoint.texts.typed is None:
            raise ModelError(
                f"model {checkpoint.model}: tokenizer.json gives token types, and versions of transformers differ in "
                "whether they count; say so by model_input_names in tokenizer_config.json, with token_type_ids or "
                "without"
            )
        if not checkpoint.texts.typed:
            return Tokens(ids, encoding)
        if max(types) >= self._reads.types:
            raise ModelError(
                f"{checkpoint.path / 'tokenizer.json'} gives token type {max(types)}, but config.json's "
                f"type_vocab_size is {self._reads.types}; both must be of the same model"
            )
        return Tokens([i + vocab * kind for i, kind in zip(ids, types, strict=True)], encoding)

    def _too_long(self, name: str) -> RequestError:
        way = "" if self._truncate else ', or send "truncate": true'
        return ContextLengthError(
            f"{name} has more than {self._reads.longest} tokens, the limit of model {self._checkpoint.model}: "
            f"shorten it{way}"
        )


def longest_first(a: int, b: int, room: int) -> tuple[int, int]:
    """Return the tokens that two texts keep: cut the longer text first, then both alike, as `tokenizers` does."""
    if a + b <= room:
        return a, b
    shorter = min(a, b)
    longer = shorter if shorter > room else max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room // 2 + room % 2
    return (shorter, longer) if a <= b else (longer, shorter)


def _encode_prefix(
    tokenizer: Tokenizer, name: str, text: str, longest: int, characters: CharacterBudget, offsets: bool
) -> Encoding:
    """Return all tokens of a text, or more than `longest` first tokens; offsets: with their positions."""
    window = CHARACTERS_PER_TOKEN * longest
    while window < len(text):
        characters.take(window)
        encoding = _encode(tokenizer.encode_batch, name, text[:window])
        # The last word may continue after the window, or start a special token, which changes its tokens.
        special = max((len(token.content) for token in tokenizer.get_added_tokens_decoder().values()), default=0)
        words, sure = encoding.word_ids, window - special
        pairs = zip(words, encoding.offsets, strict=True)
        if words and sum(word != words[-1] and stop <= sure for word, (_, stop) in pairs) > longest:
            return encoding
        window *= 2
    characters.take(len(text))
    # The fast variant returns neither word ids nor offsets.
    return _encode(tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast, name, text)


def _encode(encode: Callable[..., list[Encoding]], name: str, text: str) -> Encoding:
    """Return a text's tokens by a batch method, because only batch methods release the interpreter lock."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode ({error.reason}); send it as UTF-8") from error
    return encode([text], add_special_tokens=False)[0]
