"""Solvers of shares for convolutional nets: execution units, cuts, halos, tiles, and the methods' own programmes.

Feature maps are [y, x, channels]. Methods place maps and dense layers; other tensors are computed with their readers.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, product
from math import ceil, inf, prod
from typing import Final, NamedTuple

import numpy as np

from hepti_mqtt.core.plan import Range, apportion
from hepti_mqtt.core.profiles import Power
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.layouts import Piece, Rule, Table, region_with
from hepti_mqtt.lowering.ops import GlobalAverage, Op
from hepti_mqtt.lowering.regions import IndexSet, Region, index_count, span, union
from hepti_mqtt.shares.share import Array, DeviceResources, Options, Shares, Speeds, assign_greedily, partition_in_order

PLACED: Final = (roles.MAP, roles.DENSE)
# Tensors that every device has or receives as a row: shares of maps do not decide over them.
_SMALL: Final = (roles.INPUT, roles.STEM, roles.SQUEEZE)


class UnitInput(NamedTuple):
    """The input of a unit from another unit: first and last index for each index of the unit, bytes of an index."""

    name: str
    low: tuple[int, ...]
    high: tuple[int, ...]
    nbytes: int


class ExecutionUnit(NamedTuple):
    """A placed tensor and the ops computed for it alone, cut along one dimension: rows of a map, or columns."""

    op: Op
    dim: int
    flops: float  #: of one index, on average
    reads: tuple[UnitInput, ...]

    @property
    def size(self) -> int:
        """Return the number of indices to share."""
        return self.op.space[self.dim]


@lru_cache(maxsize=8)
def execution_units(graph: Graph) -> tuple[ExecutionUnit, ...]:
    """Return the execution units of a graph in order of computation."""
    return tuple([_unit(graph, op) for op in graph.ops if op.role in PLACED])


def _unit(graph: Graph, op: Op) -> ExecutionUnit:
    dim = cut_dimension(op)
    inputs = [_inputs(graph, op, region_with(op, {dim: span(i, i + 1)})) for i in range(op.space[dim])]
    reads = []
    for name in dict.fromkeys(name for by_name in inputs for name in by_name):
        source = graph.by_name[name]
        ends = [by_name.get(name, (0, 0)) for by_name in inputs]
        row = prod(source.space[: source.rank]) // source.space[cut_dimension(source)]
        reads.append(UnitInput(name, tuple(a for a, _ in ends), tuple(z for _, z in ends), 4 * row))
    return ExecutionUnit(op, dim, _flops(graph, op, op.full_region) / op.space[dim], tuple(reads))


def cut_dimension(op: Op) -> int:
    """Return the dimension along which a unit is cut."""
    return 0 if op.rank == 3 else 1


def _inputs(graph: Graph, op: Op, region: Region) -> Mapping[str, Range]:
    """Return the ranges of placed tensors from which a region is computed."""
    ranges: dict[str, Range] = {}
    for name, part in zip(op.inputs, op.input_regions(region), strict=True):
        source = graph.by_name[name]
        if source.role in _SMALL or not all(part):
            continue
        if source.role in PLACED:
            more = {name: (part[cut_dimension(source)][0][0], part[cut_dimension(source)][-1][1])}
        else:
            inner = source.region_for(part)
            more = dict(_inputs(graph, source, inner)) if inner else {}
        for key, (a, z) in more.items():
            low, high = ranges.get(key, (a, z))
            ranges[key] = (min(a, low), max(z, high))
    return ranges


def _flops(graph: Graph, op: Op, region: Region) -> float:
    """Return the FLOPs of a region and of the ops computed for it alone."""
    places = prod(map(index_count, region[: op.rank - 1]))
    matrices = sum((r.rows[1] - r.rows[0]) * (r.columns[1] - r.columns[0]) for r in op.weight_refs(region))
    total = 2.0 * places * matrices if matrices else float(prod(map(index_count, region[: op.rank])))
    for name, part in zip(op.inputs, op.input_regions(region), strict=True):
        source = graph.by_name[name]
        if source.role not in (*PLACED, *_SMALL) and not source.is_view:
            inner = source.region_for(part)
            total += _flops(graph, source, inner) if inner else 0.0
    return total


def pixels(graph: Graph) -> int:
    """Return the pixels of the map at which half of a net's work is done, 0 if it has no maps."""
    maps = sorted(
        (unit.op.space[0] * unit.op.space[1], unit.flops * unit.size)
        for unit in execution_units(graph)
        if unit.op.rank == 3
    )
    done = list(accumulate(flops for _, flops in maps))
    return next((size for (size, _), flops in zip(maps, done, strict=True) if 2 * flops >= done[-1]), 0)


# -- where one device continues alone -------------------------------------------------------------------------------


def map_heights(graph: Graph) -> list[int]:
    """Return the distinct heights of a graph's maps in descending order, without maps of one row, which stay whole."""
    return sorted({op.space[0] for op in graph.ops if op.role == roles.MAP and op.space[0] > 1}, reverse=True)


@lru_cache(maxsize=64)
def after_cut(graph: Graph, cut: int) -> frozenset[str]:
    """Return all tensors after a cut, and maps of one row; cut 0: nothing else.

    Cut n lies after the first map of the n-th smaller size, and at or before the first map of the next smaller size. Of
    the places between, it is the one at which the fewest bytes meet on one device.
    """
    units = execution_units(graph)
    start = len(units)
    if 0 < cut < len(map_heights(graph)):
        rest = [*map_heights(graph)[cut : cut + 2], 1][:2]
        first, stop = (next((i for i, u in enumerate(units) if _within(u, rows)), len(units)) for rows in rest)
        stop = max(stop, first + 1)  # if maps grow, the first of a size may be that of the next smaller size too
        start = min(range(first + 1, stop + 1), key=lambda i: crossing_bytes(graph, i))
    small = {unit.op.name for unit in units if unit.op.role == roles.MAP and unit.size == 1}
    return frozenset(unit.op.name for unit in units[start:]) | small


def _within(unit: ExecutionUnit, rows: int) -> bool:
    """Return whether a unit is a map of at most `rows` rows, or lies after the maps."""
    return unit.op.role != roles.MAP or unit.size <= rows


def crossing_bytes(graph: Graph, start: int) -> int:
    """Return the bytes of maps that are computed before a unit and read by it or later units."""
    units = execution_units(graph)
    before = {unit.op.name: unit for unit in units[:start]}
    read = {reads.name: reads.nbytes for unit in units[start:] for reads in unit.reads if reads.name in before}
    return sum(nbytes * before[name].size for name, nbytes in read.items())


def boundary_maps(graph: Graph, cut: int, apart: bool) -> frozenset[str]:
    """Return the divided maps with undivided readers (dense layers, maps after the cut), and the last divided map.

    Maps after a squeezed map need its means, so it belongs to the result, unless parts are to be computed apart.
    """
    following = after_cut(graph, cut)
    readers = [unit for unit in execution_units(graph) if unit.op.name in following or unit.op.role == roles.DENSE]
    read = {reads.name for unit in readers for reads in unit.reads}
    divided = [op.name for op in graph.ops if op.role == roles.MAP and op.name not in following]
    squeezed = {op.inputs[0] for op in graph.ops if isinstance(op, GlobalAverage) and op.role == roles.SQUEEZE}
    return frozenset((read if apart else read | squeezed) & set(divided)) | frozenset(divided[-1:])


# ----------------------------------------------------------------------------------------------------------------------
# Rows of maps by one weight per device, or by size, and columns of the dense layers.


def dense_kind(columns: int) -> str:
    """Return the kind of share of dense layers with `columns` columns."""
    return f"dense {columns}"


def dense_ranges(graph: Graph, divide: Callable[[int], tuple[Range, ...]]) -> dict[str, tuple[Range, ...]]:
    """Return the columns of dense layers for each device, by the layers' size; divide: divides a number of units."""
    ranges = {}
    for op in graph.ops:
        if op.role == roles.DENSE:
            total, unit = op.space[1], min(op.share_unit(1), op.space[1])
            parts = divide(ceil(total / unit))
            ranges[dense_kind(total)] = tuple((min(a * unit, total), min(z * unit, total)) for a, z in parts)
    return ranges


_ROWS: Final = "rows "


def rows_kind(rows: int) -> str:
    """Return the kind of share of maps with `rows` rows."""
    return f"{_ROWS}{rows}"


def is_rows_kind(kind: str) -> bool:
    """Return whether a kind of ranges is rows of maps, for which every device has all weights."""
    return kind.startswith(_ROWS)


def ranges_by_size(graph: Graph, _options: Options, speeds: Speeds, resources: Sequence[DeviceResources]) -> Shares:
    """Return rows of maps by size, and columns of dense layers, by the devices' speeds."""
    rows = {rows_kind(n): apportion(n, speeds) for n in map_heights(graph)}
    row_speeds = single_row_speeds(speeds, resources)
    return {}, {**rows, **dense_ranges(graph, lambda n: apportion(n, row_speeds))}


def modnn_shares(graph: Graph, _options: Options, speeds: Speeds, resources: Sequence[DeviceResources]) -> Shares:
    """Return the devices' relative speeds, and columns of the dense layers, assigned greedily."""
    row_speeds = single_row_speeds(speeds, resources)
    whole = sum(speeds) or 1.0  # relative, so that a plan's numbers stay short however often shares change
    return {"speeds": tuple(w / whole for w in speeds)}, dense_ranges(graph, lambda n: assign_greedily(n, row_speeds))


def single_row_speeds(speeds: Speeds, resources: Sequence[DeviceResources]) -> Speeds:
    """Return the devices' speeds at dense layers, which have one row and depend on memory, not arithmetic."""
    return [
        w if resource.row_flops_per_s is None or w <= 0 else resource.row_flops_per_s
        for w, resource in zip(speeds, resources, strict=True)
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Rows of maps in several pieces, so that the halo travels while a device computes its other rows.
#
# The rows that other devices wait for, at both ends of a share, are one piece: computed first and sent. Rows without a
# halo are computed while it travels, since whatever is ready runs.


MIN_MIDDLE_PIXELS: Final = 14  # of a middle: with fewer pixels a convolution mostly reads weights from memory

Rows = Mapping[int, Range]  # by device


def borders_first(graph: Graph, placed: Table) -> Table:
    """Return a table of rows of maps with both ends of a share in a piece of their own, which comes first.

    placed: layouts of one piece for each device. Every device adds up its own rows for means over maps.
    """
    lines = {**placed.optional_rules, roles.FLAT: means(graph, placed.rules[roles.MAP])}
    return Table({roles.MAP: _ends_first(graph, {**placed.rules, **placed.optional_rules})}, lines, uniform=False)


def _ends_first(graph: Graph, placed: Mapping[str, Rule]) -> Rule:
    ranges = {unit.op.name: _ranges(unit, placed[unit.op.role]) for unit in execution_units(graph)}
    top, bottom = _border_rows(graph, ranges)

    def rule(op: Op) -> list[Piece]:
        least = ceil(MIN_MIDDLE_PIXELS / op.space[1])
        pieces = []
        for i, (start, stop) in ranges[op.name].items():
            low, high = _middle((start, stop), top[op.name, i], bottom[op.name, i])
            ends = union(span(start, low), span(high, stop))
            parts = [ends, span(low, high)] if ends and high - low >= least else [span(start, stop)]
            pieces += [Piece(i, region_with(op, {0: rows})) for rows in parts]
        return pieces

    return rule


def _middle(rows: Range, first: int, last: int) -> Range:
    """Return the rows between the first and the last ones, aligned to tiles of 2 x 2 outputs."""
    low, high = rows[0] + first, rows[1] - last
    return low + (low % 2 if first else 0), high - (high % 2 if last else 0)


def means(graph: Graph, maps: Rule) -> Rule:
    """Return the layout of means over maps: every device adds up its own parts of the map."""

    def rule(op: Op) -> list[Piece] | None:
        if not isinstance(op, GlobalAverage):
            return None
        pieces = maps(graph.by_name[op.inputs[0]])
        if pieces is None:
            return None
        return [
            piece._replace(region=region_with(op, dict(zip((2, 3), piece.region, strict=False)))) for piece in pieces
        ]

    return rule


def _ranges(unit: ExecutionUnit, rule: Rule) -> Rows:
    """Return each device's indices of a unit, without devices that have none."""
    pieces = [(piece.device, piece.region[unit.dim]) for piece in rule(unit.op) or () if all(piece.region)]
    return {device: (part[0][0], part[-1][1]) for device, part in pieces}


def _border_rows(
    graph: Graph, ranges: Mapping[str, Rows]
) -> tuple[dict[tuple[str, int], int], dict[tuple[str, int], int]]:
    """Return the number of a device's first, and last, rows that wait or that others wait for, by (map, device)."""
    top: dict[tuple[str, int], int] = defaultdict(int)
    bottom: dict[tuple[str, int], int] = defaultdict(int)
    for unit in execution_units(graph):
        for reads in unit.reads:
            held = ranges[reads.name]
            for i, (start, stop) in ranges[unit.op.name].items():
                own = held.get(i, (0, 0))
                early = sum(low < own[0] for low in reads.low[start:stop])
                late = sum(high > own[1] for high in reads.high[start:stop])
                top[unit.op.name, i] = max(top[unit.op.name, i], early)
                bottom[unit.op.name, i] = max(bottom[unit.op.name, i], late)
                low, high = reads.low[start], reads.high[stop - 1]
                for j, rows in _others(held, i, low, high):
                    if j > i:
                        top[reads.name, j] = max(top[reads.name, j], rows[1] - held[j][0])
                    else:
                        bottom[reads.name, j] = max(bottom[reads.name, j], held[j][1] - rows[0])
    return top, bottom


def _others(held: Rows, device: int, low: int, high: int) -> Iterator[tuple[int, Range]]:
    """Yield (other device, its rows) within low..high."""
    for other, (start, stop) in held.items():
        a, z = max(start, low), min(stop, high)
        if other != device and a < z:
            yield other, (a, z)


# ----------------------------------------------------------------------------------------------------------------------
# Tiles of a feature map in two dimensions, and their owners.


GRID: Final = (4, 2)  # rows and columns of tiles
TILES: Final = GRID[0] * GRID[1]


def tiles(op: Op) -> list[Mapping[int, IndexSet]]:
    """Return each tile's rows and columns of a map, row by row; a small map has fewer tiles."""
    sides = [[span(*r) for r in apportion(op.space[dim], [1.0] * parts)] for dim, parts in enumerate(GRID)]
    return [{0: y, 1: x} for y, x in product(*sides) if y and x]


def owned_tiles(op: Op, speeds: Speeds) -> list[tuple[int, Mapping[int, IndexSet]]]:
    """Return the tiles of a map, each with its device: by shares, in order."""
    parts = tiles(op)
    return [(i, at) for i, (first, stop) in enumerate(apportion(len(parts), speeds)) for at in parts[first:stop]]


# ----------------------------------------------------------------------------------------------------------------------
# A linear programme by the dual simplex method: a few dozen rows, exact up to rounding, equal on every machine.


EPSILON: Final = 1e-10
STEEPEST_STEPS: Final = 5  # steps for each row


def minimise(costs: Array, rows: Array, bounds: Array) -> Array | None:
    """Return the x >= 0 with rows x >= bounds that minimises costs x, None if there is none.

    costs [n], none below 0; rows [m, n], bounds [m]. With such costs x = 0 is optimal, if not feasible, and each step
    of the dual method repairs one row (Lemke, 1954). After many steps the row of lowest number is chosen (Bland, 1977),
    which guarantees the end.
    """
    m, n = rows.shape
    # A tableau row: -rows x + slack = -bounds; the last one holds the reduced costs, the last column the values.
    tableau = np.zeros((m + 1, n + m + 1))
    tableau[:m, :n], tableau[:m, n : n + m], tableau[:m, -1] = -rows, np.eye(m), -bounds
    tableau[m, :n] = costs
    basis = np.arange(n, n + m)
    for step in itertools.count():
        below = np.flatnonzero(tableau[:m, -1] < -EPSILON)
        if not len(below):
            break
        # The most violated row needs the fewest steps, but only the first one guarantees the end.
        row = below[np.argmin(tableau[below, -1] if step < STEEPEST_STEPS * m else basis[below])]
        able = np.flatnonzero(tableau[row, :-1] < -EPSILON)
        if not len(able):
            return None
        ratios = tableau[m, able] / -tableau[row, able]
        column = able[np.flatnonzero(ratios <= ratios.min() + EPSILON)[0]]
        tableau[row] /= tableau[row, column]
        others = np.arange(m + 1) != row
        tableau[others] -= np.outer(tableau[others, column], tableau[row])
        basis[row] = column
    x = np.zeros(n + m)
    x[basis] = tableau[:m, -1]
    return x[:n]


# ----------------------------------------------------------------------------------------------------------------------
# Shares of maps by CoEdge's linear programme over computation, links and memory (Zeng et al., 2021).
#
# Its solution minimises time, or energy under a deadline. The first device is assumed to be the root.


class Costs(NamedTuple):
    """The costs of a request on N devices in L layers."""

    compute_s: Array  #: [L, N]: of a whole layer on that device alone
    halo_s: Array  #: [L, N]: of the halo of a device with a share
    gather_s: Array  #: [N]: of sending the whole last map from that device to the root, 0 for the root itself
    max_share: Array  #: [N]: largest share that fits into memory
    min_share: float  #: smallest share of a device that has any
    rest_s: float = 0.0  #: independent of shares: sending the picture to all devices, and the root's dense layers


def costs_of(graph: Graph, speeds: Speeds, resources: Sequence[DeviceResources]) -> Costs:
    """Return the costs of a graph's maps on devices of given speeds, in FLOP/s, and links; the first is the root."""
    units = [unit for unit in execution_units(graph) if unit.op.role == roles.MAP and unit.size > 1]
    rates = np.array([resource.bytes_per_s for resource in resources])
    late = np.array([resource.latency_s for resource in resources])
    compute = np.array([[u.flops * u.size / s if s > 0 else inf for s in speeds] for u in units])
    halo = [_halo(graph, unit) for unit in units]
    exchange = np.array([(late if rows else 0 * late) + nbytes / rates for rows, nbytes in halo])
    last = units[-1].op
    gather = late + 4.0 * last.space[0] * last.space[1] * last.space[2] / rates
    gather[0] = 0.0
    # Shares decide over the memory of maps: a layer's input and output.
    peak = max(4.0 * u.op.space[0] * u.op.space[1] * u.op.space[2] for u in units) * 2
    most = np.array([min(resource.memory_bytes / peak, 1.0) for resource in resources])
    smallest = max((rows / unit.size for unit, (rows, _) in zip(units, halo, strict=True)), default=0.0)
    return Costs(compute, exchange, gather, most, min(smallest, 1.0), _rest(graph, speeds, resources))


def _rest(graph: Graph, speeds: Speeds, resources: Sequence[DeviceResources]) -> float:
    """Return the seconds independent of shares: the picture over the broker's link to each, the root's dense layers."""
    dense = sum(2.0 * prod(op.space) for op in graph.ops if op.role in (roles.DENSE, roles.TASK))
    picture = sum(float(prod(op.space)) for op in graph.ops if op.role == roles.INPUT)
    brought = sum(
        picture / resource.bytes_per_s for resource, speed in zip(resources, speeds, strict=True) if speed > 0
    )
    at_root = single_row_speeds(speeds, resources)[0]
    return brought + (dense / at_root if at_root > 0 else 0.0)


def _halo(graph: Graph, unit: ExecutionUnit) -> tuple[float, float]:
    """Return (rows on one side, bytes in all) that a share in the middle of a map needs from others."""
    rows = nbytes = 0.0
    middle = unit.size // 2
    for reads in unit.reads:
        source = graph.by_name[reads.name]
        if source.rank == 3:
            beyond = max(reads.high[middle] - reads.low[middle] - source.space[0] / unit.size, 0.0)
            rows, nbytes = max(rows, beyond / 2), nbytes + beyond * reads.nbytes
    return rows, nbytes


def solve_shares(costs: Costs, power: Sequence[Power] = (), deadline_s: float = inf) -> Array | None:
    """Return the share of each device, None if no shares meet deadline and memory.

    The objective is the sum over layers of the slowest device's time, or with `power` the energy under the deadline. A
    share is nothing or at least as large as the halo of every layer. A device with a smaller share is left out of the
    next solution, the smallest share first, as in CoEdge; it gets the minimum if nothing else meets the deadline.
    """
    used = [i for i in range(costs.compute_s.shape[1]) if np.isfinite(costs.compute_s[:, i]).all()]
    return _of_some_size(costs, used, frozenset(), power, deadline_s)


def _of_some_size(
    costs: Costs, used: Sequence[int], kept: frozenset[int], power: Sequence[Power], deadline_s: float
) -> Array | None:
    """Return the shares of all devices, 0 except for `used`; kept: devices that get at least the halo."""
    solution = _solved(costs, used, kept, power, deadline_s) if used else None
    if solution is None:
        return None
    small = [i for i, d in enumerate(used) if solution[i] < _smallest(costs, used) and d not in kept]
    if not small or len(used) == 1:
        shares = np.zeros(costs.compute_s.shape[1])
        shares[list(used)] = solution
        return shares
    at = used[min(small, key=lambda i: solution[i])]
    without = _of_some_size(costs, [d for d in used if d != at], kept, power, deadline_s)
    return _of_some_size(costs, used, kept | {at}, power, deadline_s) if without is None else without


def _smallest(costs: Costs, used: Sequence[int]) -> float:
    return min(costs.min_share, 1 / len(used))


def _solved(
    costs: Costs, used: Sequence[int], kept: frozenset[int], power: Sequence[Power], deadline_s: float
) -> Array | None:
    """Return the shares of the used devices. Variables are those shares, then the time of each layer, and the end.

    Layer l, device i: T_l - compute_s[l, i] x_i >= halo_s[l, i]. The end: T - sum of gather_s[i] x_i >= 0.
    """
    compute, halo = costs.compute_s[:, used], costs.halo_s[:, used] * (len(used) > 1)
    layers, n = compute.shape
    width = n + layers + 1
    rows, bounds = [], []
    for layer in range(layers):
        for i in range(n):
            row = np.zeros(width)
            row[i], row[n + layer] = -compute[layer, i], 1.0
            rows.append(row)
            bounds.append(halo[layer, i])
    end, total, in_time = np.zeros(width), np.zeros(width), np.zeros(width)
    end[:n], end[-1] = -costs.gather_s[used], 1.0
    total[:n], in_time[n:] = 1.0, -1.0
    rows, bounds = [*rows, end, total], [*bounds, 0.0, 1.0]
    for i, device in enumerate(used):
        if costs.max_share[device] < 1:
            rows.append(-np.eye(width)[i])
            bounds.append(-costs.max_share[device])
        if device in kept:
            rows.append(np.eye(width)[i])
            bounds.append(_smallest(costs, used))
    if deadline_s < inf:
        rows.append(in_time)
        bounds.append(costs.rest_s - deadline_s)
    prices = np.zeros(width)
    if power:
        prices[:n] = [
            power[d].compute_w * compute[:, i].sum() + power[d].link_w * costs.gather_s[d] for i, d in enumerate(used)
        ]
    else:
        prices[n:] = 1.0
    # Seconds relative to the whole, so that rounding errors are small.
    unit = max(float(compute.sum(axis=0).max()), 1e-300)
    solution = minimise(prices, *_scaled(np.array(rows), np.array(bounds), n, unit))
    if solution is None:
        return None
    shares: Array = solution[:n] / solution[:n].sum()
    return shares


def _scaled(rows: Array, bounds: Array, n: int, unit: float) -> tuple[Array, Array]:
    """Return the rows with times in `unit`; rows of seconds are the rows with a time variable."""
    seconds = np.any(rows[:, n:] != 0, axis=1)
    rows, bounds = rows.copy(), bounds.copy()
    rows[seconds, :n] /= unit
    bounds[seconds] /= unit
    return rows, bounds


def coedge_shares(
    graph: Graph, speeds: Speeds, resources: Sequence[DeviceResources], energy: bool = False
) -> tuple[float, ...]:
    """Return the shares of least time, or energy; by speed if none fit into memory, or if no map has rows.

    Without the power of all devices the objective is time. Raises ValueError if no shares meet the deadline.
    """
    if not map_heights(graph):
        return tuple(speeds)
    costs = costs_of(graph, speeds, resources)
    shares = solve_shares(costs)
    if energy and all(resource.power is not None for resource in resources):
        shares = _least_energy(costs, resources, shares)
    return tuple(map(float, speeds if shares is None else shares))


def _least_energy(costs: Costs, resources: Sequence[DeviceResources], fastest: Array | None) -> Array:
    """Return the shares of least energy under the site's deadline; fastest: those of least time. Raises ValueError."""
    power, deadline_s = (
        [resource.power for resource in resources if resource.power is not None],
        resources[0].deadline_s,
    )
    shares = solve_shares(costs, power, deadline_s)
    if shares is None:
        least = (
            "none fit into memory" if fastest is None else f"the fastest take {seconds_of(costs, fastest) * 1e3:.0f} ms"
        )
        raise ValueError(f"no shares meet the deadline of {deadline_s * 1e3:g} ms: {least} by the programme's estimate")
    return shares


def seconds_of(costs: Costs, shares: Array) -> float:
    """Return the programme's estimate of the time: layers are barriers, then the root gathers the last map."""
    used = shares > 0
    halo = costs.halo_s[:, used] * (used.sum() > 1)
    layers = (costs.compute_s[:, used] * shares[used] + halo).max(axis=1)
    return float(layers.sum() + (costs.gather_s * shares).sum() + costs.rest_s)


# ----------------------------------------------------------------------------------------------------------------------
# Shares of each layer of a convolutional net, solved layer by layer as in EdgeFlow (Hu and Li, 2022).


MOST_UNITS: Final = 56  # of a layer


class _Site(NamedTuple):
    """The devices: FLOP/s on maps and on dense layers, bytes/s, and seconds of latency."""

    speeds: Array
    row_speeds: Array
    rates: Array
    late: Array


class _Held(NamedTuple):
    """The devices' ranges of a tensor, and when each is ready."""

    ranges: tuple[Range, ...]
    ready_s: Array


def edgeflow_ranges(graph: Graph, speeds: Speeds, resources: Sequence[DeviceResources]) -> dict[str, tuple[Range, ...]]:
    """Return the ranges of every layer, each in turn with the least time of its last device."""
    site = _Site(
        np.array(speeds, float),
        np.array(single_row_speeds(speeds, resources), float),
        np.array([x.bytes_per_s for x in resources]),
        np.array([x.latency_s for x in resources]),
    )
    held: dict[str, _Held] = {}
    free = np.zeros(len(speeds))
    for unit in execution_units(graph):
        done = _done(unit, site, held, free)
        ranges, free = _divided(unit, done, free)
        held[unit.op.name] = _Held(ranges, free)
    return {name: tensor.ranges for name, tensor in held.items()}


def _ends(unit: ExecutionUnit) -> list[int]:
    """Return the possible cuts of a layer."""
    least = min(unit.op.share_unit(unit.dim), unit.size)
    return [*range(0, unit.size, ceil(unit.size / MOST_UNITS / least) * least), unit.size]


def _done(unit: ExecutionUnit, site: _Site, held: Mapping[str, _Held], free: Array) -> Array:
    """Return the time at which each device has computed each range [device, start, stop], inf if stop precedes start.

    A device begins when it is free and its inputs have arrived: latency after the last of their owners is ready, and
    then all bytes over its link.
    """
    ends = np.array(_ends(unit))
    start, stop = ends[:, None], ends[None, :]
    devices, speeds = len(free), site.speeds if unit.op.rank == 3 else site.row_speeds
    done = np.full((devices, len(ends), len(ends)), np.inf)
    inputs = [(_required(reads, ends), reads.nbytes, held[reads.name]) for reads in unit.reads]
    for i in np.flatnonzero(site.speeds > 0):
        begin, nbytes = np.full((len(ends), len(ends)), free[i]), np.zeros((len(ends), len(ends)))
        for (low, high), size, source in inputs:
            for j, (a, z) in enumerate(source.ranges):
                overlap = np.maximum(np.minimum(high, z) - np.maximum(low, a), 0)
                if i != j:
                    nbytes += overlap * float(size)
                    arrived = np.where(overlap > 0, source.ready_s[j] + site.late[i] + site.late[j], 0.0)
                    begin = np.maximum(begin, arrived)
        # An empty range ends at 0, so that it never delays the layer.
        took = nbytes / site.rates[i] + unit.flops * (stop - start) / speeds[i]
        done[i] = np.where(stop > start, begin + took, np.where(stop == start, 0.0, np.inf))
    for i in np.flatnonzero(site.speeds <= 0):
        done[i][np.arange(len(ends)), np.arange(len(ends))] = 0.0
    return done


def _required(reads: UnitInput, ends: Array) -> tuple[Array, Array]:
    """Return (first, last + 1) indices that each range [start, stop] of a layer needs of another unit."""
    low, high = np.array([*reads.low, 0]), np.array([0, *reads.high])
    return low[ends][:, None], high[ends][None, :]


def _divided(unit: ExecutionUnit, done: Array, free: Array) -> tuple[tuple[Range, ...], Array]:
    """Return each device's range, in order, with the least time of the last device; and when each device is free."""
    ends, parts = _ends(unit), partition_in_order(done)
    after = [done[i, a, z] if a < z else free[i] for i, (a, z) in enumerate(parts)]
    return tuple((ends[a], ends[z]) for a, z in parts), np.array(after)
