"""ONNX's operators as the nodes of a convolutional net, one method an operator; needs no package.

Maps are [1, C, Y, X] there and [Y, X, C] here; of a row both say [1, C], and of a map's mean ONNX says [1, C, 1, 1].
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hepti_mqtt.checkpoint.formats import explain_file, has_safetensors, refuse_pointers
from hepti_mqtt.checkpoint.storage import FileStamp, TensorReader, file_stamp
from hepti_mqtt.core.errors import ModelError, UnsupportedModelError
from hepti_mqtt.models.cnn import nodes
from hepti_mqtt.models.cnn.nodes import IMAGE, Dims, Node, Pad, extend_shapes
from hepti_mqtt.models.tensors import BatchNorm


class OnnxNode(NamedTuple):
    """A node of an ONNX graph."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]


class OnnxConverter:
    """Builds the nodes; constants: weights and other constants, by name."""

    def __init__(self, size: int, given: str, constants: dict[str, npt.NDArray[Any]]) -> None:
        self.constants = constants
        self.dims: Dims = (size, size, 3)
        self._nodes: dict[str, Node] = {}
        self._shapes: dict[str, Dims] = {IMAGE: self.dims}
        self._at = {given: IMAGE}  # the node that computes a value
        self._reads: dict[str, int] = {}
        self._answer = ""

    def nodes(self, steps: Sequence[OnnxNode], outputs: Sequence[str]) -> list[dict[str, Any]]:
        """Return the nodes as config.json lists them; raises ModelError for an op without a node."""
        if len(outputs) != 1:
            raise UnsupportedModelError(f"{len(outputs)} outputs are not supported; export the model with one")
        self._answer = outputs[0]
        for x in (x for step in steps for x in step.inputs):
            self._reads[x] = self._reads.get(x, 0) + 1
        for step in steps:
            least = _LEAST.get(step.op, 1)
            if len(step.inputs) < least or not all(step.inputs[:least]):
                raise _unsupported(step, f"it has the inputs {list(step.inputs)}, and needs {least}")
            self._at[step.outputs[0]] = _METHODS[step.op](self, step)
        last = self._at.get(self._answer)
        listed = list(self._nodes.values())
        if not listed or listed[-1].name != last:
            raise UnsupportedModelError("the last node does not compute the output; export the model without the rest")
        self.dims = self._shapes[last]
        return [node.to_dict() for node in listed]

    # -- helpers of the methods ----------------------------------------------------------------------------------------

    def _put(self, node: Node) -> str:
        self._shapes = extend_shapes([node], self._shapes)
        self._nodes[node.name] = node
        return node.name

    def _name(self, op: str) -> str:
        return f"{op}_{len(self._nodes)}"

    def _source(self, step: OnnxNode, number: int = 0) -> str:
        """Return the node that computes an input."""
        name = step.inputs[number]
        if name not in self._at:
            raise _unsupported(step, f"its input {name!r} is constant, which is supported only for weights")
        return self._at[name]

    def _weight(self, step: OnnxNode, number: int, rank: int) -> str:
        """Return the name of a constant input with this number of dimensions; empty if the input is left out."""
        if number >= len(step.inputs) or not step.inputs[number]:
            return ""
        name = step.inputs[number]
        if name not in self.constants:
            raise _unsupported(step, f"its input {name!r} must be constant")
        if self.constants[name].ndim != rank:
            raise _unsupported(
                step, f"its input {name!r} has {self.constants[name].ndim} dimensions, and must have {rank}"
            )
        return name

    def _scalar(self, step: OnnxNode, number: int, attribute: str, default: float) -> float:
        if number < len(step.inputs) and step.inputs[number]:
            constant = self.constants.get(step.inputs[number])
            if constant is None or constant.size != 1:
                raise _unsupported(step, f"its input {step.inputs[number]!r} must be one constant number")
            return float(constant.reshape(-1)[0])
        return float(step.attributes.get(attribute, default))

    def _alone(self, step: OnnxNode) -> Node | None:
        """Return the node before if it has no other reader, so that it can do this node's work too."""
        node = self._nodes.get(self._source(step))
        return node if self._reads[step.inputs[0]] == 1 else None

    # -- operators ----------------------------------------------------------------------------------------------------

    def identity(self, step: OnnxNode) -> str:
        """Skip an op that changes nothing: Identity, Dropout."""
        if step.inputs[0] in self.constants:
            self.constants[step.outputs[0]] = self.constants[step.inputs[0]]
            return ""
        return self._source(step)

    def softmax(self, step: OnnxNode) -> str:
        """Drop a final softmax over labels: answers compute scores anyway."""
        if step.outputs[0] != self._answer:
            raise _unsupported(step, "it is supported only at the end")
        source = self._source(step)
        if len(self._shapes[source]) != 2:
            raise _unsupported(step, "it is supported only after a row of labels; export the model without it")
        return source

    def conv(self, step: OnnxNode) -> str:
        weight = self._weight(step, 1, 4)
        shape = self.constants[weight].shape if weight else ()
        window = _window(step, self._shapes[self._source(step)], shape[2:])
        return self._put(
            nodes.Conv(
                name=self._name("conv"), inputs=(self._source(step),), channels=shape[0], weight=weight,
                bias=self._weight(step, 2, 1), groups=int(step.attributes.get("group", 1)), **window,
            )
        )  # fmt: skip

    def batch_norm(self, step: OnnxNode) -> str:
        before = self._alone(step)
        if not isinstance(before, nodes.Conv) or before.norm is not None:
            raise _unsupported(step, "it is supported only after a Conv without other readers")
        scale, bias, mean, variance = (self._weight(step, i, 1) for i in range(1, 5))
        norm = BatchNorm(scale, bias, mean, variance, float(step.attributes.get("epsilon", 1e-5)))
        self._nodes[before.name] = replace(before, norm=norm)
        return before.name

    def function(self, step: OnnxNode) -> str:
        """Add Relu, Clip to 0..6 or LeakyRelu with a slope of 0.1."""
        function = "relu"
        if step.op == "Clip":
            low, high = self._scalar(step, 1, "min", -np.inf), self._scalar(step, 2, "max", np.inf)
            if low != 0 or high not in (6, np.inf):
                raise _unsupported(step, f"it cuts to {low:g}..{high:g}; supported: 0..6 and 0..inf")
            function = "relu6" if high == 6 else "relu"
        elif step.op == "LeakyRelu":
            slope = float(step.attributes.get("alpha", 0.01))
            if abs(slope - 0.1) > 1e-6:
                raise _unsupported(step, f"its slope is {slope:g}; supported: 0.1")
            function = "leaky_relu"
        return self._put(nodes.Activation(name=self._name(function), inputs=(self._source(step),), function=function))

    def max_pool(self, step: OnnxNode) -> str:
        window = _window(step, self._shapes[self._source(step)], step.attributes.get("kernel_shape", ()))
        return self._put(nodes.MaxPool(name=self._name("max_pool"), inputs=(self._source(step),), **window))

    def average_pool(self, step: OnnxNode) -> str:
        count_pad = bool(step.attributes.get("count_include_pad", 0))
        if count_pad and step.attributes.get("ceil_mode", 0):
            raise _unsupported(step, "ceil_mode with count_include_pad is not supported")
        window = _window(step, self._shapes[self._source(step)], step.attributes.get("kernel_shape", ()))
        name = self._name("average_pool")
        return self._put(nodes.AveragePool(name=name, inputs=(self._source(step),), count_pad=count_pad, **window))

    def global_average(self, step: OnnxNode) -> str:
        return self._put(nodes.GlobalAverage(name=self._name("mean"), inputs=(self._source(step),)))

    def reduce_mean(self, step: OnnxNode) -> str:
        """Add a mean over rows and columns."""
        axes = step.attributes.get("axes", ())
        if len(step.inputs) > 1:
            axes = self.constants.get(step.inputs[1], np.zeros(0)).reshape(-1).tolist()
        if {int(axis) % 4 for axis in axes} != {2, 3}:
            raise _unsupported(step, f"its axes are {list(axes)}; supported: rows and columns, [2, 3]")
        return self.global_average(step)

    def add(self, step: OnnxNode) -> str:
        """Add a sum, or the bias of the matrix product before."""
        constant = next((i for i in range(2) if step.inputs[i] in self.constants), None)
        if constant is None:
            return self._put(nodes.Add(name=self._name("sum"), inputs=tuple(self._source(step, i) for i in range(2))))
        turned = step._replace(inputs=(step.inputs[1 - constant], step.inputs[constant]))
        before = self._alone(turned)
        if not isinstance(before, nodes.Linear) or before.bias:
            raise _unsupported(step, "a constant is supported only after a MatMul without other readers")
        bias = turned.inputs[1]
        self.constants[bias] = self.constants[bias].reshape(-1)
        self._nodes[before.name] = replace(before, bias=bias)
        return before.name

    def concat(self, step: OnnxNode) -> str:
        if int(step.attributes.get("axis", 1)) not in (1, -3):
            raise _unsupported(step, f"its axis is {step.attributes['axis']}; supported: channels, 1")
        sources = tuple(self._source(step, i) for i in range(len(step.inputs)))
        return self._put(nodes.Concat(name=self._name("concat"), inputs=sources))

    def flatten(self, step: OnnxNode) -> str:
        if int(step.attributes.get("axis", 1)) != 1:
            raise _unsupported(step, f"its axis is {step.attributes['axis']}; supported: 1")
        return self._put(nodes.Flatten(name=self._name("flat"), inputs=(self._source(step),)))

    def reshape(self, step: OnnxNode) -> str:
        """Add a flattening: [N, -1], written in any way."""
        target = self.constants.get(step.inputs[1])
        dims = self._shapes[self._source(step)]
        row = int(np.prod(dims))
        if target is None or target.size != 2 or target[0] not in (0, 1, -1) or target[1] not in (-1, row):
            shown = "computed" if target is None else target.tolist()
            raise _unsupported(
                step, f"its shape is {shown}; supported: [1, -1], of a model that was exported for one picture"
            )
        return self._put(nodes.Flatten(name=self._name("flat"), inputs=(self._source(step),)))

    def gemm(self, step: OnnxNode) -> str:
        factors = {key: step.attributes.get(key, 1) for key in ("alpha", "beta")}
        if any(float(v) != 1 for v in factors.values()) or step.attributes.get("transA", 0):
            raise _unsupported(step, f"{factors} and transA are supported only as 1, 1 and 0")
        return self._linear(step, bool(step.attributes.get("transB", 0)), self._weight(step, 2, 1))

    def matmul(self, step: OnnxNode) -> str:
        return self._linear(step, False, "")

    def _linear(self, step: OnnxNode, turned: bool, bias: str) -> str:
        weight = self._weight(step, 1, 2)
        columns = self.constants[weight].shape[0 if turned else 1]
        what: dict[str, Any] = {"weight": weight, "bias": bias, "stored_in_out": not turned}
        return self._put(nodes.Linear(name=self._name("linear"), inputs=(self._source(step),), columns=columns, **what))


def _unsupported(step: OnnxNode, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{step.op} {step.name or step.outputs[0]!r}: {why}")


def _window(step: OnnxNode, source: Dims, kernel: Sequence[int]) -> dict[str, Any]:
    """Return the window of a step over a map."""
    if len(kernel) != 2 or len(source) != 3:
        raise _unsupported(
            step, f"a window of {list(kernel)} over {list(source)}; supported: two dimensions over a map"
        )
    (ky, kx), (sy, sx) = map(int, kernel), map(int, step.attributes.get("strides", (1, 1)))
    dy, dx = map(int, step.attributes.get("dilations", (1, 1)))
    sizes, auto = ((ky - 1) * dy + 1, (kx - 1) * dx + 1), step.attributes.get("auto_pad", "NOTSET")
    top, left, bottom, right = map(int, step.attributes.get("pads", (0, 0, 0, 0)))
    if auto.startswith("SAME"):
        around = [max((-(-n // by) - 1) * by + k - n, 0) for n, by, k in zip(source, (sy, sx), sizes, strict=False)]
        upper = [n // 2 if auto == "SAME_UPPER" else n - n // 2 for n in around]
        top, left, bottom, right = *upper, around[0] - upper[0], around[1] - upper[1]
    pad: Pad = (top, left, bottom, right)
    if step.attributes.get("ceil_mode", 0):
        bottom, right = (
            _ceiled(n, k, by, *ends)
            for n, k, by, ends in zip(source, sizes, (sy, sx), ((top, bottom), (left, right)), strict=False)
        )
        pad = (top, left, bottom, right)
    return {"kernel": (ky, kx), "stride": (sy, sx), "pad": pad, "dilation": (dy, dx)}


def _ceiled(side: int, size: int, stride: int, before: int, after: int) -> int:
    """Return the padding after a map for the windows that ceil_mode adds: windows that begin in the map."""
    count = -(-(side + before + after - size) // stride) + 1
    if (count - 1) * stride >= side + before:
        count -= 1
    return max((count - 1) * stride + size - side - before, 0)


_METHODS: Final[Mapping[str, Callable[[OnnxConverter, OnnxNode], str]]] = {
    "Add": OnnxConverter.add,
    "AveragePool": OnnxConverter.average_pool,
    "BatchNormalization": OnnxConverter.batch_norm,
    "Clip": OnnxConverter.function,
    "Concat": OnnxConverter.concat,
    "Conv": OnnxConverter.conv,
    "Dropout": OnnxConverter.identity,
    "Flatten": OnnxConverter.flatten,
    "Gemm": OnnxConverter.gemm,
    "GlobalAveragePool": OnnxConverter.global_average,
    "Identity": OnnxConverter.identity,
    "LeakyRelu": OnnxConverter.function,
    "MatMul": OnnxConverter.matmul,
    "MaxPool": OnnxConverter.max_pool,
    "ReduceMean": OnnxConverter.reduce_mean,
    "Relu": OnnxConverter.function,
    "Reshape": OnnxConverter.reshape,
    "Softmax": OnnxConverter.softmax,
}
_LEAST: Final[Mapping[str, int]] = {"Add": 2, "BatchNormalization": 5, "Conv": 2, "Gemm": 2, "MatMul": 2, "Reshape": 2}
OPERATORS: Final = frozenset(_METHODS)


# ----------------------------------------------------------------------------------------------------------------------
# Reads an ONNX file: its graph as the nodes of a convolutional net, its initialisers as stored tensors.
#
# The package `onnx` is an extra. Unlike safetensors, the whole file lies in memory while it is open.


FILE: Final = "model.onnx"
_OPSET: Final = 7  # before, Reshape and Add meant other things
_DTYPES: Final[Mapping[str, str]] = {"float16": "F16", "float32": "F32", "float64": "F64"}
_EXPORT: Final = (
    "export it with fixed sizes and one picture: torch.onnx.export(model.eval(), torch.zeros(1, 3, 224, 224), "
    "'model.onnx')"
)


def _reader(array: npt.NDArray[Any]) -> TensorReader:
    """Return the reader of a tensor in memory."""
    dtype = _DTYPES.get(str(array.dtype), str(array.dtype))

    def read(start: int, stop: int, columns: int) -> npt.NDArray[Any]:
        rows = array.reshape(-1, columns)[start:stop]
        return rows if dtype == "F16" else rows.astype("<f4", copy=False)

    return TensorReader(array.shape, dtype, read)


class OnnxFile:
    """An open ONNX file; config: the contents of a config.json for it."""

    def __init__(self, path: Path, config_beside: Mapping[str, Any]) -> None:
        """Read `path`; config_beside: the config.json of its directory, for labels. Raises ModelError."""
        graph, self.stamps = _load(path)
        constants = dict(_constants(graph))
        size, given = _input(path, graph, constants)
        reader = OnnxConverter(size, given, constants)
        try:
            nodes = reader.nodes(list(_steps(path, graph)), [value.name for value in graph.output])
        except ModelError as error:
            raise type(error)(f"{path}: {error}") from error
        self.config = _config(size, nodes, reader.dims, config_beside)
        self.tensors = {name: _reader(array) for name, array in constants.items()}

    def close(self) -> None:
        """Forget the tensors; a second call does nothing."""
        self.tensors = {}


def find_onnx(path: Path) -> Path | None:
    """Return the ONNX file that a path names, or that a directory without safetensors has; None if there is none."""
    if path.suffix == ".onnx" and path.is_file():
        return path
    inside = path / FILE
    return inside if inside.is_file() and not has_safetensors(path) else None


def _load(path: Path) -> tuple[Any, list[FileStamp]]:
    """Return a file's graph, and the stamps of all files that its weights are in."""
    refuse_pointers([path])
    try:
        import onnx
        from onnx.external_data_helper import load_external_data_for_model
    except ImportError as error:
        raise ModelError(f"{path} needs the package onnx; install it: pip install onnx") from error
    try:
        # Stamps are taken before reading, so a file that changes meanwhile has another stamp at the next start.
        stamps = [file_stamp(path, path.stat())]
        model = onnx.load(os.fspath(path), load_external_data=False)
        others = [path.parent / name for name in sorted(_external_files(model.graph))]
        refuse_pointers(others)
        stamps += [file_stamp(other, other.stat()) for other in others]
        load_external_data_for_model(model, os.fspath(path.parent))
    except ModelError:
        raise
    except Exception as error:  # protobuf and onnx may raise any error for damaged bytes
        raise ModelError(f"{path} cannot be read as ONNX ({error}): {explain_file(path)}") from error
    opset = max((used.version for used in model.opset_import if used.domain in ("", "ai.onnx")), default=1)
    if opset < _OPSET:
        raise UnsupportedModelError(f"{path}: opset {opset} is not supported; export it with {_OPSET} or later")
    return model.graph, stamps


def _external_files(graph: Any) -> set[str]:
    """Return the names of external weight files."""
    tensors = [*graph.initializer, *(attribute.t for node in graph.node for attribute in node.attribute)]
    return {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}


def _constants(graph: Any) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield initialisers and constants of nodes."""
    from onnx import numpy_helper

    for tensor in graph.initializer:
        yield tensor.name, numpy_helper.to_array(tensor)
    for node in graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    yield node.output[0], numpy_helper.to_array(attribute.t)
                else:
                    yield node.output[0], np.asarray(_value(attribute))


def _value(attribute: Any) -> Any:
    from onnx import helper

    value = helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value


def _steps(path: Path, graph: Any) -> Iterator[OnnxNode]:
    """Yield the nodes; raises UnsupportedModelError naming every unsupported operator."""
    unknown = sorted({node.op_type for node in graph.node} - OPERATORS - {"Constant"})
    if unknown:
        raise UnsupportedModelError(
            f"{path}: the operators {', '.join(unknown)} are not supported; supported are "
            f"{', '.join(sorted(OPERATORS))} with constant weights"
        )
    for node in graph.node:
        if node.op_type != "Constant":
            attributes = {attribute.name: _value(attribute) for attribute in node.attribute}
            yield OnnxNode(node.op_type, node.name, tuple(node.input), tuple(node.output), attributes)


def _input(path: Path, graph: Any, constants: Mapping[str, Any]) -> tuple[int, str]:
    """Return the side of the picture, and the name of the input."""
    inputs = [value for value in graph.input if value.name not in constants]
    if len(inputs) != 1:
        raise UnsupportedModelError(f"{path} has {len(inputs)} inputs; only models of one picture are supported")
    dims = [d.dim_value or d.dim_param or "?" for d in inputs[0].type.tensor_type.shape.dim]
    shown = f"{path}: the input {inputs[0].name!r} is [{', '.join(map(str, dims))}]"
    if len(dims) != 4 or dims[1] != 3:
        raise UnsupportedModelError(f"{shown}; only pictures [1, 3, side, side] are supported")
    if not all(isinstance(d, int) for d in dims[2:]):
        raise UnsupportedModelError(f"{shown}, of dynamic size; {_EXPORT}")
    if dims[2] != dims[3]:
        raise UnsupportedModelError(f"{shown}; only square pictures are supported")
    if isinstance(dims[0], int) and dims[0] != 1:
        raise UnsupportedModelError(f"{shown}, of several pictures; {_EXPORT}")
    return int(dims[2]), inputs[0].name


def _config(size: int, nodes: list[dict[str, Any]], dims: tuple[int, ...], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json: of a classifier if the answer is a row, else of a map."""
    config: dict[str, Any] = {"model_type": "convnet", "image_size": size, "nodes": nodes}
    if len(dims) == 3:
        return {**config, "architectures": ["ConvNet"]}
    labels = {"id2label": own["id2label"]} if "id2label" in own else {"num_labels": dims[1]}
    problem = {"problem_type": own["problem_type"]} if "problem_type" in own else {}
    return {**config, "architectures": ["ConvNetForImageClassification"], **labels, **problem}
