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
IMAGE = ("tiny-vit", "tiny-vit-classifier", "tiny-hf-resnet", "tiny-hf-mobilenet")
# Of these config.json alone is changed: their tokenizers are of the classes above, or count as they are.
CONFIGURED = (
    *("tiny-mpnet-mlm", "tiny-mpnet-classifier", "tiny-modernbert-mlm", "tiny-modernbert-classifier"),
    *("tiny-nomic-mlm", "tiny-nomic-classifier", "tiny-gte-mlm", "tiny-gte", "tiny-qwen3", "tiny-gemma3"),
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
DECODERS = ("tiny-gpt2",)
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
    yield one("config: the other family's names", ("tiny-distilbert", *DECODERS), _aliased)
    yield one("config: two numbers of heads", ("tiny-distilbert", *DECODERS), _both_names)
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
    yield one("config: regression", CLASSIFIERS, put(CONFIG, problem_type="regression"))
    yield one("config: several labels", CLASSIFIERS, put(CONFIG, problem_type="multi_label_classification"))
    yield one("config: no names of labels", CLASSIFIERS, drop(CONFIG, "id2label", "label2id"))
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
    # tokenizer_config.json
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
    # generation
    for name, values in (
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
        return [{"text": text, "max_new_tokens": 8, "truncate": True} for text in (*PLAIN, LONG)]
    if kind.endswith("-mlm"):
        return [{"text": f"the {mask} of {text}", "truncate": True, "top_k": 300} for text in (*PLAIN, LONG[:20])]
    return [{"text": text, "truncate": True, "top_k": 300} for text in (*PLAIN, LONG, *CONTROLS)]
