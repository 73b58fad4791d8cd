"""Shares of maps by CoEdge's linear programme over computation, links and memory (Zeng et al., 2021).

Its solution takes the least time, or the least energy under a deadline. The first device is taken to be the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import NamedTuple

import numpy as np

from hepti_mqtt.cluster import Power
from hepti_mqtt.lowering import Graph, roles
from hepti_mqtt.shares.linear_programme import Array, least
from hepti_mqtt.shares.rows import row_speeds
from hepti_mqtt.shares.share import Lane, Weights
from hepti_mqtt.shares.units import Unit, sizes, units


class Costs(NamedTuple):
    """What a request costs N devices in L layers, for the whole of each layer or for a share.

    compute_s [L, N]: all of a layer on that device alone. halo_s [L, N]: the halo of a device that has a share.
    gather_s [N]: bringing all of the last map from that device to the head, none for the head itself. most [N]: the
    largest share that fits into memory. least: the smallest share that a device may have if it has any. rest_s: what no
    share changes: bringing the picture to all, and the dense layers of the head.
    """

    compute_s: Array
    halo_s: Array
    gather_s: Array
    most: Array
    least: float
    rest_s: float = 0.0


def costs_of(graph: Graph, speeds: Weights, lanes: Sequence[Lane]) -> Costs:
    """Return what the maps of a graph cost on devices of given speeds, in FLOP/s, and links; the first is the head."""
    found = [unit for unit in units(graph) if unit.op.role == roles.MAP and unit.size > 1]
    rates = np.array([lane.bytes_per_s for lane in lanes])
    late = np.array([lane.latency_s for lane in lanes])
    compute = np.array([[u.flops * u.size / s if s > 0 else inf for s in speeds] for u in found])
    halo = [_halo(graph, unit) for unit in found]
    exchange = np.array([(late if rows else 0 * late) + nbytes / rates for rows, nbytes in halo])
    last = found[-1].op
    gather = late + 4.0 * last.space[0] * last.space[1] * last.space[2] / rates
    gather[0] = 0.0
    # Maps are the part of memory that shares decide over: what a layer reads and what it makes.
    peak = max(4.0 * u.op.space[0] * u.op.space[1] * u.op.space[2] for u in found) * 2
    most = np.array([min(lane.memory_bytes / peak, 1.0) for lane in lanes])
    smallest = max((rows / unit.size for unit, (rows, _) in zip(found, halo, strict=True)), default=0.0)
    return Costs(compute, exchange, gather, most, min(smallest, 1.0), _rest(graph, speeds, lanes))


def _rest(graph: Graph, speeds: Weights, lanes: Sequence[Lane]) -> float:
    """Return the seconds that no share changes: the picture over the broker's link to each, the head's dense layers."""
    dense = sum(2.0 * prod(op.space) for op in graph.ops if op.role in (roles.DENSE, roles.TASK))
    picture = sum(float(prod(op.space)) for op in graph.ops if op.role == roles.INPUT)
    brought = sum(picture / lane.bytes_per_s for lane, speed in zip(lanes, speeds, strict=True) if speed > 0)
    at_head = row_speeds(speeds, lanes)[0]
    return brought + (dense / at_head if at_head > 0 else 0.0)


def _halo(graph: Graph, unit: Unit) -> tuple[float, float]:
    """Return (rows on one side, bytes in all) that a share in the middle of a map needs of others."""
    rows = nbytes = 0.0
    middle = unit.size // 2
    for reads in unit.reads:
        source = graph.by_name[reads.name]
        if source.rank == 3:
            beyond = max(reads.high[middle] - reads.low[middle] - source.space[0] / unit.size, 0.0)
            rows, nbytes = max(rows, beyond / 2), nbytes + beyond * reads.nbytes
    return rows, nbytes


def shares_of(costs: Costs, power: Sequence[Power] = (), deadline_s: float = inf) -> Array | None:
    """Return the share of each device, None if no shares meet deadline and memory.

    Least is the time of the layers one behind the other, each as long as its slowest device, or with `power` the energy
    under the deadline. A share is nothing or at least as large as the halo of every layer: whoever has less after a
    solution is left out of the next one, the smallest share first, as in CoEdge, and gets that much if nothing else is
    in time.
    """
    used = [i for i in range(costs.compute_s.shape[1]) if np.isfinite(costs.compute_s[:, i]).all()]
    return _of_some_size(costs, used, frozenset(), power, deadline_s)


def _of_some_size(
    costs: Costs, used: Sequence[int], kept: frozenset[int], power: Sequence[Power], deadline_s: float
) -> Array | None:
    """Return the shares of all devices, of which only `used` have any; kept: who gets at least the halo."""
    found = _solved(costs, used, kept, power, deadline_s) if used else None
    if found is None:
        return None
    small = [i for i, d in enumerate(used) if found[i] < _smallest(costs, used) and d not in kept]
    if not small or len(used) == 1:
        shares = np.zeros(costs.compute_s.shape[1])
        shares[list(used)] = found
        return shares
    at = used[min(small, key=lambda i: found[i])]
    without = _of_some_size(costs, [d for d in used if d != at], kept, power, deadline_s)
    return _of_some_size(costs, used, kept | {at}, power, deadline_s) if without is None else without


def _smallest(costs: Costs, used: Sequence[int]) -> float:
    return min(costs.least, 1 / len(used))


def _solved(
    costs: Costs, used: Sequence[int], kept: frozenset[int], power: Sequence[Power], deadline_s: float
) -> Array | None:
    """Return the shares of the devices that are used: variables are those, then the time of each layer, and of the end.

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
        if costs.most[device] < 1:
            rows.append(-np.eye(width)[i])
            bounds.append(-costs.most[device])
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
    # Seconds in units of the whole, so that rounding is small beside every number.
    unit = max(float(compute.sum(axis=0).max()), 1e-300)
    found = least(prices, *_scaled(np.array(rows), np.array(bounds), n, unit))
    if found is None:
        return None
    shares: Array = found[:n] / found[:n].sum()
    return shares


def _scaled(rows: Array, bounds: Array, n: int, unit: float) -> tuple[Array, Array]:
    """Return the rows with times in `unit`; a row of seconds is one that has a time in it."""
    seconds = np.any(rows[:, n:] != 0, axis=1)
    rows, bounds = rows.copy(), bounds.copy()
    rows[seconds, :n] /= unit
    bounds[seconds] /= unit
    return rows, bounds


def solved(graph: Graph, weights: Weights, lanes: Sequence[Lane], energy: bool = False) -> tuple[float, ...]:
    """Return the shares that take the least time, or energy; by speed if none fit into memory, or no map has rows.

    Without the watts of all devices it is the time. Raises ValueError if no shares meet the deadline.
    """
    if not sizes(graph):
        return tuple(weights)
    costs = costs_of(graph, weights, lanes)
    shares = shares_of(costs)
    if energy and all(lane.power is not None for lane in lanes):
        shares = _least_energy(costs, lanes, shares)
    return tuple(map(float, weights if shares is None else shares))


def _least_energy(costs: Costs, lanes: Sequence[Lane], fastest: Array | None) -> Array:
    """Return the shares of least energy under the site's deadline; fastest: those of least time. Raises ValueError."""
    power, deadline_s = [lane.power for lane in lanes if lane.power is not None], lanes[0].deadline_s
    shares = shares_of(costs, power, deadline_s)
    if shares is None:
        least = (
            "none fit into memory" if fastest is None else f"the fastest take {seconds_of(costs, fastest) * 1e3:.0f} ms"
        )
        raise ValueError(f"no shares meet the deadline of {deadline_s * 1e3:g} ms: {least} by the programme's estimate")
    return shares


def seconds_of(costs: Costs, shares: Array) -> float:
    """Return how long shares take by the programme's estimate: layers are barriers, then all comes to the head."""
    used = shares > 0
    halo = costs.halo_s[:, used] * (used.sum() > 1)
    layers = (costs.compute_s[:, used] * shares[used] + halo).max(axis=1)
    return float(layers.sum() + (costs.gather_s * shares).sum() + costs.rest_s)
