"""Stages of a pipeline by PipeEdge's dynamic programme (Hu et al., 2022): what is cut where, and who computes it.

A model is a chain of parts; a layer is four of them: it may be cut before its attention, the attention's output, and
each matrix of its MLP. The programme goes over the parts that are done, the devices that
are used and the last of them, so stages may stand on the devices in any order. d devices, n parts. A net of
convolutions is a chain of its units, on the devices in their order. Options are `goal`, for most throughput or for the
least sum over the devices, and `micro`, sequences of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf, prod
from typing import Final, Literal, NamedTuple

import numpy as np

from hepti_mqtt.lowering import Graph, IndexSet, roles, span
from hepti_mqtt.lowering.attention import Attention
from hepti_mqtt.lowering.ops import Linear, Op
from hepti_mqtt.plan import Range
from hepti_mqtt.program import DTYPE_BYTES
from hepti_mqtt.shares.maps import crossing_bytes, execution_units
from hepti_mqtt.shares.share import Array, DeviceResources, Options, Shares, Speeds, partition_in_order

Goal = Literal["throughput", "latency"]

PARTS: Final = 4  # of a layer: attention, its output, the first matrix of the MLP, the second
MAX_PERMUTED_DEVICES: Final = 8  # up to so many devices stages may stand in any order; more keep the order of the plan
_LESS: Final = 1 - 1e-9  # what rounding makes of equal costs is no reason for another order
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
# Of these there is no layout in a stage: they are placed with what they feed, so that one kernel does both.
_INSIDE: Final = {roles.ATTENTION_OUT, roles.MLP_UP, roles.MLP_DOWN, roles.MOMENTS, roles.SLICE}
_ENDS: Final = {roles.INPUT, roles.STEM, roles.EMBEDDINGS, roles.FRAMES, roles.TASK, roles.TASK_MOMENTS}


def is_distinct(graph: Graph, options: Options) -> bool:
    """Return whether one request of one sequence, or picture, tells a variant from the others."""
    return options.get("goal") == "throughput" or (roles.MAP not in graph.roles and "micro" not in options)


def placed_roles(graph: Graph) -> list[str]:
    """Return the roles of a transformer's tensors that a stage has a layout of."""
    return sorted(graph.roles - _INSIDE - _ENDS)


def chain_part(op: Op) -> int:
    """Return the part of the chain to which an op of a layer belongs."""
    return op.layer * PARTS + PART_OF.get(op.role, 0)


def parts_of(graph: Graph) -> Callable[[Op], int]:
    """Return what tells the part of the chain to which a placed op belongs."""
    if roles.MAP not in graph.roles:
        return chain_part
    number = {unit.op.name: i for i, unit in enumerate(execution_units(graph))}
    return lambda op: number[op.name]


def micro_batches(graph: Graph, sequences: int) -> list[Mapping[int, IndexSet]]:
    """Return the rows, dimension 0, of micro-batches of so many sequences of a request; of a picture there is one."""
    if roles.MAP in graph.roles:
        return [{}]
    attention = graph.first_with_role(roles.ATTENTION)
    lengths = attention.lengths if isinstance(attention, Attention) else attention.space[:1]
    ends = [0, *accumulate(lengths)]
    return [{0: span(*cut)} for cut in pairwise(dict.fromkeys((*ends[::sequences], ends[-1])))]


def stages_of(graph: Graph, weights: Speeds, lanes: Sequence[DeviceResources], options: Options) -> tuple[Range, ...]:
    """Return the parts of each device; raises ValueError as `stages` does. options: `goal`, of a transformer."""
    if roles.MAP in graph.roles:
        return stages_of_units(graph, weights, lanes)
    return stages(chain_of(graph), weights, lanes, "latency" if options.get("goal") == "latency" else "throughput")


class Chain(NamedTuple):
    """What is known of n parts: FLOPs [n], bytes of weights [n], bytes that travel before each and behind the last."""

    flops: Sequence[float]
    weights: Sequence[float]
    cuts: Sequence[float]


def chain_of(graph: Graph) -> Chain:
    """Return the chain of a transformer's layers for the request that the graph is of."""
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
    # The residual goes along where a block is cut.
    cuts = [whole, whole + attention, whole, whole + 4.0 * rows * inner]
    return Chain(flops, weights, [cuts[i % PARTS] for i in range(n)] + [whole])


def stages(chain: Chain, speeds: Speeds, lanes: Sequence[DeviceResources], goal: Goal) -> tuple[Range, ...]:
    """Return the parts of each device, an empty range where it has none; the first device is the head.

    throughput: the slowest stage, or way between two, takes the least time. latency: all of them together do. Memory
    holds where anything fits. Raises ValueError for more devices than parts.
    """
    n, used = len(chain.flops), [d for d, speed in enumerate(speeds) if speed > 0]
    if len(used) > n:
        raise ValueError(f"{n // PARTS} layers have {n} parts, too few for {len(used)} stages; use at most {n} devices")
    search = _Search(chain, speeds, lanes, goal)
    found = search.found(used, free=False)
    if len(speeds) <= MAX_PERMUTED_DEVICES and (other := search.found(used, free=True))[0] < found[0] * _LESS:
        found = other
    if found[0] == inf and any(lane.memory_bytes < inf for lane in lanes):
        # What is missing is said by the planner, with the Programs' own figures.
        return stages(chain, speeds, [lane._replace(memory_bytes=inf) for lane in lanes], goal)
    return tuple(found[1].get(d, (0, 0)) for d in range(len(speeds)))


class _Search:
    """State: devices that are used and the last of them -> cost [n + 1] by parts that are done."""

    def __init__(self, chain: Chain, speeds: Speeds, lanes: Sequence[DeviceResources], goal: Goal) -> None:
        self.n, self.lanes, self.cuts = len(chain.flops), lanes, np.array(chain.cuts)
        done, held = (np.array([0.0, *accumulate(each)]) for each in (chain.flops, chain.weights))
        self.flops, self.held = done - done[:, None], held - held[:, None]  # [first, stop]
        self.speeds, self.together = speeds, np.add if goal == "latency" else np.maximum

    def found(self, used: Sequence[int], free: bool) -> tuple[float, dict[int, Range]]:
        """Return the least cost, infinite if nothing fits, and the parts by device; free: in any order of them."""
        computing = {d: self._computing(d) for d in used}
        cost: dict[tuple[int, int], Array] = {}
        came: dict[tuple[int, int], list[tuple[int, int, int]]] = {}  # by parts: first, devices before, the last

        def better(state: tuple[int, int], given: Array, before: Iterator[tuple[int, int, int]]) -> None:
            old, steps = cost.get(state, np.full(self.n + 1, inf)), came.get(state, [(0, 0, -1)] * (self.n + 1))
            came[state] = [new if g < o else kept for new, kept, g, o in zip(before, steps, given, old, strict=True)]
            cost[state] = np.minimum(given, old)

        for d in used:
            here = self.together(self._way(0, d)[0], computing[d][0])
            better((1 << d if free else (2 << d) - 1, d), here, ((0, 0, -1) for _ in here))
        for mask in range(1, 1 << len(self.lanes)) if free else [(2 << d) - 1 for d in used]:
            for last in used:
                if (mask, last) not in cost:
                    continue
                for d in (d for d in used if not mask >> d & 1):
                    ways = self.together(cost[mask, last], self._way(last, d))[:, None]
                    total = self.together(ways, computing[d])  # [first, stop]
                    begun = total.argmin(axis=0)
                    steps = ((int(first), mask, last) for first in begun)
                    better((mask | 1 << d if free else (2 << d) - 1, d), total.min(axis=0), steps)
        ends = {s: float(self.together(c[-1], self._way(s[1], 0)[-1])) for s, c in cost.items()}
        best = min(ends, key=lambda state: ends[state])
        return ends[best], _walk(best, came, self.n)

    def _computing(self, d: int) -> Array:
        """Return the seconds of a device for parts first..stop, infinite where it has no room for them."""
        fits = (self.flops >= 0) & (np.arange(self.n + 1) > np.arange(self.n + 1)[:, None])
        fits &= self.held <= self.lanes[d].memory_bytes
        return np.where(fits, self.flops / self.speeds[d], inf)

    def _way(self, source: int, target: int) -> Array:
        """Return the seconds of each cut from one device to another."""
        if source == target:
            return np.zeros(self.n + 1)
        a, b = self.lanes[source], self.lanes[target]
        return a.latency_s + b.latency_s + self.cuts / min(a.bytes_per_s, b.bytes_per_s)


def _walk(
    state: tuple[int, int], came: dict[tuple[int, int], list[tuple[int, int, int]]], stop: int
) -> dict[int, Range]:
    """Return the parts by device on the way to a state with all parts done."""
    found = {}
    while state[1] >= 0:
        first, mask, last = came[state][stop]
        found[state[1]] = (first, stop)
        state, stop = (mask, last), first
    return found


def stages_of_units(graph: Graph, weights: Speeds, lanes: Sequence[DeviceResources]) -> tuple[Range, ...]:
    """Return consecutive units for each device, so that the slowest stage, with what it receives, is the fastest."""
    found = execution_units(graph)
    work = np.array([0.0, *accumulate(unit.flops * unit.size for unit in found)])
    received = np.array([crossing_bytes(graph, i) for i in range(len(found) + 1)], float)
    costs = np.full((len(weights), len(work), len(work)), np.inf)
    for i, (speed, lane) in enumerate(zip(weights, lanes, strict=True)):
        if speed > 0:
            costs[i] = (work[None, :] - work[:, None]) / speed + received[:, None] / lane.bytes_per_s
        costs[i][np.tri(len(work), dtype=bool)] = np.inf
        np.fill_diagonal(costs[i], 0.0)
    return partition_in_order(costs)


# ----------------------------------------------------------------------------------------------------------------------
# Token rows that helpers compute behind the attention of one device, which goes on with its own rows meanwhile.


def offload_rows(kind: str) -> Callable[[Graph, Options, Speeds, Sequence[DeviceResources]], Shares]:
    """Return what finds rows by the devices' speeds; where one device attends for all, by what comes back in time."""

    def solve(graph: Graph, options: Options, weights: Speeds, lanes: Sequence[DeviceResources]) -> Shares:
        alone = options.get("variant") == "mlp" and sum(weights) > 0
        return {kind: _behind(graph, weights, lanes) if alone else tuple(weights)}, {}

    return solve


def _behind(graph: Graph, weights: Speeds, lanes: Sequence[DeviceResources]) -> tuple[float, ...]:
    """Return the share of rows of each device, the first one being that which attends.

    A helper's rows travel there, take what follows attention, and travel back; all that while the first device has a
    whole layer of its own rows to compute: so helpers have as much as comes back by then.
    """
    total, width = graph.first_with_role(roles.AFTER_MLP).space[:2]
    flops = [part / total for part in chain_of(graph).flops[:PARTS]]
    own_s = sum(flops) / max(weights[0], 1.0)
    away_s = [
        sum(flops[1:]) / max(weight, 1.0) + 2 * DTYPE_BYTES["f32"] * width / lane.bytes_per_s
        for weight, lane in zip(weights[1:], lanes[1:], strict=True)
    ]
    shares = [1.0, *(own_s / seconds for seconds in away_s)]
    return tuple(share / sum(shares) for share in shares)
