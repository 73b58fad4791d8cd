"""Llama (Touvron et al., 2023) and Mistral (Jiang et al., 2023), which sees a window: decoders with a gated MLP.

Positions are rotary, and queries' heads share those of keys and values in groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hepti_mqtt.models import qwen3
from hepti_mqtt.models.causal import graph, reference
from hepti_mqtt.models.config import JsonConfig, KeyTable
from hepti_mqtt.models.kinds import TINY_SPREAD, make_kind
from hepti_mqtt.models.rope import read_rope
from hepti_mqtt.models.tensors import TensorSource
from hepti_mqtt.models.transformer import BlockSpec, ModelSpec

ARCHITECTURES: Final = {"LlamaForCausalLM": "generation", "MistralForCausalLM": "generation"}
LAYER: Final = {part: name for part, name in qwen3.LAYER.items() if part not in ("query_norm", "key_norm")}
# These have no effect in a Llama, but the library's cache forgets by them.
_WINDOWS: Final = KeyTable(
    frozenset(),
    only=dict.fromkeys(("attention_chunk_size", "layer_types", "sliding_window"), ()) | {"rope_interleaved": (False,)},
    closed=False,
)


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a Llama or Mistral; raises ModelError, UnsupportedModelError."""
    mistral = architecture.startswith("Mistral")
    config.refuse_unknown_attention(*_WINDOWS.only)
    config.check_keys(_WINDOWS._replace(read=frozenset({"sliding_window"}) if mistral else frozenset()))
    hidden = config.positive("hidden_size")
    heads = config.heads(hidden)
    positions = config.positive("max_position_embeddings")
    # Null is no window, but a key that is missing is one.
    window = config.positive("sliding_window", 4096) if config.data.get("sliding_window", 0) is not None else positions
    d = config.positive("head_dim", hidden // heads)
    rope = read_rope(config, d, 10_000.0)
    biases: tuple[str, ...] = ()
    if not mistral:  # which has none, whatever the file says
        biases += ("qkv", "attention_out") if config.flag("attention_bias", False) else ()
        biases += ("mlp_up", "mlp_down") if config.flag("mlp_bias", False) else ()
    block = BlockSpec(
        biases=biases,
        norm_bias=False,
        rms=True,
        gated=True,
        kv_heads=config.positive("num_key_value_heads", 8 if mistral else heads),
        head_dim=d,
        scale=rope.factor * d**-0.5,
        causal=True,
        thetas=(rope.theta,),
        windows=(window - 1,) if mistral and window < positions else (),
        rope_divisors=(rope.divisors,),
    )
    return qwen3.decoder_spec("llama", architecture, config, extras, "hidden_act", block, generates=True)


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a Llama, from the stem to the head."""
    return qwen3.tensors(spec, LAYER)


_LLAMA: Final = {
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "bos_token_id": 2, "sliding_window": None, "eos_token_id": 3,
}  # fmt: skip
_SMOLLM2: Final = _LLAMA | {
    "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100_000.0,
    "tie_word_embeddings": True, "initializer_range": 0.02,
}  # fmt: skip
_SCALING: Final = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_TINY: Final = _LLAMA | {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
    "intermediate_size": 48, "vocab_size": 211, "max_position_embeddings": 96, "rope_theta": 10_000.0,
    "tie_word_embeddings": False, "initializer_range": TINY_SPREAD, "rope_scaling": _SCALING,
}  # fmt: skip
_WINDOW: Final = {"rope_scaling": None, "sliding_window": 6, "num_key_value_heads": 2, "tie_word_embeddings": True}
KINDS: Final = {
    "smollm2-135m": make_kind("LlamaForCausalLM", "llama", _SMOLLM2),
    "tiny-llama": make_kind("LlamaForCausalLM", "llama", _TINY),
    "tiny-mistral": make_kind("MistralForCausalLM", "mistral", _TINY, _WINDOW),
}

__all__ = ["ARCHITECTURES", "KINDS", "graph", "reference", "spec", "tensors"]
