"""The op `conv2d` as a contender: the layers of three image models, whole and in shares of rows, beside rivals.

A rival computes one layer at a time from the layout that it is fastest with (PyTorch: channels last; ONNX Runtime: the
better of with and without its own layout, whose reordering a model would do only at its ends). The activation is part
of what is timed, for all.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from hepti_mqtt.bench.kernel_shapes import MOST_DEVICES, Shape
from hepti_mqtt.bench.kernel_timing import Contender
from hepti_mqtt.errors import BenchError
from hepti_mqtt.kernels import KERNELS, Workers, allocate
from hepti_mqtt.program import Compute, SlotSpec, WeightRef

F32 = NDArray[np.float32]

# Roundings of f32 that a sum of k products and its bias may add to k.
_MORE_ROUNDINGS: Final = 4
# Rows of the result that are held against float64: the first, the last and some between.
_CHECKED_ROWS: Final = 5


class Layer(NamedTuple):
    """A convolution [Y, X, C] -> [y, x, n] with an activation; pad: top, left, bottom, right.

    Of a share of rows: first, the parity of its first row on the whole map, and whole, the rows of that.
    """

    rows: int
    columns: int
    channels: int
    n: int
    size: int
    stride: int
    pad: tuple[int, int, int, int]
    groups: int
    activation: str | None
    first: int = 0
    whole: int | None = None

    @property
    def out(self) -> tuple[int, int, int]:
        """Return the shape of the result."""
        top, left, bottom, right = self.pad
        y = (self.rows + top + bottom - self.size) // self.stride + 1
        return y, (self.columns + left + right - self.size) // self.stride + 1, self.n

    @property
    def shape(self) -> Shape:
        """Return it as a product of patches, pixels by k by n, with its own FLOPs as weight."""
        y, x, n = self.out
        k = self.size**2 * self.channels // self.groups
        return Shape(y * x, n, k, 2.0 * y * x * n * k)

    def __str__(self) -> str:
        grouped = f" in {self.groups} groups" if self.groups > 1 else ""
        of = f"{self.rows}x{self.columns}x{self.channels} to {self.n}, {self.size}x{self.size} by {self.stride}"
        share = f", of {self.whole} rows from an {'odd' if self.first else 'even'} one" if self.whole else ""
        return f"{of}{grouped}, pad {','.join(map(str, self.pad))}, {self.activation}{share}"


def _square(side: int, channels: int, n: int, size: int, stride: int, groups: int, activation: str | None) -> Layer:
    return Layer(side, side, channels, n, size, stride, (size // 2,) * 4, groups, activation)


def _vgg16() -> Iterator[Layer]:
    channels = 3
    for side, widths in ((224, (64,) * 2), (112, (128,) * 2), (56, (256,) * 3), (28, (512,) * 3), (14, (512,) * 3)):
        for n in widths:
            yield _square(side, channels, n, 3, 1, 1, "relu")
            channels = n


def _resnet50() -> Iterator[Layer]:
    yield _square(224, 3, 64, 7, 2, 1, "relu")
    side, channels = 56, 64
    for width, blocks, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            stride = first if block == 0 else 1
            yield _square(side, channels, width, 1, 1, 1, "relu")
            yield _square(side, width, width, 3, stride, 1, "relu")
            if block == 0:
                yield _square(side, channels, 4 * width, 1, stride, 1, None)
            side, channels = side // stride, 4 * width
            yield _square(side, width, channels, 1, 1, 1, "relu")


def _mobilenet_v2() -> Iterator[Layer]:
    yield _square(224, 3, 32, 3, 2, 1, "relu6")
    side, channels = 112, 32
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for wider, n, blocks, first in stages:
        for block in range(blocks):
            stride, wide = first if block == 0 else 1, channels * wider
            if wider > 1:
                yield _square(side, channels, wide, 1, 1, 1, "relu6")
            yield _square(side, wide, wide, 3, stride, wide, "relu6")
            side, channels = side // stride, n
            yield _square(side, wide, n, 1, 1, 1, None)
    yield _square(side, channels, 1280, 1, 1, 1, "relu6")


MODELS: Final[Mapping[str, Callable[[], Iterator[Layer]]]] = {
    "vgg16": _vgg16,
    "resnet50": _resnet50,
    "mobilenet-v2": _mobilenet_v2,
}


def shares(layer: Layer, devices: int) -> Iterator[Layer]:
    """Return what each of `devices` computes of a layer: equal shares of its rows, with the rows that they see."""
    y = layer.out[0]
    top, left, _, right = layer.pad
    for device in range(devices):
        first, stop = y * device // devices, y * (device + 1) // devices
        if first < stop:
            low, high = first * layer.stride - top, (stop - 1) * layer.stride - top + layer.size
            pad = (max(-low, 0), left, max(high - layer.rows, 0), right)
            rows = min(high, layer.rows) - max(low, 0)
            yield layer._replace(rows=rows, pad=pad, first=first % 2, whole=y if devices > 1 else None)


@cache
def layers(model: str, most_devices: int = MOST_DEVICES) -> tuple[tuple[Layer, float], ...]:
    """Return every distinct layer of a model, whole and in shares of 1 to `most_devices` devices, with its FLOPs in all
    of them."""
    found: Counter[Layer] = Counter()
    for layer in MODELS[model]():
        for devices in range(1, most_devices + 1):
            found.update(shares(layer, devices))
    return tuple((layer, count * layer.shape.flops) for layer, count in found.items())


@dataclass(frozen=True, slots=True)
class Data:
    """x [Y, X, C], w [ky kx C / groups, n] and b [n] of a layer."""

    layer: Layer
    x: F32
    w: F32
    b: F32

    def check(self, name: str, got: F32) -> None:
        """Raise BenchError unless some rows of `got` [y, x, n] are what float64 makes, within the bound of f32."""
        layer = self.layer
        y, x, n = layer.out
        top, left, bottom, right = layer.pad
        padded = np.pad(self.x.astype(np.float64), ((top, bottom), (left, right), (0, 0)))
        rows = sorted({(y - 1) * i // max(1, _CHECKED_ROWS - 1) for i in range(_CHECKED_ROWS)})
        k, groups = len(self.w), layer.groups
        seen = sliding_window_view(padded, (layer.size, layer.size), axis=(0, 1))[:: layer.stride, :: layer.stride]
        patches = np.moveaxis(seen[rows], 2, -1).reshape(len(rows) * x, layer.size**2, groups, layer.channels // groups)
        by_group = np.ascontiguousarray(patches.transpose(2, 0, 1, 3)).reshape(groups, len(rows) * x, k)
        columns = self.w.astype(np.float64).reshape(k, groups, n // groups).transpose(1, 0, 2)
        exact = (by_group @ columns).transpose(1, 0, 2).reshape(len(rows), x, n) + self.b
        size = (np.abs(by_group) @ np.abs(columns)).transpose(1, 0, 2).reshape(exact.shape) + np.abs(self.b)
        if layer.activation:
            exact = np.clip(exact, 0.0, 6.0 if layer.activation == "relu6" else np.inf)
        wrong = ~(np.abs(got[rows] - exact) <= (k + _MORE_ROUNDINGS) * 2.0**-24 * size)
        if wrong.any():
            raise BenchError(
                f"{name} computes {layer} wrongly in {wrong.sum()} of {wrong.size} values; nothing was timed. "
                "Run the tests of the kernels: pytest tests/kernels"
            )


def data(layer: Layer, seed: int) -> Data:
    """Return seeded data of a layer: its values do not depend on which others are measured."""
    rng = np.random.default_rng([seed, *layer[:6], *layer.pad, layer.groups])
    k = layer.shape.k
    x = rng.standard_normal((layer.rows, layer.columns, layer.channels), np.float32)
    w = rng.standard_normal((k, layer.n), np.float32) / np.float32(k**0.5)
    return Data(layer, x, w, rng.standard_normal(layer.n, np.float32))


def ours(of: Data, pool: Workers) -> Contender:
    """Return the op as the executor calls it, checked."""
    layer = of.layer
    size, stride = (layer.size, layer.size), (layer.stride, layer.stride)
    attrs = {"kernel": size, "stride": stride, "pad": layer.pad, "groups": layer.groups, "bias": True}
    out = np.empty(layer.out, np.float32)
    refs = WeightRef("w", (0, len(of.w)), (0, layer.n)), WeightRef("b", (0, 1), (0, layer.n), "plain")
    place = {"origin": (layer.first, 0), "whole": (layer.whole or layer.out[0], layer.out[1])}
    more = {"activation": layer.activation, "residual": False, **place}
    op, slots = Compute("conv2d", (0,), (1,), refs, {**attrs, **more}), (SlotSpec(of.x.shape), SlotSpec(out.shape))
    buffers = [allocate(ref) for ref in refs]
    for buffer, array in zip(buffers, (of.w, of.b[None]), strict=True):
        buffer.put(array, 0, 0)
    weights = [buffer.finish() for buffer in buffers]
    KERNELS["conv2d"].checked(op, slots, weights, pool)([of.x], [out])
    of.check("conv2d", out)
    return partial(KERNELS["conv2d"].bind(op, slots, weights, pool), [of.x], [out])


def theirs(of: Data, threads: int) -> dict[str, Contender]:
    """Return the rivals that are installed, each checked."""
    found: dict[str, Contender] = {}
    if importlib.util.find_spec("torch"):
        found["torch"] = _torch(of, threads)
    if importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx"):
        found["onnxruntime"] = _onnxruntime(of, threads)
    return found


def _oihw(of: Data) -> F32:
    layer = of.layer
    weights = of.w.reshape(layer.size, layer.size, layer.channels // layer.groups, layer.n)
    return np.ascontiguousarray(weights.transpose(3, 2, 0, 1))


def _torch(of: Data, threads: int) -> Contender:
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    layer, last = of.layer, torch.channels_last
    top, left, bottom, right = layer.pad
    # Uneven borders are part of the map: PyTorch would copy it in every call.
    even = top == bottom and left == right
    x = of.x if even else np.pad(of.x, ((top, bottom), (left, right), (0, 0)))
    pad = (top, left) if even else (0, 0)
    inputs = torch.from_numpy(np.ascontiguousarray(x.transpose(2, 0, 1))[None]).contiguous(memory_format=last)
    weight, bias = torch.from_numpy(_oihw(of)).contiguous(memory_format=last), torch.from_numpy(of.b)
    after = {None: lambda y: y, "relu": torch.relu_, "relu6": partial(torch.clamp_, min=0.0, max=6.0)}[layer.activation]

    def call() -> Any:
        return after(torch.nn.functional.conv2d(inputs, weight, bias, layer.stride, pad, 1, layer.groups))

    of.check("torch", call()[0].permute(1, 2, 0).numpy())
    return call


def _onnxruntime(of: Data, threads: int) -> Contender:
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    from hepti_mqtt.bench.kernel_timing import interleaved

    layer = of.layer
    y, x, n = layer.out
    x_shape = (1, layer.channels, *of.x.shape[:2])
    nodes = [
        helper.make_node(
            "Conv", ["x", "w", "b"], ["s"], pads=layer.pad, strides=[layer.stride] * 2, group=layer.groups
        ),
        {
            None: helper.make_node("Identity", ["s"], ["y"]),
            "relu": helper.make_node("Relu", ["s"], ["y"]),
            "relu6": helper.make_node("Clip", ["s", "low", "high"], ["y"]),
        }[layer.activation],
    ]
    limits = [numpy_helper.from_array(np.array(v, np.float32), name) for v, name in ((0, "low"), (6, "high"))]
    limits = limits if layer.activation == "relu6" else []
    graph = helper.make_graph(
        nodes,
        "conv",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x_shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, n, y, x))],
        [numpy_helper.from_array(_oihw(of), "w"), numpy_helper.from_array(of.b, "b"), *limits],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    inputs, out = np.ascontiguousarray(of.x.transpose(2, 0, 1))[None], np.empty((1, n, y, x), np.float32)

    def session(level: Any) -> Contender:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        made = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        bound: Any = made.io_binding()
        bound.bind_input("x", "cpu", 0, np.float32, inputs.shape, inputs.ctypes.data)
        bound.bind_output("y", "cpu", 0, np.float32, out.shape, out.ctypes.data)
        keep = (inputs, out)  # the binding has only addresses
        return lambda _keep=keep: made.run_with_iobinding(bound)  # type: ignore[misc]

    levels = onnxruntime.GraphOptimizationLevel
    ways = {name: session(getattr(levels, name)) for name in ("ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED")}
    for way in ways.values():
        out.fill(np.nan)
        way()
        of.check("onnxruntime", out[0].transpose(1, 2, 0))
    seconds = interleaved(ways, 3)
    return ways[min(ways, key=lambda name: min(seconds[name]))]
