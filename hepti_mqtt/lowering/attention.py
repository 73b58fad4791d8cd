"""Attention as tensor ops, over packed sequences or a session's cache, and rotary positions.

Letters: r rows, c = heads x d columns, k keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import lcm
from typing import Any

from hepti_mqtt.core.plan import Range
from hepti_mqtt.core.program import WeightRef
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


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadedAttention(Op):
    """An op that reads queries from one tensor, and keys and values from another one."""

    d: int
    columns: tuple[int, int, int]  #: first columns of q, k and v in their tensors
    #: Query heads per head of keys and values (Ainslie et al., 2023); each device with one of them needs the latter.
    group: int = 1
    scale: float = 0.0  #: of the scores, 0 for 1 / sqrt(d)
    unit: int = 1  #: values of a block of the matrix that multiplies the result

    def granularity(self) -> tuple[int, ...]:
        return 1, self.d, 1

    def share_unit(self, dim: int) -> int:
        return lcm(self.d, self.unit) if dim == 1 else super().share_unit(dim)

    def range_cost(self, dim: int, start: int, stop: int) -> int:
        """Return the columns of the matrices around it; keys and values count twice, as their cache is read too."""
        if dim != 1 or start == stop:
            return super().range_cost(dim, start, stop)
        return 2 * (stop - start) + 4 * index_count(self.columns_of("k", span(start, stop)))

    def columns_of(self, which: str, c: IndexSet) -> IndexSet:
        """Return the columns of queries `q`, keys `k` or values `v` of heads (columns of the result)."""
        first = self.columns["qkv".index(which)]
        if which == "q":
            return shift(c, first)
        whole = round_to_units(c, self.d * self.group)
        return tuple((a // self.group + first, z // self.group + first) for a, z in whole)

    def kernel_regions(self, region: Region) -> tuple[Region, ...]:
        """Return parts with equally many query heads per head of keys and values."""
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
        """Return the kernel's attributes of heads, and their columns in the operands."""
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
    """Attention over (r, c = heads x d, k = keys) of packed sequences, which do not attend to each other.

    inputs: the tensor of the queries, and that of keys and values. A part over some of a row's keys is a state
    [r, heads, d + 2]: the sum without normalisation, the running maximum and the sum of weights.
    """

    lengths: tuple[int, ...]  #: of the sequences
    causal: bool = False  #: a row attends to the keys up to its own
    window: int = -1  #: largest distance of a row's keys, -1 for any
    farthest: int = 0  #: with a bias by distance: larger distances count as this one
    side: int = 0  #: with a bias by steps on a grid: side of the grid of patches after a class token
    buckets: int = 0  #: rows of the bias table [buckets, heads] in `tensors`
    #: `tensors` are keys and queries of distances instead, [buckets, heads x d] each (DeBERTa, He et al., 2021).
    disentangled: bool = False

    @cached
    def _sequences(self) -> tuple[IndexSet, ...]:
        return tuple(span(*pair) for pair in pairwise((0, *accumulate(self.lengths))))

    def pairs(self, r: IndexSet) -> int:
        """Return the number of (row, key) pairs in sequences without causal order."""
        return sum(index_count(intersect_sets(s, r)) * index_count(s) for s in self._sequences)

    def keys(self, r: IndexSet) -> IndexSet:
        """Return the keys that any of the rows attends to."""
        if not r:
            return ()
        if self.window >= 0:
            return union(*(self._near(s, rows) for s in self._sequences for rows in intersect_sets(s, r)))
        alone = len(self.lengths) == 1
        keys = self.full_region[2] if alone else union(*(s for s in self._sequences if intersect_sets(s, r)))
        return intersect_sets(keys, span(0, r[-1][1])) if self.causal else keys

    def _near(self, sequence: IndexSet, rows: Range) -> IndexSet:
        """Return the keys of a sequence that any of a range of its rows attends to."""
        first, stop = rows
        return intersect_sets(sequence, span(first - self.window, stop + (0 if self.causal else self.window)))

    def trim(self, region: Region) -> Region | None:
        """Return all rows, with the keys that any row attends to; a row may be left without keys."""
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
        elif self.buckets:  # `tensors` of attention over x itself are matrices
            heads = tuple(a // self.d for first, stop in c for a in range(first, stop, self.d))
            attrs |= {"bias_heads": heads} | ({"bias_side": self.side} if self.side else {"farthest": self.farthest})
        kernel = "attention_block" if self.is_state(region) else "attention"
        return Call(kernel, self.weight_refs(region), attrs)

    def combine_call(self, region: Region) -> Call:
        return Call("attention_combine", (), {"heads": index_count(region[1]) // self.d, "head_dim": self.d})


@dataclass(frozen=True, eq=False, kw_only=True)
class ReorderedAttention(Attention):
    """Attention over (r, c = heads x d, k = rows of x) that reads x itself in place of its keys and values.

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
    """Attention over (m, c = heads x d, C): row i of an item attends to keys 0..at + i, or the last of them.

    inputs: the tensor of the queries, each item's cache of keys and values with this run's rows, and `at`. All rows and
    keys are one part, since their places are not in the graph.
    """

    lengths: tuple[int, ...]  #: of the items
    window: int = -1  #: number of keys before its own that a row attends to, -1 for all
    together: bool = False  #: rows of an item attend to its later new rows too
    #: `tensors` has a logit per head, which counts like that of a key with value zero (Xiao et al., 2023).
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
            raise ValueError(f"{self.name}: the caches of its items are divided differently")
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
    """Queries, keys and values over (m, c = heads x d), with rotary positions in queries and keys."""

    d: int
    q_columns: int  #: columns of queries
    k_columns: int  #: columns of keys, after those of queries
    theta: float
    lengths: tuple[int, ...]  #: of the packed sequences
    #: Of each head of queries and keys beforehand; `tensors` are its gamma for queries and for keys.
    norm: Norm | None = None
    places: int = 0  #: positions of a session; the second input is then `at`, the position of each item's first row
    divisors: tuple[float, ...] = ()  #: of the frequencies [d / 2], empty if all are 1

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
