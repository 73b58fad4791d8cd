"""Matrices that are quantised when a checkpoint is opened: blocks from there to the kernels, and what cannot be."""

import json

import numpy as np
import pytest
from gguf_writer import converted, quantised
from safetensors.numpy import load_file, save_file

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.core.errors import UnsupportedModelError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.storage import STORAGES
from hepti_mqtt.models import spec_from_dict
from hepti_mqtt.runtime.worker.executor import run_local
from hepti_mqtt.strategies.plan_programs import device_program

ALONE = Plan("model", PlanVersion(1, 1), "single", ("here",), "here")
ERRORS = {"q8": 0.01, "q4": 0.15}


@pytest.mark.parametrize(
    ("kind", "how", "kept"),
    [
        (
            "tiny-llama",
            "q4",
            {"head.decoder.weight", "layers.*.attention_out.weight", "stem.word"},
        ),  # its own embeddings
        ("tiny-mistral", "q8", {"head.decoder.weight", "layers.*.attention_out.weight"}),  # tied ones
        ("tiny-qwen3-embedding", "q8", {"stem.word"}),  # no head
    ],
)
def test_kernels_compute_with_the_blocks_that_the_reference_decodes(tmp_path, kind, how, kept):
    path = make_model(kind, tmp_path / "m")
    with Checkpoint.open(path, weights=how) as model:
        spec, storage = spec_from_dict(json.loads(json.dumps(model.spec.to_dict()))), f"{how}_0"
        assert spec == model.spec
        layers = {f"layers.*.{name}.weight" for name in ("query", "key", "value", "mlp_gate", "mlp_up")}
        assert dict(spec.storages) == dict.fromkeys(kept | layers, storage)
        assert {e.dtype for e in model.manifest.entries if e.name in kept} == {storage}
        assert all(model.tile(digest) for entry in model.manifest.entries for digest in entry.hashes)
        told = model.quantisation
        assert "layers.*.mlp_down" in told.left
        assert told.errors["query"][0] <= told.errors["query"][1] < ERRORS[how]

        shape = models.representative_shape(spec, 12)
        shape = shape.decode_step(12).with_want("task") if shape.session_rows else shape
        inputs = models.random_inputs(spec, shape, np.random.default_rng(0))
        _, expected = models.reference(spec, model.tensors(), inputs, shape)
        got = run_local(device_program(spec, ALONE, shape, "here"), model.weights(), inputs)
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)
        _, before = models.reference(spec, model.tensors_as_stored(), inputs, shape)
        assert 1e-4 < np.abs(before - expected).max() < np.abs(before).max()
    with Checkpoint.open(path) as plain:
        assert plain.quantisation is None
        assert plain.spec.storages == ()
        assert plain.manifest.digest != model.manifest.digest


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_blocks_are_those_of_ggml(name):
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    x[3] = 0
    np.testing.assert_array_equal(STORAGES[name].stored(x), quantised(x, name))


@pytest.mark.parametrize("case", ["bert", "resnet", "gpt2", "whisper", "gguf", "infinite"])
def test_what_cannot_be_quantised_is_refused(tmp_path, case):
    path = make_model(f"tiny-{case}" if case in ("bert", "resnet", "gpt2", "whisper") else "tiny-llama", tmp_path / "m")
    if case == "gguf":
        path = converted(path, tmp_path / "m.gguf", "q8_0")
    elif case == "infinite":
        weights = load_file(path / "model.safetensors")
        weights["model.layers.0.self_attn.q_proj.weight"][1, 2] = np.inf
        save_file(weights, path / "model.safetensors")
    with pytest.raises(UnsupportedModelError), Checkpoint.open(path, weights="q4") as model:
        _ = model.manifest
