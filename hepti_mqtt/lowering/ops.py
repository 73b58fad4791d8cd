"""Tensor ops: each op names its kernel, and the input regions and weights that a region of its result needs.

An op computes an array over an iteration space: the dimensions of its result, then its reduced dimensions (rows of
the weight in a linear, keys in attention, columns in a norm's moments). A region that holds only a part of a reduced
dimension is a partial result. Letters: r rows, c columns, k reduced indices, d columns of one attention head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise, product, repeat
from math import prod
from operator import attrgetter
from typing import Any, ClassVar, Final, Generic, NamedTuple, Self, TypeVar

from hepti_mqtt.core.plan import Range
from hepti_mqtt.core.program import Slot, SlotDtype, WeightRef
from hepti_mqtt.core.storage import STORAGES, BlockStorage
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

T = TypeVar("T")


class Operand(NamedTuple):
    """An input of an op, in a slot."""

    slot: Slot
    cells: Region  #: indices that the slot's array holds, by dimension
    region: Region = ()  #: the region of the source's space, of a partial result


class Call(NamedTuple):
    """A kernel with its weights and attributes, for one region of one op."""

    kernel: str
    weights: tuple[WeightRef, ...] = ()
    attrs: Mapping[str, Any] = {}


class cached(Generic[T]):  # noqa: N801
    """A `cached_property` without a lock: the function runs once per object."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function, self._name = function, function.__name__
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        value = self._function(instance)
        instance.__dict__[self._name] = value  # hides this descriptor
        return value


_COMPARED: Final[dict[type, Callable[[Any], tuple[Any, ...]]]] = {}


def _compared(kind: type[Op]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a getter of the fields that take part in comparisons of an op."""
    if kind not in _COMPARED:
        _COMPARED[kind] = attrgetter(*(f.name for f in fields(kind) if f.compare))
    return _COMPARED[kind]


@dataclass(frozen=True, eq=False, kw_only=True)
class Op:
    """One tensor of a graph; ops that differ only in their names and places are equal."""

    name: str = field(compare=False)
    inputs: tuple[str, ...] = field(compare=False, default=())
    role: str = field(compare=False, default="")  #: role in its family, by which methods place tensors
    #: Layer and branch, for topics, people and methods that cut between layers.
    layer: int = field(compare=False, default=0)
    branch: int = field(compare=False, default=-1)
    #: Stored tensors that the op reads, in the order of its class.
    tensors: tuple[str, ...] = field(compare=False, default=())
    index: int = field(compare=False, default=-1)  #: place in the whole graph
    space: tuple[int, ...]  #: dimensions of the result, then the reduced ones; the first `rank` are the result's
    rank: int = 2
    dtype: SlotDtype = "f32"

    kind: ClassVar[str] = "op"  # for people: by default the name of the class
    summed_input: ClassVar[int] = -1  # the input that the kernel reads as several parts and adds up
    is_view: ClassVar[bool] = False  # the result consists of unchanged pieces of the inputs
    stays_f32: ClassVar[bool] = False  # too sensitive for a narrow dtype on the wire
    is_session_state: ClassVar[bool] = False  # an array that outlives the run in place; `tensors` is its name

    def __init_subclass__(cls) -> None:
        if "kind" not in cls.__dict__:
            cls.kind = re.sub("(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __post_init__(self) -> None:
        # The identity of an op, without name and place. Ops are the keys of every cache, so it is computed once.
        key = (type(self), *_compared(type(self))(self))
        self.__dict__.update(_key=key, _hash=hash(key))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Op) and self._key == other._key)  # type: ignore[attr-defined]

    def relabelled(self, **places: Any) -> Self:
        """Return an equal op with another name or place: other values of fields that are not compared.

        Unlike `dataclasses.replace` it keeps the cached values.
        """
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, **places)
        return new

    def warmed_up(self) -> Self:
        """Return the op itself, after filling the cached values that `relabelled` copies."""
        self.region_for(self.full_region[: self.rank])
        return self

    @cached
    def full_region(self) -> Region:
        """Return the whole iteration space."""
        return tuple(span(0, n) for n in self.space)

    def region_for(self, result: Region) -> Region | None:
        """Return the region of the space that yields a region of the result, in whole units; None if it is empty."""
        if not all(result):
            return None
        units = self.units
        if units:
            result = tuple(s if unit == 1 else round_to_units(s, unit) for s, unit in zip(result, units, strict=False))
        return self.trim(result + self._reduced)

    @cached
    def units(self) -> tuple[int, ...]:
        """Return `granularity`, at most the size of each dimension; empty if it is 1 everywhere."""
        units = tuple(map(min, self.granularity(), self.space))
        return units if any(unit != 1 for unit in units) else ()

    @cached
    def _reduced(self) -> Region:
        return self.full_region[self.rank :]

    def granularity(self) -> tuple[int, ...]:
        """Return the unit of each dimension: regions are requested and shared in whole units."""
        return (1,) * len(self.space)

    def computed_region(self, region: Region) -> Region:
        """Return the region that the kernel computes if a region is requested: larger if the kernel needs more."""
        return region

    def kernel_regions(self, region: Region) -> tuple[Region, ...]:
        """Return the parts of a region that the kernel computes one by one."""
        return (region,)

    def share_unit(self, dim: int) -> int:
        """Return the unit in which shares of a dimension should be cut: at least its `granularity`."""
        return self.granularity()[dim]

    def range_cost(self, dim: int, start: int, stop: int) -> int:
        """Return the relative cost of a range; costs of ranges that share inputs add up to more than the whole's."""
        return stop - start

    def trim(self, region: Region) -> Region | None:
        """Return the part of a region that contributes anything; None if nothing does."""
        return region if all(region) else None

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        """Return the region of each input's result that a region needs; a region with an empty set needs nothing."""
        return tuple(region[: self.rank] for _ in self.inputs)

    def filled_region(self, number: int, region: Region) -> Region:
        """Return the part of a view's region that an input fills."""
        return region[: self.rank]

    def is_state(self, region: Region) -> bool:
        """Return whether a region's array is a partial result in the op's own format, which `combine_call` reads."""
        return False

    def result_cells(self, region: Region, state: bool) -> Region:
        """Return the index sets of the array's leading dimensions."""
        return region[: self.rank]

    def shape(self, region: Region, state: bool) -> tuple[int, ...]:
        """Return the shape of the array of a region."""
        return tuple(map(index_count, region[: self.rank]))

    def accepts_columns(self, number: int, need: Region, cells: Region) -> bool:
        """Return whether the kernel can select the needed columns of an input from a slot with more columns."""
        return False

    def weight_refs(self, region: Region) -> tuple[WeightRef, ...]:
        """Return the weights that the kernel reads for a region, in its order."""
        return ()

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        """Return the kernel that computes a region from its operands."""
        raise NotImplementedError(self.kind)

    def combine_call(self, region: Region) -> Call:
        """Return the kernel that combines a region's partial results."""
        return Call("sum", (), {"activation": None})


@dataclass(frozen=True, eq=False, kw_only=True)
class Input(Op):
    """An input of the request, which the planner sends to every device: token ids, pixels."""

    def granularity(self) -> tuple[int, ...]:
        return self.space  # the planner sends all of it to every device


# ----------------------------------------------------------------------------------------------------------------------
# Views: results that consist of unchanged pieces of their inputs, without a kernel.


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows(Op):
    """Some rows of a tensor, in order, e.g. those of the last layer that a task reads. None: all rows."""

    rows: tuple[int, ...] | None = None

    is_view = True

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        r, c = region
        return ((r if self.rows is None else index_set(self.rows[i] for i in indices(r)), c),)


@dataclass(frozen=True, eq=False, kw_only=True)
class Columns(Op):
    """A range of a tensor's last dimension, from `start`."""

    start: int

    kind = "slice"
    is_view = True

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        return ((*region[:-1], shift(region[-1], self.start)),)


@dataclass(frozen=True, eq=False, kw_only=True)
class Concat(Op):
    """Tensors concatenated along their last dimension; starts: the first index of each."""

    starts: tuple[int, ...]

    kind = "join"
    is_view = True

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        *others, c = region
        ends = (*self.starts, self.space[-1])
        return tuple((*others, shift(intersect_sets(c, span(a, z)), -a)) for a, z in pairwise(ends))

    def filled_region(self, number: int, region: Region) -> Region:
        a, z = (*self.starts, self.space[-1])[number : number + 2]
        return (*region[:-1], intersect_sets(region[-1], span(a, z)))


@dataclass(frozen=True, eq=False, kw_only=True)
class Reshape(Op):
    """A tensor in another shape."""

    source: tuple[int, ...]  #: shape of the input

    is_view = True

    def computed_region(self, region: Region) -> Region:
        return self.full_region

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        return (tuple(span(0, n) for n in self.source),)


@dataclass(frozen=True, eq=False, kw_only=True)
class Flatten(Op):
    """A map [Y, X, C] as one row [1, Y X C]; the map's rows, cut whole, become columns."""

    source: tuple[int, int, int]

    is_view = True

    def granularity(self) -> tuple[int, ...]:
        return 1, prod(self.source[1:])

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        row = prod(self.source[1:])
        rows = tuple((a // row, z // row) for a, z in region[1])
        return ((rows, *(span(0, n) for n in self.source[1:])),)


# ----------------------------------------------------------------------------------------------------------------------
# Tensor ops of a decoder: a session keeps keys and values of earlier tokens on the devices, and runs append to them.
#
# One graph serves every position: the request brings the number of rows in the cache before the m new ones (`at`,
# i32 [B], one per item; the items of a run belong to different sessions). Letters: m new rows, C rows of the cache's
# capacity, w its columns, d columns of a head.


@dataclass(frozen=True, eq=False, kw_only=True)
class SessionState(Op):
    """The session's state over (C, w); `tensors` is its name. It exists before the run, so no op fills it."""

    kind = "state"
    is_session_state = True

    def granularity(self) -> tuple[int, ...]:
        return self.space[0], 1  # whole columns: the place of the new rows is not in the graph


@dataclass(frozen=True, eq=False, kw_only=True)
class AppendRows(Op):
    """The state of one item with its new rows in place over (C, w), in the state's own memory.

    inputs: the state, the new rows of all items [m, *], and `at`.
    """

    start: int  #: first column of the state among those of the new rows
    rows: tuple[int, int]  #: new rows of the item: first..stop
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
# Matrix products, the ops between them, and kernels that read whole inputs: r rows, c columns, k reduced.


PANEL: Final = 32  # columns of a matrix that kernels store together
NARROW: Final = 256  # a matrix with fewer columns may be cut between any two


@dataclass(frozen=True, eq=False, kw_only=True)
class MatrixOp(Op):
    """An op that multiplies by matrices, the first of `tensors`."""

    #: Storage of each matrix, None for f32; empty if no matrix of the model is stored in blocks.
    storages: tuple[BlockStorage | None, ...] = ()
    unit: int = 1  #: values of the model's largest block

    def share_unit(self, dim: int) -> int:
        # The columns become the next product's k, which is cut between blocks.
        return max(PANEL, self.unit) if dim > 0 and (self.space[dim] >= NARROW or self.storages) else 1

    def matrix_refs(self, rows: IndexSet, columns: Iterable[tuple[str, Iterable[Range]]]) -> tuple[WeightRef, ...]:
        """Return one range of rows of each matrix, and its ranges of columns; raises ValueError for cut blocks."""
        if len(rows) != 1:
            raise ValueError(f"{self.name}: rows {rows} of a matrix are several ranges; give each device one")
        refs = [
            WeightRef(tensor, rows[0], each, weight_dtype=storage or "f32")
            for (tensor, ranges), storage in zip(columns, self.storages or repeat(None), strict=False)
            for each in ranges
        ]
        for block in {STORAGES[ref.weight_dtype].block for ref in refs}:
            if any(end % block for end in rows[0]):
                raise ValueError(f"{self.name}: rows {rows} of a matrix in blocks of {block}; divide it between blocks")
        return tuple(refs)


@dataclass(frozen=True, eq=False, kw_only=True)
class Linear(MatrixOp):
    """x [r, k] @ [W_1 | W_2 ...] [k, c] + b over (r, c, k), then a fused activation and residual.

    `tensors` are the matrices and then their biases. The part that contains k = 0 adds the bias, so that partial sums
    contain it once.
    """

    widths: tuple[int, ...]  #: columns of each matrix
    bias: bool = True
    activation: str | None = None
    residual: bool = False

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        r, c, k = region
        return ((r, k), (r, c)) if self.residual else ((r, k),)

    def weight_refs(self, region: Region) -> tuple[WeightRef, ...]:
        _, c, k = region
        ends = (0, *accumulate(self.widths))
        cut = [
            [(a - first, z - first) for a, z in intersect_sets(c, ((first, stop),))] for first, stop in pairwise(ends)
        ]
        refs = self.matrix_refs(k, zip(self.tensors, cut, strict=False))
        if not self._has_bias(region):
            return refs
        biases = zip(self.tensors[len(cut) :], cut, strict=True)
        return refs + tuple(WeightRef(t, (0, 1), columns, "plain") for t, ranges in biases for columns in ranges)

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

    summed_input = 0

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("sum", (), {"activation": self.function})


@dataclass(frozen=True, eq=False, kw_only=True)
class Add(Op):
    """x + y, where y may come as several summands."""

    summed_input = 1

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("add", (), {"bias": False}) if self.rank == 2 else Call("sum", (), {"activation": None})


@dataclass(frozen=True, eq=False, kw_only=True)
class Gate(Op):
    """function(x) * y over (r, c): the hidden columns of a gated MLP."""

    function: str

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("gate", (), {"activation": self.function})


class Norm(NamedTuple):
    """Layer norm, or RMS norm."""

    eps: float
    rms: bool = False
    gamma_offset: float = 0.0  #: added to gamma
    divisor: float = 1.0  #: divides the sum of gamma and its offset

    @property
    def attrs(self) -> dict[str, Any]:
        """Return the attributes of kernels that normalise."""
        more = {"rms": True, "gamma_offset": self.gamma_offset} if self.rms else {}
        return {"eps": self.eps, **more} | ({"divisor": self.divisor} if self.divisor != 1 else {})


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerNorm(Op):
    """The norm over the last dimension of (r, c), or of a map; `tensors` are gamma and an optional beta."""

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
    """Mean and sum of squared deviations over (r, 2, k): partial if columns lie on several devices."""

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
    """The likeliest tokens of logits over (r, c, k), in the kernel's format: partial if tokens lie on several devices.

    inputs: the logits, and the temperature of each row, i32 [r].
    """

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
    """The norm of x over (r, c), from x and its moments; `tensors` are gamma and an optional beta."""

    norm: Norm

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
    """A kernel that computes its whole result from its whole inputs, e.g. pooling over sequences."""

    kernel: str
    attrs: tuple[tuple[str, Any], ...] = ()  #: the kernel's attributes
    weights: tuple[WeightRef, ...] = field(compare=False, default=())  #: the kernel's weights, in its order
    sources: tuple[tuple[int, ...], ...] = ()  #: shapes of the inputs

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
    """Rows of the token embeddings and their addends over (r, c, k): partial if tokens lie on several devices.

    inputs: ids, i32 [r], and the inputs of the addends. weights: the table [k, c], or a matrix [c, k] with a column per
    token, then those of the addends. The part that contains token 0 adds the addends, so that sums contain them once.
    """

    def granularity(self) -> tuple[int, ...]:
        # A fused norm needs whole sums.
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
    """x [r, c] + the same rows of a stored table, which every device keeps whole."""

    rows: int  #: rows of the table

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
# Ops on feature maps [y, x, channels] of one image: which part of a map a part of the next map reads.
#
# Rows come first and channels last, so that the rows of a map are contiguous. Y, X, C: sizes of the input map.


@dataclass(frozen=True, eq=False, kw_only=True)
class Window(Op):
    """A window moves over a map by `stride`; its taps are `dilation` apart. Pairs are (rows, columns)."""

    rank: int = 3
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)  #: rows and columns beyond the borders: top, left, bottom, right
    dilation: tuple[int, int] = (1, 1)
    source: tuple[int, int, int]  #: Y, X, C

    def kernel_regions(self, region: Region) -> tuple[Region, ...]:
        return tuple(tuple((r,) for r in ranges) for ranges in product(*region))

    def window_range(self, dim: int, first: int, stop: int) -> tuple[int, int]:
        """Return the rows (dimension 0) or columns (1) under the window, including those beyond the borders."""
        start, size = -self.pad[dim], (self.kernel[dim] - 1) * self.dilation[dim] + 1
        return first * self.stride[dim] + start, (stop - 1) * self.stride[dim] + start + size

    def input_range(self, dim: int, s: IndexSet) -> IndexSet:
        """Return the rows, or columns, of the input that a part of the result reads."""
        ends = (self.window_range(dim, a, z) for a, z in s)
        return union(*(span(max(a, 0), min(z, self.source[dim])) for a, z in ends))

    def padding(self, dim: int, r: Range) -> tuple[int, int]:
        """Return the number of rows, or columns, before the first and after the last of the input under the window."""
        a, z = self.window_range(dim, *r)
        return max(-a, 0), max(z - self.source[dim], 0)

    def window(self, region: Region) -> dict[str, object]:
        """Return the attributes of the window for a region with one range of rows."""
        (top, bottom), (left, right) = (self.padding(dim, region[dim][0]) for dim in (0, 1))
        places = {"kernel": self.kernel, "stride": self.stride, "dilation": self.dilation}
        return {**places, "pad": (top, left, bottom, right)}


@dataclass(frozen=True, eq=False, kw_only=True)
class Conv(Window):
    """Convolution [Y, X, C] -> [y, x, n], then a fused activation and residual.

    tensors: the matrix [ky * kx * C / groups, n], rows in the order (ky, kx, c), and an optional bias.
    """

    groups: int = 1  #: groups of channels; each reads its own input channels
    bias: bool = True
    activation: str | None = None
    residual: bool = False
    residual_first: bool = False  #: the residual is added before the activation, not after it

    def granularity(self) -> tuple[int, ...]:
        return (1, 1, 1 if self.groups == 1 else self.space[2] // self.groups)

    def kernel_regions(self, region: Region) -> tuple[Region, ...]:
        # All ranges of rows are one part, so that the kernel reads the weights once.
        return tuple((region[0], *((r,) for r in ranges)) for ranges in product(*region[1:]))

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        window = (self.input_range(0, region[0]), self.input_range(1, region[1]), self._channels(region[2]))
        return (window, region) if self.residual else (window,)

    def _channels(self, s: IndexSet) -> IndexSet:
        """Return the input channels of the groups that a part of the result belongs to."""
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
        # The part's place on the whole map: the kernel cuts the same tiles of several outputs in every part.
        lies = {"origin": (region[0][0][0], region[1][0][0]), "whole": self.space[:2]}
        return Call("conv2d", self.weight_refs(region), {**self.window(region), **attrs, **more, **lies})

    def window(self, region: Region) -> dict[str, object]:
        """Return the attributes of the window for a region; `bands` describes several ranges of rows."""
        window = super().window(region)
        if len(region[0]) == 1:
            return window
        left, right = self.padding(1, region[1][0])
        return {**window, "pad": (0, left, 0, right), "bands": self._bands(region[0])}

    def _bands(self, rows: IndexSet) -> tuple[tuple[int, int, int, int, int], ...]:
        """Return a band for each range of rows; the input's rows are stored one range after the other.

        (first row, row after the last, rows beyond the map above and below, its first row on the whole map).
        """
        window, bands = self.input_range(0, rows), []
        for r in rows:
            ((first, stop),) = positions_in(self.input_range(0, (r,)), window) or ((0, 0),)
            bands.append((first, stop, *self.padding(0, r), r[0]))
        return tuple(bands)


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
    """The mean under the window, channel by channel."""

    count_pad: bool  #: cells beyond the map count as zeros

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("average_pool2d", (), {**self.window(region), "count_pad": self.count_pad})


@dataclass(frozen=True, eq=False, kw_only=True)
class GlobalAverage(Op):
    """The mean of each channel of a map [Y, X, C], over (1, c, Y, X): parts of a map yield partial means."""

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

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        return (span(0, 1), region[2]), region

    def kernel_call(self, region: Region, operands: Sequence[Operand]) -> Call:
        return Call("scale_map", (), {"activation": self.function})


@dataclass(frozen=True, eq=False, kw_only=True)
class MapAsRows(Op):
    """A map [Y, X, C] as rows [Y X, C], one per pixel, cut in whole rows of the map."""

    source: tuple[int, int, int]  #: Y, X, C

    kind = "pixels"
    is_view = True

    def granularity(self) -> tuple[int, ...]:
        return self.source[1], 1

    def input_regions(self, region: Region) -> tuple[Region, ...]:
        width = self.source[1]
        rows = tuple((a // width, z // width) for a, z in round_to_units(region[0], width))
        return ((rows, span(0, width), region[1]),)
