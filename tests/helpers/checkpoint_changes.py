"""Model directories with one change each, and the requests that show what it does.

A change gets the directory's JSON files by name, tokenizer.json among them; a file that it takes out is not written.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import os
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from hepti_mqtt.checkpoint import make_model

CONFIG, TOKENIZER, OPTIONS = "config.json", "tokenizer.json", "tokenizer_config.json"
SPECIALS, GENERATION = "special_tokens_map.json", "generation_config.json"
PRE, PROCESSOR = "preprocessor_config.json", "processor_config.json"
BERT, MODULES, SENTENCE = "sentence_bert_config.json", "modules.json", "config_sentence_transformers.json"
POOLING = "1_Pooling/config.json"
ANSWERS = Path(__file__).resolve().parent.parent / "golden" / "checkpoints.npz"

# Kinds by the class of their tokenizer; XLM-RoBERTa's are RoBERTa's under other names.
WORDPIECE = (
    *("tiny-bert", "tiny-bert-classifier", "tiny-bert-mlm", "tiny-minilm"),
    *(f"tiny-{family}{head}" for family in ("distilbert", "electra") for head in ("", "-classifier", "-mlm")),
)
BYTES = ("tiny-roberta", "tiny-roberta-classifier", "tiny-roberta-mlm", "tiny-gpt2")
UNIGRAM = (
    *("tiny-albert", "tiny-albert-classifier", "tiny-albert-mlm"),
    *("tiny-xlm-roberta", "tiny-xlm-roberta-classifier", "tiny-xlm-roberta-mlm"),
)
TEXT = (*WORDPIECE, *BYTES, *UNIGRAM)
IMAGE = (
    *("tiny-vit", "tiny-vit-classifier", "tiny-hf-resnet", "tiny-hf-mobilenet"),
    *("tiny-deit", "tiny-deit-classifier", "tiny-deit-teacher", "tiny-dinov2", "tiny-dinov2-classifier"),
    *("tiny-dinov2-registers", "tiny-dinov2-registers-classifier", "tiny-beit", "tiny-beit-classifier"),
)
# Of these config.json alone is changed: their tokenizers are of the classes above, or count as they are.
CONFIGURED = (
    *("tiny-mpnet-mlm", "tiny-mpnet-classifier", "tiny-modernbert-mlm", "tiny-modernbert-classifier"),
    *("tiny-nomic-mlm", "tiny-nomic-classifier", "tiny-gte-mlm", "tiny-gte", "tiny-qwen3", "tiny-gemma3"),
    *("tiny-deberta", "tiny-deberta-classifier"),
    *(MIXTURES := tuple(f"tiny-{name}" for name in ("qwen3-moe", "mixtral", "olmoe", "granite-moe", "gpt-oss"))),
)
LAST = ("tiny-qwen3", "tiny-gemma3")  # causal ones: their last token is read
KINDS = (*TEXT, *CONFIGURED, *IMAGE)

LONG = " ".join(f"The {word} light {i}" for i, word in enumerate(("cold", "WARM", "door", "room") * 5))
PLAIN = ("  The caf\u00e9 SENSOR's light, 42!  ", "room \u5668 of``two''  doors \u00c9t\u00e9")
CONTROLS = ("a [SEP] b <s> [PAD] c </s>",)


@dataclass(frozen=True)
class Change:
    """A change of a directory, and the kinds that it is for; raw: bytes of files instead."""

    name: str
    kinds: tuple[str, ...]
    apply: Callable[[dict], None]
    raw: dict[str, Callable[[bytes], bytes]] | None = None


def put(file, **values):
    """Return a change that sets keys of a file."""

    def apply(files):
        files[file] = {**files.get(file, {}), **copy.deepcopy(values)}

    return apply


def drop(file, *keys):
    """Return a change that takes keys out of a file, or the whole file."""

    def apply(files):
        if keys:
            files[file] = {k: v for k, v in files[file].items() if k not in keys}
        else:
            files.pop(file, None)

    return apply


def parts(**values):
    """Return a change of the parts of tokenizer.json."""

    def apply(files):
        for name, value in values.items():
            here = files[TOKENIZER]
            *path, last = name.split("__")
            for step in path:
                here = here[step]
            here[last] = copy.deepcopy(value)

    return apply


def both(*changes):
    """Return a change that makes several."""

    def apply(files):
        for change in changes:
            change(files)

    return apply


def nested(files):
    """Move the preprocessor into processor_config.json, as transformers writes it from 5.3 on."""
    files[PROCESSOR] = {"image_processor": files.pop(PRE), "processor_class": "AProcessor"}


# ----------------------------------------------------------------------------------------------------------------------
# The unchanged directories.


def base(kind, root):
    """Write an unchanged directory of a kind to `root`; return its JSON files by name."""
    xlm = kind.replace("tiny-xlm-roberta", "tiny-roberta")
    path = make_model(xlm, root, seed=3)
    files = {f.relative_to(path).as_posix(): json.loads(f.read_text()) for f in sorted(path.rglob("*.json"))}
    if xlm != kind:
        architecture = files[CONFIG]["architectures"][0]
        files[CONFIG] |= {"architectures": [f"XLM{architecture}"], "model_type": "xlm-roberta"}
    if kind == "tiny-minilm":
        files[SENTENCE] = {"__version__": {"sentence_transformers": "6.2.0"}}
        files[BERT] = {"max_seq_length": 32, "do_lower_case": False}
        for module, name in zip(files[MODULES], ("Transformer", "Pooling", "Normalize"), strict=True):
            module["type"] = f"sentence_transformers.models.{name}"
    if kind in BYTES:
        _byte_tokenizer(files, gpt2="gpt2" in kind)
    if kind in UNIGRAM:
        _unigram_tokenizer(files, albert="albert" in kind)
    if kind in (*TEXT, *CONFIGURED):
        files[OPTIONS]["model_max_length"] = 10**30
    return files


def _byte_tokenizer(files, gpt2):
    special = ["<|endoftext|>"] if gpt2 else ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokens = dict.fromkeys((*special, *string.printable[:94], "\u0120", "\u00c3", "\u00a9", "\u0142"))
    merges = []
    for word in ("\u0120the", "\u0120light", "\u0120The", "\u0120room", "The", "ED", "\u0120of"):
        for stop in range(2, len(word) + 1):
            pair = (word[: stop - 1], word[stop - 1])
            if pair[0] in tokens and pair not in merges and len(tokens) < 200:
                tokens[word[:stop]] = None
                merges.append(pair)
    vocab = {token: i for i, token in enumerate(tokens)}
    start, end = (special[0], special[0]) if gpt2 else (special[0], special[2])
    around = {"type": "RobertaProcessing", "sep": [end, 2], "cls": [start, 0], "trim_offsets": True}
    files[TOKENIZER] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(vocab[t], t, lstrip=t == "<mask>") for t in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None if gpt2 else {**around, "add_prefix_space": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                  "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": [list(pair) for pair in merges]},
    }  # fmt: skip
    files[OPTIONS] = {"tokenizer_class": "GPT2Tokenizer" if gpt2 else "RobertaTokenizer"}
    if gpt2:
        files[CONFIG] |= {"bos_token_id": 0, "eos_token_id": 0}


def _unigram_tokenizer(files, albert):
    special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"] if albert else ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    words = ("\u2581the", "\u2581light", "\u2581The", "\u2581room", "\u2581of", "oor", "old", "two", "\u2581caf\u00e9")
    pieces = {**dict.fromkeys(special, 0.0), "\u2581": -4.0}
    pieces |= {letter: -6.0 - i / 50 for i, letter in enumerate(string.printable[:94] + "\u00e9\u00c9")}
    pieces |= {word: -3.0 - i / 10 for i, word in enumerate(words)}
    around = ("[CLS]", "[SEP]") if albert else ("<s>", "</s>")
    start, end = ({"SpecialToken": {"id": token, "type_id": 0}} for token in around)
    single = [start, {"Sequence": {"id": "A", "type_id": 0}}, end]
    replaced = [{"type": "Replace", "pattern": {"String": q}, "content": '"'} for q in ("``", "''")]
    folded = [{"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}]
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    files[TOKENIZER] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, t, lstrip=t.lower() in ("<mask>", "[mask]")) for i, t in enumerate(special)],
        "normalizer": {"type": "Sequence", "normalizers": replaced + folded} if albert else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {t: {"id": t, "ids": [special.index(t)], "tokens": [t]} for t in around},
        },
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": 1 if albert else 3, "vocab": [*map(list, pieces.items())],
                  "byte_fallback": False},
    }  # fmt: skip
    files[OPTIONS] = {"tokenizer_class": "AlbertTokenizer" if albert else "XLMRobertaTokenizer"}


def _added(number, content, **flags):
    false = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **false, **flags, "special": True}


# ----------------------------------------------------------------------------------------------------------------------
# The changes.

SENTENCES = ("tiny-minilm",)
DECODERS = ("tiny-gpt2", *MIXTURES)  # whose tokens are compared
# The reference finds control tokens in the texts of these, or it would find no mask.
UNMASKED = tuple(kind for kind in TEXT if not kind.endswith("-mlm"))
CLASSIFIERS = tuple(kind for kind in KINDS if kind.endswith("classifier"))
SQUARE = ("tiny-vit", "tiny-vit-classifier")
XLM = tuple(kind for kind in UNIGRAM if "xlm" in kind)
ALBERT = tuple(kind for kind in UNIGRAM if "albert" in kind)
ROBERTA = BYTES[:3]
WORD = {"content": "light", "single_word": True, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
TEMPLATE = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {}}  # fmt: skip
NORMALIZER = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
              "lowercase": True}  # fmt: skip


def _decoder_of(files):
    files[OPTIONS]["added_tokens_decoder"] = {
        str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in files[TOKENIZER]["added_tokens"]
    }


def _vocabulary_files(files):
    model = files.pop(TOKENIZER)["model"]
    if model["type"] == "WordPiece":
        files["vocab.txt"] = "".join(f"{token}\n" for token in sorted(model["vocab"], key=model["vocab"].get))
    else:
        files["vocab.json"] = model["vocab"]
        files["merges.txt"] = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"])


def _aliased(files):
    alias = {"n_layers": "num_hidden_layers", "dim": "hidden_size", "n_heads": "num_attention_heads",
             "n_layer": "num_hidden_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads",
             "n_positions": "max_position_embeddings"}  # fmt: skip
    files[CONFIG] = {alias.get(k, k): v for k, v in files[CONFIG].items()}


def _both_names(files):
    heads = files[CONFIG]["n_heads" if "n_heads" in files[CONFIG] else "n_head"]
    files[CONFIG]["num_attention_heads"] = heads // 2


def _changes():
    one = Change
    yield one("unchanged", KINDS, lambda files: None)
    # config.json
    yield one("config: a byte order mark", KINDS, lambda files: None, {CONFIG: lambda data: b"\xef\xbb\xbf" + data})
    yield one("config: an unknown key", KINDS, put(CONFIG, colour=3))
    yield one("config: an epsilon of 0.05", KINDS, put(CONFIG, layer_norm_eps=0.05))
    yield one("config: GPT-2's epsilon of 0.05", KINDS, put(CONFIG, layer_norm_epsilon=0.05))
    yield one("config: quantized", KINDS, put(CONFIG, quantization_config={"quant_method": "bitsandbytes"}))
    yield one("config: code of its own", KINDS, put(CONFIG, auto_map={"AutoModel": "modeling.MyModel"}))
    yield one("config: a decoder", (*TEXT, *CONFIGURED), put(CONFIG, is_decoder=True))
    yield one("config: cross attention", (*TEXT, *CONFIGURED), put(CONFIG, add_cross_attention=True))
    yield one("config: relative positions", (*TEXT, *CONFIGURED), put(CONFIG, position_embedding_type="relative_key"))
    yield one("config: untied", (*TEXT, *CONFIGURED), put(CONFIG, tie_word_embeddings=False))
    yield one("config: another activation", (*TEXT, *CONFIGURED), put(CONFIG, hidden_act="relu"))
    yield one("config: DistilBERT's activation", (*TEXT, *CONFIGURED), put(CONFIG, activation="relu"))
    yield one("config: fewer layers", (*TEXT, *CONFIGURED), put(CONFIG, num_hidden_layers=2))
    yield one("config: pruned heads", (*TEXT, *CONFIGURED), put(CONFIG, pruned_heads={"0": [1]}))
    yield one("config: the other family's names", ("tiny-distilbert", "tiny-gpt2"), _aliased)
    yield one("config: two numbers of heads", ("tiny-distilbert", "tiny-gpt2"), _both_names)
    yield one("config: another padding id", (*TEXT, *CONFIGURED), put(CONFIG, pad_token_id=4))
    yield one("config: no padding id", (*TEXT, *CONFIGURED), drop(CONFIG, "pad_token_id"))
    for name, values in (
        ("another base of positions", {"rope_theta": 500.0}),
        ("scaled positions", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("half of the columns rotated", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        ("all tokens seen", {"is_causal": False}),
        ("a flag of attention", {"causal_attention": False}),
        ("fewer tokens seen", {"local_attention": 4, "sliding_window": 3}),
        ("more layers that see all", {"layer_types": ["full_attention"] * 4}),
        ("layers of an unknown type", {"layer_types": ["chunked_attention"] * 4}),
        ("heads that share all keys", {"num_key_value_heads": 1}),
        ("scores that are capped", {"attn_logit_softcapping": 5.0}),
    ):
        yield one(f"config: {name}", CONFIGURED, put(CONFIG, **values))
    for key in (
        "num_key_value_heads",
        "head_dim",
        "rope_theta",
        "rope_scaling",
        "hidden_act",
        "rms_norm_eps",
        "attention_bias",
        "norm_topk_prob",
        "tie_word_embeddings",
        "sliding_window",
        "layer_types",
        "num_experts_per_tok",
        "swiglu_limit",
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
        "intermediate_size",
    ):
        yield one(f"config: no {key}", MIXTURES, drop(CONFIG, key))
    yield one("config: regression", CLASSIFIERS, put(CONFIG, problem_type="regression"))
    yield one("config: several labels", CLASSIFIERS, put(CONFIG, problem_type="multi_label_classification"))
    yield one("config: no names of labels", CLASSIFIERS, drop(CONFIG, "id2label", "label2id"))
    for activation in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "gelu_python", "gelu_10", "silu"):
        name = {"hidden_act": activation, "activation": activation, "activation_function": activation}
        yield one(f"config: {activation}", TEXT, _activation(name))
    for name, values in (
        ("a label more", {"num_labels": 40}),
        ("the class of its tokenizer", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ("where it comes from", {"_name_or_path": "a/b", "gradient_checkpointing": False, "use_cache": False}),
        ("of a browser", {"transformers.js_config": {"dtype": "q8"}}),
        ("all hidden states", {"output_hidden_states": True, "output_attentions": True}),
        ("a task's own", {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}),
        ("of chunks", {"chunk_size_feed_forward": 2}),
        ("a dropout of its head", {"classifier_dropout": 0.5, "seq_classif_dropout": 0.9}),
        ("rotated positions", {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("a window", {"sliding_window": 4}),
        ("an encoder of pairs", {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}),
    ):
        yield one(f"config: {name}", KINDS, put(CONFIG, **values))
    # sentence-transformers computes in what this says, we in float32.
    yield one("config: half precision", tuple(k for k in KINDS if k not in SENTENCES), put(CONFIG, dtype="bfloat16"))
    yield one("config: a second architecture", KINDS, lambda files: files[CONFIG]["architectures"].append("AModel"))
    yield one("config: no type", KINDS, drop(CONFIG, "model_type"))
    yield one("config: no architecture", KINDS, drop(CONFIG, "architectures"))
    yield one("config: another type", KINDS, put(CONFIG, model_type="deberta"))
    yield one("config: a label's number is missing", CLASSIFIERS, _without_label)
    yield one("config: labels in another order", CLASSIFIERS, _labels_reversed)
    yield one("adapter", KINDS, put("adapter_config.json", peft_type="LORA", r=4, base_model_name_or_path="."))
    # tokenizer.json
    yield one("tokenizer: none", TEXT, drop(TOKENIZER))
    yield one("tokenizer: vocabulary files", (*WORDPIECE, *BYTES), _vocabulary_files)
    yield one("tokenizer: no normalizer", TEXT, parts(normalizer=None))
    yield one("tokenizer: no pre-tokenizer", TEXT, parts(pre_tokenizer=None))
    yield one("tokenizer: no post-processor", TEXT, parts(post_processor=None))
    yield one("tokenizer: an empty template", TEXT, parts(post_processor=TEMPLATE))
    yield one("tokenizer: no decoder", TEXT, parts(decoder=None))
    yield one("tokenizer: cut at the left", TEXT, parts(truncation={
        "direction": "Left", "max_length": 12, "strategy": "LongestFirst", "stride": 0}))  # fmt: skip
    yield one("tokenizer: cut at 12", TEXT, parts(truncation={
        "direction": "Right", "max_length": 12, "strategy": "LongestFirst", "stride": 0}))  # fmt: skip
    yield one("tokenizer: padded to 48", TEXT, parts(padding={
        "strategy": {"Fixed": 30}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1, "pad_type_id": 0,
        "pad_token": "[PAD]"}))  # fmt: skip
    yield one("tokenizer: cased", WORDPIECE, parts(normalizer={**NORMALIZER, "lowercase": False}))
    yield one("tokenizer: accents", WORDPIECE, parts(normalizer={**NORMALIZER, "strip_accents": False}))
    yield one("tokenizer: accents of a cased one", WORDPIECE, both(
        put(OPTIONS, do_lower_case=False),
        parts(normalizer={**NORMALIZER, "strip_accents": False, "lowercase": False})))  # fmt: skip
    yield one("tokenizer: a model without a type", TEXT, lambda files: files[TOKENIZER]["model"].pop("type"))
    yield one("tokenizer: merges as strings", BYTES, lambda files: files[TOKENIZER]["model"].update(
        merges=[" ".join(pair) for pair in files[TOKENIZER]["model"]["merges"]]))  # fmt: skip
    yield one("tokenizer: no CJK", WORDPIECE, parts(normalizer={**NORMALIZER, "handle_chinese_chars": False}))
    yield one("tokenizer: not cleaned", WORDPIECE, parts(normalizer={**NORMALIZER, "clean_text": False}))
    yield one("tokenizer: lower case alone", TEXT, parts(normalizer={"type": "Lowercase"}))
    yield one("tokenizer: NFKC", TEXT, parts(normalizer={"type": "NFKC"}))
    yield one("tokenizer: split at spaces", TEXT, parts(pre_tokenizer={"type": "WhitespaceSplit"}))
    yield one("tokenizer: spaces in front", BYTES, parts(pre_tokenizer__add_prefix_space=True))
    yield one("tokenizer: no regular expression", BYTES, parts(pre_tokenizer__use_regex=False))
    yield one("tokenizer: dropout", BYTES, parts(model__dropout=0.5))
    yield one("tokenizer: an end of words", BYTES, parts(model__end_of_word_suffix="</w>"))
    yield one("tokenizer: another prefix of pieces", WORDPIECE, parts(model__continuing_subword_prefix="@@"))
    yield one("tokenizer: words of 5 letters", WORDPIECE, parts(model__max_input_chars_per_word=5))
    yield one("tokenizer: another unknown token", WORDPIECE, parts(model__unk_token="[PAD]"))
    yield one("tokenizer: another unknown id", UNIGRAM, parts(model__unk_id=2))
    yield one("tokenizer: bytes for unknown pieces", UNIGRAM, parts(model__byte_fallback=True))
    yield one("tokenizer: marks alone", UNIGRAM, parts(pre_tokenizer={
        "type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}))  # fmt: skip
    yield one("tokenizer: a word of its own", TEXT, _own_word)
    yield one("tokenizer: no added tokens", TEXT, parts(added_tokens=[]))
    sides = [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    for name, part in (
        ("bytes", {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}),
        ("of BERT", {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]}),
        ("one token in front", TEMPLATE | {"single": sides, "special_tokens": {
            "x": {"id": "x", "ids": [7], "tokens": ["x"]}}}),
        ("a sequence of one", {"type": "Sequence", "processors": [TEMPLATE]}),
    ):  # fmt: skip
        yield one(f"tokenizer: post-processor, {name}", TEXT, parts(post_processor=part))
    for name, part in (
        ("NFC", {"type": "NFC"}),
        ("NFKC and the one before", None),
        ("stripped", {"type": "Strip", "strip_left": True, "strip_right": True}),
        ("accents stripped", {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]}),
        ("a letter replaced", {"type": "Replace", "pattern": {"String": "e"}, "content": "a"}),
        ("a mark in front", {"type": "Prepend", "prepend": "\u2581"}),
        ("nothing in a sequence", {"type": "Sequence", "normalizers": []}),
    ):
        yield one(f"tokenizer: normalizer, {name}", TEXT, _before({"type": "NFKC"}) if part is None else parts(
            normalizer=part))  # fmt: skip
    for name, part in (
        ("digits first", {"type": "Digits", "individual_digits": True}),
        ("punctuation first", {"type": "Punctuation", "behavior": "Isolated"}),
        ("at a pattern first", {"type": "Split", "pattern": {"Regex": "o"}, "behavior": "Isolated", "invert": False}),
    ):
        yield one(f"tokenizer: split, {name}", TEXT, _split_before(part))
    yield one("tokenizer: unknown pieces joined", BYTES, parts(model__fuse_unk=True, model__unk_token="the"))
    yield one("tokenizer: whole words first", BYTES, parts(model__ignore_merges=True))
    yield one("tokenizer: no unknown token", UNIGRAM, parts(model__unk_id=None))
    yield one("tokenizer: a vocabulary beyond the model's", TEXT, _large_vocabulary)
    yield one("tokenizer: cut with a stride", TEXT, parts(truncation={
        "direction": "Right", "max_length": 12, "strategy": "OnlyFirst", "stride": 4}))  # fmt: skip
    yield one("tokenizer: padded at the left", TEXT, parts(padding={
        "strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": 8, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "[PAD]"}))  # fmt: skip
    for name, flags in (
        ("found in words", {"single_word": False, "normalized": False}),
        ("takes spaces", {"lstrip": True, "rstrip": True}),
    ):
        yield one(f"tokenizer: a word of its own {name}", TEXT, _own_word_with(flags))
    yield one("tokenizer: a word of its own is special", UNMASKED, _own_word_with({"special": True}))
    yield one("added_tokens.json: a word", TEXT, put("added_tokens.json", zebra=250))
    yield one("vocabulary: lines as Windows ends them", WORDPIECE, both(_vocabulary_files, _carriage_returns))
    yield one("vocabulary: a word twice", WORDPIECE, both(_vocabulary_files, _word_twice))
    yield one("vocabulary: no version of merges", BYTES, both(_vocabulary_files, _no_version))
    # tokenizer_config.json
    for name, values in (
        ("no basic tokenizer", {"do_basic_tokenize": False}),
        ("never split", {"never_split": ["light"]}),
        ("another prefix of pieces", {"wordpieces_prefix": "@@"}),
        ("the old name of the limit", {"max_len": 9}),
        ("the limit of a call", {"max_length": 9, "stride": 0, "truncation_strategy": "longest_first"}),
        ("a slow one", {"use_fast": False, "from_slow": True}),
        ("sampled pieces", {"sp_model_kwargs": {"enable_sampling": True, "nbest_size": -1, "alpha": 0.1}}),
        ("a new control token", {"additional_special_tokens": ["<zebra>"]}),
        ("other inputs", {"model_input_names": ["input_ids"]}),
        ("no control tokens", {"add_special_tokens": False}),
        ("a chat template", {"chat_template": "{{ messages }}"}),
        ("other errors of bytes", {"errors": "strict", "trim_offsets": False}),
        ("multiples of 8", {"pad_to_multiple_of": 8}),
        ("old behaviour", {"legacy": True, "legacy_behaviour": True}),
        ("a mask that takes spaces", {"mask_token": {"content": "[MASK]", "lstrip": True, "rstrip": True,
                                                     "normalized": False, "single_word": False}}),
        ("a language", {"src_lang": "en_XX", "tgt_lang": "de_DE"}),
        ("files of another place", {"tokenizer_file": "/a/b.json", "special_tokens_map_file": None}),
        ("a split of spaces", {"split_by_whitespace": True, "spaces_between_special_tokens": False}),
    ):  # fmt: skip
        yield one(f"options: {name}", TEXT, put(OPTIONS, **values))
    for name, values in (
        ("a word as a control token", {"additional_special_tokens": ["light"]}),
        ("extra control tokens", {"extra_special_tokens": {"image_token": "light"}}),
        ("an end of texts", {"eos_token": "light"}),
        ("tokens replaced by others", {"unk_token": "light"}),
    ):
        yield one(f"options: {name}", UNMASKED, put(OPTIONS, **values))
    yield one("map: a word as a control token", UNMASKED, put(SPECIALS, additional_special_tokens=["light"]))
    yield one("options: none", TEXT, drop(OPTIONS))
    yield one("options: an unknown key", TEXT, put(OPTIONS, colour=3, name_or_path="x"))
    yield one("options: the file as it is", TEXT, put(OPTIONS, tokenizer_class="PreTrainedTokenizerFast"))
    yield one("options: another class", TEXT, put(OPTIONS, tokenizer_class="BertweetTokenizer"))
    yield one("options: an unknown class", TEXT, put(OPTIONS, tokenizer_class="MyTokenizer"))
    yield one("options: no class", TEXT, drop(OPTIONS, "tokenizer_class"))
    yield one("options: code of its own", TEXT, put(OPTIONS, auto_map={"AutoTokenizer": ["t.T", None]}))
    yield one("options: lower case", TEXT, put(OPTIONS, do_lower_case=True))
    yield one("options: cased", TEXT, put(OPTIONS, do_lower_case=False))
    yield one("options: accents kept", WORDPIECE, put(OPTIONS, strip_accents=False))
    yield one("options: accents kept by ALBERT", ALBERT, put(OPTIONS, keep_accents=True))
    yield one("options: no CJK", WORDPIECE, put(OPTIONS, tokenize_chinese_chars=False))
    yield one("options: spaces in front", TEXT, put(OPTIONS, add_prefix_space=True))
    yield one("options: no spaces in front", TEXT, put(OPTIONS, add_prefix_space=False))
    yield one("options: cut at the left", TEXT, put(OPTIONS, truncation_side="left"))
    yield one("options: cut somewhere", TEXT, put(OPTIONS, truncation_side="middle"))
    yield one("options: 10 tokens", TEXT, put(OPTIONS, model_max_length=10))
    yield one("options: a bad limit", TEXT, put(OPTIONS, model_max_length="many"))
    yield one("options: padding at the left", TEXT, put(OPTIONS, padding_side="left"))
    yield one("options: a start token", TEXT, put(OPTIONS, add_bos_token=True, add_eos_token=True))
    yield one("options: special tokens split", TEXT, put(OPTIONS, split_special_tokens=True))
    yield one("options: cleaned text", TEXT, put(OPTIONS, clean_up_tokenization_spaces=True))
    yield one("options: the added tokens again", TEXT, _decoder_of)
    yield one("options: another word", TEXT, both(_decoder_of, _stated_word))
    yield one("options: [MASK] begins", WORDPIECE, put(OPTIONS, cls_token="[MASK]"))
    yield one("map: </s> of another name", TEXT, put(SPECIALS, sep_token="t", unk_token="h"))
    yield one("map: as usual", WORDPIECE, put(SPECIALS, cls_token="[CLS]", sep_token={"content": "[SEP]"}))
    # sentence-transformers
    yield one("sentences: lower case", SENTENCES, put(BERT, do_lower_case=True))
    yield one("sentences: cased tokenizer, lower case", SENTENCES, both(
        put(OPTIONS, do_lower_case=False), put(BERT, do_lower_case=True)))  # fmt: skip
    yield one("sentences: an old version", SENTENCES, put(SENTENCE, __version__={"sentence_transformers": "2.0.0"}))
    yield one("sentences: no version", SENTENCES, drop(SENTENCE))
    yield one("sentences: no limit", SENTENCES, drop(BERT))
    yield one("sentences: limit of the tokenizer", SENTENCES, both(drop(BERT), put(OPTIONS, model_max_length=9)))
    yield one(
        "sentences: an old file", SENTENCES, both(drop(BERT), put("sentence_roberta_config.json", max_seq_length=9))
    )
    yield one("sentences: limit as processor option", SENTENCES, put(BERT, processor_kwargs={"model_max_length": 9}))
    yield one("sentences: limit as call option", SENTENCES, put(BERT, processing_kwargs={"text": {"max_length": 9}}))
    yield one("sentences: another call option", SENTENCES, put(
        BERT, processing_kwargs={"text": {"add_special_tokens": False}}))  # fmt: skip
    yield one("sentences: another task", SENTENCES, put(BERT, transformer_task="fill-mask"))
    yield one("sentences: query length", SENTENCES, put(BERT, query_length=8))
    yield one("sentences: dimensions", SENTENCES, put(SENTENCE, truncate_dim=8))
    yield one("sentences: a prompt", SENTENCES, put(SENTENCE, prompts={"q": "query: "}, default_prompt_name="q"))
    yield one("sentences: a prompt that is not named", SENTENCES, put(SENTENCE, prompts={"q": "query: "}))
    yield one(
        "sentences: custom modules", SENTENCES, lambda files: files[MODULES][0].update(type="custom_st.Transformer")
    )
    yield one("sentences: modules of version 6", SENTENCES, lambda files: [m.update(type=t) for m, t in zip(
        files[MODULES], ("sentence_transformers.base.modules.transformer.Transformer",
                         "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
                         "sentence_transformers.base.modules.normalize.Normalize"), strict=True)])  # fmt: skip
    yield one("sentences: not normalized", SENTENCES, lambda files: files[MODULES].pop())
    yield one("sentences: cls", SENTENCES, put(POOLING, pooling_mode_cls_token=True, pooling_mode_mean_tokens=False))
    yield one("sentences: max", SENTENCES, put(POOLING, pooling_mode_max_tokens=True, pooling_mode_mean_tokens=False))
    yield one("sentences: last token", SENTENCES, put(POOLING, pooling_mode="lasttoken"))
    prompt = put(SENTENCE, prompts={"q": "query: "}, default_prompt_name="q")
    yield one("sentences: prompt left out", SENTENCES, both(prompt, put(POOLING, include_prompt=False)))
    yield one("sentences: normalizes something else", SENTENCES, put(
        "2_Normalize/config.json", module_output_name="other"))  # fmt: skip
    for name, values in (
        ("a limit of nothing", {"max_seq_length": None}),
        ("a limit beyond the positions", {"max_seq_length": 4096}),
        ("options of the tokenizer", {"tokenizer_args": {"model_max_length": 9}}),
        ("options of the model", {"model_args": {"attn_implementation": "eager"}}),
        ("options of the configuration", {"config_args": {"hidden_act": "relu"}}),
        ("no padding", {"unpad_inputs": True}),
        ("other outputs", {"module_output_name": "sentence_embedding"}),
        (
            "other modalities",
            {"modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}}},
        ),
        ("an unknown option", {"colour": 3}),
    ):
        yield one(f"sentences: {name}", SENTENCES, put(BERT, **values))
    for name, values in (
        ("a similarity", {"similarity_fn_name": "dot"}),
        ("a sparse encoder", {"model_type": "SparseEncoder"}),
        ("an encoder of pairs", {"model_type": "CrossEncoder"}),
        ("an empty prompt", {"prompts": {"query": "", "document": ""}, "default_prompt_name": None}),
        ("a prompt by a name that is not there", {"prompts": {"q": "x: "}, "default_prompt_name": "other"}),
        ("a future version", {"__version__": {"sentence_transformers": "9.0.0"}}),
    ):
        yield one(f"sentences: {name}", SENTENCES, put(SENTENCE, **values))
    for mode in ("mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken", "max_tokens"):
        yield one(f"sentences: also {mode}", SENTENCES, put(POOLING, **{f"pooling_mode_{mode}": True}))
        only = {"pooling_mode_mean_tokens": False, f"pooling_mode_{mode}": True}
        yield one(f"sentences: only {mode}", SENTENCES, put(POOLING, **only))
    yield one("sentences: mean by its new name", SENTENCES, lambda files: files.update({
        POOLING: {"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": True}}))  # fmt: skip
    for kind in ("Dropout", "LayerNorm", "WeightedLayerPooling", "CNN", "LSTM", "StaticEmbedding", "Router"):
        yield one(f"sentences: a {kind} between", SENTENCES, lambda files, kind=kind: files[MODULES][2].update(
            type=f"sentence_transformers.models.{kind}"))  # fmt: skip
    yield one("sentences: no pooling", SENTENCES, lambda files: files[MODULES].pop(1))
    yield one("sentences: normalized first", SENTENCES, lambda files: files[MODULES].reverse())
    # generation
    for name, values in (
        ("neutral values", {"repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "num_beams": 1, "top_k": 50}),
        ("a temperature alone", {"temperature": 0.3, "top_k": 3}),
        ("a longest text", {"max_length": 5}),
        ("new tokens", {"max_new_tokens": 2}),
        ("a least length with the prompt", {"min_length": 400, "eos_token_id": [*range(100)]}),
        ("contrastive search", {"penalty_alpha": 0.6, "top_k": 4}),
        ("groups of beams", {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}),
        ("a penalty of lengths", {"length_penalty": 2.0, "early_stopping": True}),
        ("an exponential penalty", {"exponential_decay_length_penalty": [1, 5.0], "eos_token_id": 7}),
        ("infinite values removed", {"remove_invalid_values": True, "renormalize_logits": True}),
        ("a forced start", {"forced_bos_token_id": 9}),
        ("forced words", {"force_words_ids": [[5, 6]], "num_beams": 2}),
        ("guidance", {"guidance_scale": 1.5}),
        ("a watermark", {"watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash"}}),
        ("layers that contrast", {"dola_layers": "low"}),
        ("words that stop", {"stop_strings": ["e"]}),
        ("a time", {"max_time": 60.0}),
        ("no cache", {"use_cache": False}),
        ("a static cache", {"cache_implementation": "static"}),
        ("two texts", {"num_return_sequences": 2}),
        ("typical tokens", {"typical_p": 0.5, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "min_p": 0.3}),
        ("tokens of the prompt", {"prompt_lookup_num_tokens": 3}),
        ("a healed token", {"token_healing": True}),
        ("a penalty of the prompt", {"encoder_repetition_penalty": 1.7, "encoder_no_repeat_ngram_size": 2}),
        ("padding", {"pad_token_id": 3, "bos_token_id": 5}),
        ("one end", {"eos_token_id": 7}),
        ("several ends", {"eos_token_id": [7, *range(20, 60)]}),
        ("no end", {"eos_token_id": None}),
        ("an end out of range", {"eos_token_id": 5000}),
        ("a sampled text", {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9}),
        ("a repetition penalty", {"repetition_penalty": 1.5}),
        ("no repeated pairs", {"no_repeat_ngram_size": 2}),
        ("bad words", {"bad_words_ids": [[5], [6]]}),
        ("suppressed tokens", {"suppress_tokens": [*range(5, 100)]}),
        ("suppressed at the start", {"begin_suppress_tokens": [*range(5, 100)]}),
        ("a least length", {"min_new_tokens": 5, "eos_token_id": [*range(100)]}),
        ("beams", {"num_beams": 3}),
        ("a forced end", {"forced_eos_token_id": 9}),
        ("a bias", {"sequence_bias": [[[5], 10.0]]}),
        ("an unknown key", {"colour": 3}),
    ):
        yield one(f"generation: {name}", DECODERS, put(GENERATION, **values))
        yield one(f"config: generation of {name}", DECODERS, put(CONFIG, **values))
    # pictures
    yield one("pictures: inside processor_config", IMAGE, nested)
    yield one("pictures: inside, others outside", IMAGE, both(nested, put(PRE, image_mean=[0.1, 0.2, 0.3])))
    yield one("pictures: no file", IMAGE, drop(PRE))
    for key in ("image_mean", "image_std", "size", "resample", "do_resize", "do_rescale", "rescale_factor", "crop_pct",
                "image_processor_type", "do_normalize", "crop_size", "do_center_crop"):  # fmt: skip
        yield one(f"pictures: no {key}", IMAGE, drop(PRE, key))
    for name, values in (
        ("other mean and std", {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.3, 0.2, 0.4]}),
        ("one mean for all", {"image_mean": 0.4}),
        ("bicubic", {"resample": 3}),
        ("nearest", {"resample": 0}),
        ("an unknown filter", {"resample": 9}),
        ("not resized", {"do_resize": False}),
        ("not rescaled", {"do_rescale": False}),
        ("another factor", {"rescale_factor": 1 / 127.5}),
        ("not normalized", {"do_normalize": False}),
        ("the shorter edge", {"size": {"shortest_edge": 20}}),
        ("one number as size", {"size": 20}),
        ("two numbers as size", {"size": [20, 20]}),
        ("an oblong size", {"size": {"height": 20, "width": 30}}),
        ("shorter and longer edge", {"size": {"shortest_edge": 20, "longest_edge": 25}}),
        (
            "the middle",
            {"size": {"shortest_edge": 26}, "do_center_crop": True, "crop_size": {"height": 20, "width": 20}},
        ),
        ("the middle of a square", {"size": {"height": 26, "width": 26}, "do_center_crop": True, "crop_size": 20}),
        ("a large middle", {"size": {"shortest_edge": 16}, "do_center_crop": True, "crop_size": 20}),
        ("the longer edge", {"size": {"longest_edge": 20}}),
        ("at most so large", {"size": {"max_height": 20, "max_width": 20}}),
        ("a filter by name", {"resample": "bicubic"}),
        ("Lanczos", {"resample": 1}),
        ("a box", {"resample": 4}),
        ("Hamming", {"resample": 5}),
        ("a crop that is not done", {"do_center_crop": False, "crop_size": {"height": 10, "width": 10}}),
        ("edges instead of squares", {"default_to_square": False}),
        ("the old name of its class", {"feature_extractor_type": "ViTFeatureExtractor"}),
        ("labels reduced", {"do_reduce_labels": True}),
        ("another order of channels", {"input_data_format": "channels_last", "data_format": "channels_first"}),
        ("a mean of two", {"image_mean": [0.5, 0.4]}),
        ("a deviation of zero", {"image_std": [0.0, 0.5, 0.5]}),
        ("a factor written out", {"rescale_factor": 0.00392156862745098}),
        ("a divisor of sizes", {"size_divisor": 8}),
        ("colours as they are", {"do_convert_rgb": False}),
        ("on a device", {"device": "cuda", "disable_grouping": True, "return_tensors": "pt"}),
        ("thumbnails", {"do_thumbnail": True, "do_align_long_axis": True}),
        ("splits", {"do_image_splitting": True}),
        ("a class for Pillow", {"image_processor_type": "ViTImageProcessorPil"}),
        ("BEiT's class", {"image_processor_type": "BeitImageProcessor"}),
        ("ConvNeXt's class", {"image_processor_type": "ConvNextImageProcessor"}),
        ("MobileNet's class", {"image_processor_type": "MobileNetV2ImageProcessor"}),
        ("an unknown class", {"image_processor_type": "MyImageProcessor"}),
        ("channels swapped", {"do_flip_channel_order": True}),
        ("padded", {"do_pad": True, "pad_size": {"height": 30, "width": 30}}),
        ("an offset", {"offset": True, "rescale_offset": True}),
        ("colours converted", {"do_convert_rgb": True}),
        ("an unknown key", {"colour": 3}),
        ("code of its own", {"auto_map": {"AutoImageProcessor": "p.P"}}),
        ("a fast class", {"image_processor_type": "ViTImageProcessorFast"}),
        ("CLIP's class", {"image_processor_type": "CLIPImageProcessor"}),
        ("DeiT's class", {"image_processor_type": "DeiTImageProcessor"}),
        ("EfficientNet's class", {"image_processor_type": "EfficientNetImageProcessor"}),
        ("a part", {"image_processor_type": "ConvNextImageProcessor", "crop_pct": 0.8, "size": {"shortest_edge": 20}}),
    ):
        yield one(f"pictures: {name}", IMAGE, put(PRE, **values))


def _activation(values):
    """Return a change of the activation by the name that the family has for it."""

    def apply(files):
        files[CONFIG] = {**files[CONFIG], **{k: v for k, v in values.items() if k in files[CONFIG]}}

    return apply


def _without_label(files):
    labels = files[CONFIG].get("id2label") or {}
    files[CONFIG]["id2label"] = {k: v for k, v in labels.items() if k != "1"}


def _labels_reversed(files):
    labels = files[CONFIG].get("id2label") or {}
    files[CONFIG]["id2label"] = dict(reversed(labels.items()))


def _before(part):
    """Return a change that puts a normalizer before those that are there."""

    def apply(files):
        there = files[TOKENIZER]["normalizer"]
        steps = [part] if there is None else [part, there]
        files[TOKENIZER]["normalizer"] = {"type": "Sequence", "normalizers": steps}

    return apply


def _split_before(part):
    """Return a change that puts a pre-tokenizer before those that are there."""

    def apply(files):
        there = files[TOKENIZER]["pre_tokenizer"]
        files[TOKENIZER]["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [part, there]}

    return apply


def _large_vocabulary(files):
    model = files[TOKENIZER]["model"]
    if isinstance(model["vocab"], dict):
        size = files[CONFIG]["vocab_size"]
        token = "\u0120light" if "\u0120the" in model["vocab"] else "light"
        model["vocab"][token] = size + 7
    else:
        model["vocab"] += [["\u2581light", -0.1]] * 300


def _own_word_with(flags):
    def apply(files):
        files[TOKENIZER]["added_tokens"].append({"id": _next_id(files), **WORD, **flags})

    return apply


def _carriage_returns(files):
    files["vocab.txt"] = files["vocab.txt"].replace("\n", "\r\n")


def _word_twice(files):
    files["vocab.txt"] = files["vocab.txt"].replace("\n", "\nthe\n", 1)


def _no_version(files):
    files["merges.txt"] = files["merges.txt"].partition("\n")[2]


def _next_id(files):
    vocab = files[TOKENIZER]["model"]["vocab"]
    return vocab.get("light", max(vocab.values()) + 1) if isinstance(vocab, dict) else len(vocab)


def _own_word(files):
    files[TOKENIZER]["added_tokens"].append({"id": _next_id(files), **WORD})


def _stated_word(files):
    files[OPTIONS]["added_tokens_decoder"][str(_next_id(files))] = WORD


CHANGES = tuple(_changes())


def key_change(kind, key, value):
    """Return the change of one key of config.json."""
    return Change(f"{key}={json.dumps(value)}", (kind,), put(CONFIG, **{key: value}))


def write(directory, files, change, weights):
    """Write a changed directory; weights: the file of the unchanged one."""
    files = copy.deepcopy(files)
    change.apply(files)
    directory.mkdir()
    os.link(weights, directory / "model.safetensors")
    for name, data in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        text = data if isinstance(data, str) else json.dumps(data)
        raw = (change.raw or {}).get(name, bytes)
        (directory / name).write_bytes(raw(text.encode()))
    return directory


def picture():
    """Return a picture that no model's size fits."""
    y, x = np.mgrid[:37, :49]
    values = np.stack([(x * 5 + y) % 256, (x + 3 * y) % 256, (x * y) % 256], axis=2)
    return Image.fromarray(values.astype(np.uint8))


def requests_of(kind, mask):
    """Return the requests that show what a directory of a kind does; mask: its mask token, for heads that have one."""
    if kind in IMAGE:
        file = io.BytesIO()
        picture().save(file, "PNG")
        return [{"image": base64.b64encode(file.getvalue()).decode(), "top_k": 300}]
    if kind in DECODERS:
        return [{"text": text, "max_new_tokens": 8, "truncate": True, "temperature": 0} for text in (*PLAIN, LONG)]
    if kind.endswith("-mlm"):
        return [{"text": f"the {mask} of {text}", "truncate": True, "top_k": 300} for text in (*PLAIN, LONG[:20])]
    return [{"text": text, "truncate": True, "top_k": 300} for text in (*PLAIN, LONG, *CONTROLS)]
