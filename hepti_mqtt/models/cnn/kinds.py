"""Seeded convolutional nets: the real ones, and tiny ones of every sort for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from hepti_mqtt.models.cnn import nodes
from hepti_mqtt.models.cnn.builder import NodeBuilder
from hepti_mqtt.models.kinds import Kind, make_kind
from hepti_mqtt.models.pictures import FILE, IMAGENET_MEAN, IMAGENET_STD

PICTURE_CLASSES: Final = {
    **{"resnet": "ConvNext", "convnext": "ConvNext"},
    **{"mobilenet_v2": "MobileNetV2", "efficientnet": "EfficientNet"},
}


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
    if PICTURE_CLASSES.get(model_type) == "ConvNext":  # it crops by a part
        extras = {**{k: v for k, v in extras.items() if "crop" not in k}, **part}
    if model_type == "efficientnet":
        extras["include_top"] = False  # it would divide by the deviation a second time
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
    "mobilenet-v3-large": _kind("mobilenet_v3_large", "torchvision", **_IMAGENET),
    "convnext-tiny": _kind("ConvNextForImageClassification", "convnext", **_IMAGENET),
    "efficientnet-b0": _kind(
        "EfficientNetForImageClassification", "efficientnet", width_coefficient=1.0, depth_coefficient=1.0,
        hidden_dim=1280, **_IMAGENET,
    ),
    "tiny-convnext": _kind(
        "ConvNextForImageClassification", "convnext", 60, 7, patch_size=4, num_channels=3, num_stages=3,
        hidden_sizes=[8, 16, 24], depths=[1, 2, 1], hidden_act="gelu", layer_norm_eps=1e-12,
        layer_scale_init_value=1e-6,
    ),
    "tiny-efficientnet": _kind(
        "EfficientNetForImageClassification", "efficientnet", 61, 7, num_channels=3, width_coefficient=0.25,
        depth_coefficient=1.0, depth_divisor=8, kernel_sizes=[3, 5, 3], in_channels=[32, 16, 48],
        out_channels=[16, 48, 64], depthwise_padding=[1], strides=[1, 2, 2], num_block_repeats=[1, 2, 1],
        expand_ratios=[1, 3, 3], squeeze_expansion_ratio=0.25, hidden_act="swish", hidden_dim=320,
        pooling_type="mean", batch_norm_eps=0.001,
    ),
}  # fmt: skip
