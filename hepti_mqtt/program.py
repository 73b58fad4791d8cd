"""The Program: what one device does for one request, as data.

A strategy turns a model spec, a plan and a request shape into one Program per device. Executor, loader, simulator and
explainer read it, and none of them knows the strategies by name. A Program is a template: it is built once per (plan,
shape), its slots are integers, and it names no request.

An op is ready when all slots that it reads are filled; of the ready ones the first by (admission number of the request,
position in the list) runs. A slot is written once. Exchanges meet by (layer, point, source), which is unique among the
Recvs of a Program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from hepti_mqtt.ids import ALL, PLANNER
from hepti_mqtt.plan import Range, Storage

Slot = int
SlotDtype = Literal["f32", "f16", "i8", "u8", "i32"]
Layout = Literal["packed", "plain"]

ITEMSIZE: Final[Mapping[str, int]] = {"f32": 4, "f16": 2, "i8": 1, "u8": 1, "i32": 4}
NUMPY_DTYPE: Final[Mapping[str, np.dtype[Any]]] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "i8": np.dtype("i1"),
    "u8": np.dtype("u1"),
    "i32": np.dtype("<i4"),
}

# Points of a layer at which values are exchanged; the index stands in the frame header, so only append.
POINTS: Final[tuple[str, ...]] = (
    "input",  # planner -> head: token ids or pixels
    "scatter",  # head -> devices: embedded rows
    "kv",  # own rows of K and V, to all
    "to_heads",  # Q, K, V of own rows, to the owner of the heads
    "from_heads",  # attention of some heads, back to the owner of the rows
    "attention",  # attention of own heads, to all
    "attention_out",  # own columns after the output projection, to all
    "attention_partial",  # partial sums after the output projection, to the owner of the rows
    "attention_sum",  # own rows after residual and norm, to all
    "mlp_up",  # own columns after the first MLP matrix, to all
    "mlp_out",  # own columns after the second MLP matrix, to all
    "mlp_partial",  # partial sums after the second MLP matrix, to the owner of the rows
    "mlp_sum",  # own rows after residual and norm, to all
    "gather",  # devices -> head: final hidden rows
    "output",  # head -> planner
    "scatter_norm",  # head -> devices: embedded rows after the first block's norm
)


class WeightRef(NamedTuple):
    """A range of one tensor in [in, out] orientation, as a kernel uses it.

    `packed` is the right-hand side of a matmul in the kernels' panel layout; `plain` is an array [rows, columns], or
    [columns] for a tensor of one dimension (rows is (0, 1) there).

    storage: how a packed matrix is kept. `f16`, and int8 with a scale per column (`w8a32`), are widened to f32 as they
    are used; for `w8a8` activations become int8 too, row by row. A plain array is always f32.
    """

    tensor: str
    rows: Range
    columns: Range
    layout: Layout = "packed"
    storage: Storage = "f32"


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """Shape and dtype of a slot's array."""

    shape: tuple[int, ...]
    dtype: SlotDtype = "f32"

    @property
    def nbytes(self) -> int:
        """Return the bytes of the slot's array."""
        n = ITEMSIZE[self.dtype]
        for dim in self.shape:
            n *= dim
        return n


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a kernel: it reads whole slots and fills the slots that it writes."""

    kernel: str
    reads: tuple[Slot, ...]
    writes: tuple[Slot, ...]
    weights: tuple[WeightRef, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    layer: int = -1


@dataclass(frozen=True, slots=True)
class Send:
    """Send a slot, or a range of its first dimension, to devices; `to` is names, or (ALL,) for every peer."""

    slot: Slot
    to: tuple[str, ...]
    layer: int
    point: str
    rows: Range | None = None


@dataclass(frozen=True, slots=True)
class Recv:
    """Fill a slot with what `source` sends at (layer, point)."""

    slot: Slot
    source: str
    layer: int
    point: str


@dataclass(frozen=True, slots=True)
class Boundary:
    """Name the values from which a request could be taken up again at `layer`."""

    layer: int
    slots: tuple[Slot, ...]


Op = Compute | Send | Recv | Boundary


@dataclass(frozen=True, slots=True)
class Program:
    """The ops of one device for one (plan, shape)."""

    device: str
    slots: tuple[SlotSpec, ...]
    ops: tuple[Op, ...]

    def weights(self) -> tuple[WeightRef, ...]:
        """Return the distinct weight ranges that the Program uses, in order of first use."""
        return tuple(dict.fromkeys(w for op in self.ops if isinstance(op, Compute) for w in op.weights))

    def sources(self) -> tuple[str, ...]:
        """Return the distinct devices (or the planner) from which the Program receives."""
        return tuple(dict.fromkeys(op.source for op in self.ops if isinstance(op, Recv)))


class Builder:
    """Collects slots and ops of one device's Program."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.layer = 0
        self._slots: list[SlotSpec] = []
        self._ops: list[Op] = []

    def slot(self, shape: Sequence[int], dtype: SlotDtype = "f32") -> Slot:
        """Return a new slot of `shape`."""
        self._slots.append(SlotSpec(tuple(shape), dtype))
        return len(self._slots) - 1

    def shape(self, slot: Slot) -> tuple[int, ...]:
        """Return the shape of a slot."""
        return self._slots[slot].shape

    def compute(
        self,
        kernel: str,
        reads: Iterable[Slot],
        shape: Sequence[int],
        weights: Iterable[WeightRef] = (),
        **attrs: Any,
    ) -> Slot:
        """Append a kernel with one result of `shape`; return its slot."""
        return self.compute_many(kernel, reads, (shape,), weights, **attrs)[0]

    def compute_many(
        self,
        kernel: str,
        reads: Iterable[Slot],
        shapes: Iterable[Sequence[int]],
        weights: Iterable[WeightRef] = (),
        **attrs: Any,
    ) -> tuple[Slot, ...]:
        """Append a kernel with several results; return their slots."""
        writes = tuple(self.slot(shape) for shape in shapes)
        self._ops.append(Compute(kernel, tuple(reads), writes, tuple(weights), attrs, self.layer))
        return writes

    def send(self, slot: Slot, to: Iterable[str], point: str, rows: Range | None = None) -> None:
        """Append a Send of `slot` to devices at this layer's `point`; no destination, no op."""
        names = tuple(to)
        if names:
            self._ops.append(Send(slot, names, self.layer, point, rows))

    def recv(self, shape: Sequence[int], source: str, point: str, dtype: SlotDtype = "f32") -> Slot:
        """Append a Recv; return the slot that it fills."""
        slot = self.slot(shape, dtype)
        self._ops.append(Recv(slot, source, self.layer, point))
        return slot

    def boundary(self, slots: Iterable[Slot]) -> None:
        """Append a Boundary before this layer."""
        self._ops.append(Boundary(self.layer, tuple(slots)))

    def build(self) -> Program:
        """Return the finished Program; raises ValueError if it breaks the rules of this module."""
        program = Program(self.device, tuple(self._slots), tuple(self._ops))
        check(program)
        return program


def written(op: Op) -> tuple[Slot, ...]:
    """Return the slots that an op fills."""
    if isinstance(op, Compute):
        return op.writes
    return (op.slot,) if isinstance(op, Recv) else ()


def read(op: Op) -> tuple[Slot, ...]:
    """Return the slots that must be filled before an op may run."""
    if isinstance(op, Compute):
        return op.reads
    if isinstance(op, Send):
        return (op.slot,)
    return op.slots if isinstance(op, Boundary) else ()


def check(program: Program) -> None:
    """Raise ValueError unless slots are written once and before they are read, and exchanges have unique keys."""
    filled: set[Slot] = set()
    keys: set[tuple[int, str, str]] = set()
    for place, op in enumerate(program.ops):
        for slot in read(op):
            if slot not in filled:
                raise ValueError(f"op {place} of {program.device} reads slot {slot} before it is written: {op}")
        for slot in written(op):
            if slot in filled:
                raise ValueError(f"op {place} of {program.device} writes slot {slot} again: {op}")
            filled.add(slot)
        if isinstance(op, Recv):
            key = (op.layer, op.point, op.source)
            if op.point not in POINTS or key in keys:
                raise ValueError(f"op {place} of {program.device} receives at an unknown or repeated point: {op}")
            keys.add(key)
        if isinstance(op, Send) and (op.point not in POINTS or (len(op.to) > 1 and ALL in op.to)):
            raise ValueError(f"op {place} of {program.device} sends to an unknown point or mixes ALL with names: {op}")


def destinations(op: Send, devices: Sequence[str], me: str) -> tuple[str, ...]:
    """Return the names of the devices (or the planner) that get what `op` sends."""
    if op.to == (ALL,):
        return tuple(d for d in devices if d != me)
    return op.to


__all__ = [
    "ALL",
    "ITEMSIZE",
    "NUMPY_DTYPE",
    "PLANNER",
    "POINTS",
    "Boundary",
    "Builder",
    "Compute",
    "Layout",
    "Op",
    "Program",
    "Recv",
    "Send",
    "Slot",
    "SlotDtype",
    "SlotSpec",
    "Storage",
    "WeightRef",
    "check",
    "destinations",
    "read",
    "written",
]
