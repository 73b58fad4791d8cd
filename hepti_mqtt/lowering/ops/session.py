"""Tensor ops of a decoder: a session keeps keys and values of earlier tokens on the devices, and runs add to them.

One graph serves every position: how many rows the cache has before the m new ones is a number that comes with the
request (`at`, i32 [1]). Letters: m new rows, C rows that the cache has room for, w its columns, d columns of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hepti_mqtt.lowering.ops.base import Call, Op, Operand
from hepti_mqtt.lowering.regions import Region, shift, span


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
