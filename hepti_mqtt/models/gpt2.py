"""GPT-2 (Radford et al., 2019): a decoder that norms before each block and attends to earlier tokens only.

m new tokens, C rows of the cache, h hidden, a heads, d = h / a, f MLP width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hepti_mqtt.core.spec import TaskHead
from hepti_mqtt.models import causal, sentences, text
from hepti_mqtt.models.config import JsonConfig, KeyTable
from hepti_mqtt.models.generation import end_tokens
from hepti_mqtt.models.tensors import TensorSource, conv1d, norm, prefixed, table
from hepti_mqtt.models.transformer import BlockSpec, ModelSpec, TextStem

ARCHITECTURES: Final = {"GPT2LMHeadModel": "generation"}
TOKENIZER_CLASSES: Final = {"gpt2": "GPT2Tokenizer"}
_NAMES: Final = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}  # fmt: skip
# The model has no windows, but the reference's cache forgets by these keys; `is_causal` gives the mask.
_WINDOWS: Final = KeyTable(
    frozenset(),
    only=dict.fromkeys(("attention_chunk_size", "layer_types", "sliding_window"), ()) | {"is_causal": (True,)},
    closed=False,
)
LAYER: Final = {
    "attention_norm": "ln_1", "qkv": "attn.c_attn", "attention_out": "attn.c_proj",
    "mlp_norm": "ln_2", "mlp_up": "mlp.c_fc", "mlp_down": "mlp.c_proj",
}  # fmt: skip


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a GPT-2 model; raises ModelError, UnsupportedModelError."""
    config = config.renamed(_NAMES)
    for key, value in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        config.require_one_of(key, value, value)
    for key in ("add_cross_attention", "reorder_and_upcast_attn"):
        config.require_one_of(key, False, False)
    config.check_keys(_WINDOWS)
    hidden = config.positive("n_embd")
    vocab, positions = config.positive("vocab_size"), config.positive("n_positions")
    end_tokens(config, extras, vocab)  # raises for keys that would change the text
    return ModelSpec(
        family="gpt2",
        architecture=architecture,
        layers=config.positive("n_layer"),
        hidden=hidden,
        heads=config.heads(hidden, "n_head", "n_embd"),
        mlp=config.positive("n_inner", 4 * hidden),
        norm_first=True,
        activation=config.activation("activation_function"),
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        max_tokens=sentences.max_tokens(positions, extras),
        head=TaskHead("generation", "last", outputs=vocab, tied=config.flag("tie_word_embeddings", True)),
        text=TextStem(vocab, positions, types=0),
        block=BlockSpec(causal=True),
    )


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a GPT-2 model, from the stem to the head; matrices of the layers are stored as [in, out]."""
    stem, h, base = text.stem_of(spec), spec.hidden, ("transformer.", "")
    words = prefixed(base, "wte.weight")
    yield table("stem.word", (*words, causal.LM_HEAD) if spec.head.tied else words, stem.vocab, h)
    yield table("stem.position", prefixed(base, "wpe.weight"), stem.positions, h)
    for i in range(spec.layers):
        yield from text.layer_tensors(spec, f"layers.{i}.", base, f"h.{i}.", LAYER, matrix=conv1d)
    yield from norm("final_norm", base, "ln_f", h)
    yield from causal.head_tensors(spec, words)


graph = causal.graph
reference = causal.reference
