"""What GGUF files of each architecture call keys and tensors, and what the original calls them. Source: llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

# Keys behind the name of the architecture, and those of config.json; "" for what is checked or has no effect.
KEYS: Final[Mapping[str, str]] = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "attention.value_length": "",
    "rope.dimension_count": "",
    "rope.scaling.type": "",
    "rope.scaling.factor": "",
    "rope.scaling.original_context_length": "",
    "rope.scaling.finetuned": "",
    "vocab_size": "",
    "tensor_data_layout": "",
}
NEUTRAL: Final[Mapping[str, Any]] = {"expert_count": 0, "expert_used_count": 0, "attention.sliding_window": 0}
TENSORS: Final[Mapping[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "rope_freqs": "rope_freqs",
}
_LAYER: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


class Architecture(NamedTuple):
    """How an architecture differs from the others.

    config: what config.json says beside the metadata. keys: more of `KEYS`. layer: tensors of a layer. pairs_together:
    the two rows of a rotated pair of queries or keys are neighbours. gamma_offset: has been added to weights of norms.
    derived: what config.json says that follows from the rest of it.
    """

    config: Mapping[str, Any]
    layer: Mapping[str, str] = _LAYER
    keys: Mapping[str, str] = {}
    pairs_together: bool = False
    gamma_offset: float = 0.0
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}
    #: Flags of config.json that are true if the first layer's tensor has a bias.
    biases: Mapping[str, str] = {}


def _gemma3(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return by what scores are divided: the columns of a head, but in the model of 27 B those of a row for each."""
    wide = config["num_hidden_layers"] == 62
    own = config["hidden_size"] / config["num_attention_heads"] if wide else config["head_dim"]
    return {"query_pre_attn_scalar": own}


def _named(architecture: str, model_type: str, **more: Any) -> Mapping[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **more}


_FUSED: Final = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture(
        _named("LlamaForCausalLM", "llama", hidden_act="silu"),
        pairs_together=True,
        biases={"attention_bias": "attn_q", "mlp_bias": "ffn_down"},
    ),
    "qwen2": Architecture(_named("Qwen2ForCausalLM", "qwen2", hidden_act="silu")),
    "qwen3": Architecture(
        _named("Qwen3ForCausalLM", "qwen3", hidden_act="silu"),
        {**_LAYER, **_HEAD_NORMS},
        biases={"attention_bias": "attn_q"},
    ),
    # Of the layers every sixth sees all tokens, by no key of older files.
    "gemma3": Architecture(
        _named(
            "Gemma3ForCausalLM",
            "gemma3_text",
            hidden_activation="gelu_pytorch_tanh",
            rope_local_base_freq=10_000.0,
            rope_theta=1_000_000.0,
        ),
        {
            **_LAYER,
            **_HEAD_NORMS,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        {
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        gamma_offset=1.0,
        derived=_gemma3,
    ),
    "phi3": Architecture(
        _named("Phi3ForCausalLM", "phi3", hidden_act="silu"),
        {**_LAYER, **_FUSED},
        {"attention.sliding_window": "sliding_window"},
    ),
}
