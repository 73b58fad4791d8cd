"""Configs become specs: what is read of the files of a model, and which file and key is wrong."""

import contextlib
import math
import re
from dataclasses import replace

import pytest
import sites

from hepti_mqtt import models
from hepti_mqtt.checkpoint import KINDS, Checkpoint, make_model, spec_of_kind
from hepti_mqtt.core.errors import ModelError, UnsupportedModelError
from hepti_mqtt.cost.memory import weights_bytes
from hepti_mqtt.models import decoder
from hepti_mqtt.models.kinds import kinds_of
from hepti_mqtt.strategies.plan_programs import resident_weights

# Without keys that would forbid another architecture in the same config.
BERT, VIT = (
    {k: v for k, v in KINDS[kind].config.items() if k not in ("model_type", "pad_token_id")}
    for kind in ("tiny-bert", "tiny-vit-classifier")
)
MODULES = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "word_embedding_dimension": 32}
PICTURES = {"image_mean": 0.5, "image_std": 0.5, "resample": 2, "size": 20}


def spec_of(base, extras=None, **changes):
    extras = {"preprocessor_config.json": PICTURES, **(extras or {})} if "image_size" in base else extras
    config = {k: v for k, v in {**base, **changes}.items() if v != "absent"}
    return models.spec_from_config(config, extras or {})


SENTENCE = {"modules.json": MODULES, "1_Pooling/config.json": MEAN}
CLASSIFIER = {"architectures": ["BertForSequenceClassification"]}
DEBERTA = KINDS["tiny-deberta"].config

WRONG = [
    *((DEBERTA, {"position_buckets": value}) for value in (-1, 1, 80)),
    (DEBERTA, {"max_relative_positions": 3.5}),
    *((BERT, {"hidden_size": value}) for value in (0, "32", True, 33)),
    (BERT, {"num_hidden_layers": -1}),
    *((BERT, {"layer_norm_eps": value}) for value in (0, math.nan)),
    *((BERT, {"architectures": value}) for value in ([], "BertModel")),
    (BERT, {"max_position_embeddings": 2, "architectures": ["RobertaModel"]}),
    (BERT, {"pad_token_id": "x", "architectures": ["RobertaModel"]}),
    *((BERT, {"id2label": value, **CLASSIFIER}) for value in ({}, {"a": "b"}, {"0": "a", "9": "b"}, 5)),
    (BERT, {"num_labels": 0, **CLASSIFIER}),
    *((VIT, {"patch_size": value}) for value in (6, 2.5)),
    *((VIT, {"image_size": value}) for value in ([20, 30], 0)),
    (KINDS["tiny-gemma3"].config, {"use_bidirectional_attention": "all"}),
    (KINDS["tiny-qwen3"].config, {"num_key_value_heads": 4}),
    (KINDS["tiny-qwen3"].config, {"layer_types": ["chunked_attention"] * 3}),
    (KINDS["tiny-smollm3"].config, {"no_rope_layers": [2, 1, 1, 0]}),
    (KINDS["tiny-granite"].config, {"attention_multiplier": 0}),
    (KINDS["tiny-qwen2"].config, {"rope_scaling": {"type": "linear", "factor": 0.5}}),
    (KINDS["tiny-llama"].config, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
    (KINDS["tiny-llama"].config, {"num_key_value_heads": 3}),
    (KINDS["tiny-llama"].config, {"eos_token_id": 211}),
]
UNSUPPORTED = [
    *((DEBERTA, {key: None}) for key in ("relative_attention", "share_att_key", "position_biased_input")),
    *((DEBERTA, {"pos_att_type": value}) for value in (None, "c2p", ["p2c"], 7)),
    (DEBERTA, {"norm_rel_ebd": "none"}),
    (DEBERTA, {"conv_kernel_size": 3}),
    *((DEBERTA, {key: 24}) for key in ("embedding_size", "pooler_hidden_size", "attention_head_size")),
    (DEBERTA, {"model_type": "deberta", "architectures": ["DebertaModel"]}),
    *((BERT, {"architectures": value}) for value in (["T5ForConditionalGeneration"], [5])),
    *((BERT, {"hidden_act": value}) for value in ("mish", ["gelu"])),
    (BERT, {"position_embedding_type": "relative_key"}),
    (BERT, {"is_decoder": True}),
    (VIT, {"num_channels": 1}),
    (VIT, {"head_dim": 9}),
    *((VIT, {"architectures": ["ViTModel"], **more}) for more in ({"pooler_act": "relu"}, {"pooler_output_size": 20})),
    *((KINDS["tiny-albert"].config, {key: 2}) for key in ("num_hidden_groups", "inner_group_num")),
    (KINDS["tiny-distilbert"].config, {"activation": "mish"}),
    (KINDS["tiny-distilbert"].config, {"architectures": ["BertModel"]}),
    (KINDS["tiny-electra"].config, {"architectures": ["ElectraForPreTraining"]}),
    (KINDS["tiny-qwen3"].config, {"causal_mode": "prefix"}),
    (KINDS["tiny-gemma3"].config, {"attention_sinks": 4}),
    (KINDS["tiny-gemma3"].config, {"attn_logit_softcapping": 50.0}),
    (KINDS["tiny-qwen3"].config, {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    (KINDS["tiny-gemma3-text"].config, {"final_logit_softcapping": 30.0}),
    (KINDS["tiny-gemma3-text"].config, {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}),
    (KINDS["tiny-phi3"].config, {"partial_rotary_factor": 0.75}),
    (KINDS["tiny-phi3"].config, {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}}),
    (KINDS["tiny-smollm3"].config, {"use_sliding_window": True}),
    (KINDS["tiny-smollm3"].config, {"layer_types": ["sliding_attention"] * 4}),
    (KINDS["tiny-llama"].config, {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}),
    (KINDS["tiny-llama"].config, {"sliding_window": 8}),
    (KINDS["tiny-llama"].config, {"rope_interleaved": True}),
    (KINDS["tiny-llama"].config, {"hidden_act": "gelu_10"}),
    (
        KINDS["tiny-modernbert"].config,
        {"classifier_pooling": "max", "architectures": ["ModernBertForSequenceClassification"]},
    ),
    (KINDS["tiny-nomic"].config, {"auto_map": {"AutoModel": "somebody/else--modeling.NomicBertModel"}}),
    (KINDS["tiny-nomic"].config, {"rotary_emb_interleaved": True}),
]
POOLINGS = (
    {**MEAN, "pooling_mode_cls_token": True},
    {"pooling_mode_mean_tokens": 1},
    [],
    {"pooling_mode": "median"},
    {"pooling_mode": ["mean", "cls"]},
    {"pooling_mode": 1},
)
PROMPTS = ({"default_prompt_name": "q"}, {"default_prompt_name": "q", "prompts": {"q": 1}}, [])
PROMPT = "config_sentence_transformers.json"
ASKED = {"default_prompt_name": "q", "prompts": {"q": "x"}}
POOLED = {"1_Pooling/config.json": MEAN}
WRONG_FILES = [
    *({"modules.json": value} for value in ({}, [1], MODULES, MODULES[:1])),
    {"modules.json": [*MODULES[:2], {"type": "sentence_transformers.models.Dense"}]},
    {"modules.json": [{**MODULES[0], "path": "0_Transformer"}, *MODULES[1:]]},
    {
        "modules.json": [{**m, "type": m["type"].replace("sentence_transformers", "custom_st")} for m in MODULES],
        **POOLED,
    },
    *({"1_Pooling/config.json": pooling, "modules.json": MODULES} for pooling in POOLINGS),
    {"tokenizer_config.json": {"model_max_length": "9"}, **SENTENCE},
    {"sentence_bert_config.json": {"max_seq_length": "128"}, **SENTENCE},
    *({PROMPT: value, **SENTENCE} for value in PROMPTS),
    {PROMPT: ASKED, **SENTENCE, "1_Pooling/config.json": {**MEAN, "include_prompt": False}},
]
REQUIRED = {
    *("architectures", "vocab_size", "max_position_embeddings", "image_size", "patch_size"),
    *("hidden_act", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
    *("activation", "dim", "hidden_dim", "n_heads", "n_layers"),
}


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
    image = spec_of(VIT, {"preprocessor_config.json": {"resample": 3, "size": 20, **pre}}).image
    for channel in range(3):
        for pixel in (0, 17, 255):
            value = pixel * pre.get("rescale_factor", 1 / 255) if pre.get("do_rescale", True) else pixel
            if pre.get("do_normalize", True):
                mean, std = ([v] * 3 if isinstance(v, float) else v for v in (pre["image_mean"], pre["image_std"]))
                value = (value - mean[channel]) / std[channel]
            assert (pixel / 255 - image.mean[channel]) / image.std[channel] == pytest.approx(value)


def test_sentence_transformers_directories():
    extras = {**SENTENCE, "sentence_bert_config.json": {}}
    head = spec_of(BERT, extras).head
    assert (head.pooling, head.normalize, head.pooler) == ("mean", True, False)
    cls = {"pooling_mode_cls_token": True}
    head = spec_of(BERT, {"modules.json": MODULES[:2], "1_Pooling/config.json": cls}).head
    assert (head.pooling, head.normalize, head.pooler) == ("cls", False, False)
    for length, want in [(16, 16), (64, 40), (None, 40)]:
        extras["sentence_bert_config.json"] = {"max_seq_length": length}
        assert spec_of(BERT, extras).max_tokens == want
    for mode in ("mean", "cls", ["mean"]):  # as version 6 names it
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
    assert spec_of(BERT, files).max_tokens == min(own or 40, 40)  # no directory of sentence-transformers


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "RobertaForMaskedLM", "ElectraForMaskedLM"])
def test_sentence_transformers_leave_out_the_head_for_masks(architecture):
    extras = {"modules.json": MODULES, "1_Pooling/config.json": MEAN}
    config = {"architectures": [architecture], "pad_token_id": 1, "embedding_size": 32}
    spec = spec_of(BERT, extras, **config)
    assert (spec.head.task, spec.head.pooling, spec.head.normalize) == ("embedding", "mean", True)
    assert not [source for source in models.tensor_sources(spec) if source.name.startswith("head.")]
    assert spec_of(BERT, **config).head.task == "masked_token"


@pytest.mark.parametrize("base", [BERT, VIT, KINDS["tiny-distilbert"].config], ids=["bert", "vit", "distilbert"])
def test_a_missing_key_is_named_with_its_file(base):
    for key in REQUIRED & base.keys():
        for absent in ("absent", None):
            with pytest.raises(ModelError) as caught:
                spec_of(base, **{key: absent})
            assert "config.json" in str(caught.value)
            assert f"'{key}'" in str(caught.value)
    with pytest.raises(ModelError):
        models.spec_from_config([], {})


@pytest.mark.parametrize("extras", WRONG_FILES, ids=lambda value: str(value)[:60])
def test_wrong_sentence_transformers_files_are_named(extras):
    with pytest.raises(ModelError):
        spec_of(BERT, extras)


@pytest.mark.parametrize(
    "pre",
    [
        *({"size": value} for value in ({"height": 384, "width": 384}, 224)),
        {"do_center_crop": True},
        [],
    ],
    ids=str,
)
def test_wrong_preprocessors_are_named(pre):
    with pytest.raises(ModelError) as caught:
        spec_of(VIT, {"preprocessor_config.json": {**PICTURES, **pre} if isinstance(pre, dict) else pre})
    assert "preprocessor_config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "model_type", "fits"),
    [
        ("BertModel", "bert", True),
        ("XLMRobertaModel", "xlm-roberta", True),
        ("BertModel", "deberta", False),
        ("RobertaModel", "bert", False),
        ("XLMRobertaModel", "roberta", False),
        ("BertModel", 7, False),
    ],
)
def test_an_architecture_of_another_type_is_refused(architecture, model_type, fits):
    config = {**BERT, "pad_token_id": 1, "architectures": [architecture], "model_type": model_type}
    with contextlib.nullcontext() if fits else pytest.raises(UnsupportedModelError):
        models.spec_from_config(config, {})


@pytest.mark.parametrize(
    ("family", "architecture"), [(name, a) for name, f in models.FAMILIES.items() for a in f.ARCHITECTURES]
)
def test_every_architecture_has_a_spec_that_travels_and_tensors_with_unique_names(family, architecture):
    kinds = [
        (config, kind.extras) for kind in kinds_of(family).values() for config in models.models_of(kind.config).values()
    ]
    config, extras = next((one for one in kinds if one[0]["architectures"] == [architecture]), kinds[0])
    other = {} if config["architectures"] == [architecture] else {"model_type": "absent"}
    spec = spec_of(config, extras, architectures=[architecture], **other)
    assert models.spec_from_dict(spec.to_dict()) == replace(spec, head=replace(spec.head, labels=()))
    sources = models.tensor_sources(spec)
    names = [source.name for source in sources]
    assert len(set(names)) == len(names)
    for source in sources:
        ref = models.full_ref(spec, source.name)
        if ref.tensor != source.name:  # a table that is the matrix to the logits too
            assert (source.name, ref) == ("stem.word", models.full_ref(spec, "head.decoder.weight"))
            continue
        assert (ref.rows[1], ref.columns[1]) == ((1, *source.shape)[-2:])
        assert ref.layout == source.layout
    # Different tensors never share a stored name, except the decoder and the word embeddings, which may be tied.
    tied = {s.name: s.stored for s in sources if s.name in ("stem.word", "head.decoder.weight")}
    own = [s for s in sources if s.name not in tied and s.projected is None]
    stored = [(name, None) for s in own if not s.places for name in s.stored]
    stored += [(place.name, place.first) for s in own for place in s.places]
    if spec.head.tied:
        assert set(tied["stem.word"]) == set(tied["head.decoder.weight"])
    else:
        stored += [(name, None) for names in tied.values() for name in names]
    assert len(set(stored)) == len(stored)
    with pytest.raises(KeyError):
        models.full_ref(spec, "absent")


def test_an_albert_of_any_depth_is_as_large_as_one_layer():
    plans, totals = {}, {}
    for layers in (1, 2, 7, 12):
        spec = spec_of_kind("tiny-albert", layers)
        plans[layers] = sites.plan(spec, ("single", {}), (1.0,))
        refs = resident_weights(spec, plans[layers], "d0")
        assert len(refs) == len(set(refs)) == len(models.tensor_sources(spec))
        totals[layers] = weights_bytes(refs)
    assert len(set(totals.values())) == 1


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("tiny-bert", "tiny-albert"),
        ("tiny-electra", "tiny-bert"),
        ("tiny-resnet", "tiny-vgg"),
        ("tiny-vgg", "tiny-bert"),
    ],
)
def test_weights_of_another_family_are_refused(kind, given, tmp_path):
    path = make_model(kind, tmp_path / "m")
    other = make_model(given, tmp_path / "other")
    (other / "model.safetensors").rename(path / "model.safetensors")
    with pytest.raises(ModelError):
        Checkpoint.open(path)


LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA, QWEN2, GEMMA3 = (KINDS[f"tiny-{name}"].config for name in ("llama", "qwen2", "gemma3-text"))
# Two configs that transformers reads alike, or one that its versions read in different ways.
DECODERS = [
    (LLAMA, {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, None),
    (LLAMA, {"rope_scaling": LINEAR, "rope_parameters": LINEAR}, {"rope_scaling": LINEAR}),
    (LLAMA, {"original_max_position_embeddings": 64}, None),
    (LLAMA, {"original_max_position_embeddings": 32}, {}),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, None),
    (QWEN2, {"rope_scaling": YARN}, {"rope_scaling": {**YARN, "original_max_position_embeddings": 96}}),
    (
        QWEN2,
        {"rope_scaling": YARN, "original_max_position_embeddings": 24},
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 24}},
    ),
    (QWEN2, {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}, {}),
    (QWEN2, {"use_sliding_window": True, "max_window_layers": 0}, {"layer_types": ["sliding_attention"] * 2}),
    (GEMMA3, {"layer_types": None, "_sliding_window_pattern": 2}, {"layer_types": None}),
    (GEMMA3, {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, None),
    (KINDS["tiny-gpt2"].config, {"is_causal": False}, None),
    (KINDS["tiny-gemma3"].config, {"architectures": ["Gemma3ForCausalLM"]}, None),
    (KINDS["tiny-qwen3-text"].config, {"is_causal": False}, None),
    (KINDS["tiny-gpt2"].config, {"is_causal": True}, {}),
]


@pytest.mark.parametrize(("base", "changes", "alike"), DECODERS)
def test_a_decoder_is_read_as_by_transformers_or_refused(base, changes, alike):
    if alike is None:
        with pytest.raises(UnsupportedModelError):
            spec_of(base, **changes)
        return
    if "layer_types" in alike and base is QWEN2:
        alike = {**alike, "use_sliding_window": True}
    assert spec_of(base, **changes) == spec_of(base, **alike)


@pytest.mark.parametrize("architecture", decoder.DECODERS)
def test_a_missing_epsilon_is_the_default_of_the_class_in_transformers(architecture):
    coarse = ("Phi3ForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM", "GptOssForCausalLM")
    kinds = [kind.config for kind in KINDS.values() if kind.config["architectures"] == [architecture]]
    config = {key: value for key, value in kinds[-1].items() if key != "rms_norm_eps"}
    assert spec_of(config) == spec_of(config, rms_norm_eps=1e-5 if architecture in coarse else 1e-6)


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 32
# Values of positions and windows that no model has: a key, and what it must not be.
POSITIONS = [
    *((YARN, "attention_factor", value) for value in (0, -1, "1", math.nan, [1])),
    *((YARN, key, 0) for key in ("beta_fast", "beta_slow", "factor", "original_max_position_embeddings")),
    *((YARN, key, -1) for key in ("mscale", "mscale_all_dim")),
    *((YARN, *pair) for pair in (("truncate", 1), ("factor", 0.5), ("factor", None), ("unheard_of", 1))),
    *((LLAMA3, key, value) for key in ("low_freq_factor", "high_freq_factor") for value in (0, None, "2")),
    *((LLAMA3, *pair) for pair in (("high_freq_factor", 1.0), ("original_max_position_embeddings", -3))),
    *((LINEAR, "factor", value) for value in (None, 0, True)),
    ({"type": "dynamic", "factor": 4.0}, "rope_type", "dynamic"),
]
WINDOWS = [
    *((QWEN2, {"use_sliding_window": True}, "max_window_layers", value) for value in (-1, 1.5, "2")),
    *((QWEN2, {"use_sliding_window": True}, "sliding_window", value) for value in (0, 2.5)),
    (QWEN2, {}, "use_sliding_window", "yes"),
    (GEMMA3, {}, "sliding_window", 0),
    (GEMMA3, {"layer_types": None}, "sliding_window_pattern", 0),
    *((LLAMA, {}, "rope_scaling", value) for value in ("yarn", [YARN])),
    *((LLAMA, {"rope_scaling": YARN}, "rope_theta", value) for value in (0, 1, "10000")),
]


@pytest.mark.parametrize(
    ("base", "changes", "key"),
    [(LLAMA, {"rope_scaling": {**scaling, key: value}}, key) for scaling, key, value in POSITIONS]
    + [(base, {**more, key: value}, key) for base, more, key, value in WINDOWS],
)
def test_a_value_of_positions_that_makes_no_sense_is_refused_by_its_key(base, changes, key):
    assert spec_of(base, **{name: value for name, value in changes.items() if name != key} | {"rope_scaling": None})
    with pytest.raises(ModelError) as caught:
        spec_of(base, **changes)
    assert "config.json" in str(caught.value)
    assert re.search(rf"\b{key}\b", str(caught.value)), caught.value


SEEING = ["tiny-vit", "tiny-beit", "tiny-clip", "tiny-siglip", "tiny-smolvlm", "tiny-gemma3-eyes", "tiny-efficientnet"]
PIXELS = [
    *({"image_mean": value} for value in (None, [0.5] * 2, [0.5] * 4, "0.5", [0.5, math.nan, 0.5], [True] * 3)),
    *({"image_std": value} for value in (None, 0, [0.5, 0, 0.5], [-0.5] * 3, [0.5] * 2, {"r": 1})),
    *({"rescale_factor": value} for value in (0, -1, "1/255")),
    *({"resample": value} for value in (9, -1, True, "bilinear")),
    *({"size": value} for value in (0, {"height": 0, "width": 0}, {"shortest_edge": -4}, "20")),
    *({key: 1} for key in ("do_normalize", "do_rescale", "do_resize")),
]


@pytest.mark.parametrize("kind", SEEING)
def test_a_value_of_pictures_that_makes_no_sense_is_refused_by_its_key(kind):
    config, extras = models.models_of(KINDS[kind].config), KINDS[kind].extras
    config = config.get("image", config.get(""))
    file = "preprocessor_config.json"
    for change in PIXELS:
        with pytest.raises(ModelError) as caught:
            models.spec_from_config(config, {**extras, file: {**extras[file], **change}})
        assert file in str(caught.value), change
        assert next(iter(change)) in str(caught.value), change


def names_in(value):
    """Yield the keys and values of JSON as texts."""
    if isinstance(value, dict):
        yield from map(str, value)
        yield from (name for one in value.values() for name in names_in(one))
    elif isinstance(value, list):
        yield from (name for one in value for name in names_in(one))
    else:
        yield str(value)


@pytest.mark.parametrize(
    ("base", "changes", "error"),
    [*((*row, ModelError) for row in WRONG), *((*row, UnsupportedModelError) for row in UNSUPPORTED)],
)
def test_a_config_is_refused_by_what_is_wrong_or_not_supported(base, changes, error):
    with pytest.raises(error) as caught:
        spec_of(base, **changes)
    assert type(caught.value) is error
    assert any(name in str(caught.value) for name in names_in(changes))


def test_labels_and_activations():
    bert = {**BERT, **CLASSIFIER}
    assert spec_of(bert).head.labels == ("LABEL_0", "LABEL_1")
    assert spec_of(bert, num_labels=3).head.outputs == 3
    assert spec_of(bert, id2label={0: "no", 1: "yes"}).head.labels == ("no", "yes")
    some = {"0": "a", "1": "b", "3": "d"}  # a number without a name is a label too
    assert spec_of(bert, id2label=some).head.labels == ("a", "b", "LABEL_2", "d")
    assert spec_of(bert, id2label=some, num_labels=5).head.outputs == 5
    known = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
    assert {name: spec_of(BERT, hidden_act=name).activation for name in known} == known
    for architecture, activation in (("BertForMaskedLM", "relu"), ("RobertaForMaskedLM", "gelu")):
        masks = spec_of(BERT, architectures=[architecture], hidden_act="relu", pad_token_id=1)
        assert masks.head.activation == activation, "of the head alone"


@pytest.mark.parametrize(
    ("kind", "key", "other"),
    [("tiny-qwen3-moe", "num_experts", "num_local_experts"), ("tiny-mixtral", "num_local_experts", "num_experts")],
)
def test_the_number_of_experts_has_either_name(kind, key, other):
    config = dict(KINDS[kind].config)
    renamed = {**config, other: config[key]}
    del renamed[key]
    assert models.spec_from_config(renamed, {}) == models.spec_from_config(config, {})
    with pytest.raises(ModelError):
        models.spec_from_config({**config, other: 99}, {})
