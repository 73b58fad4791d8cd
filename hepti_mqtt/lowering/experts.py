"""Ops of a mixture of experts: each row goes through the few experts that its router's logits choose.

Every expert is divided by columns of its width, like a dense MLP, so that devices have equal work whatever is chosen.
Letters: r rows, c columns, k reduced indices, e experts, t chosen experts per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.lowering.ops import Call, MatrixOp, Operand
from hepti_mqtt.lowering.regions import IndexSet, Region, span


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertsOp(MatrixOp):
    """Common parts of both ops; `tensors` are matrices of all experts, grouped by kind."""

    experts: int
    chosen: int  #: experts that each row chooses
    biases: int = 0  #: number of bias tables [experts, columns], the last of `tensors`

    def _logits(self, rows: IndexSet) -> Region:
        return rows, span(0, self.experts)

    def _matrices(self, rows: IndexSet, columns: IndexSet) -> tuple[WeightRef, ...]:
        if len(columns) != 1:
            raise ValueError(f"{self.name}: columns {columns} are several ranges; give each device one")
        count = len(self.tensors) - self.biases
        refs = self.matrix_refs(rows, ((tensor, columns) for tensor in self.tensors[:count]))
        tables = self.tensors[count:] if self.has_bias(rows) else ()
        return refs + tuple(WeightRef(tensor, (0, self.experts), columns[0], "plain") for tensor in tables)

    def has_bias(self, rows: IndexSet) -> bool:
        """Return whether the part with these rows of the matrices adds the biases; only the first part does."""
        return self.biases > 0 and rows[0][0] == 0


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertsUp(ExpertsOp):
    """function(x @ gate_e) * (x @ up_e + offset) over (r t, c, k): a row for each expert that a row of x chooses.

    inputs: x, and the router's logits.
    """

    function: str
    limit: float = 0.0  #: bound of gates, and of the size of up columns before the offset; 0 for none
    offset: float = 0.0

    def granularity(self) -> tuple[int, ...]:
        return self.chosen, 1, self.space[2]

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        rows = tuple((a // self.chosen, z // self.chosen) for a, z in region[0])
        return (rows, region[2]), self._logits(rows)

    def weight_refs(self, region: Region) -> tuple[WeightRef, ...]:
        return self._matrices(region[2], region[1])

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        attrs = {"experts": self.experts, "chosen": self.chosen, "activation": self.function}
        attrs |= {"limit": self.limit} if self.limit else {}
        attrs |= {"offset": self.offset} if self.offset else {}
        attrs |= {"bias": True} if self.has_bias(region[2]) else {}
        return Call("experts_up", self.weight_refs(region), attrs)


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertsDown(ExpertsOp):
    """The weighted sum of hidden_e @ down_e over (r, c, k): partial if a device has some of the columns.

    inputs: rows of `ExpertsUp`, and the router's logits.
    """

    normed: bool  #: the weights of the chosen experts add up to 1

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        rows = tuple((a * self.chosen, z * self.chosen) for a, z in region[0])
        return (rows, region[2]), self._logits(region[0])

    def weight_refs(self, region: Region) -> tuple[WeightRef, ...]:
        return self._matrices(region[2], region[1])

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        attrs = {"experts": self.experts, "chosen": self.chosen, "normed": self.normed}
        attrs |= {"bias": True} if self.has_bias(region[2]) else {}
        return Call("experts_down", self.weight_refs(region), attrs)
