"""Task heads: from the final rows of the hidden states to what the user asked for, as a graph and in plain NumPy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hepti_mqtt.lowering import GraphBuilder
from hepti_mqtt.lowering.roles import TASK
from hepti_mqtt.models.plain import Array, Tensors, activate, linear, norm, sequence_slices
from hepti_mqtt.models.shapes import PackedBatch
from hepti_mqtt.models.transformer import ModelSpec, needed_rows
from hepti_mqtt.program import WeightRef


def add_head(net: GraphBuilder, spec: ModelSpec, shape: PackedBatch, x: str, refs: Mapping[str, WeightRef]) -> str:
    """Add final norm, pooling and head on the last layer's x [m, h]; return the output.

    It has the spec's `output_shape`. Only the rows that the task reads are asked for.
    """
    x = net.rows("rows", x, TASK, needed_rows(spec, shape))  # [r, h]
    if spec.norm_first:
        x = _norm(net, spec, x, "final_norm", refs)
    if shape.want == "hidden":
        return x
    head = spec.head
    if head.pooling == "mean":
        dims = (len(shape.lengths), spec.hidden)
        x = net.opaque("pooled", (x,), TASK, "mean_rows", dims, lengths=shape.lengths)  # [B, h]
    if head.pooler:
        x = _dense(net, x, "head.pooler", head.activation, refs)
    if "head.pooler_norm.weight" in refs:
        x = _norm(net, spec, x, "head.pooler_norm", refs)
    if head.normalize:
        x = net.opaque("unit", (x,), TASK, "normalize_rows", net.shape_of(x))
    if head.task == "masked_token":
        x = _dense(net, x, "head.transform", head.activation, refs)  # [masks, e]
        x = _norm(net, spec, x, "head.transform_norm", refs)
        return _dense(net, x, "head.decoder", None, refs)  # [masks, V]
    return _dense(net, x, "head.classifier", None, refs) if head.outputs else x


def reference_head(spec: ModelSpec, tensors: Tensors, x: Array, shape: PackedBatch) -> tuple[Array, Array]:
    """Return (hidden states after the final norm [m, h], the spec's output) from the last layer's x [m, h]."""
    hidden = norm(tensors, "final_norm", x, spec.norm) if spec.norm_first else x
    if shape.want == "hidden":
        return hidden, hidden
    head, rows = spec.head, needed_rows(spec, shape)
    means = (hidden[one].mean(axis=0) for one in sequence_slices(shape.lengths))
    x = np.stack([*means]) if rows is None else hidden[list(rows)]  # [B or masks, h]
    if head.pooler:
        x = activate(head.activation, linear(tensors, "head.pooler", x))
    if "head.pooler_norm.weight" in tensors:
        x = norm(tensors, "head.pooler_norm", x, spec.norm)
    if head.normalize:
        x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    if head.task == "masked_token":
        x = activate(head.activation, linear(tensors, "head.transform", x))  # [masks, e]
        x = norm(tensors, "head.transform_norm", x, spec.norm)
        return hidden, linear(tensors, "head.decoder", x)  # [masks, V]
    return hidden, linear(tensors, "head.classifier", x) if head.outputs else x


def _dense(net: GraphBuilder, x: str, name: str, activation: str | None, refs: Mapping[str, WeightRef]) -> str:
    start, stop = refs[f"{name}.weight"].columns
    return net.linear(name, x, TASK, {name: stop - start}, bias=f"{name}.bias" in refs, activation=activation)


def _norm(net: GraphBuilder, spec: ModelSpec, x: str, name: str, refs: Mapping[str, WeightRef]) -> str:
    return net.norm(name, x, TASK, name, spec.norm, bias=f"{name}.bias" in refs)
