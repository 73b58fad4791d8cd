"""DeBERTa-v2 and v3 (He et al., 2021): BERT's layers with terms of content and position in scores.

A query meets the keys of distances, and a key their queries: tables [2 k buckets, h] for each layer, which its matrices
make of embeddings that all layers share. Reading the weights computes them. m tokens, h hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from hepti_mqtt.core.errors import ModelError, UnsupportedModelError
from hepti_mqtt.models import text
from hepti_mqtt.models.bert import LAYER as BERT_LAYER
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.tensors import Projected, TensorSource, prefixed, table
from hepti_mqtt.models.transformer import DISENTANGLED, BlockSpec, ModelSpec

ARCHITECTURES: Final = text.architectures("DebertaV2", without="ForMaskedLM")
TOKENIZER_CLASSES: Final = {"deberta-v2": "DebertaV2Tokenizer"}
LAYER: Final = BERT_LAYER | {part: f"attention.self.{part}_proj" for part in ("query", "key", "value")}
_BASE_NAMES: Final = ("deberta.", "")
_TERMS: Final = {"c2p", "p2c"}


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a DeBERTa-v2 or v3; raises ModelError, UnsupportedModelError."""
    hidden, rows = config.positive("hidden_size"), config.positive("max_position_embeddings")
    # Defaults of the reference; no published model relies on them.
    config.require_one_of("relative_attention", False, True)
    config.require_one_of("share_att_key", False, True)
    config.require_one_of("position_biased_input", True, False)
    config.require_one_of("norm_rel_ebd", "none", "layer_norm")
    config.require_one_of("conv_kernel_size", 0, 0)
    for key in ("embedding_size", "pooler_hidden_size"):
        config.require_one_of(key, hidden, hidden)
    _require_both_terms(config)
    head = text.task_head(
        ARCHITECTURES[architecture], config, extras, pooler=False,
        classify=config.activation("pooler_hidden_act", "gelu"),
    )  # fmt: skip
    types = config.get("type_vocab_size", 0)
    encoder = text.encoder_spec(
        "deberta", architecture, config, extras, head, types=types and config.positive("type_vocab_size"),
        eps=config.number("layer_norm_eps", 1e-7),
    )  # fmt: skip
    config.require_one_of("attention_head_size", encoder.head_dim, encoder.head_dim)
    span, farthest = config.positive("position_buckets"), config.get("max_relative_positions", -1)
    if not isinstance(farthest, int) or isinstance(farthest, bool):
        raise config.bad_value("max_relative_positions", "an integer", farthest)
    farthest = rows if farthest < 1 else farthest
    if span < 2 or span // 2 >= farthest - 1:
        raise ModelError(f"{config.file}: position_buckets {span} must be from 2 to less than 2 x {farthest - 1}")
    scale = (encoder.head_dim * (1 + len(_TERMS))) ** -0.5
    block = BlockSpec(buckets=2 * span, farthest=farthest, shared_bias=False, disentangled=True, scale=scale)
    return replace(encoder, block=block)


def _require_both_terms(config: JsonConfig) -> None:
    terms = config.get("pos_att_type", [])
    named = terms.lower().split("|") if isinstance(terms, str) else terms
    if not isinstance(named, list) or {str(term).strip() for term in named} != _TERMS:
        raise UnsupportedModelError(f"{config.file}: pos_att_type {terms!r} is not supported; supported: 'c2p|p2c'")


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a DeBERTa, from the stem to the head."""
    base = _BASE_NAMES
    # Only distances tell positions.
    yield from (source for source in text.stem_tensors(spec, base) if source.name != "stem.position")
    for i in range(spec.layers):
        here, stored = f"layers.{i}.", f"encoder.layer.{i}."
        yield from text.layer_tensors(spec, here, base, stored, LAYER)
        for name, part in zip(DISENTANGLED, ("key", "query"), strict=True):
            yield _projected(spec, f"{here}{name}", f"{stored}{LAYER[part]}")
    yield from text.task_tensors(spec, base, ("pooler.dense",))


def _projected(spec: ModelSpec, name: str, layer: str) -> TensorSource:
    """Return the source of a table: the embeddings of distances after a dense layer."""
    distances = prefixed(_BASE_NAMES, "encoder.rel_embeddings.weight")
    source = table(name, distances, spec.block.buckets, spec.hidden)
    matrix, bias = (prefixed(_BASE_NAMES, f"{layer}.{part}") for part in ("weight", "bias"))
    gamma, beta = (prefixed(_BASE_NAMES, f"encoder.LayerNorm.{part}") for part in ("weight", "bias"))
    return replace(source, projected=Projected(matrix, bias, gamma, beta, spec.norm_eps))


graph = text.graph
reference = text.reference
