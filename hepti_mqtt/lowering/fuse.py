"""Fusion in the graph: an op joins its only reader where one kernel does both and the table does not part them.

A tensor that the table does not place, and that one elementwise op reads, is computed exactly where and as that op
needs it. So both are one op, before anything is worked out per device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.layouts import Piece
from hepti_mqtt.lowering.ops import Activation, Add, Conv, LayerNorm, Linear, Normalise, Op

Pieces = Mapping[str, tuple[Piece, ...]]


def _activation(op: Op, sources: list[Op]) -> tuple[Op, int] | None:
    """A product, then activation: in its epilogue."""
    first = sources[0]
    plain = isinstance(first, Linear | Conv) and first.activation is None and not first.residual
    if isinstance(op, Activation) and isinstance(first, Linear | Conv) and plain:
        return replace(first, activation=op.function), 0
    return None


def _residual(op: Op, sources: list[Op]) -> tuple[Op, int] | None:
    """x + product: the product adds to x."""
    if isinstance(op, Add) and isinstance(second := sources[1], Linear | Conv) and not second.residual:
        return replace(second, inputs=(*second.inputs, op.inputs[0]), residual=True), 1
    return None


def _norm(op: Op, sources: list[Op]) -> tuple[Op, int] | None:
    """moments, then normalise: a layer norm of whole rows."""
    if isinstance(op, Normalise) and sources[1].inputs == op.inputs[:1]:
        norm = LayerNorm(name=op.name, inputs=op.inputs[:1], tensors=op.tensors, space=op.space, eps=op.eps)
        return norm, 1
    return None


_RULES: Final[Mapping[type[Op], Callable[[Op, list[Op]], tuple[Op, int] | None]]] = {
    Activation: _activation,
    Add: _residual,
    Normalise: _norm,
}


def fuse(graph: Graph, pieces: Pieces) -> tuple[Graph, Pieces]:
    """Return the graph with ops joined, and its pieces with the dimensions that joint ops have in addition.

    A joint op has the name, role and index of the last of its parts.
    """
    readers = Counter(name for op in graph.ops for name in set(op.inputs))
    ops: dict[str, Op] = {}
    placed = dict(pieces)
    gone: set[str] = set()
    for op in graph.ops:
        ops[op.name] = op
        rule = _RULES.get(type(op))
        found = rule(op, [ops[name] for name in op.inputs]) if rule else None
        if found is None:
            continue
        joint, place = found
        inner = op.inputs[place]
        if inner in pieces or readers[inner] != 1 or not _fits(joint, pieces.get(op.name, ())):
            continue
        kept = replace(joint, name=op.name, role=op.role, layer=op.layer, branch=op.branch, index=op.index)
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
