"""ResNet, MobileNetV2 and ConvNeXt as Hugging Face's transformers writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from hepti_mqtt.models.cnn.builder import NodeBuilder, round_channels, stages
from hepti_mqtt.models.cnn.efficientnet import efficientnet
from hepti_mqtt.models.cnn.nodes import GlobalAverage, Pad
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.tensors import BatchNorm

# MobileNetV2's inverted residual blocks after the stem: channels and stride.
_BLOCKS: Final = (
    *((24, 2), (24, 1), (32, 2), (32, 1), (32, 1), (64, 2), (64, 1), (64, 1), (64, 1)),
    *((96, 1), (96, 1), (96, 1), (160, 2), (160, 1), (160, 1), (320, 1)),
)
_STEM: Final = 16  # channels of the stem


def resnet(config: JsonConfig, stack: NodeBuilder, labels: int) -> None:
    """Add a ResNet, of basic blocks or of bottlenecks."""
    config.require_one_of("layer_type", "bottleneck", "basic", "bottleneck")
    config.require_one_of("hidden_act", "relu", "relu")
    config.require_one_of("num_channels", 3, 3)
    bottleneck = config.get("layer_type", "bottleneck") == "bottleneck"
    sizes, depths = stages(config, ("hidden_sizes", (256, 512, 1024, 2048)), ("depths", (3, 4, 6, 3)))
    embedder = "resnet.embedder.embedder"
    width = config.positive("embedding_size", 64)
    _conv(stack, embedder, width, 7, 2, 3, "relu")
    stack.max_pool("resnet.embedder.pooler", 3, 2, 1)
    for stage, (n, depth) in enumerate(zip(sizes, depths, strict=True)):
        first = 2 if stage or config.flag("downsample_in_first_stage", False) else 1
        for block in range(depth):
            here, stride = f"resnet.encoder.stages.{stage}.layers.{block}", 1 if block else first
            early = bottleneck and config.flag("downsample_in_bottleneck", False)
            _block(stack, here, n, stride, bottleneck, early)
    stack.classifier("classifier.1", labels)


def _block(stack: NodeBuilder, here: str, n: int, stride: int, bottleneck: bool, early: bool) -> None:
    """Add a block; early: of a bottleneck the first convolution has the stride."""
    x, source = stack.current, stack.dims
    if bottleneck:
        _conv(stack, f"{here}.layer.0", n // 4, 1, stride if early else 1, 0, "relu")
        _conv(stack, f"{here}.layer.1", n // 4, 3, 1 if early else stride, 1, "relu")
        y = _conv(stack, f"{here}.layer.2", n, 1, 1, 0)
    else:
        _conv(stack, f"{here}.layer.0", n, 3, stride, 1, "relu")
        y = _conv(stack, f"{here}.layer.1", n, 3, 1, 1)
    if source[2] != n or stride != 1:
        stack.current = x
        x = _conv(stack, f"{here}.shortcut", n, 1, stride, 0)
        stack.current = y
    stack.add(f"{here}.sum", x, "relu")


def _conv(stack: NodeBuilder, here: str, n: int, kernel: int, stride: int, pad: int, function: str = "") -> str:
    norm = BatchNorm.under(f"{here}.normalization")
    return stack.conv(f"{here}.convolution", n, kernel, stride, pad, norm=norm, function=function)


class _MobileNet:
    """A MobileNetV2's options, and its convolutions."""

    def __init__(self, config: JsonConfig, stack: NodeBuilder) -> None:
        config.require_one_of("hidden_act", "relu6", "relu", "relu6")
        config.require_one_of("num_channels", 3, 3)
        self.stack, self.function = stack, config.get("hidden_act", "relu6")
        self.eps = config.number("layer_norm_eps", 0.001)
        self.same = config.flag("tf_padding", True)

    def conv(
        self, here: str, n: int, kernel: int = 1, stride: int = 1, groups: int = 1, dilation: int = 1, act: bool = True
    ) -> str:
        """Add a convolution, padded as TensorFlow does or by half of its window."""
        pad: Pad | int = (kernel - 1) // 2 * dilation
        if self.same:
            rows, columns = (_around(side, kernel, stride) for side in self.stack.dims[:2])
            top, left = rows // 2 * dilation, columns // 2 * dilation
            pad = (top, left, (rows - rows // 2) * dilation, (columns - columns // 2) * dilation)
        return self.stack.conv(
            f"{here}.convolution", n, kernel, stride, pad, groups=groups, dilation=dilation,
            norm=BatchNorm.under(f"{here}.normalization", self.eps), function=self.function if act else "",
        )  # fmt: skip


def _around(side: int, kernel: int, stride: int) -> int:
    """Return how many rows TensorFlow pads a side with, the odd one at its end, before dilation."""
    return max(kernel - (side % stride or stride), 0)


def mobilenet_v2(config: JsonConfig, stack: NodeBuilder, labels: int) -> None:
    """Add a MobileNetV2."""
    by, divisor = config.number("depth_multiplier", 1.0), config.positive("depth_divisible_by", 8)
    least, expand = config.positive("min_depth", 8), config.number("expand_ratio", 6.0)
    most = config.positive("output_stride", 32)
    net = _MobileNet(config, stack)

    def depth(channels: float) -> int:
        return round_channels(round(channels), divisor, least)

    stem = "mobilenet_v2.conv_stem"
    first = depth(32 * by)
    net.conv(f"{stem}.first_conv", first, 3, 2)
    if not config.flag("first_layer_is_expansion", True):
        net.conv(f"{stem}.expand_1x1", first)
    net.conv(f"{stem}.conv_3x3", first, 3, 1, first)
    net.conv(f"{stem}.reduce_1x1", depth(_STEM * by), act=False)
    reached, later = 2, 1
    for i, (channels, by_stride) in enumerate(_BLOCKS):
        if reached == most:  # maps get no smaller, and the next windows wider instead
            stride, dilation, later = 1, later, later * by_stride
        else:
            stride, dilation, reached = by_stride, 1, reached * by_stride
        x, source, n, here = stack.current, stack.dims, depth(channels * by), f"mobilenet_v2.layer.{i}"
        wide = depth(source[2] * expand)
        net.conv(f"{here}.expand_1x1", wide)
        net.conv(f"{here}.conv_3x3", wide, 3, stride, wide, dilation)
        net.conv(f"{here}.reduce_1x1", n, act=False)
        if stride == 1 and source[2] == n:
            stack.add(f"{here}.sum", x)
    fine = config.flag("finegrained_output", True) and by < 1
    net.conv("mobilenet_v2.conv_1x1", 1280 if fine else depth(1280 * by))
    stack.classifier("classifier", labels)


_EPS: Final = 1e-6  # of all of ConvNeXt's norms except the last; config.json cannot change it


def convnext(config: JsonConfig, stack: NodeBuilder, labels: int) -> None:
    """Add a ConvNeXt (Liu et al., 2022); its layer scales become factors of the weights."""
    config.require_one_of("num_channels", 3, 3)
    sizes, depths = stages(config, ("hidden_sizes", (96, 192, 384, 768)), ("depths", (3, 3, 9, 3)))
    config.require_one_of("num_stages", len(sizes), len(sizes))
    function, patch = (
        config.activation(default="gelu"),
        config.square("patch_size") if "patch_size" in config.data else 4,
    )
    scaled = config.at_least_zero("layer_scale_init_value", 1e-6) > 0
    stack.conv("convnext.embeddings.patch_embeddings", sizes[0], patch, patch)
    stack.layer_norm("convnext.embeddings.layernorm", _EPS)
    for stage, (n, depth) in enumerate(zip(sizes, depths, strict=True)):
        if stage:
            stack.layer_norm(f"convnext.encoder.stages.{stage}.downsampling_layer.0", _EPS)
            stack.conv(f"convnext.encoder.stages.{stage}.downsampling_layer.1", n, 2, 2)
        for layer in range(depth):
            here, x = f"convnext.encoder.stages.{stage}.layers.{layer}", stack.current
            stack.conv(f"{here}.dwconv", n, 7, pad=3, groups=n)
            stack.layer_norm(f"{here}.layernorm", _EPS)
            stack.conv(f"{here}.pwconv1", 4 * n, 1, function=function, dense=True)
            scale = BatchNorm(f"{here}.layer_scale_parameter") if scaled else None
            stack.conv(f"{here}.pwconv2", n, 1, norm=scale, dense=True)
            stack.add(f"{here}.sum", x)
    stack.add_node(GlobalAverage(name="pooled", inputs=(stack.current,)))
    stack.layer_norm("convnext.layernorm", config.number("layer_norm_eps", 1e-12))
    stack.linear("classifier", labels)


ARCHITECTURES: Final[Mapping[str, Callable[[JsonConfig, NodeBuilder, int], None]]] = {
    "ResNetForImageClassification": resnet,
    "MobileNetV2ForImageClassification": mobilenet_v2,
    "ConvNextForImageClassification": convnext,
    "EfficientNetForImageClassification": efficientnet,
}
