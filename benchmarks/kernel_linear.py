"""The op `linear` as a contender, and the same matmul by others: NumPy (OpenBLAS), PyTorch and ONNX Runtime.

Every contender is checked before it is timed. PyTorch and ONNX Runtime add the bias as Hepti does; NumPy has no fused
bias and computes the product alone.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.errors import BenchError
from benchmarks.kernel_timing import Contender, Shape
from hepti_mqtt.core.plan import WeightDtype
from hepti_mqtt.core.program import Compute, SlotSpec, WeightRef
from hepti_mqtt.kernels import KERNELS, NarrowMatrix, Weight, Workers, allocate

F32 = NDArray[np.float32]
Made = tuple[Callable[[], object], Callable[[], F32]]
# From x [m, k], w [k, n], b [n] and a thread count to (call, its result as an array [m, n]).
Maker = Callable[[F32, F32, F32, int], Made]

# Roundings of f32 that a sum of k products, its scale and its bias may add to k.
MORE_ROUNDINGS = 4
# The step of 8 bits over a row, or over all of x, that includes 0; PyTorch's dynamic int8 leaves out one bit of it.
_LEVELS, _RIVAL_LEVELS = 254.0, 127.0


@dataclass(frozen=True, slots=True)
class Data:
    """x [m, k], w [k, n], b [n], and what they make in float64: x @ w + b and |x| |w| + |b|, both [m, n]."""

    x: F32
    w: F32
    b: F32
    exact: NDArray[np.float64]
    size: NDArray[np.float64]

    def rounding(self) -> NDArray[np.float64]:
        """Return the bound of f32 on |error| [m, n]: (k + 4) u (|x| |w| + |b|), u = 2^-24 (Higham 2002, 3.1)."""
        return np.asarray((self.x.shape[1] + MORE_ROUNDINGS) * 2.0**-24 * self.size)


def data(shape: Shape, seed: int) -> Data:
    """Return seeded data of a shape: its values do not depend on which other shapes are measured."""
    m, n, k, _ = shape
    rng = np.random.default_rng([seed, m, n, k])
    x, w = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32) / np.float32(k**0.5)
    return made_of(x, w, rng.standard_normal(n, np.float32))


def made_of(x: F32, w: F32, b: F32) -> Data:
    """Return the data of x @ w + b."""
    return Data(x, w, b, x.astype(np.float64) @ w + b, np.abs(x).astype(np.float64) @ np.abs(w) + np.abs(b))


def check(name: str, got: F32, of: Data, bound: NDArray[np.float64]) -> None:
    """Raise BenchError unless |got - exact| <= bound everywhere; NaN is out of any bound."""
    wrong = ~(np.abs(got - of.exact) <= bound)
    if wrong.any():
        (m, k), n = of.x.shape, len(of.b)
        raise BenchError(
            f"{name} computes [{m}, {k}] @ [{k}, {n}] wrongly in {wrong.sum()} of {wrong.size} values; nothing was "
            "timed. Run the tests of the kernels: pytest tests/unit/kernels"
        )


def ours(of: Data, storage: WeightDtype, pool: Workers) -> tuple[Contender, int]:
    """Return (the op as the executor calls it, bytes of its matrix), checked against what its weights stand for."""
    attrs = {"bias": True, "activation": None, "residual": False}
    out = np.empty((len(of.x), len(of.b)), np.float32)
    op, slots = Compute("linear", (0,), (1,), (), attrs), (SlotSpec(of.x.shape), SlotSpec(out.shape))
    matrix = _weight("w", of.w, "packed", storage)
    weights = [matrix, _weight("b", of.b[None], "plain", "f32")]
    KERNELS["linear"].bind(op, slots, weights, pool)([of.x], [out])
    stored = made_of(of.x, matrix.plain(), of.b) if isinstance(matrix, NarrowMatrix) else of
    bound = stored.rounding()
    if storage == "w8a8":
        # Half a step of the row's activations, times the weights that they meet.
        steps = (of.x.max(axis=1, initial=0) - of.x.min(axis=1, initial=0)) / _LEVELS
        bound += 0.5 * np.outer(steps, np.abs(stored.w).sum(axis=0)) * (1 + 1e-5)
    check(f"linear in {storage}", out, stored, bound)
    return partial(KERNELS["linear"].bind(op, slots, weights, pool), [of.x], [out]), _nbytes(matrix)


def _weight(name: str, array: F32, layout: Any, storage: WeightDtype) -> Weight:
    rows, columns = array.shape
    buffer = allocate(WeightRef(name, (0, rows), (0, columns), layout, storage))
    buffer.put(array, 0, 0)
    return buffer.finish()


def _nbytes(matrix: Weight) -> int:
    """Return the bytes that are read of a matrix: its panels, and what scales them."""
    if isinstance(matrix, NarrowMatrix):
        return matrix.panels.nbytes + matrix.scales.nbytes + matrix.sums.nbytes
    return matrix.nbytes if isinstance(matrix, np.ndarray) else matrix.panels.nbytes


def theirs(of: Data, makers: Mapping[str, Maker], threads: int) -> dict[str, Contender]:
    """Return rivals in f32, each checked."""
    return _checked(of, makers, threads, of.rounding())


def theirs_int8(of: Data, makers: Mapping[str, Maker], threads: int) -> dict[str, Contender]:
    """Return rivals that quantise weights and activations with one step each per matrix, each checked."""
    x_step = (of.x.max(initial=0) - of.x.min(initial=0)) / _RIVAL_LEVELS
    w_step = 2 * np.abs(of.w).max() / _RIVAL_LEVELS
    error_of_x, error_of_w = np.full_like(of.x, x_step / 2, np.float64), np.full_like(of.w, w_step / 2, np.float64)
    bound = of.rounding() + error_of_x @ (np.abs(of.w) + error_of_w) + np.abs(of.x) @ error_of_w
    return _checked(of, makers, threads, bound)


def _checked(of: Data, makers: Mapping[str, Maker], threads: int, bound: NDArray[np.float64]) -> dict[str, Contender]:
    found: dict[str, Contender] = {}
    for name, make in makers.items():
        found[name], result = make(of.x, of.w, of.b, threads)
        found[name]()
        check(name, result(), of, bound)
    return found


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
    from onnx import helper, numpy_helper

    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "b"], ["y"])]
    out = np.empty((len(x), len(b)), np.float32)
    constants = [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")]
    return onnx_session(nodes, constants, x, out, threads, "ORT_ENABLE_ALL"), lambda: out


def onnx_session(nodes: Any, constants: Any, x: F32, out: F32, threads: int, level: str) -> Contender:
    """Return what computes `out`, named y, of x in ONNX Runtime."""
    import onnxruntime
    from onnx import TensorProto, helper

    reads, gives = (helper.make_tensor_value_info(n, TensorProto.FLOAT, v.shape) for n, v in (("x", x), ("y", out)))
    graph = helper.make_graph(nodes, "graph", [reads], [gives], constants)
    # Opset and IR version that every onnxruntime of the last years reads.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Idle threads that spin would take the core from whoever is timed next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    bound: Any = session.io_binding()
    bound.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
    bound.bind_output("y", "cpu", 0, np.float32, out.shape, out.ctypes.data)
    keep = (x, out)  # the binding has only addresses
    return lambda _keep=keep: session.run_with_iobinding(bound)  # type: ignore[misc]


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
