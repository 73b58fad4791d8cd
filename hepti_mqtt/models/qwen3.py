"""Qwen3 (Yang et al., 2025): a decoder that continues a text, or embeds it (Qwen3-Embedding) by its last token.

Queries' heads share those of keys and values in groups; each head of both is normed before its rotary positions. m
tokens, h hidden, d columns of a head, f MLP width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from hepti_mqtt.errors import ModelError, UnsupportedModelError
from hepti_mqtt.models import bert, causal, sentences, text
from hepti_mqtt.models.causal import graph, reference
from hepti_mqtt.models.config import FULL, SLIDING, JsonConfig
from hepti_mqtt.models.generation import end_tokens
from hepti_mqtt.models.kinds import TINY_SPREAD, make_kind
from hepti_mqtt.models.rope import read_rope
from hepti_mqtt.models.tensors import TensorSource, norm, prefixed, table
from hepti_mqtt.models.transformer import BlockSpec, ModelSpec, TextStem
from hepti_mqtt.spec import TaskHead

# The second generates, except in a directory of sentence-transformers, which loads the model below its head.
ARCHITECTURES: Final = {"Qwen3Model": "embedding", "Qwen3ForCausalLM": "embedding"}
TOKENIZER_CLASSES: Final = {"qwen3": "Qwen2Tokenizer"}
LAYER: Final = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "attention_out": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "mlp_gate": "mlp.gate_proj",
    "mlp_up": "mlp.up_proj",
    "mlp_down": "mlp.down_proj",
    "mlp_norm": "post_attention_layernorm",
}
MOST_TOKENS: Final = 65_536


def _head(architecture: str, config: JsonConfig, extras: Mapping[str, Any], generates: bool, tied: bool) -> TaskHead:
    """Return the head of a decoder; raises UnsupportedModelError for one that generates where its family does not."""
    if sentences.MODULES in extras:
        return sentences.sentence_head(extras)
    if architecture.endswith("ForCausalLM"):
        if generates:
            vocab = config.positive("vocab_size")
            end_tokens(config, extras, vocab)  # what would change the text is refused
            return TaskHead("generation", "last", outputs=vocab, tied=config.flag("tie_word_embeddings", tied))
        raise UnsupportedModelError(
            f"config.json: {architecture} is supported only as an encoder of sentences, with {sentences.MODULES}; use "
            "an embedding model of this family"
        )
    return TaskHead("embedding", "last")


def decoder_spec(
    family: str,
    architecture: str,
    config: JsonConfig,
    extras: Mapping[str, Any],
    activation: str,
    block: BlockSpec,
    generates: bool = False,
    tied: bool = False,
) -> ModelSpec:
    """Return the spec of a decoder; raises ModelError, UnsupportedModelError.

    generates: whether one with a head for logits is taken, if no file says that it embeds. tied: whether its head is
    the embeddings, where config.json does not say it.
    """
    head = _head(architecture, config, extras, generates, tied)
    if head.task == "generation" and not block.causal:
        raise UnsupportedModelError("config.json: a model that generates must see only tokens before")
    heads, positions = config.positive("num_attention_heads"), config.positive("max_position_embeddings")
    if heads % block.kv_heads:
        raise ModelError(f"config.json: num_key_value_heads {block.kv_heads} do not divide {heads} heads")
    return ModelSpec(
        family=family,
        architecture=architecture,
        layers=config.positive("num_hidden_layers"),
        hidden=config.positive("hidden_size"),
        heads=heads,
        mlp=config.positive("intermediate_size"),
        norm_first=True,
        activation=config.activation(activation),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        max_tokens=sentences.max_tokens(min(positions, MOST_TOKENS), extras),
        head=head,
        text=TextStem(config.positive("vocab_size"), positions, types=0),
        block=block,
    )


def windows(config: JsonConfig, causal: bool = True) -> tuple[int, ...]:
    """Return how many rows before its own each layer sees, -1 for all; raises ModelError, UnsupportedModelError."""
    layers = config.positive("num_hidden_layers")
    # A window of null is none, but one that is missing is 4096.
    slides = config.flag("use_sliding_window", False) and config.data.get("sliding_window", 0) is not None
    near = config.positive("sliding_window", 4096)
    later = int(config.at_least_zero("max_window_layers", 28)) if slides else layers
    full = config.layer_kinds(layers, lambda i: i < later)
    if not all(full) and not (slides and causal):
        raise UnsupportedModelError(
            f"config.json: layer_types of {SLIDING} need use_sliding_window and causal attention; only {FULL} is "
            "supported here"
        )
    return () if all(full) else tuple(-1 if sees_all else near - 1 for sees_all in full)


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a Qwen3; raises ModelError, UnsupportedModelError."""
    config.refuse_unknown_attention("use_sliding_window", "sliding_window", "max_window_layers", "is_causal")
    causal = config.flag("is_causal", True)
    d = config.positive("head_dim", 128)
    rope = read_rope(config, d, 10_000.0)
    block = BlockSpec(
        biases=("qkv", "attention_out") if config.flag("attention_bias", False) else (),
        norm_bias=False,
        rms=True,
        gated=True,
        kv_heads=config.positive("num_key_value_heads", config.positive("num_attention_heads")),
        head_dim=d,
        head_norms=True,
        scale=rope.factor * d**-0.5,
        causal=causal,
        thetas=(rope.theta,),
        rope_divisors=(rope.divisors,),
        windows=windows(config, causal),
    )
    return decoder_spec("qwen3", architecture, config, extras, "hidden_act", block, generates=True)


def tensors(spec: ModelSpec, called: Mapping[str, str] = LAYER) -> Iterator[TensorSource]:
    """Yield the tensors of a decoder, from the stem to the head; called: the parts of a layer."""
    base = ("model.", "")
    words = prefixed(base, "embed_tokens.weight")
    stored = (*words, causal.LOGITS) if spec.head.tied else words
    yield table("stem.word", stored, text.stem_of(spec).vocab, spec.hidden)
    for i in range(spec.layers):
        yield from text.layer_tensors(spec, f"layers.{i}.", base, f"layers.{i}.", called)
    yield from norm("final_norm", base, "norm", spec.hidden, bias=False)
    yield from causal.head_tensors(spec, words)


_REAL: Final = {
    "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 151669, "max_position_embeddings": 32768, "initializer_range": 0.02,
}  # fmt: skip
_TINY: Final = {
    "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "vocab_size": 211, "max_position_embeddings": 40, "initializer_range": TINY_SPREAD,
}  # fmt: skip
SENTENCES: Final = bert.KINDS["tiny-minilm"].extras
_QWEN3: Final = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "tie_word_embeddings": True}
KINDS: Final = {
    "qwen3-embedding": make_kind("Qwen3Model", "qwen3", _REAL, _QWEN3),
    "tiny-qwen3-embedding": replace(make_kind("Qwen3ForCausalLM", "qwen3", _TINY, _QWEN3), extras=SENTENCES),
    "tiny-qwen3-text": make_kind("Qwen3ForCausalLM", "qwen3", _TINY, _QWEN3, eos_token_id=3),
    "tiny-qwen3": make_kind("Qwen3Model", "qwen3", _TINY, _QWEN3),
}

__all__ = ["ARCHITECTURES", "KINDS", "TOKENIZER_CLASSES", "graph", "reference", "spec", "tensors"]
