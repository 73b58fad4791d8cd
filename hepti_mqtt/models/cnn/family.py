"""Seeded convolutional nets: the real ones, and tiny ones of every sort for tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from hepti_mqtt.errors import ModelError
from hepti_mqtt.lowering import GraphBuilder
from hepti_mqtt.models import pictures
from hepti_mqtt.models.cnn import hugging_face, lower, nodes, plain, torchvision
from hepti_mqtt.models.cnn.nodes import ACTIVATIONS, Activation, CnnSpec, Node, node_from_dict
from hepti_mqtt.models.cnn.torchvision import NodeBuilder
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.kinds import Kind, make_kind
from hepti_mqtt.models.pictures import FILE, IMAGENET_MEAN, IMAGENET_STD
from hepti_mqtt.models.tensors import TensorSource
from hepti_mqtt.program import WeightRef
from hepti_mqtt.spec import RequestShape, TaskHead


def _kind(architecture: str, model_type: str, size: int, labels: int, **more: Any) -> Kind:
    made = make_kind(architecture, model_type, labels=labels, image_size=size, **more)
    part = {"crop_pct": 0.875, "image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": size}}
    extras: dict[str, Any] = {
        "crop_size": {"height": size, "width": size},
        "do_center_crop": True,
        "image_mean": list(IMAGENET_MEAN),
        "image_std": list(IMAGENET_STD),
        "resample": 2,
        "size": {"shortest_edge": round(size * 256 / 224)},
    }
    if model_type == "resnet":  # the class of its pictures crops by a part
        extras = {**{k: v for k, v in extras.items() if "crop" not in k}, **part}
    return replace(made, extras={FILE: extras})


def _plain(stack: NodeBuilder) -> list[dict[str, Any]]:
    return [node.to_dict() for node in stack.nodes]


def _convnet() -> list[dict[str, Any]]:
    """Return a small net with a residual and two dense layers."""
    stack = NodeBuilder(17)
    stack.conv("conv1", 4, 3, pad=1, function="relu")
    x = stack.max_pool("pooled", 3, 2, 1)
    stack.conv("conv2", 6, 3, 2, 1, function="relu")
    y = stack.conv("conv3", 6, 3, pad=1)
    stack.current = x
    shortcut = stack.conv("shortcut", 6, 1, 2)
    stack.current = y
    stack.add("total", shortcut, "relu")
    stack.add_node(nodes.Flatten(name="flat", inputs=(stack.current,)))
    stack.linear("dense", 24, "relu")
    stack.linear("classifier", 5)
    return _plain(stack)


def _yolo() -> list[dict[str, Any]]:
    """Return a stack as Redmon and Farhadi's YOLOv2 of 2017, tiny: its last map is the answer."""
    stack = NodeBuilder(40)
    for i, n in enumerate((4, 8, 12)):
        stack.conv(f"conv{i}", n, 3, pad=1, function="leaky_relu")
        stack.max_pool(f"pool{i}", 2, 2)
    early = stack.current
    stack.conv("conv3", 10, 3, pad=1, function="leaky_relu")
    stack.add_node(nodes.Concat(name="both", inputs=(early, stack.current)))
    stack.conv("detect", 14, 1)
    return _plain(stack)


_IMAGENET: Final = {"size": 224, "labels": 1000}
_BLOCKS: Final = {"depths": [1, 2, 1, 1]}

KINDS: Final[Mapping[str, Kind]] = {
    "vgg16": _kind("vgg16", "torchvision", **_IMAGENET),
    "resnet18": _kind("resnet18", "torchvision", **_IMAGENET),
    "resnet50": _kind("resnet50", "torchvision", **_IMAGENET),
    "mobilenet-v2": _kind("mobilenet_v2", "torchvision", **_IMAGENET),
    "tiny-vgg": _kind("vgg11", "torchvision", 64, 7, width=4, dense_size=24, pooled_size=2),
    "tiny-resnet": _kind("resnet18", "torchvision", 61, 7, width=4, **_BLOCKS),
    "tiny-resnet-bottleneck": _kind("resnet50", "torchvision", 61, 7, width=4, **_BLOCKS),
    "tiny-mobilenet": _kind("mobilenet_v2", "torchvision", 64, 7, width_mult=0.2, last_channel=40),
    "tiny-convnet": _kind("ConvNetForImageClassification", "convnet", 17, 5, nodes=_convnet()),
    "tiny-yolo": _kind("ConvNet", "convnet", 40, 0, nodes=_yolo()),
    "tiny-hf-resnet": _kind(
        "ResNetForImageClassification", "resnet", 61, 7, layer_type="bottleneck", embedding_size=8, num_channels=3,
        hidden_sizes=[16, 32, 48], depths=[1, 2, 1], hidden_act="relu", downsample_in_first_stage=False,
    ),
    "tiny-hf-mobilenet": _kind(
        "MobileNetV2ForImageClassification", "mobilenet_v2", 61, 7, depth_multiplier=0.25, layer_norm_eps=0.001,
        num_channels=3, hidden_act="relu6", tf_padding=True, finegrained_output=False, expand_ratio=3.0,
    ),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Convolutional nets for images, from a list of nodes: VGG, ResNet, MobileNetV2, and whatever config.json lists.
#
# One image a request. S the image's side, Y and X rows and columns of a map, C its channels, n outputs. Maps are
# [Y, X, C]; a convolution's matrix has rows in the order (ky, kx, c).


__all__ = ["ARCHITECTURES", "KINDS", "PICTURE_CLASSES", "SPEC", "STORAGES", "graph", "reference", "spec", "tensors"]

PICTURE_CLASSES: Final = {"resnet": "ConvNext", "mobilenet_v2": "MobileNetV2"}
LISTED: Final = "ConvNet"  # its nodes stand in config.json
LISTED_CLASSIFIER: Final = "ConvNetForImageClassification"
ARCHITECTURES: Final = {
    **dict.fromkeys((*torchvision.ARCHITECTURES, *hugging_face.ARCHITECTURES), "image_classification"),
    LISTED_CLASSIFIER: "image_classification",
    LISTED: "feature_map",
}
SPEC: Final = CnnSpec
STORAGES: Final = ("f32",)  # convolutions read no other matrices

reference = plain.reference


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
    made = CnnSpec("cnn", architecture, frame.size, frame.shortest, mean, std, nodes, head, frame.square)
    if labels and made.shapes[nodes[-1].name] != (1, len(labels)):
        found = list(made.shapes[nodes[-1].name])
        raise ModelError(f"config.json: the last node gives {found}, and there are {len(labels)} labels in id2label")
    if nodes[-1].name in made.flattened:
        raise ModelError(
            f"the last node {nodes[-1].name!r} is a flattened map, whose channels come last here and first in a "
            "checkpoint; leave out the flattening: then the map is the answer"
        )
    return made


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
    found = []
    for place, data in enumerate(listed):
        try:
            node = node_from_dict(data)
        except (KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"config.json: node {place} of `nodes` is invalid ({error}): {data}") from error
        if isinstance(node, Activation) and node.function not in ACTIVATIONS:
            raise ModelError(f"config.json: function {node.function!r} is not supported; supported: {ACTIVATIONS}")
        found.append(node)
    return tuple(found)


def tensors(spec: CnnSpec) -> Iterator[TensorSource]:
    """Yield the tensors, from the first convolution to the classifier."""
    return lower.tensors(spec)


def graph(net: GraphBuilder, spec: CnnSpec, shape: RequestShape, refs: Mapping[str, WeightRef]) -> None:
    """Add the graph of one image."""
    del refs
    lower.add_graph(net, spec, shape)
