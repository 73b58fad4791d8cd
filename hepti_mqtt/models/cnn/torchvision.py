"""VGG, ResNet and MobileNetV2 as torchvision writes them, which config.json names: {"architectures": ["resnet18"]}.

VGG: Simonyan and Zisserman, 2015. ResNet: He et al., 2016, in torchvision's form with the stride in the 3 x 3
convolution of a bottleneck. MobileNetV2: Sandler et al., 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from hepti_mqtt.core.errors import ModelError
from hepti_mqtt.models.cnn import mobilenet_v3
from hepti_mqtt.models.cnn.builder import NodeBuilder, round_channels
from hepti_mqtt.models.cnn.nodes import Flatten
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.tensors import BatchNorm

# Convolutions of each stage of a VGG (1, 2, 4, 8 and 8 times the width); blocks of each stage of a ResNet.
_VGG: Final = {"vgg11": (1, 1, 2, 2, 2), "vgg13": (2, 2, 2, 2, 2), "vgg16": (2, 2, 3, 3, 3), "vgg19": (2, 2, 4, 4, 4)}
_BASIC: Final = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
_BOTTLENECK: Final = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3), "resnet152": (3, 8, 36, 3)}

# MobileNetV2's blocks: expansion, channels, how many, stride of the first.
_INVERTED: Final = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _depths(config: JsonConfig, usual: tuple[int, ...]) -> tuple[int, ...]:
    """Return the blocks of each stage: `depths` of config.json, by default those of the architecture."""
    given = config.get("depths", list(usual))
    if not isinstance(given, list) or not all(type(n) is int and n > 0 for n in given) or len(given) != len(usual):
        raise config.bad_value("depths", f"{len(usual)} integers >= 1", given)
    return tuple(given)


def vgg(name: str, config: JsonConfig, stack: NodeBuilder, labels: int) -> None:
    """Add a VGG without batch norm: maps of `width` (64) channels and more, dense layers of `dense_size` (4096)."""
    width, dense, at = config.positive("width", 64), config.positive("dense_size", 4096), 0
    for stage, depth in enumerate(_depths(config, _VGG[name])):
        for _ in range(depth):
            stack.conv(f"features.{at}", width * min(1 << stage, 8), 3, pad=1, function="relu")
            at += 2
        stack.max_pool(f"features.{at}", 2, 2)
        at += 1
    pooled = config.positive("pooled_size", 7)
    if stack.dims[:2] != (pooled, pooled):
        raise ModelError(
            f"config.json: {name} reads maps of {pooled} x {pooled} into its dense layers, and pictures of image_size "
            f"give {stack.side} x {stack.side}; use image_size {pooled * 32}"
        )
    stack.add_node(Flatten(name="flat", inputs=(stack.current,)))
    stack.linear("classifier.0", dense, "relu")
    stack.linear("classifier.3", dense, "relu")
    stack.linear("classifier.6", labels)


def resnet(name: str, config: JsonConfig, stack: NodeBuilder, labels: int) -> None:
    """Add a ResNet of maps of `width` (64) channels and more."""
    width = config.positive("width", 64)
    usual = _BASIC.get(name) or _BOTTLENECK[name]
    stack.conv("conv1", width, 7, 2, 3, norm=BatchNorm.under("bn1"), function="relu")
    stack.max_pool("maxpool", 3, 2, 1)
    for stage, depth in enumerate(_depths(config, usual)):
        for block in range(depth):
            here, stride = f"layer{stage + 1}.{block}", 2 if stage and not block else 1
            (_basic if name in _BASIC else _bottleneck)(stack, here, width << stage, stride)
    stack.classifier("fc", labels)


def _basic(stack: NodeBuilder, here: str, n: int, stride: int) -> None:
    x = stack.current
    stack.conv(f"{here}.conv1", n, 3, stride, 1, norm=BatchNorm.under(f"{here}.bn1"), function="relu")
    y = stack.conv(f"{here}.conv2", n, 3, 1, 1, norm=BatchNorm.under(f"{here}.bn2"))
    _joined(stack, here, x, y, n, stride)


def _bottleneck(stack: NodeBuilder, here: str, n: int, stride: int) -> None:
    x = stack.current
    stack.conv(f"{here}.conv1", n, 1, norm=BatchNorm.under(f"{here}.bn1"), function="relu")
    stack.conv(f"{here}.conv2", n, 3, stride, 1, norm=BatchNorm.under(f"{here}.bn2"), function="relu")
    y = stack.conv(f"{here}.conv3", 4 * n, 1, norm=BatchNorm.under(f"{here}.bn3"))
    _joined(stack, here, x, y, 4 * n, stride)


def _joined(stack: NodeBuilder, here: str, x: str, y: str, n: int, stride: int) -> None:
    """Add a block's input to its result, through a convolution if their shapes differ."""
    if stack.shape_of(x) != stack.shape_of(y):
        stack.current = x
        x = stack.conv(f"{here}.downsample.0", n, 1, stride, norm=BatchNorm.under(f"{here}.downsample.1"))
        stack.current = y
    stack.add(f"{here}.sum", x, "relu")


def mobilenet_v2(_name: str, config: JsonConfig, stack: NodeBuilder, labels: int) -> None:
    """Add a MobileNetV2 with `width_mult` (1.0) times the channels and `last_channel` (1280) at the end.

    The node after a depthwise convolution has no activation.
    """
    by = config.number("width_mult", 1.0)

    def conv(name: str, n: int, kernel: int, stride: int = 1, groups: int = 1, function: str = "relu6") -> None:
        norm = BatchNorm.under(f"{name[:-1]}{int(name[-1]) + 1}")
        stack.conv(name, n, kernel, stride, kernel // 2, norm=norm, groups=groups, function=function)

    conv("features.0.0", round_channels(32 * by), 3, 2)
    at = 1
    for expansion, channels, count, first in _INVERTED:
        for block in range(count):
            x, n, here, part = stack.current, round_channels(channels * by), f"features.{at}.conv", 0
            wide, stride = stack.dims[2] * expansion, 1 if block else first
            if expansion > 1:
                conv(f"{here}.0.0", wide, 1)
                part = 1
            conv(f"{here}.{part}.0", wide, 3, stride, wide)
            conv(f"{here}.{part + 1}", n, 1, function="")
            if stack.dims == stack.shape_of(x):
                stack.add(f"features.{at}.sum", x)
            at += 1
    conv(f"features.{at}.0", config.positive("last_channel", round_channels(1280 * max(1.0, by))), 1)
    stack.classifier("classifier.1", labels)


ARCHITECTURES: Final[Mapping[str, Callable[[str, JsonConfig, NodeBuilder, int], None]]] = {
    **dict.fromkeys(_VGG, vgg),
    **dict.fromkeys((*_BASIC, *_BOTTLENECK), resnet),
    "mobilenet_v2": mobilenet_v2,
    **mobilenet_v3.ARCHITECTURES,
}
