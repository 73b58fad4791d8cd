"""The order of the products around attention: a graph in which no keys and no values are computed.

((x_p Wq) Wk.T) x.T in place of (x_p Wq) (x Wk).T, and (A x) Wv in place of A (x Wv), as Voltage (Hu and Li, 2024) has
it. Which multiplies less depends on how many rows of all each device has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.ops import Attention, Linear, Op, ReorderedAttention
from hepti_mqtt.lowering.regions import Set, count
from hepti_mqtt.plan import Storage

Rewrite = Callable[[Graph], Graph]


# What a multiplication takes in the other order, where one as it is takes 1: measured (docs/methods/voltage.md).
DEARER: Final = 1.25


def product_order(graph: Graph, order: str, rows: Sequence[Set], storage: Storage) -> Rewrite:
    """Return what makes a request's graph, given as families state it, the one that is computed.

    order: `kept`, `reordered`, or `cost` for the one that takes the busiest device less. rows: of each device. storage:
    of the weights; the other order reads them in f32 alone, so `cost` leaves narrow ones in theirs.
    """
    if storage == "f32" and (order == "reordered" or (order == "cost" and saves(graph, rows))):
        return reordered
    return lambda graph: graph


def reordered(graph: Graph) -> Graph:
    """Return the graph with attention over x itself: as many tensors, of the same names and roles.

    What is causal, and keys and values that others read too, stay as they are.
    """
    new: dict[str, Op] = {}
    for linear, attention in _products(graph):
        n = len(linear.widths)
        new[linear.name] = _queries(linear).renamed(
            name=linear.name,
            inputs=linear.inputs,
            role=linear.role,
            layer=linear.layer,
            branch=linear.branch,
            index=linear.index,
            tensors=linear.tensors[::n],
        )
        new[attention.name] = _over_x(linear, attention).renamed(
            name=attention.name,
            inputs=(linear.name, *linear.inputs),
            role=attention.role,
            layer=attention.layer,
            branch=attention.branch,
            index=attention.index,
            tensors=tuple(tensor for i, tensor in enumerate(linear.tensors) if i % n),
        )
    return Graph(tuple(new.get(op.name, op) for op in graph.ops), graph.blocks, graph.skipped)


def saves(graph: Graph, rows: Sequence[Set]) -> bool:
    """Return whether the other order takes the busiest device less, by its multiplications; rows: of each device."""
    products = tuple(_products(graph))
    counts = [[multiplications(*pair, r) for pair in products] for r in rows]
    usual, other = (max(sum(found[order] for found in of_device) for of_device in counts) for order in (0, 1))
    return DEARER * other < usual


def multiplications(linear: Linear, attention: Attention, rows: Set) -> tuple[int, int]:
    """Return what a device with these rows multiplies for keys, values and attention: as it is, and in the other order.

    Those of queries are the same in both.
    """
    w, h, pairs = linear.space[2], attention.space[1], attention.pairs(rows)
    usual = w * h * count(attention.keys(rows)) + h * pairs
    return 2 * usual, 2 * (w * h * count(rows) + h // attention.d * w * pairs)


def _products(graph: Graph) -> Iterator[tuple[Linear, Attention]]:
    """Yield projections to queries, keys and values, all of one width, with the attention that alone reads them."""
    readers = Counter(name for op in graph.ops for name in op.inputs)
    for op in graph.ops:
        if type(op) is not Attention or op.causal or op.inputs[0] != op.inputs[1]:
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
    return replace(linear, name="", tensors=(), space=(m, h, w), widths=(h,)).settled()


@lru_cache(maxsize=64)
def _over_x(linear: Linear, attention: Attention) -> ReorderedAttention:
    return ReorderedAttention(
        name="",
        space=attention.space,
        d=attention.d,
        columns=(0, 0, 0),
        lengths=attention.lengths,
        width=linear.space[2],
        bias=linear.bias,
    ).settled()
