"""Pairs, rankings, entities, answers and labels of a user's own, compared with transformers and sentence-transformers.

`tests/helpers/make_answers.py` writes what the reference answers.
"""

import json

import numpy as np
import pytest
from question_cases import ANSWERS, CASES, MODULES, cross_encoder, put
from service_support import run
from together import run_programs

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.core.errors import ModelError, RequestError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.service.answers import decode_output
from hepti_mqtt.service.requests import read_input, split_into_batches
from hepti_mqtt.service.texts import longest_first
from hepti_mqtt.strategies.plan_programs import device_programs, make_plan

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def golden():
    return json.loads(ANSWERS.read_text())


def listed(reply):
    """Return the results of a reply, one or several."""
    return reply.get("results", [reply])


def pairs(reply):
    """Return the scores of each pair by the number of the label."""
    by_name = [{one["label"]: one["score"] for one in result["labels"]} for result in listed(reply)]
    return [[scores[name] for name in sorted(scores)] for scores in by_name]


def rank(reply):
    return [
        {"corpus_id": one["index"], "score": one["score"]} | ({"text": one["document"]} if "document" in one else {})
        for one in reply["ranking"]
    ]


def entities(reply):
    return [
        [[one["label"], one["score"], one["start"], one["end"]] for one in result["entities"]]
        for result in listed(reply)
    ]


def theirs(kind, want):
    """Return the reference's answer in the order of what is compared."""
    if kind == "entities":
        return [[[one.get("entity_group", one.get("entity")), *(one[k] for k in ("score", "start", "end"))]
                 for one in text] for text in want]  # fmt: skip
    return want


def similarity(reply):
    by_index = {one["index"]: one["score"] for one in reply["ranking"]}
    assert [*by_index.values()] == sorted(by_index.values(), reverse=True)
    return [by_index[i] for i in range(len(by_index))]


OURS = {
    "pairs": pairs,
    "rank": rank,
    "entities": entities,
    "answers": lambda reply: reply,
    "labels": lambda reply: [{x["label"]: x["score"] for x in result["labels"]} for result in listed(reply)],
    "vectors": lambda reply: [result["embedding"] for result in listed(reply)],
    "similarity": similarity,
}


def assert_alike(got, want, where="answer"):
    """Assert equal structure, equal words, and numbers that are equal to 1e-4 of the largest."""
    if isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key in want:
            assert_alike(got[key], want[key], f"{where}.{key}")
    elif isinstance(want, list) and want and not isinstance(want[0], int | float):
        assert len(got) == len(want), where
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_alike(a, b, f"{where}[{i}]")
    elif isinstance(want, str):
        assert got == want, where
    else:
        largest = max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * largest, err_msg=where)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_question_is_answered_as_by_the_reference(case, golden, tmp_path):
    with Checkpoint.open(case.write(tmp_path / "model"), "model") as checkpoint:
        reply = run(checkpoint, case.request)
    kind = case.name.partition(":")[0]
    assert_alike(OURS[kind](reply), theirs(kind, golden[case.name]))


@pytest.mark.parametrize(
    "name", ["pairs: bert", "rank: sigmoid", "entities: simple", "answers: bert", "vectors: dense twice"]
)
def test_devices_together_answer_as_the_reference(name, golden, tmp_path):
    """In several runs, as the coordinator packs the sentences of a request."""
    (case,) = (case for case in CASES if case.name == name)
    with Checkpoint.open(case.write(tmp_path / "model"), "model") as checkpoint:
        prepared = read_input(checkpoint, case.request)
        blank = Plan("model", PlanVersion(1, 1), "row", ("a", "b"), "a")
        plan = make_plan(checkpoint.spec, blank, "row", {"variant": "kv"}, (1.0, 1.0))
        outputs = [
            run_programs(device_programs(checkpoint.spec, plan, part.shape), checkpoint.tensors(), part.inputs)
            for part in split_into_batches(prepared, 60)
        ]
        reply = decode_output(checkpoint, prepared, np.concatenate(outputs))
    kind = name.partition(":")[0]
    assert_alike(OURS[kind](reply), theirs(kind, golden[name]))


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    root, checkpoints = tmp_path_factory.mktemp("models"), {}
    for kind in ("bert-classifier", "bert-ranker", "bert-entities", "bert-answers", "minilm", "vit", "gpt2", "albert"):
        checkpoints[kind] = Checkpoint.open(make_model(f"tiny-{kind}", root / kind, seed=1))
    yield checkpoints
    for checkpoint in checkpoints.values():
        checkpoint.close()


FILE = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
#: generation_config.json, a request's options, and (temperature, top_k, top_p, repetition) of its text.
DEFAULTS = [
    ({}, {}, (0.0, 0, 1.0, 1.0)),
    (FILE, {}, (0.7, 20, 0.8, 1.05)),
    (FILE, {"temperature": 0.3, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}, (0.3, 0, 1.0, 1.0)),
    (FILE, {"temperature": 0}, (0.0, 0, 1.0, 1.05)),
    (FILE | {"do_sample": False}, {}, (0.0, 0, 1.0, 1.05)),
    ({"do_sample": True}, {}, (1.0, 50, 1.0, 1.0)),
    ({"temperature": 0.7, "top_k": 5}, {"temperature": 0.5}, (0.5, 0, 1.0, 1.0)),
    ({"do_sample": True, "typical_p": 0.9}, {}, None),
    ({"do_sample": True, "temperature": 9}, {}, None),
    ({"do_sample": False, "typical_p": 0.9}, {}, (0.0, 0, 1.0, 1.0)),
]


@pytest.mark.parametrize(("file", "options", "want"), DEFAULTS)
def test_what_a_request_does_not_say_is_as_in_the_models_files(tmp_path, file, options, want):
    path = make_model("tiny-gpt2", tmp_path / "model")
    (path / "generation_config.json").write_text(json.dumps(file))
    if want is None:
        with pytest.raises(ModelError):
            Checkpoint.open(path)
        return
    with Checkpoint.open(path) as checkpoint:
        rules = read_input(checkpoint, {"ids": [5], **options}).rules
    assert (*rules.temperatures, rules.sampling.top_k, rules.sampling.top_p, rules.sampling.repetition) == want


LONG = "the " * 100
REFUSED = [
    ("minilm", {"text": "a", "text_pair": "b"}),
    ("vit", {"text": "a", "text_pair": "b"}),
    ("gpt2", {"pairs": [["a", "b"]]}),
    ("gpt2", {"messages": [{"role": "user", "content": "a"}]}),
    ("gpt2", {"text": "a", "tools": [{"type": "function", "function": {"name": "open"}}]}),
    ("minilm", {"text": "a", "temperature": 1}),
    ("bert-entities", {"query": "a", "documents": ["b"]}),
    ("bert-classifier", {"query": "a", "documents": ["b"]}),  # five labels, and no score
    ("bert-classifier", {"text": "a", "candidate_labels": ["b"]}),  # no entailment
    ("bert-classifier", {"pairs": [["a", "b", "c"]]}),
    ("bert-classifier", {"pairs": [["a", 5]]}),
    ("bert-classifier", {"pairs": [["a", " "]]}),
    ("bert-classifier", {"pairs": [["a", LONG]]}),
    ("bert-classifier", {"pairs": []}),
    ("bert-classifier", {"text_pair": "b"}),
    ("bert-classifier", {"text": "a", "text_pair": "b", "texts": ["c"]}),
    ("bert-classifier", {"ids": [2, 7, 3, 8, 3]}),
    ("bert-classifier", {"ids": [2, 7], "token_types": [0]}),
    ("bert-classifier", {"ids": [2, 7], "token_types": [0, 2]}),
    ("bert-classifier", {"ids": [[2, 7]], "token_types": [0, 1]}),
    ("bert-classifier", {"text": "a", "token_types": [0]}),
    ("bert-classifier", {"text": "a", "dimensions": 5}),
    ("bert-ranker", {"text": "a"}),  # its files say that it scores pairs
    ("bert-ranker", {"query": "a", "documents": "b"}),
    ("bert-ranker", {"query": "a", "documents": ["b"], "return_documents": 1}),
    ("bert-ranker", {"query": "a", "documents": ["b"] * 65}),
    ("bert-entities", {"text": "a", "aggregation": "first"}),
    ("bert-answers", {"text": "a"}),
    ("bert-answers", {"question": "a"}),
    ("bert-answers", {"question": LONG, "context": "a"}),
    ("bert-answers", {"question": "a", "context": "the " * 3000}),
    ("bert-answers", {"question": "a", "context": "b", "no_answer": "yes"}),
    ("minilm", {"text": "a", "prompt": "query"}),
    ("minilm", {"text": "a", "dimensions": 33}),
    ("minilm", {"text": "a", "raw_scores": True}),
    ("albert", {"pairs": [["a", "b"]]}),  # versions of transformers differ in its token types
]


@pytest.mark.parametrize(("kind", "request_"), REFUSED)
def test_what_a_model_does_not_read_is_refused(opened, kind, request_):
    with pytest.raises((RequestError, ModelError)):
        read_input(opened[kind], request_)


def test_ids_with_types_are_the_pair_itself(opened):
    checkpoint = opened["bert-classifier"]
    encoding = checkpoint.tokenizer.encode("the door", "is warm")
    own = {"ids": encoding.ids, "token_types": encoding.type_ids}
    assert run(checkpoint, own) == run(checkpoint, {"text": "the door", "text_pair": "is warm"})
    assert run(checkpoint, {**own, "token_types": [0] * len(encoding.ids)}) != run(checkpoint, own)


@pytest.mark.parametrize("lengths", [(3, 9), (9, 3), (5, 40), (40, 5), (30, 40), (20, 20), (0, 50)])
@pytest.mark.parametrize("room", [0, 1, 9, 10, 37])
def test_the_longer_half_is_cut_first_as_the_library_does(opened, lengths, room):
    tokenizer = opened["bert-classifier"].tokenizer
    halves = [" ".join(["the"] * length) for length in lengths]
    tokenizer.enable_truncation(room + 3)
    try:
        pair = tokenizer.encode(*halves)
    finally:
        tokenizer.no_truncation()
    kept = [sum(place == half for place in pair.sequence_ids) for half in (0, 1)]
    assert kept == [*longest_first(*lengths, room)]


@pytest.mark.parametrize("lengths", [(100, 120), (120, 100), (300, 41), (41, 300), (30, 500)])
def test_halves_that_are_read_in_part_are_cut_as_if_read_as_a_whole(opened, lengths):
    checkpoint = opened["bert-classifier"]
    first, second = (" ".join(f"word{i % 80}" for i in range(length)) for length in lengths)
    prepared = read_input(checkpoint, {"text": first, "text_pair": second, "truncate": True})
    tokenizer = checkpoint.tokenizer
    tokenizer.enable_truncation(40)
    try:
        pair = tokenizer.encode(first, second)
    finally:
        tokenizer.no_truncation()
    vocab = checkpoint.spec.input_spec.vocab
    assert prepared.inputs.tolist() == [i + vocab * kind for i, kind in zip(pair.ids, pair.type_ids, strict=True)]


def test_a_long_context_is_read_in_windows_that_overlap(opened):
    checkpoint = opened["bert-answers"]
    words = [f"word{i}" for i in range(60)]
    request = {"question": "the door", "context": " ".join(words)}
    prepared = read_input(checkpoint, request)
    assert len(prepared.shape.sizes) > 2
    tokenizer = checkpoint.tokenizer
    tokenizer.enable_truncation(40, stride=20, strategy="only_second")
    try:
        whole = tokenizer.encode(request["question"], request["context"])
    finally:
        tokenizer.no_truncation()
    ids = [i for window in (whole, *whole.overflowing) for i in window.ids]
    assert (prepared.inputs % checkpoint.spec.input_spec.vocab).tolist() == ids
    output = np.zeros((prepared.shape.size, 2), np.float32)
    row = 5 + sum(prepared.shape.sizes[:2])  # in the third window
    output[row] = 9
    word = checkpoint.tokenizer.id_to_token(int(prepared.inputs[row] % 211))
    reply = decode_output(checkpoint, prepared, output)
    assert reply["answer"] == word == request["context"][reply["start"] : reply["end"]]
    output[0] = output[prepared.shape.sizes[0]] = 99
    empty = read_input(checkpoint, {**request, "no_answer": True})
    assert decode_output(checkpoint, empty, output)["answer"] == word, "a window says that there is an answer"


def test_ids_of_a_users_own_give_places_of_tokens(opened):
    entities = run(opened["bert-entities"], {"ids": [2, 7, 8, 3]})["entities"]
    assert (entities[0]["tokens"][0], entities[-1]["tokens"][1]) == (1, 3)
    first, stop = run(opened["bert-answers"], {"ids": [2, 7, 8, 3]})["tokens"]
    assert 1 <= first < stop <= 4


def add_module(path, place, module):
    modules = json.loads((path / MODULES).read_text())
    modules.insert(place, {"type": "sentence_transformers.models.Dense", "path": module})
    (path / MODULES).write_text(json.dumps(modules))


def test_modules_behind_a_cross_encoder_are_refused(tmp_path):
    path = make_model("tiny-bert-ranker", tmp_path / "model")
    cross_encoder(path)
    Checkpoint.open(path).close()
    add_module(path, 9, "1")
    with pytest.raises(ModelError):
        Checkpoint.open(path)


@pytest.mark.parametrize("more", [{"activation_function": "torch.nn.SELU"}, {}, {"use_residual": True}], ids=str)
def test_a_module_that_is_not_computed_or_has_no_weights_is_refused(more, tmp_path):
    path = make_model("tiny-minilm", tmp_path / "model")
    (path / "2_Dense").mkdir()
    put("2_Dense/config.json", in_features=32, out_features=8, **more)(path)
    add_module(path, 2, "2_Dense")
    with pytest.raises(ModelError):
        Checkpoint.open(path)
