"""Tensor ops: each knows which regions of its inputs and weights a region of its result needs, and which kernel it is.

An op computes an array over an iteration space: the dimensions of its result, then those that it reduces over (rows of
the weight in a linear, keys in attention, columns in a norm's moments). A region that holds only a part of a reduced
dimension is a partial result. Letters: r rows, c columns, k reduced indices, d columns of one attention head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, ClassVar, Final, Generic, NamedTuple, Self, TypeVar

from hepti_mqtt.lowering.regions import (
    Region,
    count,
    span,
    whole_units,
)
from hepti_mqtt.program import Slot, SlotDtype, WeightRef

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


class lazy(Generic[T]):  # noqa: N801
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
    summands: ClassVar[int] = -1  # the input that the kernel takes as several parts and adds
    is_view: ClassVar[bool] = False  # the result is made of pieces of the inputs as they are
    exact: ClassVar[bool] = False  # narrower numbers on the wire would spoil it
    session: ClassVar[bool] = False  # an array that outlives the run where it lies; `tensors` is its name

    def __post_init__(self) -> None:
        # What an op is, apart from what it is called: worked out once, since ops are the keys of every cache.
        key = (type(self), *_compared(type(self))(self))
        self.__dict__.update(_key=key, _hash=hash(key))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Op) and self._key == other._key)  # type: ignore[attr-defined]

    def renamed(self, **places: Any) -> Self:
        """Return an equal op under another name, in another place: with other values of what is not compared.

        What has been worked out once is kept, which is why this is not `dataclasses.replace`.
        """
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, **places)
        return new

    def settled(self) -> Self:
        """Return the op itself, with all worked out that `renamed` hands on."""
        self.of(self.full[: self.rank])
        return self

    @lazy
    def full(self) -> Region:
        """Return the whole iteration space."""
        return tuple(span(0, n) for n in self.space)

    def of(self, result: Region) -> Region | None:
        """Return the region of the space that yields a region of the result, in whole grains; None if it is empty."""
        if not all(result):
            return None
        units = self.units
        if units:
            result = tuple(s if unit == 1 else whole_units(s, unit) for s, unit in zip(result, units, strict=False))
        return self.trim(result + self._reduced)

    @lazy
    def units(self) -> tuple[int, ...]:
        """Return the grain within the op's own size; empty where it is 1 everywhere."""
        units = tuple(map(min, self.grain(), self.space))
        return units if any(unit != 1 for unit in units) else ()

    @lazy
    def _reduced(self) -> Region:
        return self.full[self.rank :]

    def grain(self) -> tuple[int, ...]:
        """Return, per dimension, in which units regions can be asked for and shared out."""
        return (1,) * len(self.space)

    def extent(self, region: Region) -> Region:
        """Return what is computed where a region is asked for: more, where the kernel knows no less."""
        return region

    def split(self, region: Region) -> tuple[Region, ...]:
        """Return a region in parts that the kernel computes one by one."""
        return (region,)

    def unit(self, dim: int) -> int:
        """Return the units in which shares of a dimension are best made: at least its grain."""
        return self.grain()[dim]

    def trim(self, region: Region) -> Region | None:
        """Return the part of a region that contributes anything; None if nothing does."""
        return region if all(region) else None

    def need(self, region: Region) -> tuple[Region, ...]:
        """Return what a region needs of each input's result; a region with an empty Set: nothing."""
        return tuple(region[: self.rank] for _ in self.inputs)

    def filled(self, number: int, region: Region) -> Region:
        """Return what of a region an input fills, of an op that is a view."""
        return region[: self.rank]

    def is_state(self, region: Region) -> bool:
        """Return whether the array of a region is a partial result in a format of its own."""
        return False

    def cells(self, region: Region, state: bool) -> Region:
        """Return the index sets of the array's leading dimensions."""
        return region[: self.rank]

    def shape(self, region: Region, state: bool) -> tuple[int, ...]:
        """Return the shape of the array of a region."""
        return tuple(map(count, region[: self.rank]))

    def takes(self, number: int, need: Region, cells: Region) -> bool:
        """Return whether the kernel finds what it needs of an input among more columns of a slot."""
        return False

    def refs(self, region: Region) -> tuple[WeightRef, ...]:
        """Return the weights that a region needs, as its kernel takes them."""
        return ()

    def call(self, region: Region, operands: Sequence[Operand]) -> Call:
        """Return the kernel that computes a region from what `need` asked for."""
        raise NotImplementedError(self.kind)

    def combine(self, region: Region) -> Call:
        """Return the kernel that makes a region's result of its partial results."""
        return Call("sum", (), {"activation": None})


@dataclass(frozen=True, eq=False, kw_only=True)
class Input(Op):
    """What a request brings, from the planner to every device: token ids, pixels."""

    kind = "input"

    def grain(self) -> tuple[int, ...]:
        return self.space  # the planner sends all of it to everyone
