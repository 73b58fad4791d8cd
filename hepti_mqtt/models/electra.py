"""ELECTRA (Clark et al., 2020): BERT's layers after embeddings that may have fewer columns, without a pooler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hepti_mqtt.models import text
from hepti_mqtt.models.bert import LAYER
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.tensors import TensorSource
from hepti_mqtt.models.transformer import ModelSpec

ARCHITECTURES: Final = text.architectures("Electra")
TOKENIZER_CLASSES: Final = {"electra": "BertTokenizer"}


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of an ELECTRA; raises ModelError, UnsupportedModelError."""
    task = ARCHITECTURES[architecture]
    # Both dense layers of its heads have gelu, independent of its layers.
    head = text.task_head(task, config, extras, pooler=False, classify="gelu", fill="gelu")
    types, width = config.positive("type_vocab_size", 2), config.positive("embedding_size", 128)
    width *= width != config.positive("hidden_size")  # equal widths need no projection
    return text.encoder_spec("electra", architecture, config, extras, head, types=types, width=width)


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of an ELECTRA, from the stem to the head."""
    base = ("electra.", "")
    yield from text.stem_tensors(spec, base, "embeddings_project", "generator_lm_head")
    for i in range(spec.layers):
        yield from text.layer_tensors(spec, f"layers.{i}.", base, f"encoder.layer.{i}.", LAYER)
    masks = ("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head")
    yield from text.task_tensors(spec, base, ("classifier.dense",), "classifier.out_proj", masks)


graph = text.graph
reference = text.reference
