"""GPT-2 (Radford et al., 2019): a decoder that norms before each block and attends to earlier tokens only.

m new tokens, C rows of the cache, h hidden, a heads, d = h / a, f MLP width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.spec import TaskHead
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.graph import GraphBuilder
from hepti_mqtt.models import causal, heads, plain, sentences, text
from hepti_mqtt.models.config import JsonConfig, KeyTable
from hepti_mqtt.models.generation import end_tokens
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.models.tensors import TensorSource, conv1d, norm, prefixed, table, weight
from hepti_mqtt.models.transformer import ModelSpec, TextStem, needed_rows

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
        text=TextStem(vocab, positions, types=1),
    )


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a GPT-2 model, from the stem to the head; matrices of the layers are stored as [in, out]."""
    assert spec.text is not None
    h = spec.hidden
    base = ("transformer.", "")
    decoder, words = "lm_head.weight", prefixed(base, "wte.weight")
    tied = spec.head.tied
    yield table("stem.word", (*words, decoder) if tied else words, spec.text.vocab, h)
    yield table("stem.position", prefixed(base, "wpe.weight"), spec.text.positions, h)
    for i in range(spec.layers):
        yield from text.layer_tensors(spec, f"layers.{i}.", base, f"h.{i}.", LAYER, matrix=conv1d)
    yield from norm("final_norm", base, "ln_f", h)
    logits = weight("head.decoder.weight", (decoder, *words) if tied else (decoder,), h, spec.text.vocab)
    yield replace(logits, created_name=words[0] if tied else "")


def graph(net: GraphBuilder, spec: ModelSpec, shape: TokenBatch, refs: Mapping[str, WeightRef]) -> None:
    """Add the graph of one run: the inputs of `causal.add_inputs` -> the next token's logits of each item."""
    h, eps, lengths = spec.hidden, spec.norm_eps, shape.lengths
    at, ids, heat, _ = causal.add_inputs(net, shape, spec.hidden)
    tables = [refs["stem.word"], refs["stem.position"]]
    x = net.embedding("embedded", (ids, at), "embed_at", tables, h, lengths=lengths)  # [m, h]
    for i in net.layers(spec.layers):
        stored = f"layers.{i}."
        u = net.norm(f"{i}.u", x, roles.BEFORE_ATTENTION, f"{stored}attention_norm", eps)  # [m, h]
        net.begin_block()
        qkv = net.linear(f"{i}.qkv", u, roles.QKV, {f"{stored}qkv": 3 * h})  # [m, 3h]
        kv = net.append_to_cache(
            f"{i}.kv", f"{stored}kv", qkv, at, rows=shape.cache, start=h, lengths=lengths
        )  # [C, 2h] each
        attention = net.cached_attention(
            f"{i}.attention", qkv, kv, at, heads=spec.heads, columns=(0, 0, h), lengths=lengths
        )  # [m, h]
        out = net.linear(f"{i}.o", attention, roles.ATTENTION_OUT, {f"{stored}attention_out": h})  # [m, h]
        y = net.sum(f"{i}.y", x, out, roles.AFTER_ATTENTION)  # [m, h]
        v = net.norm(f"{i}.v", y, roles.BEFORE_MLP, f"{stored}mlp_norm", eps)  # [m, h]
        up = net.linear(f"{i}.up", v, roles.MLP_UP, {f"{stored}mlp_up": spec.mlp})  # [m, f]
        hidden = net.activation(f"{i}.g", up, roles.MLP_HIDDEN, spec.activation)  # [m, f]
        down = net.linear(f"{i}.down", hidden, roles.MLP_DOWN, {f"{stored}mlp_down": h})  # [m, h]
        x = net.sum(f"{i}.x", y, down, roles.AFTER_MLP)  # [m, h]
    net.begin_block()
    x = net.rows("rows", x, roles.TASK, needed_rows(spec, shape))  # [B, h], or [m, h] for all hidden states
    x = net.norm("final_norm", x, roles.TASK, "final_norm", eps)
    if shape.want != "hidden":
        logits = net.linear("logits", x, roles.LOGITS, {"head.decoder": spec.head.outputs}, bias=False)  # [B, V]
        if shape.want == "candidates":
            heads.add_candidates(net, spec, logits, heat)


def reference(
    spec: ModelSpec, tensors: plain.Tensors, inputs: plain.Array, shape: TokenBatch
) -> tuple[plain.Array, plain.Array]:
    """Return (final hidden states [m, h], the answer: logits [B, V] of the next tokens, or the states if wanted).

    The whole causal pass in plain NumPy, without a cache; inputs: a 0 for each item, then the ids [m].
    """
    ids, eps = causal.first_tokens(inputs, shape), spec.norm_eps
    places = np.concatenate([np.arange(length) for length in shape.lengths])  # [m]
    x = tensors["stem.word"][ids] + tensors["stem.position"][places]  # [m, h]
    for i in range(spec.layers):
        here = f"layers.{i}."
        u = plain.norm(tensors, f"{here}attention_norm", x, eps)  # [m, h]
        q, k, v = np.split(plain.linear(tensors, f"{here}qkv", u), 3, axis=1)  # [m, h] each
        attention = plain.attention(q, k, v, spec.heads, shape.lengths, causal=True)  # [m, h]
        x = x + plain.linear(tensors, f"{here}attention_out", attention)  # [m, h]
        u = plain.norm(tensors, f"{here}mlp_norm", x, eps)  # [m, h]
        hidden = plain.activate(spec.activation, plain.linear(tensors, f"{here}mlp_up", u))  # [m, f]
        x = x + plain.linear(tensors, f"{here}mlp_down", hidden)  # [m, h]
    x = plain.norm(tensors, "final_norm", x, eps)  # [m, h]
    rows = needed_rows(spec, shape)
    return x, x if rows is None else x[list(rows)] @ tensors["head.decoder.weight"]  # [B, V]
