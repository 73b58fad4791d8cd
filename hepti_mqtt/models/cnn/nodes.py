"""Nodes of a convolutional net, by names of the nodes that they read: plain data for JSON.

Maps are [Y, X, C] and rows [1, C]. `image` is the picture that every net begins with. Two numbers are rows and columns;
four of a pad are top, left, bottom, right. weight, bias: names of tensors in a checkpoint, none where empty.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Final

from hepti_mqtt.core.errors import ModelError
from hepti_mqtt.core.spec import RequestShape, TaskHead
from hepti_mqtt.models.shapes import ImageInput
from hepti_mqtt.models.tensors import BatchNorm

IMAGE: Final = "image"
_TAKEN: Final = (IMAGE, "pixels", "rows", "answer")  # names of tensors that every graph has around a net

Pair = tuple[int, int]
Pad = tuple[int, int, int, int]
Dims = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Node:
    """A tensor of a net, and its inputs."""

    name: str
    inputs: tuple[str, ...]

    op: ClassVar[str] = ""

    def shape(self, *sources: Dims) -> Dims:
        """Return the shape of the result; raises ValueError for sources of wrong shapes."""
        return sources[0]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"op": self.op, **{k: v for k, v in asdict(self).items() if v != _DEFAULTS[self.op].get(k, ...)}}


@dataclass(frozen=True, kw_only=True)
class Window(Node):
    """A window that moves over a map by `stride`, with places `dilation` apart."""

    kernel: Pair
    stride: Pair = (1, 1)
    pad: Pad = (0, 0, 0, 0)
    dilation: Pair = (1, 1)

    def sides(self, source: Dims) -> Pair:
        """Return rows and columns of the result."""
        if len(source) != 3:
            raise ValueError(f"it reads a map [Y, X, C], not {list(source)}")
        sizes = [(n - 1) * by + 1 for n, by in zip(self.kernel, self.dilation, strict=True)]
        if any(p >= size for p, size in zip(self.pad, sizes * 2, strict=True)):
            raise ValueError(f"pad {self.pad} is no smaller than the window of {sizes}: some of it would see nothing")
        top, left, bottom, right = self.pad
        padded = (source[0] + top + bottom, source[1] + left + right)
        if any(size > side for size, side in zip(sizes, padded, strict=True)):
            raise ValueError(f"its window of {sizes} is larger than the padded map of {list(padded)}")
        y, x = ((side - size) // by + 1 for side, size, by in zip(padded, sizes, self.stride, strict=True))
        return y, x


@dataclass(frozen=True, kw_only=True)
class Conv(Window):
    """Convolution to `channels` channels, in groups with input channels of their own; norm: a batch norm after it.

    stored_dense: of one pixel, stored [n, C] as a dense layer is.
    """

    channels: int
    weight: str
    bias: str = ""
    groups: int = 1
    norm: BatchNorm | None = None
    stored_dense: bool = False

    op = "conv"

    def shape(self, *sources: Dims) -> Dims:
        (source,) = sources
        sides = self.sides(source)
        if source[2] % self.groups or self.channels % self.groups:
            raise ValueError(f"{self.groups} groups do not divide {source[2]} channels into {self.channels}")
        if self.stored_dense and (self.kernel != (1, 1) or self.groups != 1):
            raise ValueError("a convolution stored as a dense layer must have a window of 1 x 1 and one group")
        return (*sides, self.channels)

    @property
    def has_bias(self) -> bool:
        """Return whether it or its norm adds a bias."""
        return bool(self.bias) or (self.norm is not None and self.norm.bias != "")


@dataclass(frozen=True, kw_only=True)
class MaxPool(Window):
    """The largest value under the window."""

    op = "max_pool"

    def shape(self, *sources: Dims) -> Dims:
        return (*self.sides(sources[0]), sources[0][2])


@dataclass(frozen=True, kw_only=True)
class AveragePool(MaxPool):
    """The mean under the window; count_pad: cells beyond the map count as zeros."""

    count_pad: bool = False

    op = "average_pool"


@dataclass(frozen=True, kw_only=True)
class GlobalAverage(Node):
    """The mean of each channel over all of a map: [1, C]."""

    op = "global_average"

    def shape(self, *sources: Dims) -> Dims:
        if len(sources[0]) != 3:
            raise ValueError(f"it reads a map [Y, X, C], not {list(sources[0])}")
        return 1, sources[0][2]


@dataclass(frozen=True, kw_only=True)
class Add(Node):
    """The sum of two tensors of one shape."""

    op = "add"

    def shape(self, *sources: Dims) -> Dims:
        if len(sources) != 2 or sources[0] != sources[1]:
            raise ValueError(f"it adds two tensors of one shape, not {' and '.join(str(list(s)) for s in sources)}")
        return sources[0]


@dataclass(frozen=True, kw_only=True)
class Scale(Node):
    """A map times function(row), channel by channel; inputs: the row [1, C], the map."""

    function: str

    op = "scale"

    def shape(self, *sources: Dims) -> Dims:
        if len(sources) != 2 or len(sources[1]) != 3 or sources[0] != (1, sources[1][2]):
            raise ValueError(f"it reads a row [1, C] and a map [Y, X, C], not {' and '.join(map(str, sources))}")
        if self.function not in GATES:
            raise ValueError(f"function {self.function!r} is not supported; supported: {GATES}")
        return sources[1]


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Node):
    """The layer norm of each pixel, or of a row, over its channels."""

    weight: str
    bias: str
    eps: float

    op = "layer_norm"


@dataclass(frozen=True, kw_only=True)
class Concat(Node):
    """Maps joined along their channels."""

    op = "concat"

    def shape(self, *sources: Dims) -> Dims:
        if len({s[:2] for s in sources}) != 1 or any(len(s) != 3 for s in sources):
            raise ValueError(f"it joins maps of one size, not {' and '.join(str(list(s)) for s in sources)}")
        return (*sources[0][:2], sum(s[2] for s in sources))


@dataclass(frozen=True, kw_only=True)
class Flatten(Node):
    """A map as one row."""

    op = "flatten"

    def shape(self, *sources: Dims) -> Dims:
        return 1, prod(sources[0])


@dataclass(frozen=True, kw_only=True)
class Linear(Node):
    """A dense layer [1, k] -> [1, n]; stored [n, k], or [k, n] where `stored_in_out`.

    stored_conv: stored [n, k, 1, 1], as a convolution is. What was flattened has its channels first in a checkpoint,
    and last here.
    """

    columns: int
    weight: str
    bias: str = ""
    stored_in_out: bool = False
    stored_conv: bool = False

    op = "linear"

    def shape(self, *sources: Dims) -> Dims:
        if len(sources[0]) != 2:
            raise ValueError(f"it reads a row [1, k], not {list(sources[0])}; flatten the map before it")
        return 1, self.columns


@dataclass(frozen=True, kw_only=True)
class Activation(Node):
    """An elementwise function, one of `ACTIVATIONS`; leaky_relu has a slope of 0.1."""

    function: str

    op = "activation"


ACTIVATIONS: Final = ("relu", "relu6", "leaky_relu", "gelu", "gelu_tanh", "silu", "hard_swish")
GATES: Final = ("sigmoid", "hard_sigmoid")  # functions of the row that a map is scaled by
_NODES: Final = (
    *(Conv, MaxPool, AveragePool, GlobalAverage, Add, Scale, LayerNorm, Concat, Flatten, Linear, Activation),
)
NODE_TYPES: Final[Mapping[str, type[Node]]] = {kind.op: kind for kind in _NODES}
_DEFAULTS: Final = {
    op: {name: f.default for name, f in kind.__dataclass_fields__.items()} for op, kind in NODE_TYPES.items()
}


def node_from_dict(data: Mapping[str, Any]) -> Node:
    """Return the node that `to_dict` described; raises KeyError, TypeError or ValueError on other data."""
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k != "op"}
    if isinstance(given.get("norm"), Mapping):
        given["norm"] = BatchNorm(**given["norm"])
    return NODE_TYPES[data["op"]](**given)


def _check(node: Node) -> None:
    """Raise ValueError for a field of a wrong type or value."""
    for field in fields(node):
        what, good = _FIELDS[str(field.type)]
        value = getattr(node, field.name)
        if not good(value):
            raise ValueError(f"{field.name!r} must be {what}, got {value!r}")


def _integers(value: Any, count: int, least: int) -> bool:
    return isinstance(value, tuple) and len(value) == count and all(type(v) is int and v >= least for v in value)


def _norm(value: Any) -> bool:
    named = isinstance(value, BatchNorm) and all(
        isinstance(name, str) for name in (value.weight, value.bias, value.mean, value.variance)
    )
    return value is None or (named and isinstance(value.eps, int | float) and 0 <= value.eps <= sys.float_info.max)


_FIELDS: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "str": ("a string", lambda v: isinstance(v, str)),
    "tuple[str, ...]": ("a list of names", lambda v: isinstance(v, tuple) and all(isinstance(x, str) for x in v)),
    "float": ("a number > 0", lambda v: type(v) in (int, float) and 0 < v <= sys.float_info.max),
    "int": ("an integer >= 1", lambda v: _integers((v,), 1, 1)),
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "Pair": ("two integers >= 1", lambda v: _integers(v, 2, 1)),
    "Pad": ("four integers >= 0", lambda v: _integers(v, 4, 0)),
    "BatchNorm | None": ("a batch norm's names and eps", _norm),
}


def extend_shapes(nodes: Iterable[Node], before: Mapping[str, Dims]) -> dict[str, Dims]:
    """Return earlier shapes and those of further nodes; raises ModelError naming a node that does not fit."""
    shapes = dict(before)
    for node in nodes:
        try:
            _check(node)
            if node.name in shapes or node.name in _TAKEN:
                raise ValueError("its name is taken; give it another one")
            shapes[node.name] = node.shape(*(shapes[x] for x in node.inputs))
        except KeyError as error:
            raise ModelError(f"node {node.name!r} reads {error}, which no node before it computes") from error
        except (ValueError, IndexError) as error:
            raise ModelError(f"node {node.name!r} ({node.op}) cannot be computed: {error}") from error
    return shapes


# ----------------------------------------------------------------------------------------------------------------------
# The spec of a convolutional net: the picture that it reads, its nodes, and its task.


@dataclass(frozen=True)
class CnnSpec:
    """One picture a run, S x S after the preprocessor; the last node is the answer.

    shortest: pixels of the resized shorter side before the centre crop; 0: the whole picture. square: the longer side
    too. mean, std: of pixels from 0 to 1, per channel.
    """

    family: str
    architecture: str
    size: int
    shortest: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    nodes: tuple[Node, ...]
    head: TaskHead
    square: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.architecture, self.size, self.shortest, self.mean, self.std, self.nodes, self.head))

    @property
    def input_spec(self) -> ImageInput:
        """Return the description of a request's input: pictures."""
        return ImageInput(self.size, 3, shortest=self.shortest, square=self.square)

    @cached_property
    def shapes(self) -> Mapping[str, Dims]:
        """Return the shape of every tensor."""
        return extend_shapes(self.nodes, {IMAGE: (self.size, self.size, 3)})

    @cached_property
    def flattened(self) -> Mapping[str, Dims]:
        """Return the map [C, Y, X] that each row was flattened from, as a checkpoint has it; of others nothing.

        Raises ModelError for a sum of rows in different orders.
        """
        orders_of: dict[str, Dims] = {}
        for node in self.nodes:
            source = self.shapes[node.inputs[0]]
            if isinstance(node, Flatten) and len(source) == 3:
                y, x, c = source
                if c > 1 and y * x > 1:  # with either of them 1 channels come first and last alike
                    orders_of[node.name] = (c, y, x)
            elif isinstance(node, Flatten | Activation | Add | LayerNorm):
                orders = {orders_of.get(name, ()) for name in node.inputs}
                if len(orders) > 1:
                    raise ModelError(
                        f"node {node.name!r} adds rows in different orders: a flattened map has its channels last "
                        "here and first in a checkpoint; flatten after the sum"
                    )
                orders_of.update((node.name, order) for order in orders if order)
        return orders_of

    @cached_property
    def hidden(self) -> str:
        """Return the tensor that is the hidden state: the input of the last node if it is dense, else its result.

        Of a flattened map it is the map: a row of it would have another order than in a checkpoint.
        """
        last = self.nodes[-1]
        name = last.inputs[0] if isinstance(last, Linear) else last.name
        made_by = {node.name: node for node in self.nodes}
        while name in self.flattened and isinstance(made_by[name], Flatten):
            name = made_by[name].inputs[0]
        return name

    def output_shape(self, shape: RequestShape) -> tuple[int, int]:
        """Return the shape of the answer: for each picture a row of logits, or the pixels of a map as rows."""
        *rows, columns = self.shapes[self.hidden if shape.want == "hidden" else self.nodes[-1].name]
        return len(shape.sizes) * prod(rows), columns

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for msgpack or JSON; `from_dict` is the inverse."""
        names = ("family", "architecture", "size", "shortest", "square", "mean", "std")
        plain = {name: getattr(self, name) for name in names}
        return {**plain, "nodes": [node.to_dict() for node in self.nodes], "head": self.head.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CnnSpec:
        """Return the spec that `to_dict` described; raises KeyError, TypeError or ValueError on other data."""
        parsed = {
            "mean": tuple(data["mean"]),
            "std": tuple(data["std"]),
            "nodes": tuple(node_from_dict(node) for node in data["nodes"]),
            "head": TaskHead.from_dict(data["head"]),
        }
        return cls(**{**data, **parsed})

    def readers(self, name: str) -> Sequence[Node]:
        """Return the nodes that read a tensor."""
        return self._readers.get(name, ())

    @cached_property
    def _readers(self) -> Mapping[str, list[Node]]:
        readers: dict[str, list[Node]] = {IMAGE: []}
        for node in self.nodes:
            for x in dict.fromkeys(node.inputs):
                readers.setdefault(x, []).append(node)
        return readers
