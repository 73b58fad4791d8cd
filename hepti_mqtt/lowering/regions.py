"""Sets of indices and regions of tensors, as half-open ranges, and operations on them.

An `IndexSet` is sorted ranges that do not touch: indices of one dimension. A `Region` is a product of index sets, one
per dimension: rows {0, 5, 12}, or the query, key and value columns of three heads, are one region.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Final

from hepti_mqtt.core.plan import Range

IndexSet = tuple[Range, ...]
Region = tuple[IndexSet, ...]

# A search takes as long with 512 entries as with 4096: each plan has shares of its own, so more entries would belong to
# past plans, a few KB each.
CACHE_SIZE: Final = 512


def span(start: int, stop: int) -> IndexSet:
    """Return start..stop; empty unless start < stop."""
    return ((start, stop),) if stop > start else ()


def union(*sets: IndexSet) -> IndexSet:
    """Return the indices of any of the sets."""
    out: list[Range] = []
    for a, z in sorted(r for s in sets for r in s):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(z, out[-1][1]))
        else:
            out.append((a, z))
    return tuple(out)


def intersect_sets(s: IndexSet, t: IndexSet) -> IndexSet:
    """Return the indices of both sets."""
    if s == t:
        return s
    if len(s) == len(t) == 1:
        (a, b), (c, d) = s[0], t[0]
        low, high = a if a > c else c, b if b < d else d
        return ((low, high),) if low < high else ()
    out = []
    i = j = 0
    while i < len(s) and j < len(t):
        (a, b), (c, d) = s[i], t[j]
        low, high = a if a > c else c, b if b < d else d
        if low < high:
            out.append((low, high))
        if b < d:
            i += 1
        else:
            j += 1
    return tuple(out)


def subtract_set(s: IndexSet, t: IndexSet) -> IndexSet:
    """Return the indices of `s` that are not in `t`."""
    if len(s) == len(t) == 1:
        (a, b), (c, d) = s[0], t[0]
        if c <= a and b <= d:
            return ()
    for c, d in t:
        s = tuple((low, high) for a, b in s for low, high in ((a, min(b, c)), (max(a, d), b)) if low < high)
    return s


def shift(s: IndexSet, by: int) -> IndexSet:
    """Return every index moved by `by`."""
    return tuple((a + by, z + by) for a, z in s) if by else s


def round_to_units(s: IndexSet, unit: int) -> IndexSet:
    """Return the set extended to whole units of `unit` indices."""
    if all(a % unit == 0 and z % unit == 0 for a, z in s):
        return s
    return union(*(((a // unit * unit, -(-z // unit) * unit),) for a, z in s))


def index_count(s: IndexSet) -> int:
    """Return how many indices a set has."""
    return s[0][1] - s[0][0] if len(s) == 1 else sum(z - a for a, z in s)


def indices(s: IndexSet) -> Iterator[int]:
    """Yield the indices of a set in order."""
    for a, z in s:
        yield from range(a, z)


def index_set(values: Iterable[int]) -> IndexSet:
    """Return the set of the given indices, in any order."""
    return union(*(((v, v + 1),) for v in values))


def volume(r: Region) -> int:
    """Return how many elements a region has."""
    return prod(map(index_count, r))


def intersect(r: Region, q: Region) -> Region | None:
    """Return the overlap of two regions, None if it is empty."""
    if r == q:
        return r if all(r) else None
    out: list[IndexSet] = []
    for s, t in zip(r, q, strict=True):
        if s == t:
            common = s
        elif len(s) == len(t) == 1:  # inlined from `intersect_sets`: a call would be slower
            (a, b), (c, d) = s[0], t[0]
            low, high = a if a > c else c, b if b < d else d
            if low >= high:
                return None
            common = ((low, high),)
        else:
            common = intersect_sets(s, t)
        if not common:
            return None
        out.append(common)
    return tuple(out)


def is_within(r: Region, q: Region) -> bool:
    """Return whether every element of `r` is in `q`."""
    return r == q or all(s == t or not subtract_set(s, t) for s, t in zip(r, q, strict=True))


def subtract(r: Region, q: Region) -> list[Region]:
    """Return `r` without `q` as disjoint regions, at most one per dimension."""
    common = intersect(r, q)
    if common is None:
        return [r]
    rests = [subtract_set(s, t) for s, t in zip(r, q, strict=True)]
    return [(*common[:i], rest, *r[i + 1 :]) for i, rest in enumerate(rests) if rest]


def disjoint(regions: Iterable[Region]) -> tuple[Region, ...]:
    """Return a union of regions as few disjoint ones, sorted."""
    given = tuple(regions)
    if len(given) < 2:
        return given
    unique = tuple(dict.fromkeys(given))
    return _disjoint(unique) if len(unique) > 1 else unique


@lru_cache(maxsize=CACHE_SIZE)
def _disjoint(regions: tuple[Region, ...]) -> tuple[Region, ...]:
    """Cut overlaps, the largest region first, then join pairs that differ in one dimension."""
    out: list[Region] = []
    for region in sorted(regions, key=volume, reverse=True):
        left = [region]
        for q in out:
            left = [p for r in left for p in subtract(r, q)]
        out += left
    joined = True
    while joined:
        joined = _join(out)
    return tuple(sorted(out))


def _join(regions: list[Region]) -> bool:
    """Join the first pair that differs in one dimension; return whether there was one."""
    for i, r in enumerate(regions):
        for j in range(i + 1, len(regions)):
            q = regions[j]
            differ = [n for n, (s, t) in enumerate(zip(r, q, strict=True)) if s != t]
            if len(differ) == 1:
                n = differ[0]
                regions[i] = (*r[:n], union(r[n], q[n]), *r[n + 1 :])
                del regions[j]
                return True
    return False


@lru_cache(maxsize=CACHE_SIZE)
def positions_in(inner: IndexSet, outer: IndexSet) -> IndexSet:
    """Return the place of `inner` in an array that holds the indices of `outer` contiguously."""
    at, out = 0, []
    for a, z in outer:
        out += [(low - a + at, high - a + at) for low, high in intersect_sets(inner, ((a, z),))]
        at += z - a
    return union(tuple(out))


def rectangles(
    source: Sequence[IndexSet], target: Sequence[IndexSet]
) -> list[tuple[tuple[Range, ...], tuple[Range, ...]]]:
    """Return copies of plain rectangles, (source ranges, target ranges), from one region to another.

    Both regions have equally many indices in each dimension, taken in order.
    """
    if all(len(s) == len(t) == 1 for s, t in zip(source, target, strict=True)):
        return [(tuple([s[0] for s in source]), tuple([t[0] for t in target]))]
    return [
        (tuple([a for a, _ in pairs]), tuple([b for _, b in pairs]))
        for pairs in product(*(tuple(_pairs(s, t)) for s, t in zip(source, target, strict=True)))
    ]


def _pairs(s: IndexSet, t: IndexSet) -> Iterator[tuple[Range, Range]]:
    """Yield equally long ranges of `s` and `t` in pairs."""
    sources, targets = list(s), list(t)
    while sources:
        (a, b), (c, d) = sources[0], targets[0]
        n = min(b - a, d - c)
        yield (a, a + n), (c, c + n)
        sources[0], targets[0] = (a + n, b), (c + n, d)
        if a + n == b:
            del sources[0]
        if c + n == d:
            del targets[0]


def format_region(region: Region) -> str:
    """Return a region as people write it: [0:32, 5:7+9:12]."""
    return "[" + ", ".join("+".join(f"{a}:{z}" for a, z in s) or "none" for s in region) + "]"
