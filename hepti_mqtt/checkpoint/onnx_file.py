"""Reads an ONNX file: its graph as the nodes of a convolutional net, its initialisers as stored tensors.

The package `onnx` is an extra. Unlike safetensors, the whole file lies in memory while it is open.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hepti_mqtt.checkpoint.hash_cache import Stamp
from hepti_mqtt.checkpoint.onnx_nodes import OPERATORS, Reader, Step
from hepti_mqtt.errors import ModelError, UnsupportedModelError

FILE: Final = "model.onnx"
_OPSET: Final = 7  # before, Reshape and Add meant other things
_DTYPES: Final[Mapping[str, str]] = {"float16": "F16", "float32": "F32", "float64": "F64"}
_EXPORT: Final = (
    "export it with fixed sizes and one picture: torch.onnx.export(model.eval(), torch.zeros(1, 3, 224, 224), "
    "'model.onnx')"
)


class ArrayTensor:
    """A tensor in memory that is read as those of files are."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        self.shape: tuple[int, ...] = array.shape
        self.dtype = _DTYPES.get(str(array.dtype), str(array.dtype))
        self.is_float = str(array.dtype) in _DTYPES

    def read(self, start: int, stop: int, columns: int) -> npt.NDArray[Any]:
        """Return rows start..stop of the tensor as [rows, columns]: f16 as stored, other dtypes as f32."""
        rows = self._array.reshape(-1, columns)[start:stop]
        return rows if self.dtype == "F16" else rows.astype("<f4", copy=False)


class OnnxFile:
    """An open ONNX file; config: what a config.json would say of it."""

    def __init__(self, path: Path, beside: Mapping[str, Any]) -> None:
        """Read `path`; beside: the config.json of its directory, for labels. Raises ModelError."""
        graph, self.stamps = _load(path)
        constants = dict(_constants(graph))
        size, given = _input(path, graph, constants)
        reader = Reader(size, given, constants)
        try:
            nodes = reader.nodes(list(_steps(path, graph)), [value.name for value in graph.output])
        except ModelError as error:
            raise type(error)(f"{path}: {error}") from error
        self.config = _config(size, nodes, reader.dims, beside)
        self.tensors = {name: ArrayTensor(array) for name, array in constants.items()}

    def close(self) -> None:
        """Forget the tensors; a second call does nothing."""
        self.tensors = {}


def find(path: Path) -> Path | None:
    """Return the ONNX file that a path names, or that a directory without safetensors has; None if there is none."""
    if path.suffix == ".onnx" and path.is_file():
        return path
    others = ("model.safetensors", "model.safetensors.index.json")
    inside = path / FILE
    return inside if inside.is_file() and not any((path / name).is_file() for name in others) else None


def _load(path: Path) -> tuple[Any, list[Stamp]]:
    """Return a file's graph, and the stamps of all files that its weights are in."""
    try:
        import onnx
        from onnx.external_data_helper import load_external_data_for_model
    except ImportError as error:
        raise ModelError(f"{path} needs the package onnx; install it: pip install onnx") from error
    try:
        # A stamp is older than what is read, so that a file that changes meanwhile is another one at the next start.
        stamps = [_stamp(path)]
        model = onnx.load(os.fspath(path), load_external_data=False)
        stamps += [_stamp(path.parent / name) for name in sorted(_beside(model.graph))]
        load_external_data_for_model(model, os.fspath(path.parent))
    except Exception as error:  # protobuf and onnx raise whatever damaged bytes lead them to
        raise ModelError(
            f"{path} cannot be read as ONNX ({error}); it may be an incomplete copy: copy it again"
        ) from error
    opset = max((used.version for used in model.opset_import if used.domain in ("", "ai.onnx")), default=1)
    if opset < _OPSET:
        raise UnsupportedModelError(f"{path}: opset {opset} is not supported; export it with {_OPSET} or later")
    return model.graph, stamps


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return str(path.resolve()), status.st_size, status.st_mtime_ns


def _beside(graph: Any) -> set[str]:
    """Return the names of the files that hold weights beside the graph's own."""
    tensors = [*graph.initializer, *(attribute.t for node in graph.node for attribute in node.attribute)]
    return {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}


def _constants(graph: Any) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield initialisers, and what nodes say that is constant."""
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


def _steps(path: Path, graph: Any) -> Iterator[Step]:
    """Yield the nodes; raises UnsupportedModelError naming every operator that is none of ours."""
    unknown = sorted({node.op_type for node in graph.node} - OPERATORS - {"Constant"})
    if unknown:
        raise UnsupportedModelError(
            f"{path}: the operators {', '.join(unknown)} are not supported; supported are "
            f"{', '.join(sorted(OPERATORS))} with constant weights"
        )
    for node in graph.node:
        if node.op_type != "Constant":
            attributes = {attribute.name: _value(attribute) for attribute in node.attribute}
            yield Step(node.op_type, node.name, tuple(node.input), tuple(node.output), attributes)


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


def _config(size: int, nodes: list[dict[str, Any]], dims: tuple[int, ...], beside: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config.json would say: a classifier if the answer is a row, else a map."""
    config: dict[str, Any] = {"model_type": "convnet", "image_size": size, "nodes": nodes}
    if len(dims) == 3:
        return {**config, "architectures": ["ConvNet"]}
    labels = {"id2label": beside["id2label"]} if "id2label" in beside else {"num_labels": dims[1]}
    problem = {"problem_type": beside["problem_type"]} if "problem_type" in beside else {}
    return {**config, "architectures": ["ConvNetForImageClassification"], **labels, **problem}
