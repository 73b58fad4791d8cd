"""One encoder layer (post-norm, BERT): ours beside PyTorch eager and ONNX Runtime, on the same weights.

Ours is the Program of strategy `single` for a model of one layer, taken up at its boundary, so that the embedding is
neither run nor timed. PyTorch is the plain eager module, ONNX Runtime the graph of its operators with every
optimisation on. All outputs are compared before anything is timed; then all run in turns, and a ratio is the median
over the rounds of (rival's time / our time in the same round), with the interval that holds the median in 95 %.

    python -m hepti_mqtt.bench.encoder_layer --rows 128 384
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.errors import BenchError, HeptiError
from hepti_mqtt.ids import PLANNER, Epoch
from hepti_mqtt.kernels import Workers, warm_up
from hepti_mqtt.models import encoder, shape_for, tensor_sources
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import program
from hepti_mqtt.program import Compute, Program, Recv
from hepti_mqtt.runtime.worker.executor import Executor, bind, pack

Array = NDArray[np.float32]
Tensors = dict[str, Array]
Runner = Callable[[Array], Array]

_MATRICES = ("query", "key", "value", "attention_out", "mlp_up", "mlp_down")

# Sums in another order over up to 4096 terms of a layer whose outputs are of size 1.
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Record:
    """Times of one runner in ms, and how often ours fits into its time; status says why there are none."""

    runner: str
    model: str
    rows: int
    threads: int
    status: str
    median_ms: float = math.nan
    ratio: float = math.nan
    ratio_low: float = math.nan
    ratio_high: float = math.nan
    largest_error: float = math.nan


def layer_tensors(spec: ModelSpec, seed: int = 0) -> Tensors:
    """Return seeded weights of layer 0 by canonical name: matrices [in, out], vectors [n]."""
    rng = np.random.default_rng(seed)
    found = {}
    for source in tensor_sources(spec):
        if not source.name.startswith("layers.0."):
            continue
        values = rng.standard_normal(source.shape, np.float32) * np.float32(0.03)
        found[source.name] = values + np.float32(source.name.endswith("norm.weight"))
    return found


def layer_program(spec: ModelSpec, rows: int) -> Program:
    """Return the Program of `single` from layer 0 on: reads x [m, h], sends its value [m, h]."""
    plan = Plan("layer", Epoch(1, 1), "single", ("one",), "one")
    whole = program(spec, plan, shape_for(spec, rows).asking("hidden"), "one")
    stem = (
        (i, op.writes[0])
        for i, op in enumerate(whole.ops)
        if isinstance(op, Compute) and whole.node(op.node) == "embedded"
    )
    at, x = next(stem)
    return Program(whole.device, whole.slots, (Recv(x, PLANNER, 0), *whole.ops[at + 1 :]))


class OurLayer:
    """The layer's Program, bound once and run many times; `op_seconds` sums the time of each op over all runs."""

    def __init__(self, spec: ModelSpec, tensors: Tensors, rows: int, workers: Workers) -> None:
        program = layer_program(spec, rows)
        self._bound = bind(program, pack(tensors, program.weights()), workers)
        self._executor = Executor()
        self._admission = 0
        self.runs = 0
        self.op_seconds: dict[tuple[int, str], float] = {}

    def __call__(self, x: Array) -> Array:
        """Return the layer's value of x [m, h]: a view that the next run overwrites."""
        executor, out = self._executor, x
        self._admission += 1
        self.runs += 1
        executor.admit(self._admission, self._bound)
        executor.deliver(self._admission, (0, 0, PLANNER), x)
        while (step := executor.next()) is not None:
            began = time.perf_counter()
            sent = step.run()
            key = (step.place, step.kernel or "send")
            self.op_seconds[key] = self.op_seconds.get(key, 0.0) + time.perf_counter() - began
            out = out if sent is None else sent.array
        executor.finished(self._admission)
        return out


def _torch_layer(spec: ModelSpec, tensors: Tensors, threads: int, packed_for: int | None = None) -> Runner:
    """Return the layer in PyTorch: eager, or with its weights packed once by oneDNN for so many rows."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(threads)
    heads, d = spec.heads, spec.head_dim
    matrices = {n: torch.from_numpy(tensors[f"layers.0.{n}.weight"].T.copy()) for n in _MATRICES}
    vectors = {n: torch.from_numpy(t) for n, t in tensors.items() if t.ndim == 1}

    if packed_for is not None:
        reorder = torch.ops.mkldnn._reorder_linear_weight
        matrices = {n: reorder(w, packed_for) for n, w in matrices.items()}

    def linear(x: Any, name: str) -> Any:
        bias = vectors[f"layers.0.{name}.bias"]
        if packed_for is None:
            return functional.linear(x, matrices[name], bias)
        return torch.ops.mkldnn._linear_pointwise(x, matrices[name], bias, "none", [], "")

    def norm(x: Any, name: str) -> Any:
        gamma, beta = (vectors[f"layers.0.{name}.{kind}"] for kind in ("weight", "bias"))
        return functional.layer_norm(x, (spec.hidden,), gamma, beta, spec.norm_eps)

    def run(array: Array) -> Array:
        with torch.inference_mode():
            x = torch.from_numpy(array)[None]
            q, k, v = (linear(x, n).view(1, -1, heads, d).transpose(1, 2) for n in ("query", "key", "value"))
            a = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
            x = norm(x + linear(a, "attention_out"), "attention_norm")
            up = functional.gelu(linear(x, "mlp_up"))
            return norm(x + linear(up, "mlp_down"), "mlp_norm")[0].numpy()  # type: ignore[no-any-return]

    return run


def _onnx_graph(spec: ModelSpec, tensors: Tensors, rows: int) -> bytes:
    """Return the layer as an ONNX model (opset 20), as an export of the PyTorch module has it: x [m, h] to y [m, h]."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    h, heads, d = spec.hidden, spec.heads, spec.head_dim
    constants = {**tensors, "scale": np.asarray(d**-0.5, np.float32)}
    constants["split"], constants["joined"] = np.asarray([1, rows, heads, d]), np.asarray([rows, h])
    nodes: list[Any] = []

    def node(kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [f"v{len(nodes)}"], **attributes))
        return f"v{len(nodes) - 1}"

    def linear(x: str, name: str) -> str:
        return node("Add", [node("MatMul", [x, f"layers.0.{name}.weight"]), f"layers.0.{name}.bias"])

    def by_head(name: str, order: Sequence[int]) -> str:
        return node("Transpose", [node("Reshape", [linear("x", name), "split"])], perm=order)

    def norm(x: str, name: str) -> str:
        inputs = [x, f"layers.0.{name}.weight", f"layers.0.{name}.bias"]
        return node("LayerNormalization", inputs, axis=-1, epsilon=spec.norm_eps)

    q, k, v = by_head("query", (0, 2, 1, 3)), by_head("key", (0, 2, 3, 1)), by_head("value", (0, 2, 1, 3))
    p = node("Softmax", [node("Mul", [node("MatMul", [q, k]), "scale"])], axis=-1)
    a = node("Reshape", [node("Transpose", [node("MatMul", [p, v])], perm=(0, 2, 1, 3)), "joined"])
    y = norm(node("Add", [linear(a, "attention_out"), "x"]), "attention_norm")
    y = norm(node("Add", [linear(node("Gelu", [linear(y, "mlp_up")]), "mlp_down"), y]), "mlp_norm")
    x_info, y_info = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [rows, h]) for n in ("x", y))
    stored = [numpy_helper.from_array(np.ascontiguousarray(t), n) for n, t in constants.items()]
    graph = helper.make_graph(nodes, "layer", [x_info], [y_info], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    return model.SerializeToString()  # type: ignore[no-any-return]


def _onnxruntime_layer(spec: ModelSpec, tensors: Tensors, rows: int, threads: int) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    graph = _onnx_graph(spec, tensors, rows)
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x})[0]


def _rivals(spec: ModelSpec, tensors: Tensors, rows: int, threads: int) -> dict[str, Runner | None]:
    """Return the rivals by name; None for one whose packages are not installed."""
    makers: dict[str, tuple[tuple[str, ...], Callable[[], Runner]]] = {
        "torch": (("torch",), lambda: _torch_layer(spec, tensors, threads)),
        "torch packed": (("torch",), lambda: _torch_layer(spec, tensors, threads, packed_for=rows)),
        "onnxruntime": (("onnx", "onnxruntime"), lambda: _onnxruntime_layer(spec, tensors, rows, threads)),
    }
    return {name: make() if all(map(find_spec, needs)) else None for name, (needs, make) in makers.items()}


def _times(runners: Mapping[str, Runner], x: Array, threads: int, rounds: int) -> dict[str, list[float]]:
    """Return each runner's time in every round, in turns that begin with another runner each round."""
    # One thread's own time leaves out when another process had the core.
    clock = time.thread_time if threads == 1 else time.perf_counter
    names = list(runners)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-2, rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            began = clock()
            runners[name](x)
            if turn >= 0:
                found[name].append(clock() - began)
    return found


def _median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the order statistics that hold the true median in at least 95 % (normal approximation)."""
    ordered, n = sorted(values), len(values)
    reach = math.ceil(0.98 * math.sqrt(n))
    return median(values), ordered[max(0, n // 2 - reach)], ordered[min(n - 1, (n - 1) // 2 + reach)]


@dataclass(frozen=True, slots=True)
class Runners:
    """Those who run one layer on x [rows, h]: all that are installed, ours as "ours", with each one's largest error."""

    x: Array
    runs: Mapping[str, Runner]
    missing: Sequence[str]
    errors: Mapping[str, float]


def checked_runners(spec: ModelSpec, rows: int, threads: int, seed: int, workers: Workers) -> Runners:
    """Return the runners of one layer on the same seeded weights.

    Raises BenchError if an output differs from ours by more than 1e-4.
    """
    tensors = layer_tensors(spec, seed)
    x = np.random.default_rng(seed + 1).standard_normal((rows, spec.hidden), np.float32)
    rivals = _rivals(spec, tensors, rows, threads)
    ours = OurLayer(spec, tensors, rows, workers)
    runs: dict[str, Runner] = {"ours": ours, **{n: r for n, r in rivals.items() if r is not None}}
    want = np.array(ours(x))
    errors = {name: float(np.abs(run(x) - want).max(initial=0.0)) for name, run in runs.items()}
    if wrong := {name: error for name, error in errors.items() if not error <= _TOLERANCE}:
        raise BenchError(
            f"a layer's outputs differ from ours by {wrong}, more than {_TOLERANCE}; nothing was timed. Run the tests "
            "of the kernels: pytest tests/kernels"
        )
    return Runners(x, runs, [n for n in rivals if n not in runs], errors)


def measure(rows: int, threads: int = 1, model: str = "bert-large", rounds: int = 30, seed: int = 0) -> list[Record]:
    """Return one record of ours and one of every rival, for one layer of a model kind over `rows` tokens.

    Times of one thread are its CPU time, of more the wall clock's. Raises BenchError if a runner computes wrongly.
    """
    spec = encoder(spec_of_kind(model, layers=1))
    warm_up()
    workers = Workers(threads)
    try:
        runners = checked_runners(spec, rows, threads, seed, workers)
        times = _times(runners.runs, runners.x, threads, rounds)
    finally:
        workers.close()
    records = []
    for name in times:
        ratios = [theirs / mine for theirs, mine in zip(times[name], times["ours"], strict=True)]
        middle = 1e3 * median(times[name])
        records.append(
            Record(name, model, rows, threads, "ok", middle, *_median_interval(ratios), runners.errors[name])
        )
    return [*records, *(Record(name, model, rows, threads, "not installed") for name in runners.missing)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the records as JSON lines; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 384])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="bert-large")
    parser.add_argument("--rounds", type=int, default=30)
    chosen = parser.parse_args(arguments)
    try:
        for rows in chosen.rows:
            for record in measure(rows, chosen.threads, chosen.model, chosen.rounds):
                print(json.dumps(asdict(record)))
    except HeptiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
