"""Errors of answers by narrow exchanges or weights, measured by running the Programs in NumPy once per dtype.

It uses the kernels' NumPy references with sums in float64 instead of compiled kernels. So a planner compiles nothing,
no weight is packed, and answers differ by the dtype only. The requests have seeded random inputs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.core.ids import PLANNER, PlanVersion
from hepti_mqtt.core.plan import NARROW_WIRE_DTYPES, Plan, WeightDtype, WireDtype
from hepti_mqtt.core.program import NUMPY_DTYPE, Compute, ExchangeKey, Program, Send, Slot, WeightRef
from hepti_mqtt.core.schedule import ProgramRun, RunMachine, make_template
from hepti_mqtt.core.spec import RequestShape, Spec, Want
from hepti_mqtt.core.storage import BLOCK_STORAGES, BlockStorage
from hepti_mqtt.models import random_inputs, representative_shape
from hepti_mqtt.planner.candidates import EXACT, Decision, WireErrorKey, wire_error_key
from hepti_mqtt.planner.price import Question
from hepti_mqtt.planner.search import decide
from hepti_mqtt.strategies.plan_programs import device_programs, plans_for_all_weights

SAMPLE_TOKENS: Final = 32
LEAST_INPUTS: Final = 3
MOST_INPUTS: Final = 8
WEIGHT_TOKENS: Final = 16
WEIGHT_INPUTS: Final = 2
INT8_ROWS: Final = 256  #: rows of k with one scale: `BLOCK` of the kernels, which a planner imports late
AGREE: Final = 1.3  #: largest over smallest error of the inputs, up to which no more inputs are needed
WANTS: Final[tuple[Want, ...]] = ("task", "hidden")
#: Cache of weights in float64: all devices, wires and inputs use a layer's weights at about the same time.
KEPT_BYTES: Final = 128 << 20

Array = NDArray[Any]
Measure = Callable[[Plan], Mapping[WireDtype, float]]


def decide_within_accuracy(question: Question, measured: dict[WireErrorKey, float], measure: Measure) -> Decision:
    """Return the best feasible plan with a measured error of its wire within the question's budget.

    measured: errors so far; the errors of each plan that a search chooses are added. Raises as `decide` does.
    """
    if question.accuracy is None:
        return decide(question)
    while True:
        decision = decide(replace(question, errors=dict(measured)))
        narrow = [run for run in decision.chosen.plan.executables if run.wire != EXACT]
        if all(wire_error_key(run) in measured for run in narrow):
            return decision
        for run in narrow:
            if wire_error_key(run) not in measured:  # equal replicas have one error
                new_errors = measure(run)
                measured.update({wire_error_key(run, wire): new_errors[wire] for wire in NARROW_WIRE_DTYPES})


def wire_errors(spec: Spec, plan: Plan, tensors: Mapping[str, Array]) -> dict[WireDtype, float]:
    """Return max |answer - answer with f32| / |answer with f32| by narrow dtype.

    The maximum is over the task's answer and hidden states, for inputs until their errors agree; infinity if a value is
    not finite. tensors: canonical tensors [in, out] or [n], read on demand. Weights have the checkpoint's dtype, so
    narrow weights of the plan do not count. Raises ValueError for replicas, because each has its own wire.
    """
    if plan.replicas:
        raise ValueError(f"{plan.method} has plans side by side, each with a wire of its own: measure them separately")
    plan = plans_for_all_weights(spec, plan)[0]  # a device without a row of so short a request would exchange nothing
    weights = _Weights(tensors)
    largest = dict.fromkeys(NARROW_WIRE_DTYPES, 0.0)
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
        largest = {wire: max(largest[wire], *errors) for wire, errors in tried.items()}
    return largest


def weight_error(
    spec: Spec, tensors: Mapping[str, Array], weight_dtype: WeightDtype, originals: Mapping[str, Array] | None = None
) -> float:
    """Return max |answer - answer with f32 weights| / |answer with f32 weights| over some inputs, on one device.

    Infinity if a value is not finite. tensors: as for `wire_errors`. originals: the tensors before quantisation.
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
    """Return a matrix [k, n] after conversion to a narrow dtype, as kernels store it; blocks do not change it."""
    if weight_dtype in BLOCK_STORAGES:
        return weight
    if weight_dtype == "f16":
        return weight.astype(np.float16).astype(weight.dtype)
    out = np.empty_like(weight)
    for start in range(0, len(weight), INT8_ROWS):
        rows = slice(start, start + INT8_ROWS)
        steps = np.abs(weight[rows]).max(axis=0) / 127
        out[rows] = np.rint(weight[rows] / np.where(steps > 0, steps, 1)) * steps
    return out


def rounded(x: Array) -> Array:
    """Return activations [m, k] quantised for `w8a8`: 254 steps between the extremes of a block."""
    out = np.empty_like(x)
    for start in range(0, x.shape[1], INT8_ROWS):
        block = x[:, start : start + INT8_ROWS]
        low, high = np.minimum(block.min(axis=1), 0)[:, None], np.maximum(block.max(axis=1), 0)[:, None]
        step = (high - low) / 254
        out[:, start : start + INT8_ROWS] = np.rint(block / np.where(step > 0, step, 1)) * step
    return out


def _sample(spec: Spec, want: Want, tokens: int = SAMPLE_TOKENS, sequences: int = 1) -> RequestShape:
    shape = representative_shape(spec, tokens, sequences).with_want(want)
    # A decoder's shape is that of one step; the prompt has the exchanges.
    is_step = shape.session_rows and shape.size == 1
    return shape.decode_step(min(tokens, shape.session_rows)) if is_step else shape


def _relative(answer: Array, exact: Array) -> float:
    if not (np.isfinite(answer).all() and np.isfinite(exact).all()):
        return float("inf")
    return float(np.linalg.norm(answer - exact)) / max(float(np.linalg.norm(exact)), 1e-30)


def _answers(
    wires: Sequence[Mapping[str, Program]], inputs: Sequence[Array], weights: Sequence[_Weights]
) -> list[list[Array]]:
    """Return the answers of all Programs for each input; the runs advance together, layer by layer."""
    runs = [[_ReferenceRun(parts, x, own) for parts, own in zip(wires, weights, strict=True)] for x in inputs]
    while sum(run.advance() for of_input in runs for run in of_input):
        pass
    return [[run.answer() for run in of_input] for of_input in runs]


class _Weights:
    """Ranges of tensors, with a cache of the last ones."""

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
    """One request under one plan; exchanges are delivered immediately."""

    def __init__(self, parts: Mapping[str, Program], inputs: Array, weights: _Weights) -> None:
        self._devices = {name: _ReferenceDevice(program, inputs, weights) for name, program in parts.items()}
        self._parts: list[tuple[int, Array]] = []
        devices = list(self._devices.values())
        for task in devices[0].tasks:  # leases go to devices in turn: all of them compute equal results
            devices[task % len(devices)].lease(task, inputs)

    def advance(self) -> bool:
        """Run each device in turn until it waits for another; return whether a device ran."""
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
        """Return the answer in float64; raises ValueError if a device waits for an exchange without a sender."""
        waiting = [name for name, device in self._devices.items() if device.left]
        if waiting or not self._parts:
            raise ValueError(f"{', '.join(waiting) or 'the planner'} waits for an exchange without a sender")
        self._parts.sort(key=lambda part: part[0])
        return np.concatenate([part for _, part in self._parts]).astype(np.float64)


class _ReferenceDevice:
    """The part of one device, on the same run machine as executor and simulator."""

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
        """Return the number of ops that have not run."""
        return self._work.ops_left

    @property
    def tasks(self) -> Iterable[int]:
        """Return the tasks that the device may lease."""
        return self._work.template.task_inputs

    def lease(self, task: int, inputs: Array) -> None:
        """Start a leased task."""
        for key in self._work.start_task(task):
            self.fill(key, inputs)

    def fill(self, key: ExchangeKey, array: Array) -> None:
        """Receive an exchange."""
        slot = self._work.template.slot_of_exchange[key]
        if self._machine.fill_slot(self._work, slot):
            self._arrays[slot] = array

    def step(self) -> tuple[tuple[Send, Array], ...] | None:
        """Run the next op and return its sends; None if no op is ready."""
        if (ready := self._machine.next_op()) is None:
            return None
        op = self._program.ops[ready[1]]
        sent: tuple[tuple[Send, Array], ...] = ()
        if isinstance(op, Send):
            sent = ((op, self._read(op.slot)),)
        elif isinstance(op, Compute):
            from hepti_mqtt.kernels import KERNELS  # late: Numba takes longer to import than the rest of a planner

            for step in op.kernels:
                reads, weights = [self._read(slot) for slot in step.reads], [self._weights[ref] for ref in step.weights]
                if any(ref.weight_dtype == "w8a8" for ref in step.weights):
                    reads[0] = rounded(reads[0])
                with np.errstate(over="ignore", invalid="ignore"):  # a value beyond f16 becomes an infinite error
                    results = KERNELS[step.kernel].reference(step, self._program.slots, reads, weights)
                self._arrays.update(zip(step.writes, results, strict=True))
        for slot in self._machine.finish_op(self._work, ready[1]):
            self._arrays.pop(slot, None)
        return sent

    def _read(self, slot: Slot) -> Array:
        spec = self._program.slots[slot]
        if spec.base is None:
            return self._arrays[slot]
        start = spec.start * prod(self._program.slots[spec.base].shape[1:])
        return self._arrays[spec.base].reshape(-1)[start : start + prod(spec.shape)].reshape(spec.shape)
