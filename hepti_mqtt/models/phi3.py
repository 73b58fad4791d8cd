"""Phi-3 (Abdin et al., 2024): a Llama whose queries, keys and values are stored as one matrix, and gate and up.

Texts up to the length that it was trained for: longer ones have positions of their own (`longrope`), which are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hepti_mqtt.models import llama, qwen3
from hepti_mqtt.models.causal import graph, reference
from hepti_mqtt.models.config import JsonConfig, KeyTable
from hepti_mqtt.models.kinds import TINY_SPREAD, make_kind
from hepti_mqtt.models.tensors import TensorSource
from hepti_mqtt.models.transformer import BlockSpec, ModelSpec

ARCHITECTURES: Final = {"Phi3ForCausalLM": "generation"}
LAYER: Final = (
    llama.LAYER
    | dict.fromkeys(("query", "key", "value"), "self_attn.qkv_proj")
    | dict.fromkeys(("mlp_gate", "mlp_up"), "mlp.gate_up_proj")
)
_ROTARY: Final = KeyTable(frozenset(), only={"partial_rotary_factor": (1.0,)}, closed=False)


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a Phi-3; raises ModelError, UnsupportedModelError."""
    config.refuse_unknown_attention("sliding_window", "partial_rotary_factor")
    config.check_keys(_ROTARY)
    config.require_one_of("attention_bias", False, False)
    hidden, positions = config.positive("hidden_size"), config.positive("max_position_embeddings")
    heads = config.heads(hidden)
    window = config.positive("sliding_window", positions)
    block = BlockSpec(
        biases=(),
        norm_bias=False,
        rms=True,
        gated=True,
        kv_heads=config.positive("num_key_value_heads", heads),
        head_dim=config.positive("head_dim", hidden // heads),
        causal=True,
        thetas=(config.rope_theta(10_000.0),),
        windows=(window - 1,) if window < positions else (),
    )
    return qwen3.decoder_spec("phi3", architecture, config, extras, "hidden_act", block, generates=True)


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a Phi-3, from the stem to the head."""
    return qwen3.tensors(spec, LAYER)


_PHI3: Final = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 10_000.0}
_REAL: Final = _PHI3 | {
    "num_hidden_layers": 32, "hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 32,
    "intermediate_size": 8192, "vocab_size": 32064, "max_position_embeddings": 4096, "initializer_range": 0.02,
    "sliding_window": 2047, "eos_token_id": 32000, "pad_token_id": 32000,
}  # fmt: skip
_TINY: Final = _PHI3 | {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 211, "max_position_embeddings": 96, "initializer_range": TINY_SPREAD,
    "sliding_window": 8, "eos_token_id": 3, "pad_token_id": 0,
}  # fmt: skip
KINDS: Final = {
    "phi3-mini": make_kind("Phi3ForCausalLM", "phi3", _REAL),
    "tiny-phi3": make_kind("Phi3ForCausalLM", "phi3", _TINY),
}

__all__ = ["ARCHITECTURES", "KINDS", "graph", "reference", "spec", "tensors"]
