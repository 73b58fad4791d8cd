"""CTranslate2's files: what was converted reads as the original does, and what is none is refused."""

import json
import struct

import numpy as np
import pytest

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.core.errors import ModelError, UnsupportedModelError

_PARTS = {"q_proj": 0, "k_proj": 1, "v_proj": 2}
_KINDS = {np.dtype("<f4"): 0, np.dtype("<i1"): 1, np.dtype("<i2"): 2, np.dtype("<f2"): 4}


def text(value):
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def converted(original, into, *, dtype="<f4", version=6, spec="WhisperSpec"):
    """Write a model as CTranslate2's converter does: joined matrices, zeros as the bias of keys."""
    into.mkdir()
    (into / "tokenizer.json").write_bytes((original / "tokenizer.json").read_bytes())
    rules = json.loads((original / "generation_config.json").read_text())
    own = {"suppress_ids": rules["suppress_tokens"], "suppress_ids_begin": rules["begin_suppress_tokens"]}
    (into / "config.json").write_text(json.dumps({**own, "is_multilingual": True, "lang_ids": []}))
    with Checkpoint.open(original) as whole:
        tensors, heads = whole.tensors(), whole.spec.heads
        variables = dict(variables_of(tensors, whole.spec.layers, whole.spec.decoder_layers))
    for name, value in (("num_heads", heads), ("pre_norm", 1), ("activation", 3), ("scale_embeddings", 0)):
        for side in ("encoder", "decoder"):
            variables[f"{side}/{name}"] = np.array(value, "<i2")
    out = [struct.pack("<I", version), text(spec), struct.pack("<I", 3)]
    stored = {}
    for name, array in variables.items():
        if array.ndim == 2 and name.endswith("weight") and dtype == "<i1":
            scale = 127 / np.abs(array).max(axis=1)
            stored[name], stored[f"{name}_scale"] = np.rint(array * scale[:, None]).astype("<i1"), scale.astype("<f4")
        else:
            stored[name] = array if array.ndim == 0 else array.astype("<f4" if dtype == "<i1" else dtype)
    out.append(struct.pack("<I", len(stored)))
    for name, array in stored.items():
        dims = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        out += [text(name), dims, struct.pack("<BI", _KINDS[array.dtype], array.nbytes), array.tobytes()]
    out += [struct.pack("<I", 1), text("decoder/projection/weight"), text("decoder/embeddings/weight")]
    (into / "model.bin").write_bytes(b"".join(out))
    return into


def variables_of(tensors, layers, decoders):
    for n, bands in (("1", "conv1"), ("2", "conv2")):
        matrix = tensors[f"stem.{bands}.weight"]  # [3 c, h], rows (place, channel)
        yield f"encoder/conv{n}/weight", matrix.reshape(3, -1, matrix.shape[1]).transpose(2, 1, 0)
        yield f"encoder/conv{n}/bias", tensors[f"stem.{bands}.bias"]
    yield "encoder/position_encodings/encodings", tensors["stem.sound_position"]
    yield "decoder/position_encodings/encodings", tensors["stem.position"]
    yield "decoder/embeddings/weight", tensors["stem.word"]
    for side, name in (("encoder", "final_norm"), ("decoder", "decoder.norm")):
        yield from norm_of(f"{side}/layer_norm", tensors, name)
    for side, first, count in (("encoder", 0, layers), ("decoder", layers, decoders)):
        for i in range(count):
            own, stored = f"layers.{first + i}.", f"{side}/layer_{i}/"
            yield from linear_of(f"{stored}self_attention/linear_0", tensors, own, "query", "key", "value")
            yield from linear_of(f"{stored}self_attention/linear_1", tensors, own, "attention_out")
            yield from norm_of(f"{stored}self_attention/layer_norm", tensors, f"{own}attention_norm")
            if side == "decoder":
                yield from linear_of(f"{stored}attention/linear_0", tensors, own, "cross_query")
                yield from linear_of(f"{stored}attention/linear_1", tensors, own, "cross_key", "cross_value")
                yield from linear_of(f"{stored}attention/linear_2", tensors, own, "cross_out")
                yield from norm_of(f"{stored}attention/layer_norm", tensors, f"{own}cross_norm")
            yield from linear_of(f"{stored}ffn/linear_0", tensors, own, "mlp_up")
            yield from linear_of(f"{stored}ffn/linear_1", tensors, own, "mlp_down")
            yield from norm_of(f"{stored}ffn/layer_norm", tensors, f"{own}mlp_norm")


def linear_of(name, tensors, own, *parts):
    yield f"{name}/weight", np.concatenate([tensors[f"{own}{part}.weight"].T for part in parts])
    yield f"{name}/bias", np.concatenate([tensors[f"{own}{part}.bias"] for part in parts])


def norm_of(name, tensors, own):
    yield f"{name}/gamma", tensors[f"{own}.weight"]
    yield f"{name}/beta", tensors[f"{own}.bias"]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make_model("tiny-whisper", tmp_path_factory.mktemp("speech") / "original")


@pytest.mark.parametrize(("dtype", "error"), [("<f4", 0.0), ("<f2", 1e-3), ("<i1", 1e-2)])
def test_a_converted_model_is_the_original(original, tmp_path, dtype, error):
    with (
        Checkpoint.open(original) as want,
        Checkpoint.open(converted(original, tmp_path / "c", dtype=dtype)) as got,
    ):
        assert got.spec == want.spec
        assert got.speech == want.speech
        assert got.languages == ("de", "en")
        for name, array in want.tensors().items():
            np.testing.assert_allclose(got.tensors()[name], array, atol=error * max(np.abs(array).max(), 1))
        assert all(got.tile(entry.hashes[0]) for entry in got.manifest.entries)


def test_what_is_no_such_model_is_refused(original, tmp_path):
    for number, (more, error) in enumerate(
        [({"version": 5}, UnsupportedModelError), ({"spec": "TransformerSpec"}, UnsupportedModelError)]
    ):
        with pytest.raises(error):
            Checkpoint.open(converted(original, tmp_path / str(number), **more))
    whole = converted(original, tmp_path / "cut") / "model.bin"
    data = whole.read_bytes()
    for size in (0, 3, 40, len(data) // 2, len(data) - 1):
        whole.write_bytes(data[:size])
        with pytest.raises(ModelError):
            Checkpoint.open(whole.parent)
    for noise in (b"\0" * 5000, b"\xff" * 5000, data[:4] + b"\xff" * 5000):
        whole.write_bytes(noise)
        with pytest.raises(ModelError):
            Checkpoint.open(whole.parent)
