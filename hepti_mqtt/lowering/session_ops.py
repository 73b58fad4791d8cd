"""Tensor ops of a decoder: a session keeps keys and values of earlier tokens on the devices, and runs add to them.

One graph serves every position: how many rows the cache has before the m new ones is a number that comes with the
request (`at`, i32 [1]). Letters: m new rows, C rows that the cache has room for, w its columns, d columns of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hepti_mqtt.lowering.ops import Call, Op, Operand
from hepti_mqtt.lowering.regions import Region, both, count, place, shift, span, union


@dataclass(frozen=True, eq=False, kw_only=True)
class Slice(Op):
    """Elements start.. of a vector."""

    start: int
    rank: int = 1

    kind = "slice"
    is_view = True

    def need(self, region: Region) -> tuple[Region, ...]:
        return ((shift(region[0], self.start),),)


@dataclass(frozen=True, eq=False, kw_only=True)
class State(Op):
    """What the session has kept over (C, w); `tensors` is its name. It is there before the run, so nothing fills it."""

    kind = "state"
    session = True

    def grain(self) -> tuple[int, ...]:
        return self.space[0], 1  # whole columns: which rows are new is known only as it runs


@dataclass(frozen=True, eq=False, kw_only=True)
class Append(Op):
    """The state with the new rows in their place over (C, w), in the state's own memory.

    inputs: the state, the new rows [m, *] (from column `start`), and `at`.
    """

    start: int
    rows: int

    kind = "append"
    session = True

    def grain(self) -> tuple[int, ...]:
        return self.space[0], 1

    def need(self, region: Region) -> tuple[Region, ...]:
        return region, (span(0, self.rows), shift(region[1], self.start)), (span(0, 1),)

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("append_rows")


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionAt(Op):
    """Attention over (m, c = heads x d, C): row i over the keys 0..at + i, its own included.

    inputs: the tensor of the queries, the cache of keys and values with this run's rows in it, and `at`. columns: where
    q, k and v begin in theirs. Rows and keys are not divided: where they stand is known only as it runs.
    """

    d: int
    columns: tuple[int, int, int]

    kind = "attention at"

    def grain(self) -> tuple[int, ...]:
        return self.space[0], self.d, self.space[2]

    def need(self, region: Region) -> tuple[Region, ...]:
        r, c, k = region
        q, key, value = self.columns
        return (r, shift(c, q)), (k, union(shift(c, key), shift(c, value))), (span(0, 1),)

    def takes(self, number: int, need: Region, cells: Region) -> bool:
        if number == 0:
            return len(place(need[1], cells[1])) == 1
        c = shift(both(need[1], span(self.columns[1], self.columns[1] + self.space[1])), -self.columns[1])
        return all(len(place(shift(c, first), cells[1])) == 1 for first in self.columns[1:])

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        c = region[1]
        q, key, value = (
            place(shift(c, first), operand.cells[1])
            for first, operand in zip(self.columns, (operands[0], operands[1], operands[1]), strict=True)
        )
        attrs = {
            "q_column": q[0][0],
            "k_column": key[0][0],
            "v_column": value[0][0],
            "heads": count(c) // self.d,
            "head_dim": self.d,
            "scale": self.d**-0.5,
        }
        return Call("attention_at", (), attrs)
