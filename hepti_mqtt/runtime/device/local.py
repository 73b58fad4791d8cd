"""One device's Program run to its end right here: what `model verify`, benchmarks and tests use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.ids import PLANNER
from hepti_mqtt.kernels import Weight, Workers, allocate
from hepti_mqtt.program import NUMPY_DTYPE, Program, WeightRef
from hepti_mqtt.runtime.device.executor import Executor, bind


def pack(tensors: Mapping[str, NDArray[Any]], refs: Iterable[WeightRef]) -> dict[WeightRef, Weight]:
    """Return weight ranges as the loader would make them, from whole canonical tensors [in, out] or [n]."""
    held = {}
    for ref in refs:
        buffer = allocate(ref)
        tensor = tensors[ref.tensor]
        buffer.put(tensor.reshape(1, -1) if tensor.ndim == 1 else tensor, 0, 0)
        held[ref] = buffer.finish()
    return held


def run_local(
    program: Program, tensors: Mapping[str, NDArray[Any]], inputs: NDArray[Any], workers: Workers | None = None
) -> NDArray[Any]:
    """Return what a Program without peers sends to the planner.

    Raises ValueError if it waits for a peer or sends nothing.
    """
    bound = bind(program, pack(tensors, program.weights()), workers or Workers(1))
    executor = Executor()
    states = {name: np.empty(spec.shape, NUMPY_DTYPE[spec.dtype]) for name, spec in program.states().items()}
    executor.admit(1, bound, states)
    for key in bound.template.inputs:
        executor.deliver(1, key, inputs)
    parts: list[tuple[int, NDArray[Any]]] = []
    while (step := executor.next()) is not None:
        outgoing = step.run()
        if outgoing is not None and outgoing.op.to == (PLANNER,):
            parts.append((outgoing.op.row, np.array(outgoing.array)))
    if not parts or not executor.finished(1):
        raise ValueError(f"the Program of {program.device} cannot run alone")
    return np.concatenate([part for _, part in sorted(parts, key=lambda entry: entry[0])])
