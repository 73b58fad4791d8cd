"""What DistilBERT, ALBERT and ELECTRA have of their own; what all families share is tested for every kind."""

from __future__ import annotations

import pytest
import sites

from hepti_mqtt import models
from hepti_mqtt.checkpoint import KINDS, Checkpoint, make_model, spec_of_kind
from hepti_mqtt.cost.memory import most_live_bytes, weight_total
from hepti_mqtt.errors import ModelError, UnsupportedModelError
from hepti_mqtt.plan_programs import program, resident_weights
from hepti_mqtt.program import WeightRef

ROW = ("row", {"variant": "kv"})


def spec_of(kind, **changes):
    return models.spec_from_config({**KINDS[kind].config, **changes}, {})


def names(spec):
    return {source.name for source in models.tensor_sources(spec)}


def test_distilbert_is_bert_without_token_types_and_pooler():
    spec = spec_of("tiny-distilbert")
    assert (spec.layers, spec.hidden, spec.heads, spec.mlp) == (3, 32, 4, 72)
    assert (spec.text.types, spec.text.width, spec.head.pooler) == (0, 0, False)
    assert names(spec) == names(spec_of("tiny-bert")) - {"stem.type.weight", "stem.type", *pooler()}
    assert spec_of("tiny-distilbert-classifier").head.activation == "relu"
    assert spec_of("tiny-distilbert-mlm", activation="gelu_new").head.activation == "gelu_tanh"


def pooler():
    return {"head.pooler.weight", "head.pooler.bias"}


def test_an_albert_of_any_depth_is_as_large_as_one_layer():
    plans, totals = {}, {}
    for layers in (1, 2, 7, 12):
        spec = spec_of_kind("tiny-albert", layers)
        plans[layers] = sites.plan(spec, ("single", {}), (1.0,))
        refs = resident_weights(spec, plans[layers], "d0")
        assert len(refs) == len(set(refs)) == len(models.tensor_sources(spec))
        totals[layers] = weight_total(refs)
    assert len(set(totals.values())) == 1


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0, 1.0)])
def test_a_device_of_an_albert_holds_every_range_once(weights):
    for method in sites.METHODS:
        if method[0] == "single" and len(weights) > 1:
            continue
        if method[0] == "pipeline":  # a stage of the flat model may be less than a layer
            continue
        deep, flat = (spec_of_kind("tiny-albert", layers) for layers in (9, 3))
        for device in range(len(weights)):
            held = [
                set(resident_weights(spec, sites.plan(spec, method, weights), f"d{device}")) for spec in (deep, flat)
            ]
            assert held[0] == held[1], method
            assert all(isinstance(ref, WeightRef) for ref in held[0])


def test_layers_of_an_albert_that_stand_for_many_name_the_shared_weights():
    spec = spec_of_kind("tiny-albert", 9)
    shape, _ = sites.request(spec, (9,))
    made = program(spec, sites.plan(spec, ROW, (1.0, 1.0)), shape, "d0")
    ups = [op for op in made.ops if "mlp_up" in str(getattr(op, "weights", ()))]
    assert len(ups) == 9
    assert {ref.tensor for op in ups for ref in op.weights} == {
        "layers.shared.mlp_up.weight",
        "layers.shared.mlp_up.bias",
    }
    assert most_live_bytes(spec, sites.plan(spec, ROW, (1.0, 1.0)), "d0") > 0


def test_electra_projects_its_embeddings_where_they_have_other_columns():
    assert spec_of("tiny-electra").text.width == 24
    assert "stem.projection.weight" in names(spec_of("tiny-electra"))
    same = spec_of("tiny-electra", embedding_size=32)
    assert same.text.width == 0
    assert "stem.projection.weight" not in names(same)
    assert spec_of("tiny-electra-classifier", hidden_act="relu").head.activation == "gelu"


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("tiny-albert", {"num_hidden_groups": 2}, "num_hidden_groups 2 is not supported; supported: 1"),
        ("tiny-albert", {"inner_group_num": 2}, "inner_group_num 2 is not supported; supported: 1"),
        ("tiny-albert", {"position_embedding_type": "relative_key"}, "supported: 'absolute'"),
        ("tiny-distilbert", {"activation": "swish"}, "activation 'swish' is not supported; supported: gelu"),
        ("tiny-electra", {"is_decoder": True}, "is_decoder True is not supported; supported: False"),
        ("tiny-electra", {"architectures": ["ElectraForPreTraining"]}, "supported: .*ElectraForSequenceClassification"),
        (
            "tiny-distilbert",
            {"architectures": ["BertModel"]},
            "'BertModel' is not of model_type 'distilbert'; supported with it: DistilBertModel, ",
        ),
    ],
)
def test_what_is_not_supported_says_what_is(kind, changes, says):
    with pytest.raises(UnsupportedModelError, match=says):
        spec_of(kind, **changes)


@pytest.mark.parametrize("key", ["dim", "n_heads", "n_layers", "hidden_dim", "activation"])
def test_a_missing_key_has_distilberts_name(key):
    with pytest.raises(ModelError, match=rf"config\.json: key '{key}' is missing"):
        spec_of("tiny-distilbert", **{key: None})


@pytest.mark.parametrize(("kind", "given"), [("tiny-albert", "tiny-bert"), ("tiny-bert", "tiny-electra")])
def test_weights_of_another_family_are_told_by_their_name(kind, given, tmp_path):
    path = make_model(kind, tmp_path / "m")
    other = make_model(given, tmp_path / "other")
    (other / "config.json").rename(path / "config.json")
    wanted = KINDS[kind].config["architectures"][0]
    with pytest.raises(ModelError, match=f"lacks .*another family than .*{wanted}.*restore config.json or the weights"):
        Checkpoint.open(path)
