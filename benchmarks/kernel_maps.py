"""The op `conv2d` as a contender: the layers of three image models, whole and in shares of rows, beside rivals.

A rival computes one layer at a time from the layout that it is fastest with (PyTorch: channels last; ONNX Runtime: the
better of with and without its own layout, whose reordering a model would do only at its ends). The activation is part
of what is timed, for all.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from benchmarks.errors import BenchError
from benchmarks.kernel_linear import F32, MORE_ROUNDINGS, onnx_session
from benchmarks.kernel_timing import MOST_DEVICES, Contender, Shape, interleaved
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.kernels import KERNELS, Workers, allocate
from hepti_mqtt.models import largest_shape
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import device_programs, make_plan
from hepti_mqtt.program import Compute, SlotSpec, WeightRef

MODELS: Final = ("vgg16", "resnet50", "mobilenet-v2")
_CHECKED_ROWS: Final = 5  # of the result that are held against float64: the first, the last and some between


class Layer(NamedTuple):
    """A convolution [Y, X, C] -> [y, x, n] with an activation; pad: top, left, bottom, right.

    origin: the parity of a share's first row on the whole map, and whole: the map's size.
    """

    x: tuple[int, int, int]
    out: tuple[int, int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int, int, int]
    groups: int
    activation: str | None
    origin: int
    whole: tuple[int, int]

    @property
    def shape(self) -> Shape:
        """Return it as a product of patches, pixels by k by n, with its own FLOPs as weight."""
        y, x, n = self.out
        k = self.kernel[0] * self.kernel[1] * self.x[2] // self.groups
        return Shape(y * x, n, k, 2.0 * y * x * n * k)


@cache
def layers(model: str, most_devices: int = MOST_DEVICES) -> tuple[tuple[Layer, float], ...]:
    """Return the distinct layers of a model on 1 to `most_devices` devices, each with its FLOPs in all Programs."""
    spec, found = spec_of_kind(model), Counter[Layer]()
    for count in range(1, most_devices + 1):
        devices = tuple(f"d{n}" for n in range(count))
        method, options = ("single", {}) if count == 1 else ("map_rows", {"cut": "none"})
        template = Plan("bench", PlanVersion(1, 1), method, devices, devices[0])
        plan = make_plan(spec, template, method, options, [1.0] * count)
        for program in device_programs(spec, plan, largest_shape(spec)).values():
            for op in program.ops:
                if isinstance(op, Compute) and op.kernel == "conv2d":
                    x, out = (program.slots[slots[0]].shape for slots in (op.reads, op.writes))
                    a = op.attrs
                    origin, how = a["origin"][0] % 2, (a["kernel"], a["stride"], a["pad"], a["groups"])
                    found[Layer(x, out, *how, a["activation"], origin, a["whole"])] += 1  # type: ignore[arg-type]
    return tuple((layer, number * layer.shape.flops) for layer, number in found.items())


@dataclass(frozen=True, slots=True)
class Data:
    """x [Y, X, C], w [ky kx C / groups, n] and b [n] of a layer."""

    layer: Layer
    x: F32
    w: F32
    b: F32

    def check(self, name: str, got: F32) -> None:
        """Raise BenchError unless some rows of `got` [y, x, n] are what float64 makes, within the bound of f32."""
        layer, k = self.layer, len(self.w)
        y, x, n = layer.out
        top, left, bottom, right = layer.pad
        padded = np.pad(self.x.astype(np.float64), ((top, bottom), (left, right), (0, 0)))
        rows = sorted({(y - 1) * i // max(1, _CHECKED_ROWS - 1) for i in range(_CHECKED_ROWS)})
        seen = sliding_window_view(padded, layer.kernel, axis=(0, 1))[:: layer.stride[0], :: layer.stride[1]][rows]
        patches = np.moveaxis(seen, 2, -1).reshape(len(rows) * x, -1, layer.groups, layer.x[2] // layer.groups)
        by_group = np.ascontiguousarray(patches.transpose(2, 0, 1, 3)).reshape(layer.groups, len(rows) * x, k)
        columns = self.w.astype(np.float64).reshape(k, layer.groups, -1).transpose(1, 0, 2)
        exact = (by_group @ columns).transpose(1, 0, 2).reshape(len(rows), x, n) + self.b
        size = (np.abs(by_group) @ np.abs(columns)).transpose(1, 0, 2).reshape(exact.shape) + np.abs(self.b)
        if layer.activation:
            exact = np.clip(exact, 0.0, 6.0 if layer.activation == "relu6" else np.inf)
        wrong = ~(np.abs(got[rows] - exact) <= (k + MORE_ROUNDINGS) * 2.0**-24 * size)
        if wrong.any():
            raise BenchError(f"{name} computes {layer} wrongly in {wrong.sum()} of {wrong.size} values; nothing timed")


def data(layer: Layer, seed: int) -> Data:
    """Return seeded data of a layer: its values do not depend on which others are measured."""
    rng, k = np.random.default_rng([seed, *layer.x, *layer.out, *layer.kernel]), layer.shape.k
    w = rng.standard_normal((k, layer.out[2]), np.float32) / np.float32(k**0.5)
    return Data(layer, rng.standard_normal(layer.x, np.float32), w, rng.standard_normal(layer.out[2], np.float32))


def ours(of: Data, pool: Workers) -> Contender:
    """Return the op as the executor calls it, checked."""
    layer, out = of.layer, np.empty(of.layer.out, np.float32)
    attrs = {"kernel": layer.kernel, "stride": layer.stride, "pad": layer.pad, "groups": layer.groups, "bias": True}
    attrs |= {"activation": layer.activation, "residual": False, "origin": (layer.origin, 0), "whole": layer.whole}
    refs = WeightRef("w", (0, len(of.w)), (0, len(of.b))), WeightRef("b", (0, 1), (0, len(of.b)), "plain")
    op, slots = Compute("conv2d", (0,), (1,), refs, attrs), (SlotSpec(of.x.shape), SlotSpec(out.shape))
    weights = []
    for ref, array in zip(refs, (of.w, of.b[None]), strict=True):
        buffer = allocate(ref)
        buffer.put(array, 0, 0)
        weights.append(buffer.finish())
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
    weights = of.w.reshape(*of.layer.kernel, of.layer.x[2] // of.layer.groups, len(of.b))
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
    from onnx import helper, numpy_helper

    layer = of.layer
    y, x, n = layer.out
    after, limits = {None: ("Identity", []), "relu": ("Relu", []), "relu6": ("Clip", ["low", "high"])}[layer.activation]
    how: dict[str, Any] = {"pads": layer.pad, "strides": layer.stride, "group": layer.groups}
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["s"], **how), helper.make_node(after, ["s", *limits], ["y"])]
    stored = {
        "w": _oihw(of),
        "b": of.b,
        **{name: np.float32(value) for name, value in zip(limits, (0, 6), strict=False)},
    }
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()]
    inputs, out = np.ascontiguousarray(of.x.transpose(2, 0, 1))[None], np.empty((1, n, y, x), np.float32)
    ways = {}
    for level in ("ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED"):
        out.fill(np.nan)
        ways[level] = onnx_session(nodes, constants, inputs, out, threads, level)
        ways[level]()
        of.check("onnxruntime", out[0].transpose(1, 2, 0))
    seconds = interleaved(ways, 3)
    return ways[min(ways, key=lambda name: min(seconds[name]))]
