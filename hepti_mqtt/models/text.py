"""What encoders of text share: token embeddings, names of a layer's tensors, sentence-transformers directories.

m tokens, e columns of the embedding tables, h hidden, f MLP width. A spec's `text.width` is e where a dense layer takes
embeddings to h columns, 0 where the tables have h columns themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from hepti_mqtt.errors import ModelError, UnsupportedModelError
from hepti_mqtt.lowering import GraphBuilder
from hepti_mqtt.lowering.roles import STEM
from hepti_mqtt.models import plain
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.shapes import PackedBatch
from hepti_mqtt.models.tensors import TensorSource, dense, norm, prefixed, table, vector, weight
from hepti_mqtt.models.transformer import ModelSpec, TextStem
from hepti_mqtt.program import WeightRef
from hepti_mqtt.spec import HeadActivation, Task, TaskHead


class Keys(NamedTuple):
    """What config.json calls the sizes of a family."""

    layers: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    mlp: str = "intermediate_size"
    activation: str = "hidden_act"


HUGGING_FACE: Final = Keys()  # what most families call them
LAYER_PARTS: Final = (
    "query", "key", "value", "attention_out", "attention_norm", "mlp_up", "mlp_down", "mlp_norm",
)  # fmt: skip
WORD_EMBEDDINGS: Final = "embeddings.word_embeddings.weight"


def encoder_spec(
    family: str,
    architecture: str,
    config: JsonConfig,
    extras: Mapping[str, Any],
    head: TaskHead,
    *,
    keys: Keys = HUGGING_FACE,
    types: int = 0,
    offset: int = 0,
    width: int = 0,
) -> ModelSpec:
    """Return the spec of an encoder of text that norms after each residual; raises ModelError, UnsupportedModelError.

    types: rows of the table of token types, 0 without. offset: the first token's position. width: see TextStem.
    """
    config.require_one_of("position_embedding_type", "absolute", "absolute")
    config.require_one_of("is_decoder", False, False)
    positions = config.positive("max_position_embeddings")
    if positions <= offset:
        raise ModelError(f"config.json: max_position_embeddings {positions} leaves no position behind offset {offset}")
    hidden = config.positive(keys.hidden)
    return ModelSpec(
        family=family,
        architecture=architecture,
        layers=config.positive(keys.layers),
        hidden=hidden,
        heads=config.heads(hidden, keys.heads, keys.hidden),
        mlp=config.positive(keys.mlp),
        norm_first=False,
        activation=config.activation(keys.activation),
        norm_eps=config.number("layer_norm_eps", 1e-12),
        max_tokens=_max_tokens(positions - offset, extras),
        head=head,
        text=TextStem(config.positive("vocab_size"), positions, types, offset, width),
    )


def stem_of(spec: ModelSpec) -> TextStem:
    """Return the stem of a text model."""
    assert spec.text is not None
    return spec.text


def embed(net: GraphBuilder, spec: ModelSpec, shape: PackedBatch, refs: Mapping[str, WeightRef]) -> str:
    """Add the stem of a packed batch: ids i32 [m] -> [m, h]."""
    stem = stem_of(spec)
    ids = net.input("ids", (shape.tokens,), "i32")
    parts = ("word", "position", *(("type",) if stem.types else ()), "norm.weight", "norm.bias")
    x = net.opaque(
        "embedded",
        (ids,),
        STEM,
        "embed_tokens",
        (shape.tokens, stem.width or spec.hidden),
        [refs[f"stem.{part}"] for part in parts],
        lengths=shape.lengths,
        position_offset=stem.position_offset,
        eps=spec.norm_eps,
    )  # [m, e]
    return net.linear("projected", x, STEM, {"stem.projection": spec.hidden}) if stem.width else x


def reference_embed(spec: ModelSpec, t: plain.Tensors, ids: plain.Array, shape: PackedBatch) -> plain.Array:
    """Return the embeddings of token ids [m]: [m, h]."""
    stem = stem_of(spec)
    places = plain.token_positions(shape.lengths) + stem.position_offset  # [m]
    x = t["stem.word"][ids] + t["stem.position"][places]  # [m, e]
    if stem.types:
        x = x + t["stem.type"][0]
    x = plain.norm(t, "stem.norm", x, spec.norm_eps)
    return plain.linear(t, "stem.projection", x) if stem.width else x


def stem_tensors(
    spec: ModelSpec, base: tuple[str, ...], projection: str = "", decoder: str = ""
) -> Iterator[TensorSource]:
    """Yield the tensors of the stem.

    projection: what a checkpoint calls the dense layer from e to h columns; decoder: and the one to the vocabulary,
    which stands in for missing word embeddings that are tied to it.
    """
    stem, e = stem_of(spec), stem_of(spec).width or spec.hidden
    yield table("stem.word", (*prefixed(base, WORD_EMBEDDINGS), *_tied(spec, f"{decoder}.weight")), stem.vocab, e)
    yield table("stem.position", prefixed(base, "embeddings.position_embeddings.weight"), stem.positions, e)
    if stem.types:
        yield table("stem.type", prefixed(base, "embeddings.token_type_embeddings.weight"), stem.types, e)
    yield from norm("stem.norm", base, "embeddings.LayerNorm", e)
    if stem.width:
        yield from dense("stem.projection", base, projection, e, spec.hidden)


def layer_tensors(
    spec: ModelSpec,
    here: str,
    base: tuple[str, ...],
    stored: str,
    called: Mapping[str, str],
    width: int = 0,
    matrix: Callable[..., Iterable[TensorSource]] = dense,
) -> Iterator[TensorSource]:
    """Yield the tensors of a layer; called: what a checkpoint calls each part of it below `stored`.

    width: columns of its inputs and results, by default all. matrix: how its matrices are stored.
    """
    w, h, f = width or spec.hidden, spec.hidden, spec.mlp
    sizes = {"qkv": (w, 3 * h), "attention_out": (h, w), "mlp_up": (w, f), "mlp_down": (f, w)}
    for part, name in called.items():
        if part.endswith("_norm"):
            yield from norm(f"{here}{part}", base, stored + name, w)
        else:
            yield from matrix(f"{here}{part}", base, stored + name, *sizes.get(part, (w, h)))


def mask_head_tensors(
    spec: ModelSpec, base: tuple[str, ...], transform: str, transform_norm: str, decoder: str, *bias: str
) -> Iterator[TensorSource]:
    """Yield the head for mask tokens: a dense layer, a norm, and a decoder to the vocabulary.

    decoder: what a checkpoint calls it; bias: another name of its bias. As transformers 5 does (`tie_weights`), what
    is stored as the decoder's own counts, even where config.json says that it is tied to something else. What is not
    stored is what it is tied to: the matrix to the word embeddings, stored [V, e] like it. An untied bias without a
    name of its own was written by transformers 4, for which both names were one tensor.
    """
    e, vocab = stem_of(spec).width or spec.hidden, spec.head.outputs
    yield from dense("head.transform", ("",), transform, spec.hidden, e)
    yield from norm("head.transform_norm", ("",), transform_norm, e)
    words = _tied(spec, *prefixed(base, WORD_EMBEDDINGS))
    own = weight("head.decoder.weight", (f"{decoder}.weight", *words), e, vocab)
    yield replace(own, created_name=next(iter(words), ""))
    own = vector("head.decoder.bias", (f"{decoder}.bias", *bias), vocab)
    yield replace(own, created_name=next(iter(_tied(spec, *bias)), ""))


def _tied(spec: ModelSpec, *stored: str) -> tuple[str, ...]:
    """Return these names of what the logits' weights are tied to; none where they are not."""
    return stored if spec.head.tied else ()


def task_head(
    task: Task,
    config: JsonConfig,
    extras: Mapping[str, Any],
    *,
    pooler: bool,
    classify: HeadActivation = "tanh",
    fill: HeadActivation = "gelu",
) -> TaskHead:
    """Return the head of a task.

    pooler: whether the plain model has a dense layer with tanh on the first row. classify, fill: the activation of the
    dense layer before the labels, and before the vocabulary.
    """
    # Sentence-transformers loads the base model, whatever head `architectures` names.
    if task == "masked_token" and "modules.json" in extras:
        return _sentence_head(extras)
    if task == "masked_token":
        tied = config.flag("tie_word_embeddings", True)
        return TaskHead(task, "mask", outputs=config.positive("vocab_size"), activation=fill, tied=tied)
    if task == "classification":
        labels = config.labels()
        return TaskHead(task, "cls", pooler=True, outputs=len(labels), labels=labels, activation=classify)
    return _sentence_head(extras) if "modules.json" in extras else TaskHead(task, "cls", pooler=pooler)


def default_prompt(extras: Mapping[str, Any]) -> str:
    """Return what a sentence-transformers directory puts before every text; raises ModelError."""
    file = "config_sentence_transformers.json"
    config = JsonConfig(file, extras.get(file, {}))
    name, prompts = config.get("default_prompt_name", None), config.get("prompts", {})
    if name is None:
        return ""
    if not isinstance(prompts, Mapping):
        raise config.bad_value("prompts", "an object of names and texts", prompts)
    found = prompts.get(name) if isinstance(name, str) else None
    if not isinstance(found, str):
        raise ModelError(
            f"{file}: default_prompt_name {name!r} is not one of its prompts {[*prompts]}; restore the file"
        )
    return found


def _max_tokens(positions: int, extras: Mapping[str, Any]) -> int:
    """Return the positions, or what sentence-transformers cuts texts to where that is less."""
    file, tokenizer = "sentence_bert_config.json", "tokenizer_config.json"
    length = JsonConfig(file, extras.get(file, {})).get("max_seq_length", None)
    if length is not None:
        return min(positions, JsonConfig(file, extras[file]).positive("max_seq_length"))
    if "modules.json" not in extras:
        return positions
    # Where the tokenizer knows no limit, the file says 1e30.
    return max(
        1, int(min(positions, JsonConfig(tokenizer, extras.get(tokenizer, {})).number("model_max_length", positions)))
    )


def _sentence_head(extras: Mapping[str, Any]) -> TaskHead:
    """Return the head of a sentence-transformers directory: Transformer, Pooling, and perhaps Normalize."""
    modules = extras["modules.json"]
    if not isinstance(modules, list) or not all(isinstance(m, Mapping) for m in modules):
        raise ModelError("modules.json: expected a JSON list of modules; restore the file")
    types = [str(m.get("type", "")).rpartition(".")[2] for m in modules]
    if types not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or modules[0].get("path"):
        raise UnsupportedModelError(
            f"modules.json: modules {types} are not supported; supported: Transformer (in the directory itself), "
            "Pooling, and then Normalize or nothing"
        )
    file = f"{modules[1].get('path', '')}/config.json"
    if file not in extras:
        raise ModelError(
            f"{file} is missing, though modules.json names it; restore the file as the model was published"
        )
    pooling = JsonConfig(file, extras[file])
    if default_prompt(extras) and not pooling.flag("include_prompt", True):
        raise UnsupportedModelError(
            f"{file}: include_prompt false is supported only without a default_prompt_name in "
            "config_sentence_transformers.json, since all tokens are pooled here; use a model that pools its prompt"
        )
    modes = _modes(pooling)
    normalize = types[-1] == "Normalize"
    if modes in (["mean"], ["pooling_mode_mean_tokens"]):
        return TaskHead("embedding", "mean", normalize=normalize)
    if modes in (["cls"], ["pooling_mode_cls_token"]):
        return TaskHead("embedding", "cls", normalize=normalize)
    raise UnsupportedModelError(
        f"{file}: pooling {modes} is not supported; supported: one of pooling_mode_mean_tokens, "
        "pooling_mode_cls_token, or a pooling_mode of mean or cls"
    )


def _modes(pooling: JsonConfig) -> list[Any]:
    """Return how rows are pooled: what `pooling_mode` names, or else the flags of old files that are set."""
    named = pooling.get("pooling_mode", None)
    if named is not None:
        return named if isinstance(named, list) else [named]
    return [key for key in pooling.data if key.startswith("pooling_mode_") and pooling.flag(key, False)]
