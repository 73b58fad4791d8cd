from __future__ import annotations

import base64
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service_support import encoded, noise, run

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.errors import ModelError, RequestError, WireError
from hepti_mqtt.service import requests
from hepti_mqtt.service.answers import answer, piece
from hepti_mqtt.service.requests import MAX_SEQUENCES, prepare


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    some = {}
    for kind in ("tiny-minilm", "tiny-bert-classifier", "tiny-bert-mlm", "tiny-roberta-mlm", "tiny-vit-classifier"):
        some[kind] = Checkpoint.open(make_model(kind, root / kind, seed=1))
    yield some
    for checkpoint in some.values():
        checkpoint.close()


@pytest.fixture(scope="module")
def text(opened):
    return opened["tiny-minilm"]


@pytest.fixture(scope="module")
def mlm(opened):
    return opened["tiny-bert-mlm"]


@pytest.fixture(scope="module")
def vision(opened):
    return opened["tiny-vit-classifier"]


def test_text_and_its_ids_get_the_same_embedding(text):
    ids = text.tokenizer.encode("the sensor is warm").ids
    first = run(text, {"text": "the sensor is warm"})
    assert len(first["embedding"]) == 32
    assert run(text, {"ids": ids}) == first
    assert run(text, {"ids": [ids]}) == {"results": [first]}
    assert run(text, {"text": "the sensor is cold"}) != first


def test_several_texts_get_one_result_each_in_order(text):
    texts = ["warm", "cold light off", "door"]
    results = run(text, {"texts": texts})["results"]
    assert len(results) == 3
    for one, result in zip(texts, results, strict=True):
        np.testing.assert_allclose(run(text, {"text": one})["embedding"], result["embedding"], atol=1e-6)


def test_tokens_are_packed_with_the_tokenizers_markers(text):
    prepared = prepare(text, {"texts": ["the", "the the"], "id": "a", "deadline_ms": 5, "reply_to": "x"})
    start, end = (text.tokenizer.token_to_id(t) for t in ("[CLS]", "[SEP]"))
    the = text.tokenizer.token_to_id("the")
    assert prepared.inputs.tolist() == [start, the, end, start, the, the, end]
    assert prepared.inputs.dtype == np.int32
    assert prepared.shape.lengths == (3, 4)


def test_labels_come_with_softmax_scores_best_first(opened):
    checkpoint = opened["tiny-bert-classifier"]
    prepared = prepare(checkpoint, {"texts": ["door", "window"], "top_k": 3})
    logits = np.array([[0, 1, 2, -1, 2], [5, 0, 0, 0, 0]], np.float32)
    first, second = answer(checkpoint, prepared, logits)["results"]
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
        prepared = prepare(checkpoint, {"text": "door"})
        logits = np.array([[3, -1, 2, 0, 1]], np.float32)
        scores = [label["score"] for label in answer(checkpoint, prepared, logits)["labels"]]
    assert scores == pytest.approx([score(v) for v in (3, 2, 1, 0, -1)])


@pytest.mark.parametrize("kind", ["tiny-bert-mlm", "tiny-roberta-mlm"])
def test_every_mask_gets_tokens_at_its_place(opened, kind):
    checkpoint = opened[kind]
    mask = checkpoint.tokenizer.id_to_token(checkpoint.mask_id)
    reply = run(checkpoint, {"texts": [f"the {mask} is {mask}", f"{mask}"], "top_k": 2})
    first, second = (result["masks"] for result in reply["results"])
    assert [m["position"] for m in first] == [2, 4]
    assert [m["position"] for m in second] == [1]
    for found in (*first, *second):
        assert len(found["tokens"]) == 2
        for token in found["tokens"]:
            assert checkpoint.tokenizer.token_to_id(token["token"]) == token["id"]
        assert found["tokens"][0]["score"] >= found["tokens"][1]["score"] > 0


def test_a_sequence_without_mask_beside_one_with_it_gets_no_masks(mlm):
    reply = run(mlm, {"texts": ["the door", "the [MASK]"]})
    assert [len(result["masks"]) for result in reply["results"]] == [0, 1]


def test_a_mask_in_the_first_place_belongs_to_its_own_sequence(mlm):
    reply = run(mlm, {"ids": [[7, 8], [mlm.mask_id, 9]]})
    assert [[m["position"] for m in result["masks"]] for result in reply["results"]] == [[], [0]]


def test_hidden_states_come_as_raw_floats(mlm):
    reply = run(mlm, {"texts": ["the door", "warm"], "want": "hidden"})
    assert (reply["dtype"], reply["shape"]) == ("f32", [7, 32])
    values = np.frombuffer(base64.b64decode(reply["base64"]), "<f4").reshape(7, 32)
    prepared = prepare(mlm, {"texts": ["the door", "warm"], "want": "hidden"})
    hidden, _ = models.reference(mlm.spec, mlm.tensors(), prepared.inputs, prepared.shape)
    np.testing.assert_array_equal(values, hidden)


def test_too_long_is_an_error_unless_truncated(text):
    long = "the " * 100
    with pytest.raises(RequestError, match=r"more than 40 tokens.*truncate"):
        prepare(text, {"text": long})
    with pytest.raises(RequestError, match=r"texts\[1\] has more than 40 tokens"):
        prepare(text, {"texts": ["a", long]})
    with pytest.raises(RequestError, match="more than 40 tokens"):
        prepare(text, {"ids": [7] * 41})
    cut = prepare(text, {"text": long, "truncate": True})
    assert cut.shape.lengths == (40,)
    ends = text.tokenizer.token_to_id("[CLS]"), text.tokenizer.token_to_id("[SEP]")
    assert (cut.inputs[0], cut.inputs[-1]) == ends
    assert prepare(text, {"ids": [7] * 41, "truncate": True}).shape.lengths == (40,)
    assert prepare(text, {"ids": [7] * 40}).shape.lengths == (40,)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ([], "JSON object"),
        (None, "JSON object"),
        ("text", "JSON object"),
        ({}, "exactly one of text, texts, ids"),
        ({"text": "a", "texts": ["a"]}, "text and texts"),
        ({"text": "a", "temperature": 1}, "unknown key 'temperature'"),
        ({"text": "a", "temperature": 1, "beams": 2}, r"unknown keys 'beams', 'temperature'; .*strategy.*wire"),
        ({"text": "a"} | {f"k{i}": 1 for i in range(10)}, r"'k0', .*'k7' and 2 more;"),
        ({"texts": ["a"] * 17 + [" "] + ["b"] * 32}, r"texts\[17\] is empty"),
        ({"texts": ["a", ""], "empty": "skip"}, r"""empty must be "error" or "zero", not 'skip'"""),
        ({"texts": ["", " "], "empty": "zero"}, r"texts\[0\] is empty"),
        ({"texts": ["a", ""], "empty": "zero", "want": "hidden"}, "for embeddings"),
        ({"text": ""}, "text is empty"),
        ({"text": " \n"}, "text is empty"),
        ({"text": 5}, "text must be a string, not 5"),
        ({"text": None}, "text must be a string"),
        ({"text": "bad \ud800 text"}, "not valid Unicode"),
        ({"texts": []}, "at least one"),
        ({"texts": "a"}, "must be a list"),
        ({"texts": ["a", 3]}, r"texts\[1\] must be a string"),
        ({"texts": ["a", ""]}, r"texts\[1\] is empty"),
        ({"texts": ["a"] * (MAX_SEQUENCES + 1)}, "65 elements; send at most 64"),
        ({"ids": []}, "ids is empty"),
        ({"ids": [[]]}, r"ids\[0\] is empty"),
        ({"ids": [[5], 6]}, r"ids\[1\] must be a list"),
        ({"ids": [5, "6"]}, "list of integers"),
        ({"ids": [True]}, "list of integers"),
        ({"ids": [1.5]}, "list of integers"),
        ({"ids": {"a": 1}}, "an object"),
        ({"ids": [211]}, "id 211; model tiny-minilm knows 0 to 210"),
        ({"ids": [-1]}, "id -1"),
        ({"ids": [2**70]}, "knows 0 to 210"),
        ({"image": "aGVsbG8="}, "cannot read 'image'"),
        ({"images": ["aGVsbG8="]}, "cannot read 'images'"),
        ({"text": "a", "truncate": "yes"}, "truncate must be true or false"),
        ({"text": "a", "want": "all"}, "want must be .*, not 'all'"),
        ({"text": "a", "want": ["task"]}, "want must be .*, not a list"),
        ({"text": "a", "top_k": 0}, "top_k"),
        ({"text": "a", "top_k": 1001}, "top_k"),
        ({"text": "a", "top_k": True}, "top_k"),
    ],
)
def test_wrong_requests_say_what_is_wrong(text, request_, says):
    with pytest.raises(RequestError, match=says):
        prepare(text, request_)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
keys = st.sampled_from(["text", "texts", "ids", "image", "images", "truncate", "want", "top_k"])


@settings(deadline=None)
@given(st.dictionaries(keys, json_values, max_size=3) | json_values, st.sampled_from(["text", "mlm", "vision"]))
def test_any_json_is_prepared_or_refused(opened, request_, model):
    names = {"text": "tiny-minilm", "mlm": "tiny-bert-mlm", "vision": "tiny-vit-classifier"}
    checkpoint = opened[names[model]]
    try:
        prepared = prepare(checkpoint, request_)
    except RequestError:
        return
    assert prepared.shape.tokens == sum(prepared.shape.lengths) > 0


def test_a_masked_token_request_needs_a_mask(mlm):
    with pytest.raises(RequestError, match=r"no \[MASK\]"):
        prepare(mlm, {"text": "the door"})
    with pytest.raises(RequestError, match=r"no \[MASK\]"):
        prepare(mlm, {"text": "the " * 60 + "[MASK]", "truncate": True})
    assert prepare(mlm, {"ids": [7, mlm.mask_id]}).shape.mask_rows == (1,)


def test_texts_for_an_image_model_are_refused(vision):
    for request in ({"text": "a"}, {"texts": ["a"]}, {"ids": [1]}):
        with pytest.raises(RequestError, match="cannot read"):
            prepare(vision, request)
    with pytest.raises(RequestError, match="truncate is for texts"):
        prepare(vision, {"image": encoded(noise(8, 8)), "truncate": True})


def test_an_output_that_does_not_fit_is_refused(text):
    prepared = prepare(text, {"text": "door"})
    with pytest.raises(WireError, match=r"\[2, 32\] instead of \[1, 32\]"):
        answer(text, prepared, np.zeros((2, 32), np.float32))
    for bad in (np.nan, np.inf):
        with pytest.raises(ModelError, match="NaN or infinity"):
            answer(text, prepared, np.full((1, 32), bad, np.float32))


def test_empty_texts_may_be_zeros_in_their_places(text):
    texts = ["", "the door", " ", "warm", "\n"]
    prepared = prepare(text, {"texts": texts, "empty": "zero"})
    assert prepared.shape == prepare(text, {"texts": ["the door", "warm"]}).shape
    output = np.arange(64, dtype=np.float32).reshape(2, 32)
    results = [r["embedding"] for r in answer(text, prepared, output)["results"]]
    assert [results[1], results[3]] == output.tolist()
    assert results[0] == results[2] == results[4] == [0.0] * 32


def test_token_ids_are_advised_only_where_they_help(tmp_path):
    masks, decoder = (make_model(kind, tmp_path / kind) for kind in ("tiny-bert-mlm", "tiny-gpt2"))
    for path in (masks, decoder):
        (path / "tokenizer.json").unlink()
    with Checkpoint.open(masks) as checkpoint:
        for request in ({"text": "a [MASK]"}, {"ids": [1, 4]}):
            with pytest.raises(ModelError, match="copy it") as caught:
                prepare(checkpoint, request)
            assert "token ids" not in str(caught.value)
    with Checkpoint.open(decoder) as checkpoint:
        with pytest.raises(ModelError, match="send token ids"):
            prepare(checkpoint, {"text": "a"})
        prepared = prepare(checkpoint, {"ids": [1, 2], "max_new_tokens": 2})
        assert answer(checkpoint, prepared, np.array([7, 8])) == {"ids": [7, 8], "text": ""}
        assert piece(checkpoint, (7, 8)) == ""


def test_a_model_without_tokenizer_takes_ids_only(tmp_path):
    path = make_model("tiny-bert", tmp_path / "m")
    (path / "tokenizer.json").unlink()
    with Checkpoint.open(path) as checkpoint:
        assert prepare(checkpoint, {"ids": [1, 2]}).shape.tokens == 2
        with pytest.raises(ModelError, match="token ids"):
            prepare(checkpoint, {"text": "a"})


def test_a_tokenizer_of_another_model_is_an_error(tmp_path):
    path = make_model("tiny-bert", tmp_path / "m")
    from hepti_mqtt.checkpoint.make import write_tokenizer

    write_tokenizer(path / "tokenizer.json", 300)
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError, match="vocab_size is 211"):
        prepare(checkpoint, {"text": checkpoint.tokenizer.id_to_token(250)})


def test_a_tokenizer_that_adds_nothing_may_find_nothing(tmp_path):
    path = make_model("tiny-bert", tmp_path / "m")
    data = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps({**data, "post_processor": None}))
    with Checkpoint.open(path) as checkpoint:
        assert prepare(checkpoint, {"text": "the door"}).shape.tokens == 2
        with pytest.raises(RequestError, match="no tokens"):
            prepare(checkpoint, {"text": "\x01"})


def test_the_numbers_of_an_answer_are_bounded(mlm, monkeypatch):
    monkeypatch.setattr(requests, "MAX_OUTPUT", 32 * 10)
    assert prepare(mlm, {"ids": [7] * 10, "want": "hidden"})
    with pytest.raises(RequestError, match="11 x 32 numbers, and at most 320"):
        prepare(mlm, {"ids": [7] * 11, "want": "hidden"})
    with pytest.raises(RequestError, match="2 x 211 numbers"):
        prepare(mlm, {"text": "[MASK] [MASK]"})
