"""Gemma 3 (Gemma Team, 2025): a decoder that continues a text, or embeds it from both sides (EmbeddingGemma).

Most layers see a window. Norms are by root mean square with gamma + 1, four in a block; embeddings are scaled by the
root of h. m tokens, h hidden, d columns of a head, f MLP width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from hepti_mqtt.models import qwen3, text
from hepti_mqtt.models.causal import graph, reference
from hepti_mqtt.models.config import FULL, SLIDING, JsonConfig, KeyTable
from hepti_mqtt.models.kinds import TINY_SPREAD, make_kind
from hepti_mqtt.models.rope import read_rope
from hepti_mqtt.models.tensors import TensorSource
from hepti_mqtt.models.transformer import BlockSpec, ModelSpec

ARCHITECTURES: Final = {"Gemma3TextModel": "embedding", "Gemma3ForCausalLM": "embedding"}
TOKENIZER_CLASSES: Final = {"gemma3_text": "GemmaTokenizer"}
LAYER: Final = qwen3.LAYER | {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_down_norm": "post_feedforward_layernorm",
}
_CAPPED: Final = KeyTable(frozenset(), only={"final_logit_softcapping": ()}, closed=False)


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a Gemma 3; raises ModelError, UnsupportedModelError."""
    config.refuse_unknown_attention(
        "use_bidirectional_attention", "sliding_window", "sliding_window_pattern", "_sliding_window_pattern",
        "query_pre_attn_scalar", "rope_local_base_freq",
    )  # fmt: skip
    config.check_keys(_CAPPED)
    layers, both = config.positive("num_hidden_layers"), config.flag("use_bidirectional_attention", False)
    pattern = config.positive("sliding_window_pattern", 6)  # transformers ignores the key with an underscore
    full = config.layer_kinds(layers, lambda i: (i + 1) % pattern == 0)
    window = config.positive("sliding_window", 4096)
    d = config.positive("head_dim", 256)
    ropes = {
        True: read_rope(config, d, 1_000_000.0, kind=FULL),
        False: read_rope(config, d, 10_000.0, "rope_local_base_freq", SLIDING),
    }
    # The window counts the token's own row.
    near = window // 2 if both else window - 1
    block = BlockSpec(
        biases=("qkv", "attention_out") if config.flag("attention_bias", False) else (),
        norm_bias=False,
        rms=True,
        gamma_offset=1.0,
        added_norms=True,
        gated=True,
        kv_heads=config.positive("num_key_value_heads", 4),
        head_dim=d,
        head_norms=True,
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        causal=not both,
        thetas=tuple(ropes[sees_all].theta for sees_all in full),
        windows=tuple(-1 if sees_all else near for sees_all in full),
        rope_divisors=tuple(ropes[sees_all].divisors for sees_all in full),
    )
    made = qwen3.decoder_spec(
        "gemma3", architecture, config, extras, "hidden_activation", block, generates=True, tied=True
    )
    return replace(made, text=replace(text.stem_of(made), scale=math.sqrt(made.hidden)))


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a Gemma 3, from the stem to the head."""
    return qwen3.tensors(spec, LAYER)


_GEMMA3: Final = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "use_bidirectional_attention": True,
}
_REAL: Final = _GEMMA3 | {
    "num_hidden_layers": 24, "hidden_size": 768, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 256,
    "intermediate_size": 1152, "vocab_size": 262144, "max_position_embeddings": 2048, "sliding_window": 512,
    "query_pre_attn_scalar": 256, "initializer_range": 0.02,
}  # fmt: skip
_TINY: Final = _GEMMA3 | {
    "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "vocab_size": 211, "max_position_embeddings": 40, "sliding_window": 8,
    "sliding_window_pattern": 2, "query_pre_attn_scalar": 12, "initializer_range": TINY_SPREAD,
}  # fmt: skip
_TEXT: Final = {"use_bidirectional_attention": False, "max_position_embeddings": 96, "eos_token_id": [3, 4]}
KINDS: Final = {
    "embeddinggemma": make_kind("Gemma3TextModel", "gemma3_text", _REAL),
    "tiny-embeddinggemma": replace(make_kind("Gemma3ForCausalLM", "gemma3_text", _TINY), extras=qwen3.SENTENCES),
    "tiny-gemma3": make_kind("Gemma3TextModel", "gemma3_text", _TINY),
    "tiny-gemma3-text": make_kind("Gemma3ForCausalLM", "gemma3_text", _TINY, _TEXT),
}

__all__ = ["ARCHITECTURES", "KINDS", "TOKENIZER_CLASSES", "graph", "reference", "spec", "tensors"]
