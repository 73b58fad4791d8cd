"""Runs the Programs of all devices in one process: ready ops in a random order, frames handed over at once or late."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np

from hepti_mqtt.ids import PLANNER
from hepti_mqtt.kernels import Workers
from hepti_mqtt.program import Program
from hepti_mqtt.runtime.worker.executor import Executor, bind, pack


def run_programs(
    programs: Mapping[str, Program], tensors: Mapping[str, np.ndarray], inputs: np.ndarray, seed: int = 0
) -> np.ndarray:
    """Return what the devices send to the planner, put together; asserts that everybody finishes."""
    rng = random.Random(seed)
    workers = Workers(1)
    executors = {name: Executor() for name in programs}
    packed: dict[object, object] = {}
    for name, program in programs.items():
        missing = [ref for ref in program.weights() if ref not in packed]
        packed.update(pack(tensors, missing))
        bound = bind(program, packed, workers)
        executors[name].admit(1, bound)
        for key in bound.template.inputs:
            executors[name].deliver(1, key, inputs)
    outputs: list[tuple[int, np.ndarray]] = []
    mail: list[tuple[str, tuple[int, int, str], np.ndarray]] = []
    while True:
        ready = [name for name in executors if executors[name]._machine._ready]
        if mail and (not ready or rng.random() < 0.5):
            to, key, array = mail.pop(rng.randrange(len(mail)))
            assert executors[to].deliver(1, key, array) == "filled", (to, key)
            continue
        if not ready:
            break
        name = rng.choice(ready)
        step = executors[name].next()
        assert step is not None
        out = step.run()
        if out is None:
            continue
        array = np.array(out.array)
        for to in out.op.to:
            if to == PLANNER:
                outputs.append((out.op.row, array))
            else:
                mail.append((to, (out.op.node, out.op.part, name), array))
    assert all(executor.finished(1) for executor in executors.values()), "some op never became ready"
    return np.concatenate([array for _, array in sorted(outputs, key=lambda entry: entry[0])])
