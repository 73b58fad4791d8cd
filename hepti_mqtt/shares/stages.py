"""Stages of a pipeline by PipeEdge's dynamic programme (Hu et al., 2022): cuts of the model, and a device per stage.

A model is a chain of parts. A layer is four parts: it may be cut before its attention, before the attention's output,
and before each matrix of its MLP. The programme's state is the parts done, the devices used and the last device, so
stages may lie on the devices in any order. d devices, n parts. A convolutional net is a chain of its units, on the
devices in order. Options are `goal`, for most throughput or for the least sum over the devices, and `micro`, sequences
of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf, prod
from typing import Final, Literal, NamedTuple

import numpy as np

from hepti_mqtt.core.plan import Range
from hepti_mqtt.core.program import DTYPE_BYTES
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.attention import Attention
from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.ops import Linear, Op
from hepti_mqtt.lowering.regions import IndexSet, span
from hepti_mqtt.shares.maps import crossing_bytes, execution_units
from hepti_mqtt.shares.share import Array, DeviceResources, Options, Shares, Speeds, partition_in_order

Goal = Literal["throughput", "latency"]

PARTS: Final = 4  # of a layer: attention, its output, the first matrix of the MLP, the second
MAX_PERMUTED_DEVICES: Final = 8  # up to this number stages may lie on devices in any order
_LESS: Final = 1 - 1e-9  # a difference by rounding is no reason for another order
PART_OF: Final = {
    **dict.fromkeys((roles.ATTENTION_OUT, roles.ATTENTION_SUM, roles.AFTER_ATTENTION), 1),
    **dict.fromkeys((roles.BEFORE_MLP, roles.MLP_UP, roles.MLP_HIDDEN), 2),
    **dict.fromkeys((roles.MLP_DOWN, roles.MLP_SUM, roles.AFTER_MLP), 3),
}
VARIANTS: Final[tuple[Options, ...]] = (
    {"goal": "throughput"},
    {"goal": "latency"},
    *({"micro": str(n)} for n in (2, 4, 8)),
)
# Roles without a layout in a stage: they are placed with their readers, so that one kernel computes both.
_INSIDE: Final = {roles.ATTENTION_OUT, roles.MLP_UP, roles.MLP_DOWN, roles.MOMENTS, roles.SLICE}
_ENDS: Final = {roles.INPUT, roles.STEM, roles.EMBEDDINGS, roles.FRAMES, roles.TASK, roles.TASK_MOMENTS}


def is_distinct(graph: Graph, options: Options) -> bool:
    """Return whether one request of one sequence, or picture, distinguishes a variant from the others."""
    return options.get("goal") == "throughput" or (roles.MAP not in graph.roles and "micro" not in options)


def placed_roles(graph: Graph) -> list[str]:
    """Return the roles of a transformer's tensors that a stage places."""
    return sorted(graph.roles - _INSIDE - _ENDS)


def chain_part(op: Op) -> int:
    """Return the part of the chain that contains an op of a layer."""
    return op.layer * PARTS + PART_OF.get(op.role, 0)


def parts_of(graph: Graph) -> Callable[[Op], int]:
    """Return a function from placed ops to their parts of the chain."""
    if roles.MAP not in graph.roles:
        return chain_part
    number = {unit.op.name: i for i, unit in enumerate(execution_units(graph))}
    return lambda op: number[op.name]


def micro_batches(graph: Graph, sequences: int) -> list[Mapping[int, IndexSet]]:
    """Return the rows, dimension 0, of micro-batches of `sequences` sequences; a picture is one micro-batch."""
    if roles.MAP in graph.roles:
        return [{}]
    attention = graph.first_with_role(roles.ATTENTION)
    lengths = attention.lengths if isinstance(attention, Attention) else attention.space[:1]
    ends = [0, *accumulate(lengths)]
    return [{0: span(*cut)} for cut in pairwise(dict.fromkeys((*ends[::sequences], ends[-1])))]


def stages_of(
    graph: Graph, speeds: Speeds, resources: Sequence[DeviceResources], options: Options
) -> tuple[Range, ...]:
    """Return the parts of each device; raises ValueError as `stages` does. options: `goal`, of a transformer."""
    if roles.MAP in graph.roles:
        return stages_of_units(graph, speeds, resources)
    return stages(chain_of(graph), speeds, resources, "latency" if options.get("goal") == "latency" else "throughput")


class Chain(NamedTuple):
    """A chain of n parts: FLOPs [n], bytes of weights [n], bytes that travel before each part and after the last."""

    flops: Sequence[float]
    weights: Sequence[float]
    cuts: Sequence[float]


def chain_of(graph: Graph) -> Chain:
    """Return the chain of a transformer's layers for the graph's request."""
    n = graph.layer_count() * PARTS
    flops, weights = [0.0] * n, [0.0] * n
    for op in graph.ops:
        if isinstance(op, Linear) and op.role not in (roles.STEM, roles.TASK):
            flops[chain_part(op)] += 2.0 * prod(op.space)
            weights[chain_part(op)] += 4.0 * prod(op.space[1:])
        elif isinstance(op, Attention):
            flops[chain_part(op)] += 4.0 * prod(op.space)
    rows, width = graph.first_with_role(roles.AFTER_MLP).space
    inner = graph.first_with_role(roles.MLP_HIDDEN).space[1]
    whole, attention = 4.0 * rows * width, 4.0 * rows * graph.first_with_role(roles.ATTENTION).space[1]
    # A cut inside a block also sends the residual.
    cuts = [whole, whole + attention, whole, whole + 4.0 * rows * inner]
    return Chain(flops, weights, [cuts[i % PARTS] for i in range(n)] + [whole])


def stages(chain: Chain, speeds: Speeds, resources: Sequence[DeviceResources], goal: Goal) -> tuple[Range, ...]:
    """Return the parts of each device, or an empty range; the first device is the root.

    throughput: minimises the time of the slowest stage or transfer. latency: minimises their sum. Memory is a limit
    unless nothing fits. Raises ValueError for more devices than parts.
    """
    n, used = len(chain.flops), [d for d, speed in enumerate(speeds) if speed > 0]
    if len(used) > n:
        raise ValueError(f"{n // PARTS} layers have {n} parts, too few for {len(used)} stages; use at most {n} devices")
    search = _Search(chain, speeds, resources, goal)
    solution = search.solve(used, free=False)
    if len(speeds) <= MAX_PERMUTED_DEVICES and (other := search.solve(used, free=True))[0] < solution[0] * _LESS:
        solution = other
    if solution[0] == inf and any(resource.memory_bytes < inf for resource in resources):
        # The planner reports the missing memory, with the Programs' own figures.
        return stages(chain, speeds, [resource._replace(memory_bytes=inf) for resource in resources], goal)
    return tuple(solution[1].get(d, (0, 0)) for d in range(len(speeds)))


class _Search:
    """The search. State: devices used and the last of them -> cost [n + 1] by parts done."""

    def __init__(self, chain: Chain, speeds: Speeds, resources: Sequence[DeviceResources], goal: Goal) -> None:
        self.n, self.resources, self.cuts = len(chain.flops), resources, np.array(chain.cuts)
        done, held = (np.array([0.0, *accumulate(each)]) for each in (chain.flops, chain.weights))
        self.flops, self.held = done - done[:, None], held - held[:, None]  # [first, stop]
        self.speeds, self.together = speeds, np.add if goal == "latency" else np.maximum

    def solve(self, used: Sequence[int], free: bool) -> tuple[float, dict[int, Range]]:
        """Return the least cost, infinite if nothing fits, and the parts by device; free: in any order of devices."""
        computing = {d: self._computing(d) for d in used}
        cost: dict[tuple[int, int], Array] = {}
        routes: dict[tuple[int, int], list[tuple[int, int, int]]] = {}  # by parts: first part, devices before, the last

        def better(state: tuple[int, int], given: Array, before: Iterator[tuple[int, int, int]]) -> None:
            old, steps = cost.get(state, np.full(self.n + 1, inf)), routes.get(state, [(0, 0, -1)] * (self.n + 1))
            routes[state] = [new if g < o else kept for new, kept, g, o in zip(before, steps, given, old, strict=True)]
            cost[state] = np.minimum(given, old)

        for d in used:
            initial = self.together(self._transfer(0, d)[0], computing[d][0])
            better((1 << d if free else (2 << d) - 1, d), initial, ((0, 0, -1) for _ in initial))
        for mask in range(1, 1 << len(self.resources)) if free else [(2 << d) - 1 for d in used]:
            for last in used:
                if (mask, last) not in cost:
                    continue
                for d in (d for d in used if not mask >> d & 1):
                    ways = self.together(cost[mask, last], self._transfer(last, d))[:, None]
                    total = self.together(ways, computing[d])  # [first, stop]
                    firsts = total.argmin(axis=0)
                    steps = ((int(first), mask, last) for first in firsts)
                    better((mask | 1 << d if free else (2 << d) - 1, d), total.min(axis=0), steps)
        ends = {s: float(self.together(c[-1], self._transfer(s[1], 0)[-1])) for s, c in cost.items()}
        best = min(ends, key=lambda state: ends[state])
        return ends[best], _walk(best, routes, self.n)

    def _computing(self, d: int) -> Array:
        """Return the seconds of a device for parts first..stop, infinite if its memory is too small."""
        fits = (self.flops >= 0) & (np.arange(self.n + 1) > np.arange(self.n + 1)[:, None])
        fits &= self.held <= self.resources[d].memory_bytes
        return np.where(fits, self.flops / self.speeds[d], inf)

    def _transfer(self, source: int, target: int) -> Array:
        """Return the seconds that each cut takes from one device to another."""
        if source == target:
            return np.zeros(self.n + 1)
        a, b = self.resources[source], self.resources[target]
        return a.latency_s + b.latency_s + self.cuts / min(a.bytes_per_s, b.bytes_per_s)


def _walk(
    state: tuple[int, int], routes: dict[tuple[int, int], list[tuple[int, int, int]]], stop: int
) -> dict[int, Range]:
    """Return the parts by device that lead to a state with all parts done."""
    parts = {}
    while state[1] >= 0:
        first, mask, last = routes[state][stop]
        parts[state[1]] = (first, stop)
        state, stop = (mask, last), first
    return parts


def stages_of_units(graph: Graph, speeds: Speeds, resources: Sequence[DeviceResources]) -> tuple[Range, ...]:
    """Return consecutive units for each device, with the least time of the slowest stage, receiving included."""
    units = execution_units(graph)
    work = np.array([0.0, *accumulate(unit.flops * unit.size for unit in units)])
    received = np.array([crossing_bytes(graph, i) for i in range(len(units) + 1)], float)
    costs = np.full((len(speeds), len(work), len(work)), np.inf)
    for i, (speed, resource) in enumerate(zip(speeds, resources, strict=True)):
        if speed > 0:
            costs[i] = (work[None, :] - work[:, None]) / speed + received[:, None] / resource.bytes_per_s
        costs[i][np.tri(len(work), dtype=bool)] = np.inf
        np.fill_diagonal(costs[i], 0.0)
    return partition_in_order(costs)


# ----------------------------------------------------------------------------------------------------------------------
# Token rows that other devices compute after the attention of one device, which continues with its own rows.


def offload_rows(kind: str) -> Callable[[Graph, Options, Speeds, Sequence[DeviceResources]], Shares]:
    """Return a solver of rows by the devices' speeds; in `mlp` one device attends for all (`_helper_rows`)."""

    def solve(graph: Graph, options: Options, speeds: Speeds, resources: Sequence[DeviceResources]) -> Shares:
        one_attends = options.get("variant") == "mlp" and sum(speeds) > 0
        return {kind: _helper_rows(graph, speeds, resources) if one_attends else tuple(speeds)}, {}

    return solve


def _helper_rows(graph: Graph, speeds: Speeds, resources: Sequence[DeviceResources]) -> tuple[float, ...]:
    """Return the share of rows of each device; the first device attends for all.

    A helper receives its rows, computes the rest of the layer and sends them back, while the first device computes a
    whole layer of its own rows. So a helper's share is as large as returns by then.
    """
    total, width = graph.first_with_role(roles.AFTER_MLP).space[:2]
    flops = [part / total for part in chain_of(graph).flops[:PARTS]]
    own_s = sum(flops) / max(speeds[0], 1.0)
    away_s = [
        sum(flops[1:]) / max(speed, 1.0) + 2 * DTYPE_BYTES["f32"] * width / resource.bytes_per_s
        for speed, resource in zip(speeds[1:], resources[1:], strict=True)
    ]
    shares = [1.0, *(own_s / seconds for seconds in away_s)]
    return tuple(share / sum(shares) for share in shares)
