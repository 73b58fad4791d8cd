"""Convolutional nets for images, from a list of nodes: of well-known names, or listed in config.json.

One image a request. S the image's side, Y and X rows and columns of a map, C its channels, n outputs. Maps are
[Y, X, C]; a convolution's matrix has rows in the order (ky, kx, c).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hepti_mqtt.core.errors import ModelError
from hepti_mqtt.core.spec import TaskHead
from hepti_mqtt.models import pictures
from hepti_mqtt.models.cnn import hugging_face, lower, plain, timm, torchvision
from hepti_mqtt.models.cnn.builder import NodeBuilder
from hepti_mqtt.models.cnn.nodes import ACTIVATIONS, Activation, CnnSpec, Node, node_from_dict
from hepti_mqtt.models.config import JsonConfig

PICTURE_CLASSES: Final = {
    **{"resnet": "ConvNext", "convnext": "ConvNext"},
    **{"mobilenet_v2": "MobileNetV2", "efficientnet": "EfficientNet"},
}
LISTED: Final = "ConvNet"  # an architecture with its nodes in config.json
LISTED_CLASSIFIER: Final = "ConvNetForImageClassification"
ARCHITECTURES: Final = {
    **dict.fromkeys((*torchvision.ARCHITECTURES, *hugging_face.ARCHITECTURES), "image_classification"),
    LISTED_CLASSIFIER: "image_classification",
    LISTED: "feature_map",
}
SPEC: Final = CnnSpec
WEIGHT_DTYPES: Final = ("f32",)  # convolutions read no other matrices

tensors = lower.tensors
graph = lower.graph
reference = plain.reference
translated = timm.translated


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> CnnSpec:
    """Return the spec of a config.json; raises ModelError, UnsupportedModelError."""
    pre = pictures.Preprocessor(PICTURE_CLASSES.get(str(config.get("model_type", ""))), extras)
    frame = pre.crop(None if architecture in hugging_face.ARCHITECTURES else config.square("image_size"))
    mean, std = pre.pixel_scale()
    labels = () if architecture == LISTED else config.labels()
    try:
        nodes = _nodes(architecture, config, frame.size, len(labels))
    except ValueError as error:
        raise ModelError(
            f"config.json: pictures of {frame.size} x {frame.size} are too small for {architecture}: {error}"
        ) from error
    head = TaskHead("image_classification", "cls", outputs=len(labels), labels=labels)
    if not labels:
        head = TaskHead("feature_map", "cls")
    net = CnnSpec("cnn", architecture, frame.size, frame.shortest, mean, std, nodes, head, frame.square)
    if labels and net.shapes[nodes[-1].name] != (1, len(labels)):
        dims = list(net.shapes[nodes[-1].name])
        raise ModelError(f"config.json: the last node gives {dims}, and there are {len(labels)} labels in id2label")
    if nodes[-1].name in net.flattened:
        raise ModelError(
            f"the last node {nodes[-1].name!r} is a flattened map with channels last here and first in a "
            "checkpoint; leave out the flattening: then the map is the answer"
        )
    return net


def _nodes(architecture: str, config: JsonConfig, size: int, labels: int) -> tuple[Node, ...]:
    if architecture in (LISTED, LISTED_CLASSIFIER):
        return _listed(config)
    stack = NodeBuilder(size)
    if architecture in torchvision.ARCHITECTURES:
        torchvision.ARCHITECTURES[architecture](architecture, config, stack, labels)
    else:
        hugging_face.ARCHITECTURES[architecture](config, stack, labels)
    return tuple(stack.nodes)


def _listed(config: JsonConfig) -> tuple[Node, ...]:
    """Return the nodes that config.json lists."""
    listed = config.require("nodes")
    if not isinstance(listed, list) or not listed:
        raise config.bad_value("nodes", "a list of nodes", listed)
    nodes: list[Node] = []
    for place, data in enumerate(listed):
        try:
            node = node_from_dict(data)
        except (KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"config.json: node {place} of `nodes` is invalid ({error}): {data}") from error
        if isinstance(node, Activation) and node.function not in ACTIVATIONS:
            raise ModelError(f"config.json: function {node.function!r} is not supported; supported: {ACTIVATIONS}")
        nodes.append(node)
    return tuple(nodes)
