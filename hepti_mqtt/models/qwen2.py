"""Qwen2 and Qwen2.5 (Yang et al., 2024): decoders that continue a text, with biases of queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hepti_mqtt.models import llama, qwen3
from hepti_mqtt.models.causal import graph, reference
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.kinds import TINY_SPREAD, make_kind
from hepti_mqtt.models.rope import read_rope
from hepti_mqtt.models.tensors import TensorSource
from hepti_mqtt.models.transformer import BlockSpec, ModelSpec

ARCHITECTURES: Final = {"Qwen2ForCausalLM": "generation"}
TOKENIZER_CLASSES: Final = {"qwen2": "Qwen2Tokenizer"}


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a Qwen2; raises ModelError, UnsupportedModelError."""
    config.refuse_unknown_attention("use_sliding_window", "sliding_window", "max_window_layers", "use_mrope")
    config.require_one_of("use_mrope", False, False)
    hidden = config.positive("hidden_size")
    heads = config.heads(hidden)
    d = config.positive("head_dim", hidden // heads)
    rope = read_rope(config, d, 10_000.0)
    block = BlockSpec(
        biases=("qkv",),
        norm_bias=False,
        rms=True,
        gated=True,
        kv_heads=config.positive("num_key_value_heads", heads),
        head_dim=d,
        scale=rope.factor * d**-0.5,
        causal=True,
        thetas=(rope.theta,),
        windows=qwen3.windows(config),
        rope_divisors=(rope.divisors,),
    )
    return qwen3.decoder_spec("qwen2", architecture, config, extras, "hidden_act", block, generates=True)


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a Qwen2, from the stem to the head."""
    return qwen3.tensors(spec, llama.LAYER)


_QWEN2: Final = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": True,
    "use_sliding_window": False, "eos_token_id": 3,
}  # fmt: skip
_REAL: Final = _QWEN2 | {
    "num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,
    "intermediate_size": 4864, "vocab_size": 151936, "max_position_embeddings": 32768, "initializer_range": 0.02,
}  # fmt: skip
_YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
_TINY: Final = _QWEN2 | {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 211, "max_position_embeddings": 96, "initializer_range": TINY_SPREAD,
    "rope_scaling": _YARN,
}  # fmt: skip
KINDS: Final = {
    "qwen2.5-0.5b": make_kind("Qwen2ForCausalLM", "qwen2", _REAL),
    "tiny-qwen2": make_kind("Qwen2ForCausalLM", "qwen2", _TINY),
}

__all__ = ["ARCHITECTURES", "KINDS", "TOKENIZER_CLASSES", "graph", "reference", "spec", "tensors"]
