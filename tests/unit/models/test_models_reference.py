"""The NumPy oracle of every family, and stem and head as ops by the kernels' contract."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sites import TOLERANCE, plan
from together import run_programs

from hepti_mqtt import models
from hepti_mqtt.checkpoint import KINDS, Checkpoint, make_model, spec_of_kind
from hepti_mqtt.models.plain import activate, erf
from hepti_mqtt.models.shapes import DecoderInput, ImageInput, TextInput, TokenBatch
from hepti_mqtt.models.speech import SpeechInput
from hepti_mqtt.models.transformer import BlockSpec, ModelSpec
from hepti_mqtt.strategies.plan_programs import device_programs

LONG = {"tiny-mobilenet", "tiny-hf-mobilenet"}
DECODERS = {kind for kind in KINDS if isinstance(spec_of_kind(kind).input_spec, DecoderInput)}  # inputs begin otherwise
TINY = [
    pytest.param(kind, marks=[pytest.mark.nightly] if kind in LONG else [])
    for kind in KINDS
    if kind.startswith("tiny") and kind not in DECODERS
]


@pytest.fixture(scope="module", params=TINY)
def checkpoint(request, tmp_path_factory):
    path = make_model(request.param, tmp_path_factory.mktemp("models") / request.param, seed=5)
    with Checkpoint.open(path) as opened:
        yield opened


def batch(spec, lengths, seed=0):
    """Return inputs and shape of a batch; for images the numbers of `lengths` do not matter."""
    reads = spec.input_spec
    if isinstance(reads, SpeechInput):
        return models.random_inputs(spec, reads.shape(), np.random.default_rng(seed)), reads.shape()
    shape = reads.batch(len(lengths) if isinstance(reads, ImageInput) else tuple(lengths))
    if isinstance(reads, TextInput) and reads.masks:
        masks = tuple(start + length // 2 for start, length in zip(shape.starts, lengths, strict=True))
        shape = TokenBatch(shape.lengths, mask_rows=masks)
    return models.random_inputs(spec, shape, np.random.default_rng(seed)), shape


def float64(tensors):
    return {name: array.astype(np.float64) for name, array in tensors.items()}


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("relu", lambda v: max(v, 0.0)),
        ("silu", lambda v: v / (1 + math.exp(-v))),
        ("quick_gelu", lambda v: v / (1 + math.exp(-1.702 * v))),
        ("gelu", lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2),
        ("gelu_tanh", lambda v: v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) / 2),
    ],
)
def test_activations_are_their_formulas(activation, function):
    x = np.linspace(-9, 9, 101)
    np.testing.assert_allclose(activate(activation, x), [function(v) for v in x], atol=1e-12)


@settings(deadline=None)
@given(st.lists(st.floats(), min_size=1), st.sampled_from(["f4", "f8"]))
def test_erf_is_the_error_function(values, dtype):
    with np.errstate(over="ignore"):
        x = np.array(values, dtype)
    want = np.array([math.erf(v) for v in x])
    tolerance = {"f4": 1e-7, "f8": 1e-12}[dtype]
    np.testing.assert_allclose(erf(x), want, atol=tolerance, rtol=0)
    assert erf(x).dtype == x.dtype


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
        piece = inputs[i : i + 1] if isinstance(spec.input_spec, ImageInput) else inputs[start : start + length]
        alone = models.reference(spec, tensors, piece, shape.slice_items(i, i + 1)[0])
        np.testing.assert_allclose(alone[0], hidden[start : start + length], atol=1e-12)
        rows = slice(start, start + length) if spec.head.pooling == "none" else slice(i, i + 1)
        np.testing.assert_allclose(alone[1], output[rows], atol=1e-12)


@pytest.mark.parametrize("want", ["task", "hidden"])
def test_the_program_of_one_device_is_the_oracle(checkpoint, want):
    """Contract suites divide some kinds; here every kind meets the kernels."""
    spec, held = checkpoint.spec, dict(checkpoint.tensors())
    inputs, shape = batch(spec, (5, 1, 7) if isinstance(spec, ModelSpec) else (1,))
    shape = shape.with_want(want)
    got = run_programs(device_programs(spec, plan(spec, ("single", {}), (1.0,)), shape), held, inputs)
    expected = models.reference(spec, held, inputs, shape)[want == "task"]
    assert got.shape == spec.output_shape(shape)
    np.testing.assert_allclose(got, expected, atol=TOLERANCE)


def test_every_tensor_matters(checkpoint):
    """A tensor that is renamed, forgotten or never read would leave the output as it is."""
    spec, tensors = checkpoint.spec, float64(checkpoint.tensors())
    inputs, shape = batch(spec, (6, 4))
    _, before = models.reference(spec, tensors, inputs, shape)
    for name, tensor in tensors.items():
        changed = {**tensors, name: tensor + 0.1 * np.cos(np.arange(tensor.size)).reshape(tensor.shape)}
        _, after = models.reference(spec, changed, inputs, shape)
        # Softmax does not see what is added to all keys alike, so a key's bias may not matter, unless it is rotated or
        # meets queries of distances.
        block = getattr(spec, "block", BlockSpec())
        unseen = name.endswith("key.bias") and not (block.thetas or block.disentangled)
        assert unseen == bool(np.abs(after - before).max() < 1e-9), name
