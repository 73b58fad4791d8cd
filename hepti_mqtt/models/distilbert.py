"""DistilBERT (Sanh et al., 2019): BERT's layers, half as many, without token types and without a pooler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hepti_mqtt.models import text
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.tensors import TensorSource
from hepti_mqtt.models.transformer import ModelSpec

ARCHITECTURES: Final = text.architectures("DistilBert")
TOKENIZER_CLASSES: Final = {"distilbert": "BertTokenizer"}
LAYER: Final = {
    "query": "attention.q_lin", "key": "attention.k_lin", "value": "attention.v_lin",
    "attention_out": "attention.out_lin", "attention_norm": "sa_layer_norm",
    "mlp_up": "ffn.lin1", "mlp_down": "ffn.lin2", "mlp_norm": "output_layer_norm",
}  # fmt: skip
# Constants of the reference's code; config.json cannot change them.
_EPS: Final = 1e-12
_NAMES: Final = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a DistilBERT; raises ModelError, UnsupportedModelError."""
    config = config.renamed(_NAMES)
    fill = config.activation("activation")
    head = text.task_head(ARCHITECTURES[architecture], config, extras, pooler=False, classify="relu", fill=fill)
    keys = text.Keys("n_layers", "dim", "n_heads", "hidden_dim", "activation")
    return text.encoder_spec("distilbert", architecture, config, extras, head, keys=keys, eps=_EPS)


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a DistilBERT, from the stem to the head."""
    base = ("distilbert.", "")
    yield from text.stem_tensors(spec, base, decoder="vocab_projector")
    for i in range(spec.layers):
        yield from text.layer_tensors(spec, f"layers.{i}.", base, f"transformer.layer.{i}.", LAYER)
    masks = ("vocab_transform", "vocab_layer_norm", "vocab_projector")
    yield from text.task_tensors(spec, base, ("pre_classifier",), masks=masks)


graph = text.graph
reference = text.reference
