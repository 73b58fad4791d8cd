"""Graph and NumPy reference of decoders: they continue a text in a session, or embed whole texts.

B items of a run, m new tokens, h hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from hepti_mqtt.core.errors import UnsupportedModelError
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.graph import GraphBuilder
from hepti_mqtt.models import heads, plain, text
from hepti_mqtt.models.shapes import STEP, TokenBatch
from hepti_mqtt.models.tensors import LOGITS_MATRIX, TensorSource, weight
from hepti_mqtt.models.transformer import ModelSpec, add_layers

LM_HEAD: Final = "lm_head.weight"


def head_tensors(spec: ModelSpec, embeddings: tuple[str, ...]) -> Iterator[TensorSource]:
    """Yield the matrix to the logits of a model that generates; embeddings: stored names of the token embeddings."""
    if spec.head.task == "generation":
        stored = (LM_HEAD, *(embeddings if spec.head.tied else ()))
        logits = weight(LOGITS_MATRIX, stored, spec.hidden, spec.head.outputs)
        yield replace(logits, created_name=embeddings[0] if spec.head.tied else "")


def graph(net: GraphBuilder, spec: ModelSpec, shape: TokenBatch, refs: Mapping[str, WeightRef]) -> None:
    """Add the graph of one run: of a model that generates, the inputs of `add_inputs` -> logits [B, V] or candidates.

    Of a model that embeds: ids i32 [m] -> embeddings [B, h].
    """
    ids = at = heat = rows = ""
    if spec.head.task == "generation":
        at, ids, heat, rows = add_inputs(net, shape, spec.hidden)
    x = text.embed(net, spec, shape, refs, ids, at)  # [m, h]
    if rows:
        added = net.opaque("added", (rows,), roles.STEM, "frames", (shape.tokens, spec.hidden), step=STEP)
        x = net.sum("seen", x, added, roles.STEM)  # [m, h]
    x = add_layers(net, spec, shape, x, refs, at)  # [m, h]
    logits = heads.add_head(net, spec, shape, x, refs)
    if shape.want == "candidates":
        heads.add_candidates(net, spec, logits, heat)


def add_inputs(net: GraphBuilder, shape: TokenBatch, width: int) -> tuple[str, str, str, str]:
    """Add the input of a run of sessions, i32, and return the names of its parts.

    Parts: the number of rows in each session's cache [B], ids [m], temperatures of the rows with candidates [r] (the
    bits of f32), and rows that are added to embeddings [m width], in fixed point. Absent parts have empty names.
    """
    items, ids_end = len(shape.lengths), len(shape.lengths) + shape.tokens
    last = ids_end + shape.temperatures
    whole = last + (shape.tokens * width if shape.added else 0)
    tokens = net.input("tokens", (whole,), "i32")
    at, ids = net.slice("at", tokens, roles.SLICE, 0, items), net.slice("ids", tokens, roles.SLICE, items, ids_end)
    heat = net.slice("temperatures", tokens, roles.SLICE, ids_end, last) if shape.temperatures else ""
    return at, ids, heat, net.slice("rows_added", tokens, roles.SLICE, last, whole) if shape.added else ""


def first_tokens(inputs: plain.Array, shape: TokenBatch) -> plain.Array:
    """Return the ids of a run that begins its sessions; raises UnsupportedModelError for a later run."""
    items = len(shape.lengths)
    cached, ids, _ = np.split(inputs, [items, items + shape.tokens])
    if cached.any():
        raise UnsupportedModelError("the reference has no KV cache; give it whole sequences, from the first token")
    return ids


def reference(
    spec: ModelSpec, tensors: plain.Tensors, inputs: plain.Array, shape: TokenBatch
) -> tuple[plain.Array, plain.Array]:
    """Return (final hidden states [m, h], the answer) in plain NumPy, for runs that begin their sessions.

    inputs: those of `graph`, with empty caches.
    """
    ids = inputs
    if spec.head.task == "generation":
        ids = first_tokens(inputs, shape)
    x = text.reference_embed(spec, tensors, ids, shape)  # [m, h]
    if shape.added:
        rows = inputs[len(shape.lengths) + shape.tokens + shape.temperatures :]
        x = x + (rows * x.dtype.type(STEP)).reshape(x.shape)
    return heads.reference_head(spec, tensors, plain.layers(tensors, spec, x, shape), shape)
