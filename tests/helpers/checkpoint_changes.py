"""Model directories with one change each, and the requests that show what it does.

`golden/checkpoint_changes.json` is the table of changes. A step gets the directory's JSON files by name, tokenizer.json
among them; a file that it removes is not written.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import os
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hepti_mqtt.checkpoint import make_model

CONFIG, TOKENIZER, OPTIONS = "config.json", "tokenizer.json", "tokenizer_config.json"
PRE, PROCESSOR = "preprocessor_config.json", "processor_config.json"
BERT, MODULES, SENTENCE = "sentence_bert_config.json", "modules.json", "config_sentence_transformers.json"
GOLDEN = Path(__file__).resolve().parent.parent / "golden"
ANSWERS = GOLDEN / "checkpoints.npz"
TABLE = GOLDEN / "checkpoint_changes.json"  # name, kinds, steps of each change

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
    """Steps that change a directory of some kinds: the name of a function of `STEPS` and its arguments."""

    name: str
    kinds: tuple[str, ...]
    steps: Sequence[Sequence[Any]]

    def apply(self, files):
        for step, *arguments in copy.deepcopy(self.steps):
            STEPS[step](files, *arguments)


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
# The steps of changes.

WORD = {"content": "light", "single_word": True, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
ALIASES = {
    **{"n_layers": "num_hidden_layers", "dim": "hidden_size", "n_heads": "num_attention_heads"},
    **{"n_layer": "num_hidden_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads"},
    "n_positions": "max_position_embeddings",
}


def put(files, file, values):
    """Set keys of a file."""
    files[file] = {**files.get(file, {}), **values}


def drop(files, file, *keys):
    """Remove keys of a file, or the whole file."""
    if keys:
        files[file] = {k: v for k, v in files[file].items() if k not in keys}
    else:
        files.pop(file, None)


def parts(files, values):
    """Set parts of tokenizer.json by their paths."""
    for name, value in values.items():
        place = files[TOKENIZER]
        *path, last = name.split("__")
        for step in path:
            place = place[step]
        place[last] = value


def before(files, part, list_name, first):
    """Put a normalizer or a pre-tokenizer in front of the present one."""
    present = files[TOKENIZER][part]
    steps = [first] if present is None else [first, present]
    files[TOKENIZER][part] = {"type": "Sequence", list_name: steps}


def mark(files):
    """Begin config.json with a byte order mark."""
    files[CONFIG] = "\ufeff" + json.dumps(files[CONFIG])


def activation(files, values):
    """Set the activation under the name that the family has for it."""
    files[CONFIG] |= {k: v for k, v in values.items() if k in files[CONFIG]}


def aliased(files):
    """Give keys of config.json the names of other families."""
    files[CONFIG] = {ALIASES.get(k, k): v for k, v in files[CONFIG].items()}


def joined_merges(files):
    """Write merges as strings, as older files do."""
    model = files[TOKENIZER]["model"]
    model["merges"] = [" ".join(pair) for pair in model["merges"]]


def vocabulary_files(files):
    """Write the vocabulary as its older files in place of tokenizer.json."""
    model = files.pop(TOKENIZER)["model"]
    if model["type"] == "WordPiece":
        files["vocab.txt"] = "".join(f"{token}\n" for token in sorted(model["vocab"], key=model["vocab"].get))
    else:
        files["vocab.json"] = model["vocab"]
        files["merges.txt"] = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"])


def large_vocabulary(files):
    """Add tokens with ids beyond the model's embeddings."""
    vocab = files[TOKENIZER]["model"]["vocab"]
    if isinstance(vocab, dict):
        vocab["\u0120light" if "\u0120the" in vocab else "light"] = files[CONFIG]["vocab_size"] + 7
    else:
        vocab += [["\u2581light", -0.1]] * 300


def own_word(files, flags=None):
    """Add a token of several letters with these flags."""
    files[TOKENIZER]["added_tokens"].append({"id": _next_id(files), **WORD, **(flags or {})})


def decoder_of(files):
    """State the added tokens in tokenizer_config.json too."""
    files[OPTIONS]["added_tokens_decoder"] = {
        str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in files[TOKENIZER]["added_tokens"]
    }


def nested(files):
    """Move the preprocessor into processor_config.json, as transformers writes it from 5.3 on."""
    files[PROCESSOR] = {"image_processor": files.pop(PRE), "processor_class": "AProcessor"}


def _heads(config):
    return config["n_heads"] if "n_heads" in config else config["n_head"]


def _labels(files):
    return list((files[CONFIG].get("id2label") or {}).items())


def _next_id(files):
    vocab = files[TOKENIZER]["model"]["vocab"]
    return vocab.get("light", max(vocab.values()) + 1) if isinstance(vocab, dict) else len(vocab)


STEPS = {
    function.__name__: function
    for function in (
        *(put, drop, parts, before, mark, activation, aliased, joined_merges, vocabulary_files, large_vocabulary),
        *(own_word, decoder_of, nested),
    )
} | {
    "second_architecture": lambda files: files[CONFIG]["architectures"].append("AModel"),
    "both_names": lambda files: files[CONFIG].update(num_attention_heads=_heads(files[CONFIG]) // 2),
    "without_label": lambda files: files[CONFIG].update(id2label={k: v for k, v in _labels(files) if k != "1"}),
    "labels_reversed": lambda files: files[CONFIG].update(id2label=dict(reversed(_labels(files)))),
    "untyped": lambda files: files[TOKENIZER]["model"].pop("type"),
    "carriage_returns": lambda files: files.update({"vocab.txt": files["vocab.txt"].replace("\n", "\r\n")}),
    "word_twice": lambda files: files.update({"vocab.txt": files["vocab.txt"].replace("\n", "\nthe\n", 1)}),
    "no_version": lambda files: files.update({"merges.txt": files["merges.txt"].partition("\n")[2]}),
    "stated_word": lambda files: files[OPTIONS]["added_tokens_decoder"].update({str(_next_id(files)): WORD}),
    # Of sentence-transformers.
    "module": lambda files, number, kind: files[MODULES][number].update(type=kind),
    "remove_module": lambda files, number: files[MODULES].pop(number),
    "reverse_modules": lambda files: files[MODULES].reverse(),
}

SENTENCES = ("tiny-minilm",)
DECODERS = ("tiny-gpt2", *MIXTURES)  # whose tokens are compared
#: Names of `GROUPS` in the table of changes.
GROUPS = {
    **{"KINDS": KINDS, "TEXT": TEXT, "WORDPIECE": WORDPIECE, "BYTES": BYTES, "UNIGRAM": UNIGRAM, "IMAGE": IMAGE},
    **{"CONFIGURED": CONFIGURED, "MIXTURES": MIXTURES, "SENTENCES": SENTENCES, "DECODERS": DECODERS},
    "ALBERT": tuple(kind for kind in UNIGRAM if "xlm" not in kind),
    "CLASSIFIERS": tuple(kind for kind in KINDS if kind.endswith("classifier")),
    # The reference finds control tokens in the texts of masked models, or it would find no mask.
    "UNMASKED": tuple(kind for kind in TEXT if not kind.endswith("-mlm")),
    # sentence-transformers computes in the stated precision, Hepti in float32.
    "PLAIN": tuple(kind for kind in KINDS if kind not in SENTENCES),
}


def _change(name, groups, *steps):
    kinds = (GROUPS.get(group, (group,)) for group in groups.split())
    return Change(name, tuple(kind for group in kinds for kind in group), steps)


CHANGES = tuple(_change(*entry) for entry in json.loads(TABLE.read_text("utf-8")))


def key_change(kind, key, value):
    """Return the change of one key of config.json."""
    return Change(f"{key}={json.dumps(value)}", (kind,), (("put", CONFIG, {key: value}),))


def write(directory, files, change, weights):
    """Write a changed directory; weights: the file of the unchanged one."""
    files = copy.deepcopy(files)
    change.apply(files)
    directory.mkdir()
    os.link(weights, directory / "model.safetensors")
    for name, data in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        text = data if isinstance(data, str) else json.dumps(data)
        (directory / name).write_bytes(text.encode())
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
