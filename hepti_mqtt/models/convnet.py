"""A small convolutional net for images: convolutions with stride and padding, pooling, a residual, two dense layers.

One image a request. S the image's side, C channels of a map, n outputs. Maps are [y, x, channels]; a convolution's
matrix has rows in the order (ky, kx, c), and is stored [n, ky, kx, c].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from hepti_mqtt.lowering import Net, roles
from hepti_mqtt.lowering.ops import Conv, Flatten, MaxPool, Reshape
from hepti_mqtt.models import plain
from hepti_mqtt.models.config import Config
from hepti_mqtt.models.kinds import TINY_SPREAD, kind
from hepti_mqtt.models.reads import Pictures
from hepti_mqtt.models.tensors import TensorSource, dense, vector, weight
from hepti_mqtt.program import WeightRef
from hepti_mqtt.spec import RequestShape, TaskHead

ARCHITECTURES: Final = {"ConvNetForImageClassification": "image_classification"}


@dataclass(frozen=True, slots=True)
class ConvNetSpec:
    """Side of the image, channels of the first and of the later maps, columns of the dense layer."""

    family: str
    architecture: str
    size: int
    narrow: int
    wide: int
    dense: int
    head: TaskHead

    @property
    def reads(self) -> Pictures:
        """Return what a request brings: pictures."""
        return Pictures(self.size, 3)

    def output_shape(self, shape: RequestShape) -> tuple[int, int]:
        """Return the shape of the answer: [1, dense] hidden, or [1, n] logits."""
        return 1, self.dense if shape.want == "hidden" else self.head.outputs

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for msgpack or JSON; `from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ConvNetSpec:
        """Return the spec that `to_dict` described; raises KeyError or TypeError on other data."""
        head = dict(data["head"])
        return cls(**{**data, "head": TaskHead(**{**head, "labels": tuple(head["labels"])})})


SPEC: Final = ConvNetSpec


def spec(architecture: str, config: Config, extras: Mapping[str, Any]) -> ConvNetSpec:
    """Return the spec of a config.json; raises ModelError."""
    del extras
    labels = config.labels()
    head = TaskHead("image_classification", "cls", outputs=len(labels), labels=labels)
    return ConvNetSpec(
        "convnet",
        architecture,
        size=config.positive("image_size"),
        narrow=config.positive("narrow_channels"),
        wide=config.positive("wide_channels"),
        dense=config.positive("dense_size"),
        head=head,
    )


class _Conv(NamedTuple):
    """A convolution: channels in and out, and its window."""

    c: int
    n: int
    size: int
    stride: int
    pad: int


def _convs(spec: ConvNetSpec) -> dict[str, _Conv]:
    a, b = spec.narrow, spec.wide
    return {
        "conv1": _Conv(3, a, 3, 1, 1),
        "conv2": _Conv(a, b, 3, 2, 1),
        "conv3": _Conv(b, b, 3, 1, 1),
        "shortcut": _Conv(a, b, 1, 2, 0),
    }


def _after(side: int, size: int, stride: int, pad: int) -> int:
    return (side + 2 * pad - size) // stride + 1


def _flat(spec: ConvNetSpec) -> int:
    side = _after(_after(spec.size, 3, 2, 1), 3, 2, 1)
    return side * side * spec.wide


def tensors(spec: ConvNetSpec) -> Iterator[TensorSource]:
    """Yield the tensors, from the first convolution to the classifier."""
    for name, conv in _convs(spec).items():
        stored = (conv.n, conv.size, conv.size, conv.c)
        yield weight(f"{name}.weight", (f"{name}.weight",), prod(stored[1:]), conv.n, stored)
        yield vector(f"{name}.bias", (f"{name}.bias",), conv.n)
    yield from dense("dense", ("",), "dense", _flat(spec), spec.dense)
    yield from dense("classifier", ("",), "classifier", spec.dense, spec.head.outputs)


def graph(net: Net, spec: ConvNetSpec, shape: RequestShape, refs: Mapping[str, WeightRef]) -> None:
    """Add the graph of one image: pixels u8 [1, 3, S, S] -> logits [1, n]."""
    del refs
    convs, s = _convs(spec), spec.size
    pixels = net.input("pixels", (1, 3, s, s), "u8")
    half = (0.5, 0.5, 0.5)
    rows = net.whole("rows", (pixels,), roles.STEM, "patchify", (s * s, 3), patch=1, mean=half, std=half)
    x = net.put(Reshape(name="image", inputs=(rows,), role=roles.STEM, space=(s, s, 3), rank=3, source=(s * s, 3)))

    def conv(name: str, x: str, role: str) -> str:
        """x [Y, X, c] -> [y, x, n]."""
        c, (height, width, channels) = convs[name], net.dims(x)
        space = (_after(height, c.size, c.stride, c.pad), _after(width, c.size, c.stride, c.pad), c.n)
        return net.put(
            Conv(
                name=name, inputs=(x,), role=role, tensors=(f"{name}.weight", f"{name}.bias"), space=space,
                size=c.size, stride=c.stride, pad=c.pad, source=(height, width, channels),
            )
        )  # fmt: skip

    x = net.activation("map1", conv("conv1", x, roles.MAP_SUM), roles.MAP, "relu")  # [S, S, a]
    side = _after(s, 3, 2, 1)
    x = net.put(
        MaxPool(
            name="pooled", inputs=(x,), role=roles.MAP, space=(side, side, spec.narrow), size=3, stride=2, pad=1,
            source=(s, s, spec.narrow),
        )
    )  # fmt: skip
    y = net.activation("map2", conv("conv2", x, roles.MAP_SUM), roles.MAP, "relu")
    total = net.add("total", conv("shortcut", x, roles.MAP), conv("conv3", y, roles.MAP_SUM), roles.MAP_SUM)
    y = net.activation("map3", total, roles.MAP, "relu")
    height, width, channels = net.dims(y)
    flat = Flatten(name="flat", inputs=(y,), role=roles.FLAT, space=(1, _flat(spec)), source=(height, width, channels))
    x = net.linear("dense", net.put(flat), roles.DENSE, {"dense": spec.dense}, activation="relu")  # [1, dense]
    if shape.want == "hidden":
        net.rows("hidden", x, roles.TASK)
    else:
        net.linear("logits", x, roles.TASK, {"classifier": spec.head.outputs})  # [1, n]


def reference(
    spec: ConvNetSpec, tensors: plain.Tensors, pixels: plain.Array, shape: RequestShape
) -> tuple[plain.Array, plain.Array]:
    """Return (what the dense layer gives [1, dense], the output) for pixels [1, 3, S, S], in plain NumPy."""
    dtype, convs = tensors["conv1.bias"].dtype, _convs(spec)
    x = (pixels[0].astype(dtype).transpose(1, 2, 0) / 255 - dtype.type(0.5)) / dtype.type(0.5)  # [S, S, 3]
    x = np.maximum(_plain_conv(tensors, "conv1", x, convs["conv1"]), 0)
    x = np.stack([*_windows(x, 3, 2, 1, -np.inf)]).max(axis=0)  # [y, x, a]
    y = np.maximum(_plain_conv(tensors, "conv2", x, convs["conv2"]), 0)
    y = _plain_conv(tensors, "conv3", y, convs["conv3"]) + _plain_conv(tensors, "shortcut", x, convs["shortcut"])
    hidden = np.maximum(plain.linear(tensors, "dense", np.maximum(y, 0).reshape(1, -1)), 0)  # [1, dense]
    return hidden, hidden if shape.want == "hidden" else plain.linear(tensors, "classifier", hidden)


def _windows(x: plain.Array, size: int, stride: int, pad: int, beyond: float) -> Iterator[plain.Array]:
    """Yield what each place of a window sees of x [Y, X, C], over all positions: [y, x, C]."""
    sides = [_after(n, size, stride, pad) for n in x.shape[:2]]
    x = np.pad(x, ((pad, pad), (pad, pad), (0, 0)), constant_values=beyond)
    for i in range(size):
        for j in range(size):
            yield x[i : i + stride * sides[0] : stride, j : j + stride * sides[1] : stride][: sides[0], : sides[1]]


def _plain_conv(tensors: plain.Tensors, name: str, x: plain.Array, c: _Conv) -> plain.Array:
    patches = np.concatenate([*_windows(x, c.size, c.stride, c.pad, 0.0)], axis=2)  # [y, x, size size c]
    return plain.linear(tensors, name, patches)


KINDS: Final = {
    "tiny-convnet": kind(
        "ConvNetForImageClassification", "convnet", labels=5, initializer_range=TINY_SPREAD,
        image_size=17, narrow_channels=4, wide_channels=6, dense_size=24,
    )
}  # fmt: skip
