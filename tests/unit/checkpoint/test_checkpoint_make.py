"""Seeded checkpoints: weights depend on seed and name alone."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from hepti_mqtt.checkpoint import KINDS, Checkpoint, make_model, spec_of_kind
from hepti_mqtt.core.errors import ConfigError, ModelError
from hepti_mqtt.models import tensor_sources
from hepti_mqtt.models.shapes import TextInput

TEXTS = [kind for kind in KINDS if kind.startswith("tiny") and isinstance(spec_of_kind(kind).input_spec, TextInput)]


@pytest.mark.parametrize("kind", TEXTS)
def test_every_tiny_kind_of_texts_has_its_tokenizer(tmp_path, kind):
    with Checkpoint.open(make_model(kind, tmp_path / kind)) as checkpoint:
        assert checkpoint.tokenizer.get_vocab_size() == checkpoint.spec.input_spec.vocab
        assert checkpoint.mask_id == 4
        ids = checkpoint.tokenizer.encode("the Unseen word, 42!").ids
        assert len(ids) > 6
        assert checkpoint.tokenizer.decode(ids).startswith("the u")


# Of published models; folded: what is folded into the layer before, norms and scales of layers.
@pytest.mark.parametrize(
    ("kind", "published", "folded"),
    [
        *(("bert-base", 109.48e6, 0), ("bert-large", 335.14e6, 0), ("minilm", 22.57e6, 0)),
        *(("vit-base", 86.57e6, 0), ("vit-large", 304.33e6, 0), ("vgg16", 138_357_544, 0)),
        *(("resnet18", 11_689_512, 4800), ("resnet50", 25_557_032, 26_560), ("mobilenet-v2", 3_504_872, 17_056)),
        *(("mobilenet-v3-large", 5_483_032, 12_200), ("convnext-tiny", 28_589_128, 6624)),
        ("efficientnet-b0", 5_288_548, 21_008),
    ],
)
def test_kinds_have_as_many_parameters_as_published(kind, published, folded):
    sources = [s for s in tensor_sources(spec_of_kind(kind)) if s.name != "head.decoder.weight"]  # which is tied
    parameters = sum(int(np.prod(source.shape)) for source in sources) + folded
    assert parameters == pytest.approx(published, abs=1e4 if isinstance(published, float) else 0)


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
