"""Every model family by name, and functions for all families."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from math import prod
from re import sub
from typing import Any, Final, Protocol, get_args

import numpy as np
import numpy.typing as npt

from hepti_mqtt.core.errors import UnsupportedModelError
from hepti_mqtt.core.plan import CacheDtype, Quantised, WeightDtype
from hepti_mqtt.core.program import DTYPE_BYTES, NUMPY_DTYPE, WeightRef
from hepti_mqtt.core.spec import RequestShape, Spec, TaskHead, Want
from hepti_mqtt.core.storage import BLOCK_STORAGES, QUANTISED, STORAGES, BlockStorage, Product
from hepti_mqtt.lowering.graph import Graph, GraphBuilder
from hepti_mqtt.models import (
    albert,
    beit,
    bert,
    causal,
    clip,
    deberta,
    decoder,
    decoupled,
    deit,
    dinov2,
    distilbert,
    electra,
    eyes,
    gpt2,
    modernbert,
    mpnet,
    nomic_bert,
    siglip,
    vit,
    whisper,
)
from hepti_mqtt.models.cnn import family as cnn
from hepti_mqtt.models.config import JsonConfig, KeyTable
from hepti_mqtt.models.heads import head_tensors
from hepti_mqtt.models.kinds import kinds_of
from hepti_mqtt.models.pictures import Preprocessor
from hepti_mqtt.models.shapes import DecoderInput, TokenBatch, fixed_point
from hepti_mqtt.models.speech import SpeechInput, SpeechSpec
from hepti_mqtt.models.tensors import EMBEDDING_TABLE, LOGITS_MATRIX, TensorSource, chosen, transposed, whole_ref
from hepti_mqtt.models.towers import ONE_MODEL, Towers
from hepti_mqtt.models.transformer import ModelSpec, any_layer
from hepti_mqtt.models.views import Views

Array = npt.NDArray[Any]


class Family(Protocol):
    """The members of a family's module.

    Optional constants, which a Protocol cannot list:

    `SPEC`: class of its specs, by default `ModelSpec`.
    `WEIGHT_DTYPES`: supported `WeightDtype`s, by default all. Other than f32 need layers (tensors `layers.<i>.NAME`)
    whose matrices only the kernel `linear` reads.
    `TOWERS`: `Towers` by architecture, for checkpoints with several models; each model has one of its `ARCHITECTURES`.
    `OWN_KEYS`: keys of config.json that are refused in other families.
    `KNOWN_CODE`: prefixes of `auto_map` entries, i.e. of code in a checkpoint, that the family replaces.
    `TOKENIZER_CLASSES`, `PICTURE_CLASSES`: classes of transformers by model_type, for files that name none.
    `MODEL_TYPES`: model_type by architecture, if an architecture's name does not begin with it.
    `translated`: function that returns another library's JSON files with Hugging Face's keys.
    """

    @property
    def ARCHITECTURES(self) -> Mapping[str, Any]:  # noqa: N802 - a constant of the module
        """Return the supported names in config.json's `architectures`, usually each with its task."""

    def spec(self, architecture: str, config: JsonConfig, extras: Mapping[str, Any], /) -> Any:
        """Return the spec of a config.json; raises ModelError, UnsupportedModelError."""

    def tensors(self, spec: Any, /) -> Iterator[TensorSource]:
        """Yield the tensors of a model, from the stem to the head."""

    def graph(self, net: GraphBuilder, spec: Any, shape: Any, refs: Mapping[str, WeightRef], /) -> None:
        """Add the tensors of a request's graph, the answer last; refs: references to whole tensors, by name."""

    def reference(self, spec: Any, tensors: Mapping[str, Array], inputs: Array, shape: Any, /) -> tuple[Array, Array]:
        """Return (final hidden states, the spec's output), in plain NumPy."""


def _spec_class(family: Family) -> type[Spec]:
    kind: type[Spec] = getattr(family, "SPEC", ModelSpec)
    return kind


FAMILIES: Final[Mapping[str, Family]] = {
    "bert": bert,
    "vit": vit,
    "deit": deit,
    "dinov2": dinov2,
    "beit": beit,
    "distilbert": distilbert,
    "albert": albert,
    "electra": electra,
    "mpnet": mpnet,
    "deberta": deberta,
    "modernbert": modernbert,
    "nomic_bert": nomic_bert,
    "decoder": decoder,
    "gpt2": gpt2,
    "clip": clip,
    "siglip": siglip,
    "eyes": eyes,
    "decoupled": decoupled,
    "whisper": whisper,
    "cnn": cnn,
}
_FAMILY_OF: Final[Mapping[str, Family]] = {a: family for family in FAMILIES.values() for a in family.ARCHITECTURES}
_TOWERS: Final[Mapping[str, Towers]] = {
    architecture: towers for f in FAMILIES.values() for architecture, towers in getattr(f, "TOWERS", {}).items()
}
_TYPES: Final = {kind.config["model_type"]: f for name, f in FAMILIES.items() for kind in kinds_of(name).values()}
_ENCODERS: Final = [name for name, family in FAMILIES.items() if _spec_class(family) is ModelSpec]

# Keys of config.json that would change the answers of any model; families refuse further keys.
_KEYS: Final = KeyTable(
    frozenset(),
    only={
        "add_cross_attention": (False,),
        "compression_config": (),
        "is_encoder_decoder": (False,),
        "pruned_heads": ({},),
        "quantization_config": (),
    },
    closed=False,
)
_CODE_KEYS: Final = _KEYS._replace(only={**_KEYS.only, "auto_map": ()})


def spec_from_dict(data: Mapping[str, Any]) -> Spec:
    """Return the spec that `to_dict` of a family's spec described; raises KeyError, TypeError on other data."""
    return _spec_class(FAMILIES[data["family"]]).from_dict(data)


def without_missing_pooler(spec: Spec, stored: Container[str]) -> Spec:
    """Return the spec without a pooler if the checkpoint has none; stored: names in the checkpoint."""
    if not isinstance(spec, ModelSpec) or spec.head.task != "embedding" or not spec.head.pooler:
        return spec
    names = next(source.stored for source in tensor_sources(spec) if source.name == "head.pooler.weight")
    return spec if any(name in stored for name in names) else replace(spec, head=replace(spec.head, pooler=False))


def without_false_tie(spec: Spec, stored: Mapping[str, object]) -> Spec:
    """Return the spec of a decoder, untied if the checkpoint has both embeddings and a matrix to the logits.

    stored: the checkpoint's tensors by name; a tied tensor may stand under both names.
    """
    if not _has_one_table(spec) or not isinstance(spec, ModelSpec | SpeechSpec):
        return spec
    sources = {source.name: source for source in tensor_sources(spec)}
    table, head = (stored.get(chosen(sources[name].stored, stored)) for name in (EMBEDDING_TABLE, LOGITS_MATRIX))
    return spec if table is head else replace(spec, head=replace(spec.head, tied=False))


def require_transformer(spec: Spec) -> ModelSpec:
    """Return the spec if it is a `ModelSpec`, for code that supports no other; raises UnsupportedModelError."""
    if not isinstance(spec, ModelSpec):
        raise UnsupportedModelError(f"{spec.architecture} cannot be used here; supported: {', '.join(_ENCODERS)}")
    return spec


def largest_shape(spec: Spec) -> RequestShape:
    """Return the largest shape of a run: the coordinator packs no more tokens into one."""
    return spec.input_spec.shape()


def representative_shape(spec: Spec, tokens: int, sequences: int = 1) -> RequestShape:
    """Return a representative request of sequences of `tokens` tokens each, at most the model's longest.

    Sequences beyond the largest shape are left out; a decoder has one.
    """
    one = spec.input_spec.shape(tokens)
    several = 1 if one.session_rows else max(min(sequences, largest_shape(spec).size // one.size), 1)
    return one.concatenate([one] * (several - 1))


def is_planned_for(spec: Spec, shape: RequestShape) -> bool:
    """Return whether plans are priced for runs of this shape; of sessions, only one kind is: its `InputSpec.shape`."""
    if shape.want == "alignment":
        return False
    return not shape.session_rows or (shape.size > 1) == (spec.input_spec.shape(shape.size).size > 1)


def input_bytes(spec: Spec, shape: RequestShape) -> int:
    """Return the bytes of a request's input."""
    dims, dtype = spec.input_spec.input_layout(shape)
    return prod(dims) * DTYPE_BYTES[dtype]


def random_inputs(spec: Spec, shape: RequestShape, rng: np.random.Generator) -> Array:
    """Return random token ids, pixels or frames of sound for a request."""
    dims, dtype = spec.input_spec.input_layout(shape)
    values = rng.integers(0, spec.input_spec.upper_bound, dims).astype(NUMPY_DTYPE[dtype])
    if shape.session_rows:
        values[: len(shape.sizes)] = 0  # the caches are empty
        values[len(shape.sizes) + shape.new_rows :] = 0  # temperatures
    if isinstance(spec.input_spec, SpeechInput):
        frames = values[1 + shape.new_rows :]
        frames[:] = fixed_point(np.float32(0.5) * rng.standard_normal(len(frames), np.float32))
    return values


def single_sequence(spec: Spec, ids: Array, want: Want = "task", tokens: int = 0) -> tuple[RequestShape, Array]:
    """Return a request of one sequence of token ids [m], and its inputs.

    A decoder's session begins with it: its cache is empty, and has room for `tokens` tokens.
    """
    if not isinstance(spec.input_spec, DecoderInput):
        return TokenBatch((len(ids),), want), ids
    shape = TokenBatch((len(ids),), want, cache=spec.input_spec.cache(max(tokens, len(ids))))
    return shape, np.concatenate([[0], ids]).astype(np.int32)


def reference(spec: Spec, tensors: Mapping[str, Array], inputs: Array, shape: RequestShape) -> tuple[Array, Array]:
    """Return (final hidden states [m, h] after the final norm, output of the spec's `output_shape`).

    In plain NumPy, without kernels or Programs, and in the dtype of the tensors (float32 or float64). tensors:
    canonical names and [in, out] orientation, as `tensor_sources` lists them. inputs: token ids [m], or pixels uint8
    [B, C, S, S].
    """
    return FAMILIES[spec.family].reference(spec, tensors, inputs, shape)


def weight_dtypes(spec: Spec) -> Sequence[WeightDtype]:
    """Return the dtypes of weights that plans of a model may have."""
    if isinstance(spec, ModelSpec) and spec.storages:
        return ("f32", "w8a8")  # weights stay in their blocks; w8a8 rounds activations to int8
    if isinstance(spec, ModelSpec) and spec.block.experts:
        return ("f32",)
    dtypes: Sequence[WeightDtype] = getattr(FAMILIES[spec.family], "WEIGHT_DTYPES", get_args(WeightDtype))
    return dtypes


def models_of(config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the config.json of each model of a checkpoint by name, empty for a single model; raises ModelError."""
    towers = towers_of(config)
    if towers is ONE_MODEL:
        return {"": config}
    whole = JsonConfig("config.json", config)
    whole.check_keys(_CODE_KEYS)
    return towers.configs(whole)


def towers_of(config: Mapping[str, Any]) -> Towers:
    """Return the `Towers` of a checkpoint; `ONE_MODEL` if it holds one model."""
    named = config.get("architectures") if isinstance(config, Mapping) else None  # it may be any JSON
    return _TOWERS.get(str(named[0]), ONE_MODEL) if isinstance(named, list) and named else ONE_MODEL


def with_hugging_face_keys(
    config: Mapping[str, Any], extras: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return config.json and the other JSON files of a directory with Hugging Face's keys, if another library wrote it.

    Raises ModelError, UnsupportedModelError for unsupported values.
    """
    for family in FAMILIES.values():
        if translated := getattr(family, "translated", None):
            config, extras = translated(config, extras)
    return config, extras


def spec_from_config(config: Mapping[str, Any], extras: Mapping[str, Any]) -> Spec:
    """Return the spec of a Hugging Face directory.

    config: config.json. extras: the directory's other JSON files by relative name ("preprocessor_config.json",
    "modules.json", "1_Pooling/config.json", "sentence_bert_config.json"). Raises UnsupportedModelError for an
    unsupported architecture, activation or option, ModelError for missing or wrong keys.
    """
    checked = JsonConfig("config.json", config)
    architectures = checked.require("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise checked.bad_value("architectures", "a list with one name", architectures)
    architecture = architectures[0]
    if not isinstance(architecture, str) or architecture not in _FAMILY_OF:
        near = ", ".join(get_close_matches(str(architecture), [*_FAMILY_OF, *_TOWERS], n=3, cutoff=0.5))
        raise UnsupportedModelError(
            f"config.json: architecture {architecture!r} is not supported; {f'nearest: {near}; ' if near else ''}"
            f"all {len(_FAMILY_OF) + len(_TOWERS)} are listed in docs/guide/models.md"
        )
    model_type = config.get("model_type")
    if model_type is not None and not _is_of_type(architecture, str(model_type)):
        raise UnsupportedModelError(
            f"config.json: architecture {architecture!r} is not of model_type {str(model_type)[:40]!r}, and some "
            "libraries use the one, some the other; correct the wrong one"
        )
    family = _FAMILY_OF[architecture]
    keys = _KEYS if _is_known_code(family, config.get("auto_map")) else _CODE_KEYS
    checked.check_keys(keys._replace(read=getattr(family, "OWN_KEYS", frozenset())))
    spec: Spec = family.spec(architecture, checked, extras)
    return spec


def _is_of_type(architecture: str, model_type: str) -> bool:
    """Return whether an architecture belongs to a model_type: by `MODEL_TYPES`, its name, or its family's kinds."""
    letters, family = sub("[^a-z0-9]", "", model_type.lower()), _FAMILY_OF[architecture]
    if types := getattr(family, "MODEL_TYPES", None):
        return bool(types[architecture] == model_type)
    if architecture.lower().startswith(letters):
        return True
    if _TYPES.get(model_type) is not family:
        return False
    alone = sum(other is family for other in _TYPES.values()) == 1
    return alone or not any(a.lower().startswith(letters) for a in family.ARCHITECTURES)


def _is_known_code(family: Family, named: Any) -> bool:
    """Return whether the family replaces all code that config.json names; named: its `auto_map`."""
    prefixes = getattr(family, "KNOWN_CODE", ())
    return isinstance(named, Mapping) and bool(prefixes) and all(str(v).startswith(prefixes) for v in named.values())


def tokenizer_class(model_type: str) -> str | None:
    """Return the tokenizer class of a model_type in transformers, for files that name none; None if it is unknown."""
    return _usual("TOKENIZER_CLASSES").get(model_type)


def preprocessor(config: Mapping[str, Any], extras: Mapping[str, Any]) -> Preprocessor:
    """Return the preprocessor of a model's pictures; raises ModelError, UnsupportedModelError."""
    return Preprocessor(_usual("PICTURE_CLASSES").get(str(config.get("model_type", ""))), extras)


def views(config: Mapping[str, Any], extras: Mapping[str, Any]) -> Views:
    """Return how pictures are divided for a decoder's tower of pictures; raises ModelError, UnsupportedModelError."""
    return eyes.views(JsonConfig("config.json", config), extras)


@lru_cache
def _usual(table: str) -> Mapping[str, str]:
    return {kind: name for family in FAMILIES.values() for kind, name in getattr(family, table, {}).items()}


@lru_cache(maxsize=64)
def tensor_sources(spec: Spec) -> tuple[TensorSource, ...]:
    """Return every tensor of the model, from the stem to the head."""
    shared = head_tensors(spec) if isinstance(spec, ModelSpec) else ()
    sources = (*FAMILIES[spec.family].tensors(spec), *shared)
    if not isinstance(spec, ModelSpec) or spec.storage_of(EMBEDDING_TABLE) is None:
        return sources
    return tuple(transposed(source) if source.name == EMBEDDING_TABLE else source for source in sources)


@lru_cache(maxsize=64)
def _whole_refs(spec: Spec) -> Mapping[str, WeightRef]:
    refs = {source.name: whole_ref(source) for source in tensor_sources(spec)}
    blocks = _storages(spec)
    refs |= {name: refs[name]._replace(weight_dtype=storage) for name, storage in blocks.items()}
    if _has_one_table(spec):
        refs[EMBEDDING_TABLE] = refs[LOGITS_MATRIX]  # one copy: rows of the table are columns of the matrix
    return refs


def _has_one_table(spec: Spec) -> bool:
    """Return whether a decoder's token embeddings are also its matrix to the logits."""
    head = getattr(spec, "head", None)
    return isinstance(head, TaskHead) and head.tied and head.task in ("generation", "transcription")


@lru_cache(maxsize=64)
def _storages(spec: Spec) -> Mapping[str, BlockStorage]:
    """Return the storage of each matrix in blocks."""
    if not isinstance(spec, ModelSpec) or not spec.storages:
        return {}
    storages = {source.name: spec.storage_of(source.name) for source in tensor_sources(spec)}
    return {name: storage for name, storage in storages.items() if storage is not None}


def usual_product(spec: Spec, weight_dtype: WeightDtype) -> Product:
    """Return the product of most matrices; weight_dtype: of the plan."""
    blocks = Counter(_storages(spec).values())
    return Product(blocks.most_common(1)[0][0], weight_dtype == "w8a8") if blocks else Product(weight_dtype)


def with_storages(spec: Spec, stored: Mapping[str, str]) -> Spec:
    """Return the spec with the matrices that stay in blocks; stored: storages of the file's tensors by canonical name.

    A matrix stays in blocks if kernels multiply its storage directly, and if all matrices of the same product do.
    """
    kept: dict[str, BlockStorage] = {
        name: storage for name, of in stored.items() for storage in BLOCK_STORAGES if storage == of
    }
    if not kept or not isinstance(spec, ModelSpec):
        return spec
    for source in tensor_sources(spec):
        together = [source.name]
        layer, _, part = source.name.removesuffix(".weight").rpartition(".")
        if part in _ATTENDED:
            together = [f"{layer}.{other}.weight" for other in _ATTENDED]
        if not _may_be_in_blocks(spec, source) or any(name not in kept for name in together):
            kept.pop(source.name, None)
    if spec.head.tied and LOGITS_MATRIX in kept:
        kept.pop(EMBEDDING_TABLE, None)  # the matrix to the logits stands for both
    layers: dict[str, set[BlockStorage | None]] = {}
    for source in tensor_sources(spec):
        layers.setdefault(any_layer(source.name), set()).add(kept.get(source.name))
    alike = {name: kinds.pop() for name, kinds in layers.items() if len(kinds) == 1}
    named = {name: storage for name, storage in kept.items() if any_layer(name) not in alike}
    return replace(spec, storages=tuple(sorted((n, s) for n, s in {**alike, **named}.items() if s is not None)))


def _may_be_in_blocks(spec: ModelSpec, source: TensorSource) -> bool:
    """Return whether kernels can read a tensor in blocks: matrices, and token embeddings of the graph of `causal`."""
    is_table = source.name == EMBEDDING_TABLE and _is_causal(spec)
    return is_table or (source.transposed and source.layout == "packed")


def _is_causal(spec: ModelSpec) -> bool:
    """Return whether a model is a decoder with rotary positions."""
    return FAMILIES[spec.family].graph is causal.graph and bool(spec.block.thetas)


_ATTENDED: Final = ("query", "key", "value")
_ROUTER: Final = ".router.weight"  # never quantised: it is small, and errors would choose other experts


def quantised(spec: Spec, how: Quantised) -> Spec:
    """Return the spec of a model whose checkpoint is quantised on opening; rows of matrices must be whole blocks.

    Raises UnsupportedModelError for models without such matrices or with weights in blocks, and for encoders.
    """
    why = ""
    storage = QUANTISED[how]
    if not isinstance(spec, ModelSpec) or not _is_causal(spec):
        why = "only decoders with rotary positions are; w8a8 and w8a32 keep the weights of other transformers narrow"
    elif spec.storages:
        why = "its weights are in the blocks of its file already; leave out --weights"
    else:
        whole = {
            s.name: storage
            for s in tensor_sources(spec)
            if not s.matrix_shape[-1] % STORAGES[storage].block and not s.name.endswith(_ROUTER)
        }
        blocked = with_storages(spec, whole)
        if isinstance(blocked, ModelSpec) and blocked.storages:
            return blocked
        why = f"none of its matrices is in whole blocks of {STORAGES[storage].block}"
    raise UnsupportedModelError(f"{spec.architecture} cannot be quantised to {how}: {why}")


def with_cache(spec: Spec, kept: CacheDtype) -> Spec:
    """Return the spec with a dtype of sessions' keys and values.

    Raises UnsupportedModelError for f16, except in decoders with rotary positions that generate.
    """
    if kept == "f32":
        return spec
    if isinstance(spec, ModelSpec) and _is_causal(spec) and spec.head.task == "generation":
        return replace(spec, cache=kept)
    raise UnsupportedModelError(
        f"{spec.architecture} cannot keep keys and values in {kept}: only decoders with rotary positions that generate "
        "can; leave out --kv-cache"
    )


def left_unquantised(spec: ModelSpec) -> tuple[str, ...]:
    """Return the matrices of a quantised model that are not in blocks; `*` in a name is any layer."""
    sources = [source for source in tensor_sources(spec) if _may_be_in_blocks(spec, source)]
    whole = [
        s.name
        for s in sources
        if spec.storage_of(s.name) is None and not (s.name == EMBEDDING_TABLE and spec.head.tied)
    ]
    return tuple(dict.fromkeys(any_layer(name).removesuffix(".weight") for name in whole))


def full_ref(spec: Spec, name: str) -> WeightRef:
    """Return a reference to all of tensor `name`: packed for matmul weights, plain for vectors and tables.

    Raises KeyError if the model has no such tensor.
    """
    return _whole_refs(spec)[name]


@lru_cache(maxsize=32)
def graph(spec: Spec, shape: RequestShape) -> Graph:
    """Return the graph of one request: its answer has the spec's `output_shape`."""
    net = GraphBuilder(_storages(spec))
    FAMILIES[spec.family].graph(net, spec, shape, _whole_refs(spec))
    return net.build()
