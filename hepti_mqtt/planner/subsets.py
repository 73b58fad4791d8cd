"""Which devices of a site are tried together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from math import log2
from typing import Final

from hepti_mqtt.planner.price import Question

EXHAUSTIVE: Final = 4  # up to so many devices every subset is tried
# Up to so many devices every number of them is tried, and all but each one. The price of a set grows with the square of
# its size, and that of all sets but one with the cube.
THOROUGH: Final = 8
FRAME_BYTES: Final = 1 << 15  # by which links are compared: about what a device sends to another one in a layer
LEAST_S: Final = 1e-5  # links on which that takes less are alike


def subsets(question: Question, by_speed: Sequence[str], pinned: bool) -> Iterator[tuple[str, ...]]:
    """Yield the subsets of devices, fastest first, that are tried; of those that differ in names alone the first one.

    pinned: all devices, and no other subset.
    """
    if pinned:
        yield tuple(by_speed)
        return
    alike = kinds(question, by_speed)
    seen = set()
    for subset in _tried(by_speed, _by_link(question, by_speed)):
        kind = tuple(alike[device] for device in subset)
        if kind not in seen:
            seen.add(kind)
            yield subset


def _tried(by_speed: Sequence[str], by_link: Sequence[str]) -> Iterator[tuple[str, ...]]:
    n = len(by_speed)
    if n <= EXHAUSTIVE:
        for size in range(1, n + 1):
            yield from combinations(by_speed, size)
        return
    yield from ((name,) for name in by_speed)
    for order in (by_speed, by_link):
        for size in _sizes(n):
            first = frozenset(order[:size])
            yield tuple(d for d in by_speed if d in first)
    for left_out in by_speed[:-1] if n <= THOROUGH else ():
        yield tuple(d for d in by_speed if d != left_out)


def _sizes(n: int) -> Iterator[int]:
    """Yield how many of n devices are tried together: every number of few, then twelve, sixteen and so on, and all."""
    yield from range(2, min(n, THOROUGH) + 1)
    size = THOROUGH
    while size < n:
        yield from (more for more in (size * 3 // 2, size * 2) if more < n)
        size *= 2
    if n > THOROUGH:
        yield n


def _by_link(question: Question, by_speed: Sequence[str]) -> list[str]:
    """Return devices with the best links first; of links that are about as good, the fastest device."""

    def frame_s(device: str) -> float:
        link = question.cluster.links[device]
        return link.latency_s + FRAME_BYTES / min(link.up_bytes_per_s, link.down_bytes_per_s)

    return sorted(by_speed, key=lambda device: round(log2(max(frame_s(device), LEAST_S))))


def in_line(by_speed: Sequence[str]) -> tuple[str, ...]:
    """Return devices with the fastest in the middle and the slowest at the ends, where they have one neighbour."""
    return (*by_speed[1::2][::-1], *by_speed[::2])


def kinds(question: Question, names: Sequence[str]) -> dict[str, str]:
    """Return for each device the first one that can stand in its place."""
    found: dict[str, str] = {}
    for name in names:
        found[name] = next((kind for kind in dict.fromkeys(found.values()) if _alike(question, kind, name)), name)
    return found


def _alike(question: Question, a: str, b: str) -> bool:
    """Return whether nothing but names changes where two devices change places."""
    cluster, other = question.cluster, {a: b, b: a}
    if cluster.links[a] != cluster.links[b] or replace(cluster.devices[a], name=b) != cluster.devices[b]:
        return False
    if any((a in some) != (b in some) for some in (cluster.endpoints, cluster.shared)):
        return False
    swapped = {(other.get(s, s), other.get(t, t)): link for (s, t), link in cluster.peer_links.items()}
    relayed = {(other.get(s, s), other.get(t, t)) for s, t in question.relayed}
    return swapped == dict(cluster.peer_links) and relayed == question.relayed
