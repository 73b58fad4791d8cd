"""How far an answer moves when exchanges or weights are narrow: the Programs, run here once per dtype.

Plain NumPy (the kernels' references, sums in float64) and not the compiled kernels: a planner need not compile them, no
weight is packed, and nothing but the wire makes the answers differ. The answers are those of seeded requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.ids import PLANNER, PlanVersion
from hepti_mqtt.models import random_inputs, representative_shape
from hepti_mqtt.plan import NARROW_WIRE_DTYPES, Plan, WeightDtype, WireDtype
from hepti_mqtt.plan_programs import covering_plans, device_programs
from hepti_mqtt.planner.candidates import EXACT, Decision, WireErrorKey, wire_error_key
from hepti_mqtt.planner.price import Question
from hepti_mqtt.planner.search import decide
from hepti_mqtt.program import NUMPY_DTYPE, Compute, ExchangeKey, Program, Send, Slot, WeightRef
from hepti_mqtt.schedule import ProgramRun, RunMachine, make_template
from hepti_mqtt.spec import RequestShape, Spec, Want
from hepti_mqtt.storage import BLOCK_STORAGES, BlockStorage

SAMPLE_TOKENS: Final = 32
LEAST_INPUTS: Final = 3
MOST_INPUTS: Final = 8
WEIGHT_TOKENS: Final = 16
WEIGHT_INPUTS: Final = 2
INT8_ROWS: Final = 256  # of k that share a scale: `BLOCK` of the kernels, which a planner imports late
AGREE: Final = 1.3  # the largest error over the smallest, up to which more inputs would say nothing new
WANTS: Final[tuple[Want, ...]] = ("task", "hidden")
# Of weights, in float64: all devices, wires and inputs use a layer's at about the same time.
KEPT_BYTES: Final = 128 << 20

Array = NDArray[Any]
Measure = Callable[[Plan], Mapping[WireDtype, float]]


def decide_within_accuracy(question: Question, known: dict[WireErrorKey, float], measure: Measure) -> Decision:
    """Return the best feasible plan whose narrow wire is known to keep the answer within the question's budget.

    known: errors found so far, to which those of plans that a search would choose are added. Raises as `decide` does.
    """
    if question.accuracy is None:
        return decide(question)
    while True:
        decision = decide(replace(question, errors=dict(known)))
        narrow = [run for run in decision.chosen.plan.executables if run.wire != EXACT]
        if all(wire_error_key(run) in known for run in narrow):
            return decision
        for run in narrow:
            if wire_error_key(run) not in known:  # replicas that are alike have one error
                errors = measure(run)
                known.update({wire_error_key(run, wire): errors[wire] for wire in NARROW_WIRE_DTYPES})


def wire_errors(spec: Spec, plan: Plan, tensors: Mapping[str, Array]) -> dict[WireDtype, float]:
    """Return by narrow dtype |answer - answer with f32| / |answer with f32|, the largest that was found.

    Of the task and of hidden states, for inputs until they agree. Infinity where a value is not finite. tensors:
    canonical ones [in, out] or [n], read when they are asked for. Of plans with narrow weights only the wire's part is
    found: the weights here are those of the checkpoint. Raises ValueError for replicas, each of which has its own wire.
    """
    if plan.replicas:
        raise ValueError(f"{plan.method} has plans side by side, each with a wire of its own: measure them one by one")
    plan = covering_plans(spec, plan)[0]  # a device that has no row of so short a request would exchange nothing
    weights = _Weights(tensors)
    found = dict.fromkeys(NARROW_WIRE_DTYPES, 0.0)
    for want in WANTS:
        shape = _sample(spec, want)
        parts = [device_programs(spec, replace(plan, wire=wire), shape) for wire in ("f32", *NARROW_WIRE_DTYPES)]
        tried: dict[WireDtype, list[float]] = {wire: [] for wire in NARROW_WIRE_DTYPES}
        for seeds in (range(LEAST_INPUTS), *((seed,) for seed in range(LEAST_INPUTS, MOST_INPUTS))):
            inputs = [random_inputs(spec, shape, np.random.default_rng(seed)) for seed in seeds]
            for exact, *others in _answers(parts, inputs, [weights] * len(parts)):
                for wire, other in zip(NARROW_WIRE_DTYPES, others, strict=True):
                    tried[wire].append(_relative(other, exact))
            if all(max(errors) <= AGREE * min(errors) for errors in tried.values()):
                break
        found = {wire: max(found[wire], *errors) for wire, errors in tried.items()}
    return found


def weight_error(
    spec: Spec, tensors: Mapping[str, Array], weight_dtype: WeightDtype, originals: Mapping[str, Array] | None = None
) -> float:
    """Return |answer - answer with f32 weights| / |answer with f32 weights| on one device, the largest of some inputs.

    Infinity where a value is not finite. tensors: as for `wire_errors`. originals: what they were before they were
    quantised.
    """
    plan = Plan("model", PlanVersion(1, 1), "single", ("device",), "device")
    shape = _sample(spec, "task", WEIGHT_TOKENS, WEIGHT_INPUTS)
    parts = [device_programs(spec, replace(plan, weight_dtype=each), shape) for each in ("f32", weight_dtype)]
    inputs = random_inputs(spec, shape, np.random.default_rng(0))
    kept = _Weights(tensors)
    ((exact, other),) = _answers(parts, [inputs], [kept if originals is None else _Weights(originals), kept])
    items = len(shape.sizes) if len(exact) == len(shape.sizes) else 1
    return max(_relative(a, b) for a, b in zip(np.split(other, items), np.split(exact, items), strict=True))


def narrowed(weight: Array, weight_dtype: WeightDtype | BlockStorage) -> Array:
    """Return what a matrix [k, n] stands for when it is kept in a narrow dtype, as kernels keep it.

    In blocks it is what it was read from.
    """
    if weight_dtype in BLOCK_STORAGES:
        return weight
    if weight_dtype == "f16":
        return weight.astype(np.float16).astype(weight.dtype)
    found = np.empty_like(weight)
    for start in range(0, len(weight), INT8_ROWS):
        rows = slice(start, start + INT8_ROWS)
        steps = np.abs(weight[rows]).max(axis=0) / 127
        found[rows] = np.rint(weight[rows] / np.where(steps > 0, steps, 1)) * steps
    return found


def rounded(x: Array) -> Array:
    """Return what activations [m, k] become under `w8a8`: 254 steps from the least to the largest value of a block."""
    found = np.empty_like(x)
    for start in range(0, x.shape[1], INT8_ROWS):
        block = x[:, start : start + INT8_ROWS]
        low, high = np.minimum(block.min(axis=1), 0)[:, None], np.maximum(block.max(axis=1), 0)[:, None]
        step = (high - low) / 254
        found[:, start : start + INT8_ROWS] = np.rint(block / np.where(step > 0, step, 1)) * step
    return found


def _sample(spec: Spec, want: Want, tokens: int = SAMPLE_TOKENS, sequences: int = 1) -> RequestShape:
    shape = representative_shape(spec, tokens, sequences).with_want(want)
    # A decoder's shape is that of one step; the prompt has the exchanges.
    is_step = shape.session_rows and shape.size == 1
    return shape.decode_step(min(tokens, shape.session_rows)) if is_step else shape


def _relative(found: Array, exact: Array) -> float:
    if not (np.isfinite(found).all() and np.isfinite(exact).all()):
        return float("inf")
    return float(np.linalg.norm(found - exact)) / max(float(np.linalg.norm(exact)), 1e-30)


def _answers(
    wires: Sequence[Mapping[str, Program]], inputs: Sequence[Array], weights: Sequence[_Weights]
) -> list[list[Array]]:
    """Return for each of the inputs the answers of all Programs, each with its weights, layer by layer side by side."""
    runs = [[_ReferenceRun(parts, x, own) for parts, own in zip(wires, weights, strict=True)] for x in inputs]
    while sum(run.advance() for alike in runs for run in alike):
        pass
    return [[run.answer() for run in alike] for alike in runs]


class _Weights:
    """Ranges of tensors, of which the last ones are kept."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self._tensors = tensors
        self._kept: OrderedDict[WeightRef, Array] = OrderedDict()
        self._nbytes = 0

    def __getitem__(self, ref: WeightRef) -> Array:
        if ref in self._kept:
            self._kept.move_to_end(ref)
            return self._kept[ref]
        tensor = self._tensors[ref.tensor]
        columns = slice(*ref.columns)
        array = np.array(tensor[columns] if tensor.ndim == 1 else tensor[slice(*ref.rows), columns], np.float64)
        if ref.weight_dtype != "f32":
            with np.errstate(over="ignore", invalid="ignore"):
                array = narrowed(array, ref.weight_dtype)
        self._kept[ref] = array
        self._nbytes += array.nbytes
        while self._nbytes > KEPT_BYTES and len(self._kept) > 1:
            self._nbytes -= self._kept.popitem(last=False)[1].nbytes
        return array


class _ReferenceRun:
    """One request under one plan: exchanges are handed over as they are sent."""

    def __init__(self, parts: Mapping[str, Program], inputs: Array, weights: _Weights) -> None:
        self._devices = {name: _ReferenceDevice(program, inputs, weights) for name, program in parts.items()}
        self._parts: list[tuple[int, Array]] = []
        devices = list(self._devices.values())
        for task in devices[0].tasks:  # leased: in turn, since each device would compute them alike
            devices[task % len(devices)].lease(task, inputs)

    def advance(self) -> bool:
        """Run each device in turn until it waits for another; return whether there was anything to do."""
        return sum(self._run(device) for device in self._devices.values()) > 0

    def _run(self, device: _ReferenceDevice) -> bool:
        moved = False
        while (sent := device.step()) is not None:
            moved = True
            for op, array in sent:
                for to in op.to:
                    if to == PLANNER:
                        self._parts.append((op.row, array))
                    else:
                        self._devices[to].fill((op.node, op.part, device.name), array)
        return moved

    def answer(self) -> Array:
        """Return what the planner would get, in float64; raises ValueError if a device waits for what nobody sends."""
        waiting = [name for name, device in self._devices.items() if device.left]
        if waiting or not self._parts:
            raise ValueError(f"{', '.join(waiting) or 'everyone'} waits for what nobody sends")
        self._parts.sort(key=lambda part: part[0])
        return np.concatenate([part for _, part in self._parts]).astype(np.float64)


class _ReferenceDevice:
    """The part of one device, on the run machine that executor and simulator have too."""

    def __init__(self, program: Program, inputs: Array, weights: _Weights) -> None:
        self.name, self._program, self._weights = program.device, program, weights
        self._machine: RunMachine[ProgramRun] = RunMachine()
        self._work = ProgramRun(1, make_template(program))
        self._arrays: dict[Slot, Array] = {}
        for slot in self._work.template.state_slots:
            spec = program.slots[slot]
            self._arrays[slot] = np.zeros(spec.shape, NUMPY_DTYPE[spec.dtype])
        self._machine.admit(self._work)
        for key in self._work.template.inputs:
            self.fill(key, inputs)

    @property
    def left(self) -> int:
        """Return how many ops have not run."""
        return self._work.ops_left

    @property
    def tasks(self) -> Iterable[int]:
        """Return the tasks that may be leased to it."""
        return self._work.template.task_inputs

    def lease(self, task: int, inputs: Array) -> None:
        """Take a task."""
        for key in self._work.start_task(task):
            self.fill(key, inputs)

    def fill(self, key: ExchangeKey, array: Array) -> None:
        """Take what was sent."""
        slot = self._work.template.slot_of_exchange[key]
        if self._machine.fill_slot(self._work, slot):
            self._arrays[slot] = array

    def step(self) -> tuple[tuple[Send, Array], ...] | None:
        """Run the next op, and return what it sends; None if there is none that could run."""
        if (found := self._machine.next_op()) is None:
            return None
        op = self._program.ops[found[1]]
        sent: tuple[tuple[Send, Array], ...] = ()
        if isinstance(op, Send):
            sent = ((op, self._read(op.slot)),)
        elif isinstance(op, Compute):
            from hepti_mqtt.kernels import KERNELS  # here: Numba takes longer to import than the rest of a planner

            for step in op.kernels:
                reads, weights = [self._read(slot) for slot in step.reads], [self._weights[ref] for ref in step.weights]
                if any(ref.weight_dtype == "w8a8" for ref in step.weights):
                    reads[0] = rounded(reads[0])
                with np.errstate(over="ignore", invalid="ignore"):  # what f16 cannot say becomes an error of infinity
                    results = KERNELS[step.kernel].reference(step, self._program.slots, reads, weights)
                self._arrays.update(zip(step.writes, results, strict=True))
        for slot in self._machine.finish_op(self._work, found[1]):
            self._arrays.pop(slot, None)
        return sent

    def _read(self, slot: Slot) -> Array:
        spec = self._program.slots[slot]
        if spec.base is None:
            return self._arrays[slot]
        start = spec.start * prod(self._program.slots[spec.base].shape[1:])
        return self._arrays[spec.base].reshape(-1)[start : start + prod(spec.shape)].reshape(spec.shape)
