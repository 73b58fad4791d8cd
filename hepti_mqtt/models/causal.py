"""Decoders with rotary positions as graphs: they continue a text in a session, or embed whole ones.

m new tokens, C rows of the cache, h hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from hepti_mqtt.errors import UnsupportedModelError
from hepti_mqtt.lowering import GraphBuilder, roles
from hepti_mqtt.models import heads, plain, text
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.models.tensors import TensorSource, weight
from hepti_mqtt.models.transformer import ModelSpec, add_layers
from hepti_mqtt.program import WeightRef

LOGITS: Final = "lm_head.weight"
WORDS, HEAD = "stem.word", "head.decoder.weight"  # the table of embeddings, and the matrix to the logits


def head_tensors(spec: ModelSpec, words: tuple[str, ...]) -> Iterator[TensorSource]:
    """Yield the matrix to the logits where a model generates; words: names of the embeddings, to which it is tied."""
    if spec.head.task == "generation":
        stored = (LOGITS, *(words if spec.head.tied else ()))
        logits = weight(HEAD, stored, spec.hidden, spec.head.outputs)
        yield replace(logits, created_name=words[0] if spec.head.tied else "")


def graph(net: GraphBuilder, spec: ModelSpec, shape: TokenBatch, refs: Mapping[str, WeightRef]) -> None:
    """Add the graph of one run.

    Of a model that generates: how many tokens came before, for each of B items, then ids, i32 [B + m] -> the next
    token's logits [B, V]; of one that embeds: ids i32 [m] -> embeddings.
    """
    ids = at = ""
    if spec.head.task == "generation":
        at, ids = add_inputs(net, shape)
    x = text.embed(net, spec, shape, refs, ids)  # [m, h]
    x = add_layers(net, spec, shape, x, refs, at)  # [m, h]
    heads.add_head(net, spec, shape, x, refs)


def add_inputs(net: GraphBuilder, shape: TokenBatch) -> tuple[str, str]:
    """Add what a run of sessions reads: how many rows each cache has already, i32 [B], and ids, i32 [m]."""
    items, m = len(shape.lengths), shape.tokens
    tokens = net.input("tokens", (items + m,), "i32")
    return net.slice("at", tokens, roles.SLICE, 0, items), net.slice("ids", tokens, roles.SLICE, items, items + m)


def first_tokens(inputs: plain.Array, shape: TokenBatch) -> plain.Array:
    """Return the ids of a run whose sessions begin with it; raises UnsupportedModelError for another one."""
    places, ids = np.split(inputs, [len(shape.lengths)])
    if places.any():
        raise UnsupportedModelError("the reference reads whole sequences; give it all tokens from the first")
    return ids


def reference(
    spec: ModelSpec, tensors: plain.Tensors, inputs: plain.Array, shape: TokenBatch
) -> tuple[plain.Array, plain.Array]:
    """Return (final hidden states [m, h], the answer) in plain NumPy, without a cache.

    inputs: as `graph` has them; the rows of the cache must be 0.
    """
    ids = inputs
    if spec.head.task == "generation":
        ids = first_tokens(inputs, shape)
    x = text.reference_embed(spec, tensors, ids, shape)  # [m, h]
    return heads.reference_head(spec, tensors, plain.layers(tensors, spec, x, shape), shape)
