"""Attention by heads, over packed sequences or over a session's cache: r rows, c = heads x d columns, k keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from hepti_mqtt.lowering.ops.base import Call, Op, Operand, lazy
from hepti_mqtt.lowering.regions import Region, Set, both, count, indices, place, shift, span, union
from hepti_mqtt.program import WeightRef


@dataclass(frozen=True, eq=False, kw_only=True)
class Heads(Op):
    """What reads queries from one tensor, keys and values from another; columns: where q, k and v begin there."""

    d: int
    columns: tuple[int, int, int]

    def need(self, region: Region) -> tuple[Region, ...]:
        r, c, k = region
        q, key, value = self.columns
        return (r, shift(c, q)), (k, union(shift(c, key), shift(c, value)))

    def takes(self, number: int, need: Region, cells: Region) -> bool:
        if number == 0:
            return len(place(need[1], cells[1])) == 1
        c = shift(both(need[1], span(self.columns[1], self.columns[1] + self.space[1])), -self.columns[1])
        return all(len(place(shift(c, first), cells[1])) == 1 for first in self.columns[1:])

    def heads(self, c: Set, operands: Sequence[Operand]) -> dict[str, Any]:
        """Return the attributes of the kernel that say which heads, and where they lie in what it reads."""
        q, key, value = (
            place(shift(c, first), operand.cells[1])[0][0]
            for first, operand in zip(self.columns, (operands[0], operands[1], operands[1]), strict=True)
        )
        where = {"q_column": q, "k_column": key, "v_column": value}
        return {**where, "heads": count(c) // self.d, "head_dim": self.d, "scale": self.d**-0.5}


@dataclass(frozen=True, eq=False, kw_only=True)
class Attention(Heads):
    """Attention over (r, c = heads x d, k = keys) of packed sequences, which do not see each other.

    inputs: the tensor of the queries, and that of keys and values; columns: where q, k and v begin there. lengths: of
    the sequences. causal: a row sees the keys up to its own. A part over some of a row's keys is a state
    [r, heads, d + 2]: the sum, not normalised, the running maximum and the sum of weights.
    """

    lengths: tuple[int, ...]
    causal: bool = False

    kind = "attention"

    def grain(self) -> tuple[int, ...]:
        return 1, self.d, 1

    @lazy
    def _sequences(self) -> tuple[Set, ...]:
        return tuple(span(*pair) for pair in pairwise((0, *accumulate(self.lengths))))

    def pairs(self, r: Set) -> int:
        """Return with how many keys all rows of sequences without order are paired."""
        return sum(count(both(s, r)) * count(s) for s in self._sequences)

    def keys(self, r: Set) -> Set:
        """Return the keys that any of the rows sees."""
        if not r:
            return ()
        alone = len(self.lengths) == 1
        seen = self.full[2] if alone else union(*(s for s in self._sequences if both(s, r)))
        return both(seen, span(0, r[-1][1])) if self.causal else seen

    def trim(self, region: Region) -> Region | None:
        """Keep all rows and of the keys those that some row sees: a row without any is nothing to the kernel."""
        r, c, k = region
        if not (r and c and k):
            return None
        keys = both(k, self.keys(r))
        return (r, c, keys) if keys else None

    def is_state(self, region: Region) -> bool:
        return region[2] != self.keys(region[0])

    def cells(self, region: Region, state: bool) -> Region:
        r, c, _ = region
        return (r, tuple((a // self.d, z // self.d) for a, z in c)) if state else (r, c)

    def shape(self, region: Region, state: bool) -> tuple[int, ...]:
        r, c = count(region[0]), count(region[1])
        return (r, c // self.d, self.d + 2) if state else (r, c)

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        r, c, k = region
        rows = {"q_rows": tuple(indices(r)), "k_rows": k, "lengths": self.lengths}
        attrs = self.heads(c, operands) | rows | ({"causal": True} if self.causal else {})
        return Call("attention_block" if self.is_state(region) else "attention", (), attrs)

    def combine(self, region: Region) -> Call:
        return Call("attention_combine", (), {"heads": count(region[1]) // self.d, "head_dim": self.d})


@dataclass(frozen=True, eq=False, kw_only=True)
class ReorderedAttention(Attention):
    """Attention over (r, c = heads x d, k = rows of x) that reads x itself in place of keys and values made of it.

    inputs: queries, and x of `width` columns. tensors: the matrices of keys and of values, then their biases.
    """

    width: int
    bias: bool = True

    kind = "attention over x"

    def grain(self) -> tuple[int, ...]:
        return 1, self.d, self.space[2]

    def split(self, region: Region) -> tuple[Region, ...]:
        r, c, k = region
        return tuple((r, (columns,), k) for columns in c)

    def need(self, region: Region) -> tuple[Region, ...]:
        r, c, k = region
        return (r, c), (k, span(0, self.width))

    def takes(self, number: int, need: Region, cells: Region) -> bool:
        return number == 0 and super().takes(number, need, cells)

    def refs(self, region: Region) -> tuple[WeightRef, ...]:
        (columns,) = region[1]
        matrices = tuple(WeightRef(tensor, (0, self.width), columns) for tensor in self.tensors[:2])
        return matrices + tuple(WeightRef(tensor, (0, 1), columns, "plain") for tensor in self.tensors[2:])

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        attrs = {**super().call(region, (*operands[:1], operands[0])).attrs, "bias": self.bias}
        del attrs["k_column"], attrs["v_column"]
        return Call("attention_reordered", self.refs(region), attrs)


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionAt(Heads):
    """Attention over (m, c = heads x d, C): row i over the keys 0..at + i, its own included.

    inputs: the tensor of the queries, the cache of keys and values with this run's rows in it, and `at`. columns: where
    q, k and v begin in theirs. Rows and keys are not divided: where they stand is known only as it runs.
    """

    kind = "attention at"

    def grain(self) -> tuple[int, ...]:
        return self.space[0], self.d, self.space[2]

    def need(self, region: Region) -> tuple[Region, ...]:
        return *super().need(region), (span(0, 1),)

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("attention_at", (), self.heads(region[1], operands))
