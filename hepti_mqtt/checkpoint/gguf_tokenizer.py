"""A GGUF file's tokenizer as tokenizer.json and tokenizer_config.json: byte pairs whose splitting is known by name.

Another way of splitting gives other ids and no error, so a name that is not known here is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hepti_mqtt.checkpoint.tokenizer_classes import QWEN2_WORDS
from hepti_mqtt.errors import UnsupportedModelError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_BYTES: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_ONLY_BYTES: Final = {**_BYTES, "use_regex": False}
_LLAMA3_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|"
    r"\s+"
)


def _split(pattern: str) -> dict[str, Any]:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [step, _ONLY_BYTES]}


# By `tokenizer.ggml.pre`: how texts are split; whether whole words are looked up first; whether BOS stands in front
# where the file does not say.
_DIGITS: Final = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTES]}
_PRE: Final[Mapping[str, tuple[dict[str, Any], bool, bool]]] = {
    "gpt-2": (_BYTES, False, False),
    "smollm": (_DIGITS, False, False),
    "llama-bpe": (_split(_LLAMA3_WORDS), True, True),
    "llama3": (_split(_LLAMA3_WORDS), True, True),
    "qwen2": (_split(QWEN2_WORDS), False, False),
}


def tokenizer_files(path: Path, metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (tokenizer.json, tokenizer_config.json) of a file's metadata.

    Raises UnsupportedModelError for a kind of tokenizer that is not known, ValueError for a vocabulary that does not
    agree with itself.
    """
    of = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    if of["model"] != "gpt2" or of.get("pre") not in _PRE:
        raise UnsupportedModelError(
            f"{path}: a tokenizer of the kind {of['model']!r}, {of.get('pre')!r} is not known ({', '.join(_PRE)} are); "
            "give the original model with model.safetensors and tokenizer.json"
        )
    splitting, ignore_merges, has_bos = _PRE[of["pre"]]
    tokens: list[str] = of["tokens"]
    kinds = of.get("token_type", [_NORMAL] * len(tokens))
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(kinds) != len(tokens):
        raise ValueError(f"{len(vocab)} different ones of {len(tokens)} tokens, {len(kinds)} kinds")
    named = {role: of.get(f"{key}_token_id") for role, key in _ROLES.items()}
    for role, i in named.items():
        if i is not None and not 0 <= i < len(tokens):
            raise ValueError(f"{role} token {i} of {len(tokens)}")
    special = {i for i, kind in enumerate(kinds) if kind == _CONTROL} | {i for i in named.values() if i is not None}
    added = [
        {
            "id": i, "content": tokens[i], "special": i in special, "normalized": False, "single_word": False,
            "lstrip": False, "rstrip": False,
        }
        for i in sorted(special | {i for i, kind in enumerate(kinds) if kind == _USER_DEFINED})
    ]  # fmt: skip
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizer"}
    config |= {f"{role}_token": tokens[i] for role, i in named.items() if i is not None}
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    bos = config.get("bos_token") if of.get("add_bos_token", has_bos) else None
    data = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if of["pre"] == "qwen2" else None,
        "pre_tokenizer": splitting,
        "post_processor": _begin_with(bos, vocab[bos]) if bos else None,
        "decoder": {**_BYTES, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [merge.split(" ") for merge in of["merges"]],
            "ignore_merges": ignore_merges,
        },
    }
    return data, config


_ROLES: Final[Mapping[str, str]] = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def _begin_with(token: str, number: int) -> dict[str, Any]:
    """Return the template that puts a token in front."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
