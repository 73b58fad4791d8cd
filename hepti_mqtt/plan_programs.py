"""Plans to Programs: the table of a plan's method over the graph of a request, then the passes over its Programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Final

from hepti_mqtt.ids import PLANNER, Epoch
from hepti_mqtt.lowering import PLANNER_PLACE, Graph, Lowered, Rewrite, SkippedError, Table, on, roles
from hepti_mqtt.lowering.passes import fuse, joined, narrow, routed, store, stored, widened
from hepti_mqtt.models import graph, largest_shape, shape_for, storages
from hepti_mqtt.plan import Plan
from hepti_mqtt.program import Program, WeightRef
from hepti_mqtt.shares import Lane
from hepti_mqtt.spec import RequestShape, Spec
from hepti_mqtt.strategies import STRATEGIES, Division, Method
from hepti_mqtt.task_queue import Bagged, with_work

LOWERED: Final = 32  # graphs under tables that are kept


class _Divided:
    """A plan as a key of what it divides: only what its Programs depend on."""

    __slots__ = ("key", "plan")

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.key = (
            plan.strategy,
            tuple(plan.options.items()),
            plan.devices,
            plan.head,
            tuple(plan.weights.items()),
            tuple(plan.ranges.items()),
            plan.storage,
        )

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Divided) and self.key == other.key


def lowered(spec: Spec, plan: Plan, shape: RequestShape) -> Lowered:
    """Return what a request becomes under a plan, for all of its devices; the last ones are kept.

    Of replicas, under the first one.

    Safe on any thread: the interpreter locks the cache, and what two threads work out at once is equal.

    Raises KeyError for an unknown strategy, ValueError for shares or a storage of weights that do not fit the model.
    """
    return _lowered(spec, _Divided(plan.runs[0]), shape)


@lru_cache(maxsize=LOWERED)
def _lowered(spec: Spec, divided: _Divided, shape: RequestShape) -> Lowered:
    if divided.plan.storage not in storages(spec):
        raise ValueError(f"{spec.architecture} cannot multiply by weights in {divided.plan.storage}")
    short, outline = graph(spec, shape, skip=True), graph(spec, largest_shape(spec))
    rewrite = _rewrite(short, divided.plan)
    if short.skipped.blocks and (left := rewrite(short)).like(whole := rewrite(outline)):
        with suppress(SkippedError):
            return _under(left, divided.plan, whole)
    return _under(rewrite(graph(spec, shape)), divided.plan)


def _rewrite(graph: Graph, plan: Plan) -> Rewrite:
    """Return what makes a family's graph the one that is computed under a plan: the method's choice for a request."""
    rewrite = STRATEGIES[plan.strategy].rewrite
    return (lambda same: same) if rewrite is None else rewrite(Division(graph, plan))


def frame(division: Division) -> Table:
    """Return where every method begins and ends: what the planner sends, stem and task on the head device."""
    head = on(division.head)
    return Table(where_present={roles.INPUT: on(PLANNER_PLACE), roles.STEM: head, roles.TASK: head, roles.CACHE: head})


def _table(division: Division) -> Table:
    return STRATEGIES[division.plan.strategy].table(division).over(frame(division))


def tasks(spec: Spec, plan: Plan) -> int:
    """Return how many tasks are in the bag of each run of a plan, 0 if it has none."""
    return _tasks(spec, _Divided(plan)) if _places(plan) else 0


@lru_cache(maxsize=LOWERED)
def _tasks(spec: Spec, divided: _Divided) -> int:
    return with_work(graph(spec, largest_shape(spec)), divided.plan, _places(divided.plan), _table)


def _places(plan: Plan) -> int:
    """Return for how many tasks the table of a plan has places, 0 if it has no bag."""
    return STRATEGIES[plan.strategy].bag(plan.options)


def _under(graph: Graph, plan: Plan, outline: Graph | None = None) -> Lowered:
    if places := _places(plan):
        return Bagged(graph, plan, places, _table)
    division = Division(graph, plan)
    table = _table(division)
    if outline is not None and not table.uniform:
        raise SkippedError
    return Lowered(division.graph, table, plan.devices, outline)


def programs_digest(spec: Spec, plan: Plan) -> bytes:
    """Return 8 bytes that are equal where planner and devices derive the same Programs from a plan; all lower it.

    Of replicas, 8 bytes for each.
    """
    return b"".join(lowered(spec, run, largest_shape(spec)).digest for run in plan.runs)


def program(spec: Spec, plan: Plan, shape: RequestShape, device: str) -> Program:
    """Return the Program of one device under `plan`; raises as `lowered` does."""
    own = plan.of(device)
    return passes(lowered(spec, own, shape).program(device), own)


def passes(program: Program, plan: Plan) -> Program:
    """Return a Program with copies of copies joined, and the plan's wire, storage and route."""
    whole = joined(program)
    if plan.wire != "f32":
        whole = widened(narrow(whole, plan.wire))
    if plan.storage != "f32":
        whole = store(whole, plan.storage)
    if plan.wire != "f32":
        whole = fuse(whole)
    return routed(whole, plan.route, plan.relayed)


def programs(spec: Spec, plan: Plan, shape: RequestShape) -> dict[str, Program]:
    """Return the Programs of all devices of a run: of `plan`, or of its first replica."""
    return {device: program(spec, plan, shape, device) for device in plan.runs[0].devices}


def short_programs(spec: Spec, plan: Plan, shape: RequestShape) -> dict[str, Program]:
    """Return the Programs of all devices with equal layers once; `Lowered.repeated` says for how many one stands."""
    return {device: short_program(spec, plan, shape, device) for device in plan.runs[0].devices}


def short_program(spec: Spec, plan: Plan, shape: RequestShape, device: str) -> Program:
    """Return the Program of one device of a run with equal layers once."""
    return passes(lowered(spec, plan, shape).short(device), plan.runs[0])


def make_plan(
    spec: Spec,
    template: Plan,
    strategy: str,
    options: Mapping[str, str],
    weights: Sequence[float],
    lanes: Sequence[Lane] = (),
) -> Plan:
    """Return `template` (model, epoch, devices, head, wire, storage, route) under a strategy, shares by `weights`.

    lanes: the devices' links, for methods that look at them.
    """
    whole = graph(spec, largest_shape(spec))
    by_length, ranges = STRATEGIES[strategy].divide(whole, options, weights, lanes)
    replicas = _replicas(spec, whole, template, STRATEGIES[strategy], options, weights)
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
        relayed=template.relayed,
        replicas=replicas,
    )


def _replicas(
    spec: Spec, whole: Graph, template: Plan, method: Method, options: Mapping[str, str], weights: Sequence[float]
) -> tuple[Plan, ...]:
    """Return the plans side by side of a method of groups: each under the first method that divides the model."""
    made = []
    for number, group in enumerate(() if method.groups is None else method.groups(options, weights), 1):
        inside = next((m for m in STRATEGIES.values() if _divides(m, whole, len(group))), None)
        if inside is None:
            raise ValueError(f"no method divides this model over {len(group)} devices")
        devices = tuple(template.devices[i] for i in group)
        shares = [weights[i] for i in group]
        head = template.head if template.head in devices else devices[0]
        epoch = Epoch(template.epoch.boot, template.epoch.number + number)
        part = replace(template, epoch=epoch, devices=devices, head=head)
        shares = shares if any(shares) else [1.0] * len(group)
        made.append(make_plan(spec, part, inside.name, inside.choices(len(group))[0], shares))
    return tuple(sorted(made, key=lambda part: template.head not in part.devices))  # the head's own is the first


def _divides(method: Method, graph: Graph, devices: int) -> bool:
    alone = method.most_devices == 1
    return method.groups is None and alone == (devices == 1) and method.unsupported(graph) is None


def largest(spec: Spec, plan: Plan, device: str) -> Iterator[Lowered]:
    """Yield the Programs of the longest request: for all hidden states, and for the task where the device has a part.

    What else a device does for the task it does for all hidden states too.
    """
    task, hidden = (lowered(spec, plan.of(device), shape) for shape in largest_shapes(spec))
    if task.holds(device, roles.TASK):
        yield task
    yield hidden


def widest(spec: Spec, plan: Plan) -> tuple[Plan, ...]:
    """Return plans whose Programs together use every weight and hear every peer that any request's Programs do.

    In one of them shares by length are equal wherever a device has one, so that rounding cannot hide a device's part:
    no more devices have one than the longest request has rows (`Share.most`). Where a small map has fewer rows than
    there are devices that hides some, and the plan itself has them: a picture is always as large.
    """
    if all(len(set(filter(None, weights))) <= 1 for weights in plan.weights.values()):
        return (plan,)
    equal = {k: tuple(float(w > 0) for w in weights) for k, weights in plan.weights.items()}
    own = (plan,) if shape_for(spec, 1) == largest_shape(spec) else ()
    return replace(plan, weights=equal), *own


def resident_weights(spec: Spec, plan: Plan, device: str) -> tuple[WeightRef, ...]:
    """Return every weight range that any request's Program of this device uses: what the loader must hold."""
    found = (made for wide in widest(spec, plan.of(device)) for made in largest(spec, wide, device))
    refs = dict.fromkeys(ref for made in found for ref in made.refs(device))
    return tuple(stored(ref, plan.storage) for ref in refs)


def peers(spec: Spec, plan: Plan, device: str) -> frozenset[str]:
    """Return every device that any request's Program of this device hears."""
    found = (made for wide in widest(spec, plan.of(device)) for made in largest(spec, wide, device))
    return frozenset().union(*(made.sources(device) for made in found)) - {PLANNER}


def largest_shapes(spec: Spec) -> tuple[RequestShape, RequestShape]:
    """Return the longest request, for the task and for all hidden states."""
    shape = largest_shape(spec)
    return shape, shape.asking("hidden")
