"""Names of keys and tensors in GGUF files, with those of the original checkpoint. Source: llama.cpp.

Names of a single architecture are in its row of `models.decoder.DECODERS` (`Gguf`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hepti_mqtt.models.decoder import DECODERS, Decoder
from hepti_mqtt.models.mixture import alone

# Keys of config.json by keys of the metadata, without the prefix of the architecture; "": checked or without effect.
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
# Parts (keys of `Decoder.part_names`) by their GGUF names; attn_qkv has the first of its parts.
_PARTS: Final[Mapping[str, str]] = {
    "attn_norm": "attention_norm",
    "attn_q": "query",
    "attn_k": "key",
    "attn_v": "value",
    "attn_qkv": "query",
    "attn_q_norm": "query_norm",
    "attn_k_norm": "key_norm",
    "attn_output": "attention_out",
    "attn_sinks": "sinks",
    "post_attention_norm": "attention_out_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp_gate",
    "ffn_up": "mlp_up",
    "ffn_down": "mlp_down",
    "post_ffw_norm": "mlp_down_norm",
    "ffn_gate_inp": "router",
    "ffn_gate_exps": "expert_gate",
    "ffn_up_exps": "expert_up",
    "ffn_down_exps": "expert_down",
}
# Architectures of `DECODERS` by (`general.architecture`, whether the file has experts); GGUF models always generate.
ARCHITECTURES: Final[Mapping[tuple[str, bool], str]] = {
    (row.gguf.name, row.experts is not None): name
    for name, row in DECODERS.items()
    if row.gguf is not None and name.endswith("ForCausalLM")
}
# Flags of config.json, each with a GGUF part: a bias of this part in the first layer makes the flag true.
BIASES: Final[Mapping[str, str]] = {"attention_bias": "attn_q", "mlp_bias": "ffn_down"}


def layer_names(row: Decoder) -> Mapping[str, str]:
    """Return the original's names of a layer's parts by their GGUF names."""
    names = [*row.part_names.values()]
    experts = {part for part in row.part_names if part.startswith("expert_")}
    together = {part for part, name in row.part_names.items() if names.count(name) > 1} - experts
    parts = {**_PARTS, **(row.gguf.parts if row.gguf is not None else {})}
    return {
        part: alone(row.part_names[own], own)
        if own in experts and "{}" not in row.part_names[own]
        else row.part_names[own]
        for part, own in parts.items()
        if own in row.part_names and (own not in together or part in ("attn_qkv", "ffn_up"))
        if part != "attn_qkv" or own in together
    }
