"""Shares of each layer of a convolutional net, solved one behind the other as EdgeFlow does (Hu and Li, 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Final, NamedTuple

import numpy as np

from hepti_mqtt.lowering import Graph
from hepti_mqtt.plan import Range
from hepti_mqtt.shares.consecutive import Array, consecutive
from hepti_mqtt.shares.rows import row_speeds
from hepti_mqtt.shares.share import Lane, Weights
from hepti_mqtt.shares.units import Reads, Unit, units

MOST_UNITS: Final = 56  # in which a layer is cut


class _Site(NamedTuple):
    """Devices: FLOP/s on maps and on dense layers, bytes/s and seconds of latency."""

    speeds: Array
    row_speeds: Array
    rates: Array
    late: Array


class _Held(NamedTuple):
    """Who has which range of a tensor, and when it is there."""

    ranges: tuple[Range, ...]
    ready_s: Array


def solved(graph: Graph, weights: Weights, lanes: Sequence[Lane]) -> dict[str, tuple[Range, ...]]:
    """Return the ranges of every layer: of each in turn those with which its last part is done first."""
    site = _Site(
        np.array(weights, float),
        np.array(row_speeds(weights, lanes), float),
        np.array([x.bytes_per_s for x in lanes]),
        np.array([x.latency_s for x in lanes]),
    )
    held: dict[str, _Held] = {}
    free = np.zeros(len(weights))
    for unit in units(graph):
        done = _done(unit, site, held, free)
        ranges, free = _divided(unit, done, free)
        held[unit.op.name] = _Held(ranges, free)
    return {name: found.ranges for name, found in held.items()}


def _grain(unit: Unit) -> int:
    """Return in how many indices a layer is cut at once."""
    least = min(unit.op.unit(unit.dim), unit.size)
    return ceil(unit.size / MOST_UNITS / least) * least


def _ends(unit: Unit) -> list[int]:
    """Return where a layer may be cut."""
    return [*range(0, unit.size, _grain(unit)), unit.size]


def _done(unit: Unit, site: _Site, held: Mapping[str, _Held], free: Array) -> Array:
    """Return when each device has done each range [device, start, stop], inf for one that ends before it starts.

    It begins when it is free and what it requires has arrived: latency after the last one who has some of that, and the
    bytes one behind the other over its link.
    """
    ends = np.array(_ends(unit))
    start, stop = ends[:, None], ends[None, :]
    devices, speeds = len(free), site.speeds if unit.op.rank == 3 else site.row_speeds
    done = np.full((devices, len(ends), len(ends)), np.inf)
    wanted = [(_required(reads, ends), reads.nbytes, held[reads.name]) for reads in unit.reads]
    for i in np.flatnonzero(site.speeds > 0):
        begin, nbytes = np.full((len(ends), len(ends)), free[i]), np.zeros((len(ends), len(ends)))
        for (low, high), size, source in wanted:
            for j, (a, z) in enumerate(source.ranges):
                there = np.maximum(np.minimum(high, z) - np.maximum(low, a), 0)
                if i != j:
                    nbytes += there * float(size)
                    came = np.where(there > 0, source.ready_s[j] + site.late[i] + site.late[j], 0.0)
                    begin = np.maximum(begin, came)
        # Nothing of its own, or all: what costs nothing then costs nothing.
        took = nbytes / site.rates[i] + unit.flops * (stop - start) / speeds[i]
        done[i] = np.where(stop > start, begin + took, np.where(stop == start, 0.0, np.inf))
    for i in np.flatnonzero(site.speeds <= 0):
        done[i][np.arange(len(ends)), np.arange(len(ends))] = 0.0
    return done


def _required(reads: Reads, ends: Array) -> tuple[Array, Array]:
    """Return the (first, behind the last) indices that each range [start, stop] of a layer requires of another."""
    low, high = np.array([*reads.low, 0]), np.array([0, *reads.high])
    return low[ends][:, None], high[ends][None, :]


def _divided(unit: Unit, done: Array, free: Array) -> tuple[tuple[Range, ...], Array]:
    """Return each device's range, in their order, with the least time of the last one done, and when all are free."""
    ends, parts = _ends(unit), consecutive(done)
    after = [done[i, a, z] if a < z else free[i] for i, (a, z) in enumerate(parts)]
    return tuple((ends[a], ends[z]) for a, z in parts), np.array(after)
