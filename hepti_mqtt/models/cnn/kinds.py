"""Seeded convolutional nets: the real ones, and tiny ones of every sort for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from hepti_mqtt.models.cnn import nodes
from hepti_mqtt.models.cnn.stack import Stack
from hepti_mqtt.models.kinds import Kind, kind
from hepti_mqtt.models.pictures import FILE, IMAGENET_MEAN, IMAGENET_STD


def _kind(architecture: str, model_type: str, size: int, labels: int, **more: Any) -> Kind:
    made = kind(architecture, model_type, labels=labels, image_size=size, **more)
    extras = {
        "crop_size": {"height": size, "width": size},
        "do_center_crop": True,
        "image_mean": list(IMAGENET_MEAN),
        "image_std": list(IMAGENET_STD),
        "resample": 2,
        "size": {"shortest_edge": round(size * 256 / 224)},
    }
    return replace(made, extras={FILE: extras})


def _plain(stack: Stack) -> list[dict[str, Any]]:
    return [node.to_dict() for node in stack.nodes]


def _convnet() -> list[dict[str, Any]]:
    """Return a small net with a residual and two dense layers."""
    stack = Stack(17)
    stack.conv("conv1", 4, 3, pad=1, function="relu")
    x = stack.max_pool("pooled", 3, 2, 1)
    stack.conv("conv2", 6, 3, 2, 1, function="relu")
    y = stack.conv("conv3", 6, 3, pad=1)
    stack.at = x
    shortcut = stack.conv("shortcut", 6, 1, 2)
    stack.at = y
    stack.add("total", shortcut, "relu")
    stack.put(nodes.Flatten(name="flat", inputs=(stack.at,)))
    stack.linear("dense", 24, "relu")
    stack.linear("classifier", 5)
    return _plain(stack)


def _yolo() -> list[dict[str, Any]]:
    """Return a stack as Redmon and Farhadi's YOLOv2 of 2017, tiny: its last map is the answer."""
    stack = Stack(40)
    for i, n in enumerate((4, 8, 12)):
        stack.conv(f"conv{i}", n, 3, pad=1, function="leaky_relu")
        stack.max_pool(f"pool{i}", 2, 2)
    early = stack.at
    stack.conv("conv3", 10, 3, pad=1, function="leaky_relu")
    stack.put(nodes.Concat(name="both", inputs=(early, stack.at)))
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
