"""One encoder layer (post-norm, BERT): ours beside PyTorch eager and packed and ONNX Runtime, on the same weights.

Ours is the Program of strategy `single` for a model of one layer, taken up at its boundary, so that the embedding is
neither run nor timed. The rivals are the outside baselines' own layer. All outputs are compared before any is timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.errors import BenchError
from benchmarks.outside.worker import Options, Task
from hepti_mqtt.core.ids import PLANNER, PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.program import Compute, Program, Recv
from hepti_mqtt.kernels import Workers
from hepti_mqtt.models import representative_shape, tensor_sources
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.runtime.worker.executor import Executor, bind, pack
from hepti_mqtt.strategies.plan_programs import device_program

Array = NDArray[np.float32]
Runner = Callable[[], Array]
TOLERANCE: Final = 1e-4  # sums in another order over up to 4096 terms of a layer whose outputs are of size 1


def checked_runners(spec: ModelSpec, rows: int, threads: int, seed: int, workers: Workers) -> dict[str, Runner]:
    """Return the runners of one layer on the same seeded weights, ours as "ours" and all that are installed.

    Raises BenchError if an output differs from ours by more than 1e-4.
    """
    rng, tensors = np.random.default_rng(seed), dict[str, Array]()
    for source in tensor_sources(spec):
        if source.name.startswith("layers.0."):
            values = rng.standard_normal(source.shape, np.float32) * np.float32(0.03)
            tensors[source.name] = values + np.float32(source.name.endswith("norm.weight"))
    x = np.random.default_rng(seed + 1).standard_normal((rows, spec.hidden), np.float32)
    task = Task(spec, tensors, x)
    runs = {"ours": _ours(task, workers)}
    if find_spec("torch"):
        runs |= {"torch": _torch(task, threads, packed=False), "torch packed": _torch(task, threads, packed=True)}
    if find_spec("onnx") and find_spec("onnxruntime"):
        runs["onnxruntime"] = _onnxruntime(task, threads)
    want = np.array(runs["ours"]())
    errors = {name: float(np.abs(run() - want).max(initial=0.0)) for name, run in runs.items()}
    if wrong := {name: error for name, error in errors.items() if not error <= TOLERANCE}:
        raise BenchError(f"a layer's outputs differ from ours by {wrong}, more than {TOLERANCE}; nothing was timed")
    return runs


def layer_program(spec: ModelSpec, rows: int) -> Program:
    """Return the Program of `single` from layer 0 on: reads x [m, h], sends its value [m, h]."""
    plan = Plan("layer", PlanVersion(1, 1), "single", ("one",), "one")
    whole = device_program(spec, plan, representative_shape(spec, rows).with_want("hidden"), "one")
    computes = ((i, op) for i, op in enumerate(whole.ops) if isinstance(op, Compute))
    at, stem = next((i, op) for i, op in computes if whole.node(op.node) == "embedded")
    return Program(whole.device, whole.slots, (Recv(stem.writes[0], PLANNER, 0), *whole.ops[at + 1 :]))


def _ours(task: Task, workers: Workers) -> Runner:
    """Return the layer's Program, bound once; its value is a view that the next run overwrites."""
    made = layer_program(task.spec, task.rows)
    bound, executor = bind(made, pack(task.tensors, made.weights()), workers), Executor()
    admissions = iter(range(1, 1 << 62))

    def run() -> Array:
        number, out = next(admissions), task.values
        executor.admit(number, bound)
        executor.deliver(number, (0, 0, PLANNER), task.values)
        while (step := executor.next_step()) is not None:
            sent = step.run()
            out = out if sent is None else sent.array
        executor.finish_if_done(number)
        return out

    return run


def _torch(task: Task, threads: int, *, packed: bool) -> Runner:
    import torch

    from benchmarks.outside.torch_program import by_columns

    run = by_columns(Options(packed=packed), task, stem=False)
    x = torch.from_numpy(task.values)

    def call() -> Array:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            return run(x).numpy()  # type: ignore[no-any-return]

    return call


def _onnxruntime(task: Task, threads: int) -> Runner:
    from benchmarks.outside import onnx_program

    with tempfile.TemporaryDirectory(prefix="hepti-onnx-") as directory:
        session = onnx_program.session(task, Path(directory), threads, stem=False)
    return lambda: session.run(None, {"input": task.values})[0]
