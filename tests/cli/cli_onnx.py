"""A net in an ONNX file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


def small_net(path: Path) -> Path:
    """Write a classifier of small pictures; the test is skipped without the package onnx."""
    onnx = pytest.importorskip("onnx", reason="the extra `onnx` is not installed")
    made = {"w": (4, 3, 3, 3), "v": (5, 4)}
    rng = np.random.default_rng(0)
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        for name, shape in made.items()
    ]
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w"], ["c"]),
        onnx.helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        onnx.helper.make_node("Flatten", ["p"], ["f"]),
        onnx.helper.make_node("Gemm", ["f", "v"], ["y"], transB=1),
    ]
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, dims)
        for name, dims in (("x", (1, 3, 9, 9)), ("y", None))
    ]
    graph = onnx.helper.make_graph(nodes, "net", ends[:1], ends[1:], weights)
    version = [onnx.helper.make_operatorsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=version, ir_version=9), path)
    return path
