"""The spec of a convolutional net: the picture that it reads, its nodes, and its task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from typing import Any

from hepti_mqtt.errors import ModelError
from hepti_mqtt.models.cnn.nodes import IMAGE, Activation, Add, Dims, Flatten, Linear, Node, node_from_dict, shapes
from hepti_mqtt.models.reads import Pictures
from hepti_mqtt.spec import RequestShape, TaskHead


@dataclass(frozen=True)
class CnnSpec:
    """One picture a run, S x S after the preprocessor; the last node is the answer.

    shortest: S x S is the middle of a picture whose shorter side was made so long; 0: it is all of it. mean, std: of
    pixels from 0 to 1, per channel.
    """

    family: str
    architecture: str
    size: int
    shortest: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    nodes: tuple[Node, ...]
    head: TaskHead

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.architecture, self.size, self.shortest, self.mean, self.std, self.nodes, self.head))

    @property
    def reads(self) -> Pictures:
        """Return what a request brings: pictures."""
        return Pictures(self.size, 3, shortest=self.shortest)

    @cached_property
    def shapes(self) -> Mapping[str, Dims]:
        """Return the shape of every tensor."""
        return shapes(self.nodes, (self.size, self.size, 3))

    @cached_property
    def flattened(self) -> Mapping[str, Dims]:
        """Return the map [C, Y, X] that each row was flattened from, as a checkpoint has it; of others nothing.

        Raises ModelError for a sum of rows whose numbers stand in different orders.
        """
        found: dict[str, Dims] = {}
        for node in self.nodes:
            source = self.shapes[node.inputs[0]]
            if isinstance(node, Flatten) and len(source) == 3:
                y, x, c = source
                if c > 1 and y * x > 1:  # with either of them 1 channels come first and last alike
                    found[node.name] = (c, y, x)
            elif isinstance(node, Flatten | Activation | Add):
                orders = {found.get(name, ()) for name in node.inputs}
                if len(orders) > 1:
                    raise ModelError(
                        f"node {node.name!r} adds rows in different orders: a flattened map has its channels last "
                        "here and first in a checkpoint; flatten behind the sum"
                    )
                found.update((node.name, order) for order in orders if order)
        return found

    @cached_property
    def hidden(self) -> str:
        """Return the tensor that is the hidden state: what the last node reads if that is dense, else its result.

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
        plain = {name: getattr(self, name) for name in ("family", "architecture", "size", "shortest", "mean", "std")}
        return {**plain, "nodes": [node.to_dict() for node in self.nodes], "head": asdict(self.head)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CnnSpec:
        """Return the spec that `to_dict` described; raises KeyError, TypeError or ValueError on other data."""
        head = dict(data["head"])
        made = {
            "mean": tuple(data["mean"]),
            "std": tuple(data["std"]),
            "nodes": tuple(node_from_dict(node) for node in data["nodes"]),
            "head": TaskHead(**{**head, "labels": tuple(head["labels"])}),
        }
        return cls(**{**data, **made})

    def readers(self, name: str) -> Sequence[Node]:
        """Return the nodes that read a tensor."""
        return self._readers.get(name, ())

    @cached_property
    def _readers(self) -> Mapping[str, list[Node]]:
        found: dict[str, list[Node]] = {IMAGE: []}
        for node in self.nodes:
            for x in dict.fromkeys(node.inputs):
                found.setdefault(x, []).append(node)
        return found
