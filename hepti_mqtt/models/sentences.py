"""Reads the files of sentence-transformers: modules, prompts, pooling, the longest text, and scores of pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple

from hepti_mqtt.core.errors import ModelError, UnsupportedModelError
from hepti_mqtt.core.spec import HeadActivation, Pooling, Projection, TaskHead
from hepti_mqtt.models.config import JsonConfig, KeyTable

MODULES: Final = "modules.json"
SETTINGS: Final = "config_sentence_transformers.json"
TOKENIZER: Final = "tokenizer_config.json"
# The first one that exists is read.
_TRANSFORMER_FILES: Final = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_PACKAGE: Final = "sentence_transformers."
_UNCHANGED: Final = (5, 4)  # since this version texts are neither stripped nor lowered before the tokenizer
_FORWARDS: Final = {  # by transformer_task: the output of the transformer, and its name in the module
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
}
# Poolings by `pooling_mode` of new files; then modes by the flag of old files.
_POOLINGS: Final[Mapping[str, Pooling]] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "sqrt_mean",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Activations by the dotted name of PyTorch's module: after a dense layer, then of a score (True: a sigmoid).
_ACTIVATIONS: Final[Mapping[str, HeadActivation | None]] = {
    "torch.nn.modules.linear.Identity": None,
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
}
_SCORES: Final = {"torch.nn.modules.linear.Identity": False, "torch.nn.modules.activation.Sigmoid": True}
_OLD_ACTIVATION: Final = "sbert_ce_default_activation_function"  # before version 4
SIMILARITIES: Final = ("cosine", "dot", "euclidean", "manhattan")
# Names of prompts for queries and for documents; the first one of the model is used.
QUERY_PROMPTS: Final = ("query",)
DOCUMENT_PROMPTS: Final = ("document", "passage", "corpus")

_SETTINGS_KEYS: Final = KeyTable(
    read=frozenset({"__version__", "default_prompt_name", "prompts", "similarity_fn_name"}),
    only={"model_type": ("SentenceTransformer",)},
)
_TRANSFORMER_KEYS: Final = KeyTable(
    read=frozenset({"do_lower_case", "max_seq_length", "processor_kwargs", "processing_kwargs", "tokenizer_args"})
    | {"modality_config", "module_output_name", "transformer_task"},
    without_effect=frozenset({"model_args", "model_kwargs", "unpad_inputs"}),
    only={"config_args": ({},), "config_kwargs": ({},)},
)
_CALL_KEYS: Final = KeyTable(read=frozenset({"max_length"}), only={"truncation": (True, "longest_first")})
_PROCESSOR_KEYS: Final = KeyTable(
    read=frozenset({"model_max_length"}), without_effect=frozenset({"padding_side", "use_fast", "trust_remote_code"})
)
_POOLING_KEYS: Final = KeyTable(
    read=frozenset({"include_prompt", "pooling_mode", *_FLAGS}),
    without_effect=frozenset({"embedding_dimension", "word_embedding_dimension"}),
)
_DENSE_KEYS: Final = KeyTable(
    read=frozenset({"activation_function", "bias", "in_features", "out_features"}),
    only={
        "module_input_name": ("sentence_embedding",),
        "module_output_name": ("sentence_embedding",),
        "use_residual": (False,),
    },
)
_NORMALIZE_KEYS: Final = KeyTable(
    read=frozenset(), only={"module_input_name": ("sentence_embedding",), "module_output_name": ("sentence_embedding",)}
)


class TextRules(NamedTuple):
    """Changes of a text before the tokenizer, and rules for the model's vectors."""

    #: Prefix of texts if a request names none of `prompts`.
    prompt: str = ""
    #: Drop spaces at both ends.
    strip: bool = False
    #: Lower case before the tokenizer (`text`), as its first step (`normalizer`), or never.
    lower: Literal["", "text", "normalizer"] = ""
    prompts: Mapping[str, str] = {}
    #: How vectors are compared.
    similarity: str = "cosine"
    #: Tokens of a prompt are pooled like all others.
    pools_prompt: bool = True

    def prompt_for(self, names: Sequence[str]) -> str:
        """Return the first prompt of these names, empty if there is none."""
        return next((self.prompts[name] for name in names if self.prompts.get(name)), "")


def text_rules(extras: Mapping[str, Any]) -> TextRules:
    """Return the rules for texts in a directory; raises ModelError.

    They depend on the version of sentence-transformers that wrote the directory.
    """
    if MODULES not in extras:
        return TextRules()
    settings = JsonConfig(SETTINGS, extras.get(SETTINGS, {}))
    settings.check_keys(_SETTINGS_KEYS)
    lower = _transformer(extras).flag("do_lower_case", False)
    new = _version(settings) >= _UNCHANGED
    similarity = settings.get("similarity_fn_name", SIMILARITIES[0])
    if similarity not in SIMILARITIES:
        raise settings.bad_value("similarity_fn_name", f"one of {', '.join(SIMILARITIES)}", similarity)
    return TextRules(
        _default_prompt(settings),
        not new,
        ("normalizer" if new else "text") if lower else "",
        _prompts(settings),
        similarity,
        _pools_prompt(extras),
    )


def max_tokens(positions: int, extras: Mapping[str, Any]) -> int:
    """Return the tokens of the longest text: the number of positions, or a smaller limit in a file."""
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
    """Return the head of a sentence-transformers directory.

    Its modules are Transformer, Pooling, any number of Dense, and at most one Normalize, in this order.
    """
    names, paths = _modules(extras)
    normalize = names[-1:] == ["Normalize"]
    between = names[2 : len(names) - normalize]
    if names[:2] != ["Transformer", "Pooling"] or paths[0] or any(name != "Dense" for name in between):
        raise UnsupportedModelError(
            f"{MODULES}: modules {names} are not supported; supported, all of sentence_transformers: Transformer (in "
            "the directory itself), Pooling, any number of Dense, at most one Normalize, in this order"
        )
    rules, pooling = text_rules(extras), _module(extras, paths[1])
    if rules.prompt and not rules.pools_prompt:
        raise UnsupportedModelError(
            f"{pooling.file}: include_prompt false is supported only without a default_prompt_name in "
            f"{SETTINGS}, because Hepti pools all tokens; use a model that pools its prompt"
        )
    if normalize:
        file = f"{paths[-1]}/config.json"
        JsonConfig(file, extras.get(file, {})).check_keys(_NORMALIZE_KEYS)
    layers = [_projection(path, _module(extras, path)) for path in paths[2 : 2 + len(between)]]
    for before, after in pairwise(layers):
        if before.outputs != after.inputs:
            raise ModelError(
                f"{after.path}/config.json: in_features {after.inputs}, but {before.path} has out_features "
                f"{before.outputs}; restore the files as the model was published"
            )
    return TaskHead("embedding", _pooling(pooling), normalize=normalize, projections=tuple(layers))


def _modules(extras: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the classes and the folders of the modules, in the order of computation; raises ModelError."""
    modules = extras[MODULES]
    if not isinstance(modules, list) or not modules or not all(isinstance(m, Mapping) for m in modules):
        raise ModelError(f"{MODULES}: expected a JSON list of modules; restore the file")
    types = [str(m.get("type", "")) for m in modules]
    names = [name.rpartition(".")[2] if name.startswith(_PACKAGE) else name for name in types]
    return names, [str(m.get("path", "")) for m in modules]


def _module(extras: Mapping[str, Any], path: str) -> JsonConfig:
    """Return the file of a module; raises ModelError if it is missing."""
    file = f"{path}/config.json"
    if file not in extras:
        raise ModelError(f"{file} is missing, though {MODULES} names it; restore the file as the model was published")
    return JsonConfig(file, extras[file])


def _pools_prompt(extras: Mapping[str, Any]) -> bool:
    names, paths = _modules(extras)
    pooling = next((path for name, path in zip(names, paths, strict=True) if name == "Pooling"), None)
    return pooling is None or _module(extras, pooling).flag("include_prompt", True)


def _pooling(pooling: JsonConfig) -> Pooling:
    """Return the pooling that `pooling_mode` names, or the single flag that is true in an old file."""
    named = pooling.get("pooling_mode", None)
    if named is None:
        modes = [key for key in pooling.data if key.startswith("pooling_mode_") and pooling.flag(key, False)]
        modes = [_FLAGS.get(mode, mode) for mode in modes]
    else:
        modes = named if isinstance(named, list) else [named]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise UnsupportedModelError(
            f"{pooling.file}: pooling {modes} is not supported; supported: one of {', '.join(_POOLINGS)}"
        )
    pooling.check_keys(_POOLING_KEYS)
    return _POOLINGS[modes[0]]


def _projection(path: str, config: JsonConfig) -> Projection:
    """Return a dense layer after the pooling; raises UnsupportedModelError for an unsupported activation."""
    config.check_keys(_DENSE_KEYS)
    named = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if named not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{config.file}: activation_function {named!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    sizes = (config.positive("in_features"), config.positive("out_features"))
    return Projection(path, *sizes, config.flag("bias", True), _ACTIVATIONS[named])


def check_cross_encoder(extras: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a cross-encoder with modules after its transformer."""
    if MODULES in extras and is_cross_encoder(extras) and (names := _modules(extras)[0]) != ["Transformer"]:
        raise UnsupportedModelError(
            f"{MODULES}: modules {names} are not supported for scores of pairs; supported: Transformer alone"
        )


class CrossEncoder(NamedTuple):
    """The scores of pairs (cross-encoder) in a directory."""

    #: The directory states that its model scores pairs.
    declared: bool
    #: A score is the sigmoid of the logit, else the logit; None: an unsupported activation.
    sigmoid: bool | None
    #: Name of the activation, empty if no file names one.
    activation: str = ""


def cross_encoder(config: JsonConfig, extras: Mapping[str, Any], outputs: int) -> CrossEncoder:
    """Return how pairs are scored: by the directory's files, else by a sigmoid if there is one output."""
    settings, own = extras.get(SETTINGS, {}), config.get("sentence_transformers", {})
    stated = (
        settings.get("activation_fn") if is_cross_encoder(extras) else None,
        own.get("activation_fn") if isinstance(own, Mapping) else None,
        config.get(_OLD_ACTIVATION, None),
    )
    named = next((str(name) for name in stated if name is not None), None)
    if named is None:
        return CrossEncoder(is_cross_encoder(extras), outputs == 1)
    return CrossEncoder(True, _SCORES.get(named), named)


def _transformer(extras: Mapping[str, Any]) -> JsonConfig:
    """Return the file of the Transformer module, empty if there is none."""
    file = next((name for name in _TRANSFORMER_FILES if extras.get(name)), _TRANSFORMER_FILES[0])
    config = JsonConfig(file, extras.get(file, {}) if MODULES in extras else {})
    config.check_keys(_TRANSFORMER_KEYS)
    scores = is_cross_encoder(extras)
    kind = "sequence-classification" if scores else "feature-extraction"
    called, result = _FORWARDS[kind]
    forward = {"text": {"method": "forward", "method_output_name": called}}
    only = {"modality_config": (forward,), "module_output_name": (result,), "transformer_task": (kind,)}
    config.check_keys(KeyTable(frozenset(), only=only, closed=False))
    return config


def is_cross_encoder(extras: Mapping[str, Any]) -> bool:
    """Return whether sentence-transformers wrote the directory as a cross-encoder."""
    return bool(extras.get(SETTINGS, {}).get("model_type") == "CrossEncoder")


def _part(config: JsonConfig, key: str, table: KeyTable) -> JsonConfig:
    """Return an object within a file."""
    part = JsonConfig(f"{config.file}: {key}", config.get(key, {}))
    part.check_keys(table)
    return part


def _version(settings: JsonConfig) -> tuple[int, ...]:
    """Return the major and minor version of sentence-transformers that wrote a directory, (0, 0) if unknown."""
    versions = settings.get("__version__", {})
    named = versions.get("sentence_transformers", "") if isinstance(versions, Mapping) else ""
    parts = str(named).split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else (0, 0)


def _prompts(settings: JsonConfig) -> Mapping[str, str]:
    """Return the prompts by name; raises ModelError. A null prompt is left out."""
    prompts = settings.get("prompts", {})
    if not isinstance(prompts, Mapping) or not all(isinstance(p, str | None) for p in prompts.values()):
        raise settings.bad_value("prompts", "an object of names and texts", prompts)
    return {name: prompt for name, prompt in prompts.items() if prompt is not None}


def _default_prompt(settings: JsonConfig) -> str:
    """Return the prefix of every text; raises ModelError."""
    name, prompts = settings.get("default_prompt_name", None), _prompts(settings)
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(name, str) else None
    if prompt is None:
        raise ModelError(
            f"{settings.file}: default_prompt_name {name!r} is not one of its prompts {[*prompts]}; restore the file"
        )
    return prompt
