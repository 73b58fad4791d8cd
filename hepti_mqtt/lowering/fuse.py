"""Fusion in the graph: an op joins its only reader where one kernel does both and the table does not part them.

A tensor that the table does not place, and that one elementwise op reads, is computed exactly where and as that op
needs it. So both are one op, before anything is worked out per device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.layouts import Piece
from hepti_mqtt.lowering.ops import Activation, Add, Conv, LayerNorm, Linear, Normalise, Op

Pieces = Mapping[str, tuple[Piece, ...]]


def _activation(op: Op, sources: list[Op]) -> Op | None:
    """A product, then activation: in its epilogue; of a convolution also behind the residual that it adds to."""
    first = sources[0]
    if not isinstance(op, Activation) or not isinstance(first, Linear | Conv) or first.activation:
        return None
    if first.residual and not isinstance(first, Conv):
        return None
    more = {"residual_first": True} if first.residual else {}
    return _but(first, activation=op.function, **more).renamed(inputs=first.inputs, tensors=first.tensors)


def _residual(op: Op, sources: list[Op]) -> Op | None:
    """x + product: the product adds to x."""
    if isinstance(op, Add) and isinstance(second := sources[1], Linear | Conv) and not second.residual:
        return _but(second, residual=True).renamed(inputs=(*second.inputs, op.inputs[0]), tensors=second.tensors)
    return None


def _norm(op: Op, sources: list[Op]) -> Op | None:
    """moments, then normalise: a layer norm of whole rows."""
    if isinstance(op, Normalise) and sources[1].inputs == op.inputs[:1]:
        return _layer_norm(op).renamed(inputs=op.inputs[:1], tensors=op.tensors)
    return None


@lru_cache(maxsize=64)
def _but(op: Op, **changes: Any) -> Op:
    return replace(op, **changes).settled()


@lru_cache(maxsize=64)
def _layer_norm(op: Normalise) -> LayerNorm:
    return LayerNorm(name="", space=op.space, eps=op.eps).settled()


# By the kind of the later op: which of its inputs joins it, and the joint op, None if there is none.
_RULES: Final[Mapping[type[Op], tuple[int, Callable[[Op, list[Op]], Op | None]]]] = {
    Activation: (0, _activation),
    Add: (1, _residual),
    Normalise: (1, _norm),
}


def fuse(graph: Graph, pieces: Pieces) -> tuple[Graph, Pieces]:
    """Return the graph with ops joined, and its pieces with the dimensions that joint ops have in addition.

    A joint op has the name, role and index of the last of its parts.
    """
    readers = Counter(name for op in graph.ops for name in op.inputs)
    ops: dict[str, Op] = {}
    placed = dict(pieces)
    gone: set[str] = set()
    for op in graph.ops:
        ops[op.name] = op
        if type(op) not in _RULES:
            continue
        place, rule = _RULES[type(op)]
        inner = op.inputs[place]
        if inner in pieces or readers[inner] != 1:
            continue
        joint = rule(op, [ops[name] for name in op.inputs])
        if joint is None or not _fits(joint, pieces.get(op.name, ())):
            continue
        kept = joint.renamed(name=op.name, role=op.role, layer=op.layer, branch=op.branch, index=op.index)
        ops[op.name] = kept
        gone.add(inner)
        if op.name in placed:
            rest = kept.full[len(op.space) :]
            placed[op.name] = tuple(p._replace(region=p.region + rest) for p in placed[op.name])
    blocks, left = [], 0
    starts = set(graph.blocks)
    kept_ops = []
    for place, op in enumerate(graph.ops):
        if place in starts:
            blocks.append(left)
        if op.name not in gone:
            kept_ops.append(ops[op.name])
            left += 1
    return Graph(tuple(kept_ops), tuple(blocks)), placed


def _fits(joint: Op, pieces: tuple[Piece, ...]) -> bool:
    """Return whether the joint op computes every piece and no more: a norm of parts of rows stays in two."""
    return all(joint.extent(p.region) == p.region for p in pieces)
