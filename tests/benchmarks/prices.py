"""What each op of a model takes on one core of this machine beside its price: the planner's figures, held to account.

Run by hand: `make bench-prices MODELS="vgg16 resnet50"`; STRATEGY=map_rows/none/ahead SHARES=0.63,0.19,0.18 for what
the DEVICE-th of several devices (1) computes. TOKENS: of a text (128). The device measures itself first, as an agent
does. Weights and inputs are random, but for integers, which are 1. Ops run in their order, RUNS times (6) after one
that does not count; of each the median stands, ops alike together. Run it twice: a machine's speed moves meanwhile.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from device_agent.measure import measure
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.cost.profiles import DeviceProfile, profile_from_caps
from hepti_mqtt.ids import Epoch
from hepti_mqtt.kernels import Weight, Workers, allocate, works
from hepti_mqtt.models import graph, largest_shape, shape_for
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import make_plan, programs
from hepti_mqtt.program import NUMPY_DTYPE, Compute, Program, Recv, SlotSpec, WeightRef
from hepti_mqtt.runtime.worker.executor import Bound, Executor, bind
from hepti_mqtt.spec import Spec
from hepti_mqtt.strategies import STRATEGIES

MEMORY_BYTES = 4 << 30
NAMES = 60  # characters of an op's name in the table


class Row(NamedTuple):
    """Ops that are alike: how many, and the seconds of one, measured and predicted."""

    name: str
    number: int
    measured_s: float
    predicted_s: float


def main() -> None:
    """Print the table of each model."""
    workers = Workers(1)
    profile = profile_from_caps("here", measure(workers, MEMORY_BYTES, narrow=False), MEMORY_BYTES, 1.0)
    for kind in os.environ.get("MODELS", "vgg16 resnet50").split():
        program = program_of(spec_of_kind(kind))
        rows = table(program, profile, workers)
        print(f"\n{kind}, {os.environ.get('STRATEGY', 'single')}: ms of one op, those that take most first\n")
        print(f"{'op':{NAMES}} {'number':>6} {'measured':>9} {'price':>9} {'ratio':>6}")
        for row in rows:
            print_row(row.name, row.number, row.measured_s, row.predicted_s)
        print_row("all", sum(r.number for r in rows), *sums(rows))


def print_row(name: str, number: int, measured_s: float, predicted_s: float) -> None:
    """Print a line of the table."""
    ratio = measured_s / predicted_s if predicted_s else float("inf")
    print(f"{name[:NAMES]:{NAMES}} {number:6} {measured_s * 1e3:9.3f} {predicted_s * 1e3:9.3f} {ratio:6.2f}")


def sums(rows: list[Row]) -> tuple[float, float]:
    """Return the seconds of all ops, measured and predicted."""
    return sum(r.number * r.measured_s for r in rows), sum(r.number * r.predicted_s for r in rows)


def program_of(spec: Spec) -> Program:
    """Return the Program that the environment asks for."""
    strategy, *variant = os.environ.get("STRATEGY", "single").split("/")
    shares = [float(part) for part in os.environ.get("SHARES", "1").split(",")]
    names = tuple(f"d{n}" for n in range(1, len(shares) + 1))
    choices = STRATEGIES[strategy].choices(len(names), graph(spec, largest_shape(spec)))
    options = next((o for o in choices if list(o.values()) == variant), None)
    if options is None:
        sys.exit(f"{strategy} has no variant {'/'.join(variant)}; there are: {[list(o.values()) for o in choices]}")
    plan = make_plan(spec, Plan("m", Epoch(1, 1), strategy, names, names[0]), strategy, options, shares)
    return programs(spec, plan, shape_for(spec, int(os.environ.get("TOKENS", "128"))))[
        names[int(os.environ.get("DEVICE", "1")) - 1]
    ]


def table(program: Program, profile: DeviceProfile, workers: Workers) -> list[Row]:
    """Return the rows, those that take most first."""
    bound = bind(program, weights_of(program), workers)
    executor, times = Executor(), defaultdict[int, list[float]](list)
    for run in range(1 + int(os.environ.get("RUNS", "6"))):
        for place, seconds in timed(executor, run + 1, bound, program):
            if run:
                times[place].append(seconds)
    alike: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for place, found in times.items():
        op = program.ops[place]
        assert isinstance(op, Compute)
        work = works(op, program.slots)
        alike[name_of(op, program)].append((median(found), profile.seconds(*work) if work else 0.0))
    rows = [Row(name, len(found), *map(median, zip(*found, strict=True))) for name, found in alike.items()]
    return sorted(rows, key=lambda r: -r.number * r.measured_s)


def timed(executor: Executor, admission: int, bound: Bound, program: Program) -> list[tuple[int, float]]:
    """Run a Program once; return (place, seconds) of each op that computes."""
    executor.admit(admission, bound)
    for recv in (op for op in program.ops if isinstance(op, Recv)):
        executor.deliver(admission, recv.key, values(program.slots[recv.slot]))
    found = []
    while (step := executor.next()) is not None:
        begun = perf_counter()
        step.run()
        found.append((step.place, perf_counter() - begun))
    executor.drop(admission)
    return [(place, seconds) for place, seconds in found if isinstance(program.ops[place], Compute)]


def name_of(op: Compute, program: Program) -> str:
    """Return a kernel with the shapes that it reads and writes."""
    reads, writes = ([program.slots[slot].shape for slot in slots] for slots in (op.reads[:2], op.writes[:1]))
    return f"{op.kernel} {' '.join(map(text, reads))} -> {' '.join(map(text, writes))}"


def text(shape: tuple[int, ...]) -> str:
    """Return a shape as 28x28x512."""
    return "x".join(map(str, shape))


def values(slot: SlotSpec) -> Any:
    """Return what arrives in a slot: ids that every model has, or numbers as activations are."""
    dtype = NUMPY_DTYPE[slot.dtype]
    if np.issubdtype(dtype, np.integer):
        return np.ones(slot.shape, dtype)
    return np.random.default_rng(0).standard_normal(slot.shape, np.float32).astype(dtype)


def weights_of(program: Program) -> Mapping[WeightRef, Weight]:
    """Return random weights: none shares memory with another, as in a model."""
    found, seeds = {}, count()
    for ref in program.weights():
        (top, bottom), (left, right) = ref.rows, ref.columns
        buffer = allocate(ref)
        random = np.random.default_rng(next(seeds)).standard_normal((bottom - top, right - left), np.float32)
        buffer.put(0.02 * random, top, left)
        found[ref] = buffer.finish()
    return found


if __name__ == "__main__":
    main()
