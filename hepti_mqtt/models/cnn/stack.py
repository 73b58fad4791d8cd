"""Writes nodes one behind the other, as architectures are described: every method adds to what was added last."""

from __future__ import annotations

from hepti_mqtt.models.cnn import nodes
from hepti_mqtt.models.cnn.nodes import IMAGE, Dims, Node, Pad
from hepti_mqtt.models.tensors import BatchNorm


class Stack:
    """Nodes in the making; at: the tensor that the next one reads.

    Convolutions and dense layers are called as a checkpoint calls them: `name`.weight, `name`.bias.
    """

    def __init__(self, size: int) -> None:
        self.nodes: list[Node] = []
        self.at = IMAGE
        self._shapes: dict[str, Dims] = {IMAGE: (size, size, 3)}

    @property
    def dims(self) -> Dims:
        """Return the shape of what was added last."""
        return self._shapes[self.at]

    def shape_of(self, name: str) -> Dims:
        """Return the shape of a tensor."""
        return self._shapes[name]

    @property
    def side(self) -> int:
        """Return the rows of the map that was added last."""
        return self.dims[0]

    def put(self, node: Node) -> str:
        """Add a node; return its name."""
        self.nodes.append(node)
        self._shapes[node.name] = node.shape(*(self._shapes[x] for x in node.inputs))
        self.at = node.name
        return self.at

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
    ) -> str:
        """Add a convolution: with a bias of its own, unless a norm is behind it; then an activation."""
        self.put(
            nodes.Conv(
                name=name, inputs=(self.at,), kernel=(kernel, kernel), stride=(stride, stride),
                pad=pad if isinstance(pad, tuple) else (pad, pad, pad, pad), dilation=(dilation, dilation),
                channels=channels, groups=groups, weight=f"{name}.weight", bias="" if norm else f"{name}.bias",
                norm=norm,
            )
        )  # fmt: skip
        return self.activation(function)

    def activation(self, function: str) -> str:
        """Add an activation, if there is one."""
        if function:
            self.put(nodes.Activation(name=f"{self.at}.{function}", inputs=(self.at,), function=function))
        return self.at

    def max_pool(self, name: str, kernel: int, stride: int, pad: int = 0) -> str:
        """Add the largest values under a window."""
        return self.put(
            nodes.MaxPool(
                name=name, inputs=(self.at,), kernel=(kernel, kernel), stride=(stride, stride), pad=(pad,) * 4
            )
        )  # fmt: skip

    def add(self, name: str, other: str, function: str = "") -> str:
        """Add another tensor to it; then an activation."""
        self.put(nodes.Add(name=name, inputs=(other, self.at)))
        return self.activation(function)

    def classifier(self, name: str, labels: int) -> str:
        """Add the mean over the map, and a dense layer."""
        self.put(nodes.GlobalAverage(name="pooled", inputs=(self.at,)))
        return self.linear(name, labels)

    def linear(self, name: str, columns: int, function: str = "") -> str:
        """Add a dense layer; then an activation."""
        self.put(
            nodes.Linear(
                name=name, inputs=(self.at,), columns=columns, weight=f"{name}.weight", bias=f"{name}.bias"
            )
        )  # fmt: skip
        return self.activation(function)
