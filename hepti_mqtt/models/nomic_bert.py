"""NomicBERT (Nussbaum et al., 2024) and GTE (Zhang et al., 2024): BERT's layers with rotary positions and gated MLPs.

They differ in names, biases and heads. m tokens, h hidden, f MLP width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from hepti_mqtt.models import text
from hepti_mqtt.models.config import JsonConfig, KeyTable
from hepti_mqtt.models.tensors import TensorSource, norm, prefixed, table
from hepti_mqtt.models.transformer import BlockSpec, ModelSpec

ARCHITECTURES: Final = text.architectures("NomicBert", "Gte", without="ForQuestionAnswering")
TOKENIZER_CLASSES: Final = {"nomic_bert": "BertTokenizer", "gte": "XLMRobertaTokenizer"}
# Code in checkpoints that this module replaces.
KNOWN_CODE: Final = (
    "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.",
    "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.",
    "configuration_hf_alibaba_nlp_gte.",
    "modeling_hf_alibaba_nlp_gte.",
)
_NOMIC: Final = {
    **dict.fromkeys(("query", "key", "value"), "attn.Wqkv"),
    "attention_out": "attn.out_proj",
    "attention_norm": "norm1",
    "mlp_up": "mlp.fc11",
    "mlp_gate": "mlp.fc12",
    "mlp_down": "mlp.fc2",
    "mlp_norm": "norm2",
}
_GTE: Final = {
    **dict.fromkeys(("query", "key", "value"), "attention.qkv_proj"),
    "attention_out": "attention.o_proj",
    "attention_norm": "attn_ln",
    **dict.fromkeys(("mlp_up", "mlp_gate"), "mlp.up_gate_proj"),
    "mlp_down": "mlp.down_proj",
    "mlp_norm": "mlp_ln",
}
# Keys of the first NomicBERTs, with their present names.
_OLD_NAMES: Final = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers", "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}  # fmt: skip
_KEYS: Final = KeyTable(
    read=frozenset(),
    only={
        **dict.fromkeys(("causal", "parallel_block", "prenorm", "rotary_emb_interleaved", "use_rms_norm"), (False,)),
        **dict.fromkeys(("mlp_fc1_bias", "mlp_fc2_bias", "qkv_proj_bias", "logn_attention_scale"), (False,)),
        **dict.fromkeys(("rotary_emb_scale_base", "rotary_scaling_factor"), ()),
        "activation_function": ("swiglu",),
        "layer_norm_type": ("layer_norm",),
        "pack_qkv": (True,),
        "rotary_emb_fraction": (1, 1.0),
        "scale_attn_by_inverse_layer_idx": (False,),
        "scale_attn_weights": (True,),
    },
    closed=False,
)


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a NomicBERT or GTE; raises ModelError, UnsupportedModelError."""
    config.check_keys(_KEYS)
    task, nomic = ARCHITECTURES[architecture], architecture.startswith("Nomic")
    if nomic and "activation_function" in config.data:
        config = JsonConfig(config.file, {**config.renamed(_OLD_NAMES).data, "hidden_act": "silu"})
    fill = config.activation() if nomic else "gelu"
    head = text.task_head(task, config, extras, pooler=task == "classification", fill=fill)
    types = config.get("type_vocab_size", 2 if nomic else 1)
    encoder = text.encoder_spec(
        "nomic_bert", architecture, config, extras, head, types=types and config.positive("type_vocab_size", types),
        positions="rope",
    )  # fmt: skip
    block = BlockSpec(
        biases=() if nomic else ("qkv", "attention_out", "mlp_down"),
        gated=True,
        head_dim=config.positive("head_dim", encoder.head_dim) if nomic else 0,
        thetas=(config.rope_theta(1e3 if nomic else 160e3),) * encoder.layers,
    )
    return replace(encoder, block=block)


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a NomicBERT or GTE, from the stem to the head."""
    nomic, h, stem = spec.architecture.startswith("Nomic"), spec.hidden, text.stem_of(spec)
    base = ("nomic_bert." if nomic else "gte.", "")
    decoder = "cls.predictions.decoder" if nomic else "lm_head.decoder"
    tied = (f"{decoder}.weight",) if spec.head.tied else ()
    yield table("stem.word", (*prefixed(base, text.WORD_EMBEDDINGS), *tied), stem.vocab, h)
    if stem.types:
        yield table("stem.type", prefixed(base, "embeddings.token_type_embeddings.weight"), stem.types, h)
    yield from norm("stem.norm", base, "emb_ln" if nomic else "embeddings.LayerNorm", h)
    for i in range(spec.layers):
        stored, called = (f"encoder.layers.{i}.", _NOMIC) if nomic else (f"encoder.layer.{i}.", _GTE)
        yield from text.layer_tensors(spec, f"layers.{i}.", base, stored, called)
    masks = prefixed(("lm_head.",), "dense", "norm", "decoder")
    if nomic:
        masks = prefixed(("cls.predictions.",), "transform.dense", "transform.layer_norm", "decoder", "bias")
    yield from text.task_tensors(spec, base, prefixed(base, "pooler.dense"), masks=masks)


graph = text.graph
reference = text.reference
