"""Which devices of a site are tried together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Final

from hepti_mqtt.planner.price import Question

EXHAUSTIVE: Final = 4  # up to so many devices every subset is tried


def subsets(question: Question, by_speed: Sequence[str], pinned: bool) -> Iterator[tuple[str, ...]]:
    """Yield the subsets of devices, fastest first, that are tried; of those that differ in names alone the first one.

    pinned: all devices, and no other subset.
    """
    if pinned:
        yield tuple(by_speed)
        return
    alike = kinds(question, by_speed)
    seen = set()
    for subset in _tried(by_speed):
        kind = tuple(alike[device] for device in subset)
        if kind not in seen:
            seen.add(kind)
            yield subset


def _tried(by_speed: Sequence[str]) -> Iterator[tuple[str, ...]]:
    n = len(by_speed)
    if n <= EXHAUSTIVE:
        for size in range(1, n + 1):
            yield from combinations(by_speed, size)
        return
    yield from ((name,) for name in by_speed)
    for size in range(2, n + 1):
        yield tuple(by_speed[:size])
    for left_out in by_speed[:-1]:
        yield tuple(d for d in by_speed if d != left_out)


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
