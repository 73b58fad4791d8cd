"""Calls: the functions and arguments of one op, as data. A tape executes them in compiled code, or in Python."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.core.program import NUMPY_DTYPE, Compute, Slot, SlotSpec
from hepti_mqtt.kernels.choice import Choice

Part = tuple[int, ...]
MANY: Final = 1 << 30


class Scratch:
    """Memory for results between the calls of an op."""


@dataclass(frozen=True, slots=True)
class Operand:
    """An array in a slot or in scratch memory, row by row."""

    memory: Slot | Scratch
    #: bytes before its first value
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Return the number of bytes."""
        return self.dtype.itemsize * prod(self.shape)

    def reshape(self, *shape: int) -> Operand:
        """Return the values in another shape; one extent may be -1."""
        others = -prod(shape) if -1 in shape else 0
        size = prod(self.shape) // others if others else 0
        return replace(self, shape=tuple(size if extent == -1 else extent for extent in shape))

    def view(self, dtype: Any) -> Operand:
        """Return the bytes as values of another dtype of the same size."""
        return replace(self, dtype=np.dtype(dtype))

    def octets(self) -> Operand:
        """Return the bytes, u8 [nbytes]."""
        return replace(self, shape=(self.nbytes,), dtype=np.dtype(np.uint8))

    def rows(self, first: int, stop: int) -> Operand:
        """Return a range of rows."""
        of_row = self.dtype.itemsize * prod(self.shape[1:])
        return replace(self, start=self.start + first * of_row, shape=(stop - first, *self.shape[1:]))


class Addresses(tuple[Operand, ...]):
    """The addresses of several arrays; a kernel takes them as int64 [count]."""

    __slots__ = ()


def scratch(shape: tuple[int, ...], dtype: Any) -> Operand:
    """Return a new array in scratch memory."""
    return Operand(Scratch(), 0, shape, np.dtype(dtype))


def operand(slots: Sequence[SlotSpec], slot: Slot) -> Operand:
    """Return the array of a slot; a view lies in the memory of its base."""
    spec = slots[slot]
    dtype = NUMPY_DTYPE[spec.dtype]
    if spec.base is None:
        return Operand(slot, 0, spec.shape, dtype)
    return Operand(spec.base, spec.start * dtype.itemsize * prod(slots[spec.base].shape[1:]), spec.shape, dtype)


def operands(op: Compute, slots: Sequence[SlotSpec]) -> tuple[list[Operand], list[Operand]]:
    """Return the arrays that an op reads, and the arrays that it writes."""
    return [operand(slots, slot) for slot in op.reads], [operand(slots, slot) for slot in op.writes]


class CacheWork(NamedTuple):
    """The work of a run, which depends on the rows in the caches of some items."""

    #: i32: the rows in each item's cache before the run
    held: Operand
    #: number and new rows of each item
    items: tuple[tuple[int, int], ...]
    #: most rows of the cache for a new row
    most: int
    #: multiply-adds for a new row and a row of the cache
    per_pair: int

    def of(self, held: NDArray[np.int32]) -> int:
        """Return the multiply-adds of a run."""
        pairs = (rows * min(max(int(held[item]), 0) + rows, self.most) for item, rows in self.items)
        return self.per_pair * sum(pairs)


class SizedChoice(NamedTuple):
    """The number of threads of a call with different work in each run."""

    work: CacheWork
    #: calls with equal keys take equal times for equal work
    key: Hashable
    parts: Any


class ProductArrays(NamedTuple):
    """The arrays of a product in the order in which kernels take them: x [m, k], out and residual [m, n]."""

    x: Operand
    out: Operand
    #: an empty array for none
    residual: Operand | NDArray[np.float32]


class Call(NamedTuple):
    """A function and its arguments: operands, `Addresses`, arrays and numbers."""

    function: Callable[..., None]
    arguments: tuple[Any, ...]
    #: ranges of the work, the last arguments of the function; None if it is not divided
    parts: Any = None
    #: number of threads; None: only the calling thread
    choice: Choice | SizedChoice | None = None
    #: the call is skipped if the chosen number of threads is not in this range
    least: int = 1
    most: int = MANY
    #: raises the error for arguments that the function refused
    refuse: Callable[..., None] | None = None
    #: owners of the memory that addresses in arguments point to
    alive: tuple[object, ...] = ()

    def operands(self) -> list[Operand]:
        """Return the arguments that are arrays in slots and scratch memory."""
        out: list[Operand] = []
        for argument in self.arguments:
            if isinstance(argument, Operand):
                out.append(argument)
            elif isinstance(argument, Addresses):
                out += argument
        return out

    def resolved(self, array_of: Callable[[Operand], NDArray[Any]]) -> list[Any]:
        """Return the arguments with arrays in place of operands."""
        out: list[Any] = []
        for argument in self.arguments:
            if isinstance(argument, Operand):
                argument = array_of(argument)
            elif isinstance(argument, Addresses):
                argument = np.array([array_of(each).__array_interface__["data"][0] for each in argument], np.int64)
            out.append(argument)
        return out


def sent(_array: NDArray[Any]) -> None:
    """Stand for sending an array to one peer, as the function of a call."""


def received(_array: NDArray[Any]) -> None:
    """Stand for receiving an array of one peer, as the function of a call."""


Calls = list[Call]
