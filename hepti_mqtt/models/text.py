"""Parts that models of text share: token embeddings, the tensors of a layer, heads; decoders use the first two.

m tokens, e columns of the embedding tables (`TextStem.width`, or h), h hidden, f MLP width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from hepti_mqtt.core.errors import ModelError
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.spec import HeadActivation, Task, TaskHead
from hepti_mqtt.lowering.graph import GraphBuilder
from hepti_mqtt.lowering.roles import STEM
from hepti_mqtt.models import heads, plain, sentences
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.shapes import PackedBatch
from hepti_mqtt.models.tensors import TensorSource, dense, fused, norm, prefixed, table, vector, weight
from hepti_mqtt.models.transformer import LAYERS, ModelSpec, TextStem, add_layers


class Keys(NamedTuple):
    """A family's keys of config.json for sizes and activation."""

    layers: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    mlp: str = "intermediate_size"
    activation: str = "hidden_act"


_TASKS: Final[Mapping[str, Task]] = {
    "Model": "embedding",
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "token_classification",
    "ForQuestionAnswering": "question_answering",
    "ForMaskedLM": "masked_token",
}
HUGGING_FACE: Final = Keys()  # the keys of most families
LAYER_PARTS: Final = (
    "query", "key", "value", "attention_out", "attention_norm", "mlp_up", "mlp_down", "mlp_norm",
)  # fmt: skip
_STEM: Final = {
    "word": "stem.word", "position": "stem.position", "type": "stem.type", "gamma": "stem.norm.weight",
    "beta": "stem.norm.bias",
}  # fmt: skip
WORD_EMBEDDINGS: Final = "embeddings.word_embeddings.weight"


def architectures(*names: str, without: str = "") -> dict[str, Task]:
    """Return the task of each architecture: names with every suffix of `_TASKS` except `without`."""
    return {f"{name}{end}": task for name in names for end, task in _TASKS.items() if end != without}


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
    eps: float | None = None,
    positions: str = "absolute",
) -> ModelSpec:
    """Return the spec of an encoder of text that norms after each residual; raises ModelError, UnsupportedModelError.

    types, offset, width: see `TextStem` (offset: `position_offset`). eps: of the norms, by default layer_norm_eps.
    positions: the supported value of position_embedding_type.
    """
    config.require_one_of("position_embedding_type", positions, positions)
    config.require_one_of("is_decoder", False, False)
    rows = config.positive("max_position_embeddings")
    if rows <= offset:
        raise ModelError(f"config.json: max_position_embeddings {rows} leaves no position after offset {offset}")
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
        norm_eps=config.number("layer_norm_eps", 1e-12) if eps is None else eps,
        max_tokens=sentences.max_tokens(rows - offset, extras),
        head=head,
        text=TextStem(config.positive("vocab_size"), rows, types, offset, width),
    )


def stem_of(spec: ModelSpec) -> TextStem:
    """Return the stem of a text model."""
    assert spec.text is not None
    return spec.text


def embed(
    net: GraphBuilder, spec: ModelSpec, shape: PackedBatch, refs: Mapping[str, WeightRef], ids: str = "", at: str = ""
) -> str:
    """Add the stem of a packed batch: ids i32 [m], with types as in `TextStem.types` -> [m, h].

    ids: tensor of the ids; empty: the request's input. at: tensor of the positions in sessions, see `add_layers`.
    """
    stem = stem_of(spec)
    if at and "stem.position" in refs:
        tables = (refs["stem.word"], refs["stem.position"])
        return net.embedding("embedded", (ids, at), "embed_at", tables, spec.hidden, lengths=shape.lengths)
    ids = ids or net.input("ids", (shape.tokens,), "i32")
    parts = {part: refs[name] for part, name in _STEM.items() if name in refs}
    x = net.embedding(
        "embedded",
        (ids,),
        "embed_tokens",
        parts.values(),
        stem.width or spec.hidden,
        parts=tuple(parts),
        lengths=shape.lengths,
        position_offset=stem.position_offset,
        scale=stem.scale,
        **spec.norm.attrs,
    )  # [m, e]
    return net.linear("projected", x, STEM, {"stem.projection": spec.hidden}) if stem.width else x


def reference_embed(spec: ModelSpec, t: plain.Tensors, ids: plain.Array, shape: PackedBatch) -> plain.Array:
    """Return the embeddings of token ids [m]: [m, h]."""
    stem = stem_of(spec)
    types, words = np.divmod(ids, stem.vocab)  # [m] each
    table = t["stem.word"] if spec.storage_of("stem.word") is None else t["stem.word"].T  # [V, e]
    x = table[words]  # [m, e]
    x = x * x.dtype.type(stem.scale)
    if "stem.position" in t:
        x = x + t["stem.position"][plain.token_positions(shape.lengths) + stem.position_offset]
    if stem.types:
        x = x + t["stem.type"][types]
    if "stem.norm.weight" in t:
        x = plain.norm(t, "stem.norm", x, spec.norm)
    return plain.linear(t, "stem.projection", x) if stem.width else x


def graph(
    net: GraphBuilder, spec: ModelSpec, shape: PackedBatch, refs: Mapping[str, WeightRef], stored: str = LAYERS
) -> None:
    """Add the graph of one packed batch: ids i32 [m] -> the task's output; stored: prefix of a layer's tensors."""
    x = add_layers(net, spec, shape, embed(net, spec, shape, refs), refs, stored=stored)  # [m, h]
    heads.add_head(net, spec, shape, x, refs)  # [m, h], [B, h], [B, labels] or [masks, V]


def reference(
    spec: ModelSpec, tensors: plain.Tensors, ids: plain.Array, shape: PackedBatch, stored: str = LAYERS
) -> tuple[plain.Array, plain.Array]:
    """Return (final hidden states [m, h], the task's output) for ids [m], in plain NumPy."""
    x = reference_embed(spec, tensors, ids, shape)  # [m, h]
    return heads.reference_head(spec, tensors, plain.layers(tensors, spec, x, shape, stored), shape)


def stem_tensors(
    spec: ModelSpec, base: tuple[str, ...], projection: str = "", decoder: str = ""
) -> Iterator[TensorSource]:
    """Yield the tensors of the stem.

    base: alternative prefixes of stored names. projection: stored name of the dense layer from e to h columns. decoder:
    of the dense layer to the vocabulary; its matrix is read for missing token embeddings that are tied to it.
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
    layer: str,
    base: tuple[str, ...],
    stored: str,
    part_names: Mapping[str, str],
    width: int = 0,
    matrix: Callable[..., Iterable[TensorSource]] = dense,
) -> Iterator[TensorSource]:
    """Yield the tensors of a layer's parts: canonical names are `layer` + part, stored names base + `stored` + name.

    base: alternative prefixes. part_names: stored name of each part; parts with the same name are one stored matrix,
    one below the other. width: columns of the layer's inputs and results; 0: h. matrix: `tensors.dense`, or
    `tensors.conv1d` for matrices stored as [in, out].
    """
    w, f, d, biases = width or spec.hidden, spec.mlp, spec.head_dim, spec.block.biases
    q, kv, dense_mlp = spec.heads * d, spec.kv_heads * d, spec.block.dense_mlp or f
    sizes = {
        "query": (w, q), "key": (w, kv), "value": (w, kv), "qkv": (w, q + 2 * kv), "attention_out": (q, w),
        "mlp_gate": (w, dense_mlp), "mlp_up": (w, dense_mlp), "mlp_down": (dense_mlp, w),
        "router": (w, spec.block.experts),
    }  # fmt: skip
    bias_of = {"query": "qkv", "key": "qkv", "value": "qkv", "mlp_gate": "mlp_up"}  # names in `BlockSpec.biases`
    normed = {"query_norm": q, "key_norm": kv} if spec.block.row_norms else {"query_norm": d, "key_norm": d}
    for part, name in part_names.items():
        together = [sizes[p][1] for p, n in part_names.items() if n == name and p in sizes]
        before = sum(together[: [p for p, n in part_names.items() if n == name].index(part)])
        if part.endswith("_norm"):
            yield from norm(f"{layer}{part}", base, stored + name, normed.get(part, w), spec.block.norm_bias)
        elif part == "sinks":
            yield vector(f"{layer}{part}", prefixed(base, stored + name, f"{stored}{name}.weight"), spec.heads)
        else:
            sources = matrix(f"{layer}{part}", base, stored + name, *sizes[part])
            sources = sources if bias_of.get(part, part) in biases else tuple(sources)[:1]
            if len(together) > 1:
                sources = (fused(source, before, sum(together)) for source in sources)
            yield from sources


def mask_head_tensors(
    spec: ModelSpec,
    base: tuple[str, ...],
    transform: str,
    transform_norm: str,
    decoder: str,
    *bias: str,
    words: str = WORD_EMBEDDINGS,
) -> Iterator[TensorSource]:
    """Yield the head for mask tokens: a dense layer, a norm, and a dense layer to the vocabulary (decoder).

    transform, transform_norm, decoder: stored names. bias: further names of the decoder's bias. words: stored name of
    the token embeddings [V, e]; a tied decoder is read from there if the checkpoint has no matrix of its own. A stored
    decoder is read even if config.json ties it, as in transformers 5 (`tie_weights`). transformers 4 may store an
    untied bias under a further name alone, because both names were one tensor.
    """
    e, vocab = stem_of(spec).width or spec.hidden, spec.head.outputs
    yield from dense("head.transform", ("",), transform, spec.hidden, e)
    yield from norm("head.transform_norm", ("",), transform_norm, e)
    same = _tied(spec, *prefixed(base, words))
    own = weight("head.decoder.weight", (f"{decoder}.weight", *same), e, vocab)
    yield replace(own, created_name=next(iter(same), ""))
    own = vector("head.decoder.bias", (f"{decoder}.bias", *bias), vocab)
    yield replace(own, created_name=next(iter(_tied(spec, *bias)), ""))


def task_tensors(
    spec: ModelSpec,
    base: tuple[str, ...],
    pooler: tuple[str, ...],
    classifier: str = "classifier",
    masks: tuple[str, ...] = (),
) -> Iterator[TensorSource]:
    """Yield the tensors after the layers.

    pooler: names of the dense layer before the labels, or of the plain model's; classifier: of the one to the labels.
    masks: arguments of `mask_head_tensors`.
    """
    if spec.head.task == "masked_token":
        yield from mask_head_tensors(spec, base, *masks)
    if spec.head.pooler:
        yield from dense("head.pooler", pooler, "", spec.hidden, spec.hidden)
    if spec.head.task == "classification":
        yield from dense("head.classifier", ("",), classifier, spec.hidden, spec.head.outputs)


def _tied(spec: ModelSpec, *stored: str) -> tuple[str, ...]:
    """Return the names if the matrix to the logits is tied to the token embeddings, else none."""
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

    pooler: whether the model without a task's head has a dense layer with tanh on the first row. classify, fill:
    activation of the dense layer before the labels, and before the vocabulary.
    """
    # sentence-transformers loads the model without head, even if `architectures` names one.
    if task == "masked_token" and sentences.MODULES in extras:
        return sentences.sentence_head(extras)
    if task == "masked_token":
        tied = config.flag("tie_word_embeddings", True)
        return TaskHead(task, "mask", outputs=config.positive("vocab_size"), activation=fill, tied=tied)
    if task == "classification":
        sentences.check_cross_encoder(extras)
        labels = config.labels()
        return TaskHead(task, "cls", pooler=True, outputs=len(labels), labels=labels, activation=classify)
    if task == "token_classification":
        labels = config.labels()
        return TaskHead(task, "none", outputs=len(labels), labels=labels)
    if task == "question_answering":
        return TaskHead(task, "none", outputs=2)  # where an answer begins, and where it ends
    return sentences.sentence_head(extras) if sentences.MODULES in extras else TaskHead(task, "cls", pooler=pooler)
