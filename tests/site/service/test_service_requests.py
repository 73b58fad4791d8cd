"""Requests: the envelope, texts and token ids, how they are split into runs, and refusals."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import worst_request
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import run_python
from service_support import encoded, noise, run
from tokenizers import normalizers, pre_tokenizers

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.checkpoint.make import write_tokenizer
from hepti_mqtt.core.errors import ModelError, RequestError
from hepti_mqtt.models.shapes import ImageBatch, TokenBatch
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.service import envelope as env
from hepti_mqtt.service import requests
from hepti_mqtt.service import texts as service_texts
from hepti_mqtt.service.answers import decode_output
from hepti_mqtt.service.detokenizer import WrittenText
from hepti_mqtt.service.requests import MAX_SEQUENCES, ModelInput, read_input, split_into_batches
from hepti_mqtt.service.texts import MAX_CHARACTERS, CharacterBudget

LIMIT = 20

WRONG = {
    "id": (5, "Not A Topic", "a/b"),
    "deadline_ms": (0, -1, "soon", True, float("inf"), float("nan"), 10**400),
    "reply_to": (5,),
    "strategy": ("magic", 5, ["row"], {}),
    "options": ("kv", {"variant": "nothing"}),
    "devices": ([], "a,b", ["UPPER"], [1], [["a"]]),
    "wire": ("f64", ["f32"]),
    "objective": ("speed", ["latency"]),
    "accuracy": (0, 1.5, True, "1e-3"),
    "weights": ("int4", ["f32"]),
}

WRONG_TOGETHER = (
    {"strategy": "block", "options": {"variant": "kv"}},
    {"strategy": "two_d", "options": {"x": "3x2"}},
    {"strategy": "pipeline", "options": {"goal": ["latency"]}},
    {"strategy": "pipeline", "options": {"goal": "latency", "micro": "2"}},
    {"accuracy": 1e-3, "wire": "f32"},
)

BODIES = {
    "text": ("", " \n", 5, None, "bad \ud800 text"),
    "texts": ([], "a", ["a", 3], ["a", ""], ["a"] * (MAX_SEQUENCES + 1), ["a"] * 17 + [" "] + ["b"] * 32),
    "ids": ([], [[]], [[5], 6], {"a": 1}, [211], [-1], [2**70]),
    "image": ("aGVsbG8=",),
    "images": (["aGVsbG8="],),
}

OPTIONS = {"truncate": ("yes",), "want": ("all", ["task"]), "top_k": (0, 1001, True), "temperature": (1,)}
OWN = Pins("row", {"variant": "kv"}, ("a", "b"), "f16")


def test_the_rest_is_the_models_business():
    parts = env.split_envelope({"id": "x1", "deadline_ms": 1500, "text": "hello", "top_k": 3, "reply_to": "t"})
    assert (parts.id, parts.deadline_s, parts.reply_to) == ("x1", 1.5, "t")
    assert parts.body == {"text": "hello", "top_k": 3}
    assert env.request_pins({"text": "hello"}, OWN) is None


def test_pins_that_a_request_leaves_out_are_the_planners():
    assert env.request_pins({"strategy": "auto"}, OWN) == Pins(None, {}, ("a", "b"), "f16")
    assert env.request_pins({"devices": ["b"]}, OWN) == Pins("row", {"variant": "kv"}, ("b",), "f16")
    assert env.request_pins({"objective": "memory"}, OWN) == replace(OWN, objective="memory")
    assert env.request_pins({"wire": "i8"}, OWN) == Pins("row", {"variant": "kv"}, ("a", "b"), "i8")
    assert env.request_pins({"weights": "w8a8"}, OWN) == Pins("row", {"variant": "kv"}, ("a", "b"), "f16", "w8a8")
    budget = Pins("row", {"variant": "kv"}, ("a", "b"), accuracy=1e-3)
    assert env.request_pins({"accuracy": 1e-3}, OWN) == budget, "the wire is the planner's choice then"
    assert env.request_pins({"devices": ["a", "b"]}, budget) == budget
    assert env.request_pins({"wire": "i8"}, budget) == Pins("row", {"variant": "kv"}, ("a", "b"), "i8")
    block = {"strategy": "block", "devices": ["b", "a", "b"]}
    equal = Pins("block", {}, ("a", "b"), "f16")
    assert env.request_pins(block, OWN) == equal, "names in one order, so that equal pins are equal"
    assert not env.split_envelope(block).body
    assert Pins(wire="f16").is_unpinned
    assert not env.request_pins({"options": {"variant": "heads"}}, Pins()).is_unpinned, "a variant alone is a pin"


def test_what_is_wrong_is_named():
    for wrong in (*({key: value} for key, values in WRONG.items() for value in values), *WRONG_TOGETHER):
        with pytest.raises(RequestError) as caught:
            env.request_pins({"text": "x", **wrong}, env.split_envelope({"text": "x", **wrong}) and Pins())
        assert any(key in str(caught.value) for key in (*wrong, "options")), wrong


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_request_error(payload):
    try:
        data = env.parse(payload)
    except RequestError:
        return
    assert isinstance(data, dict)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("id", "deadline_ms", "reply_to", *env.PINS), JSON)))
def test_any_values_are_accepted_or_refused_in_words(data):
    try:
        parts = env.split_envelope(env.parse(json.dumps(data).encode()))
        env.request_pins(data, OWN)
    except RequestError:
        return
    assert parts.body == {}


def test_deep_and_huge_requests_are_refused_before_they_are_parsed(monkeypatch):
    monkeypatch.setattr(env, "MAX_ITEMS", 5)
    assert env.parse(b'{"ids": [1, 2, 3, 4]}')
    with pytest.raises(RequestError):
        env.parse(b"[]")
    monkeypatch.setattr(env.json, "loads", lambda _: pytest.fail("parsed"))
    for payload in (b"[" * 100_000, b'{"ids": [1, 2, 3, 4, 5]}'):
        with pytest.raises(RequestError):
            env.parse(payload)
    monkeypatch.setattr(env, "MAX_REQUEST_BYTES", 10)
    with pytest.raises(RequestError):
        env.parse(b'{"text": "hello"}')


def test_requests_that_ask_the_same_have_one_digest_and_no_others_do():
    long, other = "a" * 5000, "a" * 4999 + "b"
    requests = [
        {"text": long},
        {"text": other},
        {"text": len(long)},
        {"texts": [long]},
        {"text": long, "image": other},
        {"text": long + "a", "image": other[1:]},
        {"text": "\ud800" * 5000},
    ]
    assert len({env.digest(data) for data in requests}) == len(requests)
    again = {"image": other, "id": "x", "text": long}
    assert env.digest(again) == env.digest(requests[4])
    assert requests[4] == {"text": long, "image": other}, "and nothing of it has changed"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    kinds = ("tiny-minilm", "tiny-bert-classifier", "tiny-bert-mlm", "tiny-roberta-mlm", "tiny-vit-classifier")
    with contextlib.ExitStack() as stack:
        yield {kind: stack.enter_context(Checkpoint.open(make_model(kind, root / kind, seed=1))) for kind in kinds}


def one_of(kind):
    """Return a fixture: one of the opened models."""
    return pytest.fixture(scope="module")(lambda opened: opened[kind])


text, mlm, vision = map(one_of, ("tiny-minilm", "tiny-bert-mlm", "tiny-vit-classifier"))


def assert_refused(checkpoint, *requests):
    for request in requests:
        with pytest.raises(RequestError):
            read_input(checkpoint, request)


def test_text_and_its_ids_get_the_same_embedding(text):
    ids = text.tokenizer.encode("the sensor is warm").ids
    first = run(text, {"text": "the sensor is warm"})
    assert len(first["embedding"]) == 32
    assert run(text, {"ids": ids}) == first
    assert run(text, {"ids": [ids]}) == {"results": [first]}
    assert run(text, {"text": "the sensor is cold"}) != first


def test_tokens_are_packed_with_the_tokenizers_markers(text):
    prepared = read_input(text, {"texts": ["the", "the the"], "id": "a", "deadline_ms": 5, "reply_to": "x"})
    start, end = (text.tokenizer.token_to_id(t) for t in ("[CLS]", "[SEP]"))
    the = text.tokenizer.token_to_id("the")
    assert prepared.inputs.tolist() == [start, the, end, start, the, the, end]
    assert prepared.inputs.dtype == np.int32
    assert prepared.shape.sizes == (3, 4)


def test_labels_come_with_softmax_scores_best_first(opened):
    checkpoint = opened["tiny-bert-classifier"]
    prepared = read_input(checkpoint, {"texts": ["door", "window"], "top_k": 3})
    logits = np.array([[0, 1, 2, -1, 2], [5, 0, 0, 0, 0]], np.float32)
    first, second = decode_output(checkpoint, prepared, logits)["results"]
    assert [label["label"] for label in first["labels"]] == ["LABEL_2", "LABEL_4", "LABEL_1"]
    total = sum(math.exp(v) for v in logits[0])
    assert [label["score"] for label in first["labels"]] == pytest.approx([math.exp(v) / total for v in (2, 2, 1)])
    assert second["labels"][0]["label"] == "LABEL_0"
    everything = run(checkpoint, {"text": "door", "top_k": 1000})["labels"]
    assert sum(label["score"] for label in everything) == pytest.approx(1)


@pytest.mark.parametrize(
    ("problem", "score"),
    [("multi_label_classification", lambda v: 1 / (1 + math.exp(-v))), ("regression", lambda v: v)],
)
def test_scores_follow_the_problem_that_the_model_was_trained_for(tmp_path, problem, score):
    path = make_model("tiny-bert-classifier", tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "problem_type": problem}))
    with Checkpoint.open(path) as checkpoint:
        prepared = read_input(checkpoint, {"text": "door"})
        logits = np.array([[3, -1, 2, 0, 1]], np.float32)
        scores = [label["score"] for label in decode_output(checkpoint, prepared, logits)["labels"]]
    assert scores == pytest.approx([score(v) for v in (3, 2, 1, 0, -1)])


@pytest.mark.parametrize("kind", ["tiny-bert-mlm", "tiny-roberta-mlm"])
def test_every_mask_gets_tokens_at_its_place(opened, kind):
    checkpoint = opened[kind]
    mask = checkpoint.tokenizer.id_to_token(checkpoint.mask_id)
    reply = run(checkpoint, {"texts": [f"the {mask} is {mask}", f"{mask}"], "top_k": 2})
    first, second = (result["masks"] for result in reply["results"])
    assert [m["position"] for m in first] == [2, 4]
    assert [m["position"] for m in second] == [1]
    for blank in (*first, *second):
        assert len(blank["tokens"]) == 2
        for token in blank["tokens"]:
            assert checkpoint.tokenizer.token_to_id(token["token"]) == token["id"]
        assert blank["tokens"][0]["score"] >= blank["tokens"][1]["score"] > 0


@pytest.mark.parametrize(
    ("request_", "places"),
    [({"texts": ["the door", "the [MASK]"]}, [[], [2]]), ({"ids": [[7, 8], ["mask", 9]]}, [[], [0]])],
    ids=["text", "first place"],
)
def test_a_mask_belongs_to_its_own_sequence(mlm, request_, places):
    ids = request_.get("ids")
    given = {"ids": [[mlm.mask_id if i == "mask" else i for i in one] for one in ids]} if ids else request_
    assert [[m["position"] for m in result["masks"]] for result in run(mlm, given)["results"]] == places


KEYS = st.sampled_from(["text", "texts", "ids", "image", "images", "truncate", "want", "top_k"])


@settings(deadline=None)
@given(
    st.dictionaries(KEYS, JSON, max_size=3) | JSON,
    st.sampled_from(["tiny-minilm", "tiny-bert-mlm", "tiny-vit-classifier"]),
)
def test_any_json_is_prepared_or_refused(opened, request_, model):
    try:
        prepared = read_input(opened[model], request_)
    except RequestError:
        return
    assert prepared.shape.size == sum(prepared.shape.sizes) > 0


def test_a_masked_token_request_needs_a_mask(mlm):
    assert_refused(mlm, {"text": "the door"}, {"text": "the " * 60 + "[MASK]", "truncate": True})
    assert read_input(mlm, {"ids": [7, mlm.mask_id]}).shape.mask_rows == (1,)


def test_texts_for_an_image_model_are_refused(vision):
    picture = {"image": encoded(noise(8, 8)), "truncate": True}
    assert_refused(vision, {"text": "a"}, {"texts": ["a"]}, {"ids": [1]}, picture)


def test_empty_texts_may_be_zeros_in_their_places(text):
    texts = ["", "the door", " ", "warm", "\n"]
    prepared = read_input(text, {"texts": texts, "empty": "zero"})
    assert prepared.shape == read_input(text, {"texts": ["the door", "warm"]}).shape
    output = np.arange(64, dtype=np.float32).reshape(2, 32)
    results = [r["embedding"] for r in decode_output(text, prepared, output)["results"]]
    assert [results[1], results[3]] == output.tolist()
    assert results[0] == results[2] == results[4] == [0.0] * 32


def test_a_tokenizer_of_another_model_is_an_error(tmp_path):
    path = make_model("tiny-bert", tmp_path / "m")
    write_tokenizer(path / "tokenizer.json", 300)
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError):
        read_input(checkpoint, {"text": checkpoint.tokenizer.id_to_token(250)})


def test_a_text_of_which_nothing_is_read_is_no_text(text):
    """The tokenizer's own tokens alone would give an embedding, too."""
    assert_refused(text, *({"text": value} for value in ("\x00", "\u202e\u200d", "\x01 \x02")))


def test_the_numbers_of_an_answer_are_bounded(mlm, monkeypatch):
    monkeypatch.setattr(requests, "MAX_OUTPUT", 32 * 10)
    assert read_input(mlm, {"ids": [7] * 10, "want": "hidden"})
    assert_refused(mlm, {"ids": [7] * 11, "want": "hidden"}, {"text": "[MASK] [MASK]"})


SPECIAL = "<|the|door|>"  # its halves would be several words
WORDS = st.sampled_from(
    ["the", "sensor", "warm", " ", "  ", "\n", ",", "?!", "x" * 120, "深", "e\u0301", "\u0301", "[MASK]", SPECIAL]
)


@pytest.fixture(scope="module", params=["tiny-minilm", "tiny-roberta", "tiny-albert"])
def reader(request, tmp_path_factory):
    path = make_model(request.param, tmp_path_factory.mktemp("models") / "m", seed=1)
    file = path / "tokenizer.json"
    file.write_text(file.read_text().replace('"##q"', f'"{SPECIAL}"'))
    with Checkpoint.open(path) as opened:
        opened.tokenizer.add_tokens([SPECIAL])
        yield opened


def first_tokens(reader, text):
    whole = reader.tokenizer.encode(text, add_special_tokens=False)
    whole.truncate(reader.spec.input_spec.longest - reader.tokenizer.num_special_tokens_to_add(False))
    return reader.tokenizer.post_process(whole).ids if whole.ids else []


@settings(max_examples=150, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=400).map("".join).filter(str.strip))
def test_a_long_text_gives_the_first_tokens_of_the_whole(reader, text):
    if ids := first_tokens(reader, text):
        assert read_input(reader, {"text": text, "truncate": True}).inputs.tolist() == ids


@pytest.mark.parametrize("shift", range(16))
def test_a_special_token_across_the_border_is_not_cut(reader, shift, monkeypatch):
    longest = reader.spec.input_spec.longest
    monkeypatch.setattr(service_texts, "CHARACTERS_PER_TOKEN", 2)
    text = "," * (longest - 3) + " " * (longest - shift) + SPECIAL + " the" * 100
    assert read_input(reader, {"text": text, "truncate": True}).inputs.tolist() == first_tokens(reader, text)


def test_too_long_is_an_error_unless_truncated(text):
    long = "the " * 39  # 41 tokens with [CLS] and [SEP]
    for request, named in (({"text": long}, "text"), ({"texts": ["a", long]}, "texts[1]"), ({"ids": [7] * 41}, "ids")):
        with pytest.raises(RequestError) as caught:
            read_input(text, request)
        assert named in str(caught.value)
        assert "40" in str(caught.value)
    cut = read_input(text, {"text": long, "truncate": True})
    ends = text.tokenizer.token_to_id("[CLS]"), text.tokenizer.token_to_id("[SEP]")
    assert (cut.shape.sizes, cut.inputs[0], cut.inputs[-1]) == ((40,), *ends)
    assert read_input(text, {"ids": [7] * 41, "truncate": True}).shape.sizes == (40,)
    assert read_input(text, {"ids": [7] * 40}).shape.sizes == (40,)


@pytest.mark.parametrize("truncate", [True, False])
def test_of_a_text_of_megabytes_little_is_tokenised(reader, monkeypatch, truncate):
    taken = []
    monkeypatch.setattr(CharacterBudget, "take", lambda self, count: taken.append(count))
    with contextlib.nullcontext() if truncate else pytest.raises(RequestError):
        read_input(reader, {"text": "the sensor is warm, " * 500_000, "truncate": truncate})
    assert sum(taken) < 100 * reader.spec.input_spec.longest


def test_a_text_of_few_tokens_is_read_up_to_the_limit_of_all_texts_together(text):
    """A word without an end has no tokens until all of it is read."""
    fits = "x" * (service_texts.MAX_CHARACTERS // 8)
    assert service_texts.CHARACTERS_PER_TOKEN * text.spec.input_spec.longest < len(fits)
    assert read_input(text, {"text": fits, "truncate": True}).shape.size > 0
    longer = ({"text": "x" * service_texts.MAX_CHARACTERS}, {"texts": [fits] * 10})
    assert_refused(text, *({**request, "truncate": True} for request in longer))


def ids_of(path, text, **request):
    """Return the ids of a text for a tokenizer to which blanks and capitals matter, as RoBERTa's."""
    with Checkpoint.open(path) as opened:
        opened.tokenizer.normalizer = normalizers.Sequence([])
        opened.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return read_input(opened, {"text": text, **request} if text else request).inputs.tolist()


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


@pytest.mark.parametrize("file", ["tokenizer_config.json", "tokenizer.json"])
def test_of_long_texts_a_model_reads_the_end_if_its_files_say_so(tmp_path, file):
    path = make_model("tiny-minilm", tmp_path / "m", seed=1)
    cut = {"truncation": {"direction": "Left", "max_length": 9, "strategy": "LongestFirst", "stride": 0}}
    data = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps(data | (cut if file == "tokenizer.json" else {"truncation_side": "left"})))
    with Checkpoint.open(path) as opened:
        text, limit = "the " * 100 + "door of the sensor", opened.spec.input_spec.longest
        ids = read_input(opened, {"text": text, "truncate": True}).inputs.tolist()
        assert ids == [ids[0], *opened.tokenizer.encode(text, add_special_tokens=False).ids[2 - limit :], ids[-1]]


@pytest.mark.parametrize("kind", ["tiny-bert", "tiny-bert-mlm"])
def test_control_tokens_in_a_text_are_text_but_for_the_mask(tmp_path, kind):
    with Checkpoint.open(make_model(kind, tmp_path / "m")) as opened:
        number = opened.tokenizer.token_to_id
        for token in ("[CLS]", "[SEP]", "[PAD]", "[MASK]"):
            given = {"text": f"a {token} b", "want": "hidden"}
            token_ids = read_input(opened, given).inputs.tolist()[1:-1]
            assert (number(token) in token_ids) == (token == "[MASK]" and kind.endswith("mlm"))
            assert len(token_ids) > 3 or number(token) in token_ids


def test_a_control_token_that_would_be_one_is_refused(tmp_path):
    """Of a vocabulary that has it among its words."""
    path = make_model("tiny-bert", tmp_path / "m")
    data = json.loads((path / "tokenizer.json").read_text())
    data |= {"pre_tokenizer": {"type": "WhitespaceSplit"}, "normalizer": None}
    (path / "tokenizer.json").write_text(json.dumps(data))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with Checkpoint.open(path) as opened:
        assert_refused(opened, {"text": "a [SEP] b"})


@pytest.mark.parametrize(
    ("kind", "read", "refused"),
    [
        ("tiny-bert", [[2, 9, 3]], [[2, 9, 3, 9, 3], [2, 9, 3, 0, 0]]),
        ("tiny-distilbert", [[2, 9, 3, 9, 3], [2, 9, 3, 0, 0]], []),
        ("tiny-roberta", [[0, 9, 2]], [[0, 9, 2, 1]]),
    ],
    ids=["token types", "no token types", "padding that moves the others"],
)
def test_ids_of_two_texts_and_of_padding_are_refused_where_they_change_the_answer(tmp_path, kind, read, refused):
    with Checkpoint.open(make_model(kind, tmp_path / "m")) as opened:
        for ids in read:
            assert read_input(opened, {"ids": ids}).shape.sizes == (len(ids),)
        assert_refused(opened, *({"ids": ids} for ids in refused))


@given(st.lists(st.integers(1, LIMIT), min_size=1, max_size=30), st.data())
def test_chunks_hold_the_whole_request_in_order(lengths, data):
    total = sum(lengths)
    rows = tuple(sorted(data.draw(st.sets(st.integers(0, total - 1), max_size=8))))
    inputs = np.arange(total, dtype=np.int32)
    chunks = split_into_batches(ModelInput(TokenBatch(tuple(lengths), "task", rows), inputs, True, 5), LIMIT)
    assert [n for c in chunks for n in c.shape.sizes] == lengths
    assert np.concatenate([c.inputs for c in chunks]).tolist() == list(range(total))
    assert all(c.shape.size == len(c.inputs) <= LIMIT and c.shape.want == "task" for c in chunks)
    # What a mask row points at is the same value in its chunk.
    assert [int(c.inputs[r]) for c in chunks for r in c.shape.mask_rows] == list(rows)
    # Greedy: the first sequence of each chunk did not fit into the one before.
    for before, after in pairwise(chunks):
        assert before.shape.size + after.shape.sizes[0] > LIMIT


@given(st.integers(1, 9), st.integers(1, 4))
def test_pictures_are_cut_along_the_batch(count, fit):
    pixels = np.arange(count * 12, dtype=np.uint8).reshape(count, 3, 2, 2)
    chunks = split_into_batches(ModelInput(ImageBatch(count, 5), pixels, True, 5), 5 * fit)
    assert all(len(c.inputs) == len(c.shape.sizes) <= fit for c in chunks)
    np.testing.assert_array_equal(np.concatenate([c.inputs for c in chunks]), pixels)


def test_a_sequence_that_fits_no_run_is_an_error():
    with pytest.raises(ValueError):
        split_into_batches(ModelInput(TokenBatch((3, LIMIT + 1)), np.zeros(LIMIT + 4, np.int32), True, 5), LIMIT)


MOST_MB = 256
USUAL = ("wide-characters", "transparent")
KINDS = [kind if kind in USUAL else pytest.param(kind, marks=pytest.mark.nightly) for kind in worst_request.WORST]


@pytest.mark.skipif(sys.platform != "linux", reason="what was in use at the most is read from /proc")
@pytest.mark.parametrize("kind", KINDS)
def test_the_worst_request_is_read_or_refused_in_bounded_memory(kind, tmp_path):
    usage = json.loads(run_python(worst_request.__file__, kind, tmp_path / "model"))
    assert usage["said"].startswith("job of ") or '"code": "bad_request"' in usage["said"]
    assert usage["mb"] <= MOST_MB
    assert usage["tokenised"] <= MAX_CHARACTERS
    words = worst_request.WORST[kind][0] == "text" and kind not in ("ids", "objects")
    assert bool(usage["tokenised"]) == words, "nothing is tokenised but texts, and these are"


BODIES_WRONG = (
    *(({key: value}, key) for key, values in BODIES.items() for value in values),
    *(({"text": "a", key: value}, key) for key, values in OPTIONS.items() for value in values),
    *((wrong, "JSON") for wrong in ([], None, "text")),
    ({}, "text"),
    ({"text": "a", "texts": ["a"]}, "texts"),
    ({"text": "a"} | {f"k{i}": 1 for i in range(10)}, "k7"),
    ({"texts": ["a"] * 17 + [" "] + ["b"] * 32}, "texts[17]"),
    *(({"ids": [2, 3, wrong]}, "ids[2]") for wrong in (float("nan"), 1.0, "7", None, True)),
    ({"ids": [[2, 3], [2, 3], [2, [7], 3]]}, "ids[2]"),
    ({"texts": ["a", ""], "empty": "skip"}, "empty"),
    ({"texts": ["", " "], "empty": "zero"}, "texts[0]"),
    ({"texts": ["a", ""], "empty": "zero", "want": "hidden"}, "empty"),
)


def test_wrong_requests_name_what_is_wrong(text):
    for request, named in BODIES_WRONG:
        with pytest.raises(RequestError) as caught:
            read_input(text, request)
        assert named in str(caught.value), request


def test_without_a_tokenizer_token_ids_serve_where_they_are_all_that_is_needed(tmp_path):
    masks, decoder, plain = (make_model(kind, tmp_path / kind) for kind in ("tiny-bert-mlm", "tiny-gpt2", "tiny-bert"))
    for path in (masks, decoder, plain):
        (path / "tokenizer.json").unlink()
    with Checkpoint.open(masks) as checkpoint:
        for request in ({"text": "a [MASK]"}, {"ids": [1, 4]}):
            with pytest.raises(ModelError):
                read_input(checkpoint, request)
    for path in (decoder, plain):
        with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError):
            read_input(checkpoint, {"text": "a"})
    with Checkpoint.open(decoder) as checkpoint:
        prepared = read_input(checkpoint, {"ids": [1, 2], "max_new_tokens": 2})
        assert decode_output(checkpoint, prepared, np.array([7, 8])) == {"ids": [7, 8], "text": "", "finish": "length"}
        assert WrittenText(checkpoint).extend_to((7, 8)) == ""
        longest = checkpoint.spec.input_spec.longest
        assert_refused(checkpoint, {"ids": [1] * (longest - 3), "max_new_tokens": 5}, {"ids": [1] * longest})
    with Checkpoint.open(plain) as checkpoint:
        assert read_input(checkpoint, {"ids": [1, 2]}).shape.size == 2
