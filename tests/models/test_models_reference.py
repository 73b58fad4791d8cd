from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hepti_mqtt import models
from hepti_mqtt.checkpoint import KINDS, Checkpoint, make_model
from hepti_mqtt.models.plain import activate, erf
from hepti_mqtt.models.shapes import PackedTokens, Pictures, Text
from hepti_mqtt.models.transformer import ModelSpec

LONG = {"tiny-mobilenet", "tiny-hf-mobilenet"}
TINY = [
    pytest.param(kind, marks=[pytest.mark.wide] if kind in LONG else [])
    for kind in KINDS
    if kind.startswith("tiny") and kind != "tiny-gpt2"  # whose inputs begin otherwise
]


@pytest.fixture(scope="module", params=TINY)
def checkpoint(request, tmp_path_factory):
    path = make_model(request.param, tmp_path_factory.mktemp("models") / request.param, seed=5)
    with Checkpoint.open(path) as opened:
        yield opened


def batch(spec, lengths, seed=0):
    """Return inputs and shape of a batch; for images the numbers of `lengths` do not matter."""
    reads = spec.reads
    shape = reads.batch(len(lengths) if isinstance(reads, Pictures) else tuple(lengths))
    if isinstance(reads, Text) and reads.masks:
        masks = tuple(start + length // 2 for start, length in zip(shape.starts, lengths, strict=True))
        shape = PackedTokens(shape.lengths, mask_rows=masks)
    return models.random_inputs(spec, shape, np.random.default_rng(seed)), shape


def float64(tensors):
    return {name: array.astype(np.float64) for name, array in tensors.items()}


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("relu", lambda v: max(v, 0.0)),
        ("gelu", lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2),
        ("gelu_tanh", lambda v: v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) / 2),
    ],
)
def test_activations_are_their_formulas(activation, function):
    x = np.linspace(-9, 9, 101)
    np.testing.assert_allclose(activate(activation, x), [function(v) for v in x], atol=1e-12)


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False), min_size=1), st.sampled_from(["f4", "f8"]))
def test_erf_is_the_error_function(values, dtype):
    with np.errstate(over="ignore"):
        x = np.array(values, dtype)
    want = np.array([math.erf(v) for v in x])
    tolerance = {"f4": 1e-7, "f8": 1e-12}[dtype]
    np.testing.assert_allclose(erf(x), want, atol=tolerance, rtol=0)
    assert erf(x).dtype == x.dtype


def test_erf_keeps_nan():
    assert np.isnan(erf(np.array([np.nan]))).all()


def test_float32_is_float64_up_to_rounding(checkpoint):
    spec, tensors = checkpoint.spec, checkpoint.tensors()
    inputs, shape = batch(spec, (7, 1, 12))
    hidden, output = models.reference(spec, tensors, inputs, shape)
    exact_hidden, exact_output = models.reference(spec, float64(tensors), inputs, shape)
    assert hidden.dtype == output.dtype == np.float32
    assert exact_hidden.dtype == exact_output.dtype == np.float64
    np.testing.assert_allclose(hidden, exact_hidden, atol=3e-5)
    np.testing.assert_allclose(output, exact_output, atol=3e-5)


def test_sequences_of_a_batch_do_not_see_each_other(checkpoint):
    spec, tensors = checkpoint.spec, float64(checkpoint.tensors())
    if not isinstance(spec, ModelSpec):
        pytest.skip("it takes one picture at a time")
    inputs, shape = batch(spec, (5, 9, 1))
    hidden, output = models.reference(spec, tensors, inputs, shape)
    assert hidden.shape == (shape.tokens, spec.hidden)
    assert output.shape == spec.output_shape(shape)
    for i, (start, length) in enumerate(zip(shape.starts, shape.lengths, strict=True)):
        piece = inputs[i : i + 1] if isinstance(spec.reads, Pictures) else inputs[start : start + length]
        alone = models.reference(spec, tensors, piece, shape.part(i, i + 1)[0])
        np.testing.assert_allclose(alone[0], hidden[start : start + length], atol=1e-12)
        np.testing.assert_allclose(alone[1], output[i : i + 1], atol=1e-12)


def test_hidden_wanted_is_hidden_given(checkpoint):
    inputs, shape = batch(checkpoint.spec, (4, 3))
    want = shape.asking("hidden")
    hidden, output = models.reference(checkpoint.spec, checkpoint.tensors(), inputs, want)
    assert output.shape == checkpoint.spec.output_shape(want)
    np.testing.assert_array_equal(hidden, output)


def test_every_tensor_matters(checkpoint):
    """A tensor that is renamed, forgotten or never read would leave the output as it is."""
    spec, tensors = checkpoint.spec, float64(checkpoint.tensors())
    inputs, shape = batch(spec, (6, 4))
    _, before = models.reference(spec, tensors, inputs, shape)
    for name, tensor in tensors.items():
        changed = {**tensors, name: tensor + 0.1 * np.cos(np.arange(tensor.size)).reshape(tensor.shape)}
        _, after = models.reference(spec, changed, inputs, shape)
        # Softmax does not see what is added to all keys alike, so a key's bias may not matter.
        assert name.endswith("key.bias") == bool(np.abs(after - before).max() < 1e-9), name


def test_normalized_embeddings_have_length_one(tmp_path):
    with Checkpoint.open(make_model("tiny-minilm", tmp_path / "m")) as opened:
        inputs, shape = batch(opened.spec, (3, 8))
        _, output = models.reference(opened.spec, opened.tensors(), inputs, shape)
    np.testing.assert_allclose(np.linalg.norm(output, axis=1), 1, atol=1e-6)
