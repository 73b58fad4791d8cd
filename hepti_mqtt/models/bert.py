"""BERT (Devlin et al., 2019) and RoBERTa (Liu et al., 2019): encoders of text that norm after each residual.

RoBERTa, XLM-RoBERTa and CamemBERT differ in names, in positions that begin after the padding id, and in their heads.
m tokens, h hidden, f MLP width, V vocabulary, B sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hepti_mqtt.models import text
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.tensors import TensorSource, prefixed
from hepti_mqtt.models.transformer import ModelSpec

_ROBERTA: Final = ("Roberta", "XLMRoberta", "Camembert")
ARCHITECTURES: Final = text.architectures("Bert", *_ROBERTA)

TOKENIZER_CLASSES: Final = {
    "bert": "BertTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
}
LAYER: Final = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp_up": "intermediate.dense",
    "mlp_down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a BERT-like model; raises ModelError, UnsupportedModelError."""
    task, roberta = ARCHITECTURES[architecture], architecture.startswith(_ROBERTA)
    types, offset = config.positive("type_vocab_size", 2), 0
    if roberta:
        # Position pad_token_id belongs to padding, so the first token has the next position.
        pad = config.get("pad_token_id", 1)
        if not isinstance(pad, int) or pad < 0:
            raise config.bad_value("pad_token_id", "an integer >= 0", pad)
        offset = pad + 1
    # RoBERTa's dense layer before the vocabulary has gelu, independent of its layers.
    fill = "gelu" if roberta else config.activation()
    head = text.task_head(task, config, extras, pooler=True, fill=fill)
    return text.encoder_spec("bert", architecture, config, extras, head, types=types, offset=offset)


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a BERT-like model, from the stem to the head."""
    roberta = spec.architecture.startswith(_ROBERTA)
    base = ("roberta." if roberta else "bert.", "")
    masks = "lm_head." if roberta else "cls.predictions."
    yield from text.stem_tensors(spec, base, decoder=f"{masks}decoder")
    for i in range(spec.layers):
        yield from text.layer_tensors(spec, f"layers.{i}.", base, f"encoder.layer.{i}.", LAYER)
    if spec.head.task == "classification" and roberta:
        # RoBERTa's classifier is a dense with tanh and a projection: BERT's pooler and classifier under other names.
        yield from text.task_tensors(spec, base, ("classifier.dense",), "classifier.out_proj")
    else:
        transform = ("dense", "layer_norm") if roberta else ("transform.dense", "transform.LayerNorm")
        names = prefixed((masks,), *transform, "decoder", "bias")
        yield from text.task_tensors(spec, base, prefixed(base, "pooler.dense"), masks=names)


graph = text.graph
reference = text.reference
