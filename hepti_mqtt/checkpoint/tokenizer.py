"""Reads a directory's tokenizer as transformers would, with one difference: control tokens in a user's text are text.

Every option of tokenizer_config.json that changes ids is honoured or refused; what has no effect on ids is ignored.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tokenizers import Tokenizer, pre_tokenizers

from hepti_mqtt.checkpoint.safetensors_file import read_json
from hepti_mqtt.checkpoint.tokenizer_classes import AS_IT_IS, CLASSES, CONFIG, FILE, Part, TokenizerClass, differs
from hepti_mqtt.core.errors import ModelError, UnsupportedModelError
from hepti_mqtt.models import tokenizer_class
from hepti_mqtt.models.config import JsonConfig, KeyTable

TOKENS_MAP: Final = "special_tokens_map.json"
ADDED: Final = "added_tokens.json"
_SENTENCEPIECE: Final = ("sentencepiece.bpe.model", "spiece.model", "tokenizer.model")
_ROLES: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_FLAGS: Final = ("lstrip", "normalized", "rstrip", "single_word", "special")
# The others of its keys have no effect on ids: the classes read these alone.
_CLEANED: Final = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
_KEYS: Final = KeyTable(read=frozenset(), only={"auto_map": (), _CLEANED: (False,)}, closed=False)
_log: Final = logging.getLogger("hepti.checkpoint")
_NOTHING: Final = {"type": "WordLevel", "vocab": {}, "unk_token": ""}


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A tokenizer without padding and truncation, and the ids and rules of its special tokens."""

    tokenizer: Tokenizer
    #: End at which a long text is cut.
    side: Literal["left", "right"]
    #: Ids, None if the tokenizer has none.
    mask: int | None
    separator: int | None
    padding: int | None
    #: Ids that only the model's own template may add.
    controls: frozenset[int]
    #: Tokens have the types of the template; None if versions of transformers differ.
    typed: bool | None = None
    #: Why it refuses pairs of texts; empty if it reads them.
    pair_refusal: str = ""


def has_tokenizer(path: Path) -> bool:
    """Return whether a directory has a tokenizer, good or bad."""
    return any((path / name).is_file() for name in (FILE, *(c.files[0] for c in CLASSES.values() if c.files)))


def open_tokenizer(
    path: Path,
    config: Mapping[str, Any],
    extras: Mapping[str, Any],
    *,
    masks: bool,
    lower: bool,
    generates: bool,
    within: Mapping[str, Any] | None = None,
) -> TextTokenizer:
    """Return the tokenizer of a directory.

    masks: texts may have the mask token. lower: lower case comes first. within: tokenizer.json from the weights file.
    Raises ModelError for a missing or bad tokenizer, UnsupportedModelError if versions of transformers read it
    differently.
    """
    options = JsonConfig(CONFIG, _options(extras))
    options.check_keys(_KEYS)
    expected = _class(options, config)
    tokens = {role: _named(options, role, expected) for role in _ROLES}
    data = _data(path, extras, expected, tokens["unk"]) if within is None else dict(within)
    try:
        parts = _canonical(data)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path / FILE} is not a valid tokenizer ({error}); copy it again") from error
    if data["model"].get("dropout"):
        raise UnsupportedModelError(f"{path / FILE}: dropout is not supported: the same text would give other tokens")
    if generates and data["model"].get("type") != "BPE" and options.flag("clean_up_tokenization_spaces", False):
        raise UnsupportedModelError(f"{CONFIG}: clean_up_tokenization_spaces true is not supported; remove it")
    if expected is None:
        _check_as_it_is(options, parts)
    else:
        _check_model(data["model"], expected, tokens["unk"])
        parts = {**_parts_of_class(path, data, expected, options, parts), "decoder": expected.decoder}
    if lower:
        parts["normalizer"] = _lowered(parts["normalizer"])
    side = options.get("truncation_side", (data.get("truncation") or {}).get("direction", "Right"))
    if str(side).lower() not in ("left", "right"):
        raise options.bad_value("truncation_side", "left or right", side)
    _check_added(data, options)
    _check_named(data, options, tokens, expected)
    tokenizer = _built(path, data, parts, tokens["mask"] if masks else None, options)
    if expected is not None and expected.around is not None:
        _put_around(tokenizer, expected, [tokens[role] for role in expected.around])
    ids = {role: tokenizer.token_to_id(token) for role, token in tokens.items() if token}
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    usual = {ids.get(role) for role, token in (expected.tokens if expected else {}).items() if tokens[role] == token}
    unknown = data["model"].get("unk_id", tokenizer.token_to_id(str(data["model"].get("unk_token") or "")))
    free = {unknown, ids.get("unk"), ids.get("mask") if masks else None}
    left: Literal["left", "right"] = "left" if str(side).lower() == "left" else "right"
    inputs = options.get("model_input_names", None)
    return TextTokenizer(
        tokenizer,
        left,
        ids.get("mask"),
        ids.get("sep"),
        ids.get("pad"),
        frozenset(i for i in special | usual if i is not None and i not in free),
        (expected.typed if expected is not None else None) if inputs is None else "token_type_ids" in inputs,
        _pair_refusal(tokenizer, expected, tokens),
    )


def _options(extras: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of tokenizer_config.json; special tokens of the older file count if it has them."""
    options, named = (JsonConfig(name, extras.get(name, {})).data for name in (CONFIG, TOKENS_MAP))
    return options if "added_tokens_decoder" in options else {**options, **named}


def _class(options: JsonConfig, config: Mapping[str, Any]) -> TokenizerClass | None:
    """Return the class named by the files, else that of the model_type; None if tokenizer.json is used alone."""
    named = options.get("tokenizer_class", config.get("tokenizer_class"))
    kind = str(tokenizer_class(str(config.get("model_type"))) if named is None else named).removesuffix("Fast")
    if kind in AS_IT_IS or kind == "None":
        return None
    if kind not in CLASSES:
        raise UnsupportedModelError(
            f"{CONFIG}: tokenizer_class {named!r} is not supported; supported: {', '.join(CLASSES)}, and "
            f"PreTrainedTokenizerFast, with which {FILE} counts as it is"
        )
    return CLASSES[kind]


def _named(options: JsonConfig, role: str, expected: TokenizerClass | None) -> str:
    """Return a special token, empty without one."""
    default = expected.tokens.get(role, "") if expected is not None else ""
    token = options.get(f"{role}_token", default)
    token = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(token, str):
        raise options.bad_value(f"{role}_token", "a string", token)
    return token


def _data(path: Path, extras: Mapping[str, Any], expected: TokenizerClass | None, unknown: str) -> dict[str, Any]:
    """Return tokenizer.json, or its equivalent from the vocabulary files of the class."""
    if (path / FILE).is_file():
        data = read_json(path / FILE)
        if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
            raise ModelError(f"{path / FILE} is not a valid tokenizer (it has no model); copy it again")
        if "type" not in data["model"] and expected is not None:  # files of the first versions
            data["model"]["type"] = expected.model
        return data
    if expected is None or not expected.files or not all((path / name).is_file() for name in expected.files):
        file = next((name for name in _SENTENCEPIECE if (path / name).is_file()), None)
        way = (
            f"make it from {file} on a machine with transformers: "
            "AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
            if file
            else "copy it from the original directory"
        )
        raise ModelError(f"{path / FILE} is missing, so texts cannot be read or written; {way}")
    model = _model_of_files([path / name for name in expected.files], unknown)
    model |= {key: values[0] for key, values in expected.parameters.items() if values[0] is not None}
    added = JsonConfig(ADDED, extras.get(ADDED, {})).data
    entries = [
        {"id": i, "content": token, **dict.fromkeys(_FLAGS, False), "normalized": True} for token, i in added.items()
    ]
    return {"version": "1.0", "added_tokens": sorted(entries, key=lambda entry: int(entry["id"])), "model": model}


def _model_of_files(files: Sequence[Path], unknown: str) -> dict[str, Any]:
    """Return the model of vocab.txt, or of vocab.json and merges.txt."""
    try:
        if len(files) == 1:
            lines = files[0].read_text(encoding="utf-8-sig").split("\n")
            words = lines[:-1] if lines[-1] == "" else lines
            vocab = {word.removesuffix("\r"): i for i, word in enumerate(words)}
            sizes = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
            return {"type": "WordPiece", "vocab": vocab, "unk_token": unknown, **sizes}
        merges = [line for line in files[1].read_text(encoding="utf-8-sig").splitlines() if line]
    except (OSError, ValueError) as error:
        raise ModelError(f"{files[0].parent}: its vocabulary cannot be read ({error}); copy it again") from error
    merges = merges[1:] if merges and merges[0].startswith("#version") else merges
    return {"type": "BPE", "vocab": read_json(files[0]), "merges": merges}


def _parts_of_class(
    path: Path, data: Mapping[str, Any], expected: TokenizerClass, options: JsonConfig, parts: Mapping[str, Part]
) -> Mapping[str, Part]:
    """Return the class's parts; parts of tokenizer.json that differ count if both make the same ids."""

    def of_class(normalizer: Part, pre_tokenizer: Part) -> Mapping[str, Part]:
        return {
            **parts,
            "normalizer": expected.normalizer(options, normalizer),
            "pre_tokenizer": expected.pre_tokenizer(options, pre_tokenizer),
        }

    try:
        return of_class(parts["normalizer"], parts["pre_tokenizer"])
    except UnsupportedModelError:
        if expected.model != "BPE":  # unknown words have no ids to compare
            raise
        by_file, by_class = (
            _built(path, dict(data), {**some, "decoder": expected.decoder}, None, options)
            for some in (parts, of_class(None, None))
        )
        if any(by_file.encode(text).ids != by_class.encode(text).ids for text in _probes(by_class)):
            raise
    _log.info("%s: its class in transformers splits texts differently, into the same ids; %s counts", path, FILE)
    return parts


def _probes(tokenizer: Tokenizer) -> list[str]:
    """Return texts with all tokens, and texts that tokenizers split differently."""
    pieces = tokenizer.decode_batch([[i] for i in range(tokenizer.get_vocab_size())])
    return [*(between.join(pieces) for between in (" ", "", "\n")), _PROBE, _PROBE.upper()]


_PROBE: Final = (
    "It's 1234567890 o'clock, 3.14 or 1,000!  Two  spaces,\ttabs\r\n\n lines; caf\u00e9 E\u0301t\u00e9 \u5668\u5177 "
    "\U0001f600 x=[1]+{'a_b': \"c\"}; \u0661\u0662\u0663 \u00bd \ufb01 a\u00a0b \u2167 "
)
_PARTS: Final = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def _canonical(data: Mapping[str, Any]) -> dict[str, Part]:
    """Return the parts of a tokenizer as the newest format writes them."""
    parts = {name: data.get(name) for name in _PARTS}
    return {name: value for name, value in json.loads(_bare(parts).to_str()).items() if name in _PARTS}


def _bare(parts: Mapping[str, Part]) -> Tokenizer:
    """Return a tokenizer of these parts without a vocabulary."""
    bare: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "model": _NOTHING,
    }
    return Tokenizer.from_str(json.dumps({**bare, **parts}))


def _check_model(model: Mapping[str, Any], expected: TokenizerClass, unknown: str) -> None:
    """Raise UnsupportedModelError unless the class would build the same model."""
    if model.get("type") != expected.model:
        raise differs("model", f"{expected.model}, and it is {model.get('type')}")
    for key, values in expected.parameters.items():
        if model.get(key) not in values:
            raise differs("model", f"{key} is {model.get(key)!r}")
    if expected.model == "WordPiece" and model.get("unk_token", "[UNK]") != unknown:
        raise differs("model", f"unk_token is {unknown!r}")
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    if (
        expected.model == "BPE"
        and model.get("unk_token")
        and not (model.get("byte_fallback") or alphabet <= {*model["vocab"]})
    ):
        raise differs("model", "its bytes are not all in the vocabulary")


def _check_as_it_is(options: JsonConfig, parts: Mapping[str, Part]) -> None:
    """Raise UnsupportedModelError for an option that tokenizer.json alone would contradict."""
    splitting = parts["pre_tokenizer"] or {}
    wanted = options.get("add_prefix_space", None)
    if wanted is not None and splitting.get("add_prefix_space", wanted) != wanted:
        raise differs("pre_tokenizer", f"add_prefix_space is {wanted!r} in {CONFIG}")


def _check_added(data: Mapping[str, Any], options: JsonConfig) -> None:
    """Raise UnsupportedModelError if both files add words to the vocabulary, and different ones."""
    named = options.get("added_tokens_decoder", None)
    if named is None:
        return
    try:
        stated = {(int(i), token["content"]) for i, token in named.items() if not token.get("special")}
        listed = {(int(t["id"]), t["content"]) for t in data.get("added_tokens") or () if not t.get("special")}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise options.bad_value("added_tokens_decoder", "an object of numbers and tokens", named) from error
    if stated != listed:
        raise differs("added_tokens", f"only one of the files has {sorted(stated ^ listed)[:4]}")


def _check_named(
    data: Mapping[str, Any], options: JsonConfig, tokens: Mapping[str, str], expected: TokenizerClass | None
) -> None:
    """Raise UnsupportedModelError for a control token that is a word like any other in tokenizer.json."""
    added = [*(data.get("added_tokens") or ()), *(options.get("added_tokens_decoder", None) or {}).values()]
    special = {token["content"] for token in added if token.get("special")}
    usual = {*expected.tokens.values()} if expected is not None else set()
    for role, token in tokens.items():
        other = token not in special and token not in usual and role != "mask"  # texts may always have masks
        if token and other and _number(data["model"].get("vocab") or {}, token) is not None:
            raise differs("added_tokens", f"{role}_token {token!r} is a word like any other")


def _lowered(normalizer: Part) -> Part:
    """Return a normalizer that begins with lower case."""
    lower = {"type": "Lowercase"}
    steps = [] if normalizer is None else [normalizer]
    if normalizer is not None and normalizer["type"] == "Sequence":
        steps = normalizer["normalizers"]
    return normalizer if lower in steps else {"type": "Sequence", "normalizers": [lower, *steps]}


def _built(
    path: Path, data: dict[str, Any], parts: Mapping[str, Part], mask: str | None, options: JsonConfig
) -> Tokenizer:
    """Return the tokenizer; mask: the only control token that texts may have."""
    added = list(_with_mask(data, mask, options)) if mask else data.get("added_tokens") or []
    whole = {**data, **parts, "added_tokens": added, "truncation": None, "padding": None}
    try:
        tokenizer = Tokenizer.from_str(json.dumps(whole))
    except Exception as error:  # as above
        raise ModelError(f"{path / FILE} is not a valid tokenizer ({error}); copy it again") from error
    tokenizer.encode_special_tokens = True
    return tokenizer


def _with_mask(data: Mapping[str, Any], mask: str, options: JsonConfig) -> Iterable[dict[str, Any]]:
    """Yield the added tokens, including a mask token that is in the vocabulary; the newest file sets its matching."""
    entries = data.get("added_tokens") or []
    stated = options.get("added_tokens_decoder", None) or {}
    entry = next((t for t in entries if t["content"] == mask), None)
    flags = next((t for t in stated.values() if isinstance(t, Mapping) and t.get("content") == mask), entry or {})
    vocab = data["model"].get("vocab") or {}
    number = entry["id"] if entry else _number(vocab, mask)
    for token in entries:
        if token is not entry:
            yield token
    if number is not None:
        yield {"id": number, "content": mask} | {flag: bool(flags.get(flag)) for flag in _FLAGS} | {"special": False}


def _number(vocab: Any, token: str) -> int | None:
    """Return the id of a token of a vocabulary, which is an object, or a list of tokens and scores."""
    if isinstance(vocab, Mapping):
        return vocab.get(token)
    return next((i for i, (piece, _) in enumerate(vocab) if piece == token), None)


def _put_around(tokenizer: Tokenizer, expected: TokenizerClass, tokens: Sequence[str]) -> None:
    """Put the class's tokens around every text if it overrules tokenizer.json or that names none."""
    ids = [tokenizer.token_to_id(token) for token in tokens]
    if None in ids:
        raise ModelError(f"{FILE} has no {' or no '.join(tokens)}, which its class puts around texts; copy it again")
    if tokenizer.post_processor is None:
        start, end, closing = (
            [{"SpecialToken": {"id": token, "type_id": kind}}]
            for token, kind in ((tokens[0], 0), (tokens[1], 0), (tokens[1], 1))
        )
        single = [*start, {"Sequence": {"id": "A", "type_id": 0}}, *end]
        second = [*(end if expected.doubled else ()), {"Sequence": {"id": "B", "type_id": 1}}, *closing]
        special = {t: {"id": t, "ids": [i], "tokens": [t]} for t, i in zip(tokens, ids, strict=True)}
        part = {"type": "TemplateProcessing", "single": single, "pair": [*single, *second]}
        tokenizer.post_processor = _bare({"post_processor": {**part, "special_tokens": special}}).post_processor
    probe = tokenizer.encode("a", add_special_tokens=False)
    if expected.always and tokenizer.post_process(probe).ids != [ids[0], *probe.ids, ids[1]]:
        raise differs("post_processor", f"{tokens[0]}, the text, {tokens[1]}")


def _pair_refusal(tokenizer: Tokenizer, expected: TokenizerClass | None, tokens: Mapping[str, str]) -> str:
    """Return why pairs are refused: the template has no pair, or its class builds another template."""
    if not tokenizer.num_special_tokens_to_add(True):
        return f"{FILE} does not say how two texts become one sequence"
    if expected is None or expected.around is None:
        return ""
    start, end = (tokenizer.token_to_id(tokens[role]) for role in expected.around)
    half = tokenizer.encode("a", add_special_tokens=False)
    pair = tokenizer.post_process(half, half)
    between = [end, end] if expected.doubled else [end]
    types = [0] * (len(half) + 2) + [1] * (len(half) + 1)
    right = pair.ids == [start, *half.ids, *between, *half.ids, end]
    if right and (not expected.typed or pair.type_ids == types):
        return ""
    return f"{FILE} joins two texts differently from its class, and versions of transformers disagree"
