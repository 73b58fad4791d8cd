"""How a sentence-transformers directory says that texts become vectors: its modules, its prompt, the longest text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from hepti_mqtt.errors import ModelError, UnsupportedModelError
from hepti_mqtt.models.config import JsonConfig, KeyTable
from hepti_mqtt.spec import TaskHead

MODULES: Final = "modules.json"
SETTINGS: Final = "config_sentence_transformers.json"
TOKENIZER: Final = "tokenizer_config.json"
# The first of them that is there counts.
_TRANSFORMER_FILES: Final = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_MODULES: Final = ("Transformer", "Pooling", "Normalize")
_PACKAGE: Final = "sentence_transformers."
_UNCHANGED: Final = (5, 4)  # from this version on texts are neither stripped nor lowered before the tokenizer
_FORWARD: Final = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
_POOLINGS: Final = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
_OTHER_POOLINGS: Final = tuple(
    f"pooling_mode_{name}" for name in ("lasttoken", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")
)

_SETTINGS_KEYS: Final = KeyTable(
    read=frozenset({"__version__", "default_prompt_name", "prompts"}),
    without_effect=frozenset({"similarity_fn_name"}),
    only={"model_type": ("SentenceTransformer",)},
)
_TRANSFORMER_KEYS: Final = KeyTable(
    read=frozenset({"do_lower_case", "max_seq_length", "processor_kwargs", "processing_kwargs", "tokenizer_args"}),
    without_effect=frozenset({"model_args", "model_kwargs", "unpad_inputs"}),
    only={
        "config_args": ({},),
        "config_kwargs": ({},),
        "modality_config": (_FORWARD,),
        "module_output_name": ("token_embeddings",),
        "transformer_task": ("feature-extraction",),
    },
)
_CALL_KEYS: Final = KeyTable(read=frozenset({"max_length"}), only={"truncation": (True, "longest_first")})
_PROCESSOR_KEYS: Final = KeyTable(
    read=frozenset({"model_max_length"}),
    without_effect=frozenset({"padding_side", "use_fast", "trust_remote_code"}),
)
_POOLING_KEYS: Final = KeyTable(
    read=frozenset({"include_prompt", "pooling_mode", *_POOLINGS}),
    without_effect=frozenset({"embedding_dimension", "word_embedding_dimension"}),
    only=dict.fromkeys(_OTHER_POOLINGS, (False,)),
)
_NORMALIZE_KEYS: Final = KeyTable(
    read=frozenset(),
    only={"module_input_name": ("sentence_embedding",), "module_output_name": ("sentence_embedding",)},
)


class TextRules(NamedTuple):
    """What is done with a text before its tokens are looked up.

    prompt: put before it. strip: spaces at both ends are dropped. lower: before the tokenizer (`text`), as its first
    step (`normalizer`), or not at all.
    """

    prompt: str = ""
    strip: bool = False
    lower: Literal["", "text", "normalizer"] = ""


def text_rules(extras: Mapping[str, Any]) -> TextRules:
    """Return what a directory of these JSON files does with texts; raises ModelError.

    It follows the version of sentence-transformers that wrote the directory.
    """
    if MODULES not in extras:
        return TextRules()
    settings = JsonConfig(SETTINGS, extras.get(SETTINGS, {}))
    settings.check_keys(_SETTINGS_KEYS)
    lower = _transformer(extras).flag("do_lower_case", False)
    new = _version(settings) >= _UNCHANGED
    return TextRules(_default_prompt(settings), not new, ("normalizer" if new else "text") if lower else "")


def max_tokens(positions: int, extras: Mapping[str, Any]) -> int:
    """Return how many tokens of a text are read: the positions, or the limit that a file names where it is less."""
    transformer, tokenizer = _transformer(extras), JsonConfig(TOKENIZER, extras.get(TOKENIZER, {}))
    limits = [tokenizer.number("model_max_length", positions)]  # without a limit the file says 1e30
    if transformer.get("max_seq_length", None) is not None:
        limits = [transformer.positive("max_seq_length")]
    for key in ("tokenizer_args", "processor_kwargs"):
        part = _part(transformer, key, _PROCESSOR_KEYS)
        limits = [part.positive("model_max_length")] if part.get("model_max_length", None) is not None else limits
    calls = JsonConfig(transformer.file, transformer.get("processing_kwargs", {}))
    calls.check_keys(KeyTable(frozenset({"common", "text"}), frozenset({"audio", "chat_template", "image", "video"})))
    for key in ("common", "text"):
        part = _part(calls, key, _CALL_KEYS)
        limits = [part.positive("max_length")] if part.get("max_length", None) is not None else limits
    return max(1, int(min(positions, *limits)))


def sentence_head(extras: Mapping[str, Any]) -> TaskHead:
    """Return the head of a sentence-transformers directory: Transformer, Pooling, and perhaps Normalize."""
    modules = extras[MODULES]
    if not isinstance(modules, list) or not all(isinstance(m, Mapping) for m in modules):
        raise ModelError(f"{MODULES}: expected a JSON list of modules; restore the file")
    types = [str(m.get("type", "")) for m in modules]
    names = [name.rpartition(".")[2] if name.startswith(_PACKAGE) else name for name in types]
    if names not in ([*_MODULES], [*_MODULES[:2]]) or modules[0].get("path"):
        raise UnsupportedModelError(
            f"{MODULES}: modules {types} are not supported; supported: Transformer (in the directory itself), "
            "Pooling, and then Normalize or nothing, all of sentence_transformers"
        )
    rules = text_rules(extras)
    file = f"{modules[1].get('path', '')}/config.json"
    if file not in extras:
        raise ModelError(f"{file} is missing, though {MODULES} names it; restore the file as the model was published")
    pooling = JsonConfig(file, extras[file])
    if rules.prompt and not pooling.flag("include_prompt", True):
        raise UnsupportedModelError(
            f"{file}: include_prompt false is supported only without a default_prompt_name in "
            f"{SETTINGS}, since all tokens are pooled here; use a model that pools its prompt"
        )
    normalize = names[-1] == "Normalize"
    if normalize:
        file = f"{modules[2].get('path', '')}/config.json"
        JsonConfig(file, extras.get(file, {})).check_keys(_NORMALIZE_KEYS)
    return TaskHead("embedding", _pooling(pooling), normalize=normalize)


def _pooling(pooling: JsonConfig) -> Literal["cls", "mean"]:
    """Return how rows are pooled: what `pooling_mode` names, or else the one flag of old files that is set."""
    named = pooling.get("pooling_mode", None)
    if named is None:
        modes = [key for key in pooling.data if key.startswith("pooling_mode_") and pooling.flag(key, False)]
        modes = [_POOLINGS.get(mode, mode) for mode in modes]
    else:
        modes = named if isinstance(named, list) else [named]
    if modes not in (["mean"], ["cls"]):
        raise UnsupportedModelError(
            f"{pooling.file}: pooling {modes} is not supported; supported: one of pooling_mode_mean_tokens, "
            "pooling_mode_cls_token, or a pooling_mode of mean or cls"
        )
    pooling.check_keys(_POOLING_KEYS)
    return "mean" if modes == ["mean"] else "cls"


def _transformer(extras: Mapping[str, Any]) -> JsonConfig:
    """Return the file of the Transformer module, empty where there is none."""
    file = next((name for name in _TRANSFORMER_FILES if extras.get(name)), _TRANSFORMER_FILES[0])
    config = JsonConfig(file, extras.get(file, {}) if MODULES in extras else {})
    config.check_keys(_TRANSFORMER_KEYS)
    return config


def _part(config: JsonConfig, key: str, table: KeyTable) -> JsonConfig:
    """Return an object within a file."""
    part = JsonConfig(f"{config.file}: {key}", config.get(key, {}))
    part.check_keys(table)
    return part


def _version(settings: JsonConfig) -> tuple[int, ...]:
    """Return the major and minor version of sentence-transformers that wrote a directory, zeros if it is not named."""
    versions = settings.get("__version__", {})
    named = versions.get("sentence_transformers", "") if isinstance(versions, Mapping) else ""
    parts = str(named).split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else (0, 0)


def _default_prompt(settings: JsonConfig) -> str:
    """Return what is put before every text; raises ModelError."""
    name, prompts = settings.get("default_prompt_name", None), settings.get("prompts", {})
    if name is None:
        return ""
    if not isinstance(prompts, Mapping):
        raise settings.bad_value("prompts", "an object of names and texts", prompts)
    found = prompts.get(name) if isinstance(name, str) else None
    if not isinstance(found, str):
        raise ModelError(
            f"{settings.file}: default_prompt_name {name!r} is not one of its prompts {[*prompts]}; restore the file"
        )
    return found
