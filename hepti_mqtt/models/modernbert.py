"""ModernBERT (Warner et al., 2024): rotary positions, a window in most layers, gated MLPs, hardly a bias.

Layers that see all tokens have a base of their own for their positions. Layer 0 has no norm before attention: the
embeddings are normed. m tokens, h hidden, f MLP width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from hepti_mqtt.models import sentences, text
from hepti_mqtt.models.config import FULL, SLIDING, JsonConfig
from hepti_mqtt.models.tensors import TensorSource, dense, norm, prefixed, table
from hepti_mqtt.models.transformer import BlockSpec, ModelSpec, TextStem

ARCHITECTURES: Final = text.architectures("ModernBert", without="ForQuestionAnswering")
TOKENIZER_CLASSES: Final = {"modernbert": "TokenizersBackend"}
LAYER: Final = {
    "query": "attn.Wqkv",
    "key": "attn.Wqkv",
    "value": "attn.Wqkv",
    "attention_out": "attn.Wo",
    "attention_norm": "attn_norm",
    "mlp_gate": "mlp.Wi",
    "mlp_up": "mlp.Wi",
    "mlp_down": "mlp.Wo",
    "mlp_norm": "mlp_norm",
}
_WORDS: Final = "embeddings.tok_embeddings.weight"


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a ModernBERT; raises ModelError, UnsupportedModelError."""
    task = ARCHITECTURES[architecture]
    act = config.activation("classifier_activation", "gelu")
    head = text.task_head(task, config, extras, pooler=False, classify=act, fill=act)
    if task == "classification":
        config.require_one_of("classifier_pooling", "cls", "cls", "mean")
        head = replace(head, pooling=config.get("classifier_pooling", "cls"))
    if task == "token_classification":
        head = replace(head, pooler=True, activation=act)
    hidden, layers = config.positive("hidden_size"), config.positive("num_hidden_layers")
    positions, every = config.positive("max_position_embeddings"), config.positive("global_attn_every_n_layers", 3)
    full = config.layer_kinds(layers, lambda i: i % every == 0)
    thetas = {
        True: config.rope_theta(160_000.0, "global_rope_theta", FULL),
        False: config.rope_theta(10_000.0, "local_rope_theta", SLIDING),
    }
    named = config.get("sliding_window", None)  # the reference writes it in place of local_attention, and reads both
    near = config.positive("local_attention", 128) // 2 if named is None else config.positive("sliding_window")
    flags = {
        "attention_bias": ("qkv", "attention_out"),
        "mlp_bias": ("mlp_up", "mlp_down"),
        "classifier_bias": ("head",),
    }
    biases = [part for key, parts in flags.items() if config.flag(key, False) for part in parts]
    block = BlockSpec(
        biases=(*biases, *(("decoder",) if config.flag("decoder_bias", True) else ())),
        norm_bias=config.flag("norm_bias", False),
        bare=1,
        gated=True,
        thetas=tuple(thetas[sees_all] for sees_all in full),
        windows=tuple(-1 if sees_all else near for sees_all in full),
    )
    return ModelSpec(
        family="modernbert",
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=config.heads(hidden),
        mlp=config.positive("intermediate_size"),
        norm_first=True,
        activation=config.activation("hidden_activation", "gelu"),
        norm_eps=config.number("norm_eps", 1e-5),
        max_tokens=sentences.max_tokens(positions, extras),
        head=head,
        text=TextStem(config.positive("vocab_size"), positions, types=0),
        block=block,
    )


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a ModernBERT, from the stem to the head."""
    base, h, biases = ("model.", ""), spec.hidden, spec.block.biases
    vocab, task, own_norm = text.stem_of(spec).vocab, spec.head.task, spec.block.norm_bias
    tied = ("decoder.weight",) if spec.head.tied else ()
    yield table("stem.word", (*prefixed(base, _WORDS), *tied), vocab, h)
    yield from norm("stem.norm", base, "embeddings.norm", h, own_norm)
    for i in range(spec.layers):
        called = {part: name for part, name in LAYER.items() if part != "attention_norm" or i >= spec.block.bare}
        yield from text.layer_tensors(spec, f"layers.{i}.", base, f"layers.{i}.", called)
    yield from norm("final_norm", base, "final_norm", h, own_norm)
    if task == "masked_token":
        has = {"transform": "head" in biases, "transform_norm": own_norm, "decoder": "decoder" in biases}
        absent = {f"head.{part}.bias" for part, biased in has.items() if not biased}
        parts = text.mask_head_tensors(spec, base, "head.dense", "head.norm", "decoder", words=_WORDS)
        yield from (source for source in parts if source.name not in absent)
    elif spec.head.pooler:
        yield from dense("head.pooler", ("",), "head.dense", h, h)[: 2 if "head" in biases else 1]
        yield from norm("head.pooler_norm", ("",), "head.norm", h, own_norm)
    if task == "classification":
        yield from dense("head.classifier", ("",), "classifier", h, spec.head.outputs)


graph = text.graph
reference = text.reference
