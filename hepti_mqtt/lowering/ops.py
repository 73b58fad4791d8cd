"""Tensor ops: each knows which regions of its inputs and weights a region of its result needs, and which kernel it is.

An op computes an array over an iteration space: the dimensions of its result, then those that it reduces over (rows of
the weight in a linear, keys in attention, columns in a norm's moments). A region that holds only a part of a reduced
dimension is a partial result. Letters: r rows, c columns, k reduced indices, d columns of one attention head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise, product
from math import prod
from operator import attrgetter
from typing import Any, ClassVar, Final, Generic, NamedTuple, Self, TypeVar

from hepti_mqtt.lowering.regions import (
    IndexSet,
    Region,
    index_count,
    index_set,
    indices,
    intersect_sets,
    positions_in,
    round_to_units,
    shift,
    span,
    union,
)
from hepti_mqtt.plan import Range
from hepti_mqtt.program import Slot, SlotDtype, WeightRef
from hepti_mqtt.storage import STORAGES, BlockStorage

T = TypeVar("T")


class Operand(NamedTuple):
    """What an op reads: a slot, the indices that its array holds, by dimension, and the region that it is a part of."""

    slot: Slot
    cells: Region
    region: Region = ()


class Call(NamedTuple):
    """A kernel with its weights and attributes, for one region of one op."""

    kernel: str
    weights: tuple[WeightRef, ...] = ()
    attrs: Mapping[str, Any] = {}


class cached(Generic[T]):  # noqa: N801
    """A value of an object that is worked out once, when it is first asked for; `cached_property` without its lock."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function, self._name = function, function.__name__
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        value = self._function(instance)
        instance.__dict__[self._name] = value  # found before this descriptor from now on
        return value


_COMPARED: Final[dict[type, Callable[[Any], tuple[Any, ...]]]] = {}


def _compared(kind: type[Op]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what takes the compared fields out of an op of a kind."""
    if kind not in _COMPARED:
        _COMPARED[kind] = attrgetter(*(f.name for f in fields(kind) if f.compare))
    return _COMPARED[kind]


@dataclass(frozen=True, eq=False, kw_only=True)
class Op:
    """One tensor of a graph; ops that differ only in what they are called are equal.

    space: dimensions of the result, then those reduced over; `rank` of them are the result's. role: what the tensor is
    in its family, by which methods name it. layer, branch: where it stands, for topics, people and methods that go by
    layers. tensors: stored tensors that it reads, in an order of its own. index: its place in the graph.
    """

    name: str = field(compare=False)
    inputs: tuple[str, ...] = field(compare=False, default=())
    role: str = field(compare=False, default="")
    layer: int = field(compare=False, default=0)
    branch: int = field(compare=False, default=-1)
    tensors: tuple[str, ...] = field(compare=False, default=())
    index: int = field(compare=False, default=-1)
    space: tuple[int, ...]
    rank: int = 2
    dtype: SlotDtype = "f32"

    kind: ClassVar[str] = "op"
    summed_input: ClassVar[int] = -1  # the input that the kernel takes as several parts and adds
    is_view: ClassVar[bool] = False  # the result is made of pieces of the inputs as they are
    stays_f32: ClassVar[bool] = False  # narrower numbers on the wire would spoil it
    is_session_state: ClassVar[bool] = False  # an array that outlives the run where it lies; `tensors` is its name

    def __post_init__(self) -> None:
        # What an op is, apart from what it is called: worked out once, since ops are the keys of every cache.
        key = (type(self), *_compared(type(self))(self))
        self.__dict__.update(_key=key, _hash=hash(key))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Op) and self._key == other._key)  # type: ignore[attr-defined]

    def relabelled(self, **places: Any) -> Self:
        """Return an equal op under another name, in another place: with other values of what is not compared.

        What has been worked out once is kept, which is why this is not `dataclasses.replace`.
        """
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, **places)
        return new

    def warmed_up(self) -> Self:
        """Return the op itself, with all worked out that `renamed` hands on."""
        self.region_for(self.full_region[: self.rank])
        return self

    @cached
    def full_region(self) -> Region:
        """Return the whole iteration space."""
        return tuple(span(0, n) for n in self.space)

    def region_for(self, result: Region) -> Region | None:
        """Return the region of the space that yields a region of the result, in whole grains; None if it is empty."""
        if not all(result):
            return None
        units = self.units
        if units:
            result = tuple(s if unit == 1 else round_to_units(s, unit) for s, unit in zip(result, units, strict=False))
        return self.trim(result + self._reduced)

    @cached
    def units(self) -> tuple[int, ...]:
        """Return the grain within the op's own size; empty where it is 1 everywhere."""
        units = tuple(map(min, self.granularity(), self.space))
        return units if any(unit != 1 for unit in units) else ()

    @cached
    def _reduced(self) -> Region:
        return self.full_region[self.rank :]

    def granularity(self) -> tuple[int, ...]:
        """Return, per dimension, in which units regions can be asked for and shared out."""
        return (1,) * len(self.space)

    def computed_region(self, region: Region) -> Region:
        """Return what is computed where a region is asked for: more, where the kernel knows no less."""
        return region

    def kernel_regions(self, region: Region) -> tuple[Region, ...]:
        """Return a region in parts that the kernel computes one by one."""
        return (region,)

    def share_unit(self, dim: int) -> int:
        """Return the units in which shares of a dimension are best made: at least its grain."""
        return self.granularity()[dim]

    def range_cost(self, dim: int, start: int, stop: int) -> int:
        """Return what a range of a dimension costs beside others: more than its part where ranges need the same."""
        return stop - start

    def trim(self, region: Region) -> Region | None:
        """Return the part of a region that contributes anything; None if nothing does."""
        return region if all(region) else None

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        """Return what a region needs of each input's result; a region with an empty Set: nothing."""
        return tuple(region[: self.rank] for _ in self.inputs)

    def filled_region(self, number: int, region: Region) -> Region:
        """Return what of a region an input fills, of an op that is a view."""
        return region[: self.rank]

    def is_state(self, region: Region) -> bool:
        """Return whether the array of a region is a partial result in a format of its own."""
        return False

    def result_cells(self, region: Region, state: bool) -> Region:
        """Return the index sets of the array's leading dimensions."""
        return region[: self.rank]

    def shape(self, region: Region, state: bool) -> tuple[int, ...]:
        """Return the shape of the array of a region."""
        return tuple(map(index_count, region[: self.rank]))

    def accepts_columns(self, number: int, need: Region, cells: Region) -> bool:
        """Return whether the kernel finds what it needs of an input among more columns of a slot."""
        return False

    def weight_refs(self, region: Region) -> tuple[WeightRef, ...]:
        """Return the weights that a region needs, as its kernel takes them."""
        return ()

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        """Return the kernel that computes a region from what `need` asked for."""
        raise NotImplementedError(self.kind)

    def combine_call(self, region: Region) -> Call:
        """Return the kernel that makes a region's result of its partial results."""
        return Call("sum", (), {"activation": None})


@dataclass(frozen=True, eq=False, kw_only=True)
class Input(Op):
    """What a request brings, from the planner to every device: token ids, pixels."""

    kind = "input"

    def granularity(self) -> tuple[int, ...]:
        return self.space  # the planner sends all of it to everyone


# ----------------------------------------------------------------------------------------------------------------------
# Results that are pieces of their inputs as they are: no kernel computes them.


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows(Op):
    """Some rows of a tensor, in order: what a task reads of the last layer. None: all of them."""

    rows: tuple[int, ...] | None = None

    kind = "rows"
    is_view = True

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        r, c = region
        return ((r if self.rows is None else index_set(self.rows[i] for i in indices(r)), c),)


@dataclass(frozen=True, eq=False, kw_only=True)
class Columns(Op):
    """A range of the columns of a tensor, from `start`."""

    start: int

    kind = "columns"
    is_view = True

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        return ((region[0], shift(region[1], self.start)),)


@dataclass(frozen=True, eq=False, kw_only=True)
class ConcatColumns(Op):
    """Tensors side by side along their columns; starts: the first column of each."""

    starts: tuple[int, ...]

    kind = "join"
    is_view = True

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        r, c = region
        ends = (*self.starts, self.space[1])
        return tuple((r, shift(intersect_sets(c, span(a, z)), -a)) for a, z in pairwise(ends))

    def filled_region(self, number: int, region: Region) -> Region:
        a, z = (*self.starts, self.space[1])[number : number + 2]
        return region[0], intersect_sets(region[1], span(a, z))


@dataclass(frozen=True, eq=False, kw_only=True)
class Slice(Op):
    """Elements start.. of a vector."""

    start: int
    rank: int = 1

    kind = "slice"
    is_view = True

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        return ((shift(region[0], self.start),),)


@dataclass(frozen=True, eq=False, kw_only=True)
class Reshape(Op):
    """All of a tensor in another shape; source: the shape that it had."""

    source: tuple[int, ...]

    kind = "reshape"
    is_view = True

    def computed_region(self, region: Region) -> Region:
        return self.full_region

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        return (tuple(span(0, n) for n in self.source),)


@dataclass(frozen=True, eq=False, kw_only=True)
class Flatten(Op):
    """A map [Y, X, C] as one row [1, Y X C]: rows of the map are columns of it, in whole rows."""

    source: tuple[int, int, int]

    kind = "flatten"
    is_view = True

    def granularity(self) -> tuple[int, ...]:
        return 1, prod(self.source[1:])

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        row = prod(self.source[1:])
        rows = tuple((a // row, z // row) for a, z in region[1])
        return ((rows, *(span(0, n) for n in self.source[1:])),)


# ----------------------------------------------------------------------------------------------------------------------
# Tensor ops of a decoder: a session keeps keys and values of earlier tokens on the devices, and runs add to them.
#
# One graph serves every position: how many rows the cache has before the m new ones is a number that comes with the
# request (`at`, i32 [B], one for each item: every item of a run is of another session). Letters: m new rows, C rows
# that a cache has room for, w its columns, d columns of a head.


@dataclass(frozen=True, eq=False, kw_only=True)
class SessionState(Op):
    """What the session has kept over (C, w); `tensors` is its name. It is there before the run, so nothing fills it."""

    kind = "state"
    is_session_state = True

    def granularity(self) -> tuple[int, ...]:
        return self.space[0], 1  # whole columns: which rows are new is known only as it runs


@dataclass(frozen=True, eq=False, kw_only=True)
class AppendRows(Op):
    """The state of one item with its new rows in their place over (C, w), in the state's own memory.

    inputs: the state, the new rows of all items [m, *] (from column `start`), and `at`. rows: those of the item,
    first..stop.
    """

    start: int
    rows: tuple[int, int]
    item: int = 0

    kind = "append"
    is_session_state = True

    def granularity(self) -> tuple[int, ...]:
        return self.space[0], 1

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        return region, (span(*self.rows), shift(region[1], self.start)), (span(self.item, self.item + 1),)

    def accepts_columns(self, number: int, need: Region, cells: Region) -> bool:
        return number == 1 and len(positions_in(need[1], cells[1])) == 1

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        columns = positions_in(shift(region[1], self.start), operands[1].cells[1])
        return Call("append_rows", (), {"column": columns[0][0]} if columns and columns[0][0] else {})


# ----------------------------------------------------------------------------------------------------------------------
# Matrix products, what stands between them, and kernels that take their inputs whole: r rows, c columns, k reduced.


PANEL: Final = 32  # columns of a matrix that kernels keep side by side
NARROW: Final = 256  # a matrix with fewer columns may be cut anywhere


@dataclass(frozen=True, eq=False, kw_only=True)
class Linear(Op):
    """x [r, k] @ [W_1 | W_2 ...] [k, c] + b over (r, c, k), then activation and residual where they are fused.

    widths: columns of each matrix; `tensors` are the matrices and then their biases. The part that holds k = 0 adds
    the bias, so that partial sums add it once. storages: of each matrix, None for one that is f32; none of a model
    without blocks. unit: values of the largest block of the model.
    """

    widths: tuple[int, ...]
    storages: tuple[BlockStorage | None, ...] = ()
    unit: int = 1
    bias: bool = True
    activation: str | None = None
    residual: bool = False

    kind = "linear"

    def share_unit(self, dim: int) -> int:
        # Its columns are the next one's k, which is cut in whole blocks.
        return max(PANEL, self.unit) if dim > 0 and (self.space[dim] >= NARROW or self.storages) else 1

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        r, c, k = region
        return ((r, k), (r, c)) if self.residual else ((r, k),)

    def weight_refs(self, region: Region) -> tuple[WeightRef, ...]:
        _, c, k = region
        if len(k) != 1:
            raise ValueError(f"{self.name}: rows {k} of a matrix are several ranges; give each device one")
        n = len(self.widths)
        ends = (0, *accumulate(self.widths))
        cut = [
            [(a - first, z - first) for a, z in intersect_sets(c, ((first, stop),))] for first, stop in pairwise(ends)
        ]
        storages = self.storages or (None,) * n
        refs = [
            WeightRef(t, k[0], columns, weight_dtype=storage or "f32")
            for t, ranges, storage in zip(self.tensors, cut, storages, strict=False)
            for columns in ranges
        ]
        for ref in refs:
            block = STORAGES[ref.weight_dtype].block
            if any(end % block for end in ref.rows):
                raise ValueError(f"{self.name}: rows {k} of a matrix in blocks of {block}; divide it between blocks")
        if self._has_bias(region):
            biases = zip(self.tensors[n:], cut, strict=True)
            refs += [WeightRef(t, (0, 1), columns, "plain") for t, ranges in biases for columns in ranges]
        return tuple(refs)

    def _has_bias(self, region: Region) -> bool:
        return self.bias and region[2][0][0] == 0

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        refs = self.weight_refs(region)
        attrs = {"bias": self._has_bias(region), "activation": self.activation, "residual": self.residual}
        return Call("linear", refs, attrs)


@dataclass(frozen=True, eq=False, kw_only=True)
class Activation(Op):
    """An elementwise function of one input, which may come as several summands."""

    function: str

    kind = "activation"
    summed_input = 0

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("sum", (), {"activation": self.function})


@dataclass(frozen=True, eq=False, kw_only=True)
class Add(Op):
    """x + y, where y may come as several summands."""

    kind = "add"
    summed_input = 1

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("add", (), {"bias": False}) if self.rank == 2 else Call("sum", (), {"activation": None})


@dataclass(frozen=True, eq=False, kw_only=True)
class Gate(Op):
    """function(x) * y over (r, c): the hidden columns of a gated MLP."""

    function: str

    kind = "gate"

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("gate", (), {"activation": self.function})


class Norm(NamedTuple):
    """How rows are normed: layer norm, or by their root mean square alone."""

    eps: float
    rms: bool = False
    #: is added to gamma
    gamma_offset: float = 0.0
    #: divides gamma, behind the offset
    divisor: float = 1.0

    @property
    def attrs(self) -> dict[str, Any]:
        """Return the attributes of kernels that norm."""
        more = {"rms": True, "gamma_offset": self.gamma_offset} if self.rms else {}
        return {"eps": self.eps, **more} | ({"divisor": self.divisor} if self.divisor != 1 else {})


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerNorm(Op):
    """The norm over the last dimension of (r, c), or of a map; `tensors` are gamma, and beta if there is one."""

    norm: Norm

    kind = "norm"

    def computed_region(self, region: Region) -> Region:
        return *region[:-1], self.full_region[-1]

    def weight_refs(self, region: Region) -> tuple[WeightRef, ...]:
        return _vectors(self.tensors, region[-1])

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("layer_norm", self.weight_refs(region), self.norm.attrs)


@dataclass(frozen=True, eq=False, kw_only=True)
class Moments(Op):
    """Mean and sum of squared distances from it over (r, 2, k): partial where columns lie on several devices."""

    kind = "moments"
    stays_f32 = True

    def granularity(self) -> tuple[int, ...]:
        return 1, 2, 1

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        return ((region[0], region[2]),)

    def is_state(self, region: Region) -> bool:
        return region[2] != self.full_region[2]

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("moments")


@dataclass(frozen=True, eq=False, kw_only=True)
class Candidates(Op):
    """The likeliest words of logits over (r, c, k), as the kernel has them: partial where words lie on several devices.

    inputs: the logits, and the temperature of each row, i32 [r].
    """

    kind = "candidates"
    stays_f32 = True

    def granularity(self) -> tuple[int, ...]:
        return 1, self.space[1], 1

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        return (region[0], region[2]), (region[0],)

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        if len(region[2]) != 1:
            raise ValueError(f"{self.name}: words {region[2]} are several ranges; give each device one")
        return Call("candidates", (), {"first": region[2][0][0]})

    def combine_call(self, region: Region) -> Call:
        return Call("merge_candidates")


@dataclass(frozen=True, eq=False, kw_only=True)
class Normalise(Op):
    """The norm of x over (r, c), from x and its moments; `tensors` are gamma, and beta if there is one."""

    norm: Norm

    kind = "normalise"
    summed_input = 1

    def kernel_regions(self, region: Region) -> tuple[Region, ...]:
        return tuple((region[0], (columns,)) for columns in region[1])

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        return region, (region[0], span(0, 2))

    def weight_refs(self, region: Region) -> tuple[WeightRef, ...]:
        return _vectors(self.tensors, region[1])

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        counts = tuple(index_count(part.region[2]) for part in operands[1:])
        return Call("normalise", self.weight_refs(region), {**self.norm.attrs, "counts": counts})


@dataclass(frozen=True, eq=False, kw_only=True)
class OpaqueOp(Op):
    """A kernel that computes all of its result from all of its inputs: embeddings, pooling over sequences.

    attrs: the kernel's, as pairs. weights: its own, in its order.
    """

    kernel: str
    attrs: tuple[tuple[str, Any], ...] = ()
    weights: tuple[WeightRef, ...] = field(compare=False, default=())
    sources: tuple[tuple[int, ...], ...] = ()  # shapes of the inputs

    kind = "whole"

    def computed_region(self, region: Region) -> Region:
        return self.full_region

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        return tuple(tuple(span(0, n) for n in shape) for shape in self.sources)

    def weight_refs(self, region: Region) -> tuple[WeightRef, ...]:
        return self.weights

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call(self.kernel, self.weights, dict(self.attrs))


@dataclass(frozen=True, eq=False, kw_only=True)
class Embedding(OpaqueOp):
    """Rows of a table of words, and what is added to them, over (r, c, k): partial where words lie on several devices.

    inputs: ids, i32 [r], and what is read for what is added. weights: the table [k, c], or a matrix [c, k] of which
    words are columns, then the others. The part that holds word 0 adds these, so that partial sums add them once.
    """

    kind = "embedding"

    def granularity(self) -> tuple[int, ...]:
        # A norm is of whole sums.
        return 1, 1, self.space[2] if "gamma" in dict(self.attrs).get("parts", ()) else 1

    def computed_region(self, region: Region) -> Region:
        return *self.full_region[:2], region[2]

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        ids, *others = super().input_regions(region)
        return ids, *(others if self._is_first(region) else [((),)] * len(others))

    def weight_refs(self, region: Region) -> tuple[WeightRef, ...]:
        if len(region[2]) != 1:
            raise ValueError(f"{self.name}: words {region[2]} are several ranges; give each device one")
        table, *others = self.weights
        words = region[2][0]
        own = table._replace(columns=words) if table.layout == "packed" else table._replace(rows=words)
        return own, *(others if self._is_first(region) else ())

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        attrs, refs = dict(self.attrs), self.weight_refs(region)
        if region[2] == self.full_region[2]:
            return Call(self.kernel, refs, attrs)
        attrs["words"] = (region[2][0][0], self.space[2])
        if self._is_first(region):
            return Call(self.kernel, refs, attrs)
        return Call("embed_tokens", refs, {**attrs, "parts": ("word",)})

    @staticmethod
    def _is_first(region: Region) -> bool:
        return region[2][0][0] == 0


@dataclass(frozen=True, eq=False, kw_only=True)
class AddTable(Op):
    """x [r, c] + the rows of the same numbers of a stored table, of which every device has all; rows: of the table."""

    rows: int

    kind = "add_table"

    def kernel_regions(self, region: Region) -> tuple[Region, ...]:
        return tuple(tuple((part,) for part in parts) for parts in product(*region))

    def weight_refs(self, region: Region) -> tuple[WeightRef, ...]:
        return (WeightRef(self.tensors[0], (0, self.rows), (0, self.space[1]), "plain"),)

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("add_table", self.weight_refs(region), {"first": (region[0][0][0], region[1][0][0])})


def _vectors(tensors: Sequence[str], c: IndexSet) -> tuple[WeightRef, ...]:
    if len(c) != 1:
        raise ValueError(f"{tensors}: columns {c} are several ranges; give each device one")
    return tuple(WeightRef(name, (0, 1), c[0], "plain") for name in tensors)


# ----------------------------------------------------------------------------------------------------------------------
# Ops on feature maps [y, x, channels] of one image: what of a map a part of the next one sees.
#
# Rows come first and channels last, so that rows of a map are one piece of memory. Y, X, C: sizes of the input map.


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

    def kernel_regions(self, region: Region) -> tuple[Region, ...]:
        return tuple(tuple((r,) for r in ranges) for ranges in product(*region))

    def window_range(self, dim: int, first: int, stop: int) -> tuple[int, int]:
        """Return the rows (dimension 0), or columns (1), under the window, those beyond the borders too."""
        start, size = -self.pad[dim], (self.kernel[dim] - 1) * self.dilation[dim] + 1
        return first * self.stride[dim] + start, (stop - 1) * self.stride[dim] + start + size

    def input_range(self, dim: int, s: IndexSet) -> IndexSet:
        """Return the rows, or columns, of the input that some of the result see."""
        ends = (self.window_range(dim, a, z) for a, z in s)
        return union(*(span(max(a, 0), min(z, self.source[dim])) for a, z in ends))

    def padding(self, dim: int, r: Range) -> tuple[int, int]:
        """Return how many rows, or columns, a range sees before the first and behind the last of the input."""
        a, z = self.window_range(dim, *r)
        return max(-a, 0), max(z - self.source[dim], 0)

    def window(self, region: Region) -> dict[str, object]:
        """Return the attributes of the window over a region of one range of rows."""
        (top, bottom), (left, right) = (self.padding(dim, region[dim][0]) for dim in (0, 1))
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

    def granularity(self) -> tuple[int, ...]:
        return (1, 1, 1 if self.groups == 1 else self.space[2] // self.groups)

    def kernel_regions(self, region: Region) -> tuple[Region, ...]:
        # Rows stay together, wherever they lie: so the weights are read once for all of them.
        return tuple((region[0], *((r,) for r in ranges)) for ranges in product(*region[1:]))

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        seen = (self.input_range(0, region[0]), self.input_range(1, region[1]), self._channels(region[2]))
        return (seen, region) if self.residual else (seen,)

    def _channels(self, s: IndexSet) -> IndexSet:
        """Return the channels that some of the result read: those of their groups."""
        reads, makes = self.source[2] // self.groups, self.space[2] // self.groups
        return union(*(((a // makes * reads, -(-z // makes) * reads),) for a, z in s))

    def weight_refs(self, region: Region) -> tuple[WeightRef, ...]:
        rows, columns = prod(self.kernel) * self.source[2] // self.groups, region[2][0]
        matrix = WeightRef(self.tensors[0], (0, rows), columns)
        return (matrix, WeightRef(self.tensors[1], (0, 1), columns, "plain")) if self.bias else (matrix,)

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        attrs = {"activation": self.activation, "bias": self.bias, "residual": self.residual}
        groups = 1 if self.groups == 1 else index_count(region[2]) * self.groups // self.space[2]
        more = {"groups": groups, "residual_first": self.residual_first}
        # Where on the whole map the part lies: tiles of several outputs are the same ones in every part.
        lies = {"origin": (region[0][0][0], region[1][0][0]), "whole": self.space[:2]}
        return Call("conv2d", self.weight_refs(region), {**self.window(region), **attrs, **more, **lies})

    def window(self, region: Region) -> dict[str, object]:
        """Return the attributes of the window over a region; of several ranges of rows, `bands` says how each lies."""
        window = super().window(region)
        if len(region[0]) == 1:
            return window
        left, right = self.padding(1, region[1][0])
        return {**window, "pad": (0, left, 0, right), "bands": self._bands(region[0])}

    def _bands(self, rows: IndexSet) -> tuple[tuple[int, int, int, int, int], ...]:
        """Return, for each range of rows, what it sees of the input's rows that lie one behind the other.

        (first row, the one behind the last, rows beyond the map above and below, its first row on the whole map).
        """
        seen, found = self.input_range(0, rows), []
        for r in rows:
            ((first, stop),) = positions_in(self.input_range(0, (r,)), seen) or ((0, 0),)
            found.append((first, stop, *self.padding(0, r), r[0]))
        return tuple(found)


@dataclass(frozen=True, eq=False, kw_only=True)
class MaxPool(Window):
    """The largest value under the window, channel by channel."""

    kind = "pool"

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        return ((self.input_range(0, region[0]), self.input_range(1, region[1]), region[2]),)

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("max_pool2d", (), self.window(region))


@dataclass(frozen=True, eq=False, kw_only=True)
class AveragePool(MaxPool):
    """The mean under the window, channel by channel; count_pad: what lies beyond the map counts as zeros."""

    count_pad: bool

    kind = "average_pool"

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("average_pool2d", (), {**self.window(region), "count_pad": self.count_pad})


@dataclass(frozen=True, eq=False, kw_only=True)
class GlobalAverage(Op):
    """The mean of each channel over a map [Y, X, C], over (1, c, Y, X): parts of a map give parts of it."""

    kind = "global_average"

    def kernel_regions(self, region: Region) -> tuple[Region, ...]:
        return tuple((*region[:2], (y,), (x,)) for y, x in product(*region[2:]))

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        return ((*region[2:], region[1]),)

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("global_sum", (), {"scale": 1 / prod(self.space[2:])})


@dataclass(frozen=True, eq=False, kw_only=True)
class ScaleMap(Op):
    """A map times function(row), channel by channel, over (y, x, c); inputs: the row [1, C], the map."""

    rank: int = 3
    function: str | None

    kind = "scale_map"

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        return (span(0, 1), region[2]), region

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("scale_map", (), {"activation": self.function})


@dataclass(frozen=True, eq=False, kw_only=True)
class MapAsRows(Op):
    """A map [Y, X, C] as rows [Y X, C], a row a pixel, in whole rows of the map; source: Y, X, C."""

    source: tuple[int, int, int]

    kind = "pixels"
    is_view = True

    def granularity(self) -> tuple[int, ...]:
        return self.source[1], 1

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        width = self.source[1]
        rows = tuple((a // width, z // width) for a, z in round_to_units(region[0], width))
        return ((rows, span(0, width), region[1]),)


@dataclass(frozen=True, eq=False, kw_only=True)
class ConcatMaps(Op):
    """Maps of one size behind each other along their channels; starts: the first channel of each."""

    rank: int = 3
    starts: tuple[int, ...]

    kind = "join_maps"
    is_view = True

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        y, x, c = region
        return tuple(
            (y, x, shift(intersect_sets(c, span(a, z)), -a)) for a, z in pairwise((*self.starts, self.space[2]))
        )

    def filled_region(self, number: int, region: Region) -> Region:
        a, z = (*self.starts, self.space[2])[number : number + 2]
        return (*region[:2], intersect_sets(region[2], span(a, z)))
