"""BERT (Devlin et al., 2019) and RoBERTa (Liu et al., 2019): encoders of text that norm after each residual.

RoBERTa, XLM-RoBERTa and CamemBERT differ in names, in positions that begin behind the padding id, and in their heads.
m tokens, h hidden, f MLP width, V vocabulary, B sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from hepti_mqtt.lowering import GraphBuilder
from hepti_mqtt.models import heads, plain, text
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.kinds import BASE, LARGE, TINY, Kind, make_kind
from hepti_mqtt.models.shapes import PackedBatch
from hepti_mqtt.models.tensors import TensorSource, dense, prefixed
from hepti_mqtt.models.transformer import Layer, ModelSpec, post_norm
from hepti_mqtt.program import WeightRef
from hepti_mqtt.spec import Task


class _Kind(NamedTuple):
    """One architecture of the family: its task, and the prefix of its encoder's tensors."""

    task: Task
    prefix: str


ARCHITECTURES: Final[Mapping[str, _Kind]] = {
    "BertModel": _Kind("embedding", "bert."),
    "BertForSequenceClassification": _Kind("classification", "bert."),
    "BertForTokenClassification": _Kind("token_classification", "bert."),
    "BertForQuestionAnswering": _Kind("question_answering", "bert."),
    "BertForMaskedLM": _Kind("masked_token", "bert."),
    "RobertaModel": _Kind("embedding", "roberta."),
    "RobertaForSequenceClassification": _Kind("classification", "roberta."),
    "RobertaForTokenClassification": _Kind("token_classification", "roberta."),
    "RobertaForQuestionAnswering": _Kind("question_answering", "roberta."),
    "RobertaForMaskedLM": _Kind("masked_token", "roberta."),
    "XLMRobertaModel": _Kind("embedding", "roberta."),
    "XLMRobertaForSequenceClassification": _Kind("classification", "roberta."),
    "XLMRobertaForTokenClassification": _Kind("token_classification", "roberta."),
    "XLMRobertaForQuestionAnswering": _Kind("question_answering", "roberta."),
    "XLMRobertaForMaskedLM": _Kind("masked_token", "roberta."),
    "CamembertModel": _Kind("embedding", "roberta."),
    "CamembertForSequenceClassification": _Kind("classification", "roberta."),
    "CamembertForTokenClassification": _Kind("token_classification", "roberta."),
    "CamembertForQuestionAnswering": _Kind("question_answering", "roberta."),
    "CamembertForMaskedLM": _Kind("masked_token", "roberta."),
}

TOKENIZER_CLASSES: Final = {
    "bert": "BertTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
}
SHARED: Final = "layers.shared."
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
    task, prefix = ARCHITECTURES[architecture]
    types, offset = config.positive("type_vocab_size", 2), 0
    if prefix == "roberta.":
        # Position pad_token_id is the padding's own, so the first token stands at the next one.
        pad = config.get("pad_token_id", 1)
        if not isinstance(pad, int) or pad < 0:
            raise config.bad_value("pad_token_id", "an integer >= 0", pad)
        offset = pad + 1
    # Before the vocabulary RoBERTa has gelu, whatever its layers use.
    fill = "gelu" if prefix == "roberta." else config.activation()
    head = text.task_head(task, config, extras, pooler=True, fill=fill)
    return text.encoder_spec("bert", architecture, config, extras, head, types=types, offset=offset)


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a BERT-like model, from the stem to the head."""
    base = (ARCHITECTURES[spec.architecture].prefix, "")
    roberta = base[0] == "roberta."
    masks = "lm_head." if roberta else "cls.predictions."
    yield from text.stem_tensors(spec, base, decoder=f"{masks}decoder")
    for i in range(spec.layers):
        yield from text.layer_tensors(spec, f"layers.{i}.", base, f"encoder.layer.{i}.", LAYER)
    h, task = spec.hidden, spec.head.task
    if task == "classification" and roberta:
        # RoBERTa's classifier is a dense with tanh and a projection: BERT's pooler and classifier under other names.
        yield from dense("head.pooler", ("classifier.",), "dense", h, h)
        yield from dense("head.classifier", ("classifier.",), "out_proj", h, spec.head.outputs)
    elif spec.head.pooler:
        yield from dense("head.pooler", base, "pooler.dense", h, h)
        if task == "classification":
            yield from dense("head.classifier", ("",), "classifier", h, spec.head.outputs)
    elif task == "masked_token":
        transform, transform_norm = ("dense", "layer_norm") if roberta else ("transform.dense", "transform.LayerNorm")
        transform, transform_norm, decoder, bias = prefixed((masks,), transform, transform_norm, "decoder", "bias")
        yield from text.mask_head_tensors(spec, base, transform, transform_norm, decoder, bias)


def _layer(spec: ModelSpec, i: int) -> str:
    """Return the prefix of a layer's tensors: ALBERT's are those of all."""
    return SHARED if spec.family == "albert" else f"layers.{i}."


def graph(net: GraphBuilder, spec: ModelSpec, shape: PackedBatch, refs: Mapping[str, WeightRef]) -> None:
    """Add the graph of one packed batch: ids i32 [m] -> the task's output."""
    x = text.embed(net, spec, shape, refs)  # [m, h]
    n = Layer.of(spec, shape)
    for i in net.layers(spec.layers):
        net.begin_block()
        x = post_norm(net, f"{i}.", _layer(spec, i), x, n)  # [m, h]
    net.begin_block()
    heads.add_head(net, spec, shape, x, refs)  # [m, h], [B, h], [B, labels] or [masks, V]


def reference(
    spec: ModelSpec, tensors: plain.Tensors, ids: plain.Array, shape: PackedBatch
) -> tuple[plain.Array, plain.Array]:
    """Return (final hidden states [m, h], the task's output) for ids [m], in plain NumPy."""
    x = text.reference_embed(spec, tensors, ids, shape)  # [m, h]
    for i in range(spec.layers):
        x = plain.post_norm(tensors, _layer(spec, i), x, Layer.of(spec, shape))  # [m, h]
    return heads.reference_head(spec, tensors, x, shape)


_BERT: Final = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 0, "type_vocab_size": 2}
_WORDS: Final = {"vocab_size": 30522, "max_position_embeddings": 512}
_SIGMOID: Final = "torch.nn.modules.activation.Sigmoid"
_MINILM: Final = {"num_hidden_layers": 6, "hidden_size": 384, "intermediate_size": 1536}
_TINY_ROBERTA: Final = TINY | {
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "max_position_embeddings": 42,
}


def _sentence(*sizes: Mapping[str, Any]) -> Kind:
    """Return the kind of a sentence-transformers directory: the mean over the tokens, of length 1."""
    made = make_kind("BertModel", "bert", *sizes)
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{module}"}
        for i, (module, path) in enumerate(
            [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
        )
    ]
    pooling = {
        "word_embedding_dimension": made.config["hidden_size"],
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
    }
    return replace(made, extras={"modules.json": modules, "1_Pooling/config.json": pooling})


KINDS: Final = {
    "bert-base": make_kind("BertModel", "bert", BASE, _BERT, _WORDS),
    "bert-large": make_kind("BertModel", "bert", LARGE, _BERT, _WORDS),
    "minilm": _sentence(BASE, _MINILM, _BERT, _WORDS),
    "tiny-bert": make_kind("BertModel", "bert", TINY, _BERT),
    "tiny-bert-classifier": make_kind("BertForSequenceClassification", "bert", TINY, _BERT, labels=5),
    "tiny-bert-ranker": make_kind(
        "BertForSequenceClassification",
        "bert",
        TINY,
        _BERT,
        labels=1,
        sentence_transformers={"activation_fn": _SIGMOID},
    ),
    "tiny-bert-entities": make_kind("BertForTokenClassification", "bert", TINY, _BERT, labels=5),
    "tiny-bert-answers": make_kind("BertForQuestionAnswering", "bert", TINY, _BERT),
    "tiny-bert-mlm": make_kind("BertForMaskedLM", "bert", TINY, _BERT),
    "tiny-minilm": _sentence(TINY, _BERT),
    "tiny-roberta": make_kind("RobertaModel", "roberta", _TINY_ROBERTA),
    "tiny-roberta-classifier": make_kind("RobertaForSequenceClassification", "roberta", _TINY_ROBERTA, labels=3),
    "tiny-roberta-entities": make_kind("RobertaForTokenClassification", "roberta", _TINY_ROBERTA, labels=5),
    "tiny-roberta-answers": make_kind("RobertaForQuestionAnswering", "roberta", _TINY_ROBERTA),
    "tiny-roberta-mlm": make_kind("RobertaForMaskedLM", "roberta", _TINY_ROBERTA),
}
