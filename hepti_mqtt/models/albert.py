"""ALBERT (Lan et al., 2020): one layer's weights used by all layers, and word embeddings of few columns.

A device holds the layer once, whatever the number of layers. m tokens, e columns of the tables, h hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from hepti_mqtt.models import text
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.tensors import TensorSource, prefixed
from hepti_mqtt.models.transformer import ModelSpec

ARCHITECTURES: Final = text.architectures("Albert")
TOKENIZER_CLASSES: Final = {"albert": "AlbertTokenizer"}
_SHARED: Final = "layers.shared."
LAYER: Final = {
    "query": "attention.query",
    "key": "attention.key",
    "value": "attention.value",
    "attention_out": "attention.dense",
    "attention_norm": "attention.LayerNorm",
    "mlp_up": "ffn",
    "mlp_down": "ffn_output",
    "mlp_norm": "full_layer_layer_norm",
}


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of an ALBERT; raises ModelError, UnsupportedModelError."""
    config.require_one_of("num_hidden_groups", 1, 1)
    config.require_one_of("inner_group_num", 1, 1)
    task, fill = ARCHITECTURES[architecture], config.activation()
    head = text.task_head(task, config, extras, pooler=True, fill=fill)
    types, width = config.positive("type_vocab_size", 2), config.positive("embedding_size", 128)
    return text.encoder_spec("albert", architecture, config, extras, head, types=types, width=width)


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of an ALBERT, from the stem to the head; all layers share the tensors of one."""
    base = ("albert.", "")
    yield from text.stem_tensors(spec, base, "encoder.embedding_hidden_mapping_in", "predictions.decoder")
    yield from text.layer_tensors(spec, _SHARED, base, "encoder.albert_layer_groups.0.albert_layers.0.", LAYER)
    masks = prefixed(("predictions.",), "dense", "LayerNorm", "decoder", "bias")
    yield from text.task_tensors(spec, base, prefixed(base, "pooler"), masks=masks)


graph = partial(text.graph, stored=_SHARED)
reference = partial(text.reference, stored=_SHARED)
