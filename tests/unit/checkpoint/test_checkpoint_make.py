"""Seeded checkpoints: weights depend on seed and name alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from hepti_mqtt.checkpoint import KINDS, Checkpoint, make_model
from hepti_mqtt.core.errors import ConfigError, ModelError
from hepti_mqtt.models import spec_from_config, tensor_sources
from hepti_mqtt.models.shapes import TextInput

TINY = [kind for kind in KINDS if kind.startswith("tiny")]


@pytest.mark.parametrize("kind", TINY)
def test_every_tiny_kind_is_a_whole_directory(tmp_path, kind):
    with Checkpoint.open(make_model(kind, tmp_path / kind)) as checkpoint:
        spec = checkpoint.spec
        if isinstance(spec.input_spec, TextInput):
            assert checkpoint.tokenizer.get_vocab_size() == spec.input_spec.vocab
            assert checkpoint.mask_id == 4
            ids = checkpoint.tokenizer.encode("the Unseen word, 42!").ids
            assert len(ids) > 6
            assert checkpoint.tokenizer.decode(ids).startswith("the u")


def parameters(kind):
    """Return the parameters of a kind's checkpoint: all that its config asks for, the tied decoder once."""
    spec = spec_from_config(KINDS[kind].config, KINDS[kind].extras)
    return sum(int(np.prod(s.shape)) for s in tensor_sources(spec) if s.name != "head.decoder.weight")


@pytest.mark.parametrize(
    ("kind", "millions"),
    [("bert-base", 109.48), ("bert-large", 335.14), ("vit-base", 86.57), ("vit-large", 304.33), ("minilm", 22.57)],
)
def test_real_kinds_have_as_many_parameters_as_the_published_models(kind, millions):
    assert parameters(kind) / 1e6 == pytest.approx(millions, abs=0.01)


def weights(path):
    return load_file(path / "model.safetensors")


def test_weights_depend_on_seed_and_name_only(tmp_path):
    three = weights(make_model("tiny-bert", tmp_path / "three", seed=1))
    again = weights(make_model("tiny-bert", tmp_path / "again", seed=1))
    two = weights(make_model("tiny-bert", tmp_path / "two", seed=1, layers=2))
    other = weights(make_model("tiny-bert", tmp_path / "other", seed=2))
    assert two.keys() < three.keys()
    for name, value in three.items():
        np.testing.assert_array_equal(value, again[name])
        assert not np.array_equal(value, other[name])
        if name in two:
            np.testing.assert_array_equal(value, two[name])
    assert not np.array_equal(three["bert.pooler.dense.bias"], three["bert.embeddings.LayerNorm.bias"])


@pytest.mark.parametrize(
    "changes", [{"kind": "gpt"}, {"seed": -1}, {"layers": 0}, {"layers": 1001}, {"kind": "tiny-resnet", "layers": 2}]
)
def test_wrong_orders_are_config_errors(tmp_path, changes):
    with pytest.raises(ConfigError):
        make_model(**{"kind": "tiny-bert", "out": tmp_path / "m", **changes})
    assert not (tmp_path / "m").exists()


def test_nothing_is_overwritten(tmp_path):
    path = make_model("tiny-bert", tmp_path / "m")
    with pytest.raises(ConfigError):
        make_model("tiny-vit", path)
    assert json.loads((path / "config.json").read_text())["model_type"] == "bert"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        make_model("tiny-vit", tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert make_model("tiny-vit", tmp_path / "empty") == tmp_path / "empty"


def test_a_place_that_cannot_be_written_is_a_model_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError):
        make_model("tiny-bert", tmp_path / "file" / "below")
