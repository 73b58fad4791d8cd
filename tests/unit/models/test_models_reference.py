"""The NumPy oracle of every family, and stem and head as ops by the kernels' contract."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hepti_mqtt import models
from hepti_mqtt.checkpoint import KINDS, Checkpoint, make_model, spec_of_kind
from hepti_mqtt.core.ids import PLANNER, PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.program import Compute, Recv
from hepti_mqtt.models.plain import activate, erf
from hepti_mqtt.models.shapes import DecoderInput, ImageInput, TextInput, TokenBatch
from hepti_mqtt.models.speech import SpeechInput
from hepti_mqtt.models.transformer import BlockSpec, ModelSpec
from hepti_mqtt.protocol.manifest import Manifest, tile_array, tile_hash
from hepti_mqtt.strategies.plan_programs import device_program

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
        piece = inputs[i : i + 1] if isinstance(spec.input_spec, ImageInput) else inputs[start : start + length]
        alone = models.reference(spec, tensors, piece, shape.slice_items(i, i + 1)[0])
        np.testing.assert_allclose(alone[0], hidden[start : start + length], atol=1e-12)
        rows = slice(start, start + length) if spec.head.pooling == "none" else slice(i, i + 1)
        np.testing.assert_allclose(alone[1], output[rows], atol=1e-12)


def test_hidden_wanted_is_hidden_given(checkpoint):
    inputs, shape = batch(checkpoint.spec, (4, 3))
    want = shape.with_want("hidden")
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
        # Softmax does not see what is added to all keys alike, so a key's bias may not matter, unless it is rotated or
        # meets queries of distances.
        block = getattr(spec, "block", BlockSpec())
        unseen = name.endswith("key.bias") and not (block.thetas or block.disentangled)
        assert unseen == bool(np.abs(after - before).max() < 1e-9), name


def test_normalized_embeddings_have_length_one(tmp_path):
    with Checkpoint.open(make_model("tiny-minilm", tmp_path / "m")) as opened:
        inputs, shape = batch(opened.spec, (3, 8))
        _, output = models.reference(opened.spec, opened.tensors(), inputs, shape)
    np.testing.assert_allclose(np.linalg.norm(output, axis=1), 1, atol=1e-6)


# The plain encoders, whose layers can be left out.
ENCODERS = [
    kind for kind in KINDS if kind.startswith("tiny") and type(spec_of_kind(kind)) is ModelSpec and kind not in DECODERS
]


def norm(op, x, gamma, beta=0.0):
    centred = x if op.attrs.get("rms") else x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred / np.sqrt(variance + op.attrs["eps"]) * (gamma + op.attrs.get("gamma_offset", 0.0)) + beta


def embed_tokens(op, ids, *weights):
    parts = dict(zip(op.attrs["parts"], weights, strict=True))
    at = [op.attrs["position_offset"] + i for length in op.attrs["lengths"] for i in range(length)]
    kinds, tokens = np.divmod(ids, len(parts["word"]))
    x = parts["word"][tokens] * op.attrs["scale"]
    x = x + (parts["position"][at] if "position" in parts else 0) + (parts["type"][kinds] if "type" in parts else 0)
    return norm(op, x, *(parts[name] for name in ("gamma", "beta") if name in parts)) if "gamma" in parts else x


def patchify(op, pixels):
    p = op.attrs["patch"]
    mean, std = (np.array(op.attrs[k])[:, None, None] for k in ("mean", "std"))
    values = (pixels / 255 - mean) / std
    side = range(0, pixels.shape[-1], p)
    return np.stack([image[:, y : y + p, x : x + p].ravel() for image in values for y in side for x in side])


def linear(op, x, *others):
    beside, weights = others[: len(op.reads) - 1], others[len(op.reads) - 1 :]
    count = len(weights) // 2 if op.attrs["bias"] else len(weights)
    biases = np.concatenate([*map(np.ravel, weights[count:])]) if op.attrs["bias"] else 0.0
    weight = np.concatenate(weights[:count], axis=1)
    activate = {
        None: lambda v: v,
        "tanh": np.tanh,
        "gelu": lambda v: 0.5 * v * (1 + erf(v / np.sqrt(2))),
        "gelu_tanh": lambda v: 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3))),
        "relu": lambda v: np.maximum(v, 0),
        "silu": lambda v: v / (1 + np.exp(-v)),
        "quick_gelu": lambda v: v / (1 + np.exp(-1.702 * v)),
    }
    return activate[op.attrs["activation"]](x @ weight + biases) + sum(beside)


def attention(op, q, kv):
    """Rows of one query each, of which `q_rows` says to which sequence they belong."""
    heads, d = op.attrs["heads"], op.attrs["head_dim"]
    ends = np.cumsum(op.attrs["lengths"])
    out = np.empty((len(q), heads * d))
    for i, row in enumerate(op.attrs["q_rows"]):
        item = int(np.searchsorted(ends, row, "right"))
        seen = kv[ends[item] - op.attrs["lengths"][item] : ends[item]]
        for h in range(heads):
            asked, keys, values = (
                rows[..., op.attrs[f"{part}_column"] + h * d :][..., :d]
                for part, rows in (("q", q[i]), ("k", seen), ("v", seen))
            )
            weights = np.exp(keys @ asked * op.attrs["scale"])
            out[i, h * d : (h + 1) * d] = weights @ values / weights.sum()
    return out


def prepend_positions(op, patches, *weights):
    *prefix, position = weights
    first, images = np.vstack([np.empty((0, position.shape[1])), *prefix]), np.split(patches, op.attrs["images"])
    placed = len(position) - len(images[0])
    first[:placed] += position[:placed]
    return np.concatenate([np.vstack([first, image + position[placed:]]) for image in images])


def pool_rows(op, x):
    pieces = np.split(x, np.cumsum(op.attrs["lengths"])[:-1])
    by_mode = {
        "mean": lambda piece: piece.mean(0),
        "sqrt_mean": lambda piece: piece.sum(0) / len(piece) ** 0.5,
        "weighted_mean": lambda piece: np.average(piece, 0, 1 + np.arange(len(piece))),
        "max": lambda piece: piece.max(0),
    }
    return np.stack([by_mode[op.attrs["mode"]](piece) for piece in pieces])


def assemble(op, *parts):
    out = np.full(
        [max(r[1] for r in ends) for ends in zip(*(t for _, _, t in op.attrs["copies"]), strict=True)], np.nan
    )
    for place, source, target in op.attrs["copies"]:
        out[tuple(slice(*r) for r in target)] = parts[place][tuple(slice(*r) for r in source)]
    return out


KERNELS = {
    "embed_tokens": embed_tokens,
    "patchify": patchify,
    "linear": linear,
    "prepend_positions": prepend_positions,
    "add": lambda _op, x, y: x + y,
    "attention": attention,
    "repeat_row": lambda _op, x, row: np.tile(row, (len(x), 1)),
    "layer_norm": norm,
    "assemble": assemble,
    "pool_rows": pool_rows,
    "normalize_rows": lambda op, x: x / np.linalg.norm(x, axis=1, keepdims=True),
}


def loaded(checkpoint, ref):
    """Return the weight of a reference from the checkpoint's tiles, as a device loads it."""
    manifest = Manifest.decode(checkpoint.manifest.encode())
    out = np.full((ref.rows[1], ref.columns[1]), np.nan)
    for place in manifest.tiles(ref):
        data = checkpoint.tile(place.hash)
        assert tile_hash(data) == place.hash
        tile = tile_array(place, data)
        out[place.row0 : place.row0 + tile.shape[0], place.column0 : place.column0 + tile.shape[1]] = tile
    assert not np.isnan(out).any()
    vector = ref.layout == "plain" and ref.rows == (0, 1) and models_dims(checkpoint, ref.tensor) == 1
    return out[0] if vector else out


def models_dims(checkpoint, name):
    return len(checkpoint.manifest.by_name[name].shape)


def interpret(checkpoint, program, inputs):
    """Return what a Program without peers sends to the planner."""
    slots = {}
    for op in program.ops:
        if isinstance(op, Recv):
            assert op.source == PLANNER
            slots[op.slot] = inputs
            spec = program.slots[op.slot]
            assert inputs.shape == spec.shape
            assert inputs.dtype == {"i32": np.int32, "u8": np.uint8}[spec.dtype]
        elif isinstance(op, Compute):
            weights = [loaded(checkpoint, ref) for ref in op.weights]
            result = KERNELS[op.kernel](op, *(value(program, slots, slot) for slot in op.reads), *weights)
            assert result.shape == program.slots[op.writes[0]].shape
            slots[op.writes[0]] = result
        else:
            assert op.to == (PLANNER,)
            output = value(program, slots, op.slot)
    return output


def value(program, slots, slot):
    spec = program.slots[slot]
    if spec.base is None:
        return slots[slot]
    whole = slots[spec.base]
    same = math.prod(spec.shape) == whole.size
    return whole.reshape(spec.shape) if same else whole[spec.start : spec.start + spec.shape[0]]


def batch_of(spec):
    reads = spec.input_spec
    if isinstance(reads, ImageInput):
        shape = reads.batch(3)
    else:
        shape = TokenBatch((5, 1, 7), mask_rows=(2, 5, 6) if reads.masks else ())
    return models.random_inputs(spec, shape, np.random.default_rng(0)), shape


@pytest.mark.parametrize("want", ["task", "hidden"])
@pytest.mark.parametrize("kind", ENCODERS)
def test_stem_and_head_are_the_oracle_without_layers(kind, want, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Checkpoint.open(make_model(kind, tmp_path / kind, seed=3)) as checkpoint:
        spec = replace(checkpoint.spec, layers=0)
        inputs, shape = batch_of(spec)
        shape = replace(shape, want=want)
        program = program_of(spec, shape)
        got = interpret(checkpoint, program, inputs)
        assert got.shape == spec.output_shape(shape)
        tensors = {name: value.astype(np.float64) for name, value in checkpoint.tensors().items()}
    want_output = models.reference(spec, tensors, inputs, shape)[1]
    np.testing.assert_allclose(got, want_output, atol=1e-9)


def program_of(spec, shape):
    return device_program(spec, Plan("m", PlanVersion(1, 1), "single", ("a",), "a"), shape, "a")


def test_the_masked_token_heads_of_the_families_differ_in_their_activation():
    size = {"hidden_size": 8, "intermediate_size": 9, "max_position_embeddings": 9, "vocab_size": 9}
    config = {**size, "hidden_act": "relu", "num_attention_heads": 1, "num_hidden_layers": 1}
    shape = TokenBatch((3,), mask_rows=(1,))
    for architecture, activation in (("BertForMaskedLM", "relu"), ("RobertaForMaskedLM", "gelu")):
        spec = models.spec_from_config({**config, "architectures": [architecture]}, {})
        linears = [op for op in program_of(spec, shape).ops if isinstance(op, Compute) and op.kernel == "linear"]
        transform, decoder = linears[-2:]
        assert (transform.attrs["activation"], decoder.attrs["activation"]) == (activation, None)
