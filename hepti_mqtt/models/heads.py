"""Task heads: from the final rows of the hidden states to the answer, as a graph and in plain NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.spec import Pooling
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.graph import GraphBuilder
from hepti_mqtt.lowering.roles import LOGITS, TASK
from hepti_mqtt.models.plain import Array, Tensors, activate, linear, norm, pool, sequence_slices
from hepti_mqtt.models.shapes import PackedBatch
from hepti_mqtt.models.tensors import TensorSource, dense
from hepti_mqtt.models.transformer import ModelSpec, candidate_count, needed_rows, patch_rows

# Poolings by the kernel `pool_rows` over all rows of a sequence; the others select rows.
POOLED: Final = ("mean", "sqrt_mean", "weighted_mean", "max")
PATCHES: Final = ("patches", "cls_patches")
_STORED: Final = {"token_classification": "classifier", "question_answering": "qa_outputs"}


def head_tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of heads that all families share: heads of each row, and dense layers after a pooling."""
    head = spec.head
    if (stored := _STORED.get(head.task)) is not None:
        yield from dense("head.classifier", ("",), stored, spec.hidden, head.outputs)
    for i, one in enumerate(head.projections):
        layer = dense(_projection(i), (f"{one.path}/",), "linear", one.inputs, one.outputs)
        yield from layer if one.bias else layer[:1]


def _projection(i: int) -> str:
    return f"head.projection.{i}"


def add_head(net: GraphBuilder, spec: ModelSpec, shape: PackedBatch, x: str, refs: Mapping[str, WeightRef]) -> str:
    """Add final norm, pooling and head after the last layer's x [m, h]; return the output (spec's `output_shape`).

    They compute only the rows that the task reads.
    """
    x = net.rows("rows", x, TASK, needed_rows(spec, shape))  # [r, h]
    if "final_norm.weight" in refs:
        scaled = spec.norm if shape.want == "hidden" else spec.norm._replace(divisor=spec.head.logits_scaling)
        x = net.norm("final_norm", x, TASK, "final_norm", scaled, bias="final_norm.bias" in refs)
    if shape.want == "hidden":
        return x
    head = spec.head
    if head.pooling in POOLED:
        x = _pool(net, x, shape.lengths, head.pooling)  # [B, h]
    if head.pooling in PATCHES:
        patches, lengths = patch_rows(spec, shape)
        mean = _pool(net, net.rows("patch_rows", x, TASK, patches), lengths, "mean")  # [B, h]
        cls = [net.rows("cls", x, TASK, shape.starts)] if head.pooling == "cls_patches" else []
        x = net.join("cls_patches", [*cls, mean], TASK)  # [B, h] or [B, 2 h]
    if head.pooler:
        x = _dense(net, x, "head.pooler", head.activation, refs)
    if "head.pooler_norm.weight" in refs:
        x = _norm(net, spec, x, "head.pooler_norm", refs)
    for i, one in enumerate(head.projections):
        matrix = {_projection(i): one.outputs}
        x = net.linear(_projection(i), x, TASK, matrix, bias=one.bias, activation=one.activation)
    if head.normalize:
        x = net.opaque("unit", (x,), TASK, "normalize_rows", net.shape_of(x))
    if head.task == "masked_token":
        x = _dense(net, x, "head.transform", head.activation, refs)  # [masks, e]
        x = _norm(net, spec, x, "head.transform_norm", refs)
        return _dense(net, x, "head.decoder", None, refs)  # [masks, V]
    if head.task == "generation":
        return _dense(net, x, "head.decoder", None, refs, LOGITS)  # [1, V]
    return _dense(net, x, "head.classifier", None, refs) if head.outputs else x


def add_candidates(net: GraphBuilder, spec: ModelSpec, logits: str, temperatures: str) -> str:
    """Add the candidates, the answer in place of the logits [r, V]; return the output."""
    return net.candidates("candidates", logits, temperatures, roles.CANDIDATES, candidate_count(spec))


def reference_head(spec: ModelSpec, tensors: Tensors, x: Array, shape: PackedBatch) -> tuple[Array, Array]:
    """Return (hidden states after the final norm [m, h], the spec's output) from the last layer's x [m, h]."""
    hidden = norm(tensors, "final_norm", x, spec.norm) if "final_norm.weight" in tensors else x
    if shape.want == "hidden":
        return hidden, hidden
    head, rows = spec.head, needed_rows(spec, shape)
    if head.pooling in POOLED:
        x = np.stack([pool(head.pooling, hidden[one]) for one in sequence_slices(shape.lengths)])  # [B, h]
    elif head.pooling in PATCHES:
        patches, lengths = patch_rows(spec, shape)
        of_patches = hidden[list(patches)]
        x = np.stack([pool("mean", of_patches[one]) for one in sequence_slices(lengths)])  # [B, h]
        x = np.hstack([hidden[list(shape.starts)], x]) if head.pooling == "cls_patches" else x
    else:
        x = hidden if rows is None else hidden[list(rows)]  # [m, B or masks, h]
    if head.pooler:
        x = activate(head.activation, linear(tensors, "head.pooler", x))
    if "head.pooler_norm.weight" in tensors:
        x = norm(tensors, "head.pooler_norm", x, spec.norm)
    for i, one in enumerate(head.projections):
        x = linear(tensors, _projection(i), x)
        x = activate(one.activation, x) if one.activation else x
    if head.normalize:
        x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    if head.task == "masked_token":
        x = activate(head.activation, linear(tensors, "head.transform", x))  # [masks, e]
        x = norm(tensors, "head.transform_norm", x, spec.norm)
        return hidden, linear(tensors, "head.decoder", x)  # [masks, V]
    if head.task == "generation":
        return hidden, linear(tensors, "head.decoder", x / x.dtype.type(head.logits_scaling))  # [1, V]
    return hidden, linear(tensors, "head.classifier", x) if head.outputs else x


def _pool(net: GraphBuilder, x: str, lengths: tuple[int, ...], mode: Pooling) -> str:
    dims = (len(lengths), net.shape_of(x)[1])
    return net.opaque("pooled", (x,), TASK, "pool_rows", dims, lengths=lengths, mode=mode)


def _dense(
    net: GraphBuilder, x: str, name: str, activation: str | None, refs: Mapping[str, WeightRef], role: str = TASK
) -> str:
    start, stop = refs[f"{name}.weight"].columns
    return net.linear(name, x, role, {name: stop - start}, bias=f"{name}.bias" in refs, activation=activation)


def _norm(net: GraphBuilder, spec: ModelSpec, x: str, name: str, refs: Mapping[str, WeightRef]) -> str:
    return net.norm(name, x, TASK, name, spec.norm, bias=f"{name}.bias" in refs)
