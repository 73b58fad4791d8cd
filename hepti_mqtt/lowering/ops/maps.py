"""Ops on feature maps [y, x, channels] of one image: what of a map a part of the next one sees.

Rows come first and channels last, so that rows of a map are one piece of memory. Y, X, C: sizes of the input map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from hepti_mqtt.lowering.ops.base import Call, Op, Operand
from hepti_mqtt.lowering.regions import Region, Set, both, count, place, shift, span, union, whole_units
from hepti_mqtt.plan import Range
from hepti_mqtt.program import WeightRef


@dataclass(frozen=True, eq=False, kw_only=True)
class Window(Op):
    """A window moves over a map by `stride`, its places `dilation` apart; source: Y, X, C.

    kernel, stride, dilation: of rows and columns. pad: rows and columns beyond the borders: top, left, bottom, right.
    """

    rank: int = 3
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    source: tuple[int, int, int]

    def split(self, region: Region) -> tuple[Region, ...]:
        return tuple(tuple((r,) for r in ranges) for ranges in product(*region))

    def sees(self, dim: int, first: int, stop: int) -> tuple[int, int]:
        """Return the rows (dimension 0), or columns (1), under the window, those beyond the borders too."""
        start, size = -self.pad[dim], (self.kernel[dim] - 1) * self.dilation[dim] + 1
        return first * self.stride[dim] + start, (stop - 1) * self.stride[dim] + start + size

    def reach(self, dim: int, s: Set) -> Set:
        """Return the rows, or columns, of the input that some of the result see."""
        ends = (self.sees(dim, a, z) for a, z in s)
        return union(*(span(max(a, 0), min(z, self.source[dim])) for a, z in ends))

    def beyond(self, dim: int, r: Range) -> tuple[int, int]:
        """Return how many rows, or columns, a range sees before the first and behind the last of the input."""
        a, z = self.sees(dim, *r)
        return max(-a, 0), max(z - self.source[dim], 0)

    def window(self, region: Region) -> dict[str, object]:
        """Return the attributes of the window over a region of one range of rows."""
        (top, bottom), (left, right) = (self.beyond(dim, region[dim][0]) for dim in (0, 1))
        places = {"kernel": self.kernel, "stride": self.stride, "dilation": self.dilation}
        return {**places, "pad": (top, left, bottom, right)}


@dataclass(frozen=True, eq=False, kw_only=True)
class Conv(Window):
    """Convolution [Y, X, C] -> [y, x, n], then activation and residual where they are fused.

    tensors: the matrix [ky * kx * C / groups, n], rows in the order (ky, kx, c), and where it has one its bias. Each of
    the `groups` reads its own channels. residual_first: the residual is added before the activation, else behind it.
    """

    groups: int = 1
    bias: bool = True
    activation: str | None = None
    residual: bool = False
    residual_first: bool = False

    kind = "conv"

    def grain(self) -> tuple[int, ...]:
        return (1, 1, 1 if self.groups == 1 else self.space[2] // self.groups)

    def split(self, region: Region) -> tuple[Region, ...]:
        # Rows stay together, wherever they lie: so the weights are read once for all of them.
        return tuple((region[0], *((r,) for r in ranges)) for ranges in product(*region[1:]))

    def need(self, region: Region) -> tuple[Region, ...]:
        seen = (self.reach(0, region[0]), self.reach(1, region[1]), self._channels(region[2]))
        return (seen, region) if self.residual else (seen,)

    def _channels(self, s: Set) -> Set:
        """Return the channels that some of the result read: those of their groups."""
        reads, makes = self.source[2] // self.groups, self.space[2] // self.groups
        return union(*(((a // makes * reads, -(-z // makes) * reads),) for a, z in s))

    def refs(self, region: Region) -> tuple[WeightRef, ...]:
        rows, columns = prod(self.kernel) * self.source[2] // self.groups, region[2][0]
        matrix = WeightRef(self.tensors[0], (0, rows), columns)
        return (matrix, WeightRef(self.tensors[1], (0, 1), columns, "plain")) if self.bias else (matrix,)

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        attrs = {"activation": self.activation, "bias": self.bias, "residual": self.residual}
        more = {"groups": count(region[2]) * self.groups // self.space[2], "residual_first": self.residual_first}
        # Where on the whole map the part lies: tiles of several outputs are the same ones in every part.
        lies = {"origin": (region[0][0][0], region[1][0][0]), "whole": self.space[:2]}
        return Call("conv2d", self.refs(region), {**self.window(region), **attrs, **more, **lies})

    def window(self, region: Region) -> dict[str, object]:
        """Return the attributes of the window over a region; of several ranges of rows, `bands` says how each lies."""
        window = super().window(region)
        if len(region[0]) == 1:
            return window
        left, right = self.beyond(1, region[1][0])
        return {**window, "pad": (0, left, 0, right), "bands": self._bands(region[0])}

    def _bands(self, rows: Set) -> tuple[tuple[int, int, int, int, int], ...]:
        """Return, for each range of rows, what it sees of the input's rows that lie one behind the other.

        (first row, the one behind the last, rows beyond the map above and below, its first row on the whole map).
        """
        seen, found = self.reach(0, rows), []
        for r in rows:
            ((first, stop),) = place(self.reach(0, (r,)), seen) or ((0, 0),)
            found.append((first, stop, *self.beyond(0, r), r[0]))
        return tuple(found)


@dataclass(frozen=True, eq=False, kw_only=True)
class MaxPool(Window):
    """The largest value under the window, channel by channel."""

    kind = "pool"

    def need(self, region: Region) -> tuple[Region, ...]:
        return ((self.reach(0, region[0]), self.reach(1, region[1]), region[2]),)

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("max_pool2d", (), self.window(region))


@dataclass(frozen=True, eq=False, kw_only=True)
class AveragePool(MaxPool):
    """The mean under the window, channel by channel; count_pad: what lies beyond the map counts as zeros."""

    count_pad: bool

    kind = "average_pool"

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("average_pool2d", (), {**self.window(region), "count_pad": self.count_pad})


@dataclass(frozen=True, eq=False, kw_only=True)
class GlobalAverage(Op):
    """The mean of each channel over a map [Y, X, C], over (1, c, Y): rows give parts of it; source: Y, X, C."""

    source: tuple[int, int, int]

    kind = "global_average"

    def split(self, region: Region) -> tuple[Region, ...]:
        return tuple((*region[:2], (rows,)) for rows in region[2])

    def need(self, region: Region) -> tuple[Region, ...]:
        return ((region[2], span(0, self.source[1]), region[1]),)

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("global_sum", (), {"scale": 1 / (self.source[0] * self.source[1])})


@dataclass(frozen=True, eq=False, kw_only=True)
class Pixels(Op):
    """A map [Y, X, C] as rows [Y X, C], a row a pixel, in whole rows of the map; source: Y, X, C."""

    source: tuple[int, int, int]

    kind = "pixels"
    is_view = True

    def grain(self) -> tuple[int, ...]:
        return self.source[1], 1

    def need(self, region: Region) -> tuple[Region, ...]:
        width = self.source[1]
        rows = tuple((a // width, z // width) for a, z in whole_units(region[0], width))
        return ((rows, span(0, width), region[1]),)


@dataclass(frozen=True, eq=False, kw_only=True)
class JoinMaps(Op):
    """Maps of one size behind each other along their channels; starts: the first channel of each."""

    rank: int = 3
    starts: tuple[int, ...]

    kind = "join_maps"
    is_view = True

    def need(self, region: Region) -> tuple[Region, ...]:
        y, x, c = region
        return tuple((y, x, shift(both(c, span(a, z)), -a)) for a, z in pairwise((*self.starts, self.space[2])))

    def filled(self, number: int, region: Region) -> Region:
        a, z = (*self.starts, self.space[2])[number : number + 2]
        return (*region[:2], both(region[2], span(a, z)))
