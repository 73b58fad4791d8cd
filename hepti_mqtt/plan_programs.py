"""Plans to Programs: the table of a plan's method over the graph of a request, then the passes over its Programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from hepti_mqtt.ids import PLANNER, PlanVersion
from hepti_mqtt.lowering import (
    PLANNER_INDEX,
    Graph,
    IndexSet,
    Lowered,
    Piece,
    Rule,
    Table,
    on_device,
    roles,
    span,
    split_along,
)
from hepti_mqtt.lowering.handover import HandedOver, HandoverError, Move, hand_over, moves
from hepti_mqtt.lowering.lower import KEPT_PARTS
from hepti_mqtt.lowering.passes import (
    fuse_conversions,
    merge_copies,
    narrow_weight,
    narrow_weights,
    narrow_wire,
    set_routes,
    widen_in_assemble,
)
from hepti_mqtt.models import graph, largest_shape, representative_shape, weight_dtypes
from hepti_mqtt.plan import Plan
from hepti_mqtt.program import ExchangeKey, Program, Send, Slot, WeightRef
from hepti_mqtt.shares import DeviceResources
from hepti_mqtt.spec import RequestShape, Spec
from hepti_mqtt.strategies import STRATEGIES, Division, Method
from hepti_mqtt.strategies.method import EMBEDDINGS, WORDS, word_ranges
from hepti_mqtt.task_queue import LoweredTasks, nonempty_tasks

CACHE_SIZE: Final = 32  # graphs under tables that are kept
KEPT_RESIDENTS: Final = 64  # weight ranges of a device under a plan that are kept


class PlanKey:
    """A plan as a key of what it divides: only what its Programs depend on."""

    __slots__ = ("hash", "key", "plan")

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.key = (
            plan.strategy,
            tuple(plan.options.items()),
            plan.devices,
            plan.root,
            tuple(plan.shares.items()),
            tuple(plan.ranges.items()),
            tuple(plan.layouts.items()),
            plan.weight_dtype,
        )
        self.hash = hash(self.key)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanKey) and self.key == other.key


def lower_plan(spec: Spec, plan: Plan, shape: RequestShape) -> Lowered:
    """Return what a request becomes under a plan, for all of its devices; the last ones are kept.

    Of replicas, under the first one.

    Safe on any thread: the interpreter locks the cache, and what two threads work out at once is equal.

    Raises KeyError for an unknown strategy, ValueError for shares or a storage of weights that do not fit the model.
    """
    return _lowered(spec, PlanKey(plan.executables[0]), shape)


@lru_cache(maxsize=CACHE_SIZE)
def _lowered(spec: Spec, divided: PlanKey, shape: RequestShape) -> Lowered:
    if divided.plan.weight_dtype not in weight_dtypes(spec):
        raise ValueError(f"{spec.architecture} does not support weights in {divided.plan.weight_dtype}")
    plan, whole = divided.plan, graph(spec, shape)
    if (rewrite := STRATEGIES[plan.strategy].rewrite) is not None and _divides(plan, whole):
        whole = rewrite(Division(whole, plan))(whole)
    if places := _task_places(plan):
        return LoweredTasks(whole, plan, places, _table)
    return Lowered(whole, _table(Division(whole, plan)), plan.devices)


def base_table(division: Division) -> Table:
    """Return where every method begins and ends: what the planner sends, stem and task on the root device."""
    head = on_device(division.root)
    at_head = (roles.STEM, roles.EMBEDDINGS, roles.TASK, roles.CACHE)
    lines = {roles.INPUT: on_device(PLANNER_INDEX), **dict.fromkeys(at_head, head)}
    if division.divides_embeddings:  # of each token one device has the row, and others add zeros
        lines[roles.EMBEDDINGS] = split_along(division.device_sets(EMBEDDINGS), EMBEDDINGS.dim)
    if (words := division.plan.ranges.get(WORDS.kind)) is None:
        lines |= dict.fromkeys((roles.WORDS, roles.CANDIDATES), head)
    else:  # each device's own, which meet on the root device
        parts = [span(*part) for part in words]
        lines |= {roles.WORDS: _meeting(parts, 1, division.root), roles.CANDIDATES: _meeting(parts, 2, division.root)}
        if division.graph.ops[-1].role != roles.TASK:  # each device with words norms the rows: that saves a round
            del lines[roles.TASK]
    return Table(optional_rules=lines)


def _meeting(parts: Sequence[IndexSet], dim: int, root: int) -> Rule:
    own = split_along(parts, dim)
    return lambda op: [*(own(op) or ()), Piece(root, op.full_region, relay=True)]


def _table(division: Division) -> Table:
    divided = _divides(division.plan, division.graph)
    table = STRATEGIES[division.plan.strategy].table(division) if divided else Table()
    return table.with_defaults(base_table(division))


def _divides(plan: Plan, part: Graph) -> bool:
    """Return whether a run has what the plan's method divides: later runs of a session may have the task alone."""
    method = STRATEGIES[plan.strategy]
    some = not method.needs_any or not part.roles.isdisjoint(method.needs_any)
    return some and part.roles.issuperset(method.needs)


def root_begins(spec: Spec, plan: Plan, shape: RequestShape) -> bool:
    """Return whether nobody but the root device reads the tokens of a run; the last answers are kept."""
    return _root_begins(spec, PlanKey(plan), shape)


@lru_cache(maxsize=KEPT_RESIDENTS)  # asked for every token, and searches push lowered plans out of their cache
def _root_begins(spec: Spec, divided: PlanKey, shape: RequestShape) -> bool:
    plan = divided.plan
    lowered = lower_plan(spec, plan, shape)
    others = (device for device in plan.devices if device != plan.root)
    return not any(lowered.computes_role(device, role) for device in others for role in (roles.STEM, roles.EMBEDDINGS))


def task_count(spec: Spec, plan: Plan) -> int:
    """Return how many tasks are in the task queue of each run of a plan, 0 if it has none."""
    return _tasks(spec, PlanKey(plan)) if _task_places(plan) else 0


@lru_cache(maxsize=CACHE_SIZE)
def _tasks(spec: Spec, divided: PlanKey) -> int:
    return nonempty_tasks(graph(spec, largest_shape(spec)), divided.plan, _task_places(divided.plan), _table)


def _task_places(plan: Plan) -> int:
    """Return for how many tasks the table of a plan has places, 0 if it has no tasks."""
    return STRATEGIES[plan.strategy].task_count(plan.options)


def programs_digest(spec: Spec, plan: Plan) -> bytes:
    """Return 8 bytes that are equal where planner and devices derive the same Programs from a plan; all lower it.

    Of replicas, 8 bytes for each.
    """
    return b"".join(lower_plan(spec, run, largest_shape(spec)).digest for run in plan.executables)


def device_program(spec: Spec, plan: Plan, shape: RequestShape, device: str) -> Program:
    """Return the Program of one device under `plan`; raises as `lowered` does."""
    own = plan.for_device(device)
    return run_passes(lower_plan(spec, own, shape).full_program(device), own)


def continued_program(spec: Spec, before: Plan, plan: Plan, shape: RequestShape, block: int, device: str) -> HandedOver:
    """Return the Program of a device for the rest of a run that began under another plan, from a block on.

    taken: slots of its Program under the plan before. Raises HandoverError for what cannot go on so.
    """
    then, now = _both(spec, before, plan, shape)
    made = hand_over(then, now, block, device)
    program = run_passes(made.program, plan if device in plan.devices else before)
    return HandedOver(program, _passed_slots(then.full_program(device), before, made.taken))


def handover_moves(spec: Spec, before: Plan, plan: Plan, shape: RequestShape, block: int) -> list[Move]:
    """Return what devices send each other where a run goes on under another plan.

    Raises HandoverError if one of them cannot go on so.
    """
    then, now = _both(spec, before, plan, shape)
    for device in before.devices:
        hand_over(then, now, block, device)
    return [move for move in moves(then, now, block) if move.source != move.target]


def _both(spec: Spec, before: Plan, plan: Plan, shape: RequestShape) -> tuple[Lowered, Lowered]:
    if shape.session_rows:
        raise HandoverError("a run of a session ends under the plan that it began with")
    if any(p.replicas or _task_places(p) for p in (before, plan)):
        raise HandoverError("replicas and leased tasks end under the plan that they began with")
    if not set(plan.devices) <= set(before.devices):
        raise HandoverError("a device has no part in the plan before")
    return lower_plan(spec, before, shape), lower_plan(spec, plan, shape)


def _passed_slots(
    program: Program, plan: Plan, taken: Sequence[tuple[ExchangeKey, Slot]]
) -> tuple[tuple[ExchangeKey, Slot], ...]:
    """Return the slots in a Program that has gone through the passes.

    Passes renumber slots, so each is marked by a Send, which must change nothing else.
    """
    marks = tuple(Send(slot, (program.device,), key[0], key[1], exact=True) for key, slot in taken)
    marked, passed = run_passes(replace(program, ops=program.ops + marks), plan), run_passes(program, plan)
    end = len(marked.ops) - len(marks)
    if marked.slots != passed.slots or marked.ops[:end] != passed.ops:
        raise HandoverError("what a device holds at the border is no slot of its own")
    found = (op.slot for op in marked.ops[end:] if isinstance(op, Send))
    return tuple((key, slot) for (key, _), slot in zip(taken, found, strict=True))


def run_passes(program: Program, plan: Plan) -> Program:
    """Return a Program with copies of copies joined, and the plan's wire, storage and route."""
    whole = merge_copies(program)
    if plan.wire != "f32":
        whole = widen_in_assemble(narrow_wire(whole, plan.wire))
    if plan.weight_dtype != "f32":
        whole = narrow_weights(whole, plan.weight_dtype)
    if plan.wire != "f32":
        whole = fuse_conversions(whole)
    return set_routes(whole, plan.route, plan.relayed_pairs)


class _Passes:
    """What the passes over a Program depend on, as a key."""

    __slots__ = ("key", "plan", "program")

    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.plan = program, plan
        self.key = (id(program), plan.wire, plan.weight_dtype, plan.route, plan.relayed_pairs)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Passes) and self.key == other.key


@lru_cache(maxsize=KEPT_PARTS)
def _passed(asked: _Passes) -> Program:
    return run_passes(asked.program, asked.plan)


def searched_program(spec: Spec, plan: Plan, shape: RequestShape, device: str) -> Program:
    """Return the Program of one device of a run with equal layers once; plans with equal parts have the same one."""
    lowered = lower_plan(spec, plan, shape)
    lowered.share_part(device)
    return _passed(_Passes(lowered.compact_program(device), plan.executables[0]))


def device_programs(spec: Spec, plan: Plan, shape: RequestShape) -> dict[str, Program]:
    """Return the Programs of all devices of a run: of `plan`, or of its first replica."""
    return {device: device_program(spec, plan, shape, device) for device in plan.executables[0].devices}


def compact_programs(spec: Spec, plan: Plan, shape: RequestShape) -> dict[str, Program]:
    """Return the Programs of all devices with equal layers once; `Lowered.repeated` says for how many one stands."""
    return {device: compact_program(spec, plan, shape, device) for device in plan.executables[0].devices}


def compact_program(spec: Spec, plan: Plan, shape: RequestShape, device: str) -> Program:
    """Return the Program of one device of a run with equal layers once."""
    return run_passes(lower_plan(spec, plan, shape).compact_program(device), plan.executables[0])


def make_plan(
    spec: Spec,
    template: Plan,
    strategy: str,
    options: Mapping[str, str],
    shares: Sequence[float],
    lanes: Sequence[DeviceResources] = (),
    divides_embeddings: bool | None = None,
) -> Plan:
    """Return `template` (model, version, devices, head, wire, storage, route) under a strategy, shares by `shares`.

    lanes: the devices' links, for methods that look at them. divides_embeddings: whether a table of words is divided
    where that can be; None: as in the template.
    """
    whole = graph(spec, largest_shape(spec))
    method = STRATEGIES[strategy]
    by_length, ranges = method.make_shares(whole, options, shares, lanes)
    if roles.WORDS in whole.roles and len(shares) > 1 and method.groups is None and not method.task_count(options):
        if divides_embeddings is None:
            divides_embeddings = EMBEDDINGS.kind in template.ranges
        if divides_embeddings:  # mostly for want of memory, which the shares follow
            ranges[WORDS.kind] = ranges[EMBEDDINGS.kind] = WORDS.ranges(whole, shares)
        else:
            ranges[WORDS.kind] = word_ranges(whole, template.devices.index(template.root), shares, lanes)
    replicas = _replicas(spec, whole, template, method, options, shares)
    return Plan(
        model=template.model,
        version=template.version,
        strategy=strategy,
        devices=template.devices,
        root=template.root,
        options=options,
        shares=by_length,
        ranges=ranges,
        wire=template.wire,
        weight_dtype=template.weight_dtype,
        route=template.route,
        relayed_pairs=template.relayed_pairs,
        replicas=replicas,
    )


def _replicas(
    spec: Spec,
    whole: Graph,
    template: Plan,
    method: Method,
    options: Mapping[str, str],
    shares_by_device: Sequence[float],
) -> tuple[Plan, ...]:
    """Return the plans side by side of a method of groups: each under the first method that divides the model."""
    made = []
    for number, group in enumerate(() if method.groups is None else method.groups(options, shares_by_device), 1):
        inside = next((m for m in STRATEGIES.values() if _can_divide(m, whole, len(group))), None)
        if inside is None:
            raise ValueError(f"no method divides this model over {len(group)} devices")
        devices = tuple(template.devices[i] for i in group)
        shares = [shares_by_device[i] for i in group]
        head = template.root if template.root in devices else devices[0]
        plan_version = PlanVersion(template.version.boot, template.version.number + number)
        part = replace(template, version=plan_version, devices=devices, root=head)
        shares = shares if any(shares) else [1.0] * len(group)
        made.append(make_plan(spec, part, inside.name, inside.variants_for(len(group))[0], shares))
    return tuple(sorted(made, key=lambda part: template.root not in part.devices))  # the head's own is the first


def _can_divide(method: Method, graph: Graph, devices: int) -> bool:
    alone = method.max_devices == 1
    return method.groups is None and alone == (devices == 1) and method.why_unsupported(graph) is None


def lowered_for_longest(spec: Spec, plan: Plan, device: str) -> Iterator[Lowered]:
    """Yield the Programs of the longest request: for all hidden states, and for the task where the device has a part.

    What else a device does for the task it does for all hidden states too. Where runs of many rows have other layouts,
    the longest one is in each of them, which bounds those of fewer rows.
    """
    own = plan.for_device(device)
    used = [name for name, most in own.layouts.items() if most < largest_shape(spec).size]
    for way in (replace(own, layouts=layouts) for layouts in ({}, *({name: 0} for name in used))):
        task, hidden = (lower_plan(spec, way, shape) for shape in longest_shapes(spec))
        if task.computes_role(device, roles.TASK) or task.computes_role(device, roles.WORDS):
            yield task
        yield hidden


def covering_plans(spec: Spec, plan: Plan) -> tuple[Plan, ...]:
    """Return plans whose Programs together use every weight and hear every peer that any request's Programs do.

    In one of them shares by length are equal wherever a device has one, so that rounding cannot hide a device's part:
    no more devices have one than the longest request has rows (`Share.most`). Where a small map has fewer rows than
    there are devices that hides some, and the plan itself has them: a picture is always as large.
    """
    if all(len(set(filter(None, weights))) <= 1 for weights in plan.shares.values()):
        return (plan,)
    equal = {k: tuple(float(w > 0) for w in weights) for k, weights in plan.shares.items()}
    own = (plan,) if representative_shape(spec, 1) == largest_shape(spec) else ()
    return replace(plan, shares=equal), *own


def resident_weights(spec: Spec, plan: Plan, device: str) -> tuple[WeightRef, ...]:
    """Return every weight range that any request's Program of this device uses; the last ones are kept."""
    return _resident_weights(spec, PlanKey(plan.for_device(device)), device)


@lru_cache(maxsize=KEPT_RESIDENTS)
def _resident_weights(spec: Spec, divided: PlanKey, device: str) -> tuple[WeightRef, ...]:
    plan = divided.plan
    found = (made for wide in covering_plans(spec, plan) for made in lowered_for_longest(spec, wide, device))
    refs = dict.fromkeys(ref for made in found for ref in made.weight_refs(device))
    return tuple(narrow_weight(ref, plan.weight_dtype) for ref in refs)


def resident_counts(spec: Spec, plan: Plan, device: str) -> Mapping[WeightRef, int]:
    """Return `resident_weights` with one range for equal ranges of several layers, and the number of these layers.

    The last ones are kept.
    """
    return _resident_counts(spec, PlanKey(plan.for_device(device)), device)


@lru_cache(maxsize=KEPT_RESIDENTS)
def _resident_counts(spec: Spec, divided: PlanKey, device: str) -> Mapping[WeightRef, int]:
    plan = divided.plan
    parts = [part for wide in covering_plans(spec, plan) for part in lowered_for_longest(spec, wide, device)]
    if len({part.repeat for part in parts}) > 1:
        return dict.fromkeys(_resident_weights(spec, divided, device), 1)
    counts = {ref: times for part in parts for ref, times in part.weight_counts(device).items()}
    return {narrow_weight(ref, plan.weight_dtype): times for ref, times in counts.items()}


def sources_of(spec: Spec, plan: Plan, device: str) -> frozenset[str]:
    """Return every device that any request's Program of this device hears."""
    found = (
        made
        for wide in covering_plans(spec, plan.for_device(device))
        for made in lowered_for_longest(spec, wide, device)
    )
    return frozenset().union(*(made.senders(device) for made in found)) - {PLANNER}


def longest_shapes(spec: Spec) -> tuple[RequestShape, RequestShape]:
    """Return the longest request, for the task and for all hidden states."""
    shape = largest_shape(spec)
    return shape, shape.with_want("hidden")
