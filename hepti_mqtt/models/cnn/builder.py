"""Writes nodes one after the other, as papers describe architectures: each method reads the last node."""

from __future__ import annotations

from collections.abc import Sequence

from hepti_mqtt.models.cnn import nodes
from hepti_mqtt.models.cnn.nodes import IMAGE, Dims, Node, Pad
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.tensors import BatchNorm


class NodeBuilder:
    """Nodes in the making; current: the tensor that the next one reads.

    Convolutions and dense layers are called as a checkpoint calls them: `name`.weight, `name`.bias.
    """

    def __init__(self, size: int) -> None:
        self.nodes: list[Node] = []
        self.current = IMAGE
        self._shapes: dict[str, Dims] = {IMAGE: (size, size, 3)}

    @property
    def dims(self) -> Dims:
        """Return the shape of the last added tensor."""
        return self._shapes[self.current]

    def shape_of(self, name: str) -> Dims:
        """Return the shape of a tensor."""
        return self._shapes[name]

    @property
    def side(self) -> int:
        """Return the rows of the map that was added last."""
        return self.dims[0]

    def add_node(self, node: Node) -> str:
        """Add a node; return its name."""
        self.nodes.append(node)
        self._shapes[node.name] = node.shape(*(self._shapes[x] for x in node.inputs))
        self.current = node.name
        return self.current

    def conv(
        self,
        name: str,
        channels: int,
        kernel: int,
        stride: int = 1,
        pad: int | Pad = 0,
        *,
        norm: BatchNorm | None = None,
        groups: int = 1,
        dilation: int = 1,
        function: str = "",
        dense: bool = False,
    ) -> str:
        """Add a convolution: with a bias of its own, unless a norm follows; then an activation.

        dense: it is stored as a dense layer.
        """
        self.add_node(
            nodes.Conv(
                name=name, inputs=(self.current,), kernel=(kernel, kernel), stride=(stride, stride),
                pad=pad if isinstance(pad, tuple) else (pad, pad, pad, pad), dilation=(dilation, dilation),
                channels=channels, groups=groups, weight=f"{name}.weight",
                bias="" if norm and norm.bias else f"{name}.bias", norm=norm, stored_dense=dense,
            )
        )  # fmt: skip
        return self.activation(function)

    def activation(self, function: str) -> str:
        """Add an activation, if there is one."""
        if function:
            self.add_node(
                nodes.Activation(name=f"{self.current}.{function}", inputs=(self.current,), function=function)
            )
        return self.current

    def layer_norm(self, name: str, eps: float) -> str:
        """Add the norm of each pixel, or of a row."""
        return self.add_node(
            nodes.LayerNorm(
                name=f"{name}.norm", inputs=(self.current,), weight=f"{name}.weight", bias=f"{name}.bias", eps=eps
            )
        )  # fmt: skip

    def squeeze(self, names: tuple[str, str], columns: int, function: str, gate: str) -> str:
        """Scale a map by its means after two dense layers, to `columns` and back; they are stored as convolutions."""
        x, channels = self.current, self.dims[2]
        self.add_node(nodes.GlobalAverage(name=f"{names[0]}.mean", inputs=(x,)))
        for name, n in zip(names, (columns, channels), strict=True):
            self.linear(name, n, function if name == names[0] else "", stored_conv=True)
        return self.add_node(nodes.Scale(name=f"{names[1]}.scaled", inputs=(self.current, x), function=gate))

    def max_pool(self, name: str, kernel: int, stride: int, pad: int = 0) -> str:
        """Add the largest values under a window."""
        return self.add_node(
            nodes.MaxPool(
                name=name, inputs=(self.current,), kernel=(kernel, kernel), stride=(stride, stride), pad=(pad,) * 4
            )
        )  # fmt: skip

    def add(self, name: str, other: str, function: str = "") -> str:
        """Add another tensor to it; then an activation."""
        self.add_node(nodes.Add(name=name, inputs=(other, self.current)))
        return self.activation(function)

    def classifier(self, name: str, labels: int) -> str:
        """Add the mean over the map, and a dense layer."""
        self.add_node(nodes.GlobalAverage(name="pooled", inputs=(self.current,)))
        return self.linear(name, labels)

    def linear(self, name: str, columns: int, function: str = "", stored_conv: bool = False) -> str:
        """Add a dense layer; then an activation."""
        self.add_node(
            nodes.Linear(
                name=name, inputs=(self.current,), columns=columns, weight=f"{name}.weight", bias=f"{name}.bias",
                stored_conv=stored_conv,
            )
        )  # fmt: skip
        return self.activation(function)


def round_channels(channels: float, by: int = 8, least: int = 8) -> int:
    """Return channels as a multiple, no less than nine tenths of the request."""
    whole = max(least, int(channels + by / 2) // by * by)
    return whole + by if whole < 0.9 * channels else whole


def stages(config: JsonConfig, *usual: tuple[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return lists of integers of one length, one for each stage; usual: the keys with their defaults."""
    columns = [tuple(integers(config, key, values, 1)) for key, values in usual]
    for (key, _), values in zip(usual, columns, strict=True):
        if not values or len(values) != len(columns[0]):
            raise config.bad_value(key, f"{len(columns[0])} integers, one for each of {usual[0][0]}", list(values))
    return columns


def integers(config: JsonConfig, key: str, usual: tuple[int, ...], least: int) -> Sequence[int]:
    """Return a list of integers >= least."""
    values = config.get(key, list(usual))
    if not isinstance(values, list) or not all(type(n) is int and n >= least for n in values):
        raise config.bad_value(key, f"a list of integers >= {least}", values)
    return values
