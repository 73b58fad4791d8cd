"""The parallel methods: each is one pure function that returns one device's Program, registered here by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from hepti_mqtt.plan import Plan, Range, apportion
from hepti_mqtt.program import Program, WeightRef
from hepti_mqtt.spec import ModelSpec, RequestShape
from hepti_mqtt.strategies import block, column, row, single
from hepti_mqtt.strategies.narrow import narrow
from hepti_mqtt.strategies.storage import store

ProgramFunction = Callable[[ModelSpec, Plan, RequestShape, str], Program]


class Units(NamedTuple):
    """A fixed share is a range of 0..total in multiples of `unit` (the last one may be shorter)."""

    total: int
    unit: int


def _heads(spec: ModelSpec) -> Units:
    return Units(spec.heads, 1)


def _mlp(spec: ModelSpec) -> Units:
    return Units(spec.mlp, _panel(spec.mlp))


def _columns(spec: ModelSpec) -> Units:
    return Units(spec.hidden, _panel(spec.hidden))


def _panel(total: int) -> int:
    """Return the grain of column shares: the kernels' panels stay whole where the matrix is large enough."""
    return 32 if total >= 256 else 1


_FIXED: Final[Mapping[str, Callable[[ModelSpec], Units]]] = {"heads": _heads, "mlp": _mlp, "columns": _columns}


@dataclass(frozen=True, slots=True)
class Strategy:
    """A parallel method as the planner sees it.

    options: the variants to price against each other. by_length: kinds of shares that depend on a request's length
    (weights). fixed: kinds that do not (ranges). most_devices: None means any number.
    """

    name: str
    summary: str
    program: ProgramFunction
    options: tuple[Mapping[str, str], ...] = ({},)
    by_length: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    most_devices: int | None = None

    def shares(
        self, spec: ModelSpec, weights: Sequence[float]
    ) -> tuple[dict[str, tuple[float, ...]], dict[str, tuple[Range, ...]]]:
        """Return (weights, ranges) of a Plan in which every kind of share follows one weight per device."""
        ranges = {}
        for kind in self.fixed:
            total, unit = _FIXED[kind](spec)
            units = apportion(-(-total // unit), weights)
            ranges[kind] = tuple((min(a * unit, total), min(z * unit, total)) for a, z in units)
        return {kind: tuple(weights) for kind in self.by_length}, ranges


STRATEGIES: Final[Mapping[str, Strategy]] = {
    s.name: s
    for s in (
        Strategy("single", "one device computes everything", single.program, most_devices=1),
        Strategy(
            "row",
            "own token rows, all weights everywhere",
            row.program,
            options=({"variant": "kv"}, {"variant": "heads"}),
            by_length=("rows",),
            fixed=("heads",),
        ),
        Strategy(
            "column",
            "own columns of every matrix, no partial sums",
            column.program,
            fixed=("heads", "columns", "mlp"),
        ),
        Strategy(
            "block",
            "own heads and MLP columns, partial sums reduced on own rows",
            block.program,
            by_length=("rows",),
            fixed=("heads", "mlp"),
        ),
    )
}


def program(spec: ModelSpec, plan: Plan, shape: RequestShape, device: str) -> Program:
    """Return the Program of one device under `plan`; raises KeyError for an unknown strategy."""
    return store(narrow(STRATEGIES[plan.strategy].program(spec, plan, shape, device), plan.wire), plan.storage)


def programs(spec: ModelSpec, plan: Plan, shape: RequestShape) -> dict[str, Program]:
    """Return the Programs of all devices of `plan`."""
    return {device: program(spec, plan, shape, device) for device in plan.devices}


def make_plan(
    spec: ModelSpec, template: Plan, strategy: str, options: Mapping[str, str], weights: Sequence[float]
) -> Plan:
    """Return `template` (model, epoch, devices, head, wire, storage, route) under a strategy, shares by `weights`."""
    by_length, ranges = STRATEGIES[strategy].shares(spec, weights)
    return Plan(
        model=template.model,
        epoch=template.epoch,
        strategy=strategy,
        devices=template.devices,
        head=template.head,
        options=options,
        weights=by_length,
        ranges=ranges,
        wire=template.wire,
        storage=template.storage,
        route=template.route,
    )


def widest_programs(spec: ModelSpec, plan: Plan, device: str) -> tuple[Program, ...]:
    """Return Programs of a device that use every weight and hear every peer that any request's Program does.

    They are those of the longest request, for the task and for all hidden states, with equal shares by length wherever
    a device has one, so that rounding cannot hide a device's part.
    """
    equal = {kind: tuple(float(w > 0) for w in weights) for kind, weights in plan.weights.items()}
    widest = replace(plan, weights=equal)
    shape = largest_shape(spec)
    return tuple(program(spec, widest, s, device) for s in (shape, replace(shape, want="hidden")))


def resident_weights(spec: ModelSpec, plan: Plan, device: str) -> tuple[WeightRef, ...]:
    """Return every weight range that any request's Program of this device uses: what the loader must hold."""
    return tuple(dict.fromkeys(ref for p in widest_programs(spec, plan, device) for ref in p.weights()))


def largest_shape(spec: ModelSpec) -> RequestShape:
    """Return the shape that needs the most memory of all that one Program may have: the coordinator packs no more
    tokens than one longest sequence into one run.
    """
    mask = (0,) if spec.head.pooling == "mask" else ()
    return RequestShape((spec.max_tokens,), mask_rows=mask)
