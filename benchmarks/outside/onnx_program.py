"""ONNX Runtime in one process of one thread.

The graph is made from the same weights with the operators of opset 20, and optimised by ONNX Runtime as it sees fit.
Weights are in a file beside the graph, which ONNX Runtime maps: in the graph, a BERT-Large would take five times its
size while it is loaded, more than the memory of the hosts that it is to be measured on.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from benchmarks.outside.worker import Array, Made, Options, Task

OPSET = 20
_LARGE_BYTES, _PAGE_BYTES = 1 << 12, 1 << 16  # offsets that can be mapped
_WEIGHTS, _GRAPH = "weights.bin", "graph.onnx"
_ACTIVATIONS: dict[str, tuple[str, dict[str, str]]] = {
    "gelu": ("Gelu", {}),
    "gelu_tanh": ("Gelu", {"approximate": "tanh"}),
    "relu": ("Relu", {}),
}


class _Graph:
    """Collects nodes and constants, whose values go to a file; every method returns the name of a value."""

    def __init__(self, onnx: Any, task: Task, file: IO[bytes]) -> None:
        self._onnx, self.task, self._file = onnx, task, file
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def op(self, kind: str, *reads: str, **attributes: Any) -> str:
        out = f"v{len(self.nodes)}"
        self.nodes.append(self._onnx.helper.make_node(kind, reads, [out], **attributes))
        return out

    def constant(self, name: str, value: Any) -> str:
        if name not in self.constants:
            self.constants[name] = self._stored(name, np.ascontiguousarray(value))
        return name

    def _stored(self, name: str, value: Array) -> Any:
        onnx = self._onnx
        if value.nbytes < _LARGE_BYTES:  # shapes and scales must be known while the graph is optimised
            return onnx.numpy_helper.from_array(value, name)
        self._file.seek(-self._file.tell() % _PAGE_BYTES, 1)
        kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
        tensor = onnx.TensorProto(name=name, data_type=kind, dims=value.shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        places = {"location": _WEIGHTS, "offset": self._file.tell(), "length": value.nbytes}
        for key, place in places.items():
            tensor.external_data.add(key=key, value=str(place))
        value.tofile(self._file)
        return tensor

    def tensor(self, name: str) -> str:
        return name if name in self.constants else self.constant(name, self.task.tensors[name])

    def linear(self, x: str, name: str) -> str:
        return self.op("Add", self.op("MatMul", x, self.tensor(f"{name}.weight")), self.tensor(f"{name}.bias"))

    def norm(self, x: str, name: str) -> str:
        weight, bias = self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias")
        return self.op("LayerNormalization", x, weight, bias, epsilon=self.task.spec.norm_eps, axis=-1)

    def stem(self) -> str:
        text = self.task.spec.text
        if text is None:
            cls = self.constant("cls", self.task.tensors["stem.cls"].reshape(1, -1))
            x = self.op("Concat", cls, self.linear("input", "stem.patch"), axis=0)
            return self.op("Add", x, self.tensor("stem.position"))
        first = text.position_offset
        places = self.task.tensors["stem.position"][first : first + self.task.rows] + self.task.tensors["stem.type"][0]
        x = self.op("Gather", self.tensor("stem.word"), "input", axis=0)
        return self.norm(self.op("Add", x, self.constant("places", places)), "stem.norm")

    def attention(self, i: int, x: str) -> str:
        m, a, d = self.task.rows, self.task.spec.heads, self.task.spec.head_dim
        split, whole = self.constant("split", np.array([m, a, d])), self.constant("whole", np.array([m, a * d]))
        orders = {"query": (1, 0, 2), "key": (1, 2, 0), "value": (1, 0, 2)}
        q, k, v = (
            self.op("Transpose", self.op("Reshape", self.linear(x, f"layers.{i}.{part}"), split), perm=order)
            for part, order in orders.items()
        )
        scale = self.constant("scale", np.array(d**-0.5, np.float32))
        weights = self.op("Softmax", self.op("Mul", self.op("MatMul", q, k), scale), axis=-1)
        y = self.op("Reshape", self.op("Transpose", self.op("MatMul", weights, v), perm=(1, 0, 2)), whole)
        return self.linear(y, f"layers.{i}.attention_out")

    def mlp(self, i: int, x: str) -> str:
        kind, attributes = _ACTIVATIONS[self.task.spec.activation]
        return self.linear(self.op(kind, self.linear(x, f"layers.{i}.mlp_up"), **attributes), f"layers.{i}.mlp_down")

    def layers(self, x: str) -> str:
        for i in range(self.task.spec.layers):
            first, second = f"layers.{i}.attention_norm", f"layers.{i}.mlp_norm"
            if self.task.spec.norm_first:
                x = self.op("Add", x, self.attention(i, self.norm(x, first)))
                x = self.op("Add", x, self.mlp(i, self.norm(x, second)))
            else:
                x = self.norm(self.op("Add", x, self.attention(i, x)), first)
                x = self.norm(self.op("Add", x, self.mlp(i, x)), second)
        return self.norm(x, "final_norm") if self.task.spec.norm_first else x


def make(_options: Options, task: Task) -> Made:
    """Return what computes the hidden states."""
    import onnx
    import onnxruntime

    with tempfile.TemporaryDirectory(prefix="hepti-onnx-") as directory:
        made = session(task, Path(directory), 1)  # what is mapped stays when the file is gone

    def compute() -> Array:
        result: Array = made.run(None, {"input": task.values})[0]
        return result

    return Made(compute, {"onnxruntime": onnxruntime.__version__, "onnx": onnx.__version__})


def session(task: Task, directory: Path, threads: int, *, stem: bool = True) -> Any:
    """Return a session of the model, without `stem` of its layers alone, with its weights in a file of `directory`."""
    import onnx
    import onnxruntime

    with (directory / _WEIGHTS).open("wb") as file:
        graph = _Graph(onnx, task, file)
        out = graph.layers(graph.stem() if stem else "input")
    helper, kinds = onnx.helper, onnx.TensorProto
    kind = kinds.INT32 if stem and task.spec.text else kinds.FLOAT
    reads = helper.make_tensor_value_info("input", kind, task.values.shape)
    gives = helper.make_tensor_value_info(out, kinds.FLOAT, (task.rows, task.spec.hidden))
    made = helper.make_graph(graph.nodes, "encoder", [reads], [gives], list(graph.constants.values()))
    # The oldest file version that has this opset, which every ONNX Runtime that knows the opset reads.
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
    (directory / _GRAPH).write_bytes(model.SerializeToString())
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
    return onnxruntime.InferenceSession(f"{directory}/{_GRAPH}", settings, ["CPUExecutionProvider"])
