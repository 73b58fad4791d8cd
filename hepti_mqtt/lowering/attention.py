"""Attention by heads as tensor ops: over packed sequences or a session's cache, and positions put in by rotation.

Letters: r rows, c = heads x d columns, k keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import lcm
from typing import Any

from hepti_mqtt.lowering.ops import Call, Norm, Op, Operand, cached
from hepti_mqtt.lowering.regions import (
    IndexSet,
    Region,
    index_count,
    indices,
    intersect_sets,
    positions_in,
    round_to_units,
    shift,
    span,
    union,
)
from hepti_mqtt.plan import Range
from hepti_mqtt.program import WeightRef


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadedAttention(Op):
    """What reads queries from one tensor, keys and values from another; columns: where q, k and v begin there.

    group: how many heads of queries share one of keys and values (Ainslie et al., 2023). Devices that have some of them
    each need that one. scale: of the scores, 0 for 1 / sqrt(d). unit: values of a block of the matrix by which the
    result is multiplied.
    """

    d: int
    columns: tuple[int, int, int]
    group: int = 1
    scale: float = 0.0
    unit: int = 1

    def granularity(self) -> tuple[int, ...]:
        return 1, self.d, 1

    def share_unit(self, dim: int) -> int:
        return lcm(self.d, self.unit) if dim == 1 else super().share_unit(dim)

    def range_cost(self, dim: int, start: int, stop: int) -> int:
        """Return the columns of the matrices around it; those of keys and values twice, as what is cached is read."""
        if dim != 1 or start == stop:
            return super().range_cost(dim, start, stop)
        return 2 * (stop - start) + 4 * index_count(self.columns_of("k", span(start, stop)))

    def columns_of(self, which: str, c: IndexSet) -> IndexSet:
        """Return the columns of queries `q`, keys `k` or values `v` of some heads, which are columns of the result."""
        first = self.columns["qkv".index(which)]
        if which == "q":
            return shift(c, first)
        whole = round_to_units(c, self.d * self.group)
        return tuple((a // self.group + first, z // self.group + first) for a, z in whole)

    def kernel_regions(self, region: Region) -> tuple[Region, ...]:
        """Return parts in each of which as many heads of queries share every one of keys and values."""
        r, c, k = region
        by = self.d * self.group
        cut = [intersect_sets(c, span(at, at + by)) for a, z in round_to_units(c, by) for at in range(a, z, by)]
        return tuple((r, union(*alike), k) for _, alike in groupby(cut, index_count))

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        r, c, k = region
        return (r, self.columns_of("q", c)), (k, union(self.columns_of("k", c), self.columns_of("v", c)))

    def accepts_columns(self, number: int, need: Region, cells: Region) -> bool:
        if number == 0:
            return len(positions_in(need[1], cells[1])) == 1
        key, value = self.columns[1:]
        keys = intersect_sets(need[1], span(key, key + self.space[1] // self.group))
        return all(len(positions_in(shift(keys, first - key), cells[1])) == 1 for first in (key, value))

    def heads(self, c: IndexSet, operands: Sequence[Operand]) -> dict[str, Any]:
        """Return the attributes of the kernel that say which heads, and where they lie in what it reads."""
        where = {
            f"{which}_column": positions_in(self.columns_of(which, c), operand.cells[1])[0][0]
            for which, operand in zip("qkv", (operands[0], operands[1], operands[1]), strict=True)
        }
        group = index_count(c) // index_count(self.columns_of("k", c))
        more = {"group": group} if group > 1 else {}
        scale = self.scale or self.d**-0.5
        return {**where, "heads": index_count(c) // self.d, "head_dim": self.d, "scale": scale, **more}


@dataclass(frozen=True, eq=False, kw_only=True)
class Attention(HeadedAttention):
    """Attention over (r, c = heads x d, k = keys) of packed sequences, which do not see each other.

    inputs: the tensor of the queries, and that of keys and values; columns: where q, k and v begin there. lengths: of
    the sequences. causal: a row sees the keys up to its own. window: and those at most so far away, -1 for all. A part
    over some of a row's keys is a state [r, heads, d + 2]: the sum, not normalised, the running maximum and the sum of
    weights. farthest: with a bias by distance, whose table [buckets, heads] `tensors` has, the largest that counts.
    side: of the grid of patches behind a class token by whose steps the bias goes instead. disentangled: `tensors` are
    keys and queries of distances instead, [buckets, heads x d] each (DeBERTa, He et al., 2021).
    """

    lengths: tuple[int, ...]
    causal: bool = False
    window: int = -1
    farthest: int = 0
    side: int = 0
    buckets: int = 0
    disentangled: bool = False

    kind = "attention"

    @cached
    def _sequences(self) -> tuple[IndexSet, ...]:
        return tuple(span(*pair) for pair in pairwise((0, *accumulate(self.lengths))))

    def pairs(self, r: IndexSet) -> int:
        """Return with how many keys all rows of sequences without order are paired."""
        return sum(index_count(intersect_sets(s, r)) * index_count(s) for s in self._sequences)

    def keys(self, r: IndexSet) -> IndexSet:
        """Return the keys that any of the rows sees."""
        if not r:
            return ()
        if self.window >= 0:
            return union(*(self._near(s, rows) for s in self._sequences for rows in intersect_sets(s, r)))
        alone = len(self.lengths) == 1
        seen = self.full_region[2] if alone else union(*(s for s in self._sequences if intersect_sets(s, r)))
        return intersect_sets(seen, span(0, r[-1][1])) if self.causal else seen

    def _near(self, sequence: IndexSet, rows: Range) -> IndexSet:
        """Return the keys of a sequence that some of a range of its rows see."""
        first, stop = rows
        return intersect_sets(sequence, span(first - self.window, stop + (0 if self.causal else self.window)))

    def trim(self, region: Region) -> Region | None:
        """Keep all rows and of the keys those that some row sees: a row without any is nothing to the kernel."""
        r, c, k = region
        if not (r and c and k):
            return None
        keys = intersect_sets(k, self.keys(r))
        return (r, c, keys) if keys else None

    def is_state(self, region: Region) -> bool:
        return region[2] != self.keys(region[0])

    def result_cells(self, region: Region, state: bool) -> Region:
        r, c, _ = region
        return (r, tuple((a // self.d, z // self.d) for a, z in c)) if state else (r, c)

    def shape(self, region: Region, state: bool) -> tuple[int, ...]:
        r, c = index_count(region[0]), index_count(region[1])
        return (r, c // self.d, self.d + 2) if state else (r, c)

    def kernel_regions(self, region: Region) -> tuple[Region, ...]:
        r, c, k = region
        return tuple((r, (columns,), k) for columns in c) if self.disentangled else super().kernel_regions(region)

    def weight_refs(self, region: Region) -> tuple[WeightRef, ...]:
        if self.disentangled:
            (columns,) = region[1]
            return tuple(WeightRef(name, (0, self.buckets), columns, "plain") for name in self.tensors)
        # The whole table: it is small, and a device's heads may be several ranges of its columns.
        whole = (0, self.buckets), (0, self.space[1] // self.d)
        return tuple(WeightRef(name, *whole, "plain") for name in self.tensors)

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        r, c, k = region
        attrs = self.heads(c, operands) | {"q_rows": tuple(indices(r)), "k_rows": k, "lengths": self.lengths}
        attrs |= {"causal": True} if self.causal else {}
        attrs |= {"window": self.window} if self.window >= 0 else {}
        if self.disentangled:
            attrs |= {"disentangled": True, "farthest": self.farthest}
        elif self.buckets:  # what reads x itself has other tensors
            heads = tuple(a // self.d for first, stop in c for a in range(first, stop, self.d))
            attrs |= {"bias_heads": heads} | ({"bias_side": self.side} if self.side else {"farthest": self.farthest})
        kernel = "attention_block" if self.is_state(region) else "attention"
        return Call(kernel, self.weight_refs(region), attrs)

    def combine_call(self, region: Region) -> Call:
        return Call("attention_combine", (), {"heads": index_count(region[1]) // self.d, "head_dim": self.d})


@dataclass(frozen=True, eq=False, kw_only=True)
class ReorderedAttention(Attention):
    """Attention over (r, c = heads x d, k = rows of x) that reads x itself in place of keys and values made of it.

    inputs: queries, and x of `width` columns. tensors: the matrices of keys and of values, then their biases.
    """

    width: int
    bias: bool = True

    kind = "attention over x"

    def granularity(self) -> tuple[int, ...]:
        return 1, self.d, self.space[2]

    def kernel_regions(self, region: Region) -> tuple[Region, ...]:
        r, c, k = region
        return tuple((r, (columns,), k) for columns in c)

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        r, c, k = region
        return (r, c), (k, span(0, self.width))

    def accepts_columns(self, number: int, need: Region, cells: Region) -> bool:
        return number == 0 and super().accepts_columns(number, need, cells)

    def weight_refs(self, region: Region) -> tuple[WeightRef, ...]:
        (columns,) = region[1]
        matrices = tuple(WeightRef(tensor, (0, self.width), columns) for tensor in self.tensors[:2])
        return matrices + tuple(WeightRef(tensor, (0, 1), columns, "plain") for tensor in self.tensors[2:])

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        attrs = {**super().kernel_call(region, (*operands[:1], operands[0])).attrs, "bias": self.bias}
        del attrs["k_column"], attrs["v_column"]
        return Call("attention_reordered", self.weight_refs(region), attrs)


@dataclass(frozen=True, eq=False, kw_only=True)
class CachedAttention(HeadedAttention):
    """Attention over (m, c = heads x d, C): row i of an item over the keys 0..at + i of its cache, or the last of them.

    inputs: the tensor of the queries, the cache of keys and values of each item with this run's rows in it, and `at`.
    columns: where q, k and v begin in theirs. lengths: of the items. window: how many keys before its own a row sees,
    -1 for all. It is computed for all rows and keys: where they stand is known only as it runs.
    """

    lengths: tuple[int, ...]
    window: int = -1
    #: rows of an item see its later new rows, too
    together: bool = False
    #: `tensors` has a logit for each head, which counts like a key's with a value of zero (Xiao et al., 2023)
    sinks: bool = False

    kind = "attention at"

    def granularity(self) -> tuple[int, ...]:
        return 1, self.d, self.space[2]

    def computed_region(self, region: Region) -> Region:
        return span(0, self.space[0]), *region[1:]

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        q, kv = super().input_regions(region)
        return q, *[kv] * len(self.lengths), (span(0, len(self.lengths)),)

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        if len({operand.cells for operand in operands[1:-1]}) > 1:
            raise ValueError(f"{self.name}: the caches of its items are divided in different ways")
        items = {"lengths": self.lengths} if len(self.lengths) > 1 else {}
        near = {"window": self.window} if self.window >= 0 else {}
        whole = {"together": True} if self.together else {}
        attrs = self.heads(region[1], operands) | items | near | whole | ({"sinks": True} if self.sinks else {})
        return Call("attention_at", self.weight_refs(region), attrs)

    def weight_refs(self, region: Region) -> tuple[WeightRef, ...]:
        heads = [(a // self.d, z // self.d) for a, z in region[1]]
        return tuple(WeightRef(name, (0, 1), some, "plain") for name in self.tensors for some in heads)


@dataclass(frozen=True, eq=False, kw_only=True)
class Rotate(Op):
    """Queries, keys and values over (m, c = heads x d), with rotary positions in queries and keys.

    q_columns, k_columns: how many of the columns are of queries, and then of keys. lengths: of the packed sequences.
    norm: of each head of queries and keys before; `tensors` are its gamma for queries and for keys. places: in
    sessions, how many a sequence has; the second input is then `at`, the place of the first row of each. divisors: of
    the frequencies [d / 2], none where all are 1.
    """

    d: int
    q_columns: int
    k_columns: int
    theta: float
    lengths: tuple[int, ...]
    norm: Norm | None = None
    places: int = 0
    divisors: tuple[float, ...] = ()

    kind = "rotate"

    def granularity(self) -> tuple[int, ...]:
        return 1, self.d

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        return (region, (span(0, len(self.lengths)),)) if self.places else (region,)

    def weight_refs(self, region: Region) -> tuple[WeightRef, ...]:
        return tuple(WeightRef(name, (0, 1), (0, self.d), "plain") for name in self.tensors)

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        r, c = region
        keys = span(self.q_columns, self.q_columns + self.k_columns)
        attrs = (
            {
                "head_dim": self.d,
                "q_heads": self._heads(intersect_sets(c, span(0, self.q_columns))),
                "k_heads": self._heads(intersect_sets(c, keys)),
                "theta": self.theta,
                "rows": tuple(indices(r)),
                "lengths": self.lengths,
            }
            | ({"places": self.places} if self.places else {})
            | ({"divisors": self.divisors} if self.divisors else {})
        )
        return Call("rotate", self.weight_refs(region), attrs | (self.norm.attrs if self.norm else {}))

    def _heads(self, c: IndexSet) -> int:
        return index_count(c) // self.d
