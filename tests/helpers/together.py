"""The Programs of all devices in one process: real kernels and executors, exchanges that arrive in any order.

What a `Swarm` also proves (frames, topics, subscriptions, loading, lost devices) takes ten times as long.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np

from hepti_mqtt.core.ids import PLANNER
from hepti_mqtt.core.program import NUMPY_DTYPE, Program, WeightRef
from hepti_mqtt.kernels import Weight, Workers
from hepti_mqtt.runtime.worker.executor import BoundProgram, Executor, bind, pack

REQUEST = 1


def bound(
    parts: Mapping[str, Program], tensors: Mapping[str, np.ndarray], workers: Workers | None = None
) -> dict[str, BoundProgram]:
    """Bind the Program of each device to the weights that it names, and no others; what several name is packed once."""
    workers = workers or Workers(1)
    packed: dict[WeightRef, Weight] = {}
    out = {}
    for name, program in parts.items():
        packed |= pack(tensors, [ref for ref in program.weights() if ref not in packed])
        out[name] = bind(program, {ref: packed[ref] for ref in program.weights()}, workers)
    return out


def run_together(
    devices: Mapping[str, BoundProgram], inputs: np.ndarray, seed: int = 0, duplicates: float = 0.0
) -> np.ndarray:
    """Return the output of one request; stretches of all devices, or parts of them, and arrivals take turns at random.

    Fails if an exchange is sent that nobody expects, or if a device is left with something to do.
    """
    rng = random.Random(seed)
    executors = {name: Executor() for name in devices}
    under_way: list[tuple[str, tuple[int, int, str], np.ndarray]] = []
    outputs: list[tuple[int, np.ndarray]] = []
    for name, program_of_device in devices.items():
        slots = program_of_device.template.program.slots
        states = {spec.state: np.empty(spec.shape, NUMPY_DTYPE[spec.dtype]) for spec in slots if spec.state}
        executors[name].admit(REQUEST, program_of_device, states)
        under_way += [(name, key, inputs) for key in program_of_device.template.inputs]
    names = sorted(devices)
    for task in devices[names[0]].template.task_inputs:  # of a bag: in turn
        executors[names[task % len(names)]].start_task(REQUEST, task, inputs)
    for executor in executors.values():
        executor.end_leases(REQUEST)
    idle: set[str] = set()
    while under_way or len(idle) < len(devices):
        active = sorted(devices.keys() - idle)
        choice = rng.randrange(len(active) + len(under_way))
        if choice >= len(active):
            at = choice - len(active)
            under_way[at], under_way[-1] = under_way[-1], under_way[at]
            name, key, array = under_way.pop()
            filled = executors[name].deliver(REQUEST, key, array)
            assert filled in {"filled", "duplicate"}, f"{name} does not expect {key}"
            idle.discard(name)
            continue
        name = active[choice]
        step = executors[name].next_step()
        if step is None:
            idle.add(name)
            continue
        outgoing = step.run(ops=rng.choice((0, 0, 1, 3)))  # all of a stretch, or a part
        if outgoing is None:
            continue
        array, op = np.array(outgoing.array), outgoing.op
        array.flags.writeable = False  # as that of a frame
        if op.to == (PLANNER,):
            outputs.append((op.row, array))
            continue
        copies = 2 if rng.random() < duplicates else 1
        under_way += [(to, (op.node, op.part, name), array) for to in op.to for _ in range(copies)]
    assert all(executor.finish_if_done(REQUEST) for executor in executors.values()), (
        "a device waits for what nobody sends"
    )
    return np.concatenate([array for _, array in sorted(outputs, key=lambda part: part[0])])


def run_programs(
    programs: Mapping[str, Program], tensors: Mapping[str, np.ndarray], inputs: np.ndarray, seed: int = 0
) -> np.ndarray:
    """Return the output of the Programs of all devices, from tensors to the answer."""
    return run_together(bound(programs, tensors), inputs, seed)
