"""Stem and head as ops: interpreted here in plain NumPy by the kernels' contract, they give what the oracle gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hepti_mqtt import models
from hepti_mqtt.checkpoint import KINDS, Checkpoint, make_model, spec_of_kind
from hepti_mqtt.ids import PLANNER, Epoch
from hepti_mqtt.models.plain import erf
from hepti_mqtt.models.shapes import PackedTokens, Pictures
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import program
from hepti_mqtt.program import Compute, Recv
from hepti_mqtt.protocol.manifest import Manifest, check_tile, tile_array

# The plain encoders, whose layers can be left out.
TINY = [
    kind for kind in KINDS if kind.startswith("tiny") and type(spec_of_kind(kind)) is ModelSpec and "gpt2" not in kind
]


def norm(x, gamma, beta, eps):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * gamma + beta


def embed_tokens(op, ids, word, position, *rest):
    *types, gamma, beta = rest
    at = [op.attrs["position_offset"] + i for length in op.attrs["lengths"] for i in range(length)]
    return norm(word[ids] + position[at] + sum(table[0] for table in types), gamma, beta, op.attrs["eps"])


def patchify(op, pixels):
    p = op.attrs["patch"]
    mean, std = (np.array(op.attrs[k])[:, None, None] for k in ("mean", "std"))
    values = (pixels / 255 - mean) / std
    side = range(0, pixels.shape[-1], p)
    return np.stack([image[:, y : y + p, x : x + p].ravel() for image in values for y in side for x in side])


def linear(op, x, weight, bias):
    assert op.attrs["bias"]
    assert not op.attrs["residual"]
    activate = {
        None: lambda v: v,
        "tanh": np.tanh,
        "gelu": lambda v: 0.5 * v * (1 + erf(v / np.sqrt(2))),
        "gelu_tanh": lambda v: 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3))),
        "relu": lambda v: np.maximum(v, 0),
    }
    return activate[op.attrs["activation"]](x @ weight + bias)


def prepend_positions(op, patches, cls, position):
    images = np.split(patches, op.attrs["images"])
    return np.concatenate([np.vstack([cls, image]) + position for image in images])


def mean_rows(op, x):
    return np.stack([piece.mean(0) for piece in np.split(x, np.cumsum(op.attrs["lengths"])[:-1])])


def assemble(op, *parts):
    width = parts[0].shape[1]
    out = np.full((max(target[0][1] for _, _, target in op.attrs["copies"]), width), np.nan)
    for place, source, target in op.attrs["copies"]:
        out[tuple(slice(*r) for r in target)] = parts[place][tuple(slice(*r) for r in source)]
    return out


KERNELS = {
    "embed_tokens": embed_tokens,
    "patchify": patchify,
    "linear": linear,
    "prepend_positions": prepend_positions,
    "layer_norm": lambda op, x, gamma, beta: norm(x, gamma, beta, op.attrs["eps"]),
    "assemble": assemble,
    "mean_rows": mean_rows,
    "normalize_rows": lambda op, x: x / np.linalg.norm(x, axis=1, keepdims=True),
}


def loaded(checkpoint, ref):
    """Return the weight of a reference from the checkpoint's tiles, as a device loads it."""
    manifest = Manifest.decode(checkpoint.manifest.encode())
    out = np.full((ref.rows[1], ref.columns[1]), np.nan)
    for place in manifest.tiles(ref):
        data = checkpoint.tile(place.hash)
        check_tile(place.hash, data)
        tile = tile_array(place, data)
        out[place.row0 : place.row0 + tile.shape[0], place.column0 : place.column0 + tile.shape[1]] = tile
    assert not np.isnan(out).any()
    vector = ref.layout == "plain" and ref.rows == (0, 1) and models_dims(checkpoint, ref.tensor) == 1
    return out[0] if vector else out


def models_dims(checkpoint, name):
    return len(checkpoint.manifest.by_name[name].shape)


def run(checkpoint, program, inputs):
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
    return slots[slot] if spec.base is None else slots[spec.base][spec.start : spec.start + spec.shape[0]]


def batch(spec):
    reads = spec.reads
    if isinstance(reads, Pictures):
        shape = reads.batch(3)
    else:
        shape = PackedTokens((5, 1, 7), mask_rows=(2, 5, 6) if reads.masks else ())
    return models.random_inputs(spec, shape, np.random.default_rng(0)), shape


@pytest.mark.parametrize("want", ["task", "hidden"])
@pytest.mark.parametrize("kind", TINY)
def test_stem_and_head_are_the_oracle_without_layers(kind, want, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Checkpoint.open(make_model(kind, tmp_path / kind, seed=3)) as checkpoint:
        spec = replace(checkpoint.spec, layers=0)
        inputs, shape = batch(spec)
        shape = replace(shape, want=want)
        program = program_of(spec, shape)
        got = run(checkpoint, program, inputs)
        assert got.shape == spec.output_shape(shape)
        tensors = {name: value.astype(np.float64) for name, value in checkpoint.tensors().items()}
    want_output = models.reference(spec, tensors, inputs, shape)[1]
    np.testing.assert_allclose(got, want_output, atol=1e-9)


def program_of(spec, shape):
    return program(spec, Plan("m", Epoch(1, 1), "single", ("a",), "a"), shape, "a")


def test_the_masked_token_heads_of_the_families_differ_in_their_activation():
    size = {"hidden_size": 8, "intermediate_size": 9, "max_position_embeddings": 9, "vocab_size": 9}
    config = {**size, "hidden_act": "relu", "num_attention_heads": 1, "num_hidden_layers": 1}
    shape = PackedTokens((3,), mask_rows=(1,))
    for architecture, activation in (("BertForMaskedLM", "relu"), ("RobertaForMaskedLM", "gelu")):
        spec = models.spec_from_config({**config, "architectures": [architecture]}, {})
        linears = [op for op in program_of(spec, shape).ops if isinstance(op, Compute) and op.kernel == "linear"]
        transform, decoder = linears[-2:]
        assert (transform.attrs["activation"], decoder.attrs["activation"]) == (activation, None)
