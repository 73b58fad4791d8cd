"""MPNet (Song et al., 2020): BERT's layers with a bias of scores by the distance of two tokens.

The table of the bias, [32 buckets, a heads], is shared by all layers. m tokens, h hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from hepti_mqtt.models import text
from hepti_mqtt.models.bert import LAYER as BERT_LAYER
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.tensors import TensorSource, prefixed, table
from hepti_mqtt.models.transformer import BlockSpec, ModelSpec

ARCHITECTURES: Final = text.architectures("MPNet")
TOKENIZER_CLASSES: Final = {"mpnet": "MPNetTokenizer"}
LAYER: Final = BERT_LAYER | {
    "query": "attention.attn.q", "key": "attention.attn.k", "value": "attention.attn.v",
    "attention_out": "attention.attn.o", "attention_norm": "attention.LayerNorm",
}  # fmt: skip
# Constants of the reference's code; config.json cannot change them.
_PADDING: Final = 1
_BUCKETS, _FARTHEST = 32, 128


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of an MPNet; raises ModelError, UnsupportedModelError."""
    config.require_one_of("relative_attention_num_buckets", _BUCKETS, _BUCKETS)
    head = text.task_head(ARCHITECTURES[architecture], config, extras, pooler=True)
    encoder = text.encoder_spec("mpnet", architecture, config, extras, head, offset=_PADDING + 1)
    return replace(encoder, block=BlockSpec(buckets=_BUCKETS, farthest=_FARTHEST))


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of an MPNet, from the stem to the head."""
    base = ("mpnet.", "")
    yield from text.stem_tensors(spec, base, decoder="lm_head.decoder")
    bias = prefixed(base, "encoder.relative_attention_bias.weight")
    yield table("relative_bias", bias, spec.block.buckets, spec.heads)
    for i in range(spec.layers):
        yield from text.layer_tensors(spec, f"layers.{i}.", base, f"encoder.layer.{i}.", LAYER)
    masks = prefixed(("lm_head.",), "dense", "layer_norm", "decoder", "bias")
    pooler = ("classifier.dense",) if spec.head.task == "classification" else prefixed(base, "pooler.dense")
    yield from text.task_tensors(spec, base, pooler, "classifier.out_proj", masks)


graph = text.graph
reference = text.reference
