"""EfficientNet (Tan and Le, 2019) as Hugging Face's transformers writes it."""

from __future__ import annotations

from math import ceil
from typing import Any

from hepti_mqtt.models.cnn.builder import NodeBuilder, integers, round_channels
from hepti_mqtt.models.cnn.builder import stages as listed
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.tensors import BatchNorm


def efficientnet(config: JsonConfig, stack: NodeBuilder, labels: int) -> None:
    """Add an EfficientNet (Tan and Le, 2019)."""
    config.require_one_of("num_channels", 3, 3)
    config.require_one_of("pooling_type", "mean", "mean")
    stages = zip(
        *listed(
            config, ("in_channels", (32, 16, 24, 40, 80, 112, 192)), ("out_channels", (16, 24, 40, 80, 112, 192, 320)),
            ("kernel_sizes", (3, 3, 5, 3, 5, 5, 3)), ("strides", (1, 2, 2, 2, 1, 2, 1)),
            ("num_block_repeats", (1, 2, 2, 3, 3, 4, 1)), ("expand_ratios", (1, 6, 6, 6, 6, 6, 6)),
        ),
        strict=True,
    )  # fmt: skip
    net = _EfficientNet(config, stack)
    net.conv("efficientnet.embeddings", "convolution", "batchnorm", net.width(32), 3, 2, pad=(0, 0, 1, 1))
    for first, n, kernel, stride, repeats, expand in stages:
        if stride > 2:
            raise config.bad_value("strides", "1 or 2 for each stage", stride)
        if stack.dims[2] != net.width(first):
            raise config.bad_value("in_channels", f"{stack.dims[2]}, which comes from the stage before", first)
        for i in range(ceil(net.depth * repeats)):
            net.block(net.width(n), kernel, 1 if i else stride, expand, is_first=not i)
    net.conv("efficientnet.encoder", "top_conv", "top_bn", net.width(1280))
    config.require_one_of("hidden_dim", 2560, net.width(1280))
    stack.classifier("classifier", labels)


class _EfficientNet:
    """An EfficientNet's options, and its blocks."""

    def __init__(self, config: JsonConfig, stack: NodeBuilder) -> None:
        self.stack, self.function, self.done = stack, config.activation(default="swish"), 0
        self.eps, self.divisor = config.number("batch_norm_eps", 0.001), config.positive("depth_divisor", 8)
        self.by, self.depth = config.number("width_coefficient", 2.0), config.number("depth_coefficient", 3.1)
        self.squeezed = config.number("squeeze_expansion_ratio", 0.25)
        self.even = frozenset(integers(config, "depthwise_padding", (), 0))  # blocks that are padded alike all around

    def width(self, channels: int) -> int:
        """Return the scaled number of channels; channels: those of the smallest of these nets."""
        return round_channels(channels * self.by, self.divisor, self.divisor)

    def conv(self, here: str, name: str, norm: str, n: int, kernel: int = 1, stride: int = 1, **more: Any) -> None:
        """Add a convolution with its norm and activation."""
        how = BatchNorm.under(f"{here}.{norm}", self.eps)
        self.stack.conv(f"{here}.{name}", n, kernel, stride, norm=how, **{"function": self.function, **more})

    def block(self, n: int, kernel: int, stride: int, expand: int, is_first: bool) -> None:
        """Add a block: wider, a depthwise convolution, scaled by its means, narrower."""
        stack, here = self.stack, f"efficientnet.encoder.blocks.{self.done}"
        x, narrow = stack.current, stack.dims[2]
        wide, middle = narrow * expand, kernel // 2
        if expand > 1:
            self.conv(f"{here}.expansion", "expand_conv", "expand_bn", wide)
        before = (kernel - 1) // 2 if stride == 1 else middle if self.done in self.even else middle - 1
        after = kernel - 1 - before if stride == 1 else middle
        pad = (before, before, after, after)
        self.conv(
            f"{here}.depthwise_conv", "depthwise_conv", "depthwise_norm", wide, kernel, stride, groups=wide, pad=pad
        )
        names = (f"{here}.squeeze_excite.reduce", f"{here}.squeeze_excite.expand")
        stack.squeeze(names, max(1, int(narrow * self.squeezed)), self.function, "sigmoid")
        self.conv(f"{here}.projection", "project_conv", "project_bn", n, function="")
        if stride == 1 and not is_first:
            stack.add(f"{here}.sum", x)
        self.done += 1
