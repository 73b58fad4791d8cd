"""What each op of a model takes on one core of this machine beside its price: the planner's figures, held to account.

strategy=map_rows/none/ahead shares=[0.63,0.19,0.18] device=1 is what the first of several devices computes. The device
measures itself first, as an agent does. Weights and inputs are random, but for integers, which are 1. Ops run in their
order; of each the median stands, ops alike together. Run it twice: a machine's speed moves meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any, Final

import numpy as np

from benchmarks.tables import table
from device_agent.measure import measure
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import DeviceProfile
from hepti_mqtt.core.program import NUMPY_DTYPE, Compute, Program, Recv, SlotSpec, WeightRef
from hepti_mqtt.cost.reported import profile_from_caps
from hepti_mqtt.kernels import Weight, Workers, allocate, works
from hepti_mqtt.models import graph, largest_shape, representative_shape
from hepti_mqtt.runtime.worker.executor import Executor, bind
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import device_programs, make_plan

MEMORY_BYTES: Final = 4 << 30


def main(
    models: Sequence[str] = ("vgg16", "resnet50"),
    strategy: str = "single",
    shares: Sequence[float] = (1.0,),
    device: int = 1,
    tokens: int = 128,
    runs: int = 6,
) -> None:
    """Print the table of each model, the ops that take most first."""
    workers = Workers(1)
    profile = profile_from_caps("here", measure(workers, MEMORY_BYTES, narrow=False), MEMORY_BYTES, 1.0)
    for kind in models:
        rows = _rows(_program(kind, strategy, shares, device, tokens), profile, workers, runs)
        whole = [sum(n * m for _, n, m, _ in rows), sum(n * p for _, n, _, p in rows)]
        lines = [[*row, row[2] / row[3] if row[3] else None] for row in rows]
        lines.append(["all", sum(row[1] for row in rows), *whole, whole[0] / whole[1]])
        print(f"\n{kind}, {strategy}: ms of one op\n")
        print("\n".join(table(("op", "number", "measured", "price", "ratio"), lines)))


def _program(kind: str, strategy: str, shares: Sequence[float], device: int, tokens: int) -> Program:
    spec, (name, *variant) = spec_of_kind(kind), strategy.split("/")
    devices = tuple(f"d{n}" for n in range(1, len(shares) + 1))
    choices = STRATEGIES[name].variants_for(len(devices), graph(spec, largest_shape(spec)))
    options = next((o for o in choices if list(o.values()) == variant), None)
    if options is None:
        raise ConfigError(f"{name} has no variant {'/'.join(variant)}; it has {[list(o.values()) for o in choices]}")
    plan = make_plan(spec, Plan("m", PlanVersion(1, 1), name, devices, devices[0]), name, options, shares)
    return device_programs(spec, plan, representative_shape(spec, tokens))[devices[device - 1]]


def _rows(program: Program, profile: DeviceProfile, workers: Workers, runs: int) -> list[tuple[str, int, float, float]]:
    """Return (op, how many, measured ms, priced ms) of ops that are alike."""
    bound, executor = bind(program, dict(_weights(program)), workers), Executor()
    times: dict[int, list[float]] = defaultdict(list)
    for run in range(1 + runs):
        executor.admit(run + 1, bound)
        for recv in (op for op in program.ops if isinstance(op, Recv)):
            executor.deliver(run + 1, recv.key, _values(program.slots[recv.slot]))
        while (step := executor.next_step()) is not None:
            begun = perf_counter()
            step.run()
            if run and isinstance(program.ops[step.place], Compute):  # the first run does not count
                times[step.place].append(perf_counter() - begun)
        executor.drop(run + 1)
    alike: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for place, found in times.items():
        op = program.ops[place]
        assert isinstance(op, Compute)
        work = works(op, program.slots)
        alike[_name(op, program)].append((1e3 * median(found), 1e3 * profile.seconds(*work) if work else 0.0))
    rows = [(name, len(own), median(m for m, _ in own), median(p for _, p in own)) for name, own in alike.items()]
    return sorted(rows, key=lambda row: -row[1] * row[2])


def _name(op: Compute, program: Program) -> str:
    """Return a kernel with the shapes that it reads and writes, such as 28x28x512."""
    reads, writes = (
        " ".join("x".join(map(str, program.slots[slot].shape)) for slot in slots)
        for slots in (op.reads[:2], op.writes[:1])
    )
    return f"{op.kernel} {reads} -> {writes}"


def _values(slot: SlotSpec) -> Any:
    """Return what arrives in a slot: ids that every model has, or numbers as activations are."""
    dtype = NUMPY_DTYPE[slot.dtype]
    if np.issubdtype(dtype, np.integer):
        return np.ones(slot.shape, dtype)
    return np.random.default_rng(0).standard_normal(slot.shape, np.float32).astype(dtype)


def _weights(program: Program) -> list[tuple[WeightRef, Weight]]:
    """Return random weights: none shares memory with another, as in a model."""
    found, seeds = [], count()
    for ref in program.weights():
        (top, bottom), (left, right) = ref.rows, ref.columns
        buffer = allocate(ref)
        random = np.random.default_rng(next(seeds)).standard_normal((bottom - top, right - left), np.float32)
        buffer.put(0.02 * random, top, left)
        found.append((ref, buffer.finish()))
    return found
