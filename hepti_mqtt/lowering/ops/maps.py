"""Ops on feature maps [y, x, channels] of one image: what of a map a part of the next one sees.

Rows come first and channels last, so that rows of a map are one piece of memory. Y, X, C: sizes of the input map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from hepti_mqtt.lowering.ops.base import Call, Op, Operand
from hepti_mqtt.lowering.regions import Region, Set, span, union
from hepti_mqtt.program import WeightRef


@dataclass(frozen=True, eq=False, kw_only=True)
class Window(Op):
    """A window of `size` moves over a map by `stride`, `pad` rows and columns beyond its borders; source: Y, X, C."""

    rank: int = 3
    size: int
    stride: int
    pad: int
    source: tuple[int, int, int]

    def split(self, region: Region) -> tuple[Region, ...]:
        return tuple(tuple((r,) for r in ranges) for ranges in product(*region))

    def reach(self, s: Set, limit: int) -> Set:
        """Return the rows, or columns, of the input that some rows see."""
        ends = ((a * self.stride - self.pad, (z - 1) * self.stride - self.pad + self.size) for a, z in s)
        return union(*(span(max(a, 0), min(z, limit)) for a, z in ends))

    def beyond(self, s: Set, limit: int) -> tuple[int, int]:
        """Return how many rows, or columns, a range sees before the first and behind the last of the input."""
        a, z = s[0][0] * self.stride - self.pad, (s[-1][1] - 1) * self.stride - self.pad + self.size
        return max(-a, 0), max(z - limit, 0)

    def window(self, region: Region) -> dict[str, object]:
        """Return the attributes of the window over a region."""
        (top, bottom), (left, right) = (self.beyond(s, n) for s, n in zip(region[:2], self.source[:2], strict=True))
        sides = {"kernel": (self.size, self.size), "stride": (self.stride, self.stride)}
        return {**sides, "pad": (top, left, bottom, right)}


@dataclass(frozen=True, eq=False, kw_only=True)
class Conv(Window):
    """Convolution [Y, X, C] -> [y, x, n], then activation, then residual where they are fused.

    tensors: the matrix [size * size * C, n], rows in the order (ky, kx, c), and its bias.
    """

    activation: str | None = None
    residual: bool = False

    kind = "conv"

    def need(self, region: Region) -> tuple[Region, ...]:
        y, x, _ = region
        seen = (self.reach(y, self.source[0]), self.reach(x, self.source[1]), span(0, self.source[2]))
        return (seen, region) if self.residual else (seen,)

    def refs(self, region: Region) -> tuple[WeightRef, ...]:
        rows, columns = self.size**2 * self.source[2], region[2][0]
        matrix, bias = self.tensors
        return WeightRef(matrix, (0, rows), columns), WeightRef(bias, (0, 1), columns, "plain")

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        attrs = {"activation": self.activation, "bias": True, "residual": self.residual}
        return Call("conv2d", self.refs(region), {**self.window(region), **attrs})


@dataclass(frozen=True, eq=False, kw_only=True)
class MaxPool(Window):
    """The largest value under the window, channel by channel."""

    kind = "pool"

    def need(self, region: Region) -> tuple[Region, ...]:
        y, x, c = region
        return ((self.reach(y, self.source[0]), self.reach(x, self.source[1]), c),)

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("max_pool2d", (), self.window(region))
