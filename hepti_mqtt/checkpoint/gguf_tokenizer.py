"""A GGUF file's tokenizer as tokenizer.json and tokenizer_config.json: SentencePiece's byte pairs, or by name.

A wrong way of splitting gives wrong ids without an error, so unknown names are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hepti_mqtt.checkpoint.tokenizer_classes import QWEN2_WORDS
from hepti_mqtt.core.errors import UnsupportedModelError

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6
_MARK: Final = "\u2581"  # replaces a space
# Converters write one end token; a control token of such a name ends a text too, as in llama.cpp.
_ENDS: Final = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "</s>",
    "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|return|>", "<|call|>", "<end_of_utterance>",
})  # fmt: skip
_PIECES: Final = "llama"  # SentencePiece's byte pairs
_PIECE_IDS: Final = {"bos": 1, "eos": 2, "unknown": 0}  # if the file names none
_BYTES: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_ONLY_BYTES: Final = {**_BYTES, "use_regex": False}
_LLAMA3_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|"
    r"\s+"
)
# o200k: a word is capitals and then small letters, with its contraction.
_O200K_WORDS: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> dict[str, Any]:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [step, _ONLY_BYTES]}


# By `tokenizer.ggml.pre`: splitting of texts; whether whole words are looked up first; whether BOS begins texts if the
# file does not say.
_DIGITS: Final = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTES]}
_PRE: Final[Mapping[str, tuple[dict[str, Any], bool, bool]]] = {
    "gpt-2": (_BYTES, False, False),
    "smollm": (_DIGITS, False, False),
    "llama-bpe": (_split(_LLAMA3_WORDS), True, True),
    "llama3": (_split(_LLAMA3_WORDS), True, True),
    "gpt-4o": (_split(_O200K_WORDS), False, False),
    "qwen2": (_split(QWEN2_WORDS), False, False),
}


def tokenizer_files(path: Path, metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (tokenizer.json, tokenizer_config.json) of a file's metadata.

    Raises UnsupportedModelError for an unknown kind of tokenizer, ValueError for a vocabulary that does not
    agree with itself.
    """
    of = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    pieces = of["model"] == _PIECES
    if not pieces and (of["model"] != "gpt2" or of.get("pre") not in _PRE):
        raise UnsupportedModelError(
            f"{path}: a tokenizer of the kind {of['model']!r}, {of.get('pre')!r} is unknown (llama is supported, "
            f"and gpt2 with {', '.join(_PRE)}); give the original model with model.safetensors and tokenizer.json"
        )
    tokens: list[str] = of["tokens"]
    kinds = of.get("token_type", [_NORMAL] * len(tokens))
    if pieces:
        tokens = _as_texts_have_them(path, of, tokens, kinds)
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(kinds) != len(tokens):
        raise ValueError(f"{len(vocab)} different ones of {len(tokens)} tokens, {len(kinds)} kinds")
    named = {role: _special_id(of, key) for role, key in _ROLES.items()}
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
    if pieces:
        parts, has_bos = _pieces(of, vocab, kinds), True
    else:
        parts, has_bos = _byte_pairs(path, of, vocab), _PRE[of["pre"]][2]
    bos = config.get("bos_token") if of.get("add_bos_token", has_bos) else None
    eos = config.get("eos_token") if of.get("add_eos_token", False) else None
    if eos:
        raise UnsupportedModelError(f"{path}: its tokenizer puts {eos!r} after every text, which is not supported")
    post = _begin_with(bos, vocab[bos]) if bos else None
    return {"version": "1.0", "added_tokens": added, "post_processor": post, **parts}, config


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the tokens after which a text ends: the ids that the metadata names, and control tokens by their names."""
    of = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    tokens, kinds = of.get("tokens", []), of.get("token_type", [])
    controls = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == _CONTROL}
    if {"<|return|>", "<|call|>"} <= controls.keys():  # gpt-oss: <|end|> ends a thought, not the text
        controls.pop("<|end|>", None)
    ids = {_special_id(of, kind) for kind in ("eos", "eot", "eom")} | {controls.get(name) for name in _ENDS}
    return sorted(i for i in ids if i is not None)


def _special_id(of: Mapping[str, Any], kind: str) -> int | None:
    """Return the id of a special token, None without one."""
    default = _PIECE_IDS.get(kind) if of.get("model") == _PIECES else None
    token: int | None = of.get(f"{kind}_token_id", default)
    return token


def _as_texts_have_them(path: Path, of: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> list[str]:
    """Return the tokens with spaces in user-defined pieces (Gemma's runs of spaces); older files have marks there.

    Texts are split at these pieces first. Raises UnsupportedModelError if the tokenizer also puts a space in front of
    texts, because it may join a piece.
    """
    spaced = [
        token.replace(_MARK, " ") if kind == _USER_DEFINED else token for token, kind in zip(tokens, kinds, strict=True)
    ]
    if of.get("add_space_prefix", True) and any(" " in token for token in spaced):
        raise UnsupportedModelError(
            f"{path}: its tokenizer has pieces of users with spaces and puts a space in front of texts, which is not "
            "supported; give the original model with model.safetensors and tokenizer.json"
        )
    return spaced


def _byte_pairs(path: Path, of: Mapping[str, Any], vocab: Mapping[str, int]) -> dict[str, Any]:
    """Return the parts of a tokenizer of bytes, as GPT-2's."""
    splitting, ignore_merges, _ = _PRE[of["pre"]]
    if (merges := of.get("merges")) is None:
        raise UnsupportedModelError(
            f"{path}: tokenizer.ggml.merges is missing, so texts cannot become tokens; convert the model again with a "
            "converter that writes it"
        )
    return {
        "normalizer": {"type": "NFC"} if of["pre"] == "qwen2" else None,
        "pre_tokenizer": splitting,
        "decoder": {**_BYTES, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [merge.split(" ") for merge in merges],
            "ignore_merges": ignore_merges,
        },
    }


def _pieces(of: Mapping[str, Any], vocab: Mapping[str, int], kinds: list[int]) -> dict[str, Any]:
    """Return the parts of a tokenizer of SentencePiece's byte pairs, which joins the likeliest neighbours first."""
    scores: list[float] = of["scores"]
    if len(scores) != len(vocab):
        raise ValueError(f"{len(scores)} scores of {len(vocab)} tokens")
    unknown = _special_id(of, "unknown")
    prefix, space = of.get("add_space_prefix", True), {"String": " "}
    marked = {"type": "Replace", "pattern": space, "content": _MARK}
    before = [{"type": "Prepend", "prepend": _MARK}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    shown = {"type": "Replace", "pattern": {"String": _MARK}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, marked]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [shown, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": _merges(vocab, scores, kinds),
            "unk_token": None if unknown is None else of["tokens"][unknown],
            "fuse_unk": True,
            "byte_fallback": _BYTE in kinds,
        },
    }


def _merges(vocab: Mapping[str, int], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Return the pairs that become a piece, the likeliest piece first."""
    pieces = {token for token, i in vocab.items() if kinds[i] == _NORMAL}
    pairs = [
        (-scores[i], i, vocab[token[:at]], (token[:at], token[at:]))
        for token in pieces
        for i in (vocab[token],)
        for at in range(1, len(token))
        if token[:at] in pieces and token[at:] in pieces
    ]
    return [pair for *_, pair in sorted(pairs)]


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
