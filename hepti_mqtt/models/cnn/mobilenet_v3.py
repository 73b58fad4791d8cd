"""MobileNetV3 (Howard et al., 2019) under torchvision's names and under timm's: two spellings of one net."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from hepti_mqtt.models.cnn.builder import NodeBuilder, round_channels
from hepti_mqtt.models.cnn.nodes import GlobalAverage
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.tensors import BatchNorm


class _Block(NamedTuple):
    """One inverted residual block; function: of all of its activations."""

    kernel: int
    wide: int
    channels: int
    squeezed: bool
    function: str
    stride: int


_RELU, _SWISH = "relu", "hard_swish"
_LARGE: Final = (
    *(_Block(3, 16, 16, False, _RELU, 1), _Block(3, 64, 24, False, _RELU, 2), _Block(3, 72, 24, False, _RELU, 1)),
    *(_Block(5, 72, 40, True, _RELU, 2), _Block(5, 120, 40, True, _RELU, 1), _Block(5, 120, 40, True, _RELU, 1)),
    *(_Block(3, 240, 80, False, _SWISH, 2), _Block(3, 200, 80, False, _SWISH, 1)),
    *(_Block(3, 184, 80, False, _SWISH, 1), _Block(3, 184, 80, False, _SWISH, 1)),
    *(_Block(3, 480, 112, True, _SWISH, 1), _Block(3, 672, 112, True, _SWISH, 1)),
    *(_Block(5, 672, 160, True, _SWISH, 2), _Block(5, 960, 160, True, _SWISH, 1), _Block(5, 960, 160, True, _SWISH, 1)),
)
_SMALL: Final = (
    *(_Block(3, 16, 16, True, _RELU, 2), _Block(3, 72, 24, False, _RELU, 2), _Block(3, 88, 24, False, _RELU, 1)),
    *(_Block(5, 96, 40, True, _SWISH, 2), _Block(5, 240, 40, True, _SWISH, 1), _Block(5, 240, 40, True, _SWISH, 1)),
    *(_Block(5, 120, 48, True, _SWISH, 1), _Block(5, 144, 48, True, _SWISH, 1)),
    *(_Block(5, 288, 96, True, _SWISH, 2), _Block(5, 576, 96, True, _SWISH, 1), _Block(5, 576, 96, True, _SWISH, 1)),
)
_STEM: Final = 16
_LAST: Final = 6  # times as many channels before the mean as the last block has


class _Names(NamedTuple):
    """What a library calls the parts of a net: convolutions with their norms, in order, and dense layers.

    eps: of its norms. dense: the two layers behind the mean, of which the first may be stored as a convolution.
    """

    eps: float
    stem: tuple[str, str]
    blocks: list[list[tuple[str, str]]]
    squeezes: list[tuple[str, str]]
    last: tuple[str, str]
    dense: tuple[str, str]
    stored_conv: bool


def _torchvision(blocks: tuple[_Block, ...]) -> _Names:
    convs, squeezes, narrow = [], [], _STEM
    for place, block in enumerate(blocks):
        here = f"features.{place + 1}.block"
        convolutions = 2 if block.wide != narrow else 1  # the convolutions before squeeze and excitation
        parts = [*range(convolutions), convolutions + block.squeezed]
        convs.append([(f"{here}.{part}.0", f"{here}.{part}.1") for part in parts])
        squeezes.append((f"{here}.{convolutions}.fc1", f"{here}.{convolutions}.fc2"))
        narrow = block.channels
    last = f"features.{len(blocks) + 1}"
    return _Names(
        0.001, ("features.0.0", "features.0.1"), convs, squeezes, (f"{last}.0", f"{last}.1"),
        ("classifier.0", "classifier.3"), stored_conv=False,
    )  # fmt: skip


def _timm(blocks: tuple[_Block, ...]) -> _Names:
    convs, squeezes, narrow, stage, place = [], [], _STEM, 0, 0
    for number, block in enumerate(blocks):
        if number and block.channels != narrow:  # a stage has one number of channels
            stage, place = stage + 1, 0
        here = f"blocks.{stage}.{place}"
        parts = ("conv_pw", "conv_dw", "conv_pwl") if block.wide != narrow else ("conv_dw", "conv_pw")
        convs.append([(f"{here}.{part}", f"{here}.bn{i}") for i, part in enumerate(parts, 1)])
        squeezes.append((f"{here}.se.conv_reduce", f"{here}.se.conv_expand"))
        narrow, place = block.channels, place + 1
    last = f"blocks.{stage + 1}.0"
    return _Names(
        1e-5, ("conv_stem", "bn1"), convs, squeezes, (f"{last}.conv", f"{last}.bn1"), ("conv_head", "classifier"),
        stored_conv=True,
    )  # fmt: skip


def _add(stack: NodeBuilder, labels: int, blocks: tuple[_Block, ...], last: int, names: _Names) -> None:
    """Add a net; last: columns of the dense layer before the classifier."""

    def conv(name: tuple[str, str], n: int, kernel: int, stride: int, function: str, groups: int = 1) -> None:
        norm = BatchNorm.under(name[1], names.eps)
        stack.conv(name[0], n, kernel, stride, kernel // 2, norm=norm, groups=groups, function=function)

    conv(names.stem, _STEM, 3, 2, _SWISH)
    for block, parts, squeeze in zip(blocks, names.blocks, names.squeezes, strict=True):
        x = stack.current
        *wider, depthwise, narrower = parts
        for name in wider:
            conv(name, block.wide, 1, 1, block.function)
        conv(depthwise, block.wide, block.kernel, block.stride, block.function, block.wide)
        if block.squeezed:
            stack.squeeze(squeeze, round_channels(block.wide / 4), _RELU, "hard_sigmoid")
        conv(narrower, block.channels, 1, 1, "")
        if stack.dims == stack.shape_of(x):
            stack.add(f"{narrower[0]}.sum", x)
    conv(names.last, _LAST * blocks[-1].channels, 1, 1, _SWISH)
    stack.add_node(GlobalAverage(name="pooled", inputs=(stack.current,)))
    stack.linear(names.dense[0], last, _SWISH, stored_conv=names.stored_conv)
    stack.linear(names.dense[1], labels)


def mobilenet_v3(name: str, _config: JsonConfig, stack: NodeBuilder, labels: int) -> None:
    """Add a MobileNetV3."""
    blocks, last = (_LARGE, 1280) if "large" in name else (_SMALL, 1024)
    _add(stack, labels, blocks, last, (_timm if name.endswith("_100") else _torchvision)(blocks))


ARCHITECTURES: Final[Mapping[str, Callable[[str, JsonConfig, NodeBuilder, int], None]]] = dict.fromkeys(
    ("mobilenet_v3_large", "mobilenet_v3_small", "mobilenetv3_large_100", "mobilenetv3_small_100"), mobilenet_v3
)
