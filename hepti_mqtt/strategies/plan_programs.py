"""Plans to Programs: the table of a plan's method over the graph of a request, then the passes over its Programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from hepti_mqtt.core.ids import PLANNER, PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.program import ExchangeKey, Keyed, Program, Send, Slot, WeightRef
from hepti_mqtt.core.spec import RequestShape, Spec
from hepti_mqtt.lowering import passes, roles
from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.handover import HandedOver, HandoverError, Move, hand_over, moves
from hepti_mqtt.lowering.layouts import PLANNER_INDEX, Piece, Rule, Table, on_device, split_along
from hepti_mqtt.lowering.lower import LOWERED_CACHE_SIZE, Lowered
from hepti_mqtt.lowering.regions import IndexSet, span
from hepti_mqtt.models import graph, largest_shape, representative_shape, weight_dtypes
from hepti_mqtt.shares import DeviceResources
from hepti_mqtt.strategies import STRATEGIES, Division, Method
from hepti_mqtt.strategies.method import EMBEDDINGS, WORDS, word_ranges
from hepti_mqtt.strategies.task_queue import LoweredTasks, nonempty_tasks

CACHE_SIZE: Final = 32  # lowered graphs
KEPT_RESIDENTS: Final = 64  # weight ranges of a device under a plan


class PlanKey(Keyed):
    """A plan as a key: only the fields that its Programs depend on."""

    __slots__ = ("plan",)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        divided = (tuple(by_name.items()) for by_name in (plan.options, plan.shares, plan.ranges, plan.layouts))
        super().__init__((plan.strategy, plan.devices, plan.root, plan.weight_dtype, *divided))


def lower_plan(spec: Spec, plan: Plan, shape: RequestShape) -> Lowered:
    """Return a request's graph lowered under a plan, or under its first replica, for all of its devices; cached.

    Safe on any thread: the interpreter locks the cache, and two threads that lower the same graph get equal results.

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
    """Return the common rules of all methods: inputs from the planner; stem and task on the root device."""
    root = on_device(division.root)
    at_root = (roles.STEM, roles.EMBEDDINGS, roles.TASK, roles.CACHE)
    lines = {roles.INPUT: on_device(PLANNER_INDEX), **dict.fromkeys(at_root, root)}
    if division.divides_embeddings:  # one device has a token's row, the others add zeros
        lines[roles.EMBEDDINGS] = split_along(division.device_sets(EMBEDDINGS), EMBEDDINGS.dim)
    if (words := division.plan.ranges.get(WORDS.kind)) is None:
        lines |= dict.fromkeys((roles.LOGITS, roles.CANDIDATES), root)
    else:  # each device computes its own; the root device gathers them
        parts = [span(*part) for part in words]
        lines |= {
            roles.LOGITS: _gathered(parts, 1, division.root),
            roles.CANDIDATES: _gathered(parts, 2, division.root),
        }
        if division.graph.ops[-1].role != roles.TASK:  # each device with tokens norms the rows, which saves a round
            del lines[roles.TASK]
    return Table(optional_rules=lines)


def _gathered(parts: Sequence[IndexSet], dim: int, root: int) -> Rule:
    own = split_along(parts, dim)
    return lambda op: [*(own(op) or ()), Piece(root, op.full_region, relay=True)]


def _table(division: Division) -> Table:
    divided = _divides(division.plan, division.graph)
    table = STRATEGIES[division.plan.strategy].table(division) if divided else Table()
    return table.with_defaults(base_table(division))


def _divides(plan: Plan, whole: Graph) -> bool:
    """Return whether a graph has the roles that the plan's method needs; runs of a session may have the task alone."""
    method = STRATEGIES[plan.strategy]
    some = not method.needs_any or not whole.roles.isdisjoint(method.needs_any)
    return some and whole.roles.issuperset(method.needs)


def root_begins(spec: Spec, plan: Plan, shape: RequestShape) -> bool:
    """Return whether only the root device reads the tokens of a run; cached."""
    return _root_begins(spec, PlanKey(plan), shape)


@lru_cache(maxsize=KEPT_RESIDENTS)  # needed for every token, while searches evict lowered plans from their cache
def _root_begins(spec: Spec, divided: PlanKey, shape: RequestShape) -> bool:
    plan = divided.plan
    lowered = lower_plan(spec, plan, shape)
    others = (device for device in plan.devices if device != plan.root)
    return not any(lowered.computes_role(device, role) for device in others for role in (roles.STEM, roles.EMBEDDINGS))


def task_count(spec: Spec, plan: Plan) -> int:
    """Return the number of tasks in the task queue of each run of a plan, 0 without tasks."""
    return _tasks(spec, PlanKey(plan)) if _task_places(plan) else 0


@lru_cache(maxsize=CACHE_SIZE)
def _tasks(spec: Spec, divided: PlanKey) -> int:
    return nonempty_tasks(graph(spec, largest_shape(spec)), divided.plan, _task_places(divided.plan), _table)


def _task_places(plan: Plan) -> int:
    """Return the number of tasks in a plan's table, 0 without tasks; a graph may have fewer."""
    return STRATEGIES[plan.strategy].task_count(plan.options)


def programs_digest(spec: Spec, plan: Plan) -> bytes:
    """Return 8 bytes, for each replica if any, that are equal if planner and devices derive equal Programs."""
    return b"".join(lower_plan(spec, run, largest_shape(spec)).digest for run in plan.executables)


def device_program(spec: Spec, plan: Plan, shape: RequestShape, device: str) -> Program:
    """Return the Program of one device under `plan`; raises as `lower_plan` does."""
    own = plan.for_device(device)
    return run_passes(lower_plan(spec, own, shape).full_program(device), own)


def handover_program(spec: Spec, before: Plan, plan: Plan, shape: RequestShape, block: int, device: str) -> HandedOver:
    """Return a device's Program for the rest of a run that began under another plan, from a block on.

    taken: slots of its Program under the old plan. Raises HandoverError if the run cannot continue there.
    """
    old, new = _lowered_pair(spec, before, plan, shape)
    rest = hand_over(old, new, block, device)
    program = run_passes(rest.program, plan if device in plan.devices else before)
    return HandedOver(program, _slots_after_passes(old.full_program(device), before, rest.taken))


def handover_moves(spec: Spec, before: Plan, plan: Plan, shape: RequestShape, block: int) -> list[Move]:
    """Return the moves between devices if a run continues under another plan from a block on.

    Raises HandoverError if a device cannot continue there.
    """
    old, new = _lowered_pair(spec, before, plan, shape)
    for device in before.devices:
        hand_over(old, new, block, device)
    return [move for move in moves(old, new, block) if move.source != move.target]


def _lowered_pair(spec: Spec, before: Plan, plan: Plan, shape: RequestShape) -> tuple[Lowered, Lowered]:
    if shape.session_rows:
        raise HandoverError("a run of a session ends under the plan under which it began")
    if any(p.replicas or _task_places(p) for p in (before, plan)):
        raise HandoverError("runs of replicas and runs with leased tasks end under the plan under which they began")
    if not set(plan.devices) <= set(before.devices):
        raise HandoverError("a device of the new plan has no part in the old plan")
    return lower_plan(spec, before, shape), lower_plan(spec, plan, shape)


def _slots_after_passes(
    program: Program, plan: Plan, taken: Sequence[tuple[ExchangeKey, Slot]]
) -> tuple[tuple[ExchangeKey, Slot], ...]:
    """Return the same slots after the passes over a Program.

    Passes renumber slots, so a Send marks each slot; it must change nothing else.
    """
    marks = tuple(Send(slot, (program.device,), key[0], key[1], exact=True) for key, slot in taken)
    marked, passed = run_passes(replace(program, ops=program.ops + marks), plan), run_passes(program, plan)
    end = len(marked.ops) - len(marks)
    if marked.slots != passed.slots or marked.ops[:end] != passed.ops:
        raise HandoverError("a slot that the device holds at the border is not its own")
    slots = (op.slot for op in marked.ops[end:] if isinstance(op, Send))
    return tuple((key, slot) for (key, _), slot in zip(taken, slots, strict=True))


def run_passes(program: Program, plan: Plan) -> Program:
    """Return a Program with joined copies, and with the plan's wire dtype, weight storage and routes."""
    whole = passes.merge_copies(program)
    if plan.wire != "f32":
        whole = passes.widen_in_assemble(passes.narrow_wire(whole, plan.wire))
    if plan.weight_dtype != "f32":
        whole = passes.narrow_weights(whole, plan.weight_dtype)
    if plan.wire != "f32":
        whole = passes.fuse_conversions(whole)
    return passes.set_routes(whole, plan.route, plan.relayed_pairs)


class _Passes(Keyed):
    """The inputs of the passes over a Program, as a key."""

    __slots__ = ("plan", "program")

    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.plan = program, plan
        super().__init__((id(program), plan.wire, plan.weight_dtype, plan.route, plan.relayed_pairs))


@lru_cache(maxsize=LOWERED_CACHE_SIZE)
def _passed(inputs: _Passes) -> Program:
    return run_passes(inputs.program, inputs.plan)


def searched_program(spec: Spec, plan: Plan, shape: RequestShape, device: str) -> Program:
    """Return one device's Program of a run with equal layers once; plans with equal parts share Programs."""
    lowered = lower_plan(spec, plan, shape)
    lowered.share_part(device)
    return _passed(_Passes(lowered.compact_program(device), plan.executables[0]))


def device_programs(spec: Spec, plan: Plan, shape: RequestShape) -> dict[str, Program]:
    """Return the Programs of a run's devices, under `plan` or its first replica."""
    return {device: device_program(spec, plan, shape, device) for device in plan.executables[0].devices}


def compact_programs(spec: Spec, plan: Plan, shape: RequestShape) -> dict[str, Program]:
    """Return the Programs of all devices with one of the equal layers; `Lowered.repeated_layer` has their number."""
    lowered, own = lower_plan(spec, plan, shape), plan.executables[0]
    return {device: run_passes(lowered.compact_program(device), own) for device in own.devices}


def make_plan(
    spec: Spec,
    template: Plan,
    strategy: str,
    options: Mapping[str, str],
    shares: Sequence[float],
    resources: Sequence[DeviceResources] = (),
    divides_embeddings: bool | None = None,
) -> Plan:
    """Return `template` (model, version, devices, root, wire, storage, route) under a strategy, divided by `shares`.

    resources: of the devices, for methods that use them. divides_embeddings: whether to divide the token embeddings if
    possible; None: as in the template.
    """
    whole = graph(spec, largest_shape(spec))
    method = STRATEGIES[strategy]
    by_length, ranges = method.make_shares(whole, options, shares, resources)
    if roles.LOGITS in whole.roles and len(shares) > 1 and method.groups is None and not method.task_count(options):
        if divides_embeddings is None:
            divides_embeddings = EMBEDDINGS.kind in template.ranges
        if divides_embeddings:  # mostly because of memory, which the shares fit
            ranges[WORDS.kind] = ranges[EMBEDDINGS.kind] = WORDS.ranges(whole, shares)
        else:
            ranges[WORDS.kind] = word_ranges(whole, template.devices.index(template.root), shares, resources)
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
    """Return the replicas of a method of groups, each under the first method that divides the model."""
    replicas = []
    for number, group in enumerate(() if method.groups is None else method.groups(options, shares_by_device), 1):
        inside = next((m for m in STRATEGIES.values() if _can_divide(m, whole, len(group))), None)
        if inside is None:
            raise ValueError(f"no method divides this model over {len(group)} devices")
        devices = tuple(template.devices[i] for i in group)
        shares = [shares_by_device[i] for i in group]
        root = template.root if template.root in devices else devices[0]
        plan_version = PlanVersion(template.version.boot, template.version.number + number)
        part = replace(template, version=plan_version, devices=devices, root=root)
        shares = shares if any(shares) else [1.0] * len(group)
        replicas.append(make_plan(spec, part, inside.name, inside.variants_for(len(group))[0], shares))
    return tuple(sorted(replicas, key=lambda part: template.root not in part.devices))  # the root device's comes first


def _can_divide(method: Method, graph: Graph, devices: int) -> bool:
    alone = method.max_devices == 1
    return method.groups is None and alone == (devices == 1) and method.why_unsupported(graph) is None


def lowered_for_longest(spec: Spec, plan: Plan, device: str) -> Iterator[Lowered]:
    """Yield graphs lowered for the longest request: for all hidden states, and for the task if the device has a part.

    The device's other ops for the task occur for all hidden states too. If runs of many rows have other layouts, the
    longest request is lowered under each of them, which bounds shorter requests.
    """
    own, longest = plan.for_device(device), largest_shape(spec)
    used = [name for name, most in own.layouts.items() if most < longest.size]
    for layout in (replace(own, layouts=layouts) for layouts in ({}, *({name: 0} for name in used))):
        task, hidden = (lower_plan(spec, layout, shape) for shape in (longest, longest.with_want("hidden")))
        if task.computes_role(device, roles.TASK) or task.computes_role(device, roles.LOGITS):
            yield task
        yield hidden


def plans_for_all_weights(spec: Spec, plan: Plan) -> tuple[Plan, ...]:
    """Return plans with Programs that together use every weight and receive from every peer that any Program does.

    In one of them shares by length are equal wherever a device has one, so that rounding cannot hide a device's part:
    at most as many devices have one as the longest request has rows (`Share.most`). If a small map has fewer rows than
    there are devices, the plan itself shows the parts: all pictures of a model have one size.
    """
    if all(len(set(filter(None, weights))) <= 1 for weights in plan.shares.values()):
        return (plan,)
    equal = {k: tuple(float(w > 0) for w in weights) for k, weights in plan.shares.items()}
    own = (plan,) if representative_shape(spec, 1) == largest_shape(spec) else ()
    return replace(plan, shares=equal), *own


def resident_weights(spec: Spec, plan: Plan, device: str) -> tuple[WeightRef, ...]:
    """Return every weight range that any request's Program of this device uses; cached."""
    return _resident_weights(spec, PlanKey(plan.for_device(device)), device)


@lru_cache(maxsize=KEPT_RESIDENTS)
def _resident_weights(spec: Spec, divided: PlanKey, device: str) -> tuple[WeightRef, ...]:
    plan = divided.plan
    longest = (low for wide in plans_for_all_weights(spec, plan) for low in lowered_for_longest(spec, wide, device))
    refs = dict.fromkeys(ref for lowered in longest for ref in lowered.weight_refs(device))
    return tuple(passes.narrow_weight(ref, plan.weight_dtype) for ref in refs)


def resident_counts(spec: Spec, plan: Plan, device: str) -> Mapping[WeightRef, int]:
    """Return `resident_weights` with one range for equal ranges of several layers, and the number of these layers.

    The last ones are kept.
    """
    return _resident_counts(spec, PlanKey(plan.for_device(device)), device)


@lru_cache(maxsize=KEPT_RESIDENTS)
def _resident_counts(spec: Spec, divided: PlanKey, device: str) -> Mapping[WeightRef, int]:
    plan = divided.plan
    parts = [part for wide in plans_for_all_weights(spec, plan) for part in lowered_for_longest(spec, wide, device)]
    if len({part.repeat for part in parts}) > 1:
        return dict.fromkeys(_resident_weights(spec, divided, device), 1)
    counts = {ref: times for part in parts for ref, times in part.weight_counts(device).items()}
    return {passes.narrow_weight(ref, plan.weight_dtype): times for ref, times in counts.items()}


def sources_of(spec: Spec, plan: Plan, device: str) -> frozenset[str]:
    """Return the devices that send to this device in any request's Program."""
    own = plan.for_device(device)
    longest = (low for wide in plans_for_all_weights(spec, own) for low in lowered_for_longest(spec, wide, device))
    return frozenset().union(*(lowered.senders(device) for lowered in longest)) - {PLANNER}
