"""The Program: one device's ops for one request, as data; and the work of an op, as devices measure it."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from hepti_mqtt.core.ids import ALL_DEVICES
from hepti_mqtt.core.plan import Range, Route, WeightDtype
from hepti_mqtt.core.storage import BlockStorage, Product

WorkKind = Literal["linear", "attention", "rowwise"]


class Work(NamedTuple):
    """The work of an op: a matmul, an attention, or an op on rows."""

    kind: WorkKind
    rows: int = 0  #: of a matmul [rows, k] @ [k, n]
    k: int = 0
    n: int = 0
    #: By the op's definition, whichever way it is computed; of attention over all (query, key) pairs.
    flops: float = 0.0
    nbytes: float = 0.0  #: bytes moved; of a matmul without its matrices
    product: Product = Product()


# ----------------------------------------------------------------------------------------------------------------------
# The Program.
#
# A strategy turns a model spec, a plan and a request shape into one Program per device. Executor, loader, simulator
# and explainer read it, and none of them knows a strategy by name. A Program is a template: it is built once per
# (plan, shape), its slots are integers, and it names no request.
#
# An op is ready when all slots that it reads are filled, and the ops before it in its stretch (`schedule.py`) have run.
# The first ready op by (run id, position in the list) runs next. A slot is written once. An exchange's key is (node,
# part, source), unique among the Recvs of a Program: the number of the tensor in the model's graph, and the number of
# the message among those of its source.


Slot = int
SlotDtype = Literal["f32", "f16", "i8", "u8", "i32"]
Layout = Literal["packed", "plain"]

DTYPE_BYTES: Final[Mapping[str, int]] = {"f32": 4, "f16": 2, "i8": 1, "u8": 1, "i32": 4}
NUMPY_DTYPE: Final[Mapping[str, np.dtype[Any]]] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "i8": np.dtype("i1"),
    "u8": np.dtype("u1"),
    "i32": np.dtype("<i4"),
}

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})

ExchangeKey = tuple[int, int, str]  # (node, part, source) of an exchange


class WeightRef(NamedTuple):
    """A range of one tensor in [in, out] orientation, as a kernel uses it.

    `packed` is the right-hand side of a matmul in the kernels' panel layout; `plain` is an array [rows, columns], or
    [columns] with rows (0, 1) for a tensor of one dimension.
    """

    tensor: str
    rows: Range
    columns: Range
    layout: Layout = "packed"
    #: Storage of a packed matrix; a plain array is f32. Kernels widen `f16`, and int8 with a scale per column
    #: (`w8a32`), to f32; with `w8a8` they quantise activations to int8 too, row by row. A matrix in blocks keeps the
    #: storage of its file, and its range of rows is in whole blocks.
    weight_dtype: WeightDtype | BlockStorage = "f32"


class SlotSpec(NamedTuple):
    """Shape and dtype of a slot's array.

    A view has no memory, is never written, and may have another shape than its rows of the base.
    """

    shape: tuple[int, ...]
    dtype: SlotDtype = "f32"
    base: Slot | None = None  #: the slot that a view refers to, None for an array of its own
    start: int = 0  #: first row of a view in its base
    #: Name of an array that the session keeps on the device between runs. Slots of one name are one array: a slot that
    #: no op writes holds it from the start, and an op that writes the other slot works in place.
    state: str = ""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the slot's array."""
        return DTYPE_BYTES[self.dtype] * prod(self.shape)


class Compute(NamedTuple):
    """Run a kernel: it reads whole slots and fills the slots that it writes."""

    kernel: str
    reads: tuple[Slot, ...]
    writes: tuple[Slot, ...]
    weights: tuple[WeightRef, ...] = ()
    attrs: Mapping[str, Any] = _NONE
    layer: int = -1
    node: int = -1  #: the tensor that the op computes
    #: Kernels of a fused op, in order; each may read slots that an earlier one writes. `kernel`, `attrs`, `layer` and
    #: `node` are those of the main kernel; `reads`, `writes` and `weights` those of all, without reads within the op.
    fused: tuple[Compute, ...] = ()

    @property
    def kernels(self) -> tuple[Compute, ...]:
        """Return the kernels of the op, as ops."""
        return self.fused or (self,)

    @property
    def label(self) -> str:
        """Return the names of its kernels, in order."""
        return "+".join(step.kernel for step in self.kernels)


class Send(NamedTuple):
    """Send a slot to devices, or to the planner, as a part of a node."""

    slot: Slot
    to: tuple[str, ...]
    node: int
    part: int = 0
    layer: int = 0  #: part of the topic
    row: int = 0  #: first row of an output within the whole answer
    exact: bool = False  #: keeps its dtype on a narrow wire
    route: Route = "broker"  #: to devices; the planner always receives from the broker


class Recv(NamedTuple):
    """Fill a slot with a part of a node from `source`."""

    slot: Slot
    source: str
    node: int
    part: int = 0
    layer: int = 0
    exact: bool = False
    alternates: tuple[str, ...] = ()  #: devices that may send the part in place of `source`; the first arrival counts
    task: int = -1  #: the leased task that this input begins; -1 for an input that arrives with the request

    @property
    def key(self) -> ExchangeKey:
        """Return the key of the exchange."""
        return self.node, self.part, self.source

    @property
    def keys(self) -> tuple[ExchangeKey, ...]:
        """Return the keys of the exchange, one for each device that may send it."""
        return self.key, *((self.node, self.part, other) for other in self.alternates)


Op = Compute | Send | Recv


def state_name(name: str, item: int) -> str:
    """Return the name of a session's array, for an item of a run."""
    return f"{name}@{item}" if item else name


@dataclass(frozen=True, slots=True)
class Program:
    """The ops of one device for one (plan, shape)."""

    device: str
    slots: tuple[SlotSpec, ...]
    ops: tuple[Op, ...]
    nodes: tuple[str, ...] = ()  #: names of the graph's tensors, for people
    blocks: tuple[int, ...] = ()  #: first tensor of each block of the graph

    def weights(self) -> tuple[WeightRef, ...]:
        """Return the distinct weight ranges that the Program uses, in order of first use."""
        return tuple(dict.fromkeys(w for op in self.ops if isinstance(op, Compute) for w in op.weights))

    def sources(self) -> tuple[str, ...]:
        """Return the distinct devices (or the planner) from which the Program receives."""
        return tuple(dict.fromkeys(key[2] for op in self.ops if isinstance(op, Recv) for key in op.keys))

    def base(self, slot: Slot) -> Slot:
        """Return the slot that has the memory of a slot."""
        base = self.slots[slot].base
        return slot if base is None else base

    def reads(self, op: Op) -> tuple[Slot, ...]:
        """Return the distinct slots that must be filled before an op may run, with bases in place of views."""
        return tuple(dict.fromkeys(map(self.base, slots_read(op))))

    def state_inputs(self) -> tuple[Slot, ...]:
        """Return the slots that are filled from the start: arrays of the session that no op writes."""
        filled = {slot for op in self.ops for slot in slots_written(op)}
        return tuple(n for n, spec in enumerate(self.slots) if spec.state and n not in filled)

    def sessions(self) -> tuple[dict[str, SlotSpec], ...]:
        """Return the session arrays of each item by name; empty without sessions."""
        items: dict[int, dict[str, SlotSpec]] = {}
        for spec in self.slots:
            if spec.state:
                name, _, number = spec.state.partition("@")
                items.setdefault(int(number or 0), {})[name] = spec
        return tuple(items[item] for item in sorted(items))

    def session_arrays(self) -> dict[str, SlotSpec]:
        """Return the session arrays of the first item by name."""
        return next(iter(self.sessions()), {})

    def block_of(self, node: int) -> int:
        """Return the block of a tensor, 0 if the Program has no blocks."""
        return max(bisect(self.blocks, node) - 1, 0)

    def node(self, number: int) -> str:
        """Return the name of a node for people."""
        return self.nodes[number] if 0 <= number < len(self.nodes) else str(number)


LINE_BYTES: Final = 64  # of a cache line


def lay_out(uses: Mapping[Any, tuple[int, int, int]]) -> tuple[dict[Any, int], int]:
    """Return (offsets of arrays in shared memory, its bytes); uses: (first call, last call, bytes) of each array."""
    offsets: dict[Any, int] = {}
    live: list[tuple[int, int, int]] = []  # offset, end, last call
    most = 0
    for key, (first, last, nbytes) in sorted(uses.items(), key=lambda item: item[1][0]):
        live = [entry for entry in live if entry[2] >= first]
        size, at = -(-nbytes // LINE_BYTES) * LINE_BYTES, 0
        for start, end, _ in live:
            if at + size <= start:
                break
            at = end
        offsets[key] = at
        insort(live, (at, at + size, last))
        most = max(most, at + size)
    return offsets, most


class Keyed:
    """An argument of a cached function, compared by its key alone."""

    __slots__ = ("hash", "key")

    def __init__(self, key: object) -> None:
        self.key, self.hash = key, hash(key)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.key == other.key


class SameProgram(Keyed):
    """A Program as a key, compared by identity."""

    __slots__ = ("program",)

    def __init__(self, program: Program) -> None:
        super().__init__(id(program))
        self.program = program


def slots_written(op: Op) -> tuple[Slot, ...]:
    """Return the slots that an op fills."""
    if isinstance(op, Compute):
        return op.writes
    return (op.slot,) if isinstance(op, Recv) else ()


def slots_read(op: Op) -> tuple[Slot, ...]:
    """Return the slots that an op reads, including views."""
    if isinstance(op, Compute):
        return op.reads
    return (op.slot,) if isinstance(op, Send) else ()


def fuse_ops(program: Program, ops: Iterable[Compute], main: Compute) -> Compute:
    """Return one op that runs several, in this order, under the name of `main`."""
    parts = tuple(step for op in ops for step in op.kernels)
    reads: dict[Slot, None] = {}
    weights: dict[WeightRef, None] = {}
    writes: list[Slot] = []
    for part in parts:
        reads.update((slot, None) for slot in part.reads if program.base(slot) not in writes)
        writes += part.writes
        weights.update(dict.fromkeys(part.weights))
    return main._replace(reads=tuple(reads), writes=tuple(writes), weights=tuple(weights), fused=parts)


def publish_targets(op: Send) -> tuple[str, ...]:
    """Return the targets of each publish of a Send.

    Over the broker several receivers share one publish to ALL, which the broker copies. Over the mesh the sender itself
    sends each copy, so each receiver gets its own by name.
    """
    return op.to if op.route == "mesh" or len(op.to) == 1 else (ALL_DEVICES,)
