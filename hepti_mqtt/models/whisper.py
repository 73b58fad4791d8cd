"""Whisper (Radford et al., 2022): an encoder of sound and a decoder of text, both with norms before each block.

2 S frames of b bands, S rows of the encoder, m new tokens, h hidden, f MLP width, V words. The decoder is the task
after the encoder's layers. A session keeps the keys and values of all S rows, from its first run, and of the text.
Weights of the frames' convolutions and of the logits stay f32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from hepti_mqtt.core.errors import UnsupportedModelError
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.spec import TaskHead
from hepti_mqtt.lowering import ops as maps
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.graph import GraphBuilder
from hepti_mqtt.models import cross_decoder, plain
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.generation import speech_rules
from hepti_mqtt.models.mel import check_preprocessor
from hepti_mqtt.models.shapes import STEP
from hepti_mqtt.models.speech import SpeechRun, SpeechSpec, answered
from hepti_mqtt.models.tensors import TensorSource, dense, norm, prefixed, table, vector, weight, zeros
from hepti_mqtt.models.transformer import Layer, pre_norm

ARCHITECTURES: Final = {"WhisperForConditionalGeneration": "transcription"}
OWN_KEYS: Final = frozenset({"is_encoder_decoder"})
SPEC: Final = SpeechSpec


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> SpeechSpec:
    """Return the spec of a model of speech; raises ModelError, UnsupportedModelError."""
    config.require_one_of("scale_embedding", False, False)
    config.require_one_of("is_encoder_decoder", True, True)
    hidden, rows = config.positive("d_model"), config.positive("max_source_positions")
    heads = config.heads(hidden, "encoder_attention_heads", "d_model")
    mlp, positions = config.positive("encoder_ffn_dim"), config.positive("max_target_positions")
    for key, value in (("decoder_attention_heads", heads), ("decoder_ffn_dim", mlp)):
        config.require_one_of(key, value, value)
    if positions > rows:
        raise UnsupportedModelError(
            f"config.json: max_target_positions {positions} is more than max_source_positions {rows}; it must not be"
        )
    bands = config.positive("num_mel_bins", 80)
    check_preprocessor(extras, bands, 2 * rows)
    vocab, tied = config.positive("vocab_size"), config.flag("tie_word_embeddings", True)
    return SpeechSpec(
        family="whisper",
        architecture=architecture,
        layers=config.positive("encoder_layers"),
        decoder_layers=config.positive("decoder_layers"),
        hidden=hidden,
        heads=heads,
        mlp=mlp,
        activation=config.activation("activation_function"),
        bands=bands,
        rows=rows,
        positions=positions,
        head=TaskHead("transcription", "last", outputs=vocab, tied=tied),
        alignment=_alignment(speech_rules(config, extras), config.positive("decoder_layers"), heads),
    )


def _alignment(rules: JsonConfig, layers: int, heads: int) -> tuple[tuple[int, int], ...]:
    """Return the heads that the files name, else all of the last half of the layers, as openai-whisper does.

    Empty if the files name heads that the model lacks: a distilled model may come with the file of its teacher.
    """
    named: Any = rules.get("alignment_heads", [[i, k] for i in range(layers // 2, layers) for k in range(heads)])
    are_pairs = isinstance(named, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(at) is int for at in pair) for pair in named
    )
    if not are_pairs:
        raise rules.bad_value("alignment_heads", "a list of [layer, head]", named)
    fits = all(0 <= layer < layers and 0 <= head < heads for layer, head in named)
    return tuple((layer, head) for layer, head in named) if fits else ()


# ----------------------------------------------------------------------------------------------------------------------
# Stored tensors.


def tensors(spec: SpeechSpec) -> Iterator[TensorSource]:
    """Yield the tensors of encoder and decoder; keys have no bias."""
    h, base = spec.hidden, ("model.", "")
    for name, n in (("conv1", spec.bands), ("conv2", h)):
        stored = prefixed(base, f"encoder.{name}.weight")
        yield replace(weight(f"stem.{name}.weight", stored, 3 * n, h, (h, n, 3)), channels_first=(n, 3))
        yield vector(f"stem.{name}.bias", prefixed(base, f"encoder.{name}.bias"), h)
    yield table("stem.sound_position", prefixed(base, "encoder.embed_positions.weight"), spec.rows, h)
    for i in range(spec.layers):
        here = prefixed(base, f"encoder.layers.{i}.")
        yield from _attention(f"layers.{i}.", here, "self_attn", h, ("query", "key", "value", "attention_out"))
        yield from norm(f"layers.{i}.attention_norm", here, "self_attn_layer_norm", h)
        yield from _mlp(f"layers.{i}.", here, spec)
    yield from norm("final_norm", base, "encoder.layer_norm", h)
    words, logits = prefixed(base, "decoder.embed_tokens.weight"), "proj_out.weight"
    vocab = spec.head.outputs
    yield table("stem.word", (*words, logits) if spec.head.tied else words, vocab, h)
    yield table("stem.position", prefixed(base, "decoder.embed_positions.weight"), spec.positions, h)
    for i in range(spec.decoder_layers):
        here, own = prefixed(base, f"decoder.layers.{i}."), cross_decoder.stored(spec, i)
        yield from _attention(own, here, "self_attn", h, ("query", "key", "value", "attention_out"))
        yield from norm(f"{own}attention_norm", here, "self_attn_layer_norm", h)
        parts = ("cross_query", "cross_key", "cross_value", "cross_out")
        yield from _attention(own, here, "encoder_attn", h, parts)
        yield from norm(f"{own}cross_norm", here, "encoder_attn_layer_norm", h)
        yield from _mlp(own, here, spec)
    yield from norm("decoder.norm", base, "decoder.layer_norm", h)
    matrix = weight("head.decoder.weight", (logits, *words) if spec.head.tied else (logits,), h, vocab)
    yield replace(matrix, created_name=words[0] if spec.head.tied else "")


def _attention(
    name: str, here: tuple[str, ...], stored: str, h: int, parts: tuple[str, str, str, str]
) -> Iterator[TensorSource]:
    for part, called in zip(parts, ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True):
        matrix, bias = dense(f"{name}{part}", here, f"{stored}.{called}", h, h)
        yield matrix
        yield zeros(bias.name, h) if called == "k_proj" else bias


def _mlp(name: str, here: tuple[str, ...], spec: SpeechSpec) -> Iterator[TensorSource]:
    yield from norm(f"{name}mlp_norm", here, "final_layer_norm", spec.hidden)
    yield from dense(f"{name}mlp_up", here, "fc1", spec.hidden, spec.mlp)
    yield from dense(f"{name}mlp_down", here, "fc2", spec.mlp, spec.hidden)


# ----------------------------------------------------------------------------------------------------------------------
# The graph.


def graph(net: GraphBuilder, spec: SpeechSpec, shape: SpeechRun, refs: Mapping[str, WeightRef]) -> None:
    """Add the graph of one run: rows of the cache, ids, frames, i32 [1 + m + n] -> logits, or the encoder's states."""
    m, (count,) = shape.tokens, spec.input_spec.input_layout(shape)[0]
    tokens = net.input("tokens", (count,), "i32")
    states = None
    if shape.encodes:
        x = _frames(net, spec, shape, net.slice("sound", tokens, roles.SLICE, 1 + m, count))  # [S, h]
        layer = Layer(spec.hidden, spec.heads, spec.mlp, spec.activation, cross_decoder.EPS, (shape.rows,))
        for i in net.layers(spec.layers):
            x = pre_norm(net, f"{i}.", f"layers.{i}.", x, layer)
        net.begin_block()
        x = net.rows("rows", x, roles.TASK)
        states = net.norm("final_norm", x, roles.TASK, "final_norm", cross_decoder.EPS)  # [S, h]
    if shape.want != "hidden":
        net.set_layer(spec.layers - 1)
        at = net.slice("at", tokens, roles.SLICE, 0, 1)  # [1]
        ids = net.slice("ids", tokens, roles.SLICE, 1, 1 + m)
        extent = net.slice("extent", tokens, roles.SLICE, 1 + m, count) if shape.want == "alignment" else ""
        cross_decoder.graph(net, spec, shape, at, ids, states, refs, extent)


def _frames(net: GraphBuilder, spec: SpeechSpec, shape: SpeechRun, sound: str) -> str:
    """Add two convolutions over time (the second halves it), then positions: [n] -> [S, h]."""
    rows, h = shape.rows, spec.hidden
    dims, source = (2 * rows, 1, spec.bands), spec.bands
    x = net.opaque("frames", (sound,), roles.FRAMES, "frames", dims, step=STEP)
    for name, step in (("conv1", 1), ("conv2", 2)):
        x = net.add_op(
            maps.Conv(
                name=name,
                inputs=(x,),
                role=roles.FRAMES,
                tensors=(f"stem.{name}.weight", f"stem.{name}.bias"),
                space=(2 * rows // step, 1, h),
                kernel=(3, 1),
                stride=(step, 1),
                pad=(1, 0, 1, 0),
                source=(2 * rows, 1, source),
                activation="gelu",  # independent of the layers' activation
            )
        )
        source = h
    x = net.add_op(maps.MapAsRows(name="heard", inputs=(x,), role=roles.FRAMES, space=(rows, h), source=(rows, 1, h)))
    return net.add_table("placed", x, roles.FRAMES, "stem.sound_position", spec.rows)


# ----------------------------------------------------------------------------------------------------------------------
# The reference.


def reference(
    spec: SpeechSpec, t: plain.Tensors, inputs: plain.Array, shape: SpeechRun
) -> tuple[plain.Array, plain.Array]:
    """Return (the encoder's states [S, h], the answer: logits, or the states if wanted), without a cache."""
    if inputs[0] != 0 or not shape.encodes:
        raise UnsupportedModelError("the reference reads whole texts; give it the sound and all tokens from the first")
    m, rows, kind = shape.tokens, shape.rows, t["stem.sound_position"].dtype.type
    x = (inputs[1 + m :] * kind(STEP)).reshape(2 * rows, spec.bands).astype(kind)
    for name, step in (("conv1", 1), ("conv2", 2)):
        padded = np.pad(x, ((1, 1), (0, 0)))
        windows = np.concatenate([padded[i : i + 2 * rows : step] for i in range(3)], axis=1)
        x = plain.activate("gelu", plain.linear(t, f"stem.{name}", windows))
    x = x + t["stem.sound_position"][:rows]
    layer = Layer(spec.hidden, spec.heads, spec.mlp, spec.activation, cross_decoder.EPS, (rows,))
    for i in range(spec.layers):
        x = plain.pre_norm(t, f"layers.{i}.", x, layer)
    states = plain.norm(t, "final_norm", x, cross_decoder.EPS)  # [S, h]
    if shape.want == "hidden":
        return states, states
    return states, cross_decoder.reference(spec, t, inputs[1 : 1 + m], states, answered(shape))
