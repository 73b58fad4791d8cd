"""Texts of tokens, together, as they come, and each with its probability: the same text, whatever the tokenizer."""

from itertools import takewhile
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from word_cases import bytes_tokenizer, sentence_piece, spaces

from hepti_mqtt.models.generation import Likely
from hepti_mqtt.service.detokenizer import WrittenText
from hepti_mqtt.service.logprobs import described, piece

WORDS = ("\u2581", "\u2581\u2581", "T", "he", "\u2581The", "\u00e9", "\ufffd")
BYTES = ("The", "\u0120hi", "\u00c3\u00a9", "\u00f0\u0141")
TOKENIZERS = {
    "byte level": bytes_tokenizer(*BYTES, added=["\u00e9\U0001f600x"], special=["<|end|>"]),
    "Llama 2": sentence_piece(WORDS, ["<s>"]),
    "Gemma": sentence_piece(WORDS, ["<s>"], spaces()),
    "Metaspace": sentence_piece(WORDS, ["<s>"], decoders.Metaspace()),
}

STOPS = ("The", "he", " T", "\u00e9", "\u6f22T")


def opened(name):
    return SimpleNamespace(has_tokenizer=True, tokenizer=TOKENIZERS[name])


def texts(name):
    """Return lists of tokens: any, of which one is none of the tokenizer's, and characters that may be cut short."""
    tokenizer = TOKENIZERS[name]
    cut = st.tuples(st.sampled_from("\u00e9\u6f22\U0001f600"), st.integers(1, 4))
    characters = cut.map(lambda pair: tokenizer.encode(pair[0]).ids[: pair[1]])
    either = st.one_of(st.lists(st.integers(0, 8)), st.lists(st.integers(0, tokenizer.get_vocab_size())), characters)
    return st.lists(either, max_size=12).map(lambda parts: [token for part in parts for token in part])


def complete_text(tokenizer, tokens):
    """Return the text of tokens without a last character of which they have only the first bytes."""
    shown = [t for t in tokens if tokenizer.id_to_token(t) and t not in special(tokenizer)]
    run = len(list(takewhile(lambda t: tokenizer.id_to_token(t).startswith("<0x"), reversed(shown))))
    texts = [tokenizer.decode(shown[: len(shown) - cut], skip_special_tokens=True) for cut in range(min(run, 4) + 1)]
    return next((text for text in texts if not text.endswith("\ufffd")), texts[0].removesuffix("\ufffd"))


def special(tokenizer):
    return {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


@pytest.mark.parametrize("name", ["byte level", "Llama 2", "Gemma"])
def test_a_character_that_the_last_token_cuts_is_in_neither_stream_nor_text(name):
    tokens = TOKENIZERS[name].encode("The\u6f22\U0001f600").ids[:-1]
    written = WrittenText(opened(name))
    pieces = [written.extend_to(tokens[: count + 1]) for count in range(len(tokens))]
    rest, _ = written.end()
    assert "".join([*pieces, rest]).strip() == "The\u6f22"


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_joined_are_the_whole_text_up_to_where_it_stops(name, data):
    tokens, stop = data.draw(texts(name)), data.draw(st.lists(st.sampled_from(STOPS)))
    written, until = WrittenText(opened(name), stop), WrittenText(opened(name), stop)
    counts = sorted({*data.draw(st.lists(st.integers(0, len(tokens)))), len(tokens)})
    pieces = [written.extend_to(tokens[:count]) for count in counts]
    assert not any(one in "".join(pieces) for one in stop)
    for part in (tokens, tokens[1:]):  # then another text, as after a run that was lost
        text = "".join(pieces) if part is tokens else written.extend_to(part)
        rest, stopped = written.end()
        whole = complete_text(TOKENIZERS[name], part)
        at = min((whole.index(one) for one in stop if one in whole), default=None)
        assert (text + rest, stopped) == (whole[:at], at is not None)
        assert not until.stops(part) or stopped, "a text stops early only where one of the texts is in it"


@pytest.mark.parametrize(
    ("name", "first", "end"), [("byte level", "\u0120hi", "<|end|>"), ("Llama 2", "\u2581The", "<s>")]
)
def test_the_bytes_of_tokens_are_those_of_the_text(name, first, end):
    tokenizer, checkpoint = TOKENIZERS[name], opened(name)
    ids = [tokenizer.token_to_id(first), *tokenizer.encode("\U0001f642").ids, tokenizer.token_to_id(end)]
    pieces = [piece(checkpoint, token) for token in ids]
    word = " " + first[1:]
    written = b"".join(bytes(one.get("bytes") or one["token"].encode()) for one in pieces)
    assert written.decode() == f"{word}\U0001f642{end}"
    assert (pieces[0]["token"], pieces[-1]["token"]) == (word, end)
    assert any("bytes" in one for one in pieces)
    told = described(checkpoint, [Likely(token, -0.123456789) for token in (ids[0], 5, 9999)])
    assert (told["id"], told["token"], told["logprob"]) == (ids[0], word, -0.123457)
    assert [one["id"] for one in told["top"]] == [5, 9999]
    assert told["top"][1]["token"] == "", "a vocabulary may be larger than its tokenizer"


class Counting:
    """Counts the tokens that a tokenizer decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, 0

    def decode(self, tokens, **options):
        self.decoded += len(tokens)
        return self.tokenizer.decode(tokens, **options)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_each_token_is_decoded_with_few_others(name):
    counting = Counting(TOKENIZERS[name])
    written, tokens = WrittenText(SimpleNamespace(has_tokenizer=True, tokenizer=counting)), []
    for token in TOKENIZERS[name].encode("The he\u6f22" * 200).ids:
        tokens.append(token)
        written.extend_to(tokens)
    assert counting.decoded < 12 * len(tokens)
