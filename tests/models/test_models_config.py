from __future__ import annotations

import math

import pytest

from hepti_mqtt import models
from hepti_mqtt.errors import ModelError, UnsupportedModelError
from hepti_mqtt.program import WeightRef

BERT = {
    "architectures": ["BertModel"],
    "hidden_act": "gelu",
    "hidden_size": 32,
    "intermediate_size": 72,
    "max_position_embeddings": 40,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "type_vocab_size": 2,
    "vocab_size": 211,
}
VIT = {
    "architectures": ["ViTForImageClassification"],
    "hidden_act": "gelu",
    "hidden_size": 48,
    "image_size": 20,
    "intermediate_size": 100,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "patch_size": 5,
}
MODULES = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "word_embedding_dimension": 32}


NO_PROMPT = {"1_Pooling/config.json": {**MEAN, "include_prompt": False}}


def prompted(options):
    files = {"modules.json": MODULES, "1_Pooling/config.json": MEAN}
    return {**files, "config_sentence_transformers.json": options}


def spec_of(base, extras=None, **changes):
    config = {k: v for k, v in {**base, **changes}.items() if v != "absent"}
    return models.spec_from_config(config, extras or {})


def test_a_bert_config_becomes_a_spec():
    spec = spec_of(BERT, layer_norm_eps=1e-6)
    assert (spec.family, spec.architecture, spec.norm_first) == ("bert", "BertModel", False)
    assert (spec.layers, spec.hidden, spec.heads, spec.mlp, spec.head_dim) == (3, 32, 4, 72, 8)
    assert (spec.norm_eps, spec.max_tokens, spec.activation) == (1e-6, 40, "gelu")
    assert (spec.text.vocab, spec.text.positions, spec.text.types, spec.text.position_offset) == (211, 40, 2, 0)
    assert (spec.head.task, spec.head.pooling, spec.head.pooler) == ("embedding", "cls", True)


def test_a_vit_config_becomes_a_spec():
    pre = {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3], "size": {"height": 20, "width": 20}}
    spec = spec_of(VIT, {"preprocessor_config.json": pre}, id2label={"1": "dog", "0": "cat"})
    assert (spec.family, spec.norm_first, spec.max_tokens) == ("vit", True, 17)
    assert (spec.head.task, spec.head.outputs, spec.head.labels) == ("image_classification", 2, ("cat", "dog"))
    assert spec.image.mean == pytest.approx((0.1, 0.2, 0.3))
    assert spec.image.std == pytest.approx((1, 2, 3))
    assert spec_of(VIT).image.mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    "pre",
    [
        {"rescale_factor": 1 / 127.5, "image_mean": 1.0, "image_std": 2.0},
        {"do_rescale": False, "image_mean": [100, 110, 120], "image_std": [50, 60, 70]},
        {"do_normalize": False},
        {"do_normalize": False, "do_rescale": False},
    ],
)
def test_the_preprocessors_scale_goes_into_mean_and_std(pre):
    image = spec_of(VIT, {"preprocessor_config.json": pre}).image
    for channel in range(3):
        for pixel in (0, 17, 255):
            value = pixel * pre.get("rescale_factor", 1 / 255) if pre.get("do_rescale", True) else pixel
            if pre.get("do_normalize", True):
                mean, std = ([v] * 3 if isinstance(v, float) else v for v in (pre["image_mean"], pre["image_std"]))
                value = (value - mean[channel]) / std[channel]
            assert (pixel / 255 - image.mean[channel]) / image.std[channel] == pytest.approx(value)


def test_roberta_positions_begin_behind_the_padding_id():
    spec = spec_of(BERT, architectures=["RobertaForMaskedLM"], pad_token_id=1)
    assert (spec.text.position_offset, spec.max_tokens, spec.text.positions) == (2, 38, 40)
    assert (spec.head.pooling, spec.head.outputs) == ("mask", 211)
    assert spec_of(BERT, architectures=["XLMRobertaModel"], pad_token_id=4).text.position_offset == 5


@pytest.mark.parametrize(
    ("hidden_act", "activation"),
    [("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", "relu")],
)
def test_activations(hidden_act, activation):
    assert spec_of(BERT, hidden_act=hidden_act).activation == activation


def test_sentence_transformers_directories():
    extras = {"modules.json": MODULES, "1_Pooling/config.json": MEAN, "sentence_bert_config.json": {}}
    head = spec_of(BERT, extras).head
    assert (head.pooling, head.normalize, head.pooler) == ("mean", True, False)
    cls = {"pooling_mode_cls_token": True}
    head = spec_of(BERT, {"modules.json": MODULES[:2], "1_Pooling/config.json": cls}).head
    assert (head.pooling, head.normalize, head.pooler) == ("cls", False, False)
    limits = [(16, 16), (64, 40), (None, 40)]
    for length, want in limits:
        extras["sentence_bert_config.json"] = {"max_seq_length": length}
        assert spec_of(BERT, extras).max_tokens == want


@pytest.mark.parametrize("mode", ["mean", "cls", ["mean"]])
def test_sentence_transformers_6_names_the_pooling(mode):
    pooling = {"embedding_dimension": 32, "pooling_mode": mode, "include_prompt": True}
    head = spec_of(BERT, {"modules.json": MODULES, "1_Pooling/config.json": pooling}).head
    assert (head.task, head.pooling) == ("embedding", mode if isinstance(mode, str) else mode[0])


@pytest.mark.parametrize(
    ("length", "own", "want"),
    [(None, 16, 16), (None, 64, 40), (None, 10**30, 40), (None, 1e30, 40), (None, None, 40), (24, 16, 24)],
)
def test_without_a_limit_of_its_own_a_sentence_model_has_its_tokenizers(length, own, want):
    files = {
        "sentence_bert_config.json": {"max_seq_length": length},
        "tokenizer_config.json": {"model_max_length": own},
    }
    extras = {"modules.json": MODULES, "1_Pooling/config.json": MEAN, **files}
    assert spec_of(BERT, extras).max_tokens == want
    del extras["sentence_bert_config.json"]
    assert spec_of(BERT, extras).max_tokens == min(own or 40, 40)
    assert spec_of(BERT, files).max_tokens == (length or 40)  # no directory of sentence-transformers


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "RobertaForMaskedLM", "ElectraForMaskedLM"])
def test_sentence_transformers_leave_out_the_head_for_masks(architecture):
    extras = {"modules.json": MODULES, "1_Pooling/config.json": MEAN}
    config = {"architectures": [architecture], "pad_token_id": 1, "embedding_size": 32}
    spec = spec_of(BERT, extras, **config)
    assert (spec.head.task, spec.head.pooling, spec.head.normalize) == ("embedding", "mean", True)
    assert not [source for source in models.tensor_sources(spec) if source.name.startswith("head.")]
    assert spec_of(BERT, **config).head.task == "masked_token"


def test_labels_of_a_classifier():
    bert = {**BERT, "architectures": ["BertForSequenceClassification"]}
    assert spec_of(bert).head.labels == ("LABEL_0", "LABEL_1")
    assert spec_of(bert, num_labels=3).head.outputs == 3
    assert spec_of(bert, id2label={0: "no", 1: "yes"}).head.labels == ("no", "yes")


@pytest.mark.parametrize("base", [BERT, VIT], ids=["bert", "vit"])
def test_a_missing_key_is_named_with_its_file(base):
    for key in base:
        if key == "type_vocab_size":
            continue
        for absent in ("absent", None):
            with pytest.raises(ModelError, match=rf"config\.json: key '{key}' is missing"):
                spec_of(base, **{key: absent})


@pytest.mark.parametrize(
    ("base", "changes", "says"),
    [
        (BERT, {"hidden_size": 0}, "hidden_size"),
        (BERT, {"hidden_size": "32"}, "hidden_size"),
        (BERT, {"hidden_size": True}, "hidden_size"),
        (BERT, {"hidden_size": 33}, "does not divide"),
        (BERT, {"num_hidden_layers": -1}, "num_hidden_layers"),
        (BERT, {"layer_norm_eps": 0}, "layer_norm_eps"),
        (BERT, {"layer_norm_eps": math.nan}, "layer_norm_eps"),
        (BERT, {"architectures": []}, "architectures"),
        (BERT, {"architectures": "BertModel"}, "architectures"),
        (BERT, {"architectures": ["RobertaModel"], "max_position_embeddings": 2}, "leaves no position"),
        (BERT, {"architectures": ["RobertaModel"], "pad_token_id": "x"}, "pad_token_id"),
        (BERT, {"architectures": ["BertForSequenceClassification"], "id2label": {}}, "id2label"),
        (BERT, {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "2": "b"}}, "numbered 0"),
        (BERT, {"architectures": ["BertForSequenceClassification"], "num_labels": 0}, "num_labels"),
        (VIT, {"patch_size": 6}, "does not divide"),
        (VIT, {"image_size": [20, 30]}, "square"),
        (VIT, {"image_size": 0}, "image_size"),
    ],
)
def test_wrong_values_are_named(base, changes, says):
    with pytest.raises(ModelError, match=says):
        spec_of(base, **changes)


@pytest.mark.parametrize(
    ("base", "changes", "says"),
    [
        (BERT, {"architectures": ["T5ForConditionalGeneration"]}, "supported: BertModel.*ViTForImageClassification"),
        (BERT, {"architectures": [5]}, "supported: BertModel"),
        (BERT, {"hidden_act": "swish"}, "supported: gelu"),
        (BERT, {"hidden_act": ["gelu"]}, "supported: gelu"),
        (BERT, {"position_embedding_type": "relative_key"}, "supported: 'absolute'"),
        (BERT, {"is_decoder": True}, "is_decoder"),
        (VIT, {"num_channels": 1}, "num_channels"),
        (VIT, {"qkv_bias": False}, "qkv_bias"),
        (VIT, {"architectures": ["ViTModel"], "pooler_act": "relu"}, "pooler_act"),
        (VIT, {"architectures": ["ViTModel"], "pooler_output_size": 20}, "pooler_output_size"),
    ],
)
def test_what_is_not_supported_says_what_is(base, changes, says):
    with pytest.raises(UnsupportedModelError, match=says):
        spec_of(base, **changes)


@pytest.mark.parametrize(
    ("extras", "says"),
    [
        ({"modules.json": {}}, "modules.json: expected a JSON list"),
        ({"modules.json": [1]}, "modules.json: expected a JSON list"),
        ({"modules.json": MODULES}, r"1_Pooling/config\.json is missing"),
        ({"modules.json": MODULES[:1]}, "supported: Transformer"),
        ({"modules.json": [*MODULES[:2], {"type": "sentence_transformers.models.Dense"}]}, "Dense"),
        ({"modules.json": [{**MODULES[0], "path": "0_Transformer"}, *MODULES[1:]]}, "supported: Transformer"),
        ({"modules.json": MODULES, "1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, "pooling_mode_max"),
        ({"modules.json": MODULES, "1_Pooling/config.json": {**MEAN, "pooling_mode_cls_token": True}}, "pooling"),
        ({"modules.json": MODULES, "1_Pooling/config.json": {"pooling_mode_mean_tokens": 1}}, "true or false"),
        ({"modules.json": MODULES, "1_Pooling/config.json": []}, "expected a JSON object"),
        ({"modules.json": MODULES, "1_Pooling/config.json": {"pooling_mode": "max"}}, r"pooling \['max'\] is not"),
        ({"modules.json": MODULES, "1_Pooling/config.json": {"pooling_mode": ["mean", "cls"]}}, "'mean', 'cls'"),
        ({"modules.json": MODULES, "1_Pooling/config.json": {"pooling_mode": 1}}, r"pooling \[1\] is not"),
        (
            {
                "modules.json": MODULES,
                "1_Pooling/config.json": MEAN,
                "tokenizer_config.json": {"model_max_length": "9"},
            },
            "model_max_length",
        ),
        ({"sentence_bert_config.json": {"max_seq_length": "128"}}, "max_seq_length"),
        (prompted({"default_prompt_name": "q"}), "default_prompt_name 'q' is none of its prompts"),
        (prompted({"default_prompt_name": "q", "prompts": {"q": 1}}), "default_prompt_name 'q' is none of its prompts"),
        (prompted({"default_prompt_name": "q", "prompts": []}), "'prompts' must be an object"),
        (prompted([]), "config_sentence_transformers.json: expected a JSON object"),
        (
            {**prompted({"default_prompt_name": "q", "prompts": {"q": "x"}}), **NO_PROMPT},
            "include_prompt false is supported only without a default_prompt_name",
        ),
    ],
)
def test_wrong_sentence_transformers_files_are_named(extras, says):
    with pytest.raises(ModelError, match=says):
        spec_of(BERT, extras)


@pytest.mark.parametrize(
    ("pre", "says"),
    [
        ({"size": {"height": 384, "width": 384}}, "image_size 20"),
        ({"size": 224}, "image_size 20"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std"),
        ({"rescale_factor": 0}, "rescale_factor"),
        ({"do_normalize": "yes"}, "do_normalize"),
        ([], "expected a JSON object"),
    ],
)
def test_wrong_preprocessors_are_named(pre, says):
    with pytest.raises(ModelError, match=rf"preprocessor_config\.json.*{says}"):
        spec_of(VIT, {"preprocessor_config.json": pre})


def test_a_config_that_is_no_object_is_refused():
    with pytest.raises(ModelError, match="expected a JSON object"):
        models.spec_from_config([], {})


@pytest.mark.parametrize(
    ("family", "architecture"), [(f, a) for f in models.FAMILIES.values() for a in f.ARCHITECTURES]
)
def test_every_architecture_has_a_spec_that_travels_and_tensors_with_unique_names(family, architecture):
    kinds = list(family.KINDS.values())
    kind = next((k for k in kinds if k.config["architectures"] == [architecture]), kinds[0])
    spec = spec_of(kind.config, kind.extras, architectures=[architecture])
    assert models.spec_from_dict(spec.to_dict()) == spec
    sources = models.tensor_sources(spec)
    names = [source.name for source in sources]
    assert len(set(names)) == len(names)
    for source in sources:
        assert math.prod(source.shape) == math.prod(source.stored_shape)
        assert source.transposed == (source.layout == "packed" and spec.family != "gpt2") or "decoder" in source.name
        ref = models.full(spec, source.name)
        assert (ref.rows[1], ref.columns[1]) == ((1, *source.shape)[-2:])
        assert ref.layout == source.layout
    # Different tensors never share a stored name, except the decoder and the word embeddings, which may be tied.
    tied = {s.name: s.stored for s in sources if s.name in ("stem.word", "head.decoder.weight")}
    stored = [name for s in sources for name in s.stored if s.name not in tied]
    if spec.head.tied:
        assert set(tied["stem.word"]) == set(tied["head.decoder.weight"])
    else:
        stored += [name for names in tied.values() for name in names]
    assert len(set(stored)) == len(stored)
    with pytest.raises(KeyError):
        models.full(spec, "absent")


def test_references_name_ranges_in_the_layout_of_their_use():
    weight, bias = "layers.0.query.weight", "layers.0.query.bias"
    assert models.matrix_ref(weight, (0, 8), (2, 4)) == WeightRef(weight, (0, 8), (2, 4), "packed")
    assert models.vector_ref(bias, (2, 4)) == WeightRef(bias, (0, 1), (2, 4), "plain")


def test_one_number_cannot_be_a_label_or_a_size():
    with pytest.raises(ModelError, match="id2label"):
        spec_of(BERT, architectures=["BertForSequenceClassification"], id2label=5)
    with pytest.raises(ModelError, match="square"):
        spec_of(VIT, patch_size=2.5)
