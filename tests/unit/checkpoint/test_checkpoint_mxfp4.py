"""Experts in MXFP4 in safetensors: the values that codes and exponents stand for, whatever part is read."""

import numpy as np
import pytest
from gguf_writer import FP4
from question_cases import put
from safetensors.numpy import load_file, save_file

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.core.errors import ModelError, UnsupportedModelError

PACKING = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def packed(path, **config):
    """Replace the experts of a model by codes and exponents; return what these stand for, by stored name."""
    weights, values = load_file(path / "model.safetensors"), {}
    rng = np.random.default_rng(5)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        codes = rng.integers(0, 16, (experts, outputs, inputs), np.uint8)
        exponents = rng.integers(118, 128, (experts, outputs, inputs // 32), np.uint8)
        weights[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(experts, outputs, -1, 16)
        weights[f"{name}_scales"] = exponents
        values[name] = FP4[codes] * 2.0 ** (exponents.repeat(32, axis=2).astype(int) - 127)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    put("config.json", quantization_config=PACKING | config)(path)
    return values


def test_packed_experts_have_the_values_of_their_codes(tmp_path):
    path = make_model("tiny-gpt-oss", tmp_path / "m")
    with Checkpoint.open(path) as numbers:
        plain = dict(numbers.tensors())
    values = packed(path)
    with Checkpoint.open(path) as model:
        assert model.widened == {"mxfp4": "q8_0"}
        assert model.spec.storage_of("layers.1.experts.3.down.weight") == "q8_0"
        assert all(model.tile(digest) for entry in model.manifest.entries for digest in entry.hashes)
        tensors = model.tensors()
        for layer in range(2):
            up, down = (values[f"model.layers.{layer}.mlp.experts.{part}_proj"] for part in ("gate_up", "down"))
            for e in range(6):
                here = f"layers.{layer}.experts.{e}."
                np.testing.assert_array_equal(tensors[f"{here}gate.weight"], up[e, ::2].T)
                np.testing.assert_array_equal(tensors[f"{here}up.weight"], up[e, 1::2].T)
                np.testing.assert_array_equal(tensors[f"{here}down.weight"], down[e].T)
            for name in (f"layers.{layer}.experts.{part}.bias" for part in ("gate", "up", "down")):
                np.testing.assert_array_equal(tensors[name], plain[name])


@pytest.mark.parametrize("fault", ["fp8", "bitsandbytes", "no exponents", "another family"])
def test_other_packings_are_refused(tmp_path, fault):
    path = make_model("tiny-mixtral" if fault == "another family" else "tiny-gpt-oss", tmp_path / "m")
    packed(path, **({"quant_method": fault} if fault in ("fp8", "bitsandbytes") else {}))
    if fault == "no exponents":
        weights = load_file(path / "model.safetensors")
        del weights["model.layers.0.mlp.experts.down_proj_scales"]
        save_file(weights, path / "model.safetensors")
    with pytest.raises(ModelError if fault == "no exponents" else UnsupportedModelError):
        Checkpoint.open(path)
