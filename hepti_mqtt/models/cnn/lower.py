"""A net's nodes as stored tensors, and as the graph of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from math import prod
from typing import Any, Final

from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.spec import RequestShape
from hepti_mqtt.lowering import ops as maps
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.graph import GraphBuilder
from hepti_mqtt.models.cnn import nodes
from hepti_mqtt.models.cnn.nodes import IMAGE, CnnSpec, Conv, Linear, Node
from hepti_mqtt.models.tensors import TensorSource, vector

_HEAVY: Final = (nodes.Window, nodes.GlobalAverage, nodes.Flatten, Linear)


def tensors(spec: CnnSpec) -> Iterator[TensorSource]:
    """Yield the stored tensors of every node, in their order."""
    for node in spec.nodes:
        if isinstance(node, Conv):
            yield from _conv_tensors(node, spec.shapes[node.inputs[0]][2])
        elif isinstance(node, Linear):
            yield from _linear_tensors(spec, node)
        elif isinstance(node, nodes.LayerNorm):
            for part, stored in (("weight", node.weight), ("bias", node.bias)):
                yield vector(f"{node.name}.{part}", (stored,), spec.shapes[node.name][-1])


def _conv_tensors(node: Conv, channels: int) -> Iterator[TensorSource]:
    here, n, c = f"{node.name}.weight", node.channels, channels // node.groups
    first = (c, *node.kernel)
    stored = (n, c) if node.stored_dense else (n, *first)
    yield TensorSource(
        here, (prod(first), n), (node.weight,), stored, True, "packed", channels_first=first, norm=node.norm
    )
    if node.norm is not None and node.norm.bias:
        name = f"{node.name}.bias"
        yield TensorSource(name, (n,), (node.norm.bias,), (n,), norm=node.norm, convolution_bias=node.bias)
    elif node.bias:
        yield TensorSource(f"{node.name}.bias", (n,), (node.bias,), (n,), norm=node.norm)


def _linear_tensors(spec: CnnSpec, node: Linear) -> Iterator[TensorSource]:
    k, n = spec.shapes[node.inputs[0]][1], node.columns
    first = spec.flattened.get(node.inputs[0], ())
    stored = (k, n) if node.stored_in_out else (n, k, 1, 1) if node.stored_conv else (n, k)
    turned = not node.stored_in_out
    yield TensorSource(f"{node.name}.weight", (k, n), (node.weight,), stored, turned, "packed", channels_first=first)
    if node.bias:
        yield TensorSource(f"{node.name}.bias", (n,), (node.bias,), (n,))


def graph(net: GraphBuilder, spec: CnnSpec, shape: RequestShape, _refs: Mapping[str, WeightRef]) -> None:
    """Add the graph of one picture: pixels u8 [1, 3, S, S] -> logits [1, n], or the pixels of a map [Y X, n]."""
    s = spec.size
    pixels = net.input("pixels", (1, 3, s, s), "u8")
    rows = net.opaque("rows", (pixels,), roles.STEM, "patchify", (s * s, 3), patch=1, mean=spec.mean, std=spec.std)
    net.add_op(maps.Reshape(name=IMAGE, inputs=(rows,), role=roles.STEM, space=(s, s, 3), rank=3, source=(s * s, 3)))
    last = spec.hidden if shape.want == "hidden" else spec.nodes[-1].name
    needed = _needed(spec, last)
    layer, adder = 0, _NodeLowering(net, spec, last)
    for node, begins in zip(needed, _begins(needed), strict=True):
        if begins:
            layer += 1
            net.set_layer(layer - 1)
            net.begin_block()
        adder.add(node)
    net.begin_block()
    if len(net.shape_of(last)) == 3:
        y, x, n = source = _map(net.shape_of(last))
        net.add_op(maps.MapAsRows(name="answer", inputs=(last,), role=roles.TASK, space=(y * x, n), source=source))
    elif shape.want == "hidden" or not isinstance(spec.nodes[-1], Linear):
        net.rows("answer", last, roles.TASK)


def _needed(spec: CnnSpec, last: str) -> list[Node]:
    """Return the nodes that a tensor is computed from, itself last."""
    wanted, needed = {last}, []
    for node in reversed(spec.nodes):
        if node.name in wanted:
            wanted.update(node.inputs)
            needed.append(node)
    return needed[::-1]


def _begins(needed: list[Node]) -> list[bool]:
    """Return the nodes that begin a layer: later nodes read a single earlier tensor, and real work begins."""
    read = {x: i for i, node in enumerate(needed) for x in node.inputs}  # the last reader of each tensor
    out, open_until, last = [], -1, IMAGE
    for i, node in enumerate(needed):
        alone = open_until < i and read[last] >= i
        out.append(alone and isinstance(node, _HEAVY))
        # Earlier tensors that this node or later ones read.
        open_until = max(open_until, read[last])
        last = node.name
    return out


def _squeezed(spec: CnnSpec) -> frozenset[str]:
    """Return the rows that scale maps, and the rows that they depend on."""
    rows: set[str] = set()
    for node in reversed(spec.nodes):
        if isinstance(node, nodes.Scale):
            rows.add(node.inputs[0])
        elif node.name in rows:
            rows.update(x for x in node.inputs if len(spec.shapes[x]) == 2)
    return frozenset(rows)


def _map(dims: tuple[int, ...]) -> tuple[int, int, int]:
    y, x, c = dims
    return y, x, c


class _NodeLowering:
    """Adds nodes to a graph; last: the answer."""

    def __init__(self, net: GraphBuilder, spec: CnnSpec, last: str) -> None:
        self.net, self.spec, self.last = net, spec, last
        self.order = {node.name: i for i, node in enumerate(spec.nodes)}
        self.squeezed = _squeezed(spec)

    def add(self, node: Node) -> None:
        """Add a node."""
        _ADDS[type(node)](self, node)

    def conv(self, node: Conv) -> None:
        tensors = (f"{node.name}.weight", f"{node.name}.bias")[: 1 + node.has_bias]
        what: dict[str, Any] = {"tensors": tensors, "groups": node.groups, "bias": node.has_bias}
        self.net.add_op(maps.Conv(**self.window(node), role=self.role(node), **what))

    def max_pool(self, node: nodes.MaxPool) -> None:
        self.net.add_op(maps.MaxPool(**self.window(node), role=roles.MAP))

    def average_pool(self, node: nodes.AveragePool) -> None:
        self.net.add_op(maps.AveragePool(**self.window(node), role=roles.MAP, count_pad=node.count_pad))

    def window(self, node: nodes.Window) -> dict[str, Any]:
        sides = {"kernel": node.kernel, "stride": node.stride, "pad": node.pad, "dilation": node.dilation}
        space, source = self.spec.shapes[node.name], self.spec.shapes[node.inputs[0]]
        return {"name": node.name, "inputs": node.inputs, "space": space, "source": source, **sides}

    def global_average(self, node: nodes.GlobalAverage) -> None:
        y, x, c = self.net.shape_of(node.inputs[0])
        what: dict[str, Any] = {"role": self.role(node), "space": (1, c, y, x)}
        self.net.add_op(maps.GlobalAverage(name=node.name, inputs=node.inputs, **what))

    def sum(self, node: nodes.Add) -> None:
        """Add a sum: the tensor that is computed later is the last input, so that its kernel adds the other."""
        first, second = sorted(node.inputs, key=lambda x: self.order.get(x, -1))
        self.net.sum(node.name, first, second, self.role(node))

    def scale(self, node: nodes.Scale) -> None:
        what: dict[str, Any] = {"role": self.role(node), "space": self.spec.shapes[node.name]}
        self.net.add_op(maps.ScaleMap(name=node.name, inputs=node.inputs, function=node.function, **what))

    def layer_norm(self, node: nodes.LayerNorm) -> None:
        space = self.spec.shapes[node.name]
        what: dict[str, Any] = {"role": self.role(node), "space": space, "rank": len(space)}
        tensors = (f"{node.name}.weight", f"{node.name}.bias")
        norm = maps.Norm(float(node.eps))
        self.net.add_op(maps.LayerNorm(name=node.name, inputs=node.inputs, tensors=tensors, norm=norm, **what))

    def concat(self, node: nodes.Concat) -> None:
        *starts, _ = accumulate((self.net.shape_of(x)[2] for x in node.inputs), initial=0)
        space = self.spec.shapes[node.name]
        what: dict[str, Any] = {"role": roles.MAP, "space": space, "starts": tuple(starts)}
        self.net.add_op(maps.Concat(name=node.name, inputs=node.inputs, rank=3, **what))

    def flatten(self, node: nodes.Flatten) -> None:
        source = self.net.shape_of(node.inputs[0])
        if len(source) == 2:
            self.net.rows(node.name, node.inputs[0], roles.FLAT)
            return
        what: dict[str, Any] = {"role": roles.FLAT, "space": self.spec.shapes[node.name], "source": source}
        self.net.add_op(maps.Flatten(name=node.name, inputs=node.inputs, **what))

    def linear(self, node: Linear) -> None:
        """Add a dense layer with its activation."""
        role = roles.TASK if node is self.spec.nodes[-1] else roles.DENSE
        role = roles.SQUEEZE if node.name in self.squeezed else role
        act = self.activation_of(node)
        name, function = (node.name, None) if act is None else (act.name, act.function)
        self.net.linear(name, node.inputs[0], role, {node.name: node.columns}, bool(node.bias), function)

    def activation(self, node: nodes.Activation) -> None:
        source = self.spec.nodes[self.order[node.inputs[0]]] if node.inputs[0] in self.order else None
        if isinstance(source, Linear) and self.activation_of(source) is node:
            return  # it is there already
        self.net.activation(node.name, node.inputs[0], self.role(node), node.function)

    def activation_of(self, node: Linear) -> nodes.Activation | None:
        """Return the activation that alone reads a dense layer."""
        readers = self.spec.readers(node.name)
        alone = len(readers) == 1 and node.name != self.last
        return readers[0] if alone and isinstance(readers[0], nodes.Activation) else None

    def role(self, node: Node) -> str:
        """Return the role of a map or row: what its only reader does in the same kernel has no place of its own."""
        if len(self.spec.shapes[node.name]) == 2:
            return roles.SQUEEZE if node.name in self.squeezed else roles.FLAT
        own = roles.MAP
        readers = self.spec.readers(node.name)
        if len(readers) == 1 and node.name != self.last:
            reader = readers[0]
            if isinstance(reader, nodes.Activation | nodes.LayerNorm):
                return roles.MAP_SUM
            if isinstance(node, nodes.Scale | nodes.LayerNorm) and _sees_once(reader):
                return roles.MAP_SUM
            if isinstance(node, Conv) and isinstance(reader, nodes.Add):
                return roles.MAP_SUM if max(reader.inputs, key=lambda x: self.order.get(x, -1)) == node.name else own
        return own


def _sees_once(reader: Node) -> bool:
    """Return whether each pixel of a node's result depends on one pixel of its input."""
    return isinstance(reader, Conv) and reader.kernel == reader.stride and not any(reader.pad)


_ADDS: Final[Mapping[type[Node], Callable[[_NodeLowering, Any], None]]] = {
    Conv: _NodeLowering.conv,
    nodes.MaxPool: _NodeLowering.max_pool,
    nodes.AveragePool: _NodeLowering.average_pool,
    nodes.GlobalAverage: _NodeLowering.global_average,
    nodes.Add: _NodeLowering.sum,
    nodes.Scale: _NodeLowering.scale,
    nodes.LayerNorm: _NodeLowering.layer_norm,
    nodes.Concat: _NodeLowering.concat,
    nodes.Flatten: _NodeLowering.flatten,
    Linear: _NodeLowering.linear,
    nodes.Activation: _NodeLowering.activation,
}
