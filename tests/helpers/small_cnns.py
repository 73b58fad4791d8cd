"""Specs of small CNNs: nodes in a line, as config.json has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hepti_mqtt.core.spec import Spec
from hepti_mqtt.models import spec_from_config

Node = dict[str, Any]


def conv(size: int = 3, pad: int = 1, channels: int = 4, **more: Any) -> Node:
    """Return a convolution."""
    return {"op": "conv", "channels": channels, "kernel": [size, size], "pad": [pad] * 4, **more}


def pool(height: int, width: int, stride: int = 1) -> Node:
    """Return a pool of the largest values."""
    return {"op": "max_pool", "kernel": [height, width], "stride": [stride, stride]}


def dense(columns: int, **more: Any) -> Node:
    """Return a dense layer."""
    return {"op": "linear", "columns": columns, **more}


def relu(**more: Any) -> Node:
    """Return an activation."""
    return {"op": "activation", "function": "relu", **more}


def cnn(side: int, *nodes: Node, names: str = "n", columns: Sequence[int] = ()) -> Spec:
    """Return a net on pictures of side x side: each node reads the one before, where it does not say.

    names: how the nodes' names begin. columns: of dense layers after the nodes, before three classes.
    """
    hidden = [n for i, k in enumerate(columns) for n in (dense(k, name=f"fc{i}.sum"), relu(name=f"fc{i}"))]
    last, operations = "image", []
    for number, node in enumerate((*nodes, {"op": "flatten"}, *hidden, dense(3))):
        name = node.get("name", f"{names}{number}")
        kept = {"weight": f"{name}.w", "bias": f"{name}.b"} if node["op"] in ("conv", "linear") else {}
        operations.append({"name": name, "inputs": [last], **kept, **node})
        last = name
    config = {
        "architectures": ["ConvNetForImageClassification"],
        "model_type": "convnet",
        "image_size": side,
        "nodes": operations,
        "id2label": {"0": "a", "1": "b", "2": "c"},
    }
    pictures = {"size": side, "resample": 2, "image_mean": 0.5, "image_std": 0.25}
    return spec_from_config(config, {"preprocessor_config.json": pictures})
