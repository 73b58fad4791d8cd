"""Rewrites of the graph: ops fused with their only reader, and the order of the products around attention.

If the table does not place a tensor and one elementwise op reads it, the tensor is computed exactly where that op
needs it. Both become one op before anything is derived per device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from hepti_mqtt.core.plan import WeightDtype
from hepti_mqtt.lowering.attention import Attention, ReorderedAttention
from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.layouts import Piece
from hepti_mqtt.lowering.ops import (
    Activation,
    Add,
    Conv,
    LayerNorm,
    Linear,
    Normalise,
    Op,
)
from hepti_mqtt.lowering.regions import IndexSet, index_count

Pieces = Mapping[str, tuple[Piece, ...]]


def _activation(op: Op, sources: list[Op]) -> Op | None:
    """Fuse an activation with the product before it; with a convolution also after its residual."""
    first = sources[0]
    if not isinstance(op, Activation) or not isinstance(first, Linear | Conv) or first.activation:
        return None
    if first.residual and not isinstance(first, Conv):
        return None
    more = {"residual_first": True} if first.residual else {}
    return _replaced(first, activation=op.function, **more).relabelled(inputs=first.inputs, tensors=first.tensors)


def _residual(op: Op, sources: list[Op]) -> Op | None:
    """Fuse x + product: the product adds to x."""
    if isinstance(op, Add) and isinstance(second := sources[1], Linear | Conv) and not second.residual:
        return _replaced(second, residual=True).relabelled(
            inputs=(*second.inputs, op.inputs[0]), tensors=second.tensors
        )
    return None


def _norm(op: Op, sources: list[Op]) -> Op | None:
    """Fuse moments and normalise to a layer norm of whole rows."""
    if isinstance(op, Normalise) and sources[1].inputs == op.inputs[:1]:
        return _layer_norm(op).relabelled(inputs=op.inputs[:1], tensors=op.tensors)
    return None


@lru_cache(maxsize=64)
def _replaced(op: Op, **changes: Any) -> Op:
    return replace(op, **changes).warmed_up()


@lru_cache(maxsize=64)
def _layer_norm(op: Normalise) -> LayerNorm:
    return LayerNorm(name="", space=op.space, norm=op.norm).warmed_up()


# Kind of the later op: (which input it is fused with, the fused op or None).
_RULES: Final[Mapping[type[Op], tuple[int, Callable[[Op, list[Op]], Op | None]]]] = {
    Activation: (0, _activation),
    Add: (1, _residual),
    Normalise: (1, _norm),
}


def fuse_ops(graph: Graph, pieces: Pieces) -> tuple[Graph, Pieces]:
    """Return the graph with ops fused, and its pieces with the dimensions that fused ops add.

    A fused op has the name, role and index of the last of its parts.
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
        # The joint op must compute every piece exactly: a norm of parts of rows stays two ops.
        if joint is None or any(joint.computed_region(p.region) != p.region for p in pieces.get(op.name, ())):
            continue
        ops[op.name] = kept = _in_place_of(op, joint)
        gone.add(inner)
        if op.name in placed:
            rest = kept.full_region[len(op.space) :]
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


def _in_place_of(op: Op, other: Op, **changes: Any) -> Op:
    """Return another op with the name, role and place of an op."""
    return other.relabelled(name=op.name, role=op.role, layer=op.layer, branch=op.branch, index=op.index, **changes)


# ----------------------------------------------------------------------------------------------------------------------
# The order of the products around attention: a graph without keys and values.
#
# ((x_p Wq) Wk.T) x.T in place of (x_p Wq) (x Wk).T, and (A x) Wv in place of A (x Wv), as in Voltage (Hu and Li, 2024).
# Which order multiplies less depends on each device's share of the rows.


Rewrite = Callable[[Graph], Graph]


# Cost of a multiplication in the other order relative to the usual order: measured (docs/methods/voltage.md).
REORDERED_COST: Final = 1.25


def choose_product_order(graph: Graph, order: str, rows: Sequence[IndexSet], storage: WeightDtype) -> Rewrite:
    """Return the rewrite of a request's graph.

    order: `kept`, `reordered`, or `cost` for the order with less work for the busiest device. rows: of each device.
    storage: of the weights; the other order supports f32 only, so `cost` keeps the usual order for narrow weights.
    """
    if storage == "f32" and (order == "reordered" or (order == "cost" and is_cheaper(graph, rows))):
        return reorder_attention
    return lambda graph: graph


def reorder_attention(graph: Graph) -> Graph:
    """Return the graph with attention over x itself: equally many tensors, of the same names and roles.

    Causal attention stays, and so do keys and values with other readers.
    """
    new: dict[str, Op] = {}
    for linear, attention in _products(graph):
        n = len(linear.widths)
        new[linear.name] = _in_place_of(linear, _queries(linear), inputs=linear.inputs, tensors=linear.tensors[::n])
        matrices = tuple(tensor for i, tensor in enumerate(linear.tensors) if i % n)
        inputs = (linear.name, *linear.inputs)
        new[attention.name] = _in_place_of(attention, _over_x(linear, attention), inputs=inputs, tensors=matrices)
    return Graph(tuple(new.get(op.name, op) for op in graph.ops), graph.blocks)


def is_cheaper(graph: Graph, rows: Sequence[IndexSet]) -> bool:
    """Return whether the busiest device has fewer multiplications in the other order; rows: of each device."""
    products = tuple(_products(graph))
    counts = [[multiplications(*pair, r) for pair in products] for r in rows]
    usual, other = (max(sum(pair[order] for pair in of_device) for of_device in counts) for order in (0, 1))
    return REORDERED_COST * other < usual


def multiplications(linear: Linear, attention: Attention, rows: IndexSet) -> tuple[int, int]:
    """Return a device's multiplications for keys, values and attention of its rows: (usual order, other order).

    Those for queries are equal in both orders.
    """
    w, h, pairs = linear.space[2], attention.space[1], attention.pairs(rows)
    usual = w * h * index_count(attention.keys(rows)) + h * pairs
    return 2 * usual, 2 * (w * h * index_count(rows) + h // attention.d * w * pairs)


def _products(graph: Graph) -> Iterator[tuple[Linear, Attention]]:
    """Yield projections to queries, keys and values of equal width, with the attention that is their only reader."""
    readers = Counter(name for op in graph.ops for name in op.inputs)
    for op in graph.ops:
        if type(op) is not Attention or op.inputs[0] != op.inputs[1] or op.causal or op.window >= 0 or op.tensors:
            continue
        source, h = graph.by_name[op.inputs[0]], op.space[1]
        if not isinstance(source, Linear) or source.activation or readers[source.name] > len(op.inputs):
            continue
        if source.widths == (h, h, h) and op.columns == (0, h, 2 * h):
            yield source, op


@lru_cache(maxsize=64)
def _queries(linear: Linear) -> Linear:
    m, _, w = linear.space
    h = linear.widths[0]
    return replace(linear, name="", tensors=(), space=(m, h, w), widths=(h,)).warmed_up()


@lru_cache(maxsize=64)
def _over_x(linear: Linear, attention: Attention) -> ReorderedAttention:
    return ReorderedAttention(
        name="",
        space=attention.space,
        d=attention.d,
        scale=attention.scale,
        columns=(0, 0, 0),
        lengths=attention.lengths,
        width=linear.space[2],
        bias=linear.bias,
    ).warmed_up()
