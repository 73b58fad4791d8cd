"""Matrix products, what stands between them, and kernels that take their inputs whole: r rows, c columns, k reduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final

from hepti_mqtt.lowering.ops.base import Call, Op, Operand
from hepti_mqtt.lowering.regions import Region, Set, both, count, span
from hepti_mqtt.program import WeightRef

PANEL: Final = 32  # columns of a matrix that kernels keep side by side
NARROW: Final = 256  # a matrix with fewer columns may be cut anywhere


@dataclass(frozen=True, eq=False, kw_only=True)
class Linear(Op):
    """x [r, k] @ [W_1 | W_2 ...] [k, c] + b over (r, c, k), then activation and residual where they are fused.

    widths: columns of each matrix; `tensors` are the matrices and then their biases. The part that holds k = 0 adds
    the bias, so that partial sums add it once.
    """

    widths: tuple[int, ...]
    bias: bool = True
    activation: str | None = None
    residual: bool = False

    kind = "linear"

    def unit(self, dim: int) -> int:
        return PANEL if dim > 0 and self.space[dim] >= NARROW else 1

    def need(self, region: Region) -> tuple[Region, ...]:
        r, c, k = region
        return ((r, k), (r, c)) if self.residual else ((r, k),)

    def refs(self, region: Region) -> tuple[WeightRef, ...]:
        _, c, k = region
        if len(k) != 1:
            raise ValueError(f"{self.name}: rows {k} of a matrix are several ranges; give each device one")
        n = len(self.widths)
        ends = (0, *accumulate(self.widths))
        cut = [[(a - first, z - first) for a, z in both(c, ((first, stop),))] for first, stop in pairwise(ends)]
        refs = [WeightRef(t, k[0], columns) for t, ranges in zip(self.tensors, cut, strict=False) for columns in ranges]
        if self._has_bias(region):
            biases = zip(self.tensors[n:], cut, strict=True)
            refs += [WeightRef(t, (0, 1), columns, "plain") for t, ranges in biases for columns in ranges]
        return tuple(refs)

    def _has_bias(self, region: Region) -> bool:
        return self.bias and region[2][0][0] == 0

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        refs = self.refs(region)
        attrs = {"bias": self._has_bias(region), "activation": self.activation, "residual": self.residual}
        return Call("linear", refs, attrs)


@dataclass(frozen=True, eq=False, kw_only=True)
class Activation(Op):
    """An elementwise function of one input, which may come as several summands."""

    function: str

    kind = "activation"
    summands = 0

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("sum", (), {"activation": self.function})


@dataclass(frozen=True, eq=False, kw_only=True)
class Add(Op):
    """x + y, where y may come as several summands."""

    kind = "add"
    summands = 1

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("add", (), {"bias": False}) if self.rank == 2 else Call("sum", (), {"activation": None})


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerNorm(Op):
    """Layer norm over (r, c); `tensors` are gamma and beta."""

    eps: float

    kind = "norm"

    def extent(self, region: Region) -> Region:
        return region[0], self.full[1]

    def refs(self, region: Region) -> tuple[WeightRef, ...]:
        return _vectors(self.tensors, region[1])

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("layer_norm", self.refs(region), {"eps": self.eps})


@dataclass(frozen=True, eq=False, kw_only=True)
class Moments(Op):
    """Mean and sum of squared distances from it over (r, 2, k): partial where columns lie on several devices."""

    kind = "moments"
    exact = True

    def grain(self) -> tuple[int, ...]:
        return 1, 2, 1

    def need(self, region: Region) -> tuple[Region, ...]:
        return ((region[0], region[2]),)

    def is_state(self, region: Region) -> bool:
        return region[2] != self.full[2]

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("moments")


@dataclass(frozen=True, eq=False, kw_only=True)
class Normalise(Op):
    """(x - mean) / deviation * gamma + beta over (r, c), from x and its moments; `tensors` are gamma and beta."""

    eps: float

    kind = "normalise"
    summands = 1

    def split(self, region: Region) -> tuple[Region, ...]:
        return tuple((region[0], (columns,)) for columns in region[1])

    def need(self, region: Region) -> tuple[Region, ...]:
        return region, (region[0], span(0, 2))

    def refs(self, region: Region) -> tuple[WeightRef, ...]:
        return _vectors(self.tensors, region[1])

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        counts = tuple(count(part.region[2]) for part in operands[1:])
        return Call("normalise", self.refs(region), {"eps": self.eps, "counts": counts})


@dataclass(frozen=True, eq=False, kw_only=True)
class Whole(Op):
    """A kernel that computes all of its result from all of its inputs: embeddings, pooling over sequences.

    attrs: the kernel's, as pairs. weights: its own, in its order.
    """

    kernel: str
    attrs: tuple[tuple[str, Any], ...] = ()
    weights: tuple[WeightRef, ...] = field(compare=False, default=())
    sources: tuple[tuple[int, ...], ...] = ()  # shapes of the inputs

    kind = "whole"

    def extent(self, region: Region) -> Region:
        return self.full

    def need(self, region: Region) -> tuple[Region, ...]:
        return tuple(tuple(span(0, n) for n in shape) for shape in self.sources)

    def refs(self, region: Region) -> tuple[WeightRef, ...]:
        return self.weights

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call(self.kernel, self.weights, dict(self.attrs))


def _vectors(tensors: Sequence[str], c: Set) -> tuple[WeightRef, ...]:
    if len(c) != 1:
        raise ValueError(f"{tensors}: columns {c} are several ranges; give each device one")
    return tuple(WeightRef(name, (0, 1), c[0], "plain") for name in tensors)
