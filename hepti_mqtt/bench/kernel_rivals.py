"""The same matmul by others: NumPy (OpenBLAS), and PyTorch and ONNX Runtime where they are installed.

Each maker takes x [m, k], w [k, n], b [n] and a thread count and returns (call, result of the call as an array [m, n]).
PyTorch and ONNX Runtime add the bias as Hepti does; NumPy has no fused bias and computes the product alone.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Made = tuple[Callable[[], object], Callable[[], F32]]
Maker = Callable[[F32, F32, F32, int], Made]


def _numpy(x: F32, w: F32, b: F32, _threads: int) -> Made:
    out = np.empty((len(x), len(b)), np.float32)
    # The bias is outside of what is timed.
    return lambda: np.matmul(x, w, out=out), lambda: out + b


def _torch(x: F32, w: F32, b: F32, threads: int) -> Made:
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    weight = torch.from_numpy(np.ascontiguousarray(w.T))  # [n, k], as torch.nn.Linear stores it
    left, bias = torch.from_numpy(x), torch.from_numpy(b)
    linear = torch.nn.functional.linear
    return lambda: linear(left, weight, bias), lambda: linear(left, weight, bias).numpy()


def _torch_int8(x: F32, w: F32, b: F32, threads: int) -> Made:
    """Dynamic int8: weights quantised once, activations in every call."""
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    plain = torch.nn.Linear(*w.shape)
    plain.weight, plain.bias = (torch.nn.Parameter(torch.from_numpy(np.array(a))) for a in (w.T, b))
    with warnings.catch_warnings():
        # It is to move to a package of its own; what it computes stays what it was.
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(plain), {torch.nn.Linear}, torch.qint8)
    (linear,) = model
    left = torch.from_numpy(x)
    return lambda: linear(left), lambda: linear(left).numpy()


def _onnxruntime(x: F32, w: F32, b: F32, threads: int) -> Made:
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "b"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (len(x), len(b)))],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")],
    )
    # Opset and IR version that every onnxruntime of the last years reads.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Idle threads that spin would take the core from whoever is timed next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    out = np.empty((len(x), len(b)), np.float32)
    bound: Any = session.io_binding()
    bound.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
    bound.bind_output("y", "cpu", 0, np.float32, out.shape, out.ctypes.data)
    keep = (x, out)  # the binding has only addresses

    def call(_keep: tuple[F32, F32] = keep) -> None:
        session.run_with_iobinding(bound)

    return call, lambda: out


_Makers = Mapping[str, tuple[tuple[str, ...], Maker]]
_MAKERS: Final[_Makers] = {
    "numpy": (("numpy",), _numpy),
    "torch": (("torch",), _torch),
    "onnxruntime": (("onnxruntime", "onnx"), _onnxruntime),
}
_INT8_MAKERS: Final[_Makers] = {"torch int8": (("torch",), _torch_int8)}


def rivals() -> dict[str, Maker]:
    """Return the makers of those that are installed, by name."""
    return _installed(_MAKERS)


def int8_rivals() -> dict[str, Maker]:
    """Return the makers of those in int8 that are installed, by name."""
    return _installed(_INT8_MAKERS)


def _installed(makers: _Makers) -> dict[str, Maker]:
    return {
        name: maker
        for name, (needs, maker) in makers.items()
        if all(importlib.util.find_spec(package) for package in needs)
    }
