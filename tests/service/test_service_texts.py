"""Long texts: what is read of them, and that it gives the tokens of the whole."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.errors import RequestError
from hepti_mqtt.service import requests
from hepti_mqtt.service.requests import Characters, prepare

WORDS = st.sampled_from(
    ["the", "sensor", "warm", " ", "  ", "\n", ",", "?!", "x" * 120, "深", "e\u0301", "\u0301", "[MASK]"]
)


@pytest.fixture(scope="module", params=["tiny-minilm", "tiny-roberta", "tiny-albert"])
def checkpoint(request, tmp_path_factory):
    with Checkpoint.open(make_model(request.param, tmp_path_factory.mktemp("models") / "m", seed=1)) as opened:
        yield opened


@settings(max_examples=150, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=400).map("".join).filter(str.strip))
def test_a_long_text_gives_the_first_tokens_of_the_whole(checkpoint, text):
    longest = checkpoint.spec.reads.longest
    room = longest - checkpoint.tokenizer.num_special_tokens_to_add(False)
    whole = checkpoint.tokenizer.encode(text, add_special_tokens=False)
    whole.truncate(room)
    ids = checkpoint.tokenizer.post_process(whole).ids
    if not ids:
        return
    assert prepare(checkpoint, {"text": text, "truncate": True}).inputs.tolist() == ids


@pytest.mark.parametrize("shift", range(16))
def test_a_special_token_across_the_border_is_not_taken_apart(checkpoint, shift, monkeypatch):
    """Cut in two it would be several words."""
    longest = checkpoint.spec.reads.longest
    special = "<|the|door|>"
    checkpoint.tokenizer.add_special_tokens([special])
    monkeypatch.setattr(requests, "CHARACTERS_PER_TOKEN", 2)
    text = "," * (longest - 3) + " " * (longest - shift) + special + " the" * 100
    ids = checkpoint.tokenizer.encode(text, add_special_tokens=False).ids
    found = requests._beginning(checkpoint.tokenizer, "text", text, longest, Characters()).ids
    assert len(found) > longest
    assert found[:longest] == ids[:longest]


def read_of(checkpoint, text, monkeypatch):
    """Return how many characters of a text the tokenizer is given."""
    given = []
    monkeypatch.setattr(Characters, "take", lambda self, count: given.append(count))
    prepare(checkpoint, {"text": text, "truncate": True})
    return sum(given)


def test_of_a_text_of_megabytes_little_is_read(checkpoint, monkeypatch):
    text = "the sensor is warm, " * 500_000
    assert read_of(checkpoint, text, monkeypatch) < 100 * checkpoint.spec.reads.longest


def test_a_text_too_long_without_truncation_is_hardly_read(checkpoint, monkeypatch):
    given = []
    monkeypatch.setattr(Characters, "take", lambda self, count: given.append(count))
    with pytest.raises(RequestError, match=r'more than \d+ tokens.*"truncate": true'):
        prepare(checkpoint, {"text": "the sensor is warm, " * 500_000})
    assert sum(given) < 100 * checkpoint.spec.reads.longest


def test_a_text_of_few_tokens_is_read_as_far_as_the_limit(checkpoint):
    """One word without an end: it has no tokens until all of it is read."""
    fits = "x" * (requests.MAX_CHARACTERS // 4)
    assert prepare(checkpoint, {"text": fits, "truncate": True}).shape.tokens > 0
    with pytest.raises(RequestError, match="characters of one request"):
        prepare(checkpoint, {"text": "x" * requests.MAX_CHARACTERS, "truncate": True})


def test_the_limit_is_that_of_all_texts_together(checkpoint):
    one = "x" * (requests.MAX_CHARACTERS // 8)
    assert requests.CHARACTERS_PER_TOKEN * checkpoint.spec.reads.longest < len(one)
    prepare(checkpoint, {"text": one, "truncate": True})
    with pytest.raises(RequestError, match="characters of one request"):
        prepare(checkpoint, {"texts": [one] * 10, "truncate": True})


def ids_of(path, text, **request):
    """Return the ids of a text for a tokenizer to which blanks and capitals matter, as RoBERTa's."""
    with Checkpoint.open(path) as opened:
        opened.tokenizer.normalizer = normalizers.Sequence([])
        opened.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return prepare(opened, {"text": text, **request} if text else request).inputs.tolist()


def test_sentence_models_get_texts_as_sentence_transformers_hands_them_over(tmp_path):
    path = make_model("tiny-minilm", tmp_path / "m", seed=1)
    assert ids_of(path, " \n the ") == ids_of(path, "the")
    assert ids_of(path, "The") != ids_of(path, "the")
    (path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    assert ids_of(path, "The ") == ids_of(path, "the")


def test_the_prompt_that_a_sentence_model_names_comes_before_every_text(tmp_path):
    path = make_model("tiny-minilm", tmp_path / "m", seed=1)
    want, alone = ids_of(path, "warm the door"), ids_of(path, "the door")
    options = {"prompts": {"query": " warm ", "document": ""}, "default_prompt_name": "query"}
    file = path / "config_sentence_transformers.json"
    file.write_text(json.dumps(options))
    assert ids_of(path, "the door") == want
    assert ids_of(path, None, ids=[2, 3]) == [2, 3]
    file.write_text(json.dumps({**options, "default_prompt_name": None}))
    assert ids_of(path, "the door") == alone


def test_other_models_get_texts_as_they_are(tmp_path):
    path = make_model("tiny-bert", tmp_path / "m", seed=1)
    assert ids_of(path, " the") != ids_of(path, "the")


def test_a_model_that_reads_the_ends_of_long_texts_is_not_given_their_beginnings(tmp_path):
    path = make_model("tiny-minilm", tmp_path / "m", seed=1)
    (path / "tokenizer_config.json").write_text(json.dumps({"truncation_side": "left"}))
    assert ids_of(path, "the", truncate=True)
    with pytest.raises(RequestError, match="truncation_side"):
        ids_of(path, "the," * 200, truncate=True)
